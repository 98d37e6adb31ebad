// One row of the forward's softmax, as the four lanes hold it that share it in the accumulators of mma.sync
// and wgmma alike.
#pragma once
#include "device.h"
#include "../params.h"

constexpr float kLowest = -3.4028234663852886e38f;

// The maximum that probabilities are taken against may lag behind by this much, in powers of two, before
// output and sum are brought to a new one: P stays below 2^8, where float32 and both 16-bit formats are as
// exact as below 1, and almost every tile goes without a rescale, and without asking the other lanes. A
// row's final result does not depend on it.
constexpr float kLag = 8.0f;

// `base` is what exponents are taken against: finite even while a row has seen nothing, as -inf - -inf
// would be NaN.
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

// What a row's sum means: whether it saw anything, its output's factor, 0 where it did not, and its LSE.
struct Finished {
  bool saw;
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
  return Finished{saw, saw ? factor / total : 0.0f, saw ? (base + log2(total)) * kLn2 : -INFINITY_F};
}
