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

// The same of a decode kernel, whose sequences may differ much in length: a short one leaves all parts but the first
// few empty. The last parts of all heads come first, which only long sequences have. Neighboring parts of a head go to
// different dies. Only the blocks of a part, which read the same keys, go to one die, one after the other.
DEVICE Work decode_work(unsigned id, unsigned blocks, unsigned parts, unsigned heads, unsigned batch, unsigned dies) {
  unsigned pairs = heads * batch, shares = pairs * parts, whole = quotient(shares, dies) * dies, share, block;
  if (id < whole * blocks) {
    unsigned place = quotient(id, dies), first = quotient(place, blocks);
    share = first * dies + id - place * dies;
    block = place - first * blocks;
  } else {
    id -= whole * blocks;
    block = quotient(id, shares - whole);
    share = whole + id - block * (shares - whole);
  }
  unsigned round = quotient(share, pairs), part = parts - 1 - round;
  unsigned turned = part - quotient(part, pairs) * pairs, pair = share - round * pairs;
  pair += pair < turned ? pairs - turned : -turned;
  unsigned sequence = quotient(pair, heads);
  return Work{(int)block, (int)part, (int)(pair - sequence * heads), (int)sequence};
}
