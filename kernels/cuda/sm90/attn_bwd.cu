// Attention backward on Hopper (FlashAttention-3, Shah et al. 2024). A block owns BLOCK_K keys of one key
// head, 64 of them a consumer warpgroup, with their dK and dV in registers. It goes over the query rows that
// see these keys, BLOCK_Q at a time, of all heads of its part of a group. A producer warpgroup loads by TMA. P is
// computed again from the LSE. dQ adds up in memory (../sm80/bwd_dq.h).
//
// All but dQ is computed as keys x rows, so that P^T and dS^T are the A operands of dV and dK as they lie in
// registers. dS goes through shared memory once, for dQ. dQ is computed transposed: its products may then have
// any number of rows. Heads beyond 128 (ROLES): bwd_wide.h. TERMS: score terms, mods, dropout and sinks,
// but what the plan says is left to sm80's kernel.
#include "../ahead.h"
#include "../format.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_Q) ||           \
    !defined(BLOCK_K) || !defined(BLOCKS) || !defined(DETERMINISTIC) || !defined(FLOAT_WEIGHTS) ||  \
    !defined(GROUPS) || !defined(ONE_SENDER) || !defined(OVERLAP) || !defined(ROLES) ||             \
    !defined(SHARED_BYTES) || !defined(TERMS)
#error "the plan defines all of these"
#endif
#include "bwd_load.h"
#include "bwd_send.h"
#include "bwd_wide.h"

DEVICE void init_barriers(Shared shared) {
  for (int i = 0; i < kBarrierCount; ++i) {
    bool full = i == kKFull || i == kVFull || (i >= kQFull && i < kQEmpty) ||
                (i >= kDoutFull && i < kDoutEmpty);
    bool one = i < kQFull || (i >= kStagedEmpty && i < kDsEmpty && !(ROLES && i == kAdded));
    mbarrier_init(mbarrier_at(shared, i), full ? 2 : one ? 1 : kConsumers * 4);
  }
  fence_mbarrier_init();
  fence_proxy_async();  // for the copies that this thread asks for at once
}

extern "C" __global__ WORKGROUP(kThreads, BLOCKS) void attn_bwd(MAPPED_PARAMS mapped) {
  const Params &p = mapped.params;
  Shared shared = shared_address(memory);
  int warp = wave_index() - kConsumerThreads / kLanes;  // of the producer warpgroup
  // Of what row_sums leaves, the table of work is needed here; the rest is waited for where it is read.
  if (has_work_table(p)) griddepcontrol_wait();
  Owned own = find_keys(p);
  Sequence s = owned_sequence(p, own);
  if (own.first_key >= s.keys) return;
  // K is asked for before the work is counted.
  if (warp == 0 && elect_one()) {
    init_barriers(shared);
    keep_keys(p, shared, own);
    load_keys(mapped, own, s, shared);
  }
  Seen seen = rows_seeing(p, s, own.first_key, min(own.first_key + BLOCK_K, s.keys) - 1);
#if LISTS
  static_assert(!DETERMINISTIC, "blocks that leave out a tile would not take their turn there");
  Work w{0, 0, 0, 0, 0, p};
  for (int i = 0; i < p.group; ++i) w.steps += list_of_head(p, own, own.head_k * p.group + i).count;
#else
  Work w;
  w.begin = seen.low / BLOCK_Q;
  w.end = seen.low < seen.high ? (seen.high + BLOCK_Q - 1) / BLOCK_Q : w.begin;
  // As in sm80's: a block whose keys no row sees takes its turn between others.
  if (BANDED && seen.low < s.rows) w.end = max((seen.high + BLOCK_Q - 1) / BLOCK_Q, w.begin);
  w.steps = (w.end - w.begin) * p.group;
#endif
  // Keys beyond the end are seen by nobody; rows beyond it have P = 0 without a mask, unless a bias there is NaN.
  w.all_low = own.first_key + BLOCK_K > s.keys ? s.rows : seen.all_low;
  w.all_high = !BANDED && !kMods && !kBiasTiles && p.window_left < 0 ? 0x7fffffff : seen.all_high;

  // Before registers are passed on, which takes 500 cycles; and in front of the barrier, since setmaxnreg wants whole
  // warps. With ROLES that early, ptxas orders the consumers' loop so that at D = 256 long sequences take 1.02 of the time.
  auto ask_for_first = [&] {
    if (warp == 0 && w.steps && elect_one()) load_first(mapped, own, w, s, shared);
  };
  if (!ROLES) ask_for_first();
  barrier();
  if (thread_index() < kConsumerThreads) {
    setmaxnreg_inc<kConsumerRegisters>();
#if ROLES
    if (wave_index() < 4)
      consume_role<kRoleP>(mapped, w, shared);
    else
      consume_role<kRoleDs>(mapped, w, shared);
#else
    consume(mapped, w, shared);
#endif
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    if (ROLES) ask_for_first();
    if (w.steps == 0) {
      griddepcontrol_wait();
      if (warp == 0 && elect_one()) {
        mbarrier_arrive(mbarrier_at(shared, kKFull));  // in place of the warp that brings states
        wait_for_unused_keys(p, shared);
      }
      return;
    }
    if (warp == 0) {
      if (elect_one()) produce_tiles(mapped, own, w, s, shared);
    } else if (warp == 1) {
      produce_states<true>(mapped, own, w, s, shared);
    } else if (warp == 2) {
      produce_states<false>(mapped, own, w, s, shared);
    } else {
      if (ONE_SENDER && elect_one()) send_tiles(p, own, w, s, shared);
      if (ROLES && DETERMINISTIC && elect_one()) take_turns(p, own, w, s, shared);
    }
  }
}
