// The producer warpgroup: one thread issues the TMA copies and, in float8, three warps transpose V.
#pragma once
#include "fwd_shape.h"

// Asks for tile `n` of keys or values, of one head. From pages PAGE_ROWS of them at a time; where none of the
// sequence's are, what the stage held before stays.
template <int panels, int width, int panel_bytes>
DEVICE void load_keys(const Params &p, const Sequence &s, const TensorMap *map, Shared to, Shared full,
                      int head, int n) {
#if PAGE_ROWS
  constexpr int kCopies = BLOCK_K / PAGE_ROWS, kCopyBytes = panel_bytes / kCopies;
  static_assert(BLOCK_K % PAGE_ROWS == 0 && PAGE_ROWS % 8 == 0, "copies of whole swizzles");
  const int *pages = (const int *)p.page_table + s.batch * p.page_table_batch;
  int key = n * BLOCK_K, copies = min((s.keys - key + PAGE_ROWS - 1) / PAGE_ROWS, kCopies);
  mbarrier_arrive_expect_tx(full, copies * panels * kCopyBytes);
#pragma unroll 1
  for (int i = 0; i < copies; ++i) {
    int page = pages[key / p.page_size];
#pragma unroll
    for (int j = 0; j < panels; ++j)
      tma_load(to + j * panel_bytes + i * kCopyBytes, map, full, j * width, key % p.page_size, head, page);
    key += PAGE_ROWS;
  }
#else
  mbarrier_arrive_expect_tx(full, panels * panel_bytes);
#pragma unroll
  for (int i = 0; i < panels; ++i)
    tma_load(to + i * panel_bytes, map, full, i * width, (int)s.key0 + n * BLOCK_K, head, s.key_batch);
#endif
}

// For each work tile of the block: tells the other warps about it, then loads the last K tile, Q, and the
// other tiles from the last to the first, each K one tile ahead of its V.
DEVICE void produce(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  Barriers barriers{shared + kBarriersAt};
  const TensorMap *q_map = mapped.maps, *k_map = q_map + 1, *v_map = q_map + 2;
  prefetch_tensormap(q_map);
  prefetch_tensormap(k_map);
  prefetch_tensormap(v_map);
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
    int head_k = tile.work.head / (p.heads_q / p.heads_k);
    auto load_k = [&](int n) {
      Shared full = barriers.k_full(k_pipe.stage);
      mbarrier_wait(barriers.k_empty(k_pipe.stage), k_pipe.phase ^ 1);
      Shared to = shared + kKAt + k_pipe.stage * kKBytes;
      load_keys<kPanels, kWidth, kKPanel>(p, s, k_map, to, full, head_k, n);
      k_pipe.advance();
    };
    load_k(tile.last);
    for (int group = 0; group < GROUPS; ++group) {
      mbarrier_wait(barriers.q_empty(group), q_phase);
      mbarrier_arrive_expect_tx(barriers.q_full(group), kQBytes);
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        tma_load(shared + group * kQBytes + i * kQPanel, q_map, barriers.q_full(group), i * kWidth,
                 (int)s.row0 + tile.row + group * kGroupRows, tile.work.head, s.row_batch);
    }
    q_phase ^= 1;
    for (int n = tile.last; n >= tile.first; --n) {
      if (n > tile.first) load_k(n - 1);
      Shared full = barriers.v_full(v_pipe.stage);
      mbarrier_wait(barriers.v_empty(v_pipe.stage), v_pipe.phase ^ 1);
      Shared to = shared + kVAt + v_pipe.stage * kVBytes;
      load_keys<kPanelsV, kWidthV, kVPanel>(p, s, v_map, to, full, head_k, n);
      v_pipe.advance();
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
    int first = uniform(range.first), last = uniform(range.last);
    int keys = uniform(load_shared<decltype(WorkTileInfo::sequence)>(info + 16).keys);
    if (uniform(range.row) < 0) break;
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
