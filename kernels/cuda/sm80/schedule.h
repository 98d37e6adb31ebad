// Which block does what.
//
// Blocks start in the order of their index. Under a causal mask the last query rows see most: all
// heads' last blocks first would leave the shortest for the end, but by the time that a head's next
// block starts, its K and V would have left the L2 cache. So heads go in sections whose K and V stay
// there together, and in a section the longest blocks of all its heads come first.
#pragma once
#include "../../params.h"

struct Work {
  int block, part, head, batch;
};

constexpr int kSectionElements = 8 << 20;  // of K and V: 16 MB

// Block `id` of blocks * parts * heads_q * batch.
DEVICE Work work_of(const Params &p, int id, int blocks) {
  int pairs = p.heads_q * p.batch, pieces = blocks * p.num_splits;
  int fitting = max(kSectionElements / (p.head_dim + p.head_dim_v) / max(p.seqlen_k, 1), 1);
  int section = min(fitting * (p.heads_q / p.heads_k), pairs);  // its heads
  int first = id / (section * pieces) * section;
  int members = min(section, pairs - first);
  int place = id - first * pieces;
  int piece = place / members, pair = first + place % members;
  return Work{blocks - 1 - piece / p.num_splits, piece % p.num_splits, pair % p.heads_q,
              pair / p.heads_q};
}
