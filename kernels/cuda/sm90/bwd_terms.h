// Score terms, mods, dropout and sinks of backward: what lies between S, dP and dS.
#pragma once
#include "bwd_shape.h"
#include "../bwd_mask.h"
#include "../bwd_place.h"
#include "../../common/row_sums.h"
#include "../../score.h"

// The 16 rows of a slice as registers have them: P, d score / d (scale q.k), and what dropout keeps, a bit each.
struct Weighed {
  float weight[8], slope[8];
  unsigned keep;
};

struct alignas(16) Four {
  float x[4];
};

// Adds the lane's shares of the sums of P dP to the rows' share of the sinks' gradient: of slice `i` rows 2 c,
// 2 c + 1 and the same of the next 8, c = lane % 4.
DEVICE void add_dots(const Params &p, const Place &at, int i, const float (&dots)[4]) {
  bool upper = lane_index() & 4, odd = lane_index() & 8;
  float two[2];
#pragma unroll
  for (int j = 0; j < 2; ++j)
    two[j] = (upper ? dots[2 + j] : dots[j]) + from_lane_xor(upper ? dots[j] : dots[2 + j], 4);
  float sum = (odd ? two[1] : two[0]) + from_lane_xor(odd ? two[0] : two[1], 8);
  sum += from_lane_xor(sum, 16);
  int row = at.row + 16 * i + (upper ? 8 : 0) + lane_index() % 4 * 2 + (odd ? 1 : 0);
  Sequence s = sequence_of(p, at.batch);
  float *to = (float *)p.dsinks + state_offset(p, s, at.head) + row;
  if (lane_index() < 16 && row < s.rows)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(sum) : "memory");
}

// Of the warp's scores of one tile.
struct TileTerms {
  const Params &p;
  Place at;                 // its first key and row
  Terms terms;
  int shift;                // of the sequence
  const char *bias;         // of the lane's first score
  Range seen[2];            // of the lane's keys
  bool full;                // the mask_mod hides nothing

  METHOD TileTerms(const Params &p, const Sequence &s, const Work &w, const Place &place, bool full)
      : p(p), at(place), full(full) {
    terms = terms_of(p, at.batch, at.head, 0);
    // S is scaled here and gradients at the end, which leaves 1 for a score's slope.
    terms.scale = 1.0f;
    terms.inverse = terms.softcap > 0.0f ? 1.0f / terms.softcap : 0.0f;
    shift = s.shift;
    int key = key_of(at, 0, 0), row = row_of(at, 0, 0), size = size_of_bias(p.bias_type);
    bias = terms.bias;
    // What is not seen need not be there: the first score's is read for it, brought inside.
    if (bias) bias += (min(row, s.rows - 1) * p.bias_row + min(key, s.keys - 1) * p.bias_key) * size;
    bool masked = at.row < w.all_low || at.row + BLOCK_Q > w.all_high;
    Mask mask = mask_of(p, s);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      seen[h] = masked ? rows_that_see(mask, key + 8 * h, row) : Range{0, 2 * BLOCK_Q};
  }

  // Of register n of a slice: the row, from the lane's first one; whether it is seen.
  static METHOD int row_in_slice(int n) { return n / 4 * 8 + n % 2; }
  static METHOD bool is_there(const unsigned (&bits)[2], int n) { return bits[n / 2 % 2] >> row_in_slice(n) & 1; }
  template <int size>
  METHOD void add_bias(int i, const unsigned (&bits)[2], float (&x)[8]) const {
    Terms one = terms;
    unsigned next_row = (unsigned)p.bias_row * size, eight_keys = (unsigned)p.bias_key * size * 8;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      unsigned at = (16 * i + row_in_slice(n)) * next_row + n / 2 % 2 * eight_keys;
      one.bias = bias + (is_there(bits, n) ? at : 0);
      x[n] += bias_of<size>(one, 0);
    }
  }

  // Of slice `i`. `scores`: q.k.
  METHOD void weigh(int i, const float *scores, const float (&minus_lse)[4], Weighed &to) const {
    auto row = [&](int n) { return row_of(at, 0, 0) + 16 * i + row_in_slice(n); };
    auto key = [&](int n) { return key_of(at, 0, n % 4); };
    float(&x)[8] = to.weight;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      x[n] = scores[n] * p.scale;
      to.slope[n] = 1.0f;
    }
    if (p.softcap > 0.0f) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = softcapped(terms, x[n], to.slope[n]);
    }
#ifdef MOD
    ModPlace place(p, at.batch, at.head);
#endif
#ifdef HAS_SCORE_MOD
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = modified(place, x[n], row(n), key(n), to.slope[n]);
#endif
    if (p.alibi_slopes) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] += alibi(terms, key(n) - row(n) - shift);
    }
#ifdef HAS_MASK_MOD
    if (!full) {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = is_seen(place, row(n), key(n)) ? x[n] : -INFINITY_F;
    }
#endif
    unsigned bits[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) bits[h] = bits_between(seen[h].first - 16 * i, seen[h].last - 16 * i);
    int size = bias ? size_of_bias(p.bias_type) : 0;
    if (size == 2)
      add_bias<2>(i, bits, x);
    else if (size == 4)
      add_bias<4>(i, bits, x);
    else if (size == 1)
      add_bias<1>(i, bits, x);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      bool seen = is_there(bits, n);
      float exponent = __builtin_fmaf(x[n], kLog2E, minus_lse[n / 4 * 2 + n % 2]);
      x[n] = seen ? exp2(exponent) : 0.0f;
#ifdef HAS_SCORE_MOD
      if (x[n] == 0.0f) to.slope[n] = 0.0f;  // it need not be finite there
#endif
    }
    to.keep = ~0u;
    if (p.dropout_threshold) to.keep = kept(p, at, 0, 2 * i) | kept(p, at, 0, 2 * i + 1) << 4;
  }

  // From q.k and dP to P as dropout leaves it and dS, as operands, dS to shared memory too. `states`: of the
  // lane.
  template <int count, int slices>
  METHOD void apply(const float (&scores)[count], const float (&dp)[count], Shared states,
                    unsigned (&weights)[slices][4], unsigned (&ds)[slices][4], Shared ds_at) const {
    float keep_scale = p.dropout_threshold ? p.dropout_scale : 1.0f;
#pragma unroll
    for (int i = 0; i < slices; ++i) {
      auto minus_lse = load_shared<Four>(states + i * 64);
      auto minus_delta = load_shared<Four>(states + (kMinusDelta - kMinusLse) + i * 64);
      float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f}, kept[8], slopes[8];
      Weighed of;
      weigh(i, scores + 8 * i, minus_lse.x, of);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        bool keep = of.keep >> n & 1;
        int row = n / 4 * 2 + n % 2;
        float weight = of.weight[n], g = keep ? dp[8 * i + n] * keep_scale : 0.0f;
        dots[row] += weight * g;
        kept[n] = keep ? weight : 0.0f;
        slopes[n] = (g + minus_delta.x[row]) * weight * of.slope[n];
      }
      if (p.dsinks) add_dots(p, at, i, dots);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        weights[i][n] = Format<DTYPE>::nearest(kept[2 * n], kept[2 * n + 1]);
        ds[i][n] = Format<DTYPE>::nearest(slopes[2 * n], slopes[2 * n + 1]);
      }
      stmatrix_transposed(ds_at + i * 16 * kRowBytes, ds[i]);
    }
  }

  // Wide heads, of which another warpgroup makes dS: P as dropout leaves it as operand, and P times the slope to
  // `to`, whose last bit says that dropout keeps it.
  template <int count, int slices>
  METHOD void hand_over(const float (&scores)[count], Shared states, unsigned (&weights)[slices][4],
                        Shared to) const {
#pragma unroll
    for (int i = 0; i < slices; ++i) {
      auto minus_lse = load_shared<Four>(states + i * 64);
      Weighed of;
      weigh(i, scores + 8 * i, minus_lse.x, of);
      unsigned steep[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        bool keep = of.keep >> n & 1;
        steep[n] = (__float_as_uint(of.weight[n] * of.slope[n]) & ~1u) | (keep ? 1 : 0);
        if (!keep) of.weight[n] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) weights[i][n] = Format<DTYPE>::nearest(of.weight[2 * n], of.weight[2 * n + 1]);
#pragma unroll
      for (int n = 0; n < 8; n += 4)
        store_shared(to + ((2 * i + n / 4) * 128 + thread_index() % 128) * 16,
                     Quad{steep[n], steep[n + 1], steep[n + 2], steep[n + 3]});
    }
  }
};
// What the other warpgroup makes of dP, whose place may be taken. `place`: of the warp's scores. Sums of P dP are
// right for slopes of 1.
template <int count, int slices>
DEVICE void take_over(const Params &p, const Place &place, float (&dp)[count], Shared states, Shared from,
                      unsigned (&ds)[slices][4]) {
  float keep_scale = p.dropout_threshold ? p.dropout_scale : 1.0f;
#pragma unroll
  for (int i = 0; i < slices; ++i) {
    auto minus_delta = load_shared<Four>(states + i * 64);
    float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Quad steep = load_shared<Quad>(from + ((2 * i + j) * 128 + thread_index() % 128) * 16);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float &x = dp[8 * i + 4 * j + r], weight = __uint_as_float(steep[r]);
        float g = steep[r] & 1 ? x * keep_scale : 0.0f;
        int row = 2 * j + r % 2;
        dots[row] += weight * g;
        x = (g + minus_delta.x[row]) * weight;
      }
    }
    if (p.dsinks) add_dots(p, place, i, dots);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      ds[i][n] = Format<DTYPE>::nearest(dp[8 * i + 2 * n], dp[8 * i + 2 * n + 1]);
  }
}
