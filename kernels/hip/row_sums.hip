// The sums of common/row_sums.h on CDNA 3: 16 rows of a head a workgroup.
#include "mma.h"
#include "../common/row_sums.h"

constexpr int kRows = 16;

extern "C" __global__ WORKGROUP(kSumThreads, 4) void row_sums(Params p) {
  int blocks = (p.seqlen_q + kRows - 1) / kRows, id = workgroup_index();
  Sequence s = sequence_of(p, id / blocks / p.heads_q);
  sum_rows<DTYPE, kRows, 16>(p, s, id / blocks % p.heads_q, id % blocks * kRows);
}
