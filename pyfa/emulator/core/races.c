// Races in global memory between the workgroups of one launch.
//
// Each byte has two tags: who wrote it (a store, or atomics) and who read it, as the number of a
// workgroup. Two workgroups race on a byte where one stores and the other stores, reads or adds, and
// nothing orders the two. Inside a workgroup nothing is checked.
//
// What orders them is a returning atomic at agent scope (LLVM AMDGPUUsage, memory model of gfx942: the
// L2 of an XCD is not coherent with the others'). Workgroup H *releases* by one if its wave has waited for
// its own stores and atomics (s_waitcnt vmcnt), a barrier or such a wait lies behind those of H's other
// waves, and a buffer_wbl2 sc1 has followed the last store; workgroup G *acquires* what was released at that address by a later one and a buffer_inv sc1 after
// it. Where a byte was read, or added to, by several workgroups, only whether G has acquired anything
// is known: such a race can be missed, none is invented. With several host threads two accesses at
// the same instant can be missed too.
//
// Tags are kept for 4 bytes together, and for single bytes in pages of memory that are accessed in
// other units; pages come with the first access.
#include "memory.h"

#define PAGE 4096u
typedef struct { u32 writer, reader; } Tag;  // number of the workgroup + 1
#define ADDS 0x80000000u                     // in writer: by atomics
#define MANY 0x7fffffffu                     // several workgroups
typedef struct Page { struct Page *next; u32 narrow; Tag tag[]; } Page;
typedef struct Released { struct Released *next; u64 address; u8 groups[]; } Released;
#define BUCKETS 4096
struct Shadow {
    u32 regions, set_bytes, lock;
    Page ***page;  // of each region, of each 4 KB
    Page *all;
    Released *released[BUCKETS];
};

EXPORT void emulator_shadow_free(Shadow *s) {
    if (!s) return;
    for (Page *p = s->all, *next; p; p = next) { next = p->next; free(p); }
    for (u32 b = 0; b < BUCKETS; b++)
        for (Released *p = s->released[b], *next; p; p = next) { next = p->next; free(p); }
    for (u32 r = 0; s->page && r < s->regions; r++) free(s->page[r]);
    free(s->page);
    free(s);
}
EXPORT Shadow *emulator_shadow_new(const Launch *c) {
    Shadow *s = calloc(1, sizeof *s);
    if (!s) return 0;
    s->regions = c->region_count;
    s->set_bytes = (u32)(((u64)c->grid[0] * c->grid[1] * c->grid[2] + 7) / 8);
    s->page = calloc(s->regions, sizeof *s->page);
    int failed = !s->page;
    for (u32 r = 0; !failed && r < s->regions; r++)
        if (c->regions[r].writable)
            failed = !(s->page[r] = calloc(c->regions[r].size / PAGE + 2, sizeof(Page *)));
    if (!failed) return s;
    emulator_shadow_free(s);
    return 0;
}

static Page *page_at(Shadow *s, Page **place, u32 narrow) {
    Page *old = __atomic_load_n(place, __ATOMIC_ACQUIRE);
    while (!old || narrow > old->narrow) {
        u32 tags = narrow ? PAGE : PAGE / 4;
        Page *page = calloc(1, sizeof *page + tags * sizeof(Tag));
        if (!page) return 0;
        page->narrow = narrow;
        for (u32 b = 0; old && b < PAGE; b++) page->tag[b] = old->tag[b / 4];
        if (__atomic_compare_exchange_n(place, &old, page, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            page->next = __atomic_load_n(&s->all, __ATOMIC_RELAXED);
            while (!__atomic_compare_exchange_n(&s->all, &page->next, page, 0, __ATOMIC_ACQ_REL,
                                                __ATOMIC_RELAXED)) {}
            return page;
        }
        free(page);
    }
    return old;
}

static int ordered(const Group *g, u32 other) {
    if (!g->acquired) return 0;
    return other == MANY || (g->acquired[(other - 1) / 8] >> ((other - 1) & 7) & 1);
}
static int report(Wave *w, const Inst *i, int lane, u64 address, u32 other, const char *now,
                  const char *before) {
    const Launch *c = w->launch;
    const Region *r = &c->regions[w->region_hint];
    char who[64] = "several others";
    u32 n = other - 1, x = c->grid[0], y = c->grid[1];
    if (other != MANY) snprintf(who, sizeof who, "workgroup (%u, %u, %u)", n % x, n / x % y, n / x / y);
    return violated(w, i, CHECK_GLOBAL_RACES, lane,
                    "%s 0x%llx (region %u, offset %llu of %llu bytes), which %s %s in the same launch, "
                    "and nothing orders the two", now, (unsigned long long)address, r->id,
                    (unsigned long long)(address - r->base), (unsigned long long)r->size, before, who);
}

int note_access(Wave *w, const Inst *i, int lane, u64 address, u32 bytes, enum Access_kind kind) {
    Shadow *s = w->launch->shadow;
    Page **pages = s->page[w->region_hint];
    if (!pages) return OK;  // nobody writes there
    Group *g = w->group;
    u64 offset = address - w->launch->regions[w->region_hint].base;
    u32 me = g->number + 1, narrow = (offset | bytes) & 3 ? 1 : 0, left = bytes;
    while (left) {
        u32 at = (u32)offset & (PAGE - 1), here = left < PAGE - at ? left : PAGE - at;
        Page *page = page_at(s, &pages[offset / PAGE], narrow);
        if (!page) return fail(w, i, ERROR_UNSUPPORTED, lane, "no memory for the race check");
        u32 unit = page->narrow ? 1 : 4, count = here / unit;
        Tag *tag = &page->tag[at / unit];
        for (u32 n = 0; n < count; n++, tag++) {
            u32 writer = tag->writer & ~ADDS, reader = tag->reader;
            u64 where = address + (bytes - left) + n * unit;
            int adds = (tag->writer & ADDS) != 0;
            if (writer && writer != me && !(adds && kind == ACCESS_ATOMIC) && !ordered(g, writer) &&
                report(w, i, lane, where, writer,
                       kind == ACCESS_READ ? "load of" : kind == ACCESS_WRITE ? "store to" : "atomic on",
                       adds ? "an atomic changes of" : "is written by")) return STOP;
            if (kind == ACCESS_READ) {
                if (reader != me && reader != MANY) tag->reader = reader ? MANY : me;
                continue;
            }
            if (reader && reader != me && !ordered(g, reader) &&
                report(w, i, lane, where, reader, kind == ACCESS_WRITE ? "store to" : "atomic on",
                       "is read by")) return STOP;
            if (kind == ACCESS_WRITE) tag->writer = me;
            else if (adds && writer != me) tag->writer = MANY | ADDS;
            else if (writer != me) tag->writer = me | ADDS;
            tag->reader = 0;
        }
        left -= here;
        offset += here;
    }
    return OK;
}

// --- what orders workgroups ------------------------------------------------------------------------
static u8 *released_at(Shadow *s, u64 address) {
    Released **list = &s->released[(u32)((address >> 2) * 0x9e3779b1u) % BUCKETS];
    for (Released *r = *list; r; r = r->next) if (r->address == address) return r->groups;
    Released *r = calloc(1, sizeof *r + s->set_bytes);
    if (!r) return 0;
    r->address = address;
    r->next = *list;
    *list = r;
    return r->groups;
}

static int written(const Wave *w) { return (i32)(w->last_write - w->vm_done) <= 0; }
static int passed_barrier(const Wave *w) { return w->write_barriers < w->group->barriers; }

// A returning atomic of the wave at the active lanes' addresses.
void synchronize(Wave *w, const u64 *at, u64 active) {
    Shadow *s = w->launch->shadow;
    Group *g = w->group;
    if (!s) return;
    int complete = g->stores == g->written_back;
    for (u32 k = 0; k < g->waves; k++)
        complete &= written(&g->wave[k]) || (&g->wave[k] != w && passed_barrier(&g->wave[k]));
    while (__atomic_exchange_n(&s->lock, 1, __ATOMIC_ACQUIRE)) {}
    if (!g->offered) g->offered = calloc(1, s->set_bytes);
    EACH_LANE {
        u8 *groups = active >> l & 1 ? released_at(s, at[l]) : 0;
        if (!groups || !g->offered) continue;
        for (u32 b = 0; b < s->set_bytes; b++) g->offered[b] |= groups[b];
        if (!complete) continue;
        groups[g->number / 8] |= (u8)(1 << (g->number & 7));
        for (u32 b = 0; g->acquired && b < s->set_bytes; b++) groups[b] |= g->acquired[b];
    }
    __atomic_store_n(&s->lock, 0, __ATOMIC_RELEASE);
}
void write_back(Wave *w) {  // buffer_wbl2 sc1
    Group *g = w->group;
    for (u32 k = 0; k < g->waves; k++)  // only what has reached the cache; a wave's own is in order
        if (&g->wave[k] != w && !written(&g->wave[k]) && !passed_barrier(&g->wave[k])) return;
    g->written_back = g->stores;
}
void invalidate(Wave *w) {  // buffer_inv sc1
    Shadow *s = w->launch->shadow;
    Group *g = w->group;
    if (!s || !g->offered) return;
    u32 any = 0;
    for (u32 b = 0; b < s->set_bytes; b++) any |= g->offered[b];
    if (!any) return;
    if (!g->acquired) g->acquired = calloc(1, s->set_bytes);
    for (u32 b = 0; g->acquired && b < s->set_bytes; b++) g->acquired[b] |= g->offered[b];
}
