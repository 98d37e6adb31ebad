// Which keys and rows the scores of backward in a warp's registers are, and which of them dropout keeps.
#pragma once
#include "device.h"
#include "../params.h"
#include "../philox.h"

// A warp's part of a tile.
struct Place {
  int batch, head;
  int key, row;   // its first ones
};

// Which of them register r of product (i, j) is.
DEVICE int key_of(const Place &at, int i, int r) {
  return at.key + i * 16 + lane_index() / 4 + r / 2 * 8;
}
DEVICE int row_of(const Place &at, int j, int r) {
  return at.row + j * 8 + lane_index() % 4 * 2 + r % 2;
}

// Which of a product's four scores dropout keeps: bit r. A draw serves four keys, which are those of
// four lanes: each draws for one register and they exchange what came out.
DEVICE unsigned kept(const Params &p, const Place &at, int i, int j) {
  unsigned turn = lane_index() / 4 % 4;
  Draws draws = philox((unsigned)(key_of(at, i, turn) + p.k_start) / 4, row_of(at, j, turn) + p.q_start,
                       at.head + p.head_start, at.batch + p.batch_start,
                       *(const unsigned long long *)p.seed);
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) bits |= (draws.word[k] < p.dropout_threshold ? 1u : 0u) << (4 * turn + k);
  bits |= __shfl_xor_sync(kAllLanes, bits, 4);
  bits |= __shfl_xor_sync(kAllLanes, bits, 8);
  bits >>= turn;
  return (bits & 1) | (bits >> 3 & 2) | (bits >> 6 & 4) | (bits >> 9 & 8);
}
