// The kernel's parameters, read again where rare paths need them: from `Params` by value they would
// stay in scalar registers through the loop (31 of them spilled in the forward, 20 in decode, 191 in backward).
#pragma once
#include "../params.h"
#include "device.h"

DEVICE const Params &params_again() {
  auto p = (const __attribute__((address_space(4))) Params *)__builtin_amdgcn_kernarg_segment_ptr();
  pin_scalar(p);
  return *(const Params *)p;
}
