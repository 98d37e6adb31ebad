// Append with rotary on NVIDIA GPUs: ../common/append.h.
#include "format.h"
#include "../common/append.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void append(KERNEL_PARAMS p) { append_row(p); }
