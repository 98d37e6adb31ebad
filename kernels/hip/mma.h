// The matrix instructions of CDNA 3 for inputs of 16 and 8 bits, and the number formats that feed them.
//
// v_mfma_f32_32x32x8 and v_mfma_f32_16x16x16: D (N x N) += A (N x depth) B (depth x N), N = 32 or 16,
// both 512 multiply-adds a clock and SIMD. Of lane l,
//   A holds row l % N, elements k = 4 (l / N) ... + 3
//   B holds column l % N, elements k = 4 (l / N) ... + 3
//   D holds column l % N; its register r is row 8 (r / 4) + 4 (l / N) + r % 4
// so registers 4j ... 4j + 3 of a D are the B of k-slice j: what S^T = K Q^T leaves is what
// O^T += V^T P^T takes, without a move. v_mfma_f32_32x32x16_fp8_fp8, twice as fast, has 8 elements of
// A and B in a lane, k = 8 (l / N) ... + 7, and the same D: its registers 8j ... 8j + 7 are the B of
// k-slice j when A has its keys in their order. Source: AMD matrix instruction calculator.
#pragma once
#include "device.h"

#define FLOAT16 0
#define BFLOAT16 1
#define FLOAT8 2  // e4m3fnuz: 4 significant bits, the largest 240, the least normal 2^-7

typedef unsigned Pair __attribute__((ext_vector_type(2)));  // four 16-bit elements, or eight of 8 bits
typedef unsigned Quad __attribute__((ext_vector_type(4)));

constexpr int kMmaPart = 4;  // elements of the inner dimension that a lane holds

template <int dtype>
struct Format;

template <>
struct Format<FLOAT16> {
  typedef unsigned short Bits;
  typedef _Float16 Four __attribute__((ext_vector_type(4)));

  // Two values in one register, to nearest, ties to even.
  static METHOD unsigned nearest(float low, float high) {
    return __builtin_bit_cast(unsigned short, (_Float16)low) |
           (unsigned)__builtin_bit_cast(unsigned short, (_Float16)high) << 16;
  }
  static METHOD unsigned half_up(float low, float high) { return nearest(low, high); }
};

template <>
struct Format<BFLOAT16> {
  typedef unsigned short Bits;
  typedef short Four __attribute__((ext_vector_type(4)));

  // gfx942 has no instruction for it. A NaN that arithmetic makes (0x7fc00000) stays one.
  static METHOD unsigned nearest(float low, float high) {
    unsigned a = __builtin_bit_cast(unsigned, low), b = __builtin_bit_cast(unsigned, high);
    a += 0x7fff + (a >> 16 & 1);
    b += 0x7fff + (b >> 16 & 1);
    return __builtin_amdgcn_perm(b, a, 0x07060302);
  }
  // To nearest, ties away from zero: 3 instructions for two values where `nearest` takes 7.
  static METHOD unsigned half_up(float low, float high) {
    unsigned a = __builtin_bit_cast(unsigned, low), b = __builtin_bit_cast(unsigned, high);
    return __builtin_amdgcn_perm(b + 0x8000, a + 0x8000, 0x07060302);
  }
};

template <>
struct Format<FLOAT8> {
  typedef unsigned char Bits;

  // Four values in one register, to nearest, ties to even. An instruction writes half of it: the other
  // half may be anything at first, which saves a move.
  static METHOD unsigned nearest(float a, float b, float c, float d) {
    int anything;
    asm("" : "=v"(anything));
    int low = __builtin_amdgcn_cvt_pk_fp8_f32(a, b, anything, false);
    return __builtin_amdgcn_cvt_pk_fp8_f32(c, d, low, true);
  }
};

// N x N products of a 16-bit format.
template <int dtype, int N>
struct Mma {
  static_assert(N == 16 || N == 32, "what CDNA 3 has");
  typedef float Acc __attribute__((ext_vector_type(N * N / kLanes)));
  typedef typename Format<dtype>::Four Four;

  static constexpr int kDepth = N == 32 ? 8 : 16;
  static constexpr int kHeld = kMmaPart;  // elements of the inner dimension in a lane
  static constexpr int kRegisters = N * N / kLanes;

  static METHOD int column() { return lane_index() % N; }
  static METHOD int part() { return lane_index() / N; }  // of the inner dimension: 4 elements each
  static METHOD int row(int r) { return r / 4 * 8 + part() * kMmaPart + r % 4; }

  static METHOD Acc mma(Pair a, Pair b, Acc c) {
    Four x = __builtin_bit_cast(Four, a), y = __builtin_bit_cast(Four, b);
    if constexpr (dtype == FLOAT16 && N == 32)
      return __builtin_amdgcn_mfma_f32_32x32x8f16(x, y, c, 0, 0, 0);
    else if constexpr (dtype == FLOAT16)
      return __builtin_amdgcn_mfma_f32_16x16x16f16(x, y, c, 0, 0, 0);
    else if constexpr (N == 32)
      return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(x, y, c, 0, 0, 0);
    else
      return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, c, 0, 0, 0);
  }

  // Over the lanes that hold parts of one column.
  static METHOD float column_max(float x) {
    if constexpr (N == 16) x = __builtin_fmaxf(x, from_lane_xor(x, 16));
    return __builtin_fmaxf(x, from_lane_xor(x, 32));
  }
  static METHOD float column_sum(float x) {
    if constexpr (N == 16) x += from_lane_xor(x, 16);
    return x + from_lane_xor(x, 32);
  }

  // Four of the kHeld elements that a lane has of an operand: all, or by `j` the first or second four.
  static METHOD void put(Pair &operand, int, const float (&x)[4]) {
    operand = Pair{Format<dtype>::half_up(x[0], x[1]), Format<dtype>::half_up(x[2], x[3])};
  }
};

// The same of float8. Of 16 x 16 products a slice would be two.
template <>
struct Mma<FLOAT8, 32> : Mma<FLOAT16, 32> {
  static constexpr int kDepth = 16, kHeld = 8;

  static METHOD Acc mma(Pair a, Pair b, Acc c) {
    return __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(__builtin_bit_cast(long, a),
                                                      __builtin_bit_cast(long, b), c, 0, 0, 0);
  }
  static METHOD void put(Pair &operand, int j, const float (&x)[4]) {
    operand[j] = Format<FLOAT8>::nearest(x[0], x[1], x[2], x[3]);
  }
};
