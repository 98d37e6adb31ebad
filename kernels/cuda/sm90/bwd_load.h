// The producer warpgroup: one warp issues copies, two load the rows' -LSE and -delta.
#pragma once
#include "bwd_shape.h"
#include "../../common/row_sums.h"

// The maps of MappedParams.
enum Map { kMapQ, kMapK, kMapV, kMapDout, kMapDk, kMapDv, kMapBias };

template <int panels, int rows>
DEVICE void load_panels(Shared to, const TensorMap *map, Shared mbarrier, int row, int head,
                        int batch) {
#pragma unroll
  for (int i = 0; i < panels; ++i)
    tma_load(to + i * rows * kRowBytes, map, mbarrier, i * 64, row, head, batch);
}

// Arms the barrier of a copy: `landed` where its tile may have to be cleared, else `full`. Returns it.
DEVICE Shared expect(Shared full, Shared landed, bool clear, int bytes) {
  if (clear) mbarrier_arrive(full);
  Shared at = clear ? landed : full;
  mbarrier_arrive_expect_tx(at, bytes);
  return at;
}

// Asks for the block's keys, of K or V.
template <int panels>
DEVICE void load_owned(const MappedParams &mapped, const Owned &own, const Sequence &s, Shared to, Map map,
                       Shared full, Shared landed) {
  const Params &p = mapped.params;
  Shared arrive = expect(full, landed, keys_to_clear(p, s, own.first_key), panels * kKPanel);
  load_panels<panels, BLOCK_K>(to, &mapped.maps[map], arrive, (int)s.key0 + own.first_key,
                               divide(own.head_k, p.splits_inverse), s.key_batch);
}
DEVICE void load_keys(const MappedParams &mapped, const Owned &own, const Sequence &s, Shared shared) {
  load_owned<kQPanels>(mapped, own, s, shared + kK, kMapK, mbarrier_at(shared, kKFull), mbarrier_at(shared, kKLanded));
}
DEVICE void load_values(const MappedParams &mapped, const Owned &own, const Sequence &s, Shared shared) {
  load_owned<kVPanels>(mapped, own, s, shared + kV, kMapV, mbarrier_at(shared, kVFull), mbarrier_at(shared, kVLanded));
}

// The copies of rows, once their places are empty.
struct RowLoader {
  const MappedParams &mapped;
  const Sequence &s;
  Shared shared;
  METHOD void load_q(const Cursor &tile, int step) const {
    load<kQPanels>(shared + kQ + stage_of(step) * kQBytes, kMapQ, kQEmpty, kQFull, kQLanded, tile, step);
  }
  METHOD void load_dout(const Cursor &tile, int step) const {
    load<kVPanels>(shared + kDout + stage_of(step) * kDoutBytes, kMapDout, kDoutEmpty, kDoutFull, kDoutLanded, tile,
                   step);
  }
  template <int panels>
  METHOD void load(Shared to, Map map, int empty, int full, int landed, const Cursor &tile, int step) const {
    int stage = stage_of(step);
    mbarrier_wait(mbarrier_at(shared, empty + stage), phase_of(step) ^ 1);
    Shared arrive = expect(mbarrier_at(shared, full + stage), mbarrier_at(shared, landed + stage),
                           rows_to_clear(mapped.params, s, tile.tile), panels * kQPanel);
    load_panels<panels, BLOCK_Q>(to, &mapped.maps[map], arrive, (int)s.row0 + tile.tile * BLOCK_Q, tile.head,
                                 s.row_batch);
  }
};

// Asks for the keys of a work tile, and for the rows of its first step, once the work tile before leaves them room: K
// when dQ has been computed, V when dK and dV, which pass through its place, have been stored.
DEVICE void load_first(const MappedParams &mapped, const Owned &own, const Work &w, const Sequence &s,
                       const Cursor &first, int step, Shared shared) {
  RowLoader loader{mapped, s, shared};
  if (w.steps) loader.load_q(first, step);
  if (w.number) {
    mbarrier_wait(mbarrier_at(shared, kKEmpty), w.number - 1 & 1);
    load_keys(mapped, own, s, shared);
  }
  if (w.steps) loader.load_dout(first, step);
  if (w.number) mbarrier_wait(mbarrier_at(shared, kVEmpty), w.number - 1 & 1);
  load_values(mapped, own, s, shared);
}

// Finds the first work tile, tells of it, and asks for what it reads first.
//
// In front of the block's barrier, since setmaxnreg wants whole warps, and takes 500 cycles. With ROLES only K is asked
// for that early: otherwise ptxas orders the consumers' loop so that at D = 256 long sequences take 1.02 of the time.
DEVICE void begin(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  Owned own = find_keys(p, first_work_tile(p));
  Sequence s = owned_sequence(p, own);
  if (own.first_key < kNoKeys) load_keys(mapped, own, s, shared);  // before the work is counted
  Work w = work_of(p, own, s, 0);
  tell(own, s, w);  // first_tile may ask for it
  if (!ROLES && w.steps >= 0) load_first(mapped, own, w, s, first_tile(p, own, w), 0, shared);
}

// The thread that finds work tiles and asks for all copies, after begin().
DEVICE void produce_tiles(const MappedParams &mapped, Shared shared) {
  const Params &p = mapped.params;
  int id = workgroup_index(), step = 0;
  for (unsigned number = 0;; ++number) {
    Owned own = number ? find_keys(p, id) : owned_keys(0);
    Sequence s = number ? owned_sequence(p, own) : told_sequence(p, own, 0);
    Work w = number ? work_of(p, own, s, number) : hear(p, 0);
    if (number) {
      mbarrier_wait(mbarrier_at(shared, kWorkEmpty + number % 2), number / 2 % 2 ^ 1);
      tell(own, s, w);
    }
    if (w.steps < 0) return;
    Cursor cursor = first_tile(p, own, w);
    if (number || ROLES) load_first(mapped, own, w, s, cursor, step, shared);
    RowLoader loader{mapped, s, shared};
    int end = step + w.steps;
    while (++step < end) {
      cursor.advance(p, w);
      loader.load_q(cursor, step);
      loader.load_dout(cursor, step);
    }
    step = end;
    if (!kPersistent) return;
    griddepcontrol_wait();  // for the counter
    id = next_work_tile(p, id);
  }
}

// Clears the rows from `first` on, once they have landed: 0 times what lies there may be NaN.
template <int panels, int rows>
DEVICE void clear_rows(Shared panel, Shared landed, unsigned parity, int first) {
  mbarrier_wait(landed, parity);
#pragma unroll 1
  for (int i = 0; i < panels; ++i)
#pragma unroll 1
    for (int unit = max(first, 0) * 8 + lane_index(); unit < rows * 8; unit += kLanes)
      store_shared(panel + i * rows * kRowBytes + unit * 16, Quad{0, 0, 0, 0});
  fence_proxy_async();
}

// The bias of a step's tile, once dS of two tiles before has been read.
DEVICE void load_bias(const MappedParams &mapped, unsigned number, const Cursor &at, int step, Shared shared) {
  const Params &p = mapped.params;
  Owned own = owned_keys(number);
  mbarrier_wait(mbarrier_at(shared, kDsEmpty + stage_of(step)), phase_of(step) ^ 1);
  Shared full = mbarrier_at(shared, kBiasFull + stage_of(step));
  mbarrier_arrive_expect_tx(full, kDsBytes);
#pragma unroll
  for (int i = 0; i < kKeyGroups; ++i)
    tma_load(shared + kDs + stage_of(step) * kDsBytes + i * kQPanel, &mapped.maps[kMapBias], full,
             own.first_key + i * 64, at.tile * BLOCK_Q, p.bias_head ? at.head : 0, p.bias_batch ? own.batch : 0);
}

// What a warp loads beside the copies of Q and K, or of dO and V: one float a row, and zeros for rows beyond
// the sequence.
//
// The warp of Q also asks for the tiles of a bias. `landed`: by place, those of Q or dO and then of the keys, the parity
// of its next copies that have to be waited for.
template <bool of_q>
DEVICE void produce_states(const MappedParams &mapped, const Work &w, int step, unsigned &landed, Shared shared) {
  const Params &p = mapped.params;
  Owned own = owned_keys(w.number);
  Sequence s = owned_sequence(p, own);  // what is told of it would be in more registers, and D = 128 take 1.01 to 1.02
  constexpr int kPanels = of_q ? kQPanels : kVPanels;
  constexpr int kFull = of_q ? kQFull : kDoutFull, kEmpty = of_q ? kQEmpty : kDoutEmpty;
  auto at = [&](int barrier) { return mbarrier_at(shared, barrier); };
  auto arrive = [&](int barrier) {
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(at(barrier));
  };
  if (keys_to_clear(p, s, own.first_key)) {
    clear_rows<kPanels, BLOCK_K>(shared + (of_q ? kK : kV), at(of_q ? kKLanded : kVLanded), landed >> kStages & 1,
                                 s.keys - own.first_key);
    landed ^= 1u << kStages;
  }
  // The copies of the work tile before may still be under way.
  if (kPersistent) mbarrier_wait(at(of_q ? kKFull : kVFull), w.number - 1 & 1);
  arrive(of_q ? kKFull : kVFull);
  griddepcontrol_wait();  // for the states; and nobody adds to dQ before they have come
  Cursor cursor = first_tile(p, own, w);
  // What dropout multiplies dP by comes at the end, so -delta is of that.
  float factor = kMore;
  if constexpr (!of_q && may_have(kDropout))
    if (has(kDropout, p.dropout_threshold)) factor *= reciprocal(p.dropout_scale);
  for (int end = step + w.steps; step < end; ++step) {
    int first = cursor.tile * BLOCK_Q;
    RowStates states = row_states(p);
    const float *from =
        (of_q ? states.minus_lse : states.minus_delta) + state_offset(p, s, cursor.head) + first;
    float x[(BLOCK_Q + kLanes - 1) / kLanes];
#pragma unroll
    for (int i = 0; i * kLanes < BLOCK_Q; ++i) {
      int row = i * kLanes + lane_index();
      x[i] = of_q ? -INFINITY_F : 0.0f;  // which makes P 0
      if (row < BLOCK_Q && first + row < s.rows) x[i] = from[row];
      if constexpr (!of_q && kTwoWeights) x[i] *= factor;
    }
    float sink = 0.0f;
    if constexpr (of_q && may_have(kSinks))
      if (has(kSinks, p.dsinks)) sink = ((const float *)p.sinks)[cursor.head] * kLog2E;
    mbarrier_wait(at(kEmpty + stage_of(step)), phase_of(step) ^ 1);
    float over_scale = of_q && kLseFirst ? one_over_scale() : 1.0f;
    Shared to = shared + (of_q ? kMinusLse : kMinusDelta) + stage_of(step) * kStates +
                state_place(lane_index()) * 4;
#pragma unroll
    for (int i = 0; i * kLanes < BLOCK_Q; ++i)
      if (i * kLanes + lane_index() < BLOCK_Q) {
        store_shared(to + i * kLanes * 4, __builtin_bit_cast(unsigned, x[i] * over_scale));
        if constexpr (of_q && may_have(kSinks))
          store_shared(to + (kSinkWeights - kMinusLse) + i * kLanes * 4,
                       __builtin_bit_cast(unsigned, exp2(x[i] + sink)));
      }
    if (rows_to_clear(p, s, cursor.tile)) {
      clear_rows<kPanels, BLOCK_Q>(
          shared + (of_q ? kQ + stage_of(step) * kQBytes : kDout + stage_of(step) * kDoutBytes),
          at((of_q ? kQLanded : kDoutLanded) + stage_of(step)), landed >> stage_of(step) & 1,
          s.rows - first);
      landed ^= 1u << stage_of(step);
    }
    arrive(kFull + stage_of(step));
    if constexpr (of_q && kBiasTiles)
      if (lane_index() == 0) load_bias(mapped, w.number, cursor, step, shared);
    cursor.advance(p, w);
  }
  if (lane_index() == 0) end_work(w.number);
}
