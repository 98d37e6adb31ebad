// The formats of tensors, and registers full of them.
#pragma once
#include "device.h"

#define FLOAT16 0
#define BFLOAT16 1
#define E4M3 2  // float8_e4m3fn: 4 significant bits, up to 448

constexpr float kLeastScale = 1.0842022e-19f;  // of float8: 2^-63, the least that `quantize` makes

struct alignas(8) Pair {  // four 16-bit elements
  unsigned word[2];
  METHOD unsigned &operator[](int i) { return word[i]; }
  METHOD unsigned operator[](int i) const { return word[i]; }
};

struct alignas(16) Quad {  // eight 16-bit elements
  unsigned word[4];
  METHOD unsigned &operator[](int i) { return word[i]; }
  METHOD unsigned operator[](int i) const { return word[i]; }
};

template <int dtype>
struct Format;

template <>
struct Format<FLOAT16> {
  // Two values in one register, to nearest, ties to even.
  static METHOD unsigned nearest(float low, float high) {
    unsigned both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};

template <>
struct Format<BFLOAT16> {
  static METHOD unsigned nearest(float low, float high) {
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
  }
};

template <>
struct Format<E4M3> {
  // Four values in one register, the first one lowest, to nearest, ties to even; beyond 448 becomes 448.
  static METHOD unsigned nearest(float a, float b, float c, float d) {
    unsigned all;
    asm("{.reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};}"
        : "=r"(all)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return all;
  }
};
