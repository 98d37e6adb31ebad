// How keys come from memory to a decode kernel: by cp.async into rings of slots in shared memory, 16
// keys and their values a slot, STAGES slots a ring.
//
// A ring belongs to a team of TEAM warps, which see the same keys and differ in their lines; a team of
// one waits for no other warp. Eight lanes copy 128 neighbouring bytes of a row. A lane finds one of
// the next 32 keys, through the page table where there is one, whose answers are asked for two rounds
// ahead; its warp reads the address from shared memory. Dense caches and pages of any size are one path.
#pragma once
#include "decode_float8.h"

constexpr int kPiece = 16 / kSize;  // elements of 16 bytes
// Lanes that copy a row together: one of 64 bytes has no work for more.
constexpr int kCopying = (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V) * kSize > 64 ? 8 : 4;
constexpr int kTeams = WARPS / TEAM;
constexpr int kStages = STAGES;
constexpr int kKeys = 16;                // of a slot
constexpr int kStride = kTeams * kKeys;  // between a team's slots, in keys
constexpr int kRound = kLanes / kKeys;   // slots whose keys a warp looks up together
constexpr int kRowsOfWarp = kLanes / kCopying;   // that a warp copies with one instruction
constexpr int kRowsAtOnce = kRowsOfWarp * TEAM;  // and its team

// What 128 bytes of a row are copied to is one line of shared memory, too. With rows of 16 bytes more
// instead, against bank conflicts, half of the sectors came twice (64 x 8192 keys: 100.7 M into the SMs
// where 67.1 M hold them all): 4.25 TB/s on an H200, not 4.39.
typedef Tile<kKeys, HEAD_DIM * kSize / 2> KeyTile;
typedef Tile<kKeys, HEAD_DIM_V * kSize / 2> ValueTile;
constexpr int kSlot = KeyTile::kBytes + ValueTile::kBytes;

static_assert(WARPS % TEAM == 0, "teams are alike");
static_assert(kKeys % kRowsAtOnce == 0, "a team's warps share a slot's rows");

// Byte offsets of a key and its value from their head's first element.
struct alignas(16) Row {
  long long k, v;
};

DEVICE int team_index() { return wave_index() / TEAM; }

// What the team's warps copied is there for all of them, and what they read is done with. Barriers of
// their own (bar.sync 1 ...) let teams drift: 3.0 TB/s, not 2.6, at 64 lines of 128. But then racecheck
// takes for races what the whole block's barriers order.
DEVICE void team_sync() {
  if constexpr (TEAM == 1)
    __syncwarp();
  else
    barrier();
}

// What lane % kCopying copies of a row of up to `dim` elements: pieces of 16 bytes, 128 apart. What lies
// beyond head_dim, and rows that do not exist, become 0.
template <int dim>
DEVICE void copy_row(Shared to, const char *from, int head_dim, bool exists) {
  constexpr int kStep = kCopying * kPiece;
#pragma unroll
  for (int first = 0; first < dim; first += kStep) {
    int element = first + lane_index() % kCopying * kPiece;
    if (dim - first >= kStep || element < dim)
      copy_16(to + first * kSize, from + first * kSize, exists && element < head_dim ? 16 : 0);
  }
}

// The keys begin, begin + 1 ... of a team, kKeys of every kStride, on their way to its ring.
class Stream {
 public:
  METHOD Stream(const Params &p, const Sequence &s, Row *rows, Scales &scales, Shared ring, int head_k,
                int member, int begin, int stop)
      : p_(p), s_(s), rows_(rows), scales_(scales), head_k_(head_k), begin_(begin), stop_(stop) {
    int lane = lane_index(), piece = lane % kCopying;
    first_ = member * kRowsOfWarp + lane / kCopying;
    to_k_ = ring + KeyTile::place(first_, piece);
    to_v_ = ring + KeyTile::kBytes + ValueTile::place(first_, piece);
    k_ = (const char *)p.k + (head_k * p.k_head + piece * kPiece) * kSize;
    v_ = (const char *)p.v + (head_k * p.v_head + piece * kPiece) * kSize;
    inverse_ = p.page_table ? 0xffffffffu / (unsigned)p.page_size : 0;
    look(0, next_);
    look(kRound, after_);
  }

  // Slot by slot: `n` counts up from 0.
  METHOD void load(int n, int slot) {
    if (n % kRound == 0) {
      __syncwarp();
      rows_[lane_index()] = Row{(next_.page * p_.k_batch + next_.row * p_.k_row) * kSize,
                                (next_.page * p_.v_batch + next_.row * p_.v_row) * kSize};
      if constexpr (kFloat8)
        copy_scales(scales_, p_, head_k_, next_.page, next_.row, n / kRound, key(n) < stop_);
      __syncwarp();
      next_ = after_;
      look(n + 2 * kRound, after_);
    }
    Shared to_k = to_k_ + slot * kSlot, to_v = to_v_ + slot * kSlot;
#pragma unroll
    for (int i = 0; i < kKeys; i += kRowsAtOnce) {
      int row = first_ + i;
      Row at = rows_[n % kRound * kKeys + row];
      bool exists = begin_ + n * kStride + row < stop_;
      copy_row<HEAD_DIM>(KeyTile::below(to_k, i), k_ + at.k, p_.head_dim, exists);
      copy_row<HEAD_DIM_V>(ValueTile::below(to_v, i), v_ + at.v, p_.head_dim_v, exists);
    }
  }

 private:
  struct Place {
    int page, row;  // `page` is what the batch strides count where there are no pages
  };

  // The lane's of the slots n ... n + kRound - 1.
  METHOD int key(int n) const {
    int lane = lane_index();
    return begin_ + (n + lane / kKeys) * kStride + lane % kKeys;
  }

  // Where that is; one beyond the end as the last. The quotient by the page size takes no division:
  // `inverse_` is floor((2^32 - 1) / size), and the estimate right or 1 less.
  METHOD void look(int n, Place &place) {
    int known = min(key(n), stop_ - 1);
    place = Place{s_.key_batch, (int)s_.key0 + known};
    if (!p_.page_table || begin_ >= stop_) return;
    unsigned position = known + s_.padding, size = p_.page_size;
    unsigned page = __umulhi(position, inverse_);
    unsigned row = position - page * size;
    if (row >= size) {
      page += 1;
      row -= size;
    }
    place.row = row;
    place.page = int_at(p_.page_table, s_.batch * p_.page_table_batch + page);
  }

  const Params &p_;
  const Sequence &s_;
  Row *rows_;
  Scales &scales_;
  Shared to_k_, to_v_;
  const char *k_, *v_;
  unsigned inverse_;
  int head_k_, begin_, stop_, first_;
  Place next_, after_;
};
