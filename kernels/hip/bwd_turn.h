// One iteration (turn) of the loop of the one-pass backward: its products, the work that overlaps with each,
// and the state of the next iteration.
#pragma once
#include "bwd_workgroup.h"

// Products come in slots, each with what one read of 16 bytes brings, which came kLead products before.
// In their order: half of dK of a step and, a step further, S; the rest of dK; dP of the further step; then
// dQ and dV. What comes first has been in LDS for a step, what makes S waited for the barrier.
constexpr int kSlotS = kSteps / 2;
constexpr int kSlotK = kSlotS + kSteps;  // the rest of dK
constexpr int kSlotP = 2 * kSteps;
constexpr int kSlotQ = kSlotP + kStepsV;
constexpr int kSlotV = kSlotQ + Swap::kBlocks;
constexpr int kSlots = kSlotV + kStepsV;

// The first product of each.
constexpr int kAtS = kSlotS * 2 * TILES;
constexpr int kAtK = kSlotK * 2 * TILES;
constexpr int kAtP = kSlotP * 2 * TILES;
constexpr int kAtQ = kAtP + kStepsV * 2 * TILES;
constexpr int kAtV = kAtQ + Swap::kBlocks * 2 * kShares;
constexpr int kProducts = kAtV + kStepsV * 2 * TILES;

// Of 16 clocks; LDS takes 64 to 128. Both by the timing model: at 128, 12 and a quarter for 9 and a half
// below is 0.826 in place of 0.853, at 64 9 for 12 is 0.729 in place of 0.736. With score terms registers are
// few, and the vector unit is what is waited for.
constexpr int kLead = HEAD_DIM > 96 ? GENERAL ? 8 : 9 : 12;
static_assert(kCarried <= kSlotS, "what is read before the barrier is dK's");

// The first product of a slot.
DEVICE constexpr int at_of(int slot) {
  if (slot < kSlotQ) return slot * 2 * TILES;
  if (slot < kSlotV) return kAtQ + (slot - kSlotQ) * 2 * kShares;
  return kAtV + (slot - kSlotV) * 2 * TILES;
}

// Three instructions fit between two products (of the vector unit, or one exponential; one clock in five is
// lost). What comes where, in products: until S is made, P is rounded, what was loaded goes to LDS, and dQ of
// the step before is added; then loads; P is made beside the rest of dK, dP and a part of dQ, where it is cut;
// then dS, which is in LDS a few products before the barrier.
constexpr int kCutBlock = Swap::kBlocks / (HEAD_DIM > 96 ? 2 : 4);
constexpr int kCutSlot = kSlotQ + kCutBlock;
constexpr int kAtCut = kAtQ + kCutBlock * 2 * kShares;
// The barrier is before the last product, which goes on meanwhile. Where what the next turn begins with comes
// only in this one, it is behind it that this is read, and the products that are left wait for nothing.
constexpr int kAtBarrier = kLate ? kProducts - 10 : kProducts - 2;
constexpr int kAtEnd = kAtBarrier - 6;
static_assert(kAtEnd + 7 < kProducts, "what the next turn needs comes in this one");
// From here on what is read is the next turn's.
constexpr int kAtCarry = kLate ? kAtBarrier : kProducts - 2 * 2 * TILES;  // or two slots before the end
constexpr int kAtTurn = kAtCarry - (kLate ? 0 : 2);
static_assert(at_of(kSlots - 1) - kLead <= kAtTurn, "all columns of this turn are read by then");
// Where a term differs between heads, the step's row and head come here: draws begin with them.
constexpr int kAtScore = kDropoutAlone ? 0 : kAtS + 2;
// A bias comes from here on: -LSE is there.
constexpr int kAtBias = kAtS + 8;
constexpr int kBiasCost = kBiasSize == 4 || (kBiasSize == 2 && DTYPE == FLOAT16) ? 1 : 2;
// That of the next step is loaded up to here.
constexpr int kAtLines = kAtV;
// Draws come up to here, what they keep behind.
constexpr int kDrawEnd = kAtCut + 4;
static_assert(kDrawEnd < kAtEnd - 7, "what the last tile keeps is known before its dS");

// The work after each product. Each kind of work is spread evenly over a range of products. If more comes
// together than fits between two products, it moves to a product nearby that has room. Spread evenly without
// this limit, with up to ten instructions after one product and none after the next, the matrix unit's share at
// 128 was 0.868 instead of 0.896.
struct Deal {
  static constexpr int kRoom = 3;   // instructions between two products
  static constexpr int kApart = 4;  // products that something goes at most
  static constexpr int kElements = 4 * TILES, kTwos = 2 * TILES;
  int taken[kProducts] = {};  // instructions behind each product
  int rounded[kTwos] = {};    // P of the step before
  int stored[Feed::kStores] = {}, loaded[Feed::kLoads] = {}, added[4 * kShares] = {};
  int state[2] = {};                               // -LSE and -delta are read
  int scaled[kElements] = {}, raised[kElements] = {};  // S to the exponent of 2, and that to P
  int weighed[4] = {};                                 // rows, for the sinks
  int inverted[kElements] = {}, steepened[kElements] = {};  // for the softcap: 1 / (e^x + 1), its slope
  int drawn[Drawing::kParts * TILES] = {};           // for dropout: parts of draws,
  int masked[kElements] = {}, dropped[kElements] = {};  // what they keep, and dP to dS with it
  int first_drawn[kProducts + 1] = {}, most_drawn = 0;  // the first part behind each product, and how many come there
  int based[kElements] = {}, lined[kElements] = {};     // a bias: added to -LSE; that of the next step is loaded
  int differed[kTwos] = {}, halved[kTwos] = {}, given[kTwos] = {};  // dP to dS, to 16 bits, to LDS

  // The best product from `least` to `most` for `cost` instructions: near `wanted`, with room.
  constexpr int place(int wanted, int least, int most, int cost) {
    int best = wanted, least_loss = 1 << 30;
    for (int m = least; m <= most; ++m) {
      int apart = m < wanted ? wanted - m : m - wanted, over = taken[m] + cost - kRoom;
      int loss = apart + (over > 0 ? 4 * over : 0) + (apart > kApart ? 100 : 0);
      if (loss < least_loss) {
        best = m;
        least_loss = loss;
      }
    }
    taken[best] += cost;
    return best;
  }
  // The i-th of `count`, no earlier than `before`, which is where the one before it is.
  constexpr int spread(int i, int count, int from, int to, int before, int cost) {
    return place(from + i * (to - from) / count, i ? before : from, to, cost);
  }

  constexpr Deal() {
    // What has its place already: reads of LDS, waits for them, scalars of the loads and of the loop.
    for (int slot = 0; slot < kSlots; ++slot) {
      int read = at_of(slot) - kLead - 1;
      if (slot >= kCarried) taken[read > 0 ? read : 0] += 1;
      if (slot) taken[at_of(slot) - 1] += 1;
    }
    taken[kAtK - 2] += 1;
    taken[kAtK - 1] += 4;
    taken[kAtQ] += 2;
    taken[kTermOfHead ? kAtScore : kAtQ + 1] += 3;
    for (int part = 0; part < 4 && kBiasAlone; ++part) taken[kAtLines + part] += 3;
    if (kAlibiAlone) taken[kAtS + 3] += 2;
    if (kSoftcapAlone || kDropoutAlone) taken[kAtK + 2] += 4;
    if (kDropoutAlone) {
      taken[1] += 3;
      taken[kAtK + 3] += 4;
    }
    taken[kAtQ + 2] += 4;
    for (int m = kAtTurn; m < kAtCarry; ++m) taken[m] += 2;
    for (int i = 0; i < 2 && !GENERAL; ++i) state[i] = place(kAtS, kAtS - 4, kAtS + 4, 2);
    for (int i = 0; i < kTwos && !GENERAL; ++i)
      rounded[i] = spread(i, kTwos, 0, kAtK - 2, i ? rounded[i - 1] : 0, 3);
    for (int i = 0; i < Feed::kStores; ++i)
      stored[i] = spread(i, Feed::kStores, 1, kAtK - 2, i ? stored[i - 1] : 0, 2);
    for (int i = 0; i < 4 * kShares; ++i)
      added[i] = spread(i, 4 * kShares, kAtS + 1, kAtK - 1, i ? added[i - 1] : 0, i ? 2 : 4);
    for (int i = 0; i < Feed::kLoads; ++i)
      loaded[i] = spread(i, Feed::kLoads, kAtK, kAtP, i ? loaded[i - 1] : 0, i % 4 ? 1 : 3);
    // Of a tile's rows the first is loaded last: where it is there, so are the others, which wait no more.
    for (int i = 0; i < kElements && kBiasAlone; ++i) {
      based[i] = spread(i, kElements, kAtBias, kAtCut - 4, i ? based[i - 1] : 0, kBiasCost);
      if (i % 4 < 3) continue;
      for (int j = i - 3; j <= i; ++j) {
        int least = based[i] + 1;
        if (j && lined[j - 1] > least) least = lined[j - 1];
        lined[j] = place(least, least, kAtLines - 1, 1);
      }
    }
    for (int i = 0; i < kElements && !GENERAL; ++i) {
      if (kSoftcapAlone) {
        scaled[i] = spread(i, kElements, kAtK + 3, kAtCut - 4, i ? scaled[i - 1] : 0, 3);
        inverted[i] = place(scaled[i] + 1, scaled[i] + 1, kAtCut - 3, 3);
        raised[i] = place(inverted[i] + 1, inverted[i] + 1, kAtCut - 1, 3);
        steepened[i] = place(raised[i] + 1, raised[i] + 1, kAtCut, 2);
        continue;
      }
      scaled[i] = spread(i, kElements, kAtK + 3, kAtCut - 2, i ? scaled[i - 1] : 0, kAlibiAlone ? 3 : 1);
      if (kBiasAlone && scaled[i] <= based[i]) scaled[i] = place(based[i] + 1, based[i] + 1, kAtCut - 2, 0);
      raised[i] = place(scaled[i] + 1, scaled[i] + 1, kAtCut - 1, 2);
    }
    constexpr int kParts = Drawing::kParts;
    for (int i = 0; i < kParts * TILES && kDropoutAlone; ++i)
      drawn[i] = spread(i, kParts * TILES, 2, kDrawEnd, i ? drawn[i - 1] : 0, Drawing::cost(i % kParts));
    for (int m = 0; m < kProducts && kDropoutAlone; ++m) {
      int end = first_drawn[m];
      while (end < kParts * TILES && drawn[end] == m) ++end;
      first_drawn[m + 1] = end;
      most_drawn = end - first_drawn[m] > most_drawn ? end - first_drawn[m] : most_drawn;
    }
    for (int i = 0; i < kElements && kDropoutAlone; ++i) {
      int last = drawn[i / 4 * kParts + kParts - 1] + 1, wanted = kAtCut + i * (kAtEnd - 4 - kAtCut) / kElements;
      masked[i] = place(wanted > last ? wanted : last, last, kAtEnd - 6, 2);
    }
    for (int i = 0; i < 4 && kSinksAlone; ++i)
      weighed[i] = spread(i, 4, kAtK, kAtCut - 1, i ? weighed[i - 1] : 0, 4);
    for (int i = 0; i < kTwos; ++i) {
      if (GENERAL) {
        given[i] = spread(i, kTwos, kAtCut, kAtEnd, i ? given[i - 1] : 0, 2);
        continue;
      }
      if (kDropoutAlone) {
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
          int least = masked[j] + 1 > kAtCut ? masked[j] + 1 : kAtCut;
          int wanted = kAtCut + j * (kAtEnd - 2 - kAtCut) / kElements;
          dropped[j] = place(wanted > least ? wanted : least, least, kAtEnd - 2, 3);
        }
        differed[i] = dropped[2 * i] > dropped[2 * i + 1] ? dropped[2 * i] : dropped[2 * i + 1];
      } else {
        int cost = kSinksAlone || kSoftcapAlone ? 4 : 2;
        differed[i] = spread(i, kTwos, kAtCut, kAtEnd - 2, i ? differed[i - 1] : 0, cost);
      }
      halved[i] = place(differed[i] + 1, differed[i] + 1, kAtEnd - 1, 3);
      given[i] = place(halved[i] + 1, halved[i] + 1, kAtEnd, 2);
    }
  }
};
constexpr Deal kDeal;

// The state of the loop: what comes next of each kind, over the heads of the group.
struct Walk {
  Aside start;       // row
  Aside end;         // row
  Aside steps;       // of a head
  Aside group_end;   // head behind the last
  int row;           // whose scores are made
  Aside head;        // and of which head, where that matters
  Aside fed_head;    // of the loads,
  int fed;           // and the steps that are left
  Aside added_head;  // the same of dQ
  int added;
  char *sums;        // where dQ is added
  Aside sums_step;   // bytes from step to step
  int sums_bytes;    // of a tile, at first 0, when there is no dQ yet: all is beyond the buffer
  int lined_head;    // with a bias alone, the same of what is loaded of it
  int lined;
  int turns;         // that are left

  METHOD void seek(const Context &c, Feed &feed) const {
    const Params &p = params_again();
    Sequence s = sequence_of(p, c.batch);
    feed.seek(q_of(p, s, fed_head), dout_of(p, s, fed_head), states_of(p, s, fed_head), start, c.s.rows);
  }
  METHOD void feed_on(const Context &c, Feed &feed) {
    if (__builtin_expect(--fed != 0, 1)) return;
    fed = steps;
    feed.left = 0;
    if (++fed_head < group_end) seek(c, feed);
  }
  METHOD void score_on(const Context &c, General &general) {
    row += kStepRows;
    if (__builtin_expect(row >= end, 0)) {
      if (kSinksAlone) general.sinks.add(c.sequence(), head, c.first);
      row = start;
      head = min(head + 1, group_end - 1);  // behind the last step its head again
      general.seek(c.sequence(), head);
    }
    pin_scalar(row);
  }
  // To the bias of the next step, behind the last one to that of its head again.
  METHOD void line_on(const Context &c, General &general) {
    if (__builtin_expect(--lined != 0, 1)) return;
    lined = steps;
    lined_head = min(lined_head + 1, group_end - 1);
    general.lines.seek(c.sequence(), lined_head, start, c.first);
  }
  METHOD void seek_sums(const Context &c) {
    const Params &p = params_again();
    Sequence s = sequence_of(p, c.batch);
    sums = (char *)p.dq_accum + sum_tile(p, s, start, added_head) * (kSumRows * HEAD_DIM * 4);
  }
  METHOD void add_on(const Context &c) {
    if (__builtin_expect(--added != 0, 1)) return;
    added = steps;
    if (++added_head < group_end) seek_sums(c);
  }
};

// Adds a register of dQ^T. The atomic returns no value; it is complete before the next kernel starts. Scope:
// workgroups that share a tile may be on any die. Additions skip L1, and leave sc1 at 0, which is the scope of
// the agent, all its dies (LLVM's memory model for gfx942).
DEVICE void add(const Places &at, const Walk &walk, const Acc (&dq)[kShares], int i) {
  auto to = buffer(walk.sums, walk.sums_bytes);
  __builtin_amdgcn_raw_ptr_buffer_atomic_fadd_f32(dq[i / 4][i % 4], to, at.sums + i * kLanes * 4, 0, 0);
}

// What lives within a turn. Apart from Turn, whose references the compiler has to see through before it
// has unrolled what indexes these.
struct Values {
  Acc s[TILES], dp[TILES], dq[kShares];
  Pair p[TILES], ds[TILES];  // of the step before
  float exponent[TILES][4];
  Acc minus_lse, minus_delta;
  float weight[4];         // of a row's sink
  float distance;          // of row 0 and tile 0, for ALiBi
  float highest[4];        // of a row's exponents with a softcap
  float steep[TILES][4];   // the softcap's slope
  Drawing drawing;         // for dropout
  unsigned drawn[TILES];
  unsigned mask[TILES][4];  // all bits where it keeps
  Quad fragment[kSlots + kCarried];
  int cut;  // below 0: some row of the step does not see some key
};

struct Turn {
  const Context &c;
  const Places &at;
  const Fixed &fixed;
  Gradients &grad;
  Feed &feed;
  Scored &scored;  // of the step before, then of this
  Buffers &lds;
  Walk &walk;
  General &general;
  Values &v;

  // Of dK.
  static METHOD int pair_of(int slot) { return slot < kSlotS ? slot : slot - kSteps; }

  METHOD void read(int slot) {
    Quad &x = v.fragment[slot];
    if (slot >= kSlots)
      x = read_unit(lds.columns + at.columns + (slot - kSlots) * ColumnsQ::kPairBytes);
    else if (slot >= kSlotV)
      x = read_unit(lds.columns + kColumnsO + at.columns + (slot - kSlotV) * ColumnsQ::kPairBytes);
    else if (slot >= kSlotQ)
      x = read_unit(lds.swap + at.swap + (slot - kSlotQ) * kUnitBytes);
    else if (slot >= kSlotP)
      x = read_unit(lds.rows + at.rows_o + (slot - kSlotP) * kUnitBytes);
    else if (slot >= kSlotS && slot < kSlotK)
      x = read_unit(lds.rows + at.rows_q + (slot - kSlotS) * kUnitBytes);
    else
      x = read_unit(lds.columns + at.columns + pair_of(slot) * ColumnsQ::kPairBytes);
  }

  // Product i of a slot.
  METHOD void multiply(int slot, int i) {
    const Quad &x = v.fragment[slot];
    if (slot < kSlotS || (slot >= kSlotK && slot < kSlotP)) {
      int n = i % TILES, t = pair_of(slot) * 2 + i / TILES;
      grad.k[n][t] = M::mma(i / TILES ? x.zw : x.xy, v.ds[n], grad.k[n][t]);
    } else if (slot < kSlotK) {
      int n = i % TILES, step = slot - kSlotS;
      const Quad &k = fixed.k[n][step];
      v.s[n] = i < TILES ? M::mma(x.xy, k.xy, step ? v.s[n] : Acc{0}) : M::mma(x.zw, k.zw, v.s[n]);
    } else if (slot < kSlotQ) {
      int n = i % TILES, step = slot - kSlotP;
      const Quad &y = fixed.v[n][step];
      Acc from = GENERAL ? Acc{0} : v.minus_delta;
      v.dp[n] = i < TILES ? M::mma(x.xy, y.xy, step ? v.dp[n] : from) : M::mma(x.zw, y.zw, v.dp[n]);
    } else if (slot < kSlotV) {
      int t = i % kShares, b = slot - kSlotQ;
      const Quad &k = fixed.transposed[t][b];
      v.dq[t] = i < kShares ? M::mma(k.xy, x.xy, b ? v.dq[t] : Acc{0}) : M::mma(k.zw, x.zw, v.dq[t]);
    } else {
      int n = i % TILES, t = (slot - kSlotV) * 2 + i / TILES;
      grad.v[n][t] = M::mma(i / TILES ? x.zw : x.xy, v.p[n], grad.v[n][t]);
    }
  }

  // What the other units do behind product m.
  METHOD void beside(int m) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i)
      if (!GENERAL && m == kDeal.rounded[i]) {
        float low = scored.p[i / 2][i % 2 * 2], high = scored.p[i / 2][i % 2 * 2 + 1];
        if (m < kAtS) {  // or this would be done before the first product
          pin(low);
          pin(high);
        }
        unsigned two = F::half_up(low, high);
        pin(two);
        v.p[i / 2][i % 2] = two;
      }
    if (m == kDeal.stored[0]) pin_scalar(lds.rows_next);  // the same of an address
#pragma unroll
    for (int i = 0; i < Feed::kStores; ++i)
      if (m == kDeal.stored[i]) feed.store(i, lds.rows_next, lds.columns_stored);
#pragma unroll
    for (int i = 0; i < 4 * kShares; ++i)
      if (m == kDeal.added[i]) add(at, walk, scored.dq, i);
    if ((GENERAL || kTermOfHead) && m == kAtScore) walk.score_on(c, general);
    if (kDropoutAlone && m == 1) v.drawing.begin(general.draws, walk.row);
    // By product: a loop over all parts behind each product, as for other work, is too much to unroll (at 128 the
    // compiler kept draws in LDS).
#pragma unroll
    for (int i = 0; kDropoutAlone && i < kDeal.most_drawn; ++i) {
      int part = kDeal.first_drawn[m] + i, n = part / Drawing::kParts;
      if (part < kDeal.first_drawn[m + 1]) v.drawing.draw(v.drawn[n], general.draws, n, part % Drawing::kParts);
    }
    if (kDropoutAlone && m == kAtK + 2)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float x = v.minus_lse[r] + general.log_scale;
        pin(x);
        v.minus_lse[r] = x;
      }
    if (kDropoutAlone && m == kAtK + 3)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        float x = v.minus_delta[r] * general.keep;
        pin(x);
        v.minus_delta[r] = x;
      }
    if (kAlibiAlone && m == kAtS + 3) {
      v.distance = general.distance_of(walk.row);
      pin(v.distance);
    }
    if (kSoftcapAlone && m == kAtK + 2)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        v.highest[r] = v.minus_lse[r] + general.cap_out;
        pin(v.highest[r]);
      }
    if (GENERAL && m == kAtK - 3) general.load_bias(c.sequence(), walk.head, walk.row);
    if (!GENERAL && m == kDeal.state[0]) v.minus_lse = read_four(lds.rows + at.state);
    if (!GENERAL && m == kDeal.state[1]) v.minus_delta = read_four(lds.rows + at.state + kStepRows * 4);
    if (m == kAtK - 2) feed.prepare_rows();
    if (m == kAtK - 1) feed.prepare();
#pragma unroll
    for (int i = 0; i < Feed::kLoads; ++i)
      if (m == kDeal.loaded[i]) feed.load(i);
#pragma unroll
    for (int i = 0; kBiasAlone && i < 4 * TILES; ++i) {
      int n = i / 4, r = i % 4;
      if (m == kDeal.based[i]) {
        float x = general.biased(n, r, v.minus_lse[r]);
        pin(x);
        v.exponent[n][r] = x;
      }
      if (m == kDeal.lined[i]) general.bias[n][3 - r] = general.lines.load(n, 3 - r);
    }
#pragma unroll
    for (int part = 0; kBiasAlone && part < BiasLines<TILES>::kParts; ++part)
      if (m == kAtLines + part) general.lines.go_on(part);
    if (kBiasAlone && m == kAtLines + BiasLines<TILES>::kParts) walk.line_on(c, general);
#pragma unroll
    for (int i = 0; !GENERAL && i < 4 * TILES; ++i) {
      float &x = v.exponent[i / 4][i % 4];
      int n = i / 4, r = i % 4;
      if (m == kDeal.scaled[i]) {
        if (kSoftcapAlone) {
          x = exp2(v.s[n][r] * general.cap_in);
        } else {
          float y = kAlibiAlone ? general.sloped(v.distance, n, r, v.minus_lse[r]) : kBiasAlone ? x : v.minus_lse[r];
          x = __builtin_fmaf(v.s[n][r], c.to_base_2, y);
        }
        pin(x);
      }
      // tanh y = 1 - 2 u with u = 1 / (e^2y + 1), which has an error of 2^-22. Its slope is 4 (u - u^2).
      if (kSoftcapAlone && m == kDeal.inverted[i]) {
        x = reciprocal(x + 1.0f);
        pin(x);
      }
      if (m == kDeal.raised[i]) {
        float y = kSoftcapAlone ? __builtin_fmaf(x, -2.0f * general.cap_out, v.highest[r]) : x;
        y = exp2(y);
        pin(y);
        scored.p[n][r] = y;
      }
      if (kSoftcapAlone && m == kDeal.steepened[i]) {
        float fourfold = 4.0f * x;
        x = __builtin_fmaf(-fourfold, x, fourfold);
        pin(x);
        v.steep[n][r] = x;
      }
    }
#pragma unroll
    for (int i = 0; kDropoutAlone && i < 4 * TILES; ++i) {
      int n = i / 4, r = i % 4;
      if (m == kDeal.masked[i]) {
        unsigned x = all_kept(v.drawn[n], r, general.key);
        pin(x);
        v.mask[n][r] = x;
      }
      if (m == kDeal.dropped[i]) {
        float p = scored.p[n][r], x = either(v.mask[n][r], v.dp[n][r], v.minus_delta[r]) * p;
        p = either(v.mask[n][r], p, 0.0f);
        pin(x);
        pin(p);
        v.dp[n][r] = x;
        scored.p[n][r] = p;
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r)
      if (kSinksAlone && m == kDeal.weighed[r]) {
        float x = general.sinks.weight(v.minus_lse[r]);
        pin(x);
        v.weight[r] = x;
      }
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      int n = i / 2, r = i % 2 * 2;
      if (!GENERAL && !kDropoutAlone && m == kDeal.differed[i])
        for (int j = r; j < r + 2; ++j) {
          float x = v.dp[n][j] * scored.p[n][j];
          if (kSoftcapAlone) x *= v.steep[n][j];
          pin(x);
          v.dp[n][j] = x;
          if (kSinksAlone) {
            general.sinks.sum = __builtin_fmaf(x, v.weight[j], general.sinks.sum);
            pin(general.sinks.sum);
          }
        }
      if (!GENERAL && m == kDeal.halved[i]) {
        unsigned two = F::half_up(v.dp[n][r], v.dp[n][r + 1]);
        pin(two);
        scored.ds[n][i % 2] = two;
      }
      if (m == kDeal.given[i])
        exchange(at, lds.next_swap(), n, r, GENERAL ? scored.general.ds[n][i % 2] : scored.ds[n][i % 2]);
    }
    if (m == kAtQ) lds.turn_rows();
    if (!(GENERAL || kTermOfHead) && m == kAtQ + 1) {
      walk.row = walk.row + kStepRows < walk.end ? walk.row + kStepRows : (int)walk.start;
      pin_scalar(walk.row);
    }
    if (m == kAtQ + 2) {
      v.cut = (walk.row - c.mine.all_low) | (c.mine.all_high - kStepRows - walk.row);
      pin_scalar(v.cut);
    }
    // What the next turn needs, where there is least else.
    if (m == kAtEnd + 1) {
      walk.sums += walk.sums_step;
      walk.sums_bytes = kSumRows * HEAD_DIM * 4;
      pin_scalar(walk.sums_bytes);
    }
    if (m == kAtEnd + 2) walk.add_on(c);
    if (m == kAtEnd + 3) lds.turn_swaps();
    if (m == kAtEnd + 4) feed.advance_states();
    if (m == kAtEnd + 5) feed.advance();
    if (m == kAtEnd + 6) walk.feed_on(c, feed);
    if (m == kAtEnd + 7) {
      --walk.turns;
      pin_scalar(walk.turns);
    }
    if (m == kAtBarrier) barrier();
    // The last of this turn's columns have been read.
    if (m == kAtTurn) lds.turn_columns();
    if (m == kAtTurn + (kLate ? 0 : 1)) lds.turn_columns_stored();
#pragma unroll
    for (int i = 0; i < kCarried; ++i)  // what the next turn begins with
      if (m == kAtCarry + (kLate ? 0 : i)) read(kSlots + i);
  }
  METHOD void mask(int first) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      unsigned seen = seen_bits(c, c.own(n), first);
#pragma unroll
      for (int r = 0; r < 4; ++r) scored.p[n][r] = where(seen, r, scored.p[n][r]);
    }
  }
  METHOD void weigh() {
    auto masked = [&](Acc (&x)[TILES]) {
      if (v.cut >= 0) return;
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        unsigned seen = seen_bits(c, c.own(n), walk.row);
#pragma unroll
        for (int r = 0; r < 4; ++r) x[n][r] = where(seen, r, x[n][r]);
      }
    };
    // The rows that came before those of this turn are still there.
    general.weigh(scored.general, v.s, v.dp, lds.rows_next + at.state, c.sequence(), walk.head, walk.row, masked);
  }
  METHOD void run() {
    int m = 0;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      v.ds[n] = GENERAL ? scored.general.ds[n] : scored.ds[n];
      if (GENERAL) v.p[n] = scored.general.p[n];
    }
    for (int i = 0; i < kCarried; ++i) v.fragment[i] = scored.columns[i];
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      if (GENERAL && slot == kCutSlot) weigh();
      if (!GENERAL && slot == kCutSlot && __builtin_expect(v.cut < 0, 0)) mask(walk.row);
      int products = at_of(slot + 1) - at_of(slot);
#pragma unroll
      for (int i = 0; i < products; ++i) {
#pragma unroll
        for (int ahead = kCarried; ahead < kSlots; ++ahead)
          if (max(at_of(ahead) - kLead, 0) == m) read(ahead);
        fence();
        multiply(slot, i);
        fence();
        beside(m++);
        fence();
      }
    }
    for (int i = 0; i < kCarried; ++i) scored.columns[i] = v.fragment[kSlots + i];
    for (int t = 0; t < kShares; ++t) scored.dq[t] = v.dq[t];
  }
};
