// The warpgroup that loads: one warp asks for copies and, in float8, three turn V.
#pragma once
#include "fwd_shape.h"

DEVICE void copy(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  Barriers barriers{shared + kBarriersAt};
  const TensorMap *queries = mapped.maps, *keys = queries + 1, *values = queries + 2;
  prefetch_tensormap(queries);
  prefetch_tensormap(keys);
  prefetch_tensormap(values);
  Turn<> of_keys, of_values;
  Turn<kSlots> of_pieces;
  unsigned used = 1;  // parity of the queries' place
  Pieces pieces(p);
  // What multiplies is told of each piece, but for those of sequences that end before; -1: that was all.
  auto tell = [&](const Told &told) {
    Shared to = shared + kToldAt + of_pieces.stage * kToldBytes;
    mbarrier_wait(barriers.piece_free(of_pieces.stage), of_pieces.parity ^ 1);
    store_shared(to, told.range);
    store_shared(to + 16, told.sequence);
    store_shared(to + 32, told.output);
    if constexpr (kFloat8)
      store_shared(to + sizeof(Told), head_scales(p, told.sequence.batch, told.sequence.head));
    mbarrier_arrive(barriers.piece_full(of_pieces.stage));
    of_pieces.advance();
  };
  for (int id = workgroup_index(); id < pieces.count; id = next_piece(p, pieces.count)) {
    Piece piece(p, id, pieces.blocks);
    const Sequence &s = piece.s;
    if (piece.row >= s.rows) continue;
    tell(Told{{piece.row, piece.first, piece.last, s.rows},
              {s.keys, s.shift, piece.work.head, s.batch},
              {piece.work.part, s.row_batch, s.row0}});
    if (piece.last < piece.first) continue;
    int head_k = piece.work.head / (p.heads_q / p.heads_k);
    auto copy_keys = [&](int tile) {
      Shared full = barriers.key_full(of_keys.stage);
      mbarrier_wait(barriers.key_free(of_keys.stage), of_keys.parity ^ 1);
      mbarrier_arrive_expect_tx(full, kKeyBytes);
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        tma_load(shared + kKeysAt + of_keys.stage * kKeyBytes + i * kKeyPanel, keys, full, i * kWidth,
                 (int)s.key0 + tile * BLOCK_K, head_k, s.key_batch);
      of_keys.advance();
    };
    copy_keys(piece.last);
    for (int group = 0; group < GROUPS; ++group) {
      mbarrier_wait(barriers.query_free(group), used);
      mbarrier_arrive_expect_tx(barriers.query_full(group), kQueryBytes);
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        tma_load(shared + group * kQueryBytes + i * kQueryPanel, queries, barriers.query_full(group),
                 i * kWidth, (int)s.row0 + piece.row + group * kGroupRows, piece.work.head, s.row_batch);
    }
    used ^= 1;
    for (int tile = piece.last; tile >= piece.first; --tile) {
      if (tile > piece.first) copy_keys(tile - 1);
      Shared full = barriers.value_full(of_values.stage);
      mbarrier_wait(barriers.value_free(of_values.stage), of_values.parity ^ 1);
      mbarrier_arrive_expect_tx(full, kValueBytes);
#pragma unroll
      for (int i = 0; i < kPanelsV; ++i)
        tma_load(shared + kValuesAt + of_values.stage * kValueBytes + i * kValuePanel, values, full,
                 i * kWidthV, (int)s.key0 + tile * BLOCK_K, head_k, s.key_batch);
      of_values.advance();
    }
  }
  tell(Told{{-1, 0, 0, 0}, {}, {}});
}

// What turns V, in float8: `warp` is one of kTurners.
DEVICE void turn_values(Shared shared, int warp) {
  Barriers barriers{shared + kBarriersAt};
  bool speaker = lane_index() == 0;
  Turn<> turn_of;
  Turn<kSlots> of_pieces;
  while (true) {
    mbarrier_wait(barriers.piece_full(of_pieces.stage), of_pieces.parity);
    Shared told = shared + kToldAt + of_pieces.stage * kToldBytes;
    auto range = load_shared<decltype(Told::range)>(told);
    int first = same(range.first), last = same(range.last);
    int keys = same(load_shared<decltype(Told::sequence)>(told + 16).keys);
    if (same(range.row) < 0) break;
    if (speaker) mbarrier_arrive(barriers.piece_free(of_pieces.stage));
    of_pieces.advance();
    for (int tile = last; tile >= first; --tile) {
      mbarrier_wait(barriers.value_full(turn_of.stage), turn_of.parity);
      mbarrier_wait(barriers.operand_free(turn_of.stage), turn_of.parity ^ 1);
      int at = turn_of.stage * kValueBytes, valid = keys - tile * BLOCK_K;
      if (valid >= BLOCK_K)
        turn<kRowBytesV, true>(shared + kValuesAt + at, shared + kTurnedAt + at, warp, valid);
      else
        turn<kRowBytesV, false>(shared + kValuesAt + at, shared + kTurnedAt + at, warp, valid);
      fence_proxy_async();
      __syncwarp();
      if (speaker) {
        mbarrier_arrive(barriers.operand_full(turn_of.stage));
        mbarrier_arrive(barriers.value_free(turn_of.stage));
      }
      turn_of.advance();
    }
  }
}
