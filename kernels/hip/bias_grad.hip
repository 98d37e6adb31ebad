// The gradient of a bias on CDNA 3: P (dP - delta) of every score, summed over what the bias is broadcast
// over. A workgroup owns 64 rows x 128 keys of that gradient, or of a bias that is broadcast over rows or
// keys all of them, and walks the sequences, heads, rows and keys that it sums up, always in the same order:
// no atomics, nothing to begin with 0, the same bits on every run.
//
// A wavefront owns 32 keys as columns of products; their K and V come from memory to registers once a head.
// Tiles of 32 query rows of Q and dO pass through LDS, in two buffers and with one barrier a tile. What is
// made of them is what attn_bwd.hip makes where it owns keys, and its sums stay in registers, in float32.
//
// `out` is the gradient here, contiguous and in the bias's own format. A stride of 0 tells where the bias is
// broadcast.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V)
#error "the plan defines DTYPE, HEAD_DIM and HEAD_DIM_V"
#endif

#define OWNS KEYS
#define COLUMNS 1
#include "bwd_owned.h"
#include "schedule.h"
#ifndef MOD
#define KERNEL_PARAMS Params
#endif

typedef Stream<HEAD_DIM, HEAD_DIM_V, kWaves, false> Tiles;
constexpr int kRowTiles = 2;  // of the rows that a workgroup owns, each with a buffer of its own
constexpr int kRows = kRowTiles * kTile;
constexpr int kBufferBytes = Tiles::RowsA::kBytes + Tiles::RowsC::kBytes;
constexpr int kLdsBytes = kRowTiles * kBufferBytes;

typedef Acc Sums[kRowTiles];

// Adds the gradient of one head's scores: of the rows from `first_row` on, all or kRows of them, against the
// kBlock keys at `key`. What it needs, it works out anew: kept from head to head, 17 scalar registers spilled.
DEVICE void add_head(Sums &sums, Lds lds, int batch, int head, int first_row, int key) {
  const Params &p = params_again();
  Context c{sequence_of(p, batch), key + wave_index() * kTile};
  Seen seen = seen_by(p, c.s, key, min(key + kBlock, c.s.keys) - 1);
  int start = first_row + max(seen.low - first_row, 0) / kRows * kRows;
  int stop = p.bias_row ? min(seen.high, first_row + kRows) : seen.high;
  if (start >= stop) return;
  int head_k = head / (p.heads_q / p.heads_k);
  Quad x[1][kSteps], y[1][kStepsV];
  load_owned(c, x, k_of(p, c.s, head_k));
  load_owned(c, y, v_of(p, c.s, head_k));
  Tiles tiles{wave_index()};
  Matrix a = q_of(p, c.s, head), dout = dout_of(p, c.s, head);
  RowStates states = states_of(p, c.s, head);
  tiles.load(a, dout, start, stop);
  barrier();  // the tiles of the head before have been read
  for (int first = start; first < stop; first += kRows) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      int at = first + t * kTile;
      if (at >= stop) break;
      Lds rows = lds + t * kBufferBytes;
      tiles.store_rows(rows, rows + Tiles::RowsA::kBytes);
      barrier();  // its rows are there, and those of the tile before the last have been read
      tiles.load(a, dout, at + kTile, stop);
      Acc s[1] = {Acc{0}}, dp[1] = {Acc{0}};
      multiply<HEAD_DIM>(s, rows, x);
      Pair rounded[kFours];
      Weights w = weigh(s[0], rounded, c, Acc{0}, states, head, 0, at);
      __builtin_amdgcn_sched_barrier(0);
      multiply<HEAD_DIM_V>(dp, rows + Tiles::RowsA::kBytes, y);
      Acc minus_delta = load_states(c, states.minus_delta, at);
#pragma unroll
      for (int r = 0; r < M::kRegisters; ++r) {
        float g = where(w.keep, r, dp[0][r] * w.keep_scale);
        // Where nothing is seen, not even a NaN of the row's.
        sums[t][r] += where(w.seen, bit_of(r), (g + minus_delta[r]) * w.p[r]);
      }
    }
  }
}

DEVICE void store_element(const Params &p, long long at, float x) {
  if (p.bias_type == kFloat32Bias) {
    ((float *)p.out)[at] = x;
    return;
  }
  unsigned bits = p.bias_type == kBfloat16Bias ? Format<BFLOAT16>::nearest(x, 0.0f)
                                               : Format<FLOAT16>::nearest(x, 0.0f);
  ((unsigned short *)p.out)[at] = (unsigned short)bits;
}

// Over the 32 columns of a product.
DEVICE float over_columns(float x) {
  for (int bit = 1; bit < kTile; bit *= 2) x += from_lane_xor(x, bit);
  return x;
}

// `base`: of the gradient's first element of this head.
DEVICE void store(const Sums &sums, Lds lds, long long base, int first_row, int first_key) {
  const Params &p = params_again();
  int wave = wave_index(), key = first_key + wave * kTile + M::column();
  bool all_rows = !p.bias_row, all_keys = !p.bias_key;
  float all = 0.0f;
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int r = 0; r < M::kRegisters; ++r) all += sums[t][r];
  all = M::column_sum(all);
  if (!all_keys) {
    if (key >= p.seqlen_k) return;
    if (all_rows) {
      if (M::part() == 0) store_element(p, base + key, all);
      return;
    }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int r = 0; r < M::kRegisters; ++r) {
        int row = first_row + t * kTile + M::row(r);
        if (row < p.seqlen_q) store_element(p, base + row * p.out_row + key, sums[t][r]);
      }
    return;
  }
  // Each wavefront has sums over its own keys.
  barrier();  // the last tile has been read
  Lds mine = lds + wave * kRows * 4;
  all = over_columns(all);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int r = 0; r < M::kRegisters; ++r) {
      float x = all_rows ? all : over_columns(sums[t][r]);
      lds_write(mine + (t * kTile + M::row(r)) * 4, __builtin_bit_cast(unsigned, x));
    }
  barrier();
  int row = thread_index();
  if (row >= (all_rows ? 1 : min(kRows, p.seqlen_q - first_row))) return;
  float x = 0.0f;
  for (int i = 0; i < kWaves; ++i)
    x += __builtin_bit_cast(float, *(LdsWords)(lds + (i * kRows + row) * 4));
  store_element(p, base + (first_row + row) * p.out_row, x);
}

extern "C" __global__ WORKGROUP(kThreads, 1) void bias_grad(KERNEL_PARAMS p) {
  __shared__ Quad memory[kLdsBytes / kUnitBytes];
  Lds lds = (Lds)memory;
  bool all_rows = !p.bias_row, all_keys = !p.bias_key;
  int lines = all_rows ? 1 : (p.seqlen_q + kRows - 1) / kRows;
  int blocks = all_keys ? 1 : (p.seqlen_k + kBlock - 1) / kBlock;
  Work work = work_of(workgroup_index(), lines * blocks, 1, p.bias_head ? p.heads_q : 1,
                      p.bias_batch ? p.batch : 1, p.dies);
  int first_row = work.block / blocks * kRows, first_key = work.block % blocks * kBlock;
  Sums sums;
  for (int t = 0; t < kRowTiles; ++t) sums[t] = Acc{0};
  int batch = work.batch;
  if (p.batch) do {
    int key = first_key;
    do {
      int head = work.head;
      do
        add_head(sums, lds, batch, head, first_row, key);
      while (!params_again().bias_head && ++head < params_again().heads_q);
      key += kBlock;
    } while (!params_again().bias_key && key < params_again().seqlen_k);
  } while (!params_again().bias_batch && ++batch < params_again().batch);
  const Params &q = params_again();
  store(sums, lds, work.batch * q.out_batch + work.head * q.out_head, first_row, first_key);
}
