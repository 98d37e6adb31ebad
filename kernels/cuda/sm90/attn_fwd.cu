// Attention forward on Hopper: out and lse of q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dense
// or packed. FlashAttention-3's division of labour (Shah et al. 2024): one warp copies by TMA, GROUPS
// warpgroups of 64 query rows each multiply, and while one of them multiplies the other exponentiates.
//
// A block stays on its SM and takes one piece of work (rows of one head) after the other, whichever is
// next when it is done: `counter`, which is 0 before and after. K and V pass through STAGES places each,
// from the last tile that the rows see to the first. Float8 inputs (INPUTS, SCALES) have V turned on its way
// by the three warps beside the one that copies: float8.h.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(SCORE) || \
    !defined(GROUPS) || !defined(BLOCK_K) || !defined(STAGES) || !defined(SHARED_BYTES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE, GROUPS (warpgroups that multiply), BLOCK_K, \
STAGES and SHARED_BYTES"
#endif

#include "fwd_load.h"

// S = Q K^T and O += P V, under way when these return.
DEVICE void multiply_keys(Scores &s, unsigned long long queries, unsigned long long keys) {
  typedef Operand<kRowBytes / 2> Panel;
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    wgmma<INPUTS, false, false>(s, queries + Panel::step_along(i, kQueryPanel),
                               keys + Panel::step_along(i, kKeyPanel), i > 0);
  wgmma_commit();
}
DEVICE void multiply_values(Output &o, const Probabilities &p, unsigned long long values) {
#pragma unroll
  for (int i = 0; i < kSlices; ++i)
    wgmma<INPUTS, true>(o, p[i], values + Operand<kRowBytesV / 2>::step_down(i), true);
  wgmma_commit();
}
// Columns `part` of P V in float8, of k-slices [from, to).
DEVICE void multiply_values(Columns &products, const Probabilities &p, unsigned long long values, int part,
                            int from = 0, int to = kSlices) {
  values += part * (kColumns * kTurnedRow / 16);
#pragma unroll
  for (int i = from; i < to; ++i)
    wgmma<INPUTS, false>(products, p[i], values + Operand<kTurnedRow / 2>::step_along(i, kTurnedPanel),
                         i > from);
  wgmma_commit();
}

// The rows of a tile of V from `from` on become 0: what is beyond a sequence may hold anything, and P's 0
// does not make 0 of a NaN. Each group does so for itself; others write the same.
DEVICE void clear_rows(Shared values, int from, int group) {
  constexpr int kUnits = kWidthV / kUnit;
  Quad zeros{};
  for (int i = from * kUnits + thread_index() % kGroupThreads; i < BLOCK_K * kUnits; i += kGroupThreads)
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) store_shared(values + panel * kValuePanel + i * 16, zeros);
  fence_proxy_async();
  bar_sync(8 + group, kGroupThreads);
}

// The warp's rows: in float32 to the workspace of this part of the keys, or in 16 bits to out.
// `unit`: what the output is a multiple of.
DEVICE void store(const Params &p, Shared told, int first_row, const Rows &rows, Output &o, float unit) {
  auto range = load_shared<decltype(Told::range)>(told);
  auto sequence = load_shared<decltype(Told::sequence)>(told + 16);
  auto output = load_shared<decltype(Told::output)>(told + 32);
  Sequence s;
  s.batch = sequence.batch;
  s.row_batch = output.row_batch;
  s.row0 = output.row0;
  int lane = lane_index();
  first_row += range.row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    Finished end = finish(p, rows[h], sequence.head, output.part);
    if (kFloat8) end.inverse *= unit;
    int row = first_row + 8 * h + lane / 4;
    bool mine = row < range.rows;
#pragma unroll
    for (int t = 0; t < kDimTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        o[4 * t + 2 * h + i] = end.inverse == 0.0f ? 0.0f : o[4 * t + 2 * h + i] * end.inverse;
    if (p.num_splits > 1) {
      if (!mine) continue;
      int column = lane % 4 * 2;
      long long line = part_line(p, s, row, sequence.head, output.part);
      float *to = (float *)p.partial_out + line * p.head_dim_v + column;
#pragma unroll
      for (int t = 0; t < kDimTiles; ++t)
        if (8 * t < p.head_dim_v)
          *(float2 *)(to + 8 * t) = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
      if (column == 0) ((float *)p.partial_lse)[line] = end.lse;
      continue;
    }
    if (p.lse && mine && lane % 4 == 0)
      ((float *)p.lse)[s.row_batch * p.lse_batch + sequence.head * p.lse_head + s.row0 + row] = end.lse;
    unsigned short *to = (unsigned short *)p.out + s.row_batch * p.out_batch + (s.row0 + row) * p.out_row +
                         sequence.head * p.out_head + lane % 4 * kUnit;
#pragma unroll
    for (int t = 0; t < kDimTiles; t += 4) {
      unsigned x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = Format<DTYPE>::nearest(o[4 * (t + i) + 2 * h], o[4 * (t + i) + 2 * h + 1]);
      gather(x);
      if (mine && 8 * t + lane % 4 * kUnit < p.head_dim_v)
        *(Quad *)(to + 8 * t) = Quad{{x[0], x[1], x[2], x[3]}};
    }
  }
}

DEVICE void multiply(const Params &p, Shared shared, int group) {
  Barriers barriers{shared + kBarriersAt};
  int in_group = wave_index() % 4;
  bool speaker = lane_index() == 0;  // for its warp
  auto release = [&](Shared barrier) {
    if (kFloat8 ? elect_one() : speaker) mbarrier_arrive(barrier);
  };
  float factor = to_base_2(p);
  unsigned long long queries = Operand<kRowBytes / 2>::along(shared + group * kQueryBytes);
  unsigned long long keys = Operand<kRowBytes / 2>::along(shared + kKeysAt);
  unsigned long long values = kFloat8 ? Operand<kTurnedRow / 2>::along(shared + kTurnedAt)
                                      : Operand<kRowBytesV / 2>::down(shared + kValuesAt, kValuePanel);

  // Groups issue their products in turn, and the softmax of one runs under those of the others.
  int mine = 1 + group, next = 1 + (group + 1) % GROUPS;
  if (kTurns && group == GROUPS - 1) bar_arrive(next, 2 * kGroupThreads);

  Turn<> of_keys, of_values;
  Turn<kSlots> of_pieces;
  unsigned used = 0;  // parity of the queries' place
  unsigned long long next_keys = keys;
  while (true) {
    mbarrier_wait(barriers.piece_full(of_pieces.stage), of_pieces.parity);
    Shared told = shared + kToldAt + of_pieces.stage * kToldBytes;
    auto range = load_shared<decltype(Told::range)>(told);
    auto sequence = load_shared<decltype(Told::sequence)>(told + 16);
    int row = same(range.row), first = same(range.first), last = same(range.last);
    if (row < 0) break;
    Sequence s;
    s.rows = same(range.rows);
    s.keys = same(sequence.keys);
    s.shift = same(sequence.shift);
    s.batch = sequence.batch;
    int first_row = row + group * kGroupRows + in_group * 16;
    float descale = 1.0f, scale = factor, unit = 1.0f;
    if (kFloat8) {
      descale = load_shared<HeadScales>(told + sizeof(Told)).scores;
      if (SCORE == PLAIN) scale *= descale;
    }
    Rows rows{{kLowest, 0.0f}, {kLowest, 0.0f}};
    Output o;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; ++i) o[i] = 0.0f;

    if (first <= last) {
      Seen seen = keys_seen(p, s, first_row, min(first_row + 16, s.rows) - 1);
      Probabilities y[kApart ? 2 : 1];  // of the tile that is multiplied, and of the one that is being made
      float factors[2];
      Blocks blocks(p, s.batch, sequence.head, first_row + lane_index() / 4);
      auto finish_scores = [&](Scores &x, int tile) {
        int key = tile * BLOCK_K;
        if constexpr (kBlocks) blocks.scale_scores(x, tile);
        if (SCORE != PLAIN) add_terms(p, x, s, sequence.head, first_row, tile, descale);
        if (key < seen.all_low || key + BLOCK_K > seen.all_high) {
          int row = first_row;
          if constexpr (kFloat8) pin(row);  // else each row's is kept through the loop, in four registers
          mask(p, x, s, row, tile);
        }
      };
      auto take_turn = [&]() {
        if (kTurns) bar_sync(mine, 2 * kGroupThreads);
      };
      auto pass_turn = [&]() {
        if (kTurns) bar_arrive(next, 2 * kGroupThreads);
      };
      auto wait_keys = [&]() { mbarrier_wait(barriers.key_full(of_keys.stage), of_keys.parity); };
      auto issue_keys = [&](Scores &x) {
        wgmma_fence();
        multiply_keys(x, queries, kFloat8 ? next_keys : keys + of_keys.stage * (kKeyBytes / 16));
      };
      auto release_keys = [&]() {
        release(barriers.key_free(of_keys.stage));
        of_keys.advance();
        // Here and not in the turn, for which another group waits.
        if constexpr (kFloat8) next_keys = keys + of_keys.stage * (kKeyBytes / 16);
      };
      auto wait_values = [&]() { mbarrier_wait(barriers.operand_full(of_values.stage), of_values.parity); };
      auto descriptor = [&]() { return values + of_values.stage * (kValueBytes / 16); };
      auto release_values = [&]() {
        release(barriers.operand_free(of_values.stage));
        of_values.advance();
      };

      mbarrier_wait(barriers.query_full(group), used);
      used ^= 1;
      if constexpr (kSerial) {
        take_turn();
#pragma unroll 1
        for (int tile = last; tile >= first; --tile) {
          float units[kSlices];
          {
            Scores x;
            if (!kAhead || tile == last) wait_keys();
            issue_keys(x);
            pass_turn();
            wgmma_wait<0>();
            hold(x);
            release_keys();
            if (tile == first) release(barriers.query_free(group));
            finish_scores(x, tile);
            bool raised = soften_in_place(scale, x, rows, factors);
            if constexpr (kBlocks) {
              if (raised) rescale(o, factors);
              blocks.scale_probabilities(x, tile, units);
            } else if (!raised) {
              factors[0] = factors[1] = 1.0f;
            }
            round_to(y[0], x);
          }
          wait_values();
          take_turn();
          Columns products[kUnderWay];
          auto issue = [&](int i) {
            Columns &into = products[i % kUnderWay];
            if constexpr (kBlocks)
              multiply_values(into, y[0], descriptor(), i / kSlices, i % kSlices, i % kSlices + 1);
            else
              multiply_values(into, y[0], descriptor(), i);
          };
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kUnderWay; ++i) issue(i);
          if (kAhead && tile > first) wait_keys();
#pragma unroll
          for (int i = 0; i < kProducts; ++i) {
            Columns &done = products[i % kUnderWay];
            if (i + 1 < kProducts)
              wgmma_wait<kUnderWay - 1>();
            else
              wgmma_wait<0>();
            hold(done);
            if constexpr (kBlocks)
              add(o, done, i / kSlices, units[i % kSlices]);
            else
              rescale_and_add(o, factors, done, i);
            if (i + kUnderWay < kProducts) {
              hold(done);
              wgmma_fence();
              issue(i + kUnderWay);
            }
          }
          hold(y[0]);
          release_values();
        }
        pass_turn();
      } else {
        Scores x;
        wait_keys();
        hold(x);
        issue_keys(x);
        wgmma_wait<0>();
        hold(x);
        release_keys();
        finish_scores(x, last);
        if constexpr (kApart) {
          soften_apart<true>(scale, x, rows, y[0], factors);
        } else {
          soften_in_place(scale, x, rows, factors);
          round_to(y[0], x);
        }
        int valid = s.keys - last * BLOCK_K;
        if (!kFloat8 && valid < BLOCK_K && (p.cu_seqlens_k || p.seqused_k)) {
          wait_values();
          clear_rows(shared + kValuesAt + of_values.stage * kValueBytes, valid, group);
        }

        // The scores of a tile, and the product of the one before it with its values.
        auto step = [&](int tile, Probabilities &before, Probabilities &made) {
          wait_keys();
          take_turn();
          hold(x);
          if constexpr (!kFloat8) hold(o);
          issue_keys(x);
          wait_values();
          Columns products[kParts];
          wgmma_fence();
          if constexpr (kFloat8) {
#pragma unroll
            for (int i = 0; i < kParts; ++i) multiply_values(products[i], before, descriptor(), i);
          } else {
            multiply_values(o, before, descriptor());
          }
          pass_turn();
          wgmma_wait<kFloat8 ? kParts : 1>();
          hold(x);
          release_keys();
          finish_scores(x, tile);
          bool raised;
          if constexpr (kApart)
            raised = soften_apart<false>(scale, x, rows, made, factors);
          else
            raised = soften_in_place(scale, x, rows, factors);
          wgmma_wait<0>();
          if constexpr (kFloat8) {
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
              hold(products[i]);
              add(o, products[i], i);
            }
          } else {
            hold(o);
          }
          hold(before);
          release_values();
          if (raised) rescale(o, factors);
          if constexpr (!kApart) round_to(made, x);
        };
        auto end = [&](Probabilities &before) {
          release(barriers.query_free(group));
          wait_values();
          if constexpr (kFloat8) {
            Columns products[kParts];
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < kParts; ++i) multiply_values(products[i], before, descriptor(), i);
            wgmma_wait<0>();
#pragma unroll
            for (int i = 0; i < kParts; ++i) {
              hold(products[i]);
              add(o, products[i], i);
            }
          } else {
            hold(o);
            wgmma_fence();
            multiply_values(o, before, descriptor());
            wgmma_wait<0>();
            hold(o);
          }
          release_values();
        };
        int tile = last - 1;
        if constexpr (kApart) {
          // By twos, so that what one step makes is where the next one takes it.
          for (; tile > first; tile -= 2) {
            step(tile, y[0], y[1]);
            step(tile - 1, y[1], y[0]);
          }
          if (tile == first) {
            step(tile, y[0], y[1]);
            end(y[1]);
          } else {
            end(y[0]);
          }
        } else {
          for (; tile >= first; --tile) step(tile, y[0], y[0]);
          end(y[0]);
        }
      }
    }
    // Read again: through the loop these would take registers that it has not got.
    if (kFloat8 && !kBlocks) unit = load_shared<HeadScales>(told + sizeof(Told)).values;
    store(p, told, group * kGroupRows + in_group * 16, rows, o, unit);
    release(barriers.piece_free(of_pieces.stage));
    of_pieces.advance();
  }
}

extern "C" __global__ WORKGROUP(kThreads, 1) void attn_fwd(const __grid_constant__ MappedParams p) {
  extern __shared__ __align__(1024) char memory[];
  Shared shared = shared_address(memory);
  if (thread_index() == 0) Barriers{shared + kBarriersAt}.make();
  barrier();
  int group = wave_index() / 4;
  if (group == 0) {
    setmaxnreg_dec<kFew>();
    if (wave_index() == 0) {
      if (elect_one()) copy(p, shared);
    } else if constexpr (kFloat8) {
      turn_values(shared, wave_index() - 1);
    }
  } else {
    setmaxnreg_inc<kMany>();
    multiply(p.params, shared, group - 1);
  }
}
