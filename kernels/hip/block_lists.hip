// Block lists on CDNA 3: ../common/block_lists.h.
#include "mods.h"

DEVICE unsigned long long lanes_where(bool x) { return __builtin_amdgcn_ballot_w64(x); }
DEVICE int count_of(unsigned long long x) { return __builtin_popcountll(x); }

#include "../common/block_lists.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void block_lists(KERNEL_PARAMS p) {
  __shared__ Meeting meeting;
  list_blocks(p, meeting);
}
