// 16-bit and packed vector operations, dot products and conversions to fp8.
//
// f16 arithmetic is done in float (add, mul: two roundings are harmless at 24 against 11 bits) or in
// double (fma). GFX9's older 16-bit operations clear the upper half of the destination; those that
// came with op_sel (mad, fma, min3, max3, med3, div_fixup, add_i16, sub_i16) keep it.
#include "floats.h"

#define FN(name) static void name(u32 *d, const u32 *a, const u32 *b, const u32 *c)
#define UNUSED (void)a, (void)b, (void)c
#define HALF1(name, expr)                                                                         \
    FN(name) { UNUSED; EACH_LANE { float x = from_f16(a[l]); d[l] = to_f16(expr); } }
#define SINGLE2(name, expr)                                                                       \
    FN(name) { UNUSED; EACH_LANE { float x = from_f16(a[l]), y = from_f16(b[l]);                  \
        d[l] = to_f16(expr); } }
#define HALF2(name, expr)                                                                         \
    SINGLE2(name, expr)                                                                           \
    FN(pk_##name) { UNUSED; EACH_LANE {                                                           \
        float x = from_f16(a[l]), y = from_f16(b[l]); u32 low = to_f16(expr);                     \
        x = from_f16(a[l] >> 16); y = from_f16(b[l] >> 16); d[l] = low | to_f16(expr) << 16; } }
#define PLAIN2(name, expr)                                                                        \
    FN(name) { UNUSED; EACH_LANE { u32 x = a[l] & 0xffff, y = b[l] & 0xffff;                      \
        d[l] = (u32)(expr) & 0xffff; } }
#define BITS2(name, expr)                                                                         \
    PLAIN2(name, expr)                                                                            \
    FN(pk_##name) { UNUSED; EACH_LANE {                                                           \
        u32 x = a[l] & 0xffff, y = b[l] & 0xffff, low = (u32)(expr) & 0xffff;                     \
        x = a[l] >> 16; y = b[l] >> 16; d[l] = low | (u32)(expr) << 16; } }
#define BITS3(name, expr)                                                                         \
    FN(name) { UNUSED; EACH_LANE { u32 x = a[l] & 0xffff, y = b[l] & 0xffff, z = c[l] & 0xffff;   \
        d[l] = (u32)(expr) & 0xffff; } }
#define S16(x) ((i32)(i16)(x))

HALF2(add_f16, x + y)
SINGLE2(sub_f16, x - y)
SINGLE2(subrev_f16, y - x)
HALF2(mul_f16, x * y)
static inline u32 nan16(u32 x) { return (x & 0x7fff) > 0x7c00; }
static inline i32 order16(u32 x) { return x & 0x8000 ? -(i32)(x & 0x7fff) - 1 : (i32)x; }
// IEEE mode, as for f32.
static inline u32 pick16(u32 x, u32 y, u32 chosen) {
    u32 r = nan16(x) ? y : nan16(y) ? x : chosen;
    r = nan16(y) && !(y & 0x200) ? y | 0x200 : r;
    return nan16(x) && !(x & 0x200) ? x | 0x200 : r;
}
static inline u32 max16(u32 x, u32 y) { return pick16(x, y, order16(x) > order16(y) ? x : y); }
static inline u32 min16(u32 x, u32 y) { return pick16(x, y, order16(x) < order16(y) ? x : y); }
static inline u32 med16(u32 x, u32 y, u32 z) {
    if (nan16(x) || nan16(y) || nan16(z)) return min16(min16(x, y), z);
    u32 low = min16(x, y), high = max16(x, y);
    return max16(low, min16(high, z));
}
BITS2(max_f16, max16(x, y))
BITS2(min_f16, min16(x, y))
BITS3(max3_f16, max16(max16(x, y), z))
BITS3(min3_f16, min16(min16(x, y), z))
BITS3(med3_f16, med16(x, y, z))
static inline u32 fma16(u32 x, u32 y, u32 z) {
    return to_f16_double((double)from_f16(x) * from_f16(y) + from_f16(z));
}
FN(fma_f16) { UNUSED; EACH_LANE d[l] = fma16(a[l], b[l], c[l]); }
FN(pk_fma_f16) { UNUSED; EACH_LANE d[l] = fma16(a[l], b[l], c[l]) |
                                          fma16(a[l] >> 16, b[l] >> 16, c[l] >> 16) << 16; }
HALF1(rcp_f16, 1.0f / x)
HALF1(sqrt_f16, sqrtf(x))
HALF1(rsq_f16, (float)exact_rsq(x))
HALF1(exp_f16, (float)exact_exp(x))
HALF1(log_f16, (float)exact_log(x))
HALF1(floor_f16, floorf(x))
HALF1(ceil_f16, ceilf(x))
HALF1(trunc_f16, truncf(x))
HALF1(rndne_f16, __builtin_rintf(x))
FN(ldexp_f16) { UNUSED; EACH_LANE { i32 e = S16(b[l]);
    e = e < -64 ? -64 : e > 64 ? 64 : e;
    d[l] = to_f16_double(ldexp((double)from_f16(a[l]), e)); } }
FN(cvt_f16_u16) { UNUSED; EACH_LANE d[l] = to_f16((float)(a[l] & 0xffff)); }
FN(cvt_f16_i16) { UNUSED; EACH_LANE d[l] = to_f16((float)S16(a[l])); }
FN(cvt_u16_f16) { UNUSED; EACH_LANE { float x = from_f16(a[l]);
    d[l] = !(x > 0) ? 0 : x >= 65535.0f ? 0xffff : (u32)x; } }
FN(cvt_i16_f16) { UNUSED; EACH_LANE { float x = from_f16(a[l]);
    d[l] = (u32)(x != x ? 0 : x >= 32767.0f ? 32767 : x <= -32768.0f ? -32768 : (i32)x) & 0xffff; } }
BITS2(add_u16, x + y)
BITS2(sub_u16, x - y)
PLAIN2(subrev_u16, y - x)
BITS2(mul_lo_u16, x * y)
BITS2(lshlrev_b16, y << (x & 15))
BITS2(lshrrev_b16, y >> (x & 15))
BITS2(ashrrev_i16, S16(y) >> (x & 15))
BITS2(max_u16, x > y ? x : y)
BITS2(max_i16, S16(x) > S16(y) ? x : y)
BITS2(min_u16, x < y ? x : y)
BITS2(min_i16, S16(x) < S16(y) ? x : y)
BITS3(mad_u16, x * y + z)
#define MIN2(t, x, y) (t(x) < t(y) ? (x) : (y))
#define MAX2(t, x, y) (t(x) > t(y) ? (x) : (y))
BITS3(min3_u16, MIN2(, MIN2(, x, y), z))
BITS3(max3_u16, MAX2(, MAX2(, x, y), z))
BITS3(min3_i16, MIN2(S16, MIN2(S16, x, y), z))
BITS3(max3_i16, MAX2(S16, MAX2(S16, x, y), z))
BITS3(med3_u16, MAX2(, MIN2(, x, y), MIN2(, MAX2(, x, y), z)))
BITS3(med3_i16, MAX2(S16, MIN2(S16, x, y), MIN2(S16, MAX2(S16, x, y), z)))
FN(pk_mad_u16) { UNUSED; EACH_LANE { u32 low = (a[l] & 0xffff) * (b[l] & 0xffff) + (c[l] & 0xffff);
    u32 high = (a[l] >> 16) * (b[l] >> 16) + (c[l] >> 16); d[l] = (low & 0xffff) | high << 16; } }
FN(pack) { UNUSED; EACH_LANE d[l] = (a[l] & 0xffff) | b[l] << 16; }

// Dot products add the products in the order of the elements, rounding after each (the chip's order
// and rounding inside v_dot2_f32_f16 are not published).
FN(dot2_f32_f16) { UNUSED; EACH_LANE {
    float r = __builtin_fmaf(from_f16(a[l]), from_f16(b[l]), as_float(c[l]));
    d[l] = as_bits(__builtin_fmaf(from_f16(a[l] >> 16), from_f16(b[l] >> 16), r)); } }
FN(dot2_i32_i16) { UNUSED; EACH_LANE
    d[l] = c[l] + (u32)(S16(a[l]) * S16(b[l])) + (u32)(S16(a[l] >> 16) * S16(b[l] >> 16)); }
FN(dot2_u32_u16) { UNUSED; EACH_LANE
    d[l] = c[l] + (a[l] & 0xffff) * (b[l] & 0xffff) + (a[l] >> 16) * (b[l] >> 16); }
FN(dot4_i32_i8) { UNUSED; EACH_LANE {
    u32 r = c[l];
    for (int n = 0; n < 32; n += 8) r += (u32)((i32)(i8)(a[l] >> n) * (i32)(i8)(b[l] >> n));
    d[l] = r; } }
FN(dot4_u32_u8) { UNUSED; EACH_LANE {
    u32 r = c[l];
    for (int n = 0; n < 32; n += 8) r += (a[l] >> n & 255) * (b[l] >> n & 255);
    d[l] = r; } }

// fma_mix: each source is an f32, or the half of a register that op_sel names where op_sel_hi is
// set; neg_hi stands for the absolute value.
static int run_mix(Wave *w, const Inst *i) {
    const Op *op = op_table[i->op];
    u32 buffers[3][2 * LANES], value[2 * LANES];
    const u32 *p[3];
    u64 defined = ~0ull, d;
    for (int n = 0; n < 3; n++) {
        p[n] = fetch(w, i, n, MIX, buffers[n], &d);
        if (!p[n]) return STOP;
        defined &= d;
    }
    EACH_LANE {
        float x[3];
        for (int n = 0; n < 3; n++) {
            u32 v = p[n][l];
            float f = !(i->opsel_hi >> n & 1) ? as_float(v)
                      : from_f16(i->opsel >> n & 1 ? v >> 16 : v);
            if (i->neg_hi >> n & 1) f = fabsf(f);
            x[n] = i->neg >> n & 1 ? -f : f;
        }
        float r = __builtin_fmaf(x[0], x[1], x[2]);
        value[l] = op->type == F32 ? as_bits(r) : to_f16(r);
    }
    Inst writes = *i;  // op_sel has served the sources: only the destination's half is left
    writes.simple = 0;
    writes.opsel = strcmp(op->name, "v_fma_mixhi_f16") == 0 ? 8 : 0;
    return store_lanes(w, &writes, op->type, value, defined);
}

// Two floats to fp8 in the half of the destination that op_sel[3] names.
static int to_fp8(Wave *w, const Inst *i, int mantissa, int bias) {
    u32 buffers[2][2 * LANES], value[LANES];
    u64 d0, d1;
    const u32 *a = fetch(w, i, 0, F32, buffers[0], &d0);
    const u32 *b = a ? fetch(w, i, 1, F32, buffers[1], &d1) : 0;
    if (!b) return STOP;
    int saturate = w->mode >> 23 & 1;  // MODE.FP16_OVFL
    EACH_LANE value[l] = to_fnuz(as_float(a[l]), mantissa, bias, saturate) |
                         to_fnuz(as_float(b[l]), mantissa, bias, saturate) << 8;
    return store_lanes(w, i, HALF_B16, value, d0 & d1);
}
static int pk_fp8(Wave *w, const Inst *i) { return to_fp8(w, i, 3, 8); }
static int pk_bf8(Wave *w, const Inst *i) { return to_fp8(w, i, 2, 16); }

#define OP(g, n, f, t, ...) {"v_" #n, KIND_LANES, g, t, {__VA_ARGS__}, run_lanes, f}
#define H2(n) OP(VALU, n, n, F16, F16, F16)
#define H1(n) OP(VALU, n, n, F16, F16)
#define T1(n) {"v_" #n "_f16", KIND_LANES, TRANS, F16, {F16}, run_lanes, n##_f16, exact_##n}
#define B2(n) OP(VALU, n, n, B16, B16, B16)
#define P2(n) OP(VALU, pk_##n, pk_##n, PK16, PK16, PK16)
#define PF2(n) OP(VALU, pk_##n, pk_##n, PKF16, PKF16, PKF16)
#define SP(n, f, t) {"v_" #n, KIND_SPECIAL, VALU, t, {NONE, NONE, NONE}, f, 0}
const Op lanes16_ops[] = {
    H2(add_f16), H2(sub_f16), H2(subrev_f16), H2(mul_f16), H2(max_f16), H2(min_f16),
    PF2(add_f16), PF2(mul_f16), PF2(max_f16), PF2(min_f16),
    OP(VALU, pk_fma_f16, pk_fma_f16, PKF16, PKF16, PKF16, PKF16),
    OP(VALU, pk_fmac_f16, pk_fma_f16, PKF16, PKF16, PKF16, PKF16),
    OP(VALU, fma_f16, fma_f16, HALF_F16, F16, F16, F16),
    OP(VALU, max3_f16, max3_f16, HALF_F16, F16, F16, F16),
    OP(VALU, min3_f16, min3_f16, HALF_F16, F16, F16, F16),
    OP(VALU, med3_f16, med3_f16, HALF_F16, F16, F16, F16),
    T1(rcp), T1(sqrt), T1(rsq), T1(exp), T1(log),
    H1(floor_f16), H1(ceil_f16), H1(trunc_f16), H1(rndne_f16),
    OP(VALU, ldexp_f16, ldexp_f16, F16, F16, B16),
    OP(VALU, cvt_f16_u16, cvt_f16_u16, F16, B16), OP(VALU, cvt_f16_i16, cvt_f16_i16, F16, B16),
    OP(VALU, cvt_u16_f16, cvt_u16_f16, B16, F16), OP(VALU, cvt_i16_f16, cvt_i16_f16, B16, F16),
    B2(add_u16), B2(sub_u16), B2(subrev_u16), B2(mul_lo_u16), B2(lshlrev_b16), B2(lshrrev_b16),
    B2(ashrrev_i16), B2(max_u16), B2(max_i16), B2(min_u16), B2(min_i16),
    OP(VALU, add_i16, add_u16, HALF_B16, B16, B16), OP(VALU, sub_i16, sub_u16, HALF_B16, B16, B16),
    OP(VALU, mad_u16, mad_u16, HALF_B16, B16, B16, B16),
    OP(VALU, mad_i16, mad_u16, HALF_B16, B16, B16, B16),
    OP(VALU, min3_u16, min3_u16, HALF_B16, B16, B16, B16),
    OP(VALU, max3_u16, max3_u16, HALF_B16, B16, B16, B16),
    OP(VALU, min3_i16, min3_i16, HALF_B16, B16, B16, B16),
    OP(VALU, max3_i16, max3_i16, HALF_B16, B16, B16, B16),
    OP(VALU, med3_u16, med3_u16, HALF_B16, B16, B16, B16),
    OP(VALU, med3_i16, med3_i16, HALF_B16, B16, B16, B16),
    P2(mul_lo_u16), P2(lshlrev_b16), P2(lshrrev_b16), P2(ashrrev_i16), P2(max_i16), P2(min_i16),
    P2(add_u16), P2(sub_u16), P2(max_u16), P2(min_u16),
    OP(VALU, pk_add_i16, pk_add_u16, PK16, PK16, PK16),
    OP(VALU, pk_sub_i16, pk_sub_u16, PK16, PK16, PK16),
    OP(VALU, pk_mad_u16, pk_mad_u16, PK16, PK16, PK16, PK16),
    OP(VALU, pk_mad_i16, pk_mad_u16, PK16, PK16, PK16, PK16),
    OP(VALU, pack_b32_f16, pack, B32, F16, F16),
    OP(VALU, dot2_f32_f16, dot2_f32_f16, F32, PKF16, PKF16, F32),
    OP(VALU, dot2c_f32_f16, dot2_f32_f16, F32, PKF16, PKF16, F32),
    OP(VALU, dot2_i32_i16, dot2_i32_i16, B32, PK16, PK16, B32),
    OP(VALU, dot2_u32_u16, dot2_u32_u16, B32, PK16, PK16, B32),
    OP(VALU, dot4_i32_i8, dot4_i32_i8, B32, B32, B32, B32),
    OP(VALU, dot4c_i32_i8, dot4_i32_i8, B32, B32, B32, B32),
    OP(VALU, dot4_u32_u8, dot4_u32_u8, B32, B32, B32, B32),
    SP(fma_mix_f32, run_mix, F32), SP(fma_mixlo_f16, run_mix, HALF_F16),
    SP(fma_mixhi_f16, run_mix, HALF_F16), SP(cvt_pk_fp8_f32, pk_fp8, NONE),
    SP(cvt_pk_bf8_f32, pk_bf8, NONE), {0},
};
