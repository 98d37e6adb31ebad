// A user's score_mod and mask_mod: what the functions that pyfa/mods/emit.py writes are made of, and how
// kernels call them. Only in plans with a MOD, a digest, and `mod_functions.h` is what it stands for. Needs
// what ../hip/mods.h or ../cuda/mods.h have.
#pragma once
#include "captured.h"
#include "score.h"

// ---- captured tensors ---------------------------------------------------------------------------

// The place of `index` along dimension `dim`, in elements. What lies outside of it is brought inside;
// `wraps`: a negative one may come, and counts from the end.
template <bool wraps, typename Index>
DEVICE unsigned mod_index(const Captured &x, Index index, int dim) {
  Index size = x.size[dim];
  if (wraps) {
    index = index < 0 ? index + size : index;
    index = index < 0 ? 0 : index;
  }
  index = index < size ? index : size - 1;
  return (unsigned)index * x.stride[dim];
}
template <typename T>
DEVICE T mod_load(const Captured &x, unsigned place) {
  return ((const GLOBAL T *)x.data)[place];
}

// ---- operations ---------------------------------------------------------------------------------

DEVICE float mod_bfloat16(unsigned short bits) {
  return __builtin_bit_cast(float, (unsigned)bits << 16);
}
template <typename T>
DEVICE T mod_abs(T x) {
  return x < 0 ? -x : x;
}
DEVICE float mod_abs(float x) { return __builtin_fabsf(x); }
// NaN comes through.
template <typename T>
DEVICE T mod_min(T x, T y) {
  return (x < y) | (x != x) ? x : y;
}
template <typename T>
DEVICE T mod_max(T x, T y) {
  return (x > y) | (x != x) ? x : y;
}
template <typename T>
DEVICE T mod_truncdiv(T x, T y) {
  return x / (y ? y : 1);
}
template <typename T>
DEVICE T mod_floordiv(T x, T y) {
  y = y ? y : 1;
  T quotient = x / y;
  return quotient * y != x && (x < 0) != (y < 0) ? quotient - 1 : quotient;
}
template <typename T>
DEVICE T mod_mod(T x, T y) {
  y = y ? y : 1;
  T rest = x % y;
  return rest && (rest < 0) != (y < 0) ? rest + y : rest;
}
template <typename T>
DEVICE T mod_shl(T x, T y) {
  return (T)((unsigned long long)x << (y & (sizeof(T) * 8 - 1)));
}
template <typename T>
DEVICE T mod_shr(T x, T y) {
  return x >> (y & (sizeof(T) * 8 - 1));
}
DEVICE float mod_exp2(float x) { return exp2(x); }
DEVICE float mod_exp(float x) { return exp2(x * kLog2E); }
DEVICE float mod_log2(float x) { return log2(x); }
DEVICE float mod_log(float x) { return log2(x) * kLn2; }
DEVICE float mod_rsqrt(float x) { return 1.0f / mod_sqrt(x); }
DEVICE float mod_tanh(float x) { return tanh(x); }
// tanh(x) to 2^-22 of 1, where that is enough; `factor`: 2 log2(e) times what x is multiplied by. As 1 - 2 / (1 +
// exp(2 x)), 5 instructions for 20.
DEVICE float mod_tanh_near(float x, float factor) {
  return 1.0f - reciprocal(__builtin_fmaf(exp2(x * factor), 0.5f, 0.5f));
}

#include "mod_functions.h"

// ---- what kernels call --------------------------------------------------------------------------

// Where a score is, as mods count: in the whole problem.
struct ModPlace {
  const Captured *captured;
  int b, h, q, kv;

  ModPlace() = default;
  METHOD ModPlace(const Params &p, int batch, int head) {
    captured = captured_of(p);
    b = batch + p.batch_start;
    h = head + p.head_start;
    q = p.q_start;
    kv = p.k_start;
  }
  // In vector registers: scalar ones are few.
  METHOD void pin_all() {
    pin(b);
    pin(h);
    pin(q);
    pin(kv);
  }
};

#ifdef HAS_SCORE_MOD
// Of the score that lies `dq` rows and `dk` keys behind `row` and `key`, the lane's first one. The distances are
// constants, because loops over a lane's scores are unrolled.
DEVICE float modified(const ModPlace &at, float x, int row, int key, int dq, int dk) {
  return mod_score(at.captured, x, at.b, at.h, row + at.q, key + at.kv, dq, dk);
}
// `slope`, that of x, becomes the result's.
DEVICE float modified(const ModPlace &at, float x, int row, int key, int dq, int dk, float &slope) {
  float mine;
  x = mod_slope(at.captured, x, at.b, at.h, row + at.q, key + at.kv, dq, dk, mine);
  slope = slope * mine;
  return x;
}
#endif
#ifdef HAS_MASK_MOD
DEVICE bool is_seen(const ModPlace &at, int row, int key) {
  return mod_mask(at.captured, at.b, at.h, row + at.q, key + at.kv);
}
#endif
