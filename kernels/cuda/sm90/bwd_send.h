// One thread of the producer warpgroup sends dQ's sums for all warps (ONE_SENDER).
//
// The first block that reaches a tile of dQ stores its sums, later ones add theirs (bwd_first.h). A block claims a tile
// as soon as it has sent the one before, because a claim is a round trip to the L2.
//
// Where DETERMINISTIC it also sees to it that blocks add to a tile of dQ one after the other, so that dQ's bits
// are the same from run to run. The order is the reverse order of their keys. Work tiles that come before this
// one have lower numbers and so have been taken (first_work_tile). With a causal mask their blocks reach a tile
// earlier, because each begins at the diagonal.
#pragma once
#include "bwd_first.h"

// Where the sums of a consumer warp begin in a tile of dQ.
DEVICE constexpr int dq_place(int warp) {
  int group = warp / 4;
  return q_product<true>(group % kDqPartsD * 4 + warp % 4, group / kDqPartsD * kDqRows / 8);
}

// And those of the last 64 elements.
DEVICE constexpr int last_dq_place(int warp) {
  return q_product<true>(kConsumers * 4 + warp % 4, warp / 4 * kLastRows / 8);
}

struct DqSemaphore {
  int *count;  // blocks that have added
  int before;  // blocks that add first
};
DEVICE DqSemaphore semaphore_of(const Params &p, const Owned &own, const Sequence &s, const Cursor &at) {
  int first = at.tile * BLOCK_Q;
  int last = (keys_seen(p, s, first, min(first + BLOCK_Q, s.rows) - 1).high - 1) / BLOCK_K;
  return DqSemaphore{(int *)p.counter + q_tile(p, s, first, at.head), last - own.first_key / BLOCK_K};
}
DEVICE bool is_my_turn(const DqSemaphore &semaphore) { return load_acquire(semaphore.count) == semaphore.before; }
// Waits until the phase of this parity has ended, and meanwhile asks whether the turn has come, because a
// question is a trip to the L2. Returns the answer.
DEVICE bool wait_and_ask(Shared barrier, unsigned parity, const DqSemaphore &semaphore, bool my_turn) {
  while (!mbarrier_test_wait(barrier, parity))
    if (!my_turn) my_turn = is_my_turn(semaphore);
  return my_turn;
}
// Waits for the turn unless it has come. What was added before it is visible then, to TMA too.
DEVICE void semaphore_wait(const DqSemaphore &semaphore, bool my_turn = false) {
  while (!my_turn) my_turn = is_my_turn(semaphore);
  fence_proxy_async_global();
}
// Ends the turn. What this thread added, and what others had added when they arrived at its barrier, is
// visible.
DEVICE void semaphore_release(const DqSemaphore &semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore.count) : "memory");
}

// The turn of a warpgroup, where its warps wait for it. Plans without DETERMINISTIC have these branches too,
// and never take them (p.counter is null). Without them ptxas makes the same instructions of the rest in
// nearly the same order, and backward takes 1.03 times as long (D = 64), or 1.10 (192). With only one of the
// two, or something shorter in their place, it still does at 192. At 256 there is no difference.
DEVICE DqSemaphore semaphore_of_tile(const Params &p, unsigned number, const Cursor &at) {
  Owned own = owned_keys(number);
  return semaphore_of(p, own, told_sequence(p, own, number), at);
}
DEVICE void wait_in_group(const Params &p, unsigned number, const Cursor &at, int group) {
  DqSemaphore semaphore = semaphore_of_tile(p, number, at);
  if (thread_index() % 128 == 0) semaphore_wait(semaphore);
  bar_sync(kGroupMeets + group, 128);
}
DEVICE void end_in_group(const Params &p, unsigned number, const Cursor &at, int group) {
  DqSemaphore semaphore = semaphore_of_tile(p, number, at);
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  bar_sync(kGroupMeets + group, 128);
  if (thread_index() % 128 == 0) semaphore_release(semaphore);
}

// Narrow heads: the warps have staged their sums of a tile when they arrive with dS of the next one, those of the last
// tile when they say so. `step`: the first one's, of all work tiles.
DEVICE void send_tiles(const Params &p, const Work &w, int step, Shared shared) {
  Owned own = owned_keys(w.number);
  Sequence s = told_sequence(p, own, w.number);
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  griddepcontrol_wait();  // for the states and counters
  Cursor cursor = first_tile(p, own, w);
  auto tile_at = [&]() { return q_tile(p, s, cursor.tile * BLOCK_Q, cursor.head); };
  Shared last_staged = at(kLastStaged + w.number % 2);
  unsigned last_phase = w.number / 2 % 2;
  if (w.steps == 0) mbarrier_wait(last_staged, last_phase);
  int *states = tile_states(p), found = kSet;
  if (!DETERMINISTIC && w.steps) found = claim(states + tile_at());
  for (int end = step + w.steps; step < end; ++step) {
    bool last = step + 1 == end;
    Shared all_staged = last ? last_staged : at(kDsFull + stage_of(step + 1));
    unsigned phase = last ? last_phase : phase_of(step + 1);
    long long tile = tile_at();
    DqSemaphore semaphore;
    bool first = !DETERMINISTIC && found == kUntouched;
    if (DETERMINISTIC) {
      semaphore = semaphore_of(p, own, s, cursor);
      semaphore_wait(semaphore, wait_and_ask(all_staged, phase, semaphore, false));
      first = semaphore.before == 0;
    } else {
      mbarrier_wait(all_staged, phase);
      if (!first) wait_set(states + tile, found);
    }
    float *to = (float *)p.dq_accum + tile * kQTile;
    Shared from = shared + kStaged + stage_of(step) * kStagedTile;
    if (first)
      bulk_store(to, from, kStagedTile);
    else
      bulk_reduce_add(to, from, kStagedTile);
    bulk_commit_group();
    cursor.advance(p, w);
    if (!DETERMINISTIC && !last) found = claim(states + tile_at());
    bulk_wait_group_read<0>();
    mbarrier_arrive(at(kStagedEmpty + stage_of(step)));
    if (DETERMINISTIC || first) bulk_wait_group<0>();
    if (DETERMINISTIC)
      semaphore_release(semaphore);
    else if (first)
      release_set(states + tile);
  }
  end_work(w.number);
}

// Wide heads: the warps add by themselves, from kTurn to kAdded. The turn ends before the next one begins,
// because additions of the next tile would delay its end.
DEVICE void take_turns(const Params &p, const Work &w, Shared shared) {
  Owned own = owned_keys(w.number);
  Sequence s = told_sequence(p, own, w.number);
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  griddepcontrol_wait();  // for the counters
  Cursor cursor = first_tile(p, own, w);
  DqSemaphore semaphore = semaphore_of(p, own, s, cursor);
  bool my_turn = false;
  for (int step = 0; step < w.steps; ++step) {
    while (!my_turn) my_turn = is_my_turn(semaphore);
    mbarrier_arrive(at(kTurn));
    DqSemaphore mine = semaphore;
    cursor.advance(p, w);
    bool last = step + 1 == w.steps;
    if (!last) semaphore = semaphore_of(p, own, s, cursor);
    my_turn = wait_and_ask(at(kAdded), step & 1, semaphore, last);
    semaphore_release(mine);
  }
}
