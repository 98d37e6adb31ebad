// Tiles of K and V from memory to LDS, by a workgroup of `waves` wavefronts.
//
// K goes to LDS directly, 4 bytes per lane (gfx942 has nothing wider), without registers; the swizzle
// is applied to the source. V passes through registers, where 2 x 2 elements are transposed by v_perm:
// a lane takes two neighboring d of eight keys, one dword each. Of bytes it is 4 x 4.
#pragma once
#include "../sequence.h"
#include "arguments.h"
#include "lds.h"

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
DEVICE void load_to_lds(const void *from, Lds to) {
  asm volatile("s_mov_b32 m0, %1\n\ts_nop 0\n\tglobal_load_lds_dword %0, off"
               :
               : "v"(from), "s"(to)
               : "memory", "m0");
}

// ---- tiles whose keys lie anywhere: paged -------------------------------------------------------

// Offsets in bytes of a tile's keys, one key per lane (`sets` times 64 keys). A key outside of `begin`
// ... `end` gets the offset of the nearest key inside: it is masked, but must be readable.
template <int keys>
struct Offsets {
  static constexpr int kSets = (keys + kLanes - 1) / kLanes;
  long long of[kSets];
  int lane;  // opaque, or the compiler keeps all that follows from it through the loop

  Offsets() = default;
  METHOD Offsets(const Params &p, const Sequence &s, const Head &head, int first, int begin,
                 int end) {
    lane = lane_index();
    pin(lane);
    for (int i = 0; i < kSets; ++i) {
      int key = min(first + i * kLanes + lane_index(), end - 1);
      if (kTurn < 0) key = max(key, begin);
      of[i] = kSize * key_offset(p, s, key, head.batch_stride, head.row_stride);
    }
  }
  // Of key `key` of the tile, which may differ between lanes.
  METHOD long long operator[](int key) const {
    long long found = from_lane(of[0], key % kLanes);
    for (int i = 1; i < kSets; ++i) {
      long long other = from_lane(of[i], key % kLanes);
      if (key / kLanes == i) found = other;
    }
    return found;
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

  // Elements from head.head_dim on are left as they are in LDS.
  static METHOD void load(int i, const Offsets<keys> &offsets, const Head &head, Lds to) {
    int lane = offsets.lane, unit = source_unit(i, lane);
    const char *from = head.base + offsets[key(i, lane)] + unit * 16 + lane % 4 * 4;
    if (unit * kUnit < head.head_dim) load_to_lds(from, chunk(to, i));
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

  static METHOD unsigned load(int i, const Offsets<keys> &offsets, const Head &head) {
    int lane = offsets.lane, task = i / kUnit;
    bool wanted = has_work(task, lane) && pair(lane) * 2 < head.head_dim;
    long long offset = offsets[wanted ? key(unit(task, lane)) + step(i % kUnit) : 0];
    return wanted ? *(const unsigned *)(head.base + offset + pair(lane) * 4) : 0;
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

  static METHOD unsigned load(int i, const Offsets<keys> &offsets, const Head &head) {
    int lane = offsets.lane, task = i / 4;
    bool wanted = has_work(task, lane) && four(task, lane) * 4 < head.head_dim;
    long long offset = offsets[wanted ? key(task, lane) + i % 4 : 0];
    return wanted ? *(const unsigned *)(head.base + offset + four(task, lane) * 4) : 0;
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
