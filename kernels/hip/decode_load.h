// How keys come from memory to the registers of a decode kernel's wavefront: in groups of 16, each
// as the operands of 16 x 16 x 16 products, without LDS.
//   K  lane l holds key l % 16, of every 32 elements 8 (16-byte loads). The order of the inner
//      dimension is free, so that both halves of a load are operands; the query's are alike.
//   V  lane l holds 4 keys, of each head_dim_v / 16 neighbouring elements: 16 lanes load one whole
//      row. Row i of product j is element 8 i + j (of 128), and v_perm brings its 4 keys together.
#pragma once
#include "mma.h"
#include "../sequence.h"

typedef Mma<DTYPE, 16> M;
constexpr int kGroup = 16;                  // keys of one step of a wavefront
constexpr int kChunks = HEAD_DIM / 32;      // 16-byte pieces of a key that a lane holds
constexpr int kElements = HEAD_DIM_V / 16;  // of a value that a lane holds, and products
constexpr int kStages = STAGES;             // groups on their way to a wavefront

// A lane's elements are pieces of 8 while 128 of the row are left, then of 4, then of 2.
constexpr int kWide = HEAD_DIM_V / 128 * 8;
constexpr int kMiddle = kWide + HEAD_DIM_V % 128 / 64 * 4;

// The element of V that row `row` of product `e` stands for.
constexpr __device__ int dim_of(int e, int row) {
  if (e < kWide) return e / 8 * 128 + row * 8 + e % 8;
  if (e < kMiddle) return kWide * 16 + row * 4 + (e - kWide);
  return kMiddle * 16 + row * 2 + (e - kMiddle);
}

struct Group {
  Quad k[kChunks];
  unsigned v[4][kElements / 2];
};

// Byte offsets of the rows of kStages groups, from their head's first element.
struct RowTable {
  long long k[kStages * kGroup], v[kStages * kGroup];
};

// K or V of one head.
struct Source {
  const char *base;
  long long batch_stride, row_stride;  // in elements
  int head_dim;
};

struct Place {
  int page, row;  // the page is only set where there are pages
};

// Quotients by the page size without a division: `inverse` is floor((2^32 - 1) / size), and the
// estimate is the quotient or 1 less.
DEVICE void find(Place &place, const Params &p, const Sequence &s, unsigned inverse, int key) {
  place.row = (int)s.key0 + key;
  if (!p.page_table) return;
  unsigned position = key + s.padding, size = p.page_size;
  unsigned page = (unsigned)((unsigned long long)position * inverse >> 32);
  unsigned row = position - page * size;
  if (row >= size) {
    page += 1;
    row -= size;
  }
  place.row = row;
  place.page = int_at(p.page_table, s.batch * p.page_table_batch + page);
}

// What other lanes of the wavefront wrote to LDS before is visible after.
DEVICE void wave_fence() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

DEVICE void write_rows(RowTable &rows, const Source &k, const Source &v, int page, int row) {
  if (lane_index() < kStages * kGroup) {
    rows.k[lane_index()] = (page * k.batch_stride + row * k.row_stride) * 2;
    rows.v[lane_index()] = (page * v.batch_stride + row * v.row_stride) * 2;
  }
  wave_fence();
}

// A piece of a value, from element `e` of the lane on.
template <typename Piece>
DEVICE void load_piece(unsigned *v, const char *value, int e, const Source &source) {
  int size = sizeof(Piece) / 2;
  Piece x = *(const Piece *)(value + min(dim_of(e, M::column()), source.head_dim - size) * 2);
  __builtin_memcpy(v + e / 2, &x, sizeof(Piece));
}

// Group `n` of `rows`. Pieces beyond the head are read as the last one inside: they meet zeros of
// the query, or make rows of the output that nobody stores.
DEVICE void load(Group &group, const RowTable &rows, int n, const Source &k, const Source &v) {
  const char *key = k.base + rows.k[n * kGroup + M::column()];
  for (int c = 0; c < kChunks; ++c)
    group.k[c] = *(const Quad *)(key + min(c * 4 + M::part(), k.head_dim / 8 - 1) * 16);
  for (int i = 0; i < 4; ++i) {
    const char *value = v.base + rows.v[n * kGroup + M::part() * 4 + i];
    for (int e = 0; e < kWide; e += 8) load_piece<Quad>(group.v[i], value, e, v);
    for (int e = kWide; e < kMiddle; e += 4) load_piece<Pair>(group.v[i], value, e, v);
    for (int e = kMiddle; e < kElements; e += 2) load_piece<unsigned>(group.v[i], value, e, v);
  }
}
