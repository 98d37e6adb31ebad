// What a traced workgroup executed, in the order in which the emulator ran it.
#ifndef PYFA_EMULATOR_TRACE_H
#define PYFA_EMULATOR_TRACE_H
#include "core.h"

// One instruction of one wavefront. Where it reached memory, `accesses` of them, from `first` on.
typedef struct { u32 index; u16 wave, accesses; u32 first; } TraceEvent;
enum { TRACE_LDS, TRACE_MEMORY };
// LDS: 64 lane addresses at `first` of `lanes`, 0xffffffff where a lane is off. Memory: `count`
// different aligned 64-byte segments at `first` of `segments`, whose lanes ask for `bytes` in all.
typedef struct { u32 kind, bytes, count, first; } TraceAccess;

typedef struct GroupTrace {
    u64 workgroup;
    u32 waves, failed;
    u64 events, accesses, lanes, segments;              // how many
    u64 room_events, room_accesses, room_lanes, room_segments;
    TraceEvent *event;
    TraceAccess *access;
    u32 *lane;
    u64 *segment;
} GroupTrace;

struct Trace { u32 count; GroupTrace group[]; };

GroupTrace *trace_of(struct Trace *t, u64 workgroup, u32 waves);  // 0 where it is not recorded
void trace_event(GroupTrace *t, u32 index, u32 wave);
void trace_lds(GroupTrace *t, const u32 *at, u32 bytes, u64 active);
void trace_memory(GroupTrace *t, const u64 *at, u32 bytes, u64 active);
#endif
