// Kernels for the emulator's tests. No headers: ziglang's clang brings none for HIP.
#define GLOBAL extern "C" __attribute__((global))
#define DEVICE __attribute__((device)) static inline
#define SHARED __attribute__((shared))
typedef _Float16 half;
typedef half half4 __attribute__((ext_vector_type(4)));
typedef float float4v __attribute__((ext_vector_type(4)));
typedef float float16v __attribute__((ext_vector_type(16)));
typedef unsigned u32;

DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int group() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int threads() { return __builtin_amdgcn_workgroup_size_x(); }
DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

GLOBAL void vector_add(const float *a, const float *b, float *c, int n) {
    int i = group() * threads() + thread();
    if (i < n) c[i] = a[i] + b[i];
}

// One 64x64 tile per workgroup of 256, through LDS with a padded row.
GLOBAL void transpose(const float *in, float *out, int rows, int columns) {
    SHARED float tile[64][65];
    int x0 = group() * 64, y0 = __builtin_amdgcn_workgroup_id_y() * 64;
    int x = thread() % 64, y = thread() / 64;
    for (int n = y; n < 64; n += 4)
        if (y0 + n < rows && x0 + x < columns) tile[n][x] = in[(y0 + n) * columns + x0 + x];
    barrier();
    for (int n = y; n < 64; n += 4)
        if (x0 + n < columns && y0 + x < rows) out[(x0 + n) * rows + y0 + x] = tile[x][n];
}

// The same with a conflict: a row of 64 dwords is twice round the 32 banks.
GLOBAL void conflicts(float *out) {
    SHARED float tile[64 * 64];
    tile[thread() * 64] = (float)thread();
    barrier();
    out[thread()] = tile[thread() * 64];
}

// Sum of a row: in the wave by DPP and a swizzle, between waves through LDS.
GLOBAL void reduce(const float *in, float *out, int n) {
    SHARED float partial[16];
    float sum = 0;
    for (int i = thread(); i < n; i += threads()) sum += in[group() * n + i];
    #define STEP(control) sum += __builtin_bit_cast(float, __builtin_amdgcn_update_dpp( \
        0, __builtin_bit_cast(int, sum), control, 0xf, 0xf, true));
    STEP(0x121) STEP(0x122) STEP(0x124) STEP(0x128)
    sum += __builtin_bit_cast(float, __builtin_amdgcn_ds_swizzle(__builtin_bit_cast(int, sum), 0x401f));
    sum += __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(
        (thread() ^ 32) * 4, __builtin_bit_cast(int, sum)));
    if (thread() % 64 == 0) partial[thread() / 64] = sum;
    barrier();
    if (thread() == 0) {
        float total = 0;
        for (int w = 0; w < threads() / 64; w++) total += partial[w];
        out[group()] = total;
    }
}

// C = A B^T for 32-row tiles, one wave each; k a multiple of 8.
GLOBAL void gemm(const half *a, const half *b, float *c, int n, int k) {
    int lane = thread() % 64, row = group() * 32, column = __builtin_amdgcn_workgroup_id_y() * 32;
    float16v sum = 0;
    for (int start = 0; start < k; start += 8) {
        int at = start + 4 * (lane / 32);
        half4 left = *(const half4 *)&a[(row + lane % 32) * k + at];
        half4 right = *(const half4 *)&b[(column + lane % 32) * k + at];
        sum = __builtin_amdgcn_mfma_f32_32x32x8f16(left, right, sum, 0, 0, 0);
    }
    for (int r = 0; r < 16; r++)
        c[(row + 8 * (r / 4) + 4 * (lane / 32) + r % 4) * n + column + lane % 32] = sum[r];
}

// Flash attention, D = 64: a workgroup of 4 waves has 64 queries, a wave 16 of them; keys come
// through LDS in tiles of 16, by 16x16x16 MFMA. S^T = K Q^T, so that a lane keeps one query.
GLOBAL void attention(const half *q, const half *k, const half *v, float *o, int length, float scale) {
    SHARED half keys[16][68], values[64][20];
    int lane = thread() % 64, wave = thread() / 64, column = lane % 16, quad = lane / 16;
    int query = group() * 64 + wave * 16 + column;
    half4 held[4];
    for (int d = 0; d < 4; d++)
        held[d] = query < length ? *(const half4 *)&q[query * 64 + d * 16 + quad * 4] : (half4)0;
    float4v out[4] = {0, 0, 0, 0};
    float top = -1e30f, total = 0;
    for (int start = 0; start < length; start += 16) {
        barrier();
        int row = thread() / 16, part = thread() % 16 * 4;
        bool inside = start + row < length;
        half4 key = inside ? *(const half4 *)&k[(start + row) * 64 + part] : (half4)0;
        half4 value = inside ? *(const half4 *)&v[(start + row) * 64 + part] : (half4)0;
        *(half4 *)&keys[row][part] = key;
        for (int n = 0; n < 4; n++) values[part + n][row] = value[n];
        barrier();
        float4v score = 0;
        for (int d = 0; d < 4; d++)
            score = __builtin_amdgcn_mfma_f32_16x16x16f16(
                *(half4 *)&keys[column][d * 16 + quad * 4], held[d], score, 0, 0, 0);
        float best = top;
        for (int n = 0; n < 4; n++) {
            score[n] = start + quad * 4 + n < length ? score[n] * scale : -1e30f;
            best = __builtin_fmaxf(best, score[n]);
        }
        for (int step = 16; step < 64; step *= 2)
            best = __builtin_fmaxf(best, __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(
                (lane ^ step) * 4, __builtin_bit_cast(int, best))));
        float shrink = __builtin_amdgcn_exp2f(top - best);
        top = best;
        total *= shrink;
        half4 p;
        for (int n = 0; n < 4; n++) {
            float e = __builtin_amdgcn_exp2f(score[n] - best);
            total += e;
            p[n] = (half)e;
        }
        for (int d = 0; d < 4; d++) {
            out[d] *= shrink;
            out[d] = __builtin_amdgcn_mfma_f32_16x16x16f16(
                *(half4 *)&values[d * 16 + column][quad * 4], p, out[d], 0, 0, 0);
        }
    }
    for (int step = 16; step < 64; step *= 2)
        total += __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(
            (lane ^ step) * 4, __builtin_bit_cast(int, total)));
    if (query < length)
        for (int d = 0; d < 4; d++)
            for (int n = 0; n < 4; n++) o[query * 64 + d * 16 + quad * 4 + n] = out[d][n] / total;
}

GLOBAL void divide(const float *a, const float *b, float *c, const double *x, const double *y, double *z) {
    int i = group() * threads() + thread();
    c[i] = a[i] / b[i];
    z[i] = x[i] / y[i];
}

GLOBAL void atomics(float *sum, u32 *count, u32 *highest) {
    __hip_atomic_fetch_add(sum, 1.0f, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_max(highest, (u32)(group() * threads() + thread()), __ATOMIC_RELAXED,
                           __HIP_MEMORY_SCOPE_AGENT);
}

// Reads far into a buffer of more than 4 GiB.
GLOBAL void far_copy(const float *in, float *out, unsigned long long step) {
    out[thread() * step] = in[thread() * step] + 1.0f;
}

// A loop whose count differs by lane, and scratch memory indexed at run time.
GLOBAL void scratch(int *out, int n) {
    volatile int held[32];
    for (int i = 0; i < 32; i++) held[i] = i * thread();
    int sum = 0;
    for (int i = 0; i < thread() % n; i++) sum += held[(i * 7 + thread()) % 32];
    out[thread()] = sum;
}

// --- faults -------------------------------------------------------------------------------------
GLOBAL void uninitialized_lds(float *out) {
    SHARED float tile[256];
    if (thread() < 200) tile[thread()] = (float)thread();
    barrier();
    out[thread()] = tile[255 - thread()];
}

GLOBAL void dropped_barrier(float *out) {
    SHARED float tile[256];
    tile[thread()] = (float)thread();
    out[thread()] = tile[255 - thread()];
}

GLOBAL void store_off_by_one(float *out) { out[thread() + 1] = 1.0f; }

GLOBAL void load_before(const float *in, float *out) { out[thread()] = in[thread() - 1]; }

GLOBAL void early_exit(float *out) {
    SHARED float tile[256];
    tile[thread()] = (float)thread();
    if (thread() >= 192) return;
    __builtin_amdgcn_s_barrier();
    out[thread()] = (float)thread();
}

GLOBAL void endless(volatile int *flag) { while (*flag == 0) {} }

GLOBAL void trapped(int *out) {
    if (thread() == 5) __builtin_trap();
    out[thread()] = 1;
}
