// The gradient of a bias on CDNA 3: P (dP - delta) of every score, summed over what the bias is broadcast
// over. A workgroup owns 64 rows, with a bias alone 128, x 128 keys of that gradient, or of a bias that is broadcast
// over rows or keys all of them, and walks the sequences, heads, rows and keys that it sums up, always in the same order:
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
#define HAS_BOOL_BIAS 0  // it has no gradient
#include "bwd_owned.h"
#include "schedule.h"
#ifndef MOD
#define KERNEL_PARAMS Params
#endif

// With a bias alone, two wavefronts on a SIMD hide each other's waits. Above 64, registers are too few for two.
constexpr int kPerSimd = kBiasAlone && HEAD_DIM <= 64 ? 2 : 1;
constexpr bool kTight = kPerSimd == 2;  // the lane's number is computed again, so that no addresses are kept
constexpr int kReadsAhead = kTight ? 2 : 3;

typedef Stream<HEAD_DIM, HEAD_DIM_V, kWaves, kTight> Tiles;
constexpr int kRowTiles = kBiasAlone ? 4 : 2;  // of the rows that a workgroup owns
constexpr int kRows = kRowTiles * kTile;
constexpr int kBufferBytes = Tiles::RowsA::kBytes + Tiles::RowsC::kBytes;
constexpr int kLdsBytes = 2 * kBufferBytes;

typedef Acc Sums[kRowTiles];

// What is loaded of a head, a tile ahead, with a bias alone all of it. Then positions go on from tile to tile: made
// anew, they took half of the scalar unit's time.
struct Ahead {
  Tiles tiles;
  Matrix a, b;
  RowStates states;
  int rows, stop;  // of the sequence, and those before which tiles end
  unsigned offset[Tiles::kMine];
  Biases biases;
  Acc minus_lse, minus_delta;

  METHOD void seek(int first) {
    a.base = a.row(first);
    b.base = b.row(first);
    biases.base += (long long)first * biases.step;
#pragma unroll
    for (int n = 0; n < Tiles::kMine; ++n) {
      offset[n] = tiles.offset(n, lane_index(), a, b);
      pin(offset[n]);
    }
  }
  static METHOD int bytes_of(const Matrix &m, int rows) {
    return rows * m.row_bytes - min(rows, 1) * (m.row_bytes - m.width * 2);
  }
  METHOD Acc states_at(const float *state, int first) const {
    Acc x;
    auto from = buffer(state, rows * 4);
    for (int j = 0; j < kFours; ++j)
      put_four(x, j, __builtin_amdgcn_raw_buffer_load_b128(from, M::row(4 * j) * 4, first * 4, 0));
    return x;
  }
  // The tile at `first`, with a bias alone the next one.
  METHOD void load(int first) {
    if (!kBiasAlone) {
      tiles.load(a, b, first, stop);
      return;
    }
    int there = max(stop - first, 0);
    pin_scalar(there);  // or min and max become v_med3, of which the compiler does not know that lanes agree
    there = min(there, kTile);
    pin_scalar(there);
    int bytes_a = bytes_of(a, there), bytes_b = bytes_of(b, there);
#pragma unroll
    for (int n = 0; n < Tiles::kMine; ++n) {
      bool of_a = tiles.is_a(n);
      int bytes = tiles.is_there(n) ? of_a ? bytes_a : bytes_b : 0;
      for (int i = 0; i < 4; ++i)
        tiles.load_row(n, i, of_a ? a.base : b.base, bytes, offset[n], of_a ? a.row_bytes : b.row_bytes);
    }
    minus_lse = states_at(states.minus_lse, first);
    minus_delta = states_at(states.minus_delta, first);
    biases.load(there);
    a.base += kTile * a.row_bytes;
    b.base += kTile * b.row_bytes;
    biases.base += kTile * (long long)biases.step;
    pin_scalars(a.base, b.base, biases.base);
  }
};

// P of a tile's scores, spread over the products of dP.
template <typename Steps>
DEVICE void multiply_beside(Acc &dp, Lds tile, const Quad (&y)[1][kStepsV], Steps step) {
  int lane = lane_for<kTight>(), row = lane % kTile, part = lane / kTile;
  auto read = [&](int i) { return lds_read(tile + Tiles::RowsC::place(row, 2 * i + part)); };
  each_read<kStepsV, kReadsAhead>(read, [&](int i, const Quad &a) {
    dp = M::mma(a.xy, y[0][i].xy, dp);
    fence();
    step(2 * i);
    fence();
    dp = M::mma(a.zw, y[0][i].zw, dp);
    fence();
    step(2 * i + 1);
  });
}

// With a bias alone, adds what the tile at `at` gives, which has come to LDS and to `ahead`.
DEVICE void add_tile(Acc &sums, Lds rows, const Context &c, const Seen &mine, const Quad (&x)[1][kSteps],
                     const Quad (&y)[1][kStepsV], Ahead &ahead, int at) {
  Acc exponent = ahead.minus_lse, dp = ahead.minus_delta, s[1] = {Acc{0}};
  ahead.biases.add(exponent, kLog2E);
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) {
    float e = exponent[r];
    pin(e);  // or it would come after the product
    exponent[r] = e;
  }
  ahead.load(at + kTile);
  fence();
  multiply_ahead<HEAD_DIM, kTight, kReadsAhead>(s, rows, x);
  multiply_beside(dp, rows + Tiles::RowsA::kBytes, y, [&](int product) {
    constexpr int kProducts = 2 * kStepsV;
#pragma unroll
    for (int r = product * M::kRegisters / kProducts; r < (product + 1) * M::kRegisters / kProducts; ++r) {
      float p = exp2(__builtin_fmaf(s[0][r], c.to_base_2, exponent[r]));
      pin(p);
      s[0][r] = p;
    }
  });
  if (at < mine.all_low || at + kTile > mine.all_high) {
    unsigned seen = seen_bits(c, c.own(0), at);
#pragma unroll
    // Where nothing is seen, not even a NaN of the row's.
    for (int r = 0; r < M::kRegisters; ++r) sums[r] += where(seen, bit_of(r), s[0][r] * dp[r]);
    return;
  }
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) sums[r] = __builtin_fmaf(s[0][r], dp[r], sums[r]);
}

// The same of scores of any kind.
DEVICE void add_general_tile(Acc &sums, Lds rows, const Context &c, const Quad (&x)[1][kSteps],
                             const Quad (&y)[1][kStepsV], Ahead &ahead, int head, int at) {
  ahead.load(at + kTile);
  Acc s[1] = {Acc{0}}, dp[1] = {Acc{0}};
  multiply<HEAD_DIM>(s, rows, x);
  Pair rounded[kFours];
  Weights w = weigh(s[0], rounded, c, Acc{0}, ahead.states, head, 0, at);
  fence();
  multiply<HEAD_DIM_V>(dp, rows + Tiles::RowsA::kBytes, y);
  Acc minus_delta = load_states(c, ahead.states.minus_delta, at);
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) {
    float g = where(w.keep, r, dp[0][r] * w.keep_scale);
    // Where nothing is seen, not even a NaN of the row's.
    sums[r] += where(w.seen, bit_of(r), (g + minus_delta[r]) * w.p[r]);
  }
}

// Asks for values now, with others: each in its place, they were waited for one by one.
template <typename... T>
DEVICE void ask_for(T... x) {
  pin_scalars(x...);
}

// Adds the gradient of one head's scores: of the rows from `first_row` on, all or kRows of them, against the
// kBlock keys at `key`. What it needs, it works out anew: kept from head to head, 17 scalar registers spilled.
DEVICE void add_head(Sums &sums, Lds lds, int batch, int head, int first_row, int key) {
  const Params &p = params_again();
  if (kBiasAlone)
    ask_for(p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_q, p.seqused_k, p.cache_batch_idx, p.cache_leftpad,
            p.seqlen_q, p.seqlen_k, p.window_left, p.window_right, p.q_start, p.k_start, p.scale, p.heads_q,
            p.heads_k, p.num_splits);
  Context c{sequence_of(p, batch), key + wave_index() * kTile, p.scale * kLog2E};
  Seen seen = seen_by(p, c.s, key, min(key + kBlock, c.s.keys) - 1);
  int start = first_row + max(seen.low - first_row, 0) / kRows * kRows;
  int stop = p.bias_row ? min(seen.high, first_row + kRows) : seen.high;
  // Lanes agree, but the compiler does not know it of a v_med3.
  start = __builtin_amdgcn_readfirstlane(start);
  stop = __builtin_amdgcn_readfirstlane(stop);
  if (start >= stop) return;
  int head_k = quotient(head, quotient(p.heads_q, p.heads_k));
  Quad x[1][kSteps], y[1][kStepsV];
  load_owned(c, x, k_of(p, c.s, head_k));
  load_owned(c, y, v_of(p, c.s, head_k));
  Ahead ahead{Tiles{wave_index()}, q_of(p, c.s, head), dout_of(p, c.s, head), states_of(p, c.s, head), c.s.rows, stop};
  Seen mine;
  if (kBiasAlone) {
    ahead.biases.seek(p, c, head, c.first);
    ahead.seek(start);
    mine = seen_by(p, c.s, c.first, min(c.first + kTile, c.s.keys) - 1);
    if (c.first + kTile > c.s.keys) mine.all_low = 0x7fffffff;
  }
  ahead.load(start);
  barrier();  // the tiles of the head before have been read
  for (int first = start; first < stop; first += kRows) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      int at = first + t * kTile;
      if (at >= stop) break;
      Lds rows = lds + t % 2 * kBufferBytes;
      ahead.tiles.store_rows(rows, rows + Tiles::RowsA::kBytes);
      barrier();  // its rows are there, and those of the tile before the last have been read
      if (kBiasAlone)
        add_tile(sums[t], rows, c, mine, x, y, ahead, at);
      else
        add_general_tile(sums[t], rows, c, x, y, ahead, head, at);
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

extern "C" __global__ WORKGROUP(kThreads, kPerSimd) void bias_grad(KERNEL_PARAMS p) {
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
