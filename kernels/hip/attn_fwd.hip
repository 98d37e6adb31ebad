// Attention forward on CDNA 3: out and lse of q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv),
// dense, packed or paged. FlashAttention-2's loop (Dao 2023, algorithm 1) in base 2.
//
// A wavefront owns 32 query rows, one column of every product in a lane. It computes S^T = K Q^T and
// O^T = V^T P^T, so that P stays in registers (mma.h). Tiles of keys pass through LDS, two of K and
// two of V in turn, one barrier a tile. While the matrix unit makes the scores of the next tile, the
// vector unit makes the probabilities of this one. Float8 inputs have scales, and 16-bit out of
// OUT_DTYPE.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(SCORE) || \
    !defined(PAGED) || !defined(MMA) || !defined(BLOCK_K) || !defined(WAVES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE, PAGED, MMA, BLOCK_K and WAVES"
#endif

#include "fwd_tile.h"
#ifndef MOD
#define KERNEL_PARAMS Params
#endif

// ---- the end of a row ---------------------------------------------------------------------------

// `scale` is that of o.
DEVICE void store(const Context &c, Row (&rows)[kColumns], const Output &o, float scale) {
  const Params &p = params_again();
  for (int n = 0; n < kColumns; ++n) {
    int row = c.row[n];
    float total = M::column_sum(rows[n].total), base = rows[n].base, factor = 1.0f;
    if (p.sinks && p.use_sinks && c.work.part == 0) {
      // One more logit, without a value.
      float sink = ((const float *)p.sinks)[c.work.head] * kLog2E;
      float raised = __builtin_fmaxf(base, sink);
      factor = exp2(base - raised);
      total = total * factor + exp2(sink - raised);
      base = raised;
    }
    if (row >= c.s.rows) continue;
    bool saw = !(total <= 0.0f);  // a NaN has to come through
    float inverse = saw ? factor / total : 0.0f;
    float lse = saw ? (base + log2(total)) * kLn2 : -INFINITY_F;
    if (SCORE == DROPOUT) inverse *= p.dropout_scale;
    if (kFloat8) inverse *= scale;
    if (p.num_splits > 1) {
      long long line = part_line(p, c.s, row, c.work.head, c.work.part);
      float *to = (float *)p.partial_out + line * p.head_dim_v;
      for (int t = 0; t < kDimTiles; ++t)
        for (int j = 0; j < kFours; ++j)
          for (int i = 0; i < 4; ++i) {
            int d = t * MMA + M::row(4 * j + i);
            if (saw && d < p.head_dim_v) to[d] = o[t][n][4 * j + i] * inverse;
          }
      if (M::part() == 0) ((float *)p.partial_lse)[line] = lse;
      continue;
    }
    unsigned short *to = (unsigned short *)p.out + c.s.row_batch * p.out_batch +
                         (c.s.row0 + row) * p.out_row + c.work.head * p.out_head;
    for (int t = 0; t < kDimTiles; ++t)
      for (int j = 0; j < kFours; ++j) {
        int d = t * MMA + M::row(4 * j);
        float x[4];
        for (int i = 0; i < 4; ++i) x[i] = saw ? o[t][n][4 * j + i] * inverse : 0.0f;
        typedef Format<OUT_DTYPE> F;
        if (d < p.head_dim_v) *(Pair *)(to + d) = Pair{F::nearest(x[0], x[1]), F::nearest(x[2], x[3])};
      }
    if (M::part() == 0)
      ((float *)p.lse)[c.s.row_batch * p.lse_batch + c.work.head * p.lse_head + c.s.row0 + row] = lse;
  }
}

// ---- the loop -----------------------------------------------------------------------------------

struct State {
  Quad q[kColumns][kSteps];
  Output o;
  Row row[kColumns];
  Descale descale;
  Scales scales;  // of the tile whose values come next
  int begin, ends;  // the first key, and the sum of the first and last tiles' first keys

  // The loop counts as if tiles were visited from the first to the last: where that is at `first`, the
  // keys of the tile begin here.
  METHOD int key(int first) const { return kTurn < 0 ? ends - first : first; }
  METHOD Scales scales_of(const Context &c, int first, int end) {
    return descale.of(c, (first - begin) / BLOCK_K, key(first), end);
  }
};

// In which slot a key slice's probabilities are made: evenly spread over all that come before the
// last products which need them.
DEVICE constexpr int slot_of(int slice) {
  return slice * (kKeySlots + (kSlices / 2 - 1) * kGroups) / kSlices;
}

// Where two tiles of K and two of V lie in LDS.
struct Places {
  Lds keys, values;            // of this tile
  Lds next_keys, next_values;

  METHOD Places(Lds lds)
      : keys(lds),
        values(lds + 2 * Keys::Tile::kBytes),
        next_keys(keys + Keys::Tile::kBytes),
        next_values(values + Values::Tile::kBytes) {}
  METHOD Places(Lds keys, Lds values, Lds next_keys, Lds next_values)
      : keys(keys), values(values), next_keys(next_keys), next_values(next_values) {}

  METHOD Places next() const { return Places(next_keys, next_values, keys, values); }
};

// One tile, whose scores are `now` and whose place in the order of visits is `first`, with the tile after
// it, of which the scores become `next`. `end`: of all keys. This tile's values and the next one's keys are in LDS; the next one's values
// arrive, and where this tile's keys were, those after the next one's.
DEVICE void step(const Context &c, Source &in, State &state, const Places &at, Scores &now,
                 Scores &next, int first, int end) {
  float largest[kColumns];
  unsigned values[Values::kLoads];
  Probabilities p;
  Fragments ready, ahead;
  Scales scales;
  if (kFloat8) scales = state.scales_of(c, first + BLOCK_K, end);
  ready.read_keys(at.next_keys, 0);
  in.begin_values();
  in.begin_keys();
#pragma unroll
  for (int slot = 0; slot < kSlots; ++slot) {
    int value_slot = slot - kKeySlots;
    if (slot + 1 < kKeySlots)
      ahead.read_keys(at.next_keys, slot + 1);
    else if (value_slot + 1 < kValueSlots)
      ahead.read_values(at.values, value_slot + 1);
    fence();
    for (int i = 0; i < Values::kLoads; ++i)
      if (i * kSlots / 2 / Values::kLoads == slot) values[i] = in.load_values(i);
    for (int i = 0; i < Keys::kLoads; ++i)
      if (i * kSlots / 2 / Keys::kLoads == slot) in.load_keys(i, at.keys);
    if (slot < kKeySlots)
      multiply_keys(next, ready, state.q, slot);
    else
      multiply_values(state.o, ready, p, value_slot);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
      if (slot_of(slice) == slot) exponentiate(c, state.scales, now, state.row, state.key(first), slice, p);
    for (int t = 0; t < kKeyTiles; ++t)
      if (value_slot == (t + 1) * kValueSlots / kKeyTiles - 1) raise_largest(next, t, largest);
    if (slot == kSlots - 1) in.values.store(values, at.next_values);
    fence();
    ready = ahead;
  }
  in.end_values();
  in.end_keys();
  finish_scores(c, scales, next, state.key(first + BLOCK_K), largest);
  raise(c, state.scales, scales, largest, state.row, state.o);
  state.scales = scales;

  loads_arrived();
  barrier();
}

DEVICE void attend(const Context &c, State &state, int begin, int end) {
  Scores even, odd;
  float largest[kColumns];
  if (kFloat8) {
    state.begin = begin;
    state.ends = 2 * begin + (end - begin - 1) / BLOCK_K * BLOCK_K;
    state.scales = state.scales_of(c, begin, end);
  }
  Source in(params_again(), c, state.key(begin), begin, end);
  Places at(c.lds);
  {
    unsigned values[Values::kLoads];
    in.begin_keys();
    for (int i = 0; i < Keys::kLoads; ++i) in.load_keys(i, at.keys);
    in.end_keys();
    in.begin_keys();
    for (int i = 0; i < Keys::kLoads; ++i) in.load_keys(i, at.next_keys);
    in.end_keys();
    in.begin_values();
    for (int i = 0; i < Values::kLoads; ++i) values[i] = in.load_values(i);
    in.end_values();
    in.values.store(values, at.values);
  }
  loads_arrived();
  barrier();
  Fragments fragments;
  for (int i = 0; i < kKeySlots; ++i) {
    fragments.read_keys(at.keys, i);
    multiply_keys(even, fragments, state.q, i);
  }
  find_largest(even, largest);
  finish_scores(c, state.scales, even, state.key(begin), largest);
  raise(c, state.scales, state.scales, largest, state.row, state.o);
  barrier();  // where the first keys are, others are loaded next

  int first = begin, last = begin + (end - begin - 1) / BLOCK_K * BLOCK_K;
  // Two at a time, so that the scores need not be moved. With all score terms that would be 96 KB of
  // code, where two compute units share 64 KB of instruction cache: there, one at a time.
  if (SCORE == PLAIN)
    for (; first + 2 * BLOCK_K <= last; first += 2 * BLOCK_K) {
      step(c, in, state, at, even, odd, first, end);
      step(c, in, state, at.next(), odd, even, first + BLOCK_K, end);
    }
  for (bool more = first < last; more; more = SCORE != PLAIN && first < last) {
    step(c, in, state, at, even, odd, first, end);
    for (int t = 0; t < kKeyTiles; ++t)
      for (int n = 0; n < kColumns; ++n) even[t][n] = odd[t][n];
    at = at.next();
    first += BLOCK_K;
  }
  Probabilities p;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice)
    exponentiate(c, state.scales, even, state.row, state.key(first), slice, p);
  for (int slot = 0; slot < kValueSlots; ++slot) {
    fragments.read_values(at.values, slot);
    multiply_values(state.o, fragments, p, slot);
  }
}

extern "C" __global__ WORKGROUP(kThreads, WAVES / 4) void attn_fwd(KERNEL_PARAMS p) {
  __shared__ __attribute__((aligned(kLineBytes))) char lds[kLdsBytes];
  int blocks = (p.seqlen_q + kBlockQ - 1) / kBlockQ;
  Work work = work_of(workgroup_index(), blocks, p.num_splits, p.heads_q, p.batch, p.dies);
  Sequence s = sequence_of(p, work.batch);
  int first_row = work.block * kBlockQ;
  if (first_row >= s.rows) return;

  Context c{p, s, work};
  c.head_k = work.head / (p.heads_q / p.heads_k);
  c.lds = (Lds)lds;
  c.seed = SCORE == DROPOUT ? *(const unsigned long long *)p.seed : 0;

  int wave_row = first_row + wave_index() * kRows;
  c.seen = keys_seen(p, s, wave_row, min(wave_row + kRows, s.rows) - 1);
  for (int n = 0; n < kColumns; ++n) {
    c.row[n] = wave_row + n * MMA + M::column();
    c.to_base_2[n] = SCORE == PLAIN ? p.scale * kLog2E : kLog2E;
    if (kFloat8 && SCORE == PLAIN)
      c.to_base_2[n] *= query_scale(p, s, c.head_k, min(c.row[n], s.rows - 1));
    Seen seen = keys_seen(p, s, c.row[n], c.row[n]);
    c.first_key[n] = seen.low;
    c.last_key[n] = seen.high - 1;
  }

  State state;
  load_queries(c, state.q);
  for (int t = 0; t < kDimTiles; ++t)
    for (int n = 0; n < kColumns; ++n) state.o[t][n] = Acc{0};

  Seen seen = keys_seen(p, s, first_row, min(first_row + kBlockQ, s.rows) - 1);
  int begin = seen.low / BLOCK_K * BLOCK_K, end = seen.high;
  if (p.num_splits > 1) {
    int tiles = (max(end - begin, 0) + BLOCK_K - 1) / BLOCK_K;
    int share = (tiles + p.num_splits - 1) / p.num_splits * BLOCK_K;
    begin += work.part * share;
    end = min(end, begin + share);
  }
  if (begin < end) attend(c, state, begin, end);
  store(c, state.row, state.o, state.scales.v);
}
