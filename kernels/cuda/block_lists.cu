// Block lists on NVIDIA GPUs: ../common/block_lists.h.
#include "mods.h"

DEVICE unsigned long long lanes_where(bool x) { return __ballot_sync(kAllLanes, x); }
DEVICE int count_of(unsigned long long x) { return __popcll(x); }

#include "../common/block_lists.h"

extern "C" __global__ WORKGROUP(kThreads, 2) void block_lists(KERNEL_PARAMS p) {
  __shared__ Meeting meeting;
  list_blocks(p, meeting);
}
