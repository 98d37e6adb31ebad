// What is under way into LDS: direct-to-LDS loads until a wait on vmcnt, and ds instructions that write
// until one on lgkmcnt.
//
// A barrier waits for no memory (LLVM AMDGPUUsage, memory model of gfx942: a release at workgroup scope is
// s_waitcnt lgkmcnt(0) before s_barrier). So what a wave wrote may reach LDS after the barrier, while another
// already reads or overwrites the same bytes. A wave keeps its writes until it has waited for them. At a
// barrier those that are left mark their bytes as late. Until the barrier that follows the wait only the
// wave itself may touch these, whose LDS instructions are performed in order.
#include "late.h"

static u8 name_of(const Wave *w) { return (u8)(w - w->group->wave + 1); }

static void mark(Group *g, const LdsWrite *x, u8 as) {
    EACH_LANE if (x->exec >> l & 1) memset(g->late + x->at[l], as, x->bytes);
}

// Keeps the writes that are `late` and those that the wave has not waited for.
static void keep(Wave *w, int late) {
    u32 kept = 0;
    for (u32 n = 0; n < w->written_count; n++) {
        LdsWrite *x = &w->written[n];
        if ((late && x->is_late) || (i32)(x->number - w->lds_done) > 0) {
            if (kept != n) w->written[kept] = *x;
            kept++;
        }
    }
    w->written_count = kept;
}

// Before the instruction counts in lgkmcnt. A wave with more writes than fit is taken to have waited for
// its first.
void lds_written(Wave *w, const u32 *at, u32 bytes, u64 exec) {
    if (!checking(w, CHECK_WAITS) || !exec) return;
    if (w->written_count == LDS_WRITES)
        memmove(w->written, w->written + 1, --w->written_count * sizeof *w->written);
    LdsWrite *x = &w->written[w->written_count++];
    *x = (LdsWrite){.number = w->lds_issued + 1, .bytes = bytes, .is_late = 0, .exec = exec};
    memcpy(x->at, at, sizeof x->at);
}

void lds_waited(Wave *w) { keep(w, 1); }

void lds_barrier(Group *g) {
    if (g->late_count) memset(g->late, 0, g->lds_bytes);
    g->late_count = 0;
    for (u32 k = 0; k < g->waves; k++) {
        Wave *w = &g->wave[k];
        if (!w->written_count) continue;
        keep(w, 0);
        for (u32 n = 0; n < w->written_count; n++) {
            w->written[n].is_late = 1;
            mark(g, &w->written[n], name_of(w));
        }
        g->late_count += w->written_count;
    }
}

int touch_late(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, const char *what) {
    Group *g = w->group;
    if (!checking(w, CHECK_WAITS)) return OK;
    for (u32 b = at; b < at + bytes; b++)
        if (g->late[b] && g->late[b] != name_of(w) &&
            violated(w, i, CHECK_WAITS, lane, "LDS byte 0x%x is %s, and wave %u, which wrote it before the "
                     "barrier, has not waited for that (lgkmcnt)", b, what, g->late[b] - 1)) return STOP;
    return OK;
}

// Loads return in order: a byte that two are under way into is the later one's.
void loads_waited(Wave *w) {
    Group *g = w->group;
    u32 kept = 0;
    for (u32 n = 0; n < w->dma_count; n++) {
        Dma d = w->dma[n];
        int done = (i32)(d.sequence - w->vm_done) <= 0;
        EACH_LANE if (d.active >> l & 1) memset(g->incoming + d.base + 4 * l, 0, 4);
        if (done) g->incoming_count--;
        else w->dma[kept++] = d;
    }
    w->dma_count = kept;
    for (u32 n = 0; n < kept; n++)
        EACH_LANE if (w->dma[n].active >> l & 1)
            memset(g->incoming + w->dma[n].base + 4 * l, name_of(w), 4);
}

int load_into_lds(Wave *w, const Inst *i, u32 sequence, u32 base, u64 active) {
    if (!checking(w, CHECK_WAITS) || !active) return OK;
    if (base + 256 - 4 * (u32)__builtin_clzll(active) > w->group->lds_bytes) return OK;
    if (w->dma_count == 64)
        return fail(w, i, ERROR_UNSUPPORTED, -1, "more than 64 direct-to-LDS loads under way");
    w->dma[w->dma_count++] = (Dma){sequence, base, active};
    w->group->incoming_count++;
    EACH_LANE if (active >> l & 1) memset(w->group->incoming + base + 4 * l, name_of(w), 4);
    return OK;
}

int touch_incoming(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, enum Touch how) {
    Group *g = w->group;
    if (!checking(w, CHECK_WAITS)) return OK;
    for (u32 b = at; b < at + bytes; b++) {
        if (!g->incoming[b] || (how == BY_LOAD && g->incoming[b] == name_of(w))) continue;
        if (violated(w, i, CHECK_WAITS, lane, "LDS byte 0x%x is %s while a direct-to-LDS load into it is "
                     "under way (wave %u)", b, how == BY_READ ? "read" : "written", g->incoming[b] - 1))
            return STOP;
    }
    return OK;
}
