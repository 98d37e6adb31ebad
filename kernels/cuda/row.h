// One row of the forward's softmax, as the four lanes hold it that share it in the accumulators of mma.sync
// and wgmma alike.
#pragma once
#include "device.h"
#include "../params.h"

constexpr float kLowest = -3.4028234663852886e38f;

// The base of a row is a maximum that may lag behind the true one by kLag, in powers of two, before output
// and sum are rescaled to a new one. P stays below 2^8, where float32 and both 16-bit formats are as exact as
// below 1. So almost every tile needs no rescale and no exchange with the other lanes. A row's final result
// does not depend on it.
constexpr float kLag = 8.0f;

// `base`: the lagging maximum. It is finite even while a row has seen nothing, because -inf - -inf is NaN.
struct Row {
  float base;
  float total;  // this lane's share of the sum of probabilities
};

DEVICE float row_max(float x) {
  x = __builtin_fmaxf(x, from_lane_xor(x, 1));
  return __builtin_fmaxf(x, from_lane_xor(x, 2));
}
DEVICE float row_sum(float x) {
  x += from_lane_xor(x, 1);
  return x + from_lane_xor(x, 2);
}

// A finished row: whether it saw a key or, for its LSE, a key or a sink; the factor of its output; its LSE. The factor
// is also 0 where a sink hides all keys, and there a NaN of their values has to come through.
struct Finished {
  bool saw_key, has_lse;
  float inverse, lse;
};
DEVICE Finished finish(const Params &p, float base, float total, int head, int split) {
  bool saw_key = !(total <= 0.0f);  // a NaN has to come through
  float factor = 1.0f;
  if (p.sinks && p.use_sinks && split == 0) {
    // One more logit, without a value.
    float sink = ((const float *)p.sinks)[head] * kLog2E;
    float raised = __builtin_fmaxf(base, sink);
    factor = exp2(base - raised);
    total = total * factor + exp2(sink - raised);
    base = raised;
  }
  bool has_lse = !(total <= 0.0f);
  return Finished{saw_key, has_lse, has_lse ? factor / total : 0.0f,
                  has_lse ? (base + log2(total)) * kLn2 : -INFINITY_F};
}
DEVICE Finished finish(const Params &p, const Row &row, int head, int split) {
  return finish(p, row.base, row_sum(row.total), head, split);
}

// Chunks: with batch invariance long rows are computed a chunk of keys at a time, each as if there were no
// other, and merged from the last chunk to the first. Whoever merges, a block of the forward or `combine`,
// gets the same bits: this is all the arithmetic of it.
struct Join {
  float base;  // of both
  float before, chunk;  // factors
  bool has_before, has_chunk;  // which of them saw a key: what saw none leaves the other as it is
  METHOD Join(float base_before, float base_chunk)
      : base(__builtin_fmaxf(base_before, base_chunk)), before(exp2(base_before - base)),
        chunk(exp2(base_chunk - base)), has_before(base_before != kLowest), has_chunk(base_chunk != kLowest) {}
  METHOD float operator()(float x_before, float x_chunk) const {
    float both = __builtin_fmaf(x_before, before, product(x_chunk, chunk));
    return !has_chunk ? x_before : has_before ? both : x_chunk;
  }
};
