// What is under way into LDS.
#ifndef PYFA_EMULATOR_LATE_H
#define PYFA_EMULATOR_LATE_H
#include "core.h"

void lds_written(Wave *w, const u32 *at, u32 bytes, u64 exec);
void lds_waited(Wave *w);
void lds_barrier(Group *g);
int touch_late(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, const char *what);

enum Touch { BY_READ, BY_WRITE, BY_LOAD };
int load_into_lds(Wave *w, const Inst *i, u32 sequence, u32 base, u64 active);
void loads_waited(Wave *w);
int touch_incoming(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, enum Touch how);
#endif
