// What the one-pass backward keeps in LDS, and how steps of 16 query rows get there.
//
// A lane l of a 16 x 16 x 16 product holds row or column l % 16 and part l / 16 of the inner dimension
// (mma.h). Everything is read by 16 bytes, which feed two products. On gfx942 a read of 16 bytes serves
// the lanes 0-3 with 20-23, 4-7 with 16-19, 8-11 with 28-31, 12-15 with 24-27 together, and the same 32
// lanes on; each of these eights has to meet eight different units of a 128-byte line.
#pragma once
#include "stream.h"

constexpr int kStepRows = 16;

DEVICE Quad read_unit(unsigned at) { return lds_read((Lds)at); }
typedef float Four __attribute__((ext_vector_type(4)));
DEVICE Four read_four(unsigned at) { return __builtin_bit_cast(Four, read_unit(at)); }

// `rows` of a matrix from `first` on, at most kStepRows of them. Without a comparison, which would be a
// branch for each of a wavefront's tiles.
DEVICE int step_bytes(int rows, int row_bytes, int width) {
  return rows * row_bytes - min(rows, 1) * (row_bytes - width * 2);
}
DEVICE __amdgpu_buffer_rsrc_t step_buffer(const Matrix &m, int first, int rows) {
  int there = max(rows, 0);
  pin_scalar(there);  // or min and max become v_med3, of which the compiler does not know that lanes agree
  return buffer(m.row(first), step_bytes(min(there, kStepRows), m.row_bytes, m.width));
}

// 16 rows of 4 * `length` units: part p reads the units that begin at length * (p / 2) + 2 length * (p % 2).
// Rows are an odd number of units apart, fours of rows `kShift` more: parts 0 and 1 are 2 `length` apart,
// which has to be what fours of rows are apart beyond 4. No exclusive or: a lane has one address, and what
// differs between reads is a constant of the instruction.
template <int length>
struct SkewedTile {
  static_assert(length % 2 == 0, "parts 0 and 1 are 0 or 4 units of a line apart");
  static constexpr int kRowBytes = (4 * length + 1) * kUnitBytes;
  static constexpr int kShift = 2 * length % 8 * kUnitBytes;
  static constexpr int kBytes = kStepRows * kRowBytes + 3 * kShift;

  // `index`: of a unit among those of its part.
  static METHOD int place(int row, int part, int index) {
    return row * kRowBytes + row / 4 * kShift +
           (index + part / 2 * length + part % 2 * 2 * length) * kUnitBytes;
  }
};

// Rows as they lie in memory, for products over the head: unit u of a row belongs to the part that
// reads it in step u % kSteps. The order of the inner dimension is free, as long as keys have the same.
template <int dim>
struct RowUnits {
  static constexpr int kSteps = dim / 32;
  typedef SkewedTile<kSteps + kSteps % 2> Tile;

  static METHOD int unit(int step, int part) { return step + part / 2 * kSteps + part % 2 * 2 * kSteps; }
  static METHOD int place(int row, int unit) {
    int part = unit / (2 * kSteps) + unit / kSteps % 2 * 2;
    return Tile::place(row, part, unit % kSteps);
  }
};

// The same transposed, for products over the 16 rows: a unit has 4 rows of two neighboring elements,
// which are of two products. Lane n of product t of pair T gets element 32 T + 2 n + t.
template <int dim>
struct ColumnUnits {
  static constexpr int kPairs = dim / 32;
  static constexpr int kPairBytes = kLanes * kUnitBytes;
  static constexpr int kBytes = kPairs * kPairBytes;

  // Of elements 2 x and 2 x + 1, rows 4 part ... Written in steps of two x.
  static METHOD int place(int x, int part) {
    int n = x % 16;
    return x / 16 * kPairBytes + (part * 16 + (n ^ (n >> 3 & 1))) * kUnitBytes;
  }
};

// dS of all keys of the workgroup, for the product over keys: rows of blocks of 32 keys, which are two
// products' keys in turn. A lane's 16 bytes are keys 4 part ... 4 part + 3 of both.
template <int waves, int tiles, bool short_of_room>
struct Exchange {
  static constexpr int kBlocks = waves * tiles / 2;
  // Of lengths that fit, the one whose writes of 2 bytes meet fewer banks twice, where there is room for it.
  static constexpr int kLength = kBlocks % 4 || short_of_room ? kBlocks : kBlocks + 2;
  typedef SkewedTile<kLength> Tile;
  static constexpr int kTogether = tiles / 2;  // blocks that are one wavefront's
  static_assert(waves % 2 == 0, "odd tiles of two wavefronts share a block");

  // The block and the half of it of a wavefront's tile.
  static METHOD int block(int wave, int tile) {
    return tile < 2 * kTogether ? wave * kTogether + tile / 2 : waves * kTogether + wave / 2;
  }
  static METHOD int half(int wave, int tile) { return tile < 2 * kTogether ? tile % 2 : wave % 2; }
  // The tile of 16 keys of the workgroup that is a half of a block.
  static METHOD int tile_of(int block, int half) {
    if (block < waves * kTogether)
      return block / max(kTogether, 1) * tiles + block % max(kTogether, 1) * 2 + half;
    return ((block - waves * kTogether) * 2 + half) * tiles + tiles - 1;
  }
};

// A wavefront's part in bringing 16 rows of A and C, and their two states, to LDS: pieces of 16 rows x
// 16 * kElements elements. A lane has 4 rows of kElements, which it stores as rows and as columns: the columns
// at once, or, `late`, from registers a step later.
template <int dim_a, int dim_c, int waves, bool few_pieces, bool late>
struct Loads {
  typedef RowUnits<dim_a> RowsA;
  typedef RowUnits<dim_c> RowsC;
  // Four where that deals all wavefronts the same, or where pieces shall be few: each takes 5 scalars.
  static constexpr int kWide = 64 * waves;
  static constexpr int kElements = (dim_a + dim_c) % kWide && !(few_pieces && dim_a + dim_c > kWide) ? 2 : 4;
  static constexpr int kWidth = 16 * kElements;
  static constexpr int kPiecesA = dim_a / kWidth;
  static constexpr int kPieces = kPiecesA + dim_c / kWidth;
  static constexpr int kMine = (kPieces + waves - 1) / waves;
  static constexpr int kPairs = kElements / 2;
  static constexpr int kLoads = kMine * 4 + 1;
  static constexpr int kStoresAPiece = 4 + 3 * kPairs;
  static constexpr int kStores = kMine * kStoresAPiece + 1;

  struct Piece {
    char *base;  // of the next step's first row
    int row_bytes;
    int width;
    unsigned offset;   // in memory, of the lane's first row
    int row;           // in LDS
    int column[kPairs];
    unsigned x[4][kPairs];
    Quad turned[kPairs];
    int bytes;
  };
  Piece piece[kMine];
  const float *states;  // of the next step's first row: -LSE or -delta
  int left;             // rows from there on
  int rows;             // of them in the next step
  int state_place;  // in LDS
  unsigned state_offset;
  unsigned state;

  // A wavefront for which there is no piece left brings its last one again, which takes no branch.
  METHOD int index(int n) const {
    int found = wave_index() + n * waves;
    return (n + 1) * waves <= kPieces || found < kPieces ? found : found - waves;
  }
  METHOD bool is_a(int n) const {
    if ((n + 1) * waves <= kPiecesA) return true;
    int least = (n + 1) * waves <= kPieces ? n * waves : (n - 1) * waves + kPieces % waves;
    return least < kPiecesA && index(n) < kPiecesA;
  }

  // Offsets in LDS are in rows, columns and states, C's behind A's.
  METHOD Loads(const Matrix &a, const Matrix &c, int rows_c, int columns_c, int states_at) {
    int lane = lane_index(), four = lane / 16;
#pragma unroll
    for (int n = 0; n < kMine; ++n) {
      Piece &x = piece[n];
      bool of_a = is_a(n);
      int element = (of_a ? index(n) : index(n) - kPiecesA) * kWidth + lane % 16 * kElements;
      Matrix m{nullptr, of_a ? a.row_bytes : c.row_bytes, of_a ? a.width : c.width};
      x.row_bytes = m.row_bytes;
      x.width = m.width;
      x.offset = buffer_offset(m, four * 4, element);
      x.row = (of_a ? RowsA::place(four * 4, element / 8) : rows_c + RowsC::place(four * 4, element / 8)) +
              element % 8 * 2;
      for (int j = 0; j < kPairs; ++j) {
        x.column[j] = (of_a ? 0 : columns_c) + ColumnUnits<dim_a>::place(element / 2 + j, four);
        pin(x.column[j]);
      }
      pin(x.offset);
      pin(x.row);
    }
    state_place = states_at + (wave_index() * 8 + lane % 8) * 4;
    pin(state_place);
    state_offset = (wave_index() % (waves / 2) * 8 + lane % 8) * 4;
    pin(state_offset);
  }

  // Goes on with the rows `first` ... and below `rows` of another head.
  METHOD void seek(const Matrix &a, const Matrix &c, const RowStates &of_rows, int first, int rows) {
#pragma unroll
    for (int n = 0; n < kMine; ++n) piece[n].base = is_a(n) ? a.row(first) : c.row(first);
    states = (wave_index() < waves / 2 ? of_rows.minus_lse : of_rows.minus_delta) + first;
    pin_scalar(states);
    left = max(rows - first, 0);
    pin_scalar(left);
  }
  METHOD void advance() {
#pragma unroll
    for (int n = 0; n < kMine; ++n) piece[n].base += kStepRows * (long long)piece[n].row_bytes;
  }
  METHOD void advance_states() {
    states += kStepRows;
    left -= kStepRows;
    pin_scalar(left);  // or this is a saturating subtraction, which is the vector unit's
    left = max(left, 0);
    pin_scalar(left);
  }

  // Both once before the loads of a step.
  METHOD void prepare_rows() {
    rows = min(left, kStepRows);
    pin_scalar(rows);
  }
  METHOD void prepare() {
    for (int n = 0; n < kMine; ++n) {
      piece[n].bytes = step_bytes(rows, piece[n].row_bytes, piece[n].width);
      pin_scalar(piece[n].bytes);
    }
  }

  // The i-th load. Rows beyond the end become 0.
  METHOD void load(int i) {
    int n = i / 4, row = i % 4;
    if (n == kMine) {
      state = __builtin_amdgcn_raw_buffer_load_b32(buffer(states, left * 4), state_offset, 0, 0);
      return;
    }
    Piece &x = piece[n];
    auto from = buffer(x.base, x.bytes);
    if constexpr (kPairs == 1) {
      x.x[row][0] = __builtin_amdgcn_raw_buffer_load_b32(from, x.offset, row * x.row_bytes, 0);
    } else {
      Pair two = __builtin_amdgcn_raw_buffer_load_b64(from, x.offset, row * x.row_bytes, 0);
      x.x[row][0] = two[0];
      x.x[row][1] = two[1];
    }
  }

  // The i-th instruction or two of the stores: rows, then the halves of each unit of columns and it, or, of the
  // step before, before them.
  METHOD void store(int i, unsigned rows, unsigned columns, bool has_columns = true) {
    int n = i / kStoresAPiece, j = i % kStoresAPiece;
    if (n == kMine) {
      lds_write((Lds)(rows + state_place), state);
      return;
    }
    Piece &x = piece[n];
    if (j < 4) {
      typedef RowUnits<dim_a> A;
      // Rows of a lane are a constant apart, for A and C the same only where they are as wide.
      int step = dim_a == dim_c || is_a(n) ? A::Tile::kRowBytes : RowsC::Tile::kRowBytes;
      Lds to = (Lds)(rows + x.row + j * step);
      if constexpr (kPairs == 1)
        lds_write(to, x.x[j][0]);
      else
        lds_write(to, Pair{x.x[j][0], x.x[j][1]});
      return;
    }
    int pair = (j - 4) / 3, half = (j - 4 + (late ? 2 : 0)) % 3;
    if (half == 2) {
      if (has_columns) lds_write((Lds)(columns + x.column[pair]), x.turned[pair]);
      return;
    }
    for (int two = 0; two < 2; ++two) {
      unsigned y = __builtin_amdgcn_perm(x.x[2 * two + 1][pair], x.x[2 * two][pair],
                                         half ? 0x07060302 : 0x05040100);
      pin(y);
      x.turned[pair][half * 2 + two] = y;
    }
  }
};
