// Traits of a C tile in zmm registers, for all AVX512 kernels. Each translation unit compiles its own copy with its own flags,
// therefore the anonymous namespace.
#pragma once

#include <immintrin.h>

#include "../../frame/types.hpp"

#define GT_INLINE static inline __attribute__((always_inline))

namespace gemmtune {
namespace {

struct Float512 {
  using Scalar = float;
  using Acc = __m512;
  static constexpr bool kInteger = false;
  static constexpr int kGroupsPerRow = 1;
  static constexpr int group_offset(int s) { return s; }
  GT_INLINE __m512 zero() { return _mm512_setzero_ps(); }
  GT_INLINE __m512 load(const float* p) { return _mm512_loadu_ps(p); }
  GT_INLINE void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
  GT_INLINE __m512 add(__m512 x, __m512 y) { return _mm512_add_ps(x, y); }
  GT_INLINE float sum(__m512 v) { return _mm512_reduce_add_ps(v); }
  GT_INLINE __m512 load_f32(const float* p) { return _mm512_loadu_ps(p); }
  GT_INLINE void store_f32(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
  GT_INLINE __m512 subtract_product(__m512 v, __m512 zero, float sum) {
    return _mm512_fnmadd_ps(zero, _mm512_set1_ps(sum), v);
  }
  GT_INLINE __m512 scale_add(__m512 v, __m512 scale, const float* c, bool accumulate) {
    return accumulate ? _mm512_fmadd_ps(v, scale, _mm512_loadu_ps(c)) : _mm512_mul_ps(v, scale);
  }
};

struct Int512 {
  using Scalar = int32_t;
  using Acc = __m512i;
  static constexpr bool kInteger = true;
  static constexpr int kGroupsPerRow = 1;
  static constexpr int group_offset(int s) { return s; }
  GT_INLINE __m512i zero() { return _mm512_setzero_si512(); }
  GT_INLINE __m512i load(const int32_t* p) { return _mm512_loadu_si512(p); }
  GT_INLINE void store(int32_t* p, __m512i v) { _mm512_storeu_si512(p, v); }
  GT_INLINE __m512i add(__m512i x, __m512i y) { return _mm512_add_epi32(x, y); }
  using AVec = __m512i;
  GT_INLINE __m512i broadcast(const char* p) {
    int v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
  }
};

// The k that nibble i of a 32-bit word of 8 k holds. A shift by 4 * s thus leaves k = 2 s and 2 s + 1 in the low nibbles of
// the word's two halves: a pair for the bf16 kernels.
constexpr int nibble_k(int i) { return 2 * (i % 4) + i / 4; }

}  // namespace
}  // namespace gemmtune
