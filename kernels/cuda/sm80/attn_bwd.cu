// Attention backward (FlashAttention-2, Dao 2023, algorithm 2) on Ampere and later. A block owns BLOCK_K keys
// with their dK and dV in registers. It goes over the query rows that see these keys, BLOCK_Q at a time, of all
// heads of the group. dQ adds up in memory (bwd_dq.h). P is computed again from the LSE.
//
// Half of the warps make S^T = K Q^T, P = exp2(S - LSE) and dV += P^T dO, the other half dP^T = V dO^T,
// dS = P (dP - delta) and dK += dS^T Q: keys x rows in WARPS_K x WARPS_Q warps each, CHUNK_Q rows at once. So a
// warp holds one gradient of twice the keys, and each fragment of Q and dO that it reads feeds twice as many
// products. P goes from one half to the other through shared memory. With WARPS_Q = 1 a warp has all rows of
// its keys, and its P or dS is the A operand of its gradient as it lies in registers; else both are read from
// where they were left for others. All warps make dQ = dS K, DQ_WARPS_Q of them along rows.
//
// With two BUFFERS of dS one barrier a tile is enough. Between two barriers a warp makes dQ of one tile and the
// scores of the next, the halves in opposite order, so that one multiplies while the other exponentiates.
#include "../format.h"
#include "../../common/row_sums.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(GENERAL) ||           \
    !defined(BLOCK_Q) || !defined(BLOCK_K) || !defined(WARPS_K) || !defined(WARPS_Q) ||             \
    !defined(CHUNK_Q) || !defined(DQ_WARPS_Q) || !defined(BUFFERS) || !defined(LOOKAHEAD) ||        \
    !defined(BLOCKS_PER_SM) || !defined(SHARED_BYTES)
#error "the plan defines all of these"
#endif
#include "bwd_tile.h"
#include "bwd_dq.h"

// ---- loads ----------------------------------------------------------------------------------------

DEVICE void load_tile(const Params &p, const Work &w, const Cursor &at, Shared shared) {
  Sequence s = sequence_of(p, w.batch);
  Shared to = shared + kStage0 + at.slot * kStage;
  int first = at.tile * BLOCK_Q;
  load_rows<HEAD_DIM, BLOCK_Q, kThreads>(
      to + kQ, rows_of(p.q, s, at.head, p.q_batch, p.q_row, p.q_head, p.head_dim), first);
  load_rows<HEAD_DIM_V, BLOCK_Q, kThreads>(
      to + kDout, rows_of(p.dout, s, at.head, p.dout_batch, p.dout_row, p.dout_head, p.head_dim_v),
      first);
  RowStates states = row_states(p);
  long long offset = state_offset(p, s, at.head) + first;
  static_assert(BLOCK_Q <= kThreads, "a thread brings one row's");
  int row = thread_index();
  if (row < BLOCK_Q) {
    bool there = first + row < s.rows;
    copy_4(to + kMinusLse + row * 4, there ? states.minus_lse + offset + row : states.minus_lse, there);
    copy_4(to + kMinusDelta + row * 4, there ? states.minus_delta + offset + row : states.minus_delta,
           there);
  }
}

// ---- dQ -------------------------------------------------------------------------------------------

// Deterministic: the blocks of a tile add to dQ in the order of their keys, so that its bits are the same from
// run to run. Blocks that come before this one have lower numbers and so have been started.
DEVICE int *semaphore_of(const Params &p, const Sequence &s, const Cursor &at) {
  return (int *)p.counter + q_tile(p, s, at.tile * BLOCK_Q, at.head);
}
DEVICE void semaphore_wait(const Params &p, const Work &w, const Cursor &at) {
  Sequence s = sequence_of(p, w.batch);
  int first = at.tile * BLOCK_Q;
  int before = w.first_key / BLOCK_K -
               keys_seen(p, s, first, min(first + BLOCK_Q, s.rows) - 1).low / BLOCK_K;
  // Beyond a max_seqlen_q that is too small nobody has set the count to 0.
  if (thread_index() == 0 && first < p.seqlen_q) {
    int turn;
    do asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(turn) : "l"(semaphore_of(p, s, at)) : "memory");
    while (turn != before);
  }
  barrier();
}
DEVICE void semaphore_release(const Params &p, const Work &w, const Cursor &at) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  barrier();
  if (thread_index() == 0)
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(
                     semaphore_of(p, sequence_of(p, w.batch), at))
                 : "memory");
}

DEVICE void add_rows(const Params &p, const Work &w, const Cursor &at, Shared shared, Shared buffer) {
  int row = wave_index() / kDqWarpsD * (kDqM * 16), part = wave_index() % kDqWarpsD;
  float dq[kDqM][kDqN][4];
  clear(dq);
  multiply<DTYPE, BLOCK_K / 16>(dq, a_down<ScoreTile>(buffer, row),
                                b_down<HeadTile, kDqWarpsD>(shared + kK, part));
  Sequence s = sequence_of(p, w.batch);
  float *to = (float *)p.dq_accum + q_tile(p, s, at.tile * BLOCK_Q, at.head) * kQTile +
              q_product<false>(row / 16, part * 2) + lane_index() * kLaneStep;
  if (p.counter) semaphore_wait(p, w, at);
#pragma unroll
  for (int i = 0; i < kDqM; ++i)
#pragma unroll
    for (int j = 0; j < kDqN; ++j) add(to + q_product<false>(i, j / 2 * kDqWarpsD * 2 + j % 2), dq[i][j]);
  int place = at.tile * BLOCK_Q + thread_index();
  if (GENERAL && p.dsinks && thread_index() < BLOCK_Q && place < s.rows) {
    float sum = 0.0f;
    for (int k = 0; k < WARPS_K; ++k)
      sum += load_float(buffer + kDots + k * kStates + thread_index() * 4);
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;"
                 ::"l"((float *)p.dsinks + state_offset(p, s, at.head) + place), "f"(sum) : "memory");
  }
  if (p.counter) semaphore_release(p, w, at);
}

// ---- the end --------------------------------------------------------------------------------------

// Through shared memory, so that 16 bytes leave at a time.
template <int width, int n>
DEVICE void stage_gradient(const Work &w, const float (&x)[kScoreM][n][4], Shared to, float factor) {
  int warp = w.warp, key = warp / WARPS_Q * (kScoreM * 16), part = warp % WARPS_Q;
#pragma unroll
  for (int i = 0; i < kScoreM; ++i)
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      unsigned both[4];
#pragma unroll
      for (int r = 0; r < 4; ++r)
        both[r] = Format<DTYPE>::nearest(x[i][2 * j + r / 2][r % 2 * 2] * factor,
                                         x[i][2 * j + r / 2][r % 2 * 2 + 1] * factor);
      store_matrices<Tile<width>>(to, key + i * 16, (j * WARPS_Q + part) * 16, both);
    }
}
template <int width>
DEVICE void store_gradient(Shared from, const Rows &x, int first) {
  typedef Tile<width> T;
  for (int index = thread_index(); index < BLOCK_K * T::kUnits; index += kThreads) {
    int row = index / T::kUnits, unit = index % T::kUnits;
    if (first + row < x.count && unit * 8 < x.width)
      *(Quad *)(x.from + (first + row) * x.step + unit * 8) = load_quad(from + T::place(row, unit));
  }
}

// All tiles of a block, as a warp of one role goes over them: the scores of a tile in one interval
// between two barriers, its dQ in the next, the roles in opposite order.
template <int role>
DEVICE void run(const Params &p, const Work &w, Cursor at, int steps, Shared shared) {
  constexpr int kN = role == kRoleP ? kValueN : kKeyN;
  float grad[kScoreM][kN][4];
  clear(grad);
  Shared buffer = shared + kBuffer0;
  Cursor last = at;
  for (int step = 0; step < steps; ++step) {
    bool first = step == 0;
    if (!kOneBarrier && !first) {
      sync<kThreads>(0);  // dS is there
      add_rows(p, w, last, shared, buffer);
    }
    wait_for_copies<0>();
    sync<kThreads>(0);  // this tile is there, the last one was read; with one barrier its dS is there
    Cursor next = at;
    next.advance(w);
    // Here and not after a product: there the addresses would cost nothing, but the copies would come too late.
    if (step + 1 < steps) load_tile(p, w, next, shared);
    end_group();
    Shared full = buffer;
    if (kOneBarrier) buffer = buffer == shared + kBuffer0 ? buffer + kBuffer : shared + kBuffer0;
    if constexpr (role == kRoleP) {
      make_p(p, w, at, shared, buffer, grad);
      if (kOneBarrier && !first) add_rows(p, w, last, shared, full);
    } else {
      if (kOneBarrier && !first) add_rows(p, w, last, shared, full);
      make_ds(p, w, at, shared, buffer, grad);
    }
    last = at;
    at = next;
  }
  sync<kThreads>(0);  // the last dS is there
  if (steps) add_rows(p, w, last, shared, buffer);
  sync<kThreads>(0);  // K and V have been read
  if constexpr (role == kRoleP)
    stage_gradient<HEAD_DIM_V>(w, grad, shared + kV,
                               GENERAL && p.dropout_threshold ? p.dropout_scale : 1.0f);
  else
    stage_gradient<HEAD_DIM>(w, grad, shared + kK, p.scale);
}

// The role of a warp. Warps whose numbers on their SM differ by 4 share a scheduler, which should not
// have two of one role: blocks of four warps change roles in turn.
DEVICE int role_of(Shared scratch) {
  int role = wave_index() / kRoleWarps;
  if (kRoleWarps >= 4) return role;
  unsigned slot;
  asm volatile("mov.u32 %0, %%warpid;" : "=r"(slot));
  if (thread_index() == 0) store_word(scratch, slot);
  barrier();
  slot = load_word(scratch);
  barrier();
  return role ^ slot / kWarps % 2;
}

extern "C" __global__ WORKGROUP(kThreads, BLOCKS_PER_SM) void attn_bwd(KERNEL_PARAMS p) {
  extern __shared__ __align__(128) unsigned char memory[];
  Shared shared = shared_address(memory);
  int blocks = (p.seqlen_k + BLOCK_K - 1) / BLOCK_K;
  Work w;
  w.first_key = workgroup_index() % blocks * BLOCK_K;
  w.head_k = workgroup_index() / blocks % p.heads_k;
  w.batch = workgroup_index() / blocks / p.heads_k;
  Sequence s = sequence_of(p, w.batch);
  if (w.first_key >= s.keys) return;
  Seen seen = rows_seeing(p, s, w.first_key, min(w.first_key + BLOCK_K, s.keys) - 1);
  w.begin = seen.low / BLOCK_Q;
  w.end = seen.low < seen.high ? (seen.high + BLOCK_Q - 1) / BLOCK_Q : w.begin;
  // Chunks and windows together may leave out keys between those that a tile of rows sees. The blocks of
  // such keys take their turn there as well, or those that come after them would wait for ever.
  if (BANDED && seen.low < s.rows) w.end = max((seen.high + BLOCK_Q - 1) / BLOCK_Q, w.begin);
  // Keys beyond the end are seen by nobody.
  w.all_low = w.first_key + BLOCK_K > s.keys ? s.rows : seen.all_low;
  w.all_high = seen.all_high;
  int group = p.heads_q / p.heads_k;
  int steps = (w.end - w.begin) * group;
  Cursor at{w.head_k * group, w.begin, 0};
  int role = role_of(shared + kBuffer0);
  w.warp = wave_index() % kRoleWarps;
  if (steps) {
    int head_k = w.head_k / p.num_splits;
    load_rows<HEAD_DIM, BLOCK_K, kThreads>(
        shared + kK, keys_of(p.k, s, head_k, p.k_batch, p.k_row, p.k_head, p.head_dim), w.first_key);
    load_rows<HEAD_DIM_V, BLOCK_K, kThreads>(
        shared + kV, keys_of(p.v, s, head_k, p.v_batch, p.v_row, p.v_head, p.head_dim_v),
        w.first_key);
    load_tile(p, w, at, shared);
    end_group();
  }
  if (role == kRoleP)
    run<kRoleP>(p, w, at, steps, shared);
  else
    run<kRoleDs>(p, w, at, steps, shared);
  barrier();
  s = sequence_of(p, w.batch);
  store_gradient<HEAD_DIM>(
      shared + kK, keys_of(p.dk, s, w.head_k, p.dk_batch, p.dk_row, p.dk_head, p.head_dim), w.first_key);
  store_gradient<HEAD_DIM_V>(
      shared + kV, keys_of(p.dv, s, w.head_k, p.dv_batch, p.dv_row, p.dv_head, p.head_dim_v),
      w.first_key);
}
