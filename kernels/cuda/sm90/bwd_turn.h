// Blocks that add to dQ in turn, so that its bits are the same from run to run: in the reverse order of their
// keys. Those before this one have lower numbers and so have been started, and with a causal mask reach a
// tile earlier, since each begins at the diagonal. One thread of the warpgroup that loads waits and counts.
#pragma once
#include "bwd_shape.h"
#include "../sm80/bwd_dq.h"

// Where the sums of a consumer warp begin in a tile of dQ.
DEVICE constexpr int dq_place(int warp) {
  int group = warp / 4;
  return q_product<true>(group % kDqPartsD * 4 + warp % 4, group / kDqPartsD * kDqRows / 8);
}

struct Turn {
  int *count;  // of the blocks that have added
  int before;  // those that do so first
};
DEVICE Turn turn_of(const Params &p, const Owned &own, const Sequence &s, const Cursor &at) {
  int first = at.tile * BLOCK_Q;
  int last = (keys_seen(p, s, first, min(first + BLOCK_Q, s.rows) - 1).high - 1) / BLOCK_K;
  return Turn{(int *)p.counter + q_tile(p, s, first, at.head), last - own.first_key / BLOCK_K};
}
DEVICE void wait_for_turn(const Turn &turn) {
  int count;
  do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(count) : "l"(turn.count) : "memory");
  while (count != turn.before);
  asm volatile("fence.proxy.async.global;" ::: "memory");  // TMA adds, too
}
// What this thread has added, and others had when they arrived where it waited, is there.
DEVICE void end_turn(const Turn &turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn.count) : "memory");
}

// A warpgroup's turn, where its warps wait for it. Plans without DETERMINISTIC have this, and nobody sets
// p.counter for them: without these branches, never taken, ptxas makes the same instructions of the rest in
// nearly the same order, and backward takes 1.03 times as long (D = 64), or 1.10 (192). With only one of the
// two, or something shorter in their place, it still does at 192. At 128 and 256 there is no difference.
DEVICE Turn turn_of_tile(const Params &p, const Cursor &at) {
  Owned own = owned_keys(p);
  return turn_of(p, own, sequence_of(p, own.batch), at);
}
DEVICE void wait_in_group(const Params &p, const Cursor &at, int group) {
  Turn turn = turn_of_tile(p, at);
  if (thread_index() % 128 == 0) wait_for_turn(turn);
  bar_sync(kGroupMeets + group, 128);
}
DEVICE void end_in_group(const Params &p, const Cursor &at, int group) {
  Turn turn = turn_of_tile(p, at);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  bar_sync(kGroupMeets + group, 128);
  if (thread_index() % 128 == 0) end_turn(turn);
}

// Tells each warp that its staged sums were read, the first one's first.
template <int warps>
DEVICE void tell_of_reading(Shared empty) {
  bulk_wait_group_read<warps - 1>();
  mbarrier_arrive(empty);
  if constexpr (warps > 1) tell_of_reading<warps - 1>(empty + 8);
}

// The turns of a block. Wide heads' warps add by themselves. Others have staged their sums of a tile when
// they tell of the next one's dS; each warp's are copied by themselves, so that the first goes on while the
// last is read.
DEVICE void take_turns(const Params &p, const Owned &own, const Work &w, const Sequence &s, Shared shared) {
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  Cursor cursor = first_tile(p, own, w);
  for (int step = 0; step < w.steps; ++step) {
    Turn turn = turn_of(p, own, s, cursor);
#if ROLES
    wait_for_turn(turn);
    mbarrier_arrive(at(kTurn));
    mbarrier_wait(at(kAdded), step & 1);
#else
    mbarrier_wait(at(kDsFull + place_of(step + 1)), phase_of(step + 1));
    wait_for_turn(turn);
    float *tile = (float *)p.dq_accum + q_tile(p, s, cursor.tile * BLOCK_Q, cursor.head) * kQTile;
#pragma unroll
    for (int warp = 0; warp < kConsumers * 4; ++warp) {
      bulk_reduce_add(tile + dq_place(warp), shared + kStaged + warp * kStagedBytes, kStagedBytes);
      bulk_commit_group();
    }
    tell_of_reading<kConsumers * 4>(at(kStagedEmpty));
    bulk_wait_group<0>();
#endif
    end_turn(turn);
    cursor.advance(w);
  }
}
