// Attention forward on Hopper: out and lse of q (B, Sq, H, D), k (B, Sk, Hk, D), v (B, Sk, Hk, Dv), dense
// or packed. FlashAttention-3's division of labour (Shah et al. 2024): one warp copies by TMA, GROUPS
// warpgroups of 64 query rows each multiply, and while one of them multiplies the other exponentiates.
//
// A block stays on its SM and takes one piece of work (rows of one head) after the other, whichever is
// next when it is done: `counter`, which is 0 before and after. K and V pass through STAGES places each,
// from the last tile that the rows see to the first.
#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(SCORE) || \
    !defined(GROUPS) || !defined(BLOCK_K) || !defined(STAGES) || !defined(SHARED_BYTES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V, SCORE, GROUPS (warpgroups that multiply), BLOCK_K, \
STAGES and SHARED_BYTES"
#endif

#include "fwd_tile.h"
#include "tma.h"
#include "../sm80/schedule.h"

constexpr int kGroupThreads = 128;
constexpr int kGroupRows = 64;
constexpr int kBlockQ = GROUPS * kGroupRows;
constexpr int kThreads = (GROUPS + 1) * kGroupThreads;
// Registers of a thread of those that copy and those that multiply: 512 a lane of an SM's four parts.
constexpr int kFew = GROUPS == 3 ? 32 : 24;
constexpr int kMany = GROUPS == 3 ? 160 : 240;

constexpr int kSteps = HEAD_DIM / 16;
constexpr int kWidth = HEAD_DIM % 64 ? 32 : 64;    // of a panel of Q and K
constexpr int kWidthV = HEAD_DIM_V % 64 ? 32 : 64;
constexpr int kPanels = HEAD_DIM / kWidth;
constexpr int kPanelsV = HEAD_DIM_V / kWidthV;
constexpr int kQueryPanel = kGroupRows * kWidth * 2;  // bytes
constexpr int kKeyPanel = BLOCK_K * kWidth * 2;
constexpr int kValuePanel = BLOCK_K * kWidthV * 2;
constexpr int kQueryBytes = kPanels * kQueryPanel;  // of a group
constexpr int kKeyBytes = kPanels * kKeyPanel;
constexpr int kValueBytes = kPanelsV * kValuePanel;

constexpr int kKeysAt = GROUPS * kQueryBytes;
constexpr int kValuesAt = kKeysAt + STAGES * kKeyBytes;
constexpr int kBarriersAt = kValuesAt + STAGES * kValueBytes;
constexpr int kSlots = 2;  // for pieces of work that have been told
constexpr int kBarriers = 2 * GROUPS + 4 * STAGES + 2 * kSlots;
constexpr int kToldAt = (kBarriersAt + kBarriers * 8 + 15) / 16 * 16;
constexpr int kToldBytes = 48;
constexpr int kSharedBytes = kToldAt + kSlots * kToldBytes;
static_assert(kSharedBytes == SHARED_BYTES, "as the plan says");

// A place in shared memory is full when its copy has arrived, and free when the warps that read it say so.
struct Barriers {
  Shared at;
  METHOD Shared query_full(int group) const { return at + group * 8; }
  METHOD Shared query_free(int group) const { return at + (GROUPS + group) * 8; }
  METHOD Shared key_full(int stage) const { return at + (2 * GROUPS + stage) * 8; }
  METHOD Shared key_free(int stage) const { return key_full(stage) + STAGES * 8; }
  METHOD Shared value_full(int stage) const { return key_full(stage) + 2 * STAGES * 8; }
  METHOD Shared value_free(int stage) const { return key_full(stage) + 3 * STAGES * 8; }
  METHOD Shared piece_full(int slot) const { return at + (2 * GROUPS + 4 * STAGES + slot) * 8; }
  METHOD Shared piece_free(int slot) const { return piece_full(slot) + kSlots * 8; }

  METHOD void make() const {
    for (int group = 0; group < GROUPS; ++group) {
      mbarrier_init(query_full(group), 1);
      mbarrier_init(query_free(group), 4);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(key_full(stage), 1);
      mbarrier_init(key_free(stage), 4 * GROUPS);
      mbarrier_init(value_full(stage), 1);
      mbarrier_init(value_free(stage), 4 * GROUPS);
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(piece_full(slot), 1);
      mbarrier_init(piece_free(slot), 4 * GROUPS);
    }
    fence_mbarrier_init();
  }
};

// The place of a tile, and how often it has been used before: for K and for V, through all pieces of work.
template <int stages = STAGES>
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  METHOD void advance() {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One piece of work, and the tiles [first, last] of keys that any of its rows see.
struct Piece {
  Work work;
  Sequence s;
  int row;  // of the block's first one, inside the sequence
  int first, last;

  METHOD Piece(const Params &p, int id, int blocks)
      : work(work_of(p, id, blocks)), s(sequence_of(p, work.batch)) {
    row = work.block * kBlockQ;
    Seen seen = keys_seen(p, s, row, min(row + kBlockQ, s.rows) - 1);
    first = seen.low / BLOCK_K;
    last = seen.high > seen.low ? (seen.high - 1) / BLOCK_K : first - 1;
    if (p.num_splits > 1) {
      int share = (last - first + p.num_splits) / p.num_splits;
      first += work.part * share;
      last = min(last, first + share - 1);
    }
    if (row >= s.rows) last = first - 1;
  }
};

// What the warps that multiply are told of a piece, in shared memory: six divisions and as many reads of
// memory for each of them otherwise, at the start of a piece and at its end.
struct alignas(16) Told {
  struct alignas(16) {
    int row, first, last, rows;  // row -1: there is no more
  } range;
  struct alignas(16) {
    int keys, shift, head, batch;
  } sequence;
  struct alignas(16) {
    int part, row_batch;
    long long row0;
  } output;
};
static_assert(sizeof(Told) == kToldBytes, "three units");

// How many pieces there are, and how many blocks of rows a head has.
struct Pieces {
  int blocks, count;
  METHOD Pieces(const Params &p)
      : blocks((p.seqlen_q + kBlockQ - 1) / kBlockQ), count(blocks * p.num_splits * p.heads_q * p.batch) {}
};

// The next piece for this block; count or more: there is none. Every block asks until it gets none, so
// that there are `count` questions in all, and who asks the last leaves the counter as it was found.
DEVICE int next_piece(const Params &p, int count) {
  int grid = gridDim.x;
  if (count <= grid) return count;
  int before = atomicAdd((int *)p.counter, 1);
  if (before == count - 1) *(int *)p.counter = 0;
  return grid + before;
}

// ---- copying ------------------------------------------------------------------------------------

DEVICE void copy(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  Barriers barriers{shared + kBarriersAt};
  const TensorMap *queries = mapped.maps, *keys = queries + 1, *values = queries + 2;
  prefetch_tensormap(queries);
  prefetch_tensormap(keys);
  prefetch_tensormap(values);
  Turn<> of_keys, of_values;
  Turn<kSlots> of_pieces;
  unsigned used = 1;  // parity of the queries' place
  Pieces pieces(p);
  // What multiplies is told of each piece, but for those of sequences that end before; -1: that was all.
  auto tell = [&](const Told &told) {
    Shared to = shared + kToldAt + of_pieces.stage * kToldBytes;
    mbarrier_wait(barriers.piece_free(of_pieces.stage), of_pieces.parity ^ 1);
    store_shared(to, told.range);
    store_shared(to + 16, told.sequence);
    store_shared(to + 32, told.output);
    mbarrier_arrive(barriers.piece_full(of_pieces.stage));
    of_pieces.advance();
  };
  for (int id = workgroup_index(); id < pieces.count; id = next_piece(p, pieces.count)) {
    Piece piece(p, id, pieces.blocks);
    const Sequence &s = piece.s;
    if (piece.row >= s.rows) continue;
    tell(Told{{piece.row, piece.first, piece.last, s.rows},
              {s.keys, s.shift, piece.work.head, s.batch},
              {piece.work.part, s.row_batch, s.row0}});
    if (piece.last < piece.first) continue;
    int head_k = piece.work.head / (p.heads_q / p.heads_k);
    auto copy_keys = [&](int tile) {
      Shared full = barriers.key_full(of_keys.stage);
      mbarrier_wait(barriers.key_free(of_keys.stage), of_keys.parity ^ 1);
      mbarrier_arrive_expect_tx(full, kKeyBytes);
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        tma_load(shared + kKeysAt + of_keys.stage * kKeyBytes + i * kKeyPanel, keys, full, i * kWidth,
                 (int)s.key0 + tile * BLOCK_K, head_k, s.key_batch);
      of_keys.advance();
    };
    copy_keys(piece.last);
    for (int group = 0; group < GROUPS; ++group) {
      mbarrier_wait(barriers.query_free(group), used);
      mbarrier_arrive_expect_tx(barriers.query_full(group), kQueryBytes);
#pragma unroll
      for (int i = 0; i < kPanels; ++i)
        tma_load(shared + group * kQueryBytes + i * kQueryPanel, queries, barriers.query_full(group),
                 i * kWidth, (int)s.row0 + piece.row + group * kGroupRows, piece.work.head, s.row_batch);
    }
    used ^= 1;
    for (int tile = piece.last; tile >= piece.first; --tile) {
      if (tile > piece.first) copy_keys(tile - 1);
      Shared full = barriers.value_full(of_values.stage);
      mbarrier_wait(barriers.value_free(of_values.stage), of_values.parity ^ 1);
      mbarrier_arrive_expect_tx(full, kValueBytes);
#pragma unroll
      for (int i = 0; i < kPanelsV; ++i)
        tma_load(shared + kValuesAt + of_values.stage * kValueBytes + i * kValuePanel, values, full,
                 i * kWidthV, (int)s.key0 + tile * BLOCK_K, head_k, s.key_batch);
      of_values.advance();
    }
  }
  tell(Told{{-1, 0, 0, 0}, {}, {}});
}

// ---- multiplying --------------------------------------------------------------------------------

// S = Q K^T and O += P V, under way when these return.
DEVICE void multiply_keys(Scores &s, unsigned long long queries, unsigned long long keys) {
  typedef Operand<kWidth> Panel;
#pragma unroll
  for (int i = 0; i < kSteps; ++i)
    wgmma<DTYPE, false, false>(s, queries + Panel::step_along(i, kQueryPanel),
                               keys + Panel::step_along(i, kKeyPanel), i > 0);
  wgmma_commit();
}
DEVICE void multiply_values(Output &o, const Probabilities &p, unsigned long long values) {
#pragma unroll
  for (int i = 0; i < kSlices; ++i)
    wgmma<DTYPE, true>(o, p[i], values + Operand<kWidthV>::step_down(i), true);
  wgmma_commit();
}

// The rows of a tile of V from `from` on become 0: what is beyond a sequence may hold anything, and P's 0
// does not make 0 of a NaN. Each group does so for itself; others write the same.
DEVICE void clear_rows(Shared values, int from, int group) {
  constexpr int kUnits = kWidthV / kUnit;
  Quad zeros{};
  for (int i = from * kUnits + thread_index() % kGroupThreads; i < BLOCK_K * kUnits; i += kGroupThreads)
#pragma unroll
    for (int panel = 0; panel < kPanelsV; ++panel) store_shared(values + panel * kValuePanel + i * 16, zeros);
  fence_proxy_async();
  bar_sync(8 + group, kGroupThreads);
}

// One row of float32, to the workspace of this part of the keys; or all rows in 16 bits.
DEVICE void store(const Params &p, Shared told, int first_row, const Rows &rows, Output &o) {
  auto range = load_shared<decltype(Told::range)>(told);
  auto sequence = load_shared<decltype(Told::sequence)>(told + 16);
  auto output = load_shared<decltype(Told::output)>(told + 32);
  Sequence s;
  s.batch = sequence.batch;
  s.row_batch = output.row_batch;
  s.row0 = output.row0;
  int lane = lane_index();
  first_row += range.row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    Finished end = finish(p, rows[h], sequence.head, output.part);
    int row = first_row + 8 * h + lane / 4;
    bool mine = row < range.rows;
#pragma unroll
    for (int t = 0; t < kDimTiles; ++t)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        o[4 * t + 2 * h + i] = end.inverse == 0.0f ? 0.0f : o[4 * t + 2 * h + i] * end.inverse;
    if (p.num_splits > 1) {
      if (!mine) continue;
      int column = lane % 4 * 2;
      long long line = part_line(p, s, row, sequence.head, output.part);
      float *to = (float *)p.partial_out + line * p.head_dim_v + column;
#pragma unroll
      for (int t = 0; t < kDimTiles; ++t)
        if (8 * t < p.head_dim_v)
          *(float2 *)(to + 8 * t) = make_float2(o[4 * t + 2 * h], o[4 * t + 2 * h + 1]);
      if (column == 0) ((float *)p.partial_lse)[line] = end.lse;
      continue;
    }
    if (p.lse && mine && lane % 4 == 0)
      ((float *)p.lse)[s.row_batch * p.lse_batch + sequence.head * p.lse_head + s.row0 + row] = end.lse;
    unsigned short *to = (unsigned short *)p.out + s.row_batch * p.out_batch + (s.row0 + row) * p.out_row +
                         sequence.head * p.out_head + lane % 4 * kUnit;
#pragma unroll
    for (int t = 0; t < kDimTiles; t += 4) {
      unsigned x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        x[i] = Format<DTYPE>::nearest(o[4 * (t + i) + 2 * h], o[4 * (t + i) + 2 * h + 1]);
      gather(x);
      if (mine && 8 * t + lane % 4 * kUnit < p.head_dim_v)
        *(Quad *)(to + 8 * t) = Quad{{x[0], x[1], x[2], x[3]}};
    }
  }
}

// What all lanes have, and the compiler is told so.
DEVICE int same(int x) { return __shfl_sync(kAllLanes, x, 0); }

DEVICE void multiply(const Params &p, Shared shared, int group) {
  Barriers barriers{shared + kBarriersAt};
  int in_group = wave_index() % 4;
  bool speaker = lane_index() == 0;  // for its warp
  auto release = [&](Shared barrier) {
    if (speaker) mbarrier_arrive(barrier);
  };
  float scale = to_base_2(p);
  unsigned long long queries = Operand<kWidth>::along(shared + group * kQueryBytes);
  unsigned long long keys = Operand<kWidth>::along(shared + kKeysAt);
  unsigned long long values = Operand<kWidthV>::down(shared + kValuesAt, kValuePanel);

  // Groups issue their products in turn, and the softmax of one runs under those of the others.
  int mine = 1 + group, next = 1 + (group + 1) % GROUPS;
  if (GROUPS > 1 && group == GROUPS - 1) bar_arrive(next, 2 * kGroupThreads);

  Turn<> of_keys, of_values;
  Turn<kSlots> of_pieces;
  unsigned used = 0;  // parity of the queries' place
  while (true) {
    mbarrier_wait(barriers.piece_full(of_pieces.stage), of_pieces.parity);
    Shared told = shared + kToldAt + of_pieces.stage * kToldBytes;
    auto range = load_shared<decltype(Told::range)>(told);
    auto sequence = load_shared<decltype(Told::sequence)>(told + 16);
    int row = same(range.row), first = same(range.first), last = same(range.last);
    if (row < 0) break;
    Sequence s;
    s.rows = same(range.rows);
    s.keys = same(sequence.keys);
    s.shift = same(sequence.shift);
    s.batch = sequence.batch;
    int first_row = row + group * kGroupRows + in_group * 16;
    Rows rows{{kLowest, 0.0f}, {kLowest, 0.0f}};
    Output o;
#pragma unroll
    for (int i = 0; i < HEAD_DIM_V / 2; ++i) o[i] = 0.0f;

    if (first <= last) {
      Seen seen = keys_seen(p, s, first_row, min(first_row + 16, s.rows) - 1);
      Scores x;
      Probabilities y[2];  // of the tile that is multiplied, and of the one that is being made
      float factors[2];
      auto finish_scores = [&](int tile) {
        int key = tile * BLOCK_K;
        if (SCORE != PLAIN) add_terms(p, x, s, sequence.head, first_row, tile);
        if (key < seen.all_low || key + BLOCK_K > seen.all_high) mask(p, x, s, first_row, tile);
      };

      mbarrier_wait(barriers.query_full(group), used);
      used ^= 1;
      mbarrier_wait(barriers.key_full(of_keys.stage), of_keys.parity);
      hold(x);
      wgmma_fence();
      multiply_keys(x, queries, keys + of_keys.stage * (kKeyBytes / 16));
      wgmma_wait<0>();
      hold(x);
      release(barriers.key_free(of_keys.stage));
      of_keys.advance();
      finish_scores(last);
      if constexpr (kApart) {
        soften_apart<true>(scale, x, rows, y[0], factors);
      } else {
        soften_in_place(scale, x, rows, factors);
        round_to(y[0], x);
      }
      int valid = s.keys - last * BLOCK_K;
      if (valid < BLOCK_K && (p.cu_seqlens_k || p.seqused_k)) {
        mbarrier_wait(barriers.value_full(of_values.stage), of_values.parity);
        clear_rows(shared + kValuesAt + of_values.stage * kValueBytes, valid, group);
      }

      // The scores of a tile, and the product of the one before it with its values.
      auto step = [&](int tile, Probabilities &before, Probabilities &made) {
        mbarrier_wait(barriers.key_full(of_keys.stage), of_keys.parity);
        if (GROUPS > 1) bar_sync(mine, 2 * kGroupThreads);
        hold(x);
        hold(o);
        wgmma_fence();
        multiply_keys(x, queries, keys + of_keys.stage * (kKeyBytes / 16));
        mbarrier_wait(barriers.value_full(of_values.stage), of_values.parity);
        wgmma_fence();
        multiply_values(o, before, values + of_values.stage * (kValueBytes / 16));
        if (GROUPS > 1) bar_arrive(next, 2 * kGroupThreads);
        wgmma_wait<1>();
        hold(x);
        release(barriers.key_free(of_keys.stage));
        of_keys.advance();
        finish_scores(tile);
        bool raised;
        if constexpr (kApart)
          raised = soften_apart<false>(scale, x, rows, made, factors);
        else
          raised = soften_in_place(scale, x, rows, factors);
        wgmma_wait<0>();
        hold(o);
#pragma unroll
        for (int i = 0; i < kSlices; ++i) hold(before[i]);
        release(barriers.value_free(of_values.stage));
        of_values.advance();
        if (raised) rescale(o, factors);
        if constexpr (!kApart) round_to(made, x);
      };
      auto end = [&](Probabilities &before) {
        release(barriers.query_free(group));
        mbarrier_wait(barriers.value_full(of_values.stage), of_values.parity);
        hold(o);
        wgmma_fence();
        multiply_values(o, before, values + of_values.stage * (kValueBytes / 16));
        wgmma_wait<0>();
        hold(o);
        release(barriers.value_free(of_values.stage));
        of_values.advance();
      };
      int tile = last - 1;
      if constexpr (kApart) {
        // By twos, so that what one step makes is where the next one takes it.
        for (; tile > first; tile -= 2) {
          step(tile, y[0], y[1]);
          step(tile - 1, y[1], y[0]);
        }
        if (tile == first) {
          step(tile, y[0], y[1]);
          end(y[1]);
        } else {
          end(y[0]);
        }
      } else {
        for (; tile >= first; --tile) step(tile, y[0], y[0]);
        end(y[0]);
      }
    }
    // Read again: through the loop these would take registers that it has not got.
    store(p, told, group * kGroupRows + in_group * 16, rows, o);
    release(barriers.piece_free(of_pieces.stage));
    of_pieces.advance();
  }
}

extern "C" __global__ WORKGROUP(kThreads, 1) void attn_fwd(const __grid_constant__ MappedParams p) {
  extern __shared__ __align__(1024) char memory[];
  Shared shared = shared_address(memory);
  if (thread_index() == 0) Barriers{shared + kBarriersAt}.make();
  barrier();
  int group = wave_index() / 4;
  if (group == 0) {
    setmaxnreg_dec<kFew>();
    if (wave_index() == 0 && elect_one()) copy(p, shared);
  } else {
    setmaxnreg_inc<kMany>();
    multiply(p.params, shared, group - 1);
  }
}
