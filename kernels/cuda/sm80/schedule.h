// Which work tile a block gets.
//
// Blocks start in the order of their index. Under a causal mask the last query rows see the most keys, so
// they should start first. But if all heads' last rows came first, a head's K and V would have left the L2
// cache before its next rows start. So heads go in sections whose K and V fit the L2 cache together. In a
// section the longest work tiles of all its heads come first.
#pragma once
#include "../../params.h"

struct Work {
  int block, split, head, batch;
};

constexpr int kSectionElements = 8 << 20;  // of K and V: 16 MB

// Work tile `id` of blocks * splits * heads * batch; `heads`: of q, or of k where its query heads share a block.
DEVICE Work work_of(const Params &p, int id, int blocks, int heads) {
  int pairs = heads * p.batch, tiles = blocks * p.num_splits;
  int fitting = max(kSectionElements / (p.head_dim + p.head_dim_v) / max(p.seqlen_k, 1), 1);
  int section = min(fitting * (heads / p.heads_k), pairs);  // its heads
  int first = id / (section * tiles) * section;
  int members = min(section, pairs - first);
  int place = id - first * tiles;
  int tile = place / members, pair = first + place % members;
  return Work{blocks - 1 - tile / p.num_splits, tile % p.num_splits, pair % heads, pair / heads};
}
