// What lies between the products of the forward, for the 64 rows of a warpgroup: score terms, mask,
// softmax. Registers hold scores and output as wgmma.h says; the plan's constants are as attn_fwd.cu says.
#pragma once
#include "wgmma.h"
#include "../../score.h"
#include "../../sequence.h"

#define PLAIN 0    // scale and mask only, a positive scale
#define GENERAL 1  // softcap, ALiBi, any scale

constexpr int kSlices = BLOCK_K / 16;  // of the second product's inner dimension
constexpr int kKeyTiles = BLOCK_K / 8;
constexpr int kDimTiles = HEAD_DIM_V / 8;

typedef float Scores[BLOCK_K / 2];
typedef float Output[HEAD_DIM_V / 2];
typedef unsigned Probabilities[kSlices][4];

constexpr float kLowest = -3.4028234663852886e38f;

// The maximum that probabilities are taken against may lag behind by this much, in powers of two, before
// output and sum are brought to a new one: P stays below 2^8, where float32 and both 16-bit formats are as
// exact as below 1, and almost every tile goes without a rescale, and without asking the other lanes.
constexpr float kLag = 8.0f;

// `base` is what exponents are taken against: finite even while a row has seen nothing, as -inf - -inf
// would be NaN.
struct Row {
  float base;
  float total;  // this lane's share of the sum of probabilities
};
typedef Row Rows[2];  // rows group and group + 8 of the warp

// Of the four lanes that hold a row.
DEVICE float row_max(float x) {
  x = __builtin_fmaxf(x, from_lane_xor(x, 1));
  return __builtin_fmaxf(x, from_lane_xor(x, 2));
}
DEVICE float row_sum(float x) {
  x += from_lane_xor(x, 1);
  return x + from_lane_xor(x, 2);
}

// What a finished score is multiplied by.
DEVICE float to_base_2(const Params &p) { return SCORE == PLAIN ? p.scale * kLog2E : kLog2E; }

// Every score of one row becomes f(score, place): its key is first_key() + place. Places are constants, so
// that what is compared with them takes no registers.
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

// `first_row`: of the warp.
DEVICE void add_terms(const Params &p, Scores &s, const Sequence &sequence, int head, int first_row,
                      int tile) {
  int key0 = first_key(tile);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = min(first_row + 8 * h + lane_index() / 4, sequence.rows - 1);
    int distance = key0 - row - sequence.shift;
    Terms terms = terms_of(p, sequence.batch, head, row);
    if (p.softcap > 0.0f) {
      float unused;
      each(s, h, [&](float x, int) { return softcapped(terms, x, unused); });
    } else {
      each(s, h, [&](float x, int) { return x * terms.scale; });
    }
    if (p.alibi_slopes) each(s, h, [&](float x, int at) { return x + alibi(terms, distance + at); });
  }
}

DEVICE void mask(const Params &p, Scores &s, const Sequence &sequence, int first_row, int tile) {
  int key0 = first_key(tile);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    int row = first_row + 8 * h + lane_index() / 4;
    Seen seen = keys_seen(p, sequence, row, row);
    int low = seen.low - key0, high = seen.high - key0;
    each(s, h, [&](float x, int at) { return at >= high ? -INFINITY_F : x; });
    if (p.window_left >= 0) each(s, h, [&](float x, int at) { return at < low ? -INFINITY_F : x; });
  }
}

// Brings bases and sums to new ones where a maximum has outgrown the old one by kLag. Whether the output
// has to follow, by `factors`.
DEVICE bool raise(float to_base_2, const Scores &s, Rows &rows, float (&factors)[2]) {
  float largest[2];
  bool outgrown = false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    largest[h] = __builtin_fmaxf(s[2 * h], s[2 * h + 1]);
#pragma unroll
    for (int t = 1; t < kKeyTiles; ++t)
      largest[h] = __builtin_fmaxf(largest[h], __builtin_fmaxf(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]));
    largest[h] *= to_base_2;
    outgrown |= largest[h] > rows[h].base + kLag;
  }
  if (!__any_sync(kAllLanes, outgrown)) return false;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float raised = __builtin_fmaxf(rows[h].base, row_max(largest[h]));
    factors[h] = exp2(rows[h].base - raised);
    rows[h].base = raised;
    rows[h].total *= factors[h];
  }
  return true;
}

DEVICE void rescale(Output &o, const float (&factors)[2]) {
#pragma unroll
  for (int t = 0; t < kDimTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[4 * t + i] *= factors[i / 2];
}

// Scores become probabilities, in float32 ...
DEVICE void exponentiate(float to_base_2, Scores &s, Rows &rows) {
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Row &row = rows[i / 2];
      s[4 * t + i] = exp2(__builtin_fmaf(s[4 * t + i], to_base_2, -row.base));
      row.total += s[4 * t + i];
    }
}
// ... and the second product's operand.
DEVICE void round_to(Probabilities &p, const Scores &s) {
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      p[t / 2][t % 2 * 2 + h] = Format<DTYPE>::nearest(s[4 * t + 2 * h], s[4 * t + 2 * h + 1]);
}

// ---- the end of a row ---------------------------------------------------------------------------

// Four lanes that hold pairs 0 ... 3 of four tiles of 8 columns get one whole tile each.
DEVICE void gather(unsigned (&x)[4]) {
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

// What a row's sum means: its output's factor, 0 where it saw nothing, and its LSE.
struct Finished {
  float inverse, lse;
};
DEVICE Finished finish(const Params &p, const Row &row, int head, int part) {
  float total = row_sum(row.total), base = row.base, factor = 1.0f;
  if (p.sinks && p.use_sinks && part == 0) {
    // One more logit, without a value.
    float sink = ((const float *)p.sinks)[head] * kLog2E;
    float raised = __builtin_fmaxf(base, sink);
    factor = exp2(base - raised);
    total = total * factor + exp2(sink - raised);
    base = raised;
  }
  bool saw = !(total <= 0.0f);  // a NaN has to come through
  return Finished{saw ? factor / total : 0.0f, saw ? (base + log2(total)) * kLn2 : -INFINITY_F};
}
