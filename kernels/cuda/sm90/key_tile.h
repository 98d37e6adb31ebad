// TMA copies of a tile of keys: from a dense or packed cache, or from its pages.
#pragma once
#include "fwd_tile.h"
#include "tma.h"

#if PAGE_ROWS
constexpr int kCopies = BLOCK_K / PAGE_ROWS;  // of a tile's keys
// So many copies have their page numbers in registers. Three consumer warpgroups leave a producer few registers.
constexpr int kKnown = kCopies < 5 ? kCopies : kCopies < 9 && GROUPS < 3 ? kCopies : 4;

// The pages of a tile of keys. The first kKnown page numbers are read before the wait for the stage. Read one by
// one, each when it was needed, pages of 16 keys took twice the time.
struct Pages {
  const int *at;  // the page table's entry of the tile's first key
  int copies;     // those that the sequence has keys for
  int offset;     // of the tile's first key in its page
  int known[kKnown];

  METHOD Pages(const Params &p, const Sequence &s, int n) {
    int key = n * BLOCK_K, page = WHOLE_PAGES ? n * kCopies : key / p.page_size;
    at = (const int *)p.page_table + s.batch * p.page_table_batch + page;
    offset = WHOLE_PAGES ? 0 : key - page * p.page_size;
    copies = min((s.keys - key + PAGE_ROWS - 1) / PAGE_ROWS, kCopies);
    int row = offset;
    const int *next = at;
    read(p, row, next, 0, known);
  }
  // Those of the copies from `first` on.
  template <int count>
  METHOD void read(const Params &p, int &row, const int *&next, int first, int (&pages)[count]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      pages[i] = first + i < copies ? *next : 0;
      next_copy(p, row, next);
    }
  }
  static METHOD void next_copy(const Params &p, int &row, const int *&page) {
    if constexpr (!WHOLE_PAGES) {
      row += PAGE_ROWS;
      if (row < p.page_size) return;
      row = 0;
    }
    ++page;
  }
};
#else
struct Pages {
  METHOD Pages(const Params &, const Sequence &, int) {}
};
#endif

// Asks for tile `n` of keys or values, of one head: `panels` of it from panel `first` on. From pages PAGE_ROWS
// keys at a time; where none of the sequence's are, what the stage held before stays. `more`: bytes of other
// copies that `full` waits for.
template <int panels, int width, int panel_bytes>
DEVICE void load_keys(const Params &p, const Sequence &s, const Pages &pages, const TensorMap *map, Shared to,
                      Shared full, int head, int n, int first = 0, int more = 0) {
#if PAGE_ROWS
  constexpr int kCopyBytes = panel_bytes / kCopies;
  static_assert(BLOCK_K % PAGE_ROWS == 0 && kCopyBytes % 128 == 0, "TMA writes to multiples of 128 bytes");
  mbarrier_arrive_expect_tx(full, pages.copies * panels * kCopyBytes);
  int row = pages.offset;
  const int *next = pages.at;
  auto copy = [&](int i, int page) {
#pragma unroll
    for (int j = 0; j < panels; ++j)
      tma_load(to + i * kCopyBytes + j * panel_bytes, map, full, (first + j) * width, row, head, page);
    Pages::next_copy(p, row, next);
  };
  if (WHOLE_PAGES && pages.copies == kCopies) {
    // The sequence has keys for all copies of the tile, so none is checked. A sub-partition of an SM issues for a
    // producer and for consumers, so each instruction that a producer saves is one that a consumer can issue.
#pragma unroll
    for (int i = 0; i < kKnown; ++i) copy(i, pages.known[i]);
#pragma unroll 1
    for (int i = kKnown; i < kCopies; i += 4) {
      int four[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) four[j] = i + j < kCopies ? pages.at[i + j] : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (i + j < kCopies) copy(i + j, four[j]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kKnown; ++i)
    if (i < pages.copies) copy(i, pages.known[i]);
#pragma unroll 1
  for (int i = kKnown; i < pages.copies; i += 4) {
    int four[4], ahead = row;
    const int *at = next;
    pages.read(p, ahead, at, i, four);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (i + j < pages.copies) copy(i + j, four[j]);
  }
#else
  mbarrier_arrive_expect_tx(full, panels * panel_bytes + more);
#pragma unroll
  for (int i = 0; i < panels; ++i)
    tma_load(to + i * panel_bytes, map, full, (first + i) * width, (int)s.key0 + n * BLOCK_K, head, s.key_batch);
#endif
}
