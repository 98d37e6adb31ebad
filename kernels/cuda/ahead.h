// A kernel that starts while the one in front of it on its stream still runs (programmatic dependent
// launch, Hopper and later; before, both functions are nothing, and so is the launch attribute:
// plans.starts_ahead): `combine`, behind what leaves the parts, and in backward Hopper's attn_bwd, behind
// row_sums, and dq_convert, behind attn_bwd. Its blocks are in place when the last one of that is done, where
// else the end of one grid and the launch of the next would pass.
//
// What may overlap:
// - Such a kernel with the one in front of it, and nothing else. wait_for_kernel_before returns when that
//   one has ended and its writes are visible. It began when all before it had ended, where it has no such
//   attribute itself; where it has, as attn_bwd in front of dq_convert, it waited for what was before it. So
//   nothing older runs either, whatever the stream did before.
// - Nothing with the last one of a call: what comes behind it has no such attribute, and starts when it has
//   ended. It ends after the kernels that it waits for. So memory that the allocator gives to the next
//   call, as that of the parts, is nobody's any more when the next call's kernels start, and an event
//   recorded behind it covers them all. Within a CUDA graph the edges are the same.
// - Another thread may queue a kernel on the same stream between two of them. Then the second waits for that
//   one, which began when the first was done, if it is not launched ahead itself; if it is, it waits before
//   it ends, as everything that is launched so has to.
//
// Every thread waits before it reads or writes memory. A kernel without allow_kernel_behind allows it at
// its end.
#pragma once
#include "device.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
DEVICE void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Counts once all blocks of the grid have come here or ended: so when the last of them has started, and
// what the kernel behind takes of an SM, no block of this one misses.
DEVICE void allow_kernel_behind() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_kernel_before() {}
DEVICE void allow_kernel_behind() {}
#endif
