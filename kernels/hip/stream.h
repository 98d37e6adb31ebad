// Tiles of 32 rows of two matrices, A and C, on their way from memory through LDS to the matrix unit:
// as they lie in memory ("rows": a product over the head) and transposed ("columns": a product over
// the rows). A wavefront carries pieces of 32 rows x 32 elements: a lane 4 rows x 4 elements, which
// it stores as 4 rows, then as 4 columns.
//
// LDS has 32 banks of 4 bytes. What a lane reads is a unit of 16 bytes; eight of them make a line of
// all banks. A unit's place inside its line is an exclusive or with a number that differs between
// rows (or columns) that are read or written together, so that nothing waits for a bank.
#pragma once
#include "memory.h"

constexpr int kTile = 32;  // rows
constexpr int kPiece = 32;  // elements along the head

// Rows of one head of one sequence in memory.
struct Matrix {
  char *base;
  int row_bytes;
  int width;  // elements

  METHOD char *row(int index) const { return base + (long long)index * row_bytes; }
};

// Elements [0, dim) of a tile's rows, as they lie.
template <int dim>
struct RowTile {
  static constexpr int kUnits = dim / 8;
  static constexpr int kBytes = kTile * dim * 2;

  // Line and place in it apart, so that what is constant of `unit` becomes an offset.
  static METHOD int place(unsigned row, unsigned unit) {
    if constexpr (kUnits % 8) {  // 12: two rows make three lines
      unit += row % 2 * kUnits;
      row /= 2;
      return (row * 2 * kUnits + unit / 8 * 8 + (unit % 8 ^ (row & 7))) * kUnitBytes;
    } else {
      return (row * kUnits + unit / 8 * 8 + (unit % 8 ^ (row & 7))) * kUnitBytes;
    }
  }
  // The place of unit 2 n + part of a lane's row, whose unit `part` lies at `base`.
  static METHOD int step(int base, int n) {
    if constexpr (kUnits % 8) {
      int lane = lane_index();
      return place(lane % kTile, 2 * n + lane / kTile);
    } else {
      return (base ^ n % 4 * 2 * kUnitBytes) + n / 4 * 8 * kUnitBytes;
    }
  }
};

// The same transposed: 32 rows of each of `dim` elements. Unit 2 J + part holds what the k-slices
// 2 J and 2 J + 1 take from a lane of that part (mma.h): rows 16 J + 4 part + 0 ... 3, and 8 further.
template <int dim>
struct ColumnTile {
  static constexpr int kBytes = kTile * dim * 2;

  static METHOD int place(unsigned element, unsigned unit) {
    // By gfx942's phases of 16-byte reads (lanes 0-3 with 20-23 and so on), of which element / 4 made two
    // meet: bits 1, 3 and 4 of the element turn the unit by 1, 2 and 6.
    unsigned turn = (element >> 1 & 1) ^ (element >> 3 & 1) * 2 ^ (element >> 4 & 1) * 6;
    return (element / 2 * 8 + ((element % 2 * 4 + unit) ^ turn)) * kUnitBytes;
  }
  // The place of element 32 t + e, unit 2 n + part, where element e, unit `part`, lies at `base`.
  static METHOD int step(int base, int t, int n) {
    return (base ^ n * 2 * kUnitBytes) + t * kTile / 2 * 8 * kUnitBytes;
  }
};

// `rows` of a matrix from `first` on, at most kTile of them.
DEVICE __amdgpu_buffer_rsrc_t buffer_of(const Matrix &m, int first, int rows) {
  int bytes = rows > 0 ? (min(rows, kTile) - 1) * m.row_bytes + m.width * 2 : 0;
  return buffer(m.row(first), bytes);
}

// Where `element`, a multiple of 4, of row `row` of a tile lies, or, beyond the width, a multiple of 8,
// somewhere beyond any buffer (tiles are less than 2^29 bytes). Without a comparison, whose lane masks
// would be kept through a loop.
DEVICE unsigned buffer_offset(const Matrix &m, int row, int element) {
  unsigned beyond = max(element + 1 - m.width, 0);
  return row * m.row_bytes + element * 2 + (beyond << 29);
}

// lane_index(), or the same computed again: where registers are too few to keep, through a loop, the
// addresses that follow from it.
template <bool again>
DEVICE int lane_for() {
  int lane = lane_index();
  if (again) pin(lane);
  return lane & (kLanes - 1);  // the compiler shall know its bits
}

// The part of one wavefront in a tile of A and C.
template <int dim_a, int dim_c, int waves, bool again>
struct Stream {
  typedef RowTile<dim_a> RowsA;
  typedef RowTile<dim_c> RowsC;
  static constexpr int kPiecesA = dim_a / kPiece;
  static constexpr int kPieces = kPiecesA + dim_c / kPiece;
  static constexpr int kMine = (kPieces + waves - 1) / waves;

  int wave;
  Pair piece[kMine][4];  // four rows of four elements

  // A's pieces come first. Which one is a piece of, is known to the compiler where that can be.
  METHOD int index(int n) const { return wave + n * waves; }
  METHOD bool is_a(int n) const {
    if ((n + 1) * waves <= kPiecesA) return true;
    return n * waves < kPiecesA && index(n) < kPiecesA;
  }
  METHOD bool is_there(int n) const { return kPieces % waves == 0 || index(n) < kPieces; }
  // A lane has rows 4 * lane / 8 ... + 3 of a piece, and four elements from here on.
  METHOD int element(int n, int lane) const {
    return (is_a(n) ? index(n) : index(n) - kPiecesA) * kPiece + lane % 8 * 4;
  }

  // Where a lane's first row of piece n lies, from the tile's first row on.
  METHOD unsigned offset(int n, int lane, const Matrix &a, const Matrix &c) const {
    Matrix m{nullptr, is_a(n) ? a.row_bytes : c.row_bytes, is_a(n) ? a.width : c.width};
    return buffer_offset(m, lane / 8 * 4, element(n, lane));
  }
  // Row i of the four of piece n, of the tile's `bytes` at `base`. What lies beyond them becomes 0.
  METHOD void load_row(int n, int i, char *base, int bytes, unsigned offset, int row_bytes) {
    piece[n][i] =
        __builtin_amdgcn_raw_buffer_load_b64(buffer(base, bytes), offset, i * row_bytes, 0);
  }
  // Row i of the four of piece n.
  METHOD void store_row(int n, int i, int lane, Lds a, Lds c) const {
    if (!is_there(n)) return;
    int unit = element(n, lane) / 8, half = lane % 2, row = lane / 8 * 4 + i;
    Lds to = is_a(n) ? a + RowsA::place(row, unit) : c + RowsC::place(row, unit);
    lds_write(to + half * 8, piece[n][i]);
  }
  // Column i of the four of piece n, of C only where `with_c`.
  template <bool with_c>
  METHOD void store_column(int n, int i, int lane, Lds a, Lds c) const {
    if (!is_there(n) || !(with_c || is_a(n))) return;
    int four = lane / 8, unit = four / 4 * 2 + four % 2, half = four / 2 % 2;
    unsigned pick = i % 2 ? 0x07060302 : 0x05040100;
    Pair column;
    for (int rows = 0; rows < 2; ++rows)
      column[rows] =
          __builtin_amdgcn_perm(piece[n][2 * rows + 1][i / 2], piece[n][2 * rows][i / 2], pick);
    Lds to = (is_a(n) ? a : c) + ColumnTile<dim_a>::place(element(n, lane) + i, unit);
    lds_write(to + half * 8, column);
  }

  // All pieces of the tile at `first`. Rows beyond `rows` become 0.
  METHOD void load(const Matrix &a, const Matrix &c, int first, int rows) {
    int lane = lane_for<again>();
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      Matrix m{is_a(n) ? a.base : c.base, is_a(n) ? a.row_bytes : c.row_bytes,
               is_a(n) ? a.width : c.width};
      auto from = buffer_of(m, first, is_there(n) ? rows - first : 0);
      for (int i = 0; i < 4; ++i)
        piece[n][i] = __builtin_amdgcn_raw_buffer_load_b64(
            from, buffer_offset(m, lane / 8 * 4 + i, element(n, lane)), 0, 0);
    }
  }
  METHOD void store_rows(Lds a, Lds c) const {
    int lane = lane_for<again>();
#pragma unroll
    for (int n = 0; n < kMine; ++n)
      for (int i = 0; i < 4; ++i) store_row(n, i, lane, a, c);
  }
  template <bool with_c>
  METHOD void store_columns(Lds a, Lds c) const {
    int lane = lane_for<again>();
#pragma unroll
    for (int n = 0; n < kMine; ++n)
      for (int i = 0; i < 4; ++i) store_column<with_c>(n, i, lane, a, c);
  }
};
