// What ../mods.h needs of CUDA.
#pragma once
#include "device.h"

#define GLOBAL

DEVICE int uniform(int x) { return x; }

DEVICE float mod_floor(float x) { return floorf(x); }
DEVICE float mod_ceil(float x) { return ceilf(x); }
DEVICE float mod_trunc(float x) { return truncf(x); }
DEVICE float mod_round(float x) { return rintf(x); }
DEVICE float mod_sqrt(float x) { return sqrtf(x); }
// sinf has a path for large arguments that takes local memory: brought to one turn first, as HIP's.
constexpr float kTurnsOfOne = 0.15915494309189535f, kOneTurn = 6.283185307179586f;
DEVICE float mod_turn(float x) {
  x *= kTurnsOfOne;
  return (x - rintf(x)) * kOneTurn;
}
DEVICE float mod_sin(float x) { return __sinf(mod_turn(x)); }
DEVICE float mod_cos(float x) { return __cosf(mod_turn(x)); }

#include "../mods.h"
