// From S^T = K Q^T and dP^T = V dO^T, keys x rows in a warp's registers, to P^T and dS^T.
#pragma once
#include "bwd_load.h"
#include "../bwd_mask.h"
#include "../bwd_place.h"
#include "../../score.h"
#ifdef MOD
#include "../mods.h"
#endif

// 0 for what is not seen.
template <int m, int n>
DEVICE void apply_mask(const Params &p, Place at, float (&weights)[m][n][4]) {
  pin(at.batch);  // or what follows from it would be kept for tiles that are seen
  Mask mask = mask_of(p, sequence_of(p, at.batch));
  int distance = at.key - at.row - mask.shift;
  bool all = distance - (n * 8 - 1) >= mask.low && distance + (m * 16 - 1) <= mask.high &&
             at.key + m * 16 <= mask.keys;
  if (!BANDED && all) return;
#pragma unroll
  for (int i = 0; i < m; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Range range = rows_that_see(mask, key_of(at, i, 2 * h), row_of(at, 0, 0));
#pragma unroll
      for (int j = 0; j < n; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (!range.has(j * 8 + r)) weights[i][j][2 * h + r] = 0.0f;
    }
}

// 16 bits a score, two in a register, as warps exchange them: A operands of the next product.
// P is positive, and its sign says that dropout drops it.
constexpr unsigned kSigns = 0x80008000u;
template <int m, int n>
struct Packed {
  unsigned x[m][n / 2][4];
  METHOD unsigned &pair(int i, int j, int h) { return x[i][j / 2][j % 2 * 2 + h]; }
  METHOD float signed_at(int i, int j, int r) {
    return low_half<DTYPE>(pair(i, j, r / 2) >> r % 2 * 16);
  }
  METHOD float at(int i, int j, int r) {
    return low_half<DTYPE>((pair(i, j, r / 2) & ~kSigns) >> r % 2 * 16);
  }
  METHOD bool drops(int i, int j, int r) { return pair(i, j, r / 2) >> (r % 2 * 16 + 15) & 1; }
};

// 0 where the sign is set.
DEVICE unsigned kept_only(unsigned x) { return x & ~(((x & kSigns) >> 15) * 0xffffu); }

// Whether a score's slope is not always 1.
DEVICE bool has_slopes(const Params &p) {
#ifdef HAS_SCORE_MOD
  return true;
#else
  return p.softcap > 0.0f;
#endif
}

// Scores of every kind: from S come P before dropout, what rounding it left over, and `slopes`, what
// d score / d (scale q.k) is.
template <int m, int n>
DEVICE void weigh(const Params &p, Place at, const float (&s)[m][n][4], Shared minus_lse,
                  Packed<m, n> &weights, Packed<m, n> &rests, Packed<m, n> &slopes) {
  pin(at.batch);
  Mask mask = mask_of(p, sequence_of(p, at.batch));
  Terms terms = terms_of(p, at.batch, at.head, 0);
  const char *bias = terms.bias;
  long long bias_row = p.bias_row * size_of_bias(p.bias_type);
  // S is scaled here and gradients at the end, which leaves 1 for a score's slope.
  terms.scale = 1.0f;
  terms.inverse = terms.softcap > 0.0f ? 1.0f / terms.softcap : 0.0f;
#ifdef MOD
  ModPlace place(p, at.batch, at.head);
#endif
#pragma unroll
  for (int j = 0; j < n; ++j) {
    float lse[2];
    load_pair(lse, minus_lse + j * 32 + lane_index() % 4 * 8);
#pragma unroll
    for (int i = 0; i < m; ++i) {
      unsigned keep = p.dropout_threshold ? kept(p, at, i, j) : ~0u;
      float weight[4], slope[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        int key = key_of(at, i, r), row = row_of(at, j, r);
        bool seen = rows_that_see(mask, key, row).has(0);
#ifdef HAS_MASK_MOD
        seen = seen && is_seen(place, row, key);
#endif
#ifdef HAS_SCORE_MOD
        float x = capped(terms, s[i][j][r] * p.scale, slope[r]);
        int row0 = row_of(at, 0, 0), key0 = key_of(at, 0, 0);
        x = modified(place, x, row0, key0, row - row0, key - key0, slope[r]) +
            alibi(terms, key - row - mask.shift);
#else
        float x = score(terms, s[i][j][r] * p.scale, key - row - mask.shift, slope[r]);
#endif
        if (bias) {
          // What is not seen need not be there: any element does for it.
          terms.bias = bias + (seen ? row : 0) * bias_row;
          x += bias_of(terms, seen ? key : 0);
        }
        weight[r] = seen ? exp2(x * kLog2E + lse[r % 2]) : 0.0f;
#ifdef HAS_SCORE_MOD
        if (weight[r] == 0.0f) slope[r] = 0.0f;  // it need not be finite there
#endif
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned both = Format<DTYPE>::nearest(weight[2 * h], weight[2 * h + 1]);
        unsigned drop = ~keep >> 2 * h;
        weights.pair(i, j, h) = both | (drop & 1) << 15 | (drop & 2) << 30;
        rests.pair(i, j, h) = Format<DTYPE>::nearest(weight[2 * h] - low_half<DTYPE>(both),
                                                     weight[2 * h + 1] - low_half<DTYPE>(both >> 16));
        slopes.pair(i, j, h) = Format<DTYPE>::nearest(slope[2 * h], slope[2 * h + 1]);
      }
    }
  }
}

// dP becomes dS, for slopes of 1. `dots` gets this lane's share of the rows' sums of P dP.
template <int m, int n>
DEVICE void differ(const Params &p, float (&dp)[m][n][4], Shared minus_delta, Packed<m, n> &weights,
                   Packed<m, n> &rests, float (&dots)[n][2]) {
  float keep_scale = p.dropout_threshold ? p.dropout_scale : 1.0f;
#pragma unroll
  for (int j = 0; j < n; ++j) {
    float delta[2];
    load_pair(delta, minus_delta + j * 32 + lane_index() % 4 * 8);
    dots[j][0] = dots[j][1] = 0.0f;
#pragma unroll
    for (int i = 0; i < m; ++i)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float weight = weights.at(i, j, r) + rests.signed_at(i, j, r);
        float g = weights.drops(i, j, r) ? 0.0f : dp[i][j][r] * keep_scale;
        dots[j][r % 2] += weight * g;
        dp[i][j][r] = (g + delta[r % 2]) * weight;
      }
  }
}
template <int m, int n>
DEVICE void steepen(float (&ds)[m][n][4], Packed<m, n> &slopes) {
#pragma unroll
  for (int i = 0; i < m * n * 4; ++i)
    ds[i / 4 / n][i / 4 % n][i % 4] *= slopes.signed_at(i / 4 / n, i / 4 % n, i % 4);
}
