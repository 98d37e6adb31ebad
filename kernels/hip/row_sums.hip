// The sums of common/row_sums.h on CDNA 3.
#include "mma.h"
#include "../common/row_sums.h"

extern "C" __global__ WORKGROUP(kSumThreads, 4) void row_sums(Params p) {
  sum_rows<DTYPE>(p, workgroup_index());
}
