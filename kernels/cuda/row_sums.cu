// The preprocessing of backward on NVIDIA GPUs: the sums of ../common/row_sums.h, and zeros where dQ adds up
// and where blocks count their turns. A block does one tile of BLOCK_Q rows of a head.
#include "format.h"
#include "../common/row_sums.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_Q)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V and BLOCK_Q"
#endif
#include "sm80/bwd_dq.h"

extern "C" __global__ WORKGROUP(kSumThreads, 4) void row_sums(KERNEL_PARAMS p) {
  int tiles = (p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
  int head = workgroup_index() / tiles % p.heads_q;
  int first = workgroup_index() % tiles * BLOCK_Q;
  Sequence s = sequence_of(p, workgroup_index() / tiles / p.heads_q);
  if (first >= s.rows) return;
  long long tile = q_tile(p, s, first, head);
  Quad *sums = (Quad *)p.dq_accum + tile * (kQTile / 4);
#pragma unroll
  for (int i = thread_index(); i < kQTile / 4; i += kSumThreads) sums[i] = Quad{0, 0, 0, 0};
  if (p.counter && thread_index() == 0) ((int *)p.counter)[tile] = 0;
  // Heads of 64 elements take 128 bytes a row.
  sum_rows<DTYPE, BLOCK_Q, HEAD_DIM_V <= 64 ? 8 : 16>(p, s, head, first);
}
