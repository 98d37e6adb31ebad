// A kernel's way along a block list.
#pragma once
#include "../lists.h"

// Entries one after the other. A lane has one of 64 of them, and a tile's comes from its lane: a scalar load
// would wait for all LDS reads that are on their way.
struct Entries {
  List list;
  int lanes;   // the lane's entry
  int number;  // of the one that comes next

  METHOD void begin(const List &of) {
    list = of;
    number = 0;
  }
  METHOD bool more() const { return number < list.count; }
  // `behind` comes behind the last: a tile beyond the end, of which nothing is loaded.
  METHOD int next(int behind) {
    int at = number % kLanes;
    if (at == 0) {
      int mine = number + lane_index();
      lanes = behind;
      if (mine < list.count) lanes = list.entries[mine];
      pin(lanes);  // waited for here, not where each tile takes its own
    }
    ++number;
    return __builtin_amdgcn_readlane(lanes, at);
  }
};

// The forward's, of tiles of `size` keys: which is at hand, and which ones follow. It is known three tiles
// ahead, as keys are loaded two tiles before their probabilities are made.
template <int size>
struct Walk {
  Entries entries;
  int end;                      // of the keys
  int now, next, after, later;  // entries: of the tile at hand and the three behind it

  METHOD void begin(const List &list, int end_of_keys) {
    end = end_of_keys;
    entries.begin(list);
    now = entries.next(behind());
    next = entries.next(behind());
    after = entries.next(behind());
    later = entries.next(behind());
  }
  // At the end of a tile: the branch around a load would divide the beats.
  METHOD void advance() {
    now = next;
    next = after;
    after = later;
    later = entries.next(behind());
  }
  METHOD int behind() const { return (end + size - 1) / size; }
  METHOD int key(int entry) const { return tile_of(entry) * size; }
  // From one tile to another.
  METHOD int keys(int from, int to) const { return key(to) - key(from); }
};
