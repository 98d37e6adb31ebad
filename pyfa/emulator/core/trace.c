// The recorder behind Machine.launch(trace=...): growing arrays per traced workgroup, read by Python.
#include "trace.h"
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

// Room for `more` elements of `size` bytes; 0 and `failed` where memory ran out.
static int grow(GroupTrace *t, void **array, u64 *room, u64 used, u64 more, size_t size) {
    if (used + more <= *room) return 1;
    u64 want = *room ? *room * 2 : 4096;
    while (want < used + more) want *= 2;
    void *moved = t->failed ? 0 : realloc(*array, want * size);
    if (!moved) { t->failed = 1; return 0; }
    *array = moved;
    *room = want;
    return 1;
}
#define ROOM(t, array, count, more)                                                               \
    grow(t, (void **)&(t)->array, &(t)->room_##count, (t)->count, more, sizeof *(t)->array)

GroupTrace *trace_of(struct Trace *t, u64 workgroup, u32 waves) {
    for (u32 n = 0; t && n < t->count; n++)
        if (t->group[n].workgroup == workgroup) {
            t->group[n].waves = waves;
            return &t->group[n];
        }
    return 0;
}

void trace_event(GroupTrace *t, u32 index, u32 wave) {
    if (!ROOM(t, event, events, 1)) return;
    t->event[t->events++] = (TraceEvent){index, (u16)wave, 0, (u32)t->accesses};
}

static void access_of(GroupTrace *t, u32 kind, u32 bytes, u32 count, u64 first) {
    if (!t->events || !ROOM(t, access, accesses, 1)) return;
    t->access[t->accesses++] = (TraceAccess){kind, bytes, count, (u32)first};
    t->event[t->events - 1].accesses++;
}

void trace_lds(GroupTrace *t, const u32 *at, u32 bytes, u64 active) {
    if (!ROOM(t, lane, lanes, LANES)) return;
    EACH_LANE t->lane[t->lanes + l] = active >> l & 1 ? at[l] : ~0u;
    access_of(t, TRACE_LDS, bytes, LANES, t->lanes);
    t->lanes += LANES;
}

void trace_memory(GroupTrace *t, const u64 *at, u32 bytes, u64 active) {
    u64 first = t->segments;
    EACH_LANE {
        if (!(active >> l & 1)) continue;
        for (u64 s = at[l] >> 6; s <= (at[l] + bytes - 1) >> 6; s++) {
            u64 n = t->segments;  // the newest first: neighbors share segments
            while (n > first && t->segment[n - 1] != s) n--;
            if (n > first) continue;
            if (!ROOM(t, segment, segments, 1)) return;
            t->segment[t->segments++] = s;
        }
    }
    access_of(t, TRACE_MEMORY, bytes * (u32)__builtin_popcountll(active), (u32)(t->segments - first),
              first);
}

EXPORT struct Trace *emulator_trace_new(const u64 *workgroups, u32 count) {
    struct Trace *t = calloc(1, sizeof *t + count * sizeof *t->group);
    if (!t) return 0;
    t->count = count;
    for (u32 n = 0; n < count; n++) t->group[n].workgroup = workgroups[n];
    return t;
}
EXPORT const GroupTrace *emulator_trace_group(const struct Trace *t, u32 n) { return &t->group[n]; }
EXPORT void emulator_trace_free(struct Trace *t) {
    for (u32 n = 0; t && n < t->count; n++) {
        GroupTrace *g = &t->group[n];
        free(g->event); free(g->access); free(g->lane); free(g->segment);
    }
    free(t);
}
