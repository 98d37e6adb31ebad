// Everything between the two products of the forward, for the 64 rows of a consumer warpgroup: score terms,
// mask, online softmax. wgmma.h describes the registers of scores and output, attn_fwd.cu the constants of
// the plan.
#pragma once
#include "wgmma.h"
#include "../row.h"
#include "../../common/row_sums.h"
#include "../../score.h"
#include "../../sequence.h"
#define TENSOR_MAPS
#ifdef MOD
#include "../mods.h"
#endif
#if LISTS
#include "../../lists.h"
#endif

#define PLAIN 0    // scale and mask only, a positive scale
#define GENERAL 1  // softcap, score_mod, ALiBi, any scale
#define SOFTCAP 3  // softcap alone
#define ALIBI 4    // ALiBi alone, a positive scale
#define SCORE_MOD 5  // a score_mod alone, any scale
#define BIAS 6     // a bias alone, whose tiles can be copied

// INPUTS is the format of q, k and v, DTYPE that of out. Float8 has a scale for each head or block of rows.
#ifndef INPUTS
#define INPUTS DTYPE
#define SCALES PER_HEAD
#endif
#define PER_HEAD 0
#define PER_BLOCK 1
constexpr bool kFloat8 = INPUTS == E4M3;

// Number of keys in one copy from a page; a tile takes several copies. 0 without pages.
#ifndef PAGE_ROWS
#define PAGE_ROWS 0
#endif

// Whether a copy is a whole page: PAGE_ROWS is the page size, which divides a tile's keys. Then a tile begins with a
// page, and each of its copies has the next entry of the page table.
#ifndef WHOLE_PAGES
#define WHOLE_PAGES 0
#endif

// Whether a row's bits are independent of the other rows of its warp. Its base is then raised only by its own
// scores, not because another row outgrew its base.
#ifndef INVARIANT
#define INVARIANT 0
#endif
// GROUPS of another plan whose bits this plan reproduces: how P is computed depends on GROUPS.
#ifndef OF_GROUPS
#define OF_GROUPS GROUPS
#endif
// Whether a warpgroup's lines are the same rows of all query heads of a KV head, so that K and V are read once for
// the group.
#ifndef PACKED
#define PACKED 0
#endif
// Warpgroups that have the same rows, each with its own columns of V: a head_dim of 512 leaves one warpgroup
// no registers. All of them compute the scores, which takes them no exchange.
#ifndef HALVES
#define HALVES 1
#endif
constexpr int kOwnDims = HEAD_DIM_V / HALVES;
// Such a block often has the rows of one group of heads. Then a warp has 8 rows and not 16, and leaves out the
// softmax of the rows that are not there: it waits for that, and not for another warpgroup's products. On an
// H200 that gains 12 % at D = 64 and 1 % at 128; wider heads spill.
constexpr bool kFewRows = GROUPS != OF_GROUPS && HEAD_DIM_V <= 64 && !PACKED;
// Tiles of keys that are merged with others only when they are done (row.h: Join), 0 for all. Their
// boundaries are absolute, so a split can take such a chunk and another call all of them.
#ifndef CHUNK_TILES
#define CHUNK_TILES 0
#endif
constexpr int kChunkTiles = CHUNK_TILES;
// Whether what a warpgroup keeps between chunks lies in shared memory (fwd_chunks.h) and not in global memory. The bits
// are the same.
#ifndef CHUNK_SHARED
#define CHUNK_SHARED 0
#endif
constexpr bool kBlockScaled = kFloat8 && SCALES == PER_BLOCK;
constexpr int kInner = kFloat8 ? 32 : 16;  // elements of a product's inner dimension

constexpr int kSlices = BLOCK_K / kInner;  // of the second product's
constexpr int kKeyTiles = BLOCK_K / 8;
constexpr int kDimTiles = kOwnDims / 8;

typedef float Scores[BLOCK_K / 2];
typedef float Output[kOwnDims / 2];
typedef unsigned Probabilities[kSlices][4];

// The tensor core sums float8 products in 14 bits (pyfa/conformance/float8.py). Over 16k keys a quarter of a
// mean would be lost. So P V of one tile of keys goes to separate registers (TileOutput), kColumns columns of
// the output at a time, and is added to O in float32. 128 columns at once take half as many instructions as
// 64, and as many registers as two times 64 in flight.
constexpr int kMostColumns = GROUPS == 3 ? 128 : 64;
constexpr int kColumns = HEAD_DIM_V < kMostColumns ? HEAD_DIM_V : kMostColumns;
constexpr int kColumnGroups = HEAD_DIM_V / kColumns;
typedef float TileOutput[kColumns / 2];
// Whether TileOutput reuses the registers of the scores, because both do not fit. A warpgroup's products then
// wait for its softmax, and only the products of other warpgroups overlap with it (the serial consumer).
constexpr int kRegisters = HEAD_DIM_V + BLOCK_K / 2 + BLOCK_K / 8;  // of output, products, scores, P
constexpr bool kSerial =
    kBlockScaled || (kFloat8 && kRegisters > (GROUPS == 3 ? 140 : SCORE == PLAIN ? 208 : 176));
// With scales per block each k-slice is a separate product, because it has its own scale of V.
constexpr int kProducts = kBlockScaled ? kColumnGroups * kSlices : kColumnGroups;
constexpr int kInFlight = kProducts < 2 ? 1 : 2;
// Whether the serial consumer waits for the next K tile while P V is in flight, and not after it: gains 1 to
// 2 % at D = 128 and 64. At D = 256 ptxas then emits the products twice, which loses 5 %.
constexpr bool kWaitEarly = kProducts == 1;

// Whether P has registers of its own while the P of the tile before is multiplied. Then the scores are still
// there when a row's sum shows that one outgrew its base, so no maximum is computed first: 320 instructions
// a tile at D = 128, not 380.
constexpr bool kSeparateP = !kFloat8 && OF_GROUPS == 2 && BLOCK_K + kOwnDims / 2 <= (SCORE == BIAS ? 191 : 192);
// With it, the loop over tiles takes two steps, and can end between them. Or it takes two at a time, and a third
// step follows: that kernel is a fifth larger and waits more for instructions. But the other one takes 1.04 times as
// long for 197 keys in tiles of 112.
constexpr bool kByTwo = BLOCK_K == 112;

// The largest P after its row's base has been raised, as a power of two. E4M3 goes from 2^-6, below which it
// loses bits, to 448. So there is hardly room for a base that lags.
constexpr float kTop = kFloat8 ? 8.0f : 0.0f;
constexpr float kMost = kFloat8 ? 8.75f : kLag;  // the same, before it is raised

typedef Row Rows[2];  // rows group and group + 8 of the warp

// f(from, to) of a warp's rows by halves, [from, to) of 2; `both`: there are more than 8.
template <typename F>
DEVICE void for_halves(bool both, F f) {
  if constexpr (kFewRows) {
    f(0, 1);
    if (both) f(1, 2);
  } else {
    f(0, 2);
  }
}

// What a finished score is multiplied by: with softcap alone it is a tanh, with ALiBi alone not yet scaled.
DEVICE float to_base_2(const Params &p) {
  return (SCORE == GENERAL || SCORE == SCORE_MOD || SCORE == BIAS ? 1.0f : SCORE == SOFTCAP ? p.softcap : p.scale) *
         kLog2E;
}

// Every score of one row becomes f(score, place). Its key is first_key() + place. Places are constants, so a
// comparison with one takes no register.
DEVICE int first_key(int tile) { return tile * BLOCK_K + lane_index() % 4 * 2; }
template <typename F>
DEVICE void each(Scores &s, int half, F f) {
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float &x = s[4 * t + 2 * half + i];
      x = f(x, 8 * t + i);
    }
}
// Every score of both rows becomes f(score, dq, dk): it lies so many rows and keys behind the lane's first one. Also
// rows beyond the last, so that these distances are constants. The rows of a key come one after the other, so that a
// value that depends on the key alone is loaded once, and scores of a diagonal share what depends on q - kv alone: of
// 64 scores, a relative bias loads 34 elements, and takes 0.83 ms instead of 1.13 on an H200 (ALiBi 0.65 instead of
// 0.71).
template <typename F>
DEVICE void each_of_both(Scores &s, F f) {
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float &x = s[4 * t + 2 * h + i];
        x = f(x, 8 * h, 8 * t + i);
      }
}

#ifdef MOD
// The lane's two rows.
struct TwoRows {
  int at[2];
  METHOD TwoRows(const Sequence &sequence, int first_row) {
    int row = first_row + lane_index() / 4, last = sequence.rows - 1;
    at[0] = min(row, last);
    at[1] = min(row + 8, last);
  }
};
// Not in a loop over rows, in which what is loaded for a key stays in registers: 360 bytes of stack with int64 documents
// at head_dim 128.
DEVICE void modify(const Params &p, Scores &s, const Sequence &sequence, int head, int first_row, int tile,
                   float scale) {
#ifdef HAS_SCORE_MOD
  ModPlace place(p, sequence.batch, head);
  int row0 = first_row + lane_index() / 4, key0 = first_key(tile);
  each_of_both(s, [&](float x, int dq, int dk) { return modified(place, x * scale, row0, key0, dq, dk); });
#endif
}
#endif

// One minus 2 / (1 + exp(2 y)): tanh(y), exact to 2^-22. Softcap multiplies that, so beyond this one it is computed
// to 2 ulp.
constexpr float kMostSoftcap = 512.0f;
DEVICE void cap(const Params &p, Scores &s) {
  float inner = p.scale / p.softcap;
  if (p.softcap > kMostSoftcap) {
#pragma unroll
    for (float &x : s) x = tanh(x * inner);
    return;
  }
  inner *= 2.0f * kLog2E;
#pragma unroll
  for (float &x : s) x = 1.0f - reciprocal(__builtin_fmaf(exp2(x * inner), 0.5f, 0.5f));
}
// `slope`: of ALiBi over the scale, negative.
DEVICE void add_alibi(Scores &s, const Sequence &sequence, int first_row, int tile, float slope) {
  float distance = (float)(first_key(tile) - (first_row + lane_index() / 4) - sequence.shift);
  each_of_both(s, [&](float x, int dq, int dk) {
    return __builtin_fmaf(slope, __builtin_fabsf(distance + (float)(dk - dq)), x);
  });
}

// `tile`: of the bias, in panels of 64 keys; `row`: the warp's first one in it.
template <int panel>
DEVICE void add_bias(const Params &p, Scores &s, Shared tile, int row) {
  row += lane_index() % 16;
  tile += row * 128 + (lane_index() / 16 ^ row % 8) * 16;
#pragma unroll
  for (int t = 0; t < kKeyTiles; t += 2) {
    unsigned pairs[4];  // of rows 0 ... 7 and 8 ... 15, of two times 8 keys
    ldmatrix(pairs, (tile ^ t % 8 * 16) + t / 8 * panel);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float *x = s + 4 * t + 2 * i;
      x[0] = __builtin_fmaf(x[0], p.scale, low_half<DTYPE>(pairs[i]));
      x[1] = __builtin_fmaf(x[1], p.scale, low_half<DTYPE>(pairs[i] >> 16));
    }
  }
}

// `first_row`: of the warp. `descale`: of q and k.
DEVICE void add_terms(const Params &p, Scores &s, const Sequence &sequence, int head, int first_row,
                      int tile, float descale) {
  int key0 = first_key(tile);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = min(first_row + 8 * h + lane_index() / 4, sequence.rows - 1);
    int distance = key0 - row - sequence.shift;
    Terms terms = terms_of(p, sequence.batch, head, row);
    if (kFloat8) {
      terms.scale *= descale;
      terms.inverse *= descale;
    }
    if (p.softcap > 0.0f) {
      float unused;
      each(s, h, [&](float x, int) { return softcapped(terms, x, unused); });
    } else {
      each(s, h, [&](float x, int) { return x * terms.scale; });
    }
#ifdef HAS_SCORE_MOD
  }
  modify(p, s, sequence, head, first_row, tile, 1.0f);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = min(first_row + 8 * h + lane_index() / 4, sequence.rows - 1);
    int distance = key0 - row - sequence.shift;
    Terms terms = terms_of(p, sequence.batch, head, row);
#endif
    if (p.alibi_slopes) each(s, h, [&](float x, int at) { return x + alibi(terms, distance + at); });
  }
}

// `row_of`: the row, inside the sequence, of each half of the lane's scores.
template <typename F>
DEVICE void mask_rows(const Params &p, Scores &s, const Sequence &sequence, int tile, F row_of) {
  int key0 = first_key(tile);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = row_of(h);
    Seen seen = keys_seen(p, sequence, row, row);
    int low = seen.low - key0, high = seen.high - key0;
    each(s, h, [&](float x, int at) { return at >= high ? -INFINITY_F : x; });
    if (BANDED || p.window_left >= 0) each(s, h, [&](float x, int at) { return at < low ? -INFINITY_F : x; });
  }
}
DEVICE void mask(const Params &p, Scores &s, const Sequence &sequence, int first_row, int tile) {
  mask_rows(p, s, sequence, tile, [&](int h) { return first_row + 8 * h + lane_index() / 4; });
}

#ifdef HAS_MASK_MOD
// Masks what a mask_mod masks.
DEVICE void hide(const Params &p, Scores &s, const Sequence &sequence, int head, int first_row, int tile) {
  ModPlace place(p, sequence.batch, head);
  TwoRows rows(sequence, first_row);
  int key0 = first_key(tile);
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float &x = s[4 * t + n];
      x = is_seen(place, rows.at[n / 2], key0 + 8 * t + n % 2) ? x : -INFINITY_F;
    }
}
// Where a mask_mod loads anything for a key, all masks are bits, which need no score: its loads are on their way
// beside K or the products, and registers hold no scores beside them.
constexpr bool kMaskBits = MASK_LOADS;
constexpr int kBitWords = (kKeyTiles + 15) / 16;
struct SeenBits {
  unsigned of_row[2][kBitWords];  // bit 2 t + i: key 8 t + i of the lane
};
// The bits of keys below `key`.
DEVICE unsigned bits_below(int key) {
  int count = key / 8 * 2 + min(key % 8, 2);
  return key <= 0 ? 0 : count < 32 ? (1u << count) - 1 : ~0u;
}
// `cuts`: the mask_mod hides something in the tile; `ends`: what rows see ends or begins in it.
DEVICE SeenBits seen_bits(const Params &p, const Sequence &sequence, int head, int first_row, int tile, bool cuts,
                          bool ends) {
  constexpr int kAtOnce = kKeyTiles % 4 ? 2 : 4;
  SeenBits bits;
  int key0 = first_key(tile);
#pragma unroll
  for (int word = 0; word < kBitWords; ++word) {
    int tiles = min(16, kKeyTiles - 16 * word);
#pragma unroll
    for (int h = 0; h < 2; ++h) bits.of_row[h][word] = ~0u;
    if (cuts) {
      ModPlace place(p, sequence.batch, head);
      TwoRows rows(sequence, first_row);
      unsigned seen[2] = {0, 0};
      // Not unrolled all the way: loads for all keys at once spilled, and the code took twice as long to compile.
#pragma unroll 1
      for (int t = 0; t < tiles; t += kAtOnce) {
        unsigned some[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            some[h] |= is_seen(place, rows.at[h], key0 + 8 * (16 * word + t + i / 2) + i % 2) ? 1u << i : 0;
        // The first ones end up lowest.
#pragma unroll
        for (int h = 0; h < 2; ++h) seen[h] = seen[h] >> 2 * kAtOnce | some[h] << (32 - 2 * kAtOnce);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) bits.of_row[h][word] = seen[h] >> (32 - 2 * tiles);
    }
    if (ends) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int row = first_row + 8 * h + lane_index() / 4, from = key0 + 128 * word;
        Seen seen = keys_seen(p, sequence, row, row);
        bits.of_row[h][word] &= bits_below(seen.high - from) & ~bits_below(seen.low - from);
      }
    }
  }
  return bits;
}
DEVICE void hide(Scores &s, const SeenBits &bits) {
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      float &x = s[4 * t + n];
      x = bits.of_row[n / 2][t / 16] >> (2 * t % 32 + n % 2) & 1 ? x : -INFINITY_F;
    }
}
#else
constexpr bool kMaskBits = false;
#endif

// The largest scores of this lane, times `to_base_2`.
DEVICE void find_largest(float to_base_2, const Scores &s, float (&largest)[2], bool both) {
  largest[1] = kLowest;
  for_halves(both, [&](int from, int to) {
#pragma unroll
    for (int h = from; h < to; ++h) {
      largest[h] = __builtin_fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
      for (int t = 1; t < kKeyTiles; ++t)
        largest[h] = __builtin_fmaxf(largest[h], __builtin_fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
      largest[h] *= to_base_2;
    }
  });
}

// Whether the condition holds in any of the four lanes of a row.
DEVICE bool any_of_row(bool x) { return __ballot_sync(kAllLanes, x) >> (lane_index() & 28) & 15; }

// Raises the bases to the maxima so far and rescales the sums, with INVARIANT only for rows that are
// `outgrown`. The output must then be multiplied by `factors`.
DEVICE void update_max(const float (&largest)[2], const bool (&outgrown)[2], Rows &rows,
                       float (&factors)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float raised = __builtin_fmaxf(rows[h].base, row_max(largest[h]) - kTop);
    if (INVARIANT && !outgrown[h]) raised = rows[h].base;
    factors[h] = exp2(rows[h].base - raised);
    rows[h].base = raised;
    rows[h].total *= factors[h];
  }
}

template <int count>
DEVICE void rescale(float (&o)[count], const float (&factors)[2]) {
#pragma unroll
  for (int t = 0; t < count / 4; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[4 * t + i] *= factors[i / 2];
}

// Float8: one group of O's columns plus P V; plus P V times `unit`; or rescaled, plus P V.
DEVICE void add(Output &o, const TileOutput &products, int column_group) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) o[column_group * (kColumns / 2) + i] += products[i];
}
DEVICE void add(Output &o, const TileOutput &products, int column_group, float unit) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float &x = o[column_group * (kColumns / 2) + i];
    x = __builtin_fmaf(products[i], unit, x);
  }
}
DEVICE void rescale_and_add(Output &o, const float (&factors)[2], const TileOutput &products,
                            int column_group) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    float &x = o[column_group * (kColumns / 2) + i];
    x = __builtin_fmaf(x, factors[i / 2 % 2], products[i]);
  }
}

DEVICE float probability(float score, float to_base_2, float base) {
  return exp2(__builtin_fmaf(score, to_base_2, -base));
}

// One tile of online softmax: the scores become probabilities in place, and `round_to` makes the operand of
// P V of them. Returns whether O has to be rescaled.
DEVICE bool online_softmax_in_place(float to_base_2, Scores &s, Rows &rows, float (&factors)[2],
                                    bool both) {
  float largest[2];
  find_largest(to_base_2, s, largest, both);
  bool outgrown[2] = {largest[0] > rows[0].base + kMost, largest[1] > rows[1].base + kMost};
  if constexpr (INVARIANT)
    for (int h = 0; h < 2; ++h) outgrown[h] = any_of_row(outgrown[h]);
  bool raised = __any_sync(kAllLanes, outgrown[0] || outgrown[1]);
  if (raised) update_max(largest, outgrown, rows, factors);
  for_halves(both, [&](int from, int to) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int i = 2 * from; i < 2 * to; ++i) {
        Row &row = rows[i / 2];
        s[4 * t + i] = probability(s[4 * t + i], to_base_2, row.base);
        row.total += s[4 * t + i];
      }
  });
  return raised;
}
DEVICE void round_to(Probabilities &p, const Scores &s) {
  if constexpr (kFloat8) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; t += 2)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        p[t / 4][t / 2 % 2 * 2 + h] = Format<E4M3>::nearest(s[4 * t + 2 * h], s[4 * t + 2 * h + 1],
                                                            s[4 * t + 2 * h + 4], s[4 * t + 2 * h + 5]);
  } else {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        p[t / 2][t % 2 * 2 + h] = Format<DTYPE>::nearest(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]);
  }
}

// Computes rounded probabilities in separate registers, and the sums of this tile.
DEVICE void exponentiate(float to_base_2, const Scores &s, const Rows &rows, Probabilities &p,
                         float (&sums)[2], bool both) {
  sums[0] = sums[1] = 0.0f;
  for_halves(both, [&](int from, int to) {
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int h = from; h < to; ++h) {
        float x = probability(s[4 * t + 2 * h], to_base_2, rows[h].base);
        float y = probability(s[4 * t + 2 * h + 1], to_base_2, rows[h].base);
        sums[h] += x;
        sums[h] += y;
        p[t / 2][t % 2 * 2 + h] = Format<DTYPE>::nearest(x, y);
      }
  });
}
// One tile of online softmax with P in separate registers. If a lane's share of a tile's sum stays below
// 2^kLag, no score exceeds its base by more than kLag. Otherwise the tile is computed again with new bases.
// The first tile of a work tile has no base yet.
template <bool first>
DEVICE bool online_softmax_to(float to_base_2, const Scores &s, Rows &rows, Probabilities &p,
                              float (&factors)[2], bool both) {
  constexpr float kMostSum = 256.0f;
  float sums[2];
  bool raised = first, outgrown[2] = {true, true};
  if (!first) {
    exponentiate(to_base_2, s, rows, p, sums, both);
    if constexpr (INVARIANT) {
      for (int h = 0; h < 2; ++h) outgrown[h] = any_of_row(!(sums[h] <= kMostSum));
      raised = __any_sync(kAllLanes, outgrown[0] || outgrown[1]);
    } else {
      raised = __any_sync(kAllLanes, !(sums[0] <= kMostSum && sums[1] <= kMostSum));  // also for a NaN
    }
  }
  if (raised) {
    float largest[2];
    find_largest(to_base_2, s, largest, both);
    update_max(largest, outgrown, rows, factors);
    exponentiate(to_base_2, s, rows, p, sums, both);
  }
  rows[0].total += sums[0];
  rows[1].total += sums[1];
  return raised;
}

// ---- for the epilogue ---------------------------------------------------------------------------

// Four lanes each hold a pair of columns of four 8-column tiles, and exchange them: each gets a whole tile.
DEVICE void transpose_quads(unsigned (&x)[4]) {
  bool odd = lane_index() & 1, upper = lane_index() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    unsigned other = __shfl_xor_sync(kAllLanes, odd ? x[i] : x[i + 1], 1);
    if (odd)
      x[i] = other;
    else
      x[i + 1] = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    unsigned other = __shfl_xor_sync(kAllLanes, upper ? x[i] : x[i + 2], 2);
    if (upper)
      x[i] = other;
    else
      x[i + 2] = other;
  }
}
