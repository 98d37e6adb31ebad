// Number formats: conversions between float and f16, bf16 and the fnuz fp8 types of CDNA3.
#ifndef PYFA_EMULATOR_FLOATS_H
#define PYFA_EMULATOR_FLOATS_H
#include "core.h"
#include <math.h>

static inline float from_f16(u32 h) {
    // Exact: shift the 15 bits into a float's place and rescale by 2^112; subnormals come out right
    // because the multiplication normalizes them. Infinities and NaNs get the exponent set again.
    float f = as_float((h & 0x7fff) << 13) * 0x1p112f;
    u32 special = (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
    return as_float(as_bits(f) | special | (h & 0x8000) << 16);
}
static inline u32 to_f16(float f) {  // round to nearest even
    u32 x = as_bits(f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff;
    // Subnormal: adding 0.5 puts the binary point where f16's last bit is 2^-24.
    u32 small = as_bits(as_float(a) + 0.5f) - 0x3f000000u;
    u32 normal = (a + 0xfff + (a >> 13 & 1) - 0x38000000u) >> 13;
    u32 r = a < 0x38800000u ? small : normal;
    r = a >= 0x477ff000u ? 0x7c00 : r;
    r = a > 0x7f800000u ? 0x7e00 | (a >> 13 & 0x3ff) : r;
    return r | sign;
}
static inline u32 to_f16_zero(float f) {  // toward zero: overflow stops at 65504, infinity stays
    u32 x = as_bits(f), sign = x >> 16 & 0x8000, a = x & 0x7fffffff;
    u32 e = a >> 23, r;
    if (a > 0x7f800000u) r = 0x7e00 | (a >> 13 & 0x3ff);
    else if (a == 0x7f800000u) r = 0x7c00;
    else if (e >= 143) r = 0x7bff;
    else if (e >= 113) r = (a - 0x38000000u) >> 13;
    else if (e >= 102) r = ((a & 0x7fffff) | 0x800000) >> (126 - e);
    else r = 0;
    return r | sign;
}
static inline u32 to_f16_double(double d) {  // round to nearest even, once
    // A double is rounded to odd in float first: 24 bits and a sticky one then round once.
    float f = (float)d;
    u32 x = as_bits(f);
    if ((double)f != d && !(x & 1) && (x & 0x7fffffff) < 0x7f800000u) {
        int toward = fabs((double)f) > fabs(d);
        x = toward ? x - 1 : x + 1;
    }
    return to_f16(as_float(x));
}
static inline float from_bf16(u32 h) { return as_float(h << 16); }
static inline u32 to_bf16(float f) {  // round to nearest even
    u32 x = as_bits(f);
    if ((x & 0x7fffffff) > 0x7f800000u) return x >> 16 | 0x40;
    return (x + 0x7fff + (x >> 16 & 1)) >> 16;
}
// e4m3fnuz: bias 8, e5m2fnuz: bias 16; no infinities, no minus zero, 0x80 is the one NaN.
static inline float from_fnuz(u32 byte, int mantissa, int bias) {
    if ((byte & 0xff) == 0x80) return as_float(0x7fc00000u);
    int e = (byte & 0x7f) >> mantissa, m = byte & ((1 << mantissa) - 1);
    float v = e ? ldexpf((float)(m | 1 << mantissa), e - bias - mantissa)
                : ldexpf((float)m, 1 - bias - mantissa);
    return byte & 0x80 ? -v : v;
}
// Rounds to nearest even. What is too large becomes NaN, or the largest value where MODE.FP16_OVFL
// is set; infinities become NaN either way, as hip_fp8.h relies on.
static inline u32 to_fnuz(float f, int mantissa, int bias, int saturate) {
    u32 x = as_bits(f), sign = x >> 24 & 0x80;
    if ((x & 0x7f800000u) == 0x7f800000u) return 0x80;
    double v = fabs((double)f);
    if (v == 0) return 0;
    int e = ilogb(v);
    if (e < 1 - bias) e = 1 - bias;
    double unit = ldexp(1.0, e - mantissa);
    u64 n = (u64)rint(v / unit);  // v / unit is exact; at most 2^(mantissa + 1)
    if (n == 0) return 0;         // there is no minus zero
    double r = (double)n * unit;
    double largest = ldexp(2.0 - ldexp(1.0, -mantissa), mantissa == 3 ? 7 : 15);
    if (r > largest) return saturate ? sign | 0x7f : 0x80;
    int re = ilogb(r);
    if (re < 1 - bias) return sign | (u32)n;
    u32 m = (u32)ldexp(r, mantissa - re) & ((1u << mantissa) - 1);
    return sign | (u32)(re + bias) << mantissa | m;
}
// 2^x in double to about 1e-15, in a form that vectorizes: the float rounded from it is the
// correctly rounded one but for one argument in some ten million.
static inline double exp2_double(double x) {
    double n = __builtin_rint(x), t = (x - n) * 0.6931471805599453094, p = 1.0 / 6227020800.0;
    p = p * t + 1.0 / 479001600.0; p = p * t + 1.0 / 39916800.0; p = p * t + 1.0 / 3628800.0;
    p = p * t + 1.0 / 362880.0; p = p * t + 1.0 / 40320.0; p = p * t + 1.0 / 5040.0;
    p = p * t + 1.0 / 720.0; p = p * t + 1.0 / 120.0; p = p * t + 1.0 / 24.0;
    p = p * t + 1.0 / 6.0; p = p * t + 0.5; p = p * t + 1.0; p = p * t + 1.0;
    return p * as_double((u64)((i64)(i32)n + 1023) << 52);
}
// What the transcendental operations round. sin and cos take revolutions.
static inline double exact_exp(double x) { return exp2(x); }
static inline double exact_log(double x) { return log2(x); }
static inline double exact_rcp(double x) { return 1.0 / x; }
static inline double exact_rsq(double x) { return 1.0 / sqrt(x); }
static inline double exact_sqrt(double x) { return sqrt(x); }
static inline double exact_sin(double x) { return sin(6.283185307179586 * (x - rint(x))); }
static inline double exact_cos(double x) { return cos(6.283185307179586 * (x - rint(x))); }
#endif
