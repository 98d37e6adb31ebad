// The first block that reaches a tile of dQ sets its sums, and later ones add to them (dq_unset): row_sums writes no
// zeros for them to read back. With one sender the first block stores its sums (bwd_send.h). Else one warp of the
// producer warpgroup writes zeros before the warps that multiply get there (clear_tiles).
//
// The first block claims the tile. Later ones wait until it is set. A block that has claimed a tile waits for no other
// block before it has set it, so the wait ends. Without zeros from row_sums, backward takes 0.90 of the time with a
// window of 128 keys, and 0.94 to 0.98 for 16 x 1,024 tokens (H200, D = 128).
#pragma once
#include "bwd_shape.h"
#include "../sm80/bwd_dq.h"

// Reads what other blocks release: what they did before is visible then,
DEVICE int load_acquire(const int *from) {
  int found;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");
  return found;
}
// and from here on to TMA too.
DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Claims a tile if nobody has, and returns the state that it had.
DEVICE int claim(int *state) {
  int found;
  asm volatile("atom.acquire.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(found)
               : "l"(state), "r"((int)kUntouched), "r"((int)kClaimed)
               : "memory");
  return found;
}
// Waits until the sums of a tile are set. `found`: its state. They are visible then, to TMA too.
DEVICE void wait_set(const int *state, int found) {
  while (found != kSet) found = load_acquire(state);
  fence_proxy_async_global();
}
// Says that what this thread has stored there is complete.
DEVICE void release_set(int *state) {
  asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(state), "r"((int)kSet) : "memory");
}

// Writes zeros to a tile if it is untouched. Returns its state after that: kSet, or that another block has claimed it.
// For a whole warp.
DEVICE int clear_untouched(const Params &p, int *states, int tile) {
  int found = kSet;
  if (lane_index() == 0 && dq_unset(p)) found = claim(states + tile);
  if (__shfl_sync(kAllLanes, found, 0) == kUntouched) {
    Quad *sums = (Quad *)p.dq_accum + (long long)tile * (kQTile / 4) + lane_index();
#pragma unroll 4
    for (int i = 0; i < kQTile / 4; i += kLanes) sums[i] = Quad{0, 0, 0, 0};
    __syncwarp();
    if (lane_index() == 0) release_set(states + tile);
    found = kSet;
  }
  return found;
}

// About how many blocks of the same head run at the same time.
DEVICE int blocks_beside(const Params &p) {
  int units;
  asm("mov.u32 %0, %nsmid;" : "=r"(units));
  return max(1, divide(units, p.section_inverse));
}

// Sees to it that a tile of dQ is set before the tile's dO is said to be there: warps add to dQ later. With ROLES, the
// first tile's dO does not wait for that: their warps add to it in the second step.
//
// With a mask, the block that is farthest ahead would have to clear all tiles beyond it, and the others would wait behind
// it. So with ROLES, where a tile has up to 64 KB, each block also clears its share of the tiles ahead. At D = 256 the
// backward of 4,096 causal tokens takes 0.97 of the time with that and 1.17 without, of 16,384 tokens 0.94 and 1.36
// (H200).
DEVICE void clear_tiles(const Params &p, const Work &w, int step, Shared shared) {
  auto arrive = [&](int step) {
    mbarrier_wait(mbarrier_at(shared, kDoutEmpty + stage_of(step)), phase_of(step) ^ 1);
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(mbarrier_at(shared, kDoutFull + stage_of(step)));
  };
  griddepcontrol_wait();  // for the states
  Owned own = owned_keys(w.number);
  Cursor cursor = first_tile(p, own, w);
  int first = (int)q_tile(p, told_sequence(p, own, w.number), 0, 0);
  int *states = tile_states(p);
  bool early = ROLES && w.steps > 1;
  if (early) arrive(step);
#pragma unroll 1
  for (int end = step + w.steps; step < end; ++step) {
    int tile = first + cursor.tile * p.heads_q + cursor.head;
    int found = clear_untouched(p, states, tile);
    if (ROLES && !goes_around(p)) {
      int ahead = (cursor.tile - w.begin + 1) * blocks_beside(p);
      if (w.begin + ahead < w.end) clear_untouched(p, states, first + (w.begin + ahead) * p.heads_q + cursor.head);
    }
    if (lane_index() == 0) wait_set(states + tile, found);
    fence_proxy_async_global();
    if (!early || step + w.steps != end) arrive(step);
    cursor.advance(p, w);
  }
  if (lane_index() == 0) end_work(w.number);
}
