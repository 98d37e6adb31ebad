// The copy engine of Hopper: boxes of tensors that a map in the kernel's parameters describes (TMA), and
// plain runs of float32 that are added to memory or stored. One thread asks; all addresses in shared memory are
// multiples of 128 bytes, of 1024 where the map swizzles by 128.
//
// A swizzle of 128 bytes lets unit u (of 16 bytes) of the row at byte 128 r lie at u ^ r % 8; of 64 bytes,
// in rows of 64, at u ^ r / 2 % 4; of 32 bytes, in rows of 32, at u ^ r / 4 % 2.
#pragma once
#include "../../params.h"
#include "mbarrier.h"

DEVICE void prefetch_tensormap(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// The box at (c0, c1, c2, c3), the contiguous dimension first. What lies beyond the tensor arrives as
// zeros and counts as bytes that `mbarrier` expects.
DEVICE void tma_load(Shared to, const TensorMap *map, Shared mbarrier, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(mbarrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The box at `from` to (c0, c1, c2, c3), but for what lies beyond the tensor. Writers fence_proxy_async() first.
DEVICE void tma_store(const TensorMap *map, Shared from, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// `bytes` (a multiple of 16) of float32 are added to memory, element by element, in no fixed order.
// Writers fence_proxy_async() first.
DEVICE void bulk_reduce_add(float *to, Shared from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(from), "r"(bytes)
               : "memory");
}

// `bytes` (a multiple of 16) are stored in memory. Writers fence_proxy_async() first.
DEVICE void bulk_store(float *to, Shared from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// Reductions and stores of this thread so far become one group ...
DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// ... of which all but the last `groups` have been read from shared memory, or are done.
template <int groups>
DEVICE void bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(groups) : "memory");
}
template <int groups>
DEVICE void bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(groups) : "memory");
}
