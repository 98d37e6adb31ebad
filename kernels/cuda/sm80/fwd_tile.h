// One tile of the forward: its products, softmax and score terms. A warp owns ROWS query rows, in bands
// of 16; the plan's constants are as attn_fwd.cu says.
#pragma once
#include "load.h"
#include "schedule.h"
#include "../row.h"
#include "../../philox.h"
#include "../../score.h"
#ifdef MOD
#include "../mods.h"
#endif

#define PLAIN 0    // scale and mask only, a positive scale
#define GENERAL 1  // softcap, ALiBi, bias, any scale
#define DROPOUT 2  // the same with dropout

constexpr int kThreads = WARPS * kLanes;
constexpr int kBlockQ = WARPS * ROWS;
constexpr int kBands = ROWS / 16;             // rows of one matrix product
constexpr int kKeyTiles = BLOCK_K / 8;        // columns of one
constexpr int kDimTiles = HEAD_DIM_V / 8;
constexpr int kSteps = HEAD_DIM / 16;         // its inner dimension, along the head
constexpr int kSlices = BLOCK_K / 16;         // and along the keys

typedef Tile<kBlockQ, HEAD_DIM> Queries;
typedef Tile<BLOCK_K, HEAD_DIM> Keys;
typedef Tile<BLOCK_K, HEAD_DIM_V> Values;
typedef Tile<kBlockQ, HEAD_DIM_V> Outputs;
typedef Source<Keys, Values, kThreads> Tiles;

constexpr int kStageBytes = Keys::kBytes + Values::kBytes;
// Queries that go on to registers pass through the stage that is filled last.
constexpr bool kPassing = Q_IN_REGISTERS && Queries::kBytes <= kStageBytes;
constexpr int kQueriesAt = (kPassing ? STAGES - 1 : STAGES) * kStageBytes;
constexpr int kNotesAt = STAGES * kStageBytes + (kPassing ? 0 : Queries::kBytes);
constexpr int kNotes = 48 + Tiles::kNotes;  // of a warp
constexpr int kSharedBytes = kNotesAt + WARPS * kNotes;
static_assert(kSharedBytes == SHARED_BYTES, "as the plan says");
static_assert(kNotesAt >= Outputs::kBytes, "the output leaves through it");

typedef float Scores[kBands][kKeyTiles][4];
typedef float Output[kBands][kDimTiles][4];
typedef unsigned Probabilities[kBands][4];  // of one slice: A of the second product

typedef Row Rows[kBands][2];  // rows group and group + 8 of each band

// Where the rows of a warp are, and whose.
struct Place {
  int first_row, rows, keys, shift;  // inside the sequence; of which are in use; as in Sequence

  // The row of registers 2 half and 2 half + 1.
  METHOD int row(int band, int half) const {
    return first_row + 16 * band + 8 * half + lane_index() / 4;
  }
};
struct Owner {
  int batch, head, unused[2];
};

// What the loop knows. All but the scale waits in shared memory until it is wanted, each warp's own
// copy: with it, and what the compiler makes of it ahead of the loop, registers were spilled.
struct Warp {
  const Params &p;
  Shared notes;
  float to_base_2;  // what a finished score is multiplied by

  METHOD Warp(const Params &p, Shared shared) : p(p) {
    notes = shared + kNotesAt + wave_index() * kNotes;
    to_base_2 = SCORE == PLAIN ? p.scale * kLog2E : kLog2E;
  }
  METHOD void note(const Seen &seen, const Place &place, const Owner &owner) const {
    store_shared(notes, seen);
    store_shared(notes + 16, place);
    store_shared(notes + 32, owner);
    __syncwarp();
  }
  METHOD Seen seen() const { return load_shared<Seen>(notes); }  // by the rows of the warp
  METHOD Place place() const { return load_shared<Place>(notes + 16); }
  METHOD Owner owner() const { return load_shared<Owner>(notes + 32); }
};

// ---- products -----------------------------------------------------------------------------------

// Products are made in slots, each with one fragment of B (16 x 16 elements), read so many slots ahead
// (at 256 one is 2 % faster than two).
constexpr int kAhead = HEAD_DIM > 128 ? 1 : 2;

// Q: all of it in registers, or read again for every tile, one step along the head ahead.
#if Q_IN_REGISTERS
struct Query {
  unsigned q[kSteps][kBands][4];

  METHOD void find(Shared lane) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int b = 0; b < kBands; ++b) ldmatrix(q[step][b], Queries::at(lane, 16 * b, 2 * step));
  }
  METHOD void read(int) {}
  METHOD const unsigned (&operator()(int step, int band) const)[4] { return q[step][band]; }
};
#else
struct Query {
  Shared lane;
  unsigned q[2][kBands][4];

  METHOD void find(Shared at) {
    lane = at;
    pin(lane);  // or it stays in two registers, with and without the offset
  }
  METHOD void read(int step) {
    if (step == kSteps) return;
#pragma unroll
    for (int b = 0; b < kBands; ++b) ldmatrix(q[step % 2][b], Queries::at(lane, 16 * b, 2 * step));
  }
  METHOD const unsigned (&operator()(int step, int band) const)[4] { return q[step % 2][band]; }
};
#endif

// After which slot the next tile is asked for. Not later where registers are short: behind slot 8 of a
// head of 128 something spills (-6 %); at 256 slot 12 is 3 % faster than slot 1.
constexpr int kLoadSlot = HEAD_DIM > 128 ? 12 : 1;

// S = Q K^T; `load` asks for the next tile.
template <class F>
DEVICE void gemm_qk(Scores &s, Query &q, Shared keys, F load) {
  constexpr int kPairs = kKeyTiles / 2, kSlots = kSteps * kPairs;
  Shared lane = Keys::along(keys);
  unsigned k[kAhead + 1][4];
#pragma unroll
  for (int b = 0; b < kBands; ++b)
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int r = 0; r < 4; ++r) s[b][t][r] = 0.0f;
  q.read(0);
#pragma unroll
  for (int slot = -kAhead; slot < kSlots; ++slot) {
    int step = slot / kPairs, pair = slot % kPairs, next = slot + kAhead;
    if (next < kSlots)
      ldmatrix(k[next % (kAhead + 1)], Keys::at(lane, next % kPairs * 16, next / kPairs * 2));
    if (slot < 0) continue;
    if (pair == 0) q.read(step + 1);
    const unsigned(&x)[4] = k[slot % (kAhead + 1)];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int b = 0; b < kBands; ++b)
        mma<DTYPE>(s[b][2 * pair + n], q(step, b), x[2 * n], x[2 * n + 1]);
    if (slot == kLoadSlot) load();
  }
}

// Drops of one tile of 8 keys, the first of them `key`, for the rows of one band: x[half][i]. Two
// neighboring lanes hold the four keys of one draw; one draws for row group, the other for group + 8.
DEVICE void drop(const Warp &w, int band, int key, float (&x)[2][2]) {
  const Params &p = w.p;
  Place place = w.place();
  Owner owner = w.owner();
  unsigned long long seed = *(const unsigned long long *)p.seed;
  int odd = lane_index() % 2;
  Draws draws = philox((key + p.k_start) / 4 + lane_index() % 4 / 2, place.row(band, odd) + p.q_start,
                       owner.head + p.head_start, owner.batch + p.batch_start, seed);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned mine = odd ? draws.word[2 + i] : draws.word[i];
    unsigned other = __shfl_xor_sync(kAllLanes, odd ? draws.word[i] : draws.word[2 + i], 1);
    unsigned upper = odd ? other : mine, lower = odd ? mine : other;
    if (upper >= p.dropout_threshold) x[0][i] = 0.0f;
    if (lower >= p.dropout_threshold) x[1][i] = 0.0f;
  }
}

// The probabilities of one slice are made in parts, of one band and 8 keys each: two registers of A.
constexpr int kParts = 2 * kBands;

DEVICE void exponentiate(const Warp &w, const Scores &s, Rows &rows, int first, int slice, int part,
                         Probabilities &p) {
  int band = part / 2, tile = part % 2;
  float x[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Row &row = rows[band][half];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      x[half][i] = exp2(__builtin_fmaf(s[band][2 * slice + tile][2 * half + i], w.to_base_2, -row.base));
      row.total += x[half][i];
    }
  }
  if (SCORE == DROPOUT) drop(w, band, first + 16 * slice + 8 * tile, x);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    p[band][2 * tile + half] = Format<DTYPE>::nearest(x[half][0], x[half][1]);
}

// O += P V, where the exponentials of a slice lie between the products of the one before.
DEVICE void gemm_pv(const Warp &w, Output &o, const Scores &s, Rows &rows, Shared values,
                            int first) {
  constexpr int kPairs = kDimTiles / 2, kSlots = kSlices * kPairs;
  Shared lane = Values::down(values);
  unsigned v[kAhead + 1][4];
  Probabilities p[2];
#pragma unroll
  for (int part = 0; part < kParts; ++part) exponentiate(w, s, rows, first, 0, part, p[0]);
#pragma unroll
  for (int slot = -kAhead; slot < kSlots; ++slot) {
    int slice = slot / kPairs, pair = slot % kPairs, next = slot + kAhead;
    if (next < kSlots)
      ldmatrix_transposed(v[next % (kAhead + 1)],
                          Values::at(lane, next / kPairs * 16, next % kPairs * 2));
    if (slot < 0) continue;
    const unsigned(&x)[4] = v[slot % (kAhead + 1)];
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int b = 0; b < kBands; ++b)
        mma<DTYPE>(o[b][2 * pair + n], p[slice % 2][b], x[2 * n], x[2 * n + 1]);
    if (slice + 1 == kSlices) continue;
#pragma unroll
    for (int part = 0; part < kParts; ++part)
      if (part * kPairs / kParts == pair)
        exponentiate(w, s, rows, first, slice + 1, part, p[(slice + 1) % 2]);
  }
}

// ---- what lies between the products -------------------------------------------------------------

// Every score of one row becomes f(score, key), the keys counted from `first`.
template <typename F>
DEVICE void each(Scores &s, int band, int half, int first, F f) {
  int key0 = first + lane_index() % 4 * 2;
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float &x = s[band][t][2 * half + i];
      x = f(x, key0 + 8 * t + i);
    }
}

DEVICE void add_terms(const Warp &w, Scores &s, int first) {
  const Params &p = w.p;
  Place place = w.place();
  Owner owner = w.owner();
  int last = place.keys - 1;
#pragma unroll
  for (int b = 0; b < kBands; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int row = min(place.row(b, h), place.rows - 1), diagonal = row + place.shift;
      Terms terms = terms_of(p, owner.batch, owner.head, row);
      if (p.softcap > 0.0f) {
        float unused;
        each(s, b, h, first, [&](float x, int) { return softcapped(terms, x, unused); });
      } else {
        each(s, b, h, first, [&](float x, int) { return x * terms.scale; });
      }
#ifdef MOD
      ModPlace at(p, owner.batch, owner.head);
#endif
#ifdef HAS_SCORE_MOD
      int key0 = first + lane_index() % 4 * 2;
      each(s, b, h, first, [&](float x, int key) { return modified(at, x, row, key0, 0, key - key0); });
#endif
      if (p.alibi_slopes)
        each(s, b, h, first, [&](float x, int key) { return x + alibi(terms, key - diagonal); });
      int size = p.bias_type ? size_of_bias(p.bias_type) : 0;
      if (size == 1)
        each(s, b, h, first, [&](float x, int key) { return biased<1>(terms, x, min(key, last)); });
      else if (size == 2)
        each(s, b, h, first, [&](float x, int key) { return biased<2>(terms, x, min(key, last)); });
      else if (size == 4)
        each(s, b, h, first, [&](float x, int key) { return biased<4>(terms, x, min(key, last)); });
#ifdef HAS_MASK_MOD
      each(s, b, h, first, [&](float x, int key) { return is_seen(at, row, key) ? x : -INFINITY_F; });
#endif
    }
}

DEVICE void mask(const Warp &w, Scores &s, int first) {
  Place place = w.place();
  Sequence sequence;
  sequence.keys = place.keys;
  sequence.shift = place.shift;
#pragma unroll
  for (int b = 0; b < kBands; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Seen seen = keys_seen(w.p, sequence, place.row(b, h), place.row(b, h));
      each(s, b, h, first, [&](float x, int key) {
        return key < seen.low || key >= seen.high ? -INFINITY_F : x;
      });
      if constexpr (TREE) {
        Branch branch(w.p, w.owner().batch, place.shift, place.row(b, h));
        each(s, b, h, first, [&](float x, int key) { return branch.hides(key) ? -INFINITY_F : x; });
      }
    }
}

// Brings accumulator and sum to a new base where a maximum has outgrown the old one by kLag: of that row
// alone, whose bits are then the same whatever the other rows of the warp are.
DEVICE void update_max(const Warp &w, const Scores &s, Rows &rows, Output &o) {
  float largest[kBands][2];
  bool outgrown = false;
#pragma unroll
  for (int b = 0; b < kBands; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      largest[b][h] = __builtin_fmaxf(s[b][0][2 * h], s[b][0][2 * h + 1]);
#pragma unroll
      for (int t = 1; t < kKeyTiles; ++t)
        largest[b][h] =
            __builtin_fmaxf(largest[b][h], __builtin_fmaxf(s[b][t][2 * h], s[b][t][2 * h + 1]));
      largest[b][h] *= w.to_base_2;
      outgrown |= largest[b][h] > rows[b][h].base + kLag;
    }
  if (!__any_sync(kAllLanes, outgrown)) return;
#pragma unroll
  for (int b = 0; b < kBands; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Row &row = rows[b][h];
      float highest = row_max(largest[b][h]);
      float raised = highest > row.base + kLag ? highest : row.base;
      float factor = exp2(row.base - raised);
      row.base = raised;
      row.total *= factor;
#pragma unroll
      for (int t = 0; t < kDimTiles; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) o[b][t][2 * h + i] *= factor;
    }
}
