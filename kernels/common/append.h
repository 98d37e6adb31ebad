// What a KV cache needs before attention, in one launch: new keys and values are appended to each sequence,
// and rotary (Su et al. 2021, "RoFormer") rotates the new keys and the queries.
//
// `seqused_q` has the keys that each sequence holds; `seqused_k` gets their number with the new ones. A
// workgroup takes one row with all its heads. First come the rows of the new keys, then those of the new
// values, then those of the queries, which are there only with rotary. A thread takes pieces of heads: 8
// pairs to rotate or 8 elements to copy, 16 bytes at a time where they are aligned. Needs a vendor's
// device.h, Quad and Format.
#pragma once
#include "../sequence.h"

#if !defined(DTYPE)
#error "the plan defines DTYPE"
#endif

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // elements of 16 bytes

// Of rotary_flags; pyfa/backends/native/append.py has them too. Tables that are not float32 are in q's format.
// Pairs are 2i and 2i + 1, or i and i + rotary_dim / 2. The queries of a sequence stand one behind the other,
// or all at its first position.
enum RotaryFlags { kFloat32Tables = 1, kInterleaved = 2, kMoving = 4 };

typedef unsigned short Bits;  // an element as it is stored

DEVICE float float_of(Bits bits) {
  return DTYPE == BFLOAT16 ? __builtin_bit_cast(float, (unsigned)bits << 16) : float_of_half(bits);
}

template <typename T>
struct Piece {
  T at[kPiece];
};

DEVICE bool is_aligned(const void *at) { return ((unsigned long long)at & 15) == 0; }

// `count` elements, and zeros behind them.
template <typename T>
DEVICE Piece<T> load(const T *from, int count) {
  Piece<T> piece{};
  if (count == kPiece && is_aligned(from)) {
    // Vector by vector. As a struct it would be taken apart, and one of its elements loaded alone, as the path
    // below loads it.
    constexpr int kQuads = sizeof(Piece<T>) / sizeof(Quad);
    struct {
      Quad at[kQuads];
    } words;
    for (int i = 0; i < kQuads; ++i) words.at[i] = ((const Quad *)from)[i];
    piece = __builtin_bit_cast(Piece<T>, words);
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      if (i < count) piece.at[i] = from[i];
  }
  return piece;
}

DEVICE void store(Bits *to, Quad words, int count) {
  if (count == kPiece && is_aligned(to)) {
    *(Quad *)to = words;
  } else {
#pragma unroll
    for (int i = 0; i < kPiece; ++i)
      if (i < count) to[i] = (Bits)(words[i / 2] >> i % 2 * 16);
  }
}

// `count` elements of a table from `first` on.
DEVICE Piece<float> table_at(const Params &p, const void *table, long long first, int count) {
  if (p.rotary_flags & kFloat32Tables) return load((const float *)table + first, count);
  Piece<Bits> bits = load((const Bits *)table + first, count);
  Piece<float> piece;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) piece.at[i] = float_of(bits.at[i]);
  return piece;
}

// Rotates the pairs `pair` ... + 7 of a head. Products are rounded before they are added, as the operator
// rounds them. -ffp-contract=fast would fuse the two.
template <bool interleaved>
DEVICE void rotate(const Params &p, const Bits *from, Bits *to, int pair, int position) {
  int half = p.rotary_dim / 2, count = min(half - pair, kPiece);
  // The two runs of elements that hold the pairs: neighbors, or one in each half.
  int low = interleaved ? 2 * pair : pair, high = interleaved ? low + kPiece : low + half;
  int in_low = interleaved ? min(2 * count, kPiece) : count;
  int in_high = interleaved ? 2 * count - in_low : count;
  Piece<Bits> a = load(from + low, in_low), b = load(from + high, in_high);
  // A position without a row in the tables gives NaN, and no read outside of them.
  bool known = (unsigned)position < (unsigned)p.rotary_rows;
  long long entry = (long long)position * half + pair;
  Piece<float> cos = table_at(p, p.rotary_cos, entry, known ? count : 0);
  Piece<float> sin = table_at(p, p.rotary_sin, entry, known ? count : 0);
  float x[kPiece], y[kPiece];
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    constexpr int kPairs = kPiece / 2;
    const Piece<Bits> &run = i < kPairs ? a : b;
    float first = float_of(interleaved ? run.at[i % kPairs * 2] : a.at[i]);
    float second = float_of(interleaved ? run.at[i % kPairs * 2 + 1] : b.at[i]);
    float c = known ? cos.at[i] : __builtin_nanf(""), s = sin.at[i];
    x[i] = product(first, c) - product(second, s);
    y[i] = product(first, s) + product(second, c);
  }
  Quad lows, highs;
#pragma unroll
  for (int w = 0; w < kPiece / 2; ++w) {
    int v = w + kPiece / 2;
    lows[w] = interleaved ? Format<DTYPE>::nearest(x[w], y[w])
                          : Format<DTYPE>::nearest(x[2 * w], x[2 * w + 1]);
    highs[w] = interleaved ? Format<DTYPE>::nearest(x[v], y[v])
                           : Format<DTYPE>::nearest(y[2 * w], y[2 * w + 1]);
  }
  store(to + low, lows, in_low);
  store(to + high, highs, in_high);
}

// A row. Of the `columns` elements of each head the first `rotated` are rotated.
struct Row {
  const Bits *from;
  Bits *to;
  long long from_head, to_head;  // strides
  int heads, columns, rotated, position;
};

DEVICE void write_row(const Params &p, const Row &row) {
  int rotations = (row.rotated / 2 + kPiece - 1) / kPiece;
  int pieces = rotations + (row.columns - row.rotated + kPiece - 1) / kPiece;
  for (int i = thread_index(); i < row.heads * pieces; i += kThreads) {
    int head = i / pieces, piece = i % pieces;
    const Bits *from = row.from + head * row.from_head;
    Bits *to = row.to + head * row.to_head;
    if (piece >= rotations) {
      int column = row.rotated + (piece - rotations) * kPiece, count = min(row.columns - column, kPiece);
      store(to + column, __builtin_bit_cast(Quad, load(from + column, count)), count);
    } else if (p.rotary_flags & kInterleaved) {
      rotate<true>(p, from, to, piece * kPiece, row.position);
    } else {
      rotate<false>(p, from, to, piece * kPiece, row.position);
    }
  }
}

// The row of workgroup `id`: new keys, then new values, then queries. Returns false where there is none.
DEVICE bool find_row(const Params &p, int id, Row &row) {
  int appended = p.batch * p.new_rows;
  if (id >= 2 * appended) {
    id -= 2 * appended;
    Sequence s = sequence_of(p, id / p.seqlen_q);
    int index = id % p.seqlen_q;
    if (index >= s.stored_rows) return false;
    long long at = s.row0 + index;
    int position = int_at(p.rotary_seqlens, s.batch) + (p.rotary_flags & kMoving ? index : 0);
    row = Row{(const Bits *)p.q + s.row_batch * p.q_batch + at * p.q_row,
              (Bits *)p.out + s.row_batch * p.out_batch + at * p.out_row, p.q_head,
              p.out_head, p.heads_q, p.head_dim, p.rotary_dim, position};
    return true;
  }
  bool is_key = id < appended;
  if (!is_key) id -= appended;
  Sequence s = sequence_of(p, id / p.new_rows);
  int index = id % p.new_rows;
  int place = int_at(p.seqused_q, s.batch) + index;
  if ((unsigned)place >= (unsigned)p.seqlen_k) return false;  // beyond the end of the cache
  if (is_key) {
    int position = p.rotary_dim ? int_at(p.rotary_seqlens, s.batch) + index : 0;
    row = Row{(const Bits *)p.new_k + s.batch * p.new_k_batch + index * p.new_k_row,
              (Bits *)p.k + key_offset(p, s, place, p.k_batch, p.k_row), p.new_k_head,
              p.k_head, p.heads_k, p.head_dim, p.rotary_dim, position};
  } else {
    row = Row{(const Bits *)p.new_v + s.batch * p.new_v_batch + index * p.new_v_row,
              (Bits *)p.v + key_offset(p, s, place, p.v_batch, p.v_row), p.new_v_head,
              p.v_head, p.heads_k, p.head_dim_v, 0, 0};
  }
  return true;
}

DEVICE void append_row(const Params &p) {
  Row row;
  int id = workgroup_index();
  if (find_row(p, id, row)) write_row(p, row);
  // What attention counts by, which would take the host a launch of its own. Behind the writes: of what is
  // loaded after a store, nothing is a scalar load on gfx942 (24 vector loads where 3 do).
  if (id < p.batch * p.new_rows && id % p.new_rows == 0 && thread_index() == 0) {
    int batch = id / p.new_rows;
    ((int *)p.seqused_k)[batch] = int_at(p.seqused_q, batch) + p.new_rows;
  }
}
