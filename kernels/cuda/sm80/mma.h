// The 16-bit matrix instruction of Ampere and later archs, and the loads of its operands from shared memory.
//
// mma.sync.m16n8k16: D (16 x 8) += A (16 x 16) B (16 x 8). With group = lane / 4 and pair = lane % 4,
//   A's registers 0 ... 3 hold rows group and group + 8 in turn, elements 2 pair and 2 pair + 1 of the
//     first 8 of the inner dimension (registers 0, 1), then of the last 8 (2, 3)
//   B's registers 0, 1 hold column group, elements 2 pair, 2 pair + 1 of the first and of the last 8
//   D's registers 0, 1 hold row group, columns 2 pair and 2 pair + 1; 2, 3 the same of row group + 8
// so the D of two neighboring products, rounded in pairs, is the A of the next one's k-slice: P needs
// no move. Source: PTX ISA, "Matrix fragments for mma.m16n8k16".
#pragma once
#include "../format.h"

template <int dtype>
DEVICE void mma(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (dtype == BFLOAT16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Shared memory by its own 32-bit addresses.
typedef unsigned Shared;
DEVICE Shared shared_address(const void *at) { return (Shared)__cvta_generic_to_shared(at); }

// Four 8 x 8 matrices of 16-bit elements: lane l gives the address of row l % 8 of matrix l / 8 and gets
// row l / 4, elements 2 (l % 4) and 2 (l % 4) + 1 of each; transposed: column l / 4 instead of a row.
DEVICE void ldmatrix(unsigned (&x)[4], Shared at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at));
}
DEVICE void ldmatrix_transposed(unsigned (&x)[4], Shared at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(at));
}

// Copies 16 bytes from global to shared memory without registers. `bytes` (0 or 16) of them are read, the
// rest is 0. The copy is complete after wait_for_copies<n> in the thread that issued it; other threads see it
// after a barrier.
DEVICE void copy_16(Shared to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
DEVICE void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the last `groups` groups of copies are complete.
template <int groups>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}
