// DS instructions: the local data share of a workgroup, and exchanges between lanes that use its
// crossbar.
//
// Every LDS byte has a tag of its last writer and one of its readers, with the barrier interval
// (epoch) they belong to. Two accesses of different waves within one interval, one of them a write,
// are a race: nothing orders them. A byte with writer tag 0 was never written, and reading it makes
// the destination undefined.
#include "trace.h"
#include "atomics.h"
#include "floats.h"
#include "late.h"
#include "memory.h"
#include "phases.h"

static u16 tag_of(const Wave *w) { return (u16)(w->group->epoch << 5 | (u32)(w - w->group->wave)); }

static int race(Wave *w, const Inst *i, int lane, u32 byte, const char *what, u32 other) {
    if (other == SEVERAL)
        return violated(w, i, CHECK_RACES, lane, "LDS byte 0x%x: %s by several waves in the same "
                        "barrier interval", byte, what);
    return violated(w, i, CHECK_RACES, lane, "LDS byte 0x%x: %s by wave %u in the same barrier "
                    "interval", byte, what, other);
}

#define INLINE static inline __attribute__((always_inline))

INLINE int note_read(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, u32 *undefined) {
    Group *g = w->group;
    u16 mine = tag_of(w), never = 0, foreign = 0, current = (u16)(g->epoch << 5);
    u16 *wrote = g->wrote + at, *read = g->read + at;
    for (u32 b = 0; b < bytes; b++) {
        u16 t = wrote[b], r = read[b];
        never |= t == 0;
        foreign |= ((t ^ mine) & 0xffe0) == 0 && t != mine;
        read[b] = ((r ^ mine) & 0xffe0) == 0 && r != mine ? current | SEVERAL : mine;
    }
    *undefined |= never;
    if (foreign)
        for (u32 b = 0; b < bytes; b++)
            if (((wrote[b] ^ mine) & 0xffe0) == 0 && wrote[b] != mine &&
                race(w, i, lane, at + b, "read, and written", wrote[b] & 31)) return STOP;
    if (g->incoming_count && touch_incoming(w, i, lane, at, bytes, BY_READ)) return STOP;
    if (g->late_count && touch_late(w, i, lane, at, bytes, "read")) return STOP;
    return OK;
}

// Notes that `data` is about to be written; where it is undefined its bytes count as never written.
// Two waves that write the same value are no race: compilers let all waves store a replicated value.
INLINE int noted(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, int is_defined,
                 const u8 *data, enum Touch how) {
    Group *g = w->group;
    u16 mine = tag_of(w), by_write = 0, by_read = 0, stored = is_defined ? mine : 0;
    u16 *wrote = g->wrote + at, *read = g->read + at;
    const u8 *held = g->lds + at;
    for (u32 b = 0; b < bytes; b++) {
        u16 t = wrote[b], r = read[b];
        by_write |= ((t ^ mine) & 0xffe0) == 0 && t != mine && held[b] != data[b];
        by_read |= ((r ^ mine) & 0xffe0) == 0 && r != mine;
    }
    if (by_write | by_read)
        for (u32 b = 0; b < bytes; b++) {
            u16 t = by_read ? read[b] : wrote[b];
            if (((t ^ mine) & 0xffe0) == 0 && t != mine &&
                race(w, i, lane, at + b, by_read ? "written, and read" : "written, and written",
                     t & 31)) return STOP;
        }
    for (u32 b = 0; b < bytes; b++) wrote[b] = stored;
    if (g->incoming_count && touch_incoming(w, i, lane, at, bytes, how)) return STOP;
    if (g->late_count && touch_late(w, i, lane, at, bytes, "written")) return STOP;
    return OK;
}

int note_write(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, int is_defined, const u8 *data) {
    return noted(w, i, lane, at, bytes, is_defined, data, BY_LOAD);
}

static int outside(Wave *w, const Inst *i, int lane, u64 at, u32 bytes) {
    return violated(w, i, CHECK_MEMORY, lane,
                    "LDS access of %u bytes at 0x%llx, beyond the %u bytes of the workgroup", bytes,
                    (unsigned long long)at, w->group->lds_bytes);
}

// Modeled, not measured here: a phase (phases.h) takes as many clocks as the fullest bank has
// different dwords. `moved` is the sum of bytes that active lanes ask for.
static void count_banks(Wave *w, const Inst *i, const u32 *at, u32 bytes, int writes, u64 exec,
                        u64 *moved) {
    Thread *t = w->thread;
    *moved += (u64)__builtin_popcountll(exec) * bytes;
    Pattern *p = &t->patterns[i - w->launch->code];
    u32 first = exec ? at[__builtin_ctzll(exec)] : 0, same = 1;
    if (p->valid && p->exec == exec && p->phase == (first & 3)) {
        u32 differ = 0;
        EACH_LANE differ |= (at[l] - first) ^ p->delta[l];
        same = differ == 0;
    } else same = 0;
    if (!same) {
        Phases phases = phases_of(bytes, writes);
        u32 dwords = bytes < 4 ? 1 : bytes / 4, clocks = 0, ideal = 0;
        for (u32 start = 0; start < LANES; start += phases.together) {
            u32 seen[32][64], count[32] = {0}, fullest = 0, distinct = 0;
            for (u32 n = start; n < start + phases.together; n++) {
                u32 l = phases.lanes[n];
                if (!(exec >> l & 1)) continue;
                for (u32 d = 0; d < dwords; d++) {
                    u32 dword = at[l] / 4 + d, bank = dword & 31, k = 0;
                    while (k < count[bank] && seen[bank][k] != dword) k++;
                    if (k == count[bank] && k < 64) {
                        seen[bank][count[bank]++] = dword;
                        distinct++;
                        if (count[bank] > fullest) fullest = count[bank];
                    }
                }
            }
            clocks += fullest;
            ideal += (distinct + 31) / 32;
        }
        p->valid = 1; p->exec = exec; p->phase = first & 3;
        p->a = clocks; p->b = clocks - ideal;
        EACH_LANE p->delta[l] = at[l] - first;
    }
    t->totals.lds_clocks += p->a;
    t->totals.lds_conflict_clocks += p->b;
}

static int need_address(Wave *w, const Inst *i, u64 defined, u64 exec) {
    u64 bad = exec & ~defined;
    if (!bad) return OK;
    return violated(w, i, CHECK_UNDEFINED, __builtin_ctzll(bad), "the address is undefined");
}

// The lanes' LDS addresses, checked for bounds and alignment.
static int addresses(Wave *w, const Inst *i, u32 offset, u32 bytes, u32 align, u32 *at,
                     u64 *active) {
    u64 exec = exec_of(w);
    u32 row = i->src[0] - VGPR0;
    if (touch_rows(w, i, row, 1) || need_address(w, i, w->defined[row], exec)) return STOP;
    const u32 *base = w->v[row];
    u32 limit = w->group->lds_bytes, bad = 0, skewed = 0;
    EACH_LANE at[l] = base[l] + offset;
    EACH_LANE {
        u32 on = (u32)(exec >> l & 1);
        bad |= on & ((u64)at[l] + bytes > limit);
        skewed |= on & ((at[l] & (align - 1)) != 0);
    }
    if (bad) EACH_LANE
        if ((exec >> l & 1) && (u64)at[l] + bytes > limit) {
            if (outside(w, i, l, at[l], bytes)) return STOP;
            exec &= ~(1ull << l);  // counted only: the lane does nothing, as on the chip
        }
    *active = exec;
    if (w->group->trace) trace_lds(w->group->trace, at, bytes, exec);
    if (skewed) EACH_LANE
        if ((exec >> l & 1) && (at[l] & (align - 1)) &&
            violated(w, i, CHECK_ALIGNMENT, l, "LDS address 0x%x is not a multiple of %u", at[l],
                     align)) return STOP;
    return OK;
}

static u32 begin_load(Wave *w) { return (++w->lds_issued) << 1 | 1; }

// Loads and stores. ROCm runs gfx942 with unaligned LDS access on, so that only atomics need natural
// alignment; a dword or more still has to be a multiple of 4 to be one access, and is held to that.
INLINE int ds_read(Wave *w, const Inst *i, u32 bytes, u32 rows, int sign, int high, u32 offset,
                   u32 first_row) {
    u32 at[LANES], value[4][LANES];
    u64 exec, defined = ~0ull;
    Group *g = w->group;
    if (addresses(w, i, offset, bytes, bytes < 4 ? bytes : 4, at, &exec)) return STOP;
    count_banks(w, i, at, bytes, 0, exec, &w->thread->totals.lds_read_bytes);
    u32 to = i->dst - VGPR0 + first_row;
    if (touch_loaded(w, i, to, rows, 1)) return STOP;
    for (u32 r = 0; r < rows; r++) memcpy(value[r], w->v[to + r], sizeof value[r]);
    int tracked = checking(w, CHECK_RACES) || checking(w, CHECK_UNDEFINED) ||
                  g->incoming_count || g->late_count;
    EACH_LANE {
        if (!(exec >> l & 1)) continue;
        u32 undefined = 0;
        if (tracked && note_read(w, i, l, at[l], bytes, &undefined)) return STOP;
        if (undefined) {
            defined &= ~(1ull << l);
            w->undefined_pc = i->pc;
            w->undefined_where = at[l] | 0x80000000u;
        }
        const u8 *from = g->lds + at[l];
        if (bytes >= 4) {
            for (u32 r = 0; r < rows; r++) memcpy(&value[r][l], from + 4 * r, 4);
        } else {
            u32 x = from[0];
            if (bytes == 2) x |= (u32)from[1] << 8;
            if (sign) x = bytes == 1 ? (u32)(i32)(i8)x : (u32)(i32)(i16)x;
            if (high == 1) x = (value[0][l] & 0xffff0000) | (x & 0xffff);
            if (high == 2) x = (value[0][l] & 0xffff) | x << 16;
            value[0][l] = x;
        }
    }
    for (u32 r = 0; r < rows; r++) write_row(w, to + r, value[r], exec, defined);
    return OK;
}
INLINE int ds_write(Wave *w, const Inst *i, int source, u32 bytes, int high, u32 offset) {
    u32 at[LANES], rows = bytes < 4 ? 1 : bytes / 4;
    u64 exec, defined = ~0ull;
    Group *g = w->group;
    if (addresses(w, i, offset, bytes, bytes < 4 ? bytes : 4, at, &exec)) return STOP;
    count_banks(w, i, at, bytes, 1, exec, &w->thread->totals.lds_write_bytes);
    u32 row = i->src[source] - VGPR0;
    if (touch_rows(w, i, row, rows)) return STOP;
    for (u32 r = 0; r < rows; r++) defined &= w->defined[row + r];
    int tracked = checking(w, CHECK_RACES) || checking(w, CHECK_UNDEFINED) ||
                  g->incoming_count || g->late_count;
    EACH_LANE {
        if (!(exec >> l & 1)) continue;
        u32 data[4];
        for (u32 r = 0; r < rows; r++) data[r] = w->v[row + r][l];
        if (high) data[0] >>= 16;
        if (tracked && noted(w, i, l, at[l], bytes, defined >> l & 1, (const u8 *)data,
                             BY_WRITE))
            return STOP;
        memcpy(g->lds + at[l], data, bytes);
    }
    lds_written(w, at, bytes, exec);
    return OK;
}
static void mark(Wave *w, const Inst *i, u32 rows) {
    u32 tag = begin_load(w), to = i->dst - VGPR0;
    for (u32 r = to; r < to + rows; r++) w->pending[r] = tag;
}
#define READ(name, bytes, rows, sign, high)                                                       \
    static int name(Wave *w, const Inst *i) {                                                     \
        if (ds_read(w, i, bytes, rows, sign, high, (u32)i->imm, 0)) return STOP;                  \
        mark(w, i, rows);                                                                         \
        return OK;                                                                                \
    }
// Two accesses with offsets in units of the element, or of 64 elements.
#define READ2(name, bytes, unit)                                                                  \
    static int name(Wave *w, const Inst *i) {                                                     \
        u32 rows = (bytes) / 4, row = i->src[0] - VGPR0, to = i->dst - VGPR0, keep[LANES];        \
        u64 known = w->defined[row];                                                              \
        memcpy(keep, w->v[row], sizeof keep);                                                     \
        if (ds_read(w, i, bytes, rows, 0, 0, ((u32)i->imm & 255) * (unit), 0)) return STOP;       \
        if (row >= to && row < to + rows) {                                                       \
            u32 now[LANES]; u64 d = w->defined[row];                                              \
            memcpy(now, w->v[row], sizeof now);                                                   \
            memcpy(w->v[row], keep, sizeof keep); w->defined[row] = known;                        \
            if (ds_read(w, i, bytes, rows, 0, 0, i->extra * (unit), rows)) return STOP;           \
            memcpy(w->v[row], now, sizeof now); w->defined[row] = d;                              \
        } else if (ds_read(w, i, bytes, rows, 0, 0, i->extra * (unit), rows)) return STOP;        \
        mark(w, i, 2 * rows);                                                                     \
        return OK;                                                                                \
    }
#define WRITE(name, bytes, high)                                                                  \
    static int name(Wave *w, const Inst *i) {                                                     \
        if (ds_write(w, i, 1, bytes, high, (u32)i->imm)) return STOP;                             \
        begin_load(w);                                                                            \
        return OK;                                                                                \
    }
#define WRITE2(name, bytes, unit)                                                                 \
    static int name(Wave *w, const Inst *i) {                                                     \
        if (ds_write(w, i, 1, bytes, 0, ((u32)i->imm & 255) * (unit)) ||                          \
            ds_write(w, i, 2, bytes, 0, i->extra * (unit))) return STOP;                          \
        begin_load(w);                                                                            \
        return OK;                                                                                \
    }
READ(read_b32, 4, 1, 0, 0)
READ(read_b64, 8, 2, 0, 0)
READ(read_b96, 12, 3, 0, 0)
READ(read_b128, 16, 4, 0, 0)
READ(read_i8, 1, 1, 1, 0)
READ(read_u8, 1, 1, 0, 0)
READ(read_i16, 2, 1, 1, 0)
READ(read_u16, 2, 1, 0, 0)
READ(read_u8_d16, 1, 1, 0, 1)
READ(read_u8_d16_hi, 1, 1, 0, 2)
READ(read_i8_d16, 1, 1, 1, 1)
READ(read_i8_d16_hi, 1, 1, 1, 2)
READ(read_u16_d16, 2, 1, 0, 1)
READ(read_u16_d16_hi, 2, 1, 0, 2)
READ2(read2_b32, 4, 4)
READ2(read2st64_b32, 4, 256)
READ2(read2_b64, 8, 8)
READ2(read2st64_b64, 8, 512)
WRITE(write_b8, 1, 0)
WRITE(write_b16, 2, 0)
WRITE(write_b8_d16_hi, 1, 1)
WRITE(write_b16_d16_hi, 2, 1)
WRITE(write_b32, 4, 0)
WRITE(write_b64, 8, 0)
WRITE(write_b96, 12, 0)
WRITE(write_b128, 16, 0)
WRITE2(write2_b32, 4, 4)
WRITE2(write2st64_b32, 4, 256)
WRITE2(write2_b64, 8, 8)
WRITE2(write2st64_b64, 8, 512)

// Atomics: lanes in rising order. Their reads and writes do not race with other waves' atomics, so
// that they only mark their bytes as written in an earlier era.
static int ds_atomic(Wave *w, const Inst *i, u32 kind, u32 bytes, int returns, int compares) {
    u32 at[LANES], rows = bytes / 4, value[2 * LANES];
    u64 exec, defined = ~0ull;
    Group *g = w->group;
    if (addresses(w, i, (u32)i->imm, bytes, bytes, at, &exec)) return STOP;
    count_banks(w, i, at, bytes, 1, exec, &w->thread->totals.lds_write_bytes);
    // DS compare-and-swap takes the comparand first and the new value second.
    u32 data = i->src[compares ? 2 : 1] - VGPR0, compare = i->src[1] - VGPR0;
    if (touch_rows(w, i, data, rows) || touch_rows(w, i, compare, rows)) return STOP;
    for (u32 r = 0; r < rows; r++) defined &= w->defined[data + r] & w->defined[compare + r];
    EACH_LANE {
        if (!(exec >> l & 1)) continue;
        if (g->late_count && touch_late(w, i, l, at[l], bytes, "updated")) return STOP;
        u64 old = 0, x = w->v[data][l], y = w->v[compare][l];
        if (rows == 2) { x |= (u64)w->v[data + 1][l] << 32; y |= (u64)w->v[compare + 1][l] << 32; }
        memcpy(&old, g->lds + at[l], bytes);
        u64 known = defined >> l & 1;
        for (u32 b = 0; b < bytes; b++) known &= g->wrote[at[l] + b] != 0;
        u64 now = lds_atomic_update(w->mode, kind, old, x, y);
        memcpy(g->lds + at[l], &now, bytes);
        for (u32 b = 0; b < bytes; b++) g->wrote[at[l] + b] = known ? OLD : 0;
        defined = (defined & ~(1ull << l)) | known << l;
        value[l] = (u32)old;
        value[l + LANES] = (u32)(old >> 32);
    }
    lds_written(w, at, bytes, exec);
    if (returns) {
        u32 to = i->dst - VGPR0;
        if (touch_loaded(w, i, to, rows, 1)) return STOP;
        for (u32 r = 0; r < rows; r++) write_row(w, to + r, value + r * LANES, exec, defined);
        mark(w, i, rows);
    } else begin_load(w);
    return OK;
}

// ds_permute and ds_bpermute use the crossbar only: no memory.
static int permute(Wave *w, const Inst *i, int backward) {
    u32 a = i->src[0] - VGPR0, b = i->src[1] - VGPR0, value[LANES] = {0};
    u64 exec = exec_of(w), defined = ~0ull;
    if (touch_rows(w, i, a, 1) || touch_rows(w, i, b, 1) ||
        need_address(w, i, w->defined[a], exec)) return STOP;
    EACH_LANE {
        if (!(exec >> l & 1)) continue;
        u32 other = (w->v[a][l] + (u32)i->imm) >> 2 & 63;
        if (backward) {  // a lane that is off gives 0
            int on = exec >> other & 1;
            value[l] = on ? w->v[b][other] : 0;
            if (on && !(w->defined[b] >> other & 1)) defined &= ~(1ull << l);
        } else {
            value[other] = w->v[b][l];
            if (!(w->defined[b] >> l & 1)) defined &= ~(1ull << other);
        }
    }
    u32 to = i->dst - VGPR0;
    if (touch_loaded(w, i, to, 1, 1)) return STOP;
    write_row(w, to, value, exec, defined);
    mark(w, i, 1);
    return OK;
}
static int ds_permute(Wave *w, const Inst *i) { return permute(w, i, 0); }
static int ds_bpermute(Wave *w, const Inst *i) { return permute(w, i, 1); }
static int swizzle(Wave *w, const Inst *i) {
    u32 row = i->src[0] - VGPR0, value[LANES], mode = (u32)i->imm;
    u64 exec = exec_of(w), defined = ~0ull;
    if (touch_rows(w, i, row, 1)) return STOP;
    EACH_LANE {
        u32 other;
        if (mode >= 0xe000) return fail(w, i, ERROR_UNSUPPORTED, l, "FFT swizzle");
        if (mode >= 0xc000) {  // rotate within 32: bit 10 the direction, bits 9:5 the amount
            u32 n = mode >> 5 & 31, keep = mode & 31, k = mode >> 10 & 1 ? (u32)l - n : (u32)l + n;
            other = ((u32)l & 32) | (((u32)l & keep) | (k & ~keep)) % 32;
        } else if (mode & 0x8000) other = ((u32)l & ~3u) | (mode >> 2 * (l & 3) & 3);
        else other = ((u32)l & 32) |
                     (((((u32)l & 31) & (mode & 31)) | (mode >> 5 & 31)) ^ (mode >> 10 & 31));
        int on = exec >> other & 1;
        value[l] = on ? w->v[row][other] : 0;
        if (on && !(w->defined[row] >> other & 1)) defined &= ~(1ull << l);
    }
    u32 to = i->dst - VGPR0;
    if (touch_loaded(w, i, to, 1, 1)) return STOP;
    write_row(w, to, value, exec, defined);
    mark(w, i, 1);
    return OK;
}
static int ds_nop(Wave *w, const Inst *i) { (void)i; begin_load(w); return OK; }

#define DS_ATOMIC(name, kind, bytes, compares)                                                    \
    static int name(Wave *w, const Inst *i) { return ds_atomic(w, i, kind, bytes, 0, compares); } \
    static int name##_r(Wave *w, const Inst *i) { return ds_atomic(w, i, kind, bytes, 1, compares); }
#define DS_ATOMICS(X)                                                                             \
    X(add, u32, A_ADD32, 4) X(sub, u32, A_SUB32, 4) X(inc, u32, A_INC32, 4) X(dec, u32, A_DEC32, 4) \
    X(min, i32, A_SMIN32, 4) X(max, i32, A_SMAX32, 4) X(min, u32, A_UMIN32, 4)                     \
    X(max, u32, A_UMAX32, 4) X(and, b32, A_AND, 4) X(or, b32, A_OR, 4) X(xor, b32, A_XOR, 4)       \
    X(add, f32, A_ADDF32, 4) X(min, f32, A_MINF32, 4) X(max, f32, A_MAXF32, 4)                     \
    X(add, u64, A_ADD64, 8) X(sub, u64, A_SUB64, 8) X(min, i64, A_SMIN64, 8)                       \
    X(max, i64, A_SMAX64, 8) X(min, u64, A_UMIN64, 8) X(max, u64, A_UMAX64, 8) X(and, b64, A_AND, 8)\
    X(or, b64, A_OR, 8) X(xor, b64, A_XOR, 8) X(add, f64, A_ADDF64, 8) X(pk_add, f16, A_PKF16, 4)  \
    X(pk_add, bf16, A_PKBF16, 4)
#define DEFINE(op, type, kind, bytes) DS_ATOMIC(at_##op##_##type, kind, bytes, 0)
DS_ATOMICS(DEFINE)
static int at_swap32_r(Wave *w, const Inst *i) { return ds_atomic(w, i, A_SWAP, 4, 1, 0); }
static int at_swap64_r(Wave *w, const Inst *i) { return ds_atomic(w, i, A_SWAP, 8, 1, 0); }
DS_ATOMIC(at_cmp32, A_CMPSWAP32, 4, 1)
DS_ATOMIC(at_cmp64, A_CMPSWAP64, 8, 1)

#define D(n, f) {"ds_" #n, KIND_SPECIAL, LDS, NONE, {NONE, NONE, NONE}, f, 0}
#define D1(n) D(n, n)
#define LIST(op, type, kind, bytes) D(op##_##type, at_##op##_##type), D(op##_rtn_##type, at_##op##_##type##_r),
const Op lds_ops[] = {
    D1(read_b32), D1(read_b64), D1(read_b96), D1(read_b128), D1(read_i8), D1(read_u8),
    D1(read_i16), D1(read_u16), D1(read_u8_d16), D1(read_u8_d16_hi), D1(read_i8_d16),
    D1(read_i8_d16_hi), D1(read_u16_d16), D1(read_u16_d16_hi), D1(read2_b32), D1(read2st64_b32),
    D1(read2_b64), D1(read2st64_b64), D1(write_b8), D1(write_b16), D1(write_b8_d16_hi),
    D1(write_b16_d16_hi), D1(write_b32), D1(write_b64), D1(write_b96), D1(write_b128),
    D1(write2_b32), D1(write2st64_b32), D1(write2_b64), D1(write2st64_b64),
    D(permute_b32, ds_permute), D(bpermute_b32, ds_bpermute), D(swizzle_b32, swizzle), D(nop, ds_nop),
    DS_ATOMICS(LIST) D(wrxchg_rtn_b32, at_swap32_r), D(wrxchg_rtn_b64, at_swap64_r),
    D(cmpst_b32, at_cmp32), D(cmpst_rtn_b32, at_cmp32_r), D(cmpst_b64, at_cmp64),
    D(cmpst_rtn_b64, at_cmp64_r), {0},
};
