// Tiles of Q, K and V from memory to shared memory by cp.async: rows beyond the end and elements beyond
// the head arrive as zeros, and nothing is read there.
#pragma once
#include "smem.h"
#include "../../sequence.h"

// As copy_16, all or nothing.
DEVICE void copy_or_zero(Shared to, const void *from, bool wanted) {
  asm volatile(
      "{.reg .pred ignored; setp.eq.u32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored;}" ::"r"(to),
      "l"(from), "r"((int)wanted)
      : "memory");
}

// How `threads` threads share a tile: neighbors take neighboring units of a row, a line or half a line
// of it; each thread the same units of every kRows-th row.
template <class T, int threads>
struct Copies {
  static constexpr int kWide = T::kPeriod;
  static constexpr int kRows = threads / kWide;     // at once
  static constexpr int kSteps = T::kRows / kRows;
  static constexpr int kChunks = T::kUnits / kWide;
  static_assert(T::kRows % kRows == 0 && kRows % 8 == 0, "every thread has as much to do");

  int row, element;  // of the thread's first unit
  Shared place;      // where it goes

  METHOD Copies(int thread, Shared tile)
      : row(thread / kWide),
        element(thread % kWide * kUnit),
        place(tile + T::place(row, thread % kWide)) {}

  // One step: a thread's units of one row. `from`: the row's first element.
  METHOD void copy(int step, const char *from, bool row_wanted, int head_dim) const {
    from += (unsigned)element * 2;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      copy_or_zero(place + step * kRows * T::kRowBytes + chunk * kWide * 16, from + chunk * kWide * 16,
                   row_wanted && element + chunk * kWide * kUnit < head_dim);
  }

  // A whole tile of rows that lie `row_bytes` apart, of which there are `rows`.
  METHOD void copy(const char *from, long long row_bytes, int rows, int head_dim) const {
    from += row * row_bytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step, from += kRows * row_bytes)
      copy(step, from, row + step * kRows < rows, head_dim);
  }
};

// The thread's index, opaque: what follows from it is found again for every tile, since the loop has no
// registers to spare.
DEVICE int thread_again() {
  int thread = thread_index();
  pin(thread);
  return thread;
}

// The tiles of K and V of one head. What all threads share waits in shared memory, `notes`: each warp
// has its own copy, so that none waits for another.
#if PAGED
template <class K, class V, int threads>
struct Source {
  typedef Copies<K, threads> KeyCopies;
  typedef Copies<V, threads> ValueCopies;
  // A lane looks up one of the keys whose rows its warp copies, a tile ahead.
  static constexpr int kAWarp = kLanes / KeyCopies::kWide;
  static_assert(KeyCopies::kSteps * kAWarp <= kLanes, "one key a lane");
  static_assert(KeyCopies::kWide == ValueCopies::kWide, "the same rows of K and V");

  struct Bases {
    const char *k, *v;
  };
  struct Table {
    const int *pages;
    int padding, unused;
  };
  static constexpr int kNotes = 32;  // bytes

  Shared notes;
  int page, place;  // of this lane's key in the next tile

  METHOD Source(const Params &p, const Sequence &s, int head, int first, int end, Shared notes)
      : notes(notes) {
    const char *k = (const char *)p.k + head * p.k_head * 2;
    const char *v = (const char *)p.v + head * p.v_head * 2;
    store_shared(notes, Bases{k, v});
    const int *pages = (const int *)p.page_table + s.batch * p.page_table_batch;
    store_shared(notes + 16, Table{pages, s.padding, 0});
    __syncwarp();
    find(p, first, end);
  }

  METHOD void find(const Params &p, int first, int end) {
    int lane = lane_index();
    int key = first + lane / kAWarp * KeyCopies::kRows + wave_index() * kAWarp + lane % kAWarp;
    Table table = load_shared<Table>(notes + 16);
    int at = min(key, end - 1) + table.padding;
    page = table.pages[at / p.page_size];
    place = at % p.page_size;
  }

  // The tile whose first key is `first`, of keys that end with `end`: K, and V behind it.
  METHOD void load(const Params &p, int first, int end, Shared keys) {
    Shared values = keys + K::kBytes;
    Bases bases = load_shared<Bases>(notes);
    KeyCopies of_keys(thread_again(), keys);
    ValueCopies of_values(thread_again(), values);
    long long of_k = (page * p.k_batch + place * p.k_row) * 2;
    long long of_v = (page * p.v_batch + place * p.v_row) * 2;
    int left = end - first - of_keys.row, first_lane = lane_index() / KeyCopies::kWide;
#pragma unroll
    for (int i = 0; i < KeyCopies::kSteps; ++i) {
      int lane = i * kAWarp + first_lane;
      bool wanted = i * KeyCopies::kRows < left;
      of_keys.copy(i, bases.k + __shfl_sync(kAllLanes, of_k, lane), wanted, p.head_dim);
      of_values.copy(i, bases.v + __shfl_sync(kAllLanes, of_v, lane), wanted, p.head_dim_v);
    }
    find(p, first + K::kRows, end);
  }
};
#else
template <class K, class V, int threads>
struct Source {
  typedef Copies<K, threads> KeyCopies;
  typedef Copies<V, threads> ValueCopies;

  static_assert(KeyCopies::kWide == ValueCopies::kWide, "the same units of K and V");

  struct Bases {
    const char *k, *v;  // of the sequence's first key
  };
  static constexpr int kNotes = 16;  // bytes

  Shared notes;

  METHOD Source(const Params &p, const Sequence &s, int head, int, int, Shared notes) : notes(notes) {
    long long k = s.key_batch * p.k_batch + s.key0 * p.k_row + head * p.k_head;
    long long v = s.key_batch * p.v_batch + s.key0 * p.v_row + head * p.v_head;
    store_shared(notes, Bases{(const char *)p.k + 2 * k, (const char *)p.v + 2 * v});
    __syncwarp();
  }

  // `row` rows from `base`. A row has fewer than 2^24 bytes (the host sees to it): one instruction.
  static METHOD const char *row_of(const char *base, long long row_stride, int row) {
    return base + (unsigned long long)((unsigned)row_stride * 2) * (unsigned)row;
  }

  // The tile whose first key is `first`, of keys that end with `end`: K, and V behind it.
  METHOD void load(const Params &p, int first, int end, Shared keys) {
    Shared values = keys + K::kBytes;
    Bases bases = load_shared<Bases>(notes);
    KeyCopies of_keys(thread_again(), keys);
    ValueCopies of_values(thread_again(), values);
    int row = first + of_keys.row, left = end - row;
    const char *k = row_of(bases.k, p.k_row, row), *v = row_of(bases.v, p.v_row, row);
#pragma unroll
    for (int i = 0; i < KeyCopies::kSteps; ++i)
      of_keys.copy(i, row_of(k, p.k_row, i * KeyCopies::kRows), i * KeyCopies::kRows < left, p.head_dim);
#pragma unroll
    for (int i = 0; i < ValueCopies::kSteps; ++i)
      of_values.copy(i, row_of(v, p.v_row, i * ValueCopies::kRows), i * ValueCopies::kRows < left,
                     p.head_dim_v);
  }
};
#endif
