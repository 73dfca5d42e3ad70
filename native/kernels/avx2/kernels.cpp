// AVX2 + FMA + F16C. A "vector" of 16 columns is two ymm registers; the largest tile is 6 x 16.
#include <immintrin.h>

#include "../../frame/epilogue.hpp"
#include "../../frame/microkernel.hpp"
#include "../../frame/pack_a.hpp"

#define GT_INLINE static inline __attribute__((always_inline))

namespace gemmtune {
namespace {

struct F2 {
  __m256 lo, hi;
};
struct I2 {
  __m256i lo, hi;
};

struct Fma {
  using Scalar = float;
  using Acc = F2;
  using AVec = __m256;
  using BVec = F2;
  static constexpr bool kInteger = false;
  static constexpr int kGroupsPerRow = 1;
  static constexpr int group_offset(int s) { return s; }
  GT_INLINE F2 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  GT_INLINE F2 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  GT_INLINE void store(float* p, F2 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
  }
  GT_INLINE F2 add(F2 x, F2 y) { return {_mm256_add_ps(x.lo, y.lo), _mm256_add_ps(x.hi, y.hi)}; }
  GT_INLINE F2 load_f32(const float* p) { return load(p); }
  GT_INLINE void store_f32(float* p, F2 v) { store(p, v); }
  GT_INLINE F2 subtract_product(F2 v, F2 zero, float sum) {
    const __m256 s = _mm256_set1_ps(sum);
    return {_mm256_fnmadd_ps(zero.lo, s, v.lo), _mm256_fnmadd_ps(zero.hi, s, v.hi)};
  }
  GT_INLINE F2 scale_add(F2 v, F2 scale, const float* c, bool accumulate) {
    if (!accumulate) return {_mm256_mul_ps(v.lo, scale.lo), _mm256_mul_ps(v.hi, scale.hi)};
    const F2 old = load(c);
    return {_mm256_fmadd_ps(v.lo, scale.lo, old.lo), _mm256_fmadd_ps(v.hi, scale.hi, old.hi)};
  }
  GT_INLINE __m256 broadcast(const char* p) { return _mm256_broadcast_ss(reinterpret_cast<const float*>(p)); }
  GT_INLINE F2 dot(F2 acc, __m256 a, F2 b) { return {_mm256_fmadd_ps(a, b.lo, acc.lo), _mm256_fmadd_ps(a, b.hi, acc.hi)}; }
  GT_INLINE void store_dense(char* p, F2 v) { store(reinterpret_cast<float*>(p), v); }
};

GT_INLINE __m128i load128(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
GT_INLINE __m256i load256(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

struct FmaF32 : Fma {
  using StoredVec = F2;
  static constexpr int kVectorBytes = 64;
  GT_INLINE StoredVec load_stored(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  template <int S> GT_INLINE F2 convert(StoredVec v) { return v; }
};

struct FmaBf16 : Fma {
  using StoredVec = I2;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return {_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 16))}; }
  template <int S> GT_INLINE F2 convert(StoredVec v) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(v.lo, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(v.hi, 16))};
  }
};

struct FmaF16 : Fma {
  using StoredVec = F2;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 16))}; }
  template <int S> GT_INLINE F2 convert(StoredVec v) { return v; }
};

struct FmaS8 : Fma {
  using StoredVec = I2;
  static constexpr int kVectorBytes = 16;
  GT_INLINE StoredVec load_stored(const char* p) {
    const __m128i v = load128(p);
    return {_mm256_cvtepi8_epi32(v), _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))};
  }
  template <int S> GT_INLINE F2 convert(StoredVec v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
};

// The bits of float8_e4m3fn are those of a float16 that is 2^-8 times as large, subnormals too; 0x7F is NaN.
struct FmaF8 : Fma {
  using StoredVec = F2;
  static constexpr int kVectorBytes = 16;
  GT_INLINE __m256 to_float(__m128i wide) {
    const __m128i low = _mm_set1_epi16(0x7F), magnitude = _mm_and_si128(wide, low);
    const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(magnitude, low), _mm_set1_epi16(0x7E00));
    const __m128i sign = _mm_slli_epi16(_mm_andnot_si128(low, wide), 8);
    const __m128i half = _mm_or_si128(_mm_or_si128(_mm_slli_epi16(magnitude, 7), nan), sign);
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
  }
  GT_INLINE StoredVec load_stored(const char* p) {
    const __m256i wide = _mm256_cvtepu8_epi16(load128(p));
    return {to_float(_mm256_castsi256_si128(wide)), to_float(_mm256_extracti128_si256(wide, 1))};
  }
  template <int S> GT_INLINE F2 convert(StoredVec v) { return v; }
};

struct FmaS4 : Fma {
  using StoredVec = I2;
  static constexpr int kVectorBytes = 64;
  static constexpr int kGroupsPerRow = 8;
  static constexpr int group_offset(int s) { return 2 * (s % 4) + s / 4; }
  GT_INLINE StoredVec load_stored(const char* p) { return {load256(p), load256(p + 32)}; }
  GT_INLINE __m256 nibble(__m256i v) {
    const __m256i q = _mm256_and_si256(v, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(q, _mm256_set1_epi32(8)));
  }
  template <int S> GT_INLINE F2 convert(StoredVec v) {
    return {nibble(_mm256_srli_epi32(v.lo, 4 * S)), nibble(_mm256_srli_epi32(v.hi, 4 * S))};
  }
};

struct MaddS8 {
  using Scalar = int32_t;
  using Acc = I2;
  using AVec = __m256i;
  using BVec = I2;
  using StoredVec = I2;
  static constexpr bool kInteger = true;
  static constexpr int kGroupsPerRow = 1;
  static constexpr int kVectorBytes = 32;
  static constexpr int group_offset(int s) { return s; }
  GT_INLINE I2 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  GT_INLINE I2 load(const int32_t* p) { return {load256(reinterpret_cast<const char*>(p)), load256(reinterpret_cast<const char*>(p + 8))}; }
  GT_INLINE void store(int32_t* p, I2 v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), v.hi);
  }
  GT_INLINE I2 add(I2 x, I2 y) { return {_mm256_add_epi32(x.lo, y.lo), _mm256_add_epi32(x.hi, y.hi)}; }
  GT_INLINE StoredVec load_stored(const char* p) { return {_mm256_cvtepi8_epi16(load128(p)), _mm256_cvtepi8_epi16(load128(p + 16))}; }
  template <int S> GT_INLINE I2 convert(StoredVec v) { return v; }
  GT_INLINE __m256i broadcast(const char* p) {
    int v;
    __builtin_memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
  }
  GT_INLINE I2 dot(I2 acc, __m256i a, I2 b) {
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(a, b.lo)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(a, b.hi))};
  }
  GT_INLINE void store_dense(char* p, I2 v) { store(reinterpret_cast<int32_t*>(p), v); }
};

constexpr KernelSet kSets[] = {
    make_kernel_set<FmaF32, 6, 0, 0, 0>(Compute::f32, DType::f32), make_kernel_set<FmaBf16, 6, 0, 0, 0>(Compute::f32, DType::bf16),
    make_kernel_set<FmaF16, 6, 0, 0, 0>(Compute::f32, DType::f16), make_kernel_set<FmaS8, 6, 0, 0, 0>(Compute::f32, DType::s8),
    make_kernel_set<FmaF8, 6, 0, 0, 0>(Compute::f32, DType::f8),
    make_kernel_set<FmaS4, 4, 0, 0, 0>(Compute::f32, DType::s4),   make_kernel_set<MaddS8, 6, 0, 0, 0>(Compute::i16, DType::s8),
};

}  // namespace

extern const IsaOps kAvx2Ops;
const IsaOps kAvx2Ops = {"avx2", kSets, sizeof(kSets) / sizeof(kSets[0]), &run_epilogue, &run_pointwise, &pack_activations, &row_sums};

}  // namespace gemmtune
