// Where a workgroup's results go: to the output, or to what `combine` reads of its part of the keys. A workgroup asks
// once, before it exchanges sums: behind each barrier, the compiler would read the parameters again.
#pragma once
#include "../sequence.h"

struct Results {
  bool split;             // the output is float32, and 16-bit otherwise
  GLOBAL char *out;       // of row 0 and head 0, as `lse`
  GLOBAL float *lse;
  long long out_row, out_head;  // strides in bytes
  long long lse_row, lse_head;  // in elements
  const GLOBAL float *sinks;     // of the part that has them
  int head_dim_v;

  METHOD Results(const Params &p, const Sequence &s, int part) : split(p.num_splits > 1), head_dim_v(p.head_dim_v) {
    GLOBAL char *partial_out = (GLOBAL char *)p.partial_out;
    GLOBAL float *partial_lse = (GLOBAL float *)p.partial_lse;
    const void *packed = p.cu_seqlens_q;
    int splits = p.num_splits, heads = p.heads_q, rows = p.seqlen_q, with_sinks = p.use_sinks;
    sinks = (const GLOBAL float *)p.sinks;
    // All of them are read at once: in branches, each would be waited for.
    pin_scalars(partial_out, partial_lse, packed, splits, heads, rows, with_sinks, sinks, head_dim_v);
    if (split) {
      long long size = 4 * head_dim_v, first = (s.row0 + (packed ? 0 : (long long)s.batch * rows)) * heads * splits + part;
      out = partial_out + first * size;
      lse = partial_lse + first;
      lse_head = splits;
      lse_row = lse_head * heads;
      out_head = lse_head * size;
      out_row = lse_row * size;
    } else {
      out = (GLOBAL char *)p.out + 2 * (s.row_batch * p.out_batch + s.row0 * p.out_row);
      lse = (GLOBAL float *)p.lse + s.row_batch * p.lse_batch + s.row0;
      lse_head = p.lse_head;
      lse_row = 1;
      out_head = 2 * p.out_head;
      out_row = 2 * p.out_row;
    }
    if (!with_sinks || part > 0) sinks = nullptr;
  }
  METHOD GLOBAL char *out_of(unsigned row, unsigned head) const {
    return out + multiply_add(row, out_row, multiply_add(head, out_head, 0));
  }
  METHOD void store_lse(unsigned row, unsigned head, float x) const {
    lse[multiply_add(row, lse_row, multiply_add(head, lse_head, 0))] = x;
  }
};
