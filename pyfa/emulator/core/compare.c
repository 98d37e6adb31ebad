// VOPC: comparisons of 64 lanes into a scalar register pair, and classification of floats.
#include "floats.h"

#define FN(name) static void name(u32 *d, const u32 *a, const u32 *b, const u32 *c)
#define LOOP(name, type, left, right, cond)                                                       \
    FN(name) { (void)c; EACH_LANE { type x = left, y = right; (void)x; (void)y;                   \
        d[l] = (cond) ? ~0u : 0; } }
#define W64(p) ((p)[l] | (u64)(p)[l + LANES] << 32)
#define FLOATS(s, type, from)                                                                     \
    LOOP(f_##s, type, from(a), from(b), 0) LOOP(lt_##s, type, from(a), from(b), x < y)            \
    LOOP(eq_##s, type, from(a), from(b), x == y) LOOP(le_##s, type, from(a), from(b), x <= y)     \
    LOOP(gt_##s, type, from(a), from(b), x > y)                                                   \
    LOOP(lg_##s, type, from(a), from(b), x < y || x > y)                                          \
    LOOP(ge_##s, type, from(a), from(b), x >= y)                                                  \
    LOOP(o_##s, type, from(a), from(b), x == x && y == y)                                         \
    LOOP(u_##s, type, from(a), from(b), x != x || y != y)                                         \
    LOOP(nge_##s, type, from(a), from(b), !(x >= y))                                              \
    LOOP(nlg_##s, type, from(a), from(b), !(x < y || x > y))                                      \
    LOOP(ngt_##s, type, from(a), from(b), !(x > y))                                               \
    LOOP(nle_##s, type, from(a), from(b), !(x <= y))                                              \
    LOOP(neq_##s, type, from(a), from(b), x != y)                                                 \
    LOOP(nlt_##s, type, from(a), from(b), !(x < y)) LOOP(tru_##s, type, from(a), from(b), 1)
#define INTEGERS(s, type, from)                                                                   \
    LOOP(f_##s, type, from(a), from(b), 0) LOOP(lt_##s, type, from(a), from(b), x < y)            \
    LOOP(eq_##s, type, from(a), from(b), x == y) LOOP(le_##s, type, from(a), from(b), x <= y)     \
    LOOP(gt_##s, type, from(a), from(b), x > y) LOOP(ne_##s, type, from(a), from(b), x != y)      \
    LOOP(ge_##s, type, from(a), from(b), x >= y) LOOP(t_##s, type, from(a), from(b), 1)
#define FROM32(p) as_float((p)[l])
#define FROM16(p) from_f16((p)[l])
#define FROM64(p) as_double(W64(p))
#define LOW(p) ((p)[l])
FLOATS(f32, float, FROM32)
FLOATS(f16, float, FROM16)
FLOATS(f64, double, FROM64)
INTEGERS(i32, i32, (i32)LOW)
INTEGERS(u32, u32, LOW)
INTEGERS(i16, i16, (i16)LOW)
INTEGERS(u16, u16, (u16)LOW)
INTEGERS(i64, i64, (i64)W64)
INTEGERS(u64, u64, W64)

// Bits of the class mask: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal,
// +normal, +inf.
static inline u32 class_of(u64 magnitude, u32 negative, int exponent, int mantissa) {
    u64 inf = ((1ull << exponent) - 1) << mantissa;
    if (magnitude > inf) return magnitude >> (mantissa - 1) & 1 ? 2 : 1;
    u32 positive_bit = magnitude == inf ? 9 : magnitude >> mantissa ? 8 : magnitude ? 7 : 6;
    return 1u << (negative ? 11 - positive_bit : positive_bit);
}
LOOP(class_f32, u32, a[l], b[l], class_of(x & 0x7fffffff, x >> 31, 8, 23) & y)
LOOP(class_f16, u32, a[l], b[l], class_of(x & 0x7fff, x >> 15 & 1, 5, 10) & y)
FN(class_f64) { (void)c; EACH_LANE { u64 x = W64(a);
    d[l] = class_of(x & ~(1ull << 63), (u32)(x >> 63), 11, 52) & b[l] ? ~0u : 0; } }

#define CM(prefix, n, s, kind)                                                                     \
    {prefix #n "_" #s, KIND_COMPARE, VALU, NONE, {kind, kind, NONE}, run_compare, n##_##s}
#define C(n, s, kind) CM("v_cmp_", n, s, kind), CM("v_cmpx_", n, s, kind)
#define CF(s, k) C(f, s, k), C(lt, s, k), C(eq, s, k), C(le, s, k), C(gt, s, k), C(lg, s, k),      \
    C(ge, s, k), C(o, s, k), C(u, s, k), C(nge, s, k), C(nlg, s, k), C(ngt, s, k), C(nle, s, k),   \
    C(neq, s, k), C(nlt, s, k), C(tru, s, k)
#define CI(s, k) C(f, s, k), C(lt, s, k), C(eq, s, k), C(le, s, k), C(gt, s, k), C(ne, s, k),      \
    C(ge, s, k), C(t, s, k)
#define CC(s, t, u) {"v_cmp_class_" #s, KIND_COMPARE, VALU, NONE, {t, u, NONE}, run_compare,       \
                     class_##s},                                                                   \
                    {"v_cmpx_class_" #s, KIND_COMPARE, VALU, NONE, {t, u, NONE}, run_compare,      \
                     class_##s}
const Op compare_ops[] = {CF(f32, F32), CF(f16, F16), CF(f64, F64), CI(i32, B32), CI(u32, B32),
                          CI(i16, B16), CI(u16, B16), CI(i64, B64), CI(u64, B64),
                          CC(f32, F32, B32), CC(f16, F16, B32), CC(f64, F64, B32), {0}};
