// Everything between Q K^T and softmax, once for both vendors: scale, softcap, ALiBi, bias. Needs
// DEVICE, exp2 and kLog2E.
#pragma once
#include "params.h"

// To 2 ulp: a polynomial below 0.625 (Cephes' tanhf, S. Moshier 1984), else by exponentials.
DEVICE float tanh(float x) {
  float z = x * x;
  float odd = ((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z;
  odd = ((odd + 1.33314422036e-1f) * z - 3.33332819422e-1f) * z * x + x;
  float e = exp2(__builtin_fabsf(x) * (-2.0f * kLog2E));
  float large = __builtin_copysignf((1.0f - e) / (1.0f + e), x);
  return __builtin_fabsf(x) < 0.625f ? odd : large;
}

enum BiasType { kNoBias, kBoolBias, kFloat32Bias, kFloat16Bias, kBfloat16Bias };

// What one query row's scores need to know.
struct Terms {
  float scale, softcap, slope;
  const char *bias;      // of the row, null without
  long long bias_step;   // bytes from key to key
  int bias_type;
};

// `row` counts inside the sequence.
DEVICE Terms terms_of(const Params &p, int batch, int head, int row) {
  Terms terms;
  terms.scale = p.scale;
  terms.softcap = p.softcap;
  terms.slope = 0.0f;
  if (p.alibi_slopes) terms.slope = ((const float *)p.alibi_slopes)[batch * p.slopes_batch + head];
  terms.bias_type = p.bias_type;
  int size = p.bias_type == kBoolBias ? 1 : p.bias_type == kFloat32Bias ? 4 : 2;
  terms.bias = p.bias_type == kNoBias
                   ? nullptr
                   : (const char *)p.bias +
                         (batch * p.bias_batch + head * p.bias_head + row * p.bias_row) * size;
  terms.bias_step = p.bias_key * size;
  return terms;
}

// The score of q.k = `qk` before bias and mask. `distance` is key - row - shift: what ALiBi weighs.
// `derivative` becomes d score / d qk.
DEVICE float score(const Terms &terms, float qk, int distance, float &derivative) {
  float s = qk * terms.scale;
  derivative = terms.scale;
  if (terms.softcap > 0.0f) {
    float t = tanh(s / terms.softcap);
    s = t * terms.softcap;
    derivative *= 1.0f - t * t;
  }
  return s - terms.slope * __builtin_fabsf((float)distance);
}

// The bias of one key, -inf where a boolean one masks. Only where terms.bias is not null.
DEVICE float bias_of(const Terms &terms, int key) {
  const char *at = terms.bias + key * terms.bias_step;
  if (terms.bias_type == kFloat32Bias) return *(const float *)at;
  if (terms.bias_type == kBoolBias) return *at ? 0.0f : -INFINITY_F;
  unsigned short bits = *(const unsigned short *)at;
  if (terms.bias_type == kBfloat16Bias) return __builtin_bit_cast(float, (unsigned)bits << 16);
  return (float)__builtin_bit_cast(_Float16, bits);
}
