// The 32-bit and 64-bit vector operations, one loop over 64 lanes each.
//
// v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin and v_cos give the correctly rounded value (sin and cos
// nearly so); the real chip is within 1 ulp, as lanes.c can make of them (vary). Their f32 forms treat denormal
// inputs and results as zero whatever MODE says: compilers scale around them because the hardware
// promises nothing there, and a kernel that relies on more should be found out.
// The NaN that an invalid operation makes is the host's: only its being NaN is meaningful.
#include "floats.h"

#define FN(name) static void name(u32 *d, const u32 *a, const u32 *b, const u32 *c)
#define UNUSED (void)a, (void)b, (void)c
#define INT1(name, expr) FN(name) { UNUSED; EACH_LANE { u32 x = a[l]; d[l] = (u32)(expr); } }
#define INT2(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { u32 x = a[l], y = b[l]; d[l] = (u32)(expr); } }
#define INT3(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { u32 x = a[l], y = b[l], z = c[l]; d[l] = (u32)(expr); } }
#define FLT1(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { float x = as_float(a[l]); d[l] = as_bits(expr); } }
#define FLT2(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { float x = as_float(a[l]), y = as_float(b[l]);                  \
        d[l] = as_bits(expr); } }
#define FLT3(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { float x = as_float(a[l]), y = as_float(b[l]),                  \
        z = as_float(c[l]); d[l] = as_bits(expr); } }
#define W64(p) ((p)[l] | (u64)(p)[l + LANES] << 32)
#define PUT64(v) do { u64 v_ = (v); d[l] = (u32)v_; d[l + LANES] = (u32)(v_ >> 32); } while (0)
#define DBL1(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { double x = as_double(W64(a)); PUT64(as_bits64(expr)); } }
#define DBL2(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { double x = as_double(W64(a)), y = as_double(W64(b));           \
        PUT64(as_bits64(expr)); } }
#define DBL3(name, expr)                                                                          \
    FN(name) { UNUSED; EACH_LANE { double x = as_double(W64(a)), y = as_double(W64(b)),           \
        z = as_double(W64(c)); PUT64(as_bits64(expr)); } }

INT1(mov_b32, x)
FN(mov_b64) { UNUSED; memcpy(d, a, 8 * LANES); }
FLT2(add_f32, x + y)
FLT2(sub_f32, x - y)
FLT2(subrev_f32, y - x)
FLT2(mul_f32, x * y)
FLT2(mul_legacy_f32, x == 0 || y == 0 ? 0.0f : x * y)
FLT3(fma_f32, __builtin_fmaf(x, y, z))
// IEEE mode: a signalling NaN comes out quiet, a quiet one loses to a number; -0 is below +0.
static inline u32 number_or(u32 x, u32 y, u32 chosen) {
    u32 nan_x = (x & 0x7fffffff) > 0x7f800000u, nan_y = (y & 0x7fffffff) > 0x7f800000u;
    u32 quiet = 0x400000u, r = chosen;
    r = nan_y ? x : r;
    r = nan_x ? y : r;
    r = nan_y && !(y & quiet) ? y | quiet : r;
    r = nan_x && !(x & quiet) ? x | quiet : r;
    return nan_x && nan_y && (x & quiet) && (y & quiet) ? y : r;
}
static inline i32 ordered(u32 x) { return (i32)x ^ (i32)((u32)((i32)x >> 31) >> 1); }
static inline u32 max_bits(u32 x, u32 y) { return number_or(x, y, ordered(x) > ordered(y) ? x : y); }
static inline u32 min_bits(u32 x, u32 y) { return number_or(x, y, ordered(x) < ordered(y) ? x : y); }
static inline u32 med_bits(u32 x, u32 y, u32 z) {
    u32 any = (x & 0x7fffffff) > 0x7f800000u || (y & 0x7fffffff) > 0x7f800000u ||
              (z & 0x7fffffff) > 0x7f800000u;
    i32 i = ordered(x), j = ordered(y), k = ordered(z);
    u32 low = i < j ? x : y, high = i < j ? y : x;
    u32 middle = k < ordered(low) ? low : k > ordered(high) ? high : z;
    return any ? min_bits(min_bits(x, y), z) : middle;
}
INT2(max_f32, max_bits(x, y))
INT2(min_f32, min_bits(x, y))
INT3(max3_f32, max_bits(max_bits(x, y), z))
INT3(min3_f32, min_bits(min_bits(x, y), z))
INT3(med3_f32, med_bits(x, y, z))

static inline float no_denormal(float f) {
    u32 x = as_bits(f);
    return as_float(x & 0x7f800000 ? x : x & 0x80000000);
}
FN(exp_f32) {
    UNUSED;
    EACH_LANE {
        float x = as_float(a[l]);
        double within = x < -200.0f ? -200.0 : x > 200.0f ? 200.0 : x == x ? (double)x : 0.0;
        float r = no_denormal((float)exp2_double(within));
        d[l] = x == x ? as_bits(r) : a[l] | 0x400000;
    }
}
FLT1(log_f32, (float)exact_log(no_denormal(x)))
FLT1(rcp_f32, no_denormal(1.0f / no_denormal(x)))
FLT1(rsq_f32, (float)exact_rsq(no_denormal(x)))
FLT1(sqrt_f32, __builtin_sqrtf(no_denormal(x)))
// Arguments are in revolutions; beyond 256 of them the hardware gives sin 0 and cos 1.
FLT1(sin_f32, fabsf(x) > 256.0f ? (isinf(x) ? NAN : 0.0f) : (float)exact_sin(x))
FLT1(cos_f32, fabsf(x) > 256.0f ? (isinf(x) ? NAN : 1.0f) : (float)exact_cos(x))
FLT1(trunc_f32, __builtin_truncf(x))
FLT1(ceil_f32, __builtin_ceilf(x))
FLT1(floor_f32, __builtin_floorf(x))
FLT1(rndne_f32, __builtin_rintf(x))
static inline float fract(float x) {
    float r = x - __builtin_floorf(x);
    return isinf(x) ? NAN : r >= 1.0f ? 0x1.fffffep-1f : r;
}
FLT1(fract_f32, fract(x))
static inline double scale(double x, i32 e) {  // exact: the factor stays within double's range
    e = e < -600 ? -600 : e > 600 ? 600 : e;
    return x * as_double((u64)(1023 + e) << 52);
}
FN(ldexp_f32) { UNUSED; EACH_LANE d[l] = as_bits((float)scale(as_float(a[l]), (i32)b[l])); }
FN(frexp_exp_f32) {
    UNUSED;
    EACH_LANE { int e = 0; float x = as_float(a[l]); if (isfinite(x)) frexpf(x, &e); d[l] = (u32)e; }
}
FN(frexp_mant_f32) {
    UNUSED;
    EACH_LANE { int e; float x = as_float(a[l]); d[l] = as_bits(isfinite(x) ? frexpf(x, &e) : x); }
}
INT1(cvt_f32_i32, as_bits((float)(i32)x))
INT1(cvt_f32_u32, as_bits((float)x))
static inline i32 to_i32(float x) {
    return x != x ? 0 : x >= 0x1p31f ? 0x7fffffff : x <= -0x1p31f ? (i32)0x80000000 : (i32)x;
}
static inline u32 to_u32(float x) { return !(x > 0) ? 0 : x >= 0x1p32f ? ~0u : (u32)x; }
INT1(cvt_i32_f32, to_i32(as_float(x)))
INT1(cvt_u32_f32, to_u32(as_float(x)))
INT1(cvt_flr, to_i32(__builtin_floorf(as_float(x))))
INT1(cvt_rpi, to_i32((float)floor((double)as_float(x) + 0.5)))
INT1(cvt_f16_f32, to_f16(as_float(x)))
INT1(cvt_f32_f16, as_bits(from_f16(x)))
INT1(cvt_ubyte0, as_bits((float)(x & 255)))
INT1(cvt_ubyte1, as_bits((float)(x >> 8 & 255)))
INT1(cvt_ubyte2, as_bits((float)(x >> 16 & 255)))
INT1(cvt_ubyte3, as_bits((float)(x >> 24)))
INT2(cvt_pkrtz, to_f16_zero(as_float(x)) | to_f16_zero(as_float(y)) << 16)
INT2(cvt_pk_u16_u32, (x > 0xffff ? 0xffff : x) | (y > 0xffff ? 0xffff : y) << 16)
static inline u32 narrow(i32 x) { return (u32)(x < -32768 ? -32768 : x > 32767 ? 32767 : x) & 0xffff; }
INT2(cvt_pk_i16_i32, narrow((i32)x) | narrow((i32)y) << 16)

INT1(not_b32, ~x)
INT2(and_b32, x & y)
INT2(or_b32, x | y)
INT2(xor_b32, x ^ y)
INT2(xnor_b32, ~(x ^ y))
INT2(lshlrev_b32, y << (x & 31))
INT2(lshrrev_b32, y >> (x & 31))
INT2(ashrrev_i32, (i32)y >> (x & 31))
INT2(add_u32, x + y)
INT2(sub_u32, x - y)
INT2(subrev_u32, y - x)
INT2(mul_lo_u32, x * y)
INT2(mul_hi_u32, (u64)x * y >> 32)
INT2(mul_hi_i32, (u64)((i64)(i32)x * (i32)y) >> 32)
#define I24(x) ((i32)((x) << 8) >> 8)
#define U24(x) ((x) & 0xffffff)
INT2(mul_i32_i24, (u32)I24(x) * (u32)I24(y))
INT2(mul_u32_u24, U24(x) * U24(y))
INT2(mul_hi_i32_i24, (u64)((i64)I24(x) * I24(y)) >> 32)
INT2(mul_hi_u32_u24, (u64)U24(x) * U24(y) >> 32)
INT3(mad_i32_i24, (u32)I24(x) * (u32)I24(y) + z)
INT3(mad_u32_u24, U24(x) * U24(y) + z)
INT3(mad_u32_u16, (x & 0xffff) * (y & 0xffff) + z)
INT3(mad_i32_i16, (u32)((i32)(i16)x * (i32)(i16)y) + z)
INT2(min_i32, (i32)x < (i32)y ? x : y)
INT2(max_i32, (i32)x > (i32)y ? x : y)
INT2(min_u32, x < y ? x : y)
INT2(max_u32, x > y ? x : y)
#define MIN_I(x, y) ((i32)(x) < (i32)(y) ? (x) : (y))
#define MAX_I(x, y) ((i32)(x) > (i32)(y) ? (x) : (y))
#define MIN_U(x, y) ((x) < (y) ? (x) : (y))
#define MAX_U(x, y) ((x) > (y) ? (x) : (y))
INT3(min3_i32, MIN_I(MIN_I(x, y), z))
INT3(max3_i32, MAX_I(MAX_I(x, y), z))
INT3(min3_u32, MIN_U(MIN_U(x, y), z))
INT3(max3_u32, MAX_U(MAX_U(x, y), z))
INT3(med3_i32, MAX_I(MIN_I(x, y), MIN_I(MAX_I(x, y), z)))
INT3(med3_u32, MAX_U(MIN_U(x, y), MIN_U(MAX_U(x, y), z)))
INT3(bfe_u32, x >> (y & 31) & ((1u << (z & 31)) - 1))
static inline u32 bfe_signed(u32 x, u32 offset, u32 width) {
    u32 v = (u32)((i32)x >> offset);
    return width ? (u32)((i32)(v << (32 - width)) >> (32 - width)) : 0;
}
INT3(bfe_i32, bfe_signed(x, y & 31, z & 31))
INT3(bfi_b32, (x & y) | (~x & z))
INT2(bfm_b32, ((1u << (x & 31)) - 1) << (y & 31))
INT3(alignbit, ((u64)x << 32 | y) >> (z & 31))
INT3(alignbyte, ((u64)x << 32 | y) >> (8 * (z & 3)))
INT3(add3, x + y + z)
INT3(lshl_add, (x << (y & 31)) + z)
INT3(add_lshl, (x + y) << (z & 31))
INT3(lshl_or, (x << (y & 31)) | z)
INT3(and_or, (x & y) | z)
INT3(or3, x | y | z)
INT3(xad, (x ^ y) + z)
INT3(sad_u32, (x > y ? x - y : y - x) + z)
static inline u32 distance(u32 x, u32 y) { return x > y ? x - y : y - x; }
INT3(sad_u16, distance(x & 0xffff, y & 0xffff) + distance(x >> 16, y >> 16) + z)
INT3(sad_u8, distance(x & 255, y & 255) + distance(x >> 8 & 255, y >> 8 & 255) +
                 distance(x >> 16 & 255, y >> 16 & 255) + distance(x >> 24, y >> 24) + z)
INT2(bcnt, (u32)__builtin_popcount(x) + y)
INT2(mbcnt_lo, (u32)__builtin_popcount(l < 32 ? x & ((1u << l) - 1) : x) + y)
INT2(mbcnt_hi, (u32)__builtin_popcount(l < 32 ? 0 : x & ((1u << (l - 32)) - 1)) + y)
INT1(bfrev, (x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555),
             x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333),
             x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f), __builtin_bswap32(x)))
INT1(ffbh_u32, x ? __builtin_clz(x) : -1)
INT1(ffbl_b32, x ? __builtin_ctz(x) : -1)
INT1(ffbh_i32, (x ^ (u32)((i32)x >> 31)) ? __builtin_clz(x ^ (u32)((i32)x >> 31)) : -1)

FN(lshlrev_b64) { UNUSED; EACH_LANE PUT64(W64(b) << (a[l] & 63)); }
FN(lshrrev_b64) { UNUSED; EACH_LANE PUT64(W64(b) >> (a[l] & 63)); }
FN(ashrrev_i64) { UNUSED; EACH_LANE PUT64((u64)((i64)W64(b) >> (a[l] & 63))); }
FN(lshl_add_u64) { UNUSED; EACH_LANE PUT64((W64(a) << (b[l] & 7)) + W64(c)); }
DBL2(add_f64, x + y)
DBL2(mul_f64, x * y)
DBL3(fma_f64, __builtin_fma(x, y, z))
static inline double max_double(double x, double y) {
    return x != x ? y : y != y ? x : x > y || (x == y && signbit(y)) ? x : y;
}
static inline double min_double(double x, double y) {
    return x != x ? y : y != y ? x : x < y || (x == y && signbit(x)) ? x : y;
}
DBL2(max_f64, max_double(x, y))
DBL2(min_f64, min_double(x, y))
DBL1(trunc_f64, trunc(x))
DBL1(ceil_f64, ceil(x))
DBL1(floor_f64, floor(x))
DBL1(rndne_f64, rint(x))
DBL1(rcp_f64, 1.0 / x)
DBL1(rsq_f64, 1.0 / sqrt(x))
DBL1(sqrt_f64, sqrt(x))
FN(ldexp_f64) { UNUSED; EACH_LANE {
    i32 e = (i32)b[l];
    e = e < -5000 ? -5000 : e > 5000 ? 5000 : e;
    PUT64(as_bits64(ldexp(as_double(W64(a)), e))); } }
FN(cvt_f64_f32) { UNUSED; EACH_LANE PUT64(as_bits64((double)as_float(a[l]))); }
FN(cvt_f32_f64) { UNUSED; EACH_LANE d[l] = as_bits((float)as_double(W64(a))); }
FN(cvt_f64_i32) { UNUSED; EACH_LANE PUT64(as_bits64((double)(i32)a[l])); }
FN(cvt_f64_u32) { UNUSED; EACH_LANE PUT64(as_bits64((double)a[l])); }
FN(cvt_i32_f64) { UNUSED; EACH_LANE { double x = as_double(W64(a));
    d[l] = x != x ? 0 : x >= 0x1p31 ? 0x7fffffff : x <= -0x1p31 ? 0x80000000 : (u32)(i32)x; } }
FN(cvt_u32_f64) { UNUSED; EACH_LANE { double x = as_double(W64(a));
    d[l] = !(x > 0) ? 0 : x >= 0x1p32 ? ~0u : (u32)x; } }
FN(frexp_exp_f64) { UNUSED; EACH_LANE { int e = 0; double x = as_double(W64(a));
    if (isfinite(x)) frexp(x, &e); d[l] = (u32)e; } }
FN(frexp_mant_f64) { UNUSED; EACH_LANE { int e; double x = as_double(W64(a));
    PUT64(as_bits64(isfinite(x) ? frexp(x, &e) : x)); } }

#define PAIR(name, expr)                                                                          \
    FN(name) { UNUSED; for (int l = 0; l < 2 * LANES; l++) {                                      \
        float x = as_float(a[l]), y = as_float(b[l]), z = c ? as_float(c[l]) : 0;                 \
        (void)z; d[l] = as_bits(expr); } }
PAIR(pk_fma_f32, __builtin_fmaf(x, y, z))
PAIR(pk_mul_f32, x * y)
PAIR(pk_add_f32, x + y)
// Each source's op_sel picks the one dword it gives.
FN(pk_mov_b32) { UNUSED; EACH_LANE { d[l] = a[l]; d[l + LANES] = b[l]; } }

// D from a quotient estimate x, the denominator y and the numerator z (ISA: V_DIV_FIXUP_F32).
static inline u32 div_fixup(u32 x, u32 y, u32 z) {
    u32 sign = (y ^ z) & 0x80000000, ay = y & 0x7fffffff, az = z & 0x7fffffff;
    i32 ey = (i32)(ay >> 23), ez = (i32)(az >> 23);
    if (az > 0x7f800000) return z | 0x400000;
    if (ay > 0x7f800000) return y | 0x400000;
    if ((ay == 0 && az == 0) || (ay == 0x7f800000 && az == 0x7f800000)) return 0xffc00000;
    if (ay == 0 || az == 0x7f800000) return sign | 0x7f800000;
    if (ay == 0x7f800000 || az == 0) return sign;
    if (ez - ey < -150) return sign;
    // The steps before make a NaN of a quotient that overflows.
    return sign | ((x & 0x7fffffff) > 0x7f800000 ? 0x7f800000 : x & 0x7fffffff);
}
INT3(div_fixup_f32, div_fixup(x, y, z))
FN(div_fixup_f64) {
    UNUSED;
    EACH_LANE {
        u64 x = W64(a), y = W64(b), z = W64(c), top = 1ull << 63, inf = 0x7ffull << 52;
        u64 sign = (y ^ z) & top, ay = y & ~top, az = z & ~top, quiet = 1ull << 51, r;
        if (az > inf) r = z | quiet;
        else if (ay > inf) r = y | quiet;
        else if ((ay == 0 && az == 0) || (ay == inf && az == inf)) r = top | inf | quiet;
        else if (ay == 0 || az == inf) r = sign | inf;
        else if (ay == inf || az == 0) r = sign;
        else if ((i64)(az >> 52) - (i64)(ay >> 52) < -1075) r = sign;
        else r = sign | ((x & ~top) > inf ? inf : x & ~top);
        PUT64(r);
    }
}
INT1(cvt_f32_fp8, as_bits(from_fnuz(x, 3, 8)))
INT1(cvt_f32_bf8, as_bits(from_fnuz(x, 2, 16)))
FN(cvt_pk_f32_fp8) { UNUSED; EACH_LANE { u32 x = a[l];
    d[l] = as_bits(from_fnuz(x, 3, 8)); d[l + LANES] = as_bits(from_fnuz(x >> 8, 3, 8)); } }
FN(cvt_pk_f32_bf8) { UNUSED; EACH_LANE { u32 x = a[l];
    d[l] = as_bits(from_fnuz(x, 2, 16)); d[l + LANES] = as_bits(from_fnuz(x >> 8, 2, 16)); } }

#define OP(g, n, f, t, ...) {"v_" #n, KIND_LANES, g, t, {__VA_ARGS__}, run_lanes, f}
#define LOW(n, ...) {"v_" #n, KIND_LOW, VALU, B64, {__VA_ARGS__}, run_lanes, n}
#define I1(n, f) OP(VALU, n, f, B32, B32)
#define I2(n, f) OP(VALU, n, f, B32, B32, B32)
#define I3(n, f) OP(VALU, n, f, B32, B32, B32, B32)
#define F1(n) OP(VALU, n, n, F32, F32)
#define F2(n) OP(VALU, n, n, F32, F32, F32)
#define F3(n) OP(VALU, n, n, F32, F32, F32, F32)
#define TRANS1(n, f, t, exact) {"v_" #n, KIND_LANES, TRANS, t, {t}, run_lanes, f, exact}
#define T1(n) TRANS1(n##_f32, n##_f32, F32, exact_##n)
const Op lanes_ops[] = {
    I1(mov_b32, mov_b32), LOW(mov_b64, B64), I1(accvgpr_read_b32, mov_b32),
    I1(accvgpr_write_b32, mov_b32), I1(accvgpr_mov_b32, mov_b32),
    F2(add_f32), F2(sub_f32), F2(subrev_f32), F2(mul_f32), F2(mul_legacy_f32), F3(fma_f32),
    OP(VALU, fmac_f32, fma_f32, F32, F32, F32, F32), OP(VALU, fmamk_f32, fma_f32, F32, F32, F32, F32),
    OP(VALU, fmaak_f32, fma_f32, F32, F32, F32, F32), F2(max_f32), F2(min_f32), F3(max3_f32),
    F3(min3_f32), F3(med3_f32), T1(exp), T1(log), T1(rcp), T1(rsq), T1(sqrt),
    TRANS1(rcp_iflag_f32, rcp_f32, F32, exact_rcp), T1(sin), T1(cos), F1(trunc_f32),
    F1(ceil_f32), F1(floor_f32), F1(rndne_f32), F1(fract_f32),
    OP(VALU, ldexp_f32, ldexp_f32, F32, F32, B32),
    OP(VALU, frexp_exp_i32_f32, frexp_exp_f32, B32, F32), F1(frexp_mant_f32),
    OP(VALU, cvt_f32_i32, cvt_f32_i32, F32, B32), OP(VALU, cvt_f32_u32, cvt_f32_u32, F32, B32),
    OP(VALU, cvt_i32_f32, cvt_i32_f32, B32, F32), OP(VALU, cvt_u32_f32, cvt_u32_f32, B32, F32),
    OP(VALU, cvt_flr_i32_f32, cvt_flr, B32, F32), OP(VALU, cvt_rpi_i32_f32, cvt_rpi, B32, F32),
    OP(VALU, cvt_f16_f32, cvt_f16_f32, F16, F32), OP(VALU, cvt_f32_f16, cvt_f32_f16, F32, F16),
    OP(VALU, cvt_f32_ubyte0, cvt_ubyte0, F32, B32), OP(VALU, cvt_f32_ubyte1, cvt_ubyte1, F32, B32),
    OP(VALU, cvt_f32_ubyte2, cvt_ubyte2, F32, B32), OP(VALU, cvt_f32_ubyte3, cvt_ubyte3, F32, B32),
    OP(VALU, cvt_pkrtz_f16_f32, cvt_pkrtz, B32, F32, F32), I2(cvt_pk_u16_u32, cvt_pk_u16_u32),
    I2(cvt_pk_i16_i32, cvt_pk_i16_i32), I1(not_b32, not_b32), I2(and_b32, and_b32),
    I2(or_b32, or_b32), I2(xor_b32, xor_b32), I2(xnor_b32, xnor_b32), I2(lshlrev_b32, lshlrev_b32),
    I2(lshrrev_b32, lshrrev_b32), I2(ashrrev_i32, ashrrev_i32), I2(add_u32, add_u32),
    I2(sub_u32, sub_u32), I2(subrev_u32, subrev_u32), I2(add_i32, add_u32), I2(sub_i32, sub_u32),
    I2(mul_lo_u32, mul_lo_u32), I2(mul_hi_u32, mul_hi_u32), I2(mul_hi_i32, mul_hi_i32),
    I2(mul_i32_i24, mul_i32_i24), I2(mul_u32_u24, mul_u32_u24), I2(mul_hi_i32_i24, mul_hi_i32_i24),
    I2(mul_hi_u32_u24, mul_hi_u32_u24), I3(mad_i32_i24, mad_i32_i24), I3(mad_u32_u24, mad_u32_u24),
    OP(VALU, mad_u32_u16, mad_u32_u16, B32, B16, B16, B32),
    OP(VALU, mad_i32_i16, mad_i32_i16, B32, B16, B16, B32), I2(min_i32, min_i32),
    I2(max_i32, max_i32), I2(min_u32, min_u32), I2(max_u32, max_u32), I3(min3_i32, min3_i32),
    I3(max3_i32, max3_i32), I3(min3_u32, min3_u32), I3(max3_u32, max3_u32), I3(med3_i32, med3_i32),
    I3(med3_u32, med3_u32), I3(bfe_u32, bfe_u32), I3(bfe_i32, bfe_i32), I3(bfi_b32, bfi_b32),
    I2(bfm_b32, bfm_b32), I3(alignbit_b32, alignbit), I3(alignbyte_b32, alignbyte),
    I3(add3_u32, add3), I3(lshl_add_u32, lshl_add), I3(add_lshl_u32, add_lshl),
    I3(lshl_or_b32, lshl_or), I3(and_or_b32, and_or), I3(or3_b32, or3), I3(xad_u32, xad),
    I3(sad_u32, sad_u32), I3(sad_u16, sad_u16), I3(sad_u8, sad_u8), I2(bcnt_u32_b32, bcnt),
    I2(mbcnt_lo_u32_b32, mbcnt_lo), I2(mbcnt_hi_u32_b32, mbcnt_hi), I1(bfrev_b32, bfrev),
    I1(ffbh_u32, ffbh_u32), I1(ffbl_b32, ffbl_b32), I1(ffbh_i32, ffbh_i32),
    LOW(lshlrev_b64, B32, B64),
    OP(VALU, lshrrev_b64, lshrrev_b64, B64, B32, B64),
    OP(VALU, ashrrev_i64, ashrrev_i64, B64, B32, B64),
    LOW(lshl_add_u64, B64, B32, B64),
    OP(VALU, add_f64, add_f64, F64, F64, F64), OP(VALU, mul_f64, mul_f64, F64, F64, F64),
    OP(VALU, fma_f64, fma_f64, F64, F64, F64, F64), OP(VALU, fmac_f64, fma_f64, F64, F64, F64, F64),
    OP(VALU, max_f64, max_f64, F64, F64, F64), OP(VALU, min_f64, min_f64, F64, F64, F64),
    OP(VALU, trunc_f64, trunc_f64, F64, F64), OP(VALU, ceil_f64, ceil_f64, F64, F64),
    OP(VALU, floor_f64, floor_f64, F64, F64), OP(VALU, rndne_f64, rndne_f64, F64, F64),
    OP(TRANS, rcp_f64, rcp_f64, F64, F64), OP(TRANS, rsq_f64, rsq_f64, F64, F64),
    OP(TRANS, sqrt_f64, sqrt_f64, F64, F64), OP(VALU, ldexp_f64, ldexp_f64, F64, F64, B32),
    OP(VALU, cvt_f64_f32, cvt_f64_f32, F64, F32), OP(VALU, cvt_f32_f64, cvt_f32_f64, F32, F64),
    OP(VALU, cvt_f64_i32, cvt_f64_i32, F64, B32), OP(VALU, cvt_f64_u32, cvt_f64_u32, F64, B32),
    OP(VALU, cvt_i32_f64, cvt_i32_f64, B32, F64), OP(VALU, cvt_u32_f64, cvt_u32_f64, B32, F64),
    OP(VALU, frexp_exp_i32_f64, frexp_exp_f64, B32, F64),
    OP(VALU, frexp_mant_f64, frexp_mant_f64, F64, F64),
    OP(VALU, pk_fma_f32, pk_fma_f32, PKF32, PKF32, PKF32, PKF32),
    OP(VALU, pk_mul_f32, pk_mul_f32, PKF32, PKF32, PKF32),
    OP(VALU, pk_add_f32, pk_add_f32, PKF32, PKF32, PKF32),
    OP(VALU, pk_mov_b32, pk_mov_b32, B64, PKB32, PKB32),
    OP(VALU, div_fixup_f32, div_fixup_f32, F32, F32, F32, F32),
    OP(VALU, div_fixup_f64, div_fixup_f64, F64, F64, F64, F64),
    OP(VALU, cvt_f32_fp8, cvt_f32_fp8, F32, B32), OP(VALU, cvt_f32_bf8, cvt_f32_bf8, F32, B32),
    OP(VALU, cvt_pk_f32_fp8, cvt_pk_f32_fp8, PKF32, B32),
    OP(VALU, cvt_pk_f32_bf8, cvt_pk_f32_bf8, PKF32, B32), {0},
};
