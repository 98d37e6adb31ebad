// SOP1, SOP2, SOPC and SOPK comparisons: the arithmetic of the scalar unit.
//
// Every scalar register carries a mask of defined bits. Bitwise operations propagate it exactly (an
// AND with a defined 0 is defined), because compilers keep masks whose unused lanes were never
// written; all others make the whole result undefined. It is an error when control depends on it.
#include "scalar.h"

u32 scalar_value(const Wave *w, const Inst *i, u32 code, int half, enum Type type) {
    if (code < 128) return w->s[code + half];
    if (code <= 192) return half ? 0 : code - 128;
    if (code <= 208) return half ? ~0u : (u32)(192 - (int)code);
    if (code >= 240 && code <= 248) {
        static const u32 f32[] = {0x3f000000, 0xbf000000, 0x3f800000, 0xbf800000, 0x40000000,
                                  0xc0000000, 0x40800000, 0xc0800000, 0x3e22f983};
        static const u16 f16[] = {0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400,
                                  0x3118};
        static const u64 f64[] = {0x3fe0000000000000, 0xbfe0000000000000, 0x3ff0000000000000,
                                  0xbff0000000000000, 0x4000000000000000, 0xc000000000000000,
                                  0x4010000000000000, 0xc010000000000000, 0x3fc45f306dc9c882};
        u32 n = code - 240;
        if (type == F64 || type == B64) return (u32)(f64[n] >> (half ? 32 : 0));
        if (type == F16 || type == PKF16) return half ? 0 : f16[n];
        return f32[n];
    }
    switch (code) {
    case LITERAL:  // a 32-bit literal is the upper dword of a double, else zero extended
        if (type == F64) return half ? i->literal : 0;
        return half ? 0 : i->literal;
    case SHARED_BASE: return half ? 0x10000u : 0;    // flat address of LDS byte 0: 2^48
    case SHARED_LIMIT: return half ? 0x10000u : ~0u;
    case PRIVATE_BASE: return half ? 0x20000u : 0;   // and of scratch byte 0: 2^49
    case PRIVATE_LIMIT: return half ? 0x20000u : ~0u;
    case VCCZ: return !half && !pair_of(&w->s[VCC]);
    case EXECZ: return !half && !exec_of(w);
    case SRC_SCC: return half ? 0 : w->scc;
    }
    return 0;  // the decoder lets no other code through
}

// SOP2 with 32-bit operands x and y; r is the result, scc the condition (or the old one).
#define SOP2_32(name, sets_scc, expr, condition)                                                  \
    static int name(Wave *w, const Inst *i) {                                                     \
        Bits p, q;                                                                                \
        if (read32(w, i, i->src[0], &p) || read32(w, i, i->src[1], &q)) return STOP;              \
        u32 x = (u32)p.value, y = (u32)q.value, scc = w->scc, r = (u32)(expr);                    \
        (void)scc;                                                                                \
        int whole = (u32)(p.defined & q.defined) == ~0u;                                          \
        u32 c = (condition);                                                                      \
        if (sets_scc) set_scc(w, c, whole);                                                       \
        return put32(w, i, i->dst, r, whole ? ~0ull : 0);                                         \
    }
#define SOP2_64(name, sets_scc, expr)                                                             \
    static int name(Wave *w, const Inst *i) {                                                     \
        Bits p, q;                                                                                \
        if (read64(w, i, i->src[0], &p) || read32(w, i, i->src[1], &q)) return STOP;              \
        u64 x = p.value; u32 y = (u32)q.value;                                                    \
        u64 r = (u64)(expr);                                                                      \
        int whole = p.defined == ~0ull && (u32)q.defined == ~0u;                                  \
        if (sets_scc) set_scc(w, r != 0, whole);                                                  \
        return put64(w, i, i->dst, r, whole ? ~0ull : 0);                                         \
    }
// Bitwise, with the defined bits of the result given exactly by `known`.
#define BITWISE(name, expr, known)                                                                \
    static int name##32(Wave *w, const Inst *i) {                                                 \
        Bits p, q;                                                                                \
        if (read32(w, i, i->src[0], &p) || read32(w, i, i->src[1], &q)) return STOP;              \
        u64 x = p.value, y = q.value, dx = p.defined, dy = q.defined;                             \
        u32 r = (u32)(expr);                                                                      \
        u64 d = (known);                                                                          \
        set_scc(w, r != 0, (u32)d == ~0u || (r & d));                                             \
        return put32(w, i, i->dst, r, d);                                                         \
    }                                                                                             \
    static int name##64(Wave *w, const Inst *i) {                                                 \
        Bits p, q;                                                                                \
        if (read64(w, i, i->src[0], &p) || read64(w, i, i->src[1], &q)) return STOP;              \
        u64 x = p.value, y = q.value, dx = p.defined, dy = q.defined;                             \
        u64 r = (expr), d = (known);                                                              \
        set_scc(w, r != 0, d == ~0ull || (r & d));                                                \
        return put64(w, i, i->dst, r, d);                                                         \
    }                                                                                             \
    static int name##_saveexec(Wave *w, const Inst *i) {                                          \
        Bits p;                                                                                   \
        if (read64(w, i, i->src[0], &p)) return STOP;                                             \
        u64 x = p.value, y = exec_of(w), dx = p.defined, dy = ~0ull;                              \
        u64 r = (expr), d = (known);                                                              \
        set_scc(w, r != 0, d == ~0ull || (r & d));                                                \
        if (put64(w, i, i->dst, y, ~0ull)) return STOP;                                           \
        return put64(w, i, EXEC, r, d);                                                           \
    }
#define AND_KNOWN(a, da, b, db) (((da) & (db)) | ((da) & ~(a)) | ((db) & ~(b)))
BITWISE(and, x & y, AND_KNOWN(x, dx, y, dy))
BITWISE(andn2, x & ~y, AND_KNOWN(x, dx, ~y, dy))
BITWISE(nand, ~(x & y), AND_KNOWN(x, dx, y, dy))
BITWISE(or, x | y, AND_KNOWN(~x, dx, ~y, dy))
BITWISE(orn2, x | ~y, AND_KNOWN(~x, dx, y, dy))
BITWISE(nor, ~(x | y), AND_KNOWN(~x, dx, ~y, dy))
BITWISE(xor, x ^ y, dx & dy)
BITWISE(xnor, ~(x ^ y), dx & dy)

SOP2_32(add_u32, 1, x + y, ((u64)x + y) >> 32 != 0)
SOP2_32(sub_u32, 1, x - y, y > x)
SOP2_32(add_i32, 1, x + y, (~(x ^ y) & (x ^ (x + y))) >> 31)
SOP2_32(sub_i32, 1, x - y, ((x ^ y) & (x ^ (x - y))) >> 31)
SOP2_32(addc_u32, 1, x + y + scc, ((u64)x + y + scc) >> 32 != 0)
SOP2_32(subb_u32, 1, x - y - scc, (u64)y + scc > x)
SOP2_32(min_i32, 1, (i32)x < (i32)y ? x : y, (i32)x < (i32)y)
SOP2_32(min_u32, 1, x < y ? x : y, x < y)
SOP2_32(max_i32, 1, (i32)x > (i32)y ? x : y, (i32)x > (i32)y)
SOP2_32(max_u32, 1, x > y ? x : y, x > y)
SOP2_32(lshl_b32, 1, x << (y & 31), r != 0)
SOP2_32(lshr_b32, 1, x >> (y & 31), r != 0)
SOP2_32(ashr_i32, 1, (i32)x >> (y & 31), r != 0)
SOP2_32(bfm_b32, 0, ((1u << (x & 31)) - 1) << (y & 31), 0)
SOP2_32(mul_i32, 0, x * y, 0)
SOP2_32(mul_hi_u32, 0, (u64)x * y >> 32, 0)
SOP2_32(mul_hi_i32, 0, (u64)((i64)(i32)x * (i32)y) >> 32, 0)
static u32 field_u32(u32 x, u32 offset, u32 width) {
    u32 v = x >> offset;
    return width == 0 ? 0 : width >= 32 ? v : v & ((1u << width) - 1);
}
static u32 field_i32(u32 x, u32 offset, u32 width) {
    if (width == 0) return 0;
    i64 v = (i64)(i32)x >> offset;
    return width >= 32 ? (u32)v : (u32)((i32)((u32)v << (32 - width)) >> (32 - width));
}
SOP2_32(bfe_u32, 1, field_u32(x, y & 31, y >> 16 & 127), r != 0)
SOP2_32(bfe_i32, 1, field_i32(x, y & 31, y >> 16 & 127), r != 0)
SOP2_32(absdiff_i32, 1, (i32)x > (i32)y ? x - y : y - x, r != 0)
SOP2_32(lshl1_add, 1, (x << 1) + y, (((u64)x << 1) + y) >> 32 != 0)
SOP2_32(lshl2_add, 1, (x << 2) + y, (((u64)x << 2) + y) >> 32 != 0)
SOP2_32(lshl3_add, 1, (x << 3) + y, (((u64)x << 3) + y) >> 32 != 0)
SOP2_32(lshl4_add, 1, (x << 4) + y, (((u64)x << 4) + y) >> 32 != 0)
SOP2_32(pack_ll, 0, (x & 0xffff) | y << 16, 0)
SOP2_32(pack_lh, 0, (x & 0xffff) | (y & 0xffff0000), 0)
SOP2_32(pack_hh, 0, x >> 16 | (y & 0xffff0000), 0)
SOP2_64(lshl_b64, 1, x << (y & 63))
SOP2_64(lshr_b64, 1, x >> (y & 63))
SOP2_64(ashr_i64, 1, (i64)x >> (y & 63))
static u64 field_u64(u64 x, u32 offset, u32 width) {
    u64 v = x >> offset;
    return width == 0 ? 0 : width >= 64 ? v : v & ((1ull << width) - 1);
}
static u64 field_i64(u64 x, u32 offset, u32 width) {
    if (width == 0) return 0;
    u64 v = (u64)((i64)x >> offset);
    return width >= 64 ? v : (u64)((i64)(v << (64 - width)) >> (64 - width));
}
SOP2_64(bfe_u64, 1, field_u64(x, y & 63, y >> 16 & 127))
SOP2_64(bfe_i64, 1, field_i64(x, y & 63, y >> 16 & 127))
static int bfm_b64(Wave *w, const Inst *i) {
    Bits p, q;
    if (read32(w, i, i->src[0], &p) || read32(w, i, i->src[1], &q)) return STOP;
    u64 r = ((1ull << (p.value & 63)) - 1) << (q.value & 63);
    return put64(w, i, i->dst, r, (u32)(p.defined & q.defined) == ~0u ? ~0ull : 0);
}
static int cselect32(Wave *w, const Inst *i) {
    Bits p;
    if (read32(w, i, i->src[w->scc ? 0 : 1], &p)) return STOP;
    return put32(w, i, i->dst, (u32)p.value, w->scc_defined ? p.defined : 0);
}
static int cselect64(Wave *w, const Inst *i) {
    Bits p;
    if (read64(w, i, i->src[w->scc ? 0 : 1], &p)) return STOP;
    return put64(w, i, i->dst, p.value, w->scc_defined ? p.defined : 0);
}

// SOP1: the bits of the result that are defined are `known`.
#define SOP1_32(name, sets_scc, expr, known)                                                      \
    static int name(Wave *w, const Inst *i) {                                                     \
        Bits p;                                                                                   \
        if (read32(w, i, i->src[0], &p)) return STOP;                                             \
        u32 x = (u32)p.value, d = (u32)p.defined, whole = d == ~0u ? ~0u : 0, r = (u32)(expr);    \
        (void)d; (void)whole;                                                                     \
        u32 k = (known);                                                                          \
        if (sets_scc) set_scc(w, r != 0, k == ~0u || (r & k));                                    \
        return put32(w, i, i->dst, r, k);                                                         \
    }
#define SOP1_64(name, sets_scc, expr, known)                                                      \
    static int name(Wave *w, const Inst *i) {                                                     \
        Bits p;                                                                                   \
        if (read64(w, i, i->src[0], &p)) return STOP;                                             \
        u64 x = p.value, d = p.defined, whole = d == ~0ull ? ~0ull : 0, r = (u64)(expr);          \
        (void)d; (void)whole;                                                                     \
        u64 k = (known);                                                                          \
        if (sets_scc) set_scc(w, r != 0, k == ~0ull || (r & k));                                  \
        return put64(w, i, i->dst, r, k);                                                         \
    }
#define SOP1_64_32(name, sets_scc, expr)                                                          \
    static int name(Wave *w, const Inst *i) {                                                     \
        Bits p;                                                                                   \
        if (read64(w, i, i->src[0], &p)) return STOP;                                             \
        u64 x = p.value; u32 r = (u32)(expr);                                                     \
        if (sets_scc) set_scc(w, r != 0, p.defined == ~0ull);                                     \
        return put32(w, i, i->dst, r, p.defined == ~0ull ? ~0ull : 0);                            \
    }
static u32 reverse32(u32 x) {
    x = (x & 0x55555555) << 1 | (x >> 1 & 0x55555555);
    x = (x & 0x33333333) << 2 | (x >> 2 & 0x33333333);
    x = (x & 0x0f0f0f0f) << 4 | (x >> 4 & 0x0f0f0f0f);
    return __builtin_bswap32(x);
}
static u64 spread_bits(u32 x) {  // each bit twice
    u64 r = 0;
    for (int b = 0; b < 32; b++) r |= (u64)(x >> b & 1) * 3 << 2 * b;
    return r;
}
SOP1_32(mov_b32, 0, x, d)
SOP1_64(mov_b64, 0, x, d)
SOP1_32(not_b32, 1, ~x, d)
SOP1_64(not_b64, 1, ~x, d)
SOP1_32(brev_b32, 0, reverse32(x), reverse32(d))
SOP1_64(brev_b64, 0, (u64)reverse32((u32)x) << 32 | reverse32((u32)(x >> 32)), whole)
SOP1_32(bcnt0_32, 1, 32 - __builtin_popcount(x), whole)
SOP1_32(bcnt1_32, 1, __builtin_popcount(x), whole)
SOP1_64_32(bcnt0_64, 1, 64 - __builtin_popcountll(x))
SOP1_64_32(bcnt1_64, 1, __builtin_popcountll(x))
SOP1_32(ff0_32, 0, ~x ? __builtin_ctz(~x) : -1, whole)
SOP1_32(ff1_32, 0, x ? __builtin_ctz(x) : -1, whole)
SOP1_64_32(ff0_64, 0, ~x ? __builtin_ctzll(~x) : -1)
SOP1_64_32(ff1_64, 0, x ? __builtin_ctzll(x) : -1)
SOP1_32(flbit_b32, 0, x ? __builtin_clz(x) : -1, whole)
SOP1_64_32(flbit_b64, 0, x ? __builtin_clzll(x) : -1)
#define SIGN_RUN(x) ((x) ^ (u32)((i32)(x) >> 31))
SOP1_32(flbit_i32, 0, SIGN_RUN(x) ? __builtin_clz(SIGN_RUN(x)) : -1, whole)
SOP1_64_32(flbit_i64, 0, (x ^ (u64)((i64)x >> 63)) ? __builtin_clzll(x ^ (u64)((i64)x >> 63)) : -1)
SOP1_32(sext_i8, 0, (i32)(i8)x, (d & 0xff) == 0xff ? ~0u : 0)
SOP1_32(sext_i16, 0, (i32)(i16)x, (d & 0xffff) == 0xffff ? ~0u : 0)
SOP1_32(abs_i32, 1, (i32)x < 0 ? 0 - x : x, whole)
static int cmov_b32(Wave *w, const Inst *i) { return w->scc ? mov_b32(w, i) : OK; }
static int cmov_b64(Wave *w, const Inst *i) { return w->scc ? mov_b64(w, i) : OK; }
#define BITSET(name, wide, expr)                                                                  \
    static int name(Wave *w, const Inst *i) {                                                     \
        Bits p, q;                                                                                \
        if (read32(w, i, i->src[0], &p)) return STOP;                                             \
        if (wide ? read64(w, i, i->dst, &q) : read32(w, i, i->dst, &q)) return STOP;              \
        u64 x = q.value, bit = 1ull << (p.value & (wide ? 63 : 31));                              \
        u64 d = (u32)p.defined == ~0u ? q.defined | bit : 0;                                      \
        return wide ? put64(w, i, i->dst, expr, d) : put32(w, i, i->dst, (u32)(expr), d);         \
    }
BITSET(bitset0_b32, 0, x & ~bit)
BITSET(bitset1_b32, 0, x | bit)
BITSET(bitset0_b64, 1, x & ~bit)
BITSET(bitset1_b64, 1, x | bit)
static int bitreplicate(Wave *w, const Inst *i) {
    Bits p;
    if (read32(w, i, i->src[0], &p)) return STOP;
    return put64(w, i, i->dst, spread_bits((u32)p.value), spread_bits((u32)p.defined));
}
static int andn1_saveexec(Wave *w, const Inst *i) {
    Bits p;
    if (read64(w, i, i->src[0], &p)) return STOP;
    u64 y = exec_of(w), r = ~p.value & y, d = AND_KNOWN(~p.value, p.defined, y, ~0ull);
    set_scc(w, r != 0, d == ~0ull);
    return put64(w, i, i->dst, y, ~0ull) || put64(w, i, EXEC, r, d);
}
static int orn1_saveexec(Wave *w, const Inst *i) {
    Bits p;
    if (read64(w, i, i->src[0], &p)) return STOP;
    u64 y = exec_of(w), r = ~p.value | y, d = AND_KNOWN(p.value, p.defined, ~y, ~0ull);
    set_scc(w, r != 0, d == ~0ull);
    return put64(w, i, i->dst, y, ~0ull) || put64(w, i, EXEC, r, d);
}
static int andn1_wrexec(Wave *w, const Inst *i) {
    Bits p;
    if (read64(w, i, i->src[0], &p)) return STOP;
    u64 y = exec_of(w), r = ~p.value & y, d = AND_KNOWN(~p.value, p.defined, y, ~0ull);
    set_scc(w, r != 0, d == ~0ull);
    return put64(w, i, EXEC, r, d) || put64(w, i, i->dst, r, d);
}
static int andn2_wrexec(Wave *w, const Inst *i) {
    Bits p;
    if (read64(w, i, i->src[0], &p)) return STOP;
    u64 y = exec_of(w), r = p.value & ~y, d = AND_KNOWN(p.value, p.defined, ~y, ~0ull);
    set_scc(w, r != 0, d == ~0ull);
    return put64(w, i, EXEC, r, d) || put64(w, i, i->dst, r, d);
}

#define SOPC(name, expr)                                                                          \
    static int name(Wave *w, const Inst *i) {                                                     \
        Bits p, q;                                                                                \
        if (read32(w, i, i->src[0], &p) || read32(w, i, i->src[1], &q)) return STOP;              \
        u32 x = (u32)p.value, y = (u32)q.value;                                                   \
        set_scc(w, (expr), (u32)(p.defined & q.defined) == ~0u);                                  \
        return OK;                                                                                \
    }                                                                                             \
    static int k_##name(Wave *w, const Inst *i) {                                                 \
        Bits p;                                                                                   \
        if (read32(w, i, i->dst, &p)) return STOP;                                                \
        u32 x = (u32)p.value, y = (u32)i->imm;                                                    \
        set_scc(w, (expr), (u32)p.defined == ~0u);                                                \
        return OK;                                                                                \
    }
SOPC(eq_i32, x == y)
SOPC(lg_i32, x != y)
SOPC(gt_i32, (i32)x > (i32)y)
SOPC(ge_i32, (i32)x >= (i32)y)
SOPC(lt_i32, (i32)x < (i32)y)
SOPC(le_i32, (i32)x <= (i32)y)
SOPC(gt_u32, x > y)
SOPC(ge_u32, x >= y)
SOPC(lt_u32, x < y)
SOPC(le_u32, x <= y)
static int bitcmp(Wave *w, const Inst *i, int wide, u32 wanted) {
    Bits p, q;
    if (wide ? read64(w, i, i->src[0], &p) : read32(w, i, i->src[0], &p)) return STOP;
    if (read32(w, i, i->src[1], &q)) return STOP;
    u32 bit = q.value & (wide ? 63 : 31);
    set_scc(w, (p.value >> bit & 1) == wanted, (p.defined >> bit & 1) && (u32)q.defined == ~0u);
    return OK;
}
static int bitcmp0_32(Wave *w, const Inst *i) { return bitcmp(w, i, 0, 0); }
static int bitcmp1_32(Wave *w, const Inst *i) { return bitcmp(w, i, 0, 1); }
static int bitcmp0_64(Wave *w, const Inst *i) { return bitcmp(w, i, 1, 0); }
static int bitcmp1_64(Wave *w, const Inst *i) { return bitcmp(w, i, 1, 1); }
static int cmp64(Wave *w, const Inst *i, int wanted) {
    Bits p, q;
    if (read64(w, i, i->src[0], &p) || read64(w, i, i->src[1], &q)) return STOP;
    set_scc(w, (p.value == q.value) == wanted, (p.defined & q.defined) == ~0ull);
    return OK;
}
static int eq_u64(Wave *w, const Inst *i) { return cmp64(w, i, 1); }
static int lg_u64(Wave *w, const Inst *i) { return cmp64(w, i, 0); }

#define S(n, f) {"s_" #n, KIND_SPECIAL, SALU, NONE, {NONE, NONE, NONE}, f, 0}
#define LOGIC(n) S(n##_b32, n##32), S(n##_b64, n##64), S(n##_saveexec_b64, n##_saveexec)
#define COMPARE(n) S(cmp_##n, n), S(cmpk_##n, k_##n)
const Op scalar_ops[] = {
    LOGIC(and), LOGIC(or), LOGIC(xor), LOGIC(andn2), LOGIC(orn2), LOGIC(nand), LOGIC(nor),
    LOGIC(xnor), S(andn1_saveexec_b64, andn1_saveexec), S(orn1_saveexec_b64, orn1_saveexec),
    S(andn1_wrexec_b64, andn1_wrexec), S(andn2_wrexec_b64, andn2_wrexec), S(add_u32, add_u32),
    S(sub_u32, sub_u32), S(add_i32, add_i32), S(sub_i32, sub_i32), S(addc_u32, addc_u32),
    S(subb_u32, subb_u32), S(min_i32, min_i32), S(min_u32, min_u32), S(max_i32, max_i32),
    S(max_u32, max_u32), S(cselect_b32, cselect32), S(cselect_b64, cselect64),
    S(lshl_b32, lshl_b32), S(lshr_b32, lshr_b32), S(ashr_i32, ashr_i32), S(lshl_b64, lshl_b64),
    S(lshr_b64, lshr_b64), S(ashr_i64, ashr_i64), S(bfm_b32, bfm_b32), S(bfm_b64, bfm_b64),
    S(mul_i32, mul_i32), S(mul_hi_u32, mul_hi_u32), S(mul_hi_i32, mul_hi_i32),
    S(bfe_u32, bfe_u32), S(bfe_i32, bfe_i32), S(bfe_u64, bfe_u64), S(bfe_i64, bfe_i64),
    S(absdiff_i32, absdiff_i32), S(lshl1_add_u32, lshl1_add), S(lshl2_add_u32, lshl2_add),
    S(lshl3_add_u32, lshl3_add), S(lshl4_add_u32, lshl4_add), S(pack_ll_b32_b16, pack_ll),
    S(pack_lh_b32_b16, pack_lh), S(pack_hh_b32_b16, pack_hh), S(mov_b32, mov_b32),
    S(mov_b64, mov_b64), S(cmov_b32, cmov_b32), S(cmov_b64, cmov_b64), S(not_b32, not_b32),
    S(not_b64, not_b64), S(brev_b32, brev_b32), S(brev_b64, brev_b64), S(bcnt0_i32_b32, bcnt0_32),
    S(bcnt0_i32_b64, bcnt0_64), S(bcnt1_i32_b32, bcnt1_32), S(bcnt1_i32_b64, bcnt1_64),
    S(ff0_i32_b32, ff0_32), S(ff0_i32_b64, ff0_64), S(ff1_i32_b32, ff1_32),
    S(ff1_i32_b64, ff1_64), S(flbit_i32_b32, flbit_b32), S(flbit_i32_b64, flbit_b64),
    S(flbit_i32, flbit_i32), S(flbit_i32_i64, flbit_i64), S(sext_i32_i8, sext_i8),
    S(sext_i32_i16, sext_i16), S(abs_i32, abs_i32), S(bitset0_b32, bitset0_b32),
    S(bitset0_b64, bitset0_b64), S(bitset1_b32, bitset1_b32), S(bitset1_b64, bitset1_b64),
    S(bitreplicate_b64_b32, bitreplicate), COMPARE(gt_i32), COMPARE(ge_i32), COMPARE(lt_i32),
    COMPARE(le_i32), COMPARE(gt_u32), COMPARE(ge_u32), COMPARE(lt_u32), COMPARE(le_u32),
    COMPARE(eq_i32), COMPARE(lg_i32), S(cmp_eq_u32, eq_i32), S(cmp_lg_u32, lg_i32),
    S(cmpk_eq_u32, k_eq_i32), S(cmpk_lg_u32, k_lg_i32), S(bitcmp0_b32, bitcmp0_32),
    S(bitcmp1_b32, bitcmp1_32), S(bitcmp0_b64, bitcmp0_64), S(bitcmp1_b64, bitcmp1_64),
    S(cmp_eq_u64, eq_u64), S(cmp_lg_u64, lg_u64),
    {0},
};
