// Combine on CDNA 3: ../common/combine.h.
#include "mma.h"
#include "../common/combine.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void combine(Params p) {
  __shared__ Meeting meeting;
  combine_lines(p, meeting);
}
