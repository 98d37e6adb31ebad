// Latent attention (MLA with absorbed weights) of many packed rows on Hopper: keys of one head, whose first
// HEAD_DIM_V elements are also the values. It is bound by products, not by bytes.
//
// A block takes 64 packed rows of one sequence (row * heads + head) and one split of its keys. O, 64 x 512 in
// float32, is half of the registers of an SM, so two consumer warpgroups hold 256 of its columns each. Both
// see all tiles of 64 keys. Tile t is owned by consumer t % 2 and lies in stage t % 2:
//   1. The producer loads its panels (64 elements of 64 keys) by TMA, each with a barrier of its own.
//   2. The owner computes S = Q K^T and the softmax, and tells the other consumer P and the bases of the rows
//      in shared memory. P takes the place of the last panel, which is no part of V.
//   3. Each consumer adds P times its columns of V: the owner's P comes from registers. Then the producer
//      may load these columns of tile t + 2.
// While one consumer exponentiates, the products of the other run (as the "seesaw" of DeepSeek-AI 2025,
// FlashMLA). Both add tile after tile, so the base of a row goes from one to the other and never falls.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(SCORE) || \
    !defined(GROUPS) || !defined(BLOCK_K) || !defined(STAGES) || !defined(SHARED_BYTES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE, GROUPS (consumer warpgroups), BLOCK_K, \
STAGES and SHARED_BYTES"
#endif

#include "key_tile.h"
#include "../ahead.h"

constexpr int kGroupThreads = 128;
constexpr int kConsumers = GROUPS * kGroupThreads;  // threads
constexpr int kThreads = kConsumers + kGroupThreads;
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

constexpr int kBlockRows = 64;  // packed rows of a block
typedef Tile<64, 64> PanelTile;
constexpr int kPanelBytes = PanelTile::kBytes;
constexpr int kPanels = HEAD_DIM / 64;
constexpr int kOwnPanels = HEAD_DIM_V / 64 / GROUPS;  // of V, of one consumer
constexpr int kLastPanel = kPanels - 1;
constexpr int kTileBytes = kPanels * kPanelBytes;
typedef float Columns[HEAD_DIM_V / GROUPS / 2];  // of O
static_assert(GROUPS == 2 && STAGES == GROUPS && BLOCK_K == kBlockRows, "P has the size of a panel");
static_assert(GROUPS * kOwnPanels == kLastPanel, "V is all panels but the last");

// Parts of a stage that are free at different times: each consumer's columns of V, and P.
constexpr int kParts = GROUPS + 1;
DEVICE constexpr int first_panel(int part) { return part * kOwnPanels; }
DEVICE constexpr int panels_of(int part) { return part < GROUPS ? kOwnPanels : 1; }
// The order in which the parts of a stage are loaded and read: its owner's columns are free first.
DEVICE constexpr int part_at(int place, int owner) { return place < GROUPS ? place ^ owner : place; }

constexpr int kQAt = 0;
constexpr int kKAt = kQAt + kTileBytes;
constexpr int kBasesAt = kKAt + STAGES * kTileBytes;  // of the rows, of each tile in flight
constexpr int kTotalsAt = kBasesAt + STAGES * kBlockRows * 4;
constexpr int kBarriersAt = kTotalsAt + GROUPS * kBlockRows * 4;
constexpr int kBarriers = STAGES * (kPanels + kParts + 1);
static_assert(kBarriersAt + kBarriers * 8 == SHARED_BYTES, "as the plan says");

struct Barriers {
  Shared at;
  METHOD Shared full(int stage, int panel) const { return at + (stage * kPanels + panel) * 8; }
  METHOD Shared empty(int stage, int part) const { return full(STAGES, 0) + (stage * kParts + part) * 8; }
  METHOD Shared told(int stage) const { return empty(STAGES, 0) + stage * 8; }  // P and bases

  METHOD void make() const {
    for (int stage = 0; stage < STAGES; ++stage) {
      for (int panel = 0; panel < kPanels; ++panel) mbarrier_init(full(stage, panel), 1);
      for (int part = 0; part < kParts; ++part) mbarrier_init(empty(stage, part), part < GROUPS ? 4 : 4 * GROUPS);
      mbarrier_init(told(stage), 4);
    }
    fence_mbarrier_init();
  }
};
// The parity of the phase of tile `t`, whose stage is t % STAGES.
DEVICE unsigned phase_of(int t) { return t / STAGES & 1; }

// The work tile of a block.
struct Block {
  Sequence s;
  int first_packed_row, packed_rows;  // of the block, of the sequence
  unsigned group;                     // query heads
  int split, first, tiles;            // number of the first tile of keys, and how many there are

  METHOD Block(const Params &p) {
    // Neighbours in memory run together: blocks of the same keys, then the splits.
    group = p.heads_q;
    unsigned id = workgroup_index(), blocks = (p.seqlen_q * group + kBlockRows - 1) / kBlockRows;
    first_packed_row = id % blocks * kBlockRows;
    id /= blocks;
    split = id % (unsigned)p.num_splits;
    s = sequence_of(p, id / (unsigned)p.num_splits);
    packed_rows = s.rows * group;
    first = tiles = 0;
    if (first_packed_row >= packed_rows) return;
    Seen seen = keys_seen(p, s, row_of(first_packed_row), row_of(first_packed_row + kBlockRows - 1));
    if (seen.high <= seen.low) return;
    int begin = seen.low / BLOCK_K, end = (seen.high + BLOCK_K - 1) / BLOCK_K;
    int share = (unsigned)(end - begin + p.num_splits - 1) / (unsigned)p.num_splits;
    first = min(begin + split * share, end);
    tiles = min(share, end - first);
  }
  // The row of a packed row; of one beyond the last, that of the last.
  METHOD int row_of(int packed_row) const { return (unsigned)min(packed_row, packed_rows - 1) / group; }
  METHOD int head_of(int packed_row, int row) const { return min(packed_row, packed_rows - 1) - row * group; }
};

// ---- the producer -------------------------------------------------------------------------------

DEVICE void produce(const MappedParams &mapped, const Block &b, Shared shared) {
  Barriers barriers{shared + kBarriersAt};
  for (int t = 0; t < b.tiles; ++t) {
    int stage = t % STAGES;
    Shared to = shared + kKAt + stage * kTileBytes;
    Pages pages(mapped.params, b.s, b.first + t);
#pragma unroll 1
    for (int place = 0; place < kParts; ++place) {
      int part = part_at(place, stage);
      mbarrier_wait(barriers.empty(stage, part), phase_of(t) ^ 1);
#pragma unroll 1
      for (int i = 0; i < panels_of(part); ++i) {
        int panel = first_panel(part) + i;
        load_keys<1, 64, kPanelBytes>(mapped.params, b.s, pages, mapped.maps, to + panel * kPanelBytes,
                                      barriers.full(stage, panel), 0, b.first + t, panel);
      }
    }
  }
}

// ---- a consumer ---------------------------------------------------------------------------------

// By all consumers. Packed rows and elements that do not exist become 0.
DEVICE void load_queries(const Params &p, const Block &b, Shared to, int thread) {
  constexpr int kAtOnce = kConsumers / 8;  // rows: eight threads copy 128 neighbouring bytes
#pragma unroll
  for (int i = 0; i < kBlockRows; i += kAtOnce) {
    int place = i + thread / 8, unit = thread % 8, packed_row = b.first_packed_row + place;
    int row = b.row_of(packed_row);
    const unsigned short *from = (const unsigned short *)p.q + b.s.row_batch * p.q_batch +
                                 (b.s.row0 + row) * p.q_row + b.head_of(packed_row, row) * p.q_head +
                                 unit * kUnit;
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      bool exists = packed_row < b.packed_rows && panel * 64 + unit * kUnit < p.head_dim;
      copy_16(to + panel * kPanelBytes + PanelTile::place(place, unit), from + panel * 64, exists ? 16 : 0);
    }
  }
  end_group();
  wait_for_copies<0>();
  fence_proxy_async();
}

DEVICE float load_float(Shared at) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
  return x;
}
DEVICE void store_float(Shared at, float x) { store_shared(at, __builtin_bit_cast(unsigned, x)); }

DEVICE void store(const Params &p, const Block &b, const Row &row, Columns &o, int half, int place, int column);

template <int mine>
DEVICE void consume(const Params &p, const Block &b, Shared shared) {
  typedef Operand<64> Panel;
  constexpr int kOther = 1 - mine;
  Barriers barriers{shared + kBarriersAt};
  int warp = wave_index() % 4, thread = thread_index() % kGroupThreads;
  bool leader = lane_index() == 0;  // arrives for its warp
  float factor = to_base_2(p);
  int first_of_warp = b.first_packed_row + warp * 16;
  Seen seen = keys_seen(p, b.s, b.row_of(first_of_warp), b.row_of(first_of_warp + 15));
  unsigned long long q = Panel::along(shared + kQAt), k = Panel::along(shared + kKAt);
  // Of this consumer's columns; of P of the other one's tiles; of its own tiles' P, as a lane writes it.
  unsigned long long v = Panel::down(shared + kKAt + mine * kOwnPanels * kPanelBytes, kPanelBytes);
  unsigned long long told_p = k + (kOther * kTileBytes + kLastPanel * kPanelBytes) / 16;
  Shared my_p = PanelTile::at(
      PanelTile::down(shared + kKAt + mine * kTileBytes + kLastPanel * kPanelBytes), warp * 16, 0);
  Shared bases = shared + kBasesAt + (warp * 16 + lane_index() / 4) * 4;

  load_queries(p, b, shared + kQAt, mine * kGroupThreads + thread);
  bar_sync(1, kConsumers);

  Rows rows{{kLowest, 0.0f}, {kLowest, 0.0f}};
  Columns o;
#pragma unroll
  for (int i = 0; i < HEAD_DIM_V / GROUPS / 2; ++i) o[i] = 0.0f;
  Scores x;
  Probabilities y;

  auto issue_scores = [&](int t) {
    hold(x);
    wgmma_fence();
#pragma unroll
    for (int place = 0; place < kParts; ++place) {
      const int part = part_at(place, mine);
#pragma unroll
      for (int panel = first_panel(part); panel < first_panel(part) + panels_of(part); ++panel) {
        mbarrier_wait(barriers.full(mine, panel), phase_of(t));
#pragma unroll
        for (int i = panel * 4; i < panel * 4 + 4; ++i)
          wgmma<DTYPE, false, false>(x, q + Panel::step_along(i, kPanelBytes),
                                     k + mine * (kTileBytes / 16) + Panel::step_along(i, kPanelBytes),
                                     place + i % (kOwnPanels * 4) > 0);
      }
    }
    wgmma_commit();
  };
  // Rows of V beyond the end of the sequence become 0: P is 0 there, but 0 times NaN is NaN. TMA has zeroed
  // those beyond the tensor. Each consumer clears its own columns.
  auto clear_tail = [&](int t, int stage) {
    int valid = b.s.keys - (b.first + t) * BLOCK_K;
    if (valid >= BLOCK_K || !(PAGE_ROWS || p.cu_seqlens_k || p.seqused_k)) return;
    Shared to = shared + kKAt + stage * kTileBytes + mine * kOwnPanels * kPanelBytes;
    for (int i = valid * 8 + thread; i < BLOCK_K * 8; i += kGroupThreads)
#pragma unroll
      for (int panel = 0; panel < kOwnPanels; ++panel) store_shared(to + panel * kPanelBytes + i * 16, Quad{});
    fence_proxy_async();
    bar_sync(2 + mine, kGroupThreads);
  };
  // O += P V of the other consumer's tile `t`, and the bases that it was told.
  auto issue_others = [&](int t) {
    mbarrier_wait(barriers.told(kOther), phase_of(t));
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float base = load_float(bases + (kOther * kBlockRows + 8 * h) * 4);
      factors[h] = exp2(rows[h].base - base);
      rows[h].base = base;
      rows[h].total *= factors[h];
    }
    if (__any_sync(kAllLanes, factors[0] != 1.0f || factors[1] != 1.0f)) {
      wgmma_wait<0>();
      hold(o);
      rescale(o, factors);
    }
#pragma unroll
    for (int i = 0; i < kOwnPanels; ++i)
      mbarrier_wait(barriers.full(kOther, mine * kOwnPanels + i), phase_of(t));
    clear_tail(t, kOther);
    hold(o);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSlices; ++i)
      wgmma<DTYPE, false, true>(o, told_p + Panel::step_along(i, kPanelBytes),
                                v + kOther * (kTileBytes / 16) + Panel::step_down(i), true);
    wgmma_commit();
  };
  auto release = [&](int stage) {
    if (!leader) return;
    mbarrier_arrive(barriers.empty(stage, mine));
    mbarrier_arrive(barriers.empty(stage, GROUPS));
  };

  auto finish_others = [&]() {
    wgmma_wait<0>();
    hold(o);
    release(kOther);
  };
  constexpr bool kScoresFirst = mine == 1;
  // Tile t is this consumer's, t - 1 the other's.
  int t = mine;
#pragma unroll 1
  for (; t < b.tiles; t += GROUPS) {
    if (!kScoresFirst && t > 0) {
      issue_others(t - 1);
      finish_others();
    }
    issue_scores(t);
    if (kScoresFirst) {
      issue_others(t - 1);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
    }
    hold(x);
    int key = (b.first + t) * BLOCK_K;
    if (key < seen.all_low || key + BLOCK_K > seen.all_high)
      mask_rows(p, x, b.s, b.first + t,
                [&](int h) { return b.row_of(first_of_warp + 8 * h + lane_index() / 4); });
    float factors[2];
    bool raised = online_softmax_to<false>(factor, x, rows, y, factors, true);
#pragma unroll
    for (int i = 0; i < kSlices; ++i) stmatrix(PanelTile::at(my_p, 0, 2 * i), y[i]);
    if (lane_index() % 4 == 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) store_float(bases + (mine * kBlockRows + 8 * h) * 4, rows[h].base);
    }
    fence_proxy_async();
    __syncwarp();
    if (leader) mbarrier_arrive(barriers.told(mine));
    if (kScoresFirst) finish_others();
    if (raised) rescale(o, factors);
    clear_tail(t, mine);
    hold(o);
    hold(y);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSlices; ++i)
      wgmma<DTYPE, true>(o, y[i], v + mine * (kTileBytes / 16) + Panel::step_down(i), true);
    wgmma_commit();
    wgmma_wait<0>();
    hold(o);
    hold(y);
    release(mine);
  }
  if (t > 0 && t == b.tiles) {
    issue_others(t - 1);
    finish_others();
  }

  // Each consumer has the sums of its own tiles, relative to the same bases.
  Shared totals = shared + kTotalsAt + (warp * 16 + lane_index() / 4) * 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    rows[h].total = row_sum(rows[h].total);
    if (lane_index() % 4 == 0) store_float(totals + (mine * kBlockRows + 8 * h) * 4, rows[h].total);
  }
  bar_sync(1, kConsumers);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // `finish` adds up four lanes.
    float total = rows[h].total + load_float(totals + (kOther * kBlockRows + 8 * h) * 4);
    rows[h].total = lane_index() % 4 == 0 ? total : 0.0f;
    store(p, b, rows[h], o, h, first_of_warp + 8 * h + lane_index() / 4, mine * (HEAD_DIM_V / GROUPS));
  }
}

// Stores a packed row's columns from `column` on: in float32 to the workspace of its split, or in 16 bits.
DEVICE void store(const Params &p, const Block &b, const Row &row, Columns &o, int half, int packed_row,
                  int column) {
  constexpr int kTiles = HEAD_DIM_V / GROUPS / 8;
  bool exists = packed_row < b.packed_rows;
  int at = b.row_of(packed_row), head = b.head_of(packed_row, at);
  Finished end = finish(p, row, head, b.split);
  bool first = column == 0 && lane_index() % 4 == 0;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      o[4 * t + 2 * half + i] = end.saw_key ? o[4 * t + 2 * half + i] * end.inverse : 0.0f;
  if (p.num_splits > 1) {
    if (!exists) return;
    long long line = part_line(p, b.s, at, head, b.split);
    column += lane_index() % 4 * 2;
    float *to = (float *)p.partial_out + line * p.head_dim_v + column;
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
      if (column + 8 * t < p.head_dim_v)
        *(float2 *)(to + 8 * t) = make_float2(o[4 * t + 2 * half], o[4 * t + 2 * half + 1]);
    if (first) ((float *)p.partial_lse)[line] = end.lse;
    return;
  }
  if (p.lse && exists && first)
    ((float *)p.lse)[b.s.row_batch * p.lse_batch + head * p.lse_head + b.s.row0 + at] = end.lse;
  column += lane_index() % 4 * kUnit;
  unsigned short *to = (unsigned short *)p.out + b.s.row_batch * p.out_batch + (b.s.row0 + at) * p.out_row +
                       head * p.out_head + column;
#pragma unroll
  for (int t = 0; t < kTiles; t += 4) {
    unsigned four[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      four[i] = Format<DTYPE>::nearest(o[4 * (t + i) + 2 * half], o[4 * (t + i) + 2 * half + 1]);
    transpose_quads(four);
    if (exists && column + 8 * t < p.head_dim_v) *(Quad *)(to + 8 * t) = Quad{{four[0], four[1], four[2], four[3]}};
  }
}

// ---- the kernel ---------------------------------------------------------------------------------

extern "C" __global__ WORKGROUP(kThreads, 1) void attn_latent(MAPPED_PARAMS mapped) {
  extern __shared__ __align__(1024) char memory[];
  const Params &p = mapped.params;
  if (p.num_splits > 1) griddepcontrol_launch_dependents();  // combine
  Block b(p);
  if (b.first_packed_row >= b.packed_rows) return;
  Shared shared = shared_address(memory);
  if (thread_index() == 0) Barriers{shared + kBarriersAt}.make();
  barrier();
  int group = wave_index() / 4;
  if (group == GROUPS) {
    setmaxnreg_dec<kProducerRegisters>();
    if (wave_index() == 4 * GROUPS && elect_one()) produce(mapped, b, shared);
  } else {
    setmaxnreg_inc<kConsumerRegisters>();
    if (group == 0)
      consume<0>(p, b, shared);
    else
      consume<1>(p, b, shared);
  }
}
