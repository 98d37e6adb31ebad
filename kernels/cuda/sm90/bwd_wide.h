// Wide heads: dK and dV of 64 keys fill the registers of a warpgroup each. So two warpgroups have the same 64
// keys. One makes S, P and dV, the other dP, dS and dK, and each every other 64 elements of dQ's head. P goes
// from the first to the second through shared memory, as its threads hold it. With FLOAT_WEIGHTS in float32:
// from P in 16 bits, dK has 1.2 times the mean error.
#pragma once
#include "bwd_tile.h"

constexpr int kRoleP = 0, kRoleDs = 1;  // roles
constexpr int kChunks = HEAD_DIM / 64;                   // of dQ^T
typedef float Chunk[kScores];

// To where `to` has the lane's part of the first product.
DEVICE void add_dq(float *to, const Chunk &dq) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j) {
    float four[4] = {dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]};
    add(to + q_product<true>(0, j), four);
  }
}

DEVICE void store_weights(Shared to, const float (&weights)[kScores]) {
#pragma unroll
  for (int j = 0; j < kScores / 4; ++j)
    store_shared(to + (j * 128 + thread_index() % 128) * 16,
                 Quad{__float_as_uint(weights[4 * j]), __float_as_uint(weights[4 * j + 1]),
                      __float_as_uint(weights[4 * j + 2]), __float_as_uint(weights[4 * j + 3])});
}
DEVICE void store_weights(Shared to, const Packed &weights) {
#pragma unroll
  for (int i = 0; i < kSlices; ++i)
    store_shared(to + (i * 128 + thread_index() % 128) * 16,
                 Quad{weights[i][0], weights[i][1], weights[i][2], weights[i][3]});
}
// dS^T from dP^T, whose place may be taken, and P^T from where the other warpgroup left it.
DEVICE void make_ds(Packed &ds, float (&dp)[kScores], Shared weights, const States &minus_delta) {
  auto load = [&](int i) { return load_shared<Quad>(weights + (i * 128 + thread_index() % 128) * 16); };
  if constexpr (FLOAT_WEIGHTS) {
#pragma unroll
    for (int j = 0; j < kScores / 4; ++j) {
      Quad p = load(j);
#pragma unroll
      for (int r = 0; r < 4; ++r)
        dp[4 * j + r] = (dp[4 * j + r] + minus_delta[j / 2][j % 2 * 2 + r % 2]) * __uint_as_float(p[r]);
    }
    round_to(ds, dp);
  } else {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      Quad p = load(i);
      unsigned words[4] = {p[0], p[1], p[2], p[3]};
      make_ds(ds[i], dp, i, words, minus_delta[i]);
    }
  }
}

// A warpgroup's share of dQ of a tile, every other chunk of 64 elements: issue(), some other work, add().
static_assert(!ROLES || kChunks == 3 || kChunks == 4, "a role has one or two chunks");
template <int role>
struct DqSums {
  Shared keys, ds;
  float *to;   // of the first tile
  Cursor of;   // the last one whose dS was made
  int stage;
  Shared turn, added;  // barriers, where blocks add in turn
  METHOD void issue(Chunk &sums, int chunk) const {
    multiply_keys(sums, keys + chunk * kKPanel, ds + stage * kDsBytes);
    wgmma_commit();
  }
  METHOD void add(const Params &p, Chunk &sums, int chunk, const Cursor &tile) const {
    hold(sums);
    bool first = chunk == role, last = chunk + 2 >= kChunks;
    if (DETERMINISTIC && first) mbarrier_wait(turn, stage);
    if (!DETERMINISTIC && p.counter && first) wait_in_group(p, 0, tile, role);
    long long number = (long long)tile.tile * p.heads_q + tile.head;
    add_dq(to + number * kQTile + q_product<true>(4 * chunk, 0), sums);
    if (!DETERMINISTIC && p.counter && last) end_in_group(p, 0, tile, role);
    if (DETERMINISTIC && last) {
      __syncwarp();
      if (lane_index() == 0) mbarrier_arrive(added);
    }
  }
};

// What a role prepares of the score terms: the second has none. Named, because NVRTC 13.0 takes a lambda with a
// parameter of type `auto` for a host function.
template <bool first>
struct TermsOf {
  typedef TileTerms Type;
};
template <>
struct TermsOf<false> {
  typedef int Type;
};

// All tiles of a block. While a tile's scores are made, the first chunk of dQ of the tile before is in flight,
// and its other chunks before this tile's dV or dK. No product is issued under a condition: the compiler would
// wait for it.
template <int role>
DEVICE void consume_role(const MappedParams &mapped, const Work &w, Shared shared) {
  const Params &p = mapped.params;
  constexpr bool kFirst = role == kRoleP;
  constexpr int kWidth = kFirst ? HEAD_DIM_V : HEAD_DIM;
  constexpr int kLast = role + (kChunks - 1 - role) / 2 * 2;  // of its chunks
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  int warp = wave_index() % 4;
  float gradient[kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) gradient[i] = 0.0f;

  if (w.steps) {
    Packed operand;  // P^T or dS^T
    Owned own = owned_keys(0);
    static_assert(FLOAT_WEIGHTS || !kTwoWeights, "P times the slope in 16 bits is too inexact");
    Sequence whole = told_sequence(p, own, 0), s = counted_from(own, whole);
    Cursor cursor = first_tile(p, own, w);
    float scale = exponent_scale(p);
    float sink_sum = 0.0f;
    int column = lane_index() % 4 * 2;
    int ds_row = lane_index() / 16 * 8 + lane_index() % 8;
    Shared ds_at = shared + kDs + ds_row * kRowBytes +
                   ((warp * 2 + lane_index() / 8 % 2) ^ ds_row % 8) * 16;
    DqSums<role> dq{shared + kK, shared + kDs,
                    (float *)p.dq_accum + q_tile(p, whole, 0, 0) * kQTile +
                        q_product<true>(warp, 0) + lane_index() * kLaneStep,
                    {}, 0, at(kTurn), at(kAdded)};

    auto issue_scores = [&](float(&scores)[kScores], int step) {
      int stage = stage_of(step);
      mbarrier_wait(at((kFirst ? kQFull : kDoutFull) + stage), phase_of(step));
      if constexpr (kFirst)
        multiply_heads<kQPanels>(scores, shared + kK, shared + kQ + stage * kQBytes);
      else
        multiply_heads<kVPanels>(scores, shared + kV, shared + kDout + stage * kDoutBytes);
      wgmma_commit();
    };
    // What does not need the scores; only one role has any.
    auto prepare_terms = [&] {
      if constexpr (kFirst) {
        Place place{own.batch, cursor.head, own.first_key + warp * 16, cursor.tile * BLOCK_Q};
        TileTerms terms(p, own, s, place, is_full(cursor));
        terms.draw();
        terms.look();
        return terms;
      } else {
        return 0;
      }
    };
    auto make_operand = [&](float(&scores)[kScores], typename TermsOf<kFirst>::Type &terms, int step) {
      int stage = stage_of(step), first = cursor.tile * BLOCK_Q;
      hold(scores);
      States states;
      load_states(states, shared + (kFirst ? kMinusLse : kMinusDelta) + stage * kStates + column * 8);
      if constexpr (kFirst) {
        bool masked = first < w.all_low || first + BLOCK_Q > w.all_high;
        int key = warp * 16 + lane_index() / 4;
        float slopes[kSlopes ? kScores : 1];
        if constexpr (kBiasTiles) terms.wait_for_bias(shared, step, ds_at + stage * kDsBytes);
        if constexpr (kScoreTerms)
          terms.make_exponents(scores, states, slopes);
        else
          make_exponents(scores, scale, states);
        if constexpr (kTwoWeights || FLOAT_WEIGHTS) terms.hide(scores);
        if constexpr (kTwoWeights) {
          if (masked) apply_mask(p, w, s, key, first + column, scores);
          terms.hand_over(scores, slopes, operand, shared + kWeights);
          bar_arrive(kWeightsWritten, kConsumerThreads);
        } else if constexpr (FLOAT_WEIGHTS) {
          if (masked) apply_mask(p, w, s, key, first + column, scores);
          make_weights(scores);  // behind the branch, so that stores lie beside exponentials
          store_weights(shared + kWeights, scores);
          bar_arrive(kWeightsWritten, kConsumerThreads);
          round_to(operand, scores);
        } else {
          make_weights(scores);
          round_to(operand, scores);
          terms.hide(operand);
          if (masked) apply_mask(p, w, s, key, first + column, operand);
          store_weights(shared + kWeights, operand);
          bar_arrive(kWeightsWritten, kConsumerThreads);
        }
      } else {
        bar_sync(kWeightsWritten, kConsumerThreads);
        if constexpr (kTwoWeights || may_have(kSinks))
          take_over(scores, shared + kWeights, states, operand,
                    shared + kSinkWeights + stage * kStates + column * 8, sink_sum);
        else
          make_ds(operand, scores, shared + kWeights, states);
      }
      if constexpr (!kFirst) {
#pragma unroll
        for (int i = 0; i < kSlices; ++i)
          stmatrix_transposed(ds_at + stage * kDsBytes + i * 16 * kRowBytes, operand[i]);
        fence_proxy_async();
      }
      if (lane_index() == 0) mbarrier_arrive(at((kFirst ? kQEmpty : kDoutEmpty) + stage));
    };
    auto issue_gradient = [&](int step) {
      int stage = stage_of(step);
      mbarrier_wait(at((kFirst ? kDoutFull : kQFull) + stage), phase_of(step));
      multiply_rows<kWidth>(gradient, operand,
                            shared + (kFirst ? kDout + stage * kDoutBytes : kQ + stage * kQBytes));
      wgmma_commit();
      dq.of = cursor;
      dq.stage = stage;
      cursor.advance(p, w);
      if constexpr (!kFirst && may_have(kSinks))
        if (has(kSinks, p.dsinks) && (cursor.head != dq.of.head || step + 1 == w.steps))
          store_sink_sum(p, Place{own.batch, dq.of.head, own.first_key + warp * 16, 0}, sink_sum);
    };
    // Of the tile before `step`.
    auto end_gradient = [&](int step) {
      hold(gradient);
      hold(operand);
      if (lane_index() == 0) mbarrier_arrive(at((kFirst ? kDoutEmpty : kQEmpty) + stage_of(step - 1)));
    };

    mbarrier_wait(at(kKFull), 0);
    if (!kFirst) mbarrier_wait(at(kVFull), 0);
    {
      float scores[kScores];
      issue_scores(scores, 0);
      auto terms = prepare_terms();
      wgmma_wait<0>();
      make_operand(scores, terms, 0);
      issue_gradient(0);
    }
#pragma unroll 1
    for (int step = 1; step < w.steps; ++step) {
      float scores[kScores];
      Chunk sums;
      if (OVERLAP) issue_scores(scores, step);
      wgmma_wait<OVERLAP>();
      end_gradient(step);
      if (!OVERLAP) issue_scores(scores, step);
      bar_sync(kConsumersMeet, kConsumerThreads);
      dq.issue(sums, role);
      auto terms = prepare_terms();
      wgmma_wait<kDqEarly ? 0 : 1>();  // the scores
      if constexpr (kDqEarly) dq.add(p, sums, role, dq.of);
      make_operand(scores, terms, step);
      if constexpr (!kDqEarly) {
        wgmma_wait<0>();
        dq.add(p, sums, role, dq.of);
      }
      if constexpr (kLast != role) dq.issue(sums, kLast);
      Cursor before = dq.of;
      issue_gradient(step);
      if constexpr (kLast != role) {
        wgmma_wait<1>();
        dq.add(p, sums, kLast, before);
      }
      if (kBiasTiles && lane_index() == 0) mbarrier_arrive(at(kDsEmpty + stage_of(step - 1)));
    }
    Chunk sums;
    bar_sync(kConsumersMeet, kConsumerThreads);
    dq.issue(sums, role);
    wgmma_wait<0>();
    end_gradient(w.steps);
    dq.add(p, sums, role, dq.of);
    if constexpr (kLast != role) {
      dq.issue(sums, kLast);
      wgmma_wait<0>();
      dq.add(p, sums, kLast, dq.of);
    }
  } else {
    mbarrier_wait(at(kKFull), 0);  // and let nothing be on its way when the block ends
    mbarrier_wait(at(kVFull), 0);
  }
  // By way of V's place, which nobody reads since all met, and of Q's, whose last reader was this warpgroup.
  static_assert(kStages * kQBytes >= kQPanels * kKPanel, "where dK passes through");
  if constexpr (kFirst)
    store_values_gradient(mapped, 0, gradient, shared + kV, warp);
  else
    store_keys_gradient(mapped, 0, gradient, shared + kQ, warp);
  if (lane_index() == 0) bulk_wait_group_read<0>();
}
