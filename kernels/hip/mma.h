// The matrix instruction of CDNA 3 for 16-bit inputs, and the number formats that feed it.
//
// v_mfma_f32_32x32x8: D (32x32) += A (32x8) B (8x32). Of lane l,
//   A holds row l % 32, elements k = 4 (l / 32) ... + 3
//   B holds column l % 32, elements k = 4 (l / 32) ... + 3
//   D holds column l % 32; its register r is row 8 (r / 4) + 4 (l / 32) + r % 4
// so registers 4j ... 4j + 3 of a D are the B of k-slice j: what S^T = K Q^T leaves is what
// O^T += V^T P^T takes, without a move. Source: AMD matrix instruction calculator.
#pragma once
#include "device.h"

#define FLOAT16 0
#define BFLOAT16 1

typedef float Acc __attribute__((ext_vector_type(16)));
typedef unsigned Pair __attribute__((ext_vector_type(2)));  // four 16-bit elements
typedef unsigned Quad __attribute__((ext_vector_type(4)));  // eight 16-bit elements

constexpr int kMma = 32;       // rows and columns of a product
constexpr int kMmaDepth = 8;   // its inner dimension
constexpr int kMmaPart = 4;    // elements of it that a lane holds

DEVICE int mma_column() { return lane_index() % kMma; }
DEVICE int mma_depth() { return lane_index() / kMma * kMmaPart; }
DEVICE int mma_row(int r) { return r / 4 * 8 + lane_index() / kMma * 4 + r % 4; }

template <int dtype>
struct Format;

template <>
struct Format<FLOAT16> {
  typedef _Float16 Four __attribute__((ext_vector_type(4)));

  static DEVICE Acc mma(Pair a, Pair b, Acc c) {
    return __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(Four, a),
                                                __builtin_bit_cast(Four, b), c, 0, 0, 0);
  }

  static DEVICE unsigned short round(float x) {
    return __builtin_bit_cast(unsigned short, (_Float16)x);
  }
};

template <>
struct Format<BFLOAT16> {
  typedef short Four __attribute__((ext_vector_type(4)));

  static DEVICE Acc mma(Pair a, Pair b, Acc c) {
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(__builtin_bit_cast(Four, a),
                                                    __builtin_bit_cast(Four, b), c, 0, 0, 0);
  }

  // To nearest, ties to even. gfx942 has no instruction for it. A NaN that arithmetic makes
  // (0x7fc00000) stays one.
  static DEVICE unsigned short round(float x) {
    unsigned bits = __builtin_bit_cast(unsigned, x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
};

template <int dtype>
DEVICE Pair round_four(float a, float b, float c, float d) {
  typedef Format<dtype> F;
  return Pair{F::round(a) | (unsigned)F::round(b) << 16, F::round(c) | (unsigned)F::round(d) << 16};
}
