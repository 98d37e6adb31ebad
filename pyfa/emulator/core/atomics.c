// What an atomic leaves in memory, for 32-bit (in the low half) and 64-bit values.
//
// Float additions round to nearest even, whatever MODE says, and quiet a NaN. In global memory
// denormals are kept, as operands and as results, whatever MODE says: f32 since gfx940 (LLVM's
// FeatureMemoryAtomicFAddF32DenormalSupport, llvm-project#96443; before, "global FP atomic
// instructions have a hardcoded FP mode and do not support FP32 denormals, and only support v2f16
// denormals", LLVM review D87864), f16 and bf16 as AMD's own simulator has them ("fixed nearest-even
// rounding, preserve memory-atomic denormals", ROCm/rocm-systems#11447). In LDS f32 follows MODE's
// FP_DENORM ("DS FP atomics do respect the denormal mode, but the rounding mode is fixed to
// round-to-nearest-even", D87864; llvm-project#89468), f64 never flushes. The three sources agree with
// each other; none was compared with silicon here.
#include "atomics.h"
#include "floats.h"

static u64 float_op(u32 kind, u32 old, u32 data) {
    float x = as_float(old), y = as_float(data);
    if (kind == A_ADDF32) return as_bits(x + y);
    if (kind == A_MINF32) return y < x ? data : old;
    return y > x ? data : old;
}
static u64 packed(u32 kind, u32 old, u32 data) {
    u32 r = 0;
    for (u32 n = 0; n < 32; n += 16) {
        u32 x = old >> n & 0xffff, y = data >> n & 0xffff;
        r |= (kind == A_PKF16 ? to_f16(from_f16(x) + from_f16(y))
                              : to_bf16(from_bf16(x) + from_bf16(y))) << n;
    }
    return r;
}
static u32 without_denormal(u32 x) { return x & 0x7f800000 ? x : x & 0x80000000; }
u64 lds_atomic_update(u32 mode, u32 kind, u64 old, u64 data, u64 compare) {
    if (kind != A_ADDF32 && kind != A_MINF32 && kind != A_MAXF32)
        return atomic_update(kind, old, data, compare);
    u32 x = (u32)old, y = (u32)data;
    if (!(mode & 0x10)) { x = without_denormal(x); y = without_denormal(y); }
    u32 r = (u32)float_op(kind, x, y);
    return mode & 0x20 ? r : without_denormal(r);
}
u64 atomic_update(u32 kind, u64 old, u64 data, u64 compare) {
    u32 x = (u32)old, y = (u32)data;
    i64 sx = (i64)old, sy = (i64)data;
    switch (kind) {
    case A_SWAP: return data;
    case A_CMPSWAP32: return x == (u32)compare ? y : x;
    case A_CMPSWAP64: return old == compare ? data : old;
    case A_ADD32: return x + y;
    case A_SUB32: return x - y;
    case A_SMIN32: return (i32)y < (i32)x ? y : x;
    case A_UMIN32: return y < x ? y : x;
    case A_SMAX32: return (i32)y > (i32)x ? y : x;
    case A_UMAX32: return y > x ? y : x;
    case A_AND: return old & data;
    case A_OR: return old | data;
    case A_XOR: return old ^ data;
    case A_INC32: return x >= y ? 0 : x + 1;
    case A_DEC32: return x == 0 || x > y ? y : x - 1;
    case A_ADDF32: case A_MINF32: case A_MAXF32: return float_op(kind, x, y);
    case A_PKF16: case A_PKBF16: return packed(kind, x, y);
    case A_ADD64: return old + data;
    case A_SUB64: return old - data;
    case A_SMIN64: return sy < sx ? data : old;
    case A_UMIN64: return data < old ? data : old;
    case A_SMAX64: return sy > sx ? data : old;
    case A_UMAX64: return data > old ? data : old;
    case A_ADDF64: return as_bits64(as_double(old) + as_double(data));
    case A_MINF64: return as_double(data) < as_double(old) ? data : old;
    case A_MAXF64: return as_double(data) > as_double(old) ? data : old;
    }
    return old;
}
