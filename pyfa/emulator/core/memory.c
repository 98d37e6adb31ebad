// Global, flat, scratch, buffer and scalar memory instructions.
//
// Memory is a sorted list of regions, each a range of 64-bit device addresses backed by host memory.
// A byte outside every region is an error, so that the bounds of a tensor are exact. Data is moved
// when the instruction issues; its registers are marked until an s_waitcnt covers it. Overwriting
// the registers of an issued store is no fault here: since GCN3 they are read at issue, and the
// compiler's short hazard (one wait state after stores of over 64 bits) is not modeled.
#include "memory.h"
#include "atomics.h"
#include "late.h"
#include "trace.h"

u8 *host_of(Wave *w, u64 address, u32 bytes, int writing) {
    const Launch *c = w->launch;
    const Region *r = &c->regions[w->region_hint];
    if (address - r->base > r->size || r->size - (address - r->base) < bytes) {
        u32 low = 0, high = c->region_count;
        while (low + 1 < high) {
            u32 middle = (low + high) / 2;
            if (c->regions[middle].base <= address) low = middle; else high = middle;
        }
        r = &c->regions[low];
        if (address < r->base || address - r->base > r->size ||
            r->size - (address - r->base) < bytes) return 0;
        w->region_hint = low;
    }
    return writing && !r->writable ? 0 : r->host + (address - r->base);
}

int outside_memory(Wave *w, const Inst *i, int lane, u64 address, u32 bytes, const char *what) {
    const Launch *c = w->launch;
    u64 best = ~0ull;
    u32 nearest = ~0u;
    for (u32 n = 0; n < c->region_count; n++) {
        const Region *r = &c->regions[n];
        u64 end = r->base + r->size;
        u64 gap = address < r->base ? r->base - address : address + bytes > end ? address + bytes - end
                                                                               : 0;
        if (gap < best) { best = gap; nearest = n; }
    }
    if (nearest == ~0u)
        return violated(w, i, CHECK_MEMORY, lane, "%s of %u bytes at 0x%llx: no memory is mapped",
                        what, bytes, (unsigned long long)address);
    const Region *r = &c->regions[nearest];
    return violated(w, i, CHECK_MEMORY, lane,
                    "%s of %u bytes at 0x%llx is outside every tensor%s; nearest region %u: offset "
                    "%lld of %llu bytes",
                    what, bytes, (unsigned long long)address, best ? "" : " (read-only memory)",
                    r->id, (long long)(address - r->base), (unsigned long long)r->size);
}

// Requested bytes, and the 64- and 128-byte segments that one instruction's lanes touch.
void count_segments(Wave *w, const Inst *i, const u64 *at, u32 bytes, u64 active, int store) {
    Totals *t = &w->thread->totals;
    if (w->group->trace) trace_memory(w->group->trace, at, bytes, active);
    u64 requested = (u64)__builtin_popcountll(active) * bytes;
    *(store ? &t->store_bytes : &t->load_bytes) += requested;
    if (!active) return;
    Pattern *p = &w->thread->patterns[i - w->launch->code];
    u64 first = at[__builtin_ctzll(active)], wide = 0;
    u32 delta[LANES], differ = 0;
    EACH_LANE {
        u64 distance = active >> l & 1 ? at[l] - first : 0;
        wide |= (distance + 0x80000000u) >> 32;
        delta[l] = (u32)distance;
    }
    EACH_LANE differ |= delta[l] ^ p->delta[l];
    if (!p->valid || p->exec != active || p->phase != (first & 127) || differ || wide) {
        u64 seen[2][256];
        u32 count[2] = {0, 0};
        u8 used[2][256] = {{0}};
        EACH_LANE {
            if (!(active >> l & 1)) continue;
            for (int k = 0; k < 2; k++)
                for (u64 s = at[l] >> (6 + k); s <= (at[l] + bytes - 1) >> (6 + k); s++) {
                    u32 slot = (u32)(s * 0x9e3779b1u) >> 24;
                    while (used[k][slot] && seen[k][slot] != s) slot = (slot + 1) & 255;
                    if (!used[k][slot]) { used[k][slot] = 1; seen[k][slot] = s; count[k]++; }
                }
        }
        p->valid = !wide; p->exec = active; p->phase = first & 127;
        p->a = count[0]; p->b = count[1];
        memcpy(p->delta, delta, sizeof delta);
    }
    t->segments64 += p->a;
    t->segments128 += p->b;
}

int need_defined(Wave *w, const Inst *i, u64 lanes, u64 defined, const char *what) {
    u64 bad = lanes & ~defined;
    if (!bad) return OK;
    if (w->undefined_where)
        return violated(w, i, CHECK_UNDEFINED, __builtin_ctzll(bad), "%s is undefined; the wave last "
                        "read LDS that was never written at 0x%x (pc 0x%x)", what,
                        w->undefined_where & 0x7fffffff, w->undefined_pc);
    return violated(w, i, CHECK_UNDEFINED, __builtin_ctzll(bad), "%s is undefined", what);
}
int need_scalar(Wave *w, const Inst *i, u32 code, u32 count, const char *what) {
    if (code >= 128) return OK;
    if (touch_scalars(w, i, code, count)) return STOP;
    for (u32 n = 0; n < count; n++)
        if (w->s_defined[code + n] != ~0u)
            return violated(w, i, CHECK_UNDEFINED, -1, "%s is undefined", what);
    return OK;
}

// Atomics under way on bytes that the wave accesses now, which come first.
static void settle(Wave *w, const u64 *at, u64 active, u32 bytes) {
    u64 low = ~0ull, high = 0;
    EACH_LANE {
        if (!(active >> l & 1)) continue;
        if (at[l] < low) low = at[l];
        if (at[l] + bytes > high) high = at[l] + bytes;
    }
    commit_overlapping(w, low, high);
}

// `valid[r]` are the lanes whose dword r is in range; the others load 0.
static int load(Wave *w, const Inst *i, const u64 *at, u64 active, const u64 *valid, Access x) {
    u32 to = i->dst - VGPR0, value[4][LANES];
    if (touch_loaded(w, i, to, x.rows, 0)) return STOP;
    for (u32 r = 0; r < x.rows; r++) memcpy(value[r], w->v[to + r], sizeof value[r]);
    count_segments(w, i, at, x.bytes, valid ? active & valid[0] : active, 0);
    u32 unit = x.bytes < 4 ? x.bytes : 4;
    if (w->group->buffered) settle(w, at, active, x.bytes);
    EACH_LANE {
        if (!(active >> l & 1)) continue;
        u32 in_range = x.rows;
        if (valid) for (in_range = 0; in_range < x.rows && (valid[in_range] >> l & 1);) in_range++;
        for (u32 r = in_range; r < x.rows; r++) value[r][l] = 0;
        if (!in_range) {
            if (x.high) value[0][l] = x.high == 1 ? w->v[to][l] & 0xffff0000 : w->v[to][l] & 0xffff;
            continue;
        }
        u32 bytes = in_range == x.rows ? x.bytes : in_range * 4;
        const u8 *from = host_of(w, at[l], bytes, 0);
        if (!from) {
            if (outside_memory(w, i, l, at[l], bytes, "load")) return STOP;
            for (u32 r = 0; r < in_range; r++) value[r][l] = 0;
            continue;
        }
        if (note_global(w, i, l, at[l], bytes, ACCESS_READ)) return STOP;
        if (unit == 4) {
            for (u32 r = 0; r < in_range; r++) memcpy(&value[r][l], from + 4 * r, 4);
            continue;
        }
        u32 v = from[0];
        if (unit == 2) v |= (u32)from[1] << 8;
        if (x.sign) v = unit == 1 ? (u32)(i32)(i8)v : (u32)(i32)(i16)v;
        if (x.high == 1) v = (value[0][l] & 0xffff0000) | (v & 0xffff);
        if (x.high == 2) v = (value[0][l] & 0xffff) | v << 16;
        value[0][l] = v;
    }
    u32 tag = ++w->vm_issued << 1;
    for (u32 r = 0; r < x.rows; r++) {
        write_row(w, to + r, value[r], active, ~0ull);
        w->pending[to + r] = tag;
    }
    return OK;
}

static int store(Wave *w, const Inst *i, const u64 *at, u64 active, const u64 *valid, Access x) {
    u32 from = i->src[1] - VGPR0;
    u64 defined = ~0ull;
    if (touch_rows(w, i, from, x.rows)) return STOP;
    for (u32 r = 0; r < x.rows; r++) defined &= w->defined[from + r];
    if (need_defined(w, i, active, defined, "the stored value")) return STOP;
    count_segments(w, i, at, x.bytes, valid ? active & valid[0] : active, 1);
    if (w->group->buffered) settle(w, at, active, x.bytes);
    EACH_LANE {
        if (!(active >> l & 1)) continue;
        u32 in_range = x.rows;
        if (valid) for (in_range = 0; in_range < x.rows && (valid[in_range] >> l & 1);) in_range++;
        if (!in_range) continue;
        u32 bytes = in_range == x.rows ? x.bytes : in_range * 4;
        u8 *to = host_of(w, at[l], bytes, 1);
        if (!to) {
            if (outside_memory(w, i, l, at[l], bytes, "store")) return STOP;
            continue;
        }
        if (note_global(w, i, l, at[l], bytes, ACCESS_WRITE)) return STOP;
        if (x.bytes >= 4) {
            for (u32 r = 0; r < in_range; r++) memcpy(to + 4 * r, &w->v[from + r][l], 4);
        } else {
            u32 v = w->v[from][l] >> (x.high == 2 ? 16 : 0);
            memcpy(to, &v, x.bytes);
        }
    }
    w->last_write = ++w->vm_issued;
    w->write_barriers = w->group->barriers;
    w->group->stores++;
    return OK;
}

// A dword per lane straight into LDS, at M0 + offset + 4 * lane.
static int load_to_lds(Wave *w, const Inst *i, const u64 *at, u64 active, u64 valid) {
    Group *g = w->group;
    if (need_scalar(w, i, M0, 1, "M0")) return STOP;
    u32 base = (w->s[M0] & 0xffff) + (u32)i->imm;
    if ((base & 3) && violated(w, i, CHECK_ALIGNMENT, -1, "LDS address 0x%x is not a multiple of 4",
                               base)) return STOP;
    count_segments(w, i, at, 4, active & valid, 0);
    w->thread->totals.lds_direct_bytes += 4 * (u64)__builtin_popcountll(active);
    if (w->group->buffered) settle(w, at, active & valid, 4);
    u32 sequence = ++w->vm_issued;
    EACH_LANE {
        if (!(active >> l & 1)) continue;
        u32 place = base + 4 * (u32)l, v = 0;
        if (place + 4 > g->lds_bytes) {
            if (violated(w, i, CHECK_MEMORY, l, "direct-to-LDS write at 0x%x, beyond the %u bytes of "
                         "the workgroup", place, g->lds_bytes)) return STOP;
            continue;
        }
        if (valid >> l & 1) {
            const u8 *from = host_of(w, at[l], 4, 0);
            if (from) {
                if (note_global(w, i, l, at[l], 4, ACCESS_READ)) return STOP;
                memcpy(&v, from, 4);
            } else if (outside_memory(w, i, l, at[l], 4, "load")) return STOP;
        }
        if (note_write(w, i, l, place, 4, 1, (const u8 *)&v)) return STOP;
        memcpy(g->lds + place, &v, 4);
    }
    return load_into_lds(w, i, sequence, base, active);
}

// --- addresses ----------------------------------------------------------------------------------
static int global_addresses(Wave *w, const Inst *i, u64 *at) {
    u64 exec = exec_of(w), defined;
    u32 row = i->src[0] - VGPR0, scalar = i->src[2];
    i64 offset = i->imm;
    if (scalar != NO_OPERAND) {
        if (need_scalar(w, i, scalar, 2, "the address") || touch_rows(w, i, row, 1)) return STOP;
        u64 base = pair_of(&w->s[scalar]) + (u64)offset;
        EACH_LANE at[l] = base + w->v[row][l];
        defined = w->defined[row];
    } else {
        if (touch_rows(w, i, row, 2)) return STOP;
        EACH_LANE at[l] = (w->v[row][l] | (u64)w->v[row + 1][l] << 32) + (u64)offset;
        defined = w->defined[row] & w->defined[row + 1];
    }
    return need_defined(w, i, exec, defined, "the address");
}
// Which memory a flat instruction's active lanes address; lanes of several kinds are refused.
enum { FLAT_GLOBAL, FLAT_LDS, FLAT_SCRATCH };
static int flat_addresses(Wave *w, const Inst *i, u64 *at, int *kind) {
    if (global_addresses(w, i, at)) return STOP;
    u64 exec = exec_of(w);
    int seen = 0;
    EACH_LANE {
        if (!(exec >> l & 1)) continue;
        u32 high = (u32)(at[l] >> 32);
        seen |= 1 << (high == 0x10000 ? FLAT_LDS : high == 0x20000 ? FLAT_SCRATCH : FLAT_GLOBAL);
    }
    if (seen > 1 && seen != 2 && seen != 4)
        return fail(w, i, ERROR_UNSUPPORTED, -1, "flat access to several kinds of memory at once");
    *kind = seen == 4 ? FLAT_SCRATCH : seen == 2 ? FLAT_LDS : FLAT_GLOBAL;
    w->lds_issued++;  // flat instructions count in both vmcnt and lgkmcnt
    return OK;
}

// A buffer descriptor: base, stride, number of records. Raw accesses (no index) are checked per
// dword against num_records less the scalar offset; indexed ones by their index.
static int buffer_addresses(Wave *w, const Inst *i, u32 bytes, u64 *at, u64 *valid) {
    u32 resource = i->sdst, offset_code = i->src[2], row = i->src[0] - VGPR0;
    u64 exec = exec_of(w), defined = ~0ull;
    u32 rows = (u32)(i->idxen + i->offen);
    if (need_scalar(w, i, resource, 4, "the buffer descriptor") ||
        need_scalar(w, i, offset_code, 1, "the scalar offset")) return STOP;
    if (rows && touch_rows(w, i, row, rows)) return STOP;
    for (u32 r = 0; r < rows; r++) defined &= w->defined[row + r];
    if (need_defined(w, i, exec, defined, "the address")) return STOP;
    const u32 *d = &w->s[resource];
    u64 base = d[0] | (u64)(d[1] & 0xffff) << 32;
    u32 stride = d[1] >> 16 & 0x3fff, records = d[2];
    if (d[1] >> 31 || d[3] >> 23 & 1)
        return fail(w, i, ERROR_UNSUPPORTED, -1, "swizzled or thread-indexed buffer descriptor");
    if ((d[3] >> 30) != 0)
        return fail(w, i, ERROR_UNSUPPORTED, -1, "the descriptor is not of a buffer");
    u32 scalar = scalar_value(w, i, offset_code, 0, B32);
    const u32 *index = i->idxen ? w->v[row] : 0, *lane = i->offen ? w->v[row + i->idxen] : 0;
    u32 dwords = bytes < 4 ? 1 : bytes / 4, unit = bytes < 4 ? bytes : 4, lost = 0;
    for (u32 r = 0; r < dwords; r++) valid[r] = 0;
    EACH_LANE {
        u64 offset = (u64)(lane ? lane[l] : 0) + (u32)i->imm;
        u64 n = index ? index[l] : 0;
        at[l] = base + scalar + offset + n * stride;
        for (u32 r = 0; r < dwords; r++) {
            int in = index ? n < records
                           : offset + scalar + 4 * r + unit <= records;
            valid[r] |= (u64)in << l;
        }
        lost += (exec >> l & 1) && !(valid[dwords - 1] >> l & 1);
    }
    w->thread->totals.buffer_out_of_range += lost;
    return OK;
}

#define ACCESS(bytes, sign, high) ((Access){bytes, (bytes) < 4 ? 1 : (bytes) / 4, sign, high})
#define GLOBAL(name, f, bytes, sign, high)                                                        \
    static int global_##name(Wave *w, const Inst *i) {                                            \
        u64 at[LANES];                                                                            \
        if (global_addresses(w, i, at)) return STOP;                                              \
        return f(w, i, at, exec_of(w), 0, ACCESS(bytes, sign, high));                             \
    }                                                                                             \
    static int scratch_##name(Wave *w, const Inst *i) {                                           \
        u32 at[LANES];                                                                            \
        if (scratch_addresses(w, i, at) || check_scratch(w, i, bytes, at)) return STOP;           \
        return scratch_##f##_at(w, i, at, ACCESS(bytes, sign, high));                             \
    }                                                                                             \
    static int flat_##name(Wave *w, const Inst *i) {                                              \
        u64 at[LANES];                                                                            \
        u32 low[LANES];                                                                           \
        int kind;                                                                                 \
        if (flat_addresses(w, i, at, &kind)) return STOP;                                         \
        if (kind == FLAT_GLOBAL) return f(w, i, at, exec_of(w), 0, ACCESS(bytes, sign, high));    \
        if (kind == FLAT_LDS) return fail(w, i, ERROR_UNSUPPORTED, -1, "flat access to LDS");     \
        EACH_LANE low[l] = (u32)at[l];                                                            \
        return check_scratch(w, i, bytes, low) ||                                                 \
               scratch_##f##_at(w, i, low, ACCESS(bytes, sign, high));                            \
    }
#define BUFFER(name, f, bytes, sign, high)                                                        \
    static int buffer_##name(Wave *w, const Inst *i) {                                            \
        u64 at[LANES], valid[4];                                                                  \
        if (buffer_addresses(w, i, bytes, at, valid)) return STOP;                                \
        if (i->lds) {                                                                             \
            if (bytes != 4) return fail(w, i, ERROR_UNSUPPORTED, -1, "lds of this size");         \
            return load_to_lds(w, i, at, exec_of(w), valid[0]);                                   \
        }                                                                                         \
        return f(w, i, at, exec_of(w), valid, ACCESS(bytes, sign, high));                         \
    }
#define EVERYWHERE(name, f, bytes, sign, high)                                                    \
    GLOBAL(name, f, bytes, sign, high) BUFFER(name, f, bytes, sign, high)
#define ACCESSES(X)                                                                               \
    X(load_ubyte, load, 1, 0, 0) X(load_sbyte, load, 1, 1, 0) X(load_ushort, load, 2, 0, 0)        \
    X(load_sshort, load, 2, 1, 0) X(load_dword, load, 4, 0, 0) X(load_dwordx2, load, 8, 0, 0)      \
    X(load_dwordx3, load, 12, 0, 0) X(load_dwordx4, load, 16, 0, 0)                                \
    X(load_ubyte_d16, load, 1, 0, 1) X(load_ubyte_d16_hi, load, 1, 0, 2)                           \
    X(load_sbyte_d16, load, 1, 1, 1) X(load_sbyte_d16_hi, load, 1, 1, 2)                           \
    X(load_short_d16, load, 2, 0, 1) X(load_short_d16_hi, load, 2, 0, 2)                           \
    X(store_byte, store, 1, 0, 0) X(store_byte_d16_hi, store, 1, 0, 2)                             \
    X(store_short, store, 2, 0, 0) X(store_short_d16_hi, store, 2, 0, 2)                           \
    X(store_dword, store, 4, 0, 0) X(store_dwordx2, store, 8, 0, 0)                                \
    X(store_dwordx3, store, 12, 0, 0) X(store_dwordx4, store, 16, 0, 0)
ACCESSES(EVERYWHERE)
static int global_load_lds(Wave *w, const Inst *i) {
    u64 at[LANES];
    if (global_addresses(w, i, at)) return STOP;
    return load_to_lds(w, i, at, exec_of(w), ~0ull);
}

#define ATOMICS(X)                                                                                \
    X(swap, A_SWAP, 4) X(cmpswap, A_CMPSWAP32, 4) X(add, A_ADD32, 4) X(sub, A_SUB32, 4)            \
    X(smin, A_SMIN32, 4) X(umin, A_UMIN32, 4) X(smax, A_SMAX32, 4) X(umax, A_UMAX32, 4)            \
    X(and, A_AND, 4) X(or, A_OR, 4) X(xor, A_XOR, 4) X(inc, A_INC32, 4) X(dec, A_DEC32, 4)         \
    X(add_f32, A_ADDF32, 4) X(pk_add_f16, A_PKF16, 4) X(add_f64, A_ADDF64, 8)                      \
    X(min_f64, A_MINF64, 8) X(max_f64, A_MAXF64, 8) X(swap_x2, A_SWAP, 8)                          \
    X(cmpswap_x2, A_CMPSWAP64, 8) X(add_x2, A_ADD64, 8) X(sub_x2, A_SUB64, 8)                      \
    X(smin_x2, A_SMIN64, 8) X(umin_x2, A_UMIN64, 8) X(smax_x2, A_SMAX64, 8)                        \
    X(umax_x2, A_UMAX64, 8) X(and_x2, A_AND, 8) X(or_x2, A_OR, 8) X(xor_x2, A_XOR, 8)
#define DEFINE(name, kind, bytes)                                                                 \
    static int global_atomic_##name(Wave *w, const Inst *i) {                                     \
        u64 at[LANES];                                                                            \
        if (global_addresses(w, i, at)) return STOP;                                              \
        return memory_atomic(w, i, at, exec_of(w), kind, bytes);                                         \
    }                                                                                             \
    static int flat_atomic_##name(Wave *w, const Inst *i) {                                       \
        u64 at[LANES];                                                                            \
        int where;                                                                                \
        if (flat_addresses(w, i, at, &where)) return STOP;                                        \
        if (where) return fail(w, i, ERROR_UNSUPPORTED, -1, "flat atomic outside global memory"); \
        return memory_atomic(w, i, at, exec_of(w), kind, bytes);                                         \
    }
#define DEFINE_BUFFER(name, kind, bytes)                                                          \
    static int buffer_atomic_##name(Wave *w, const Inst *i) {                                     \
        u64 at[LANES], valid[4];                                                                  \
        if (buffer_addresses(w, i, bytes, at, valid)) return STOP;                                \
        return memory_atomic(w, i, at, exec_of(w) & valid[(bytes) / 4 - 1], kind, bytes);                \
    }
ATOMICS(DEFINE)
ATOMICS(DEFINE_BUFFER)
DEFINE(pk_add_bf16, A_PKBF16, 4)
// Cache maintenance: caches are not modeled, but that it took place (sc1: for other XCDs) is part of
// what orders workgroups. LLVM does not count these in vmcnt; nor does this.
static int buffer_wbl2(Wave *w, const Inst *i) { if (i->sc1) write_back(w); return OK; }
static int buffer_inv(Wave *w, const Inst *i) { if (i->sc1) invalidate(w); return OK; }

#define M(n, f) {n, KIND_SPECIAL, VMEM, NONE, {NONE, NONE, NONE}, f, 0}
#define LIST(name, f, bytes, sign, high) M("global_" #name, global_##name),                       \
    M("flat_" #name, flat_##name), M("buffer_" #name, buffer_##name),                             \
    M("scratch_" #name, scratch_##name),
#define LIST2(name, kind, bytes) M("global_atomic_" #name, global_atomic_##name),                 \
    M("flat_atomic_" #name, flat_atomic_##name), M("buffer_atomic_" #name, buffer_atomic_##name),
const Op memory_ops[] = {
    ACCESSES(LIST) ATOMICS(LIST2) M("global_atomic_pk_add_bf16", global_atomic_pk_add_bf16),
    M("flat_atomic_pk_add_bf16", flat_atomic_pk_add_bf16),
    M("global_load_lds_dword", global_load_lds), M("buffer_wbl2", buffer_wbl2),
    M("buffer_inv", buffer_inv),
    {0},
};
