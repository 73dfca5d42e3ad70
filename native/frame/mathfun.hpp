// exp, SiLU and the two GELUs in fp32, without branches so that loops over them vectorise. NaN and infinities
// propagate as in ATen.
#pragma once

#include "convert.hpp"

namespace gemmtune {
namespace {

// exp in [-ln2/2, ln2/2] by the degree-5 minimax polynomial of Cephes' expf.
inline float exp_of_remainder(float r) {
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return (p * r * r + r) + 1.0f;
}

// exp by range reduction to [-ln2/2, ln2/2] with a two-part ln2 (Cody & Waite 1980); 2 ulp on the finite range. Below -87.3 the
// result flushes to 0, above 88.7 it is inf.
inline float exp_f32(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.7f ? 88.7f : x);
  const float n = __builtin_rintf(clamped * 1.44269504f);
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  const float m = exp_of_remainder(r);
  // n is at most 128, and 2^128 overflows: scale by two factors.
  const int32_t e = x == x ? static_cast<int32_t>(n) : 0;
  const int32_t half = e >> 1;
  float y = m * from_bits(static_cast<uint32_t>(half + 127) << 23) *
            from_bits(static_cast<uint32_t>(e - half + 127) << 23);
  y = x > 88.72283f ? HUGE_VALF : y;
  y = x < -87.3f ? 0.0f : y;
  return x != x ? x : y;
}

// 1 + exp(-x), for quotients by it: where exp(-x) is below 2^-24 it does not matter, and above 2^128 the sum is inf. So one
// factor scales the polynomial of exp_f32, by 2^(n - 1), and n is rounded by an addition, which leaves it in the low bits.
inline float one_plus_exp_of_minus(float x) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: the sum's last bit counts ones
  const float minus = -x < -87.0f ? -87.0f : (-x > 89.0f ? 89.0f : -x);
  const float sum = minus * 1.44269504f + kRounds;
  const float n = sum - kRounds;
  const float r = (minus - n * 0.693359375f) + n * 2.12194440e-4f;
  const float half_of_power = from_bits((to_bits(sum) + 126u) << 23);
  return 1.0f + 2.0f * (exp_of_remainder(r) * half_of_power);
}

inline float silu_f32(float x) { return x / one_plus_exp_of_minus(x); }

// erfc(z), z >= 0, fractional error 1.2e-7 (Press et al., Numerical Recipes, 2nd ed., section 6.2).
inline float erfc_f32(float z) {
  const float t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  return t * exp_f32(p - z * z);
}

// x * Phi(x). A negative x uses erfc directly, so that small results keep their relative accuracy.
inline float gelu_f32(float x) {
  const float z = __builtin_fabsf(x) * 0.70710678f;
  const float tail = 0.5f * erfc_f32(z);
  const float y = x * (x > 0.0f ? 1.0f - tail : tail);
  return z == HUGE_VALF ? (x > 0.0f ? x : from_bits(0x7FC00000u)) : y;
}

inline float gelu_tanh_f32(float x) {
  const float y = 1.59576912f * (x + 0.044715f * x * x * x);  // 2 * sqrt(2 / pi) * (...)
  return x / one_plus_exp_of_minus(y);
}

}  // namespace
}  // namespace gemmtune
