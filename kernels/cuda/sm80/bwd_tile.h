// One tile of the backward: what a block knows, where things lie in its shared memory, and what the two
// halves of its warps make of Q, dO and its keys. The plan's constants are as attn_bwd.cu says.
#pragma once
#include "bwd_score.h"

constexpr int kRoleWarps = WARPS_K * WARPS_Q;
constexpr int kWarps = 2 * kRoleWarps;
constexpr int kThreads = kWarps * kLanes;
constexpr bool kHeld = WARPS_Q == 1;          // P and dS are where they are multiplied
constexpr bool kOneBarrier = BUFFERS == 2;
constexpr int kChunks = BLOCK_Q / WARPS_Q / CHUNK_Q;
static_assert(kChunks * CHUNK_Q * WARPS_Q == BLOCK_Q && (kHeld || kChunks == 1), "all rows are scored");

// Products of 16 x 8 that a warp makes.
constexpr int kScoreM = BLOCK_K / WARPS_K / 16, kScoreN = CHUNK_Q / 8;
constexpr int kKeyN = HEAD_DIM / WARPS_Q / 8, kValueN = HEAD_DIM_V / WARPS_Q / 8;
constexpr int kDqWarpsD = kWarps / DQ_WARPS_Q;
constexpr int kDqM = BLOCK_Q / DQ_WARPS_Q / 16, kDqN = HEAD_DIM / kDqWarpsD / 8;

// What a warp makes.
constexpr int kRoleP = 0;  // S, P and dV
constexpr int kRoleDs = 1;    // dP, dS and dK

typedef Tile<HEAD_DIM> HeadTile;
typedef Tile<HEAD_DIM_V> ValueTile;
typedef Tile<BLOCK_Q> ScoreTile;

// Shared memory.
constexpr int kStates = BLOCK_Q * 4;
constexpr int kScores = BLOCK_K * ScoreTile::kRowBytes;
constexpr int kK = 0;
constexpr int kV = kK + BLOCK_K * HeadTile::kRowBytes;
constexpr int kStage0 = kV + BLOCK_K * ValueTile::kRowBytes;
constexpr int kQ = 0;  // in a stage
constexpr int kDout = kQ + BLOCK_Q * HeadTile::kRowBytes;
constexpr int kMinusLse = kDout + BLOCK_Q * ValueTile::kRowBytes;
constexpr int kMinusDelta = kMinusLse + kStates;
constexpr int kStage = kMinusDelta + kStates;
constexpr int kP = kStage0 + 2 * kStage;
constexpr int kSlopes = kP + kScores;
constexpr int kBuffer0 = kSlopes + (GENERAL ? kScores : 0);
constexpr int kDots = kScores;  // in a buffer, behind dS
constexpr int kBuffer = kDots + (GENERAL ? WARPS_K * kStates : 0);
constexpr int kSharedBytes = kBuffer0 + BUFFERS * kBuffer;
static_assert(kSharedBytes == SHARED_BYTES, "as the plan says");
static_assert(kStage % 128 == 0 && kBuffer % 128 == 0, "tiles begin where their banks do");

// What a block does: tiles `begin` ... `end` of BLOCK_Q rows, of each head of the group.
struct Work {
  int batch, head_k, first_key;
  int begin, end;           // tiles
  int all_low, all_high;    // the rows that see all of the keys
  int warp;                 // in its role
};

// A head and a tile of it, in the order in which a block takes them, and where it lies.
struct Cursor {
  int head, tile, slot;
  METHOD void advance(const Work &w) {
    slot ^= 1;
    if (++tile == w.end) {
      tile = w.begin;
      ++head;
    }
  }
};

// Barriers of a few warps; number 0 is that of the block.
template <int threads>
DEVICE void arrive(int number) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(threads) : "memory");
}
template <int threads>
DEVICE void sync(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(threads) : "memory");
}
// P of a warp's chunk is there for the warp that needs it for dS.
DEVICE int handed(int warp, int chunk) { return 1 + warp * kChunks + chunk; }
// P or dS of some keys is there for all warps of the role that multiply with it.
DEVICE int shared_keys(int role, int warp) {
  return 1 + kRoleWarps * kChunks + role * WARPS_K + warp / WARPS_Q;
}
static_assert(1 + kRoleWarps * kChunks + (kHeld ? 0 : 2 * WARPS_K) <= 16, "there are 16 barriers");

typedef Packed<kScoreM, kScoreN> Half;

// Between the registers and a tile of 16-bit scores.
DEVICE void store_half(Shared tile, int key, int row, const Half &x) {
#pragma unroll
  for (int i = 0; i < kScoreM; ++i)
#pragma unroll
    for (int j = 0; j < kScoreN / 2; ++j)
      store_matrices<ScoreTile>(tile, key + i * 16, row + j * 16, x.x[i][j]);
}
DEVICE void load_half(Shared tile, int key, int row, Half &x) {
#pragma unroll
  for (int j = 0; j < kScoreN / 2; ++j) {
    Shared at = ScoreTile::move(tile + lane_down<ScoreTile>(), key, row / 8 + 2 * j);
#pragma unroll
    for (int i = 0; i < kScoreM; ++i) ldmatrix(x.x[i][j], ScoreTile::move(at, i * 16, 0));
  }
}

// P in shared memory as an operand: what dropout drops is 0.
struct Kept {
  Along<ScoreTile> weights;
  METHOD void load(unsigned (&x)[4], int i, int k) const {
    weights.load(x, i, k);
    if (GENERAL)
      for (int r = 0; r < 4; ++r) x[r] = kept_only(x[r]);
  }
};

template <int n>
DEVICE void add_dots(const float (&dots)[n][2], Shared to) {
#pragma unroll
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = dots[j][r];
      for (int bit = 4; bit < kLanes; bit *= 2) sum += from_lane_xor(sum, bit);
      if (lane_index() < 4) store_float(to + (j * 8 + lane_index() * 2 + r) * 4, sum);
    }
}

// P of a warp's keys, and what it adds to dV.
DEVICE void make_p(const Params &p, const Work &w, const Cursor &at, Shared shared,
                               Shared buffer, float (&dv)[kScoreM][kValueN][4]) {
  Shared stage = shared + kStage0 + at.slot * kStage;
  int warp = w.warp, key = warp / WARPS_Q * (kScoreM * 16);
  Half weights;
#pragma unroll 1  // or what is run once a block no longer fits the instruction cache beside it
  for (int c = 0; c < kChunks; ++c) {
    int row = (warp % WARPS_Q * kChunks + c) * CHUNK_Q, first = at.tile * BLOCK_Q;
    Place place{w.batch, at.head, w.first_key + key, first + row};
    float s[kScoreM][kScoreN][4];
    clear(s);
    multiply<DTYPE, HEAD_DIM / 16>(s, a_along<HeadTile>(shared + kK, key),
                                   b_along<HeadTile>(stage + kQ, row));
    Shared minus_lse = stage + kMinusLse + row * 4;
    if constexpr (GENERAL) {
      Half rests, slopes;
      weigh(p, place, s, minus_lse, weights, rests, slopes);
      store_half(buffer, key, row, rests);  // where dS will be
      if (has_slopes(p)) store_half(shared + kSlopes, key, row, slopes);
    } else {
      float scale = p.scale * kLog2E;
#pragma unroll
      for (int j = 0; j < kScoreN; ++j) {
        float lse[2];
        load_pair(lse, minus_lse + j * 32 + lane_index() % 4 * 8);
#pragma unroll
        for (int i = 0; i < kScoreM; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r)
            s[i][j][r] = exp2(__builtin_fmaf(s[i][j][r], scale, lse[r % 2]));
      }
      if (first < w.all_low || first + BLOCK_Q > w.all_high) apply_mask(p, place, s);
      round<DTYPE>(weights.x, s);
    }
    store_half(shared + kP, key, row, weights);
    arrive<2 * kLanes>(handed(warp, c));
    if constexpr (kHeld) {
      if (GENERAL)
#pragma unroll
        for (int i = 0; i < kScoreM * kScoreN * 2; ++i) {
          unsigned &x = weights.x[i / kScoreN / 2][i / 4 % (kScoreN / 2)][i % 4];
          x = kept_only(x);
        }
      multiply<DTYPE, CHUNK_Q / 16>(dv, Held<kScoreM, kScoreN / 2>{weights.x},
                                    b_down<ValueTile, 1>(stage + kDout + row * ValueTile::kRowBytes, 0));
    }
  }
  if constexpr (!kHeld) {
    sync<WARPS_Q * kLanes>(shared_keys(kRoleP, warp));
    multiply<DTYPE, BLOCK_Q / 16>(dv, Kept{a_along<ScoreTile>(shared + kP, key)},
                                  b_down<ValueTile, WARPS_Q>(stage + kDout, warp % WARPS_Q));
  }
}

// dS of a warp's keys, and what it adds to dK.
DEVICE void make_ds(const Params &p, const Work &w, const Cursor &at, Shared shared,
                             Shared buffer, float (&dk)[kScoreM][kKeyN][4]) {
  Shared stage = shared + kStage0 + at.slot * kStage;
  int warp = w.warp, key = warp / WARPS_Q * (kScoreM * 16);
#pragma unroll 1  // or what is run once a block no longer fits the instruction cache beside it
  for (int c = 0; c < kChunks; ++c) {
    int row = (warp % WARPS_Q * kChunks + c) * CHUNK_Q;
    Shared minus_delta = stage + kMinusDelta + row * 4;
    float dp[kScoreM][kScoreN][4];
    if constexpr (GENERAL) {
      clear(dp);
    } else {
#pragma unroll
      for (int j = 0; j < kScoreN; ++j) {
        float delta[2];
        load_pair(delta, minus_delta + j * 32 + lane_index() % 4 * 8);
#pragma unroll
        for (int i = 0; i < kScoreM; ++i)
#pragma unroll
          for (int r = 0; r < 4; ++r) dp[i][j][r] = delta[r % 2];  // no instruction subtracts it
      }
    }
    multiply<DTYPE, HEAD_DIM_V / 16>(dp, a_along<ValueTile>(shared + kV, key),
                                     b_along<ValueTile>(stage + kDout, row));
    sync<2 * kLanes>(handed(warp, c));
    Half weights;
    load_half(shared + kP, key, row, weights);
    if constexpr (GENERAL) {
      Half rests;
      load_half(buffer, key, row, rests);
      float dots[kScoreN][2];
      differ(p, dp, minus_delta, weights, rests, dots);
      if (has_slopes(p)) {
        load_half(shared + kSlopes, key, row, rests);
        steepen(dp, rests);
      }
      if (p.dsinks) add_dots(dots, buffer + kDots + warp / WARPS_Q * kStates + row * 4);
    } else {
#pragma unroll
      for (int i = 0; i < kScoreM; ++i)
#pragma unroll
        for (int j = 0; j < kScoreN; ++j)
#pragma unroll
          for (int r = 0; r < 4; ++r)
            dp[i][j][r] *= low_half<DTYPE>(weights.pair(i, j, r / 2) >> r % 2 * 16);
    }
    Half ds;
    round<DTYPE>(ds.x, dp);
    store_half(buffer, key, row, ds);
    if constexpr (kHeld)
      multiply<DTYPE, CHUNK_Q / 16>(dk, Held<kScoreM, kScoreN / 2>{ds.x},
                                    b_down<HeadTile, 1>(stage + kQ + row * HeadTile::kRowBytes, 0));
  }
  if constexpr (!kHeld) {
    sync<WARPS_Q * kLanes>(shared_keys(kRoleDs, warp));
    multiply<DTYPE, BLOCK_Q / 16>(dk, a_along<ScoreTile>(buffer, key),
                                  b_down<HeadTile, WARPS_Q>(stage + kQ, warp % WARPS_Q));
  }
}
