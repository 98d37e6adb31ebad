// What a workgroup of the one-pass backward has: where things lie in LDS, what a wavefront keeps in registers.
#pragma once
#include "bwd_inputs.h"
#include "bwd_dq.h"
#include "bwd_step.h"
#include "bwd_terms.h"

typedef Mma<DTYPE, 16> M;
typedef M::Acc Acc;
typedef Format<DTYPE> F;

constexpr int kWaves = 4;
constexpr int kThreads = kWaves * kLanes;
constexpr int kOwned = TILES * 16;         // keys of a wavefront
constexpr int kBlock = kWaves * kOwned;    // of a workgroup
constexpr int kSteps = HEAD_DIM / 32;      // of 16 bytes a lane along the head
constexpr int kStepsV = HEAD_DIM_V / 32;
constexpr int kShares = (HEAD_DIM / 16 + kWaves - 1) / kWaves;  // products of dQ^T of a wavefront
typedef Exchange<kWaves, TILES, (HEAD_DIM > 128)> Swap;
// Three buffers of columns do not fit 64 KB, and columns come to LDS a step later.
constexpr bool kLate = HEAD_DIM + HEAD_DIM_V > 320;
typedef Loads<HEAD_DIM, HEAD_DIM_V, kWaves, GENERAL && !kLate, kLate> Feed;
typedef Scoring<DTYPE, TILES> General;

// The same in all lanes, which the compiler does not know of a minimum of 64 bits or a v_med3.
DEVICE void make_scalar(int &x) { x = __builtin_amdgcn_readfirstlane(x); }

// ---- LDS ----------------------------------------------------------------------------------------

typedef RowUnits<HEAD_DIM> RowsQ;
typedef RowUnits<HEAD_DIM_V> RowsO;
typedef ColumnUnits<HEAD_DIM> ColumnsQ;
typedef ColumnUnits<HEAD_DIM_V> ColumnsO;

// One step's rows, with -LSE and -delta of each; its columns; its dS.
constexpr int kRowsO = RowsQ::Tile::kBytes;
constexpr int kStates = kRowsO + RowsO::Tile::kBytes;
constexpr int kRowsBytes = kStates + 2 * kStepRows * 4;
constexpr int kColumnsO = ColumnsQ::kBytes;
constexpr int kColumnsBytes = kColumnsO + ColumnsO::kBytes;
constexpr int kSwapBytes = Swap::Tile::kBytes;
constexpr int kLdsBytes = 2 * kRowsBytes + (kLate ? 2 : 3) * kColumnsBytes + 2 * kSwapBytes;

// Where the loop finds them: of this step, of the next one and, where they are stored, of the one after.
// What comes in turn is made from what all are together, each in its place: copies would stand at the loop's
// end, behind the last product.
struct Buffers {
  unsigned rows, rows_next;
  unsigned columns, columns_stored;
  unsigned swap, swap_next;
  unsigned all_rows, all_columns, all_swaps;

  METHOD Buffers(Lds lds) {
    rows = (unsigned)lds;
    rows_next = rows + kRowsBytes;
    columns = rows_next + kRowsBytes;
    columns_stored = columns + (kLate ? 1 : 2) * kColumnsBytes;
    swap = columns_stored + kColumnsBytes;
    swap_next = swap + kSwapBytes;
    all_rows = rows + rows_next;
    all_columns = columns + columns_stored + (kLate ? 0 : columns + kColumnsBytes);
    all_swaps = swap + swap_next;
  }
  METHOD unsigned columns_next() const { return kLate ? columns_stored : all_columns - columns - columns_stored; }
  METHOD void turn_rows() {
    rows = all_rows - rows;
    pin_scalar(rows);
    rows_next = all_rows - rows_next;
    pin_scalar(rows_next);  // or each address in it would be a subtraction
  }
  METHOD void turn_columns() {
    columns = kLate ? all_columns - columns : columns_next();
    pin_scalar(columns);
  }
  METHOD void turn_columns_stored() {
    columns_stored = kLate ? all_columns - columns_stored : columns_next();
    pin_scalar(columns_stored);
  }
  // With score terms scalar registers are too few for one more.
  METHOD unsigned next_swap() const { return GENERAL ? all_swaps - swap : swap_next; }
  METHOD void turn_swaps() {
    swap = all_swaps - swap;
    pin_scalar(swap);
    if (GENERAL) return;
    swap_next = all_swaps - swap_next;
    pin_scalar(swap_next);
  }
};

// ---- what a wavefront has -----------------------------------------------------------------------

// With score terms, and with dropout's keys, scalar registers are few.
constexpr bool kScalarsFew = GENERAL || kDropoutAlone;
// An integer that all lanes share and that is seldom needed: where scalars are few, in a vector register.
struct Aside {
  int x;

  METHOD Aside(int x = 0) : x(x) {
    if (kScalarsFew) pin(this->x);
  }
  METHOD operator int() const { return kScalarsFew ? __builtin_amdgcn_readfirstlane(x) : x; }
  METHOD int operator++() { return *this = Aside(*this + 1); }
};

struct Context {
  Sequence s;  // but for its number
  Aside batch;
  int first;  // key of this wavefront
  float to_base_2;
  Seen mine;  // rows that see them: a step is cut unless all rows see all keys

  METHOD int own(int n) const { return first + n * 16 + M::column(); }
  METHOD Sequence sequence() const {
    Sequence x = s;
    x.batch = batch;
    return x;
  }
};

struct Fixed {
  Quad k[TILES][kSteps], v[TILES][kStepsV];
  Quad transposed[kShares][Swap::kBlocks];  // of K: a share of the head, all keys
};

struct Gradients {
  Acc k[TILES][2 * kSteps], v[TILES][2 * kStepsV];
};

// The element of product `t` of dQ^T, dK^T or dV^T that lane or register row `n` is.
DEVICE int element_of(int t, int n) { return t / 2 * 32 + n * 2 + t % 2; }

constexpr int kCarried = kSteps < 4 ? 1 : 2;  // slots whose reads come a turn before

// What a turn leaves for the next one.
struct Scored {
  Acc p[TILES];         // not yet rounded
  Pair ds[TILES];
  General::Scored general;  // in place of both
  Quad columns[kCarried];  // the first ones
  Acc dq[kShares];
};

// Which of the rows first + 4 part + 0 ... 3 see key `own`: bit r for register r of a product.
DEVICE unsigned seen_bits(const Context &c, int own, int first) {
  pin(own);  // or what follows from it would be kept for steps without a mask
  Seen seen = rows_seeing(params_again(), c.s, own, own);
  int low = max(seen.low - first, 0), high = min(seen.high - first, kStepRows);
  if (own >= c.s.keys || low >= high) return 0;
  return (0xffffu >> (kStepRows - high + low) << low) >> M::part() * kMmaPart;
}

// Lanes' places in LDS.
struct Places {
  int rows_q, rows_o, columns, swap, state;
  int swap_to, swap_odd;  // where dS goes: of tiles in pairs, and of the odd one
  unsigned sums;          // where dQ goes in a tile of sums, not in LDS

  METHOD Places() {
    int row = M::column(), part = M::part();
    rows_q = RowsQ::Tile::place(row, part, 0);
    rows_o = kRowsO + RowsO::Tile::place(row, part, 0);
    columns = (part * 16 + (row ^ (row >> 3 & 1))) * kUnitBytes;
    swap = Swap::Tile::place(row, part, 0);
    state = kStates + part * 16;
    int to = Swap::Tile::place(4 * part, row / 4, 0) + row % 4 * 4;
    swap_to = to + Swap::block(wave_index(), 0) * kUnitBytes;
    swap_odd = to + Swap::block(wave_index(), TILES - 1) * kUnitBytes + Swap::half(wave_index(), TILES - 1) * 2;
    sums = (wave_index() * kShares * 4 * kLanes + lane_index()) * 4;
    pin(sums);
    pin(rows_q);
    pin(rows_o);
    pin(columns);
    pin(swap);
    pin(state);
    pin(swap_to);
    pin(swap_odd);
  }
};

typedef __attribute__((address_space(3))) unsigned short *LdsHalves;

// Rows r and r + 1 of dS of tile n.
DEVICE void exchange(const Places &at, unsigned swap, int n, int r, unsigned two) {
  bool odd = TILES % 2 && n == TILES - 1;
  Lds to = (Lds)(swap + (odd ? at.swap_odd : at.swap_to + n / 2 * kUnitBytes + n % 2 * 2) + r * Swap::Tile::kRowBytes);
  *(LdsHalves)to = (unsigned short)two;
  *(LdsHalves)(to + Swap::Tile::kRowBytes) = (unsigned short)(two >> 16);
}
