// A block's place in the order of work tiles, by what the host made of the launch's sizes (plans.order_of).
#pragma once
#include "../params.h"

// x / d for x from 0 to 2^31, of whose d the host made `inverse` (abi.inverse_of). A division takes about 100
// cycles, this about 15; and no block can load anything before it has found its work tile.
DEVICE int divide(int x, unsigned long long inverse) {
  unsigned long long low = (unsigned long long)(unsigned)x * (unsigned)inverse >> 32;
  unsigned long long high = (unsigned long long)(unsigned)x * (unsigned)(inverse >> 32);
  return inverse ? (int)(high + low >> 32) : x;
}

// A work tile's place among those of a section: `tile` of a head, and `pair`, the number of the head and sequence.
struct InSection {
  int tile, pair;
};
// Of work tile `id`; `tiles`: of a head, `pairs`: heads of all sequences.
DEVICE InSection place_in_section(const Params &p, int id, int tiles, int pairs) {
  int first = divide(id, p.section_tiles_inverse) * p.section;
  int members = min(p.section, pairs - first), place = id - first * tiles;
  int tile = divide(place, members < p.section ? p.last_section_inverse : p.section_inverse);
  return InSection{tile, first + place - tile * members};
}
