// The mapping from workgroup to work tile.
//
// Workgroups go to the dies (XCDs) in turn, and each die has its own L2. All blocks of a head, and the
// neighboring heads of its group, read the same K and V. So a die gets neighboring heads, one after the
// other. A head's last blocks come first, because they see the most keys under a causal mask; short
// blocks are left for the end. Heads beyond a multiple of the number of dies go first, spread over all
// dies.
#pragma once
#include "../params.h"
#include "device.h"

struct Work {
  int block, part, head, batch;
};

// Workgroup `id` of blocks * parts * heads * batch.
DEVICE Work work_of(int id, int blocks, int parts, int heads, int batch, int dies) {
  int pairs = heads * batch, pieces = blocks * parts;
  int spare = pairs % dies;
  int pair, piece;
  if (id < spare * pieces) {
    pair = id % spare;
    piece = id / spare;
  } else {
    int place = (id - spare * pieces) / dies;
    pair = spare + id % dies * (pairs / dies) + place / pieces;
    piece = place % pieces;
  }
  return Work{blocks - 1 - piece / parts, piece % parts, pair % heads, pair / heads};
}
