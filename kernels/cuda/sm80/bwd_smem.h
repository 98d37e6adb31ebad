// Tiles in shared memory, and the operands that products read from them.
#pragma once
#include "mma.h"

// Rows of `width` 16-bit elements, in units of 16 bytes. A row's units are turned by its number so that
// eight rows' units of one column, which is what a quarter of ldmatrix reads, lie in different banks.
template <int width>
struct Tile {
  static constexpr int kRowBytes = width * 2;
  static constexpr int kUnits = width / 8;
  static constexpr int kTurned = width % 64 ? 3 : 7;  // bits of a unit's number that are turned
  static_assert(width % 32 == 0, "a row's units are whole groups of those that are turned");

  static METHOD int place(int row, int unit) {
    int swizzle = width % 64 ? row / 2 % 4 : row % 8;
    return row * kRowBytes + (unit ^ swizzle) * 16;
  }
  // From the place of an element to that `rows`, a multiple of 8, and `units`, an even number, further.
  static METHOD Shared move(Shared at, int rows, int units) {
    return (at ^ (units & kTurned) * 16) + rows * kRowBytes + (units & ~kTurned) * 16;
  }
};

// The two ways in which lanes address the four matrices of an ldmatrix: down the rows first, or along a
// row first.
template <typename T>
DEVICE int lane_down() {
  return T::place(lane_index() % 16, lane_index() / 16);
}
template <typename T>
DEVICE int lane_along() {
  return T::place(lane_index() % 8 + lane_index() / 16 * 8, lane_index() / 8 % 2);
}

// Operands of m16n8k16. load() brings A's 16 rows number i, or 16 columns of B, of slice k of the inner
// dimension.

// The inner dimension lies along the tile's rows.
template <typename T>
struct Along {
  Shared at;
  METHOD void load(unsigned (&x)[4], int i, int k) const { ldmatrix(x, T::move(at, i * 16, k * 2)); }
};
template <typename T>
DEVICE Along<T> a_along(Shared tile, int row) {
  return Along<T>{tile + row * T::kRowBytes + lane_down<T>()};
}
template <typename T>
DEVICE Along<T> b_along(Shared tile, int row) {
  return Along<T>{tile + row * T::kRowBytes + lane_along<T>()};
}

// It goes down the tile's rows. B's columns are dealt out to `parts` warps by sixteens.
template <typename T, int parts = 1>
struct Down {
  Shared at;
  METHOD void load(unsigned (&x)[4], int i, int k) const {
    ldmatrix_transposed(x, T::move(at, k * 16, i * 2 * parts));
  }
};
template <typename T>
DEVICE Down<T> a_down(Shared tile, int column) {
  return Down<T>{T::move(tile + lane_along<T>(), 0, column / 8)};
}
template <typename T, int parts>
DEVICE Down<T, parts> b_down(Shared tile, int part) {
  static_assert((parts & (parts - 1)) == 0, "what is added to a unit's number is not carried");
  return Down<T, parts>{T::move(tile + lane_down<T>(), 0, part * 2)};
}

// It is in registers already.
template <int tiles, int slices>
struct Held {
  const unsigned (&x)[tiles][slices][4];
  METHOD void load(unsigned (&to)[4], int i, int k) const {
    for (int r = 0; r < 4; ++r) to[r] = x[i][k][r];
  }
};

// acc += A B over `slices` of 16. Of the operand with more fragments a slice, each is read LOOKAHEAD
// products before its use; of the other, all of a slice one slice before.
template <int dtype, int slices, int m, int n, typename A, typename B>
DEVICE void multiply(float (&acc)[m][n][4], const A &a, const B &b) {
  static_assert(n % 2 == 0, "columns come in pairs");
  constexpr bool kRowsStream = m > n / 2;
  constexpr int kStream = kRowsStream ? m : n / 2, kStay = kRowsStream ? n / 2 : m;
  constexpr int kTotal = slices * kStream, kAhead = LOOKAHEAD < kTotal ? LOOKAHEAD : kTotal - 1;
  unsigned stay[2][kStay][4], stream[kAhead + 1][4];
  auto load_stay = [&](int k) {
#pragma unroll
    for (int i = 0; i < kStay; ++i)
      if constexpr (kRowsStream) b.load(stay[k % 2][i], i, k);
      else a.load(stay[k % 2][i], i, k);
  };
  auto load_stream = [&](int j) {
    if constexpr (kRowsStream) a.load(stream[j % (kAhead + 1)], j % kStream, j / kStream);
    else b.load(stream[j % (kAhead + 1)], j % kStream, j / kStream);
  };
  load_stay(0);
#pragma unroll
  for (int j = 0; j < kAhead; ++j) load_stream(j);
#pragma unroll
  for (int j = 0; j < kTotal; ++j) {
    int k = j / kStream;
    if (j + kAhead < kTotal) load_stream(j + kAhead);
    if (j % kStream == 0 && k + 1 < slices) load_stay(k + 1);
#pragma unroll
    for (int i = 0; i < kStay; ++i) {
      const unsigned(&x)[4] = kRowsStream ? stream[j % (kAhead + 1)] : stay[k % 2][i];
      const unsigned(&y)[4] = kRowsStream ? stay[k % 2][i] : stream[j % (kAhead + 1)];
      int row = kRowsStream ? j % kStream : i, pair = kRowsStream ? i : j % kStream;
      mma<dtype>(acc[row][2 * pair], x, y[0], y[1]);
      mma<dtype>(acc[row][2 * pair + 1], x, y[2], y[3]);
    }
  }
}

template <int m, int n>
DEVICE void clear(float (&acc)[m][n][4]) {
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i) acc[i / 4 / n][i / 4 % n][i % 4] = 0.0f;
}

// The 16-bit form of a product (rows x columns) in registers as the A operand of the next one.
template <int dtype, int m, int n>
DEVICE void round(unsigned (&to)[m][n / 2][4], const float (&x)[m][n][4]) {
#pragma unroll
  for (int i = 0; i < m; ++i)
#pragma unroll
    for (int j = 0; j < n; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        to[i][j / 2][j % 2 * 2 + h] = Format<dtype>::nearest(x[i][j][2 * h], x[i][j][2 * h + 1]);
}

DEVICE void store_word(Shared at, unsigned x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

DEVICE unsigned load_word(Shared at) {
  unsigned x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at));
  return x;
}

// Four 8 x 8 matrices as ldmatrix reads them, with the same addresses.
template <typename T>
DEVICE void store_matrices(Shared tile, int row, int column, const unsigned (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  Shared at = T::move(tile + lane_down<T>(), 0, column / 8) + row * T::kRowBytes;
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
#else
  Shared at = tile + row * T::kRowBytes + lane_index() % 4 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    store_word(at + T::place(lane_index() / 4 + i % 2 * 8, column / 8 + i / 2), x[i]);
#endif
}
