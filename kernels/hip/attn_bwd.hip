// Attention backward on CDNA 3 without atomics (FlashAttention-2, Dao 2023, algorithm 2): the same
// kernel twice, once owning keys (dK and dV) and once owning query rows (dQ). P is made again from
// the LSE, so that both need two products before and one or two after it.
//
//                owns X, Y   streams A, C   S = A X^T, dP = C Y^T   then
//   OWNS KEYS    K, V        Q, dO          rows x keys             dV^T += dO^T P, dK^T += Q^T dS
//   OWNS ROWS    Q, dO       K, V           keys x rows             dQ^T += K^T dS
//
// A wavefront owns COLUMNS times 32 of them, in registers with their gradients: one column of every
// product in a lane, so that P and dS stay in registers (mma.h). Tiles of 32 streamed rows pass
// through LDS (stream.h), each in two phases: the products over the head read the tile as it lies
// while it is stored transposed, the products over its rows read it transposed while the next tile
// is stored as it lies. Two barriers a tile. Keys are owned once for all heads of their group, whose
// gradients add up in registers. Rows and keys beyond the end are 0 and so is what they add.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(OWNS) || \
    !defined(GENERAL) || !defined(COLUMNS) || !defined(PER_SIMD) || !defined(SLOTS)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, OWNS, GENERAL, COLUMNS, PER_SIMD and SLOTS"
#endif

#include "bwd_owned.h"
#include "packed.h"
#ifndef MOD
#define KERNEL_PARAMS Params
#endif

constexpr int kTiles = HEAD_DIM / kTile;          // products along the head
constexpr int kTilesV = HEAD_DIM_V / kTile;

// K, V and their gradients take 384 registers.
constexpr bool kFull = kKeys && (HEAD_DIM + HEAD_DIM_V) * COLUMNS == 512;
// Reads of LDS come this many ahead of the products that take them, in plans without slots. Left to the compiler, they
// come right before these: the matrix unit's share was 0.317 in place of 0.564 (256, by the timing model).
constexpr int kAhead = GENERAL ? 2 : 3;
// With score terms, dP of owned rows up to 128 and dV at 256 have the fewest registers left. With 2, 4 of dV spilled in
// float16 at 256, and of rows at 128 only one workgroup fit on a compute unit.
constexpr int kAheadDp = GENERAL && !kKeys && HEAD_DIM <= 128 ? 1 : kAhead;
constexpr int kAheadDv = GENERAL && HEAD_DIM == 256 ? 1 : kAhead;
#if LISTS
// With a mask that a user gave, 21 registers spilled: none do where the compiler places the reads of dK.
constexpr int kAheadDx = kFull && DTYPE == FLOAT16 ? 0 : kAhead;
#else
constexpr int kAheadDx = kAhead;
#endif

// Where the lane's number is computed again, so that no addresses are kept. In products: from 240 on, as 1 register of
// 192/128 spilled, and in general plans of 128 that own rows, where with 2 to 16 registers more only one workgroup
// fit on a compute unit. In what stores the tiles of 64 with lists the same, by 4 registers.
constexpr bool kHalf = GENERAL && !kKeys && HEAD_DIM + HEAD_DIM_V == 256;
constexpr bool kTight = kHalf || (kKeys && (HEAD_DIM + HEAD_DIM_V) * COLUMNS >= 320);
#if LISTS == 1
constexpr bool kTightTiles = kFull || (kKeys && HEAD_DIM == 64);
#else
constexpr bool kTightTiles = kFull;
#endif

static_assert(!TERM || kSoftcapAlone, "the one term that has plans of its own here");
static_assert(!(GENERAL && TERM), "a plan has one term, or any");

typedef Stream<HEAD_DIM, HEAD_DIM_V, kWaves, kTightTiles> Tiles;
constexpr int kRowsA = 0;
constexpr int kRowsC = kRowsA + Tiles::RowsA::kBytes;
constexpr int kColumnsA = kRowsC + Tiles::RowsC::kBytes;
constexpr int kColumnsC = kColumnsA + ColumnTile<HEAD_DIM>::kBytes;
constexpr int kLdsBytes = kColumnsC + (kKeys ? ColumnTile<HEAD_DIM_V>::kBytes : 0);

typedef Pair Rounded[COLUMNS][kFours];  // P or dS: what the next product takes

// What the owned ones meet: tiles from row `start` on, `steps` of them in each of `heads`, or by list.
struct Pass {
  Context c;
  Lds lds;
  Tiles tiles;
  Matrix a, b;       // streamed, of `head`
  RowStates states;  // of `head`
  Seen mine;         // by this wavefront's
  int heads, head;
#if LISTS == 1
  Entries entries;   // of `head`
  int entry;         // of the tile at hand

  METHOD int first(int) const { return tile_of(entry) * kTile; }
  METHOD bool is_full() const { return ::is_full(entry); }
  METHOD void next() { entry = entries.next((c.streamed() + kTile - 1) / kTile); }
  METHOD int count() const { return uniform(entries.list.count); }
  // To the first tile of `head`. How many there are.
  METHOD int begin() {
    if (kKeys) look_up();
    const Params &p = params_again();
    int block = c.first / kBlock, first = block * kBlock;
    Seen seen = seen_by(p, c.s, first, min(first + kBlock, c.owned()) - 1);
    List list = list_of(p, c.s.batch, head, block);
    cut_to(list, kTile, seen.low, seen.high);
    entries.begin(list);
    // Scalar registers are few: 2 to 4 of them spilled at 96 and at 192 and 128.
    pin(entries.list.entries);
    pin(entries.list.count);
    next();
    return list.count;
  }
#else
  int start, steps;
  METHOD int count() const { return heads * steps; }
  METHOD int first(int step) const { return start + step * kTile; }
  METHOD bool is_full() const { return false; }
#endif

  // Where what is streamed of `head` lies: all but `a` and `b`'s rows' lengths.
  METHOD void look_up() {
    const Params &p = params_again();
    Sequence s = sequence_of(p, c.s.batch);
    a = q_of(p, s, head);
    b = dout_of(p, s, head);
    states = states_of(p, s, head);
  }
};

#if SLOTS
#include "bwd_slots.h"
#endif

// ---- operands -----------------------------------------------------------------------------------

// A product over the tile's rows: grad (head x owned), with reads `ahead`.
template <int dim, int ahead, int tiles>
DEVICE void accumulate(Acc (&grad)[COLUMNS][tiles], Lds tile, const Rounded &x) {
  int lane = lane_for<kTight>(), element = lane % kTile, part = lane / kTile;
  constexpr int kHalves = kFours / 2;
  auto read = [&](int i) {
    return lds_read(tile + ColumnTile<dim>::place(i / kHalves * kTile + element, i % kHalves * 2 + part));
  };
  each_read<tiles * kHalves, ahead>(read, [&](int i, const Quad &a) {
    int t = i / kHalves, j = i % kHalves;
    for (int n = 0; n < COLUMNS; ++n) {
      grad[n][t] = M::mma(a.xy, x[n][2 * j], grad[n][t]);
      grad[n][t] = M::mma(a.zw, x[n][2 * j + 1], grad[n][t]);
    }
  });
}

// dP becomes dS. Returns this lane's share of the row's sum of P dP.
DEVICE float differ(Acc &dp, const Acc &s, const Weights &w, const Acc &minus_delta) {
  float dots = 0.0f;
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) {
    float g = where(w.keep, r, dp[r] * w.keep_scale);
    if (!kKeys) dots += w.p[r] * g;
    dp[r] = (g + minus_delta[r]) * s[r];
  }
  return dots;
}

DEVICE void store_sinks(const Context &c, float dots, int head, int row) {
  const Params &p = params_again();
  dots = M::column_sum(dots);
  if (row >= c.s.rows || M::part()) return;
  store_sink_gradient(p, c.s, head, row, dots);
}

DEVICE void exponentiate(Acc &s, const Context &c, const Acc &minus_lse) {
  Acc x = s * c.to_base_2 + minus_lse;
  for (int r = 0; r < M::kRegisters; ++r) s[r] = exp2(x[r]);
}

// The same with a softcap alone, by whose slope dP is multiplied.
DEVICE void exponentiate(Acc &s, Acc &dp, const Cap &cap, const Acc &minus_lse) {
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) {
    float t = cap.tanh(cap.inverted(cap.raised(s[r])));
    s[r] = cap.weight(t, minus_lse[r]);
    dp[r] *= cap.slope(t);
  }
}

// The tiles of `pass`, or by list those of one head, in the compiler's own schedule.
DEVICE void run(Pass &pass, const Quad (&x)[COLUMNS][kSteps], const Quad (&y)[COLUMNS][kStepsV],
                Acc (&grad_x)[COLUMNS][kTiles], Acc (&grad_y)[COLUMNS][kTilesV], float (&dots)[COLUMNS]) {
  const Context &c = pass.c;
  Lds lds = pass.lds;
  Tiles &tiles = pass.tiles;
  Cap cap;
  tiles.load(pass.a, pass.b, pass.first(0), c.streamed());
  tiles.store_rows(lds + kRowsA, lds + kRowsC);
  Acc minus_lse[COLUMNS], minus_delta[COLUMNS];
  auto load_both = [&](int n, int first) {
    minus_lse[n] = load_states(c, pass.states.minus_lse, first);
    minus_delta[n] = load_states(c, pass.states.minus_delta, first);
  };
  if (!kKeys)
    for (int n = 0; n < COLUMNS; ++n) load_both(n, c.first + n * kTile);
  int step = 0;
  for (int n = pass.count(); n > 0; --n) {
    int first = pass.first(step);
    barrier();  // its rows are there, and the columns of the tile before have been read
    tiles.store_columns<kKeys>(lds + kColumnsA, lds + kColumnsC);
    if (kKeys && !GENERAL) load_both(0, first);
    Acc s[COLUMNS], dp[COLUMNS];
    Rounded p_rounded, ds_rounded;
    for (int n = 0; n < COLUMNS; ++n) s[n] = Acc{0};
    multiply_ahead<HEAD_DIM, kFull || kHalf, kAhead>(s, lds + kRowsA, x);
    Weights weights[COLUMNS];
    if (GENERAL) {
      for (int n = 0; n < COLUMNS; ++n)
        weights[n] = weigh(s[n], p_rounded[n], c, minus_lse[n], pass.states, pass.head, n, first, pass.is_full());
      fence();
    }
    for (int n = 0; n < COLUMNS; ++n) dp[n] = GENERAL ? Acc{0} : minus_delta[kKeys ? 0 : n];
    multiply_ahead<HEAD_DIM_V, kFull || kHalf, kAheadDp>(dp, lds + kRowsC, y);
    if (kKeys && GENERAL) minus_delta[0] = load_states(c, pass.states.minus_delta, first);
    for (int n = 0; n < COLUMNS; ++n) {
      if (GENERAL) {
        dots[n] += differ(dp[n], s[n], weights[n], minus_delta[kKeys ? 0 : n]);
      } else {
        if (kSoftcapAlone)
          exponentiate(s[n], dp[n], cap, minus_lse[kKeys ? 0 : n]);
        else
          exponentiate(s[n], c, minus_lse[kKeys ? 0 : n]);
        if (first < pass.mine.all_low || first + kTile > pass.mine.all_high)
          mask(s[n], seen_bits(c, c.own(n), first));
        if (kKeys) round(p_rounded[n], s[n]);
        dp[n] *= s[n];
      }
      round(ds_rounded[n], dp[n]);
    }
    barrier();  // its columns are there, and its rows have been read

#if LISTS == 1
    pass.next();
#else
    if (++step == pass.steps && --pass.heads) {
      step = 0;
      ++pass.head;
      pass.look_up();
    }
#endif
    tiles.load(pass.a, pass.b, pass.first(step), c.streamed());
    if (kKeys) accumulate<HEAD_DIM_V, kAheadDv>(grad_y, lds + kColumnsC, p_rounded);
    // Or the next product's reads come first: 4 registers of bfloat16 spilled, with score terms.
    if (kFull && GENERAL) fence();
    tiles.store_rows(lds + kRowsA, lds + kRowsC);
    accumulate<HEAD_DIM, kAheadDx>(grad_x, lds + kColumnsA, ds_rounded);
  }
}

// ---- the end ------------------------------------------------------------------------------------

// What is not owned lies outside the buffer and is not written. A width is a multiple of 8.
template <int tiles>
DEVICE void store(const Context &c, const Matrix &m, const Acc (&grad)[COLUMNS][tiles],
                  float factor) {
  int column = M::column();
  pin(column);  // or its addresses would be kept from before the loop
  for (int n = 0; n < COLUMNS; ++n) {
    int first = c.first + n * kTile;
    auto to = buffer_of(m, first, c.owned() - first);
    for (int t = 0; t < tiles; ++t)
      for (int j = 0; j < kFours; ++j) {
        if (t * kTile + j * 8 >= m.width) break;
        float x[4];
        for (int i = 0; i < 4; ++i) x[i] = grad[n][t][4 * j + i] * factor;
        Pair four{F::nearest(x[0], x[1]), F::nearest(x[2], x[3])};
        int offset = column * m.row_bytes + (t * kTile + M::row(4 * j)) * 2;
        __builtin_amdgcn_raw_buffer_store_b64(four, to, offset, 0, 0);
      }
  }
}

extern "C" __global__ WORKGROUP(kThreads, PER_SIMD) void attn_bwd(KERNEL_PARAMS p) {
  __shared__ Quad memory[kLdsBytes / kUnitBytes];
  Lds lds = (Lds)memory;
  Work work;
  if (!find_work<kKeys, kBlock>(p, kKeys ? p.heads_k : p.heads_q, 1, work)) return;
  int group = p.heads_q / p.heads_k;
  Context c{sequence_of(p, work.batch)};
  int head_k = kKeys ? work.head : work.head / group;
  int first_own = work.block * kBlock;
  if (first_own >= c.owned()) return;
  int wave = wave_index();
  c.first = first_own + wave * COLUMNS * kTile;
  c.to_base_2 = p.scale * kLog2E;

  Quad x[COLUMNS][kSteps], y[COLUMNS][kStepsV];
  load_owned(c, x, kKeys ? k_of(p, c.s, head_k) : q_of(p, c.s, work.head));
  load_owned(c, y, kKeys ? v_of(p, c.s, head_k) : dout_of(p, c.s, work.head));
  Acc grad_x[COLUMNS][kTiles], grad_y[COLUMNS][kTilesV];
  for (int n = 0; n < COLUMNS; ++n) {
    for (int t = 0; t < kTiles; ++t) grad_x[n][t] = Acc{0};
    for (int t = 0; t < kTilesV; ++t) grad_y[n][t] = Acc{0};
  }

  int last = min(c.first + COLUMNS * kTile, c.owned()) - 1;
  Seen block = seen_by(p, c.s, first_own, min(first_own + kBlock, c.owned()) - 1);
  int start = block.low / kTile * kTile;
  int steps = max(block.high - start + kTile - 1, 0) / kTile;
  int head = kKeys ? head_k * group : work.head;

  Pass pass{c,
            lds,
            Tiles{wave},
            kKeys ? q_of(p, c.s, head) : k_of(p, c.s, head_k),
            kKeys ? dout_of(p, c.s, head) : v_of(p, c.s, head_k),
            states_of(p, c.s, head),
            seen_by(p, c.s, c.first, last),
            kKeys ? group : 1,
            head};
#if LISTS != 1
  pass.start = start;
  pass.steps = steps;
#endif
  float dots[COLUMNS] = {};
#if SLOTS
  run_in_slots(pass, x, y, grad_x, grad_y);
#else
#if LISTS == 1
  // Heads one by one, each from its own list's first tile. Going on to the next head in the loop over tiles, as
  // below, spilled 2 scalar registers: what finds a list needs some when all are taken.
  for (; pass.heads > 0; --pass.heads, ++pass.head)
    if (pass.begin()) run(pass, x, y, grad_x, grad_y, dots);
#else
  run(pass, x, y, grad_x, grad_y, dots);
#endif
#endif
  const Params &q = params_again();
  Sequence s = sequence_of(q, c.s.batch);
  if (kKeys) {
    store(c, keys_of(q.dk, s, head_k, q.dk_batch, q.dk_row, q.dk_head, q.head_dim), grad_x,
          q.scale);
    store(c, keys_of(q.dv, s, head_k, q.dv_batch, q.dv_row, q.dv_head, q.head_dim_v), grad_y,
          1.0f);
  } else {
    store(c, rows_of(q.dq, s, head, q.dq_batch, q.dq_row, q.dq_head, q.head_dim), grad_x,
          q.scale);
    if (GENERAL && q.dsinks)
      for (int n = 0; n < COLUMNS; ++n) store_sinks(c, dots[n], head, c.own(n));
  }
}
