// Rows of no sequence on CDNA 3: ../common/gaps.h.
#include "mma.h"
#include "../common/gaps.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void gaps(Params p) { fill_gaps(p); }
