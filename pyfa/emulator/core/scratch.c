// Scratch: private memory of each lane, behind scratch and flat instructions.
// Its bytes count as defined: whether scratch was written before it is read is not checked.
#include "memory.h"

int check_scratch(Wave *w, const Inst *i, u32 bytes, const u32 *at) {
    u64 exec = exec_of(w);
    u32 limit = w->launch->scratch_bytes;
    EACH_LANE
        if ((exec >> l & 1) && (u64)at[l] + bytes > limit)
            return fail(w, i, CHECK_MEMORY, l, "scratch access at %u, beyond the %u bytes of a lane",
                        at[l], limit);
    return OK;
}
int scratch_addresses(Wave *w, const Inst *i, u32 *at) {
    u32 scalar = 0, row = i->src[0] - VGPR0;
    if (i->src[2] != NO_OPERAND) {
        if (need_scalar(w, i, i->src[2], 1, "the address")) return STOP;
        scalar = w->s[i->src[2]];
    }
    if (i->offen && (touch_rows(w, i, row, 1) ||
                     need_defined(w, i, exec_of(w), w->defined[row], "the address"))) return STOP;
    EACH_LANE at[l] = scalar + (u32)i->imm + (i->offen ? w->v[row][l] : 0);
    return OK;
}
int scratch_load_at(Wave *w, const Inst *i, const u32 *at, Access x) {
    u32 to = i->dst - VGPR0;
    u64 exec = exec_of(w);
    if (touch_loaded(w, i, to, x.rows, 0)) return STOP;
    u32 tag = ++w->vm_issued << 1;
    EACH_LANE {
        if (!(exec >> l & 1)) continue;
        const u8 *from = w->scratch + (size_t)l * w->launch->scratch_bytes + at[l];
        if (x.bytes >= 4) {
            for (u32 r = 0; r < x.rows; r++) memcpy(&w->v[to + r][l], from + 4 * r, 4);
        } else {
            u32 v = from[0] | (x.bytes == 2 ? (u32)from[1] << 8 : 0), old = w->v[to][l];
            if (x.sign) v = x.bytes == 1 ? (u32)(i32)(i8)v : (u32)(i32)(i16)v;
            if (x.high == 1) v = (old & 0xffff0000) | (v & 0xffff);
            if (x.high == 2) v = (old & 0xffff) | v << 16;
            w->v[to][l] = v;
        }
    }
    for (u32 r = to; r < to + x.rows; r++) { w->defined[r] |= exec; w->pending[r] = tag; }
    return OK;
}
int scratch_store_at(Wave *w, const Inst *i, const u32 *at, Access x) {
    u32 from = i->src[1] - VGPR0;
    u64 exec = exec_of(w);
    if (touch_rows(w, i, from, x.rows)) return STOP;
    w->vm_issued++;
    EACH_LANE {
        if (!(exec >> l & 1)) continue;
        u8 *to = w->scratch + (size_t)l * w->launch->scratch_bytes + at[l];
        for (u32 r = 0; r < x.rows; r++) {
            u32 v = w->v[from + r][l] >> (x.high == 2 ? 16 : 0);
            memcpy(to + 4 * r, &v, x.bytes < 4 ? x.bytes : 4);
        }
    }
    return OK;
}
