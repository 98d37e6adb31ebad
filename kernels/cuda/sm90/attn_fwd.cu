// Attention forward on Hopper: out and lse of q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dense
// or packed. Warp-specialized as FlashAttention-3 (Shah et al. 2024): one producer warpgroup, GROUPS
// consumer warpgroups of 64 query rows each.
//
// A block stays on its SM and takes work tiles (rows of one head) from `counter`, which is 0 before the
// launch and after it. For each work tile, in this order:
//   1. The producer tells the consumers what it is and loads Q, K and V by TMA, from the last tile of keys
//      that the rows see to the first; with LISTS only those that the mask_mod leaves. K and V have STAGES stages each (fwd_load.h). In float8 three more
//      warps of the producer warpgroup transpose V (float8.h).
//   2. The consumers run the online softmax over the tiles (consume). They have one of two loops:
//      pipelined  S of the next tile and P V of this one are in flight together;
//      serial     float8 with too few registers for that: one product after the other.
//      Either way warpgroups alternate (ping-pong): one issues products while another exponentiates.
//   3. The epilogue stores the output and the LSE, or a split's share of them (store).
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(SCORE) || \
    !defined(GROUPS) || !defined(BLOCK_K) || !defined(STAGES) || !defined(SHARED_BYTES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE, GROUPS (consumer warpgroups), BLOCK_K, \
STAGES and SHARED_BYTES"
#endif

#include "fwd_chunks.h"
#include "fwd_load.h"

// ---- products, in flight when these return ------------------------------------------------------

// S = Q K^T.
DEVICE void issue_qk(Scores &s, unsigned long long q, unsigned long long k) {
  typedef Operand<kRowBytes / 2> Panel;
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    wgmma<INPUTS, false, false>(s, q + Panel::step_along(i, kQPanel), k + Panel::step_along(i, kKPanel),
                               i > 0);
  wgmma_commit();
}
// O += P V.
DEVICE void issue_pv(Output &o, const Probabilities &p, unsigned long long v) {
#pragma unroll
  for (int i = 0; i < kSlices; ++i)
    wgmma<INPUTS, true>(o, p[i], v + Operand<kRowBytesV / 2>::step_down(i), true);
  wgmma_commit();
}
// Float8: one group of columns of P V, of the k-slices [from, to).
DEVICE void issue_pv(TileOutput &pv, const Probabilities &p, unsigned long long v, int column_group,
                     int from = 0, int to = kSlices) {
  v += column_group * (kColumns * kTransposedRow / 16);
#pragma unroll
  for (int i = from; i < to; ++i)
    wgmma<INPUTS, false>(pv, p[i], v + Operand<kTransposedRow / 2>::step_along(i, kTransposedPanel),
                         i > from);
  wgmma_commit();
}

// The rows of a V tile from `from` on become 0. What lies beyond a sequence may be NaN, and P's 0 times NaN
// is NaN. Each warpgroup clears for itself; the others write the same zeros.
DEVICE void clear_rows(Shared v, int from, int group) {
  constexpr int kUnits = kWidthV / kUnit;
  Quad zeros{};
  for (int i = from * kUnits + thread_index() % kGroupThreads; i < BLOCK_K * kUnits; i += kGroupThreads)
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) store_shared(v + panel * kVPanel + i * 16, zeros);
  fence_proxy_async();
  bar_sync(8 + group, kGroupThreads);
}

// ---- a consumer warpgroup -----------------------------------------------------------------------

DEVICE void store(const Params &p, Shared info, int first_line, const Rows &rows, Output &o, float unit,
                  int first_dim);

// One function, because ptxas allocates registers by the order in which a function declares its variables:
// with the two loops in functions of their own 38 of the 46 plans became other machine code.
DEVICE void consume(const Params &p, Shared shared, int group) {
  // ---- through all work tiles: operands, pipelines, ping-pong
  Barriers barriers{shared + kBarriersAt};
  int warp = wave_index() % 4;  // of the warpgroup
  bool leader = lane_index() == 0;  // arrives for its warp
  auto release = [&](Shared empty) {
    if (kFloat8 ? elect_one() : leader) mbarrier_arrive(empty);
  };
  float factor = to_base_2(p);
  int row_group = group / HALVES, half = group % HALVES;
  unsigned long long q = Operand<kRowBytes / 2>::along(shared + row_group * kQBytes);
  unsigned long long k = Operand<kRowBytes / 2>::along(shared + kKAt);
  unsigned long long v = kFloat8 ? Operand<kTransposedRow / 2>::along(shared + kTransposedAt)
                                 : Operand<kRowBytesV / 2>::down(shared + kVAt, kVPanel);
  v += half * (kPanelsV / HALVES * kVPanel / 16);

  // Ping-pong: a warpgroup waits for its turn to issue products, then lets the next one have it. Each waits
  // on a named barrier of its own. The first turn is that of warpgroup 0.
  int my_turn = 1 + group, next_turn = 1 + (group + 1) % GROUPS;
  if (kPingPong && group == GROUPS - 1) bar_arrive(next_turn, 2 * kGroupThreads);

  PipelineState<> k_pipe, v_pipe;
  PipelineState<kWorkStages> work_pipe;
  unsigned q_phase = 0;
  unsigned long long next_k = k;  // float8: the descriptor of the next K tile
  while (true) {
    // ---- the next work tile, as the producer tells it
    mbarrier_wait(barriers.work_full(work_pipe.stage), work_pipe.phase);
    Shared info = shared + kWorkInfoAt + work_pipe.stage * kWorkInfoBytes;
    auto range = load_shared<decltype(WorkTileInfo::range)>(info);
    auto sequence = load_shared<decltype(WorkTileInfo::sequence)>(info + 16);
    int row = broadcast(range.row), first = broadcast(range.first), last = broadcast(range.last);
    if (row < 0) break;
    Sequence s;
    s.rows = broadcast(range.rows);
    s.keys = broadcast(sequence.keys);
    s.shift = broadcast(sequence.shift);
    s.batch = sequence.batch;
    int first_line = row_group * kGroupRows + warp * 16;
    int first_row = PACKED ? row + row_group * rows_of_group(p) : row + first_line;
    int many = PACKED ? rows_of_group(p) : 16;  // rows of the warp
    float descale = 1.0f, scale = factor, unit = 1.0f;
    if (kFloat8) {
      descale = load_shared<HeadScales>(info + sizeof(WorkTileInfo)).scores;
      if (SCORE == PLAIN) scale *= descale;
    }
    Rows rows{{kLowest, 0.0f}, {kLowest, 0.0f}};
    Output o;
#pragma unroll
    for (int i = 0; i < kOwnDims / 2; ++i) o[i] = 0.0f;

    if (first <= last) {
      Seen seen = keys_seen(p, s, first_row, min(first_row + many, s.rows) - 1);
      Probabilities y[kSeparateP ? 2 : 1];  // P of the tile before, and of this one
      if constexpr (kFewRows)
        for (auto &tile : y)
          for (auto &slice : tile)
            for (unsigned &x : slice) x = 0;
      float factors[2];
      bool both = first_row + 8 < s.rows;  // of the warp's two halves
      TileScales tile_scales(p, s.batch, sequence.head, first_row + lane_index() / 4);

      Visits visits(p, s, sequence.head, row);
      float slope = 0.0f;
      if constexpr (SCORE == ALIBI) slope = -terms_of(p, s.batch, sequence.head, 0).slope / p.scale;

      // ---- the parts that both loops are made of
      // Whether what rows of the warp see ends or begins in tile `n`.
      auto ends_in = [&](int n) {
        return n * BLOCK_K < seen.all_low || n * BLOCK_K + BLOCK_K > seen.all_high;
      };
      // With kMaskBits, masks are made here, and finish_scores applies them. In chunks, the row is loaded again: through
      // the loop it would take registers.
#ifdef HAS_MASK_MOD
      SeenBits bits;
      auto make_mask = [&](int visit) {
        if constexpr (kMaskBits) {
          int n = tile_of(visit);
          bool cuts = !is_full(visit), ends = ends_in(n);
          int row =
              kChunkTiles ? broadcast(load_shared<decltype(WorkTileInfo::range)>(info).row) + first_line : first_row;
          if (cuts || ends) bits = seen_bits(p, s, sequence.head, row, n, cuts, ends);
        }
      };
#else
      auto make_mask = [](int) {};
#endif
      // Scales of blocks, score terms and mask of tile `n`. Only a tile that the mask cuts pays for it.
      auto finish_scores = [&](Scores &x, int visit) {
        int n = tile_of(visit);
        if constexpr (kBlockScaled) tile_scales.scale_scores(x, n);
        if constexpr (SCORE == SOFTCAP) cap(p, x);
        if constexpr (SCORE == ALIBI) add_alibi(x, s, first_row, n, slope);
#ifdef MOD
        if constexpr (SCORE == SCORE_MOD) modify(p, x, s, sequence.head, first_row, n, p.scale);
#endif
        if constexpr (SCORE == BIAS)
          add_bias<kBiasPanel>(p, x, shared + kBiasAt + k_pipe.stage * kBiasBytes +
                                         row_group * (BLOCK_K / 64) * kBiasPanel, warp * 16);
        if constexpr (SCORE == GENERAL) add_terms(p, x, s, sequence.head, first_row, n, descale);
#ifdef HAS_MASK_MOD
        if (!is_full(visit) || (kMaskBits && ends_in(n))) {
          if constexpr (kMaskBits)
            hide(x, bits);
          else
            hide(p, x, s, sequence.head, first_row, n);
        }
#endif
        if (!kMaskBits && ends_in(n)) {
          if constexpr (PACKED || kChunkTiles != 0) {
            // Made again: through the loop they would take registers.
            int row = load_shared<decltype(WorkTileInfo::range)>(info).row;
            int line = (thread_index() - kGroupThreads) / 32 * 16 + lane_index() / 4;
            mask_rows(p, x, s, n, [&](int h) { return Line(p, row, 0, line + 8 * h).row; });
          } else {
            int row = first_row;
            if constexpr (kFloat8) pin(row);  // or the loop keeps each row's number in four registers
            mask(p, x, s, row, n);
          }
        }
      };
      auto wait_for_turn = [&]() {
        if (kPingPong) bar_sync(my_turn, 2 * kGroupThreads);
      };
      auto pass_turn = [&]() {
        if (kPingPong) bar_arrive(next_turn, 2 * kGroupThreads);
      };
      auto wait_k = [&]() { mbarrier_wait(barriers.k_full(k_pipe.stage), k_pipe.phase); };
      auto issue_s = [&](Scores &x) {
        auto this_q = q;
        if constexpr (HEAD_DIM == 192) {  // or the descriptors of all 12 steps stay in registers
          unsigned low = (unsigned)q;
          pin(low);
          this_q = q >> 32 << 32 | low;
        }
        wgmma_fence();
        issue_qk(x, this_q, kFloat8 ? next_k : k + k_pipe.stage * (kKBytes / 16));
      };
      auto release_k = [&]() {
        release(barriers.k_empty(k_pipe.stage));
        k_pipe.advance();
        // Computed here and not in the next turn, for which another warpgroup waits.
        if constexpr (kFloat8) next_k = k + k_pipe.stage * (kKBytes / 16);
      };
      auto wait_v = [&]() { mbarrier_wait(barriers.operand_full(v_pipe.stage), v_pipe.phase); };
      auto this_v = [&]() { return v + v_pipe.stage * (kVBytes / 16); };
      auto release_v = [&]() {
        release(barriers.operand_empty(v_pipe.stage));
        v_pipe.advance();
      };

      make_mask(visits[last]);  // while Q and K are on their way
      mbarrier_wait(barriers.q_full(row_group), q_phase);
      q_phase ^= 1;
      if constexpr (!kSerial) {
        // ---- the pipelined consumer
        // Of all tiles, or a chunk at a time.
        for (int chunk_last = last, chunk_first;; chunk_last = chunk_first - 1) {
          chunk_first = kChunkTiles ? max(first, chunk_last / max(kChunkTiles, 1) * kChunkTiles) : first;
          // The work tile's first and last are loaded again when the chunk is done: through the loop they would
          // take registers.
          auto whole = [&]() { return load_shared<decltype(WorkTileInfo::range)>(info); };
          // Prologue: S and P of the last tile, while nothing else is in flight.
          Scores x;
          int first_visit = visits[chunk_last];
          if (kChunkTiles && chunk_last != last) make_mask(first_visit);
          wait_k();
          if constexpr (kFirstInTurn) wait_for_turn();
          hold(x);
          issue_s(x);
          if constexpr (kFirstInTurn) pass_turn();
          wgmma_wait<0>();
          hold(x);
          if constexpr (SCORE != BIAS) release_k();
          finish_scores(x, first_visit);
          if constexpr (SCORE == BIAS) release_k();  // its tile has come with K
          if constexpr (kSeparateP) {
            online_softmax_to<true>(scale, x, rows, y[0], factors, both);
          } else {
            online_softmax_in_place(scale, x, rows, factors, both);
            round_to(y[0], x);
          }
          int valid = s.keys - tile_of(first_visit) * BLOCK_K;
          if (!kFloat8 && valid < BLOCK_K && (PAGE_ROWS || p.cu_seqlens_k || p.seqused_k)) {
            wait_v();
            clear_rows(shared + kVAt + v_pipe.stage * kVBytes, valid, group);
          }

          // The body of the hot loop: S and P of tile `n` (`made`), and P V of the tile before it (`before`).
          auto step = [&](int n, Probabilities &before, Probabilities &made) {
            int visit = visits[n];
            if (!kSeparateP) make_mask(visit);  // where x needs no registers
            // 1. K of this tile, before the turn: whoever has the turn keeps the tensor cores busy.
            wait_k();
            // 2. This warpgroup's turn on the tensor cores.
            wait_for_turn();
            hold(x);
            if constexpr (!kFloat8) hold(o);
            // 3. S = Q K^T goes first, because softmax needs it first.
            issue_s(x);
            // 4. P V of the tile before. It runs under the softmax of step 7. Float8's goes to registers of
            //    its own.
            wait_v();
            TileOutput pv[kColumnGroups];
            wgmma_fence();
            if constexpr (kFloat8) {
#pragma unroll
              for (int i = 0; i < kColumnGroups; ++i) issue_pv(pv[i], before, this_v(), i);
            } else {
              issue_pv(o, before, this_v());
            }
            // 5. Both products are issued: the next warpgroup's turn.
            pass_turn();
            if (kSeparateP) make_mask(visit);
            // 6. Waits for S alone. K's stage is free.
            wgmma_wait<kFloat8 ? kColumnGroups : 1>();
            hold(x);
            if constexpr (SCORE != BIAS) release_k();
            // 7. Score terms, mask and softmax, while P V is in flight.
            finish_scores(x, visit);
            if constexpr (SCORE == BIAS) release_k();
            bool raised;
            if constexpr (kSeparateP)
              raised = online_softmax_to<false>(scale, x, rows, made, factors, both);
            else
              raised = online_softmax_in_place(scale, x, rows, factors, both);
            // 8. Waits for P V. V's stage and the registers of `before` are free.
            wgmma_wait<0>();
            if constexpr (kFloat8) {
#pragma unroll
              for (int i = 0; i < kColumnGroups; ++i) {
                hold(pv[i]);
                add(o, pv[i], i);
              }
            } else {
              hold(o);
            }
            hold(before);
            release_v();
            // 9. O follows the maximum. Almost no tile needs it, because the maximum may lag (kLag).
            if (raised) rescale(o, factors);
            // 10. P without registers of its own is rounded to where P V has just read it.
            if constexpr (!kSeparateP) round_to(made, x);
          };
          // Drain: P V of the first tile. Q has been read for the last time.
          auto drain = [&](Probabilities &before) {
            if (!kChunkTiles || chunk_first == broadcast(whole().first)) release(barriers.q_empty(row_group));
            wait_v();
            if constexpr (kFloat8) {
              TileOutput pv[kColumnGroups];
              wgmma_fence();
#pragma unroll
              for (int i = 0; i < kColumnGroups; ++i) issue_pv(pv[i], before, this_v(), i);
              wgmma_wait<0>();
#pragma unroll
              for (int i = 0; i < kColumnGroups; ++i) {
                hold(pv[i]);
                add(o, pv[i], i);
              }
            } else {
              hold(o);
              wgmma_fence();
              issue_pv(o, before, this_v());
              wgmma_wait<0>();
              hold(o);
            }
            release_v();
          };
          int n = chunk_last - 1;
          if constexpr (kSeparateP) {
            // In turns: what one step makes lies where the next one reads it, without moves.
            if constexpr (kByTwo)
              for (; n > chunk_first; n -= 2) {
                step(n, y[0], y[1]);
                step(n - 1, y[1], y[0]);
              }
            while (true) {
              if (n < chunk_first) {
                drain(y[0]);
                break;
              }
              step(n--, y[0], y[1]);
              if (kByTwo || n < chunk_first) {
                drain(y[1]);
                break;
              }
              step(n--, y[1], y[0]);
            }
          } else {
            for (; n >= chunk_first; --n) step(n, y[0], y[0]);
            drain(y[0]);
          }
          if constexpr (!kChunkTiles) {
            break;
          } else {
            sum_up(rows);
            auto all = whole();
            first = broadcast(all.first);
            auto before = [&]() { return Before(p, shared + kBeforeAt, group); };
            if (broadcast(all.last) / kChunkTiles > chunk_first / kChunkTiles) before().join(rows, o);
            if (chunk_first == first) break;
            before().keep(rows, o);
            rows[0] = rows[1] = Row{kLowest, 0.0f};
#pragma unroll
            for (int i = 0; i < HEAD_DIM_V / 2; ++i) o[i] = 0.0f;
          }
        }
      } else {
        // ---- the serial consumer
        // Registers hold either the scores or P V. So a warpgroup's products never run under its own
        // softmax, only under that of the other warpgroups.
        wait_for_turn();
#pragma unroll 1
        for (int n = last; n >= first; --n) {
          float units[kSlices];  // scales of blocks: what each k-slice of P is a multiple of
          {
            Scores x;
            // 1. S = Q K^T, then the next warpgroup's turn.
            if (!kWaitEarly || n == last) wait_k();
            issue_s(x);
            pass_turn();
            // 2. Waits for S. K's stage is free, and Q after the first tile of keys.
            wgmma_wait<0>();
            hold(x);
            release_k();
            if (n == first) release(barriers.q_empty(row_group));
            // 3. Score terms, mask and softmax, under the products of the other warpgroups.
            int visit = visits[n];
            if (n != last) make_mask(visit);
            finish_scores(x, visit);
            bool raised = online_softmax_in_place(scale, x, rows, factors, both);
            if constexpr (kBlockScaled) {
              if (raised) rescale(o, factors);
              tile_scales.scale_probabilities(x, n, units);
            } else if (!raised) {
              factors[0] = factors[1] = 1.0f;  // step 6 multiplies O by them
            }
            round_to(y[0], x);
          }
          // 4. This warpgroup's turn, for P V and for S of the next tile.
          wait_v();
          wait_for_turn();
          // 5. P V in kProducts parts, kInFlight of them at once, in registers that the scores have left.
          TileOutput pv[kInFlight];
          auto issue = [&](int i) {
            TileOutput &to = pv[i % kInFlight];
            if constexpr (kBlockScaled)
              issue_pv(to, y[0], this_v(), i / kSlices, i % kSlices, i % kSlices + 1);
            else
              issue_pv(to, y[0], this_v(), i);
          };
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) issue(i);
          if (kWaitEarly && n > first) wait_k();
          // 6. Each part is added to O in float32 when it is done, and the next one is issued.
#pragma unroll
          for (int i = 0; i < kProducts; ++i) {
            TileOutput &done = pv[i % kInFlight];
            if (i + 1 < kProducts)
              wgmma_wait<kInFlight - 1>();
            else
              wgmma_wait<0>();
            hold(done);
            if constexpr (kBlockScaled)
              add(o, done, i / kSlices, units[i % kSlices]);
            else
              rescale_and_add(o, factors, done, i);
            if (i + kInFlight < kProducts) {
              hold(done);
              wgmma_fence();
              issue(i + kInFlight);
            }
          }
          hold(y[0]);
          release_v();
        }
        pass_turn();
      }
    }
    // ---- the epilogue
    // Loaded again: through the loop these would take registers that it has not got.
    if (kFloat8 && !kBlockScaled) unit = load_shared<HeadScales>(info + sizeof(WorkTileInfo)).values;
    store(p, info, row_group * kGroupRows + warp * 16, rows, o, unit, half * kOwnDims);
    release(barriers.work_empty(work_pipe.stage));
    work_pipe.advance();
  }
}

// ---- the epilogue -------------------------------------------------------------------------------

// Stores the warp's rows: in float32 to the workspace of their split, or in 16 bits to out. `unit`: what the
// output is a multiple of, in float8. `first_dim`: of the warpgroup's columns.
DEVICE void store(const Params &p, Shared info, int first_line, const Rows &rows, Output &o, float unit,
                  int first_dim) {
  auto range = load_shared<decltype(WorkTileInfo::range)>(info);
  auto sequence = load_shared<decltype(WorkTileInfo::sequence)>(info + 16);
  auto output = load_shared<decltype(WorkTileInfo::output)>(info + 32);
  Sequence s;
  s.batch = sequence.batch;
  s.row_batch = output.row_batch;
  s.row0 = output.row0;
  int lane = lane_index();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    Line line(p, range.row, sequence.head, first_line + 8 * h + lane / 4);
    int row = line.row, head = line.head;
    bool mine = row < range.rows && line.exists;
    if constexpr (kChunkTiles != 0) {
      // A chunk, for combine: as it is.
      if (p.num_splits > 1) {
        if (!mine) continue;
        long long at = part_line(p, s, row, head, output.split);
        float *to = (float *)p.partial_out + at * p.head_dim_v + lane % 4 * 2;
#pragma unroll
        for (int t = 0; t < kDimTiles; ++t)
          if (8 * t < p.head_dim_v)
            *(float2 *)(to + 8 * t) = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
        if (lane % 4 == 0) ((float2 *)p.partial_lse)[at] = make_float2(rows[h].base, rows[h].total);
        continue;
      }
    }
    // 1. The sum of the row over its four lanes, the sink, the LSE.
    Finished end = finish(p, rows[h], head, output.split);
    if (kFloat8) end.inverse *= unit;
    // 2. O / sum; 0 for a row that sees no key.
#pragma unroll
    for (int t = 0; t < kDimTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        o[4 * t + 2 * h + i] = end.saw_key ? o[4 * t + 2 * h + i] * end.inverse : 0.0f;
    // 3. Of a split: float32, for combine.
    if (p.num_splits > 1) {
      if (!mine) continue;
      int column = first_dim + lane % 4 * 2;
      long long at = part_line(p, s, row, head, output.split);
      float *to = (float *)p.partial_out + at * p.head_dim_v + column;
#pragma unroll
      for (int t = 0; t < kDimTiles; ++t)
        if (first_dim + 8 * t < p.head_dim_v)
          *(float2 *)(to + 8 * t) = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
      if (column == 0) ((float *)p.partial_lse)[at] = end.lse;
      continue;
    }
    // 4. Else 16 bits from registers to out. Four lanes exchange their elements first, so that each stores
    // 16 neighboring bytes: whole sectors, and Q's shared memory is not needed for it.
    if (p.lse && mine && lane % 4 == 0 && first_dim == 0)
      ((float *)p.lse)[s.row_batch * p.lse_batch + head * p.lse_head + s.row0 + row] = end.lse;
    unsigned short *to = (unsigned short *)p.out + s.row_batch * p.out_batch + (s.row0 + row) * p.out_row +
                         head * p.out_head + first_dim + lane % 4 * kUnit;
#pragma unroll
    for (int t = 0; t < kDimTiles; t += 4) {
      unsigned x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = Format<DTYPE>::nearest(o[4 * (t + i) + 2 * h], o[4 * (t + i) + 2 * h + 1]);
      transpose_quads(x);
      if (mine && first_dim + 8 * t + lane % 4 * kUnit < p.head_dim_v)
        *(Quad *)(to + 8 * t) = Quad{{x[0], x[1], x[2], x[3]}};
    }
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

extern "C" __global__ WORKGROUP(kThreads, BLOCKS) void attn_fwd(MAPPED_PARAMS p) {
  extern __shared__ __align__(1024) char memory[];
  Shared shared = shared_address(memory);
  bool begins = kScheduler && !by_true_lengths(p.params);
  if (thread_index() == 0) {
    Barriers{shared + kBarriersAt}.make();
    if (begins) begin(p, shared);
  }
  if constexpr (PACKED) {
    // No copy reaches nobody's lines. What they hold must not be NaN, or each tile is computed again.
    for (int i = thread_index(); i < kRowGroups * kQBytes / 16; i += kThreads) store_shared(shared + i * 16, Quad{});
    fence_proxy_async();
  }
  barrier();
  int group = wave_index() / 4;
  if (group == 0) {
    if (kMovesRegisters) setmaxnreg_dec<kProducerRegisters>();
    if (wave_index() == 0) {
      if (elect_one()) produce(p, shared, begins);
    } else if constexpr (kFloat8) {
      transpose_v(shared, wave_index() - 1);
    } else if constexpr (kTwoProducers) {
      if (wave_index() == 1 && elect_one()) produce_v(p, shared);
    } else if constexpr (kScheduler) {
      if (wave_index() == 1) schedule(p.params, shared, begins);
      if (wave_index() == 2 && elect_one()) produce_q(p, shared, begins);
    }
  } else {
    if (kMovesRegisters) setmaxnreg_inc<kConsumerRegisters>();
    consume(p.params, shared, group - 1);
  }
}
