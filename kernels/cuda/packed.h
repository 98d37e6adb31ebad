// Which part of a packed batch a block gets: `size` rows (or keys) of one head of one sequence, by the true
// lengths. Sequences go in sections whose K and V fit the L2 together, of at most kLanes. Of a section the
// highest blocks of its sequences come first: under a causal mask they see the most keys. A grid that counts every
// sequence as the longest one mostly has blocks without work: of 64 sequences with 29,350 rows, the longest of
// 3,037, 5 of 6, which took a fifth of the forward's time.
//
// A warp executes all of this together.
#pragma once
#include "../sequence.h"

constexpr int kSectionOfKeys = 8 << 20;  // elements of K and V: 16 MB

template <bool of_keys>
DEVICE int blocks_of(const Params &p, int batch, int size) {
  if (batch >= p.batch) return 0;
  Sequence s = sequence_of(p, batch);
  return ((of_keys ? s.keys : s.rows) + size - 1) / size;
}
DEVICE int sum_of_lanes(int x) { return __reduce_add_sync(kAllLanes, x); }
DEVICE int max_of_lanes(int x) { return __reduce_max_sync(kAllLanes, x); }

// KV heads of a section, of `heads` of a sequence: at least as many as fit, so that the last section lacks the smallest
// share (as plans.kv_heads_together). Each lane tries one number.
DEVICE int equal_sections(int heads, int fitting) {
  int least = min(fitting, heads), tried = least + min(lane_index(), least);
  unsigned share = __float_as_uint((float)(tried - 1 - (heads - 1) % tried) * reciprocal((float)tried));
  return least + __ffs(__ballot_sync(kAllLanes, share == __reduce_min_sync(kAllLanes, share))) - 1;
}

// One tile of work: block number `block` of `blocks` of a head of a sequence.
struct PackedTile {
  int batch, head, block, blocks, split;
};

// Backward numbers its tiles for blocks that own keys: `block` 0 has the last keys.
//
// Where blocks add to dQ in turn (p.counter), it goes through a section in the reverse order. Where they do not, and
// no mask makes blocks of different length or there are as many query heads as KV heads, heads come one by one, so
// that few rows are in use at a time.
template <bool of_keys, int size>
struct PackedTiles {
  int batch = 0, head = 0;          // the section's first ones
  int sequences = 0, members = 0;   // what it has: sequences, and heads of each
  int blocks = 0;                   // of the lane's sequence
  int end = 0;                      // the number behind its last tile

  static METHOD int heads(const Params &p) { return of_keys ? p.heads_k : p.heads_q; }
  static METHOD int parts(const Params &p) { return of_keys ? 1 : p.num_splits; }
  static METHOD bool one_by_one(const Params &p) {
    bool masked = p.window_left >= 0 || p.window_right >= 0;
    return of_keys && !p.counter && !(masked && p.heads_q / p.heads_k * p.num_splits > 1);
  }

  // Tiles of all sequences.
  METHOD int count(const Params &p) const {
    int sum = 0;
#pragma unroll 1
    for (int at = lane_index(); at < p.batch; at += kLanes) sum += blocks_of<of_keys>(p, at, size);
    return sum_of_lanes(sum) * heads(p) * parts(p);
  }
  static METHOD int sum_up_to_lane(int x) {
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      int before = __shfl_up_sync(kAllLanes, x, step);
      if (lane_index() >= step) x += before;
    }
    return x;
  }
  // The next section, unless there is none.
  METHOD bool advance(const Params &p) {
    head += members;
    if (head == heads(p) || !members) {
      head = 0;
      batch += sequences;
    }
    if (batch >= p.batch) return false;
    int mine = batch + lane_index();
    sequences = kLanes;
    members = heads(p);
    if (!one_by_one(p)) {
      int most = kSectionOfKeys / (p.head_dim + p.head_dim_v) / p.heads_k;
      int keys = mine < p.batch ? min(max(sequence_of(p, mine).keys, 1), most + 1) : most + 1;
      sequences = __popc(__ballot_sync(kAllLanes, sum_up_to_lane(keys) <= most));
      if (head || !sequences) {  // a part of the heads of one
        sequences = 1;
        int group = p.heads_q / p.heads_k, all = max(sequence_of(p, batch).keys, 1);
        int fitting = max(kSectionOfKeys / (p.head_dim + p.head_dim_v) / all, 1);
        members = min(of_keys ? fitting : equal_sections(members / group, fitting) * group, members - head);
      }
    }
    blocks = lane_index() < sequences ? blocks_of<of_keys>(p, mine, size) : 0;
    end += sum_of_lanes(blocks) * members * parts(p);
    return true;
  }
  // Tile number `id`, which is not below that of the last question. False: there are fewer.
  METHOD bool find(const Params &p, int id, PackedTile &tile) {
    while (id >= end)
      if (!advance(p)) return false;
    int begin = end - sum_of_lanes(blocks) * members * parts(p), place = id - begin, number, lane;
    if (one_by_one(p)) {
      int first = (sum_up_to_lane(blocks) - blocks) * members;
      lane = 31 - __clz(__ballot_sync(kAllLanes, blocks > 0 && first <= place));
      tile.blocks = __shfl_sync(kAllLanes, blocks, lane);
      place -= __shfl_sync(kAllLanes, first, lane);
      tile.head = place / tile.blocks;
      tile.block = tile.blocks - 1 - (place - tile.head * tile.blocks);
      tile.batch = batch + lane;
      return true;
    }
    if (of_keys && p.counter) place = end - 1 - id;
    int top = max_of_lanes(blocks);
    unsigned with;
    while (true) {
      with = __ballot_sync(kAllLanes, blocks >= top);  // sequences that have this block
      int below = max_of_lanes(blocks < top ? blocks : 0), row = __popc(with) * members * parts(p);
      number = place / row;
      if (number < top - below) break;
      place -= (top - below) * row;
      top = below;
    }
    place -= number * __popc(with) * members * parts(p);
    tile.block = top - 1 - number;
    number = place / members;
    tile.head = head + place - number * members;
    tile.split = number / __popc(with);
    number -= tile.split * __popc(with);
    bool mine = (with >> lane_index() & 1) && __popc(with & ((1u << lane_index()) - 1)) == number;
    lane = __ffs(__ballot_sync(kAllLanes, mine)) - 1;
    tile.batch = batch + lane;
    tile.blocks = __shfl_sync(kAllLanes, blocks, lane);
    return true;
  }
};
