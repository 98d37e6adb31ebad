// Combine on NVIDIA GPUs: ../common/combine.h. CHUNKED: of chunks (row.h), one behind the other.
#include "ahead.h"
#include "format.h"
#include "../common/combine.h"
#if defined(CHUNKED)
#include "row.h"

// A thread merges four elements of a row.
DEVICE void combine_chunks(const Params &p) {
  int columns = bits_of_fours(p.head_dim_v);
  Place place{};
  place.column = (thread_index() & ((1 << columns) - 1)) * kWide;
  place.packed_row = ((PackedRow)workgroup_index() << (kThreadBits - columns)) + (thread_index() >> columns);
  Stand stand(p, place);
  if (stand.batch >= (p.cu_seqlens_q ? 1 : p.batch) || place.column >= p.head_dim_v) return;
  float base = kLowest, total = 0.0f;
  Elements x{};
  if (is_used(p, (int)stand.batch, (int)stand.row)) {
    long long at = (long long)place.packed_row * p.num_splits;
#pragma unroll 4
    for (long long i = at + p.num_splits - 1; i >= at; --i) {
      float2 state = ((const float2 *)p.partial_lse)[i];
      Elements y = *(const Elements *)((const float *)p.partial_out + i * p.head_dim_v + place.column);
      Join join(base, state.x);
      base = join.base;
      total = join(total, state.y);
      for (int j = 0; j < kWide; ++j) x.x[j] = join(x.x[j], y.x[j]);
    }
  }
  Finished end = finish(p, base, total, stand.head, 0);
  for (int j = 0; j < kWide; ++j) x.x[j] = end.saw_key ? x.x[j] * end.inverse : 0.0f;
  long long to = stand.batch * p.out_batch + stand.row * p.out_row + stand.head * p.out_head + place.column;
  *(Stored *)((unsigned short *)p.out + to) =
      Stored{Format<DTYPE>::nearest(x.x[0], x.x[1]), Format<DTYPE>::nearest(x.x[2], x.x[3])};
  if (place.column == 0 && p.lse)
    ((float *)p.lse)[stand.batch * p.lse_batch + stand.head * p.lse_head + stand.row] = end.lse;
}
#endif

extern "C" __global__ WORKGROUP(kThreads, 4) void combine(KERNEL_PARAMS p) {
  griddepcontrol_wait();
#if defined(CHUNKED)
  combine_chunks(p);
#else
  __shared__ Meeting meeting;
  combine_lines(p, meeting);
#endif
}
