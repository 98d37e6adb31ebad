// Attention forward on Ampere and later: out and lse of q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv),
// dense, packed or paged. FlashAttention-2's loop (Dao 2023, algorithm 1) in base 2.
//
// A warp owns ROWS query rows, with their output in registers. Tiles of BLOCK_K keys and values pass through
// STAGES stages in shared memory. Each is loaded a whole tile ahead, with one barrier a tile.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(SCORE) || \
    !defined(PAGED) || !defined(ROWS) || !defined(WARPS) || !defined(BLOCK_K) || \
    !defined(STAGES) || !defined(Q_IN_REGISTERS) || !defined(BLOCKS) || !defined(SHARED_BYTES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE, PAGED, ROWS (of a warp: 16 or 32), WARPS, \
BLOCK_K, STAGES, Q_IN_REGISTERS, BLOCKS (on an SM) and SHARED_BYTES"
#endif

#include "fwd_tile.h"

// The work tile of a block.
struct Context {
  const Params &p;
  Work work;
  Sequence s;
  int first_row;  // of the warp, inside the sequence

  METHOD Context(const Params &p, int id)
      : p(p), work(work_of(p, id, (p.seqlen_q + kBlockQ - 1) / kBlockQ, p.heads_q)), s(sequence_of(p, work.batch)) {
    first_row = work.block * kBlockQ + wave_index() * ROWS;
  }
  METHOD Place place() const { return Place{first_row, s.rows, s.keys, s.shift}; }
  METHOD Owner owner() const { return Owner{work.batch, work.head, {}}; }
  METHOD Seen seen() const { return keys_seen(p, s, first_row, min(first_row + ROWS, s.rows) - 1); }
};

// ---- the end of a row ---------------------------------------------------------------------------

// float32, to the workspace of this split.
DEVICE void store_split(const Context &c, const Output &o, int band, int half, bool saw, float lse) {
  const Params &p = c.p;
  int row = c.place().row(band, half), column = lane_index() % 4 * 2;
  long long at = part_line(p, c.s, row, c.work.head, c.work.split);
  float *to = (float *)p.partial_out + at * p.head_dim_v + column;
#pragma unroll
  for (int t = 0; t < kDimTiles; ++t)
    if (saw && 8 * t < p.head_dim_v)
      *(float2 *)(to + 8 * t) = make_float2(o[band][t][2 * half], o[band][t][2 * half + 1]);
  if (column == 0) ((float *)p.partial_lse)[at] = lse;
}

// In 16 bits through shared memory, each warp its own rows, so that lanes store 16 bytes.
DEVICE void store_rows(const Context &c, const Output &o, Shared shared) {
  typedef Outputs T;
  constexpr int kAtOnce = kLanes / T::kPeriod;
  int lane = lane_index(), base = wave_index() * ROWS;
#pragma unroll
  for (int b = 0; b < kBands; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int t = 0; t < kDimTiles; ++t)
        store_shared(shared + T::place(base + 16 * b + 8 * h + lane / 4, t) + lane % 4 * 4,
                     Format<DTYPE>::nearest(o[b][t][2 * h], o[b][t][2 * h + 1]));
  __syncwarp();
  unsigned short *to = (unsigned short *)c.p.out + c.s.row_batch * c.p.out_batch +
                       c.work.head * c.p.out_head;
#pragma unroll
  for (int i = 0; i < ROWS / kAtOnce; ++i) {
    int row = i * kAtOnce + lane / T::kPeriod;
#pragma unroll
    for (int unit = lane % T::kPeriod; unit < T::kUnits; unit += T::kPeriod)
      if (c.first_row + row < c.s.rows && unit * kUnit < c.p.head_dim_v)
        *(Quad *)(to + (c.s.row0 + c.first_row + row) * c.p.out_row + unit * kUnit) =
            load_shared<Quad>(shared + T::place(base + row, unit));
  }
}

DEVICE void store(const Context &c, const Rows &rows, Output &o, Shared shared) {
  const Params &p = c.p;
#pragma unroll
  for (int b = 0; b < kBands; ++b)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      Finished end = finish(p, rows[b][h], c.work.head, c.work.split);
      if (SCORE == DROPOUT) end.inverse *= p.dropout_scale;
#pragma unroll
      for (int t = 0; t < kDimTiles; ++t)
#pragma unroll
        for (int i = 0; i < 2; ++i) o[b][t][2 * h + i] = end.saw_key ? o[b][t][2 * h + i] * end.inverse : 0.0f;
      int row = c.place().row(b, h);
      if (row >= c.s.rows) continue;
      if (p.num_splits > 1)
        store_split(c, o, b, h, end.has_lse, end.lse);
      else if (p.lse && lane_index() % 4 == 0)
        ((float *)p.lse)[c.s.row_batch * p.lse_batch + c.work.head * p.lse_head + c.s.row0 + row] =
            end.lse;
    }
  if (p.num_splits > 1) return;
  // Others may still be reading keys and values, and zeros from beyond the last tile be on their way.
  wait_for_copies<0>();
  barrier();
  store_rows(c, o, shared);
}

// ---- the loop -----------------------------------------------------------------------------------

DEVICE void load_queries(const Context &c, Shared queries) {
  const Params &p = c.p;
  int row = c.work.block * kBlockQ;
  const char *from = (const char *)p.q + (c.s.row_batch * p.q_batch + (c.s.row0 + row) * p.q_row +
                                          c.work.head * p.q_head) * 2;
  Copies<Queries, kThreads> copies(thread_index(), queries);
  copies.copy(from, p.q_row * 2, c.s.rows - row, p.head_dim);
}

DEVICE void attend(const Context &c, Rows &rows, Output &o, Shared shared, int begin, int end) {
  const Params &p = c.p;
  Shared queries = shared + kQueriesAt;
  load_queries(c, queries);
  Warp w(p, shared);
  w.note(c.seen(), c.place(), c.owner());
  Tiles in(p, c.s, c.work.head / (p.heads_q / p.heads_k), begin, end, w.notes + 48);
  for (int i = 0; i < STAGES - 1; ++i) {
    in.load(p, begin + i * BLOCK_K, end, shared + i * kStageBytes);
    end_group();
  }
  Query q;
#if Q_IN_REGISTERS
  wait_for_copies<0>();
  barrier();
#endif
  q.find(Queries::down(queries) + wave_index() * ROWS * Queries::kRowBytes);
  int high = w.seen().high;
  Shared stage = 0;
  for (int first = begin; first < end; first += BLOCK_K) {
    wait_for_copies<STAGES - 2>();
    barrier();
    Shared keys = shared + stage;
    // Where the tile before this one was, the one STAGES - 1 further goes.
    auto load = [&] {
      Shared free = stage == 0 ? (STAGES - 1) * kStageBytes : stage - kStageBytes;
      in.load(p, first + (STAGES - 1) * BLOCK_K, end, shared + free);
      end_group();
    };
    if (first < high) {
      Scores s;
      gemm_qk(s, q, keys, load);
      Seen seen = w.seen();
      if (SCORE != PLAIN) add_terms(w, s, first);
      if (first < seen.all_low || first + BLOCK_K > seen.all_high) mask(w, s, first);
      update_max(w, s, rows, o);
      gemm_pv(w, o, s, rows, keys + Keys::kBytes, first);
    } else {
      load();
    }
    stage = stage == (STAGES - 1) * kStageBytes ? 0 : stage + kStageBytes;
  }
}

extern "C" __global__ WORKGROUP(kThreads, BLOCKS) void attn_fwd(KERNEL_PARAMS p) {
  extern __shared__ __align__(kLine) char memory[];
  Context c(p, workgroup_index());
  int block_row = c.work.block * kBlockQ;
  if (block_row >= c.s.rows) return;

  Rows rows;
  Output o;
#pragma unroll
  for (int b = 0; b < kBands; ++b) {
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[b][h] = Row{kLowest, 0.0f};
#pragma unroll
    for (int t = 0; t < kDimTiles; ++t)
#pragma unroll
      for (int r = 0; r < 4; ++r) o[b][t][r] = 0.0f;
  }

  Seen seen = keys_seen(p, c.s, block_row, min(block_row + kBlockQ, c.s.rows) - 1);
  int begin = seen.low / BLOCK_K * BLOCK_K, end = seen.high;
  if (p.num_splits > 1) {
    int tiles = (max(end - begin, 0) + BLOCK_K - 1) / BLOCK_K;
    int share = (tiles + p.num_splits - 1) / p.num_splits * BLOCK_K;
    begin += c.work.split * share;
    end = min(end, begin + share);
  }
  Shared shared = shared_address(memory);
  if (begin < end) attend(c, rows, o, shared, begin, end);

  // Computed again: through the loop these would take registers that it has not got.
  int id = workgroup_index();
  pin(id);
  store(Context(p, id), rows, o, shared);
}
