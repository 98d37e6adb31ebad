// What float8 adds to the forward on Hopper: V is transposed before the products, and scales.
//
// wgmma takes 8-bit operands only if the inner dimension is contiguous. For P V that dimension is the keys.
// So three producer warps rewrite each tile of V, 16 keys by 32 elements at a time: ldmatrix transposes
// pairs of bytes, prmt splits the pairs, stmatrix puts 16 keys of one element of the head into one unit.
//
// The keys may stand in any order, as long as P has the same one. A lane has the scores of keys 2 pair,
// 2 pair + 1, 8 + 2 pair, 8 + 2 pair + 1 of every 16 (wgmma.h), and one register of the operand holds places
// 4 pair ... 4 pair + 3. So the keys go in that order, and P needs no exchange between lanes. prmt finds the
// bytes of two matrices, keys 0 ... 7 and 8 ... 15, in the same order.
#pragma once
#include "fwd_tile.h"
#include "../order.h"

constexpr int kTransposers = 3;  // producer warps that transpose V
constexpr int kTransposedRow = BLOCK_K % 128 == 0 ? 128 : BLOCK_K % 64 == 0 ? 64 : 32;  // bytes of a panel
constexpr int kTransposedPanel = HEAD_DIM_V * kTransposedRow;
static_assert(!kFloat8 || (BLOCK_K % 32 == 0 && HEAD_DIM_V % 32 == 0), "whole products, whole units");

// Where a unit of a row of `bytes` lies, swizzled as tma.h says.
template <int bytes>
DEVICE int swizzled(int row, int unit) {
  return row * bytes + (unit ^ row * bytes / kLine % (bytes / 16)) * 16;
}

// One warp's share of a tile: panels of `row_bytes` become panels of kTransposedRow. Keys from `valid` on
// become 0: what lies there may be NaN, and P's 0 times NaN is NaN. `whole`: all keys are valid. Then no
// bytes are masked, which saves 16 `and` per 16 keys and gains 5 % at D = 128, because a transposing warp
// takes issue slots from one warp of each consumer warpgroup. Each load is issued before the store of the
// one before it: another 5 % at D = 256, where products wait for V.
template <int row_bytes, bool whole>
DEVICE void transpose_tile(Shared from, Shared to, int warp, int valid) {
  constexpr int kUnits = row_bytes / 16, kTransposedUnits = kTransposedRow / 16;
  constexpr bool kOnePanel = BLOCK_K == kTransposedRow;
  int lane = lane_index(), row = lane % 8, pair = lane % 4;
  Shared read = swizzled<row_bytes>(lane % 16, lane / 16);
  // Elements 0, 2, 4, 6, 9, 11, 13, 15 of 16 are one matrix, the rest is another. These eight rows lie in
  // different banks; eight even ones would not. So half of the lanes split their pairs the other way round.
  int element = lane / 16 * 16 + 2 * row + ((row >= 4) ^ (lane / 8 & 1));
  unsigned selectors[2] = {0x6420, 0x7531};
  bool crossed = lane >= 16;
#pragma unroll 1
  for (unsigned keys = warp; keys < BLOCK_K / 16; keys += kTransposers) {
    Shared source = from + keys * 16 * row_bytes;
    Shared target = to + (kOnePanel ? 0 : keys / kTransposedUnits * kTransposedPanel) +
                    swizzled<kTransposedRow>(element, kOnePanel ? keys : keys % kTransposedUnits);
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
        y[j] = __byte_perm(x[i % 2][j & 2], x[i % 2][j | 1],
                           crossed ? selectors[j + 1 & 1] : selectors[j & 1]) &
               kept;
      stmatrix(target + i * 32 * kTransposedRow, y);
    }
  }
}

// ---- scales -------------------------------------------------------------------------------------

// Scales of heads: what a head's scores and its output are multiplied by.
struct alignas(16) HeadScales {
  float scores, values;
};
DEVICE HeadScales head_scales(const Params &p, int batch, int head) {
  if (kBlockScaled || !p.k_descale) return HeadScales{1.0f, 1.0f};
  int head_k = divide(head, p.group_inverse);
  auto at = [&](const void *scales, long long by_batch, long long by_head) {
    return ((const float *)scales)[batch * by_batch + head_k * by_head];
  };
  return HeadScales{at(p.q_descale, p.q_descale_batch, p.q_descale_head) *
                        at(p.k_descale, p.k_descale_batch, p.k_descale_head),
                    at(p.v_descale, p.v_descale_batch, p.v_descale_head)};
}

// Scales of blocks, of one head: 2^log2 neighboring rows in memory share one.
struct BlockScales {
  const float *at;
  int step, log2;
  long long first;  // row of the sequence
  METHOD int block(int row) const { return (int)((first + row) >> log2); }
  METHOD float of_block(int block) const { return at[(long long)block * step]; }
  METHOD float of(int row) const { return of_block(block(row)); }
};

// The same of rows in pages, each of which begins with a block. Blocks are counted as the sequence has them.
struct PagedScales {
  const float *at;
  int step, log2;
  const int *pages;
  int page_size, of_page;  // blocks of a page
  long long page_stride;
  METHOD int block(int row) const { return row / page_size * of_page + (row % page_size >> log2); }
  METHOD float of_block(int block) const {
    return at[pages[block / of_page] * page_stride + (long long)(block % of_page) * step];
  }
  METHOD float of(int row) const { return of_block(block(row)); }
};
#if PAGE_ROWS
typedef PagedScales KeyScales;
#else
typedef BlockScales KeyScales;
#endif

// Scales of blocks that a lane applies: of its rows, of keys and of values.
struct TileScales {
  KeyScales keys, values;
  float rows[2];
  int last_key;

  // `row`: the lane's first one.
  METHOD TileScales(const Params &p, int batch, int head, int row) {
    if constexpr (!kBlockScaled) return;
    Sequence s = sequence_of(p, batch);
    int head_k = divide(head, p.group_inverse);
    auto scales = [&](const void *all, long long by_batch, long long by_head, int step, int log2, int of,
                      long long first) {
      return BlockScales{(const float *)all + of * by_batch + head_k * by_head, step, log2, first};
    };
    BlockScales queries = scales(p.q_descale, p.q_descale_batch, p.q_descale_head, p.q_descale_block,
                                 p.q_block_log2, s.row_batch, s.row0);
#if PAGE_ROWS
    int of_page = (p.page_size + (1 << p.k_block_log2) - 1) >> p.k_block_log2;
    auto in_pages = [&](const void *all, long long by_page, long long by_head, int step) {
      return PagedScales{(const float *)all + head_k * by_head, step, p.k_block_log2,
                         (const int *)p.page_table + s.batch * p.page_table_batch, p.page_size, of_page,
                         by_page};
    };
    keys = in_pages(p.k_descale, p.k_descale_batch, p.k_descale_head, p.k_descale_block);
    values = in_pages(p.v_descale, p.v_descale_batch, p.v_descale_head, p.v_descale_block);
#else
    keys = scales(p.k_descale, p.k_descale_batch, p.k_descale_head, p.k_descale_block, p.k_block_log2,
                  s.key_batch, s.key0);
    values = scales(p.v_descale, p.v_descale_batch, p.v_descale_head, p.v_descale_block, p.k_block_log2,
                    s.key_batch, s.key0);
#endif
#pragma unroll
    for (int h = 0; h < 2; ++h) rows[h] = queries.of(min(row + 8 * h, s.rows - 1));
    last_key = s.keys - 1;
  }

  // Multiplies both rows' elements of the k-slices [from, to) by f(scale of the key). If these keys share
  // one scale, it is read once.
  template <typename F>
  METHOD void each_key(Scores &x, const KeyScales &scales, int tile, int from, int to, F f) const {
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
  // Brings v's scales into P: each k-slice of P becomes a multiple of the slice's largest scale, units[i].
  // A slice with one scale keeps its P, so that rounding is the same as without scales.
  METHOD void scale_probabilities(Scores &x, int tile, float (&units)[kSlices]) const {
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      int first = tile * BLOCK_K + i * kInner;
      int last = values.block(min(first + kInner - 1, last_key));
      float largest = kLeastScale;
#pragma unroll 1
      for (int block = values.block(min(first, last_key)); block <= last; ++block)
        largest = __builtin_fmaxf(largest, __builtin_fabsf(values.of_block(block)));
      each_key(x, values, tile, i, i + 1, [&](float scale) { return scale / largest; });
      units[i] = largest;
    }
  }
};
