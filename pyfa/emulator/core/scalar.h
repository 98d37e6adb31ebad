// Reading and writing scalar operands with their defined bits.
#ifndef PYFA_EMULATOR_SCALAR_H
#define PYFA_EMULATOR_SCALAR_H
#include "core.h"

typedef struct { u64 value, defined; } Bits;

static inline int read32(Wave *w, const Inst *i, u32 code, Bits *b) {
    if (code < 128 && touch_scalars(w, i, code, 1)) return STOP;
    b->value = scalar_value(w, i, code, 0, B32);
    b->defined = scalar_defined(w, code);
    return OK;
}
static inline int read64(Wave *w, const Inst *i, u32 code, Bits *b) {
    if (code < 128 && touch_scalars(w, i, code, 2)) return STOP;
    b->value = scalar_value(w, i, code, 0, B64) | (u64)scalar_value(w, i, code, 1, B64) << 32;
    b->defined = code < 128 ? pair_of(&w->s_defined[code]) : ~0ull;
    return OK;
}
static inline int put32(Wave *w, const Inst *i, u32 code, u32 value, u64 defined) {
    if (touch_scalars(w, i, code, 1)) return STOP;
    set_scalar(w, code, value, (u32)defined);
    if (code >= EXEC && (u32)defined != ~0u)
        return violated(w, i, CHECK_UNDEFINED, -1, "EXEC is set from undefined bits");
    return OK;
}
static inline int put64(Wave *w, const Inst *i, u32 code, u64 value, u64 defined) {
    if (touch_scalars(w, i, code, 2)) return STOP;
    memcpy(&w->s[code], &value, 8);
    memcpy(&w->s_defined[code], &defined, 8);
    if (code == EXEC && defined != ~0ull)
        return violated(w, i, CHECK_UNDEFINED, -1, "EXEC is set from undefined bits");
    return OK;
}
static inline void set_scc(Wave *w, u32 value, int defined) { w->scc = value; w->scc_defined = defined; }
#endif
