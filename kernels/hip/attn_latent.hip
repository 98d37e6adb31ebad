// Latent attention of many lines on CDNA 3: V is the first HEAD_DIM_V elements of K. A line is a row of
// one query head, row * group + head, and a column of the products S^T = K Q^T and O^T = V^T P^T (mma.h).
//
// A workgroup takes 64 * TILES lines and one part of the keys; each of its four wavefronts owns
// 16 * TILES lines, with their queries and the whole of their output in registers. Keys come to LDS once
// for all, 16 at a time, in three slots: while tile n's values are multiplied, the scores of tile n + 1
// are made and tile n + 2 is written. So a tile takes one barrier, and the probabilities of the next tile
// are computed beside the products of this one.
#include "../params.h"
#include "mma.h"
#include "schedule.h"

#if !defined(DTYPE) || !defined(HEAD_DIM) || !defined(HEAD_DIM_V) || !defined(TILES)
#error "the plan defines DTYPE, HEAD_DIM, HEAD_DIM_V and TILES"
#endif

#include "arguments.h"
#include "memory.h"
#include "../sequence.h"

typedef Mma<DTYPE, 16> M;
typedef M::Acc Acc;
constexpr int kWaves = 4;
constexpr int kThreads = kWaves * kLanes;
constexpr int kLines = 16 * TILES;            // of a wavefront
constexpr int kGroup = 16;                    // keys of a tile
constexpr int kChunks = HEAD_DIM / 32;        // 16-byte pieces of a query or a key that a lane multiplies
constexpr int kSteps = HEAD_DIM_V / 128;      // of the second product, 8 products each
constexpr int kElements = HEAD_DIM_V / 16;    // products of a tile of 16 lines
constexpr int kRowBytes = HEAD_DIM * 2;
constexpr int kTileBytes = kGroup * kRowBytes;
constexpr int kSlots = 3;
constexpr int kOwn = kGroup / kWaves;         // keys of a tile that a wavefront loads
// A line's maximum is raised where a score exceeds it by more: probabilities are below 2^8.
constexpr float kSlack = 8.0f;
static_assert(HEAD_DIM_V == 512 && HEAD_DIM == 576, "a key is four and a half loads of a wavefront");

struct Shared {
  char keys[kSlots][kTileBytes];
};

struct Block {
  int first_line, lines;
  unsigned group;
  int start, stop;
  int all_low, all_high;
};

struct Lines {
  Quad q[TILES][kChunks];
};

// The line that a lane's column of its t-th products is.
DEVICE unsigned line_of(const Block &b, int t) {
  return b.first_line + (wave_index() * TILES + t) * 16 + M::column();
}
// Lines beyond the last repeat it; their results are not stored.
DEVICE int row_of(const Block &b, unsigned line) { return min(line, (unsigned)b.lines - 1) / b.group; }

struct State {
  Acc o[TILES][kElements];
  float maximum[TILES], total[TILES];
};

// ---- products -----------------------------------------------------------------------------------

// Inline assembly says where accumulators are: the output in accumulation registers, scores in the others.
// Left to the compiler, both are of one kind, and of 264 accumulators in 256 registers 8 to 338 spilled.
// It counts no wait states around them: the emulator does (tests/hip/test_hip_static.py).
DEVICE void add_product(Acc &o, Pair a, Pair b) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile("v_mfma_f32_16x16x16_f16 %0, %1, %2, %0" : "+a"(o) : "v"(a), "v"(b));
  else
    asm volatile("v_mfma_f32_16x16x16_bf16 %0, %1, %2, %0" : "+a"(o) : "v"(a), "v"(b));
}
DEVICE void add_score(Acc &s, Pair a, Pair b) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile("v_mfma_f32_16x16x16_f16 %0, %1, %2, %0" : "+v"(s) : "v"(a), "v"(b));
  else
    asm volatile("v_mfma_f32_16x16x16_bf16 %0, %1, %2, %0" : "+v"(s) : "v"(a), "v"(b));
}
DEVICE void first_score(Acc &s, Pair a, Pair b) {
  if constexpr (DTYPE == FLOAT16)
    asm volatile("v_mfma_f32_16x16x16_f16 %0, %1, %2, 0" : "=&v"(s) : "v"(a), "v"(b));
  else
    asm volatile("v_mfma_f32_16x16x16_bf16 %0, %1, %2, 0" : "=&v"(s) : "v"(a), "v"(b));
}
// What products left in `x` is there after it.
DEVICE void settle() { asm volatile("s_nop 15\n\ts_nop 3"); }
DEVICE void clear(Acc &o) {
  Pair none{0, 0};
  if constexpr (DTYPE == FLOAT16)
    asm volatile("v_mfma_f32_16x16x16_f16 %0, %1, %1, 0" : "=a"(o) : "v"(none));
  else
    asm volatile("v_mfma_f32_16x16x16_bf16 %0, %1, %1, 0" : "=a"(o) : "v"(none));
}
// Element by element: the compiler would move all accumulators to other registers at once.
DEVICE void scale(Acc &o, float by) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float one = o[r], x;
    asm volatile("v_accvgpr_read_b32 %1, %0\n\tv_mul_f32 %1, %1, %2\n\tv_accvgpr_write_b32 %0, %1"
                 : "+a"(one), "=&v"(x)
                 : "v"(by));
    o[r] = one;
  }
}
DEVICE float element(const Acc &o, int r) {
  float x;
  asm volatile("v_accvgpr_read_b32 %0, %1" : "=v"(x) : "a"(o[r]));
  return x;
}

DEVICE bool any_lane(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }

// ---- keys from memory to LDS --------------------------------------------------------------------

// A tile in LDS: of each key the elements of V, then of each key the others. Units of 16 bytes lie in other
// places of their row, so that reads touch every bank once (see decode_load.h): unit x of a key at
// x ^ swizzle(key). Rows are whole lines of banks: the places of other units and keys differ from a lane's
// first in a few bits, and by a multiple of the row.
constexpr int kValueBytes = HEAD_DIM_V * 2, kRestBytes = kRowBytes - kValueBytes;
constexpr int kValues = kGroup * kValueBytes;
constexpr int kValueChunks = HEAD_DIM_V / 32;
DEVICE constexpr int swizzle(int key) { return (key >> 1 & 3) | (key & 1) << 2; }

// A lane's places in a tile in LDS, in bytes, and which bytes of a wavefront's first key it loads.
struct Places {
  int key, rest, value;
  unsigned from;

  METHOD Places() {
    int lane = lane_index(), column = M::column(), part = M::part();
    key = column * kValueBytes + (part ^ swizzle(column)) * 16;
    rest = kValues + column * kRestBytes + (part ^ swizzle(column)) * 16;
    value = part * 4 * kValueBytes + (column ^ swizzle(part * 4)) * 16;
    from = (lane / 4 ^ swizzle(wave_index())) * 16 + lane % 4 * 4;
  }
};

DEVICE Lds turned(Lds at, int unit) { return (Lds)((int)at ^ unit * 16); }

// Where the keys of four tiles are: lane l finds the l-th. A page is looked up four tiles ahead.
struct Finder {
  const Params &p;
  const Sequence &s;
  int first, last;   // keys
  unsigned inverse;  // quotients by the page size as in decode_load.h
  int page;          // of the keys to come
  long long offset;  // of those at hand

  METHOD Finder(const Params &p, const Sequence &s, int first, int last) : p(p), s(s), first(first), last(last) {
    inverse = p.page_table ? 0xffffffffu / (unsigned)p.page_size : 0;
    page = s.key_batch;
    look(0);
  }
  METHOD unsigned position(int n) const { return min(first + n * kGroup + lane_index(), last) + s.padding; }
  METHOD unsigned quotient(unsigned position) const {
    unsigned number = (unsigned)((unsigned long long)position * inverse >> 32);
    return position - number * p.page_size >= (unsigned)p.page_size ? number + 1 : number;
  }
  METHOD void look(int n) {
    if (p.page_table) page = int_at(p.page_table, s.batch * p.page_table_batch + quotient(position(n)));
  }
  METHOD void advance(int n) {  // to tiles n ... n + 3, which were looked up
    unsigned at = position(n), row = at - s.padding + (int)s.key0;
    if (p.page_table) row = at - quotient(at) * p.page_size;
    offset = (page * p.k_batch + row * p.k_row) * 2;
    look(n + 4);
  }
};

DEVICE long long of_lane(long long x, int lane) {
  unsigned low = __builtin_amdgcn_readlane((int)x, lane);
  unsigned high = __builtin_amdgcn_readlane((int)(x >> 32), lane);
  return (long long)((unsigned long long)high << 32 | low);
}

// The n-th tile, without registers in between: each wavefront brings four keys.
DEVICE void load(Lds tile, const char *keys, const Finder &finder, const Places &places, int n) {
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int key = i * kWaves + wave_index();
    const char *from = keys + of_lane(finder.offset, n % 4 * kGroup + key);
    int to = (int)tile + key * kValueBytes, rest = (int)tile + kValues - kValueBytes + key * kRestBytes;
    // An offset counts in memory and in LDS. The rest of a key is 32 lanes wide.
    asm volatile(
        "s_mov_b32 m0, %2\n\ts_nop 0\n\t"
        "global_load_lds_dword %0, %1\n\tglobal_load_lds_dword %0, %1 offset:256\n\t"
        "global_load_lds_dword %0, %1 offset:512\n\tglobal_load_lds_dword %0, %1 offset:768\n\t"
        "s_mov_b32 m0, %3\n\ts_mov_b32 exec_hi, 0\n\t"
        "global_load_lds_dword %0, %1 offset:1024\n\ts_mov_b32 exec_hi, -1"
        :
        : "v"(places.from ^ swizzle(i * kWaves) * 16), "s"(from), "s"(to), "s"(rest)
        : "memory", "m0");
  }
}
// What this wavefront loaded is in LDS.
DEVICE void loaded() { asm volatile("s_waitcnt vmcnt(0)" : : : "memory"); }

// ---- one tile -----------------------------------------------------------------------------------

// Four 16-bit numbers times a power of two.
DEVICE Pair scaled(Pair x, float by) {
  for (int i = 0; i < 2; ++i) {
    float low, high;
    if (DTYPE == FLOAT16) {
      low = float_of_half(x[i] & 0xffff) * by;
      high = float_of_half(x[i] >> 16) * by;
    } else {
      low = __builtin_bit_cast(float, x[i] << 16) * by;
      high = __builtin_bit_cast(float, x[i] & 0xffff0000) * by;
    }
    x[i] = Format<DTYPE>::half_up(low, high);
  }
  return x;
}

// What the vector unit does beside the products of a tile: from scores to probabilities of the next.
struct Softmax {
  State &state;
  Pair (&now)[TILES], (&next)[TILES];  // P as operands of the second product: of this tile, of the next
  Acc (&s)[TILES];
  const Params &p;
  const Sequence &sequence;
  const Block &b;
  int first;

  METHOD void mask() {
#pragma unroll
    for (int t = 0; t < TILES; ++t) s[t] *= p.scale * kLog2E;
    if (first >= b.all_low && first + kGroup <= b.all_high) return;
    int left = p.window_left < 0 ? -0x7fffffff : -p.window_left;
    int right = p.window_right < 0 ? 0x7fffffff : p.window_right;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      int key = first + M::part() * 4, distance = key - row_of(b, line_of(b, t)) - sequence.shift;
#pragma unroll
      for (int r = 0; r < 4; ++r)
        if (distance + r < left || distance + r > right || key + r >= b.stop) s[t][r] = -INFINITY_F;
    }
  }
  // A line's maximum is a whole number: then what is scaled stays exact, also P.
  template <bool first_tile>
  METHOD void raise() {
    float highest[TILES];
    bool above = false;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      highest[t] = max(max(s[t][0], s[t][1]), max(s[t][2], s[t][3]));
      above |= highest[t] > state.maximum[t] + kSlack;
    }
    if (!any_lane(above)) return;
    if (!first_tile) settle();
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      float raised = max(state.maximum[t], __builtin_ceilf(M::column_max(highest[t])));
      float change = raised == -INFINITY_F ? 1.0f : exp2(state.maximum[t] - raised);
      state.maximum[t] = raised;
      if (first_tile) continue;
#pragma unroll
      for (int e = 0; e < kElements; ++e) scale(state.o[t][e], change);
      state.total[t] *= change;
      now[t] = scaled(now[t], change);
    }
  }
  METHOD void weigh(int t) {
    float lowest = state.maximum[t] == -INFINITY_F ? 0.0f : state.maximum[t];
#pragma unroll
    for (int r = 0; r < 4; ++r) s[t][r] = exp2(s[t][r] - lowest);
  }
  METHOD void pack(int t) {
    state.total[t] += (s[t][0] + s[t][1]) + (s[t][2] + s[t][3]);
    next[t] = Pair{Format<DTYPE>::half_up(s[t][0], s[t][1]), Format<DTYPE>::half_up(s[t][2], s[t][3])};
  }
  METHOD void operator()(int beat) {
    if (beat == 3) mask();
    if (beat == 5) raise<false>();
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      if (beat == 8 + 4 * t) weigh(t);
      if (beat == 10 + 4 * t) pack(t);
    }
  }
};

DEVICE Quad read_key(Lds tile, const Places &places, int c) {
  if (c >= kValueChunks) return lds_read(turned(tile + places.rest, c % 2 * 4) + (c - kValueChunks) / 2 * 128);
  return lds_read(turned(tile + places.key, c % 2 * 4) + c / 2 * 128);
}

DEVICE Quad read_value(Lds tile, const Places &places, int c, int i) {
  return lds_read(turned(tile + places.value, swizzle(i)) + i * kValueBytes + c * 256);
}

// Element e of four values.
DEVICE Pair value_operand(const Quad (&v)[4], int e) {
  unsigned halves = e % 2 ? 0x07060302 : 0x05040100;
  return Pair{__builtin_amdgcn_perm(v[1][e / 2], v[0][e / 2], halves),
              __builtin_amdgcn_perm(v[3][e / 2], v[2][e / 2], halves)};
}

constexpr int kDeep = 3;  // keys are read as many products ahead

// Scores of a tile. `beside` has the beats.
template <typename Beside>
DEVICE void scores(Acc (&s)[TILES], Lds tile, const Places &places, const Lines &lines, Beside beside) {
  Quad k[kDeep];
#pragma unroll
  for (int c = 0; c < kDeep; ++c) k[c] = read_key(tile, places, c);
#pragma unroll
  for (int t = 0; t < TILES; ++t) first_score(s[t], k[0].xy, lines.q[t][0].xy);
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
#pragma unroll
    for (int t = 0; t < TILES; ++t)
      if (c > 0) add_score(s[t], k[c % kDeep].xy, lines.q[t][c].xy);
#pragma unroll
    for (int t = 0; t < TILES; ++t) add_score(s[t], k[c % kDeep].zw, lines.q[t][c].zw);
    if (c + kDeep < kChunks) k[c % kDeep] = read_key(tile, places, c + kDeep);
    beside(c);
    fence();
  }
}

template <typename Beside>
DEVICE void outputs(State &state, Quad (&v)[4], Lds tile, const Places &places, const Pair (&w)[TILES],
                    Beside &beside) {
  Quad next[4];
  Pair operand = value_operand(v, 0);
  pin(operand);
  asm volatile("s_nop 1");
#pragma unroll
  for (int c = 0; c < kSteps; ++c) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      // An operand is made a product ahead: a matrix instruction may not follow it at once.
      Pair a = operand;
      if (e < 7) operand = value_operand(v, e + 1);
      else if (c + 1 < kSteps) operand = value_operand(next, 0);
      pin(operand);
#pragma unroll
      for (int t = 0; t < TILES; ++t) add_product(state.o[t][c * 8 + e], a, w[t]);
      if (c + 1 < kSteps && e < 4) next[e] = read_value(tile, places, c + 1, e);
      beside(c * 8 + e);
      fence();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = next[i];
  }
}

// ---- the keys of a part -------------------------------------------------------------------------

DEVICE void load_queries(Lines &lines, const Params &p, const Sequence &s, const Block &b) {
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    unsigned line = min(line_of(b, t), (unsigned)b.lines - 1);
    const char *q = (const char *)p.q + 2 * (s.row_batch * p.q_batch + (s.row0 + line / b.group) * p.q_row +
                                             line % b.group * p.q_head);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) lines.q[t][c] = *(const Quad *)(q + (c * 4 + M::part()) * 16);
  }
}

DEVICE void attend(State &state, Shared &shared, const Params &p, const Sequence &s, const Block &b) {
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int e = 0; e < kElements; ++e) clear(state.o[t][e]);
  int tiles = (b.stop - b.start + kGroup - 1) / kGroup;
  const char *keys = (const char *)p.k;
  Places places;
  Lds slots = (Lds)&shared.keys[0][0];
  Finder finder(p, s, b.start, b.stop - 1);
  auto slot = [&](int n) { return slots + n * kTileBytes; };
  auto fetch = [&](int n, int to) {
    if (n >= tiles) return;
    if (n % 4 == 0) finder.advance(n);
    load(slot(to), keys, finder, places, n);
  };
  fetch(0, 0);
  fetch(1, 1);
  Lines lines;
  load_queries(lines, p, s, b);
  loaded();
  barrier();
  Acc score[TILES];
  Pair now[TILES], next[TILES];
  Quad v[4];
  scores(score, slot(0), places, lines, [](int) {});
  settle();
  Softmax first{state, now, next, score, p, s, b, b.start};
  first.mask();
  first.raise<true>();
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    first.weigh(t);
    first.pack(t);
    now[t] = next[t];
  }
  int at = 0, after = 1, last = 2;  // the slots of tiles n, n + 1, n + 2
  for (int n = 0; n < tiles; ++n) {
    loaded();
    barrier();
    Lds tile = slot(at);
    scores(score, slot(after), places, lines, [&](int beat) {
      if (beat == 1) fetch(n + 2, last);
      if (beat >= kChunks - 4) v[beat - kChunks + 4] = read_value(tile, places, 0, beat - kChunks + 4);
    });
    Softmax softmax{state, now, next, score, p, s, b, b.start + (n + 1) * kGroup};
    outputs(state, v, tile, places, now, softmax);
#pragma unroll
    for (int t = 0; t < TILES; ++t) now[t] = next[t];
    int free = at;
    at = after;
    after = last;
    last = free;
  }
}

// ---- from registers to memory -------------------------------------------------------------------

// `nothing`: no line saw a key, and there is no state.
template <bool nothing>
DEVICE void store(const State &state, int t, const Params &p, const Sequence &s, const Block &b, int part) {
  unsigned line = line_of(b, t);
  int row = line / b.group, head = line % b.group;
  float sink = -INFINITY_F;
  if ((int)line >= b.lines) return;
  if (p.sinks && p.use_sinks && part == 0) sink = ((const float *)p.sinks)[head] * kLog2E;
  float maximum = nothing ? -INFINITY_F : state.maximum[t];
  float top = max(sink, maximum), base = top == -INFINITY_F ? 0.0f : top;
  float own = exp2(maximum - base);
  float total = exp2(sink - base) + (nothing ? 0.0f : state.total[t] * own);
  bool saw = total != 0.0f;
  own *= saw ? 1.0f / total : 0.0f;
  float lse = saw ? (top + log2(total)) * kLn2 : -INFINITY_F;
  if (p.num_splits > 1) {
    long long place = part_line(p, s, row, head, part);
    if (M::part() == 0) ((float *)p.partial_lse)[place] = lse;
    if (!saw) return;  // nobody reads it
    float *to = (float *)p.partial_out + place * p.head_dim_v;
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
#pragma unroll
      for (int r = 0; r < 4; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          Acc x;
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = nothing ? 0.0f : element(state.o[t][c * 8 + half * 4 + e], r) * own;
          *(Acc *)(to + c * 128 + (M::part() * 4 + r) * 8 + half * 4) = x;
          fence();
        }
    return;
  }
  if (M::part() == 0) ((float *)p.lse)[s.row_batch * p.lse_batch + head * p.lse_head + s.row0 + row] = lse;
  unsigned short *to = (unsigned short *)p.out + s.row_batch * p.out_batch + (s.row0 + row) * p.out_row +
                       head * p.out_head;
#pragma unroll
  for (int c = 0; c < kSteps; ++c)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      Quad x;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        x[e] = nothing ? 0u
                       : Format<DTYPE>::nearest(element(state.o[t][c * 8 + 2 * e], r) * own,
                                                element(state.o[t][c * 8 + 2 * e + 1], r) * own);
      *(Quad *)(to + c * 128 + (M::part() * 4 + r) * 8) = x;
      fence();
    }
}

extern "C" __global__ WORKGROUP(kThreads, 1) void attn_latent(Params p) {
  __shared__ Shared shared;
  unsigned group = p.heads_q;
  constexpr int kAll = kWaves * kLines;
  int blocks = (p.seqlen_q * group + kAll - 1) / kAll;
  Work work = work_of(workgroup_index(), blocks, p.num_splits, 1, p.batch, p.dies);
  Sequence s = sequence_of(p, work.batch);
  Block b;
  b.group = group;
  b.lines = s.rows * group;
  b.first_line = work.block * kAll;
  if (b.first_line >= b.lines) return;
  unsigned last_line = min(b.first_line + kAll, b.lines) - 1;
  Seen seen = keys_seen(p, s, b.first_line / group, last_line / group);
  int groups = (max(seen.high - seen.low, 0) + kGroup - 1) / kGroup;
  int share = (unsigned)(groups + p.num_splits - 1) / (unsigned)p.num_splits * kGroup;
  b.start = (int)min(seen.low + (long long)work.part * share, (long long)seen.high);
  b.stop = b.start + min(share, seen.high - b.start);
  b.all_low = seen.all_low;
  b.all_high = min(seen.all_high, b.stop);

  State state;
  if (b.start >= b.stop) {
#pragma unroll
    for (int t = 0; t < TILES; ++t) store<true>(state, t, params_again(), s, b, work.part);
    return;
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    state.maximum[t] = -INFINITY_F;
    state.total[t] = 0.0f;
  }
  attend(state, shared, p, s, b);
  settle();
  const Params &again = params_again();
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    state.total[t] = M::column_sum(state.total[t]);
    store<false>(state, t, again, s, b, work.part);
  }
}
