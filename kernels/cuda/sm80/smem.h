// Tiles of 16-bit elements in shared memory, without bank conflicts.
//
// Everything moves in units of 16 bytes, eight of which make a line of all 32 banks. The place of a
// unit in its line is XORed with a number that differs between the eight rows that one matrix of
// ldmatrix reads, so that each read of 8 rows x 16 bytes, and each write of a row, touches every bank
// once.
#pragma once
#include "mma.h"

constexpr int kUnit = 8;  // elements of 16 bytes
constexpr int kLine = 128;

template <int rows, int elements>
struct Tile {
  static_assert(elements % 32 == 0, "half lines");
  static constexpr int kRows = rows;
  static constexpr int kUnits = elements / kUnit;
  static constexpr int kRowBytes = elements * 2;
  static constexpr int kBytes = rows * kRowBytes;
  // A unit moves among this many: all eight of a line, if rows are whole lines. If rows are half lines,
  // two neighbors take the two halves, and every other row is moved by one more.
  static constexpr int kPeriod = elements % 64 ? 4 : 8;

  static METHOD constexpr int swizzle(int row) { return (kPeriod == 8 ? row : row / 2) & (kPeriod - 1); }
  // Where unit `unit` of row `row` lies.
  static METHOD int place(int row, int unit) { return row * kRowBytes + (unit ^ swizzle(row)) * 16; }
  // The same unit `more` rows further down, a number that has no bit in common with that of the row.
  static METHOD Shared below(Shared at, int more) { return (at ^ swizzle(more) * 16) + more * kRowBytes; }

  // Where a lane reads 16 x 16 elements with ldmatrix, for A's fragment and, transposed, for B's (rows
  // are the inner dimension): matrices go down the rows first.
  static METHOD Shared down(Shared tile) {
    return tile + place(lane_index() % 16, lane_index() / 16);
  }
  // For two fragments of B whose rows are columns of the product: matrices go along the row first.
  static METHOD Shared along(Shared tile) {
    return tile + place(lane_index() % 8 + lane_index() / 16 * 8, lane_index() / 8 % 2);
  }
  // The same lane's place in the 16 x 16 elements at row `row`, unit `unit` (multiples of 16 and 2).
  static METHOD Shared at(Shared lane, int row, int unit) {
    return (lane ^ (unit % kPeriod * 16)) + (unit / kPeriod * kPeriod * 16 + row * kRowBytes);
  }
};

DEVICE void store_shared(Shared at, unsigned x) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
// 16 bytes.
template <class T>
DEVICE void store_shared(Shared at, const T &value) {
  Quad x = __builtin_bit_cast(Quad, value);
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(at),
               "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
template <class T>
DEVICE T load_shared(Shared at) {
  Quad x;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x.word[0]), "=r"(x.word[1]), "=r"(x.word[2]), "=r"(x.word[3])
               : "r"(at)
               : "memory");
  return __builtin_bit_cast(T, x);
}
