// What a block of the forward is made of: sizes, the layout of shared memory, barriers, work tiles.
#pragma once
#include "float8.h"
#include "tma.h"
#include "../sm80/schedule.h"

constexpr int kGroupThreads = 128;  // of a warpgroup
constexpr int kGroupRows = 64;      // query rows of a consumer warpgroup, or lines with PACKED
constexpr int kRowGroups = GROUPS / HALVES;
constexpr int kBlockQ = kRowGroups * kGroupRows;
constexpr int kThreads = (GROUPS + 1) * kGroupThreads;
// Registers of a thread. The 512 registers of each lane of an SM sub-partition are shared by one producer
// warp and GROUPS consumer warps, of each of BLOCKS blocks. Two warpgroups alone have all that they can use.
#ifndef BLOCKS
#define BLOCKS 1
#endif
constexpr bool kMovesRegisters = BLOCKS * (GROUPS + 1) > 2;
constexpr bool kManyCopies = HALVES > 1;  // that the producer issues for a tile: with 24 registers 48 bytes of stack
constexpr bool kTwoPacked = PACKED && BLOCKS > 1;  // with 24 registers the producer over pages has 8 bytes
constexpr int kProducerRegisters = GROUPS == 3 ? 32 : kFloat8 || kManyCopies || kTwoPacked ? 40 : 24;
constexpr int kConsumerRegisters = GROUPS == 3 ? 160 : kTwoPacked ? 216 : kFloat8 || kManyCopies || BLOCKS > 1 ? 232 : 240;
// A block has only the registers that it starts with, equally many for each warp, in steps of 8 a thread. If its
// warps asked for more in sum, setmaxnreg would wait forever. For example, one producer of 32 and two consumers of 240
// ask for 512, but three warps start with 3 * 168 = 504.
constexpr int kRegistersAtStart = 512 / BLOCKS / (GROUPS + 1) / 8 * 8;
static_assert(kProducerRegisters + GROUPS * kConsumerRegisters <= (GROUPS + 1) * kRegistersAtStart, "of a lane");

// Whether consumer warpgroups alternate: one issues its products while another computes its softmax.
constexpr bool kPingPong = GROUPS > 1;
// Whether they also take turns for the first product of a work tile, so that the first softmax of one runs under the
// product of the next.
constexpr bool kFirstInTurn = HEAD_DIM == 192;

constexpr int kSteps = HEAD_DIM / kInner;
DEVICE constexpr int panel_bytes(int head) {
  int row = head * (kFloat8 ? 1 : 2);
  return row % 128 == 0 ? 128 : row % 64 == 0 ? 64 : 32;
}
constexpr int kRowBytes = panel_bytes(HEAD_DIM);  // of a panel of Q and K
constexpr int kRowBytesV = panel_bytes(HEAD_DIM_V);
constexpr int kWidth = kFloat8 ? kRowBytes : kRowBytes / 2;  // elements
constexpr int kWidthV = kFloat8 ? kRowBytesV : kRowBytesV / 2;
constexpr int kPanels = HEAD_DIM / kWidth;
constexpr int kPanelsV = HEAD_DIM_V / kWidthV;
constexpr int kQPanel = kGroupRows * kRowBytes;
constexpr int kKPanel = BLOCK_K * kRowBytes;
constexpr int kVPanel = BLOCK_K * kRowBytesV;
constexpr int kQBytes = kPanels * kQPanel;  // of a warpgroup
constexpr int kKBytes = kPanels * kKPanel;
constexpr int kVBytes = kPanelsV * kVPanel;

constexpr int kKAt = kRowGroups * kQBytes;
constexpr int kVAt = kKAt + STAGES * kKBytes;
constexpr int kTransposedAt = kVAt + STAGES * kVBytes;
// Tiles of the bias, which come with those of K: of each warpgroup panels of 64 keys.
constexpr int kBiasPanel = kGroupRows * 128;
constexpr int kBiasBytes = SCORE == BIAS ? kRowGroups * BLOCK_K / 64 * kBiasPanel : 0;
static_assert(SCORE != BIAS || BLOCK_K % 64 == 0, "whole panels");
constexpr int kBiasAt = kTransposedAt;
constexpr int kBarriersAt = kTransposedAt + STAGES * (kFloat8 ? kVBytes : kBiasBytes);
constexpr int kWorkStages = 2;  // work tiles that the producer may be ahead
constexpr int kBarriers = 2 * GROUPS + (kFloat8 ? 6 : 4) * STAGES + 2 * kWorkStages + 1;
constexpr int kWorkInfoAt = (kBarriersAt + kBarriers * 8 + 15) / 16 * 16;
constexpr int kWorkInfoBytes = kFloat8 ? 64 : 48;
// Whether a producer warp of its own loads V. A thread that issued all copies of pages of 16 keys was slower than the
// products (measured before WHOLE_PAGES). In float8 the other warps transpose.
constexpr bool kTwoProducers = PAGE_ROWS != 0 && !kFloat8;
// Whether a warp of its own finds the work tiles, and another loads Q. In float8 all warps of the producer warpgroup
// are busy; with pages these spill 32 bytes. Plans with PACKED are for few rows, and those with chunks have no registers
// to spare.
constexpr bool kScheduler = !kFloat8 && !kTwoProducers && !PACKED && !kChunkTiles;
constexpr int kWorkReaders = 4 * GROUPS + (kFloat8 ? kTransposers : kTwoProducers ? 1 : kScheduler ? 2 : 0);  // warps
// What a warpgroup keeps between chunks (fwd_chunks.h), if it lies in shared memory: a base and a sum of each row, then
// the output.
constexpr int kBeforeAt = kWorkInfoAt + kWorkStages * kWorkInfoBytes;
constexpr int kBeforeStates = kGroupRows * 8;
constexpr int kBeforeBytes = CHUNK_SHARED ? kGroupRows * HEAD_DIM_V * 4 + kBeforeStates : 0;
constexpr int kSharedBytes = kBeforeAt + GROUPS * kBeforeBytes;
static_assert(kSharedBytes == SHARED_BYTES, "as the plan says");

// Each stage has two mbarriers. `full`: its copy has arrived. `empty`: the warps that read it are done.
struct Barriers {
  Shared at;
  METHOD Shared q_full(int group) const { return at + group * 8; }
  METHOD Shared q_empty(int group) const { return at + (GROUPS + group) * 8; }
  METHOD Shared k_full(int stage) const { return at + (2 * GROUPS + stage) * 8; }
  METHOD Shared k_empty(int stage) const { return k_full(stage) + STAGES * 8; }
  METHOD Shared v_full(int stage) const { return k_full(stage) + 2 * STAGES * 8; }
  METHOD Shared v_empty(int stage) const { return k_full(stage) + 3 * STAGES * 8; }
  // V as the products read it. In float8 that is the transposed copy.
  METHOD Shared operand_full(int stage) const { return v_full(stage) + (kFloat8 ? 2 * STAGES * 8 : 0); }
  METHOD Shared operand_empty(int stage) const { return v_empty(stage) + (kFloat8 ? 2 * STAGES * 8 : 0); }
  METHOD Shared work_wanted() const { return at + (kBarriers - 1) * 8; }
  METHOD Shared work_full(int stage) const { return at + (kBarriers - 1 - 2 * kWorkStages + stage) * 8; }
  METHOD Shared work_empty(int stage) const { return work_full(stage) + kWorkStages * 8; }

  METHOD void make() const {
    for (int group = 0; group < kRowGroups; ++group) {
      mbarrier_init(q_full(group), 1);
      mbarrier_init(q_empty(group), 4 * HALVES);
    }
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(k_full(stage), 1);
      mbarrier_init(k_empty(stage), 4 * GROUPS);
      mbarrier_init(v_full(stage), 1);
      mbarrier_init(operand_empty(stage), 4 * GROUPS);
      if (kFloat8) {
        mbarrier_init(v_empty(stage), kTransposers);
        mbarrier_init(operand_full(stage), kTransposers);
      }
    }
    mbarrier_init(work_wanted(), 1);
    for (int stage = 0; stage < kWorkStages; ++stage) {
      mbarrier_init(work_full(stage), 1);
      mbarrier_init(work_empty(stage), kWorkReaders);
    }
    fence_mbarrier_init();
    fence_proxy_async();  // for copies that this thread asks for at once
  }
};

// Where a pipeline stands: the stage that is next, and the parity of its phase. It runs on from one work
// tile to the next.
template <int stages = STAGES>
struct PipelineState {
  int stage = 0;
  unsigned phase = 0;
  METHOD void advance() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// How many query heads share a block, and how many rows of each a warpgroup has. 64 is not a multiple of every
// number of heads: the last lines may be nobody's.
DEVICE int heads_together(const Params &p) { return PACKED ? p.group : 1; }
DEVICE int work_heads(const Params &p) { return PACKED ? p.heads_k : p.heads_q; }
DEVICE int rows_of_group(const Params &p) { return PACKED ? divide(kGroupRows, p.group_inverse) : kGroupRows; }
DEVICE int rows_of_block(const Params &p) { return kRowGroups * rows_of_group(p); }

// Line `line` of a block whose first row is `row`; `head`: of the work tile.
struct Line {
  int row, head;
  bool exists;
  METHOD Line(const Params &p, int row, int head, int line) : row(row + line), head(head), exists(true) {
    if constexpr (PACKED) {
      int heads = heads_together(p), rows = rows_of_group(p), place = line % kGroupRows;
      this->row = row + line / kGroupRows * rows + place % rows;
      this->head = head * heads + min(place / rows, heads - 1);
      exists = place < rows * heads;
    }
  }
};

// What is visited at number `n` of a work tile's keys: tile `n` itself, or entry `n` of its block list, whose
// sign says that the mask_mod hides nothing there.
#if LISTS
struct Visits {
  const int *entries;
  METHOD Visits(const Params &p, const Sequence &s, int head, int row)
      : entries(list_of(p, s.batch, head, row / kBlockQ).entries) {}
  METHOD int operator[](int n) const { return entries[n]; }
};
#else
struct Visits {
  METHOD Visits(const Params &, const Sequence &, int, int) {}
  METHOD int operator[](int n) const { return n; }
};
DEVICE int tile_of(int visit) { return visit; }
DEVICE bool is_full(int) { return false; }
#endif

// One work tile: the rows of a block, of one head or with PACKED of one KV head, of one split, and the numbers [first, last] of what is visited of
// the tiles of keys that any of its rows sees.
struct WorkTile {
  Work work;
  Sequence s;
  int row;  // the first one, inside the sequence
  int first, last;

  METHOD WorkTile(const Params &p, const Work &work) : work(work), s(sequence_of(p, work.batch)) {
    row = work.block * rows_of_block(p);
    Seen seen = keys_seen(p, s, row, min(row + rows_of_block(p), s.rows) - 1);
#if LISTS
    List all = list_of(p, s.batch, work.head, work.block), list = all;
    cut_to(list, BLOCK_K, seen.low, max(seen.high, seen.low));
    first = (int)(list.entries - all.entries);
    last = first + list.count - 1;
#else
    first = seen.low / BLOCK_K;
    last = seen.high > seen.low ? (seen.high - 1) / BLOCK_K : first - 1;
#endif
    if (p.num_splits > 1) {
      if constexpr (kChunkTiles != 0) {
        int begin = work.split * kChunkTiles;
        first = max(first, begin);
        last = min(last, begin + kChunkTiles - 1);
      } else {
        int share = divide(last - first + p.num_splits, p.splits_inverse);
        first += work.split * share;
        last = min(last, first + share - 1);
      }
    }
    if (row >= s.rows) last = first - 1;
  }
};

// What the producer tells the other warps of a work tile, in shared memory. Without it each warp computed
// this by itself, twice: six divisions and as many loads at the start of a work tile and at its end.
struct alignas(16) WorkTileInfo {
  struct alignas(16) {
    int row, first, last, rows;  // row -1: there is no more work
  } range;
  struct alignas(16) {
    int keys, shift, head, batch;
  } sequence;
  struct alignas(16) {
    int split, row_batch;
    long long row0;
  } output;
};
static_assert(sizeof(WorkTileInfo) == 48, "three 16-byte units; in float8 HeadScales follow");

// How many work tiles there are, and how many blocks of rows a head has.
struct WorkTiles {
  int blocks, count;
  METHOD WorkTiles(const Params &p)
      : blocks((p.seqlen_q + rows_of_block(p) - 1) / rows_of_block(p)),
        count(blocks * p.num_splits * work_heads(p) * p.batch) {}
};

// Whether work tiles are found by the true lengths (../packed.h), where a warp of its own does that.
DEVICE bool by_true_lengths(const Params &p) { return kScheduler && (p.cu_seqlens_q || p.seqused_q); }

DEVICE WorkTileInfo info_of(const WorkTile &tile) {
  const Sequence &s = tile.s;
  return WorkTileInfo{{tile.row, tile.first, tile.last, s.rows},
                      {s.keys, s.shift, tile.work.head, s.batch},
                      {tile.work.split, s.row_batch, s.row0}};
}

// The next work tile of this block; `count` or more means that there is none. Every block asks until it
// gets none, so there are `count` questions in all. Whoever asks the last one sets the counter back to 0. No
// counter is given to a grid of a block for each work tile.
DEVICE int next_work_tile(const Params &p, int count) {
  if (!p.counter) return count;
  int before = atomicAdd((int *)p.counter, 1);
  if (before == count - 1) *(int *)p.counter = 0;
  return gridDim.x + before;
}

// A value that all lanes share. The shuffle tells the compiler so.
DEVICE int broadcast(int x) { return __shfl_sync(kAllLanes, x, 0); }
