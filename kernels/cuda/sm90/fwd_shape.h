// What a block of the forward is made of: sizes, where things lie in shared memory, barriers, its work.
#pragma once
#include "float8.h"
#include "tma.h"
#include "../sm80/schedule.h"

constexpr int kGroupThreads = 128;
constexpr int kGroupRows = 64;
constexpr int kBlockQ = GROUPS * kGroupRows;
constexpr int kThreads = (GROUPS + 1) * kGroupThreads;
// Registers of a thread of those that copy and those that multiply: 512 a lane of an SM's four parts.
constexpr int kFew = GROUPS == 3 ? 32 : kFloat8 ? 40 : 24;
constexpr int kMany = GROUPS == 3 ? 160 : kFloat8 ? 232 : 240;

// Whether groups issue their products in turn.
constexpr bool kTurns = GROUPS > 1;

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
constexpr int kQueryPanel = kGroupRows * kRowBytes;
constexpr int kKeyPanel = BLOCK_K * kRowBytes;
constexpr int kValuePanel = BLOCK_K * kRowBytesV;
constexpr int kQueryBytes = kPanels * kQueryPanel;  // of a group
constexpr int kKeyBytes = kPanels * kKeyPanel;
constexpr int kValueBytes = kPanelsV * kValuePanel;

constexpr int kKeysAt = GROUPS * kQueryBytes;
constexpr int kValuesAt = kKeysAt + STAGES * kKeyBytes;
constexpr int kTurnedAt = kValuesAt + STAGES * kValueBytes;
constexpr int kBarriersAt = kTurnedAt + (kFloat8 ? STAGES * kValueBytes : 0);
constexpr int kSlots = 2;  // for pieces of work that have been told
constexpr int kBarriers = 2 * GROUPS + (kFloat8 ? 6 : 4) * STAGES + 2 * kSlots;
constexpr int kToldAt = (kBarriersAt + kBarriers * 8 + 15) / 16 * 16;
constexpr int kToldBytes = kFloat8 ? 64 : 48;
// Of the warps: who reads a piece.
constexpr int kListeners = 4 * GROUPS + (kFloat8 ? kTurners : 0);
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
  // V as the products take it: turned, in float8.
  METHOD Shared operand_full(int stage) const { return value_full(stage) + (kFloat8 ? 2 * STAGES * 8 : 0); }
  METHOD Shared operand_free(int stage) const { return value_free(stage) + (kFloat8 ? 2 * STAGES * 8 : 0); }
  METHOD Shared piece_full(int slot) const { return at + (kBarriers - 2 * kSlots + slot) * 8; }
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
      mbarrier_init(operand_free(stage), 4 * GROUPS);
      if (kFloat8) {
        mbarrier_init(value_free(stage), kTurners);
        mbarrier_init(operand_full(stage), kTurners);
      }
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      mbarrier_init(piece_full(slot), 1);
      mbarrier_init(piece_free(slot), kListeners);
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
static_assert(sizeof(Told) == 48, "three units; behind them HeadScales, in float8");

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

// What all lanes have, and the compiler is told so.
DEVICE int same(int x) { return __shfl_sync(kAllLanes, x, 0); }
