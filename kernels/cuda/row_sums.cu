// The preprocessing of backward on NVIDIA GPUs: the sums of ../common/row_sums.h, and zeros where dQ adds up (unless
// dq_unset) and in the states of its tiles. A block does one tile of BLOCK_Q rows of a head.
#include "format.h"
#include "../common/row_sums.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_Q)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V and BLOCK_Q"
#endif
#include "sm80/bwd_dq.h"
#include "bwd_work.h"
#include "ahead.h"

// Keys of a block of Hopper's attn_bwd, whose work this kernel finds in a packed batch.
#ifndef OWNED_KEYS
#define OWNED_KEYS 0
#endif

extern "C" __global__ WORKGROUP(kSumThreads, 4) void row_sums(KERNEL_PARAMS p) {
  griddepcontrol_launch_dependents();
  if constexpr (OWNED_KEYS) {
    if (workgroup_index() == 0 && thread_index() == 0) *work_counter(p) = 0;
    if (has_work_table(p) && thread_index() < kLanes)
      make_work_table<OWNED_KEYS>(p, workgroup_index(), gridDim.x);
  }
  RowsOfBlock own(p);
  Sequence s = own.s;
  int head = own.head, first = own.first;
  if (first >= s.rows) return;
  long long tile = q_tile(p, s, first, head);
  if (!dq_unset(p)) {
    Quad *sums = (Quad *)p.dq_accum + tile * (kQTile / 4);
#pragma unroll
    for (int i = thread_index(); i < kQTile / 4; i += kSumThreads) sums[i] = Quad{0, 0, 0, 0};
  }
  if ((p.counter || dq_unset(p)) && thread_index() == 0) tile_states(p)[tile] = kUntouched;
  // Heads of 64 elements take 128 bytes a row.
  sum_rows<DTYPE, BLOCK_Q, HEAD_DIM_V <= 64 ? 8 : 16>(p, s, head, first);
}
