// Attention of few query rows over many keys on Ampere and later (split-KV, "flash decoding"). It is bound by
// the bytes of K and V, which are read once for all query heads of a group.
//
// A packed row (packed GQA) is a row of one head of a group, row * group + head. A block takes one key head,
// one split of the keys and up to 8 * TILES * TEAM packed rows. Packed rows are the columns of the products
// S^T = K Q^T and O^T = V^T P^T (mma.h). As rows they would come by 16, and waste twice as much. Each team
// of warps takes 16 keys in turn (decode_load.h), a warp of it 8 * TILES packed rows. A team of one warp
// waits for nobody until all teams add up their sums. K and V may be float8 (decode_float8.h).
#include "../../params.h"
#include "../ahead.h"
#include "mma.h"
#include "../../score.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILES) || \
    !defined(TEAM) || !defined(WARPS) || !defined(STAGES) || !defined(SHARED_BYTES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, TILES, TEAM, WARPS, STAGES and SHARED_BYTES"
#endif

#ifndef LATENT  // whether V is the first elements of K
#define LATENT 0
#endif

#include "decode_load.h"

constexpr int kThreads = WARPS * kLanes;
constexpr int kTile = 8;                       // packed rows of a product
constexpr int kPackedRows = kTile * TILES * TEAM;   // of a block
constexpr int kChunks = HEAD_DIM / 16;         // k-slices of the first product
constexpr int kDims = HEAD_DIM_V / 16;         // rows of O^T in products

struct PackedRow {
  int row, head;
  float slope;
};

struct Memory {
  Row rows[WARPS][kLanes];
  PackedRow packed_rows[kPackedRows];
  float maximum[kTeams][kPackedRows], total[kTeams][kPackedRows];
  union alignas(kLine) {
    char ring[kTeams][kStages][kStageBytes];
    float sums[kTeams][kPackedRows][HEAD_DIM_V + 4];  // 4 more: a warp writes to all banks
  };
};
static_assert(sizeof(Memory) + (kFloat8 ? sizeof(Scales) : 0) == SHARED_BYTES, "as the plan has it");

DEVICE Scales &scales_of(Memory &memory) { return *(Scales *)(&memory + 1); }

// The work tile of a block.
struct Block {
  int first_packed_row, packed_rows, head_k, split;
  unsigned group;         // query heads of a key head
  int start, stop;        // its keys
  int all_low, all_high;  // those that every packed row sees
  bool general;           // scores are more than q.k times a factor
};

// Online softmax of a lane's two columns: packed rows 2 (lane % 4) and the next, of each tile. `total` is its
// share of the sum.
struct State {
  float o[TILES][kDims][4];
  float maximum[TILES][2], total[TILES][2];
};

typedef unsigned Queries[TILES][kChunks * 2];

// The first of a warp's packed rows, counted in the block.
DEVICE int first_of_warp() { return wave_index() % TEAM * TILES * kTile; }
// The column, and the first row, of the accumulators' registers: register r is row + r / 2 * 8 and
// column + r % 2.
DEVICE int column() { return lane_index() % 4 * 2; }
DEVICE int row() { return lane_index() / 4; }

// ---- one stage of keys ----------------------------------------------------------------------------

// Scores in base 2, -inf where the packed row does not see the key.
DEVICE void finish(float (&s)[4], const Params &p, const Sequence &sequence, const Block &b,
                   const PackedRow *packed_rows, int first) {
  bool masked = first < b.all_low || first + kKeys > b.all_high;
  if (!b.general)
    for (int r = 0; r < 4; ++r) s[r] *= p.scale * kLog2E;
  if (!b.general && !masked) return;
  int left = p.window_left < 0 ? -0x7fffffff : -p.window_left;
  int right = p.window_right < 0 ? 0x7fffffff : p.window_right;
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const PackedRow &packed_row = packed_rows[column() + r % 2];
    int key = first + row() + r / 2 * 8;
    int distance = key - packed_row.row - sequence.shift;
    if (b.general) {
      Terms terms = terms_of(p, sequence.batch, packed_row.head, packed_row.row);
      terms.slope = packed_row.slope;
      float derivative;
      s[r] = score(terms, s[r], distance, derivative);
      if (terms.bias) s[r] = biased(terms, s[r], min(key, b.stop - 1));
      s[r] *= kLog2E;
    }
    if (BANDED && masked) {
      Seen seen = keys_seen(p, sequence, packed_row.row, packed_row.row);
      if (key < seen.low || key >= min(seen.high, b.stop)) s[r] = -INFINITY_F;
    } else if (masked && (distance < left || distance > right || key >= b.stop)) {
      s[r] = -INFINITY_F;
    }
    if (TREE && masked && Branch(p, sequence.batch, sequence.shift, packed_row.row).hides(key))
      s[r] = -INFINITY_F;
  }
}

// A column's maximum over the eight lanes that share it.
DEVICE float column_max(float x) {
  for (int bit = 4; bit < kLanes; bit *= 2) x = max(x, from_lane_xor(x, bit));
  return x;
}
DEVICE float column_sum(float x) {
  for (int bit = 4; bit < kLanes; bit *= 2) x += from_lane_xor(x, bit);
  return x;
}

// An 8 x 8 matrix of 16-bit elements, lane l holding row l / 4, elements 2 (l % 4) and the next,
// transposed.
DEVICE unsigned transposed(unsigned x) {
  unsigned y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// P^T as the operand of the next product. The accumulator is rescaled only when the maximum rises, which
// seldom happens after the first stages.
DEVICE void weights(unsigned (&w)[2], State &state, int t, const float (&s)[4], const ValueFactors &factors) {
  float(&maximum)[2] = state.maximum[t];
  float highest[2] = {max(s[0], s[2]), max(s[1], s[3])};
  if (__any_sync(kAllLanes, highest[0] > maximum[0] || highest[1] > maximum[1])) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float raised = max(maximum[c], column_max(highest[c]));
      // Of a packed row that has seen nothing yet both are -inf.
      float rescale = raised == -INFINITY_F ? 1.0f : exp2(maximum[c] - raised);
#pragma unroll
      for (int e = 0; e < kDims; ++e) {
        state.o[t][e][c] *= rescale;
        state.o[t][e][c + 2] *= rescale;
      }
      state.total[t][c] *= rescale;
      maximum[c] = raised;
    }
  }
  float x[4];
#pragma unroll
  for (int r = 0; r < 4; ++r)
    x[r] = exp2(s[r] - (maximum[r % 2] == -INFINITY_F ? 0.0f : maximum[r % 2] - kTop));
#pragma unroll
  for (int c = 0; c < 2; ++c)
    state.total[t][c] +=
        kFloat8 ? x[c] * factors.back[0] + x[c + 2] * factors.back[1] : x[c] + x[c + 2];
  w[0] = transposed(Format<kProduct>::nearest(x[0], x[1]));
  w[1] = transposed(Format<kProduct>::nearest(x[2], x[3]));
}

// The `n`-th stage, whose keys begin at `first`.
DEVICE void step(State &state, Shared stage, const Queries &q, const Params &p, const Sequence &sequence,
                 const Block &b, const PackedRow *packed_rows, int n, int first, const Scales &scales) {
  float s[TILES][4] = {};
  Shared keys = KeyTile::down(stage);
#pragma unroll
  for (int c = 0; c < kChunks; c += kOperands) {
    unsigned x[4];
    ldmatrix(x, KeyTile::at(keys, 0, c * kSize));
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      unsigned k[4];
      key_operand(k, x, i);
#pragma unroll
      for (int t = 0; t < TILES; ++t)
        mma<kProduct>(s[t], k, q[t][(c + i) * 2], q[t][(c + i) * 2 + 1]);
    }
  }
  unsigned w[TILES][2];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    if constexpr (kFloat8)
      scale_scores(s[t], p, scales, first_of_warp() + t * kTile + column(), n, row());
    finish(s[t], p, sequence, b, packed_rows + t * kTile, first);
    ValueFactors factors(p, scales, n, row());
    if constexpr (kFloat8)
      for (int r = 0; r < 4; ++r) s[t][r] += factors.lift[r / 2];
    weights(w[t], state, t, s[t], factors);
  }
  Shared values = ValueTile::along(stage + (LATENT ? 0 : KeyTile::kBytes));
#pragma unroll
  for (int e = 0; e < kDims; e += kOperands) {
    unsigned x[4];
    ldmatrix_transposed(x, ValueTile::at(values, 0, e * kSize));
#pragma unroll
    for (int i = 0; i < kOperands; ++i) {
      unsigned v[4];
      value_operand(v, x, i);
#pragma unroll
      for (int t = 0; t < TILES; ++t) mma<kProduct>(state.o[t][e + i], v, w[t][0], w[t][1]);
    }
  }
}

// ---- the keys of a split -------------------------------------------------------------------------

// Loads queries from memory as the operand of the product, for float8 keys in their order. Packed rows and
// elements that do not exist become 0.
DEVICE void load_queries(Queries &q, const Params &p, const Sequence &s, const Block &b, Scales &scales) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    int place = first_of_warp() + t * kTile + row();
    unsigned packed_row = b.first_packed_row + place;
    const unsigned short *from = (const unsigned short *)p.q + s.row_batch * p.q_batch +
                                 (s.row0 + packed_row / b.group) * p.q_row +
                                 (b.head_k * b.group + packed_row % b.group) * p.q_head + column() * kOperands;
    if constexpr (kFloat8) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        bool exists = (int)packed_row < b.packed_rows && c * 16 < p.head_dim;
        Pair four = exists ? *(const Pair *)(from + c * 16) : Pair{0, 0};
        q[t][c * 2] = four[0];
        q[t][c * 2 + 1] = four[1];
      }
      float factor = as_float16(q[t]) *
                     row_scale(p, s, b.head_k, min((int)packed_row, b.packed_rows - 1) / b.group);
      bool writes = team_index() == 0 && column() == 0;
      if (writes) scales.packed_rows[place] = factor;
    } else {
#pragma unroll
      for (int c = 0; c < kChunks * 2; ++c)
        q[t][c] = (int)packed_row < b.packed_rows && c * 8 < p.head_dim ? *(const unsigned *)(from + c * 8) : 0;
    }
  }
}

// Packed rows beyond the last one repeat its mask. Their queries are 0, and their results are not stored.
DEVICE void describe_packed_rows(Memory &memory, const Params &p, const Sequence &s, const Block &b) {
  for (int i = thread_index(); i < kPackedRows; i += kThreads) {
    unsigned packed_row = min(b.first_packed_row + i, b.packed_rows - 1);
    int row = packed_row / b.group, head = b.head_k * b.group + packed_row % b.group;
    memory.packed_rows[i] = PackedRow{row, head, terms_of(p, s.batch, head, row).slope};
  }
}

DEVICE void attend(State &state, Memory &memory, const Params &p, const Sequence &s, const Block &b) {
  int team = team_index();
  int begin = b.start + team * kKeys;
  // Teams of several warps meet at every step, so all of them make as many.
  int from = TEAM == 1 ? begin : b.start;
  int steps = from < b.stop ? (b.stop - from + kStride - 1) / kStride : 0;
  Shared ring = shared_address(memory.ring[team]);
  Scales &scales = scales_of(memory);
  Stream stream(p, s, memory.rows[wave_index()], scales, ring, b.head_k, wave_index() % TEAM, begin, b.stop);
  // Latent queries, 72 words a thread, are asked for directly behind the first stage. Behind all stages, they took
  // 4 µs to come. Queries over float8 caches are scaled as soon as they are there, which would hold up the other
  // stages.
  constexpr bool kEarly = LATENT && !kFloat8;
  Queries q;
  if constexpr (kEarly) {
    if (steps > 0) stream.load(0, 0);
    end_group();
    load_queries(q, p, s, b, scales);
  }
  for (int n = kEarly; n < kStages - 1; ++n) {
    if (n < steps) stream.load(n, n);
    end_group();
  }
  if constexpr (!kEarly) load_queries(q, p, s, b, scales);
  describe_packed_rows(memory, p, s, b);
  if (kFloat8 && thread_index() == 0) scales.output = value_scale(p, s, b.head_k);
  barrier();
  const PackedRow *packed_rows = memory.packed_rows + first_of_warp();
  int stage = 0, free = kStages - 1;
  for (int n = 0; n < steps; ++n) {
    wait_for_copies<kStages - 2>();
    team_sync();
    if (n + kStages - 1 < steps) stream.load(n + kStages - 1, free);
    end_group();
    int first = begin + n * kStride;
    if (TEAM == 1 || first < b.stop)
      step(state, ring + stage * kStageBytes, q, p, s, b, packed_rows, n, first, scales);
    free = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

// ---- from the teams to memory --------------------------------------------------------------------

struct alignas(16) Four {
  float x[4];
};

DEVICE long long split_row(const Params &p, const Sequence &s, const Block &b, const PackedRow &packed_row) {
  long long place = p.cu_seqlens_q ? s.row0 + packed_row.row : s.batch * (long long)p.seqlen_q + packed_row.row;
  return (place * p.heads_q + packed_row.head) * p.num_splits + b.split;
}

DEVICE void store(const Params &p, const Sequence &s, const Block &b, const PackedRow &packed_row, int dim,
                  const Four &o) {
  if (p.num_splits > 1) {
    *(Four *)((float *)p.partial_out + split_row(p, s, b, packed_row) * p.head_dim_v + dim) = o;
    return;
  }
  unsigned short *to = (unsigned short *)p.out + s.row_batch * p.out_batch +
                       (s.row0 + packed_row.row) * p.out_row + packed_row.head * p.out_head + dim;
  *(Pair *)to = Pair{Format<DTYPE>::nearest(o.x[0], o.x[1]), Format<DTYPE>::nearest(o.x[2], o.x[3])};
}

DEVICE void store_lse(const Params &p, const Sequence &s, const Block &b, const PackedRow &packed_row,
                      float lse) {
  if (p.num_splits > 1)
    ((float *)p.partial_lse)[split_row(p, s, b, packed_row)] = lse;
  else if (p.lse)
    ((float *)p.lse)[s.row_batch * p.lse_batch + packed_row.head * p.lse_head + s.row0 + packed_row.row] = lse;
}

DEVICE void share_sums(Memory &memory, const State &state) {
  int team = team_index();
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      int packed_row = first_of_warp() + t * kTile + column() + c;
      float total = column_sum(state.total[t][c]);
      if (row() == 0) {
        memory.maximum[team][packed_row] = state.maximum[t][c] - kTop;
        memory.total[team][packed_row] = total;
      }
#pragma unroll
      for (int e = 0; e < kDims; ++e) {
        float *sums = memory.sums[team][packed_row] + e * 16 + row() * kRows[0];
        sums[0] = state.o[t][e][c];
        sums[kRows[1]] = state.o[t][e][c + 2];
      }
    }
  }
}

// The packed rows of a block that exist.
DEVICE int rows_of(const Block &b) { return min(kPackedRows, b.packed_rows - b.first_packed_row); }

// A warp adds up the teams' sums of packed row `i`, and stores its output and LSE. From the last step of a latent block
// to its end are 2.2 us. With a thread for any four elements, and one for the weights of a packed row, 3.5 us (H200).
DEVICE void add_up(Memory &memory, const Params &p, const Sequence &s, const Block &b, int i) {
  PackedRow packed_row = memory.packed_rows[i];
  // A sink is one more logit, without a value. The first split has it.
  float sink = -INFINITY_F;
  if (p.sinks && p.use_sinks && b.split == 0) sink = ((const float *)p.sinks)[packed_row.head] * kLog2E;
  float top = sink;
  for (int w = 0; w < kTeams; ++w) top = max(top, memory.maximum[w][i]);
  float base = top == -INFINITY_F ? 0.0f : top, total = exp2(sink - base), weight[kTeams];
  for (int w = 0; w < kTeams; ++w) {
    weight[w] = exp2(memory.maximum[w][i] - base);
    total += weight[w] * memory.total[w][i];
  }
  bool saw = total != 0.0f;
  float inverse = saw ? reciprocal(total) : 0.0f;
  if constexpr (kFloat8) inverse *= scales_of(memory).output;
  constexpr int kStep = kLanes * 4;  // elements
  Four o[(HEAD_DIM_V + kStep - 1) / kStep]{};
  for (int w = 0; w < kTeams; ++w) {
    const float *sums = memory.sums[w][i];
    for (int n = 0; n * kStep < HEAD_DIM_V; ++n) {
      Four sum = *(const Four *)(sums + min(n * kStep + lane_index() * 4, HEAD_DIM_V - 4));
      for (int j = 0; j < 4; ++j) o[n].x[j] += weight[w] * inverse * sum.x[j];
    }
  }
  // Nobody reads the output of a split that saw no key.
  int dims = saw || p.num_splits == 1 ? p.head_dim_v : 0;
#pragma unroll
  for (int n = 0; n * kStep < HEAD_DIM_V; ++n) {
    int dim = n * kStep + lane_index() * 4;
    if (dim < dims) store(p, s, b, packed_row, dim, o[n]);
  }
  if (lane_index() == 0) store_lse(p, s, b, packed_row, saw ? (top + log2(total)) * kLn2 : -INFINITY_F);
}

extern "C" __global__ WORKGROUP(kThreads, 1) void attn_decode(KERNEL_PARAMS p) {
  griddepcontrol_wait();
  extern __shared__ __align__(128) char shared_bytes[];
  Memory &memory = *(Memory *)shared_bytes;
  if (p.num_splits > 1) griddepcontrol_launch_dependents();  // combine
  Block b;
  b.group = (unsigned)p.heads_q / (unsigned)p.heads_k;
  // Neighbours in memory run together: blocks of the same keys, then the heads of a key, then the splits.
  unsigned id = workgroup_index(), blocks = (p.seqlen_q * b.group + kPackedRows - 1) / kPackedRows;
  b.first_packed_row = id % blocks * kPackedRows;
  id /= blocks;
  b.head_k = id % (unsigned)p.heads_k;
  id /= (unsigned)p.heads_k;
  b.split = id % (unsigned)p.num_splits;
  Sequence s = sequence_of(p, id / (unsigned)p.num_splits);
  b.packed_rows = s.rows * b.group;
  if (b.first_packed_row >= b.packed_rows) return;
  unsigned last_packed_row = min(b.first_packed_row + kPackedRows, b.packed_rows) - 1;
  Seen seen = keys_seen(p, s, b.first_packed_row / b.group, last_packed_row / b.group);
  int groups = (max(seen.high - seen.low, 0) + kKeys - 1) / kKeys;
  int share = (unsigned)(groups + p.num_splits - 1) / (unsigned)p.num_splits * kKeys;
  b.start = (int)min(seen.low + (long long)b.split * share, (long long)seen.high);
  b.stop = b.start + min(share, seen.high - b.start);
  b.all_low = seen.all_low;
  b.all_high = min(seen.all_high, b.stop);
  b.general = p.softcap > 0.0f || p.alibi_slopes || p.bias_type;

  State state;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      state.maximum[t][c] = -INFINITY_F;
      state.total[t][c] = 0.0f;
    }
#pragma unroll
    for (int e = 0; e < kDims; ++e)
#pragma unroll
      for (int r = 0; r < 4; ++r) state.o[t][e][r] = 0.0f;
  }
  attend(state, memory, p, s, b);
  barrier();
  share_sums(memory, state);
  barrier();
#pragma unroll 1
  for (int i = wave_index(); i < rows_of(b); i += WARPS) add_up(memory, p, s, b, i);
}
