// Chunks of keys (CHUNK_TILES): what a warpgroup keeps of the chunks that it has computed, and how the next chunk is
// merged with it (row.h: Join). Chunks are computed from the last to the first.
#pragma once
#include "fwd_shape.h"

// At the end of a chunk: adds up the four lanes' shares of a row's sum. The first of the lanes has the sum from now on,
// the others have 0.
DEVICE void sum_up(Rows &rows) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float total = row_sum(rows[h].total);
    rows[h].total = lane_index() % 4 == 0 ? total : 0.0f;
  }
}

// What the chunks before this one came to: the output, a base and a sum of each row of a warpgroup. They lie in shared
// memory if there is room (CHUNK_SHARED). Else they lie in memory that the block writes and reads over and over, so
// that it stays in the L2 cache. Of the output a thread reads only what it has written itself, in units of 16 bytes:
// unit `t` is that of tile `t` of eight columns. `put` and `get` need no barrier, then.
struct Before {
  struct alignas(16) Four {
    float x[4];
  };
#if CHUNK_SHARED
  Shared at, states;
  METHOD Before(const Params &, Shared before, int group) {
    int thread = thread_index() % kGroupThreads;
    pin(thread);  // or the addresses are kept through the loop over tiles
    states = before + group * kBeforeBytes;
    at = states + kBeforeStates + thread * (int)sizeof(Four);
    states += thread / 4 * (int)sizeof(Four);
  }
  METHOD Four get(int t) const { return load_shared<Four>(at + t * kGroupThreads * (int)sizeof(Four)); }
  METHOD void put(int t, const Four &x) const { store_shared(at + t * kGroupThreads * (int)sizeof(Four), x); }
  // The four lanes of a row share one copy, which the first of them writes. Only that lane has the sum (sum_up).
  METHOD Four get_states() const {
    Four two = load_shared<Four>(states);
    if (lane_index() % 4) two.x[1] = two.x[3] = 0.0f;
    return two;
  }
  METHOD void put_states(const Four &two) const {
    __syncwarp();  // all lanes have read the states before
    if (lane_index() % 4 == 0) store_shared(states, two);
    __syncwarp();
  }
#else
  static constexpr int kStep = GROUPS * 128;  // consumer threads of a block
  // Unit 0 of each thread has its states: all four lanes of a row keep them.
  Four *at;
  METHOD Before(const Params &p, Shared, int) {
    int thread = workgroup_index() * (kStep * (kDimTiles + 1)) + thread_index() - 128;
    pin(thread);  // or the address is kept through the loop over tiles
    at = (Four *)p.partial_out + thread;
  }
  METHOD Four get(int t) const { return at[(t + 1) * kStep]; }
  METHOD void put(int t, const Four &x) const { at[(t + 1) * kStep] = x; }
  METHOD Four get_states() const { return at[0]; }
  METHOD void put_states(const Four &two) const { at[0] = two; }
#endif
  // Two rows of a thread: a base and a sum of each.
  METHOD void keep(const Rows &rows, const Output &o) const {
    put_states(Four{{rows[0].base, rows[0].total, rows[1].base, rows[1].total}});
#pragma unroll
    for (int t = 0; t < kDimTiles; ++t) put(t, Four{{o[4 * t], o[4 * t + 1], o[4 * t + 2], o[4 * t + 3]}});
  }
  // Merges what was kept into the chunk that `rows` and `o` have.
  METHOD void join(Rows &rows, Output &o) const {
    Four states = get_states();
    Join joins[2] = {Join(states.x[0], rows[0].base), Join(states.x[2], rows[1].base)};
#pragma unroll
    for (int h = 0; h < 2; ++h)
      rows[h] = Row{joins[h].base, joins[h](states.x[2 * h + 1], rows[h].total)};
#pragma unroll
    for (int t = 0; t < kDimTiles; ++t) {
      if (t % 2 == 0) asm volatile("" ::: "memory");  // or all loads come first, and take registers
      Four four = get(t);
#pragma unroll
      for (int i = 0; i < 4; ++i) o[4 * t + i] = joins[i / 2](four.x[i], o[4 * t + i]);
    }
  }
};
