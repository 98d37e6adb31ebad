// Where the one-pass backward adds up dQ: in float32, in tiles of 16 rows of one head, there as the lanes
// of the 16 x 16 products of dQ^T hold it, one register of all lanes after the other: an addition is 256
// bytes a wavefront without gaps. Tiles go by sequence, then by row, then by head. A sequence of a packed
// batch begins at the tile that leaves one to spare for each sequence before it.
#pragma once
#include "device.h"
#include "../sequence.h"

constexpr int kSumRows = 16;  // of a tile

// Number of the tile that begins at `row`, a multiple of kSumRows, of a head.
DEVICE long long sum_tile(const Params &p, const Sequence &s, int row, int head) {
  long long first = p.cu_seqlens_q
                        ? s.row0 / kSumRows + s.batch
                        : (long long)s.batch * ((p.seqlen_q + kSumRows - 1) / kSumRows);
  return (first + row / kSumRows) * p.heads_q + head;
}
