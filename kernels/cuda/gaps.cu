// Rows of no sequence on NVIDIA GPUs: ../common/gaps.h.
#include "format.h"
#include "../common/gaps.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void gaps(KERNEL_PARAMS p) { fill_gaps(p); }
