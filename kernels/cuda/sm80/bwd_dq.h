// The layout of the dQ accumulator: float32, in tiles of BLOCK_Q rows of one head. In a tile the 16 x 8
// products are stored one after the other, in the order in which the lanes of a warp hold them, so that an
// addition covers 16 bytes per lane and 512 contiguous bytes per warp. The products are of dQ or, transposed,
// of dQ^T. Tiles are ordered by sequence, then by row, then by head. After each sequence of a packed batch
// one tile is left free.
#pragma once
#include "../device.h"
#include "../../sequence.h"

constexpr int kQTile = BLOCK_Q * HEAD_DIM;

// Number of the tile that begins at `row`, a multiple of BLOCK_Q, of a head.
DEVICE long long q_tile(const Params &p, const Sequence &s, int row, int head) {
  long long first = p.cu_seqlens_q ? s.row0 / BLOCK_Q + s.batch
                                   : (long long)s.batch * ((p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q);
  return (first + row / BLOCK_Q) * p.heads_q + head;
}

// Whether row_sums leaves the sums unset: in attn_bwd, the first block that reaches a tile stores its sums or writes
// zeros (../sm90/bwd_first.h). At head_dim 64 a causal mask over more than 8,192 keys keeps row_sums' zeros: the blocks
// that are ahead would write most of them, and the backward of 16,384 tokens would take 1.02 times as long (H200).
#ifndef DQ_UNSET
#define DQ_UNSET 0
#endif
DEVICE bool dq_unset(const Params &p) {
  bool causal = p.window_left < 0 && p.window_right >= 0;
  return DQ_UNSET && (HEAD_DIM > 64 || p.counter || !causal || p.seqlen_k <= 8192);
}
// The states of all tiles follow the sums of all tiles. Where blocks take turns (p.counter), the states are the counts
// of turns, and 0 is kUntouched there, too.
enum TileState { kUntouched, kClaimed, kSet };
DEVICE int *tile_states(const Params &p) {
  if (p.counter) return (int *)p.counter;
  long long tiles = p.cu_seqlens_q ? p.lse_head / BLOCK_Q + p.batch
                                   : (long long)p.batch * ((p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q);
  return (int *)p.dq_accum + tiles * p.heads_q * kQTile;
}

// The rows of a head that a block of the kernels before and after attn_bwd has: one tile. Of a packed batch blocks
// are numbered as tiles are, so that there are few beyond the sequences' ends.
//
// The last tiles come first. attn_bwd begins with the first ones, whose rows and zeros row_sums has then left in the L2,
// and ends with the last ones, whose sums dq_convert finds there. Of 8,192 tokens with a window of 128 keys the
// backward takes 0.97 of the time, of ViT-B's 64 x 197 tokens 0.95, of 16 x 1,024 tokens 0.99 (H200).
struct RowsOfBlock {
  Sequence s;
  int head, first;
  METHOD RowsOfBlock(const Params &p) {
    int id = (int)gridDim.x - 1 - workgroup_index(), tiles = (p.seqlen_q + BLOCK_Q - 1) / BLOCK_Q;
    int batch = id / tiles / p.heads_q;
    head = id / tiles % p.heads_q;
    first = id % tiles * BLOCK_Q;
    if (p.cu_seqlens_q) {
      head = id % p.heads_q;
      id /= p.heads_q;
      batch = 0;
      for (int end = p.batch; end - batch > 1;) {
        int middle = (batch + end) / 2;
        (int_at(p.cu_seqlens_q, middle) / BLOCK_Q + middle <= id ? batch : end) = middle;
      }
      first = (id - int_at(p.cu_seqlens_q, batch) / BLOCK_Q - batch) * BLOCK_Q;
    }
    s = sequence_of(p, batch);
  }
};

// Of the product at rows 16 m and columns 8 n of a tile.
template <bool transposed>
DEVICE constexpr int q_product(int m, int n) {
  return (m * ((transposed ? BLOCK_Q : HEAD_DIM) / 8) + n) * 128;
}

#if __CUDA_ARCH__ >= 900
// Four elements of a lane are contiguous.
constexpr int kLaneStep = 4;
DEVICE void add(float *to, const float (&x)[4]) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(x[0]), "f"(x[1]),
               "f"(x[2]), "f"(x[3])
               : "memory");
}
// A lane's four.
DEVICE void read(float (&x)[4], const float *from) {
  float4 all = *(const float4 *)from;
  x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
}
#else
// The same element of all lanes is contiguous: an addition is of one element.
constexpr int kLaneStep = 1, kElementStep = 32;
DEVICE void add(float *to, const float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to + i * kElementStep), "f"(x[i])
                 : "memory");
}
DEVICE void read(float (&x)[4], const float *from) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = from[i * kElementStep];
}
#endif
