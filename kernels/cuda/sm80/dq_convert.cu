// The end of backward: dQ from the float32 sums that attn_bwd.cu left to 16 bits, times the scale, and
// each row's share of the sinks' gradient from the sum of its P dP.
//
// A block takes one tile of BLOCK_Q rows of one head, a warp 16 rows and 32 columns of it at a time:
// four products, of which each lane of four gets the 8 columns of one.
#include "../format.h"
#include "../../common/row_sums.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(BLOCK_Q)
#error "the plan defines DTYPE, HEAD_DIM and BLOCK_Q"
#endif
#include "bwd_dq.h"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kColumns = HEAD_DIM / 32;              // of 32, which are four products
constexpr int kItems = BLOCK_Q / 16 * kColumns;      // of a tile

// The delta that the rounded O gives is, summed over rows, too far off for the sinks.
DEVICE void finish_sinks(const Params &p, const Sequence &s, int head, int row) {
  long long at = state_offset(p, s, head) + row;
  float dlse = p.dlse ? ((const float *)p.dlse)[at] : 0.0f;
  float sink = exp2(((const float *)p.sinks)[head] * kLog2E + row_states(p).minus_lse[at]);
  float *dsinks = (float *)p.dsinks + at;
  *dsinks = sink * (dlse - *dsinks);
}

// Among four neighbouring lanes: register j of lane i goes to register i of lane j.
DEVICE void transpose(unsigned (&x)[4]) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    bool upper = lane_index() & bit;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & bit) continue;
      unsigned sent = upper ? x[j] : x[j + bit];
      unsigned got = __shfl_xor_sync(kAllLanes, sent, bit);
      (upper ? x[j] : x[j + bit]) = got;
    }
  }
}

extern "C" __global__ WORKGROUP(kThreads, 4) void dq_convert(KERNEL_PARAMS p) {
  int tiles = (p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  int head = workgroup_index() / tiles % p.heads_q;
  int first = workgroup_index() % tiles * BLOCK_Q;
  Sequence s = sequence_of(p, workgroup_index() / tiles / p.heads_q);
  if (first >= s.rows) return;
  if (p.dsinks && thread_index() < min(BLOCK_Q, s.rows - first))
    finish_sinks(p, s, head, first + thread_index());

  const float *sums = (const float *)p.dq_accum + q_tile(p, s, first, head) * kQTile;
  unsigned short *dq = (unsigned short *)p.dq + s.row_batch * p.dq_batch + (s.row0 + first) * p.dq_row +
                       head * p.dq_head;
  int row = lane_index() / 4, part = lane_index() % 4;
#pragma unroll
  for (int item = wave_index(); item < kItems; item += kWarps) {
    int m = item / kColumns, n = item % kColumns * 4;
    unsigned x[2][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float *from = sums + q_product(m, n + j) + lane_index() * kLaneStep;
      float four[4];
      for (int i = 0; i < 4; ++i) four[i] = from[i * kElementStep] * p.scale;
      for (int h = 0; h < 2; ++h) x[h][j] = Format<DTYPE>::nearest(four[2 * h], four[2 * h + 1]);
    }
    for (int h = 0; h < 2; ++h) {
      transpose(x[h]);
      int place = m * 16 + row + h * 8;
      if (first + place < s.rows && (n + part) * 8 < p.head_dim)
        *(Quad *)(dq + place * p.dq_row + (n + part) * 8) = Quad{x[h][0], x[h][1], x[h][2], x[h][3]};
    }
  }
}
