// The matrix instruction of Hopper, by four warps (a warpgroup) together and asynchronous.
//
// wgmma.m64nNk16: D (64 x N, float32) += A (64 x 16) B (16 x N). Warp w of the four holds rows 16 w ...
// 16 w + 15 of D, and of A where A is in registers, as sm80/mma.h says: with group = lane / 4 and pair =
// lane % 4, d[4 t + 2 h + i] is row 16 w + 8 h + group, column 8 t + 2 pair + i, and a[2 t + h] two
// elements of the t-th 8 of the inner dimension. So the D of a k-slice, rounded in pairs, is the A of the
// next product. B, and A otherwise, lie in shared memory as `Operand` describes.
//
// wgmma.m64nNk32 for E4M3 is the same with twice as many elements in the same bytes, so that a[2 t + h] are
// elements 4 pair ... 4 pair + 3 of the t-th 16 of the inner dimension. B lies "along" only.
// Source: PTX ISA, "Asynchronous warpgroup level matrix instructions".
#pragma once
#include "mbarrier.h"

// Before the first wgmma of a batch: orders it behind what touched its registers.
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last `groups` commits are done.
template <int groups>
DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
// Registers of products under way: the compiler moves no other use of them past this. Goes before the
// fence of a batch, and behind the wait for it.
template <int count>
DEVICE void hold(float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int count>
DEVICE void hold(unsigned (&x)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <int slices>
DEVICE void hold(unsigned (&x)[slices][4]) {
#pragma unroll
  for (int i = 0; i < slices; ++i) hold(x[i]);
}

// Four 8 x 8 matrices, as sm80/mma.h's ldmatrix would read them.
DEVICE void stmatrix(Shared at, const unsigned (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
DEVICE void stmatrix_transposed(Shared at, const unsigned (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// An operand in shared memory, in panels: rows of `width` 16-bit elements (64, 32 or 16, swizzled by 128,
// 64 or 32 bytes), one behind the other, as TMA leaves a box of that width, at a multiple of 1024 bytes.
//   along: a panel's rows are the operand's 64 or N, its elements 64, 32 or 16 of the inner dimension
//          (K-major).
//   down:  a panel's rows are the inner dimension, its elements 64, 32 or 16 of the operand's 64 or N, and
//          the next of those lie `panel_bytes` on (MN-major, "transposed").
template <int width>
struct Operand {
  static constexpr int kRowBytes = 2 * width;

  static METHOD unsigned long long along(Shared at) { return describe(at, 16); }
  static METHOD unsigned long long down(Shared at, int panel_bytes) { return describe(at, panel_bytes); }

  // What leads from a descriptor to that of the `step`-th 16 of the inner dimension: it is added.
  static METHOD constexpr unsigned step_along(int step, int panel_bytes) {
    return (step / (width / 16) * panel_bytes + step % (width / 16) * 32) / 16;
  }
  static METHOD constexpr unsigned step_down(int step) { return step * 16 * kRowBytes / 16; }

  static METHOD unsigned long long describe(Shared at, int leading_bytes) {
    constexpr unsigned long long kSwizzle = width == 64 ? 1 : width == 32 ? 2 : 3;
    constexpr unsigned long long kEightRows = 8 * kRowBytes / 16;
    return kSwizzle << 62 | kEightRows << 32 | (unsigned long long)(leading_bytes / 16) << 16 |
           (at & 0x3ffff) / 16;
  }
};

// wgmma<dtype, transposed a, transposed b>(d, a, b, add): d = A B, or d += A B where `add`; the same with A
// in registers, wgmma<dtype, transposed b>. N follows from the size of d. E4M3 takes nothing transposed.
#define WGMMA_SHARED(type, n, registers, outputs, e0, e1, e2, e3, e4)                              \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %" #e2 ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, " \
               "%" #e0 ", %" #e1 ", add, 1, 1, %" #e3 ", %" #e4 ";}"                                \
               : outputs                                                                           \
               : "l"(a), "l"(b), "r"((int)add), "n"(transposed_a), "n"(transposed_b))
#define WGMMA_REGISTERS(type, n, registers, outputs, e0, e1, e2, e3, e4, e5, e6)                   \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %" #e5 ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers "}, " \
               "{%" #e0 ", %" #e1 ", %" #e2 ", %" #e3 "}, %" #e4 ", add, 1, 1, %" #e6 ";}"           \
               : outputs                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add), "n"(transposed_b))
#define WGMMA_SHARED_8(n, registers, outputs, e0, e1, e2)                                          \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %" #e2 ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, "         \
               "%" #e0 ", %" #e1 ", add, 1, 1;}"                                                    \
               : outputs                                                                           \
               : "l"(a), "l"(b), "r"((int)add))
#define WGMMA_REGISTERS_8(n, registers, outputs, e0, e1, e2, e3, e4, e5)                           \
  asm volatile("{.reg .pred add; setp.ne.b32 add, %" #e5 ", 0;\n"                                  \
               "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" registers "}, "         \
               "{%" #e0 ", %" #e1 ", %" #e2 ", %" #e3 "}, %" #e4 ", add, 1, 1;}"                     \
               : outputs                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add))
#define WGMMA(n, registers, outputs, e0, e1, e2, e3, e4, e5, e6)                                   \
  template <int dtype, bool transposed_a, bool transposed_b>                                       \
  DEVICE void wgmma(float (&d)[n / 2], unsigned long long a, unsigned long long b, bool add) {     \
    if constexpr (dtype == E4M3)                                                                   \
      WGMMA_SHARED_8(n, registers, LIST(outputs), e0, e1, e2);                                     \
    else if constexpr (dtype == BFLOAT16)                                                          \
      WGMMA_SHARED("bf16", n, registers, LIST(outputs), e0, e1, e2, e3, e4);                       \
    else                                                                                           \
      WGMMA_SHARED("f16", n, registers, LIST(outputs), e0, e1, e2, e3, e4);                        \
  }                                                                                                \
  template <int dtype, bool transposed_b>                                                          \
  DEVICE void wgmma(float (&d)[n / 2], const unsigned (&a)[4], unsigned long long b, bool add) {   \
    if constexpr (dtype == E4M3)                                                                   \
      WGMMA_REGISTERS_8(n, registers, LIST(outputs), e0, e1, e2, e3, e4, e5);                      \
    else if constexpr (dtype == BFLOAT16)                                                          \
      WGMMA_REGISTERS("bf16", n, registers, LIST(outputs), e0, e1, e2, e3, e4, e5, e6);            \
    else                                                                                           \
      WGMMA_REGISTERS("f16", n, registers, LIST(outputs), e0, e1, e2, e3, e4, e5, e6);             \
  }

// The numbers of d's registers and the operands themselves, by tens: NAMES_20 is "%0,%1, ... %19".
#define LIST(...) __VA_ARGS__

#define NAMES2(tens) "%" #tens "0,%" #tens "1"
#define NAMES4(tens) NAMES2(tens) "," "%" #tens "2,%" #tens "3"
#define NAMES6(tens) NAMES4(tens) "," "%" #tens "4,%" #tens "5"
#define NAMES8(tens) NAMES6(tens) "," "%" #tens "6,%" #tens "7"
#define NAMES10(tens) NAMES8(tens) "," "%" #tens "8,%" #tens "9"
#define VALUES2(i) "+f"(d[i]), "+f"(d[i + 1])
#define VALUES4(i) VALUES2(i), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VALUES6(i) VALUES4(i), "+f"(d[i + 4]), "+f"(d[i + 5])
#define VALUES8(i) VALUES6(i), "+f"(d[i + 6]), "+f"(d[i + 7])
#define VALUES10(i) VALUES8(i), "+f"(d[i + 8]), "+f"(d[i + 9])
#define NAMES_10 NAMES10()
#define VALUES_10 VALUES10(0)
#define NAMES_20 NAMES_10 "," NAMES10(1)
#define VALUES_20 VALUES_10, VALUES10(10)
#define NAMES_30 NAMES_20 "," NAMES10(2)
#define VALUES_30 VALUES_20, VALUES10(20)
#define NAMES_40 NAMES_30 "," NAMES10(3)
#define VALUES_40 VALUES_30, VALUES10(30)
#define NAMES_50 NAMES_40 "," NAMES10(4)
#define VALUES_50 VALUES_40, VALUES10(40)
#define NAMES_60 NAMES_50 "," NAMES10(5)
#define VALUES_60 VALUES_50, VALUES10(50)
#define NAMES_70 NAMES_60 "," NAMES10(6)
#define VALUES_70 VALUES_60, VALUES10(60)
#define NAMES_80 NAMES_70 "," NAMES10(7)
#define VALUES_80 VALUES_70, VALUES10(70)
#define NAMES_90 NAMES_80 "," NAMES10(8)
#define VALUES_90 VALUES_80, VALUES10(80)
#define NAMES_100 NAMES_90 "," NAMES10(9)
#define VALUES_100 VALUES_90, VALUES10(90)
#define NAMES_110 NAMES_100 "," NAMES10(10)
#define VALUES_110 VALUES_100, VALUES10(100)
#define NAMES_120 NAMES_110 "," NAMES10(11)
#define VALUES_120 VALUES_110, VALUES10(110)

WGMMA(16, NAMES8(), LIST(VALUES8(0)), 8, 9, 10, 11, 12, 13, 14)
WGMMA(32, NAMES_10 "," NAMES6(1), LIST(VALUES_10, VALUES6(10)), 16, 17, 18, 19, 20, 21, 22)
WGMMA(40, NAMES_20, LIST(VALUES_20), 20, 21, 22, 23, 24, 25, 26)
WGMMA(48, NAMES_20 "," NAMES4(2), LIST(VALUES_20, VALUES4(20)), 24, 25, 26, 27, 28, 29, 30)
WGMMA(56, NAMES_20 "," NAMES8(2), LIST(VALUES_20, VALUES8(20)), 28, 29, 30, 31, 32, 33, 34)
WGMMA(64, NAMES_30 "," NAMES2(3), LIST(VALUES_30, VALUES2(30)), 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, NAMES_40, LIST(VALUES_40), 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, NAMES_40 "," NAMES8(4), LIST(VALUES_40, VALUES8(40)), 48, 49, 50, 51, 52, 53, 54)
WGMMA(112, NAMES_50 "," NAMES6(5), LIST(VALUES_50, VALUES6(50)), 56, 57, 58, 59, 60, 61, 62)
WGMMA(128, NAMES_60 "," NAMES4(6), LIST(VALUES_60, VALUES4(60)), 64, 65, 66, 67, 68, 69, 70)
WGMMA(144, NAMES_70 "," NAMES2(7), LIST(VALUES_70, VALUES2(70)), 72, 73, 74, 75, 76, 77, 78)
WGMMA(160, NAMES_80, LIST(VALUES_80), 80, 81, 82, 83, 84, 85, 86)
WGMMA(176, NAMES_80 "," NAMES8(8), LIST(VALUES_80, VALUES8(80)), 88, 89, 90, 91, 92, 93, 94)
WGMMA(192, NAMES_90 "," NAMES6(9), LIST(VALUES_90, VALUES6(90)), 96, 97, 98, 99, 100, 101, 102)
WGMMA(224, NAMES_110 "," NAMES2(11), LIST(VALUES_110, VALUES2(110)), 112, 113, 114, 115, 116, 117, 118)
WGMMA(256, NAMES_120 "," NAMES8(12), LIST(VALUES_120, VALUES8(120)), 128, 129, 130, 131, 132, 133, 134)
