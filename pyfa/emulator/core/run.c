// Workgroups: how waves start, take turns, meet at barriers and end; errors; the exported functions.
#include "core.h"
#include "late.h"
#include "pending.h"
#include <stdarg.h>
#include "trace.h"

void mfma_tables(void);
#define OPS_MAX 1600
const Op *op_table[OPS_MAX];
int op_total;

int fail(Wave *w, const Inst *i, u32 kind, int lane, const char *format, ...) {
    Launch *c = (Launch *)w->launch;
    w->stop = 1;
    if (__atomic_exchange_n(&c->fault.set, 1, __ATOMIC_SEQ_CST)) return STOP;
    c->fault.kind = kind;
    c->fault.pc = i->pc;
    c->fault.wave = (u32)(w - w->group->wave);
    c->fault.lane = (u32)lane;
    memcpy(c->fault.workgroup, w->group->id, sizeof c->fault.workgroup);
    va_list list;
    va_start(list, format);
    vsnprintf(c->fault.text, sizeof c->fault.text, format, list);
    va_end(list);
    return STOP;
}
int violated(Wave *w, const Inst *i, enum Check check, int lane, const char *format, ...) {
    u32 policy = w->launch->policy[check];
    if (policy == POLICY_OFF) return OK;
    w->thread->totals.violations[check]++;
    if (policy == POLICY_COUNT) return OK;
    char text[240];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return fail(w, i, check, lane, "%s", text);
}
int pending_fault(Wave *w, const Inst *i, u32 row) {
    u32 counter = w->pending[row] & 1;
    w->pending[row] = checking(w, CHECK_WAITS) == POLICY_RAISE ? w->pending[row] : 0;
    return violated(w, i, CHECK_WAITS, -1, "%c%u is used while a load into it is under way (no "
                    "s_waitcnt %s covers it)", row < 256 ? 'v' : 'a', row & 255,
                    counter ? "lgkmcnt" : "vmcnt");
}
int scalar_pending_fault(Wave *w, const Inst *i, u32 reg) {
    w->s_pending[reg] = checking(w, CHECK_WAITS) == POLICY_RAISE ? w->s_pending[reg] : 0;
    return violated(w, i, CHECK_WAITS, -1, "s%u is used while a scalar load into it is under way (no "
                    "s_waitcnt lgkmcnt(0) covers it)", reg);
}

// Poison: NaN in f32, f16 and bf16, and a conspicuous address.
#define POISON 0xffffdeadu

static void start_wave(Wave *w, const Launch *c, Group *g, Thread *t, u32 number, u64 seed) {
    u32 rows = c->vgpr_rows, first_agpr = 256;
    for (u32 r = 0; r < rows; r++)
        for (u32 l = 0; l < LANES; l++) w->v[r][l] = POISON;
    for (u32 r = first_agpr; r < first_agpr + rows; r++)
        for (u32 l = 0; l < LANES; l++) w->v[r][l] = POISON;
    memset((u8 *)w + sizeof w->v, 0, sizeof *w - sizeof w->v);
    w->launch = c;
    w->group = g;
    w->thread = t;
    w->random = seed ^ (u64)number << 32;
    w->key = ++t->waves;
    w->mode = c->mode;
    w->index = c->entry;
    for (u32 r = 0; r < 128; r++) w->s[r] = POISON;
    w->scc = 0;
    u32 s = 0;
    #define GIVE(value) do { w->s[s] = (u32)(value); w->s_defined[s] = ~0u; s++; } while (0)
    #define GIVE64(value) do { u64 q = (value); GIVE(q); GIVE(q >> 32); } while (0)
    // User SGPRs in the order of the descriptor's enable bits (private segment buffer, dispatch
    // pointer, queue pointer, kernarg pointer, dispatch id, flat scratch, private segment size).
    u32 on = c->user_bits;
    if (on & 1) { GIVE64(0); GIVE64(0); }
    if (on & 2) GIVE64(c->dispatch_address);
    if (on & 4) GIVE64(c->queue_address);
    if (on & 8) GIVE64(c->kernarg_address);
    if (on & 16) GIVE64(0);
    if (on & 32) GIVE64(0);
    if (on & 64) GIVE(c->scratch_bytes);
    for (u32 n = 0; n < c->preload_length && s < 16; n++) {
        u32 value = 0;
        for (u32 r = 0; r < c->region_count; r++)
            if (c->regions[r].base == c->kernarg_address)
                memcpy(&value, c->regions[r].host + 4 * (c->preload_offset + n), 4);
        GIVE(value);
    }
    s = c->user_sgprs;
    for (u32 d = 0; d < 3; d++) if (c->rsrc2 >> (7 + d) & 1) GIVE(g->id[d]);
    if (c->rsrc2 >> 10 & 1) GIVE(0);
    w->s_defined[M0] = 0;
    w->s[102] = w->s[103] = 0;  // FLAT_SCRATCH is set up by the hardware (architected)
    w->s_defined[102] = w->s_defined[103] = ~0u;
    u64 exec = 0, items = (u64)c->block[0] * c->block[1] * c->block[2];
    u32 packed[LANES];
    for (u32 l = 0; l < LANES; l++) {
        u64 n = (u64)number * LANES + l;
        u32 x = (u32)(n % c->block[0]), y = (u32)(n / c->block[0] % c->block[1]),
            z = (u32)(n / ((u64)c->block[0] * c->block[1]));
        packed[l] = x | y << 10 | z << 20;
        if (n < items) exec |= 1ull << l;
    }
    memcpy(&w->s[EXEC], &exec, 8);
    w->s_defined[EXEC] = w->s_defined[EXEC + 1] = ~0u;
    memcpy(w->v[0], packed, sizeof packed);
    w->defined[0] = exec;
    if (!c->policy[CHECK_UNDEFINED]) memset(w->defined, 0xff, sizeof w->defined);
}

// Runs until the wave ends, waits at a barrier, fails, or has had its turn. `traced` is a constant
// of each call, so that a loop which records nothing does not ask.
static inline __attribute__((always_inline)) int run_turn(Wave *w, u32 turn, GroupTrace *traced) {
    const Launch *c = w->launch;
    const Inst *code = c->code;
    u64 *executed = w->thread->executed;
    u32 count = c->code_count;
    for (u32 n = 0; n < turn; n++) {
        u32 index = w->index;
        if (index >= count) {
            fail(w, &code[count - 1], ERROR_UNSUPPORTED, -1, "execution ran past the last instruction");
            return STOP;
        }
        const Inst *i = &code[index];
        w->index = index + 1;
        w->executed++;
        executed[index]++;
        if (traced) trace_event(traced, index, (u32)(w - w->group->wave));
        int r = i->run(w, i);
        if (__builtin_expect(r, 0)) {
            w->pc = i->pc;
            return w->stop ? STOP : r;
        }
    }
    if (w->executed > c->max_instructions)
        return fail(w, &code[w->index < count ? w->index : count - 1], ERROR_LIMIT, -1,
                    "the wave has executed %llu instructions",
                    (unsigned long long)w->executed);
    return OK;
}

static int run_wave(Wave *w, u32 turn) {
    return w->group->trace ? run_turn(w, turn, w->group->trace) : run_turn(w, turn, 0);
}

static const Inst *at_pc(const Launch *c, u32 pc) { return &c->code[c->index_of[(pc - c->first_pc) / 4]]; }

static void next_epoch(Group *g) {
    g->epoch++;
    if (g->epoch < ERA) return;
    for (u32 b = 0; b < g->lds_bytes; b++) {
        g->wrote[b] = g->wrote[b] ? OLD : 0;
        g->read[b] = 0;
    }
    g->epoch = 1;
}

static int run_group(const Launch *c, Group *g, u64 *random) {
    u32 live = g->waves, waiting = 0;
    while (live) {
        if (c->fault.set) return STOP;
        if (!(next_random(random) & 3)) commit_any(g->wave->thread->pool);  // a wave may wait for one
        u32 order[MAX_WAVES], n = 0;
        for (u32 k = 0; k < g->waves; k++)
            if (!g->wave[k].ended && !g->wave[k].at_barrier) order[n++] = k;
        u32 pick = c->in_order ? order[0] : order[next_random(random) % n];
        Wave *w = &g->wave[pick];
        u32 turn = c->in_order ? 1u << 20 : 1 + (u32)(next_random(random) & 511);
        int r = run_wave(w, turn);
        if (r == STOP) return STOP;
        if (r == ENDED) {
            w->ended = 1;
            live--;
            if (w->vm_issued != w->vm_done && w->dma_count)
                for (u32 d = 0; d < w->dma_count; d++) g->incoming_count--;
        }
        if (r == BARRIER) {
            w->at_barrier = 1;
            w->barriers++;
            waiting++;
            w->thread->totals.barriers++;
        }
        if (waiting == live && waiting) {
            // On the chip a wave that has ended no longer counts; it is reported all the same,
            // because code that is right passes the same barriers in every wave.
            for (u32 k = 0; k < g->waves; k++)
                if (g->wave[k].ended && g->wave[k].barriers < w->barriers &&
                    violated(w, at_pc(c, w->pc), CHECK_BARRIERS, -1, "barrier %u of this wave was not "
                             "reached by wave %u, which ended after %u", w->barriers, k,
                             g->wave[k].barriers)) return STOP;
            for (u32 k = 0; k < g->waves; k++) g->wave[k].at_barrier = 0;
            waiting = 0;
            g->barriers++;
            lds_barrier(g);
            next_epoch(g);
        }
    }
    return OK;
}

static int unknown(Wave *w, const Inst *i) {
    return fail(w, i, ERROR_UNKNOWN, -1, "unknown instruction 0x%08x", i->literal);
}
// Sets each instruction's handler.
EXPORT void emulator_prepare(Inst *code, u32 count) {
    for (u32 n = 0; n < count; n++) {
        Inst *i = &code[n];
        if (i->op == 0xffff) { i->run = unknown; continue; }
        const Op *op = op_table[i->op];
        i->run = op->group == TRANS ? run_transcendental : op->run;
        i->lanes = op->lanes;
        int packed = 0;
        for (int k = 0; k < 3; k++)
            packed |= op->sources[k] == PK16 || op->sources[k] == PKF16 || op->sources[k] == PKF32 ||
                      op->sources[k] == PKB32;
        int half = op->type == HALF_F16 || op->type == HALF_B16;
        i->simple = !i->mode && !i->neg && !i->abs && !i->neg_hi && !i->opsel && !i->omod &&
                    !i->clamp && (!packed || i->opsel_hi == 7) && !half;
        i->to_exec = strncmp(op->name, "v_cmpx", 6) == 0;
    }
}
EXPORT void emulator_flush_mode(Inst *code, u32 count) {  // f32 denormals are flushed: no short cut
    for (u32 n = 0; n < count; n++) code[n].simple = 0;
}

EXPORT int emulator_ops(void) {
    static const Op *const tables[] = {scalar_ops, control_ops, lanes_ops, lanes16_ops, compare_ops,
                                       cross_ops, mfma_ops, lds_ops, memory_ops,
                                       scalar_memory_ops};
    if (op_total) return op_total;
    int n = 0;
    for (u32 t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const Op *op = tables[t]; op->name; op++)
            if (n < OPS_MAX) op_table[n++] = op;
    mfma_tables();
    op_total = n;
    return n;
}
EXPORT const char *emulator_op_name(int n) { return op_table[n]->name; }
EXPORT int emulator_op_group(int n) { return op_table[n]->group; }
// Sizes of what Python lays out too: Inst, Launch, Totals, Region.
EXPORT u32 emulator_size(int which) {
    static const u32 sizes[] = {sizeof(Inst), sizeof(Launch), sizeof(Totals), sizeof(Region)};
    return sizes[which];
}

// The workgroups 0 ... count - 1 in an order that the seed chooses.
EXPORT void emulator_order(u64 seed, u32 *order, u64 count) {
    for (u64 n = 0; n < count; n++) order[n] = (u32)n;
    for (u64 n = count; n > 1; n--) {
        u64 other = next_random(&seed) % n;
        u32 kept = order[n - 1];
        order[n - 1] = order[other];
        order[other] = kept;
    }
}

// One thread's work: takes workgroups until none is left. `executed` has a counter per instruction.
EXPORT int emulator_run(Launch *c, u64 *executed, Totals *totals) {
    u64 items = (u64)c->block[0] * c->block[1] * c->block[2];
    u32 waves = (u32)((items + LANES - 1) / LANES);
    u64 groups = (u64)c->grid[0] * c->grid[1] * c->grid[2];
    Thread thread = {executed, {0}, calloc(c->code_count, sizeof(Pattern)), new_pool(c->seed), 0, 0};
    Group *g = aligned_alloc(64, (sizeof *g + 63) / 64 * 64);
    Wave *wave = aligned_alloc(64, (sizeof *wave + 63) / 64 * 64 * waves);
    u8 *scratch = c->scratch_bytes ? calloc((size_t)waves * LANES, c->scratch_bytes) : 0;
    int failed = !thread.patterns || !thread.pool || !g || !wave || (c->scratch_bytes && !scratch);
    for (u64 n; !failed && (n = __atomic_fetch_add(&c->next_workgroup, 1, __ATOMIC_SEQ_CST)) < groups;) {
        if (c->order) n = c->order[n];
        u64 random = c->seed + n * 0x632be59bd9b4e019ull;
        g->trace = trace_of(c->trace, n, waves);
        memset(g->lds, 0xff, c->lds_bytes);
        memset(g->wrote, 0, 2 * c->lds_bytes);
        memset(g->read, 0, 2 * c->lds_bytes);
        memset(g->incoming, 0, c->lds_bytes);
        memset(g->late, 0, c->lds_bytes);
        g->incoming_count = g->late_count = 0;
        g->epoch = 1;
        g->waves = waves;
        g->wave = wave;
        g->lds_bytes = c->lds_bytes;
        g->number = (u32)n;
        g->key = ++thread.groups;
        g->buffered = g->barriers = 0;
        g->stores = g->written_back = 0;
        g->offered = g->acquired = 0;
        g->id[0] = (u32)(n % c->grid[0]);
        g->id[1] = (u32)(n / c->grid[0] % c->grid[1]);
        g->id[2] = (u32)(n / ((u64)c->grid[0] * c->grid[1]));
        for (u32 k = 0; k < waves; k++) {
            start_wave(&wave[k], c, g, &thread, k, next_random(&random));
            wave[k].scratch = scratch ? scratch + (size_t)k * LANES * c->scratch_bytes : 0;
        }
        failed = run_group(c, g, &random);
        free(g->offered);
        free(g->acquired);
    }
    if (!failed) commit_all(thread.pool);
    *totals = thread.totals;
    free(thread.pool); free(thread.patterns); free(g); free(wave); free(scratch);
    return failed;
}
