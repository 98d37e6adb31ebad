// Score terms, mods and masks of the forward: what the products of a tile begin with, and everything between them and
// the softmax.
#pragma once
#include "fwd_tile.h"

// A bias or ALiBi alone: what the products of a tile are added to, over the scale. So scores are those of a plain plan.
// Or a bias of bool alone, which hides scores that the products leave.
#if SCORE == BIAS || SCORE == FLOAT32_BIAS
// A load has four neighboring keys of a row in each lane. Those of float32 go where the scores will be: with registers
// of their own, 4 spilled at 128.
struct Addend {
  static constexpr int kBytes = SCORE == BIAS ? 2 : 4;
  typedef float Floats __attribute__((ext_vector_type(4)));
  const char *base;           // of the wavefront's first row
  int row_bytes, rows, keys;  // rows: of the wavefront; keys: whole fours of all rows
  unsigned offset[kColumns];  // of the lane's rows
  float inverse;              // of the scale
  Pair bits[kKeyTiles][kColumns][kFours];

  METHOD void begin(const Context &c, int first_row) {
    base = terms_of(c.p, c.work.batch, c.work.head, first_row).bias;
    row_bytes = (int)c.p.bias_row * kBytes;
    rows = min(c.s.rows - first_row, kRows);
    keys = c.p.seqlen_k;
    inverse = 1.0f / c.p.scale;
    for (int n = 0; n < kColumns; ++n) {
      offset[n] = (n * MMA + M::column()) * row_bytes + M::row(0) * kBytes;
      pin(offset[n]);
    }
  }
  // Of the tile whose first key is `key`, and whose scores `s` will be: of all products or of one. Beyond the last row
  // or key are zeros or other elements: they are masked.
  METHOD void load(Scores &s, int key, int product = -1) {
    int left = keys - key;
    auto from = buffer(base + key * kBytes, left > 0 && rows > 0 ? (rows - 1) * row_bytes + left * kBytes : 0);
    for (int t = 0; t < kKeyTiles; ++t)
      for (int n = 0; n < kColumns && (product < 0 || product == t); ++n)
        for (int j = 0; j < kFours; ++j) {
          unsigned at = offset[n] + (t * MMA + 8 * j) * kBytes;
          if (kBytes == 2) {
            bits[t][n][j] = __builtin_bit_cast(Pair, __builtin_amdgcn_raw_buffer_load_b64(from, at, 0, 0));
          } else {
            Floats four = __builtin_bit_cast(Floats, __builtin_amdgcn_raw_buffer_load_b128(from, at, 0, 0));
            for (int i = 0; i < 4; ++i) s[t][n][4 * j + i] = four[i];
          }
        }
  }
  // The scores of that tile begin with what was loaded.
  METHOD void start(Scores &s, int) const {
    for (int t = 0; t < kKeyTiles; ++t)
      for (int n = 0; n < kColumns; ++n)
        for (int r = 0; r < M::kRegisters; ++r) {
          unsigned two = bits[t][n][r / 4][r / 2 % 2];
          unsigned one = r % 2 ? two >> 16 : two & 0xffff;
          float half = DTYPE == BFLOAT16 ? __builtin_bit_cast(float, one << 16) : float_of_half(one);
          s[t][n][r] = inverse * (kBytes == 2 ? half : s[t][n][r]);
        }
  }
  METHOD void receive() const {}
  METHOD void hide(Scores &, int) const {}
};
#elif SCORE == ALIBI
struct Addend {
  float slope;             // negative, over the scale
  int distance[kColumns];  // from the lane's row to its first key of a tile that begins at 0

  METHOD void begin(const Context &c, int) {
    slope = -terms_of(c.p, c.work.batch, c.work.head, 0).slope / c.p.scale;
    for (int n = 0; n < kColumns; ++n) {
      distance[n] = M::row(0) - c.row[n] - c.s.shift;
      pin(distance[n]);
    }
  }
  METHOD void load(Scores &, int, int = -1) {}
  // The scores of the tile whose first key is `key` begin with their distances times the slope.
  METHOD void start(Scores &s, int key) const {
    for (int n = 0; n < kColumns; ++n) {
      float first = (float)(key + distance[n]);
      for (int t = 0; t < kKeyTiles; ++t)
        for (int r = 0; r < M::kRegisters; ++r)
          s[t][n][r] = slope * __builtin_fabsf(first + (float)(t * MMA + r / 4 * 8 + r % 4));
    }
  }
  METHOD void receive() const {}
  METHOD void hide(Scores &, int) const {}
};
#elif SCORE == BOOL_BIAS
// A load has 16 neighboring keys of a row in each lane: with four, it would touch the lines of 32 rows for a quarter of
// the keys. In the products, these keys belong to the lane and to the one with the row's other keys, a four to each in
// turn. They exchange half of them as bits.
struct Addend {
  static_assert(MMA == 32 && kKeyTiles == 2, "a lane's fours are the bits of a byte");
  const char *base;           // of the wavefront's first row
  int row_bytes, rows, keys;  // rows: of the wavefront; keys: whole fours of all rows
  unsigned offset;            // of the lane's first key
  Quad bytes[kKeyTiles];
  unsigned own, other;  // bits of the keys that the lane and the other one loaded
  unsigned seen;        // bit 8 k + four: whether key k of a four is seen
  int hidden;           // -inf; of a constant, the choice would be three instructions

  METHOD void begin(const Context &c, int first_row) {
    base = terms_of(c.p, c.work.batch, c.work.head, first_row).bias;
    row_bytes = (int)c.p.bias_row;
    rows = min(c.s.rows - first_row, kRows);
    keys = c.p.seqlen_k;
    offset = M::column() * row_bytes + M::part() * kUnitBytes;
    hidden = __builtin_bit_cast(int, -INFINITY_F);
    pin(offset);
    pin(hidden);
  }
  // Of the tile whose first key is `key`. Beyond the last row or key are zeros or other elements: they are masked.
  METHOD void load(Scores &, int key, int = -1) {
    int left = keys - key;
    auto from = buffer(base + key, left > 0 && rows > 0 ? (rows - 1) * row_bytes + left : 0);
    for (int t = 0; t < kKeyTiles; ++t)
      bytes[t] = __builtin_bit_cast(Quad, __builtin_amdgcn_raw_buffer_load_b128(from, offset + t * MMA, 0, 0));
  }
  // Bytes are 0 or 1, so those of eight fours fit side by side: first those that belong to part 0. The bits of the other
  // lane's fours are sent to it at their place there.
  METHOD void start(Scores &, int) {
    own = 0;
    for (int i = 8; i-- > 0;) own = own << 1 | bytes[i / 2 % 2][i / 4 + i % 2 * 2];
    pin(own);
    other = __builtin_amdgcn_ds_bpermute((lane_index() ^ MMA) * 4, M::part() ? own : own >> 4);
  }
  // Much later: it takes a while.
  METHOD void receive() {
    seen = M::part() ? own & 0xf0f0f0f0 | other & 0x0f0f0f0f : own & 0x0f0f0f0f | (other & 0x0f0f0f0f) << 4;
    pin(seen);
  }
  // Scores of a pair, as `raise_largest` takes them. A choice, not a sum, which a NaN would pass.
  METHOD void hide(Scores &s, int pair) const {
    int t = pair * 2 / M::kRegisters, r = pair * 2 % M::kRegisters;
    for (int i = r; i < r + 2; ++i) {
      int kept = __builtin_amdgcn_sbfe(seen, i / 8 * 4 + t * 2 + i / 4 % 2 + i % 4 * 8, 1);
      pin(kept);
      float x = s[t][0][i];  // __builtin_bit_cast of the element itself would take the first one
      s[t][0][i] = __builtin_bit_cast(float, (__builtin_bit_cast(int, x) ^ hidden) & kept ^ hidden);
    }
  }
};
#else
struct Addend {
  METHOD void begin(const Context &, int) {}
  METHOD void load(Scores &, int, int = -1) {}
  METHOD void start(Scores &, int) const {}
  METHOD void receive() const {}
  METHOD void hide(Scores &, int) const {}
};
#endif

// A softcap alone. Of x = scale q.k / softcap, a score becomes -1 / (1 + exp(2x)): softcap tanh(x) is twice the softcap
// times it, plus the softcap, which a softmax does not need and `store` adds. To 2^-22 of the softcap. (The tanh of
// score.h, to 2 ulp of a small x too, takes 19 instructions instead of 4.) No x needs a bound, and NaN stays NaN.
struct Cap {
  float factor;

  METHOD void begin(const Params &p) { factor = kCaps ? 2.0f * kLog2E * (p.scale / p.softcap) : 0.0f; }
  // Two scores, in two parts: other instructions can come between an exponential and its use.
  METHOD void begin(Scores &s, int pair) const {
    both(s, pair, [&](float x) { return exp2(x * factor); });
  }
  METHOD void end(Scores &s, int pair) const {
    both(s, pair, [](float x) { return reciprocal(-1.0f - x); });
  }

 private:
  template <typename F>
  METHOD static void both(Scores &s, int pair, F f) {
    int t = pair * 2 / M::kRegisters, r = pair * 2 % M::kRegisters;
    for (int n = 0; n < kColumns; ++n)
      for (int i = r; i < r + 2; ++i) s[t][n][i] = f(s[t][n][i]);
  }
};

// Every score becomes f(score, key) of its register, `key` counted from `key0`. Four at a time: all
// together would take more registers than there are. In a plain plan `key0` is opaque for each four, or
// the mask's comparisons all come first: 22 scalar registers spilled at 96. (Beside score terms that is
// more vector registers: 7 spilled at 128, paged.)
template <typename F>
DEVICE void each(Scores &s, int n, int key0, F f) {
#pragma unroll
  for (int i = 0; i < kKeyTiles * M::kRegisters; ++i) {
    int t = i / M::kRegisters, r = i % M::kRegisters;
    if (kPlain && i % 4 == 0) pin(key0);
    s[t][n][r] = f(s[t][n][r], key0 + t * MMA + r / 4 * 8 + r % 4);
    if (i % 4 == 3) fence();
  }
}

#ifdef MOD
#ifdef HAS_SCORE_MOD
// Scores of a score_mod alone that are computed together. What all of them share is computed and loaded once. What each
// loads takes registers, and so do long functions.
constexpr int kOfScoreMod = SCORE_OPERATIONS > 24 || SCORE_LOADS > 2 ? 8 : SCORE_LOADS ? 16 : 32;
#endif
// Every score becomes f(place, score, key0, dk) of its register, whose key is key0 + dk. So many registers at a time
// that what the mod loads is on its way together and its parameters are loaded once, and so few that the results of a
// mask's comparisons fit in scalar registers, and a score_mod with RoPE in vector registers. By the timing model, a
// tile of a document mask takes 7,700 clocks at head_dim 128 with 16 registers at a time; with one 19,700, with eight
// 8,800, with all 32 11,500.
template <int kMost, typename F>
DEVICE void each_of_mod(const Context &c, Scores &s, int n, int first, F f) {
  constexpr int kAll = kKeyTiles * M::kRegisters, kAtOnce = kMost < kAll ? kMost : kAll;
  auto key_of = [](int i) { return i / M::kRegisters * MMA + i % M::kRegisters / 4 * 8 + i % 4; };
#pragma unroll
  for (int i = 0; i < kAll; i += kAtOnce) {
    int key0 = first + M::row(0) + key_of(i);
    pin(key0);
    float x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      x[j] = s[(i + j) / M::kRegisters][n][(i + j) % M::kRegisters];
      if (kAtOnce == 1) pin(x[j]);
    }
    ModPlace place;
    if constexpr (SCORE == SCORE_MOD) {
      place = c.place;
      place.captured = captured_of(params_again());
    } else {
      // No registers for it: at 128 a mask_mod alone spilled 7, and with dropout the compiler failed.
      place = ModPlace(params_again(), c.work.batch, c.work.head);
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) x[j] = f(place, x[j], key0, key_of(i + j) - key_of(i));
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      pin(x[j]);
      s[(i + j) / M::kRegisters][n][(i + j) % M::kRegisters] = x[j];
    }
    fence();
  }
}
#ifdef HAS_SCORE_MOD
// Scaled scores become those of the score_mod.
template <int kMost>
DEVICE void modify(const Context &c, Scores &s, int n, int first) {
  int row = min(c.row[n], c.s.rows - 1);
  each_of_mod<kMost>(c, s, n, first, [&](const ModPlace &place, float x, int key0, int dk) {
    return modified(place, x, row, key0, 0, dk);
  });
}
#endif
#endif

// Everything between the product and the softmax: score terms and mask. `largest` is the maximum of the
// plain product, and becomes that of the result. `is_full`: the mask_mod masks nothing in this tile.
DEVICE void finish_scores(const Context &c, const Scales &scales, Scores &s, int first, bool is_full,
                          float (&largest)[kColumns]) {
  if (!kPlain)
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
#ifdef HAS_SCORE_MOD
      modify<SCORE == DROPOUT ? 1 : 8>(c, s, n, first);
#endif
      if (p.alibi_slopes)
        each(s, n, key0, [&](float x, int key) { return x + alibi(terms, key - row - c.s.shift); });
      int size = p.bias_type ? size_of_bias(p.bias_type) : 0;
      if (size == 1)
        each(s, n, key0, [&](float x, int key) { return biased<1>(terms, x, min(key, last)); });
      else if (size == 2)
        each(s, n, key0, [&](float x, int key) { return biased<2>(terms, x, min(key, last)); });
      else if (size == 4)
        each(s, n, key0, [&](float x, int key) { return biased<4>(terms, x, min(key, last)); });
    }
#ifdef HAS_SCORE_MOD
  if (SCORE == SCORE_MOD)
    for (int n = 0; n < kColumns; ++n) {
      float scale = params_again().scale;
      // Before the mod: or the compiler makes one packed product of this and one of the mod's, between moves.
      each(s, n, 0, [&](float x, int) { return x * scale; });
      modify<kOfScoreMod>(c, s, n, first);
    }
#endif
#ifdef HAS_MASK_MOD
  constexpr bool kMasked = true;
  for (int n = 0; n < kColumns && !is_full; ++n) {
    int row = min(c.row[n], c.s.rows - 1);
    each_of_mod<SCORE == DROPOUT ? 1 : 16>(c, s, n, first, [&](const ModPlace &place, float x, int key0, int dk) {
      return is_seen(place, row, key0 + dk) ? x : -INFINITY_F;
    });
  }
#else
  constexpr bool kMasked = false;
#endif
  bool cut = first < c.seen.all_low || first + BLOCK_K > c.seen.all_high;
  if (cut)
    for (int n = 0; n < kColumns; ++n)
      each(s, n, first + M::row(0), [&](float x, int key) {
        return key > c.last_key[n] || key < c.first_key[n] ? -INFINITY_F : x;
      });
  if (TREE && cut)
    for (int n = 0; n < kColumns; ++n) {
      Branch branch(params_again(), c.work.batch, c.s.shift, c.row[n]);
      each(s, n, first + M::row(0), [&](float x, int key) { return branch.hides(key) ? -INFINITY_F : x; });
    }
  if (!kPlain || SCORE == SCORE_MOD || cut || kMasked && !is_full) find_largest(s, largest);
}
