// The postprocessing of backward: dQ from the float32 sums that attn_bwd.cu left to 16 bits, times the scale,
// and each row's share of the sinks' gradient from the sum of its P dP.
//
// A block takes one tile of BLOCK_Q rows of one head, a warp 16 rows and 32 columns of it at a time: four
// products, of which each of four lanes gets the 8 columns of one. TRANSPOSED: the products are of dQ^T, and a
// warp takes 8 rows and 32 columns.
#include "../ahead.h"
#include "../format.h"
#include "../../common/row_sums.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(BLOCK_Q) || !defined(TRANSPOSED)
#error "the plan defines DTYPE, HEAD_DIM, BLOCK_Q and TRANSPOSED"
#endif
#include "bwd_dq.h"

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kLanes;
constexpr int kColumns = HEAD_DIM / 32;              // of 32, which are four products
constexpr int kHalves = TRANSPOSED ? 1 : 2;          // rows of an item by eights
constexpr int kItems = BLOCK_Q / (8 * kHalves) * kColumns;  // of a tile

// The sinks need the exact sum: the delta of the rounded O, summed over rows, is too far off. Ampere's kernel
// leaves it. Hopper's leaves what is to be subtracted (../sm90/bwd_terms.h), for all rows together.
DEVICE void finish_sinks(const Params &p, const Sequence &s, int head, int row) {
  if (TRANSPOSED) {
    store_sink_share(p, s, head, row);
    return;
  }
  long long at = state_offset(p, s, head) + row;
  float dlse = p.dlse ? ((const float *)p.dlse)[at] : 0.0f;
  float sink = exp2(((const float *)p.sinks)[head] * kLog2E + row_states(p).minus_lse[at]);
  float *dsinks = (float *)p.dsinks + at;
  *dsinks = sink * (dlse - *dsinks);
}

// Among four neighboring lanes: register j of lane i goes to register i of lane j.
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

// An 8 x 8 matrix of 16-bit elements as ldmatrix would give it.
DEVICE unsigned transposed_matrix(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// Two rows, 8 apart, of the products at rows 16 m and columns 8 n, ... 8 (n + 3), in 16 bits.
DEVICE void read_rows(const Params &p, const float *sums, int m, int n, unsigned (&x)[2][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float four[4];
    read(four, sums + q_product<false>(m, n + j) + lane_index() * kLaneStep);
    for (int h = 0; h < 2; ++h)
      x[h][j] = Format<DTYPE>::nearest(four[2 * h] * p.scale, four[2 * h + 1] * p.scale);
  }
}
// One row of dQ from products of dQ^T: rows 8 m, columns 8 n ... 8 (n + 3) of dQ.
DEVICE void read_rows(const Params &p, const float *sums, int m, int n, unsigned (&x)[1][4]) {
  float factor = p.dropout_threshold ? p.scale * p.dropout_scale : p.scale;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float four[4];
    read(four, sums + q_product<true>(n / 2 + j, m) + lane_index() * kLaneStep);
    for (int h = 0; h < 2; ++h)
      x[0][2 * j + h] =
          transposed_matrix(Format<DTYPE>::nearest(four[2 * h] * factor, four[2 * h + 1] * factor));
  }
}

extern "C" __global__ WORKGROUP(kThreads, 4) void dq_convert(KERNEL_PARAMS p) {
  griddepcontrol_wait();
  RowsOfBlock own(p);
  Sequence s = own.s;
  int head = own.head, first = own.first;
  if (first >= s.rows) return;
  if (p.dsinks && thread_index() < min(BLOCK_Q, s.rows - first))
    finish_sinks(p, s, head, first + thread_index());

  long long tile = q_tile(p, s, first, head);
  const float *sums = (const float *)p.dq_accum + tile * kQTile;
  bool none = dq_unset(p) && tile_states(p)[tile] == kUntouched;  // no row sees a key
  unsigned short *dq = (unsigned short *)p.dq + s.row_batch * p.dq_batch + (s.row0 + first) * p.dq_row +
                       head * p.dq_head;
  int row = lane_index() / 4, part = lane_index() % 4;
#pragma unroll
  for (int item = wave_index(); item < kItems; item += kWarps) {
    int m = item / kColumns, n = item % kColumns * 4;
    unsigned x[kHalves][4] = {};
    if (!none) read_rows(p, sums, m, n, x);
    for (int h = 0; h < kHalves; ++h) {
      transpose(x[h]);
      int place = (m * kHalves + h) * 8 + row;
      if (first + place < s.rows && (n + part) * 8 < p.head_dim)
        *(Quad *)(dq + place * p.dq_row + (n + part) * 8) = Quad{x[h][0], x[h][1], x[h][2], x[h][3]};
    }
  }
}
