// Tiles of K and V from memory to LDS, by a workgroup of `waves` wavefronts.
//
// K goes to LDS directly, 4 bytes per lane (gfx942 has nothing wider), without registers; the swizzle
// is applied to the source. V passes through registers, where 2 x 2 elements are transposed by v_perm:
// a lane takes two neighboring d of eight keys, one dword each. Of bytes it is 4 x 4.
#pragma once
#include "../sequence.h"
#include "arguments.h"
#include "lds.h"
#include "pages.h"

// K or V of one head.
struct Head {
  const char *base;        // of the head's first element of sequence and batch 0
  long long batch_stride;  // in elements
  long long row_stride;
  int head_dim;
};

DEVICE Head keys_of(const Params &p, int head) {
  return Head{(const char *)p.k + head * p.k_head * kSize, p.k_batch, p.k_row, p.head_dim};
}

DEVICE Head values_of(const Params &p, int head) {
  return Head{(const char *)p.v + head * p.v_head * kSize, p.v_batch, p.v_row, p.head_dim_v};
}

// Tiles are visited from the first keys to the last, with float8 from the last to the first. A float8 P
// spans 18 powers of two. After a key that dominates a row, as the first token of a text often does, P
// of all other keys would be 0; so it comes last.
constexpr int kTurn = DTYPE == FLOAT8 ? -1 : 1;

// ---- tiles in rows: one buffer descriptor -------------------------------------------------------

// Buffers end with the last needed key: elements of a tile beyond it, in keys or along the head, read
// as 0 and cause no memory request.
typedef int Descriptor __attribute__((ext_vector_type(4)));
constexpr unsigned kNowhere = 0x80000000u;     // an offset beyond every tile

// Rows of K or V in memory, tile after tile.
struct Rows {
  const char *tile;    // the next tile's first key
  int left;            // keys from there on
  int wanted;          // keys at most
  unsigned row_bytes;
  unsigned width;      // bytes of a row that are the head's

  METHOD Rows(const Head &head, const Sequence &s, int first, int begin, int end)
      : tile(head.base + kSize * (s.key_batch * head.batch_stride +
                                  (s.key0 + first) * head.row_stride)),
        left(end - first),
        wanted(end - begin),
        row_bytes((unsigned)head.row_stride * kSize),
        width(head.head_dim * kSize) {}

  // Bytes that a tile of `keys` keys has, from its first to its last one's end.
  METHOD int bytes(int keys) const {
    int there = kTurn < 0 && left > wanted ? 0 : min(left, keys);
    return there > 0 ? (int)((there - 1) * row_bytes + width) : 0;
  }
  // `few`: whether the multiples of row_bytes that the loads add may stay in scalar registers.
  METHOD void advance(int keys, bool few) {
    tile += kTurn * keys * (long long)row_bytes;
    left -= kTurn * keys;
    if (!few) pin_scalar(row_bytes);
  }
};

// In global memory: of an address from numbers the compiler would not know, and then it counts LDS loads, too.
typedef const __attribute__((address_space(1))) char *Global;
DEVICE unsigned word_at(Global at) { return *(const __attribute__((address_space(1))) unsigned *)at; }

// Loads 4 bytes per lane directly to LDS at `to` + 4 lane. The compiler does not know about these two
// loads: `loads_arrived` waits for them. With the builtin, every later LDS read would wait for all of
// them. The compiler does not keep wait states here either: a vector instruction that writes one of
// these scalar registers must come 5 states before. `pyfa compile` checks this
// (pyfa/emulator/hazards.py).
DEVICE void load_to_lds(const void *tile, int bytes, unsigned offset, unsigned scalar_offset, Lds to) {
  unsigned long long at = (unsigned long long)tile;
  Descriptor from{(int)at, (int)(at >> 32) & 0xffff, bytes, kRawDwords};
  asm volatile("s_mov_b32 m0, %3\n\ts_nop 0\n\tbuffer_load_dword %0, %1, %2 offen lds"
               :
               : "v"(offset), "s"(from), "s"(scalar_offset), "s"(to)
               : "memory", "m0");
}
// The same where a vector instruction has just written `tile`.
DEVICE void load_row_to_lds(unsigned long long tile, int bytes, unsigned offset, Lds to) {
  Descriptor from{(int)tile, (int)(tile >> 32) & 0xffff, bytes, kRawDwords};
  asm volatile("s_mov_b32 m0, %2\n\ts_nop 3\n\tbuffer_load_dword %0, %1, 0 offen lds"
               :
               : "v"(offset), "s"(from), "s"(to)
               : "memory", "m0");
}
DEVICE void load_to_lds(Global from, Lds to) {
  asm volatile("s_mov_b32 m0, %1\n\ts_nop 0\n\tglobal_load_lds_dword %0, off"
               :
               : "v"(from), "s"(to)
               : "memory", "m0");
}

// ---- tiles whose keys lie anywhere: paged -------------------------------------------------------

// Numbers that a tile needs once, in the lanes of a register. As scalars they do not fit beside score terms. Read
// again from the parameters, a tile waited 800 clocks for them by the timing model.
struct Kept {
  int lanes = 0;
  METHOD void put(int n, unsigned x) { lanes = lane_index() == n ? (int)x : lanes; }
  METHOD void put(int n, unsigned long long x) {
    put(n, (unsigned)x);
    put(n + 1, (unsigned)(x >> 32));
  }
  METHOD unsigned word(int n) const { return __builtin_amdgcn_readlane(lanes, n); }
  METHOD unsigned long long wide(int n) const {
    return (unsigned long long)word(n + 1) << 32 | word(n);
  }
};

// The pages of a sequence, with the keys and values of one head.
struct Pages {
  enum { kTable = 0, kSize_ = 2, kInverse, kPadding, kHeads, kOfHead = 5 };
  Kept kept;

  METHOD Pages(const Params &p, const Sequence &s, int head) {
    kept.put(kTable, (unsigned long long)table_of(p, s));
    kept.put(kSize_, (unsigned)p.page_size);
    kept.put(kInverse, inverse_of_pages(p));
    kept.put(kPadding, (unsigned)s.padding);
    put(0, keys_of(p, head));
    put(1, values_of(p, head));
    pin(kept.lanes);
  }
  METHOD void put(int which, const Head &head) {
    int n = kHeads + which * kOfHead;
    kept.put(n, (unsigned long long)head.base);
    kept.put(n + 2, (unsigned long long)head.batch_stride * kSize);
    kept.put(n + 4, (unsigned)head.row_stride * kSize);
  }
  METHOD void find(Place &place, int key) const {
    find_in_pages(place, (const GLOBAL int *)kept.wide(kTable), kept.word(kSize_), kept.word(kInverse),
                  key + kept.word(kPadding));
  }
  // Of a key (`which` is 0) or value.
  METHOD unsigned long long address(int which, const Place &place) const {
    int n = kHeads + which * kOfHead;
    return kept.wide(n) + (unsigned)place.page * kept.wide(n + 2) + wide_product(place.row, kept.word(n + 4));
  }
};

// Where the keys of a tile lie, one key per lane. A key outside of `begin` ... `end` counts as the nearest key
// inside: it is masked, but must be readable.
template <int keys>
struct Addresses {
  static_assert(keys <= kLanes, "a lane has a key");
  Place place;
  unsigned long long of;

  // The page is on its way until `arrive`.
  METHOD void look(const Pages &pages, int first, int begin, int end) {
    int key = min(first + lane_index(), end - 1);
    if (kTurn < 0) key = max(key, begin);
    pages.find(place, key);
  }
  METHOD void arrive(const Pages &pages, int which) { of = pages.address(which, place); }

  // Of key `key` of the tile, the same for all lanes. (Through ds_bpermute each load waited for LDS twice.)
  METHOD unsigned long long uniform(int key) const {
    unsigned low = __builtin_amdgcn_readlane((int)of, key);
    unsigned high = __builtin_amdgcn_readlane((int)(of >> 32), key);
    return (unsigned long long)high << 32 | low;
  }
  // Of key `low` for the first half of the lanes, of key `high` for the others.
  METHOD Global halves(int low, int high) const {
    unsigned long long first = uniform(low), second = uniform(high);
    return (Global)(lane_index() < kLanes / 2 ? first : second);
  }
  // Of a key that may differ between all lanes.
  METHOD Global operator[](int key) const { return (Global)from_lane((long long)of, key); }
};

// ---- tiles whose keys lie in whole groups: pages of a multiple of so many keys ------------------

// Tiles begin at multiples of it, and all lanes of a load have keys of one group.
constexpr int kGroup = 16;

// Where the groups of tiles lie: for each the address that would be the tile's first key if all keys lay as this group
// does. So loads are those of rows, each from the base of its group. Lane g has K's group g, lane kOfValues + g V's.
template <int keys>
struct Groups {
  static_assert(keys % kGroup == 0, "tiles of whole groups");
  static constexpr int kGroups = keys / kGroup, kOfValues = kLanes / 2;
  const GLOBAL int *table;
  unsigned size;  // of a page
  Quotient now;   // where the group of the tile that is looked up next is
  Quotient step;  // from a tile to the next
  unsigned last;  // page
  unsigned long long base, page_bytes;
  unsigned row_bytes;
  Place place;
  unsigned long long of;

  METHOD Groups(const Params &p, const Sequence &s, int head, int first, int end)
      : table(table_of(p, s)), size(p.page_size) {
    unsigned inverse = inverse_of_pages(p), group = lane_index() % kGroups * kGroup;
    Head mine = lane_index() < kOfValues ? keys_of(p, head) : values_of(p, head);
    page_bytes = mine.batch_stride * kSize;
    row_bytes = mine.row_stride * kSize;
    base = (unsigned long long)mine.base - wide_product(group, row_bytes);
    now = divide_by_pages(first + group, size, inverse);
    step = divide_by_pages(keys, size, inverse);
    last = divide_by_pages(end - 1, size, inverse).page;
    // In vector registers: there are no scalar ones for them.
    pin(table);
    pin(size);
    pin(last);
    pin(step.page);
    pin(step.row);
    pin(base);
    pin(page_bytes);
    pin(row_bytes);
  }

  // The pages of the next tile, on their way until `arrive`. A group beyond the last page has the last one, which is in
  // the table, and nothing of it is loaded.
  METHOD void look() {
    place.page = table[min(now.page, last)];
    place.row = now.row;
    // By the step of a tile: a division would take several instructions more.
    now.row += step.row;
    now.page += step.page + (now.row >= size);
    now.row = min(now.row, now.row - size);
  }
  METHOD void arrive() {
    of = multiply_add(place.page, page_bytes, base) + wide_product(place.row, row_bytes);
    pin(of);
  }
  METHOD const char *at(int lane) const {
    unsigned low = __builtin_amdgcn_readlane((int)of, lane);
    unsigned high = __builtin_amdgcn_readlane((int)(of >> 32), lane);
    auto tile = (const char *)((unsigned long long)high << 32 | low);
    pin_scalar(tile);
    return tile;
  }
};

// ---- K ------------------------------------------------------------------------------------------

template <int keys, int head_dim, int waves>
struct KeyLoads {
  typedef KeyTile<keys, head_dim> Tile;
  static constexpr int kChunk = kLanes * 4;                     // bytes of one load
  static constexpr int kLoads = Tile::kBytes / kChunk / waves;  // of a wavefront
  static constexpr int kKeysALoad = waves * kChunk / Tile::kRowBytes;  // of all wavefronts
  // The loads of a period have different swizzles, one period after the other the same.
  static constexpr int kPeriod = kKeysALoad < 8 ? 8 / kKeysALoad : 1;

  unsigned offset[kPeriod];

  // What the i-th load brings to lane `lane`.
  static METHOD int byte(int lane) { return wave_index() * kChunk + lane * 4; }
  static constexpr bool kHalfLines = Tile::kRowBytes < kLineBytes;
  static METHOD int unit_of_line(int lane) {
    return byte(lane) % kLineBytes / 16 ^ (byte(lane) / kLineBytes & 7);
  }
  static METHOD int key(int i, int lane) {
    if (kHalfLines) return i * kKeysALoad + byte(lane) / kLineBytes * 2 + unit_of_line(lane) / 4;
    return i * kKeysALoad + byte(lane) / Tile::kRowBytes;
  }
  static METHOD int source_unit(int i, int lane) {
    if (kHalfLines) return unit_of_line(lane) % 4;
    return byte(lane) % Tile::kRowBytes / 16 ^ (key(i, lane) & 7);
  }
  // Of the i-th load of any wavefront.
  static constexpr METHOD int group(int i) {
    static_assert(kGroup % kKeysALoad == 0, "of all lanes");
    return i * kKeysALoad / kGroup;
  }
  static METHOD Lds chunk(Lds tile, int i) { return tile + (i * waves + wave_index()) * kChunk; }

  METHOD KeyLoads(const Rows &rows) {
    int lane = lane_index();
    for (int i = 0; i < kPeriod; ++i) {
      offset[i] = key(0, lane) * rows.row_bytes + source_unit(i, lane) * 16 + lane % 4 * 4;
      if (source_unit(i, lane) * 16 >= rows.width) offset[i] = kNowhere;
      pin(offset[i]);
    }
  }

  METHOD void load(int i, const Rows &rows, int bytes, Lds to) const {
    load_to_lds(rows.tile, bytes, offset[i % kPeriod], i * kKeysALoad * rows.row_bytes, chunk(to, i));
  }

  // Of paged tiles, whose rows are `width` bytes. If a load is of more than one key, what is beyond them is left as
  // it is in LDS; otherwise it becomes 0.
  static constexpr bool kAlone = Tile::kRowBytes >= kChunk;
  METHOD KeyLoads() {
    int lane = lane_index();
    for (int i = 0; i < kPeriod; ++i) {
      offset[i] = source_unit(i, lane) * 16 + lane % 4 * 4;
      pin(offset[i]);
    }
  }
  METHOD void load(int i, const Addresses<keys> &at, unsigned width, Lds to) const {
    unsigned byte = offset[i % kPeriod];
    if constexpr (kAlone) {
      load_row_to_lds(at.uniform(key(i, 0)), width, byte, chunk(to, i));
    } else {
      Global row =
          kHalfLines ? at[key(i, lane_index())] : at.halves(key(i, 0), key(i, kLanes / 2));
      if (byte < width) load_to_lds(row + byte, chunk(to, i));
    }
  }
};

// ---- V ------------------------------------------------------------------------------------------

template <int size, int keys, int head_dim, int depth, int waves>
struct ValueLoads;

template <int keys, int head_dim, int depth, int waves>
struct ValueLoads<2, keys, head_dim, depth, waves> {
  typedef ValueTile<keys, head_dim> Tile;
  // Pairs of d that lanes are given, some without work where the head is no power of two.
  static constexpr int kPairs = head_dim <= 64 ? 32 : head_dim <= 128 ? 64 : 128;
  static constexpr int kThreads = waves * kLanes;
  static constexpr int kTasks = (Tile::kUnits * kPairs + kThreads - 1) / kThreads;  // of a thread
  static constexpr int kUnitsATask = kThreads / kPairs;
  static constexpr int kParts = depth / 4;
  static constexpr int kLoads = kTasks * kUnit;

  unsigned offset[kTasks];    // in memory
  unsigned place[kTasks][2];  // in LDS, of both d

  static METHOD int thread(int lane) { return wave_index() * kLanes + lane; }
  static METHOD int pair(int lane) { return thread(lane) % kPairs; }
  static METHOD int unit(int task, int lane) { return task * kUnitsATask + thread(lane) / kPairs; }
  static METHOD bool has_work(int task, int lane) {
    constexpr bool all = kTasks * kUnitsATask == Tile::kUnits && kPairs * 2 == head_dim;
    return all || (unit(task, lane) < Tile::kUnits && pair(lane) * 2 < head_dim);
  }
  // The first key of a unit, and how far its n-th one is (lds.h).
  static METHOD int key(int unit) { return unit / kParts * 2 * depth + unit % kParts * 4; }
  static constexpr METHOD int step(int n) { return n / 4 * depth + n % 4; }
  static METHOD int group(int task) {
    static_assert(2 * depth == kGroup && kLanes / kPairs <= kParts, "of all keys of a unit, and of all lanes");
    return unit(task, 0) / kParts;
  }

  METHOD ValueLoads() {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i)
      for (int n = 0; n < 2; ++n) {
        place[i][n] = Tile::place(2 * pair(lane) + n, unit(i, lane));
        pin(place[i][n]);
      }
  }
  METHOD ValueLoads(const Rows &rows) : ValueLoads() {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i) {
      offset[i] = key(unit(i, lane)) * rows.row_bytes + pair(lane) * 4;
      if (!has_work(i, lane) || pair(lane) * 4 >= rows.width) offset[i] = kNowhere;
      pin(offset[i]);
    }
  }

  // The i-th load.
  METHOD unsigned load(int i, const Rows &rows, int bytes) const {
    return __builtin_amdgcn_raw_buffer_load_b32(buffer(rows.tile, bytes), offset[i / kUnit],
                                                step(i % kUnit) * rows.row_bytes, 0);
  }

  // Of paged tiles, whose rows are `width` bytes.
  METHOD ValueLoads(unsigned width) : ValueLoads() {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i) {
      offset[i] = has_work(i, lane) && pair(lane) * 4 < width ? pair(lane) * 4 : kNowhere;
      pin(offset[i]);
    }
  }
  METHOD unsigned load(int i, const Addresses<keys> &at, unsigned width) const {
    int task = i / kUnit, first = key(unit(task, 0)) + step(i % kUnit);
    if constexpr (kPairs >= kLanes) {
      auto row = (const void *)at.uniform(first);
      return __builtin_amdgcn_raw_buffer_load_b32(buffer(row, width), offset[task], 0, 0);
    }
    Global row = at.halves(first, key(unit(task, kLanes / 2)) + step(i % kUnit));
    return offset[task] < width ? word_at(row + offset[task]) : 0;
  }

  METHOD void store(const unsigned (&pair_of_key)[kLoads], Lds to) const {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i) {
      if (!has_work(i, lane)) continue;
      const unsigned *x = pair_of_key + i * kUnit;
      Quad even, odd;
      for (int n = 0; n < 4; ++n) {
        even[n] = __builtin_amdgcn_perm(x[2 * n + 1], x[2 * n], 0x05040100);
        odd[n] = __builtin_amdgcn_perm(x[2 * n + 1], x[2 * n], 0x07060302);
      }
      lds_write(to + place[i][0], even);
      lds_write(to + place[i][1], odd);
    }
  }
};

// Of bytes: a lane takes four neighboring d of four neighboring keys, which are one word of four
// units. Half a wavefront writes 8 fours of d and the 4 words of a unit: every bank once.
template <int keys, int head_dim, int depth, int waves>
struct ValueLoads<1, keys, head_dim, depth, waves> {
  typedef ValueTile<keys, head_dim> Tile;
  static constexpr int kFours = head_dim <= 64 ? 16 : head_dim <= 128 ? 32 : 64;  // of d
  static constexpr int kAcross = kFours / 16;  // wavefronts along a row: each has 16 fours
  static constexpr int kPieces = kAcross * Tile::kUnits;
  static constexpr int kTasks = (kPieces + waves - 1) / waves;  // of a lane
  static constexpr int kLoads = kTasks * 4;

  unsigned offset[kTasks];    // in memory
  unsigned place[kTasks];     // in LDS, of the first d

  static METHOD int piece(int task) { return task * waves + wave_index(); }
  static METHOD int unit(int task) { return piece(task) / kAcross; }
  static METHOD int four(int task, int lane) {
    return piece(task) % kAcross * 16 + lane / 32 * 8 + lane % 8;
  }
  static METHOD int word(int lane) { return lane / 8 % 4; }
  static METHOD bool has_work(int task, int lane) {
    return (kPieces % waves == 0 || piece(task) < kPieces) &&
           (kFours * 4 == head_dim || four(task, lane) * 4 < head_dim);
  }
  // The first of four keys (lds.h).
  static METHOD int key(int task, int lane) {
    return unit(task) / 2 * 2 * depth + unit(task) % 2 * 4 + word(lane) * 8;
  }

  METHOD ValueLoads() {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i) {
      place[i] = Tile::place(4 * four(i, lane), unit(i)) + 4 * word(lane);
      pin(place[i]);
    }
  }
  METHOD ValueLoads(const Rows &rows) : ValueLoads() {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i) {
      offset[i] = key(i, lane) * rows.row_bytes + four(i, lane) * 4;
      if (!has_work(i, lane) || four(i, lane) * 4 >= rows.width) offset[i] = kNowhere;
      pin(offset[i]);
    }
  }

  // The i-th load.
  METHOD unsigned load(int i, const Rows &rows, int bytes) const {
    return __builtin_amdgcn_raw_buffer_load_b32(buffer(rows.tile, bytes), offset[i / 4],
                                                i % 4 * rows.row_bytes, 0);
  }

  // Of paged tiles, whose rows are `width` bytes.
  METHOD ValueLoads(unsigned width) : ValueLoads() {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i) {
      offset[i] = has_work(i, lane) && four(i, lane) * 4 < width ? four(i, lane) * 4 : kNowhere;
      pin(offset[i]);
    }
  }
  METHOD unsigned load(int i, const Addresses<keys> &at, unsigned width) const {
    int task = i / 4;
    bool wanted = offset[task] < width;
    Global row = at[wanted ? key(task, lane_index()) + i % 4 : 0];
    return wanted ? word_at(row + offset[task]) : 0;
  }

  METHOD void store(const unsigned (&four_of_key)[kLoads], Lds to) const {
    int lane = lane_index();
    for (int i = 0; i < kTasks; ++i) {
      if (!has_work(i, lane)) continue;
      const unsigned *x = four_of_key + i * 4;
      for (int half = 0; half < 2; ++half) {  // two d each
        unsigned pairs = half ? 0x07030602 : 0x05010400;
        unsigned low = __builtin_amdgcn_perm(x[1], x[0], pairs);
        unsigned high = __builtin_amdgcn_perm(x[3], x[2], pairs);
        unsigned even = __builtin_amdgcn_perm(high, low, 0x05040100);
        unsigned odd = __builtin_amdgcn_perm(high, low, 0x07060302);
        lds_write(to + Tile::beside(place[i], 2 * half), even);
        lds_write(to + Tile::beside(place[i], 2 * half + 1), odd);
      }
    }
  }
};
