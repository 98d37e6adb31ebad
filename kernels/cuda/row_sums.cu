// Backward's row sums on NVIDIA GPUs: ../common/row_sums.h.
#include "format.h"
#include "../common/row_sums.h"

extern "C" __global__ WORKGROUP(kSumThreads, 4) void row_sums(KERNEL_PARAMS p) {
  sum_rows<DTYPE>(p, workgroup_index());
}
