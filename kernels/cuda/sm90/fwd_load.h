// The producer warpgroup: a thread issues the TMA copies, two over pages; in float8 three warps transpose V.
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

// Waits for a stage of V, and asks for tile `n` of its head.
DEVICE void load_v(const MappedParams &mapped, Shared shared, PipelineState<> &v_pipe, const Sequence &s,
                   int head_k, int n) {
  Barriers barriers{shared + kBarriersAt};
  Shared full = barriers.v_full(v_pipe.stage);
  Pages pages(mapped.params, s, n);
  mbarrier_wait(barriers.v_empty(v_pipe.stage), v_pipe.phase ^ 1);
  Shared to = shared + kVAt + v_pipe.stage * kVBytes;
  load_keys<kPanelsV, kWidthV, kVPanel>(mapped.params, s, pages, mapped.maps + 2, to, full, head_k, n);
  v_pipe.advance();
}

// The second producer: loads V of the work tiles that the first one tells of.
DEVICE void produce_v(const MappedParams &mapped, Shared shared) {
  Barriers barriers{shared + kBarriersAt};
  PipelineState<> v_pipe;
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
    for (int n = range.last; n >= range.first; --n) load_v(mapped, shared, v_pipe, s, head_k, n);
  }
}

// For each work tile of the block: tells the other warps about it, then loads the last K tile, Q, and the
// other tiles from the last to the first, each K one tile ahead of its V.
DEVICE void produce(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  Barriers barriers{shared + kBarriersAt};
  const TensorMap *q_map = mapped.maps, *k_map = q_map + 1;
  prefetch_tensormap(q_map);
  prefetch_tensormap(k_map);
  prefetch_tensormap(mapped.maps + 2);
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
    auto load_k = [&](int n) {
      Shared full = barriers.k_full(k_pipe.stage);
      Pages pages(p, s, n);
      mbarrier_wait(barriers.k_empty(k_pipe.stage), k_pipe.phase ^ 1);
      Shared to = shared + kKAt + k_pipe.stage * kKBytes;
      load_keys<kPanels, kWidth, kKPanel>(p, s, pages, k_map, to, full, head_k, n);
      k_pipe.advance();
    };
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
      if (!kTwoProducers) load_v(mapped, shared, v_pipe, s, head_k, walk.now(n));
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
