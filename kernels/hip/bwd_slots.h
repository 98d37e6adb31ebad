// The loop of the two-pass backward over plain scores, in slots.
//
// A tile's products are made in slots of four, or of two where registers are too few for that, each with the
// fragments that one or two reads of LDS bring, a slot ahead: S, dP, then with the columns dV and dK, or dQ.
// What the vector unit has to do is dealt out over single products, so that one wavefront alone keeps both
// units busy; `fence` holds the compiler to it. In the last slot before the columns, and before the next
// tile, all fragments of what others will write over are in registers: there the barriers are, with products
// on both sides.
#pragma once
#include "bwd_owned.h"

typedef float Four __attribute__((ext_vector_type(4)));

static_assert(!kFull, "K, V and their gradients leave no registers for the fragments of the next slot");

constexpr int kReads = COLUMNS == 2 || HEAD_DIM + HEAD_DIM_V > 384 ? 1 : 2;  // of a slot
constexpr int kEndS = kSteps / kReads;
constexpr int kEndP = kEndS + kStepsV / kReads;
constexpr int kEndV = kEndP + (kKeys ? kTilesV * kFours / 2 / kReads : 0);
constexpr int kSlots = kEndV + kTiles * kFours / 2 / kReads;

typedef Quad Fragments[kReads];

// Products are counted through the tile. After each one of them comes its share of the vector unit's work:
// with all of a slot's exponentials after its first product, the matrix unit would wait for them.
constexpr int kPerSlot = 2 * COLUMNS * kReads;
constexpr int kFirstP = kEndS * kPerSlot, kFirstV = kEndP * kPerSlot, kFirstG = kEndV * kPerSlot;
constexpr int kProducts = kSlots * kPerSlot;
constexpr int kElements = M::kRegisters * COLUMNS;  // of S, in a lane
constexpr int kMoves = Tiles::kMine * 4;            // rows or columns of pieces that a lane stores

// After which of the products `begin` ... `end` - 1 comes part `part` of `parts`.
DEVICE constexpr int turn(int part, int parts, int begin, int end) {
  return begin + part * (end - begin) / parts;
}
// P of an element: among the products for dP.
DEVICE constexpr int turn_of_p(int element) { return turn(element, kElements, kFirstP, kFirstV); }
// Of P, the half that the first products for dV take is rounded at once, the rest among these.
constexpr int kEarly = M::kRegisters / 2;
DEVICE constexpr int turn_of_late(int element) {
  return turn(element - kElements / 2, kElements / 2, kFirstV, (kFirstV + kFirstG) / 2 - kPerSlot / 2);
}
// dS of an element: among those for dV. Of dQ half right after dP, half among the first products for dQ, which
// need it last.
DEVICE constexpr int turn_of_ds(int element) {
  if (kKeys) return turn(element, kElements, kFirstV + 1, kFirstG);
  return element < kElements / 2
             ? -1
             : turn(element - kElements / 2, kElements / 2, kFirstG, (kFirstG + kProducts) / 2);
}
// The transposed stores come first, then, in the place of each piece's registers, the loads of the next tile,
// whose rows are stored well before the barrier that they have to pass.
DEVICE constexpr int turn_of_column(int move) { return turn(move, kMoves, 0, kFirstP * 3 / 4); }
DEVICE constexpr int turn_of_load(int move) { return turn_of_column(move / 4 * 4 + 3) + 1 + move % 4; }
DEVICE constexpr int turn_of_state(int n) { return kFirstP / 4 * (n + 1) + 1; }
DEVICE constexpr int turn_of_row(int move) {
  return turn(move, kMoves, kFirstG - kPerSlot, kProducts - 5 * kPerSlot / 2);
}

// Where a lane reads its first units: those of other steps differ by an exclusive or and an offset.
struct Bases {
  int a, c, columns;

  METHOD Bases() {
    int row = lane_index() % kTile, part = lane_index() / kTile;
    a = Tiles::RowsA::place(row, part);
    c = Tiles::RowsC::place(row, part);
    columns = ColumnTile<HEAD_DIM>::place(row, part);
  }
};

// Where the tile lies that is loaded: looked up once a head, then moved on from tile to tile, so that what
// stands beside products is two additions and not a descriptor from the start (312 clocks of 2,933 at 128).
struct Next {
  char *a, *b;
  int left;                         // rows from its first one on
  int bytes_a, bytes_b;             // of it, from there to its end
  unsigned offset[Tiles::kMine];    // of a lane's first row of each piece

  METHOD void seek(const Pass &pass) {
    a = pass.a.row(pass.start);
    b = pass.b.row(pass.start);
    left = pass.c.streamed() - pass.start;
    measure(pass);
  }
  METHOD void advance(const Pass &pass) {
    a += kTile * pass.a.row_bytes;
    b += kTile * pass.b.row_bytes;
    left -= kTile;
    measure(pass);
  }
  METHOD void measure(const Pass &pass) {
    int rows = max(left, 0);
    pin_scalar(rows);  // or min and max become v_med3, of which the compiler does not know that lanes agree
    rows = min(rows, kTile);
    bytes_a = bytes_of(pass.a, rows);
    bytes_b = bytes_of(pass.b, rows);
  }
  // Without a comparison, which would be a branch.
  static METHOD int bytes_of(const Matrix &m, int rows) {
    return rows * m.row_bytes - min(rows, 1) * (m.row_bytes - m.width * 2);
  }
};

DEVICE void read(Fragments &f, Lds lds, const Bases &bases, int slot) {
  for (int i = 0; i < kReads; ++i) {
    int n = slot * kReads + i;
    if (slot < kEndS) {
      f[i] = lds_read(lds + kRowsA + Tiles::RowsA::step(bases.a, n));
    } else if (slot < kEndP) {
      n -= kEndS * kReads;
      int base = HEAD_DIM_V == HEAD_DIM ? bases.a : bases.c;
      f[i] = lds_read(lds + kRowsC + Tiles::RowsC::step(base, n));
    } else {  // all of the head for 16 rows, then for the others
      bool of_v = slot < kEndV;
      n -= (of_v ? kEndP : kEndV) * kReads;
      int tiles = of_v ? kTilesV : kTiles;
      Lds from = lds + (of_v ? kColumnsC : kColumnsA);
      f[i] = lds_read(from + ColumnTile<HEAD_DIM>::step(bases.columns, n % tiles, n / tiles));
    }
  }
}

// acc (tile x owned) of a tile's rows and the owned ones, or of `start` and that. `work` comes after each
// product.
template <int steps, typename Work>
DEVICE void multiply_slot(Acc (&acc)[COLUMNS], const Fragments &f, const Quad (&x)[COLUMNS][steps],
                          int slot, const Acc (&start)[COLUMNS], Work work) {
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    int step = slot * kReads + i;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        const Acc &to = step || half ? acc[n] : start[n];
        acc[n] = half ? M::mma(f[i].zw, x[n][step].zw, to) : M::mma(f[i].xy, x[n][step].xy, to);
        work((i * 2 + half) * COLUMNS + n);
      }
  }
}

// grad (head x owned), over half of the tile's rows.
template <int tiles, typename Work>
DEVICE void accumulate_slot(Acc (&grad)[COLUMNS][tiles], const Fragments &f, const Rounded &x, int slot,
                            Work work) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int i = 0; i < kReads; ++i) {
      int t = (slot * kReads + i) % tiles, j = (slot * kReads + i) / tiles;
#pragma unroll
      for (int n = 0; n < COLUMNS; ++n) {
        grad[n][t] = half ? M::mma(f[i].zw, x[n][2 * j + 1], grad[n][t])
                          : M::mma(f[i].xy, x[n][2 * j], grad[n][t]);
        work((half * kReads + i) * COLUMNS + n);
      }
    }
}

// Registers r and r + 1 of x. Pinned, or the compiler would make them below a branch that they pass.
DEVICE void round_two(Pair &to, const Acc &x, int r, bool pinned = false) {
  unsigned two = F::half_up(x[r], x[r + 1]);
  if (pinned) pin(two);
  to[r / 2 % 2] = two;
}

// -LSE or -delta of a row: where keys are owned of row `first` + lane % 32, else of the owned row.
DEVICE float load_state(const Context &c, const float *state, int first) {
  auto from = buffer(state + first, max(c.s.rows - first, 0) * 4);
  return __builtin_bit_cast(
      float, __builtin_amdgcn_raw_buffer_load_b32(from, lane_index() % kTile * 4, 0, 0));
}
// Where keys are owned: what registers 4 j ... 4 j + 3 of a product take of one state, which is at `lds`.
DEVICE Four states_of_four(Lds lds, int j) {
  return __builtin_bit_cast(Four, lds_read(lds + M::row(4 * j) * 4));
}
// The first 32 lanes bring LSE, the others delta. Every wavefront writes the same.
DEVICE void store_states(Lds lds, float lse, float delta) {
  int lane = lane_index();
  float x = lane < kTile ? lse : delta;
  lds_write(lds + lane * 4, __builtin_bit_cast(unsigned, x));
}

// All tiles of all heads of `pass`.
DEVICE void run_in_slots(Pass &pass, const Quad (&x)[COLUMNS][kSteps], const Quad (&y)[COLUMNS][kStepsV],
                         Acc (&grad_x)[COLUMNS][kTiles], Acc (&grad_y)[COLUMNS][kTilesV]) {
  const Context &c = pass.c;
  Lds lds = pass.lds;
  Tiles &tiles = pass.tiles;
  int lane = lane_index(), count = pass.heads * pass.steps;
  Next next;
  next.seek(pass);
  auto load = [&](int move) {
    int n = move / 4;
    bool of_a = tiles.is_a(n);
    int bytes = tiles.is_there(n) ? of_a ? next.bytes_a : next.bytes_b : 0;
    tiles.load_row(n, move % 4, of_a ? next.a : next.b, bytes, next.offset[n],
                   of_a ? pass.a.row_bytes : pass.b.row_bytes);
  };
  for (int n = 0; n < Tiles::kMine; ++n) {
    next.offset[n] = tiles.offset(n, lane, pass.a, pass.b);
    pin(next.offset[n]);
  }
  for (int i = 0; i < kMoves; ++i) load(i);
  for (int i = 0; i < kMoves; ++i) tiles.store_row(i / 4, i % 4, lane, lds + kRowsA, lds + kRowsC);
  // Of this tile; where keys are owned, the first alone, on its way to LDS.
  float minus_lse[COLUMNS], minus_delta[COLUMNS];
  for (int n = 0; n < (kKeys ? 1 : COLUMNS); ++n) {
    int at = kKeys ? pass.start : c.first + n * kTile;
    minus_lse[n] = load_state(c, pass.states.minus_lse, at);
    minus_delta[n] = load_state(c, pass.states.minus_delta, at);
  }
  if (kKeys) store_states(lds + kStates + count % 2 * kStateBytes, minus_lse[0], minus_delta[0]);
  Acc nothing[COLUMNS], start_dp[COLUMNS];
  for (int n = 0; n < COLUMNS; ++n) {
    nothing[n] = Acc{0};
    if (!kKeys) start_dp[n] = Acc(minus_delta[n]);
  }
  int step = 0, first = pass.start;
  auto next_first = [&] { return pass.start + step * kTile; };
  auto advance = [&] {
    next.advance(pass);
    if (++step == pass.steps && --pass.heads) {
      step = 0;
      ++pass.head;
      pass.look_up();
      next.seek(pass);
    }
  };
  Fragments ready, ahead;
  Bases bases;
  barrier();  // the first rows are there
  read(ready, lds, bases, 0);
  for (; count > 0; --count) {
    advance();
    bool cut = first < pass.mine.all_low || first + kTile > pass.mine.all_high;
    Acc s[COLUMNS], dp[COLUMNS];
    Rounded p_rounded, ds_rounded;
    float next_lse, next_delta;
    Four lse[kFours];
    int states_at = count % 2 * kStateBytes;
    Lds lds_lse = lds + kStates + states_at, lds_delta = lds_lse + kTile * 4;
    auto differ_element = [&](int e) {
      int r = e / (4 * COLUMNS) * 4 + e % 4, n = e / 4 % COLUMNS;
      dp[n][r] *= s[n][r];
      if (r % 2) round_two(ds_rounded[n][r / 4], dp[n], r - 1);
    };
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      int reading = (slot + 1) % kSlots;
      if (reading == kEndP) barrier();  // its columns are there, and its rows have been read
      if (reading == 0) barrier();      // the next rows are there, and the columns have been read
      read(ahead, lds, bases, reading);
      if (kKeys)  // a slot before they are needed
#pragma unroll
        for (int j = 0; j < kFours; ++j) {
          if (slot == turn_of_p(j * 4 * COLUMNS) / kPerSlot - 1) lse[j] = states_of_four(lds_lse, j);
          if (slot != kEndS - 2 + j / 2) continue;
          Four delta = states_of_four(lds_delta, j);
          for (int n = 0; n < COLUMNS; ++n)
            for (int i = 0; i < 4; ++i) start_dp[n][4 * j + i] = delta[i];
        }
      fence();
      auto work = [&](int product) {
        product += slot * kPerSlot;
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
          if (product == turn_of_column(i))
            tiles.store_column<kKeys>(i / 4, i % 4, lane, lds + kColumnsA, lds + kColumnsC);
          if (product == turn_of_load(i)) load(i);
        }
        if (kKeys && product == turn_of_state(0))
          next_lse = load_state(c, pass.states.minus_lse, next_first());
        if (kKeys && product == turn_of_state(1))
          next_delta = load_state(c, pass.states.minus_delta, next_first());
#pragma unroll
        for (int e = 0; e < kElements; ++e) {
          int r = e / (4 * COLUMNS) * 4 + e % 4, n = e / 4 % COLUMNS;
          if (product == turn_of_p(e)) {
            s[n][r] = exp2(s[n][r] * c.to_base_2 + (kKeys ? lse[r / 4][r % 4] : minus_lse[n]));
            if (kKeys && r % 2 && r < kEarly) round_two(p_rounded[n][r / 4], s[n], r - 1, true);
          }
          if (kKeys && r % 2 && r >= kEarly && product == turn_of_late(e))
            round_two(p_rounded[n][r / 4], s[n], r - 1);
          if (product == turn_of_ds(e)) differ_element(e);
        }
#pragma unroll
        for (int i = 0; i < kMoves; ++i)
          if (product == turn_of_row(i))
            tiles.store_row(i / 4, i % 4, lane, lds + kRowsA, lds + kRowsC);
        if (kKeys && product == turn_of_row(kMoves - 1))
          store_states(lds + kStates + (states_at ^ kStateBytes), next_lse, next_delta);
        fence();
      };
      if (slot < kEndS)
        multiply_slot(s, ready, x, slot, nothing, work);
      else if (slot < kEndP)
        multiply_slot(dp, ready, y, slot - kEndS, start_dp, work);
      else if (slot < kEndV)
        accumulate_slot(grad_y, ready, p_rounded, slot - kEndP, work);
      else
        accumulate_slot(grad_x, ready, ds_rounded, slot - kEndV, work);
      if (slot == kEndP - 1) {
        if (cut)
#pragma unroll
          for (int n = 0; n < COLUMNS; ++n) {
            mask(s[n], seen_bits(c, c.own(n), first));
#pragma unroll
            for (int r = 0; kKeys && r < kEarly; r += 2) round_two(p_rounded[n][r / 4], s[n], r);
          }
#pragma unroll
        for (int e = 0; e < kElements; ++e)
          if (turn_of_ds(e) < 0) differ_element(e);
      }
      fence();
#pragma unroll
      for (int i = 0; i < kReads; ++i) ready[i] = ahead[i];
    }
    first = next_first();
  }
}
