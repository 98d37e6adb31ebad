// Tensors that kernels are given behind Params: those that mods captured, or the parts that `combine` merges.
#pragma once
#include "params.h"

// Of one, in elements; dimensions that it lacks have a size of 1.
struct Captured {
  void *data;
  int size[4], stride[4];
};
// What kernels of such plans take by value, as pyfa/abi.py packs it.
#ifdef TENSOR_MAPS
typedef MappedParams ParamsBefore;
#else
typedef Params ParamsBefore;
#endif
struct ModifiedParams : ParamsBefore {
#if LISTS
  Captured captured[MOD_CAPTURED + 3];  // and block lists (lists.h), and what makes them asks for (tile_bounds.h)
#else
  Captured captured[MOD_CAPTURED ? MOD_CAPTURED : 1];
#endif
};
static_assert(sizeof(Captured) == 40, "as pyfa/abi.py packs it");

// Of a ModifiedParams, which begins with Params either way.
DEVICE const Captured *captured_of(const Params &p) { return ((const ModifiedParams &)p).captured; }
