// What both backward kernels read, where it lies, and masks as bits.
#pragma once
#include "arguments.h"
#include "stream.h"
#include "../sequence.h"
#include "../common/row_sums.h"

// ---- where things are ---------------------------------------------------------------------------

DEVICE Matrix rows_of(const void *x, const Sequence &s, int head, long long batch, long long row,
                      long long head_stride, int width) {
  return Matrix{(char *)x + 2 * (s.row_batch * batch + s.row0 * row + head * head_stride),
                (int)row * 2, width};
}
DEVICE Matrix keys_of(const void *x, const Sequence &s, int head, long long batch, long long row,
                      long long head_stride, int width) {
  return Matrix{(char *)x + 2 * (s.key_batch * batch + s.key0 * row + head * head_stride),
                (int)row * 2, width};
}
DEVICE Matrix q_of(const Params &p, const Sequence &s, int head) {
  return rows_of(p.q, s, head, p.q_batch, p.q_row, p.q_head, p.head_dim);
}
DEVICE Matrix dout_of(const Params &p, const Sequence &s, int head) {
  return rows_of(p.dout, s, head, p.dout_batch, p.dout_row, p.dout_head, p.head_dim_v);
}
// `head`: of heads_k, each of which is one of num_splits parts of a group.
DEVICE Matrix k_of(const Params &p, const Sequence &s, int head) {
  return keys_of(p.k, s, head / p.num_splits, p.k_batch, p.k_row, p.k_head, p.head_dim);
}
DEVICE Matrix v_of(const Params &p, const Sequence &s, int head) {
  return keys_of(p.v, s, head / p.num_splits, p.v_batch, p.v_row, p.v_head, p.head_dim_v);
}

DEVICE RowStates states_of(const Params &p, const Sequence &s, int head) {
  RowStates at = row_states(p);
  long long offset = state_offset(p, s, head);
  return RowStates{at.minus_delta + offset, at.minus_lse + offset};
}

// ---- masks --------------------------------------------------------------------------------------

// All bits where bit `bit`, a constant, is set, else none; and x there, else 0. Whatever the compiler
// understands of it becomes a comparison and a lane mask.
DEVICE int bits_of(unsigned bits, int bit) {
  int all;
  asm("v_bfe_i32 %0, %1, %2, 1" : "=v"(all) : "v"(bits), "i"(bit));
  return all;
}
DEVICE float where(unsigned bits, int bit, float x) {
  return __builtin_bit_cast(float, __builtin_bit_cast(int, x) & bits_of(bits, bit));
}
