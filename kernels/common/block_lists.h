// Makes the block lists of a mask_mod (../lists.h, pyfa/blocks): which tiles of ROWS x KEYS it leaves anything of,
// and in which it hides nothing. No memory but the lists and, where it reads tensors, their bounds (tile_bounds.h).
//
// A workgroup makes the list of one tile of rows, or of keys where OWNS_KEYS. With OWN_BOUNDS its wavefronts first
// compute what tile_bounds.h does, of the tiles that the list may name: in short lists that is less than another
// launch. A thread takes one tile that the list
// may name, and computes bounds of the mask_mod (mask_range.h): they decide most tiles of masks that compare places
// or documents. A wavefront takes each tile that is left, and asks the mask_mod for its points until it has seen a
// key and not seen another. What is to be visited is then counted and written in order.
//
// The lists come behind what the mods captured, as in the kernels that visit by them, and the table of
// tile_bounds.h behind the lists. Needs a vendor's mods.h, `lanes_where` and `count_of`.
#pragma once
#include "../lists.h"
#include "../ranges.h"
#include "mask_range.h"

#if !defined(ROWS) || !defined(KEYS) || !defined(OWNS_KEYS)
#error "the plan defines ROWS, KEYS and OWNS_KEYS"
#endif

constexpr int kThreads = 512, kWaves = kThreads / kLanes;
constexpr int kAtOnce = 8;  // points of a lane between two looks at what all have seen
constexpr int kPoints = ROWS * KEYS;

enum State { kEmpty, kPartial, kWhole, kUndecided };

struct Meeting {
  int state[kThreads], visited[kWaves];
#if OWN_BOUNDS
  long long bounds[OWN_BOUNDS + 1][2 * kTabled];  // of the tiles that the list may name, then of the list's own tile
#endif
};

DEVICE int state_by_range(const ModPlace &at, Range rows, Range keys, Table of_rows, Table of_keys) {
  Range seen = mask_range(at.captured, Range{at.b, at.b}, Range{at.h, at.h}, rows, keys, of_rows, of_keys);
  return seen.low != 0 ? kWhole : seen.high != 0 ? kUndecided : kEmpty;
}

// Of what bounds leave open. A wavefront's lanes take the points row by row; those beyond the end stand for the
// last one, which adds nothing.
DEVICE int state_by_points(const ModPlace &at, Range rows, Range keys) {
  int any = 0, all = 1;
  for (int first = lane_index(); first < kPoints + lane_index(); first += kAtOnce * kLanes) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      int point = first + j * kLanes;
      if (kPoints % (kAtOnce * kLanes)) point = min(point, kPoints - 1);
      int row = min((int)rows.low + point / KEYS, (int)rows.high);
      int key = min((int)keys.low + point % KEYS, (int)keys.high);
      int seen = mod_mask(at.captured, at.b, at.h, row, key);
      pin(seen);  // as truth values they take two scalar registers each: 16 spilled
      any |= seen;
      all &= seen;
    }
    if (lanes_where(any) && lanes_where(!all)) return kPartial;
  }
  return lanes_where(any) ? kWhole : kEmpty;
}

DEVICE void list_blocks(const Params &p, Meeting &meeting) {
  const Captured &counts = captured_of(p)[MOD_CAPTURED], &entries = captured_of(p)[MOD_CAPTURED + 1];
  int heads = counts.size[1], lists = counts.size[2], most = entries.size[3];
  int id = workgroup_index(), thread = thread_index(), wave = wave_index();
  int head = id / lists % heads, batch = id / lists / heads;
  int owned = id % lists;
  GLOBAL int *list = (GLOBAL int *)entries.data + (long long)id * most;
  ModPlace at(p, batch, head);
  at.pin_all();
  auto row_of = [&](int tile) { return OWNS_KEYS ? tile : owned; };
  auto key_of = [&](int tile) { return OWNS_KEYS ? owned : tile; };
  auto rows_of = [&](int tile) { return places_of(row_of(tile), ROWS, p.seqlen_q, at.q); };
  auto keys_of = [&](int tile) { return places_of(key_of(tile), KEYS, p.seqlen_k, at.kv); };
#if OWN_BOUNDS
  for (int i = wave; i <= most; i += kWaves) {
    Range b{at.b, at.b}, h{at.h, at.h}, found[kTabled] = {};
    if ((i < most) == OWNS_KEYS)
      bounds_of_rows(at.captured, b, h, rows_of(i), found);
    else
      bounds_of_keys(at.captured, b, h, keys_of(i), found);
    if (lane_index() == 0)
#pragma unroll
      for (int j = 0; j < kTabled; ++j) {
        meeting.bounds[i][2 * j] = found[j].low;
        meeting.bounds[i][2 * j + 1] = found[j].high;
      }
  }
  barrier();
  auto table_of_rows = [&](int tile) { return (Table)meeting.bounds[OWNS_KEYS ? tile : most]; };
  auto table_of_keys = [&](int tile) { return (Table)meeting.bounds[OWNS_KEYS ? most : tile]; };
#else
  const Captured &tables = captured_of(p)[MOD_CAPTURED + 2];
  int of_rows = OWNS_KEYS ? most : lists;
  auto table_of_rows = [&](int tile) { return table_of(tables, batch, head, row_of(tile)); };
  auto table_of_keys = [&](int tile) { return table_of(tables, batch, head, of_rows + key_of(tile)); };
#endif

  int count = 0;
  for (int begin = 0; begin < most; begin += kThreads) {
    int here = min(most - begin, kThreads);
    int tile = begin + thread, state = kEmpty;
    if (thread < here)
      state = state_by_range(at, rows_of(tile), keys_of(tile), table_of_rows(tile), table_of_keys(tile));
    meeting.state[thread] = state;
    barrier();
    for (int i = wave; i < here; i += kWaves) {
      if (uniform(meeting.state[i]) != kUndecided) continue;
      int found = state_by_points(at, rows_of(begin + i), keys_of(begin + i));
      if (lane_index() == 0) meeting.state[i] = found;
    }
    barrier();
    state = meeting.state[thread];
    unsigned long long visited = lanes_where(state != kEmpty);
    if (lane_index() == 0) meeting.visited[wave] = count_of(visited);
    barrier();
    int place = count + count_of(visited & ((1ull << lane_index()) - 1));
    for (int i = 0; i < kWaves; ++i) {
      if (i < wave) place += meeting.visited[i];
      count += meeting.visited[i];
    }
    if (state != kEmpty) list[place] = state == kWhole ? (int)(tile | 1u << 31) : tile;
  }
  // Beyond the last: a tile that begins beyond the end.
  for (int i = count + thread; i < most; i += kThreads) list[i] = most;
  if (thread == 0) ((GLOBAL int *)counts.data)[id] = count;
}
