// Barriers of Hopper: mbarrier objects in shared memory (8 bytes each), on which threads and bulk copies
// arrive, and the block's 16 named barriers. A wait names the parity of the phase that it waits for:
// 0 for the first one that ends, and a wait for parity 1 of a fresh barrier returns at once.
#pragma once
#include "../sm80/smem.h"

// One thread does this, then fence_mbarrier_init, before a barrier() of the block.
DEVICE void mbarrier_init(Shared at, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(arrivals) : "memory");
}
DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// One arrival, by the thread that executes it.
DEVICE void mbarrier_arrive(Shared at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
// The same if `wanted`, without a branch: ptxas waits before a branch for what is being loaded from shared memory.
DEVICE void mbarrier_arrive_if(bool wanted, Shared at) {
  asm volatile(
      "{.reg .pred wanted;\n"
      "setp.ne.u32 wanted, %1, 0;\n"
      "@wanted mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(at), "r"((unsigned)wanted)
      : "memory");
}
// The same, and the phase ends only after copies of `bytes` more have been written.
DEVICE void mbarrier_arrive_expect_tx(Shared at, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity has ended; waits for it a while.
DEVICE bool mbarrier_try_wait(Shared at, unsigned parity) {
  unsigned done;
  asm volatile(
      "{.reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;}"
      : "=r"(done)
      : "r"(at), "r"(parity)
      : "memory");
  return done;
}
// The same, without waiting.
DEVICE bool mbarrier_test_wait(Shared at, unsigned parity) {
  unsigned done;
  asm volatile(
      "{.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;}"
      : "=r"(done)
      : "r"(at), "r"(parity)
      : "memory");
  return done;
}
DEVICE void mbarrier_wait(Shared at, unsigned parity) {
  while (!mbarrier_try_wait(at, parity)) {
  }
}

// Named barriers 1 ... 15 (0 is barrier()'s): `threads`, a multiple of 32, counts those that wait and
// those that only arrive.
DEVICE void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void bar_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// What this thread wrote to shared memory is seen by bulk copies and wgmma that come after a barrier.
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// True in one lane of a converged warp, always the same one.
DEVICE bool elect_one() {
  unsigned elected;
  asm volatile(
      "{.reg .pred elected;\n"
      "elect.sync _|elected, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, elected;}"
      : "=r"(elected));
  return elected;
}

// Registers of a thread from here on, a multiple of 8; all warps of a warpgroup execute it together.
template <int registers>
DEVICE void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
DEVICE void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
