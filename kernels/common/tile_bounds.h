// What a captured tensor can be in a tile: the least and the largest element at the tile's rows, and at its keys.
// Before block_lists.h, for a mask_mod that asks for a tensor by its row alone or by its key alone: a wavefront
// reads these elements once for each tile of rows and of keys, not a thread for each pair of the two.
//
// A row of the table is a tile: first those of rows, then those of keys, for each sequence and head that the lists
// distinguish. It holds kTabled bounds. Needs a vendor's mods.h.
#pragma once
#include "../ranges.h"
#include "mask_range.h"

constexpr int kThreads = 256, kWaves = kThreads / kLanes;
constexpr int kTiles = 8;  // of a workgroup

// `number`: a row of the table.
DEVICE void bound_tile(const Params &p, int number) {
  const Captured &tables = captured_of(p)[MOD_CAPTURED + 2];
  int heads = tables.size[1], tiles = tables.size[2];
  int tile = number % tiles, head = number / tiles % heads, batch = number / tiles / heads;
  int behind = tile - tiles_of(p.seqlen_q, ROWS);
  ModPlace at(p, batch, head);
  at.pin_all();
  Range b{at.b, at.b}, h{at.h, at.h}, found[kTabled] = {};
  if (behind < 0)
    bounds_of_rows(at.captured, b, h, places_of(tile, ROWS, p.seqlen_q, at.q), found);
  else
    bounds_of_keys(at.captured, b, h, places_of(behind, KEYS, p.seqlen_k, at.kv), found);
  GLOBAL long long *table = (GLOBAL long long *)table_of(tables, batch, head, tile);
  if (lane_index() == 0)
#pragma unroll
    for (int i = 0; i < kTabled; ++i) {
      table[2 * i] = found[i].low;
      table[2 * i + 1] = found[i].high;
    }
}

DEVICE void bound_tiles(const Params &p) {
  const Captured &tables = captured_of(p)[MOD_CAPTURED + 2];
  int first = workgroup_index() * kTiles, end = tables.size[0] * tables.size[1] * tables.size[2];
  for (int i = first + wave_index(); i < min(first + kTiles, end); i += kWaves) bound_tile(p, i);
}
