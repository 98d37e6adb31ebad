// Score terms, mods, dropout and sinks of backward: P from S, and dS from dP and P. Only what the plan may
// have (TERMS) takes instructions and registers.
#pragma once
#include "bwd_shape.h"
#include "../bwd_mask.h"
#include "../bwd_place.h"
#include "../../common/row_sums.h"
#include "../../score.h"

constexpr int kProducts = BLOCK_Q / 8;  // 16 keys x 8 rows of a warp each: four scores a lane

struct alignas(16) Four {
  float x[4];
};
DEVICE Four load_four(Shared at) { return load_shared<Four>(at); }

// Which scores of a tile dropout keeps, of the lane: byte r of word j / 8 has bit j % 8 for register r of product
// j. A draw serves four keys, which are those of four lanes. So each lane draws for one register of all products,
// and at the end they exchange bytes.
struct Kept {
  unsigned bits[(kProducts + 7) / 8];

  METHOD void draw(const Params &p, const Place &at) {
    unsigned turn = lane_index() / 4 % 4, threshold = p.dropout_threshold;
    unsigned group = (unsigned)(key_of(at, 0, turn) + p.k_start) / 4;
    unsigned long long seed = *(const unsigned long long *)p.seed;
    // The same in all lanes, and the compiler is told so: the keys of the rounds are in uniform registers.
    seed = __shfl_sync(kAllLanes, seed, 0);
#pragma unroll
    for (int w = 0; w < (kProducts + 7) / 8; ++w) {
      unsigned mine = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        int j = 8 * w + i;
        if (j >= kProducts) break;
        Draws draws = philox(group, row_of(at, j, turn) + p.q_start, at.head + p.head_start,
                             at.batch + p.batch_start, seed);
#pragma unroll
        for (int k = 0; k < 4; ++k)
          asm("{.reg .pred kept; setp.lt.u32 kept, %1, %2; @kept or.b32 %0, %0, %3;}"
              : "+r"(mine)
              : "r"(draws.word[k]), "r"(threshold), "r"(1u << (8 * k + i)));
      }
      unsigned others = __shfl_xor_sync(kAllLanes, mine, 4);
      mine = __byte_perm(mine, others, turn & 1 ? 0x3715 : 0x6240);
      others = __shfl_xor_sync(kAllLanes, mine, 8);
      bits[w] = __byte_perm(mine, others, turn & 2 ? 0x3276 : 0x5410);
    }
  }
  METHOD void keep_all() {
    for (unsigned &word : bits) word = ~0u;
  }
  // Of product j, the signs of the four bytes: prmt spreads them.
  METHOD unsigned signs(int j) const { return bits[j / 8] << (7 - j % 8); }
  METHOD unsigned bit(int j, int r) const { return bits[j / 8] >> (8 * r + j % 8) & 1; }
};
DEVICE unsigned spread(unsigned signs, unsigned which) {
  unsigned mask;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(signs), "r"(which));
  return mask;
}

// An 8 x 8 matrix of 16-bit elements, transposed.
DEVICE unsigned transposed_matrix(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Of the warp's scores of one tile. Registers n = 0 ... 7 of a slice of 16 rows are those of two products.
struct TileTerms {
  const Params &p;
  Place at;      // its first key and row
  int rows, keys;
  bool full;     // the mask_mod hides nothing
  unsigned seen[2];  // otherwise, of the lane's keys 0 and 8: bit 2 j + r is of row r of product j
  float scale;   // to exponents of 2
  float slope;   // of ALiBi, negative, the same
  float first_distance;  // key - row - shift of the lane's first score
  Terms terms;
  Kept kept;
  unsigned bias[kBiasAlone ? kProducts * 2 : 1];  // pairs, as they lie in memory
  Shared bias_tile;

  // Loads what does not need S; draw() is apart from it. `s` counts keys from the block's first one.
  METHOD TileTerms(const Params &p, const Owned &own, const Sequence &s, const Place &place, bool full)
      : p(p), at(place), rows(s.rows), keys(s.keys + own.first_key), full(full) {
    scale = exponent_scale(p);
    if constexpr (may_have(kAlibi) || (may_have(kBias) && !kBiasTiles)) terms = terms_of(p, at.batch, at.head, 0);
    if constexpr (may_have(kAlibi)) {
      slope = -terms.slope * kLog2E;
      first_distance = (float)(key_of(at, 0, 0) - row_of(at, 0, 0) - (s.shift + own.first_key));
    }
    if constexpr (kBiasAlone)
      if (has_pairs()) load_bias();
  }
  METHOD void draw() {
    if constexpr (may_have(kDropout)) {
      kept.keep_all();
      if (has(kDropout, p.dropout_threshold)) kept.draw(p, at);
    }
  }

  // ---- the mask_mod

  // What it leaves, for which no score is needed: S is under way meanwhile. A loop that is not unrolled all the way
  // takes few registers and compiles fast.
  METHOD void look() {
#ifdef HAS_MASK_MOD
    static_assert(2 * kProducts <= 32, "a bit a row");
    seen[0] = seen[1] = ~0u;
    if (full) return;
    ModPlace place(p, at.batch, at.head);
    unsigned found[2] = {0, 0};
#pragma unroll 4
    for (int j = 0; j < kProducts; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          found[h] |= (unsigned)is_seen(place, row_of(at, j, r), key_of(at, 0, 2 * h)) << (2 * j + r);
    seen[0] = found[0];
    seen[1] = found[1];
#endif
  }
  // Zeros for what it hides, of weights in 16 bits, or exponents of -infinity.
  template <int slices>
  METHOD void hide(unsigned (&weights)[slices][4]) const {
#ifdef HAS_MASK_MOD
    if (full) return;
#pragma unroll
    for (int j = 0; j < 2 * slices; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        unsigned both;  // the sign of the highest byte of each of two words, over 16 bits
        asm("prmt.b32 %0, %1, %2, 0xffbb;"
            : "=r"(both)
            : "r"(seen[h] << (31 - 2 * j)), "r"(seen[h] << (30 - 2 * j)));
        weights[j / 2][j % 2 * 2 + h] &= both;
      }
#endif
  }
  template <int count>
  METHOD void hide(float (&exponents)[count]) const {
#ifdef HAS_MASK_MOD
    if (full) return;
#pragma unroll
    for (int n = 0; n < count; ++n)
      exponents[n] = seen[n % 4 / 2] >> (n / 4 * 2 + n % 2) & 1 ? exponents[n] : -INFINITY_F;
#endif
  }

  static METHOD int row_in_slice(int n) { return n / 4 * 8 + n % 2; }

  // ---- bias

  // Whether the bias is read by pairs of neighbouring keys, before S is there. Alone it may be.
  METHOD bool has_pairs() const {
    return p.bias_type == (DTYPE == BFLOAT16 ? kBfloat16Bias : kFloat16Bias) && p.bias_key == 1 &&
           p.bias_row % 2 == 0 && ((unsigned long long)terms.bias & 3) == 0;
  }
  METHOD void load_bias() {
    int row = at.row + lane_index() / 4, key = at.key + lane_index() % 4 * 2;
    const char *from = terms.bias + (row * p.bias_row + key) * 2;
    if (at.row + BLOCK_Q <= rows && at.key + 16 <= keys) {
#pragma unroll
      for (int j = 0; j < kProducts; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          bias[2 * j + h] = *(const unsigned *)(from + j * 8 * p.bias_row * 2 + h * 16);
      return;
    }
#pragma unroll
    for (int j = 0; j < kProducts; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const char *pair = from + j * 8 * p.bias_row * 2 + h * 16;
        unsigned &x = bias[2 * j + h];
        x = 0;
        if (row + 8 * j < rows && key + 8 * h < keys) x = *(const unsigned short *)pair;
        if (row + 8 * j < rows && key + 8 * h + 1 < keys) x |= *(const unsigned short *)(pair + 2) << 16;
      }
  }
  static METHOD void add_two(unsigned two, float *x) {
    x[0] = __builtin_fmaf(low_half<DTYPE>(two), kLog2E, x[0]);
    x[1] = __builtin_fmaf(low_half<DTYPE>(two >> 16), kLog2E, x[1]);
  }
  METHOD void add_pairs(int i, float (&x)[8]) const {
#pragma unroll
    for (int n = 0; n < 8; n += 2) add_two(transposed_matrix(bias[4 * i + n / 2]), x + n);
  }
  // From its tile.
  METHOD void add_tile(int i, float (&x)[8]) const {
    unsigned pairs[4];
    ldmatrix_transposed(pairs, bias_tile + i * 16 * kRowBytes);
#pragma unroll
    for (int n = 0; n < 4; ++n) add_two(pairs[n], x + 2 * n);
  }
  // Until the tile has come: `at`, where the lane writes dS later.
  METHOD void wait_for_bias(Shared shared, int step, Shared at) {
    bias_tile = at;
    mbarrier_wait(mbarrier_at(shared, kBiasFull + stage_of(step)), phase_of(step));
  }
  template <int size>
  METHOD void add_bias(int i, float (&x)[8]) const {
    int row = row_of(at, 2 * i, 0), key = key_of(at, 0, 0);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      int r = row + row_in_slice(n), k = key + n / 2 % 2 * 8;
      Terms one = terms;
      one.bias += (r < rows && k < keys ? r * p.bias_row + k * p.bias_key : 0) * size;
      x[n] = __builtin_fmaf(bias_of<size>(one, 0), kLog2E, x[n]);
    }
  }
  METHOD void add_bias(int i, float (&x)[8]) const {
    int size = size_of_bias(p.bias_type);
    if (size == 2)
      add_bias<2>(i, x);
    else if (size == 4)
      add_bias<4>(i, x);
    else
      add_bias<1>(i, x);
  }

  // ---- P

  // Exponents of P and slopes of slice `i` from q.k. Of softcap alone h or 2 h is left instead of the slope.
  template <bool pairs>
  METHOD void make_exponents(int i, const float *scores, const float (&minus_lse)[4], float (&x)[8],
                             float (&slopes)[8]) const {
    auto state = [&](int n) { return minus_lse[n / 4 * 2 + n % 2]; };
    if constexpr (kScoreMod || TERMS == kAllTerms) {
      Terms capped = terms;
      capped.scale = 1.0f;  // gradients are scaled at the end
      capped.softcap = p.softcap;
      capped.inverse = p.softcap > 0.0f ? 1.0f / p.softcap : 0.0f;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        x[n] = scores[n] * p.scale;
        slopes[n] = 1.0f;
      }
      if (has(kSoftcap, p.softcap > 0.0f)) {
#pragma unroll
        for (int n = 0; n < 8; ++n) x[n] = softcapped(capped, x[n], slopes[n]);
      }
#ifdef HAS_SCORE_MOD
      ModPlace place(p, at.batch, at.head);
#pragma unroll
      for (int n = 0; n < 8; ++n)
        x[n] = modified(place, x[n], row_of(at, 0, 0), key_of(at, 0, 0), 16 * i + row_in_slice(n), n / 2 % 2 * 8,
                        slopes[n]);
#endif
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = __builtin_fmaf(x[n], kLog2E, state(n));
    } else if constexpr (may_have(kSoftcap)) {
      // With h = 1 / (1 + exp(2 y)), tanh(y) is 1 - 2 h, exact to 2^-22, which softcap multiplies. The slope is
      // 4 h (1 - h), which `steepened` makes of h or 2 h.
      constexpr float kTimes = kQuarters ? 1.0f : 2.0f;
      float cap = p.softcap * kLog2E, inner = 2.0f * scale * reciprocal(p.softcap);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        slopes[n] = reciprocal(__builtin_fmaf(exp2(scores[n] * inner), 1.0f / kTimes, 1.0f / kTimes));
        x[n] = __builtin_fmaf(slopes[n], -2.0f / kTimes * cap, state(n) + cap);
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) x[n] = __builtin_fmaf(scores[n], scale, state(n));
    }
    if (has(kAlibi, p.alibi_slopes)) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float distance = first_distance + (float)(n / 2 % 2 * 8 - 16 * i - row_in_slice(n));
        x[n] = __builtin_fmaf(slope, __builtin_fabsf(distance), x[n]);
      }
    }
    if constexpr (kBiasTiles) {
      add_tile(i, x);
    } else if constexpr (pairs) {
      add_pairs(i, x);
    } else if constexpr (may_have(kBias)) {
      if (has(kBias, terms.bias)) add_bias(i, x);
    }
  }

  // P times the slope, or a quarter of it.
  static METHOD float steepened(float weight, float slope) {
    if (kSoftcapAlone && !kQuarters) slope *= 2.0f - slope;
    float product = weight * slope;
    return kQuarters ? __builtin_fmaf(-product, slope, product) : product;
  }
  // P times the slope, in the place of P.
  template <int count, int sloped>
  METHOD void steepen(float (&weights)[count], const float (&slopes)[sloped]) const {
#pragma unroll
    for (int n = 0; n < sloped; ++n)
      // The slope need not be finite where P is 0.
      weights[n] = kScoreMod && weights[n] == 0.0f ? 0.0f : steepened(weights[n], slopes[n]);
  }
  // P of all slices as operands, and P times the slope. `minus_lse`: of the lane.
  template <bool pairs, int count, int slices>
  METHOD void weigh(const float (&scores)[count], Shared minus_lse, unsigned (&weights)[slices][4],
                    unsigned (&steep)[slices][4], unsigned (&rests)[slices][4]) const {
#pragma unroll
    for (int i = 0; i < slices; ++i) {
      float x[8], y[8];
      make_exponents<pairs>(i, scores + 8 * i, load_four(minus_lse + i * 64).x, x, y);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        x[n] = exp2(x[n]);
        if constexpr (kSlopes) y[n] = steepened(x[n], y[n]);
        if (kScoreMod && x[n] == 0.0f) y[n] = 0.0f;  // the slope need not be finite there
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        weights[i][n] = Format<DTYPE>::nearest(x[2 * n], x[2 * n + 1]);
        if constexpr (kSlopes) steep[i][n] = Format<DTYPE>::nearest(y[2 * n], y[2 * n + 1]);
        if constexpr (kRests) rests[i][n] = rest_of(x[2 * n], x[2 * n + 1], weights[i][n]);
      }
    }
  }
  template <int count, int slices>
  METHOD void weigh(const float (&scores)[count], Shared minus_lse, unsigned (&weights)[slices][4],
                    unsigned (&steep)[slices][4], unsigned (&rests)[slices][4]) const {
    if constexpr (kBiasAlone)
      if (has_pairs()) return weigh<true>(scores, minus_lse, weights, steep, rests);
    weigh<false>(scores, minus_lse, weights, steep, rests);
  }
  static METHOD unsigned rest_of(float x, float y, unsigned rounded) {
    return Format<DTYPE>::nearest((x - low_half<DTYPE>(rounded)) * kRestScale,
                                  (y - low_half<DTYPE>(rounded >> 16)) * kRestScale);
  }

  // Zeros for what dropout does not keep.
  template <int slices>
  METHOD void drop(unsigned (&weights)[slices][4]) const {
#pragma unroll
    for (int i = 0; i < slices; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n) weights[i][n] &= spread(kept.signs(2 * i + n / 2), n % 2 ? 0xbbaa : 0x9988);
  }

  // Wide heads, of which another warpgroup makes dS. Exponents and slopes of all slices:
  template <bool pairs, int count, int slices, int sloped>
  METHOD void make_exponents(float (&scores)[count], const float (&minus_lse)[slices][4],
                             float (&slopes)[sloped]) const {
#pragma unroll
    for (int i = 0; i < slices; ++i) {
      float x[8], y[8];
      make_exponents<pairs>(i, scores + 8 * i, minus_lse[i], x, y);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        scores[8 * i + n] = x[n];
        if constexpr (kSlopes) slopes[8 * i + n] = y[n];
      }
    }
  }
  template <int count, int slices, int sloped>
  METHOD void make_exponents(float (&scores)[count], const float (&minus_lse)[slices][4],
                             float (&slopes)[sloped]) const {
    if constexpr (kBiasAlone)
      if (has_pairs()) return make_exponents<true>(scores, minus_lse, slopes);
    make_exponents<false>(scores, minus_lse, slopes);
  }
  // P as dropout leaves it as operand, and P times the slope to `to`, whose last bit says that dropout keeps it.
  template <int count, int slices, int sloped>
  METHOD void hand_over(const float (&exponents)[count], const float (&slopes)[sloped],
                        unsigned (&weights)[slices][4], Shared to) const {
#pragma unroll
    for (int i = 0; i < slices; ++i) {
      unsigned steep[8];
      float weight[8];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        weight[n] = exp2(exponents[8 * i + n]);
        float y = weight[n];
        if constexpr (kSlopes) y = steepened(y, slopes[8 * i + n]);
        if (kScoreMod && weight[n] == 0.0f) y = 0.0f;  // the slope need not be finite there
        steep[n] = __float_as_uint(y);
        if constexpr (may_have(kDropout)) steep[n] = (steep[n] & ~1u) | kept.bit(2 * i + n / 4, n % 4);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) weights[i][n] = Format<DTYPE>::nearest(weight[2 * n], weight[2 * n + 1]);
#pragma unroll
      for (int n = 0; n < 8; n += 4)
        store_shared(to + ((2 * i + n / 4) * 128 + thread_index() % 128) * 16,
                     Quad{steep[n], steep[n + 1], steep[n + 2], steep[n + 3]});
    }
    if constexpr (may_have(kDropout)) drop(weights);
  }

  // ---- dS

  // Of slice `i`, register n, dP as dropout leaves it.
  METHOD float dropped(float dp, int i, int n) const {
    if constexpr (!may_have(kDropout)) return dp;
    unsigned mask = spread(kept.signs(2 * i + n / 4), 0x8888 + 0x1111 * (n % 4));
    return __uint_as_float(__float_as_uint(dp) & mask);
  }
  // dS of slice `i`. `weights`: P, or what dropout leaves of it; `steep`: P times the slope.
  METHOD void make_ds(unsigned (&ds)[4], int i, const float *dp, const unsigned (&weights)[4],
                      const unsigned (&steep)[4], const unsigned (&rests)[4],
                      const float (&minus_delta)[4], Shared sink_weights, float &sink_sum) const {
    float x[8], dots[4] = {0.0f, 0.0f, 0.0f, 0.0f}, rest_dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      auto half = [&](const unsigned (&all)[4]) { return low_half<DTYPE>(all[n / 2] >> n % 2 * 16); };
      int row = n / 4 * 2 + n % 2;
      if constexpr (may_have(kDropout) && !kSlopes && !may_have(kSinks)) {
        // `weights` is what dropout leaves of P, and tells what it leaves of dP.
        x[n] = __builtin_fmaf(half(steep), minus_delta[row], dp[n] * half(weights));
        continue;
      }
      float g = __builtin_fmaf(dropped(dp[n], i, n), kMore, minus_delta[row]);
      x[n] = g * half(steep);
      if constexpr (may_have(kSinks)) dots[row] += kSlopes ? g * half(weights) : x[n];
      if constexpr (kRests) rest_dots[row] = __builtin_fmaf(g, half(rests), rest_dots[row]);
    }
    if constexpr (kRests)
      for (int row = 0; row < 4; ++row)
        dots[row] = __builtin_fmaf(rest_dots[row], 1.0f / kRestScale, dots[row]);
    if constexpr (may_have(kSinks)) add_dots(dots, sink_weights + i * 64, sink_sum);
#pragma unroll
    for (int n = 0; n < 4; ++n) ds[n] = Format<DTYPE>::nearest(x[2 * n], x[2 * n + 1]);
  }
  static METHOD void add_dots(const float (&dots)[4], Shared sink_weights, float &sink_sum) {
    Four weights = load_four(sink_weights);
#pragma unroll
    for (int row = 0; row < 4; ++row) sink_sum = __builtin_fmaf(dots[row], weights.x[row], sink_sum);
  }
};

// What dP is to be multiplied by, which is left to the end: -delta is divided by it when it is loaded.
DEVICE float dp_scale(const Params &p) { return has(kDropout, p.dropout_threshold) ? p.dropout_scale : 1.0f; }

// The sinks' gradient is -sum over the rows of exp(sink - LSE) delta, but delta is of the rounded O: what the
// rounding of P did to it, the same in all elements of a row where V has a mean, is too much (the suite's
// bound). Now sum over the keys of P (dP - delta) is exact delta less (1 - exp(sink - LSE)) times the rounded
// one, and small where V has a mean. So the main kernel leaves this, over all rows of a head, and
// ../sm80/dq_convert.cu makes the rest of delta.
DEVICE void store_sink_sum(const Params &p, const Place &at, float &sum) {
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) sum += from_lane_xor(sum, bit);
  if (lane_index() == 0) sink_sums(p, at.batch, at.head)[at.key / kSinkKeys] = sum * (dp_scale(p) / kMore);
  sum = 0.0f;
}

// Wide heads: what the other warpgroup makes of dP, whose place may be taken, and of what it was handed. Sums for
// the sinks are right for slopes of 1.
template <int count, int slices>
DEVICE void take_over(float (&dp)[count], Shared from, const float (&minus_delta)[slices][4],
                      unsigned (&ds)[slices][4], Shared sink_weights, float &sink_sum) {
#pragma unroll
  for (int i = 0; i < slices; ++i) {
    float dots[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    Quad packed;
    if constexpr (!FLOAT_WEIGHTS)
      packed = load_shared<Quad>(from + (i * 128 + thread_index() % 128) * 16);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      Quad steep;
      if constexpr (FLOAT_WEIGHTS)
        steep = load_shared<Quad>(from + ((2 * i + j) * 128 + thread_index() % 128) * 16);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float &x = dp[8 * i + 4 * j + r];
        float weight = FLOAT_WEIGHTS ? __uint_as_float(steep[r])
                                     : low_half<DTYPE>(packed[2 * j + r / 2] >> r % 2 * 16);
        int row = 2 * j + r % 2;
        if (may_have(kDropout) && !(steep[r] & 1)) x = 0.0f;
        x = __builtin_fmaf(x, kMore, minus_delta[i][row]) * weight;
        dots[row] += x;
      }
    }
    if constexpr (may_have(kSinks)) TileTerms::add_dots(dots, sink_weights + i * 64, sink_sum);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      ds[i][n] = Format<DTYPE>::nearest(dp[8 * i + 2 * n], dp[8 * i + 2 * n + 1]);
  }
}
