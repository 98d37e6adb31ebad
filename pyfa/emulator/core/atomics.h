// The read-modify-write operations that LDS and global memory share.
#ifndef PYFA_EMULATOR_ATOMICS_H
#define PYFA_EMULATOR_ATOMICS_H
#include "core.h"
enum {
    A_SWAP, A_CMPSWAP32, A_CMPSWAP64, A_ADD32, A_SUB32, A_SMIN32, A_UMIN32, A_SMAX32, A_UMAX32,
    A_AND, A_OR, A_XOR, A_INC32, A_DEC32, A_ADDF32, A_MINF32, A_MAXF32, A_PKF16, A_PKBF16, A_ADD64,
    A_SUB64, A_SMIN64, A_UMIN64, A_SMAX64, A_UMAX64, A_ADDF64, A_MINF64, A_MAXF64
};
u64 atomic_update(u32 kind, u64 old, u64 data, u64 compare);
u64 lds_atomic_update(u32 mode, u32 kind, u64 old, u64 data, u64 compare);
#endif
