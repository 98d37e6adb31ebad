// Bounds of integers and truth values: what the function that pyfa/mods/emit_ranges.py writes is made of. It
// computes what a mask_mod can be in a tile from the tile's first and last rows and keys. Needs what captured.h
// has.
#pragma once
#include "captured.h"

// From `low` to `high`, both included; truth values are 0 and 1.
struct Range {
  long long low, high;
};

constexpr long long kIntMost = 0x7fffffff, kIntLeast = -kIntMost - 1;
constexpr long long kLongMost = 0x7fffffffffffffff, kLongLeast = -kLongMost - 1;
constexpr long long kFar = 1ll << 61;  // of operands up to it no sum leaves 64 bits

// A T of which nothing is known.
template <typename T>
DEVICE Range anything() {
  if (sizeof(T) == 1) return Range{0, 1};
  return sizeof(T) == 4 ? Range{kIntLeast, kIntMost} : Range{kLongLeast, kLongMost};
}
DEVICE bool is_exact(Range x) { return x.low == x.high; }
DEVICE bool is_within(Range x, long long low, long long high) { return low <= x.low && x.high <= high; }
// What a T holds of bounds that were computed in 64 bits. Values that may wrap around may be any.
template <typename T>
DEVICE Range fitted(Range x) {
  bool fits = sizeof(T) == 4 ? is_within(x, kIntLeast, kIntMost) : is_within(x, -kFar, kFar);
  return fits ? x : anything<T>();
}
// Of all values of two ranges.
DEVICE Range hull(Range x, Range y) { return Range{min(x.low, y.low), max(x.high, y.high)}; }

// ---- comparisons --------------------------------------------------------------------------------

// In vector registers: as truth values they take two scalar ones each, of which 10 spilled.
DEVICE Range compared(int always, int ever) {
  pin(always);
  pin(ever);
  return Range{always, ever};
}
DEVICE Range range_lt(Range x, Range y) { return compared(x.high < y.low, x.low < y.high); }
DEVICE Range range_le(Range x, Range y) { return compared(x.high <= y.low, x.low <= y.high); }
DEVICE Range range_gt(Range x, Range y) { return range_lt(y, x); }
DEVICE Range range_ge(Range x, Range y) { return range_le(y, x); }
DEVICE Range range_eq(Range x, Range y) {
  return compared(is_exact(x) && is_exact(y) && x.low == y.low, x.low <= y.high && y.low <= x.high);
}
DEVICE Range range_ne(Range x, Range y) {
  Range equal = range_eq(x, y);
  return Range{1 - equal.high, 1 - equal.low};
}

// ---- arithmetic ---------------------------------------------------------------------------------

DEVICE bool are_near(Range x, Range y) { return is_within(x, -kFar, kFar) && is_within(y, -kFar, kFar); }

template <typename T>
DEVICE Range range_add(Range x, Range y) {
  return are_near(x, y) ? fitted<T>(Range{x.low + y.low, x.high + y.high}) : anything<T>();
}
template <typename T>
DEVICE Range range_sub(Range x, Range y) {
  return are_near(x, y) ? fitted<T>(Range{x.low - y.high, x.high - y.low}) : anything<T>();
}
template <typename T>
DEVICE Range range_neg(Range x) {
  return range_sub<T>(Range{0, 0}, x);
}
template <typename T>
DEVICE Range range_abs(Range x) {
  if (!are_near(x, x)) return anything<T>();
  long long far = max(-x.low, x.high);
  return fitted<T>(Range{x.low > 0 ? x.low : x.high < 0 ? -x.high : 0, far});
}
template <typename T>
DEVICE Range range_mul(Range x, Range y) {
  if (!is_within(x, kIntLeast, kIntMost) || !is_within(y, kIntLeast, kIntMost)) return anything<T>();
  long long a = x.low * y.low, b = x.low * y.high, c = x.high * y.low, d = x.high * y.high;
  return fitted<T>(Range{min(min(a, b), min(c, d)), max(max(a, b), max(c, d))});
}
template <typename T>
DEVICE Range range_min(Range x, Range y) {
  return Range{min(x.low, y.low), min(x.high, y.high)};
}
template <typename T>
DEVICE Range range_max(Range x, Range y) {
  return Range{max(x.low, y.low), max(x.high, y.high)};
}
// By one divisor above 0 they grow with the dividend. In 64 bits a division takes 100 instructions.
DEVICE bool divides(Range y) { return is_exact(y) && y.low > 0; }
template <typename T>
DEVICE Range range_truncdiv(Range x, Range y) {
  T by = (T)y.low;
  return divides(y) ? Range{mod_truncdiv((T)x.low, by), mod_truncdiv((T)x.high, by)} : anything<T>();
}
template <typename T>
DEVICE Range range_floordiv(Range x, Range y) {
  T by = (T)y.low;
  return divides(y) ? Range{mod_floordiv((T)x.low, by), mod_floordiv((T)x.high, by)} : anything<T>();
}
template <typename T>
DEVICE Range range_mod(Range x, Range y) {
  if (!divides(y)) return anything<T>();
  Range times = range_floordiv<T>(x, y);
  if (!is_exact(times)) return Range{0, y.low - 1};
  return Range{x.low - times.low * y.low, x.high - times.low * y.low};
}

// ---- bits and truth values ----------------------------------------------------------------------

template <typename T>
DEVICE Range range_and(Range x, Range y) {
  if (sizeof(T) == 1 || (is_exact(x) && is_exact(y))) return Range{x.low & y.low, x.high & y.high};
  if (x.low >= 0 && y.low >= 0) return Range{0, min(x.high, y.high)};
  return x.low >= 0 ? Range{0, x.high} : y.low >= 0 ? Range{0, y.high} : anything<T>();
}
template <typename T>
DEVICE Range range_or(Range x, Range y) {
  if (sizeof(T) == 1 || (is_exact(x) && is_exact(y))) return Range{x.low | y.low, x.high | y.high};
  return anything<T>();
}
template <typename T>
DEVICE Range range_xor(Range x, Range y) {
  if (is_exact(x) && is_exact(y)) return Range{x.low ^ y.low, x.low ^ y.low};
  return anything<T>();
}
template <typename T>
DEVICE Range range_not(Range x) {
  return sizeof(T) == 1 ? Range{1 - x.high, 1 - x.low} : Range{~x.high, ~x.low};
}
template <typename T>
DEVICE Range range_shr(Range x, Range y) {
  bool known = is_exact(y) && y.low >= 0 && y.low < (int)sizeof(T) * 8;
  return known ? Range{x.low >> y.low, x.high >> y.low} : anything<T>();
}
template <typename T>
DEVICE Range range_shl(Range x, Range y) {
  bool known = is_exact(y) && y.low >= 0 && y.low < 31;
  return known ? range_mul<T>(x, Range{1ll << y.low, 1ll << y.low}) : anything<T>();
}
DEVICE Range range_where(Range condition, Range x, Range y) {
  return condition.low ? x : condition.high ? hull(x, y) : y;
}

// ---- captured tensors ---------------------------------------------------------------------------

// Elements that are looked at; of more nothing is known. Enough for the 256 rows of a tile, and for the
// 383 distances between those and 128 keys.
constexpr int kMostLoads = 512;

// Of the elements of type M at these indices, or of whether they are not 0. With `together` all lanes of a wavefront
// ask for the same elements, and each reads its share of them.
template <typename M, bool truth, bool together, typename... Indices>
DEVICE Range range_load(const Captured &x, Indices... indices) {
  constexpr int kRank = sizeof...(Indices);
  Range at[kRank ? kRank : 1] = {indices...};
  Range every = truth ? Range{0, 1} : sizeof(M) == 8 ? anything<long long>() : anything<int>();
  long long loads = 1;
#pragma unroll
  for (int dim = 0; dim < kRank; ++dim) {
    Range &place = at[dim];
    int size = x.size[dim];
    // Those below 0 count from the end: of both kinds, any place.
    if (place.low < 0) {
      if (place.high >= 0 || place.low < -kFar)
        place = Range{0, size - 1};
      else
        place = Range{place.low + size, place.high + size};
    }
    place = Range{min(max(place.low, 0ll), size - 1ll), min(max(place.high, 0ll), size - 1ll)};
    pin(place.low);  // the four loops' bounds would be scalar: 2 spilled
    pin(place.high);
    loads *= place.high - place.low + 1;
    if (loads > kMostLoads) return every;
  }
  // Of dimension `dim` from the last: the last one's loop is innermost, whatever the rank.
  auto low = [&](int dim) { return kRank > dim ? (int)at[kRank - 1 - dim].low : 0; };
  auto high = [&](int dim) { return kRank > dim ? (int)at[kRank - 1 - dim].high : 0; };
  auto step = [&](int dim) { return kRank > dim ? x.stride[kRank - 1 - dim] : 0; };
  Range found{kLongMost, kLongLeast};
  for (int i = low(3); i <= high(3); ++i)
    for (int j = low(2); j <= high(2); ++j)
      for (int k = low(1); k <= high(1); ++k)
        for (int l = low(0) + (together ? lane_index() : 0); l <= high(0); l += together ? kLanes : 1) {
          unsigned place = (unsigned)i * step(3) + (unsigned)j * step(2) + (unsigned)k * step(1) +
                           (unsigned)l * step(0);
          long long element = (long long)mod_load<M>(x, place);
          if (truth) element = element != 0;
          found = hull(found, Range{element, element});
        }
  if (together)
    for (int bit = 1; bit < kLanes; bit *= 2)
      found = hull(found, Range{from_lane_xor(found.low, bit), from_lane_xor(found.high, bit)});
  return found;
}

// ---- tiles --------------------------------------------------------------------------------------

// Tiles of `size` that hold `end` rows or keys.
DEVICE int tiles_of(int end, int size) { return (end + size - 1) / size; }
// The first and the last of tile `number` of `size`, of `end` rows or keys that count from `start`.
DEVICE Range places_of(int number, int size, int end, int start) {
  int first = number * size;
  return Range{start + first, start + min(first + size, end) - 1};
}

// With OWN_BOUNDS a workgroup of block_lists.h computes the bounds of captured tensors itself, of up to so many tiles
// that its list may name; with 0 tile_bounds.h has written them.
#ifndef OWN_BOUNDS
#define OWN_BOUNDS 0
#endif

// The bounds of one tile: its captured tensors at its rows, or at its keys.
#if OWN_BOUNDS
typedef const long long *Table;
#else
typedef const GLOBAL long long *Table;
#endif
DEVICE Table table_of(const Captured &tables, int batch, int head, int tile) {
  long long row = ((long long)batch * tables.size[1] + head) * tables.size[2] + tile;
  return (Table)tables.data + row * tables.size[3];
}
DEVICE Range tabled(Table table, int slot) { return Range{table[2 * slot], table[2 * slot + 1]}; }
