// Shared by the backward kernels whose wavefronts own 32 or 64 keys or query rows, as columns of products, and
// stream tiles of the others through LDS: operands, masks and score terms.
#pragma once
#include "bwd_inputs.h"
#include "bwd_score.h"
#ifdef MOD
#include "mods.h"
#endif
#if LISTS == 1
#include "walk.h"
#endif

#define KEYS 0
#define ROWS 1

typedef Mma<DTYPE, kTile> M;
typedef M::Acc Acc;
typedef Format<DTYPE> F;

constexpr bool kKeys = OWNS == KEYS;
constexpr int kWaves = 4;
constexpr int kThreads = kWaves * kLanes;
constexpr int kBlock = kWaves * COLUMNS * kTile;  // owned by a workgroup
constexpr int kSteps = HEAD_DIM / 16;             // of 16 bytes a lane along the head
constexpr int kStepsV = HEAD_DIM_V / 16;
constexpr int kFours = M::kRegisters / 4;         // groups of four consecutive rows of a product

struct Context {
  Sequence s;
  int first;  // that this wavefront owns
  float to_base_2;

  METHOD int owned() const { return kKeys ? s.keys : s.rows; }
  METHOD int streamed() const { return kKeys ? s.rows : s.keys; }
  METHOD int own(int c) const { return first + c * kTile + M::column(); }
};

// Which streamed rows see or are seen by the owned ones `first` ... `last`.
DEVICE Seen seen_by(const Params &p, const Sequence &s, int first, int last) {
  return kKeys ? rows_seeing(p, s, first, last) : keys_seen(p, s, first, last);
}

// ---- operands -----------------------------------------------------------------------------------

template <int steps>
DEVICE void load_owned(const Context &c, Quad (&x)[COLUMNS][steps], const Matrix &m) {
  for (int n = 0; n < COLUMNS; ++n) {
    int first = c.first + n * kTile;
    auto from = buffer_of(m, first, c.owned() - first);
    for (int i = 0; i < steps; ++i)
      x[n][i] = __builtin_amdgcn_raw_buffer_load_b128(
          from, buffer_offset(m, M::column(), i * 16 + M::part() * 8), 0, 0);
  }
}

// work(i, what read(i) reads) for each i below `count`, in this order: reads come `ahead` of these before their use,
// or where the compiler places them.
template <int count, int ahead, typename Read, typename Work>
DEVICE void each_read(Read read, Work work) {
  Quad x[count];
#pragma unroll
  for (int i = 0; i < ahead; ++i) x[i] = read(i);
  if (ahead) fence();
#pragma unroll
  for (int i = 0; i < count; ++i) {
    if (i + ahead < count) x[i + ahead] = read(i + ahead);
    if (ahead) fence();
    work(i, x[i]);
    if (ahead) fence();
  }
}

// A product over the head: acc (tile x owned) of a tile's rows and the owned ones, with reads `ahead`. `again`: see
// lane_for.
template <int dim, bool again, int ahead, int steps>
DEVICE void multiply_ahead(Acc (&acc)[COLUMNS], Lds tile, const Quad (&x)[COLUMNS][steps]) {
  int lane = lane_for<again>(), row = lane % kTile, part = lane / kTile;
  auto read = [&](int i) { return lds_read(tile + RowTile<dim>::place(row, 2 * i + part)); };
  each_read<steps, ahead>(read, [&](int i, const Quad &a) {
    for (int n = 0; n < COLUMNS; ++n) {
      acc[n] = M::mma(a.xy, x[n][i].xy, acc[n]);
      acc[n] = M::mma(a.zw, x[n][i].zw, acc[n]);
    }
  });
}
// The same in the compiler's own schedule.
template <int dim, int steps>
DEVICE void multiply(Acc (&acc)[COLUMNS], Lds tile, const Quad (&x)[COLUMNS][steps]) {
  int lane = lane_for<false>();
  for (int i = 0; i < steps; ++i) {
    Quad a = lds_read(tile + RowTile<dim>::place(lane % kTile, 2 * i + lane / kTile));
    for (int n = 0; n < COLUMNS; ++n) {
      acc[n] = M::mma(a.xy, x[n][i].xy, acc[n]);
      acc[n] = M::mma(a.zw, x[n][i].zw, acc[n]);
    }
  }
}

DEVICE void round(Pair (&to)[kFours], const Acc &x) {
  for (int j = 0; j < kFours; ++j)
    to[j] = Pair{F::half_up(x[4 * j], x[4 * j + 1]), F::half_up(x[4 * j + 2], x[4 * j + 3])};
}

// ---- scores -------------------------------------------------------------------------------------

DEVICE void put_four(Acc &x, int j, Quad four) {
  for (int i = 0; i < 4; ++i) x[4 * j + i] = __builtin_bit_cast(float, (unsigned)four[i]);
}
// -LSE or -delta of the tile's rows at `first`, for registers 4 j ... 4 j + 3 of a product.
DEVICE void load_four(Acc &x, const Context &c, const float *state, int first, int j) {
  auto from = buffer(state + first, max(c.s.rows - first, 0) * 4);
  put_four(x, j, __builtin_amdgcn_raw_buffer_load_b128(from, M::row(4 * j) * 4, 0, 0));
}

// The same for each register: of the tile's rows where keys are owned, else of the owned row.
DEVICE Acc load_states(const Context &c, const float *state, int first) {
  Acc x;
  if (!kKeys) {
    auto from = buffer(state + first, max(c.s.rows - first, 0) * 4);
    unsigned one = __builtin_amdgcn_raw_buffer_load_b32(from, M::column() * 4, 0, 0);
    return Acc(__builtin_bit_cast(float, one));
  }
  for (int j = 0; j < kFours; ++j) load_four(x, c, state, first, j);
  return x;
}

// Which rows of the tile at `first` owned `own` sees or is seen by, none beyond the end of either: bit
// bit_of(r) for register r of a product. Bits in a vector register, since a lane mask for each
// register of a product would take 32 scalar ones.
DEVICE unsigned seen_bits(const Context &c, int own, int first) {
  pin(own);  // or what follows from it would be kept for tiles without a mask
  Seen seen = seen_by(params_again(), c.s, own, own);
  int low = max(seen.low - first, 0), high = min(seen.high - first, kTile);
  if (own >= c.owned() || low >= high) return 0;
  return (~0u >> (kTile - high + low) << low) >> M::part() * kMmaPart;
}
constexpr METHOD int bit_of(int r) { return r / 4 * 8 + r % 4; }

DEVICE void mask(Acc &s, unsigned seen) {
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) s[r] = where(seen, bit_of(r), s[r]);
}

// ---- a softcap alone ----------------------------------------------------------------------------

// Its steps, from S as the product leaves it: e^2y, then 1 / (e^2y + 1), then tanh y, which has an error of 2^-22,
// then P and the slope.
struct Cap {
  float in, out;  // S times `in` is 2 y in base 2; the softcap in base 2

  METHOD Cap() {
    if (!kSoftcapAlone) return;
    const Params &p = params_again();
    in = 2.0f * kLog2E * p.scale / p.softcap;
    out = p.softcap * kLog2E;
  }
  METHOD float raised(float s) const { return exp2(s * in); }
  static METHOD float inverted(float raised) { return reciprocal(raised + 1.0f); }
  static METHOD float tanh(float inverted) { return __builtin_fmaf(inverted, -2.0f, 1.0f); }
  static METHOD float slope(float tanh) { return __builtin_fmaf(-tanh, tanh, 1.0f); }
  METHOD float weight(float tanh, float minus_lse) const { return exp2(__builtin_fmaf(tanh, out, minus_lse)); }
};

// ---- scores of every kind -----------------------------------------------------------------------

// Which scores of a product dropout keeps: bit r for register r.
DEVICE unsigned kept(const Context &c, int head, int own, int first) {
  const Params &p = params_again();
  Dropout dropout(p, c.s.batch);
  auto draw = [&](int key, int row) { return dropout.kept_of_four(dropout.group_of(key), row, head); };
  // A draw serves four keys: four registers, or where keys are owned one of four neighboring lanes,
  // each of which draws for every fourth row.
  int lane = lane_index() % 4;
  unsigned bits = 0;
#pragma unroll 1
  for (int j = 0; j < kFours; ++j) {
    int other = first + M::row(4 * j);
    bits |= (kKeys ? draw(own, other + lane) : draw(other, own)) << 4 * j;
  }
  if (!kKeys) return bits;
  return kept_by_lane<0x1111>(bits);
}

// The bias of a product's scores, as it is in memory. What is not seen need not be there: elements beyond the end are 0
// or others of the bias.
#ifndef HAS_BOOL_BIAS
#define HAS_BOOL_BIAS 1
#endif
struct Biases {
  const char *base;    // of the owned ones from `first_own` on
  int type, step;      // bytes between streamed ones
  int own_bytes;       // of the owned ones, 0 where none is there
  unsigned offset[4];  // of the lane, for registers 0 ... 3
  unsigned bits[M::kRegisters];

  METHOD void seek(const Params &p, const Context &c, int head, int first_own) {
    type = p.bias_type;
    int size = size_of_bias(type), row_step = (int)p.bias_row * size, key_step = (int)p.bias_key * size;
    int own_step = kKeys ? key_step : row_step, own = min(c.owned() - first_own, kTile);
    pin_scalar(own);
    step = kKeys ? row_step : key_step;
    base = terms_of(p, c.s.batch, head, 0).bias + (long long)first_own * own_step;
    own_bytes = own > 0 ? (own - 1) * own_step + size : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) offset[i] = M::row(i) * step + M::column() * own_step;
  }
  // Of `there` streamed ones from `base` on. All are on their way at once: one after the other, each was waited for.
  METHOD void load(int there) {
    auto from = buffer(base, there > 0 && own_bytes ? (there - 1) * step + own_bytes : 0);
    int size = size_of_bias(type), more[kFours];
#pragma unroll
    for (int j = 0; j < kFours; ++j) {
      more[j] = j * 8 * step;
      pin_scalar(more[j]);  // or it is kept in a vector register, and loads go lane by lane
    }
    auto load = [&](auto one) {
#pragma unroll
      for (int r = 0; r < M::kRegisters; ++r) bits[r] = one(offset[r % 4], more[r / 4]);
    };
    if (size == 4)
      load([&](unsigned at, int more) { return __builtin_amdgcn_raw_buffer_load_b32(from, at, more, 0); });
    else if (size == 2 || !HAS_BOOL_BIAS)
      load([&](unsigned at, int more) { return __builtin_amdgcn_raw_buffer_load_b16(from, at, more, 0); });
    else
      load([&](unsigned at, int more) { return __builtin_amdgcn_raw_buffer_load_b8(from, at, more, 0); });
  }
  // Adds the bias, `factor` times, to s.
  template <int of_type, int size>
  METHOD void add(Acc &s, float factor) const {
#pragma unroll
    for (int r = 0; r < M::kRegisters; ++r) s[r] = __builtin_fmaf(bias_value<size>(of_type, bits[r]), factor, s[r]);
  }
  METHOD void add(Acc &s, float factor) const {
    if (type == kFloat32Bias)
      add<kFloat32Bias, 4>(s, factor);
    else if (type == kBfloat16Bias)
      add<kBfloat16Bias, 2>(s, factor);
    else if (type == kFloat16Bias || !HAS_BOOL_BIAS)
      add<kFloat16Bias, 2>(s, factor);
    else
      add<kBoolBias, 1>(s, factor);
  }
};

// What dS needs of S, besides the product itself.
struct Weights {
  Acc p;         // before dropout: for the sinks, and for the gradient of a bias
  unsigned seen;  // bit_of(r): whether the mask leaves register r
  unsigned keep;  // bit r: whether dropout keeps register r
  float keep_scale;
};

#ifdef MOD
// Scores whose mods are computed together: their loads are on their way at once, and parameters are loaded once.
constexpr int kOfMod = 4;
// f(place, other, register) for the first of each kOfMod registers; `other`: the row or key that is not owned of
// register 0. Opaque, or what elements need comes first for all of them: 88 scalar registers spilled.
template <typename F>
DEVICE void each_place(const Context &c, int head, int row0, F f) {
  ModPlace place(params_again(), c.s.batch, head);
  place.pin_all();
#pragma unroll
  for (int r = 0; r < M::kRegisters; r += kOfMod) {
    place.captured = captured_of(params_again());
    int other = row0;
    pin(other);
    f(place, other, r);
    fence();
  }
}

// Applies the score_mod to each score and writes its derivative to `slope`. Keys that a mask_mod masks are no
// longer `seen`. `is_full`: it masks nothing in this tile.
DEVICE void modify(Acc &s, float (&slope)[M::kRegisters], unsigned &seen, const Context &c, int head, int own,
                   int row0, bool is_full) {
#ifdef HAS_SCORE_MOD
  each_place(c, head, row0, [&](const ModPlace &place, int other, int r) {
    float x[kOfMod];
#pragma unroll
    for (int i = 0; i < kOfMod; ++i) {
      int step = bit_of(r + i);
      x[i] = modified(place, s[r + i], kKeys ? other : own, kKeys ? own : other, kKeys ? step : 0, kKeys ? 0 : step,
                      slope[r + i]);
    }
#pragma unroll
    for (int i = 0; i < kOfMod; ++i) {
      pin(x[i]);
      pin(slope[r + i]);
      s[r + i] = x[i];
    }
  });
#endif
#ifdef HAS_MASK_MOD
  if (is_full) return;
  each_place(c, head, row0, [&](const ModPlace &place, int other, int r) {
#pragma unroll
    for (int i = 0; i < kOfMod; ++i) {
      int at = other + bit_of(r + i);
      seen = is_seen(place, kKeys ? at : own, kKeys ? own : at) ? seen : seen & ~(1u << bit_of(r + i));
    }
    pin(seen);
  });
#endif
}
#endif

// S becomes d P / d (scaled Q K^T), and where keys are owned `rounded` P after dropout.
DEVICE Weights weigh(Acc &s, Pair (&rounded)[kFours], const Context &c, Acc minus_lse,
                     const RowStates &states, int head, int n, int first,
                     bool is_full = false) {
  const Params &p = params_again();
  int own = c.own(n), row0 = first + M::row(0);
  // Or what follows from them would be kept from tile to tile: with a head_dim of 256 there is no room.
  pin(own);
  pin(row0);
  Weights w;
  unsigned seen = seen_bits(c, own, first);
  Terms terms = terms_of(p, c.s.batch, head, 0);
  // S is scaled here and gradients at the end, which leaves 1 for a score's slope.
  terms.scale = 1.0f;
  terms.inverse = terms.softcap > 0.0f ? 1.0f / terms.softcap : 0.0f;
  w.keep = ~0u;
  w.keep_scale = 1.0f;
  if (p.dropout_threshold) {
    w.keep = kept(c, head, own, first);
    w.keep_scale = p.dropout_scale;
  }
  float slope[M::kRegisters];
#ifdef MOD
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) s[r] = capped(terms, s[r] * p.scale, slope[r]);
  modify(s, slope, seen, c, head, own, row0, is_full);
#endif
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) {
    int other = row0 + bit_of(r);
    int distance = (kKeys ? own - other : other - own) - c.s.shift;
#ifdef MOD
    s[r] += alibi(terms, distance);
#else
    s[r] = score(terms, s[r] * p.scale, distance, slope[r]);
#endif
  }
  w.seen = seen;
  if (p.bias_type != kNoBias) {
    const Params &again = params_again();
#ifdef MOD
    // One by one: all at once, up to 20 registers spilled with the conformance suite's masks.
    constexpr bool kOneByOne = true;
#else
    constexpr bool kOneByOne = false;
#endif
    if (kOneByOne) {
      Terms at = terms_of(again, c.s.batch, head, 0);
      const char *bias = at.bias;
      long long row_step = terms_of(again, c.s.batch, head, 1).bias - bias;
      int place = own < c.owned() ? own : 0;
#pragma unroll
      for (int r = 0; r < M::kRegisters; ++r) {
        // What is not seen need not be there: any element does for it.
        int other = row0 + bit_of(r) & bits_of(seen, bit_of(r));
        at.bias = bias + (kKeys ? other : place) * row_step;
        // `biased` takes registers: with a mask 260 at 128, so that one workgroup fits where two have to.
        s[r] += bias_of(at, kKeys ? place : other);
      }
    } else {
      Biases biases;
      biases.seek(again, c, head, c.first + n * kTile);
      biases.base += (long long)first * biases.step;
      int there = min(c.streamed() - first, kTile);
      pin_scalar(there);
      biases.load(there);
      biases.add(s, 1.0f);
    }
  }
  if (kKeys) minus_lse = load_states(c, states.minus_lse, first);
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r)
    w.p[r] = where(seen, bit_of(r), exp2(s[r] * kLog2E + minus_lse[r]));
#pragma unroll
  for (int r = 0; r < M::kRegisters; ++r) s[r] = where(w.keep, r, w.p[r] * w.keep_scale);
  if (kKeys) round(rounded, s);
  for (int r = 0; r < M::kRegisters; ++r) {
    float x = w.p[r] * slope[r];
#ifdef HAS_SCORE_MOD
    // A slope need not be finite where nothing is seen.
    x = w.p[r] == 0.0f ? 0.0f : x;
    pin(x);  // or all comparisons come first: 2 scalar registers spilled at 64
#endif
    s[r] = x;
  }
  return w;
}
