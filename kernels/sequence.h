// Where one sequence of a batch lies, and which of its keys a row sees: dense or packed, with
// lengths read on the device, paged or not. Needs DEVICE, min and max.
#pragma once
#include "params.h"

// Whether there may be chunks, or a moved window where something else counts by the rows' places. The
// code of other plans knows of neither.
#ifndef BANDED
#define BANDED 0
#endif
// Whether there is a mask over the new rows (`p.bias`), as a tree of drafted tokens has one. Nor do other
// plans know of this.
#ifndef TREE
#define TREE 0
#endif

struct Sequence {
  int batch;            // its number
  long long row0;       // of its first row in q, out and their gradients
  long long key0;       // of its first valid key in k and v, unless paged
  int row_batch;        // the index that q's and out's batch strides take
  int key_batch;        // the same of k and v
  int rows;             // in use
  int stored_rows;      // in memory: those beyond `rows` give output 0 and LSE -inf
  int keys;             // valid keys
  int padding;          // keys before the first valid one
  int shift;            // row i stands at key i + shift
};

DEVICE int int_at(const void *array, int index) { return ((const int *)array)[index]; }

DEVICE int shift_of(const Params &p, int rows, int keys) { return keys - rows + p.q_start - p.k_start; }

DEVICE Sequence sequence_of(const Params &p, int batch) {
  Sequence s;
  s.batch = batch;
  s.row_batch = s.key_batch = batch;
  s.row0 = s.key0 = 0;
  s.stored_rows = p.seqlen_q;
  s.keys = p.seqlen_k;
  s.padding = 0;
  if (p.cu_seqlens_q) {
    s.row0 = int_at(p.cu_seqlens_q, batch);
    s.stored_rows = int_at(p.cu_seqlens_q, batch + 1) - (int)s.row0;
    s.row_batch = 0;
  }
  if (p.cu_seqlens_k) {
    s.key0 = int_at(p.cu_seqlens_k, batch);
    s.keys = int_at(p.cu_seqlens_k, batch + 1) - (int)s.key0;
    s.key_batch = 0;
  }
  s.rows = p.seqused_q ? min(int_at(p.seqused_q, batch), s.stored_rows) : s.stored_rows;
  if (p.seqused_k) s.keys = int_at(p.seqused_k, batch);
  if (p.cache_batch_idx) s.key_batch = int_at(p.cache_batch_idx, batch);
  if (p.cache_leftpad) s.padding = int_at(p.cache_leftpad, batch);
  s.keys = max(s.keys - s.padding, 0);
  s.key0 += s.padding;
  s.shift = shift_of(p, s.rows, s.keys);
  return s;
}

// Whether a sequence uses row `row` of batch entry `batch`; of packed rows, row `row` of all.
DEVICE bool is_used(const Params &p, int batch, int row) {
  if (p.cu_seqlens_q) {
    // The last sequence that begins at `row` or before it.
    int low = 0, high = p.batch;
    while (high - low > 1) {
      int middle = (low + high) / 2;
      (int_at(p.cu_seqlens_q, middle) <= row ? low : high) = middle;
    }
    if (row >= int_at(p.cu_seqlens_q, p.batch)) return false;
    batch = low;
    row -= int_at(p.cu_seqlens_q, batch);
  }
  return !p.seqused_q || row < int_at(p.seqused_q, batch);
}

// The line that a part of the keys has for a row of one head in partial_out and partial_lse.
DEVICE long long part_line(const Params &p, const Sequence &s, int row, int head, int part) {
  long long place = s.row0 + row;
  if (!p.cu_seqlens_q) place += (long long)s.batch * p.seqlen_q;
  return (place * p.heads_q + head) * p.num_splits + part;
}

// The keys [low, high) that any of the rows first ... last sees; those in [all_low, all_high) every
// one of them sees. Empty ranges have high <= low.
struct Seen {
  int low, high, all_low, all_high;
};

// What a window counts from: row i's is in the middle at key i + this.
DEVICE long long middle_of(const Params &p, const Sequence &s) {
  return BANDED ? (long long)s.shift + p.window_shift : s.shift;
}

// The first key of the chunk that a row at `key`, or that key, is in. Chunks are the larger problem's.
DEVICE int chunk_begin(const Params &p, int key) {
  int place = key + p.k_start;
  // In front of the first key there is none to see, whatever the chunk.
  return (place < 0 ? -p.attention_chunk : place - (int)((unsigned)place % (unsigned)p.attention_chunk)) -
         p.k_start;
}

// Leaves of `seen`, of at most `most` keys or rows, what is in the chunks that begin at `first` and at `last`.
// In 32 bits: the host keeps chunks below 2^30 (problem.band_of).
DEVICE void cut_to_chunks(const Params &p, Seen &seen, int most, int first, int last) {
  seen.low = max(seen.low, min(first, most));
  seen.high = min(seen.high, max(last + p.attention_chunk, 0));
  seen.all_low = max(seen.all_low, min(last, most));
  seen.all_high = min(seen.all_high, max(first + p.attention_chunk, 0));
}

DEVICE Seen keys_seen(const Params &p, const Sequence &s, int first, int last) {
  Seen seen{0, s.keys, 0, s.keys};
  if (p.window_left >= 0) {
    // In 64 bits: a window may be as wide as an int.
    long long left = middle_of(p, s) - p.window_left;
    seen.low = (int)min(max(first + left, 0ll), (long long)s.keys);
    seen.all_low = (int)min(max(last + left, 0ll), (long long)s.keys);
  }
  if (p.window_right >= 0) {
    long long right = middle_of(p, s) + p.window_right + 1;
    seen.high = (int)min(max(last + right, 0ll), (long long)s.keys);
    seen.all_high = (int)min(max(first + right, 0ll), (long long)s.keys);
  }
  if (BANDED && p.attention_chunk)
    cut_to_chunks(p, seen, s.keys, chunk_begin(p, first + s.shift), chunk_begin(p, last + s.shift));
  if (TREE) seen.all_high = min(seen.all_high, max(s.shift, 0));
  return seen;
}

// A row of the mask over the new rows, whose keys stand side by side. The row does not have to exist.
struct Branch {
  const char *seen;
  int shift, last;

  METHOD Branch(const Params &p, int batch, int shift, int row) : shift(shift), last(p.seqlen_q - 1) {
    seen = (const char *)p.bias + batch * p.bias_batch + min(row, last) * p.bias_row;
  }
  // Nor does the key.
  METHOD bool hides(int key) const {
    int column = min(key - shift, last);
    return column >= 0 && !seen[max(column, 0)];
  }
};

// The rows [low, high) that see any of the keys first ... last; those in [all_low, all_high) see
// every one of them.
DEVICE Seen rows_seeing(const Params &p, const Sequence &s, int first, int last) {
  Seen seen{0, s.rows, 0, s.rows};
  if (p.window_right >= 0) {
    long long right = middle_of(p, s) + p.window_right;
    seen.low = (int)min(max(first - right, 0ll), (long long)s.rows);
    seen.all_low = (int)min(max(last - right, 0ll), (long long)s.rows);
  }
  if (p.window_left >= 0) {
    long long left = p.window_left - middle_of(p, s) + 1;
    seen.high = (int)min(max(last + left, 0ll), (long long)s.rows);
    seen.all_high = (int)min(max(first + left, 0ll), (long long)s.rows);
  }
  if (BANDED && p.attention_chunk)
    cut_to_chunks(p, seen, s.rows, chunk_begin(p, first) - s.shift, chunk_begin(p, last) - s.shift);
  return seen;
}

// Where key j of a sequence starts in k or v, in elements from the head's first one. A paged cache
// has its batch stride between pages.
DEVICE long long key_offset(const Params &p, const Sequence &s, int key, long long batch_stride,
                            long long row_stride) {
  if (p.page_table) {
    int place = key + s.padding;
    const int *pages = (const int *)p.page_table + s.batch * p.page_table_batch;
    return pages[place / p.page_size] * batch_stride + place % p.page_size * row_stride;
  }
  return s.key_batch * batch_stride + (s.key0 + key) * row_stride;
}
