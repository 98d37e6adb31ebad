// The producer warpgroup: a thread issues the TMA copies, over pages two or four; in float8 three warps transpose V.
#pragma once
#include "fwd_shape.h"
#include "key_tile.h"

DEVICE int key_head(const Params &p, int head) { return PACKED ? head : head / (p.heads_q / p.heads_k); }

// The tiles of keys of a work tile, from the last number to the first: that of number n and the one behind.
#if LISTS
static_assert(!kTwoProducers, "the second producer visits every tile");
struct Walk {
  Visits visits;
  int first, here, behind;
  METHOD Walk(const Params &p, const WorkTile &tile)
      : visits(p, tile.s, tile.work.head, tile.row), first(tile.first), here(visits[tile.last]),
        behind(visits[max(tile.last - 1, first)]) {}
  METHOD int now(int) const { return tile_of(here); }
  METHOD int next(int) const { return tile_of(behind); }
  // To n - 1. An entry is asked for a tile ahead of its K.
  METHOD void advance(int n) {
    here = behind;
    behind = visits[max(n - 2, first)];
  }
};
#else
struct Walk {
  METHOD Walk(const Params &, const WorkTile &) {}
  METHOD int now(int n) const { return n; }
  METHOD int next(int n) const { return n; }
  METHOD void advance(int) {}
};
#endif

// Waits for a stage of K or V, and asks for a share of tile `n` of its head.
template <bool of_v>
DEVICE void load_tile(const MappedParams &mapped, Shared shared, PipelineState<> &pipe, const Sequence &s,
                      int head_k, int n, int share = 0) {
  Barriers barriers{shared + kBarriersAt};
  Shared full = of_v ? barriers.v_full(pipe.stage) : barriers.k_full(pipe.stage);
  Pages<kShares> pages(mapped.params, s, n, share);
  mbarrier_wait(of_v ? barriers.v_empty(pipe.stage) : barriers.k_empty(pipe.stage), pipe.phase ^ 1);
  Shared to = shared + (of_v ? kVAt + pipe.stage * kVBytes : kKAt + pipe.stage * kKBytes);
  const TensorMap *map = mapped.maps + (of_v ? 2 : 1);
  load_keys<of_v ? kPanelsV : kPanels, of_v ? kWidthV : kWidth, of_v ? kVPanel : kKPanel>(
      mapped.params, s, pages, map, to, full, head_k, n);
  pipe.advance();
}

// Another producer: loads a share of K or V of the work tiles that the first one tells of.
template <bool of_v>
DEVICE void produce_more(const MappedParams &mapped, Shared shared, int share) {
  Barriers barriers{shared + kBarriersAt};
  PipelineState<> pipe;
  PipelineState<kWorkStages> work_pipe;
  while (true) {
    mbarrier_wait(barriers.work_full(work_pipe.stage), work_pipe.phase);
    Shared info = shared + kWorkInfoAt + work_pipe.stage * kWorkInfoBytes;
    auto range = load_shared<decltype(WorkTileInfo::range)>(info);
    auto sequence = load_shared<decltype(WorkTileInfo::sequence)>(info + 16);
    if (range.row < 0) break;
    mbarrier_arrive(barriers.work_empty(work_pipe.stage));
    work_pipe.advance();
    Sequence s;
    s.keys = sequence.keys;
    s.batch = sequence.batch;
    int head_k = key_head(mapped.params, sequence.head);
    for (int n = range.last; n >= range.first; --n) load_tile<of_v>(mapped, shared, pipe, s, head_k, n, share);
  }
}

// For each work tile of the block: tells the other warps about it, then loads the last K tile, Q, and the
// other tiles from the last to the first, each K one tile ahead of its V.
DEVICE void produce(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  Barriers barriers{shared + kBarriersAt};
  const TensorMap *q_map = mapped.maps;
  for (int i = 0; i < 3; ++i) prefetch_tensormap(mapped.maps + i);
  PipelineState<> k_pipe, v_pipe;
  PipelineState<kWorkStages> work_pipe;
  unsigned q_phase = 1;
  WorkTiles tiles(p);
  auto publish = [&](const WorkTileInfo &info) {
    Shared to = shared + kWorkInfoAt + work_pipe.stage * kWorkInfoBytes;
    mbarrier_wait(barriers.work_empty(work_pipe.stage), work_pipe.phase ^ 1);
    store_shared(to, info.range);
    store_shared(to + 16, info.sequence);
    store_shared(to + 32, info.output);
    if constexpr (kFloat8)
      store_shared(to + sizeof(WorkTileInfo), head_scales(p, info.sequence.batch, info.sequence.head));
    mbarrier_arrive(barriers.work_full(work_pipe.stage));
    work_pipe.advance();
  };
  for (int id = workgroup_index(); id < tiles.count; id = next_work_tile(p, tiles.count)) {
    WorkTile tile(p, id, tiles.blocks);
    const Sequence &s = tile.s;
    if (tile.row >= s.rows) continue;  // the sequence ends before: nobody hears of this work tile
    publish(WorkTileInfo{{tile.row, tile.first, tile.last, s.rows},
                         {s.keys, s.shift, tile.work.head, s.batch},
                         {tile.work.split, s.row_batch, s.row0}});
    if (tile.last < tile.first) continue;
    int head_k = key_head(p, tile.work.head);
    auto load_k = [&](int n) { load_tile<false>(mapped, shared, k_pipe, s, head_k, n); };
    Walk walk(p, tile);
    load_k(walk.now(tile.last));
    int heads = heads_together(p), rows = rows_of_group(p);
    for (int group = 0; group < kRowGroups; ++group) {
      mbarrier_wait(barriers.q_empty(group), q_phase);
      mbarrier_arrive_expect_tx(barriers.q_full(group), heads * rows * kPanels * kRowBytes);
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        tma_load(shared + group * kQBytes + i * kQPanel, q_map, barriers.q_full(group), i * kWidth,
                 (int)s.row0 + tile.row + group * rows, tile.work.head * heads, s.row_batch);
    }
    q_phase ^= 1;
    for (int n = tile.last; n >= tile.first; --n) {
      if (n > tile.first) load_k(walk.next(n - 1));
      if (!kTwoProducers) load_tile<true>(mapped, shared, v_pipe, s, head_k, walk.now(n));
      walk.advance(n);
    }
  }
  publish(WorkTileInfo{{-1, 0, 0, 0}, {}, {}});
}

// Float8: transposes each V tile into the operand of P V. `warp` is one of kTransposers.
DEVICE void transpose_v(Shared shared, int warp) {
  Barriers barriers{shared + kBarriersAt};
  bool leader = lane_index() == 0;
  PipelineState<> v_pipe;
  PipelineState<kWorkStages> work_pipe;
  while (true) {
    mbarrier_wait(barriers.work_full(work_pipe.stage), work_pipe.phase);
    Shared info = shared + kWorkInfoAt + work_pipe.stage * kWorkInfoBytes;
    auto range = load_shared<decltype(WorkTileInfo::range)>(info);
    int first = broadcast(range.first), last = broadcast(range.last);
    int keys = broadcast(load_shared<decltype(WorkTileInfo::sequence)>(info + 16).keys);
    if (broadcast(range.row) < 0) break;
    if (leader) mbarrier_arrive(barriers.work_empty(work_pipe.stage));
    work_pipe.advance();
    for (int n = last; n >= first; --n) {
      mbarrier_wait(barriers.v_full(v_pipe.stage), v_pipe.phase);
      mbarrier_wait(barriers.operand_empty(v_pipe.stage), v_pipe.phase ^ 1);
      int at = v_pipe.stage * kVBytes, valid = keys - n * BLOCK_K;
      if (valid >= BLOCK_K)
        transpose_tile<kRowBytesV, true>(shared + kVAt + at, shared + kTransposedAt + at, warp, valid);
      else
        transpose_tile<kRowBytesV, false>(shared + kVAt + at, shared + kTransposedAt + at, warp, valid);
      fence_proxy_async();
      __syncwarp();
      if (leader) {
        mbarrier_arrive(barriers.operand_full(v_pipe.stage));
        mbarrier_arrive(barriers.v_empty(v_pipe.stage));
      }
      v_pipe.advance();
    }
  }
}
