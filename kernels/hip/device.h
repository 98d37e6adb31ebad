// What HIP's own headers would bring, for compilers that come without them.
#pragma once

#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#endif

#define METHOD __device__ inline __attribute__((always_inline))
#define DEVICE static METHOD
// Of a pointer into memory: where it was pinned, or read from a struct, the compiler does not know it.
#define GLOBAL __attribute__((address_space(1)))

// Threads of a workgroup, and how many wavefronts should fit on a SIMD: what decides the registers.
#define WORKGROUP(threads, waves_per_simd)                      \
  __attribute__((amdgpu_flat_work_group_size(threads, threads), \
                 amdgpu_waves_per_eu(waves_per_simd, waves_per_simd)))

constexpr int kLanes = 64;

template <typename T>
DEVICE T min(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
DEVICE T max(T a, T b) {
  return a > b ? a : b;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
#define INFINITY_F __builtin_inff()

DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int lane_index() { return thread_index() % kLanes; }
// The same in all lanes of a wavefront, and the compiler is told so.
DEVICE int wave_index() { return __builtin_amdgcn_readfirstlane(thread_index() / kLanes); }
DEVICE int workgroup_index() { return __builtin_amdgcn_workgroup_id_x(); }

// The least n with x < 2^n.
DEVICE int bits_of(unsigned x) { return x ? 32 - __builtin_clz(x) : 0; }

// x / by of scalars. A division takes 25 instructions, and most divisors are powers of two.
DEVICE unsigned quotient(unsigned x, unsigned by) {
  if ((by & (by - 1)) == 0) return x >> __builtin_ctz(by);
  return x / by;
}

// All of the workgroup's LDS traffic before this is visible to all of it after.
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Nothing moves from one side to the other: the schedule is the source's, slot by slot. (Left to the
// compiler, fragments are read one product before their use: 0.80 of the clocks on the matrix unit by
// llvm-mca for the forward's HEAD_DIM 128, 0.90 with fences.)
DEVICE void fence() { __builtin_amdgcn_sched_barrier(0); }

// v_exp_f32 and v_log_f32: base 2, one instruction each; the plain builtins take 9.
DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float log2(float x) { return __builtin_amdgcn_logf(x); }
DEVICE float reciprocal(float x) { return __builtin_amdgcn_rcpf(x); }  // to 1 ulp

// All 64 bits.
DEVICE unsigned long long wide_product(unsigned x, unsigned y) { return (unsigned long long)x * y; }
// x * y + z in 64 bits. Of a plain product, LLVM 19 makes an instruction that also reads a register without a value,
// which may be waiting for a load.
DEVICE long long multiply_add(unsigned x, long long y, long long z) {
  unsigned high = x * (unsigned)(y >> 32);
  return (long long)(wide_product(x, (unsigned)y) + (unsigned long long)z + ((unsigned long long)high << 32));
}
// Rounded before anything is added to it.
DEVICE float product(float x, float y) {
#pragma clang fp contract(off)
  return x * y;
}

DEVICE float float_of_half(unsigned short bits) {
  return (float)__builtin_bit_cast(_Float16, bits);
}

// Makes `x` opaque to the compiler, which can then neither compute it again where it is used, nor keep
// through a loop all that follows from it, nor move what makes it: in a vector or a scalar register.
template <typename T>
DEVICE void pin(T &x) {
  asm volatile("" : "+v"(x));
}
template <typename T>
DEVICE void pin_scalar(T &x) {
  asm volatile("" : "+s"(x));
}
template <typename... T>
DEVICE void pin_scalars(T &...x) {
  (pin_scalar(x), ...);
}

// `x` of lane `lane`.
DEVICE float from_lane(float x, int lane) {
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_bit_cast(int, x)));
}
DEVICE long long from_lane(long long x, int lane) {
  unsigned low = __builtin_amdgcn_ds_bpermute(lane * 4, (int)x);
  unsigned high = __builtin_amdgcn_ds_bpermute(lane * 4, (int)(x >> 32));
  return (long long)((unsigned long long)high << 32 | low);
}

// `x` of lane `lane`, which is the same for all.
DEVICE float from_any_lane(float x, int lane) {
  return __builtin_bit_cast(float, __builtin_amdgcn_readlane(__builtin_bit_cast(int, x), lane));
}

// `x` of the lane whose index differs in `bit`.
template <typename T>
DEVICE T from_lane_xor(T x, int bit) {
  return from_lane(x, lane_index() ^ bit);
}
