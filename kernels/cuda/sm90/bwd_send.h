// One thread of the warpgroup that loads sends dQ's sums for all warps (ONE_SENDER), and where DETERMINISTIC
// sees to it that blocks add to a tile in turn, so that dQ's bits are the same from run to run: in the
// reverse order of their keys. Those before this one have lower numbers and so have been started, and with a
// causal mask reach a tile earlier, since each begins at the diagonal.
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
DEVICE bool has_come(const Turn &turn) {
  int count;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(count) : "l"(turn.count) : "memory");
  return count == turn.before;
}
// Until the phase of this parity has ended. A question is a trip to the L2, so that it is put meanwhile:
// whether the turn has come.
DEVICE bool wait_and_ask(Shared barrier, unsigned parity, const Turn &turn, bool come) {
  while (!mbarrier_test_wait(barrier, parity))
    if (!come) come = has_come(turn);
  return come;
}
// Unless it has come, for that; what was added before it is seen then, by TMA too.
DEVICE void wait_for_turn(const Turn &turn, bool come = false) {
  while (!come) come = has_come(turn);
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// What this thread has added, and others had when they arrived where it waited, is there.
DEVICE void end_turn(const Turn &turn) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turn.count) : "memory");
}

// A warpgroup's turn, where its warps wait for it. Plans without DETERMINISTIC have this, and nobody sets
// p.counter for them: without these branches, never taken, ptxas makes the same instructions of the rest in
// nearly the same order, and backward takes 1.03 times as long (D = 64), or 1.10 (192). With only one of the
// two, or something shorter in their place, it still does at 192. At 256 there is no difference.
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

// Narrow heads' warps have staged their sums of a tile when they tell of the next one's dS.
DEVICE void send_tiles(const Params &p, const Owned &own, const Work &w, const Sequence &s, Shared shared) {
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  Cursor cursor = first_tile(p, own, w);
  for (int step = 0; step < w.steps; ++step) {
    Shared all_staged = at(kDsFull + place_of(step + 1));
    Turn turn;
    if (DETERMINISTIC) {
      turn = turn_of(p, own, s, cursor);
      wait_for_turn(turn, wait_and_ask(all_staged, phase_of(step + 1), turn, false));
    } else {
      mbarrier_wait(all_staged, phase_of(step + 1));
    }
    bulk_reduce_add((float *)p.dq_accum + q_tile(p, s, cursor.tile * BLOCK_Q, cursor.head) * kQTile,
                    shared + kStaged + place_of(step) * kStagedTile, kStagedTile);
    bulk_commit_group();
    bulk_wait_group_read<0>();
    mbarrier_arrive(at(kStagedEmpty + place_of(step)));
    if (DETERMINISTIC) {
      bulk_wait_group<0>();
      end_turn(turn);
    }
    cursor.advance(w);
  }
  bulk_wait_group<0>();
}

// Wide heads' warps add by themselves, from kTurn to kAdded. The turn ends before the next one begins:
// additions of the next tile would hold up its end.
DEVICE void take_turns(const Params &p, const Owned &own, const Work &w, const Sequence &s, Shared shared) {
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  Cursor cursor = first_tile(p, own, w);
  Turn turn = turn_of(p, own, s, cursor);
  bool come = false;
  for (int step = 0; step < w.steps; ++step) {
    while (!come) come = has_come(turn);
    mbarrier_arrive(at(kTurn));
    Turn mine = turn;
    cursor.advance(w);
    bool last = step + 1 == w.steps;
    if (!last) turn = turn_of(p, own, s, cursor);
    come = wait_and_ask(at(kAdded), step & 1, turn, last);
    end_turn(mine);
  }
}
