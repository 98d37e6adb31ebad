// Which scores backward hides.
#pragma once
#include "device.h"
#include "../sequence.h"

// What is seen: where key - row - shift lies between two bounds, and neither is beyond its end.
struct Mask {
  int low, high;
  int rows, keys, shift;
#if BANDED
  int chunk, origin;  // key 0's place among the chunks
#endif
};
DEVICE Mask mask_of(const Params &p, const Sequence &s) {
  constexpr int kFar = 0x3fffffff;  // what is added to it does not overflow
#if BANDED
  return Mask{p.window_left >= 0 ? p.window_shift - min(p.window_left, kFar) : -kFar,
              p.window_right >= 0 ? p.window_shift + min(p.window_right, kFar) : kFar, s.rows, s.keys,
              s.shift, p.attention_chunk, p.k_start};
#endif
  return Mask{p.window_left >= 0 ? -min(p.window_left, kFar) : -kFar,
              p.window_right >= 0 ? min(p.window_right, kFar) : kFar, s.rows, s.keys, s.shift};
}

// All bits from `first` to `last` of a word; shifts by more than 31 give 0.
DEVICE unsigned bits_between(int first, int last) {
  unsigned from, to;
  asm("shl.b32 %0, 0xffffffff, %1;" : "=r"(from) : "r"(max(first, 0)));
  asm("shr.u32 %0, 0xffffffff, %1;" : "=r"(to) : "r"(max(31 - last, 0)));
  return from & to;
}
// Of the rows from `row` on those that see a key.
struct Range {
  int first, last;
  METHOD bool has(int offset) const { return offset >= first && offset <= last; }
};
DEVICE Range rows_that_see(const Mask &mask, int key, int row) {
  int distance = key - row - mask.shift;
#if BANDED
  // No key that is there has a place below 0.
  int begin = mask.chunk ? distance - (key + mask.origin) % (unsigned)mask.chunk : distance - mask.high;
  int end = mask.chunk ? begin + mask.chunk - 1 : distance - mask.low;
  return Range{max(begin, distance - mask.high),
               key < mask.keys ? min(min(end, distance - mask.low), mask.rows - 1 - row) : -1};
#endif
  return Range{distance - mask.high,
               key < mask.keys ? min(distance - mask.low, mask.rows - 1 - row) : -1};
}
