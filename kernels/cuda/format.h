// The 16-bit formats, and registers full of them.
#pragma once
#include "device.h"

#define FLOAT16 0
#define BFLOAT16 1

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
