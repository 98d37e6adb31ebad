// Vector instructions that also touch scalar registers, or move values between lanes.
#include "floats.h"

#define PAIR_MASK(reg) pair_of(&w->s[reg])

static int scalar_mask(Wave *w, const Inst *i, u32 code, u64 *mask, u64 *defined) {
    if (code < 128) {
        if (touch_scalars(w, i, code, 2)) return STOP;
        *mask = PAIR_MASK(code);
        *defined = pair_of(&w->s_defined[code]);
    } else {
        *mask = scalar_value(w, i, code, 0, B64) | (u64)scalar_value(w, i, code, 1, B64) << 32;
        *defined = ~0ull;
    }
    return OK;
}

// D = mask ? src1 : src0; a lane is defined where its mask bit and the chosen source are.
static int cndmask(Wave *w, const Inst *i) {
    u32 buffers[2][2 * LANES], value[2 * LANES];
    u64 d0, d1, mask, dm;
    if (scalar_mask(w, i, i->src[2], &mask, &dm)) return STOP;
    enum Type type = i->neg | i->abs ? F32 : B32;
    const u32 *a = fetch(w, i, 0, type, buffers[0], &d0);
    const u32 *b = a ? fetch(w, i, 1, type, buffers[1], &d1) : 0;
    if (!b) return STOP;
    u32 low = (u32)mask, high = (u32)(mask >> 32);
    for (u32 l = 0; l < 32; l++) value[l] = low >> l & 1 ? b[l] : a[l];
    for (u32 l = 0; l < 32; l++) value[l + 32] = high >> l & 1 ? b[l + 32] : a[l + 32];
    return store_lanes(w, i, B32, value, dm & ((mask & d1) | (~mask & d0)));
}

// Byte permute: a selector byte of 0 to 3 takes src1's bytes, 4 to 7 src0's, 8 to 11 the sign of a
// half, 12 gives 0x00, more gives 0xff. Only the selected bytes' sources need to be defined.
static int perm(Wave *w, const Inst *i) {
    u32 buffers[3][2 * LANES], value[2 * LANES];
    u64 d0, d1, d2, defined = ~0ull;
    const u32 *a = fetch(w, i, 0, B32, buffers[0], &d0);
    const u32 *b = a ? fetch(w, i, 1, B32, buffers[1], &d1) : 0;
    const u32 *c = b ? fetch(w, i, 2, B32, buffers[2], &d2) : 0;
    if (!c) return STOP;
    EACH_LANE {
        u64 both = (u64)a[l] << 32 | b[l];
        u32 r = 0;
        for (int n = 0; n < 4; n++) {
            u32 s = c[l] >> 8 * n & 255, byte;
            if (s < 8) byte = (u32)(both >> 8 * s) & 255;
            else if (s < 12) byte = both >> (16 * (s - 8) + 15) & 1 ? 255 : 0;
            else byte = s == 12 ? 0 : 255;
            r |= byte << 8 * n;
        }
        value[l] = r;
    }
    if ((d0 & d1) != ~0ull) {
        u64 first = 0, second = 0;
        EACH_LANE for (int n = 0; n < 4; n++) {
            u32 s = c[l] >> 8 * n & 255;
            first |= (u64)((s >= 4 && s < 8) || s == 10 || s == 11) << l;
            second |= (u64)(s < 4 || s == 8 || s == 9) << l;
        }
        defined = (d0 | ~first) & (d1 | ~second);
    }
    return store_lanes(w, i, B32, value, defined & d2);
}

// Additions and subtractions with a carry in or out per lane.
static int carry(Wave *w, const Inst *i, int subtract, int reverse, int with) {
    u32 buffers[2][2 * LANES], value[2 * LANES];
    u64 d0, d1, in = 0, din = ~0ull, out = 0, exec = exec_of(w);
    const u32 *a = fetch(w, i, 0, B32, buffers[0], &d0);
    const u32 *b = a ? fetch(w, i, 1, B32, buffers[1], &d1) : 0;
    if (!b || (with && scalar_mask(w, i, i->src[2], &in, &din))) return STOP;
    if (reverse) { const u32 *swap = a; a = b; b = swap; }
    EACH_LANE {
        u64 c = in >> l & 1, x = a[l], y = b[l], r = subtract ? x - y - c : x + y + c;
        value[l] = (u32)r;
        out |= (u64)(r >> 32 != 0) << l;
    }
    u64 defined = d0 & d1 & din, known = defined | ~exec;
    out &= exec;
    if (i->clamp) return fail(w, i, ERROR_UNSUPPORTED, -1, "clamp on this operation");
    if (store_lanes(w, i, B32, value, defined) || touch_scalars(w, i, i->sdst, 2)) return STOP;
    memcpy(&w->s[i->sdst], &out, 8);
    memcpy(&w->s_defined[i->sdst], &known, 8);
    return OK;
}
static int add_co(Wave *w, const Inst *i) { return carry(w, i, 0, 0, 0); }
static int sub_co(Wave *w, const Inst *i) { return carry(w, i, 1, 0, 0); }
static int subrev_co(Wave *w, const Inst *i) { return carry(w, i, 1, 1, 0); }
static int addc_co(Wave *w, const Inst *i) { return carry(w, i, 0, 0, 1); }
static int subb_co(Wave *w, const Inst *i) { return carry(w, i, 1, 0, 1); }
static int subbrev_co(Wave *w, const Inst *i) { return carry(w, i, 1, 1, 1); }

static int mad64(Wave *w, const Inst *i, int is_signed) {
    u32 buffers[3][2 * LANES], value[2 * LANES];
    u64 d0, d1, d2, out = 0, exec = exec_of(w);
    const u32 *a = fetch(w, i, 0, B32, buffers[0], &d0);
    const u32 *b = a ? fetch(w, i, 1, B32, buffers[1], &d1) : 0;
    const u32 *c = b ? fetch(w, i, 2, B64, buffers[2], &d2) : 0;
    if (!c) return STOP;
    EACH_LANE {
        u64 z = c[l] | (u64)c[l + LANES] << 32, r;
        if (is_signed) {
            i64 product = (i64)(i32)a[l] * (i32)b[l], sum;
            out |= (u64)__builtin_add_overflow(product, (i64)z, &sum) << l;
            r = (u64)sum;
        } else {
            r = (u64)a[l] * b[l] + z;
            out |= (u64)(r < z) << l;
        }
        value[l] = (u32)r;
        value[l + LANES] = (u32)(r >> 32);
    }
    u64 defined = d0 & d1 & d2, known = defined | ~exec, low = d0 & d1 & low_defined(w, i, 2, d2);
    out &= exec;
    if (store_pair(w, i, B64, value, low, defined) || touch_scalars(w, i, i->sdst, 2)) return STOP;
    memcpy(&w->s[i->sdst], &out, 8);
    memcpy(&w->s_defined[i->sdst], &known, 8);
    return OK;
}
static int mad_u64(Wave *w, const Inst *i) { return mad64(w, i, 0); }
static int mad_i64(Wave *w, const Inst *i) { return mad64(w, i, 1); }

// The three steps of an IEEE division that need VCC (ISA: V_DIV_SCALE, V_DIV_FMAS): s0 is the
// operand to scale, s1 the denominator, s2 the numerator.
static u32 scale32(u32 s0, u32 s1, u32 s2, u64 *flag) {
    i32 e1 = (i32)(s1 >> 23 & 255), e2 = (i32)(s2 >> 23 & 255);
    float x = as_float(s0), den = as_float(s1), num = as_float(s2);
    float inverse = (float)(1.0 / (double)den), quotient = (float)((double)num / (double)den);
    #define TINY(f) (fabsf(f) < 0x1p-126f && (f) != 0)
    *flag = 0;
    if (num == 0 || den == 0) return 0x7fc00000;
    if (e2 - e1 >= 96) { *flag = 1; return s0 == s1 ? as_bits(x * 0x1p64f) : s0; }
    if (e1 == 0) return as_bits(x * 0x1p64f);
    // A denominator above 2^126: scaled down here, where the ISA's text scales up and would overflow.
    if (TINY(inverse) && TINY(quotient)) { *flag = 1; return s0 == s1 ? as_bits(x * 0x1p-64f) : s0; }
    if (TINY(inverse)) return as_bits(x * 0x1p-64f);
    if (TINY(quotient) || quotient == 0) { *flag = 1; return s0 == s2 ? as_bits(x * 0x1p64f) : s0; }
    if (e2 <= 23) return as_bits(x * 0x1p64f);
    return s0;
}
static u64 scale64(u64 s0, u64 s1, u64 s2, u64 *flag) {
    i32 e1 = (i32)(s1 >> 52 & 2047), e2 = (i32)(s2 >> 52 & 2047);
    double x = as_double(s0), den = as_double(s1), num = as_double(s2);
    double inverse = 1.0 / den, quotient = num / den;
    #define TINY64(f) (fabs(f) < 0x1p-1022 && (f) != 0)
    *flag = 0;
    if (num == 0 || den == 0) return 0x7ff8000000000000ull;
    if (e2 - e1 >= 768) { *flag = 1; return s0 == s1 ? as_bits64(x * 0x1p128) : s0; }
    if (e1 == 0) return as_bits64(x * 0x1p128);
    if (TINY64(inverse) && TINY64(quotient)) {
        *flag = 1;
        return s0 == s1 ? as_bits64(x * 0x1p-128) : s0;
    }
    if (TINY64(inverse)) return as_bits64(x * 0x1p-128);
    if (TINY64(quotient) || quotient == 0) {
        *flag = 1;
        return s0 == s2 ? as_bits64(x * 0x1p128) : s0;
    }
    if (e2 <= 53) return as_bits64(x * 0x1p128);
    return s0;
}
static int div_scale(Wave *w, const Inst *i, enum Type type) {
    u32 buffers[3][2 * LANES], value[2 * LANES];
    u64 d[3], out = 0, exec = exec_of(w);
    const u32 *p[3];
    for (int n = 0; n < 3; n++) {
        p[n] = fetch(w, i, n, type, buffers[n], &d[n]);
        if (!p[n]) return STOP;
    }
    EACH_LANE {
        u64 flag;
        if (type == F32) {
            value[l] = scale32(p[0][l], p[1][l], p[2][l], &flag);
        } else {
            u64 x[3];
            for (int n = 0; n < 3; n++) x[n] = p[n][l] | (u64)p[n][l + LANES] << 32;
            u64 r = scale64(x[0], x[1], x[2], &flag);
            value[l] = (u32)r;
            value[l + LANES] = (u32)(r >> 32);
        }
        out |= flag << l;
    }
    u64 defined = d[0] & d[1] & d[2], known = defined | ~exec;
    out &= exec;
    if (store_lanes(w, i, type, value, defined) || touch_scalars(w, i, i->sdst, 2)) return STOP;
    memcpy(&w->s[i->sdst], &out, 8);
    memcpy(&w->s_defined[i->sdst], &known, 8);
    return OK;
}
static int div_scale_f32(Wave *w, const Inst *i) { return div_scale(w, i, F32); }
static int div_scale_f64(Wave *w, const Inst *i) { return div_scale(w, i, F64); }
static int div_fmas(Wave *w, const Inst *i, enum Type type) {
    u32 buffers[3][2 * LANES], value[2 * LANES];
    u64 d[3], vcc, dv;
    const u32 *p[3];
    for (int n = 0; n < 3; n++) {
        p[n] = fetch(w, i, n, type, buffers[n], &d[n]);
        if (!p[n]) return STOP;
    }
    if (scalar_mask(w, i, VCC, &vcc, &dv)) return STOP;
    EACH_LANE {
        int scaled = vcc >> l & 1;
        if (type == F32) {
            float z = as_float(p[2][l]);
            float r = __builtin_fmaf(as_float(p[0][l]), as_float(p[1][l]), z);
            int big = (p[2][l] >> 23 & 255) > 127;
            value[l] = as_bits(scaled ? r * (big ? 0x1p64f : 0x1p-64f) : r);
        } else {
            double x[3];
            for (int n = 0; n < 3; n++) x[n] = as_double(p[n][l] | (u64)p[n][l + LANES] << 32);
            double r = __builtin_fma(x[0], x[1], x[2]);
            int big = (p[2][l + LANES] >> 20 & 2047) > 1023;
            u64 bits = as_bits64(scaled ? r * (big ? 0x1p128 : 0x1p-128) : r);
            value[l] = (u32)bits;
            value[l + LANES] = (u32)(bits >> 32);
        }
    }
    return store_lanes(w, i, type, value, d[0] & d[1] & d[2] & dv);
}
static int div_fmas_f32(Wave *w, const Inst *i) { return div_fmas(w, i, F32); }
static int div_fmas_f64(Wave *w, const Inst *i) { return div_fmas(w, i, F64); }

// Vector to scalar: the register's lane must be defined for the scalar to be.
static int read_to_scalar(Wave *w, const Inst *i, u32 lane) {
    u32 row = i->src[0] - VGPR0;
    if (i->src[0] < VGPR0) return fail(w, i, ERROR_UNSUPPORTED, -1, "scalar source");
    if (touch_rows(w, i, row, 1) || touch_scalars(w, i, i->dst, 1)) return STOP;
    set_scalar(w, i->dst, w->v[row][lane], w->defined[row] >> lane & 1 ? ~0u : 0);
    return OK;
}
static int readfirstlane(Wave *w, const Inst *i) {
    u64 exec = exec_of(w);
    return read_to_scalar(w, i, exec ? (u32)__builtin_ctzll(exec) : 0);
}
static int readlane(Wave *w, const Inst *i) {
    u32 code = i->src[1];
    if (code < 128 && touch_scalars(w, i, code, 1)) return STOP;
    if (scalar_defined(w, code) != ~0u)
        return violated(w, i, CHECK_UNDEFINED, -1, "the lane number is undefined");
    return read_to_scalar(w, i, scalar_value(w, i, code, 0, B32) & 63);
}
static int writelane(Wave *w, const Inst *i) {  // ignores EXEC
    u32 row = i->dst - VGPR0, value = i->src[0], code = i->src[1];
    if (touch_rows(w, i, row, 1) || (value < 128 && touch_scalars(w, i, value, 1)) ||
        (code < 128 && touch_scalars(w, i, code, 1))) return STOP;
    u32 lane = scalar_value(w, i, code, 0, B32) & 63;
    u64 bit = 1ull << lane;
    w->v[row][lane] = scalar_value(w, i, value, 0, B32);
    w->defined[row] = (w->defined[row] & ~bit) | (scalar_defined(w, value) == ~0u ? bit : 0);
    return OK;
}
static int swap(Wave *w, const Inst *i) {
    u32 p = i->dst - VGPR0, q = i->src[0] - VGPR0, value[LANES];
    if (touch_rows(w, i, p, 1) || touch_rows(w, i, q, 1)) return STOP;
    u64 exec = exec_of(w), defined = w->defined[p];
    memcpy(value, w->v[p], sizeof value);
    write_row(w, p, w->v[q], exec, w->defined[q]);
    write_row(w, q, value, exec, defined);
    return OK;
}
static int nop(Wave *w, const Inst *i) { (void)w; (void)i; return OK; }

#define V(n, f) {"v_" #n, KIND_SPECIAL, VALU, NONE, {NONE, NONE, NONE}, f, 0}
const Op cross_ops[] = {
    V(cndmask_b32, cndmask), V(perm_b32, perm), V(add_co_u32, add_co), V(sub_co_u32, sub_co),
    V(subrev_co_u32, subrev_co), V(addc_co_u32, addc_co), V(subb_co_u32, subb_co),
    V(subbrev_co_u32, subbrev_co), V(mad_u64_u32, mad_u64), V(mad_i64_i32, mad_i64),
    V(div_scale_f32, div_scale_f32), V(div_scale_f64, div_scale_f64), V(div_fmas_f32, div_fmas_f32),
    V(div_fmas_f64, div_fmas_f64), V(readfirstlane_b32, readfirstlane), V(readlane_b32, readlane),
    V(writelane_b32, writelane), V(swap_b32, swap), V(nop, nop), {0},
};
