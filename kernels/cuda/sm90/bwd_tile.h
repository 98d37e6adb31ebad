// A warpgroup that multiplies: S^T and dP^T of its 64 keys, what they add to dV and dK, its share of dQ.
#pragma once
#include "bwd_shape.h"
#include "../bwd_mask.h"
#include "bwd_load.h"
#include "bwd_send.h"
#include "../../common/row_sums.h"
#include "bwd_terms.h"

constexpr int kScores = BLOCK_Q / 2;   // registers of 64 keys x BLOCK_Q rows in float32
constexpr int kSlices = BLOCK_Q / 16;  // of a product over the rows
constexpr int kDqSums = kDqRows / 2;   // registers of 64 elements of the head x kDqRows rows
constexpr int kLastSums = kLastRows / 2;
typedef float TileDq[kDqSums + kLastSums];

typedef unsigned Packed[kSlices][4];   // scores in 16 bits, as A operands

// One float of each of the lane's rows, by slices; `at`: the lane's place in what produce_states left.
typedef float States[kSlices][4];
DEVICE void load_state(float (&x)[4], Shared at) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(at));
}
DEVICE void load_states(States &x, Shared at) {
#pragma unroll
  for (int i = 0; i < kSlices; ++i) load_state(x[i], at + i * 64);
}

// The same as sums that products are added to: of each row for both of the lane's keys.
DEVICE void load_sums(float (&d)[kScores], Shared at) {
#pragma unroll
  for (int i = 0; i < kSlices; ++i) {
    float x[4];
    load_state(x, at + i * 64);
#pragma unroll
    for (int n = 0; n < 8; ++n) d[8 * i + n] = x[n / 4 * 2 + n % 2];
  }
}

// S^T = K Q^T or dP^T = V dO^T, of panels of 64 elements of the head; `add`ed to what `d` holds, or in its place.
template <int panels, bool add = false>
DEVICE void multiply_heads(float (&d)[kScores], Shared keys, Shared rows) {
  unsigned long long a = Panel::along(keys), b = Panel::along(rows);
  if (add) hold(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < panels * 4; ++i)
    wgmma<DTYPE, false, false>(d, a + Panel::step_along(i, kKPanel), b + Panel::step_along(i, kQPanel),
                               add || i > 0);
}

// dV += P^T dO or dK += dS^T Q.
template <int width>
DEVICE void multiply_rows(float (&d)[width / 2], const Packed &scores, Shared rows) {
  unsigned long long b = Panel::down(rows, kQPanel);
  hold(d);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kSlices; ++i)
    wgmma<DTYPE, true>(d, scores[i], b + Panel::step_down(i), true);
}

// dQ^T = K^T dS^T: `keys` from the first element of the head that is wanted, `ds` from the first row.
template <int n>
DEVICE void multiply_keys(float (&d)[n], Shared keys, Shared ds) {
  unsigned long long a = Panel::down(keys, kKPanel), b = Panel::along(ds);
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < BLOCK_K / 16; ++i)
    wgmma<DTYPE, true, false>(d, a + Panel::step_down(i), b + Panel::step_along(i, kQPanel), i > 0);
}

// Of the last elements of the head, where a warpgroup has some of them beside its own.
template <int n>
DEVICE void multiply_last(float *d, Shared keys, Shared ds) {
  if constexpr (n > 0) multiply_keys((float(&)[n])*d, keys, ds);
}

// Exponents of P^T from S^T, in its place. With kLseFirst, -LSE is in S.
DEVICE void make_exponents(float (&s)[kScores], float scale, const States &minus_lse) {
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    s[i] = kLseFirst ? s[i] * scale : __builtin_fmaf(s[i], scale, minus_lse[i / 8][i / 4 % 2 * 2 + i % 2]);
}
DEVICE void round_to(Packed &to, const float (&x)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores / 2; ++i)
    to[i / 4][i % 4] = Format<DTYPE>::nearest(x[2 * i], x[2 * i + 1]);
}
DEVICE void copy(Packed &to, const Packed &from) {
#pragma unroll
  for (int i = 0; i < kSlices * 4; ++i) to[i / 4][i % 4] = from[i / 4][i % 4];
}
// P^T from its exponents, in their place.
DEVICE void make_weights(float (&x)[kScores]) {
#pragma unroll
  for (int i = 0; i < kScores; ++i) x[i] = exp2(x[i]);
}
// dS^T from dP^T and P^T, of slice i. With kDeltaFirst, -delta is in dP. P in 32 bits would not fit the registers
// beside what is under way.
DEVICE void make_ds(unsigned (&ds)[4], const float (&dp)[kScores], int i,
                             const unsigned (&weights)[4], const float (&minus_delta)[4]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float x[4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      x[r] = (kDeltaFirst ? dp[8 * i + 4 * j + r] : dp[8 * i + 4 * j + r] + minus_delta[2 * j + r % 2]) *
             low_half<DTYPE>(weights[2 * j + r / 2] >> r % 2 * 16);
#pragma unroll
    for (int h = 0; h < 2; ++h) ds[2 * j + h] = Format<DTYPE>::nearest(x[2 * h], x[2 * h + 1]);
  }
}

// With kFloatP: dS^T of slice i from dP^T and P^T, or P^T times the slope.
DEVICE void make_ds(unsigned (&ds)[4], const float *dp, const float *weights, const float (&minus_delta)[4]) {
  float x[8];
#pragma unroll
  for (int n = 0; n < 8; ++n) x[n] = (dp[n] + minus_delta[n / 4 * 2 + n % 2]) * weights[n];
#pragma unroll
  for (int n = 0; n < 4; ++n) ds[n] = Format<DTYPE>::nearest(x[2 * n], x[2 * n + 1]);
}

// The sequence as masks need it, its keys counted from a block's first one. What lies beyond its rows
// needs no mask, unless a mod or a bias makes something of it.
DEVICE Sequence counted_from(const Owned &own, Sequence s) {
  s.keys -= own.first_key;
  s.shift -= own.first_key;
  if (!kMods && !may_have(kBias)) s.rows = 0x3fffffff;
  return s;
}
// By bits: `x` where they are 1, which may be NaN where they are 0.
DEVICE float chosen(unsigned bits, float x, float otherwise) {
  return __uint_as_float((__float_as_uint(x) & bits) | (__float_as_uint(otherwise) & ~bits));
}
// P's 0, or its exponents' -infinity, for what is not seen, of the lane's keys number `key` and `key` + 8 and
// rows from `row` on. A bit a row says what is seen; the sign of a byte of each of two words, for two
// neighbouring rows, is spread over 16 bits, or of one over 32. 2 instructions a register, where comparing
// takes 10.
template <class Values>
DEVICE void apply_mask(const Params &p, const Work &w, const Sequence &s, int key, int row, Values &x) {
  Mask mask = mask_of(p, s);
#if BANDED
  mask.origin += owned_keys(w.number).first_key;  // from where `s` counts
#endif
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    Range range = rows_that_see(mask, key + 8 * h, row);
#pragma unroll
    for (int j = 0; j < kScores / 4; j += 4) {
      unsigned seen = bits_between(range.first - 8 * j, range.last - 8 * j);
#pragma unroll
      for (int i = 0; i < 4 && j + i < kScores / 4; ++i) {
        auto spread = [&](unsigned signs) {
          unsigned bits;
          asm("prmt.b32 %0, %1, %2, %3;"
              : "=r"(bits)
              : "r"(seen << 7), "r"(seen << 6), "r"(signs + 0x1111 * i));
          return bits;
        };
        if constexpr (sizeof(Values) == sizeof(Packed)) {
          x[(j + i) / 2][(j + i) % 2 * 2 + h] &= spread(0xcc88);
        } else {
          float *two = x + 4 * (j + i) + 2 * h;
          two[0] = chosen(spread(0x8888), two[0], -INFINITY_F);
          two[1] = chosen(spread(0xcccc), two[1], -INFINITY_F);
        }
      }
    }
  }
}

// A warp's 16 keys of a gradient to memory, by way of its part of `tile`, which nobody reads any more: by TMA, which
// ends on its own (bulk_wait_group_read), or 16 bytes a lane where the sequence ends among them.
template <int width>
DEVICE void store_gradient(const float (&x)[width / 2], float factor, Shared tile, int warp, const TensorMap *map,
                           unsigned short *to, long long step, int keys, int elements, int key, int head, int batch) {
  Shared mine = tile + warp * 16 * kRowBytes;
  int row = lane_index() % 16, unit = lane_index() / 16;
#pragma unroll
  for (int i = 0; i < width / 16; ++i) {
    unsigned both[4];
#pragma unroll
    for (int r = 0; r < 4; ++r)
      both[r] = Format<DTYPE>::nearest(x[8 * i + 2 * r] * factor, x[8 * i + 2 * r + 1] * factor);
    stmatrix(mine + i / 4 * kKPanel + row * kRowBytes + ((i % 4 * 2 + unit) ^ row % 8) * 16, both);
  }
  if (keys >= 16) {
    fence_proxy_async();
    __syncwarp();
    if (lane_index() == 0) {
#pragma unroll
      for (int panel = 0; panel < width / 64; ++panel)
        tma_store(map, mine + panel * kKPanel, panel * 64, key, head, batch);
      bulk_commit_group();
    }
    return;
  }
  __syncwarp();
  row = lane_index() / 8;
  unit = lane_index() % 8;
#pragma unroll
  for (int panel = 0; panel < width / 64; ++panel)
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      Quad eight = load_shared<Quad>(mine + panel * kKPanel + (row + i) * kRowBytes +
                                     (unit ^ (row + i) % 8) * 16);
      if (row + i < keys && panel * 64 + unit * 8 < elements)
        *(Quad *)(to + (row + i) * step + panel * 64 + unit * 8) = eight;
    }
}

// `place`: where it passes through shared memory.
DEVICE void store_keys_gradient(const MappedParams &mapped, unsigned number, const float (&dk)[HEAD_DIM / 2],
                                Shared place, int warp) {
  const Params &p = mapped.params;
  Owned own = owned_keys(number);
  Sequence s = told_sequence(p, own, number);
  int first = own.first_key + warp * 16;
  store_gradient<HEAD_DIM>(dk, p.scale * dp_scale(p), place, warp, &mapped.maps[kMapDk],
                           (unsigned short *)p.dk + s.key_batch * p.dk_batch +
                               (s.key0 + first) * p.dk_row + own.head_k * p.dk_head,
                           p.dk_row, s.keys - first, p.head_dim, (int)s.key0 + first, own.head_k, s.key_batch);
}
DEVICE void store_values_gradient(const MappedParams &mapped, unsigned number, const float (&dv)[HEAD_DIM_V / 2],
                                  Shared place, int warp) {
  const Params &p = mapped.params;
  Owned own = owned_keys(number);
  Sequence s = told_sequence(p, own, number);
  int first = own.first_key + warp * 16;
  store_gradient<HEAD_DIM_V>(dv, dp_scale(p), place, warp, &mapped.maps[kMapDv],
                             (unsigned short *)p.dv + s.key_batch * p.dv_batch +
                                 (s.key0 + first) * p.dv_row + own.head_k * p.dv_head,
                             p.dv_row, s.keys - first, p.head_dim_v, (int)s.key0 + first, own.head_k, s.key_batch);
}

// Whether P is wanted in dS, and none of two registers has it: then dropout and dV come behind.
constexpr bool kLateDv = kSlopes && may_have(kDropout) && may_have(kSinks);

// Whether dK passes through the place of K, whose panels are more than V's.
constexpr bool kKeysLast = kQPanels > kVPanels;

// No branch for the first tile between S and dQ: the backward takes 0.985 to 1.0 of the time at D = 128, but 1.01 at
// 192/128.
constexpr bool kBranchless = kLastRows == 0;

// All tiles of a block. Of a tile, products are asked for in the order S, dQ of the tile before, dP, dV, dK,
// and only the oldest is waited for: exponentials lie beside dQ, dS beside dV, the next S is asked for while
// dK is under way. That dQ comes a tile late leaves a warpgroup the time of a tile to wait for the others' dS.
//
// With kLseFirst, dK is waited for before S is asked for: ptxas waits for it where S begins with sums that moves made.
//
// Where P comes twice (kDqEarly), dQ is staged before dP is asked for: its sums, dP and the two do not fit the
// registers together.
//
// `step`: the first one, of all work tiles of the block.
DEVICE void consume(const MappedParams &mapped, const Work &w, int step, Shared shared) {
  const Params &p = mapped.params;
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  int group = wave_index() / 4, warp = wave_index();
  float dk[HEAD_DIM / 2], dv[HEAD_DIM_V / 2];
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; ++i) dk[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < HEAD_DIM_V / 2; ++i) dv[i] = 0.0f;

  mbarrier_wait(at(kKFull), w.number & 1);
  if (w.steps) {
    Packed ds;
    int end = step + w.steps;
    bool later = false;  // than the first tile
    Owned own = owned_keys(w.number);
    Sequence whole = told_sequence(p, own, w.number), s = counted_from(own, whole);
    Cursor cursor = first_tile(p, own, w), before = cursor;
    Shared my_keys = shared + kK + group * 64 * kRowBytes, my_values = my_keys + (kV - kK);
    float scale = exponent_scale(p);
    float sink_sum = 0.0f;
    int column = lane_index() % 4 * 2;  // a lane's first row in a tile, which lies along its registers
    Shared my_states = shared + kMinusLse + column * 8;
    // Where the lane's four matrices of 16 rows x 16 keys begin in dS.
    int ds_row = lane_index() / 16 * 8 + lane_index() % 8;
    Shared ds_at = shared + kDs + group * kQPanel + ds_row * kRowBytes +
                   ((warp % 4 * 2 + lane_index() / 8 % 2) ^ ds_row % 8) * 16;
    // Its share of dQ.
    int part_d = group % kDqPartsD, part_rows = group / kDqPartsD;
    Shared dq_keys = shared + kK + part_d * kKPanel;
    Shared dq_ds = shared + kDs + part_rows * kDqRows * kRowBytes;
    Shared staged = shared + kStaged + (ONE_SENDER ? dq_place(warp) * 4 : warp * kStagedBytes);
    float *dq_to = (float *)p.dq_accum + q_tile(p, whole, 0, 0) * kQTile + dq_place(warp);

    // dQ of the tile before `step`, which at first is of what happens to lie there and goes nowhere.
    auto issue_dq = [&](TileDq &dq, int step) {
      // At first, this returns at once.
      if (kBranchless || later) mbarrier_wait(at(kDsFull + stage_of(step + 1)), phase_of(step - 1));
      multiply_keys((float(&)[kDqSums])dq, dq_keys, dq_ds + stage_of(step + 1) * kDsBytes);
      multiply_last<kLastSums>(dq + kDqSums, shared + kK + kConsumers * kKPanel,
                               dq_ds + group * kLastRows * kRowBytes + stage_of(step + 1) * kDsBytes);
      wgmma_commit();
    };
    // Of the tile before `step`, once the last one's was read.
    auto stage_dq = [&](const TileDq &dq, int step) {
      if (lane_index() == 0) {
        if (ONE_SENDER)
          mbarrier_wait(at(kStagedEmpty + stage_of(step + 1)), phase_of(step + 1));
        else
          bulk_wait_group_read<0>();
      }
      __syncwarp();
      Shared to = staged + stage_of(step + 1) % kStagedTiles * kStagedTile + lane_index() * 16;
      Shared to_last = to + (last_dq_place(warp) - dq_place(warp)) * 4 - kDqSums / 4 * 512;
#pragma unroll
      for (int j = 0; j < (kDqSums + kLastSums) / 4; ++j)
        store_shared((j < kDqSums / 4 ? to : to_last) + j * 512,
                     Quad{__float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                          __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3])});
    };
    auto send_dq = [&](const Cursor &tile) {
      if (ONE_SENDER) return;
      float *to = dq_to + ((long long)tile.tile * p.heads_q + tile.head) * kQTile;
      auto add = [&] {
        bulk_reduce_add(to, staged, kStagedBytes);
        bulk_commit_group();
      };
      if (!p.counter) {
        if (lane_index() == 0) add();
        return;
      }
      wait_in_group(p, w.number, tile, group);
      if (lane_index() == 0) {
        add();
        bulk_wait_group<0>();
      }
      end_in_group(p, w.number, tile, group);
    };

    auto end_dk = [&](int step) {  // of the tile before `step`
      hold(dk);
      hold(ds);
      bool arrives = later && lane_index() == 0;
      if constexpr (kBranchless)
        mbarrier_arrive_if(arrives, at(kQEmpty + stage_of(step + 1)));
      else if (arrives)
        mbarrier_arrive(at(kQEmpty + stage_of(step + 1)));
    };

#pragma unroll 1
    for (; step < end; ++step) {
      float scores[kScores], dp[kScores];
      TileDq dq;
      Packed weights;
      States states;
      int first = cursor.tile * BLOCK_Q;
      Shared this_q = shared + kQ + stage_of(step) * kQBytes;
      Shared this_dout = shared + kDout + stage_of(step) * kDoutBytes;
      mbarrier_wait(at(kQFull + stage_of(step)), phase_of(step));
      if constexpr (kLseFirst) {
        wgmma_wait<0>();  // dK
        end_dk(step);
        load_sums(scores, my_states + stage_of(step) * kStates);
      }
      // -LSE comes before S is asked for where it takes 16 registers: behind dQ, backward takes 1.04 to 1.07 times
      // as long (D = 128), since products of 64 rows leave shared memory no time for it.
      if (!kManyRows && !kScoreTerms) load_states(states, my_states + stage_of(step) * kStates);
      multiply_heads<kQPanels, kLseFirst>(scores, my_keys, this_q);
      wgmma_commit();
      if constexpr (!kLseFirst) {
        wgmma_wait<1>();  // dK
        end_dk(step);
      }
      Place place{own.batch, cursor.head, own.first_key + warp * 16, first};
      TileTerms terms(p, own, s, place, is_full(cursor));
      issue_dq(dq, step);

      if (kManyRows && !kScoreTerms && !kLseFirst) load_states(states, my_states + stage_of(step) * kStates);
      Packed steep, rests;  // with kTwoWeights, what dS is of; with kRests, what P lost
      terms.draw();
      terms.look();
      wgmma_wait<1>();  // S
      hold(scores);
      if constexpr (kBiasTiles) terms.wait_for_bias(shared, step, ds_at + stage_of(step) * kDsBytes);
      bool masked = first < w.all_low || first + BLOCK_Q > w.all_high;
      if constexpr (kFloatP) {
        float slopes[kSlopes ? kScores : 1];
        if constexpr (kScoreTerms) {
          load_states(states, my_states + stage_of(step) * kStates);
          terms.make_exponents(scores, states, slopes);
        } else {
          make_exponents(scores, scale, states);
        }
        terms.hide(scores);
        if (masked) apply_mask(p, w, s, warp * 16 + lane_index() / 4, first + column, scores);
        make_weights(scores);
        round_to(weights, scores);
        if constexpr (kSlopes) terms.steepen(scores, slopes);
      } else if constexpr (kScoreTerms) {
        terms.weigh(scores, my_states + stage_of(step) * kStates, weights, steep, rests);
      } else {
        make_exponents(scores, scale, states);
        make_weights(scores);
        round_to(weights, scores);
        if constexpr (kRests)
          for (int i = 0; i < kScores / 2; ++i)
            rests[i / 4][i % 4] = TileTerms::rest_of(scores[2 * i], scores[2 * i + 1], weights[i / 4][i % 4]);
      }
      if constexpr (!kFloatP) {
        terms.hide(weights);
        if constexpr (kSlopes) terms.hide(steep);
        if constexpr (kRests) terms.hide(rests);
      }
      if (!kFloatP && masked) {
        int key = warp * 16 + lane_index() / 4;
        apply_mask(p, w, s, key, first + column, weights);
        if constexpr (kSlopes) apply_mask(p, w, s, key, first + column, steep);
        if constexpr (kRests) apply_mask(p, w, s, key, first + column, rests);
      }
      static_assert(!(kBiasTiles && kDqEarly), "who says that dS was read");
      if constexpr (kDqEarly) {
        wgmma_wait<0>();  // dQ
        hold(dq);
        if (later) stage_dq(dq, step);
      }
      if constexpr (may_have(kDropout)) {
        if constexpr (!kSlopes) copy(steep, weights);
        if constexpr (!kLateDv) terms.drop(weights);
      }
      if (!later) mbarrier_wait(at(kVFull), w.number & 1);
      mbarrier_wait(at(kDoutFull + stage_of(step)), phase_of(step));
      Shared minus_delta = my_states + (kMinusDelta - kMinusLse) + stage_of(step) * kStates;
      if constexpr (kDeltaFirst) load_sums(dp, minus_delta);
      multiply_heads<kVPanels, kDeltaFirst>(dp, my_values, this_dout);
      wgmma_commit();
      if constexpr (!kLateDv) {
        multiply_rows<HEAD_DIM_V>(dv, weights, this_dout);
        wgmma_commit();
      }
      if constexpr (!kDqEarly) {
        wgmma_wait<2>();  // dQ
        hold(dq);
        if (kBiasTiles && later && lane_index() == 0) mbarrier_arrive(at(kDsEmpty + stage_of(step + 1)));
        if (later) stage_dq(dq, step);
      }
      if (!kDqEarly && !kDeltaFirst) load_states(states, minus_delta);
      wgmma_wait<kLateDv ? 0 : 1>();  // dP
      hold(dp);
      // Nobody reads this place any more: the other warpgroups had dQ of the dS that lay here before they
      // wrote their dS of the last tile, which issue_dq waited for.
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        if constexpr (kDqEarly) load_state(states[i], minus_delta + i * 64);
        if constexpr (kFloatP)
          make_ds(ds[i], dp + 8 * i, scores + 8 * i, states[i]);
        else if constexpr (kTwoWeights || may_have(kSinks))
          terms.make_ds(ds[i], i, dp + 8 * i, weights[i], kTwoWeights ? steep[i] : weights[i], rests[i], states[i],
                        minus_delta + (kSinkWeights - kMinusDelta), sink_sum);
        else
          make_ds(ds[i], dp, i, weights[i], states[i]);
        stmatrix_transposed(ds_at + stage_of(step) * kDsBytes + i * 16 * kRowBytes, ds[i]);
      }
      fence_proxy_async();  // for what was staged too
      __syncwarp();
      if (lane_index() == 0) mbarrier_arrive(at(kDsFull + stage_of(step)));
      if constexpr (kLateDv) {
        terms.drop(weights);
        multiply_rows<HEAD_DIM_V>(dv, weights, this_dout);
        wgmma_commit();
      }
      multiply_rows<HEAD_DIM>(dk, ds, this_q);
      wgmma_commit();
      wgmma_wait<1>();  // dV
      hold(dv);
      hold(weights);
      if (later) send_dq(before);
      later = true;
      if (lane_index() == 0) mbarrier_arrive(at(kDoutEmpty + stage_of(step)));
      before = cursor;
      cursor.advance(p, w);
      if constexpr (may_have(kSinks))
        if (has(kSinks, p.dsinks) && (cursor.head != place.head || step + 1 == end))
          store_sink_sum(p, place, sink_sum);
    }
    TileDq dq;
    issue_dq(dq, end);
    // All have written dS of the last tile, so nobody reads V any more. By way of V's place dV and dK go to memory, while
    // dQ is computed and sent: the backward takes 0.97 to 1.0 of the time.
    store_values_gradient(mapped, w.number, dv, shared + kV, warp);
    wgmma_wait<0>();
    end_dk(end);
    hold(dq);
    if (kBiasTiles && lane_index() == 0) mbarrier_arrive(at(kDsEmpty + stage_of(end + 1)));
    if (!kKeysLast && lane_index() == 0) mbarrier_arrive(at(kKEmpty));
    stage_dq(dq, end);
    fence_proxy_async();
    __syncwarp();
    send_dq(before);
  } else {
    mbarrier_wait(at(kVFull), w.number & 1);
    if (!kKeysLast && lane_index() == 0) mbarrier_arrive(at(kKEmpty));
    store_values_gradient(mapped, w.number, dv, shared + kV, warp);
  }
  if (ONE_SENDER && lane_index() == 0) mbarrier_arrive(at(kLastStaged + w.number % 2));
  if (kKeysLast) bar_sync(kConsumersMeet, kConsumerThreads);  // K was read
  if (lane_index() == 0) bulk_wait_group_read<0>();  // dV
  __syncwarp();
  store_keys_gradient(mapped, w.number, dk, shared + (kKeysLast ? kK : kV), warp);
  fence_proxy_async();  // before the next copies to where this thread wrote
  if (lane_index() == 0) bulk_wait_group_read<0>();
  __syncwarp();
  if (lane_index() == 0) {
    if (kKeysLast) mbarrier_arrive(at(kKEmpty));
    mbarrier_arrive(at(kVEmpty));
    end_work(w.number);
  }
}
