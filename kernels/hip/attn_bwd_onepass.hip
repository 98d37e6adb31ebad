// Attention backward on CDNA 3 in one pass over the scores (FlashAttention-2, Dao 2023, algorithm 2): five
// products per score instead of seven in two passes. dQ is accumulated by atomics, in no fixed order.
//
// A workgroup owns kBlock keys. Each wavefront owns TILES times 16 of them, with K, V, dK and dV in
// registers. It also computes a share of dQ's columns for all keys of the workgroup, and for this keeps K in
// registers a second time, transposed. The loop visits the query rows that see these keys, 16 per step:
//
//   S = Q K^T    dP = dO V^T    rows x keys, its own keys in columns: P and dS feed from registers
//   dV^T += dO^T P    dK^T += Q^T dS
//   dQ^T = K^T dS^T    of all keys, through LDS, a step later
//
// Steps overlap: the products S and dP of a step alternate with dK, dV and dQ of the previous step, and
// vector instructions run during the products (see `Deal`). There is one barrier per step.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(GENERAL) || !defined(TILES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, GENERAL and TILES"
#endif

#include "bwd_turn.h"
#include "packed.h"

// ---- operands -----------------------------------------------------------------------------------

template <int steps, typename Units>
DEVICE void load_owned(const Context &c, Quad (&x)[TILES][steps], const Matrix &m) {
  for (int n = 0; n < TILES; ++n) {
    int first = c.first + n * 16;
    pin_scalar(first);
    auto from = step_buffer(m, first, c.s.keys - first);
    for (int i = 0; i < steps; ++i)
      x[n][i] = __builtin_amdgcn_raw_buffer_load_b128(
          from, buffer_offset(m, M::column(), Units::unit(i, M::part()) * 8), 0, 0);
  }
}

// K^T for a share of head_dim and all keys of the workgroup. A 4-byte load brings two neighboring elements of
// a key, of which one is kept. Keys are in the order of the exchange.
DEVICE void load_transposed(const Context &c, Fixed &x, const Matrix &m, int first_own, Lds lds) {
  Lds mine = lds + thread_index() * kUnitBytes;
#pragma unroll
  for (int b = 0; b < Swap::kBlocks; ++b) {
    unsigned two[kShares][4][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int first = first_own + Swap::tile_of(b, half) * 16;
      pin_scalar(first);  // otherwise all tiles' descriptors are computed first: 900 scalar spills
      auto from = step_buffer(m, first, c.s.keys - first);
#pragma unroll
      for (int t = 0; t < kShares; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          int element = element_of((wave_index() * kShares + t) / 2 * 2, M::column());
          two[t][i][half] = __builtin_amdgcn_raw_buffer_load_b32(
              from, buffer_offset(m, M::part() * 4 + i, element), 0, 0);
        }
    }
#pragma unroll
    for (int t = 0; t < kShares; ++t) {
      unsigned pick = (wave_index() * kShares + t) % 2 ? 0x07060302 : 0x05040100;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x.transposed[t][b][i] = __builtin_amdgcn_perm(two[t][i][1], two[t][i][0], pick);
      // A loaded value may be in any register. A computed one would be copied to a VGPR before each of its
      // products: 46 moves per step.
      lds_write(mine, x.transposed[t][b]);
      asm volatile("" : : : "memory");
      x.transposed[t][b] = lds_read(mine);
    }
  }
}

// ---- the first step, and the end ----------------------------------------------------------------

// Scores without a turn.
DEVICE void begin(const Context &c, const Places &at, const Fixed &fixed, const Buffers &lds,
                  Scored &scored, General &general, int head, int first) {
  Acc minus_lse = read_four(lds.rows + at.state), minus_delta = read_four(lds.rows + at.state + kStepRows * 4);
  if (kDropoutAlone) {
    minus_lse += general.log_scale;
    minus_delta *= general.keep;
  }
  Acc s[TILES], dp[TILES];
  for (int n = 0; n < TILES; ++n) {
    s[n] = Acc{0};
    dp[n] = GENERAL ? Acc{0} : minus_delta;
  }
  for (int i = 0; i < kSteps; ++i) {
    Quad x = read_unit(lds.rows + at.rows_q + i * kUnitBytes);
    for (int n = 0; n < TILES; ++n) {
      s[n] = M::mma(x.xy, fixed.k[n][i].xy, s[n]);
      s[n] = M::mma(x.zw, fixed.k[n][i].zw, s[n]);
    }
  }
  for (int i = 0; i < kStepsV; ++i) {
    Quad x = read_unit(lds.rows + at.rows_o + i * kUnitBytes);
    for (int n = 0; n < TILES; ++n) {
      dp[n] = M::mma(x.xy, fixed.v[n][i].xy, dp[n]);
      dp[n] = M::mma(x.zw, fixed.v[n][i].zw, dp[n]);
    }
  }
  if (GENERAL) {
    general.load_bias(c.sequence(), head, first);
    auto masked = [&](Acc (&x)[TILES]) {
      for (int n = 0; n < TILES; ++n) {
        unsigned seen = seen_bits(c, c.own(n), first);
        for (int r = 0; r < 4; ++r) x[n][r] = where(seen, r, x[n][r]);
      }
    };
    general.weigh(scored.general, s, dp, lds.rows + at.state, c.sequence(), head, first, masked);
    for (int i = 0; i < 2 * TILES; ++i)
      exchange(at, lds.swap, i / 2, i % 2 * 2, scored.general.ds[i / 2][i % 2]);
  }
  if (kBiasAlone) {
    general.lines.seek(c.sequence(), head, first, c.first);
    general.load_lines();
  }
  unsigned kept[TILES];
  if (kDropoutAlone) general.draw(kept, c.sequence(), head, first);
  for (int n = 0; !GENERAL && n < TILES; ++n) {
    unsigned seen = seen_bits(c, c.own(n), first);
    for (int r = 0; r < 4; ++r) {
      float x = kAlibiAlone ? general.sloped(general.distance_of(first), n, r, minus_lse[r]) : minus_lse[r];
      if (kBiasAlone) x = general.biased(n, r, minus_lse[r]);
      x = __builtin_fmaf(s[n][r], c.to_base_2, x);
      float slope = 1.0f;
      if (kSoftcapAlone) {
        float y = reciprocal(exp2(s[n][r] * general.cap_in) + 1.0f);
        x = __builtin_fmaf(y, -2.0f * general.cap_out, minus_lse[r] + general.cap_out);
        slope = 4.0f * (y - y * y);
      }
      scored.p[n][r] = where(seen, r, exp2(x));
      if (kDropoutAlone) {
        dp[n][r] = either(bits_of(kept[n], r), dp[n][r], minus_delta[r]) * scored.p[n][r];
        scored.p[n][r] = where(kept[n], r, scored.p[n][r]);
      } else {
        dp[n][r] *= scored.p[n][r] * slope;
      }
      if (kSinksAlone) general.sinks.sum += general.sinks.weight(minus_lse[r]) * dp[n][r];
    }
    for (int r = 0; r < 4; r += 2) {
      scored.ds[n][r / 2] = F::half_up(dp[n][r], dp[n][r + 1]);
      exchange(at, lds.swap, n, r, scored.ds[n][r / 2]);
    }
  }
  for (int i = 0; i < kCarried; ++i)
    scored.columns[i] = read_unit(lds.columns + at.columns + i * ColumnsQ::kPairBytes);
}

// What is not owned lies outside the buffer and is not written. A width is a multiple of 8.
template <int tiles>
DEVICE void store(const Context &c, const Matrix &m, const Acc (&grad)[TILES][tiles], float factor) {
  for (int n = 0; n < TILES; ++n) {
    int first = c.first + n * 16;
    pin_scalar(first);
    auto to = step_buffer(m, first, c.s.keys - first);
    for (int t = 0; t < tiles; t += 2) {
      Quad x;
      for (int r = 0; r < 4; ++r) x[r] = F::nearest(grad[n][t][r] * factor, grad[n][t + 1][r] * factor);
      unsigned offset = buffer_offset(m, M::column(), element_of(t, 4 * M::part()));
      __builtin_amdgcn_raw_buffer_store_b128(x, to, offset, 0, 0);
    }
  }
}

extern "C" __global__ WORKGROUP(kThreads, 1) void attn_bwd_onepass(Params p) {
  __shared__ __attribute__((aligned(kLineBytes))) char memory[kLdsBytes];
  Buffers lds((Lds)memory);
  Work work;
  if (!find_work<true, kBlock>(p, p.heads_k, 1, work)) return;
  Context c{sequence_of(p, work.batch), work.batch};
  make_scalar(c.s.keys);
  make_scalar(c.s.rows);
  int first_own = work.block * kBlock;
  if (first_own >= c.s.keys) return;
  c.first = first_own + wave_index() * kOwned;
  c.to_base_2 = p.scale * kLog2E;
  c.mine = rows_seeing(p, c.s, c.first, min(c.first + kOwned, c.s.keys) - 1);
  if (c.first + kOwned > c.s.keys) c.mine.all_low = 0x7fffffff;  // a lane without a key adds nothing
  make_scalar(c.mine.all_low);
  make_scalar(c.mine.all_high);

  Fixed fixed;
  load_owned<kSteps, RowsQ>(c, fixed.k, k_of(params_again(), c.s, work.head));
  fence();
  load_owned<kStepsV, RowsO>(c, fixed.v, v_of(params_again(), c.s, work.head));
  fence();
  load_transposed(c, fixed, k_of(params_again(), c.s, work.head), first_own, (Lds)memory);
  fence();
  Gradients grad;
  for (int n = 0; n < TILES; ++n) {
    for (int t = 0; t < 2 * kSteps; ++t) grad.k[n][t] = Acc{0};
    for (int t = 0; t < 2 * kStepsV; ++t) grad.v[n][t] = Acc{0};
  }

  Seen block = rows_seeing(p, c.s, first_own, min(first_own + kBlock, c.s.keys) - 1);
  int start = block.low / kStepRows * kStepRows;
  int steps = max(block.high - start + kStepRows - 1, 0) / kStepRows;
  make_scalar(start);
  make_scalar(steps);
  int group = p.heads_q / p.heads_k, head = work.head * group;

  if (steps) {
    Walk walk{start, start + steps * kStepRows, steps, head + group, start, head, head, steps, head, steps + 1};
    walk.lined_head = head;
    walk.lined = steps;
    const Params &again = params_again();
    Feed feed(q_of(again, c.s, head), dout_of(again, c.s, head), kRowsO, kColumnsO, kStates);
    walk.seek(c, feed);
    auto load = [&] {
      feed.prepare_rows();
      feed.prepare();
#pragma unroll
      for (int i = 0; i < Feed::kLoads; ++i) feed.load(i);
      feed.advance();
      feed.advance_states();
      walk.feed_on(c, feed);
    };
    auto store = [&](unsigned rows, unsigned columns, bool has_columns) {
#pragma unroll
      for (int i = 0; i < Feed::kStores; ++i) feed.store(i, rows, columns, has_columns);
    };
    load();
    barrier();  // tiles overwrite the LDS that K^T used
    store(lds.rows, lds.columns, !kLate);
    load();
    store(lds.rows_next, kLate ? lds.columns : lds.columns_next(), true);
    load();
    barrier();
    Places at;
    Scored scored;
    General general;
    if (GENERAL || TERM) general.begin(c.sequence(), c.first, head);
    begin(c, at, fixed, lds, scored, general, head, start);
    if (kBiasAlone) {
      for (int i = 0; i < 2; ++i) {
        for (int part = 0; part < BiasLines<TILES>::kParts; ++part) general.lines.go_on(part);
        walk.line_on(c, general);
        if (i == 0) general.load_lines();
      }
    }
    lds.turn_rows();
    barrier();

    walk.seek_sums(c);
    walk.sums_step = params_again().heads_q * (kSumRows * HEAD_DIM * 4);
    walk.sums -= walk.sums_step;
    walk.sums_bytes = 0;
    walk.turns = group * steps;
    do {
      Values values;
      Turn turn{c, at, fixed, grad, feed, scored, lds, walk, general, values};
      turn.run();
    } while (walk.turns);
#pragma unroll
    for (int i = 0; i < 4 * kShares; ++i) add(at, walk, scored.dq, i);
  }
  const Params &q = params_again();
  Sequence s = sequence_of(q, c.batch);
  store(c, keys_of(q.dk, s, work.head, q.dk_batch, q.dk_row, q.dk_head, q.head_dim), grad.k, q.scale);
  store(c, keys_of(q.dv, s, work.head, q.dv_batch, q.dv_row, q.dv_head, q.head_dim_v), grad.v, 1.0f);
}
