// Attention backward on CDNA 3 in one pass over the scores (FlashAttention-2, Dao 2023, algorithm 2): five
// products a score where two passes have seven. dQ is added up by atomics, in whatever order.
//
// A workgroup owns kBlock keys: a wavefront TILES times 16, with K, V, dK and dV in registers, and a share
// of dQ's columns for all of them, so that the same keys of K are in registers a second time, transposed.
// It walks over the query rows that see its keys, 16 a step:
//
//   S = Q K^T    dP = dO V^T    rows x keys, its own keys in columns: P and dS feed from registers
//   dV^T += dO^T P    dK^T += Q^T dS
//   dQ^T = K^T dS^T    of all keys, through LDS, a step later
//
// Steps overlap: while the matrix unit makes S and dP of a step, it makes dK, dV and dQ of the one before,
// and the vector unit finds products to hide behind (see `Deal`). One barrier a step.
#include "bwd_inputs.h"
#include "bwd_dq.h"
#include "bwd_step.h"
#include "bwd_terms.h"
#include "schedule.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(GENERAL) || !defined(TILES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, GENERAL and TILES"
#endif

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

// An integer that all lanes share and that is seldom needed: with score terms, in a vector register.
struct Aside {
  int x;

  METHOD Aside(int x = 0) : x(x) {
    if (GENERAL) pin(this->x);
  }
  METHOD operator int() const { return GENERAL ? __builtin_amdgcn_readfirstlane(x) : x; }
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

template <int steps, typename Units>
DEVICE void load_owned(const Context &c, Quad (&x)[TILES][steps], const Matrix &m) {
  for (int n = 0; n < TILES; ++n) {
    int first = c.first + n * 16;
    pin_scalar(first);
    auto from = step_buffer(m, first, c.s.keys - first);
    for (int i = 0; i < steps; ++i)
      x[n][i] = __builtin_amdgcn_raw_buffer_load_b128(
          from, buffer_offset(m, M::column(), Units::unit(i, M::part()) * 8), 0, 0);
  }
}

// K^T of a share of the head, for all keys of the workgroup: two neighbouring elements of a key by four
// bytes, of which one is kept, and the keys in the order of the exchange.
DEVICE void load_transposed(const Context &c, Fixed &x, const Matrix &m, int first_own, Lds lds) {
  Lds mine = lds + thread_index() * kUnitBytes;
#pragma unroll
  for (int b = 0; b < Swap::kBlocks; ++b) {
    unsigned two[kShares][4][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int first = first_own + Swap::tile_of(b, half) * 16;
      pin_scalar(first);  // or the descriptors of all tiles would be made first: 900 scalars spilled
      auto from = step_buffer(m, first, c.s.keys - first);
#pragma unroll
      for (int t = 0; t < kShares; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int element = element_of((wave_index() * kShares + t) / 2 * 2, M::column());
          two[t][i][half] = __builtin_amdgcn_raw_buffer_load_b32(
              from, buffer_offset(m, M::part() * 4 + i, element), 0, 0);
        }
    }
#pragma unroll
    for (int t = 0; t < kShares; ++t) {
      unsigned pick = (wave_index() * kShares + t) % 2 ? 0x07060302 : 0x05040100;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x.transposed[t][b][i] = __builtin_amdgcn_perm(two[t][i][1], two[t][i][0], pick);
      // What a load brings may lie in any register. What an instruction makes would be copied to a
      // VGPR before each of its products: 46 moves a step.
      lds_write(mine, x.transposed[t][b]);
      asm volatile("" : : : "memory");
      x.transposed[t][b] = lds_read(mine);
    }
  }
}

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

// ---- a turn of the loop -------------------------------------------------------------------------

// Products come in slots, each with what one read of 16 bytes brings, which came kLead products before.
// In their order: half of dK of a step and, a step further, S; the rest of dK; dP of the further step; then
// dQ and dV. What comes first has been in LDS for a step, what makes S waited for the barrier.
constexpr int kSlotS = kSteps / 2;
constexpr int kSlotK = kSlotS + kSteps;  // the rest of dK
constexpr int kSlotP = 2 * kSteps;
constexpr int kSlotQ = kSlotP + kStepsV;
constexpr int kSlotV = kSlotQ + Swap::kBlocks;
constexpr int kSlots = kSlotV + kStepsV;

// The first product of each.
constexpr int kAtS = kSlotS * 2 * TILES;
constexpr int kAtK = kSlotK * 2 * TILES;
constexpr int kAtP = kSlotP * 2 * TILES;
constexpr int kAtQ = kAtP + kStepsV * 2 * TILES;
constexpr int kAtV = kAtQ + Swap::kBlocks * 2 * kShares;
constexpr int kProducts = kAtV + kStepsV * 2 * TILES;

// Of 16 clocks; LDS takes 64 to 128. Both by the timing model: at 128, 12 and a quarter for 9 and a half
// below is 0.826 in place of 0.853, at 64 9 for 12 is 0.729 in place of 0.736. With score terms registers are
// few, and the vector unit is what is waited for.
constexpr int kLead = HEAD_DIM > 96 ? GENERAL ? 8 : 9 : 12;
static_assert(kCarried <= kSlotS, "what is read before the barrier is dK's");

// The first product of a slot.
DEVICE constexpr int at_of(int slot) {
  if (slot < kSlotQ) return slot * 2 * TILES;
  if (slot < kSlotV) return kAtQ + (slot - kSlotQ) * 2 * kShares;
  return kAtV + (slot - kSlotV) * 2 * TILES;
}

// Between two products fit three instructions (of the vector unit, or one exponential, and one clock in five
// is lost). What comes where, in products: until S is made, P is rounded, what was loaded goes to LDS, and dQ of
// the step before is added; then loads; P is made beside the rest of dK, dP and a part of dQ, where it is cut;
// then dS, which is in LDS a few products before the barrier.
constexpr int kCutBlock = Swap::kBlocks / (HEAD_DIM > 96 ? 2 : 4);
constexpr int kCutSlot = kSlotQ + kCutBlock;
constexpr int kAtCut = kAtQ + kCutBlock * 2 * kShares;
// The barrier is before the last product, which goes on meanwhile. Where what the next turn begins with comes
// only in this one, it is behind it that this is read, and the products that are left wait for nothing.
constexpr int kAtBarrier = kLate ? kProducts - 10 : kProducts - 2;
constexpr int kAtEnd = kAtBarrier - 6;
static_assert(kAtEnd + 7 < kProducts, "what the next turn needs comes in this one");
// From here on what is read is the next turn's.
constexpr int kAtCarry = kLate ? kAtBarrier : kProducts - 2 * 2 * TILES;  // or two slots before the end
constexpr int kAtTurn = kAtCarry - (kLate ? 0 : 2);
static_assert(at_of(kSlots - 1) - kLead <= kAtTurn, "all columns of this turn are read by then");

// After which product comes what. Everything would like to be spread evenly over a range of products; where that
// is more than fits between two, something goes to the next product, or the one before, that has room. Evenly
// alone, with up to ten instructions behind one product and none behind the next, was 0.868 of the matrix unit
// at 128 and is 0.896.
struct Deal {
  static constexpr int kRoom = 3;   // instructions between two products
  static constexpr int kApart = 4;  // products that something goes at most
  static constexpr int kElements = 4 * TILES, kTwos = 2 * TILES;
  int taken[kProducts] = {};  // instructions behind each product
  int rounded[kTwos] = {};    // P of the step before
  int stored[Feed::kStores] = {}, loaded[Feed::kLoads] = {}, added[4 * kShares] = {};
  int state[2] = {};                               // -LSE and -delta are read
  int scaled[kElements] = {}, raised[kElements] = {};  // S to the exponent of 2, and that to P
  int differed[kTwos] = {}, halved[kTwos] = {}, given[kTwos] = {};  // dP to dS, to 16 bits, to LDS

  // The product from `least` to `most` for something of `cost` instructions that would like to be at `wanted`.
  constexpr int place(int wanted, int least, int most, int cost) {
    int best = wanted, least_loss = 1 << 30;
    for (int m = least; m <= most; ++m) {
      int apart = m < wanted ? wanted - m : m - wanted, over = taken[m] + cost - kRoom;
      int loss = apart + (over > 0 ? 4 * over : 0) + (apart > kApart ? 100 : 0);
      if (loss < least_loss) {
        best = m;
        least_loss = loss;
      }
    }
    taken[best] += cost;
    return best;
  }
  // The i-th of `count`, no earlier than `before`, which is where the one before it is.
  constexpr int spread(int i, int count, int from, int to, int before, int cost) {
    return place(from + i * (to - from) / count, i ? before : from, to, cost);
  }

  constexpr Deal() {
    // What has its place already: reads of LDS, waits for them, scalars of the loads and of the loop.
    for (int slot = 0; slot < kSlots; ++slot) {
      int read = at_of(slot) - kLead - 1;
      if (slot >= kCarried) taken[read > 0 ? read : 0] += 1;
      if (slot) taken[at_of(slot) - 1] += 1;
    }
    taken[kAtK - 2] += 1;
    taken[kAtK - 1] += 4;
    taken[kAtQ] += 2;
    taken[kAtQ + 1] += 3;
    taken[kAtQ + 2] += 4;
    for (int m = kAtTurn; m < kAtCarry; ++m) taken[m] += 2;
    for (int i = 0; i < 2 && !GENERAL; ++i) state[i] = place(kAtS, kAtS - 4, kAtS + 4, 2);
    for (int i = 0; i < kTwos && !GENERAL; ++i)
      rounded[i] = spread(i, kTwos, 0, kAtK - 2, i ? rounded[i - 1] : 0, 3);
    for (int i = 0; i < Feed::kStores; ++i)
      stored[i] = spread(i, Feed::kStores, 1, kAtK - 2, i ? stored[i - 1] : 0, 2);
    for (int i = 0; i < 4 * kShares; ++i)
      added[i] = spread(i, 4 * kShares, kAtS + 1, kAtK - 1, i ? added[i - 1] : 0, i ? 2 : 4);
    for (int i = 0; i < Feed::kLoads; ++i)
      loaded[i] = spread(i, Feed::kLoads, kAtK, kAtP, i ? loaded[i - 1] : 0, i % 4 ? 1 : 3);
    for (int i = 0; i < kElements && !GENERAL; ++i) {
      scaled[i] = spread(i, kElements, kAtK + 3, kAtCut - 2, i ? scaled[i - 1] : 0, 1);
      raised[i] = place(scaled[i] + 1, scaled[i] + 1, kAtCut - 1, 2);
    }
    for (int i = 0; i < kTwos; ++i) {
      if (GENERAL) {
        given[i] = spread(i, kTwos, kAtCut, kAtEnd, i ? given[i - 1] : 0, 2);
        continue;
      }
      differed[i] = spread(i, kTwos, kAtCut, kAtEnd - 2, i ? differed[i - 1] : 0, 2);
      halved[i] = place(differed[i] + 1, differed[i] + 1, kAtEnd - 1, 3);
      given[i] = place(halved[i] + 1, halved[i] + 1, kAtEnd, 2);
    }
  }
};
constexpr Deal kDeal;

// Where the loop is: what comes next of each kind, through the heads of the group.
struct Walk {
  Aside start;       // row
  Aside end;         // row
  Aside steps;       // of a head
  Aside group_end;   // head behind the last
  int row;           // whose scores are made
  Aside head;        // and of which head, where that matters
  Aside fed_head;    // of the loads,
  int fed;           // and the steps that are left
  Aside added_head;  // the same of dQ
  int added;
  char *sums;        // where dQ is added
  Aside sums_step;   // bytes from step to step
  int sums_bytes;    // of a tile, at first 0, when there is no dQ yet: all is beyond the buffer
  int turns;         // that are left

  METHOD void seek(const Context &c, Feed &feed) const {
    const Params &p = params_again();
    Sequence s = sequence_of(p, c.batch);
    feed.seek(q_of(p, s, fed_head), dout_of(p, s, fed_head), states_of(p, s, fed_head), start, c.s.rows);
  }
  METHOD void feed_on(const Context &c, Feed &feed) {
    if (__builtin_expect(--fed != 0, 1)) return;
    fed = steps;
    feed.left = 0;
    if (++fed_head < group_end) seek(c, feed);
  }
  METHOD void score_on(const Context &c, General &general) {
    row += kStepRows;
    if (__builtin_expect(row >= end, 0)) {
      row = start;
      head = min(head + 1, group_end - 1);  // behind the last step its head again
      if (GENERAL) general.seek(c.sequence(), head);
    }
    pin_scalar(row);
  }
  METHOD void seek_sums(const Context &c) {
    const Params &p = params_again();
    Sequence s = sequence_of(p, c.batch);
    sums = (char *)p.dq_accum + sum_tile(p, s, start, added_head) * (kSumRows * HEAD_DIM * 4);
  }
  METHOD void add_on(const Context &c) {
    if (__builtin_expect(--added != 0, 1)) return;
    added = steps;
    if (++added_head < group_end) seek_sums(c);
  }
};

// A register of dQ^T. Without a value that returns, an addition is done when memory has it; the next
// kernel comes after it. Scope: workgroups that share a tile may be on any die. Additions skip L1, and
// leave sc1 at 0, which is the scope of the agent, all its dies (LLVM's memory model for gfx942).
DEVICE void add(const Places &at, const Walk &walk, const Acc (&dq)[kShares], int i) {
  auto to = buffer(walk.sums, walk.sums_bytes);
  __builtin_amdgcn_raw_ptr_buffer_atomic_fadd_f32(dq[i / 4][i % 4], to, at.sums + i * kLanes * 4, 0, 0);
}

// What lives within a turn. Apart from Turn, whose references the compiler has to see through before it
// has unrolled what indexes these.
struct Values {
  Acc s[TILES], dp[TILES], dq[kShares];
  Pair p[TILES], ds[TILES];  // of the step before
  float exponent[TILES][4];
  Acc minus_lse, minus_delta;
  Quad fragment[kSlots + kCarried];
  int cut;  // below 0: some row of the step does not see some key
};

struct Turn {
  const Context &c;
  const Places &at;
  const Fixed &fixed;
  Gradients &grad;
  Feed &feed;
  Scored &scored;  // of the step before, then of this
  Buffers &lds;
  Walk &walk;
  General &general;
  Values &v;

  // Of dK.
  static METHOD int pair_of(int slot) { return slot < kSlotS ? slot : slot - kSteps; }

  METHOD void read(int slot) {
    Quad &x = v.fragment[slot];
    if (slot >= kSlots)
      x = read_unit(lds.columns + at.columns + (slot - kSlots) * ColumnsQ::kPairBytes);
    else if (slot >= kSlotV)
      x = read_unit(lds.columns + kColumnsO + at.columns + (slot - kSlotV) * ColumnsQ::kPairBytes);
    else if (slot >= kSlotQ)
      x = read_unit(lds.swap + at.swap + (slot - kSlotQ) * kUnitBytes);
    else if (slot >= kSlotP)
      x = read_unit(lds.rows + at.rows_o + (slot - kSlotP) * kUnitBytes);
    else if (slot >= kSlotS && slot < kSlotK)
      x = read_unit(lds.rows + at.rows_q + (slot - kSlotS) * kUnitBytes);
    else
      x = read_unit(lds.columns + at.columns + pair_of(slot) * ColumnsQ::kPairBytes);
  }

  // Product i of a slot.
  METHOD void multiply(int slot, int i) {
    const Quad &x = v.fragment[slot];
    if (slot < kSlotS || (slot >= kSlotK && slot < kSlotP)) {
      int n = i % TILES, t = pair_of(slot) * 2 + i / TILES;
      grad.k[n][t] = M::mma(i / TILES ? x.zw : x.xy, v.ds[n], grad.k[n][t]);
    } else if (slot < kSlotK) {
      int n = i % TILES, step = slot - kSlotS;
      const Quad &k = fixed.k[n][step];
      v.s[n] = i < TILES ? M::mma(x.xy, k.xy, step ? v.s[n] : Acc{0}) : M::mma(x.zw, k.zw, v.s[n]);
    } else if (slot < kSlotQ) {
      int n = i % TILES, step = slot - kSlotP;
      const Quad &y = fixed.v[n][step];
      Acc from = GENERAL ? Acc{0} : v.minus_delta;
      v.dp[n] = i < TILES ? M::mma(x.xy, y.xy, step ? v.dp[n] : from) : M::mma(x.zw, y.zw, v.dp[n]);
    } else if (slot < kSlotV) {
      int t = i % kShares, b = slot - kSlotQ;
      const Quad &k = fixed.transposed[t][b];
      v.dq[t] = i < kShares ? M::mma(k.xy, x.xy, b ? v.dq[t] : Acc{0}) : M::mma(k.zw, x.zw, v.dq[t]);
    } else {
      int n = i % TILES, t = (slot - kSlotV) * 2 + i / TILES;
      grad.v[n][t] = M::mma(i / TILES ? x.zw : x.xy, v.p[n], grad.v[n][t]);
    }
  }

  // What the other units do behind product m.
  METHOD void beside(int m) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      if (!GENERAL && m == kDeal.rounded[i]) {
        float low = scored.p[i / 2][i % 2 * 2], high = scored.p[i / 2][i % 2 * 2 + 1];
        if (m < kAtS) {  // or this would be done before the first product
          pin(low);
          pin(high);
        }
        unsigned two = F::half_up(low, high);
        pin(two);
        v.p[i / 2][i % 2] = two;
      }
    if (m == kDeal.stored[0]) pin_scalar(lds.rows_next);  // the same of an address
#pragma unroll
    for (int i = 0; i < Feed::kStores; ++i)
      if (m == kDeal.stored[i]) feed.store(i, lds.rows_next, lds.columns_stored);
#pragma unroll
    for (int i = 0; i < 4 * kShares; ++i)
      if (m == kDeal.added[i]) add(at, walk, scored.dq, i);
    if (GENERAL && m == kAtS + 1) general.add_dots(scored.general, c.sequence(), walk.head, walk.row);
    if (GENERAL && m == kAtS + 2) walk.score_on(c, general);
    if (GENERAL && m == kAtK - 3) general.load_bias(c.sequence(), walk.head, walk.row);
    if (!GENERAL && m == kDeal.state[0]) v.minus_lse = read_four(lds.rows + at.state);
    if (!GENERAL && m == kDeal.state[1]) v.minus_delta = read_four(lds.rows + at.state + kStepRows * 4);
    if (m == kAtK - 2) feed.prepare_rows();
    if (m == kAtK - 1) feed.prepare();
#pragma unroll
    for (int i = 0; i < Feed::kLoads; ++i)
      if (m == kDeal.loaded[i]) feed.load(i);
#pragma unroll
    for (int i = 0; !GENERAL && i < 4 * TILES; ++i) {
      float &x = v.exponent[i / 4][i % 4];
      if (m == kDeal.scaled[i]) {
        x = __builtin_fmaf(v.s[i / 4][i % 4], c.to_base_2, v.minus_lse[i % 4]);
        pin(x);
      }
      if (m == kDeal.raised[i]) {
        x = exp2(x);
        pin(x);
        scored.p[i / 4][i % 4] = x;
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      int n = i / 2, r = i % 2 * 2;
      if (!GENERAL && m == kDeal.differed[i])
        for (int j = r; j < r + 2; ++j) {
          float x = v.dp[n][j] * scored.p[n][j];
          pin(x);
          v.dp[n][j] = x;
        }
      if (!GENERAL && m == kDeal.halved[i]) {
        unsigned two = F::half_up(v.dp[n][r], v.dp[n][r + 1]);
        pin(two);
        scored.ds[n][i % 2] = two;
      }
      if (m == kDeal.given[i])
        exchange(at, lds.next_swap(), n, r, GENERAL ? scored.general.ds[n][i % 2] : scored.ds[n][i % 2]);
    }
    if (m == kAtQ) lds.turn_rows();
    if (!GENERAL && m == kAtQ + 1) {
      walk.row = walk.row + kStepRows < walk.end ? walk.row + kStepRows : (int)walk.start;
      pin_scalar(walk.row);
    }
    if (m == kAtQ + 2) {
      v.cut = (walk.row - c.mine.all_low) | (c.mine.all_high - kStepRows - walk.row);
      pin_scalar(v.cut);
    }
    // What the next turn needs, where there is least else.
    if (m == kAtEnd + 1) {
      walk.sums += walk.sums_step;
      walk.sums_bytes = kSumRows * HEAD_DIM * 4;
      pin_scalar(walk.sums_bytes);
    }
    if (m == kAtEnd + 2) walk.add_on(c);
    if (m == kAtEnd + 3) lds.turn_swaps();
    if (m == kAtEnd + 4) feed.advance_states();
    if (m == kAtEnd + 5) feed.advance();
    if (m == kAtEnd + 6) walk.feed_on(c, feed);
    if (m == kAtEnd + 7) {
      --walk.turns;
      pin_scalar(walk.turns);
    }
    if (m == kAtBarrier) barrier();
    // The last of this turn's columns have been read.
    if (m == kAtTurn) lds.turn_columns();
    if (m == kAtTurn + (kLate ? 0 : 1)) lds.turn_columns_stored();
#pragma unroll
    for (int i = 0; i < kCarried; ++i)  // what the next turn begins with
      if (m == kAtCarry + (kLate ? 0 : i)) read(kSlots + i);
  }
  METHOD void mask(int first) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      unsigned seen = seen_bits(c, c.own(n), first);
#pragma unroll
      for (int r = 0; r < 4; ++r) scored.p[n][r] = where(seen, r, scored.p[n][r]);
    }
  }
  METHOD void weigh() {
    auto masked = [&](Acc (&x)[TILES]) {
      if (v.cut >= 0) return;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        unsigned seen = seen_bits(c, c.own(n), walk.row);
#pragma unroll
        for (int r = 0; r < 4; ++r) x[n][r] = where(seen, r, x[n][r]);
      }
    };
    // The rows that came before those of this turn are still there.
    general.weigh(scored.general, v.s, v.dp, lds.rows_next + at.state, c.sequence(), walk.head, walk.row, masked);
  }
  METHOD void run() {
    int m = 0;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      v.ds[n] = GENERAL ? scored.general.ds[n] : scored.ds[n];
      if (GENERAL) v.p[n] = scored.general.p[n];
    }
    for (int i = 0; i < kCarried; ++i) v.fragment[i] = scored.columns[i];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (GENERAL && slot == kCutSlot) weigh();
      if (!GENERAL && slot == kCutSlot && __builtin_expect(v.cut < 0, 0)) mask(walk.row);
      int products = at_of(slot + 1) - at_of(slot);
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int ahead = kCarried; ahead < kSlots; ++ahead)
          if (max(at_of(ahead) - kLead, 0) == m) read(ahead);
        fence();
        multiply(slot, i);
        fence();
        beside(m++);
        fence();
      }
    }
    for (int i = 0; i < kCarried; ++i) scored.columns[i] = v.fragment[kSlots + i];
    for (int t = 0; t < kShares; ++t) scored.dq[t] = v.dq[t];
  }
};

// The first step of all: scores without a turn.
DEVICE void begin(const Context &c, const Places &at, const Fixed &fixed, const Buffers &lds,
                  Scored &scored, General &general, int head, int first) {
  Acc minus_lse = read_four(lds.rows + at.state), minus_delta = read_four(lds.rows + at.state + kStepRows * 4);
  Acc s[TILES], dp[TILES];
  for (int n = 0; n < TILES; ++n) {
    s[n] = Acc{0};
    dp[n] = GENERAL ? Acc{0} : minus_delta;
  }
  for (int i = 0; i < kSteps; ++i) {
    Quad x = read_unit(lds.rows + at.rows_q + i * kUnitBytes);
    for (int n = 0; n < TILES; ++n) {
      s[n] = M::mma(x.xy, fixed.k[n][i].xy, s[n]);
      s[n] = M::mma(x.zw, fixed.k[n][i].zw, s[n]);
    }
  }
  for (int i = 0; i < kStepsV; ++i) {
    Quad x = read_unit(lds.rows + at.rows_o + i * kUnitBytes);
    for (int n = 0; n < TILES; ++n) {
      dp[n] = M::mma(x.xy, fixed.v[n][i].xy, dp[n]);
      dp[n] = M::mma(x.zw, fixed.v[n][i].zw, dp[n]);
    }
  }
  if (GENERAL) {
    general.load_bias(c.sequence(), head, first);
    auto masked = [&](Acc (&x)[TILES]) {
      for (int n = 0; n < TILES; ++n) {
        unsigned seen = seen_bits(c, c.own(n), first);
        for (int r = 0; r < 4; ++r) x[n][r] = where(seen, r, x[n][r]);
      }
    };
    general.weigh(scored.general, s, dp, lds.rows + at.state, c.sequence(), head, first, masked);
    for (int i = 0; i < 2 * TILES; ++i)
      exchange(at, lds.swap, i / 2, i % 2 * 2, scored.general.ds[i / 2][i % 2]);
  }
  for (int n = 0; !GENERAL && n < TILES; ++n) {
    unsigned seen = seen_bits(c, c.own(n), first);
    for (int r = 0; r < 4; ++r)
      scored.p[n][r] = where(seen, r, exp2(__builtin_fmaf(s[n][r], c.to_base_2, minus_lse[r])));
    for (int r = 0; r < 4; r += 2) {
      scored.ds[n][r / 2] = F::half_up(dp[n][r] * scored.p[n][r], dp[n][r + 1] * scored.p[n][r + 1]);
      exchange(at, lds.swap, n, r, scored.ds[n][r / 2]);
    }
  }
  for (int i = 0; i < kCarried; ++i)
    scored.columns[i] = read_unit(lds.columns + at.columns + i * ColumnsQ::kPairBytes);
}

// ---- the end ------------------------------------------------------------------------------------

// What is not owned lies outside the buffer and is not written. A width is a multiple of 8.
template <int tiles>
DEVICE void store(const Context &c, const Matrix &m, const Acc (&grad)[TILES][tiles], float factor) {
  for (int n = 0; n < TILES; ++n) {
    int first = c.first + n * 16;
    pin_scalar(first);
    auto to = step_buffer(m, first, c.s.keys - first);
    for (int t = 0; t < tiles; t += 2) {
      Quad x;
      for (int r = 0; r < 4; ++r) x[r] = F::nearest(grad[n][t][r] * factor, grad[n][t + 1][r] * factor);
      unsigned offset = buffer_offset(m, M::column(), element_of(t, 4 * M::part()));
      __builtin_amdgcn_raw_buffer_store_b128(x, to, offset, 0, 0);
    }
  }
}

extern "C" __global__ WORKGROUP(kThreads, 1) void attn_bwd_onepass(Params p) {
  __shared__ __attribute__((aligned(kLineBytes))) char memory[kLdsBytes];
  Buffers lds((Lds)memory);
  int blocks = (p.seqlen_k + kBlock - 1) / kBlock;
  Work work = work_of(workgroup_index(), blocks, 1, p.heads_k, p.batch, p.dies);
  work.block = blocks - 1 - work.block;  // the first keys are seen most
  Context c{sequence_of(p, work.batch), work.batch};
  make_scalar(c.s.keys);
  make_scalar(c.s.rows);
  int first_own = work.block * kBlock;
  if (first_own >= c.s.keys) return;
  c.first = first_own + wave_index() * kOwned;
  c.to_base_2 = p.scale * kLog2E;
  c.mine = rows_seeing(p, c.s, c.first, min(c.first + kOwned, c.s.keys) - 1);
  if (c.first + kOwned > c.s.keys) c.mine.all_low = 0x7fffffff;  // what has no key counts for nothing
  make_scalar(c.mine.all_low);
  make_scalar(c.mine.all_high);

  Fixed fixed;
  load_owned<kSteps, RowsQ>(c, fixed.k, k_of(params_again(), c.s, work.head));
  fence();
  load_owned<kStepsV, RowsO>(c, fixed.v, v_of(params_again(), c.s, work.head));
  fence();
  load_transposed(c, fixed, k_of(params_again(), c.s, work.head), first_own, (Lds)memory);
  fence();
  Gradients grad;
  for (int n = 0; n < TILES; ++n) {
    for (int t = 0; t < 2 * kSteps; ++t) grad.k[n][t] = Acc{0};
    for (int t = 0; t < 2 * kStepsV; ++t) grad.v[n][t] = Acc{0};
  }

  Seen block = rows_seeing(p, c.s, first_own, min(first_own + kBlock, c.s.keys) - 1);
  int start = block.low / kStepRows * kStepRows;
  int steps = max(block.high - start + kStepRows - 1, 0) / kStepRows;
  make_scalar(start);
  make_scalar(steps);
  int group = p.heads_q / p.heads_k, head = work.head * group;

  if (steps) {
    Walk walk{start, start + steps * kStepRows, steps, head + group, start, head, head, steps, head, steps + 1};
    const Params &again = params_again();
    Feed feed(q_of(again, c.s, head), dout_of(again, c.s, head), kRowsO, kColumnsO, kStates);
    walk.seek(c, feed);
    auto load = [&] {
      feed.prepare_rows();
      feed.prepare();
#pragma unroll
      for (int i = 0; i < Feed::kLoads; ++i) feed.load(i);
      feed.advance();
      feed.advance_states();
      walk.feed_on(c, feed);
    };
    auto store = [&](unsigned rows, unsigned columns, bool has_columns) {
#pragma unroll
      for (int i = 0; i < Feed::kStores; ++i) feed.store(i, rows, columns, has_columns);
    };
    load();
    barrier();  // K^T has been where tiles come
    store(lds.rows, lds.columns, !kLate);
    load();
    store(lds.rows_next, kLate ? lds.columns : lds.columns_next(), true);
    load();
    barrier();
    Places at;
    Scored scored;
    General general;
    if (GENERAL) general.begin(c.sequence(), c.first, head);
    begin(c, at, fixed, lds, scored, general, head, start);
    lds.turn_rows();
    barrier();

    walk.seek_sums(c);
    walk.sums_step = params_again().heads_q * (kSumRows * HEAD_DIM * 4);
    walk.sums -= walk.sums_step;
    walk.sums_bytes = 0;
    walk.turns = group * steps;
    do {
      Values values;
      Turn turn{c, at, fixed, grad, feed, scored, lds, walk, general, values};
      turn.run();
    } while (walk.turns);
#pragma unroll
    for (int i = 0; i < 4 * kShares; ++i) add(at, walk, scored.dq, i);
  }
  const Params &q = params_again();
  Sequence s = sequence_of(q, c.batch);
  store(c, keys_of(q.dk, s, work.head, q.dk_batch, q.dk_row, q.dk_head, q.head_dim), grad.k, q.scale);
  store(c, keys_of(q.dv, s, work.head, q.dv_batch, q.dv_row, q.dv_head, q.head_dim_v), grad.v, 1.0f);
}
