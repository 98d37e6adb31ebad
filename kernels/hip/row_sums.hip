// The start of backward on CDNA 3: the sums of common/row_sums.h for 16 rows of a head a workgroup and,
// where dQ is going to be added up in heads of HEAD_DIM, not 0, zeros for them.
#include "mma.h"
#include "bwd_dq.h"
#include "packed.h"
#include "../common/row_sums.h"

#if !defined(DTYPE) || !defined(HEAD_DIM)
#error "the plan defines DTYPE and HEAD_DIM"
#endif

extern "C" __global__ WORKGROUP(kSumThreads, 4) void row_sums(Params p) {
  RowBlock at = rows_of_workgroup<kSumRows>(p);
  int head = at.head, first = at.first;
  Sequence s = sequence_of(p, at.batch);
  if (HEAD_DIM && first < s.rows) {
    constexpr int kQuads = kSumRows * HEAD_DIM / 4;
    Quad *sums = (Quad *)p.dq_accum + sum_tile(p, s, first, head) * kQuads;
    for (int i = thread_index(); i < kQuads; i += kSumThreads) sums[i] = Quad{0, 0, 0, 0};
  }
  sum_rows<DTYPE, kSumRows, 16>(p, s, head, first);
}
