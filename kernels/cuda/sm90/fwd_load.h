// The producer warpgroup: a thread issues the TMA copies, two over pages, and a warp finds the work tiles; in
// float8 three warps transpose V, and the copying thread finds them.
#pragma once
#include "fwd_shape.h"
#include "key_tile.h"
#include "../packed.h"

DEVICE int key_head(const Params &p, int head) { return PACKED ? head : divide(head, p.group_inverse); }

// The tiles of keys of a work tile, from the last number to the first: that of number n and the one behind.
#if LISTS
static_assert(!kTwoProducers, "the second producer visits every tile");
struct Walk {
  Visits visits;
  int first, here, behind;
  METHOD Walk(const Params &p, const Sequence &s, int head, int row, int first, int last)
      : visits(p, s, head, row), first(first), here(visits[last]), behind(visits[max(last - 1, first)]) {}
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
  METHOD Walk(const Params &, const Sequence &, int, int, int, int) {}
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

// What one thread of another warp hears of work tiles.
struct Heard {
  Shared shared;
  unsigned count = 0;
  // False: there is no more work.
  METHOD bool next(WorkTileInfo &info) {
    Barriers barriers{shared + kBarriersAt};
    int stage = count % kWorkStages;
    mbarrier_wait(barriers.work_full(stage), count / kWorkStages % 2);
    Shared at = shared + kWorkInfoAt + stage * kWorkInfoBytes;
    info.range = load_shared<decltype(WorkTileInfo::range)>(at);
    info.sequence = load_shared<decltype(WorkTileInfo::sequence)>(at + 16);
    info.output = load_shared<decltype(WorkTileInfo::output)>(at + 32);
    mbarrier_arrive(barriers.work_empty(stage));
    ++count;
    return info.range.row >= 0;
  }
};

// The second producer: loads V.
DEVICE void produce_v(const MappedParams &mapped, Shared shared) {
  PipelineState<> v_pipe;
  Heard heard{shared};
  for (WorkTileInfo info; heard.next(info);) {
    Sequence s;
    s.keys = info.sequence.keys;
    s.batch = info.sequence.batch;
    int head_k = key_head(mapped.params, info.sequence.head);
    for (int n = info.range.last; n >= info.range.first; --n) load_v(mapped, shared, v_pipe, s, head_k, n);
  }
}

// Tells the other warps of work tiles; one thread, or a warp together.
struct Publisher {
  Shared shared;
  unsigned told = 0;  // one number: with 24 registers a stage and a phase were too many
  // Until there is a place for it.
  METHOD void wait() const {
    mbarrier_wait(Barriers{shared + kBarriersAt}.work_empty(told % kWorkStages), told / kWorkStages % 2 ^ 1);
  }
  // Row -1: there is no more work.
  METHOD void tell(const Params &p, const WorkTileInfo &info, bool leader) {
    Shared to = shared + kWorkInfoAt + told % kWorkStages * kWorkInfoBytes;
    if (leader) {
      store_shared(to, info.range);
      store_shared(to + 16, info.sequence);
      store_shared(to + 32, info.output);
      if constexpr (kFloat8)
        store_shared(to + sizeof(WorkTileInfo), head_scales(p, info.sequence.batch, info.sequence.head));
      mbarrier_arrive(Barriers{shared + kBarriersAt}.work_full(told % kWorkStages));
    }
    ++told;
  }
  METHOD void tell_end(const Params &p, bool leader) {
    wait();
    tell(p, WorkTileInfo{{-1, 0, 0, 0}, {}, {}}, leader);
  }
};

// Waits until the rows of the work tile before have been read, and asks for those of this one.
DEVICE void load_q(const MappedParams &mapped, Shared shared, const WorkTileInfo &info, unsigned &phase) {
  if (info.range.last < info.range.first) return;
  Barriers barriers{shared + kBarriersAt};
  int heads = heads_together(mapped.params), rows = rows_of_group(mapped.params);
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    mbarrier_wait(barriers.q_empty(group), phase);
    mbarrier_arrive_expect_tx(barriers.q_full(group), heads * rows * kPanels * kRowBytes);
#pragma unroll
    for (int i = 0; i < kPanels; ++i)
      tma_load(shared + group * kQBytes + i * kQPanel, mapped.maps, barriers.q_full(group), i * kWidth,
               (int)info.output.row0 + info.range.row + group * rows, info.sequence.head * heads,
               info.output.row_batch);
  }
  phase ^= 1;
}

// The warp that loads Q. `asked`: for that of the first work tile, by begin().
DEVICE void produce_q(const MappedParams &mapped, Shared shared, bool asked) {
  if (!asked) prefetch_tensormap(mapped.maps);
  unsigned phase = 1;
  Heard heard{shared};
  WorkTileInfo info;
  if (asked && heard.next(info) && info.range.first <= info.range.last) phase ^= 1;
  while (heard.next(info)) load_q(mapped, shared, info, phase);
}

// The warp that finds the work tiles of the block: the next one when the last copy of this one's V is about to be
// asked for. Sooner would be too soon: blocks would hold work that others have time for, and the forward at 16k
// with a causal mask took 7 % longer.
//
// `told`: of the first one, by begin().
DEVICE void schedule(const Params &p, Shared shared, bool told) {
  Publisher publisher{shared};
  bool leader = lane_index() == 0, packed = by_true_lengths(p);
  PackedTiles<false, kBlockQ> tiles;
  int count = packed ? tiles.count(p) : WorkTiles(p).count;
  for (int id = workgroup_index(); id < count;) {
    if (told) {
      publisher.told = 1;
      told = false;
    } else {
      Work work;
      if (packed) {
        PackedTile at;
        tiles.find(p, id, at);
        work = Work{at.block, at.split, at.head, at.batch};
      } else {
        work = work_of(p, id, WorkTiles(p).blocks, p.heads_q);
      }
      publisher.wait();
      publisher.tell(p, info_of(WorkTile(p, work)), leader);
    }
    mbarrier_wait(Barriers{shared + kBarriersAt}.work_wanted(), publisher.told - 1 & 1);
    if (leader) id = next_work_tile(p, count);
    id = broadcast(id);
  }
  publisher.tell_end(p, leader);
}

DEVICE void load_bias(const MappedParams &mapped, Shared to, Shared full, int row, int n, int head, int batch) {
  const Params &p = mapped.params;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group)
#pragma unroll
    for (int key = 0; key < BLOCK_K; key += 64)
      tma_load(to + (group * (BLOCK_K / 64) + key / 64) * kBiasPanel, mapped.maps + 3, full, n * BLOCK_K + key,
               row + group * kGroupRows, p.bias_head ? head : 0, p.bias_batch ? batch : 0);
}

// Waits for a stage of K, and asks for tile `n` of the keys of a work tile, with the tile of a bias there.
DEVICE void load_k(const MappedParams &mapped, Shared shared, PipelineState<> &k_pipe, const Sequence &s, int row,
                   int head, int head_k, int n) {
  Barriers barriers{shared + kBarriersAt};
  Shared full = barriers.k_full(k_pipe.stage);
  Pages pages(mapped.params, s, n);
  mbarrier_wait(barriers.k_empty(k_pipe.stage), k_pipe.phase ^ 1);
  Shared to = shared + kKAt + k_pipe.stage * kKBytes;
  load_keys<kPanels, kWidth, kKPanel>(mapped.params, s, pages, mapped.maps + 1, to, full, head_k, n, 0, kBiasBytes);
  if constexpr (SCORE == BIAS)
    load_bias(mapped, shared + kBiasAt + k_pipe.stage * kBiasBytes, full, row, n, head, s.batch);
  k_pipe.advance();
}

// The thread that makes the barriers also finds the first work tile of the block, asks for its last tile of K and for Q,
// and tells of it, in place of the three warps that do this later. A sequence of 128 tokens takes 0.9 of the time.
//
// In front of the block's barrier. Behind it, with the three asked by their warps, blocks hung on a GPU: lanes are apart
// there, and setmaxnreg, which comes next, wants whole warps.
DEVICE void begin(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  WorkTile first(p, work_of(p, workgroup_index(), WorkTiles(p).blocks, p.heads_q));
  WorkTileInfo info = info_of(first);
  if (first.first <= first.last) {
    PipelineState<> k_pipe;
    int head = first.work.head;
    Walk walk(p, first.s, head, first.row, first.first, first.last);
    load_k(mapped, shared, k_pipe, first.s, first.row, head, key_head(p, head), walk.now(first.last));
  }
  unsigned phase = 1;
  load_q(mapped, shared, info, phase);
  Publisher{shared}.tell(p, info, true);
}

// For each work tile of the block: loads the last K tile, Q, and the other tiles from the last to the first,
// each K one tile ahead of its V. `asked`: for the first one's last K tile, by begin().
DEVICE void produce(const MappedParams &mapped, Shared shared, bool asked) {
  const Params &p = mapped.params;
  Barriers barriers{shared + kBarriersAt};
  if (!asked) prefetch_tensormap(mapped.maps + 1);
  prefetch_tensormap(mapped.maps + 2);
  PipelineState<> k_pipe, v_pipe;
  unsigned q_phase = 1;
  auto load = [&](const WorkTileInfo &info) {
    int row = info.range.row, first = info.range.first, last = info.range.last, head = info.sequence.head;
    auto want_next = [&] {
      if (kScheduler) mbarrier_arrive(barriers.work_wanted());
    };
    if (last < first) return want_next();
    Sequence s = sequence_of(p, info.sequence.batch);
    int head_k = key_head(p, head);
    auto load_k_of = [&](int n) { load_k(mapped, shared, k_pipe, s, row, head, head_k, n); };
    Walk walk(p, s, head, row, first, last);
    if (asked)
      k_pipe.advance();
    else
      load_k_of(walk.now(last));
    if (!kScheduler) load_q(mapped, shared, info, q_phase);
    for (int n = last; n >= first; --n) {
      if (n > first)
        load_k_of(walk.next(n - 1));
      else
        want_next();
      if (!kTwoProducers) load_v(mapped, shared, v_pipe, s, head_k, walk.now(n));
      walk.advance(n);
    }
  };
  if constexpr (kScheduler) {
    Heard heard{shared};
    for (WorkTileInfo info; heard.next(info); asked = false) load(info);
  } else {
    Publisher publisher{shared};
    WorkTiles tiles(p);
    for (int id = workgroup_index(); id < tiles.count; id = next_work_tile(p, tiles.count)) {
      WorkTile tile(p, work_of(p, id, tiles.blocks, work_heads(p)));
      if (tile.row >= tile.s.rows) continue;  // the sequence ends before: nobody hears of this work tile
      publisher.wait();
      publisher.tell(p, info_of(tile), true);
      load(info_of(tile));
    }
    publisher.tell_end(p, true);
  }
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
