// What row_sums leaves for blocks that own keys, behind the row states: a counter, from which they take work tiles,
// and for a packed batch a table of these, since to find one takes 1 to 2 us. It has an entry for each of as many work
// tiles as the lengths can need.
#pragma once
#include "packed.h"
#include "../common/row_sums.h"

struct Owned {
  int batch, head_k, first_key;  // head_k: of p.heads_k, which counts each part of a group
};
constexpr int kNoKeys = 1 << 30;

DEVICE bool has_work_table(const Params &p) { return p.cu_seqlens_k || p.seqused_k; }
// `size`: keys of a block.
DEVICE int work_count(const Params &p, int size) {
  int tiles = (p.seqlen_k + size - 1) / size * p.batch;
  if (p.cu_seqlens_k) tiles = int_at(p.cu_seqlens_k, p.batch) / size + p.batch;
  return tiles * p.heads_k;
}
// Work tiles taken, of most plans beyond the first one of each block.
DEVICE int *work_counter(const Params &p) {
  RowStates states = row_states(p);
  long long floats = 2 * (states.minus_lse - states.minus_delta);
  return (int *)(states.minus_delta + (floats + 3) / 4 * 4);
}
DEVICE Quad *work_table(const Params &p) { return (Quad *)work_counter(p) + 1; }
// A warp makes every `step`-th entry from `id` on.
template <int size>
DEVICE void make_work_table(const Params &p, int id, int step) {
  PackedTiles<true, size> tiles;
  PackedTile at;
  for (int count = work_count(p, size); id < count; id += step) {
    Quad entry{0, 0, kNoKeys, 0};
    if (tiles.find(p, id, at))
      entry = Quad{(unsigned)at.batch, (unsigned)at.head, (unsigned)(at.blocks - 1 - at.block) * size, 0};
    if (lane_index() == 0) work_table(p)[id] = entry;
  }
}
DEVICE Owned owned_of_table(const Params &p, int id, int size) {
  if (id >= work_count(p, size)) return Owned{0, 0, kNoKeys};
  Quad entry = work_table(p)[id];
  return Owned{(int)entry[0], (int)entry[1], (int)entry[2]};
}
