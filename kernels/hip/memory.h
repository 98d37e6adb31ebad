// How LDS and bounded memory are addressed.
#pragma once
#include "mma.h"

typedef __attribute__((address_space(3))) char *Lds;
typedef __attribute__((address_space(3))) Quad *LdsQuads;
typedef __attribute__((address_space(3))) Pair *LdsPairs;
typedef __attribute__((address_space(3))) unsigned *LdsWords;

DEVICE Quad lds_read(Lds at) { return *(LdsQuads)at; }
DEVICE void lds_write(Lds at, Quad x) { *(LdsQuads)at = x; }
DEVICE void lds_write(Lds at, Pair x) { *(LdsPairs)at = x; }
DEVICE void lds_write(Lds at, unsigned x) { *(LdsWords)at = x; }

// LDS has 32 banks of 4 bytes: what is read together in units of 16 bytes is best one line of all.
constexpr int kUnitBytes = 16;
constexpr int kLineBytes = 128;

// The last word of a buffer's descriptor: raw 32-bit data (CDNA 3 ISA, 9.1.5).
constexpr int kRawDwords = 0x00020000;

// Loads from beyond `bytes` give 0.
DEVICE __amdgpu_buffer_rsrc_t buffer(const void *base, int bytes) {
  return __builtin_amdgcn_make_buffer_rsrc((void *)base, 0, bytes, kRawDwords);
}
