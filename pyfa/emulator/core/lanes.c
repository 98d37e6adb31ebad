// How a vector instruction reads its operands, runs over 64 lanes and writes its result: modifiers,
// DPP, SDWA, operand halves, clamping, EXEC and the tracking of undefined lanes.
#include "floats.h"

const u8 type_rows[] = {
    [NONE] = 0, [B32] = 1, [F32] = 1, [F16] = 1, [B16] = 1, [F64] = 2, [B64] = 2, [PK16] = 1,
    [PKF16] = 1, [PKF32] = 2, [PKB32] = 2, [MIX] = 1, [HALF_F16] = 1, [HALF_B16] = 1};

void write_row(Wave *w, u32 row, const u32 *value, u64 lanes, u64 defined) {
    u32 *d = w->v[row];
    if (lanes == ~0ull) {
        memcpy(d, value, 4 * LANES);
    } else {
        u32 low = (u32)lanes, high = (u32)(lanes >> 32);
        for (u32 l = 0; l < 32; l++) d[l] = low >> l & 1 ? value[l] : d[l];
        for (u32 l = 0; l < 32; l++) d[l + 32] = high >> l & 1 ? value[l + 32] : d[l + 32];
    }
    w->defined[row] = (w->defined[row] & ~lanes) | (defined & lanes);
}

// The lane that lane l reads under a DPP control (ISA: "DPP"); -1 where there is none.
static int dpp_source(u32 control, int l) {
    int row = l & 48, in = l & 15, n = control & 15;
    if (control < 0x100) return (l & ~3) | (control >> 2 * (l & 3) & 3);
    switch (control & 0x1f0) {
    case 0x100: return in + n < 16 ? l + n : -1;         // row_shl
    case 0x110: return in - n >= 0 ? l - n : -1;         // row_shr
    case 0x120: return row | ((in - n) & 15);            // row_ror
    case 0x130:
        if (n == 0) return l < 63 ? l + 1 : -1;          // wave_shl:1
        if (n == 4) return (l + 1) & 63;                 // wave_rol:1
        if (n == 8) return l - 1;                        // wave_shr:1, -1 for lane 0
        return (l - 1) & 63;                             // wave_ror:1
    case 0x140:
        if (n == 0) return row | (15 - in);              // row_mirror
        if (n == 1) return (l & ~7) | (7 - (l & 7));     // row_half_mirror
        if (n == 2) return row ? row - 1 : -1;           // row_bcast:15
        return l >= 32 ? 31 : -1;                        // row_bcast:31
    default: return row | n;                             // row_newbcast
    }
}

// Lanes that DPP's masks and missing sources leave unwritten.
static u64 dpp_lanes(const Wave *w, const Inst *i) {
    u32 x = i->extra, control = x >> 8 & 0x1ff, bound = x >> 19 & 1;
    u64 exec = exec_of(w), lanes = 0;
    EACH_LANE {
        int source = dpp_source(control, l);
        int valid = bound || (source >= 0 && (exec >> source & 1));
        lanes |= (u64)(valid && (x >> (28 + l / 16) & 1) && (x >> (24 + l / 4 % 4) & 1)) << l;
    }
    return lanes;
}

static void apply_dpp(const Wave *w, const Inst *i, const u32 *from, u32 *to, u64 *defined) {
    u32 control = i->extra >> 8 & 0x1ff;
    u64 exec = exec_of(w), d = 0;
    EACH_LANE {
        int source = dpp_source(control, l);
        int valid = source >= 0 && (exec >> source & 1);
        to[l] = valid ? from[source] : 0;
        d |= (valid ? *defined >> source & 1 : 1) << l;
    }
    *defined = d;
}

static void apply_sdwa(const Inst *i, int n, const u32 *from, u32 *to) {
    u32 x = i->extra, select = n ? x >> 24 & 7 : x >> 16 & 7, sign = n ? x >> 27 & 1 : x >> 19 & 1;
    u32 shift = select < 4 ? 8 * select : select < 6 ? 16 * (select - 4) : 0;
    u32 width = select < 4 ? 8 : select < 6 ? 16 : 32, unused = 32 - width;
    EACH_LANE {
        u32 v = from[l] >> shift << unused;
        to[l] = sign ? (u32)((i32)v >> unused) : v >> unused;
    }
}

static void flush_denormals(const u32 *from, u32 *to) {
    EACH_LANE to[l] = (from[l] & 0x7f800000) ? from[l] : from[l] & 0x80000000;
}

const u32 *fetch(Wave *w, const Inst *i, int n, enum Type type, u32 *buffer, u64 *defined) {
    u32 code = i->src[n], rows = type_rows[type];
    const u32 *p;
    if (code >= VGPR0) {
        u32 row = code - VGPR0;
        if (touch_rows(w, i, row, rows)) return 0;
        *defined = w->defined[row];
        if (rows == 2) *defined &= w->defined[row + 1];
        p = w->v[row];
    } else {
        u32 whole = scalar_defined(w, code);
        if (code < 128) {
            if (touch_scalars(w, i, code, rows)) return 0;
            if (rows == 2) whole &= w->s_defined[code + 1];
        }
        *defined = whole == ~0u ? ~0ull : 0;
        enum Type as = type == MIX ? (i->opsel_hi >> n & 1 ? F16 : F32) : type;
        for (u32 half = 0; half < rows; half++) {
            u32 v = scalar_value(w, i, code, (int)half, as);
            EACH_LANE buffer[half * LANES + l] = v;
        }
        p = buffer;
    }
    if (i->simple) return p;
    if (i->mode == 1 && n == 0) {
        u64 d = *defined, whole = ~0ull;
        u32 moved[2 * LANES];
        for (u32 r = 0; r < rows; r++) {
            u64 e = d;
            apply_dpp(w, i, p + r * LANES, moved + r * LANES, &e);
            whole &= e;
        }
        *defined = whole;
        memcpy(buffer, moved, 4 * LANES * rows);
        p = buffer;
    }
    if (i->mode == 2 && n < 2) { apply_sdwa(i, n, p, buffer); p = buffer; }
    u32 neg = i->neg >> n & 1, abs = i->abs >> n & 1, high = i->opsel >> n & 1;
    switch (type) {
    case F32:
        if (!(w->mode & 0x10)) { flush_denormals(p, buffer); p = buffer; }
        if (neg | abs) {
            u32 keep = abs ? 0x7fffffff : ~0u, flip = neg << 31;
            EACH_LANE buffer[l] = (p[l] & keep) ^ flip;
            p = buffer;
        }
        break;
    case F16: case B16:
        if (neg | abs | high) {
            u32 keep = abs && type == F16 ? 0x7fff : 0xffff, flip = type == F16 ? neg << 15 : 0;
            EACH_LANE buffer[l] = ((p[l] >> (high ? 16 : 0)) & keep) ^ flip;
            p = buffer;
        }
        break;
    case F64:
        if (neg | abs) {
            u32 keep = abs ? 0x7fffffff : ~0u, flip = neg << 31;
            EACH_LANE { u32 lo = p[l], hi = p[l + LANES]; buffer[l] = lo;
                        buffer[l + LANES] = (hi & keep) ^ flip; }
            p = buffer;
        }
        break;
    case PK16: case PKF16: {
        u32 second = i->opsel_hi >> n & 1, flip = 0;
        if (type == PKF16) flip = neg << 15 | (u32)(i->neg_hi >> n & 1) << 31;
        EACH_LANE {
            u32 x = p[l], lo = high ? x >> 16 : x & 0xffff, hi = second ? x >> 16 : x & 0xffff;
            buffer[l] = (lo | hi << 16) ^ flip;
        }
        p = buffer;
        break;
    }
    case PKF32: case PKB32: {
        u32 second = i->opsel_hi >> n & 1, flip_lo = neg << 31,
            flip_hi = (u32)(i->neg_hi >> n & 1) << 31;
        u32 result[2 * LANES];
        EACH_LANE {
            result[l] = p[l + (high ? LANES : 0)] ^ flip_lo;
            result[l + LANES] = p[l + (second ? LANES : 0)] ^ flip_hi;
        }
        memcpy(buffer, result, sizeof result);
        p = buffer;
        if (type == PKF32 && !(w->mode & 0x10)) {
            flush_denormals(p, buffer); flush_denormals(p + LANES, buffer + LANES);
        }
        break;
    }
    default: break;  // MIX operands are converted by their operations
    }
    return p;
}

static u32 clamp_f32(u32 x) {
    float f = as_float(x);
    return f >= 1.0f ? 0x3f800000u : f > 0.0f ? x : 0;  // NaN becomes 0 (DX10_CLAMP)
}
static u32 clamp_f16(u32 x) {
    return x & 0x8000 || (x & 0x7fff) > 0x7c00 ? 0 : x > 0x3c00 ? 0x3c00 : x;
}

static int finish(Wave *w, const Inst *i, enum Type type, u32 *value) {
    if (type == F32 || type == PKF32) {
        u32 count = LANES * type_rows[type];
        static const float factor[] = {1.0f, 2.0f, 4.0f, 0.5f};
        if (i->omod)
            for (u32 l = 0; l < count; l++) value[l] = as_bits(as_float(value[l]) * factor[i->omod]);
        if (!(w->mode & 0x20) || i->omod) {
            flush_denormals(value, value);
            if (type == PKF32) flush_denormals(value + LANES, value + LANES);
        }
        if (i->clamp) for (u32 l = 0; l < count; l++) value[l] = clamp_f32(value[l]);
        return OK;
    }
    if (i->clamp) {
        if (type == F16 || type == HALF_F16) {
            EACH_LANE value[l] = clamp_f16(value[l] & 0xffff);
        } else if (type == PKF16) {
            EACH_LANE value[l] = clamp_f16(value[l] & 0xffff) | clamp_f16(value[l] >> 16) << 16;
        } else if (type == F64) {
            EACH_LANE {
                double f = as_double(value[l] | (u64)value[l + LANES] << 32);
                u64 r = as_bits64(f >= 1.0 ? 1.0 : f > 0.0 ? f : 0.0);
                value[l] = (u32)r; value[l + LANES] = (u32)(r >> 32);
            }
        } else return fail(w, i, ERROR_UNSUPPORTED, -1, "clamp on this operation");
    }
    if (i->omod) return fail(w, i, ERROR_UNSUPPORTED, -1, "output modifier on this operation");
    return OK;
}

// The lanes whose low dword of 64-bit source n is defined; `both` are those with both defined.
// Compilers leave the upper dword of an addend undefined where only the low sum is used.
u64 low_defined(const Wave *w, const Inst *i, int n, u64 both) {
    u32 code = i->src[n];
    if (both == ~0ull || i->mode) return both;
    if (code >= VGPR0) return w->defined[code - VGPR0];
    return scalar_defined(w, code) == ~0u ? ~0ull : 0;
}

// The lanes whose dword of the pair n that feeds the low or high result is defined. Compilers give
// one register twice (op_sel_hi 0) and leave its neighbor unwritten.
static u64 half_defined(const Wave *w, const Inst *i, int n, u32 high, u64 both) {
    if (both == ~0ull) return both;
    u32 code = i->src[n] + ((high ? i->opsel_hi : i->opsel) >> n & 1);
    if (code >= VGPR0) return w->defined[code - VGPR0];
    return i->src[n] >= 128 || scalar_defined(w, code) == ~0u ? ~0ull : 0;
}

// Writes a result under EXEC and the lanes that DPP leaves.
int store_pair(Wave *w, const Inst *i, enum Type type, u32 *value, u64 low, u64 high) {
    u32 row = i->dst - VGPR0, rows = type_rows[type];
    u64 lanes = exec_of(w);
    if (touch_rows(w, i, row, rows)) return STOP;
    if (!i->simple && finish(w, i, type, value)) return STOP;
    if (type == HALF_F16 || type == HALF_B16) {
        const u32 *old = w->v[row];
        if (i->opsel & 8) EACH_LANE value[l] = (old[l] & 0xffff) | value[l] << 16;
        else EACH_LANE value[l] = (old[l] & 0xffff0000) | (value[l] & 0xffff);
    }
    if (i->mode == 1) lanes &= dpp_lanes(w, i);
    if (i->mode == 2) {
        u32 select = i->extra >> 8 & 7, unused = i->extra >> 11 & 3;
        u32 shift = select < 4 ? 8 * select : select < 6 ? 16 * (select - 4) : 0;
        u32 mask = select < 4 ? 0xffu << shift : select < 6 ? 0xffffu << shift : ~0u;
        const u32 *old = w->v[row];
        EACH_LANE {
            u32 v = value[l] << shift & mask;
            if (unused == 2) v |= old[l] & ~mask;
            else if (unused == 1 && select < 6) {
                u32 above = select < 4 ? 24 : 16;
                v = (u32)((i32)(value[l] << above) >> above) << shift;
            }
            value[l] = v;
        }
    }
    for (u32 r = 0; r < rows; r++)
        write_row(w, row + r, value + r * LANES, lanes, r ? high : low);
    return OK;
}

int store_lanes(Wave *w, const Inst *i, enum Type type, u32 *value, u64 defined) {
    return store_pair(w, i, type, value, defined, defined);
}

int run_lanes(Wave *w, const Inst *i) {
    const Op *op = op_table[i->op];
    u32 buffers[3][2 * LANES] __attribute__((aligned(64)));
    u32 value[2 * LANES] __attribute__((aligned(64)));
    const u32 *p[3] = {0, 0, 0};
    u64 defined = ~0ull, low = ~0ull, high = ~0ull, d;
    for (int n = 0; n < 3 && op->sources[n]; n++) {
        enum Type source = op->sources[n];
        p[n] = fetch(w, i, n, source, buffers[n], &d);
        if (!p[n]) return STOP;
        defined &= d;
        if (source == PKF32) {
            low &= half_defined(w, i, n, 0, d);
            high &= half_defined(w, i, n, 1, d);
        } else if (source == PKB32) {  // v_pk_mov_b32: each source gives one dword
            *(n ? &high : &low) &= half_defined(w, i, n, 0, d);
        } else {
            low &= source == B64 ? low_defined(w, i, n, d) : d;
            high &= d;
        }
    }
    i->lanes(value, p[0], p[1], p[2]);
    if (op->sources[0] == PKF32 || op->sources[0] == PKB32)
        return store_pair(w, i, op->type, value, low, high);
    return store_pair(w, i, op->type, value, op->kind == KIND_LOW ? low : defined, defined);
}

// A comparison's lanes are all ones or zero in `value`; inactive lanes give 0.
static u64 mask_of(const u32 *value) {
    u64 m = 0;
    for (int l = 0; l < LANES; l += 8) {
        u32 b = 0;
        for (int k = 0; k < 8; k++) b |= value[l + k] & 1u << k;
        m |= (u64)b << l;
    }
    return m;
}

int run_compare(Wave *w, const Inst *i) {
    const Op *op = op_table[i->op];
    u32 buffers[2][2 * LANES] __attribute__((aligned(64)));
    u32 value[LANES] __attribute__((aligned(64)));
    u64 d0, d1, exec = exec_of(w);
    const u32 *a = fetch(w, i, 0, op->sources[0], buffers[0], &d0);
    const u32 *b = a ? fetch(w, i, 1, op->sources[1], buffers[1], &d1) : 0;
    if (!b) return STOP;
    i->lanes(value, a, b, 0);
    u64 mask = mask_of(value) & exec, defined = (d0 & d1) | ~exec;
    u32 to = i->sdst;
    if (touch_scalars(w, i, to, 2)) return STOP;
    memcpy(&w->s[to], &mask, 8);
    memcpy(&w->s_defined[to], &defined, 8);
    if (i->to_exec) {  // v_cmpx
        memcpy(&w->s[EXEC], &mask, 8);
        if (defined != ~0ull)
            return violated(w, i, CHECK_UNDEFINED, -1, "EXEC is set from undefined lanes");
    }
    return OK;
}

// From `value` to the number at the other side of the exact one.
static u32 beyond_exact(const Op *op, u32 x, u32 value) {
    double from = op->type == F16 ? from_f16(x) : as_float(x);
    double found = fabs(op->type == F16 ? from_f16(value) : as_float(value));
    double exact = fabs(op->exact(from));
    return exact > found ? 1 : exact < found ? ~0u : 0;
}

// The chip's v_exp, v_log, v_rcp, v_rsq, v_sqrt, v_sin and v_cos are accurate to one unit in the
// last place; AMD publishes no more about them. With a rounding seed, a result is either of the two
// numbers around the exact value, depending on its operand alone, as on a chip. A unit away from the
// nearest number could be 1.5 units from the exact value, and with such a v_rcp the compiler's
// divisions of integers are far off. In f64, where AMD promises less, a result is one unit up, one
// unit down or unchanged. Powers of two, zeros, infinities and NaN stay; so do denormals.
static __attribute__((noinline)) void vary(const Op *op, u64 rounding, const u32 *x, u32 *value) {
    enum Type type = op->type;
    u32 infinite = type == F16 ? 0x7c00 : type == F64 ? 0x7ff00000 : 0x7f800000;
    u32 one = infinite & (0u - infinite), wide = type == F64;  // the exponent's lowest bit
    EACH_LANE {
        u32 top = value[l + (wide ? LANES : 0)], exponent = top & infinite, low = value[l];
        u32 mantissa = wide ? low : low & (one - 1), last = wide ? ~0u : one - 1;
        u32 h = (x[l] ^ (wide ? x[l + LANES] : 0) ^ (u32)rounding ^ (u32)(rounding >> 32)) * 0x9e3779b1u;
        h = (h ^ h >> 15) * 0x85ebca6bu;
        int fixed = !exponent || exponent == infinite || !mantissa || mantissa == last;
        if (fixed) continue;
        if (op->exact) value[l] += h >> 31 ? beyond_exact(op, x[l], low) : 0;
        else value[l] += h >> 30 == 1 ? 1 : h >> 30 == 2 ? ~0u : 0;
    }
}

// Separate from run_lanes, which must be fast.
static __attribute__((noinline, cold)) int run_varied(Wave *w, const Inst *i) {
    const Op *op = op_table[i->op];
    u32 buffer[2 * LANES], value[2 * LANES];
    u64 defined;
    const u32 *x = fetch(w, i, 0, op->sources[0], buffer, &defined);
    if (!x) return STOP;
    i->lanes(value, x, 0, 0);
    vary(op, w->launch->rounding, x, value);
    return store_pair(w, i, op->type, value, defined, defined);
}
int run_transcendental(Wave *w, const Inst *i) {
    return __builtin_expect(w->launch->rounding != 0, 0) ? run_varied(w, i) : run_lanes(w, i);
}
