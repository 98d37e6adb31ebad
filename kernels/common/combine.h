// Combines the splits of the keys:
//   out = sum of 2^(lse_i - lse) out_i,  2^lse = sum of 2^lse_i  (in base e where it is stored).
//
// A packed row is one row of one head, row * heads_q + head. A thread takes four neighboring elements of
// the outputs. So a split takes a slot of threads: as many as fours in head_dim_v, rounded up to a power of
// two. A packed row has one slot for every four splits, up to all of a workgroup, and its slots take the
// splits in turn. What is left of the workgroup takes further packed rows: 2,048 packed rows of two splits
// and 128 elements are 256 workgroups, one of 32 splits is a workgroup. The slots' sums meet in LDS, in an
// order that does not change. The output of a split that saw nothing (LSE -inf) is not read, because nobody
// has written it; nor is anything of a row that no sequence uses, whose output is 0 and LSE -inf.
//
// MERGED: the splits are up to kAtOnce tensors of the caller's, of any format and strides, each with its LSE,
// one behind the other in `captured`. The size of dimension 0 is the format. Needs a
// vendor's device.h and Format. `rows_of` of pyfa/backends/native/combine.py counts
// the same.
#pragma once
#include "../sequence.h"

#ifndef MERGED
#define MERGED 0
#endif
#if MERGED
#include "../captured.h"
#endif

#if !defined(DTYPE)
#error "the plan defines DTYPE"
#endif

constexpr int kThreads = 256;
constexpr int kWide = 4;    // elements of a thread
constexpr int kAtOnce = 4;  // splits whose outputs a thread loads together

struct alignas(16) Elements {
  float x[kWide];
};

struct alignas(8) Stored {  // the same in 16 bits
  unsigned word[kWide / 2];
};

#define FLOAT32 3  // the format of a merged out or part, beside those of the vendor's

// A sum in units of e^top.
struct Sum {
  float top, total;
  Elements out;
};

struct Meeting {
  float top[kThreads], total[kThreads];
  Elements out[kThreads];
};

// The number of a packed row. Divisions of 64 bits are slow, and 32 bits are enough: a packed row has at least two
// splits of float32 in memory, so 2^32 packed rows of 8 elements would take 300 GB. The parts of MERGED are the
// caller's and may be smaller: of 16 bits, or with strides of 0.
#if MERGED
typedef long long PackedRow;
#else
typedef unsigned PackedRow;
#endif

// The share of a thread. `stride`: threads of a slot.
struct Place {
  int column, slot, slots, stride;
  PackedRow packed_row;
};

DEVICE float power(float x) { return exp2(x * kLog2E); }

// -inf stays out of differences: -inf - -inf would be NaN.
DEVICE float finite(float top) { return top == -INFINITY_F ? 0.0f : top; }

// The least power of two that is not below x / 4, as its logarithm. x > 0.
DEVICE int bits_of_fours(int x) { return bits_of((unsigned)(x - 1) / 4); }

constexpr int kThreadBits = 8;
static_assert(1 << kThreadBits == kThreads && kWide == 4 && kAtOnce == 4, "what bits_of_fours is for");

DEVICE Place place_of(const Params &p) {
  int columns = bits_of_fours(p.head_dim_v);
  int slots = min(bits_of_fours(p.num_splits), kThreadBits - columns);
  int slot = thread_index() >> columns;
  Place place;
  place.column = (thread_index() & ((1 << columns) - 1)) * kWide;
  place.slot = slot & ((1 << slots) - 1);
  place.slots = 1 << slots;
  place.stride = 1 << columns;
  place.packed_row = ((PackedRow)workgroup_index() << (kThreadBits - columns - slots)) + (slot >> slots);
  return place;
}

// Where a packed row is stored: its head, its sequence and its row there.
struct Stand {
  int head;
  long long batch, row;
  METHOD Stand(const Params &p, const Place &place) {
    PackedRow heads = p.heads_q, rows = p.seqlen_q, at = place.packed_row / heads;
    head = place.packed_row - at * heads;
    batch = at / rows;
    row = at - batch * rows;
  }
};

#if MERGED
// Four neighboring elements of a part, those that exist. In 16 bits they are two words.
template <typename T>
DEVICE T element(const Captured &part, long long at, int columns, int j) {
  return j < columns ? ((const T *)part.data)[at + (long long)j * part.stride[3]] : T(0);
}
DEVICE Elements elements_of(const Captured &part, long long at, int columns) {
  bool side_by_side = part.stride[3] == 1 && columns >= kWide;
  Elements x{};
  if (part.size[0] == FLOAT32) {
    const float *from = (const float *)part.data + at;
    if (side_by_side && (unsigned long long)from % sizeof(Elements) == 0) {
      x = *(const Elements *)from;
    } else {
#pragma unroll
      for (int j = 0; j < kWide; ++j) x.x[j] = element<float>(part, at, columns, j);
    }
    return x;
  }
  const unsigned short *from = (const unsigned short *)part.data + at;
  Stored stored;
  if (side_by_side && (unsigned long long)from % sizeof(Stored) == 0) {
    stored = *(const Stored *)from;
  } else {
#pragma unroll
    for (int j = 0; j < kWide / 2; ++j)
      stored.word[j] = element<unsigned short>(part, at, columns, 2 * j) |
                       (unsigned)element<unsigned short>(part, at, columns, 2 * j + 1) << 16;
  }
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    unsigned short bits = (unsigned short)(stored.word[j / 2] >> 16 * (j % 2));
    x.x[j] = part.size[0] == BFLOAT16 ? __builtin_bit_cast(float, (unsigned)bits << 16) : float_of_half(bits);
  }
  return x;
}

DEVICE void read_splits(const Params &p, const Place &place, int, float (&lse)[kAtOnce],
                        Elements (&out)[kAtOnce]) {
  Stand stand(p, place);
  int columns = p.head_dim_v - place.column;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    lse[i] = -INFINITY_F;
    out[i] = Elements{};
    if (i >= p.num_splits) continue;
    const Captured &part = captured_of(p)[2 * i], &sums = captured_of(p)[2 * i + 1];
    lse[i] = ((const float *)sums.data)[stand.batch * sums.stride[0] + (long long)stand.head * sums.stride[1] +
                                        stand.row * sums.stride[2]];
    if (lse[i] != -INFINITY_F && columns > 0)
      out[i] = elements_of(part, stand.batch * part.stride[0] + stand.row * part.stride[1] +
                                     (long long)stand.head * part.stride[2] +
                                     (long long)place.column * part.stride[3], columns);
  }
}
#else
DEVICE void read_splits(const Params &p, const Place &place, int first, float (&lse)[kAtOnce],
                        Elements (&out)[kAtOnce]) {
  long long splits = (long long)place.packed_row * p.num_splits;
  for (int i = 0; i < kAtOnce; ++i) {
    int split = first + i * place.slots;
    lse[i] = -INFINITY_F;
    out[i] = Elements{};
    if (split < p.num_splits) lse[i] = ((const float *)p.partial_lse)[splits + split];
  }
  const float *from = (const float *)p.partial_out + (splits + first) * p.head_dim_v + place.column;
  int step = place.slots * p.head_dim_v, columns = p.head_dim_v - place.column;
  if (p.head_dim_v % kWide == 0) {
    for (int i = 0; i < kAtOnce; ++i)
      if (lse[i] != -INFINITY_F && columns > 0) out[i] = *(const Elements *)(from + i * step);
  } else {
    for (int i = 0; i < kAtOnce; ++i)
      for (int j = 0; j < kWide; ++j)
        if (lse[i] != -INFINITY_F && columns > j) out[i].x[j] = from[i * step + j];
  }
}
#endif

DEVICE void add_splits(Sum &sum, const Params &p, const Place &place, int first) {
  float lse[kAtOnce];
  Elements out[kAtOnce];
  read_splits(p, place, first, lse, out);
  float top = sum.top;
  for (int i = 0; i < kAtOnce; ++i) top = max(top, lse[i]);
  float rescale = power(sum.top - finite(top));
  sum.total *= rescale;
  for (int j = 0; j < kWide; ++j) sum.out.x[j] *= rescale;
  for (int i = 0; i < kAtOnce; ++i) {
    float weight = power(lse[i] - finite(top));
    sum.total += weight;
    for (int j = 0; j < kWide; ++j) sum.out.x[j] += weight * out[i].x[j];
  }
  sum.top = top;
}

// seqlen_q is the number of stored rows of a batch entry; packed rows are one entry, with batch strides of 0.
DEVICE void store(const Params &p, const Place &place, const Stand &stand, const Sum &sum) {
  bool saw = sum.total != 0.0f;  // also where it is NaN
  int head = stand.head;
  long long batch = stand.batch, row = stand.row;
  long long at = batch * p.out_batch + row * p.out_row + head * p.out_head + place.column;
  float x[kWide];
  for (int j = 0; j < kWide; ++j) x[j] = saw ? sum.out.x[j] / sum.total : 0.0f;
#if DTYPE == FLOAT32
  for (int j = 0; j < kWide; ++j)
    if (place.column + j < p.head_dim_v) ((float *)p.out + at)[j] = x[j];
#else
  unsigned short *to = (unsigned short *)p.out + at;
  if (place.column + kWide <= p.head_dim_v && (unsigned long long)to % sizeof(Stored) == 0) {
    *(Stored *)to = Stored{Format<DTYPE>::nearest(x[0], x[1]), Format<DTYPE>::nearest(x[2], x[3])};
  } else {
    for (int j = 0; j < kWide; ++j)
      if (place.column + j < p.head_dim_v)
        to[j] = (unsigned short)Format<DTYPE>::nearest(x[j], 0.0f);
  }
#endif
  if (place.column == 0 && p.lse)
    ((float *)p.lse)[batch * p.lse_batch + head * p.lse_head + row] =
        saw ? sum.top + log2(sum.total) * kLn2 : -INFINITY_F;
}

// Of the slots of a packed row, an even number, by the first one's threads.
DEVICE Sum met(const Meeting &meeting, const Place &place) {
  Sum all{-INFINITY_F, 0.0f, {}};
  int thread = thread_index();
#pragma unroll 4
  for (int s = 0; s < place.slots; s += 2)
    for (int i = 0; i < 2; ++i) all.top = max(all.top, meeting.top[thread + (s + i) * place.stride]);
#pragma unroll 1  // left to clang: 70 VGPRs, too many for eight wavefronts a SIMD
  for (int s = 0; s < place.slots; s += 2)
    for (int i = 0; i < 2; ++i) {
      int other = thread + (s + i) * place.stride;
      float weight = power(meeting.top[other] - finite(all.top));
      all.total += weight * meeting.total[other];
      for (int j = 0; j < kWide; ++j) all.out.x[j] += weight * meeting.out[other].x[j];
    }
  return all;
}

DEVICE void combine_lines(const Params &p, Meeting &meeting) {
  Place place = place_of(p);
  bool exists = place.packed_row < (PackedRow)p.heads_q * p.seqlen_q * (p.cu_seqlens_q ? 1 : p.batch), used = exists;
  if (used && (p.cu_seqlens_q || p.seqused_q)) {
    Stand stand(p, place);
    used = is_used(p, (int)stand.batch, (int)stand.row);
  }
  Sum sum{-INFINITY_F, 0.0f, {}};
  if (used)
    for (int first = place.slot; first < p.num_splits; first += place.slots * kAtOnce)
      add_splits(sum, p, place, first);

  int thread = thread_index();
  if (place.slots > 1) {
    meeting.top[thread] = sum.top;
    meeting.total[thread] = sum.total;
    meeting.out[thread] = sum.out;
  }
  Stand stand(p, place);
  if (place.slots > 1) {
    barrier();
    if (place.slot == 0) sum = met(meeting, place);
  }
  if (exists && place.slot == 0) store(p, place, stand, sum);
}
