// What backward needs to know of each query row, once for all its tiles: -delta, where delta =
// rowsum(dO o O) - dLSE is what every dP of the row is measured against, and -LSE in base 2, -inf
// for rows that see nothing, so that P = exp2(score + that) is 0. Needs DEVICE, Quad, BFLOAT16,
// kLog2E, from_lane_xor and thread_index.
#pragma once
#include "../params.h"
#include "../sequence.h"

constexpr int kSumThreads = 256;

// Where -delta and -LSE begin: shaped as the LSE, one after the other.
struct RowStates {
  float *minus_delta, *minus_lse;
};

DEVICE RowStates row_states(const Params &p) {
  long long rows = p.lse_batch ? p.batch * p.lse_batch : p.heads_q * p.lse_head;
  float *states = (float *)p.delta;
  return RowStates{states, states + rows};
}

DEVICE long long state_offset(const Params &p, const Sequence &s, int head) {
  return s.row_batch * p.lse_batch + head * p.lse_head + s.row0;
}

// Behind the rows' shares of the sinks' gradient, shaped as the LSE, the sums that Hopper's warps, and wavefronts of
// the one-pass backward, leave for their keys: one for each head and kSinkKeys keys.
constexpr int kSinkKeys = 16;
DEVICE int sink_sum_count(const Params &p) { return (p.seqlen_k + 127) / 128 * (128 / kSinkKeys); }
DEVICE float *sink_sums(const Params &p, int batch, int head) {
  long long rows = p.lse_batch ? p.batch * p.lse_batch : p.heads_q * p.lse_head;
  return (float *)p.dsinks + rows + (long long)(batch * p.heads_q + head) * sink_sum_count(p);
}

// A row's share of the sinks' gradient, w (dLSE - sum of P dP) with w = exp(sink - LSE), where the kernel over keys
// has left sums of w P (dP - delta), for all rows of a head together: since the sum of P is 1 - w, the rest is of the
// row alone. Each row subtracts its part of the sums.
DEVICE void store_sink_share(const Params &p, const Sequence &s, int head, int row) {
  long long at = state_offset(p, s, head) + row;
  float dlse = p.dlse ? ((const float *)p.dlse)[at] : 0.0f;
  float sink = exp2(((const float *)p.sinks)[head] * kLog2E + row_states(p).minus_lse[at]);
  float share = sink * (dlse + row_states(p).minus_delta[at] * (1.0f - sink));
  for (int i = row; i < sink_sum_count(p); i += s.rows) share -= sink_sums(p, s.batch, head)[i];
  ((float *)p.dsinks)[at] = share;
}

// The 16-bit element in the low half.
template <int dtype>
DEVICE float low_half(unsigned x) {
  if (dtype == BFLOAT16) return __builtin_bit_cast(float, x << 16);
  return float_of_half((unsigned short)x);
}

template <int dtype>
DEVICE float dot(Quad x, Quad y) {
  float sum = 0.0f;
  for (int i = 0; i < 4; ++i)
    sum += low_half<dtype>(x[i]) * low_half<dtype>(y[i]) +
           low_half<dtype>(x[i] >> 16) * low_half<dtype>(y[i] >> 16);
  return sum;
}

// Rows first ... first + rows - 1 of a head: `lanes` lanes share a row, 16 bytes each at a time, and all
// of the workgroup's rows are asked for before the first sum. Where the last round is not whole, other workgroups
// compute the same for the rows beyond.
template <int dtype, int rows, int lanes>
DEVICE void sum_rows(const Params &p, const Sequence &s, int head, int first) {
  constexpr int kStep = kSumThreads / lanes, kMine = (rows + kStep - 1) / kStep;
  typedef const unsigned short *Elements;
  Elements out = (Elements)p.out + s.row_batch * p.out_batch + s.row0 * p.out_row + head * p.out_head;
  Elements dout =
      (Elements)p.dout + s.row_batch * p.dout_batch + s.row0 * p.dout_row + head * p.dout_head;
  first += thread_index() / lanes;
  float sums[kMine] = {};
  for (int d = thread_index() % lanes * 8; d < p.head_dim_v; d += lanes * 8) {
    Quad of_out[kMine], of_dout[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      int row = first + i * kStep;
      of_out[i] = of_dout[i] = Quad{0, 0, 0, 0};
      if (row >= s.rows) continue;
      of_out[i] = *(const Quad *)(out + row * p.out_row + d);
      of_dout[i] = *(const Quad *)(dout + row * p.dout_row + d);
    }
#pragma unroll
    for (int i = 0; i < kMine; ++i) sums[i] += dot<dtype>(of_out[i], of_dout[i]);
  }
  RowStates states = row_states(p);
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    for (int bit = 1; bit < lanes; bit *= 2) sums[i] += from_lane_xor(sums[i], bit);
    int row = first + i * kStep;
    if (row >= s.rows || thread_index() % lanes) continue;
    long long at = state_offset(p, s, head) + row;
    float lse = ((const float *)p.lse)[at];
    float dlse = p.dlse ? ((const float *)p.dlse)[at] : 0.0f;
    bool saw = lse != -INFINITY_F;  // a NaN has to come through
    states.minus_delta[at] = saw ? dlse - sums[i] : 0.0f;
    states.minus_lse[at] = saw ? -lse * kLog2E : -INFINITY_F;
  }
}
