// How keys come from memory to the registers of a decode kernel's wavefront: in groups of 16, each
// as the operands of 16 x 16 x 16 products, without LDS.
//   K  lane l holds key l % 16, of every 32 elements 8 (16-byte loads). The order of the inner
//      dimension is free, so that both halves of a load are operands; the query's are alike.
//   V  lane l holds 4 keys, of each head_dim_v / 16 neighboring elements: 16 lanes load one whole
//      row. Row i of product j is element 8 i + j (of 128), and v_perm brings its 4 keys together.
//      Where V is a view of K (LATENT) it is not loaded: keys pass from registers through LDS, 256 bytes
//      of each at a time, and come back in this form.
// Float8 keys and values stay 8 bits wide in registers until the step that multiplies them: there
// they become DTYPE, exactly. Of K a lane holds 16 of every 64 elements, then 8 of the last 32.
#pragma once
#include "mma.h"
#include "descale.h"
#include "pages.h"

typedef Mma<DTYPE, 16> M;
constexpr bool kFloat8 = KEY_DTYPE == FLOAT8;
constexpr int kSize = kFloat8 ? 1 : 2;      // bytes of an element of K and V
constexpr int kGroup = 16;                  // keys of one step of a wavefront
constexpr int kChunks = HEAD_DIM / 32;      // 16-byte pieces of a query that a lane holds
constexpr int kElements = HEAD_DIM_V / 16;  // of a value that a lane holds, and products
constexpr int kStages = STAGES;             // groups on their way to a wavefront
constexpr int kKeys = kStages * kGroup;
constexpr int kFound = (kKeys + kLanes - 1) / kLanes;  // of these, that a lane finds
static_assert(kFound <= 2, "see each_found");

constexpr int kKeyPieces = HEAD_DIM * kSize / 64;  // of 16 bytes, that a lane holds of a key
constexpr int kHalfPieces = HEAD_DIM * kSize % 64 / 32;
constexpr int kPaired = kKeyPieces * 2;  // pieces of a query that meet halves of float8 ones

// A lane's elements are pieces of 8 while 128 of the row are left, then of 4, then of 2.
constexpr int kWide = HEAD_DIM_V / 128 * 8;
constexpr int kMiddle = kWide + HEAD_DIM_V % 128 / 64 * 4;

// The element of V that row `row` of product `e` stands for.
constexpr __device__ int dim_of(int e, int row) {
  if (e < kWide) return e / 8 * 128 + row * 8 + e % 8;
  if (e < kMiddle) return kWide * 16 + row * 4 + (e - kWide);
  return kMiddle * 16 + row * 2 + (e - kMiddle);
}

// Keys on their way to values, 256 bytes of each of a group, in pieces of 16 bytes.
constexpr int kTurnBytes = 256;
constexpr int kTurnProducts = kTurnBytes / kSize / 16;
struct Turn {
  Quad piece[kGroup][kTurnBytes / 16];
};
static_assert(!LATENT || HEAD_DIM_V * kSize % kTurnBytes == 0, "turns are whole");

// Where a key's piece lies in its row. Eight lanes write the same piece of neighboring keys, and read four
// neighboring pieces of one key with the four next to them of the fourth key behind: both touch every bank
// once.
constexpr __device__ int place_of_piece(int piece, int key) {
  return piece ^ ((key >> 1 & 3) | (key & 1) << 2);
}

struct Group {
  unsigned k[HEAD_DIM * kSize / 16];
  unsigned v[4][(kElements * kSize + 3) / 4];
};

// Byte offsets of the rows of kStages groups, from their head's first element.
struct RowTable {
  long long k[kKeys], v[kKeys];
};

// The scales of kStages groups.
struct ScaleTable {
  float k[kKeys], v[kKeys];
};

// K or V of one head.
struct Source {
  const char *base;
  long long batch_stride, row_stride;  // in elements
  int head_dim;
};

// f(i, n) for the i-th key that the lane finds, the n-th of a table.
template <typename F>
DEVICE void each_found(F f) {
  f(0, lane_index());
  if constexpr (kFound == 2) f(1, lane_index() + kLanes);
}

DEVICE void find(Place &place, const Params &p, const Sequence &s, unsigned inverse, int key) {
  place.row = (int)s.key0 + key;
  if (p.page_table) find_in_pages(place, table_of(p, s), p.page_size, inverse, key + s.padding);
}

// The scales of a key that was found. Registers stay as they are where there are none: see `find`.
DEVICE void find_scales(KeyScales &scales, const Sequence &s, int head, const Place &place) {
  const Params &p = params_again();
  if (!p.k_descale) return;
  long long stored = p.descale_type == 1 ? s.batch : p.page_table ? place.page : s.key_batch;
  scales = scales_of_block(p, stored, head, place.row >> p.k_block_log2);
}

// What other lanes of the wavefront wrote to LDS before is visible after.
DEVICE void wave_fence() {
  __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
  __builtin_amdgcn_wave_barrier();
}

DEVICE void write_row(RowTable &rows, int n, const Source &k, const Source &v, unsigned page, unsigned row) {
  if (n < kKeys) {
    rows.k[n] = multiply_add(page, k.batch_stride, multiply_add(row, k.row_stride, 0)) * kSize;
    if constexpr (!LATENT) rows.v[n] = multiply_add(page, v.batch_stride, multiply_add(row, v.row_stride, 0)) * kSize;
  }
}

DEVICE void write_scales(ScaleTable &table, const KeyScales (&scales)[kFound]) {
  each_found([&](int i, int n) {
    if (n >= kKeys) return;
    table.k[n] = scales[i].k;
    table.v[n] = scales[i].v;
  });
  wave_fence();
}

template <int bytes>
struct Bytes;
template <>
struct Bytes<2> {
  typedef unsigned short Type;
};
template <>
struct Bytes<4> {
  typedef unsigned Type;
};
template <>
struct Bytes<8> {
  typedef Pair Type;
};
template <>
struct Bytes<16> {
  typedef Quad Type;
};

// Piece `index` of a key.
template <int bytes>
DEVICE void load_key(unsigned *k, const char *key, int index, const Source &source) {
  typename Bytes<bytes>::Type x;
  x = *(decltype(x) *)(key + min(index, source.head_dim / (bytes / kSize) - 1) * bytes);
  __builtin_memcpy(k, &x, bytes);
}

// `count` elements of a value, from the lane's element `e` on.
template <int count>
DEVICE void load_value(unsigned *v, const char *value, int e, const Source &source) {
  typename Bytes<count * kSize>::Type x;
  x = *(decltype(x) *)(value + min(dim_of(e, M::column()), source.head_dim - count) * kSize);
  __builtin_memcpy(v + e * kSize / 4, &x, count * kSize);
}

// Group `n` of `rows`. Pieces beyond the head are read as the last one inside: see `clear_beyond`. Of V they make
// rows of the output that nobody stores.
DEVICE void load(Group &group, const RowTable &rows, int n, const Source &k, const Source &v) {
  const char *key = k.base + rows.k[n * kGroup + M::column()];
  for (int c = 0; c < kKeyPieces; ++c) load_key<16>(group.k + c * 4, key, c * 4 + M::part(), k);
  if (kHalfPieces)
    load_key<8>(group.k + kKeyPieces * 4, key, kKeyPieces * 8 + M::part(), k);
  if constexpr (LATENT) return;
  for (int i = 0; i < 4; ++i) {
    const char *value = v.base + rows.v[n * kGroup + M::part() * 4 + i];
    for (int e = 0; e < kWide; e += 8) load_value<8>(group.v[i], value, e, v);
    for (int e = kWide; e < kMiddle; e += 4) load_value<4>(group.v[i], value, e, v);
    for (int e = kMiddle; e < kElements; e += 2) load_value<2>(group.v[i], value, e, v);
  }
}

// What lies beyond the head becomes 0, as it is in the query: the last piece was read there, and an infinite element
// of it times 0 would be NaN. Float8 has no infinity.
DEVICE void clear_beyond(Group &group, int head_dim) {
  if constexpr (kFloat8) return;
  // Otherwise the comparisons stay in registers through the loop, and two plans spill 2.
  pin_scalar(head_dim);
  if (head_dim == HEAD_DIM) return;
  for (int c = 0; c < kChunks; ++c) {
    bool inside = c * 4 + M::part() < head_dim / 8;
    for (int i = 0; i < 4; ++i) group.k[c * 4 + i] = inside ? group.k[c * 4 + i] : 0;
  }
}

// The values of the `c`-th 256 bytes of the keys of `group`, as `load` leaves them. A wavefront's own: what
// it writes to LDS and reads there stays in order.
DEVICE void turn_values(Group &values, Turn &turn, const Group &group, int c) {
  wave_fence();
  for (int j = 0; j < 4; ++j) {
    const unsigned *k = group.k + (c * 4 + j) * 4;
    int place = place_of_piece(j * 4 + M::part(), M::column());
    turn.piece[M::column()][place] = Quad{k[0], k[1], k[2], k[3]};
  }
  wave_fence();
  for (int i = 0; i < 4; ++i) {
    int key = M::part() * 4 + i;
    for (int e = 0; e < kTurnProducts; e += 8) {
      int byte = (e / 8 * 128 + M::column() * 8) * kSize;
      typename Bytes<8 * kSize>::Type x;
      x = *(decltype(x) *)((const char *)&turn.piece[key][place_of_piece(byte / 16, key)] + byte % 16);
      __builtin_memcpy(values.v[i] + (c * kTurnProducts + e) * kSize / 4, &x, 8 * kSize);
    }
  }
}

// ---- operands -----------------------------------------------------------------------------------

typedef float Two __attribute__((ext_vector_type(2)));

// Two neighbors of four float8 elements.
DEVICE Two two_of(unsigned four, bool second) {
  return second ? __builtin_amdgcn_cvt_pk_f32_fp8(four, true)
                : __builtin_amdgcn_cvt_pk_f32_fp8(four, false);
}

// What were float8 elements, in one register: DTYPE has them all.
DEVICE unsigned narrow(float low, float high) {
  if (DTYPE == FLOAT16)
    return __builtin_bit_cast(unsigned, __builtin_amdgcn_cvt_pkrtz(low, high));
  return __builtin_amdgcn_perm(__builtin_bit_cast(unsigned, high), __builtin_bit_cast(unsigned, low),
                               0x07060302);
}

// Four elements of a key, those of half `i` % 2 of a query's piece `i` / 2.
DEVICE Pair key_operand(const Group &group, int i) {
  if (!kFloat8) return Pair{group.k[2 * i], group.k[2 * i + 1]};
  Two a = two_of(group.k[i], false), b = two_of(group.k[i], true);
  return Pair{narrow(a.x, a.y), narrow(b.x, b.y)};
}

// Element `e` of four values.
DEVICE Pair value_operand(const Group &group, int e) {
  if (kFloat8) {
    float x[4];
    for (int i = 0; i < 4; ++i) x[i] = two_of(group.v[i][e / 4], e / 2 % 2)[e % 2];
    return Pair{narrow(x[0], x[1]), narrow(x[2], x[3])};
  }
  unsigned halves = e % 2 ? 0x07060302 : 0x05040100;
  return Pair{__builtin_amdgcn_perm(group.v[1][e / 2], group.v[0][e / 2], halves),
              __builtin_amdgcn_perm(group.v[3][e / 2], group.v[2][e / 2], halves)};
}
