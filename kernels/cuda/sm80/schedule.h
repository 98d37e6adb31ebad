// Which work tile a block gets.
//
// Blocks start in the order of their index. Under a causal mask the last query rows see the most keys, so
// they should start first. But if all heads' last rows came first, a head's K and V would have left the L2
// cache before its next rows start. So heads go in sections whose K and V fit the L2 cache together. In a
// section the longest work tiles of all its heads come first.
#pragma once
#include "../order.h"

struct Work {
  int block, split, head, batch;
};

// Work tile `id` of blocks * splits * heads * batch; `heads`: of q, or of k where its query heads share a block.
DEVICE Work work_of(const Params &p, int id, int blocks, int heads) {
  InSection found = place_in_section(p, id, blocks * p.num_splits, heads * p.batch);
  int block = divide(found.tile, p.splits_inverse), batch = divide(found.pair, p.heads_inverse);
  return Work{blocks - 1 - block, found.tile - block * p.num_splits, found.pair - batch * heads, batch};
}
