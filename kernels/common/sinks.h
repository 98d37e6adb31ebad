// A row's share of the sinks' gradient from the sum of its P dP, `dots`. The delta that the rounded O
// gives is, summed over rows, three times as far off as naive attention's.
#pragma once
#include "row_sums.h"

DEVICE float sink_share(const Params &p, const Sequence &s, int head, int row, float dots) {
  long long at = state_offset(p, s, head) + row;
  float dlse = p.dlse ? ((const float *)p.dlse)[at] : 0.0f;
  float sink = exp2(((const float *)p.sinks)[head] * kLog2E + row_states(p).minus_lse[at]);
  return sink * (dlse - dots);
}
