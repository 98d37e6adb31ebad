// How decode loads keys and values: by cp.async into rings in shared memory. A ring has STAGES stages of 16
// keys and their values.
//
// A ring belongs to a team of TEAM warps, which see the same keys and differ in their packed rows. A team of
// one waits for no other warp. Eight lanes copy 128 neighboring bytes of a row. A lane looks up one of the
// next 32 keys, through the page table if there is one, two rounds before it is used; its warp reads the
// address from shared memory. So dense caches and pages of any size are one path.
#pragma once
#include "decode_float8.h"

constexpr int kPiece = 16 / kSize;  // elements of 16 bytes
// Lanes that copy a row together: one of 64 bytes has no work for more.
constexpr int kCopying = (HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V) * kSize > 64 ? 8 : 4;
constexpr int kTeams = WARPS / TEAM;
constexpr int kStages = STAGES;
constexpr int kKeys = 16;                // of a stage
constexpr int kStride = kTeams * kKeys;  // between a team's stages, in keys
constexpr int kRound = kLanes / kKeys;   // stages whose keys a warp looks up together
constexpr int kRowsOfWarp = kLanes / kCopying;   // that a warp copies with one instruction
constexpr int kRowsAtOnce = kRowsOfWarp * TEAM;  // and its team

// 128 bytes of a row go to one 128-byte line of shared memory. With 16 bytes of padding a row instead,
// against bank conflicts, half of the sectors came twice (64 x 8192 keys: 100.7 M into the SMs where 67.1 M
// hold them all): 4.25 TB/s on an H200, not 4.39.
typedef Tile<kKeys, HEAD_DIM * kSize / 2> KeyTile;
// Where V is a view of K (LATENT), values are read where the keys lie.
typedef Tile<kKeys, (LATENT ? HEAD_DIM : HEAD_DIM_V) * kSize / 2> ValueTile;
constexpr int kStageBytes = KeyTile::kBytes + (LATENT ? 0 : ValueTile::kBytes);

static_assert(WARPS % TEAM == 0, "teams are alike");
static_assert(kKeys % kRowsAtOnce == 0, "a team's warps share a stage's rows");

// Byte offsets of a key and its value from their head's first element.
struct alignas(16) Row {
  long long k, v;
};

DEVICE int team_index() { return wave_index() / TEAM; }

// The team's copies have arrived for all its warps, and all have read the stage before. Named barriers of a
// team (bar.sync 1 ...) let teams drift: 3.0 TB/s, not 2.6, at 64 packed rows of 128. But racecheck does not
// understand them and reports races.
DEVICE void team_sync() {
  if constexpr (TEAM == 1)
    __syncwarp();
  else
    barrier();
}

// Copies the share of lane % kCopying of a row of up to `dim` elements: pieces of 16 bytes, 128 apart.
// Elements beyond head_dim and rows that do not exist become 0.
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

// Loads the keys of a team into its ring: begin, begin + 1, ..., kKeys of every kStride.
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

  // Stage by stage: `n` counts up from 0.
  METHOD void load(int n, int stage) {
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
    Shared to_k = to_k_ + stage * kStageBytes, to_v = to_v_ + stage * kStageBytes;
#pragma unroll
    for (int i = 0; i < kKeys; i += kRowsAtOnce) {
      int row = first_ + i;
      Row at = rows_[n % kRound * kKeys + row];
      bool exists = begin_ + n * kStride + row < stop_;
      copy_row<HEAD_DIM>(KeyTile::below(to_k, i), k_ + at.k, p_.head_dim, exists);
      if constexpr (!LATENT)
        copy_row<HEAD_DIM_V>(ValueTile::below(to_v, i), v_ + at.v, p_.head_dim_v, exists);
    }
  }

 private:
  struct Place {
    int page, row;  // `page` is what the batch strides count where there are no pages
  };

  // The key that this lane looks up for the stages n ... n + kRound - 1.
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
