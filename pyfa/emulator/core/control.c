// SOPK moves, SOPP, jumps, waits, barriers and hardware registers.
#include "scalar.h"
#include "late.h"
#include "pending.h"

static int movk(Wave *w, const Inst *i) { return put32(w, i, i->dst, (u32)i->imm, ~0ull); }
static int cmovk(Wave *w, const Inst *i) { return w->scc ? movk(w, i) : OK; }
static int addk(Wave *w, const Inst *i) {
    Bits p;
    if (read32(w, i, i->dst, &p)) return STOP;
    u32 x = (u32)p.value, y = (u32)i->imm, r = x + y, whole = (u32)p.defined == ~0u;
    set_scc(w, (~(x ^ y) & (x ^ r)) >> 31, whole);
    return put32(w, i, i->dst, r, whole ? ~0ull : 0);
}
static int mulk(Wave *w, const Inst *i) {
    Bits p;
    if (read32(w, i, i->dst, &p)) return STOP;
    return put32(w, i, i->dst, (u32)p.value * (u32)i->imm, (u32)p.defined == ~0u ? ~0ull : 0);
}
// hwreg(id, offset, width): only MODE (1) changes what is computed, HW_ID and the others are facts
// of a real chip that a kernel's result should not depend on.
static int getreg(Wave *w, const Inst *i) {
    u32 id = i->imm & 63, offset = i->imm >> 6 & 31, width = (i->imm >> 11 & 31) + 1;
    u32 value = id == 1 ? w->mode : 0;
    return put32(w, i, i->dst, (u32)(value >> offset & ((1ull << width) - 1)), ~0ull);
}
static int write_mode(Wave *w, const Inst *i, u32 value) {
    u32 id = i->imm & 63, offset = i->imm >> 6 & 31, width = (i->imm >> 11 & 31) + 1;
    if (id != 1) return fail(w, i, ERROR_UNSUPPORTED, -1, "hardware register %u is not modeled", id);
    u32 mask = (u32)(((1ull << width) - 1) << offset);
    w->mode = (w->mode & ~mask) | (value << offset & mask);
    if (w->mode & 15) return fail(w, i, ERROR_UNSUPPORTED, -1, "rounding modes other than nearest");
    return OK;
}
static int setreg(Wave *w, const Inst *i) {
    Bits p;
    if (read32(w, i, i->dst, &p)) return STOP;
    return write_mode(w, i, (u32)p.value);
}
static int setreg_imm(Wave *w, const Inst *i) { return write_mode(w, i, i->literal); }

// --- control ------------------------------------------------------------------------------------
static int go(Wave *w, const Inst *i) {
    if ((u32)i->imm >= w->launch->code_count)
        return fail(w, i, ERROR_UNSUPPORTED, -1, "branch to where no instruction starts");
    w->index = (u32)i->imm;
    return OK;
}
static int jump(Wave *w, const Inst *i, u64 address) {
    const Launch *c = w->launch;
    u64 at = address - c->image_base - c->first_pc;
    u32 index = at < c->code_bytes && !(at & 3) ? c->index_of[at / 4] : ~0u;
    if (index == ~0u)
        return fail(w, i, ERROR_UNSUPPORTED, -1, "jump to 0x%llx, where no instruction starts",
                    (unsigned long long)address);
    w->index = index;
    return OK;
}
static int undefined_branch(Wave *w, const Inst *i, const char *what) {
    return violated(w, i, CHECK_UNDEFINED, -1, "the branch depends on undefined bits of %s", what);
}
static int branch(Wave *w, const Inst *i) { return go(w, i); }
static int scc0(Wave *w, const Inst *i) {
    if (!w->scc_defined && undefined_branch(w, i, "SCC")) return STOP;
    return w->scc ? OK : go(w, i);
}
static int scc1(Wave *w, const Inst *i) {
    if (!w->scc_defined && undefined_branch(w, i, "SCC")) return STOP;
    return w->scc ? go(w, i) : OK;
}
static int vcc_zero(Wave *w, const Inst *i, int *zero) {
    if (touch_scalars(w, i, VCC, 2)) return STOP;
    u64 value = pair_of(&w->s[VCC]), defined = pair_of(&w->s_defined[VCC]);
    *zero = value == 0;
    return defined == ~0ull || (value & defined) ? OK : undefined_branch(w, i, "VCC");
}
static int vccz(Wave *w, const Inst *i) {
    int zero;
    return vcc_zero(w, i, &zero) ? STOP : zero ? go(w, i) : OK;
}
static int vccnz(Wave *w, const Inst *i) {
    int zero;
    return vcc_zero(w, i, &zero) ? STOP : zero ? OK : go(w, i);
}
static int execz(Wave *w, const Inst *i) { return exec_of(w) ? OK : go(w, i); }
static int execnz(Wave *w, const Inst *i) { return exec_of(w) ? go(w, i) : OK; }
static u64 next_address(const Wave *w, const Inst *i) {
    return w->launch->image_base + i->pc + i->size;
}
static int getpc(Wave *w, const Inst *i) {
    return put64(w, i, i->dst, next_address(w, i), ~0ull);
}
static int setpc(Wave *w, const Inst *i) {
    Bits p;
    if (read64(w, i, i->src[0], &p)) return STOP;
    return jump(w, i, p.value);
}
static int swappc(Wave *w, const Inst *i) {
    Bits p;
    if (read64(w, i, i->src[0], &p)) return STOP;
    return put64(w, i, i->dst, next_address(w, i), ~0ull) || jump(w, i, p.value) ? STOP : OK;
}
static int call(Wave *w, const Inst *i) {
    return put64(w, i, i->dst, next_address(w, i), ~0ull) || go(w, i) ? STOP : OK;
}
static int nothing(Wave *w, const Inst *i) { (void)w; (void)i; return OK; }
static int endpgm(Wave *w, const Inst *i) { (void)w; (void)i; return ENDED; }
static int barrier(Wave *w, const Inst *i) { (void)w; (void)i; return BARRIER; }
static int trap(Wave *w, const Inst *i) {
    return fail(w, i, ERROR_TRAP, -1, "the kernel trapped (trap id %d)", i->imm & 255);
}
// vmcnt is bits 3:0 and 15:14, lgkmcnt bits 11:8. LDS operations finish in order, and so do vector
// memory operations; scalar loads do not, so that only lgkmcnt(0) proves that one has finished.
static int waitcnt(Wave *w, const Inst *i) {
    u32 vm = (i->imm & 15) | (i->imm >> 10 & 48), lgkm = i->imm >> 8 & 15;
    if (w->vm_issued - w->vm_done > vm && vm < 63) {
        w->vm_done = w->vm_issued - vm;
        if (w->dma_count) loads_waited(w);
    }
    if (vm < 63 && w->group->buffered) commit_waited(w);
    if (lgkm < 15 && w->lds_issued - w->lds_done > lgkm) {
        w->lds_done = w->lds_issued - lgkm;
        if (w->written_count) lds_waited(w);
    }
    if (lgkm == 0) w->smem_done = w->smem_issued;
    return OK;
}
static int memtime(Wave *w, const Inst *i) {  // instructions executed stand for the clock
    if (put64(w, i, i->dst, w->executed, ~0ull)) return STOP;
    w->s_pending[i->dst] = w->s_pending[i->dst + 1] = ++w->smem_issued;
    return OK;
}

#define S(n, f) {"s_" #n, KIND_SPECIAL, SALU, NONE, {NONE, NONE, NONE}, f, 0}
#define B(n, f) {"s_" #n, KIND_SPECIAL, BRANCH, NONE, {NONE, NONE, NONE}, f, 0}
#define W(n, f, g) {"s_" #n, KIND_SPECIAL, g, NONE, {NONE, NONE, NONE}, f, 0}
const Op control_ops[] = {
    S(movk_i32, movk), S(cmovk_i32, cmovk), S(addk_i32, addk), S(mulk_i32, mulk),
    S(getreg_b32, getreg), S(setreg_b32, setreg), S(setreg_imm32_b32, setreg_imm),
    B(branch, branch), B(cbranch_scc0, scc0), B(cbranch_scc1, scc1), B(cbranch_vccz, vccz),
    B(cbranch_vccnz, vccnz), B(cbranch_execz, execz), B(cbranch_execnz, execnz),
    B(getpc_b64, getpc), B(setpc_b64, setpc), B(swappc_b64, swappc), B(call_b64, call),
    B(endpgm, endpgm), B(trap, trap), S(nop, nothing), S(setprio, nothing), S(sleep, nothing),
    S(icache_inv, nothing), S(dcache_inv, nothing), S(dcache_wb, nothing), S(sethalt, nothing),
    S(ttracedata, nothing), W(memtime, memtime, SMEM), W(memrealtime, memtime, SMEM),
    W(barrier, barrier, SYNC), W(waitcnt, waitcnt, WAIT),
    {0},
};
