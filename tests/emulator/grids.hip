// Kernels whose workgroups meet in global memory, right and wrong, for the emulator's tests.
#define GLOBAL extern "C" __attribute__((global))
#define DEVICE __attribute__((device)) static inline
#define SHARED __attribute__((shared))
typedef unsigned u32;

DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int group() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int threads() { return __builtin_amdgcn_workgroup_size_x(); }
DEVICE void add(float *to, float x) {  // without a return value
    asm("" : "+v"(to));  // or lanes that add to one place would be summed up first
    __builtin_amdgcn_global_atomic_fadd_f32((__attribute__((address_space(1))) float *)to, x);
}

// Each workgroup stores what it has, the last to arrive sums it all up in order.
template <bool release, bool acquire>
DEVICE void last_sums(float *part, u32 *count, float *out, int groups) {
    SHARED u32 before;
    part[group() * threads() + thread()] = (float)(group() + thread());
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    if (thread() == 0) {
        if (release) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
        before = __hip_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    }
    __builtin_amdgcn_s_barrier();
    if (before != (u32)groups - 1) return;
    if (acquire) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    float sum = 0;
    for (int g = 0; g < groups; g++) sum += part[g * threads() + thread()];
    out[thread()] = sum;
    if (thread() == 0) *count = 0;
}
GLOBAL void last_right(float *part, u32 *count, float *out, int groups) {
    last_sums<true, true>(part, count, out, groups);
}
GLOBAL void last_without_release(float *part, u32 *count, float *out, int groups) {
    last_sums<false, true>(part, count, out, groups);
}
GLOBAL void last_without_acquire(float *part, u32 *count, float *out, int groups) {
    last_sums<true, false>(part, count, out, groups);
}

// The same with sums by atomics, which the last one takes. Of a half: see the test.
GLOBAL void last_takes(float *sum, u32 *count, float *out, int groups) {
    SHARED u32 before;
    for (int n = 0; n < 4; n++) add(&sum[64 * n + thread() % 64], (float)(1 + group()));
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    if (thread() == 0) {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
        before = __hip_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    }
    __builtin_amdgcn_s_barrier();
    if (before != (u32)groups - 1) return;
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    out[thread()] = sum[thread()];
    sum[thread()] = 0;
}

GLOBAL void sums(const float *x, float *sum, int n) {
    for (int i = 0; i < n; i++) add(&sum[i], x[(group() * threads() + thread()) * n + i]);
}

GLOBAL void read_neighbor(const float *in, float *x, int groups) {
    float other = x[((group() + 1) % groups) * threads() + thread()];
    x[group() * threads() + thread()] = in[thread()] + other * 0;
}
GLOBAL void overlapping_tiles(float *x) { x[group() * (threads() - 1) + thread()] = 1.0f; }
GLOBAL void store_and_add(float *x) {
    if (group() == 0) x[thread()] = 0;
    else add(&x[thread()], 1.0f);
}
// Neighbors in one dword belong to different workgroups.
GLOBAL void halves(short *x, int groups) { x[thread() * groups + group()] = (short)group(); }
GLOBAL void bytes_race(char *x) { x[thread() + group()] = (char)group(); }
GLOBAL void bytes_after_dwords(u32 *x, int groups) {
    int next = ((group() + 1) % groups) * threads() + thread();
    x[group() * threads() + thread()] = 1;
    ((char *)x)[4 * next + 1] = 2;
}
// Across a page of tags.
GLOBAL void quads(float *x, int step) {
    typedef float Quad __attribute__((ext_vector_type(4), aligned(4)));
    *(Quad *)&x[(group() * threads() + thread()) * step] = Quad{1, 2, 3, 4};
}
