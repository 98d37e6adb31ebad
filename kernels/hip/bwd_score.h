// What both backward kernels make of scores beyond scale and masks: dropout's bits, the sinks' gradient.
#pragma once
#include "bwd_inputs.h"
#include "../philox.h"
#include "../score.h"

// The one score term of a plan that has no other (bwd_terms.h).
#ifndef TERM
#define TERM 0
#endif
constexpr bool kSinksAlone = TERM == 1, kAlibiAlone = TERM == 2, kSoftcapAlone = TERM == 3,
               kDropoutAlone = TERM == 4, kBiasAlone = TERM >= 5;
// A bias alone has 16 bits, or with codes of its own 32, or is boolean.
constexpr int kBiasSize = TERM == 6 ? 4 : TERM == 7 ? 1 : 2;

// `x` of lane `from` of the four that this lane is one of.
template <int from>
DEVICE unsigned of_four(unsigned x) {
  return __builtin_amdgcn_mov_dpp(x, from * 0x55, 0xf, 0xf, true);
}

// What draws need to know of a sequence, all indices global.
struct Dropout {
  unsigned long long seed;
  unsigned threshold;
  int k_start, q_start, head_start, batch;

  METHOD Dropout(const Params &p, int sequence) {
    seed = *(const unsigned long long *)p.seed;
    threshold = p.dropout_threshold;
    k_start = p.k_start;
    q_start = p.q_start;
    head_start = p.head_start;
    batch = sequence + p.batch_start;
  }
  METHOD unsigned group_of(int key) const { return (unsigned)(key + k_start) / 4; }
  // A draw serves four keys of a row. Bit i: whether the i-th is kept.
  METHOD unsigned kept_of_four(unsigned group, int row, int head) const {
    Draws draws = philox(group, row + q_start, head + head_start, batch, seed);
    unsigned bits = 0;
    for (int i = 0; i < 4; ++i) bits |= (draws.word[i] < threshold ? 1u : 0u) << i;
    return bits;
  }
};

// Where keys lie in lanes, four neighboring lanes share draws: lane i of them has drawn for row i of each
// four rows, by bits of all four keys. What they have drawn for this lane's key, by bits of rows. `first`:
// the bits of the first rows.
template <unsigned first>
DEVICE unsigned kept_by_lane(unsigned bits) {
  int lane = lane_index() % 4;
  return (of_four<0>(bits) >> lane & first) | (of_four<1>(bits) >> lane & first) << 1 |
         (of_four<2>(bits) >> lane & first) << 2 | (of_four<3>(bits) >> lane & first) << 3;
}

// A row's share of the sinks' gradient, from the sum of its P dP: the delta that the rounded O gives
// is, summed over rows, three times as far off as naive attention's.
DEVICE void store_sink_gradient(const Params &p, const Sequence &s, int head, int row, float dots) {
  long long at = state_offset(p, s, head) + row;
  float dlse = p.dlse ? ((const float *)p.dlse)[at] : 0.0f;
  float sink = exp2(((const float *)p.sinks)[head] * kLog2E + row_states(p).minus_lse[at]);
  ((float *)p.dsinks)[at] = sink * (dlse - dots);
}
