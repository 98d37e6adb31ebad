// What backward needs to know of each query row, once for all its tiles: -delta, where delta =
// rowsum(dO o O) - dLSE is what every dP of the row is measured against, and -LSE in base 2, -inf
// for rows that see nothing, so that P = exp2(score + that) is 0. Needs DEVICE, Quad, BFLOAT16,
// kLog2E, from_lane_xor and thread_index.
#pragma once
#include "../params.h"
#include "../sequence.h"

constexpr int kSumThreads = 256;
constexpr int kSumLanes = 16;  // share a row: 256 bytes a load
constexpr int kSumRows = kSumThreads / kSumLanes;

// Where -delta and -LSE begin: shaped as the LSE, one after the other.
struct RowStates {
  float *minus_delta, *minus_lse;
};

DEVICE RowStates row_states(const Params &p) {
  long long rows = p.lse_batch ? p.batch * p.lse_batch : p.heads_q * p.lse_head;
  float *states = (float *)p.delta;
  return RowStates{states, states + rows};
}

DEVICE long long state_offset(const Params &p, const Sequence &s, int head) {
  return s.row_batch * p.lse_batch + head * p.lse_head + s.row0;
}

// The 16-bit element in the low half.
template <int dtype>
DEVICE float low_half(unsigned x) {
  if (dtype == BFLOAT16) return __builtin_bit_cast(float, x << 16);
  return float_of_half((unsigned short)x);
}

template <int dtype>
DEVICE float dot(Quad x, Quad y) {
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i)
    sum += low_half<dtype>(x[i]) * low_half<dtype>(y[i]) +
           low_half<dtype>(x[i] >> 16) * low_half<dtype>(y[i] >> 16);
  return sum;
}

// Workgroup `id` of blocks * heads * batch, each of kSumRows rows.
template <int dtype>
DEVICE void sum_rows(const Params &p, int id) {
  int blocks = (p.seqlen_q + kSumRows - 1) / kSumRows;
  int head = id / blocks % p.heads_q;
  Sequence s = sequence_of(p, id / blocks / p.heads_q);
  int row = id % blocks * kSumRows + thread_index() / kSumLanes;
  bool exists = row < s.rows;
  float sum = 0.0f;
  if (exists) {
    typedef const unsigned short *Elements;
    Elements out = (Elements)p.out + s.row_batch * p.out_batch + (s.row0 + row) * p.out_row +
                   head * p.out_head;
    Elements dout = (Elements)p.dout + s.row_batch * p.dout_batch + (s.row0 + row) * p.dout_row +
                    head * p.dout_head;
    for (int d = thread_index() % kSumLanes * 8; d < p.head_dim_v; d += kSumLanes * 8)
      sum += dot<dtype>(*(const Quad *)(out + d), *(const Quad *)(dout + d));
  }
  for (int bit = 1; bit < kSumLanes; bit *= 2) sum += from_lane_xor(sum, bit);
  if (!exists || thread_index() % kSumLanes) return;
  long long at = state_offset(p, s, head) + row;
  float lse = ((const float *)p.lse)[at];
  float dlse = p.dlse ? ((const float *)p.dlse)[at] : 0.0f;
  RowStates states = row_states(p);
  bool saw = lse > -INFINITY_F;
  states.minus_delta[at] = saw ? dlse - sum : 0.0f;
  states.minus_lse[at] = saw ? -lse * kLog2E : -INFINITY_F;
}
