// Which tiles a mask_mod leaves to be visited, as pyfa/blocks lists them for this kernel's own tiles. Only in
// plans with LISTS (1: visits by them; 2: is given them and visits every tile, where registers are short); counts
// and entries come behind what the mods captured. `uniform` says that a number is the same for all lanes.
#pragma once
#include "mods.h"

// Of one tile of rows: tiles of keys in ascending order; of keys, tiles of rows. No entry is read whose
// number is `count` or more.
struct List {
  const GLOBAL int *entries;
  int count;
};
// Where an entry is below 0, the mask_mod hides nothing in its tile.
DEVICE int tile_of(int entry) { return entry & 0x7fffffff; }
DEVICE bool is_full(int entry) { return entry < 0; }

// `head`: the query head.
DEVICE List list_of(const Params &p, int batch, int head, int tile) {
  const Captured &counts = captured_of(p)[MOD_CAPTURED], &entries = captured_of(p)[MOD_CAPTURED + 1];
  // The strides are 0 where one list serves all.
  long long row = (long long)batch * counts.stride[0] + head * counts.stride[1] + tile;
  return List{(const GLOBAL int *)entries.data + row * entries.stride[2],
              uniform(((const GLOBAL int *)counts.data)[row])};
}

// The number of the first entry whose tile, of `size`, ends behind `place`.
DEVICE int first_behind(const List &list, int size, int place) {
  int low = 0, high = list.count;
  while (low < high) {
    int middle = (low + high) / 2;
    if ((long long)(tile_of(uniform(list.entries[middle])) + 1) * size > place)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Leaves of `list` the tiles, of `size`, that have something in [begin, end).
DEVICE void cut_to(List &list, int size, int begin, int end) {
  int first = begin > 0 ? first_behind(list, size, begin) : 0;
  // Whose last entry lies inside, as it mostly does, has none to be looked for.
  bool inside = list.count > 0 && tile_of(uniform(list.entries[list.count - 1])) * (long long)size < end;
  int last = list.count;
  if (!inside && list.count > 0) {
    last = end > 0 ? first_behind(list, size, end - 1) : 0;
    // It has something below `end`, unless it begins there.
    if (last < list.count && tile_of(uniform(list.entries[last])) * (long long)size < end) ++last;
  }
  list.entries += first;
  list.count = last > first ? last - first : 0;
}
