// Programmatic dependent launch (Hopper and later): a kernel is launched while the one before it on its
// stream still runs, so that its blocks are in place when the last block of that one ends. Without it a
// launch would pass between the two grids. Four kernels are launched so (plans.starts_ahead): attn_decode;
// `combine`, after the kernel that leaves the splits; and in backward Hopper's attn_bwd after row_sums (the
// preprocessing) and dq_convert (the postprocessing) after attn_bwd. Before Hopper both functions are empty
// and the launch attribute is not set.
//
// What may overlap:
// - Such a kernel with the one before it, and nothing else. griddepcontrol_wait returns when that one has
//   ended and its writes are visible. Either that one has no such attribute: then it began when all before
//   it had ended. Or it has: then it waited for what was before it. So nothing older runs either, whatever
//   the stream did before. Kernels of other libraries that are launched so have to wait before they end, too.
// - attn_decode may follow any kernel, also the last one of the call before. It waits first of all, so memory
//   that the allocator gives to two calls in turn, as that of the splits, is used by one of them at a time.
//   An event recorded after a call covers its last kernel, which ends after those that it waits for. Within a
//   CUDA graph the edges are the same.
// - Another thread may queue a kernel on the same stream between two of them. Then the second waits for that
//   one.
//
// attn_decode, combine and dq_convert wait before they read or write memory. With it attn_decode over a short
// cache takes 0.3 to 0.5 us less of 7 to 13, and after `append`, which lets it start early, 1.0 us less of 10 (H200).
// attn_bwd waits where it reads what row_sums left: its copies of Q, K, V and dO, which nothing writes since before
// row_sums, come while the last blocks of row_sums run. Backward of one sequence of 128 tokens takes 0.87 of the
// time, of 512 0.93 to 0.98, of 16k in all 0.99 to 1 (H100). That one thread has waited holds for the whole grid, so
// what comes after an mbarrier of that thread need not wait again. A block that reads nothing of row_sums waits too
// before it ends.
//
// Forwards are not launched so: of consecutive ones some gain 5 %, but others lose 10 %, because early blocks are
// placed where the ones before leave room, not evenly over the SMs.
//
// A kernel without griddepcontrol_launch_dependents lets the next one start when it ends.
#pragma once
#include "device.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Takes effect when all blocks of the grid have executed it or ended. So the last of them has started, and
// the next kernel takes nothing of an SM that a block of this one still needs.
DEVICE void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
#else
DEVICE void griddepcontrol_wait() {}
DEVICE void griddepcontrol_launch_dependents() {}
#endif
