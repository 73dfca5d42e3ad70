// AVX512F/BW/DQ/VL: fp32 FMAs for every stored weight type, and int8 products as int16 pairs.
#include "../../frame/dotkernel.hpp"
#include "../../frame/epilogue.hpp"
#include "../../frame/pack_a.hpp"
#include "vec512.hpp"

namespace gemmtune {
namespace {

struct Fma : Float512 {
  using AVec = __m512;
  using BVec = __m512;
  GT_INLINE __m512 broadcast(const char* p) {
    float v;
    __builtin_memcpy(&v, p, 4);
    return _mm512_set1_ps(v);
  }
  GT_INLINE __m512 dot(__m512 acc, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, acc); }
  GT_INLINE void store_dense(char* p, __m512 v) { _mm512_storeu_ps(reinterpret_cast<float*>(p), v); }
};

struct FmaF32 : Fma {
  using StoredVec = __m512;
  static constexpr int kVectorBytes = 64;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm512_loadu_ps(reinterpret_cast<const float*>(p)); }
  template <int S> GT_INLINE __m512 convert(StoredVec v) { return v; }
};

struct FmaBf16 : Fma {
  using StoredVec = __m256i;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  template <int S> GT_INLINE __m512 convert(StoredVec v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
  }
};

struct FmaF16 : Fma {
  using StoredVec = __m256i;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  template <int S> GT_INLINE __m512 convert(StoredVec v) { return _mm512_cvtph_ps(v); }
};

struct FmaS8 : Fma {
  using StoredVec = __m128i;
  static constexpr int kVectorBytes = 16;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  template <int S> GT_INLINE __m512 convert(StoredVec v) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v)); }
};

// The bits of float8_e4m3fn are those of a float16 that is 2^-8 times as large, subnormals too; 0x7F is NaN.
struct FmaF8 : Fma {
  using StoredVec = __m128i;
  static constexpr int kVectorBytes = 16;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
  template <int S> GT_INLINE __m512 convert(StoredVec v) {
    const __m256i wide = _mm256_cvtepu8_epi16(v), low = _mm256_set1_epi16(0x7F);
    const __m256i magnitude = _mm256_and_si256(wide, low);
    const __m256i sign = _mm256_slli_epi16(_mm256_andnot_si256(low, wide), 8);
    const __mmask16 nan = _mm256_cmpeq_epi16_mask(magnitude, low);
    const __m256i half = _mm256_mask_mov_epi16(_mm256_slli_epi16(magnitude, 7), nan, _mm256_set1_epi16(0x7E00));
    return _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(half, sign)), _mm512_set1_ps(256.0f));
  }
};

struct FmaS4 : Fma {
  using StoredVec = __m512i;
  static constexpr int kVectorBytes = 64;
  static constexpr int kGroupsPerRow = 8;
  static constexpr int group_offset(int s) { return nibble_k(s); }
  GT_INLINE StoredVec load_stored(const char* p) { return _mm512_loadu_si512(p); }
  // vpermps looks the low nibble of each lane up in a table of q - 8 and ignores the higher bits.
  template <int S> GT_INLINE __m512 convert(StoredVec v) {
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(v, 4 * S), table);
  }
};

// Dot-product traits for an unpacked weight, 16 k at a time; A was converted to fp32.
template <class Weight>
struct RowDot : Weight {
  static constexpr int kElements = 16;
  static constexpr int kABytes = 64, kBBytes = Weight::kVectorBytes;
  GT_INLINE __m512 load_a(const char* p) { return _mm512_loadu_ps(reinterpret_cast<const float*>(p)); }
  GT_INLINE __m512 load_b(const char* p) { return Weight::template convert<0>(Weight::load_stored(p)); }
  GT_INLINE __m512 load_a_tail(const char* p, int count) { return _mm512_maskz_loadu_ps((1u << count) - 1, p); }
  GT_INLINE __m512 load_b_tail(const char* p, int count) {
    alignas(64) char padded[64] = {};
    __builtin_memcpy(padded, p, count * kBBytes / kElements);
    return load_b(padded);
  }
};

struct MaddS8 : Int512 {
  using BVec = __m512i;
  using StoredVec = __m256i;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
  template <int S> GT_INLINE __m512i convert(StoredVec v) { return _mm512_cvtepi8_epi16(v); }
  GT_INLINE __m512i dot(__m512i acc, __m512i a, __m512i b) { return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b)); }
  GT_INLINE void store_dense(char* p, __m512i v) { _mm512_storeu_si512(p, v); }
};

constexpr KernelSet kSets[] = {
    add_dot_kernels<RowDot<FmaF32>>(make_kernel_set<FmaF32, 12, 12, 8, 6>(Compute::f32, DType::f32)),
    add_dot_kernels<RowDot<FmaBf16>>(make_kernel_set<FmaBf16, 12, 12, 8, 6>(Compute::f32, DType::bf16)),
    add_dot_kernels<RowDot<FmaF16>>(make_kernel_set<FmaF16, 12, 12, 8, 6>(Compute::f32, DType::f16)),
    make_kernel_set<FmaS8, 12, 12, 8, 6>(Compute::f32, DType::s8),     make_kernel_set<FmaF8, 12, 12, 8, 6>(Compute::f32, DType::f8),
    make_kernel_set<FmaS4, 8, 8, 6, 4>(Compute::f32, DType::s4),     make_kernel_set<MaddS8, 12, 12, 8, 6>(Compute::i16, DType::s8),
};

}  // namespace

extern const IsaOps kAvx512Ops;
const IsaOps kAvx512Ops = {"avx512", kSets, sizeof(kSets) / sizeof(kSets[0]), &run_epilogue, &run_pointwise, &pack_activations, &row_sums};

}  // namespace gemmtune
