// The loop of the two-pass backward over plain scores, in slots.
//
// A tile's products are computed in slots of four, or of two if there are too few registers. One or two LDS
// reads bring the fragments of a slot, one slot ahead: S, dP, then with the columns dV and dK, or dQ. The
// vector unit's work is spread over single products, so that one wavefront alone keeps both units busy; `fence`
// fixes this order for the compiler. In the last slot before the columns, and in the last before the next tile,
// all fragments that other wavefronts will overwrite are in registers. The barriers are there, with products on
// both sides.
#pragma once
#include "bwd_owned.h"

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

// Elements in the order in which products take them.
DEVICE constexpr int register_of(int element) { return element / (4 * COLUMNS) * 4 + element % 4; }
DEVICE constexpr int column_of(int element) { return element / 4 % COLUMNS; }

// After which of the products `begin` ... `end` - 1 comes part `part` of `parts`.
DEVICE constexpr int turn(int part, int parts, int begin, int end) {
  return begin + part * (end - begin) / parts;
}
// Elements `first` ... of S are dealt out over the products `begin` ... `end` - 1: `work` takes those whose turn
// comes after `product`.
template <int first, int begin, int end, typename Work>
DEVICE void elements_of(int product, Work work) {
  if (product < begin || product >= end) return;
  constexpr int parts = kElements - first, span = end - begin;
  int from = ((product - begin) * parts + span - 1) / span;
#pragma unroll
  for (int i = 0; i < (parts + span - 1) / span; ++i)
    if (from + i < parts && turn(from + i, parts, begin, end) == product) work(first + from + i);
}
// Of P, the half that the first products for dV take is rounded at once, the rest among these; of dS
// of rows, half is made right after dP, half among the first products for dQ, which need it last.
constexpr int kEarly = M::kRegisters / 2, kEarlyElements = kElements / 2;
// Of a softcap, three steps come after three products: its exponential, its reciprocal, and P.
constexpr int kStages = kSoftcapAlone ? 2 : 0;
// The transposed stores come first, then, in the place of each piece's registers, the loads of the next tile,
// whose rows are stored well before the barrier that they have to pass.
// At 64 the loads would come too late (rows: 0.73 to 0.82 of the matrix unit in place of 0.77 to 0.82).
constexpr int kColumnsEnd = HEAD_DIM > 64 ? kFirstP : kFirstP * 3 / 4;
DEVICE constexpr int turn_of_column(int move) { return turn(move, kMoves, 0, kColumnsEnd); }
DEVICE constexpr int turn_of_load(int move) { return turn_of_column(move / 4 * 4 + 3) + 1 + move % 4; }
// Where keys are owned, -LSE and -delta of the next tile come among the products for dV.
constexpr int kStates = 2 * kFours;
DEVICE constexpr int turn_of_state(int n) { return turn(n, kStates, kFirstV + 2, kFirstG + 2); }
// The addresses of the next iteration's loads are computed among the products for dK.
DEVICE constexpr int turn_of_next(int n) { return kFirstG + 1 + n; }
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

// The position of the tile that is loaded: computed once per head, then advanced from tile to tile. Only a few
// additions then overlap with products, instead of whole descriptors (312 clocks of 2,933 at 128).
struct Next {
  char *a, *b;
  int left;                       // rows from its first one on
  int rows, bytes_a, bytes_b;     // of it
  unsigned offset[Tiles::kMine];  // of a lane's first row of each piece

  METHOD void seek(const Pass &pass) {
    a = pass.a.row(pass.start);
    b = pass.b.row(pass.start);
    left = pass.c.streamed() - pass.start;
    for (int part = 3; part < kParts; ++part) advance(pass, part);
  }
  // In parts, each beside a product of its own.
  static constexpr int kParts = 6;
  METHOD void advance(const Pass &pass, int part) {
    if (part == 0) {
      a += kTile * pass.a.row_bytes;
      pin_scalar(a);
    } else if (part == 1) {
      left -= kTile;
      pin_scalar(left);
    } else if (part == 2) {
      b += kTile * pass.b.row_bytes;
      pin_scalar(b);
    } else if (part == 3) {
      rows = max(left, 0);
      pin_scalar(rows);  // or min and max become v_med3, of which the compiler does not know that lanes agree
      rows = min(rows, kTile);
      pin_scalar(rows);
    } else if (part == 4) {
      bytes_a = bytes_of(pass.a, rows);
      pin_scalar(bytes_a);
    } else {
      bytes_b = bytes_of(pass.b, rows);
      pin_scalar(bytes_b);
    }
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
        const Acc &to = step || half ? acc[n] : start[kKeys ? 0 : n];
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

// Registers r and r + 1 of x. Pinned; otherwise the compiler would move them below a later branch.
DEVICE void round_two(Pair &to, const Acc &x, int r) {
  unsigned two = F::half_up(x[r], x[r + 1]);
  pin(two);
  to[r / 2 % 2] = two;
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
  // Of this tile: where keys are owned, of its rows, else of the owned ones.
  Acc minus_lse[COLUMNS], start_dp[COLUMNS];
  for (int n = 0; n < COLUMNS; ++n) {
    int at = kKeys ? pass.start : c.first + n * kTile;
    minus_lse[n] = load_states(c, pass.states.minus_lse, at);
    start_dp[n] = load_states(c, pass.states.minus_delta, at);
  }
  Cap cap;
  Acc nothing[COLUMNS];
  for (int n = 0; n < COLUMNS; ++n) nothing[n] = Acc{0};
  // Of this tile, and of that which is loaded beside it.
  int step = 0, first = pass.start, next_first = pass.start;
  auto advance = [&](int part) {
    next.advance(pass, part);
    if (part != 1) return;
    next_first += kTile;
    if (__builtin_expect(++step == pass.steps, 0) && --pass.heads) {
      step = 0;
      next_first = pass.start;
      ++pass.head;
      pass.look_up();
      next.a = pass.a.row(pass.start);
      next.b = pass.b.row(pass.start) - kTile * pass.b.row_bytes;
      next.left = c.streamed() - pass.start;
    }
  };
  for (int part = 0; part < Next::kParts; ++part) advance(part);
  Fragments fragments[2];  // of this slot and of the next, in turn
  Bases bases;
  barrier();  // the first rows are there
  read(fragments[0], lds, bases, 0);
  for (; count > 0; --count) {
    Acc s[COLUMNS], dp[COLUMNS];
    Rounded p_rounded, ds_rounded;
    int after = next_first;
    int cut;  // below 0: the tile is not seen as a whole
    float steep[COLUMNS][M::kRegisters];  // the softcap's slope
    auto differ_element = [&](int e) {
      int r = register_of(e), n = column_of(e);
      if (kSoftcapAlone) dp[n][r] *= steep[n][r];
      dp[n][r] *= s[n][r];
      if (r % 2) round_two(ds_rounded[n][r / 4], dp[n], r - 1);
    };
#pragma unroll
    for (int slot = 0; slot < kSlots; ++slot) {
      int reading = (slot + 1) % kSlots;
      if (reading == kEndP) barrier();  // the columns are there, and the rows have been read
      if (reading == 0) barrier();      // the next rows are there, and the columns have been read
      read(fragments[(slot + 1) % 2], lds, bases, reading);
      const Fragments &ready = fragments[slot % 2];
      fence();
      auto work = [&](int product) {
        product += slot * kPerSlot;
        fence();  // or some of it would come before the product
        if (product == kFirstP) {
          cut = (first - pass.mine.all_low) | (pass.mine.all_high - kTile - first);
          pin_scalar(cut);
        }
#pragma unroll
        for (int i = 0; i < kMoves; ++i) {
          if (product == turn_of_column(i))
            tiles.store_column<kKeys>(i / 4, i % 4, lane, lds + kColumnsA, lds + kColumnsC);
          if (product == turn_of_load(i)) load(i);
        }
#pragma unroll
        for (int i = 0; kKeys && i < kStates; ++i)
          if (product == turn_of_state(i)) {
            bool of_lse = i < kFours;
            load_four(of_lse ? minus_lse[0] : start_dp[0], c,
                      of_lse ? pass.states.minus_lse : pass.states.minus_delta, after, i % kFours);
          }
#pragma unroll
        for (int i = 0; i < Next::kParts; ++i)
          if (product == turn_of_next(i)) advance(i);
        if (kSoftcapAlone) {
          elements_of<0, kFirstP, kFirstV - 2>(product, [&](int e) {
            Acc &x = s[column_of(e)];
            x[register_of(e)] = cap.raised(x[register_of(e)]);
          });
          elements_of<0, kFirstP + 1, kFirstV - 1>(product, [&](int e) {
            Acc &x = s[column_of(e)];
            x[register_of(e)] = cap.inverted(x[register_of(e)]);
          });
        }
        elements_of<0, kFirstP + kStages, kFirstV>(product, [&](int e) {
          int r = register_of(e), n = column_of(e);
          if (kSoftcapAlone) {
            float t = cap.tanh(s[n][r]);
            steep[n][r] = cap.slope(t);
            s[n][r] = cap.weight(t, minus_lse[kKeys ? 0 : n][r]);
          } else {
            s[n][r] = exp2(s[n][r] * c.to_base_2 + minus_lse[kKeys ? 0 : n][r]);
          }
          if (kKeys && r % 2 && r < kEarly) round_two(p_rounded[n][r / 4], s[n], r - 1);
        });
        if (kKeys) {
          elements_of<kEarlyElements, kFirstV, (kFirstV + kFirstG) / 2 - kPerSlot / 2>(
              product, [&](int e) {
                int r = register_of(e), n = column_of(e);
                if (r % 2) round_two(p_rounded[n][r / 4], s[n], r - 1);
              });
          elements_of<0, kFirstV + 1, kFirstG>(product, differ_element);
        } else {
          elements_of<kEarlyElements, kFirstG, (kFirstG + kProducts) / 2>(product, differ_element);
        }
#pragma unroll
        for (int i = 0; i < kMoves; ++i)
          if (product == turn_of_row(i))
            tiles.store_row(i / 4, i % 4, lane, lds + kRowsA, lds + kRowsC);
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
        if (__builtin_expect(cut < 0, 0))
#pragma unroll
          for (int n = 0; n < COLUMNS; ++n) {
            mask(s[n], seen_bits(c, c.own(n), first));
#pragma unroll
            for (int r = 0; kKeys && r < kEarly; r += 2) round_two(p_rounded[n][r / 4], s[n], r);
          }
#pragma unroll
        for (int e = 0; !kKeys && e < kEarlyElements; ++e) differ_element(e);
      }
      fence();
    }
    for (int i = 0; kSlots % 2 && i < kReads; ++i) fragments[0][i] = fragments[1][i];
    first = after;
  }
}
