// Puts together what was computed for each part of the keys:
//   out = sum of 2^(lse_i - lse) out_i,  2^lse = sum of 2^lse_i  (in base e where it is stored).
//
// A workgroup makes one row of one head, the line row * heads_q + head. Its wavefronts take the
// parts in turn, lane l the elements l, l + kLanes ... of their outputs, and the wavefronts' sums
// meet in LDS, in an order that does not change. The output of a part that saw nothing (LSE -inf)
// is not read: it is as it was allocated. Needs a vendor's device.h and Format.
#pragma once
#include "../params.h"

#if !defined(DTYPE)
#error "the plan defines DTYPE"
#endif

constexpr int kThreads = 256;
constexpr int kWaves = kThreads / kLanes;
constexpr int kLargest = 256;                 // head_dim_v
constexpr int kColumns = kLargest / kLanes;   // of a lane
constexpr int kAtOnce = 4;  // parts whose outputs are loaded together

// A sum that is to be multiplied with e^top.
struct Sum {
  float top, total;
  float out[kColumns];
};

struct Meeting {
  float top[kWaves], total[kWaves];
  float out[kWaves][kLargest];
};

DEVICE float power(float x) { return exp2(x * kLog2E); }

// While nothing was seen `top` is -inf, and -inf - -inf would be NaN.
DEVICE float finite(float top) { return top == -INFINITY_F ? 0.0f : top; }

DEVICE void add_parts(Sum &sum, const Params &p, long long line, int first) {
  long long parts = line * p.num_splits;
  float lse[kAtOnce], out[kAtOnce][kColumns];
  for (int i = 0; i < kAtOnce; ++i) {
    int part = first + i * kWaves;
    lse[i] = -INFINITY_F;
    if (part < p.num_splits) lse[i] = ((const float *)p.partial_lse)[parts + part];
  }
  float top = sum.top;
  for (int i = 0; i < kAtOnce; ++i) {
    const float *from =
        (const float *)p.partial_out + (parts + first + i * kWaves) * p.head_dim_v;
    for (int c = 0; c < kColumns; ++c) {
      int column = c * kLanes + lane_index();
      out[i][c] = 0.0f;
      if (lse[i] != -INFINITY_F && column < p.head_dim_v) out[i][c] = from[column];
    }
    top = max(top, lse[i]);
  }
  float rescale = power(sum.top - finite(top));
  sum.total *= rescale;
  for (int c = 0; c < kColumns; ++c) sum.out[c] *= rescale;
  for (int i = 0; i < kAtOnce; ++i) {
    float weight = power(lse[i] - finite(top));
    sum.total += weight;
    for (int c = 0; c < kColumns; ++c) sum.out[c] += weight * out[i][c];
  }
  sum.top = top;
}

// The workgroup's line. seqlen_q counts the rows of a sequence as they are stored; in a packed
// batch all of them, with batch strides of 0.
DEVICE void combine_line(const Params &p, Meeting &meeting) {
  long long line = workgroup_index();
  Sum sum{-INFINITY_F, 0.0f, {}};
  for (int first = wave_index(); first < p.num_splits; first += kWaves * kAtOnce)
    add_parts(sum, p, line, first);

  int wave = wave_index();
  for (int c = 0; c < kColumns; ++c) meeting.out[wave][c * kLanes + lane_index()] = sum.out[c];
  if (lane_index() == 0) {
    meeting.top[wave] = sum.top;
    meeting.total[wave] = sum.total;
  }
  barrier();

  float top = -INFINITY_F, total = 0.0f, out = 0.0f;
  for (int w = 0; w < kWaves; ++w) top = max(top, meeting.top[w]);
  for (int w = 0; w < kWaves; ++w) {
    float weight = power(meeting.top[w] - finite(top));
    total += weight * meeting.total[w];
    out += weight * meeting.out[w][thread_index()];
  }
  bool saw = total != 0.0f;  // also where it is NaN
  int head = line % p.heads_q;
  long long place = line / p.heads_q;
  long long batch = place / p.seqlen_q, row = place % p.seqlen_q;
  if (thread_index() < p.head_dim_v) {
    unsigned short *to = (unsigned short *)p.out + batch * p.out_batch + row * p.out_row +
                         head * p.out_head + thread_index();
    *to = (unsigned short)Format<DTYPE>::nearest(saw ? out / total : 0.0f, 0.0f);
  }
  if (thread_index() == 0 && p.lse)
    ((float *)p.lse)[batch * p.lse_batch + head * p.lse_head + row] =
        saw ? top + log2(total) * kLn2 : -INFINITY_F;
}
