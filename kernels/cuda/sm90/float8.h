// What float8 adds to the forward on Hopper: the scales, and V turned on its way to the products.
//
// wgmma takes 8-bit operands only with the inner dimension contiguous, which for P V is the keys. So warps
// beside the one that copies rewrite each tile of V, 16 keys by 32 elements at a time: ldmatrix transposes
// pairs of bytes, prmt parts the pairs, stmatrix puts 16 keys of one element of the head into one unit.
//
// In which order keys stand there is free, as long as P's are in the same. A lane has the scores of keys
// 2 pair, 2 pair + 1, 8 + 2 pair, 8 + 2 pair + 1 of every 16 (wgmma.h), and an operand's register is places
// 4 pair ... 4 pair + 3: so that is the order, and P needs no exchange between lanes. It is also the one in
// which prmt finds the bytes of two matrices, keys 0 ... 7 and 8 ... 15.
#pragma once
#include "fwd_tile.h"

constexpr int kTurners = 3;  // warps that turn V
constexpr int kTurnedRow = BLOCK_K % 128 == 0 ? 128 : BLOCK_K % 64 == 0 ? 64 : 32;  // bytes of a panel
constexpr int kTurnedPanel = HEAD_DIM_V * kTurnedRow;
static_assert(!kFloat8 || (BLOCK_K % 32 == 0 && HEAD_DIM_V % 32 == 0), "whole products, whole units");

// Where a unit of a row of `bytes` lies, swizzled as tma.h says.
template <int bytes>
DEVICE int swizzled(int row, int unit) {
  return row * bytes + (unit ^ row * bytes / kLine % (bytes / 16)) * 16;
}

// One warp's share of a tile: panels of `row_bytes` become panels of kTurnedRow. Keys from `valid` on become
// 0: memory there may hold anything, and P's 0 does not make 0 of a NaN. `whole`: there are none of these.
// A warp that turns takes issue slots from one of each group: without the 16 `and` of 16 keys, D = 128 gains
// 5 %. Each load is asked for ahead of the store before it: another 5 % at D = 256, where products wait for V.
template <int row_bytes, bool whole>
DEVICE void turn(Shared from, Shared to, int warp, int valid) {
  constexpr int kUnits = row_bytes / 16, kTurnedUnits = kTurnedRow / 16;
  constexpr bool kOnePanel = BLOCK_K == kTurnedRow;
  int lane = lane_index(), row = lane % 8, pair = lane % 4;
  Shared read = swizzled<row_bytes>(lane % 16, lane / 16);
  // Elements 0, 2, 4, 6, 9, 11, 13, 15 of 16 are one matrix and the rest another: eight rows that lie in
  // different banks, which eight even ones would not. So half of the lanes part their pairs the other way
  // round.
  int element = lane / 16 * 16 + 2 * row + ((row >= 4) ^ (lane / 8 & 1));
  unsigned parts[2] = {0x6420, 0x7531};
  bool crossed = lane >= 16;
#pragma unroll 1
  for (unsigned keys = warp; keys < BLOCK_K / 16; keys += kTurners) {
    Shared source = from + keys * 16 * row_bytes;
    Shared target = to + (kOnePanel ? 0 : keys / kTurnedUnits * kTurnedPanel) +
                    swizzled<kTurnedRow>(element, kOnePanel ? keys : keys % kTurnedUnits);
    unsigned kept = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (whole || (int)keys * 16 + i / 2 * 8 + 2 * pair + i % 2 < valid) kept |= 0xffu << 8 * i;
    unsigned x[2][4];
    auto load = [&](int i) {
      int unit = 2 * i % kUnits, panel = 2 * i / kUnits;
      ldmatrix_transposed(x[i % 2], source + panel * (BLOCK_K * row_bytes) + (read ^ unit * 16));
    };
    load(0);
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 32; ++i) {
      if (i + 1 < HEAD_DIM_V / 32) load(i + 1);
      unsigned y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        y[j] = __byte_perm(x[i % 2][j & 2], x[i % 2][j | 1], crossed ? parts[j + 1 & 1] : parts[j & 1]) & kept;
      stmatrix(target + i * 32 * kTurnedRow, y);
    }
  }
}

// ---- scales -------------------------------------------------------------------------------------

// What the scores of a head, and its output, are multiplied by, where scales are of whole heads.
struct alignas(16) HeadScales {
  float scores, values;
};
DEVICE HeadScales head_scales(const Params &p, int batch, int head) {
  if (kBlocks || !p.k_descale) return HeadScales{1.0f, 1.0f};
  int head_k = head / (p.heads_q / p.heads_k);
  auto at = [&](const void *scales, long long by_batch, long long by_head) {
    return ((const float *)scales)[batch * by_batch + head_k * by_head];
  };
  return HeadScales{at(p.q_descale, p.q_descale_batch, p.q_descale_head) *
                        at(p.k_descale, p.k_descale_batch, p.k_descale_head),
                    at(p.v_descale, p.v_descale_batch, p.v_descale_head)};
}

// Of one head: those of its blocks of rows, which lie as the rows do in memory.
struct BlockScales {
  const float *at;
  int step, log2;
  long long first;  // row of the sequence
  METHOD int block(int row) const { return (int)((first + row) >> log2); }
  METHOD float of(int row) const { return at[(long long)block(row) * step]; }
};

// The scales of a sequence and head.
struct Blocks {
  BlockScales keys, values;
  float rows[2];
  int last_key;

  // `row`: the lane's first one.
  METHOD Blocks(const Params &p, int batch, int head, int row) {
    if constexpr (!kBlocks) return;
    Sequence s = sequence_of(p, batch);
    int head_k = head / (p.heads_q / p.heads_k);
    auto scales = [&](const void *all, long long by_batch, long long by_head, int step, int log2, int of,
                      long long first) {
      return BlockScales{(const float *)all + of * by_batch + head_k * by_head, step, log2, first};
    };
    BlockScales queries = scales(p.q_descale, p.q_descale_batch, p.q_descale_head, p.q_descale_block,
                                 p.q_block_log2, s.row_batch, s.row0);
    keys = scales(p.k_descale, p.k_descale_batch, p.k_descale_head, p.k_descale_block, p.k_block_log2,
                  s.key_batch, s.key0);
    values = scales(p.v_descale, p.v_descale_batch, p.v_descale_head, p.v_descale_block, p.k_block_log2,
                    s.key_batch, s.key0);
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h] = queries.of(min(row + 8 * h, s.rows - 1));
    last_key = s.keys - 1;
  }

  // Both rows' elements of the keys of slices [from, to) times f(their scales). Where these share one it is
  // read once.
  template <typename F>
  METHOD void each_key(Scores &x, const BlockScales &scales, int tile, int from, int to, F f) const {
    int first = min(tile * BLOCK_K + from * kInner, last_key);
    int last = min(tile * BLOCK_K + to * kInner - 1, last_key);
    bool shared = scales.block(first) == scales.block(last);
    float one = f(scales.of(first));
#pragma unroll
    for (int t = from * (kInner / 8); t < to * (kInner / 8); ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float factor = shared ? one : f(scales.of(min(first_key(tile) + 8 * t + i, last_key)));
        x[4 * t + i] *= factor;
        x[4 * t + 2 + i] *= factor;
      }
  }
  METHOD void scale_scores(Scores &x, int tile) const {
    each_key(x, keys, tile, 0, kSlices, [](float scale) { return scale; });
#pragma unroll
    for (int h = 0; h < 2; ++h) each(x, h, [&](float s, int) { return s * rows[h]; });
  }
  // Probabilities become multiples of their slice's largest scale, `units`: they stay what they are, and are
  // rounded as without, where a slice has one scale.
  METHOD void scale_probabilities(Scores &x, int tile, float (&units)[kSlices]) const {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      int first = tile * BLOCK_K + i * kInner;
      int last = values.block(min(first + kInner - 1, last_key));
      float largest = kLeastScale;
#pragma unroll 1
      for (int block = values.block(min(first, last_key)); block <= last; ++block)
        largest = __builtin_fmaxf(largest, __builtin_fabsf(values.at[(long long)block * values.step]));
      each_key(x, values, tile, i, i + 1, [&](float scale) { return scale / largest; });
      units[i] = largest;
    }
  }
};
