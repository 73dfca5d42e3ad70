// Scalar conversions in a form that compilers vectorise in loops. They round to nearest, ties to even.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace gemmtune {
namespace {

inline float from_bits(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

inline uint32_t to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

inline float bf16_to_f32(uint16_t h) { return from_bits(static_cast<uint32_t>(h) << 16); }

inline uint16_t f32_to_bf16(float f) {
  const uint32_t u = to_bits(f);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  const uint32_t quiet = (u >> 16) | 0x40u;
  return static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? quiet : rounded);
}

#if defined(__F16C__)
inline float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t f32_to_f16(float f) { return _cvtss_sh(f, 0); }
#else
inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 0x1Fu, mantissa = h & 0x3FFu;
  if (exponent == 31) return from_bits(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24 is exact in fp32
    const float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return sign ? -f : f;
  }
  return from_bits(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline uint16_t f32_to_f16(float f) {
  const uint32_t u = to_bits(f), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds past 65504
  if (magnitude < 0x38800000u) {  // subnormal result: let an fp32 addition round at 2^-24
    const float shifted = from_bits(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (to_bits(shifted) - 0x3F000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}
#endif

// Convert float8_e4m3fn: its exponent and mantissa bits are those of a float16 that is 2^-8 times as large.
inline float f8_to_f32(uint8_t v) {
  const uint32_t magnitude = v & 0x7Fu, sign = v & 0x80u;
  const uint32_t half = magnitude == 0x7Fu ? 0x7E00u : magnitude << 7;
  return f16_to_f32(static_cast<uint16_t>(sign << 8 | half)) * 256.0f;
}

// Round to an integer in [lo, hi], ties to even; NaN becomes 0. The clamp comes first because C++ does not define the
// conversion of a float out of range.
inline int32_t round_to_int(float f, float lo, float hi) {
  f = f != f ? 0.0f : f;
  f = f < lo ? lo : f;
  f = f > hi ? hi : f;
  return static_cast<int32_t>(__builtin_rintf(f));
}

// Round to int32, saturating. No float32 equals the largest int32, so this value has a case of its own.
inline int32_t round_to_s32(float f) {
  const int32_t rounded = round_to_int(f, -2147483648.0f, 2147483520.0f);
  return f >= 2147483648.0f ? 2147483647 : rounded;
}

}  // namespace
}  // namespace gemmtune
