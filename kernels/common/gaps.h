// What the rows hold that belong to no sequence: those behind the last one of a packed batch, and
// those beyond a sequence's length. Output and gradients are 0 there, the LSE is -inf. Which rows
// these are is known on the device alone, and no other kernel writes them.
//
// `seqlen_q` is the number of rows in memory of each of p's batch entries, or of all where they are
// packed; `cu_seqlens_q` and `seqused_q` say which of them are in use. `out` has `heads_q` heads of
// `head_dim_v` elements, `dv`, where it is given, `heads_k` of `head_dim`; both have 2 bytes an
// element and whole units of 16 bytes. Where the keys are split, `combine` does this instead. Needs a
// vendor's device.h and Quad.
#pragma once
#include "../sequence.h"

constexpr int kThreads = 256;
constexpr int kRows = 16;  // of a workgroup

DEVICE void clear(unsigned short *to, long long head_stride, int heads, int columns, int thread) {
  int units = columns / 8;
  for (int i = thread; i < heads * units; i += kThreads / kRows)
    *(Quad *)(to + i / units * head_stride + i % units * 8) = Quad{0, 0, 0, 0};
}

// Sixteen threads take a row: one row a workgroup spills eight scalar registers on gfx942.
DEVICE void fill_gaps(const Params &p) {
  constexpr int kOfRow = kThreads / kRows;
  long long place = (long long)workgroup_index() * kRows + thread_index() / kOfRow;
  int thread = thread_index() % kOfRow;
  if (place >= (long long)p.seqlen_q * (p.cu_seqlens_q ? 1 : p.batch)) return;
  int batch = (int)(place / p.seqlen_q), row = (int)(place % p.seqlen_q);
  if (is_used(p, batch, row)) return;
  clear((unsigned short *)p.out + batch * p.out_batch + row * p.out_row, p.out_head, p.heads_q,
        p.head_dim_v, thread);
  if (p.dv)
    clear((unsigned short *)p.dv + batch * p.dv_batch + row * p.dv_row, p.dv_head, p.heads_k,
          p.head_dim, thread);
  if (p.lse)
    for (int head = thread; head < p.heads_q; head += kOfRow)
      ((float *)p.lse)[batch * p.lse_batch + head * p.lse_head + row] = -INFINITY_F;
}
