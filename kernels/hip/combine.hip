// Combine on CDNA 3: ../common/combine.h.
#include "mma.h"
#include "../common/combine.h"

#if MERGED
#define KERNEL_PARAMS ModifiedParams
#else
#define KERNEL_PARAMS Params
#endif

extern "C" __global__ WORKGROUP(kThreads, 4) void combine(KERNEL_PARAMS p) {
  __shared__ Meeting meeting;
  combine_lines(p, meeting);
}
