// Bounds of captured tensors in tiles on NVIDIA GPUs: ../common/tile_bounds.h.
#include "mods.h"
#include "../common/tile_bounds.h"

extern "C" __global__ WORKGROUP(kThreads, 4) void tile_bounds(KERNEL_PARAMS p) { bound_tiles(p); }
