// Global atomics: when each reaches memory.
//
// An atomic without a return value is under way after it issues. Here it stays in a pool, and leaves
// it in an order drawn from the launch's seed: any wave's oldest one next, and the lanes of an
// instruction in any order, since nothing orders atomics of different waves or lanes. What a kernel
// may rely on is kept: a wave's own atomics leave in program order, they have left before an
// s_waitcnt vmcnt that covers them ends, before the wave's own access to bytes that they change, and
// before the launch ends. A barrier passes that on to the workgroup without a wait, as LLVM's memory
// model of gfx942 has it (its waves share one CU; release at workgroup scope omits vmcnt): what was
// issued before it comes before later accesses to the same bytes, and before a later s_waitcnt vmcnt(0),
// of any wave. Atomics may outlive their workgroup: s_endpgm waits for nothing. Those that
// return the old value are performed when they issue.
#include "memory.h"
#include "atomics.h"

typedef struct {
    Group *group;
    u32 key, group_key, barriers, sequence;  // of the wave and workgroup, which may have ended
    u32 kind, bytes;
    u64 active, low, high;           // all bytes lie in low ... high - 1
    u8 *to[LANES];
    u64 data[LANES];
} Packet;
#define POOL 256
struct Pool { u32 count; u64 random; Packet packet[POOL]; };

Pool *new_pool(u64 seed) {
    Pool *pool = malloc(sizeof *pool);
    if (!pool) return 0;
    pool->count = 0;
    pool->random = seed ^ 0xa70111c5u;
    return pool;
}

// Other workgroups run on other threads: the update is a compare-and-swap on the host's memory.
static u64 perform(u8 *to, u32 kind, u32 bytes, u64 data, u64 compare) {
    if (bytes == 4) {
        u32 before = __atomic_load_n((u32 *)to, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n((u32 *)to, &before,
                   (u32)atomic_update(kind, before, data, compare), 0, __ATOMIC_SEQ_CST,
                   __ATOMIC_RELAXED)) {}
        return before;
    }
    u64 before = __atomic_load_n((u64 *)to, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n((u64 *)to, &before,
               atomic_update(kind, before, data, compare), 0, __ATOMIC_SEQ_CST,
               __ATOMIC_RELAXED)) {}
    return before;
}

static void shuffle(u64 *random, u8 *lanes, int in_order) {
    for (u32 l = 0; l < LANES; l++) lanes[l] = (u8)l;
    for (u32 l = LANES - 1; l > 0 && !in_order; l--) {
        u32 other = (u32)((next_random(random) & 0xffffffffu) * (l + 1) >> 32);
        u8 kept = lanes[l];
        lanes[l] = lanes[other];
        lanes[other] = kept;
    }
}

static void commit(Pool *pool, u32 place) {
    Packet *p = &pool->packet[place];
    u8 lanes[LANES];
    shuffle(&pool->random, lanes, 0);
    for (u32 n = 0; n < LANES; n++)
        if (p->active >> lanes[n] & 1)
            perform(p->to[lanes[n]], p->kind, p->bytes, p->data[lanes[n]], 0);
    if (p->group->key == p->group_key) p->group->buffered--;
    if (place != --pool->count) *p = pool->packet[pool->count];
}
static void commit_oldest(Pool *pool, u32 key) {
    u32 oldest = POOL;
    for (u32 n = 0; n < pool->count; n++)
        if (pool->packet[n].key == key &&
            (oldest == POOL ||
             (i32)(pool->packet[n].sequence - pool->packet[oldest].sequence) < 0)) oldest = n;
    if (oldest != POOL) commit(pool, oldest);
}
void commit_any(Pool *pool) {
    if (!pool->count) return;
    u32 place = (u32)(next_random(&pool->random) % pool->count);
    commit_oldest(pool, pool->packet[place].key);
}
void commit_all(Pool *pool) { while (pool->count) commit_any(pool); }

static int same_wave(const Packet *p, const Wave *w) { return p->key == w->key; }
static int before_barrier(const Packet *p, const Wave *w) {
    return p->group_key == w->group->key && p->barriers < w->group->barriers;
}
// After a wait: the wave's own up to number vm_done, and where it waited for all, what a barrier passed on.
void commit_waited(Wave *w) {
    Pool *pool = w->thread->pool;
    int all = w->vm_done == w->vm_issued;
    for (u32 n = 0; n < pool->count;) {
        const Packet *p = &pool->packet[n];
        if ((same_wave(p, w) && (i32)(p->sequence - w->vm_done) <= 0) ||
            (all && before_barrier(p, w))) {
            commit_oldest(pool, p->key);
            n = 0;
        } else n++;
    }
}
// Before the wave accesses bytes in low ... high - 1.
void commit_overlapping(Wave *w, u64 low, u64 high) {
    Pool *pool = w->thread->pool;
    for (u32 n = 0; n < pool->count;) {
        const Packet *p = &pool->packet[n];
        if (p->low < high && low < p->high && (same_wave(p, w) || before_barrier(p, w))) {
            commit_oldest(pool, p->key);
            n = 0;
        } else n++;
    }
}

int memory_atomic(Wave *w, const Inst *i, const u64 *at, u64 active, u32 kind, u32 bytes) {
    u32 rows = bytes / 4, from = i->src[1] - VGPR0, value[2 * LANES] = {0};
    int compares = kind == A_CMPSWAP32 || kind == A_CMPSWAP64, in_order = (int)w->launch->in_order;
    u32 needed = compares ? 2 * rows : rows;
    u64 defined = ~0ull;
    if (touch_rows(w, i, from, needed)) return STOP;
    for (u32 r = 0; r < needed; r++) defined &= w->defined[from + r];
    if (need_defined(w, i, active, defined, "the atomic's operand")) return STOP;
    count_segments(w, i, at, bytes, active, 1);
    Pool *pool = w->thread->pool;
    Group *g = w->group;
    Packet now = {g, w->key, g->key, g->barriers, w->vm_issued + 1, kind, bytes, 0, ~0ull, 0, {0}, {0}};
    u64 compare[LANES] = {0};
    EACH_LANE {
        if (!(active >> l & 1)) continue;
        if ((at[l] & (bytes - 1)) &&
            violated(w, i, CHECK_ALIGNMENT, l, "atomic at 0x%llx, not a multiple of %u",
                     (unsigned long long)at[l], bytes)) return STOP;
        u8 *to = host_of(w, at[l], bytes, 1);
        if (!to) {
            if (outside_memory(w, i, l, at[l], bytes, "atomic")) return STOP;
            continue;
        }
        if (note_global(w, i, l, at[l], bytes, ACCESS_ATOMIC)) return STOP;
        // Global compare-and-swap has the new value first and the comparand second.
        now.data[l] = w->v[from][l];
        compare[l] = compares ? w->v[from + rows][l] : 0;
        if (rows == 2) {
            now.data[l] |= (u64)w->v[from + 1][l] << 32;
            if (compares) compare[l] |= (u64)w->v[from + 3][l] << 32;
        }
        now.to[l] = to;
        now.active |= 1ull << l;
        if (at[l] < now.low) now.low = at[l];
        if (at[l] + bytes > now.high) now.high = at[l] + bytes;
    }
    if (i->glc) synchronize(w, at, now.active);
    w->last_write = ++w->vm_issued;
    w->write_barriers = g->barriers;
    if (!i->glc && !compares && !in_order) {
        if (!now.active) return OK;
        while (pool->count == POOL) commit_any(pool);
        pool->packet[pool->count++] = now;
        g->buffered++;
        return OK;
    }
    if (g->buffered) commit_overlapping(w, now.low, now.high);
    u8 lanes[LANES];
    shuffle(&pool->random, lanes, in_order);
    for (u32 n = 0; n < LANES; n++) {
        u32 l = lanes[n];
        if (!(now.active >> l & 1)) continue;
        u64 old = perform(now.to[l], kind, bytes, now.data[l], compare[l]);
        value[l] = (u32)old;
        value[l + LANES] = (u32)(old >> 32);
    }
    if (!i->glc) return OK;
    u32 to = i->dst - VGPR0;
    if (touch_loaded(w, i, to, rows, 0)) return STOP;
    for (u32 r = 0; r < rows; r++) {
        write_row(w, to + r, value + r * LANES, active, ~0ull);
        w->pending[to + r] = w->vm_issued << 1;
    }
    return OK;
}
