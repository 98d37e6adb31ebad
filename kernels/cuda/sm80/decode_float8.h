// Decode over float8 keys and values (KEY_DTYPE): their conversion to operands of 16-bit products, and their
// scales.
//
// Both products are in float16, which represents every e4m3 number. One instruction converts two elements
// (sm_89 and later; shifts and masks would take seven for four). Rows stay 8-bit in shared memory, and
// ldmatrix moves pairs of elements. With group = lane / 4 and pair = lane % 4 (mma.h), a register of ldmatrix
// is
//   of K   elements 4 pair ... 4 pair + 3 of 16, of one key: two registers of A, if the inner dimension is
//          in that order, which the queries then are, too
//   of V   transposed, elements 2 group and 2 group + 1 of 16, of keys 2 pair and 2 pair + 1: parted, rows
//          group and group + 8 of A. So these rows of O^T are elements 2 group and 2 group + 1.
#pragma once
#include "smem.h"
#include "../../sequence.h"

#ifndef KEY_DTYPE  // of K and V
#define KEY_DTYPE DTYPE
#endif

constexpr bool kFloat8 = KEY_DTYPE == E4M3;
constexpr int kSize = kFloat8 ? 1 : 2;                   // bytes of an element of K and V
constexpr int kProduct = kFloat8 ? FLOAT16 : DTYPE;      // format of both products
constexpr int kOperands = 2 / kSize;                     // of A, that one ldmatrix brings
constexpr int kRows[2] = {kFloat8 ? 2 : 1, kFloat8 ? 1 : 8};  // of O^T: between groups, and between registers
// A power of two that P is multiplied by, so that float16 represents P down to 2^-38.
constexpr float kTop = kFloat8 ? 14.0f : 0.0f;

// ---- operands ------------------------------------------------------------------------------------

// Elements 0 and 1, 2 and 3 of four in float16.
DEVICE void widen(unsigned &low, unsigned &high, unsigned four) {
  asm("{.reg .b16 low, high;\n"
      "mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n"
      "cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// Operand `i` of the registers that one ldmatrix loaded, for keys and for values.
DEVICE void key_operand(unsigned (&a)[4], const unsigned (&x)[4], int i) {
  if constexpr (kFloat8) {
    widen(a[0], a[2], x[2 * i]);
    widen(a[1], a[3], x[2 * i + 1]);
  } else {
    for (int r = 0; r < 4; ++r) a[r] = x[r];
  }
}
DEVICE void value_operand(unsigned (&a)[4], const unsigned (&x)[4], int i) {
  if constexpr (kFloat8) {
    widen(a[0], a[1], __byte_perm(x[i], 0, 0x3120));
    widen(a[2], a[3], __byte_perm(x[i + 2], 0, 0x3120));
  } else {
    for (int r = 0; r < 4; ++r) a[r] = x[r];
  }
}

// Converts the queries of one packed row to float16; four neighboring lanes hold a share each. bfloat16
// queries are scaled by a power of two, which is returned. What float16 then loses is below 2^-39 of the
// largest one.
template <int count>
DEVICE float as_float16(unsigned (&q)[count]) {
  if constexpr (DTYPE == FLOAT16) return 1.0f;
  auto low = [](unsigned x) { return __builtin_bit_cast(float, x << 16); };
  auto high = [](unsigned x) { return __builtin_bit_cast(float, x & 0xffff0000u); };
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < count; ++i)
    largest = max(largest, max(__builtin_fabsf(low(q[i])), __builtin_fabsf(high(q[i]))));
  for (int bit = 1; bit < 4; bit *= 2) largest = max(largest, from_lane_xor(largest, bit));
  // The largest one is scaled to between 2^14 and 2^15.
  int exponent = min(268 - (int)(__builtin_bit_cast(unsigned, largest) >> 23), 253);
  float factor = __builtin_bit_cast(float, exponent << 23);
#pragma unroll
  for (int i = 0; i < count; ++i)
    q[i] = Format<FLOAT16>::nearest(low(q[i]) * factor, high(q[i]) * factor);
  return __builtin_bit_cast(float, (254 - exponent) << 23);
}

// ---- scales --------------------------------------------------------------------------------------

// The scales of a key and its value, if scales are per block.
struct alignas(8) KeyScales {
  float k, v;
};

constexpr int kRounds = STAGES / 2 + 1;  // of 32 keys, two stages, whose scales are kept

// Shared memory that float8 needs, after the other buffers.
struct Scales {
  float packed_rows[8 * TILES * TEAM];  // what a packed row's scores are multiplied by
  float output;                   // and the output
  KeyScales keys[WARPS][kRounds * kLanes];
};

// As copy_16 (mma.h); 0 where `exists` is false.
DEVICE void copy_4(Shared to, const void *from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0)
               : "memory");
}

DEVICE bool of_blocks(const Params &p) { return p.descale_type == 2; }

// If scales are per block, starts the copy of the scales of a lane's key. `page` is the index that the batch
// strides count; scales of keys that do not exist become 0.
DEVICE void copy_scales(Scales &scales, const Params &p, int head_k, int page, int row, int round,
                        bool exists) {
  if (!of_blocks(p)) return;
  int block = row >> p.k_block_log2;
  Shared to = shared_address(scales.keys[thread_index() / kLanes] + round % kRounds * kLanes + lane_index());
  copy_4(to, (const float *)p.k_descale + page * p.k_descale_batch + head_k * p.k_descale_head +
                 (long long)block * p.k_descale_block,
         exists);
  copy_4(to + 4, (const float *)p.v_descale + page * p.v_descale_batch + head_k * p.v_descale_head +
                     (long long)block * p.v_descale_block,
         exists);
}

// The factor of a packed row's scores in addition to p.scale: the scale of its row and, if there is one, of
// its key head.
DEVICE float row_scale(const Params &p, const Sequence &s, int head_k, int row) {
  float scale = 1.0f;
  bool blocks = of_blocks(p);
  if (p.q_descale) {
    long long at = blocks ? s.row_batch * p.q_descale_batch +
                                ((s.row0 + row) >> p.q_block_log2) * p.q_descale_block
                          : s.batch * p.q_descale_batch;
    scale = ((const float *)p.q_descale)[at + head_k * p.q_descale_head];
  }
  if (p.k_descale && !blocks)
    scale *= ((const float *)p.k_descale)[s.batch * p.k_descale_batch + head_k * p.k_descale_head];
  return scale;
}

// The factor of the output.
DEVICE float value_scale(const Params &p, const Sequence &s, int head_k) {
  if (!p.v_descale || of_blocks(p)) return 1.0f;
  return ((const float *)p.v_descale)[s.batch * p.v_descale_batch + head_k * p.v_descale_head];
}

// The scales of key `row` of the n-th stage, if scales are per block.
DEVICE KeyScales key_scales(const Scales &scales, int n, int row) {
  return scales.keys[thread_index() / kLanes][n % (2 * kRounds) * 16 + row];
}

// A lane's scores of keys `row` and row + 8, of two packed rows.
DEVICE void scale_scores(float (&s)[4], const Params &p, const Scales &scales, int packed_row, int n, int row) {
  float factors[2] = {1.0f, 1.0f};
  if (of_blocks(p))
    for (int h = 0; h < 2; ++h) factors[h] = key_scales(scales, n, row + 8 * h).k;
  for (int r = 0; r < 4; ++r) s[r] *= factors[r / 2] * scales.packed_rows[packed_row + r % 2];
}

// Multiplies P by v's scales of a lane's two keys. `lift` is their logarithm: it is added to the scores
// before the maximum is computed, so that P is rounded relative to its contribution to the output. `back`
// takes the scale out of the sum of P.
struct ValueFactors {
  float lift[2] = {0.0f, 0.0f}, back[2] = {1.0f, 1.0f};

  METHOD ValueFactors(const Params &p, const Scales &scales, int n, int row) {
    if (!kFloat8 || !of_blocks(p)) return;
    for (int h = 0; h < 2; ++h) {
      float v = max(key_scales(scales, n, row + 8 * h).v, kLeastScale);
      lift[h] = log2(v);
      back[h] = reciprocal(v);
    }
  }
};
