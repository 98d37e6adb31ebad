// Attention forward on CDNA 3: out (B, Sq, H, D), lse (B, H, Sq) of q (B, Sq, H, D), k and v
// (B, Sk, Hk, D). FlashAttention-2's loop (Dao 2023, algorithm 1) in base 2.
//
// A workgroup owns 128 query rows of one head, a wavefront 32 of them: column l % 32 of every
// product in lane l. It computes S^T = K Q^T and O^T = V^T P^T, so that a row's maximum and sum
// need one exchange between lanes and P stays in registers (mma.h). Tiles of 64 keys pass through
// LDS, K as it lies, V transposed.
#include "../params.h"
#include "mma.h"
#include "../sequence.h"
#include "../score.h"
#include "../philox.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(CAUSAL)
#error "the plan defines DTYPE, HEAD_DIM and CAUSAL"
#endif

typedef Mma<DTYPE, 32> M;
typedef M::Acc Acc;
constexpr int kMma = 32, kMmaDepth = 8;
DEVICE int mma_row(int r) { return M::row(r); }
DEVICE int mma_column() { return M::column(); }
DEVICE int mma_depth() { return M::part() * 4; }
DEVICE float other_half(float x) { return from_lane_xor(x, 32); }
template <int dtype>
DEVICE Pair round_four(float a, float b, float c, float d) {
  return Pair{Format<dtype>::nearest(a, b), Format<dtype>::nearest(c, d)};
}
constexpr int kWaves = 4;
constexpr int kThreads = kWaves * kLanes;
constexpr int kBlockQ = kWaves * kMma;
constexpr int kBlockK = 64;
constexpr int kKeyTiles = kBlockK / kMma;         // products along the keys
constexpr int kDimTiles = HEAD_DIM / kMma;        // products along the head
constexpr int kDimSlices = HEAD_DIM / kMmaDepth;  // steps of the inner dimension of K Q^T
constexpr int kChunk = 8;                         // elements of a 16-byte load
constexpr int kRowChunks = HEAD_DIM / kChunk;
constexpr int kLoads = kBlockK * kRowChunks / kThreads;  // per thread and tile

// Rows are padded by 8 bytes: 16 lanes then read 8 bytes each from 32 different banks.
constexpr int kPad = 4;
constexpr int kStrideK = HEAD_DIM + kPad;
constexpr int kStrideV = kBlockK + kPad;

struct Lds {
  unsigned short k[kBlockK * kStrideK];
  unsigned short v[HEAD_DIM * kStrideV];  // transposed
};

typedef M F;
typedef const unsigned short *Elements;

struct Block {
  int batch, head, first_row;
  int rows, keys;
  int shift;  // row i sees key j when j <= i + shift
};

// ---- global to LDS ------------------------------------------------------------------------------

// Rows beyond the sequence are zero: 0 times what lies there might be NaN.
DEVICE void load_tile(Quad (&part)[kLoads], Elements base, long long row_stride, int first, int end) {
  for (int i = 0; i < kLoads; ++i) {
    int chunk = thread_index() + i * kThreads;
    int row = first + chunk / kRowChunks;
    part[i] = Quad{0, 0, 0, 0};
    if (row < end)
      part[i] = *(const Quad *)(base + row * row_stride + chunk % kRowChunks * kChunk);
  }
}

DEVICE void store_keys(Lds &lds, const Quad (&part)[kLoads]) {
  for (int i = 0; i < kLoads; ++i) {
    int chunk = thread_index() + i * kThreads;
    unsigned short *to = lds.k + chunk / kRowChunks * kStrideK + chunk % kRowChunks * kChunk;
    *(Pair *)to = part[i].xy;
    *(Pair *)(to + kChunk / 2) = part[i].zw;
  }
}

DEVICE void store_values(Lds &lds, const Quad (&part)[kLoads]) {
  for (int i = 0; i < kLoads; ++i) {
    int chunk = thread_index() + i * kThreads;
    unsigned short *to = lds.v + chunk % kRowChunks * kChunk * kStrideV + chunk / kRowChunks;
    for (int j = 0; j < kChunk; ++j)
      to[j * kStrideV] = part[i][j / 2] >> (j % 2 * 16);
  }
}

// ---- one tile -----------------------------------------------------------------------------------

DEVICE void load_queries(Pair (&q)[kDimSlices], const Params &p, const Block &b, int row) {
  Elements from = (Elements)p.q + b.batch * p.q_batch + b.head * p.q_head + row * p.q_row;
  for (int s = 0; s < kDimSlices; ++s) {
    q[s] = Pair{0, 0};
    if (row < b.rows) q[s] = *(const Pair *)(from + s * kMmaDepth + mma_depth());
  }
}

// S^T of 64 keys and this wavefront's 32 rows.
DEVICE void scores(Acc (&s)[kKeyTiles], const Lds &lds, const Pair (&q)[kDimSlices]) {
  for (int t = 0; t < kKeyTiles; ++t) {
    s[t] = Acc{0};
    Elements from = lds.k + (t * kMma + mma_column()) * kStrideK + mma_depth();
    for (int d = 0; d < kDimSlices; ++d)
      s[t] = F::mma(*(const Pair *)(from + d * kMmaDepth), q[d], s[t]);
  }
}

DEVICE void mask(Acc (&s)[kKeyTiles], const Block &b, int first_key, int row) {
  int last = b.keys - 1;
  if (CAUSAL) last = min(last, row + b.shift);
  for (int t = 0; t < kKeyTiles; ++t)
    for (int r = 0; r < 16; ++r)
      if (first_key + t * kMma + mma_row(r) > last) s[t][r] = -INFINITY_F;
}

// Online softmax of one row per lane pair: S becomes P, and the accumulator is brought to the new
// maximum. `total` is this lane's share of the row's sum.
DEVICE void softmax(Acc (&s)[kKeyTiles], Acc (&o)[kDimTiles], float &maximum, float &total) {
  float raised = maximum;
  for (int t = 0; t < kKeyTiles; ++t)
    for (int r = 0; r < 16; ++r) raised = __builtin_fmaxf(raised, s[t][r]);
  raised = __builtin_fmaxf(raised, other_half(raised));
  // A row that has seen nothing yet has the maximum -inf, and -inf - -inf would be NaN.
  float base = raised == -INFINITY_F ? 0.0f : raised;
  float rescale = exp2(maximum - base);
  maximum = raised;
  float sum = 0.0f;
  for (int t = 0; t < kKeyTiles; ++t)
    for (int r = 0; r < 16; ++r) {
      s[t][r] = exp2(s[t][r] - base);
      sum += s[t][r];
    }
  total = total * rescale + sum;
  for (int t = 0; t < kDimTiles; ++t) o[t] *= rescale;
}

DEVICE void add_values(Acc (&o)[kDimTiles], const Lds &lds, const Acc (&s)[kKeyTiles]) {
  for (int t = 0; t < kKeyTiles; ++t)
    for (int j = 0; j < kMma / kMmaDepth; ++j) {
      Pair p = round_four<DTYPE>(s[t][4 * j], s[t][4 * j + 1], s[t][4 * j + 2], s[t][4 * j + 3]);
      int key = t * kMma + j * kMmaDepth + mma_depth();
      for (int d = 0; d < kDimTiles; ++d) {
        Elements from = lds.v + (d * kMma + mma_column()) * kStrideV + key;
        o[d] = F::mma(*(const Pair *)from, p, o[d]);
      }
    }
}

// ---- the end of a row ---------------------------------------------------------------------------

DEVICE void store(const Params &p, const Block &b, const Acc (&o)[kDimTiles], float maximum,
                  float total, int row) {
  total += other_half(total);
  if (row >= b.rows) return;
  bool saw = total > 0.0f;
  float inverse = saw ? 1.0f / total : 0.0f;
  unsigned short *to =
      (unsigned short *)p.out + b.batch * p.out_batch + b.head * p.out_head + row * p.out_row;
  for (int t = 0; t < kDimTiles; ++t)
    for (int j = 0; j < 4; ++j)
      *(Pair *)(to + t * kMma + mma_row(4 * j)) =
          round_four<DTYPE>(o[t][4 * j] * inverse, o[t][4 * j + 1] * inverse,
                            o[t][4 * j + 2] * inverse, o[t][4 * j + 3] * inverse);
  if (lane_index() < kMma) {
    float lse = saw ? (maximum + log2(total)) * kLn2 : -INFINITY_F;
    ((float *)p.lse)[b.batch * p.lse_batch + b.head * p.lse_head + row] = lse;
  }
}

extern "C" __global__ WORKGROUP(kThreads, 2) void attn_fwd(Params p) {
  __shared__ Lds lds;
  Block b;
  b.first_row = __builtin_amdgcn_workgroup_id_x() * kBlockQ;
  b.head = __builtin_amdgcn_workgroup_id_y();
  b.batch = __builtin_amdgcn_workgroup_id_z();
  b.rows = p.seqlen_q;
  b.keys = p.seqlen_k;
  b.shift = b.keys - b.rows;
  int head_k = b.head / (p.heads_q / p.heads_k);
  Elements k = (Elements)p.k + b.batch * p.k_batch + head_k * p.k_head;
  Elements v = (Elements)p.v + b.batch * p.v_batch + head_k * p.v_head;
  int row = b.first_row + wave_index() * kMma + mma_column();

  Pair q[kDimSlices];
  load_queries(q, p, b, row);
  Acc o[kDimTiles];
  for (int t = 0; t < kDimTiles; ++t) o[t] = Acc{0};
  float maximum = -INFINITY_F, total = 0.0f;
  float scale = p.scale * kLog2E;

  int end = b.keys;
  if (CAUSAL) end = min(end, b.first_row + kBlockQ + b.shift);
  // Tiles before this one are full for every row of the workgroup.
  int full = CAUSAL ? max(0, min(b.keys, b.first_row + b.shift + 1)) : b.keys;
  for (int first = 0; first < end; first += kBlockK) {
    Quad part_k[kLoads], part_v[kLoads];
    load_tile(part_k, k, p.k_row, first, b.keys);
    load_tile(part_v, v, p.v_row, first, b.keys);
    barrier();  // the tile before this one has been read
    store_keys(lds, part_k);
    store_values(lds, part_v);
    barrier();
    Acc s[kKeyTiles];
    scores(s, lds, q);
    for (int t = 0; t < kKeyTiles; ++t) s[t] *= scale;
    if (first + kBlockK > full) mask(s, b, first, row);
    softmax(s, o, maximum, total);
    add_values(o, lds, s);
  }
  store(p, b, o, maximum, total, row);
}
