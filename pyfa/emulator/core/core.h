// The state of an emulated gfx942 machine and the interface between the parts of the interpreter.
//
// One wavefront is 64 lanes. A register file is an array of rows of 64 dwords, so that a 64-bit
// operand is two neighboring rows and every operation is a loop over 64 lanes that vectorizes.
// Rows 0 to 255 are VGPRs, rows 256 to 511 are AGPRs (CDNA3 gives a wave one unified file).
#ifndef PYFA_EMULATOR_CORE_H
#define PYFA_EMULATOR_CORE_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;

#define LANES 64
#define EACH_LANE for (int l = 0; l < LANES; l++)
#define ROWS 512
#define MAX_WAVES 16
#define LDS_MAX 65536

// Codes of operands, as the instruction encodings number them (ISA: "SSRC" and "SRC" tables),
// extended by AGPRs at 512.
enum {
    VCC = 106, M0 = 124, EXEC = 126, SHARED_BASE = 235, SHARED_LIMIT = 236, PRIVATE_BASE = 237,
    PRIVATE_LIMIT = 238, VCCZ = 251, EXECZ = 252, SRC_SCC = 253, LITERAL = 255, VGPR0 = 256,
    NO_OPERAND = 0xffff
};

// How an operand is read or written. The order is known to nobody outside C.
enum Type {
    NONE, B32, F32, F16, B16, F64, B64, PK16, PKF16, PKF32, PKB32, MIX,
    HALF_F16, HALF_B16  // destinations of which one half is written and the other kept
};

enum Check { CHECK_UNDEFINED, CHECK_MEMORY, CHECK_RACES, CHECK_WAITS, CHECK_BARRIERS,
             CHECK_ALIGNMENT, CHECK_GLOBAL_RACES, CHECKS };
enum Policy { POLICY_OFF, POLICY_RAISE, POLICY_COUNT };
// Kinds of error beyond the checks; shared with machine.py by number.
enum { ERROR_UNKNOWN = CHECKS, ERROR_UNSUPPORTED, ERROR_TRAP, ERROR_LIMIT };

enum { OK = 0, STOP = 1, ENDED = 2, BARRIER = 3 };

struct Wave;
struct Inst;
typedef int (*Handler)(struct Wave *, const struct Inst *);
typedef void (*Lanes)(u32 *d, const u32 *a, const u32 *b, const u32 *c);

// One decoded instruction; the layout is decode.INSTRUCTION's.
typedef struct Inst {
    Handler run;
    Lanes lanes;
    u32 pc, literal;
    i32 imm;      // SIMM16, memory offset, or the index of a branch's target
    u32 extra;    // DPP or SDWA dword; second DS offset
    u16 op, dst, sdst, src[3];
    u8 size, neg, abs, neg_hi, opsel, opsel_hi, omod, clamp;
    u8 mode;      // 0 plain, 1 DPP, 2 SDWA
    u8 glc, lds, idxen, offen, simple, to_exec, sc1;
} Inst;

struct Trace;
struct GroupTrace;
typedef struct { u64 base, size; u8 *host; u32 writable, id; } Region;

typedef struct {
    u32 set, kind, pc, wave, lane, workgroup[3];
    char text[240];
} Fault;

// Sums over a launch; the layout is counters.RAW's.
typedef struct {
    u64 lds_conflict_clocks, lds_clocks, lds_read_bytes, lds_write_bytes, lds_direct_bytes,
        load_bytes, scalar_bytes, store_bytes, segments64, segments128, barriers,
        buffer_out_of_range, violations[CHECKS];
} Totals;

typedef struct Shadow Shadow;
typedef struct Pool Pool;

typedef struct {
    Inst *code;
    u32 *index_of;            // (pc - first_pc) / 4 to index, 0xffffffff where none starts
    Region *regions;
    u32 *order;               // the workgroups as they are taken; 0 for in order
    Shadow *shadow;          // of the check for global races, or 0
    u64 image_base, kernarg_address, dispatch_address, queue_address;
    u32 code_count, first_pc, code_bytes, entry, region_count;
    u32 grid[3], block[3];    // grid counts workgroups
    u32 lds_bytes, scratch_bytes, mode, user_sgprs, user_bits, rsrc2, preload_length,
        preload_offset, vgpr_rows, in_order;
    u64 seed, max_instructions, rounding;  // rounding: 0 for that of this source (lanes.c, mfma.c)
    u8 policy[8];
    volatile u64 next_workgroup;
    struct Trace *trace;      // 0, or what records some of the workgroups (trace.h)
    Fault fault;
} Launch;

// What a memory instruction's last address pattern cost: patterns repeat, so that costs are
// looked up by comparing 64 distances.
typedef struct {
    u64 exec; u32 delta[LANES]; u32 phase, valid, a, b;
} Pattern;

typedef struct {
    u64 *executed;            // per instruction
    Totals totals;
    Pattern *patterns;        // per instruction
    Pool *pool;               // atomics under way
    u32 waves, groups;        // started so far
} Thread;

typedef struct { u32 sequence, base; u64 active; } Dma;  // a direct-to-LDS load under way, a dword a lane
typedef struct { u32 number, bytes, is_late; u64 exec; u32 at[LANES]; } LdsWrite;  // late.c
#define LDS_WRITES 64

struct Group;
typedef struct Wave {
    u32 v[ROWS][LANES] __attribute__((aligned(64)));
    u64 defined[ROWS];        // bit per lane
    u32 pending[ROWS];        // 0, or sequence << 1 | counter (0 vmcnt, 1 lgkmcnt)
    u32 s[128], s_defined[128], s_pending[128];
    u32 scc, scc_defined, mode, index;
    u32 vm_issued, vm_done, lds_issued, lds_done, smem_issued, smem_done;
    u32 stop, at_barrier, ended, barriers, pc;
    u64 executed;
    u64 random;
    const Launch *launch;
    Thread *thread;
    struct Group *group;
    u8 *scratch;
    u32 undefined_pc, undefined_where;  // last read of LDS never written: 1 when set
    Dma dma[64];
    u32 dma_count, region_hint;
    LdsWrite written[LDS_WRITES];  // that it has not waited for, as far as known
    u32 written_count;
    u32 key;                  // of all waves of the thread
    u32 last_write, write_barriers;  // the last store or atomic: as in vm_issued; after how many barriers
} Wave;

typedef struct Group {
    u8 lds[LDS_MAX] __attribute__((aligned(64)));
    u16 wrote[LDS_MAX], read[LDS_MAX];  // epoch << 5 | wave; 0 never, OLD in an earlier era
    u8 incoming[LDS_MAX];               // wave + 1 of an outstanding direct-to-LDS load
    u8 late[LDS_MAX];                   // wave + 1 of a ds write before the barrier, not waited for
    u32 incoming_count, late_count, epoch, id[3], waves;
    u32 lds_bytes;
    u32 number;                         // in the grid
    u32 key, buffered, barriers;        // of all of the thread; atomics in its pool; passed
    u32 stores, written_back;           // to global memory; how many when they were last written back
    u8 *offered, *acquired;             // sets of workgroups: races.c
    Wave *wave;
    struct GroupTrace *trace; // 0 unless this workgroup is recorded
} Group;
#define OLD 1u          // tag of a write before the era: wave 1 of epoch 0, which is never current
#define ERA 2000u       // barriers until tags are folded to OLD; 11 bits of epoch
#define SEVERAL 31u     // the wave field of a tag when several waves have read

typedef struct {
    const char *name;
    u8 kind, group, type, sources[3];
    Handler run;
    Lanes lanes;
    double (*exact)(double);  // what `lanes` rounds, where that is to vary (floats.h)
} Op;
// KIND_LOW: the low dword of a 64-bit result depends on the low dwords of the sources alone.
enum { KIND_SPECIAL, KIND_LANES, KIND_COMPARE, KIND_LOW };
enum { SALU, VALU, TRANS, MFMA, LDS, VMEM, SMEM, BRANCH, SYNC, WAIT };

extern const Op scalar_ops[], control_ops[], lanes_ops[], lanes16_ops[], compare_ops[],
    cross_ops[], mfma_ops[], lds_ops[], memory_ops[], scalar_memory_ops[];

int fail(Wave *w, const Inst *i, u32 kind, int lane, const char *format, ...);
int violated(Wave *w, const Inst *i, enum Check check, int lane, const char *format, ...);
int run_lanes(Wave *w, const Inst *i);
int run_transcendental(Wave *w, const Inst *i);
int run_compare(Wave *w, const Inst *i);
extern const u8 type_rows[];
const u32 *fetch(Wave *w, const Inst *i, int n, enum Type type, u32 *buffer, u64 *defined);
u64 low_defined(const Wave *w, const Inst *i, int n, u64 both);
int store_pair(Wave *w, const Inst *i, enum Type type, u32 *value, u64 low, u64 high);
int store_lanes(Wave *w, const Inst *i, enum Type type, u32 *value, u64 defined);
extern const Op *op_table[];
extern int op_total;

// --- small things shared by all parts -----------------------------------------------------------
static inline float as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 as_bits(float f) { u32 x; memcpy(&x, &f, 4); return x; }
static inline double as_double(u64 x) { double f; memcpy(&f, &x, 8); return f; }
static inline u64 as_bits64(double f) { u64 x; memcpy(&x, &f, 8); return x; }
static inline u64 exec_of(const Wave *w) { u64 x; memcpy(&x, &w->s[EXEC], 8); return x; }
static inline u64 pair_of(const u32 *p) { u64 x; memcpy(&x, p, 8); return x; }
static inline int checking(const Wave *w, enum Check c) { return w->launch->policy[c]; }
static inline u64 next_random(u64 *state) {  // splitmix64
    u64 z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

// A register with a load under way must not be read or written before a wait covers it.
int pending_fault(Wave *w, const Inst *i, u32 row);
static inline int still_pending(const Wave *w, u32 tag) {
    u32 sequence = tag >> 1;
    return (i32)(sequence - ((tag & 1) ? w->lds_done : w->vm_done)) > 0;
}
static inline int touch_rows(Wave *w, const Inst *i, u32 row, u32 count) {
    for (u32 r = row; r < row + count; r++)
        if (w->pending[r]) {
            if (still_pending(w, w->pending[r])) { if (pending_fault(w, i, r)) return STOP; }
            else w->pending[r] = 0;
        }
    return OK;
}
// A load may overwrite a register that an older load of the same in-order queue is still to fill.
static inline int touch_loaded(Wave *w, const Inst *i, u32 row, u32 count, u32 counter) {
    for (u32 r = row; r < row + count; r++)
        if (w->pending[r] && (w->pending[r] & 1) != counter && touch_rows(w, i, r, 1)) return STOP;
    return OK;
}
int scalar_pending_fault(Wave *w, const Inst *i, u32 reg);
static inline int touch_scalars(Wave *w, const Inst *i, u32 reg, u32 count) {
    for (u32 r = reg; r < reg + count && r < 128; r++)
        if (w->s_pending[r]) {
            if ((i32)(w->s_pending[r] - w->smem_done) > 0) {
                if (scalar_pending_fault(w, i, r)) return STOP;
            } else w->s_pending[r] = 0;
        }
    return OK;
}

// A scalar operand's dword; `half` 1 is the upper dword of a 64-bit operand.
u32 scalar_value(const Wave *w, const Inst *i, u32 code, int half, enum Type type);
// All ones where the bits of the dword are defined.
static inline u32 scalar_defined(const Wave *w, u32 code) {
    if (code < 128) return w->s_defined[code];
    return code == SRC_SCC ? (w->scc_defined ? ~0u : 0u) : ~0u;
}
static inline void set_scalar(Wave *w, u32 code, u32 value, u32 defined) {
    w->s[code] = value;
    w->s_defined[code] = defined;
}
void write_row(Wave *w, u32 row, const u32 *value, u64 lanes, u64 defined);
#endif
