// Scores of every kind in the one-pass backward: softcap, ALiBi, bias, dropout, sinks. In GENERAL plans, which of
// them there are is known at run time: each is a branch around the work of a whole step. TERM plans have one term
// and no other, whose work is spread over the products (bwd_turn.h): a backward with sinks takes 0.65 of the time (by
// the timing model, 64 and 128).
#pragma once
#include "bwd_draws.h"
#include "bwd_step.h"

static_assert(!(GENERAL && TERM), "a plan has one term, or any");
// Which differs between heads.
constexpr bool kTermOfHead = kSinksAlone || kAlibiAlone || kDropoutAlone || kBiasAlone;

// What of the sinks' gradient needs the scores: the sum over a head's rows and this wavefront's keys of
// w P (dP - delta), with w = exp(sink - LSE). dq_convert makes the rest (store_sink_share).
struct SinkSum {
  float sink;  // of the head, in base 2
  float sum;   // of this lane

  METHOD void look_up(int head) { sink = ((const float *)params_again().sinks)[head] * kLog2E; }
  METHOD void seek(int head) {
    look_up(head);
    sum = 0.0f;
    pin(sink);
    pin(sum);
  }
  // LSE is at least the sink, but rows beyond the end have 0: infinity times their 0 would be NaN.
  METHOD float weight(float minus_lse) const { return exp2(__builtin_fminf(sink + minus_lse, 0.0f)); }
  // Adds the sum to that of the head and of the wavefront's keys, to which nobody else adds.
  METHOD void add(const Sequence &s, int head, int first_key) const {
    float all = sum;
    for (int bit = 1; bit < kLanes; bit *= 2) all += from_lane_xor(all, bit);
    if (lane_index() != 0 || first_key >= s.keys) return;
    // With addresses in vector registers: scalar ones are few.
    pin(head);
    pin(first_key);
    float *sums = sink_sums(params_again(), s.batch, head) + first_key / kSinkKeys;
    __builtin_amdgcn_global_atomic_fadd_f32((GLOBAL float *)sums, all);
  }
};

// A bias alone, whose keys are side by side in memory, of the plan's number format if it has 16 bits. What a step adds
// is loaded a turn before its scores are made.
template <int tiles>
struct BiasLines {
  const char *base;    // of the step's first row, at the wavefront's first key
  int bytes;           // from there on, of the step's rows
  int left;            // rows from there on
  int row_step;        // in bytes
  int beyond;          // bytes from the end of a row's keys to the next row
  unsigned offset[4];  // of the lane's rows

  METHOD void begin(const Sequence &s, int first_key) {
    int keys = min(s.keys - first_key, tiles * 16);
    pin_scalar(keys);  // or min and max become v_med3, of which the compiler does not know that lanes agree
    keys = max(keys, 0);
    pin_scalar(keys);
    row_step = (int)params_again().bias_row * kBiasSize;
    pin_scalar(row_step);
    beyond = row_step - keys * kBiasSize;
    pin_scalar(beyond);
    int lane = keys ? lane_index() % 16 * kBiasSize : 0x7fffffff;  // without keys all is beyond the buffer
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      offset[r] = lane + (lane_index() / 16 * kMmaPart + r) * row_step;
      pin(offset[r]);
    }
  }
  // To a head's rows from `row` on.
  METHOD void seek(const Sequence &s, int head, int row, int first_key) {
    base = terms_of(params_again(), s.batch, head, row).bias + first_key * kBiasSize;
    left = s.rows - row;
    pin_scalar(base);
    pin_scalar(left);
    go_on(2);
  }
  // To the next step, in parts.
  static constexpr int kParts = 3;
  METHOD void go_on(int part) {
    if (part == 0) {
      base += row_step * kStepRows;
      pin_scalar(base);
    } else if (part == 1) {
      left -= kStepRows;
      pin_scalar(left);
    } else {
      int rows = min(left, kStepRows);
      pin_scalar(rows);
      bytes = rows * row_step - beyond;
      pin_scalar(bytes);
    }
  }
  METHOD unsigned load(int n, int r) const {
    auto from = buffer(base, bytes);
    unsigned at = offset[r] + n * 16 * kBiasSize;
    if constexpr (kBiasSize == 4) return __builtin_amdgcn_raw_buffer_load_b32(from, at, 0, 0);
    if constexpr (kBiasSize == 1) return __builtin_amdgcn_raw_buffer_load_b8(from, at, 0, 0);
    return __builtin_amdgcn_raw_buffer_load_b16(from, at, 0, 0);
  }
};

// Of 16 rows and the keys of a wavefront, `tiles` times 16: a lane has one key of each tile, and four rows.
template <int dtype, int tiles>
struct Scoring {
  typedef Mma<dtype, 16> M;
  typedef typename M::Acc Acc;
  typedef Format<dtype> F;
  enum { kSoftcap = 1, kAlibi = 2, kBias = 4, kDropout = 8, kSinks = 16, kBiasType = 32 };

  // What a step leaves.
  struct Scored {
    Pair p[tiles], ds[tiles];  // P is rounded after dropout
  };

  int kinds;        // and the bias' type, times kBiasType
  int first;        // key of the wavefront
  // Of the score's head. S is scaled here and gradients at the end, which leaves a scale of 1; `inverse` is
  // what S is multiplied by first, with softcap or without.
  Terms terms;
  int place;        // of the lane's first key, as distances count, before row 4 * part
  unsigned bias[tiles][4];  // of the step whose scores come next, as it is in memory
  SinkSum sinks;            // of the score's head
  // Softcap alone: S times `cap_in` is 2 S / softcap in base 2, and `cap_out` is the softcap in base 2.
  float cap_in, cap_out;
  // Dropout alone. P is made 1 / (1 - p) times as large, by `log_scale` more in its exponent. delta, which is
  // multiplied by this P, is `keep`, 1 - p, times as large.
  DrawKeys<tiles> draws;
  unsigned key;  // the lane's in its group of four
  float log_scale, keep;
  BiasLines<tiles> lines;  // bias alone: of the step that comes next, then of the one after it

  METHOD void begin(const Sequence &s, int first_key, int head) {
    const Params &p = params_again();
    first = first_key;
    place = first + M::column() - s.shift - M::part() * kMmaPart;
    if (TERM) {
      cap_in = 2.0f * kLog2E * p.scale / p.softcap;
      cap_out = p.softcap * kLog2E;
      pin(cap_in);
      pin(cap_out);
      pin(place);
      if (kBiasAlone) lines.begin(s, first_key);
      if (kDropoutAlone) {
        log_scale = log2(p.dropout_scale);
        keep = reciprocal(p.dropout_scale);
        key = lane_index() % 4;
        pin(log_scale);
        pin(keep);
        pin(key);
        draws.begin(s, M::part() * kMmaPart + lane_index() % 4);
      }
      seek(s, head);
      return;
    }
    kinds = (p.softcap > 0.0f ? kSoftcap : 0) | (p.alibi_slopes ? kAlibi : 0) |
            (p.bias_type != kNoBias ? kBias : 0) | (p.dropout_threshold ? kDropout : 0) |
            (p.dsinks ? kSinks : 0) | p.bias_type * kBiasType;
    pin_scalar(kinds);
    terms.scale = 1.0f;
    terms.softcap = p.softcap;
    terms.inverse = p.softcap > 0.0f ? p.scale / p.softcap : p.scale;
    // In vector registers: scalar ones are few.
    pin(terms.softcap);
    pin(terms.inverse);
    pin(place);
    seek(s, head);
  }
  METHOD void seek(const Sequence &s, int head) {
    if (kSinksAlone) sinks.seek(head);
    if (kDropoutAlone) draws.seek(s, head, first + M::column());
    if (TERM && !kAlibiAlone) return;
    terms.slope = 0.0f;
    if (kAlibiAlone || (kinds & kAlibi)) terms.slope = terms_of(params_again(), s.batch, head, 0).slope;
    if (kAlibiAlone) terms.slope *= -kLog2E;
    pin(terms.slope);
  }
  // ALiBi alone: what it adds to the exponent of the score of row r and the lane's key of tile n. `distance`: of
  // row 0 and tile 0.
  METHOD float sloped(float distance, int n, int r, float minus_lse) const {
    return __builtin_fmaf(terms.slope, __builtin_fabsf(distance + (float)(n * 16 - r)), minus_lse);
  }
  METHOD float distance_of(int row) const { return (float)(place - row); }

  // Bias alone: what it adds to the exponent of the score of row r and the lane's key of tile n.
  METHOD float biased(int n, int r, float minus_lse) const {
    if (kBiasSize == 1) return bias[n][r] ? minus_lse : -INFINITY_F;
    constexpr int kType = dtype == BFLOAT16 ? kBfloat16Bias : kFloat16Bias;
    return __builtin_fmaf(bias_value<kBiasSize>(kType, bias[n][r]), kLog2E, minus_lse);
  }
  METHOD void load_lines() {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) bias[n][r] = lines.load(n, r);
  }

  // What is not seen need not be there: elements beyond the end are 0 or others of the bias.
  METHOD void load_bias(const Sequence &s, int head, int row) {
    if (!(kinds & kBias)) return;
    const Params &p = params_again();
    Terms at = terms_of(p, s.batch, head, row);
    int size = size_of_bias(bias_type()), row_step = p.bias_row * size, key_step = p.bias_key * size;
    int key = first;
    pin_scalar(key);  // or what follows from it would be kept from step to step
    int rows = min(s.rows - row, kStepRows), keys = min(s.keys - key, tiles * 16);
    pin_scalar(rows);
    pin_scalar(keys);
    int bytes = rows > 0 && keys > 0 ? (rows - 1) * row_step + (keys - 1) * key_step + size : 0;
    auto from = buffer(at.bias + key * at.bias_step, bytes);
    unsigned offset = M::part() * kMmaPart * row_step + M::column() * key_step;
    auto load = [&](auto one) {
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) bias[n][r] = one(n * 16 * key_step + r * row_step);
    };
    if (size == 4)
      load([&](int more) { return __builtin_amdgcn_raw_buffer_load_b32(from, offset, more, 0); });
    else if (size == 2)
      load([&](int more) { return __builtin_amdgcn_raw_buffer_load_b16(from, offset, more, 0); });
    else
      load([&](int more) { return __builtin_amdgcn_raw_buffer_load_b8(from, offset, more, 0); });
  }

  METHOD int bias_type() const {
    int type = kinds / kBiasType;
    pin_scalar(type);  // or each comparison with it would be kept
    return type;
  }
  template <int type, int size>
  METHOD void add_bias(Acc (&s)[tiles]) const {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) s[n][r] += bias_value<size>(type, bias[n][r]);
  }

  // Whether dropout keeps row r of tile n: bit r.
  METHOD void draw(unsigned (&kept)[tiles], const Sequence &s, int head, int row) const {
    Dropout dropout(params_again(), s.batch);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      int mine = row + M::part() * kMmaPart + lane_index() % 4;
      kept[n] = kept_by_lane<1>(
          dropout.kept_of_four(dropout.group_of(first + n * 16 + M::column()), mine, head));
      fence();  // or the draws of all tiles would be made side by side, in registers that are not there
    }
  }

  // From S and dP of the rows at `row`, whose states are in LDS. `masked` leaves 0 where a row does not see
  // a key.
  template <typename Mask>
  METHOD void weigh(Scored &to, Acc (&s)[tiles], Acc (&dp)[tiles], unsigned states, const Sequence &of,
                    int head, int row, Mask masked) {
    float derivative[tiles][4];
    if (kinds & kSoftcap) {
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          s[n][r] = softcapped(terms, s[n][r], derivative[n][r]);
          if (r % 2) fence();
        }
    } else {
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        s[n] *= terms.inverse;
        for (int r = 0; r < 4; ++r) derivative[n][r] = 1.0f;
      }
    }
    if (kinds & kAlibi)
#pragma unroll
      for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int r = 0; r < 4; ++r) s[n][r] += alibi(terms, place + n * 16 - r - row);
    if (kinds & kBias) {
      int type = bias_type();
      if (type == kFloat32Bias)
        add_bias<kFloat32Bias, 4>(s);
      else if (type == kBfloat16Bias)
        add_bias<kBfloat16Bias, 2>(s);
      else if (type == kFloat16Bias)
        add_bias<kFloat16Bias, 2>(s);
      else
        add_bias<kBoolBias, 1>(s);
    }
    Acc minus_lse = read_four(states);
#pragma unroll
    for (int n = 0; n < tiles; ++n)
      for (int r = 0; r < 4; ++r) s[n][r] = exp2(s[n][r] * kLog2E + minus_lse[r]);
    masked(s);
    if (kinds & kDropout) {
      float keep_scale = params_again().dropout_scale;
      unsigned kept[tiles];
      draw(kept, of, head, row);
#pragma unroll
      for (int n = 0; n < tiles; ++n) {
        float x[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          x[r] = where(kept[n], r, s[n][r] * keep_scale);
          dp[n][r] = where(kept[n], r, dp[n][r] * keep_scale);
        }
        M::put(to.p[n], 0, x);
      }
    } else {
#pragma unroll
      for (int n = 0; n < tiles; ++n) to.p[n] = Pair{F::half_up(s[n][0], s[n][1]), F::half_up(s[n][2], s[n][3])};
    }
    Acc minus_delta = read_four(states + kStepRows * 4);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      for (int r = 0; r < 4; ++r) dp[n][r] = (dp[n][r] + minus_delta[r]) * s[n][r];
    }
    if (kinds & kSinks) {
      // In each step: for one register more from step to step, 128 and 192 would spill.
      sinks.look_up(head);
      sinks.sum = 0.0f;
      Acc again = read_four(states);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float weight = sinks.weight(again[r]);
        for (int n = 0; n < tiles; ++n) sinks.sum = __builtin_fmaf(dp[n][r], weight, sinks.sum);
      }
      sinks.add(of, head, first);
    }
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      float x[4];
      for (int r = 0; r < 4; ++r) x[r] = dp[n][r] * derivative[n][r];
      M::put(to.ds[n], 0, x);
    }
  }
};
