// Which lanes of an LDS access are served in one clock. LDS has 32 banks of 4 bytes; in a phase each
// bank gives one dword, to every lane that asks for it.
//
//   bytes a lane   read                                write
//   1, 2, 4        32 lanes in a row (a)               32 in a row (a)
//   8              16 in a row (b)                     16 in a row (c)
//   12             8: groups of four, crossed (c)      8 in a row (e)
//   16             8: groups of four, crossed (b, d)   8 in a row (d)
//
// (a) 128 bytes a clock, ROCm Compute Profiler, "Local data share"; no lane groups published.
// (b) measured on an MI300 by timing pairs of lanes: github.com/tingqli/pyhip, tests/bank-conflict.
// (c) measured by conflict counters on an MI355X, which has 32 banks for these widths too:
//     HipKittens, analysis/paper_experiments/phases.
// (d) AMD, Composable Kernel, "Understanding AMD GPU LDS and Bank Conflicts".
// (e) assumed: as 16 bytes. Atomics are assumed to go as writes of their width.
#ifndef PYFA_EMULATOR_PHASES_H
#define PYFA_EMULATOR_PHASES_H
#include "core.h"

// The order in which lanes are served; a phase takes the next `together` of them.
static const u8 in_a_row[LANES] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};
static const u8 crossed[LANES] = {
    0,  1,  2,  3,  20, 21, 22, 23, 4,  5,  6,  7,  16, 17, 18, 19,
    8,  9,  10, 11, 28, 29, 30, 31, 12, 13, 14, 15, 24, 25, 26, 27,
    32, 33, 34, 35, 52, 53, 54, 55, 36, 37, 38, 39, 48, 49, 50, 51,
    40, 41, 42, 43, 60, 61, 62, 63, 44, 45, 46, 47, 56, 57, 58, 59,
};
typedef struct { u32 together; const u8 *lanes; } Phases;

static inline Phases phases_of(u32 bytes, int writes) {
    if (bytes <= 4) return (Phases){32, in_a_row};
    if (bytes == 8) return (Phases){16, in_a_row};
    return (Phases){8, writes ? in_a_row : crossed};
}
#endif
