// One tile of the forward: its loads, its products in slots and its softmax. Each wavefront owns 32
// query rows; attn_fwd.hip describes the plan's constants.
#pragma once
#include "mma.h"
#include "../philox.h"
#include "descale.h"
#include "load.h"
#include "packed.h"
#include "score.h"
#ifdef MOD
#include "mods.h"
#endif
#if LISTS == 1
#include "walk.h"
#endif

#define PLAIN 0    // scale and masks only, a positive scale
#define GENERAL 1  // softcap, ALiBi, bias, any scale
#define DROPOUT 2  // the same with dropout
#define BIAS 3     // a bias alone, of q's number format, in rows on 8 bytes, and a positive scale
#define ALIBI 4    // ALiBi alone, and a positive scale
#define SCORE_MOD 5  // a score_mod alone, any scale
#define BOOL_BIAS 6  // a bias of bool alone, in rows on 4 bytes, and a positive scale
#define SOFTCAP 7    // a softcap alone, of at most 256, and a positive scale
#define FLOAT32_BIAS 8  // as BIAS, but of float32, in rows on 16 bytes
// Where K and V lie, if PAGED is not 0.
#define ANY_PAGES 1
#define WHOLE_GROUPS 2  // in pages of a multiple of kGroup keys, without padding before the first key
constexpr bool kAdds = SCORE == BIAS || SCORE == ALIBI || SCORE == FLOAT32_BIAS;  // what products can begin with
constexpr bool kHides = SCORE == BOOL_BIAS;                                       // scores that products leave
constexpr bool kCaps = SCORE == SOFTCAP;
constexpr bool kPlain = SCORE == PLAIN || kAdds || kHides || kCaps || SCORE == SCORE_MOD;

typedef Mma<DTYPE, MMA> M;
typedef M::Acc Acc;
#ifndef OUT_DTYPE
#define OUT_DTYPE DTYPE
#endif
constexpr bool kFloat8 = DTYPE == FLOAT8;
typedef Format<DTYPE>::Bits Bits;

constexpr int kRows = 32;                        // of a wavefront
constexpr int kColumns = kRows / MMA;            // rows that a lane has a column of
constexpr int kBlockQ = WAVES * kRows;
constexpr int kThreads = WAVES * kLanes;
constexpr int kKeyTiles = BLOCK_K / MMA;
constexpr int kDimTiles = HEAD_DIM_V / MMA;
constexpr int kParts = kLanes / MMA;             // lanes that share a column
constexpr int kSteps = HEAD_DIM / kUnit / kParts;  // of 16 bytes a lane along the head
constexpr int kFours = M::kRegisters / 4;        // groups of four consecutive rows in a product

// The products of a tile are computed in slots; the fragments of A for a slot are read one slot ahead.
// A slot is a step along the head for all keys or, after these, a pair of key slices for a few d.
// Within a slot, products use accumulators in turn, so that none waits for the previous one.
constexpr int kTogether = kDimTiles % 2 ? 3 : 2;  // accumulators of O^T in a slot
constexpr int kGroups = kDimTiles / kTogether;    // slots of a pair of key slices
constexpr int kSlices = BLOCK_K / M::kDepth;
// A step of 32 keys is two products, 64 clocks, too few to hide the reads of the next fragments if no
// other wavefront is on the SIMD. There a slot of keys has two steps (0.680 to 0.752 at 256 by the
// model).
constexpr int kStepsASlot = kKeyTiles == 1 && WAVES == 4 ? 2 : 1;
constexpr int kKeySlots = kSteps / kStepsASlot, kValueSlots = kSlices / 2 * kGroups;
constexpr int kSlots = kKeySlots + kValueSlots;
static_assert(kDimTiles % kTogether == 0, "every d is multiplied");
// A beat is one product, and the vector instructions that overlap with it.
constexpr int kStepBeats = 2 * kKeyTiles * kColumns;
constexpr int kKeyBeats = kStepsASlot * kStepBeats, kValueBeats = 2 * kTogether * kColumns;  // of a slot
constexpr int kAllKeyBeats = kKeySlots * kKeyBeats;
constexpr int kBeats = kAllKeyBeats + kValueSlots * kValueBeats;

typedef KeyLoads<BLOCK_K, HEAD_DIM, WAVES> Keys;
typedef ValueLoads<kSize, BLOCK_K, HEAD_DIM_V, M::kDepth, WAVES> Values;
constexpr int kLdsBytes = 2 * Keys::Tile::kBytes + 2 * Values::Tile::kBytes;

typedef Acc Scores[kKeyTiles][kColumns];
typedef Acc Output[kDimTiles][kColumns];
typedef Pair Probabilities[kSlices][kColumns];

// ---- what a wavefront knows -----------------------------------------------------------------------

constexpr float kLowest = -3.4028234663852886e38f;

// The base of a row may lag behind its maximum by this much, in powers of two, before accumulator and
// sum are rescaled to a new base. P stays below 2^8, where float32 and both 16-bit formats are as exact
// as below 1, and almost no tile needs a rescale. (FlashAttention 4 and HipKittens do the same.) A
// row's final result does not depend on it. Float8 ends at 240 = 2^7.9: there the largest P after a
// rescale is 2^7. P has 4 significant bits down to 2^-14, and reaches down to 2^-17; the lag is 0.9.
// Over 4,096 normally distributed scores a quarter of the tiles rescale some row of 32 (without a lag
// two thirds), over 16,384 a tenth (a third).
constexpr float kLag = kFloat8 ? 0.9f : 8.0f;
constexpr float kPeak = kFloat8 ? 7.0f : 0.0f;

// One row. `base` is subtracted before the exponential, kPeak below the maximum. It is finite even
// while a row has seen no key, because -inf - -inf would be NaN.
struct Row {
  float base = kLowest;
  float total = 0.0f;  // this lane's share of the sum of probabilities
};

struct Context {
  const Params &p;
  Sequence s;
  Work work;
  int head_k;
  Lds lds;
  float to_base_2[kColumns];  // what a finished score is multiplied by
  Seen seen;        // by the rows of this wavefront
  int row[kColumns];         // inside the sequence
  int first_key[kColumns];   // that the row sees
  int last_key[kColumns];
  unsigned long long seed;
#ifdef MOD
  ModPlace place;
#endif
};

// ---- loads --------------------------------------------------------------------------------------

// The loads of the loop: tiles of K and V, each at its own pace.
struct Unplaced {  // other than groups of pages
  METHOD void arrive() {}
  METHOD void place() {}
  METHOD void place_at_once() {}
};
#if PAGED == ANY_PAGES
struct Source : Unplaced {
  int next_k, next_v;  // the first keys of the tiles that come next
  int begin, end;      // of the keys
  unsigned width_k, width_v;  // bytes of a row
  Pages pages;
  Addresses<BLOCK_K> k, v;
  Keys keys;
  Values values;

  METHOD Source(const Params &p, const Context &c, int first, int begin, int end)
      : next_k(first),
        next_v(first),
        begin(begin),
        end(end),
        width_k(p.head_dim * kSize),
        width_v(p.head_dim_v * kSize),
        pages(p, c.s, c.head_k),
        values(width_v) {
    if (Keys::kAlone || p.head_dim == HEAD_DIM) return;
    // No other code writes the part that the head does not fill.
    for (int at = thread_index() * 16; at < 2 * Keys::Tile::kBytes; at += kThreads * 16)
      lds_write(c.lds + at, Quad{0, 0, 0, 0});
    barrier();
  }

  // A tile's pages are looked up while the tile before it is loaded.
  METHOD void begin_keys() { k.look(pages, next_k, begin, end); }
  METHOD void begin_values() { v.look(pages, next_v, begin, end); }
  METHOD void load_keys(int i, Lds to) {
    if (i == 0) k.arrive(pages, 0);
    keys.load(i, k, width_k, to);
  }
  METHOD unsigned load_values(int i) {
    if (i == 0) v.arrive(pages, 1);
    return values.load(i, v, width_v);
  }
  // `keys`: from this tile to the one after it.
  METHOD void end_keys(int keys) { next_k += kTurn * keys; }
  METHOD void end_values(int keys) { next_v += kTurn * keys; }
};
#else
constexpr bool kFewLoads = Keys::kLoads + Values::kLoads <= 16;  // of 32, 12 addends spilled

struct RowSource : Unplaced {
  Rows k, v;
  Keys keys;
  Values values;
  int bytes_k, bytes_v;  // of the tiles that are being loaded

  METHOD RowSource(const Params &p, const Context &c, int first, int begin, int end)
      : k(keys_of(p, c.head_k), c.s, first, begin, end),
        v(values_of(p, c.head_k), c.s, first, begin, end),
        keys(k),
        values(v) {}

  // Computed here, not where the loads are issued.
  METHOD void begin_keys() {
    bytes_k = k.bytes(BLOCK_K);
    pin_scalar(bytes_k);
  }
  METHOD void begin_values() {
    bytes_v = v.bytes(BLOCK_K);
    pin_scalar(bytes_v);
  }
  METHOD void load_keys(int i, Lds to) const { keys.load(i, k, bytes_k, to); }
  METHOD unsigned load_values(int i) const { return values.load(i, v, bytes_v); }
  // `keys`: from this tile to the one after it.
  METHOD void end_keys(int keys) {
    k.advance(keys, kFewLoads);
    pin_scalar(k.tile);
  }
  METHOD void end_values(int keys) {
    v.advance(keys, kFewLoads);
    pin_scalar(v.tile);
  }
};

#if PAGED == WHOLE_GROUPS
struct Source : RowSource {
  static_assert(kTurn > 0, "tiles are looked up from the first to the last");
  Groups<BLOCK_K> groups;
  const char *of_keys[BLOCK_K / kGroup];  // the tiles as the groups of keys have them
  // As a task's group of values has it. Values are loaded a tile later than keys.
  const char *of_values[Values::kTasks], *next_values[Values::kTasks];

  METHOD Source(const Params &p, const Context &c, int first, int begin, int end)
      : RowSource(p, c, first, begin, end), groups(p, c.s, c.head_k, first, end) {}

  METHOD void begin_keys() {
    RowSource::begin_keys();
    groups.look();
  }
  METHOD void arrive() { groups.arrive(); }
  // In time for the loads, which come at least 5 states after (`load_to_lds`).
  METHOD void place() {
    for (int group = 0; group < groups.kGroups; ++group) of_keys[group] = groups.at(group);
    for (int task = 0; task < Values::kTasks; ++task) {
      of_values[task] = next_values[task];
      next_values[task] = groups.at(groups.kOfValues + values.group(task));
    }
  }
  METHOD void place_at_once() {
    arrive();
    place();
    asm volatile("s_nop 4");
  }
  METHOD void load_keys(int i, Lds to) {
    k.tile = of_keys[keys.group(i)];
    RowSource::load_keys(i, to);
  }
  METHOD unsigned load_values(int i) {
    v.tile = of_values[i / kUnit];
    return RowSource::load_values(i);
  }
  METHOD void end_keys(int keys) { k.left -= keys; }
  METHOD void end_values(int keys) { v.left -= keys; }
};
#else
typedef RowSource Source;
#endif
#endif

DEVICE void load_queries(const Context &c, Quad (&q)[kColumns][kSteps]) {
  for (int n = 0; n < kColumns; ++n) {
    const Bits *from = (const Bits *)c.p.q + c.s.row_batch * c.p.q_batch +
                       (c.s.row0 + c.row[n]) * c.p.q_row + c.work.head * c.p.q_head;
    for (int i = 0; i < kSteps; ++i) {
      int d = (i * kParts + M::part()) * kUnit;
      q[n][i] = Quad{0, 0, 0, 0};
      if (c.row[n] < c.s.rows && d < c.p.head_dim) q[n][i] = *(const Quad *)(from + d);
    }
  }
}

// ---- scales of float8 -----------------------------------------------------------------------------

// The factors of a tile's scores, and of its values. If each key has its own scale, lane i has that of
// key i; then `v` is the largest of them, and `value` is relative to it.
struct Scales {
  float k = 1.0f, v = 1.0f;
  float key = 1.0f, value = 1.0f;
};

// The scales of tiles. In a PLAIN plan each tile lies in one block of rows; in others it may not.
struct Descale {
  KeyScales tiles;  // a lane's: of the tile that comes so many tiles after one

  // Of the tile-th tile that is visited, of keys `first` ... and below `end`.
  METHOD Scales of(const Context &c, int tile, int first, int end) {
    if (kPlain) return of_tile(c, tile, first);
    return of_keys(c, min(first + lane_index() % BLOCK_K, end - 1));
  }

  METHOD Scales of_tile(const Context &c, int tile, int first) {
    if (tile % kLanes == 0)
      tiles = key_scales(params_again(), c.s, c.head_k, max(first - lane_index() * BLOCK_K, 0));
    return Scales{from_any_lane(tiles.k, tile % kLanes), from_any_lane(tiles.v, tile % kLanes)};
  }

  METHOD Scales of_keys(const Context &c, int key) {
    KeyScales mine = key_scales(params_again(), c.s, c.head_k, key);
    float largest = mine.v;
    for (int bit = 1; bit < kLanes; bit *= 2)
      largest = __builtin_fmaxf(largest, from_lane_xor(largest, bit));
    return Scales{1.0f, largest, mine.k, mine.v / largest};
  }
};

// ---- one tile -----------------------------------------------------------------------------------

constexpr int kKeyFragments = kStepsASlot * kKeyTiles;
constexpr int kFragments = kKeyFragments > kTogether ? kKeyFragments : kTogether;

// A of one slot.
struct Fragments {
  Quad x[kFragments];

  METHOD void read_keys(Lds keys, int slot) {
    for (int i = 0; i < kKeyFragments; ++i) {
      int step = slot * kStepsASlot + i / kKeyTiles, t = i % kKeyTiles;
      x[i] = lds_read(keys + Keys::Tile::place(t * MMA + M::column(), step * kParts + M::part()));
    }
  }
  METHOD void read_values(Lds values, int slot) {
    int pair = slot / kGroups, d = slot % kGroups * kTogether * MMA;
    for (int t = 0; t < kTogether; ++t)
      x[t] = lds_read(values + Values::Tile::place(d + t * MMA + M::column(),
                                                   pair * kParts + M::part()));
  }
};

// Other work during the products: none.
struct Nothing {
  METHOD void operator()(int) {}
};

// S^T += K Q^T along 16 bytes a lane of the head, or twice as many. `beside` is called after every
// product.
template <typename Beside = Nothing>
DEVICE void multiply_keys(Scores &s, const Fragments &k, const Quad (&q)[kColumns][kSteps], int slot,
                          Beside beside = Beside()) {
#pragma unroll
  for (int i = 0; i < kKeyBeats; ++i) {
    int step = i / kStepBeats, half = i / (kStepBeats / 2) % 2;
    int t = i / kColumns % kKeyTiles, n = i % kColumns;
    Quad a = k.x[step * kKeyTiles + t], b = q[n][slot * kStepsASlot + step];
    bool first = slot + step + half == 0;
    s[t][n] = M::mma(half ? a.zw : a.xy, half ? b.zw : b.xy, first && !kAdds ? Acc{0} : s[t][n]);
    beside(slot * kKeyBeats + i);
  }
}

// O^T += V^T P^T of two key slices and a few d.
template <typename Beside = Nothing>
DEVICE void multiply_values(Output &o, const Fragments &v, const Probabilities &p, int slot,
                            Beside beside = Beside()) {
#pragma unroll
  for (int i = 0; i < kValueBeats; ++i) {
    int half = i / (kValueBeats / 2), t = i / kColumns % kTogether, n = i % kColumns;
    int slice = slot / kGroups * 2 + half, d = slot % kGroups * kTogether + t;
    o[d][n] = M::mma(half ? v.x[t].zw : v.x[t].xy, p[slice][n], o[d][n]);
    beside(kAllKeyBeats + slot * kValueBeats + i);
  }
}

// A lane converts its scores to probabilities one after the other, in the order in which the products
// use them. This is the place of one.
constexpr int kElements = kKeyTiles * kColumns * M::kRegisters;
struct Element {
  int n, t, r;        // column, product and register of the score
  int slice, part;    // of P

  METHOD Element(int number) {
    constexpr int kFoursHeld = M::kHeld / 4;
    int four = number / 4, of_slice = four % (kColumns * kFoursHeld);
    slice = four / (kColumns * kFoursHeld);
    n = of_slice / kFoursHeld;
    part = of_slice % kFoursHeld;
    int all = slice * kFoursHeld + part;
    t = all / kFours;
    r = all % kFours * 4 + number % 4;
  }
};

DEVICE float probability(const Context &c, const Scales &scales, const Scores &s,
                         const Row (&row)[kColumns], int number) {
  Element e(number);
  return exp2(__builtin_fmaf(s[e.t][e.n][e.r], c.to_base_2[e.n] * scales.k, -row[e.n].base));
}

// Four probabilities, the last of which is `number`, as an operand.
DEVICE void operand(const Context &c, const Scales &scales, const float (&made)[kElements], int first,
                    int number, Probabilities &p) {
  Element e(number);
  int n = e.n, t = e.t, j = e.r / 4;
  float x[4];
  for (int i = 0; i < 4; ++i) x[i] = made[number - 3 + i];
  if (SCORE == DROPOUT) {
    // Opaque; otherwise the compiler keeps every round's keys in scalar registers: 40 of them spilled.
    unsigned long long seed = c.seed;
    pin_scalar(seed);
    const Params &a = params_again();
    int key = first + t * MMA + M::row(4 * j) + a.k_start;
    Draws draws = philox(key / 4, c.row[n] + a.q_start, c.work.head + a.head_start,
                         c.work.batch + a.batch_start, seed);
    for (int i = 0; i < 4; ++i)
      if (draws.word[i] >= a.dropout_threshold) x[i] = 0.0f;
  }
  if (kFloat8 && !kPlain)
    for (int i = 0; i < 4; ++i) x[i] *= from_lane(scales.value, t * MMA + M::row(4 * j + i));
  M::put(p[e.slice][n], e.part, x);
}

// Extends the largest score of each column that this lane holds by two more: one instruction.
constexpr int kPairs = kKeyTiles * M::kRegisters / 2;
DEVICE void raise_largest(const Scores &s, int pair, float (&largest)[kColumns]) {
  int t = pair * 2 / M::kRegisters, r = pair * 2 % M::kRegisters;
  for (int n = 0; n < kColumns; ++n)
    for (int i = r; i < r + 2; ++i)
      largest[n] = __builtin_fmaxf(pair || i ? largest[n] : s[0][n][0], s[t][n][i]);
}

DEVICE void find_largest(const Scores &s, float (&largest)[kColumns]) {
  for (int pair = 0; pair < kPairs; ++pair) raise_largest(s, pair, largest);
}

// What the accumulator is multiplied by before the products with the next tile's values.
struct Rescale {
  bool pending = false;
  float factor[kColumns];

  METHOD void apply(Output &o) {
    if (!pending) return;
    for (int n = 0; n < kColumns; ++n)
      for (int t = 0; t < kDimTiles; ++t) o[t][n] *= factor[n];
    pending = false;
  }
};

// How far a score exceeds the base of its row, in powers of two.
DEVICE float above(float score, float to_base_2, const Row &row) {
  return __builtin_fmaf(score, to_base_2, -row.base);
}

// Raises the base of a row whose maximum has outgrown it by kLag, and rescales its sum. Each row is on
// its own, so its bits do not depend on the wavefront's other rows. Returns the factors that bring the
// accumulator to the new base, and to `next`, the scale of the coming values.
DEVICE void raise(const Context &c, const Scales &scales, const Scales &next,
                  const float (&largest)[kColumns], Row (&row)[kColumns], Rescale &rescale) {
  bool outgrown = false;
  for (int n = 0; n < kColumns; ++n)
    outgrown |= above(largest[n], c.to_base_2[n] * next.k, row[n]) > kPeak + kLag;
  rescale.pending = __builtin_amdgcn_ballot_w64(outgrown) || scales.v != next.v;
  if (!rescale.pending) return;
  for (int n = 0; n < kColumns; ++n) {
    // With the same operations as above, so that what a lane finds agrees with what its row does.
    float highest = M::column_max(largest[n]), to_base_2 = c.to_base_2[n] * next.k;
    bool outgrows = above(highest, to_base_2, row[n]) > kPeak + kLag;
    float raised = outgrows ? highest * to_base_2 - kPeak : row[n].base;
    float factor = exp2(row[n].base - raised);
    row[n].base = raised;
    row[n].total *= factor;
    if (kFloat8) factor *= scales.v / next.v;
    rescale.factor[n] = factor;
  }
}
