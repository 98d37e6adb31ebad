// Atomics under way, and the check for global races: what happens between the memory instructions.
#ifndef PYFA_EMULATOR_PENDING_H
#define PYFA_EMULATOR_PENDING_H
#include "core.h"

Pool *new_pool(u64 seed);
void commit_any(Pool *pool);
void commit_all(Pool *pool);
void commit_waited(Wave *w);
void commit_overlapping(Wave *w, u64 low, u64 high);

enum Access_kind { ACCESS_READ, ACCESS_WRITE, ACCESS_ATOMIC };
int note_access(Wave *w, const Inst *i, int lane, u64 address, u32 bytes, enum Access_kind kind);
// Of an address that host_of has found.
static inline int note_global(Wave *w, const Inst *i, int lane, u64 address, u32 bytes,
                              enum Access_kind kind) {
    return w->launch->shadow ? note_access(w, i, lane, address, bytes, kind) : OK;
}
void synchronize(Wave *w, const u64 *at, u64 active);
void write_back(Wave *w);
void invalidate(Wave *w);
#endif
