// Attention backward on Hopper (FlashAttention-3, Shah et al. 2024). A work tile is BLOCK_K keys of one key
// head, 64 of them a consumer warpgroup, with their dK and dV in registers. A block goes over the query rows that
// see these keys, BLOCK_Q at a time, of all heads of its part of a group. A producer warpgroup loads by TMA. P is
// computed again from the LSE. dQ adds up in memory (../sm80/bwd_dq.h).
//
// Persistent blocks take work tiles from a counter that row_sums leaves (../bwd_work.h). The producer is a work tile
// ahead of the consumers where these leave it room.
//
// All but dQ is computed as keys x rows, so that P^T and dS^T are the A operands of dV and dK as they lie in
// registers. dS goes through shared memory once, for dQ. dQ is computed transposed: its products may then have
// any number of rows. Heads beyond 128 (ROLES): bwd_wide.h. TERMS: score terms, mods, dropout and sinks,
// but what the plan says is left to sm80's kernel.
#include "../ahead.h"
#include "../format.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(BLOCK_Q) ||           \
    !defined(BLOCK_K) || !defined(BLOCKS) || !defined(DETERMINISTIC) || !defined(DQ_UNSET) ||       \
    !defined(FLOAT_WEIGHTS) || !defined(GROUPS) || !defined(ONE_SENDER) || !defined(OVERLAP) ||     \
    !defined(PERSISTENT) || !defined(ROLES) || !defined(SHARED_BYTES) || !defined(TERMS)
#error "the plan defines all of these"
#endif
#include "bwd_load.h"
#include "bwd_send.h"
#include "bwd_wide.h"

DEVICE void init_barriers(Shared shared) {
  constexpr int kHearing = kConsumers * 4 + 2 + (ONE_SENDER || kFirstClears);  // warps
  for (int i = 0; i < kBarrierCount; ++i) {
    bool dout_full = i >= kDoutFull && i < kDoutEmpty;
    bool full = i == kKFull || i == kVFull || (i >= kQFull && i < kQEmpty) || dout_full;
    bool one = i < kQFull || (i >= kStagedEmpty && i < kDsEmpty && !(ROLES && i == kAdded)) ||
               (i >= kWorkFull && i < kWorkEmpty);
    int of_warps = i >= kWorkEmpty ? kHearing : kConsumers * 4;
    mbarrier_init(mbarrier_at(shared, i), full ? 2 + (dout_full && kFirstClears) : one ? 1 : of_warps);
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
  if (warp == 0 && elect_one()) {
    init_barriers(shared);
    keep_one_over_scale(p, shared);
    begin(mapped, shared);
  }
  barrier();
  if (thread_index() < kConsumerThreads) {
    setmaxnreg_inc<kConsumerRegisters>();
    for_each_work_tile(p, [&](const Work &w, int step) {
#if ROLES
      if (wave_index() < 4)
        consume_role<kRoleP>(mapped, w, shared);
      else
        consume_role<kRoleDs>(mapped, w, shared);
#else
      consume(mapped, w, step, shared);
#endif
    });
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    unsigned landed = 0;
    if (warp == 0) {
      if (elect_one()) produce_tiles(mapped, shared);
    } else if (warp == 1) {
      for_each_work_tile(p, [&](const Work &w, int step) { produce_states<true>(mapped, w, step, landed, shared); });
    } else if (warp == 2) {
      for_each_work_tile(p, [&](const Work &w, int step) { produce_states<false>(mapped, w, step, landed, shared); });
    } else if (kFirstClears) {
      for_each_work_tile(p, [&](const Work &w, int step) { clear_tiles(p, w, step, shared); });
    } else if ((ONE_SENDER || (ROLES && DETERMINISTIC)) && elect_one()) {
      for_each_work_tile(p, [&](const Work &w, int step) {
        if (ONE_SENDER) send_tiles(p, w, step, shared);
        if (ROLES && DETERMINISTIC) take_turns(p, w, shared);
      });
    }
  }
}
