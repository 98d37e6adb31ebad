// What vector and scalar memory instructions share.
#ifndef PYFA_EMULATOR_MEMORY_H
#define PYFA_EMULATOR_MEMORY_H
#include "pending.h"

// The host's address of a range of device memory; 0 where it is not inside one region.
u8 *host_of(Wave *w, u64 address, u32 bytes, int writing);
int outside_memory(Wave *w, const Inst *i, int lane, u64 address, u32 bytes, const char *what);
void count_segments(Wave *w, const Inst *i, const u64 *at, u32 bytes, u64 active, int store);
int need_scalar(Wave *w, const Inst *i, u32 code, u32 count, const char *what);
typedef struct { u32 bytes, rows, sign, high; } Access;  // high: 0 whole, 1 d16, 2 d16_hi
int need_defined(Wave *w, const Inst *i, u64 lanes, u64 defined, const char *what);
int check_scratch(Wave *w, const Inst *i, u32 bytes, const u32 *at);
int scratch_addresses(Wave *w, const Inst *i, u32 *at);
int scratch_load_at(Wave *w, const Inst *i, const u32 *at, Access x);
int scratch_store_at(Wave *w, const Inst *i, const u32 *at, Access x);
int memory_atomic(Wave *w, const Inst *i, const u64 *at, u64 active, u32 kind, u32 bytes);
int note_write(Wave *w, const Inst *i, int lane, u32 at, u32 bytes, int is_defined, const u8 *data);
#endif
