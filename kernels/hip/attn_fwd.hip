// Attention forward on CDNA 3: out and lse of q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv),
// dense, packed or paged. FlashAttention-2's loop (Dao 2023, algorithm 1) in base 2.
//
// A wavefront owns 32 query rows, one column of every product in a lane. It computes S^T = K Q^T and
// O^T = V^T P^T, so that P stays in registers (mma.h). Tiles of keys pass through LDS, two of K and two
// of V in turn, with one barrier per tile. While the matrix unit computes the scores of the next tile,
// the vector unit computes the probabilities of this one. Float8 inputs have scales, and a 16-bit
// output of OUT_DTYPE.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(SCORE) || \
    !defined(PAGED) || !defined(MMA) || !defined(BLOCK_K) || !defined(WAVES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE, PAGED, MMA, BLOCK_K and WAVES"
#endif

#include "fwd_terms.h"
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
    if (kCaps) base += 0.5f * c.to_base_2[n];  // scores are the softcap too low
    if (p.sinks && p.use_sinks && c.work.part == 0) {
      // One more logit, without a value.
      float sink = ((const float *)p.sinks)[c.work.head] * kLog2E;
      float raised = __builtin_fmaxf(base, sink);
      factor = exp2(base - raised);
      total = total * factor + exp2(sink - raised);
      base = raised;
    }
    if (row >= c.s.rows) continue;
    bool saw = !(total <= 0.0f);  // a NaN must propagate
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
  Rescale rescale;
  Descale descale;
  Scales scales;  // of the tile whose values come next
  Addend addend;
  Cap cap;
  int begin, ends;  // the first key, and the sum of the first and last tiles' first keys
#if LISTS == 1
  Walk<BLOCK_K> walk;

  // The loop counts the visited tiles as if they were contiguous.
  METHOD int key(int) const { return walk.key(walk.now); }
  METHOD int next_key(int) const { return walk.key(walk.next); }
  METHOD bool is_full() const { return ::is_full(walk.now); }
  METHOD bool next_is_full() const { return ::is_full(walk.next); }
  METHOD int keys_to_next() const { return walk.keys(walk.now, walk.next); }
  METHOD int keys_to_values() const { return walk.keys(walk.next, walk.after); }
  METHOD int keys_to_keys() const { return walk.keys(walk.after, walk.later); }
  METHOD int end_of_keys(int) const { return walk.end; }
  METHOD void advance() { walk.advance(); }
#else
  // The loop counts as if tiles were visited from the first to the last. At its count `first`, the keys
  // of the tile begin here.
  METHOD int key(int first) const { return kTurn < 0 ? ends - first : first; }
  METHOD int next_key(int first) const { return key(first + BLOCK_K); }
  METHOD bool is_full() const { return false; }
  METHOD bool next_is_full() const { return false; }
  // From a tile to the next: at first, and where values or keys are being loaded.
  METHOD int keys_to_next() const { return BLOCK_K; }
  METHOD int keys_to_values() const { return BLOCK_K; }
  METHOD int keys_to_keys() const { return BLOCK_K; }
  METHOD int end_of_keys(int end) const { return end; }
  METHOD void advance() {}
#endif
  METHOD Scales scales_of(const Context &c, int first, int end) {
    return descale.of(c, (first - begin) / BLOCK_K, key(first), end);
  }
};

// The barrier comes before the last products of a tile, which hide it, and fragments of the next keys
// are read after it. These do not fit with float8 (9 registers spilled at 128) or with score terms.
constexpr bool kEarly = kPlain && !kFloat8;
// O is rescaled just before the next products with values. (At a tile's end: 17 moves a tile and 14
// registers spilled at 128.) With float8 at 192 the factor does not fit (16 spilled).
constexpr bool kFull = kPlain && kFloat8 && HEAD_DIM_V == 192;
constexpr bool kLate = kPlain && !kFull;

// The beats in which probabilities are computed: spread evenly over all beats before the last products
// that need them. If registers are short, spread over the beats with keys, because used scores free
// their registers; so, too, if scores are hidden and a tile has many beats. Scores are hidden and maxima
// computed during the products with values.
constexpr int kLastNeed = kAllKeyBeats + (kSlices / 2 - 1) * kGroups * kValueBeats;
constexpr int kElementBeats = kFull || kCaps || kHides && HEAD_DIM > 64 ? kAllKeyBeats
                              : SCORE == FLOAT32_BIAS                    ? (kAllKeyBeats + kBeats) / 2
                                                                         : kLastNeed - 1;
constexpr int kLargestBeats = kBeats - kAllKeyBeats - 2 - 2 * kCaps - (kEarly ? kValueBeats : 0);
DEVICE constexpr int clamp(int x, int most) { return x < 0 ? 0 : x < most ? x : most; }
// The first of `count` items that comes in `beat` or later, if the items are spread over `beats`.
DEVICE constexpr int first_in(int beat, int beats, int count) {
  return beat <= 0 ? 0 : clamp((beat * count + beats - 1) / beats, count);
}
DEVICE constexpr int first_element(int beat) { return first_in(beat, kElementBeats, kElements); }
// Loads are spread over the first half of a tile's slots (the first quarter if there are few), so that
// they arrive in time: 0.737 to 0.859 of the clocks on the matrix unit at 96 by the timing model.
constexpr int kLoadSlots = kSlots > 10 ? kSlots / 2 : kFloat8 ? kSlots * 3 / 8 : kSlots / 4;
constexpr int kLoadBeats = kLoadSlots * kKeyBeats;
// Where a float32 bias of product t is loaded: in place of scores of this tile, which have become probabilities.
// (Without the two slots at 128, 4 registers spilled.)
DEVICE constexpr int bias_slot(int t) { return kKeySlots + kValueSlots / 2 * t + (HEAD_DIM == 128 ? 2 : 0); }
DEVICE constexpr bool are_scores_done(int t) {
  return first_element(kAllKeyBeats + (bias_slot(t) - kKeySlots) * kValueBeats) >= kElements / kKeyTiles * (t + 1);
}
static_assert(SCORE != FLOAT32_BIAS || are_scores_done(0) && are_scores_done(kKeyTiles - 1), "before a bias comes");
// Values are stored to LDS two slots before the last (one if there are few), so that the barrier waits
// for no write: by the same model 0.917 at 192 (v 128), where half a slot before the last gave 0.837.
constexpr int kStoreBeat = kBeats - (kValueSlots > 2 ? 3 : 2) * kValueBeats;
static_assert(kLoadBeats <= kStoreBeat && kLoadBeats + 3 < kBeats &&
                  (kLoadSlots <= kKeySlots || kValueBeats <= kKeyBeats),
              "loads, and then what the next tile's need");

// The places in LDS of two tiles of K and two of V.
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

// The vector unit's work during the products of a tile, beat by beat: the probabilities of this tile,
// the maxima of the next tile's scores, and what is derived from them.
struct Beside {
  const Context &c;
  Source &in;
  State &state;
  const Scores &now;
  Scores &next;
  const Scales &scales;  // of the next tile
  const unsigned (&values)[Values::kLoads];
  Lds next_values;
  int first, end;
  Probabilities &p;
  float (&largest)[kColumns];
  float (&made)[kElements];

  METHOD void operator()(int beat) {
#pragma unroll
    for (int i = first_element(beat); i < first_element(beat + 1); ++i)
      made[i] = probability(c, state.scales, now, state.row, i);
    // A beat later, when they are there.
#pragma unroll
    for (int i = first_element(beat - 1); i < first_element(beat); ++i) {
      Element e(i);
      state.row[e.n].total += made[i];
      pin(state.row[e.n].total);
      if (i % 4 == 3) {
        operand(c, state.scales, made, state.key(first), i, p);
        if (kLate && (i + 1) % M::kHeld == 0) pin(p[e.slice][e.n]);
      }
    }
    int of_values = beat - kAllKeyBeats - 1;
    if (beat == kAllKeyBeats) state.addend.receive();
    if (kCaps) {
#pragma unroll
      for (int pair = first_in(of_values, kLargestBeats, kPairs);
           pair < first_in(of_values + 1, kLargestBeats, kPairs); ++pair)
        state.cap.begin(next, pair);
#pragma unroll
      for (int pair = first_in(of_values - 1, kLargestBeats, kPairs);
           pair < first_in(of_values, kLargestBeats, kPairs); ++pair)
        state.cap.end(next, pair);
      of_values -= 2;
    }
#pragma unroll
    for (int pair = first_in(of_values, kLargestBeats, kPairs);
         pair < first_in(of_values + 1, kLargestBeats, kPairs); ++pair) {
      state.addend.hide(next, pair);
      raise_largest(next, pair, largest);
      for (int n = 0; n < kColumns && kPlain; ++n) pin(largest[n]);
    }
    // The addresses of the next tile's loads, in four beats: at once they were 26 scalar instructions.
    int advanced = beat - kLoadBeats;
    if (advanced == 0) in.end_values(state.keys_to_values());
    if (advanced == 1) in.begin_values();
    if (advanced == 2) in.end_keys(state.keys_to_keys());
    if (advanced == 3) in.begin_keys();
    if (beat == kStoreBeat) in.values.store(values, next_values);
    if (beat == kBeats - 2) in.arrive();
    if (beat == kBeats - 1) in.place();
    if (kPlain) fence();
  }

  // The bases of the next tile's probabilities.
  METHOD void finish() {
    finish_scores(c, scales, next, state.next_key(first), state.next_is_full(), largest);
    raise(c, state.scales, scales, largest, state.row, state.rescale);
    state.scales = scales;
  }
};

// Runs during the last products of a tile, if the barrier comes before them. It is not in every beat's
// code, because the compiler would unroll the mask in each before it drops it (14 s for a plan instead
// of 2).
struct BesideLast {
  Beside &beside;
  METHOD void operator()(int beat) {
    beside(beat);
    if (beat == kBeats - kValueBeats + 1) beside.finish();
    fence();
  }
};

// Processes one tile, whose scores are `now` and whose place in the order of visits is `first`, and
// computes `next`, the scores of the tile after it. `end`: of all keys. This tile's values and the next
// tile's keys are in LDS. Meanwhile the next tile's values are loaded, and the keys of the tile after
// the next, in place of this tile's keys. `ready`: the first fragments of the next tile's keys, if they
// are read early.
DEVICE void step(const Context &c, Source &in, State &state, const Places &at, Fragments &ready,
                 Scores &now, Scores &next, int first, int end) {
  float largest[kColumns], made[kElements];
  unsigned values[Values::kLoads];
  Probabilities p;
  Fragments ahead;
  Scales scales;
  if (kFloat8) scales = state.scales_of(c, first + BLOCK_K, end);
  Beside beside{c, in, state, now, next, scales, values, at.next_values, first, end, p, largest, made};
  if (!kEarly) ready.read_keys(at.next_keys, 0);
  auto multiply = [&](int slot, auto beside) __attribute__((always_inline)) {
    int value_slot = slot - kKeySlots;
    if (slot + 1 < kKeySlots)
      ahead.read_keys(at.next_keys, slot + 1);
    else if (value_slot + 1 < kValueSlots)
      ahead.read_values(at.values, value_slot + 1);
    else if (kEarly) {
      loads_arrived();
      barrier();
      ahead.read_keys(at.keys, 0);
    }
    fence();
    for (int i = 0; i < Values::kLoads; ++i)
      if (i * kLoadSlots / Values::kLoads == slot) values[i] = in.load_values(i);
    for (int i = 0; i < Keys::kLoads; ++i)
      if (i * kLoadSlots / Keys::kLoads == slot) in.load_keys(i, at.keys);
    bool at_once = kHides || kAdds && SCORE != FLOAT32_BIAS;
    if (at_once && slot == kLoadSlots) state.addend.load(now, state.key(first + 2 * BLOCK_K));
    for (int t = 0; t < kKeyTiles && SCORE == FLOAT32_BIAS; ++t)
      if (slot == bias_slot(t)) state.addend.load(now, state.key(first + 2 * BLOCK_K), t);
    // The wavefront that is behind goes first.
    if (slot == 0) __builtin_amdgcn_s_setprio(3);
    if (slot == kSlots / 4) __builtin_amdgcn_s_setprio(2);
    if (slot == kSlots / 2) __builtin_amdgcn_s_setprio(1);
    if (slot == kSlots * 3 / 4) __builtin_amdgcn_s_setprio(0);
    if (kLate && slot == kKeySlots) state.rescale.apply(state.o);
    if (slot < kKeySlots)
      multiply_keys(next, ready, state.q, slot, beside);
    else
      multiply_values(state.o, ready, p, value_slot, beside);
    fence();
    ready = ahead;
  };
#pragma unroll
  for (int slot = 0; slot < kSlots - kEarly; ++slot) multiply(slot, beside);
  if (kEarly) {
    multiply(kSlots - 1, BesideLast{beside});
    if (kAdds || kHides) state.addend.start(now, state.key(first + 2 * BLOCK_K));
    state.advance();
    return;
  }
  beside.finish();
  state.advance();
  if (!kLate) state.rescale.apply(state.o);
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
  Source in(params_again(), c, state.key(begin), begin, state.end_of_keys(end));
  Places at(c.lds);
  {
    unsigned values[Values::kLoads];
    in.begin_keys();
    in.place_at_once();
    for (int i = 0; i < Keys::kLoads; ++i) in.load_keys(i, at.keys);
    in.end_keys(state.keys_to_next());
    in.begin_keys();
    in.place_at_once();
    for (int i = 0; i < Keys::kLoads; ++i) in.load_keys(i, at.next_keys);
    in.end_keys(state.keys_to_values());
    in.begin_values();
    for (int i = 0; i < Values::kLoads; ++i) values[i] = in.load_values(i);
    in.end_values(state.keys_to_next());
    in.values.store(values, at.values);
    in.begin_keys();
    in.begin_values();
  }
  loads_arrived();
  in.place_at_once();
  barrier();
  if (kAdds || kHides) {
    state.addend.load(even, state.key(begin));
    state.addend.start(even, state.key(begin));
    state.addend.receive();
    state.addend.load(odd, state.key(begin + BLOCK_K));
    state.addend.start(odd, state.key(begin + BLOCK_K));
  }
  Fragments fragments;
  for (int i = 0; i < kKeySlots; ++i) {
    fragments.read_keys(at.keys, i);
    multiply_keys(even, fragments, state.q, i);
  }
  for (int pair = 0; kHides && pair < kPairs; ++pair) state.addend.hide(even, pair);
  for (int pair = 0; kCaps && pair < kPairs; ++pair) {
    state.cap.begin(even, pair);
    state.cap.end(even, pair);
  }
  find_largest(even, largest);
  finish_scores(c, state.scales, even, state.key(begin), state.is_full(), largest);
  raise(c, state.scales, state.scales, largest, state.row, state.rescale);
  barrier();  // the next load overwrites the first keys

  if (kEarly) fragments.read_keys(at.next_keys, 0);
  int first = begin, last = begin + (end - begin - 1) / BLOCK_K * BLOCK_K;
  // Two at a time, so that the scores are not moved. With all score terms that would be 96 KB of code,
  // but two compute units share 64 KB of instruction cache: these plans go one at a time.
  if (kPlain)
    for (; first + 2 * BLOCK_K <= last; first += 2 * BLOCK_K) {
      step(c, in, state, at, fragments, even, odd, first, end);
      step(c, in, state, at.next(), fragments, odd, even, first + BLOCK_K, end);
    }
  for (bool more = first < last; more; more = !kPlain && first < last) {
    step(c, in, state, at, fragments, even, odd, first, end);
    for (int t = 0; t < kKeyTiles; ++t)
      for (int n = 0; n < kColumns; ++n) even[t][n] = odd[t][n];
    at = at.next();
    first += BLOCK_K;
  }
  Probabilities p;
  float made[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    made[i] = probability(c, state.scales, even, state.row, i);
    state.row[Element(i).n].total += made[i];
    if (i % 4 == 3) operand(c, state.scales, made, state.key(first), i, p);
  }
  state.rescale.apply(state.o);
  for (int slot = 0; slot < kValueSlots; ++slot) {
    fragments.read_values(at.values, slot);
    multiply_values(state.o, fragments, p, slot);
  }
}

extern "C" __global__ WORKGROUP(kThreads, WAVES / 4) void attn_fwd(KERNEL_PARAMS p) {
  __shared__ __attribute__((aligned(kLineBytes))) char lds[kLdsBytes];
  Work work;
  if (!find_work<false, kBlockQ>(p, p.heads_q, p.num_splits, work)) return;
  Sequence s = sequence_of(p, work.batch);
  int first_row = work.block * kBlockQ;
  if (first_row >= s.rows) return;

  Context c{p, s, work};
  c.head_k = work.head / (p.heads_q / p.heads_k);
  c.lds = (Lds)lds;
#ifdef MOD
  if (SCORE == SCORE_MOD) {
    c.place = ModPlace(p, work.batch, work.head);
    c.place.pin_all();
  }
#endif
  c.seed = SCORE == DROPOUT ? *(const unsigned long long *)p.seed : 0;

  int wave_row = first_row + wave_index() * kRows;
  c.seen = keys_seen(p, s, wave_row, min(wave_row + kRows, s.rows) - 1);
  for (int n = 0; n < kColumns; ++n) {
    c.row[n] = wave_row + n * MMA + M::column();
    c.to_base_2[n] = kPlain && SCORE != SCORE_MOD ? p.scale * kLog2E : kLog2E;
    if (kCaps) c.to_base_2[n] = 2.0f * kLog2E * p.softcap;
    if (kFloat8 && kPlain)
      c.to_base_2[n] *= query_scale(p, s, c.head_k, min(c.row[n], s.rows - 1));
    Seen seen = keys_seen(p, s, c.row[n], c.row[n]);
    c.first_key[n] = seen.low;
    c.last_key[n] = seen.high - 1;
  }

  State state;
  load_queries(c, state.q);
  state.addend.begin(c, wave_row);
  state.cap.begin(p);
  for (int t = 0; t < kDimTiles; ++t)
    for (int n = 0; n < kColumns; ++n) state.o[t][n] = Acc{0};

  Seen seen = keys_seen(p, s, first_row, min(first_row + kBlockQ, s.rows) - 1);
  int begin = seen.low / BLOCK_K * BLOCK_K, end = seen.high;
#if LISTS == 1
  List list = list_of(p, work.batch, work.head, work.block);
  cut_to(list, BLOCK_K, begin, end);
  if (p.num_splits > 1) {
    int share = (list.count + p.num_splits - 1) / p.num_splits, before = min(work.part * share, list.count);
    list = List{list.entries + before, min(list.count - before, share)};
  }
  state.walk.begin(list, end);
  begin = 0;
  end = list.count * BLOCK_K;
#else
  if (p.num_splits > 1) {
    int tiles = (max(end - begin, 0) + BLOCK_K - 1) / BLOCK_K;
    int share = (tiles + p.num_splits - 1) / p.num_splits * BLOCK_K;
    begin += work.part * share;
    end = min(end, begin + share);
  }
#endif
  if (begin < end) attend(c, state, begin, end);
  store(c, state.row, state.o, state.scales.v);
}
