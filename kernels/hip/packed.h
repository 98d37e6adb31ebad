// The work tile of a workgroup of a packed batch, by the true lengths: `size` rows (or keys) of one head of one
// sequence.
//
// An XCD gets heads, of all sequences, so all XCDs have equal work whatever the lengths. (By sequences, as
// schedule.h divides a dense batch, one long sequence would keep one XCD busy and seven idle.) The query heads of a
// KV head go side by side, because they read the same K and V. The highest blocks of all sequences come first: under
// a causal mask they see the most keys. Sequences go in sections of one per lane.
//
// A wavefront executes all of this together.
#pragma once
#include "schedule.h"
#include "../sequence.h"

// What `combine` makes of every lane's `x`, none of them below 0.
template <typename Combine>
DEVICE int over_lanes(int x, Combine combine) {
#define STEP(control, rows) x = combine(x, __builtin_amdgcn_update_dpp(0, x, control, rows, 0xf, false))
  STEP(0x111, 0xf);  // row_shr:1
  STEP(0x112, 0xf);  // row_shr:2
  STEP(0x114, 0xf);  // row_shr:4
  STEP(0x118, 0xf);  // row_shr:8
  STEP(0x142, 0xa);  // row_bcast:15
  STEP(0x143, 0xc);  // row_bcast:31
#undef STEP
  return __builtin_amdgcn_readlane(x, kLanes - 1);
}
DEVICE int sum_of_lanes(int x) {
  return over_lanes(x, [](int a, int b) { return a + b; });
}
DEVICE int max_of_lanes(int x) {
  return over_lanes(x, [](int a, int b) { return max(a, b); });
}

// Blocks of the sequence `batch`, each lane's own.
template <bool of_keys, int size>
DEVICE int blocks_of(const Params &p, int batch) {
  if (batch >= p.batch) return 0;
  Sequence s = sequence_of(p, batch);
  return ((of_keys ? s.keys : s.rows) + size - 1) / size;
}

// Of `heads` query heads, or KV heads if workgroups own keys. Returns false if workgroup `id` has no work: the host
// only knows how many tiles there may be.
template <bool of_keys, int size>
DEVICE bool packed_work(const Params &p, int id, int heads, int parts, Work &work) {
  int pieces = 0;  // of a head
#pragma unroll 1
  for (int first = 0; first < p.batch; first += kLanes)
    pieces += blocks_of<of_keys, size>(p, first + lane_index());
  pieces = sum_of_lanes(pieces) * parts;
  int spare = heads % p.dies, piece;
  if (id < spare * pieces) {
    work.head = id % spare;
    piece = id / spare;
  } else {
    int place = (id - spare * pieces) / p.dies, of_die = heads / p.dies;
    if (place >= of_die * pieces) return false;
    int group = of_keys ? 1 : p.heads_q / p.heads_k;
    int beside = of_die % group == 0 ? group : group % of_die == 0 ? of_die : 1;
    int members = place / (beside * pieces);
    place -= members * beside * pieces;
    piece = place / beside;
    work.head = spare + id % p.dies * of_die + members * beside + place % beside;
  }
  work.part = piece % parts;
  piece /= parts;

  int first = 0, blocks;
#pragma unroll 1
  for (;; first += kLanes) {
    blocks = blocks_of<of_keys, size>(p, first + lane_index());
    int all = sum_of_lanes(blocks);
    if (piece < all) break;
    piece -= all;
  }
  int top = max_of_lanes(blocks);
  unsigned long long with;
#pragma unroll 1
  for (;; --top) {
    with = __builtin_amdgcn_ballot_w64(blocks >= top);  // sequences that have this block
    int many = __builtin_popcountll(with);
    if (piece < many) break;
    piece -= many;
  }
  int before = __builtin_amdgcn_mbcnt_hi((unsigned)(with >> 32), __builtin_amdgcn_mbcnt_lo((unsigned)with, 0));
  int lane = __builtin_ctzll(__builtin_amdgcn_ballot_w64(blocks >= top && before == piece));
  work.batch = first + lane;
  // The first keys are seen the most.
  work.block = of_keys ? __builtin_amdgcn_readlane(blocks, lane) - top : top - 1;
  return true;
}

// The work tile of this workgroup, of a packed or a dense batch. Returns false if it has none.
template <bool of_keys, int size>
DEVICE bool find_work(const Params &p, int heads, int parts, Work &work) {
  int id = workgroup_index();
  if (of_keys ? p.cu_seqlens_k : p.cu_seqlens_q) {
    if (!packed_work<of_keys, size>(p, id, heads, parts, work)) return false;
  } else {
    int blocks = ((of_keys ? p.seqlen_k : p.seqlen_q) + size - 1) / size;
    work = work_of(id, blocks, parts, heads, p.batch, p.dies);
    if (of_keys) work.block = blocks - 1 - work.block;  // the first keys are seen the most
  }
  // Lanes agree, but the compiler loses that where the two ways meet: small changes to a kernel, such as a score_mod,
  // then ended in "illegal VGPR to SGPR copy".
  work.block = __builtin_amdgcn_readfirstlane(work.block);
  work.part = __builtin_amdgcn_readfirstlane(work.part);
  work.head = __builtin_amdgcn_readfirstlane(work.head);
  work.batch = __builtin_amdgcn_readfirstlane(work.batch);
  return true;
}

// The rows of a workgroup that works on rows alone: `first` to `first + size - 1` of one head.
struct RowBlock {
  int batch, head, first;
};

// A packed sequence begins at its first row / size, plus one for each sequence before it. The workgroups between two
// sequences have no rows.
template <int size>
DEVICE RowBlock rows_of_workgroup(const Params &p) {
  int id = workgroup_index();
  if (!p.cu_seqlens_q) {
    int blocks = (p.seqlen_q + size - 1) / size;
    return RowBlock{id / blocks / p.heads_q, id / blocks % p.heads_q, id % blocks * size};
  }
  int place = id / p.heads_q, begun = 0;
#pragma unroll 1
  for (int section = 0; section < p.batch; section += kLanes) {
    int mine = section + lane_index();
    bool is_begun = mine < p.batch && int_at(p.cu_seqlens_q, mine) / size + mine <= place;
    int many = __builtin_popcountll(__builtin_amdgcn_ballot_w64(is_begun));
    begun += many;
    if (many < kLanes) break;
  }
  int batch = begun - 1;
  return RowBlock{batch, id % p.heads_q, (place - int_at(p.cu_seqlens_q, batch) / size - batch) * size};
}
