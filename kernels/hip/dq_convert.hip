// The end of the one-pass backward: dQ from float32 sums (bwd_dq.h) to 16 bits, times the scale; the sinks'
// gradient from the sums that the wavefronts have left.
//
// A wavefront takes a tile of 16 rows of a head. Of two neighboring products of dQ^T a lane has 8
// neighboring elements of its row: 16 bytes.
#include "bwd_dq.h"
#include "bwd_score.h"
#include "packed.h"

#if !defined(DTYPE) || !defined(HEAD_DIM)
#error "the plan defines DTYPE and HEAD_DIM"
#endif

constexpr int kWaves = 4;

extern "C" __global__ WORKGROUP(kWaves *kLanes, 4) void dq_convert(Params p) {
  typedef Mma<DTYPE, 16> M;
  RowBlock at = rows_of_workgroup<kWaves * kSumRows>(p);
  int head = at.head, first = at.first + wave_index() * kSumRows;
  Sequence s = sequence_of(p, at.batch);
  int row = first + M::column();
  if (row >= s.rows) return;
  if (p.dsinks && !M::part()) store_sink_share(p, s, head, row);
  const float *sums =
      (const float *)p.dq_accum + sum_tile(p, s, first, head) * (kSumRows * HEAD_DIM) + lane_index();
  unsigned short *dq = (unsigned short *)p.dq + s.row_batch * p.dq_batch + (s.row0 + row) * p.dq_row +
                       head * p.dq_head;
#pragma unroll
  for (int pair = 0; pair < HEAD_DIM / 32; ++pair) {
    int element = pair * 32 + M::part() * 8;
    if (element >= p.head_dim) continue;
    Quad x;
    for (int r = 0; r < 4; ++r) {
      const float *two = sums + (pair * 8 + r) * kLanes;
      x[r] = Format<DTYPE>::nearest(two[0] * p.scale, two[4 * kLanes] * p.scale);
    }
    *(Quad *)(dq + element) = x;
  }
}
