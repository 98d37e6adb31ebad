// The layout of K and V tiles in LDS, and the loads that fill it.
//
// LDS has 32 banks of 4 bytes. Everything is read and written in units of 16 bytes, eight of which
// make a line of all banks; the place of a unit in its line is XORed with a number that differs between
// the rows that neighboring lanes access, so that 16 lanes take 2 clocks, the minimum for 256 bytes.
// Padding would cost the same bytes but not leave 64 KB for two tiles each.
#pragma once
#include "memory.h"

constexpr int kSize = sizeof(Format<DTYPE>::Bits);  // of an element
constexpr int kUnit = kUnitBytes / kSize;            // elements of a unit

// A tile of keys as it lies in memory: rows of a power of two of elements, whole lines or half ones.
template <int keys, int head_dim>
struct KeyTile {
  static constexpr int kStride = head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256;
  static constexpr int kRowBytes = kStride * kSize;
  static constexpr int kBytes = keys * kRowBytes;

  // Where unit `unit` of key `key` lies.
  static METHOD int place(int key, int unit) {
    if constexpr (kRowBytes < kLineBytes)
      return key / 2 * kLineBytes + ((key % 2 * 4 + unit) ^ (key / 2 & 7)) * 16;
    else
      return key * kRowBytes + ((unit ^ (key & 7)) * 16);
  }
};

// A tile of values transposed: a row per element of the head, along it the keys in the order in
// which the products take them: unit j * parts + part holds the keys 2 depth j + 4 part + 0 ... 3
// and those `depth` further (mma.h's k-slices 2j and 2j + 1 of one lane). Of bytes, the keys
// 32 j + 4 part + 0 ... 3 and those 8, 16 and 24 further.
template <int keys, int head_dim>
struct ValueTile {
  static constexpr int kUnits = keys / kUnit;  // of a row
  static constexpr int kBytes = head_dim * keys * kSize;

  // Reading, the 8 lanes of a phase (four neighboring d, and four that are 20 or 12 further) have 8
  // places of a line; writing, every other d, of bytes every fourth.
  static METHOD int place(int d, int unit) {
    if constexpr (kUnits < 8) {
      static_assert(kUnits == 4 || kUnits == 2, "two or four rows make a line");
      constexpr int kRows = 8 / kUnits;
      int line = d / kRows, swizzle = kSize == 1 ? d / 4 ^ turn(d) : line;
      return line * kLineBytes + ((d % kRows * kUnits + unit) ^ (swizzle & 7)) * 16;
    } else {
      return d * kUnits * 16 + ((unit ^ (d & 7) ^ (d >> 3 & 1)) * 16);
    }
  }
  // The place of d + n with n below 4, of bytes, where d is a multiple of 4 and lies at `place`.
  static METHOD int beside(int place, int n) {
    constexpr int kRows = 8 / kUnits;
    return (place ^ (n % kRows * kUnits ^ turn(n)) * kUnitBytes) + n / kRows * kLineBytes;
  }

 private:
  // If four neighboring d take two lines, the second line uses other places than the first.
  static METHOD int turn(int d) { return kUnits == 4 ? d / 2 % 2 * 2 : 0; }
};

DEVICE void loads_arrived() { asm volatile("s_waitcnt vmcnt(0)" : : : "memory"); }
