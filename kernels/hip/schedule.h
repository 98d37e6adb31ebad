// Which workgroup does what.
//
// Workgroups go to the dies (XCDs) in turn, each die has an L2 of its own, and a head's K and V are
// read by all of its blocks and by its neighbors in a group: so a die gets neighboring heads, one
// after the other. A head's last blocks come first, which see most under a causal mask: what is left
// at the end is short. Heads beyond a multiple of the dies go first, spread over all dies.
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
