// Everything between Q K^T and softmax, once for both vendors: scale, softcap, ALiBi, bias. Needs
// DEVICE, exp2, reciprocal and kLog2E.
#pragma once
#include "params.h"

// To 2 ulp: a polynomial below 0.625 (Cephes' tanhf, S. Moshier 1984), else by exponentials.
DEVICE float tanh(float x) {
  float z = x * x;
  float odd = ((-5.70498872745e-3f * z + 2.06390887954e-2f) * z - 5.37397155531e-2f) * z;
  odd = ((odd + 1.33314422036e-1f) * z - 3.33332819422e-1f) * z * x + x;
  float e = exp2(__builtin_fabsf(x) * (-2.0f * kLog2E));
  float large = __builtin_copysignf((1.0f - e) * reciprocal(1.0f + e), x);
  return __builtin_fabsf(x) < 0.625f ? odd : large;
}

enum BiasType { kNoBias, kBoolBias, kFloat32Bias, kFloat16Bias, kBfloat16Bias };

DEVICE int size_of_bias(int type) { return type == kBoolBias ? 1 : type == kFloat32Bias ? 4 : 2; }

// What one query row's scores need to know.
struct Terms {
  float scale, softcap, inverse, slope;  // inverse: scale / softcap
  const char *bias;      // of the row, null without
  long long bias_step;   // bytes from key to key
  int bias_type;
};

// `row` counts inside the sequence.
DEVICE Terms terms_of(const Params &p, int batch, int head, int row) {
  Terms terms;
  terms.scale = p.scale;
  terms.softcap = p.softcap;
  terms.inverse = p.softcap > 0.0f ? p.scale / p.softcap : 0.0f;
  terms.slope = 0.0f;
  if (p.alibi_slopes) terms.slope = ((const float *)p.alibi_slopes)[batch * p.slopes_batch + head];
  terms.bias_type = p.bias_type;
  int size = size_of_bias(p.bias_type);
  terms.bias = p.bias_type == kNoBias
                   ? nullptr
                   : (const char *)p.bias +
                         (batch * p.bias_batch + head * p.bias_head + row * p.bias_row) * size;
  terms.bias_step = p.bias_key * size;
  return terms;
}

// scale q.k, or c tanh(scale q.k / c). `derivative` becomes what d score / d q.k is.
DEVICE float softcapped(const Terms &terms, float qk, float &derivative) {
  float t = tanh(qk * terms.inverse);
  derivative = terms.scale * (1.0f - t * t);
  return t * terms.softcap;
}

// `distance` is key - row - shift.
DEVICE float alibi(const Terms &terms, int distance) {
  return -terms.slope * __builtin_fabsf((float)distance);
}

// The score of q.k = `qk` as a score_mod gets it: before ALiBi, bias and mask.
DEVICE float capped(const Terms &terms, float qk, float &derivative) {
  float s = qk * terms.scale;
  derivative = terms.scale;
  if (terms.softcap > 0.0f) s = softcapped(terms, qk, derivative);
  return s;
}
// The same before bias and mask.
DEVICE float score(const Terms &terms, float qk, int distance, float &derivative) {
  return capped(terms, qk, derivative) + alibi(terms, distance);
}

// A bias of `type`, whose `size` in bytes tells it but for the two of 16 bits: -inf where a boolean one masks.
template <int size>
DEVICE float bias_value(int type, unsigned bits) {
  if constexpr (size == 4) return __builtin_bit_cast(float, bits);
  if constexpr (size == 1) return bits ? 0.0f : -INFINITY_F;
  return type == kBfloat16Bias ? __builtin_bit_cast(float, bits << 16) : float_of_half(bits);
}

// The bias of one key. Only where terms.bias is not null.
template <int size>
DEVICE float bias_of(const Terms &terms, int key) {
  const char *at = terms.bias + key * terms.bias_step;
  unsigned bits;
  if constexpr (size == 4)
    bits = *(const unsigned *)at;
  else if constexpr (size == 2)
    bits = *(const unsigned short *)at;
  else
    bits = *(const unsigned char *)at;
  return bias_value<size>(terms.bias_type, bits);
}

DEVICE float bias_of(const Terms &terms, int key) {
  int size = size_of_bias(terms.bias_type);
  return size == 4 ? bias_of<4>(terms, key)
                   : size == 1 ? bias_of<1>(terms, key) : bias_of<2>(terms, key);
}

// The score `x` with the bias of one key. What a boolean one masks is -inf whatever `x` is: the key may be NaN.
template <int size>
DEVICE float biased(const Terms &terms, float x, int key) {
  float bias = bias_of<size>(terms, key);
  return size == 1 && bias < 0.0f ? bias : x + bias;
}

DEVICE float biased(const Terms &terms, float x, int key) {
  int size = size_of_bias(terms.bias_type);
  return size == 4 ? biased<4>(terms, x, key)
                   : size == 1 ? biased<1>(terms, x, key) : biased<2>(terms, x, key);
}
