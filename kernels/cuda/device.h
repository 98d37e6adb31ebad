// What CUDA's own headers would bring: NVRTC finds none of them. One thread block is what the shared
// headers call a workgroup, a warp their wavefront.
#pragma once

#define METHOD __device__ __forceinline__
#define DEVICE static METHOD

// Threads of a block, and how many blocks should fit on an SM: what decides the registers.
#define WORKGROUP(threads, blocks_per_sm) __launch_bounds__(threads, blocks_per_sm)
// Parameters by value stay in constant memory, also where their address is taken.
#ifdef MOD_CAPTURED
#define KERNEL_PARAMS const __grid_constant__ ModifiedParams
#define MAPPED_PARAMS const __grid_constant__ ModifiedParams
#else
#define KERNEL_PARAMS const __grid_constant__ Params
#define MAPPED_PARAMS const __grid_constant__ MappedParams
#endif

// clang's names for what NVRTC knows under CUDA's.
#define __builtin_fabsf fabsf
#define __builtin_fmaf fmaf
#define __builtin_fmaxf fmaxf
#define __builtin_copysignf copysignf
#define __builtin_nanf(text) __builtin_bit_cast(float, 0x7fc00000)
#define INFINITY_F __builtin_bit_cast(float, 0x7f800000)

constexpr int kLanes = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

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

DEVICE int thread_index() { return threadIdx.x; }
DEVICE int lane_index() { return threadIdx.x % kLanes; }
// The same in all lanes of a warp, and the compiler is told so.
DEVICE int wave_index() { return __shfl_sync(kAllLanes, threadIdx.x / kLanes, 0); }
DEVICE int workgroup_index() { return blockIdx.x; }

// The least n with x < 2^n.
DEVICE int bits_of(unsigned x) { return 32 - __clz(x); }

DEVICE void barrier() { __syncthreads(); }

// ex2.approx and lg2.approx: base 2, one instruction each (exp2f adds a range check for denormals).
DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEVICE float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// To 1 ulp.
DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// All 64 bits, in one instruction: from C++ each product got an addition of 0 to its upper half.
DEVICE unsigned long long wide_product(unsigned x, unsigned y) {
  unsigned long long z;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(z) : "r"(x), "r"(y));
  return z;
}
// Rounded before anything is added to it.
DEVICE float product(float x, float y) { return __fmul_rn(x, y); }

DEVICE float float_of_half(unsigned short bits) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(bits));
  return y;
}

// Makes `x` opaque to the compiler, which can then neither compute it again where it is used, nor keep
// through a loop all that follows from it.
DEVICE void pin(int &x) { asm volatile("" : "+r"(x)); }
DEVICE void pin(unsigned &x) { asm volatile("" : "+r"(x)); }
DEVICE void pin(float &x) { asm volatile("" : "+f"(x)); }
DEVICE void pin(long long &x) { asm volatile("" : "+l"(x)); }

// `x` of the lane whose index differs in `bit`.
DEVICE float from_lane_xor(float x, int bit) { return __shfl_xor_sync(kAllLanes, x, bit); }
DEVICE long long from_lane_xor(long long x, int bit) { return __shfl_xor_sync(kAllLanes, x, bit); }
