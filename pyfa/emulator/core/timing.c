// The issue model of one compute unit: when each instruction of a trace would issue on an MI300X.
//
// A model, compared with published figures only. Each SIMD has its turn every fourth clock (a
// quantum). In it, it issues at most one instruction of each class, each from another wavefront,
// those of high priority first, then the oldest; a wavefront issues in order, one instruction a turn.
// What stands here is mechanism; every number comes from pyfa/emulator/timing/constants.py.
#include "core.h"
#include "phases.h"
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))
#define SIMDS 4
#define QUANTUM 4
#define WAVES_MAX 64
#define REGISTERS 512

enum Kind { SCALAR, VECTOR, TRANSCENDENTAL, MATRIX, LDS_ACCESS, LOAD, LOAD_TO_LDS, STORE, ATOMIC,
            SCALAR_LOAD, JUMP, MEET, WAIT_COUNT, IDLE, PRIORITY, END };
enum Cause { BY_VECTOR, BY_LDS, BY_MEMORY, BY_BARRIER, BY_DEPENDENCY, BY_FETCH, BY_ISSUE, BY_END,
             CAUSES };

// An instruction of the program. Reads and writes are ranges of registers, AGPRs from 256 on; a
// matrix product's third read is its addend. `amount`: quanta of the vector unit, passes of the
// matrix unit, idle quanta, or a priority. The layout is issue.STEP's.
typedef struct {
    u16 read[4], reads[4], write, writes;
    u8 kind, bytes, vmcnt, lgkmcnt;
    u16 amount, reserved;
} Step;

// A step as one wavefront took it. `clocks`: of the LDS or L1 pipe; `lines` different 128-byte lines
// from `first` on. The layout is issue.TURN's.
typedef struct { u32 step, first; u16 clocks, lines; u8 taken, reserved[3]; } Turn;

typedef struct { u32 first, count, simd, group; double start; } WaveOf;  // issue.WAVE

// Clocks, bytes a clock, or switches; the order is issue.PARAMETERS'.
typedef struct {
    double lds_latency, lds_queue, lds_direct_bytes, l1_latency, l2_latency, l2_bytes, l1_queue,
        store_latency, store_bytes, atomic_latency, atomic_bytes, scalar_latency, barrier, branch,
        fetch_bytes, transcendental, transcendental_apart, matrix_apart, matrix_extra,
        transcendental_extra, l1_lines;
} Parameters;

// The order in which lanes are served, into `lanes`; the result is how many make a phase.
EXPORT u32 emulator_phases(u32 bytes, int writes, u8 *lanes) {
    Phases phases = phases_of(bytes, writes);
    memcpy(lanes, phases.lanes, LANES);
    return phases.together;
}

typedef struct { double at[64]; u32 count; } Queue;  // when outstanding accesses are done

typedef struct {
    const Turn *turn;
    u32 left, simd, group, priority, waiting, scalar_out;
    double free, buffered, vector_ready[REGISTERS];
    Queue vm, lgkm;
    u8 why, ended;
} Running;

#define SETS 4  // of L1, with 64 ways each
typedef struct { double *used; u64 *line; u32 ways; } Cache;

static u32 drop_done(Queue *q, double now) {
    u32 kept = 0;
    for (u32 n = 0; n < q->count; n++)
        if (q->at[n] > now) q->at[kept++] = q->at[n];
    return q->count = kept;
}
static double after(Queue *q, double at, int in_order) {
    for (u32 n = 0; in_order && n < q->count; n++)
        if (q->at[n] > at) at = q->at[n];
    q->at[q->count++] = at;
    return at;
}

// Whether the line was there; it is afterwards, in place of the one not used for longest.
static int touch_line(Cache *c, u64 line, double now) {
    u32 first = (u32)(line & (SETS - 1)) * c->ways, oldest = first;
    for (u32 n = first; n < first + c->ways; n++) {
        if (c->line[n] == line + 1) { c->used[n] = now; return 1; }
        if (c->used[n] < c->used[oldest]) oldest = n;
    }
    c->line[oldest] = line + 1;
    c->used[oldest] = now;
    return 0;
}

static double ready_of(const Running *w, u32 first, u32 count) {
    double at = 0;
    for (u32 r = first; r < first + count && r < REGISTERS; r++)
        if (w->vector_ready[r] > at) at = w->vector_ready[r];
    return at;
}

// When the operands are there. A product adds to the accumulator that the one before leaves behind
// without waiting for it to come out.
static double operands(const Running *w, const Step *s) {
    double at = 0, one;
    for (int n = 0; n < 4; n++) {
        int chained = s->kind == MATRIX && n == 2 && s->read[2] == s->write;
        if (!chained && (one = ready_of(w, s->read[n], s->reads[n])) > at) at = one;
    }
    if (s->kind != MATRIX && (one = ready_of(w, s->write, s->writes)) > at) at = one;
    return at;
}

// `issued`: the clock of each turn. `lost`: clocks in which a matrix unit idles, by the step that its
// wavefronts stand at and why (shared between them). `stalled`: clocks that wavefronts stand there.
// Totals: clocks, matrix, vector, LDS and L1 busy clocks, lines missed in L1. Returns 0, 1 without
// memory, 2 when nothing can go on.
EXPORT int emulator_time(const Step *step, u32 steps, const Turn *turn, const u64 *line,
                         const WaveOf *wave, u32 waves, const Parameters *p, float *issued,
                         double *lost, double *stalled, double *totals) {
    Running *run = calloc(waves, sizeof *run);
    u32 ways = (u32)p->l1_lines / SETS;
    Cache l1 = {calloc(SETS * ways, sizeof(double)), calloc(SETS * ways, sizeof(u64)), ways};
    if (!run || !l1.used || !l1.line || waves > WAVES_MAX) {
        free(run); free(l1.used); free(l1.line);
        return 1;
    }
    u32 live = waves, arrived[WAVES_MAX] = {0}, members[WAVES_MAX] = {0};
    for (u32 k = 0; k < waves; k++) {
        run[k].turn = turn + wave[k].first;
        run[k].left = wave[k].count;
        run[k].simd = wave[k].simd;
        run[k].group = wave[k].group;
        run[k].free = wave[k].start;
        run[k].buffered = 32;
        run[k].why = BY_END;
        members[wave[k].group]++;
        if (!wave[k].count) { run[k].ended = 1; live--; members[wave[k].group]--; }
    }
    double vector[SIMDS] = {0}, trans[SIMDS] = {0}, matrix[SIMDS] = {0}, lds = 0, pipe = 0, fill = 0,
           out = 0, now = 0, quiet = 0;
    memset(totals, 0, 6 * sizeof *totals);
    for (u64 quantum = 0; live; quantum++) {
        if (now - quiet > 1e6) break;  // every wavefront waits for what never comes
        for (u32 s = 0; s < SIMDS; s++) {
            now = (double)quantum * QUANTUM + s;
            u32 used = 0, here[WAVES_MAX], count = 0;
            for (u32 k = 0; k < waves; k++) {  // by priority, then by age
                if (run[k].simd != s || run[k].ended) continue;
                u32 at = count++;
                while (at && run[here[at - 1]].priority < run[k].priority) {
                    here[at] = here[at - 1];
                    at--;
                }
                here[at] = k;
            }
            double share = p->fetch_bytes;
            for (u32 n = 0; n < count; n++) {  // whoever has least is fed first
                u32 hungry = 0;
                for (u32 m = 1; m < count; m++)
                    if (run[here[m]].buffered < run[here[hungry]].buffered) hungry = m;
                Running *w = &run[here[hungry]];
                double got = 64 - w->buffered < share ? 64 - w->buffered : share;
                if (got <= 0) break;
                w->buffered += got;
                share -= got;
            }
            for (u32 n = 0; n < count; n++) {
                Running *w = &run[here[n]];
                const Step *i = &step[w->turn->step];
                u32 class = i->kind == TRANSCENDENTAL || (i->kind == MATRIX && !p->matrix_apart)
                                ? VECTOR
                            : i->kind >= LOAD && i->kind <= ATOMIC ? LOAD : i->kind;
                int own = i->kind >= MEET;  // handled at the wavefront's own instruction buffer
                if (w->waiting) { w->why = BY_BARRIER; continue; }
                if (w->free > now) continue;  // `why` says still what for
                if (w->buffered < i->bytes) { w->why = BY_FETCH; continue; }
                if (!own && used >> class & 1) {
                    w->why = class == VECTOR ? BY_VECTOR : BY_ISSUE;
                    continue;
                }
                if (class == VECTOR && vector[s] > now) { w->why = BY_VECTOR; continue; }
                if (i->kind == TRANSCENDENTAL && trans[s] > now) { w->why = BY_VECTOR; continue; }
                if (i->kind == MATRIX && matrix[s] > now) { w->why = BY_ISSUE; continue; }
                if (operands(w, i) > now) { w->why = BY_DEPENDENCY; continue; }
                if (i->kind == WAIT_COUNT) {
                    if (drop_done(&w->vm, now) > i->vmcnt) { w->why = BY_MEMORY; continue; }
                    if (drop_done(&w->lgkm, now) == 0) w->scalar_out = 0;
                    if (w->lgkm.count > i->lgkmcnt) {
                        w->why = w->scalar_out ? BY_MEMORY : BY_LDS;
                        continue;
                    }
                }
                if (i->kind == LDS_ACCESS &&
                    (lds > now + p->lds_queue || drop_done(&w->lgkm, now) >= 15)) {
                    w->why = BY_LDS;
                    continue;
                }
                if (class == LOAD && (pipe > now + p->l1_queue || drop_done(&w->vm, now) >= 63)) {
                    w->why = BY_MEMORY;
                    continue;
                }
                if (i->kind == SCALAR_LOAD && drop_done(&w->lgkm, now) >= 15) {
                    w->why = BY_MEMORY;
                    continue;
                }
                // It issues.
                const Turn *t = w->turn;
                if (!own) used |= 1u << class;
                issued[t - turn] = (float)now;
                quiet = now;
                w->free = now + QUANTUM;
                w->why = class == VECTOR ? BY_VECTOR : BY_ISSUE;
                w->buffered -= i->bytes;
                double clocks = t->clocks, done;
                switch (i->kind) {
                case VECTOR:
                    vector[s] = now + QUANTUM * i->amount;
                    totals[2] += QUANTUM * i->amount;
                    break;
                case TRANSCENDENTAL:
                    trans[s] = now + p->transcendental;
                    vector[s] = p->transcendental_apart ? now + QUANTUM : trans[s];
                    totals[2] += p->transcendental_apart ? QUANTUM : p->transcendental;
                    for (u32 r = i->write; r < i->write + i->writes && r < REGISTERS; r++)
                        w->vector_ready[r] = trans[s] + p->transcendental_extra;
                    break;
                case MATRIX:
                    if (!p->matrix_apart) { vector[s] = now + QUANTUM; totals[2] += QUANTUM; }
                    matrix[s] = now + QUANTUM * i->amount;
                    totals[1] += QUANTUM * i->amount;
                    for (u32 r = i->write; r < i->write + i->writes && r < REGISTERS; r++)
                        w->vector_ready[r] = matrix[s] + p->matrix_extra;
                    break;
                case LDS_ACCESS:
                    lds = (lds > now ? lds : now) + clocks;
                    totals[3] += clocks;
                    after(&w->lgkm, lds + p->lds_latency, 1);
                    break;
                case SCALAR_LOAD:
                    after(&w->lgkm, now + p->scalar_latency, 0);
                    w->scalar_out = 1;
                    break;
                case LOAD: case LOAD_TO_LDS:
                    pipe = (pipe > now ? pipe : now) + clocks;
                    totals[4] += clocks;
                    done = pipe + p->l1_latency;
                    for (u32 m = 0; m < t->lines; m++)
                        if (!touch_line(&l1, line[t->first + m], now + 1)) {
                            fill = (fill > now ? fill : now) + 128 / p->l2_bytes;
                            totals[5]++;
                            if (fill + p->l2_latency > done) done = fill + p->l2_latency;
                        }
                    if (i->kind == LOAD_TO_LDS) {
                        double write = 256 / p->lds_direct_bytes;
                        lds = (lds > now ? lds : now) + write;
                        totals[3] += write;
                    }
                    after(&w->vm, done, 1);
                    break;
                case STORE: case ATOMIC:
                    pipe = (pipe > now ? pipe : now) + clocks;
                    totals[4] += clocks;
                    out = (out > now ? out : now) +
                          64 * clocks / (i->kind == STORE ? p->store_bytes : p->atomic_bytes);
                    after(&w->vm, out + (i->kind == STORE ? p->store_latency : p->atomic_latency), 1);
                    break;
                case MEET:
                    w->waiting = 1;
                    arrived[w->group]++;
                    break;
                case IDLE: w->free = now + QUANTUM * i->amount; break;
                case PRIORITY: w->priority = i->amount; break;
                default: break;
                }
                if (t->taken) {
                    w->free = now + QUANTUM + p->branch;
                    w->why = BY_FETCH;
                    w->buffered = 32;
                }
                w->turn++;
                if (!--w->left) { w->ended = 1; live--; members[w->group]--; }
                if (arrived[w->group] && arrived[w->group] >= members[w->group]) {
                    for (u32 k = 0; k < waves; k++)
                        if (run[k].waiting && run[k].group == w->group) {
                            run[k].waiting = 0;
                            run[k].free = now + QUANTUM + p->barrier;
                            run[k].why = BY_BARRIER;
                        }
                    arrived[w->group] = 0;
                }
            }
            // What this quantum was to each wavefront, and to the matrix unit.
            u32 still = 0;
            for (u32 n = 0; n < count; n++) still += !run[here[n]].ended;
            for (u32 n = 0; n < count; n++) {
                Running *w = &run[here[n]];
                if (w->ended) continue;
                u64 at = (u64)w->turn->step * CAUSES + w->why;
                stalled[at] += QUANTUM;
                if (matrix[s] <= now) lost[at] += (double)QUANTUM / still;
            }
            if (!still && matrix[s] <= now) lost[(u64)steps * CAUSES + BY_END] += QUANTUM;
        }
    }
    totals[0] = now;
    int stuck = live != 0;
    free(run); free(l1.used); free(l1.line);
    return stuck ? 2 : 0;
}
