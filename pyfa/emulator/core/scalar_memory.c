// SMEM: scalar loads, from memory and through buffer descriptors.
#include "memory.h"

static int scalar_load(Wave *w, const Inst *i, u32 count, int buffer) {
    u32 base = i->src[0], to = i->dst, soffset = 0, value[16] = {0};
    if (need_scalar(w, i, base, buffer ? 4 : 2, "the address")) return STOP;
    if (i->src[1] != NO_OPERAND) {
        if (need_scalar(w, i, i->src[1], 1, "the offset")) return STOP;
        soffset = scalar_value(w, i, i->src[1], 0, B32);
    }
    u64 start = pair_of(&w->s[base]);
    i64 offset = (i64)i->imm + soffset;
    u32 in_range = count;
    if (buffer) {
        start &= 0xffffffffffffull;
        u64 records = w->s[base + 2], stride = w->s[base + 1] >> 16 & 0x3fff;
        if (stride) records *= stride;
        for (in_range = 0; in_range < count && (u64)offset + 4 * in_range + 4 <= records;) in_range++;
    }
    u64 address = start + (u64)offset;
    if ((address & 3) && violated(w, i, CHECK_ALIGNMENT, -1, "scalar load at 0x%llx, not a multiple "
                                  "of 4", (unsigned long long)address)) return STOP;
    if (in_range) {
        const u8 *from = host_of(w, address & ~3ull, 4 * in_range, 0);
        if (from) {
            if (note_global(w, i, -1, address & ~3ull, 4 * in_range, ACCESS_READ)) return STOP;
            memcpy(value, from, 4 * in_range);
        } else if (outside_memory(w, i, -1, address, 4 * in_range, "scalar load")) return STOP;
    }
    w->thread->totals.scalar_bytes += 4 * count;
    w->thread->totals.load_bytes += 4 * count;
    if (touch_scalars(w, i, to, count)) return STOP;
    u32 tag = ++w->smem_issued;
    for (u32 n = 0; n < count; n++) {
        set_scalar(w, to + n, value[n], ~0u);
        w->s_pending[to + n] = tag;
    }
    return OK;
}
#define SCALAR(n, count)                                                                          \
    static int s_load_##n(Wave *w, const Inst *i) { return scalar_load(w, i, count, 0); }         \
    static int s_buffer_##n(Wave *w, const Inst *i) { return scalar_load(w, i, count, 1); }
SCALAR(dword, 1)
SCALAR(dwordx2, 2)
SCALAR(dwordx4, 4)
SCALAR(dwordx8, 8)
SCALAR(dwordx16, 16)

#define K(n, f) {n, KIND_SPECIAL, SMEM, NONE, {NONE, NONE, NONE}, f, 0}
const Op scalar_memory_ops[] = {
    K("s_load_dword", s_load_dword), K("s_load_dwordx2", s_load_dwordx2),
    K("s_load_dwordx4", s_load_dwordx4), K("s_load_dwordx8", s_load_dwordx8),
    K("s_load_dwordx16", s_load_dwordx16), K("s_buffer_load_dword", s_buffer_dword),
    K("s_buffer_load_dwordx2", s_buffer_dwordx2), K("s_buffer_load_dwordx4", s_buffer_dwordx4),
    K("s_buffer_load_dwordx8", s_buffer_dwordx8), K("s_buffer_load_dwordx16", s_buffer_dwordx16),
    {0},
};
