// Combine on NVIDIA GPUs: ../common/combine.h.
#include "ahead.h"
#include "format.h"
#include "../common/combine.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void combine(KERNEL_PARAMS p) {
  __shared__ Meeting meeting;
  griddepcontrol_wait();
  combine_lines(p, meeting);
}
