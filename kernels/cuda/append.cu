// Append with rotary on NVIDIA GPUs: ../common/append.h.
#include "ahead.h"
#include "format.h"
#include "../common/append.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void append(KERNEL_PARAMS p) {
  griddepcontrol_launch_dependents();  // attn_decode
  append_row(p);
}
