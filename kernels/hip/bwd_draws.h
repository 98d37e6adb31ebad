// Dropout alone in the one-pass backward: the draws of a step (philox.h), in parts that come between its products.
//
// A lane draws for one row of the step and the four keys of its group, in each of its wavefront's tiles. Four of the
// products of the first three rounds do not depend on the row, and one not on the tile: of a draw's 14 products, 9 are
// left, and one that all tiles share.
#pragma once
#include "bwd_score.h"

// Of philox.h: what a round multiplies by, and what each round adds to its keys.
constexpr unsigned kPhiloxA = 0xD2511F53u, kPhiloxB = 0xCD9E8D57u;
constexpr unsigned kPhiloxKeyA = 0x9E3779B9u, kPhiloxKeyB = 0xBB67AE85u;

DEVICE unsigned same_for_all(unsigned x) { return __builtin_amdgcn_readfirstlane(x); }
DEVICE unsigned high_of(unsigned long long x) { return (unsigned)(x >> 32); }

// What of the draws is the same for all rows of a head. Keys are in scalar registers: they are read for each tile.
template <int tiles>
struct DrawKeys {
  unsigned row;  // of the lane in a step that begins at row 0
  // What rounds combine with a high half by an exclusive or: words that they are given, and keys.
  unsigned first, second[tiles], third_a[tiles], third_b[tiles], fourth[tiles];
  unsigned a[4], b[3];  // keys of the last rounds
  unsigned times_a, times_b, threshold;

  METHOD void begin(const Sequence &s, int lane_row) {
    Dropout dropout(params_again(), s.batch);
    row = lane_row + dropout.q_start;
    unsigned key_a = same_for_all((unsigned)dropout.seed), key_b = same_for_all(high_of(dropout.seed));
    for (int i = 0; i < 4; ++i) a[i] = key_a + (3 + i) * kPhiloxKeyA;
    for (int i = 0; i < 3; ++i) b[i] = key_b + (4 + i) * kPhiloxKeyB;
    times_a = kPhiloxA;
    times_b = kPhiloxB;
    threshold = dropout.threshold;
    pin(row);
    for (int i = 0; i < 4; ++i) pin_scalar(a[i]);
    for (int i = 0; i < 3; ++i) pin_scalar(b[i]);
    pin_scalar(times_a);
    pin_scalar(times_b);
    pin_scalar(threshold);
  }
  // `key`: of the lane in the first tile.
  METHOD void seek(const Sequence &s, int head, int key) {
    Dropout dropout(params_again(), s.batch);
    unsigned key_a = (unsigned)dropout.seed, key_b = high_of(dropout.seed);
    unsigned long long y = wide_product(kPhiloxB, head + dropout.head_start);
    first = high_of(y) ^ key_a;
    unsigned of_head = (unsigned)y ^ (key_a + kPhiloxKeyA);
    pin(first);
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
      unsigned long long x = wide_product(kPhiloxA, dropout.group_of(key + n * 16));
      second[n] = (unsigned)x ^ (key_b + kPhiloxKeyB);
      y = wide_product(kPhiloxB, high_of(x) ^ dropout.batch ^ key_b);
      third_a[n] = (unsigned)y ^ (key_a + 2 * kPhiloxKeyA);
      x = wide_product(kPhiloxA, high_of(y) ^ of_head);
      third_b[n] = high_of(x) ^ (key_b + 2 * kPhiloxKeyB);
      fourth[n] = (unsigned)x ^ (key_b + 3 * kPhiloxKeyB);
      pin(second[n]);
      pin(third_a[n]);
      pin(third_b[n]);
      pin(fourth[n]);
    }
  }
};

// Which of four words are below the threshold, as lane masks; and a lane's four bits of these. Apart, since a vector
// instruction reads a scalar register no sooner than two others after a vector instruction has written it.
struct FourKept {
  unsigned long long mask[4];

  METHOD void compare(unsigned x0, unsigned x1, unsigned x2, unsigned x3, unsigned threshold) {
    asm volatile(
        "v_cmp_gt_u32_e64 %0, %4, %5\n\tv_cmp_gt_u32_e64 %1, %4, %6\n\t"
        "v_cmp_gt_u32_e64 %2, %4, %7\n\tv_cmp_gt_u32_e64 %3, %4, %8"
        : "=&s"(mask[3]), "=&s"(mask[2]), "=&s"(mask[1]), "=&s"(mask[0])
        : "s"(threshold), "v"(x3), "v"(x2), "v"(x1), "v"(x0));
  }
  METHOD unsigned bits() {
    unsigned bits;
    asm volatile(
        "v_cndmask_b32_e64 %0, 0, 1, %1\n\tv_addc_co_u32_e64 %0, %2, %0, %0, %2\n\t"
        "v_addc_co_u32_e64 %0, %3, %0, %0, %3\n\tv_addc_co_u32_e64 %0, %4, %0, %0, %4"
        : "=&v"(bits), "+s"(mask[3]), "+s"(mask[2]), "+s"(mask[1]), "+s"(mask[0]));
    return bits;
  }
};

// The draws of a step, a tile after the other. `kept`, of a tile: whether the i-th key of the group is kept in the row
// that was drawn, bit i.
struct Drawing {
  static constexpr int kParts = 11;  // of a tile: 9 products, then what they keep

  unsigned long long row, x, y;  // the rows' product; the last two of a round, of its words 0 and 2
  unsigned c1, c3;               // the words that a round passes on
  unsigned long long last;       // x of the round before
  FourKept words;

  // In instructions, of which a product takes as long as four.
  static constexpr int cost(int part) { return part < 3 ? 4 : part < 9 ? 5 : part < 10 ? 8 : 4; }

  template <typename Keys>
  METHOD void begin(const Keys &keys, int first_row) {
    row = wide_product(keys.times_a, (first_row + keys.row) ^ keys.first);
    pin(row);
  }
  template <typename Keys>
  METHOD void draw(unsigned &kept, const Keys &keys, int n, int part) {
    int round = (part - 3) / 2;  // of the last three
    if (part == 0) {
      y = wide_product(keys.times_b, high_of(row) ^ keys.second[n]);
      pin(y);
    } else if (part == 1) {
      c1 = (unsigned)y;
      x = wide_product(keys.times_a, high_of(y) ^ keys.third_a[n]);
      pin(x);
    } else if (part == 2) {
      y = wide_product(keys.times_b, (unsigned)row ^ keys.third_b[n]);
      pin(y);
    } else if (part == 9) {
      unsigned c0 = high_of(y) ^ c1 ^ keys.a[3], c2 = high_of(x) ^ c3 ^ keys.b[2];
      words.compare(c0, (unsigned)y, c2, (unsigned)x, keys.threshold);
    } else if (part == 10) {
      kept = words.bits();
    } else if (part % 2) {
      unsigned c0 = high_of(y) ^ c1 ^ keys.a[round];
      c1 = (unsigned)y;
      last = x;
      x = wide_product(keys.times_a, c0);
      pin(x);
    } else {
      unsigned c2 = high_of(last) ^ (round ? c3 ^ keys.b[round - 1] : keys.fourth[n]);
      c3 = (unsigned)last;
      y = wide_product(keys.times_b, c2);
      pin(y);
    }
  }
};

// `x` where bits are set, else `y`.
DEVICE float either(unsigned bits, float x, float y) {
  unsigned of_x = __builtin_bit_cast(unsigned, x), of_y = __builtin_bit_cast(unsigned, y);
  return __builtin_bit_cast(float, (bits & of_x) | (~bits & of_y));
}
// All bits where row r and the lane's key, the `key`-th of its group, are kept, else none.
DEVICE unsigned all_kept(unsigned kept, int r, unsigned key) {
  unsigned drawn = r == 0 ? of_four<0>(kept) : r == 1 ? of_four<1>(kept) : r == 2 ? of_four<2>(kept) : of_four<3>(kept);
  return __builtin_amdgcn_sbfe(drawn, key, 1);
}
