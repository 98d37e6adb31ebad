// Append with rotary on CDNA 3: ../common/append.h.
#include "mma.h"
#include "../common/append.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void append(Params p) { append_row(p); }
