// What ../mods.h needs of HIP.
#pragma once
#include "arguments.h"

#define KERNEL_PARAMS ModifiedParams

// Or what follows from a load would be taken for different in each lane.
DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }

DEVICE float mod_floor(float x) { return __builtin_floorf(x); }
DEVICE float mod_ceil(float x) { return __builtin_ceilf(x); }
DEVICE float mod_trunc(float x) { return __builtin_truncf(x); }
DEVICE float mod_round(float x) { return __builtin_rintf(x); }
DEVICE float mod_sqrt(float x) { return __builtin_amdgcn_sqrtf(x); }
// v_sin_f32 counts in turns.
constexpr float kTurns = 0.15915494309189535f;
DEVICE float mod_sin(float x) { return __builtin_amdgcn_sinf(__builtin_amdgcn_fractf(x * kTurns)); }
DEVICE float mod_cos(float x) { return __builtin_amdgcn_cosf(__builtin_amdgcn_fractf(x * kTurns)); }

#include "../mods.h"
