// One tile of the forward: what feeds it, its products in slots, softmax and score terms. Wavefronts
// own 32 query rows each; the plan's constants are as attn_fwd.hip says.
#pragma once
#include "mma.h"
#include "../philox.h"
#include "descale.h"
#include "load.h"
#include "schedule.h"
#include "score.h"

#define PLAIN 0    // scale and mask only, a positive scale
#define GENERAL 1  // softcap, ALiBi, bias, any scale
#define DROPOUT 2  // the same with dropout

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

// The products of a tile are made in slots, each with the fragments of A that one read ahead brings:
// a step along the head for all keys, then pairs of key slices for a few d. Within a slot, products
// go to accumulators in turn, so that none waits for the one before.
constexpr int kTogether = kDimTiles % 2 ? 3 : 2;  // accumulators of O^T in a slot
constexpr int kGroups = kDimTiles / kTogether;    // slots of a pair of key slices
constexpr int kSlices = BLOCK_K / M::kDepth;
constexpr int kKeySlots = kSteps, kValueSlots = kSlices / 2 * kGroups;
constexpr int kSlots = kKeySlots + kValueSlots;
static_assert(kDimTiles % kTogether == 0, "every d is multiplied");

typedef KeyLoads<BLOCK_K, HEAD_DIM, WAVES> Keys;
typedef ValueLoads<kSize, BLOCK_K, HEAD_DIM_V, M::kDepth, WAVES> Values;
constexpr int kLdsBytes = 2 * Keys::Tile::kBytes + 2 * Values::Tile::kBytes;

typedef Acc Scores[kKeyTiles][kColumns];
typedef Acc Output[kDimTiles][kColumns];
typedef Pair Probabilities[kSlices][kColumns];

// ---- what a wavefront knows -----------------------------------------------------------------------

constexpr float kLowest = -3.4028234663852886e38f;

// The maximum that probabilities are taken against may lag behind by this much, in powers of two,
// before accumulator and sum are brought to a new one: P stays below 2^8, where float32 and both
// 16-bit formats are as exact as below 1, and almost every tile goes without a rescale. (FlashAttention
// 4 and HipKittens do the same.) A row's final result does not depend on it.
// Float8 ends at 240 = 2^7.9: there P is 2^7 where it is largest, which leaves it 2^-14 at 4 significant
// bits and 2^-17 at all, and 0.9 to lag by. Over 4,096 normally distributed scores a quarter of the tiles
// rescale some row of 32, without a lag two thirds; over 16,384 a tenth and a third.
constexpr float kLag = kFloat8 ? 0.9f : 8.0f;
constexpr float kPeak = kFloat8 ? 7.0f : 0.0f;

// One row. `base` is what exponents are taken against, kPeak below the maximum: it is finite even while
// a row has seen nothing, as -inf - -inf would be NaN.
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
};

// ---- loads --------------------------------------------------------------------------------------

// What feeds the loop: tiles of K and V, each at its own pace.
#if PAGED
struct Source {
  const Context &c;
  int next_k, next_v;  // the first keys of the tiles that come next
  int begin, end;      // of the keys
  Offsets<BLOCK_K> k, v;
  Values values;

  METHOD Source(const Params &p, const Context &c, int first, int begin, int end)
      : c(c), next_k(first), next_v(first), begin(begin), end(end) {
    if (p.head_dim == HEAD_DIM) return;
    // Nobody else writes what the head does not fill.
    for (int at = thread_index() * 16; at < 2 * Keys::Tile::kBytes; at += kThreads * 16)
      lds_write(c.lds + at, Quad{0, 0, 0, 0});
    barrier();
  }

  METHOD void begin_keys() {
    const Params &p = params_again();
    k = Offsets<BLOCK_K>(p, c.s, keys_of(p, c.head_k), next_k, begin, end);
  }
  METHOD void begin_values() {
    const Params &p = params_again();
    v = Offsets<BLOCK_K>(p, c.s, values_of(p, c.head_k), next_v, begin, end);
  }
  METHOD void load_keys(int i, Lds to) const {
    Keys::load(i, k, keys_of(params_again(), c.head_k), to);
  }
  METHOD unsigned load_values(int i) const {
    return Values::load(i, v, values_of(params_again(), c.head_k));
  }
  METHOD void end_keys() { next_k += kTurn * BLOCK_K; }
  METHOD void end_values() { next_v += kTurn * BLOCK_K; }
};
#else
constexpr bool kFewLoads = Keys::kLoads + Values::kLoads <= 16;  // of 32, 12 addends spilled

struct Source {
  Rows k, v;
  Keys keys;
  Values values;
  int bytes_k, bytes_v;  // of the tiles that are being loaded

  METHOD Source(const Params &p, const Context &c, int first, int begin, int end)
      : k(keys_of(p, c.head_k), c.s, first, begin, end),
        v(values_of(p, c.head_k), c.s, first, begin, end),
        keys(k),
        values(v) {}

  METHOD void begin_keys() { bytes_k = k.bytes(BLOCK_K); }
  METHOD void begin_values() { bytes_v = v.bytes(BLOCK_K); }
  METHOD void load_keys(int i, Lds to) const { keys.load(i, k, bytes_k, to); }
  METHOD unsigned load_values(int i) const { return values.load(i, v, bytes_v); }
  METHOD void end_keys() { k.advance(BLOCK_K, kFewLoads); }
  METHOD void end_values() { v.advance(BLOCK_K, kFewLoads); }
};
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

// What the scores of a tile are multiplied by, and its values. Those of single keys are in the lanes,
// lane i having key i: there `v` is their largest, and `value` relative to it.
struct Scales {
  float k = 1.0f, v = 1.0f;
  float key = 1.0f, value = 1.0f;
};

// The scales of tiles. A PLAIN plan's tiles lie in one block of rows each, others may not.
struct Descale {
  KeyScales tiles;  // a lane's: of the tile that comes so many tiles after one

  // Of the tile-th tile that is visited, of keys `first` ... and below `end`.
  METHOD Scales of(const Context &c, int tile, int first, int end) {
    if (SCORE == PLAIN) return of_tile(c, tile, first);
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

constexpr int kFragments = kKeyTiles > kTogether ? kKeyTiles : kTogether;

// A of one slot.
struct Fragments {
  Quad x[kFragments];

  METHOD void read_keys(Lds keys, int step) {
    for (int t = 0; t < kKeyTiles; ++t)
      x[t] = lds_read(keys + Keys::Tile::place(t * MMA + M::column(), step * kParts + M::part()));
  }
  METHOD void read_values(Lds values, int slot) {
    int pair = slot / kGroups, d = slot % kGroups * kTogether * MMA;
    for (int t = 0; t < kTogether; ++t)
      x[t] = lds_read(values + Values::Tile::place(d + t * MMA + M::column(),
                                                   pair * kParts + M::part()));
  }
};

// S^T += K Q^T along 16 bytes a lane of the head.
DEVICE void multiply_keys(Scores &s, const Fragments &k, const Quad (&q)[kColumns][kSteps], int step) {
  for (int t = 0; t < kKeyTiles; ++t)
    for (int n = 0; n < kColumns; ++n)
      s[t][n] = M::mma(k.x[t].xy, q[n][step].xy, step ? s[t][n] : Acc{0});
  for (int t = 0; t < kKeyTiles; ++t)
    for (int n = 0; n < kColumns; ++n) s[t][n] = M::mma(k.x[t].zw, q[n][step].zw, s[t][n]);
}

// O^T += V^T P^T of two key slices and a few d.
DEVICE void multiply_values(Output &o, const Fragments &v, const Probabilities &p, int slot) {
  int slice = slot / kGroups * 2, d = slot % kGroups * kTogether;
  for (int t = 0; t < kTogether; ++t)
    for (int n = 0; n < kColumns; ++n) o[d + t][n] = M::mma(v.x[t].xy, p[slice][n], o[d + t][n]);
  for (int t = 0; t < kTogether; ++t)
    for (int n = 0; n < kColumns; ++n) o[d + t][n] = M::mma(v.x[t].zw, p[slice + 1][n], o[d + t][n]);
}

// Four probabilities of the n-th column, and their share of the sum.
DEVICE void exponentiate(const Context &c, const Scales &scales, const Scores &s, Row &row, int first,
                         int n, int four, Pair &to, int part) {
  int t = four / kFours, j = four % kFours;
  float x[4];
  for (int i = 0; i < 4; ++i) {
    x[i] = exp2(__builtin_fmaf(s[t][n][4 * j + i], c.to_base_2[n] * scales.k, -row.base));
    row.total += x[i];
  }
  // Not later: the compiler would move the additions out of the products' shadow.
  pin(row.total);
  if (SCORE == DROPOUT) {
    // Opaque, or the compiler keeps every round's keys in scalar registers: 40 of them spilled.
    unsigned long long seed = c.seed;
    pin_scalar(seed);
    const Params &p = params_again();
    int key = first + t * MMA + M::row(4 * j) + p.k_start;
    Draws draws = philox(key / 4, c.row[n] + p.q_start, c.work.head + p.head_start,
                         c.work.batch + p.batch_start, seed);
    for (int i = 0; i < 4; ++i)
      if (draws.word[i] >= p.dropout_threshold) x[i] = 0.0f;
  }
  if (kFloat8 && SCORE != PLAIN)
    for (int i = 0; i < 4; ++i) x[i] *= from_lane(scales.value, t * MMA + M::row(4 * j + i));
  M::put(to, part, x);
}

// P^T of one key slice, and its share of the sum.
DEVICE void exponentiate(const Context &c, const Scales &scales, const Scores &s,
                         Row (&row)[kColumns], int first, int slice, Probabilities &p) {
  constexpr int kFoursHeld = M::kHeld / 4;
#pragma unroll
  for (int i = 0; i < kColumns * kFoursHeld; ++i) {
    int n = i / kFoursHeld, part = i % kFoursHeld, four = slice * kFoursHeld + part;
    exponentiate(c, scales, s, row[n], first, n, four, p[slice][n], part);
  }
}

// Goes on with the largest score of each column that this lane holds, over one product: tile 0 begins.
DEVICE void raise_largest(const Scores &s, int tile, float (&largest)[kColumns]) {
  for (int n = 0; n < kColumns; ++n)
    for (int r = 0; r < M::kRegisters; ++r)
      largest[n] = __builtin_fmaxf(tile + r ? largest[n] : s[0][n][0], s[tile][n][r]);
}

DEVICE void find_largest(const Scores &s, float (&largest)[kColumns]) {
  for (int t = 0; t < kKeyTiles; ++t) raise_largest(s, t, largest);
}

// Every score becomes f(score, key) of its register, `key` counted from `key0`. Four at a time: all
// together would take more registers than there are.
template <typename F>
DEVICE void each(Scores &s, int n, int key0, F f) {
#pragma unroll
  for (int i = 0; i < kKeyTiles * M::kRegisters; ++i) {
    int t = i / M::kRegisters, r = i % M::kRegisters;
    s[t][n][r] = f(s[t][n][r], key0 + t * MMA + r / 4 * 8 + r % 4);
    if (i % 4 == 3) fence();
  }
}

// What lies between the product and the softmax: score terms and mask. `largest` is that of the plain
// product, and becomes that of the result.
DEVICE void finish_scores(const Context &c, const Scales &scales, Scores &s, int first,
                          float (&largest)[kColumns]) {
  if (SCORE != PLAIN)
    for (int n = 0; n < kColumns; ++n) {
      // Opaque, or the compiler keeps every register's distance through the loop: 29 of them spilled.
      int key0 = first + M::row(0);
      pin(key0);
      const Params &p = params_again();
      int row = min(c.row[n], c.s.rows - 1), last = c.s.keys - 1;
      Terms terms = terms_of(p, c.work.batch, c.work.head, row);
      if (kFloat8) {
        float scale = query_scale(p, c.s, c.head_k, row);
        terms.scale *= scale;
        terms.inverse *= scale;
        each(s, n, key0, [&](float x, int key) { return x * from_lane(scales.key, key - first); });
      }
      if (p.softcap > 0.0f) {
        float unused;
        each(s, n, key0, [&](float x, int) { return softcapped(terms, x, unused); });
      } else {
        each(s, n, key0, [&](float x, int) { return x * terms.scale; });
      }
      if (p.alibi_slopes)
        each(s, n, key0, [&](float x, int key) { return x + alibi(terms, key - row - c.s.shift); });
      int size = p.bias_type ? size_of_bias(p.bias_type) : 0;
      if (size == 1)
        each(s, n, key0, [&](float x, int key) { return x + bias_of<1>(terms, min(key, last)); });
      else if (size == 2)
        each(s, n, key0, [&](float x, int key) { return x + bias_of<2>(terms, min(key, last)); });
      else if (size == 4)
        each(s, n, key0, [&](float x, int key) { return x + bias_of<4>(terms, min(key, last)); });
    }
  bool cut = first < c.seen.all_low || first + BLOCK_K > c.seen.all_high;
  if (cut)
    for (int n = 0; n < kColumns; ++n)
      each(s, n, first + M::row(0), [&](float x, int key) {
        return key > c.last_key[n] || key < c.first_key[n] ? -INFINITY_F : x;
      });
  if (SCORE != PLAIN || cut) find_largest(s, largest);
}

// Brings accumulator and sum to a new base where a maximum has outgrown the old one by kLag, of that row
// alone, whose bits are then the same whatever the wavefront's other rows are; and the accumulator to the
// scale of the values that come, `next`.
DEVICE void raise(const Context &c, const Scales &scales, const Scales &next,
                  const float (&largest)[kColumns], Row (&row)[kColumns], Output &o) {
  bool outgrown = false;
  for (int n = 0; n < kColumns; ++n)
    outgrown |= largest[n] * (c.to_base_2[n] * next.k) > row[n].base + (kPeak + kLag);
  if (!__builtin_amdgcn_ballot_w64(outgrown) && scales.v == next.v) return;
  for (int n = 0; n < kColumns; ++n) {
    float highest = M::column_max(largest[n] * (c.to_base_2[n] * next.k)) - kPeak;
    float raised = highest > row[n].base + kLag ? highest : row[n].base;
    float factor = exp2(row[n].base - raised);
    row[n].base = raised;
    row[n].total *= factor;
    if (kFloat8) factor *= scales.v / next.v;
    for (int t = 0; t < kDimTiles; ++t) o[t][n] *= factor;
  }
}
