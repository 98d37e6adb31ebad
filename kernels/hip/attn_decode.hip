// Attention of few query rows over many keys on CDNA 3 (split-KV, "flash decoding"): bound by the
// bytes of K and V, which are read once for all query heads of a group.
//
// A workgroup takes one key head, one part of the keys and up to 16 * TILES lines. A line is a row of
// one head of the group, row * group + head, and a column of the products S^T = K Q^T and O^T = V^T P^T
// (mma.h). The four wavefronts take groups of 16 keys in turn (decode_load.h). Each has STAGES groups,
// 16 KB or more, in flight. They do not wait for one another until they merge their sums. LDS holds
// queries, the addresses of rows, and at the end the sums.
#include "../params.h"
#include "mma.h"
#include "../score.h"
#include "schedule.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILES) || \
    !defined(STAGES) || !defined(OCCUPANCY)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, TILES, STAGES and OCCUPANCY"
#endif
#ifndef KEY_DTYPE  // of K and V
#define KEY_DTYPE DTYPE
#endif
#ifndef LATENT  // whether V is the first elements of K
#define LATENT 0
#endif
constexpr bool kBiased = !LATENT;  // ALiBi and a bias: no call of latent attention has them

#include "arguments.h"
#include "decode_load.h"
#include "results.h"

typedef M::Acc Acc;
constexpr float kLeastUnit = 1e-30f;  // below any scale that `quantize` makes
constexpr int kWaves = 4;
constexpr int kThreads = kWaves * kLanes;
constexpr int kLeastGroups = 2 * kWaves;  // of a part, but for the last
constexpr int kFours = OCCUPANCY == 1 ? 2 : 1;  // of products that wavefronts exchange at once, as LDS has room

// Keys that a line sees.
struct Range {
  int low, high;
};

struct Shared {
  RowTable rows[kWaves];
  union {
    Quad q[TILES][kChunks][kLanes];
    Acc sums[kWaves][kFours][4][kLanes];  // from wavefront, row of the product
  };
  float maximum[kWaves][TILES][kGroup], total[kWaves][TILES][kGroup];
  ScaleTable scales[kFloat8 ? kWaves : 0];
  Turn turns[LATENT ? kWaves : 0];
  Range seen[BANDED ? TILES : 0][kGroup];
};

// A workgroup's part of the problem.
struct Block {
  int first_line, lines, head_k;
  unsigned group;         // query heads of a key head
  int start, stop;        // its keys
  int all_low, all_high;  // those that every line sees
  bool general;           // scores are more than q.k times a factor
};

// One column of each product: a query row.
struct Lines {
  Quad q[TILES][kChunks];
  int row[TILES], head[TILES];
  float slope[TILES];
  float scale[TILES];  // of float8
};

// Online softmax, per column; `total` is a lane's share of the sum.
struct State {
  Acc o[TILES][kElements];
  float maximum[TILES], total[TILES];
  float unit;  // that `o` counts in, of float8
};

// Of the four keys that a lane has scores of: what those are multiplied by, and P.
struct Factors {
  Acc k, v;
};

// ---- one group of keys --------------------------------------------------------------------------

DEVICE bool any_lane(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }

DEVICE Acc scores(const Group &group, const Quad (&q)[kChunks]) {
  Acc s = Acc{0};
  for (int c = 0; c < kChunks; ++c) {
    s = M::mma(key_operand(group, 2 * c), q[c].xy, s);
    s = M::mma(key_operand(group, 2 * c + 1), q[c].zw, s);
  }
  return s;
}

// Scores in base 2, -inf where the row does not see the key.
DEVICE void finish(Acc &s, const Shared &shared, const Params &p, const Sequence &sequence, const Block &b,
                   const Lines &lines, int t, int first) {
  int key = first + M::part() * 4;
  int distance = key - lines.row[t] - sequence.shift;
  // Multiplied before the paths diverge. Otherwise, after they join, a write to the products' registers
  // would come one wait state too early, on a path that the compiler does not count.
  s *= b.general ? 1.0f : p.scale * kLog2E;
  if (b.general) {
    Terms terms = terms_of(params_again(), sequence.batch, lines.head[t], lines.row[t]);
    terms.slope = lines.slope[t];  // a load here would wait for all keys in flight
    float derivative;
    if constexpr (kBiased) {
      for (int r = 0; r < 4; ++r) s[r] = score(terms, s[r], distance + r, derivative);
      if (terms.bias) {
        for (int r = 0; r < 4; ++r) s[r] = biased(terms, s[r], min(key + r, b.stop - 1));
      }
    } else {
      for (int r = 0; r < 4; ++r) s[r] = capped(terms, s[r], derivative);
    }
    s *= kLog2E;
  }
  if (first >= b.all_low && first + kGroup <= b.all_high) return;
  if (BANDED) {
    Range seen = shared.seen[t][M::column()];
    seen.low -= key;  // compared with `key + r`, a register spilled in two plans
    seen.high -= key;
    for (int r = 0; r < 4; ++r) s[r] = r < seen.low || r >= seen.high ? -INFINITY_F : s[r];
  }
  if (TREE) {
    Branch branch(params_again(), sequence.batch, sequence.shift, lines.row[t]);
    for (int r = 0; r < 4; ++r) s[r] = branch.hides(key + r) ? -INFINITY_F : s[r];
  }
  if (BANDED) return;
  int left = p.window_left < 0 ? -0x7fffffff : -p.window_left;
  int right = p.window_right < 0 ? 0x7fffffff : p.window_right;
  for (int r = 0; r < 4; ++r)
    if (distance + r < left || distance + r > right || key + r >= b.stop) s[r] = -INFINITY_F;
}

// P as the operand of the next product. The accumulator is rescaled only for a new maximum, which is
// rare after the first groups.
DEVICE Pair weights(State &state, int t, const Acc &s, const Factors &factors) {
  float highest = max(max(s[0], s[1]), max(s[2], s[3]));
  if (any_lane(highest > state.maximum[t])) {
    float raised = max(state.maximum[t], M::column_max(highest));
    // Both are -inf for a row that has seen no key yet.
    float rescale = raised == -INFINITY_F ? 1.0f : exp2(state.maximum[t] - raised);
    for (int e = 0; e < kElements; ++e) state.o[t][e] *= rescale;
    state.total[t] *= rescale;
    state.maximum[t] = raised;
  }
  float base = state.maximum[t] == -INFINITY_F ? 0.0f : state.maximum[t];
  Acc w;
  for (int r = 0; r < 4; ++r) w[r] = exp2(s[r] - base);
  state.total[t] += (w[0] + w[1]) + (w[2] + w[3]);
  if (kFloat8) w *= factors.v;
  return Pair{Format<DTYPE>::half_up(w[0], w[1]), Format<DTYPE>::half_up(w[2], w[3])};
}

// The factors of the n-th group of a table. Those of P are relative to the accumulator's unit, the
// largest of a few groups: times scales of 2^-14 and less, P would lose bits in float16. Scales that
// differ by less than 64 cost no rescale.
DEVICE Factors factors_of(State &state, const ScaleTable &table, int n) {
  int at = n * kGroup + M::part() * 4;
  Factors factors{*(const Acc *)&table.k[at], *(const Acc *)&table.v[at]};
  const Acc &v = factors.v;
  float largest = max(max(v[0], v[1]), max(v[2], v[3]));
  if (any_lane(largest > state.unit) || !any_lane(largest * 64.0f > state.unit)) {
    float unit = max(M::column_max(largest), kLeastUnit);
    float change = state.unit * reciprocal(unit);
    for (int t = 0; t < TILES; ++t)
      for (int e = 0; e < kElements; ++e) state.o[t][e] *= change;
    state.unit = unit;
  }
  factors.v *= reciprocal(state.unit);
  return factors;
}

DEVICE void step(State &state, Shared &shared, Group &group, const Factors &factors, const Params &p,
                 const Sequence &sequence, const Block &b, const Lines &lines, int first) {
  Pair w[TILES];
  clear_beyond(group, p.head_dim);
  for (int t = 0; t < TILES; ++t) {
    Acc s = scores(group, lines.q[t]);
    if (kFloat8) s *= factors.k * lines.scale[t];
    finish(s, shared, p, sequence, b, lines, t, first);
    w[t] = weights(state, t, s, factors);
  }
  if constexpr (LATENT) {
    Group values;
    for (int e = 0; e < kElements; ++e) {
      if (e % kTurnProducts == 0)
        turn_values(values, shared.turns[wave_index()], group, e / kTurnProducts);
      Pair v = value_operand(values, e);
      for (int t = 0; t < TILES; ++t) state.o[t][e] = M::mma(v, w[t], state.o[t][e]);
    }
    return;
  }
  for (int e = 0; e < kElements; ++e) {
    Pair v = value_operand(group, e);
    for (int t = 0; t < TILES; ++t) state.o[t][e] = M::mma(v, w[t], state.o[t][e]);
  }
}

// ---- queries ------------------------------------------------------------------------------------

// Each wavefront loads a quarter, and all wavefronts read everything from LDS: a workgroup requests
// every query once. The first keys are in flight before it waits for the queries.
constexpr int kPieces = TILES * kChunks;
constexpr int kShare = (kPieces + kWaves - 1) / kWaves;

// Before keys are in flight: what is loaded here would wait for all of them.
DEVICE void describe(Lines &lines, Shared &shared, const Params &p, const Sequence &s, const Block &b) {
  unsigned group = b.group;
  pin_scalar(group);  // nothing that divides by it stays in registers through the loop
  for (int t = 0; t < TILES; ++t) {
    // Lines beyond the last repeat it; their results are not stored.
    unsigned line = min(b.first_line + t * 16 + M::column(), b.lines - 1), row = quotient(line, group);
    lines.row[t] = row;
    lines.head[t] = b.head_k * group + line - row * group;
    lines.slope[t] = terms_of(p, s.batch, lines.head[t], row).slope;
    if (kFloat8) lines.scale[t] = query_scale(p, s, b.head_k, row);
    if constexpr (BANDED) {
      // All wavefronts write the same, before the barrier of `share_queries`. Computed beside a group of keys, it took
      // registers that some plans do not have. With `p`, 2 scalar ones spilled.
      Seen seen = keys_seen(params_again(), s, row, row);
      shared.seen[t][M::column()] = Range{seen.low, seen.high};
    }
  }
}

// The 8 elements of a line that a lane has of a piece.
DEVICE int eight_of(int piece) {
  int c = piece % kChunks;
  return kFloat8 && c < kPaired ? c / 2 * 8 + M::part() * 2 + c % 2 : c * 4 + M::part();
}

DEVICE void load_queries(Quad (&share)[kShare], const Lines &lines, const Params &p, const Sequence &s, const Block &b) {
  const unsigned short *q = (const unsigned short *)p.q + s.row_batch * p.q_batch + s.row0 * p.q_row;
  for (int i = 0; i < kShare; ++i) {
    int piece = i * kWaves + wave_index(), tile = piece / kChunks, eight = eight_of(piece);
    unsigned row = lines.row[0], head = lines.head[0];
    for (int t = 1; t < TILES; ++t) {
      if (tile != t) continue;
      row = lines.row[t];
      head = lines.head[t];
    }
    share[i] = Quad{0, 0, 0, 0};
    // Latent lines are mostly full, and their loads are all of a path: see `attend`.
    bool wanted = piece < kPieces && b.first_line + tile * 16 + M::column() < b.lines && eight * 8 < p.head_dim;
    if (LATENT) eight = min(eight, p.head_dim / 8 - 1);
    if (LATENT || wanted)
      share[i] = *(const Quad *)(q + multiply_add(row, p.q_row, multiply_add(head, p.q_head, eight * 8)));
  }
}

DEVICE void share_queries(Lines &lines, Shared &shared, Quad (&share)[kShare], int head_dim) {
  for (int i = 0; i < kShare; ++i) {
    int piece = i * kWaves + wave_index();
    if (LATENT && eight_of(piece) * 8 >= head_dim) share[i] = Quad{0, 0, 0, 0};
    if (piece < kPieces) shared.q[piece / kChunks][piece % kChunks][lane_index()] = share[i];
  }
  barrier();
  for (int t = 0; t < TILES; ++t)
    for (int c = 0; c < kChunks; ++c) lines.q[t][c] = shared.q[t][c][lane_index()];
}

// ---- the keys of a part -------------------------------------------------------------------------

DEVICE void attend(State &state, Shared &shared, const Params &p, const Sequence &s,
                   const Block &b) {
  Lines lines;
  Quad share[kShare];
  describe(lines, shared, params_again(), s, b);
  constexpr int kStride = kWaves * kGroup;  // between groups of a wavefront
  int begin = b.start + wave_index() * kGroup;
  if (begin >= b.stop) {
    load_queries(share, lines, p, s, b);
    share_queries(lines, shared, share, p.head_dim);
    return;
  }
  int groups = (b.stop - begin + kStride - 1) / kStride;
  RowTable &rows = shared.rows[wave_index()];
  Source k{(const char *)p.k + b.head_k * p.k_head * kSize, p.k_batch, p.k_row, p.head_dim};
  Source v{(const char *)p.v + b.head_k * p.v_head * kSize, p.v_batch, p.v_row, p.head_dim_v};
  unsigned inverse = p.page_table ? inverse_of_pages(p) : 0;

  // A lane finds one or two keys of the groups n ... n + kStages - 1; a key beyond the end becomes the
  // last one. Scales are loaded once the page is known, and written one round after the rows.
  Place place[kFound] = {};
  KeyScales scales[kFound];
  for (int f = 0; f < kFound; ++f) scales[f] = KeyScales{1.0f, 1.0f};
  auto look = [&](int n) {
    each_found([&](int i, int at) {
      int key = begin + (n + at / kGroup) * kStride + at % kGroup;
      find(place[i], p, s, inverse, min(key, b.stop - 1));
    });
  };
  auto write = [&] {
    each_found([&](int i, int at) {
      write_row(rows, at, k, v, p.page_table ? place[i].page : s.key_batch, place[i].row);
      if (kFloat8) find_scales(scales[i], s, b.head_k, place[i]);
    });
    wave_fence();
  };
  auto begin_round = [&] {
    if (kFloat8) write_scales(shared.scales[wave_index()], scales);
  };
  auto advance = [&](Group &group, int n, int i) {  // the i-th of its round
    Factors factors{};
    if (kFloat8) factors = factors_of(state, shared.scales[wave_index()], i);
    step(state, shared, group, factors, p, s, b, lines, begin + n * kStride);
  };
  Group group[kStages];
  look(0);
  load_queries(share, lines, p, s, b);
  write();
  if (groups > kStages) look(kStages);
  int n = 0;
  // All loads of this path are unconditional: where paths with different numbers of loads join, the
  // compiler waits for more loads than necessary. Those behind the last group are of the last key alone.
  // Float8 takes it always: with both paths, a plan spilled.
  if (kFloat8 || groups >= kStages) {
#pragma unroll
    for (int i = 0; i < kStages; ++i) load(group[i], rows, i, k, v);
    share_queries(lines, shared, share, p.head_dim);
    for (; n + kStages < groups; n += kStages) {
      // Otherwise the offsets of a key's pieces stay in registers through the loop, and up to 21 spill.
      if (kFloat8) pin_scalar(k.head_dim);
      begin_round();
      write();
      look(n + 2 * kStages);
#pragma unroll
      for (int i = 0; i < kStages; ++i) {
        advance(group[i], n + i, i);
        load(group[i], rows, i, k, v);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kStages; ++i)
      if (i < groups) load(group[i], rows, i, k, v);
    share_queries(lines, shared, share, p.head_dim);
  }
  begin_round();
#pragma unroll
  for (int i = 0; i < kStages; ++i)
    if (n + i < groups) advance(group[i], n + i, i);
}

// ---- from four wavefronts to memory -------------------------------------------------------------

// Of a part without keys combine reads only this.
DEVICE void store_empty(const Sequence &s, const Block &b, int part) {
  unsigned line = b.first_line + thread_index(), row = quotient(line, b.group);
  if (thread_index() < TILES * 16 && (int)line < b.lines)
    Results(params_again(), s, part).store_lse(row, b.head_k * b.group + line - row * b.group, -INFINITY_F);
}

// `count` elements of an output.
template <int count>
DEVICE void store(const Results &to, GLOBAL char *out, int dim, const Acc &x) {
  if (to.split) {
    for (int i = 0; i < count; ++i) ((GLOBAL float *)out)[dim + i] = x[i];
    return;
  }
  for (int i = 0; i < count; i += 2)
    *(GLOBAL unsigned *)(out + 2 * (dim + i)) = Format<DTYPE>::nearest(x[i], x[i + 1]);
}

DEVICE void finish_tile(State &state, int t, Shared &shared, const Results &to, const Block &b) {
  int wave = wave_index(), column = M::column();
  unsigned group = b.group, line = b.first_line + t * 16 + column;
  pin_scalar(group);  // see `describe`
  unsigned row = quotient(line, group), head = b.head_k * group + line - row * group;
  bool exists = (int)line < b.lines;

  // A sink is one more logit, without a value.
  float sink = -INFINITY_F;
  if (to.sinks && exists) sink = to.sinks[head] * kLog2E;
  float top = sink;
  for (int w = 0; w < kWaves; ++w) top = max(top, shared.maximum[w][t][column]);
  float base = top == -INFINITY_F ? 0.0f : top;
  float total = exp2(sink - base);
  for (int w = 0; w < kWaves; ++w)
    total += shared.total[w][t][column] * exp2(shared.maximum[w][t][column] - base);
  bool saw = total != 0.0f;
  float own = exp2(state.maximum[t] - base) * (saw ? 1.0f / total : 0.0f);
  if (kFloat8) own *= state.unit;
  GLOBAL char *out = to.out_of(row, head);
  // The output of a part that saw no key is not read.
  bool wanted = exists && (saw || !to.split);

  // Each wavefront adds up one row of every product: element for element it lies in the same lane.
  for (int first = 0; first < kElements; first += 4 * kFours) {
    if (t > 0 || first > 0) barrier();
    for (int f = 0; f < kFours; ++f) {
      for (int r = 0; r < 4; ++r) {
        Acc x = Acc{0};
        for (int j = 0, e = first + 4 * f; j < 4 && e + j < kElements; ++j) x[j] = state.o[t][e + j][r] * own;
        shared.sums[wave][f][r][lane_index()] = x;
      }
    }
    barrier();
    for (int e = first, f = 0; f < kFours && e < kElements; e += 4, ++f) {
      Acc x = shared.sums[0][f][wave][lane_index()];
      for (int w = 1; w < kWaves; ++w) x += shared.sums[w][f][wave][lane_index()];
      int dim = dim_of(e, M::part() * 4 + wave);
      if (wanted && dim < to.head_dim_v) {
        if (e < kMiddle) store<4>(to, out, dim, x);
        else store<2>(to, out, dim, x);
      }
    }
  }
  if (wave == 0 && M::part() == 0 && exists)
    to.store_lse(row, head, saw ? (top + log2(total)) * kLn2 : -INFINITY_F);
}

// Merges the wavefronts.
DEVICE void finish(State &state, Shared &shared, const Sequence &s, const Block &b, int part) {
  Results to(params_again(), s, part);
  for (int t = 0; t < TILES; ++t) {
    float total = M::column_sum(state.total[t]);
    if (M::part() == 0) {
      shared.maximum[wave_index()][t][M::column()] = state.maximum[t];
      shared.total[wave_index()][t][M::column()] = total;
    }
  }
  barrier();
  for (int t = 0; t < TILES; ++t) finish_tile(state, t, shared, to, b);
}

extern "C" __global__ WORKGROUP(kThreads, OCCUPANCY) void attn_decode(Params p) {
  __shared__ Shared shared;

  unsigned group = quotient(p.heads_q, p.heads_k);
  int blocks = (p.seqlen_q * group + TILES * 16 - 1) / (TILES * 16);
  Work work = decode_work(workgroup_index(), blocks, p.num_splits, p.heads_k, p.batch, p.dies);
  Sequence s = sequence_of(p, work.batch);
  Block b;
  b.group = group;
  b.head_k = work.head;
  b.lines = s.rows * group;
  b.first_line = work.block * TILES * 16;
  if (b.first_line >= b.lines) return;
  unsigned last_line = min(b.first_line + TILES * 16, b.lines) - 1;
  Seen seen = keys_seen(p, s, quotient(b.first_line, group), quotient(last_line, group));
  int groups = (max(seen.high - seen.low, 0) + kGroup - 1) / kGroup;
  // As many parts as the longest sequence needs; shorter ones leave the last of them empty.
  int share = quotient(groups + p.num_splits - 1, p.num_splits);
  share = max(share, kLeastGroups) * kGroup;
  b.start = (int)min(seen.low + (long long)work.part * share, (long long)seen.high);
  b.stop = b.start + min(share, seen.high - b.start);
  if (work.part > 0 && b.start >= b.stop) {
    store_empty(s, b, work.part);
    return;
  }
  b.all_low = seen.all_low;
  b.all_high = min(seen.all_high, b.stop);
  b.general = p.softcap > 0.0f || (kBiased && p.alibi_slopes) || (kBiased && p.bias_type);

  State state;
  state.unit = 1.0f;
  for (int t = 0; t < TILES; ++t) {
    state.maximum[t] = -INFINITY_F;
    state.total[t] = 0.0f;
    for (int e = 0; e < kElements; ++e) state.o[t][e] = Acc{0};
  }
  attend(state, shared, p, s, b);
  finish(state, shared, s, b, work.part);
}
