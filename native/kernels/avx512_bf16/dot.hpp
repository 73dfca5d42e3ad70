// Traits for vdpbf16ps over bf16, int8, float8 and int4 weights: it accumulates pairs in fp32 and flushes subnormals. The AMX
// kernels use them too: all CPUs with AMX have this instruction.
#pragma once

#include "../../frame/dotkernel.hpp"
#include "../avx512/vec512.hpp"

namespace gemmtune {
namespace {

struct Dot : Float512 {
  using AVec = __m512bh;
  using BVec = __m512bh;
  GT_INLINE __m512bh broadcast(const char* p) {
    int v;
    __builtin_memcpy(&v, p, 4);
    return (__m512bh)_mm512_set1_epi32(v);
  }
  GT_INLINE __m512 dot(__m512 acc, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(acc, a, b); }
  GT_INLINE void store_dense(char* p, __m512bh v) { _mm512_storeu_si512(p, (__m512i)v); }
};

struct DotBf16 : Dot {
  using StoredVec = __m512i;
  static constexpr int kVectorBytes = 64;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm512_loadu_si512(p); }
  template <int S> GT_INLINE __m512bh convert(StoredVec v) { return (__m512bh)v; }
};

// 16 columns at the even k, and these columns at the odd k. Two loads, since the instructions that widen bytes read memory.
struct BytePairs {
  __m128i even, odd;
};

GT_INLINE BytePairs load_byte_pairs(const char* p) {
  const auto* bytes = reinterpret_cast<const __m128i*>(p);
  return {_mm_loadu_si128(bytes), _mm_loadu_si128(bytes + 1)};
}

// Convert 32 int8 to bf16 pairs, exactly: |q| <= 128 has 8
// significant bits, so the lower half of its fp32 form is zero. A shift and an OR join the halves; vcvtne2ps2bf16 would
// compete with the products for the multipliers (on Zen 5: 8% of the time at M = 16).
struct DotS8 : Dot {
  using StoredVec = BytePairs;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return load_byte_pairs(p); }
  template <int S> GT_INLINE __m512bh convert(StoredVec v) {
    const __m512 even = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v.even));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v.odd));
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
  }
};

struct F32Pair {
  __m512 even, odd;
};

// fp32 FMAs over the layout of bf16 pairs: two consecutive k of 16 columns at a time.
struct FmaPairs : Float512 {
  using AVec = F32Pair;
  using BVec = F32Pair;
  GT_INLINE F32Pair split_pairs(__m512i v) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  GT_INLINE F32Pair broadcast(const char* p) {
    int v;
    __builtin_memcpy(&v, p, 4);
    return split_pairs(_mm512_set1_epi32(v));
  }
  GT_INLINE __m512 dot(__m512 acc, F32Pair a, F32Pair b) {
    return _mm512_fmadd_ps(a.odd, b.odd, _mm512_fmadd_ps(a.even, b.even, acc));
  }
};

struct FmaPairsS8 : FmaPairs {
  using StoredVec = DotS8::StoredVec;
  static constexpr int kVectorBytes = DotS8::kVectorBytes;
  GT_INLINE StoredVec load_stored(const char* p) { return DotS8::load_stored(p); }
  template <int S> GT_INLINE F32Pair convert(StoredVec v) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v.even)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v.odd))};
  }
};

// Convert 32 float8_e4m3fn to bf16 pairs, exactly, in lanes of 16 bits: normal numbers get
// another exponent bias (127 - 7), the seven subnormals of each sign come from a table, and 0x7F is NaN.
struct DotF8 : Dot {
  using StoredVec = BytePairs;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return load_byte_pairs(p); }
  GT_INLINE __m512i subnormals() {  // 0 to 7 times 2^-9
    const __m128i first = _mm_setr_epi16(0x0000, 0x3B00, 0x3B80, 0x3BC0, 0x3C00, 0x3C20, 0x3C40, 0x3C60);
    return _mm512_castsi128_si512(first);
  }
  template <int S> GT_INLINE __m512bh convert(StoredVec v) {
    const __m512i even = _mm512_cvtepu8_epi32(v.even);
    const __m512i odd = _mm512_cvtepu8_epi32(v.odd);
    const __m512i bytes = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)), low = _mm512_set1_epi16(0x7F);
    const __m512i magnitude = _mm512_and_si512(bytes, low);
    const __mmask32 subnormal = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(magnitude, low);
    __m512i value = _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
    value = _mm512_mask_permutexvar_epi16(value, subnormal, magnitude, subnormals());
    value = _mm512_mask_mov_epi16(value, nan, _mm512_set1_epi16(0x7FC0));
    return (__m512bh)_mm512_or_si512(value, _mm512_slli_epi16(_mm512_andnot_si512(low, bytes), 8));
  }
};

// Convert int4 by a 32-entry table of bf16(q - 8). Its halves are equal, so that the fifth index bit (the next nibble's) does
// not matter.
struct DotS4 : Dot {
  using StoredVec = __m512i;
  static constexpr int kVectorBytes = 64;
  static constexpr int kGroupsPerRow = 4;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm512_loadu_si512(p); }
  GT_INLINE __m512i table() {
    const __m256i half = _mm256_setr_epi16(
        (short)0xC100, (short)0xC0E0, (short)0xC0C0, (short)0xC0A0, (short)0xC080, (short)0xC040, (short)0xC000,
        (short)0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0);
    return _mm512_broadcast_i64x4(half);
  }
  template <int S> GT_INLINE __m512bh convert(StoredVec v) {
    return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4 * S), table());
  }
};

// Dot-product traits for an unpacked bf16 weight, 32 k at a time.
struct RowDotBf16 : Dot {
  static constexpr int kElements = 32;
  static constexpr int kABytes = 64, kBBytes = 64;
  GT_INLINE __m512bh load_a(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
  GT_INLINE __m512bh load_b(const char* p) { return (__m512bh)_mm512_loadu_si512(p); }
  GT_INLINE __m512bh load_a_tail(const char* p, int count) {
    return (__m512bh)_mm512_maskz_loadu_epi16((__mmask32(1) << count) - 1, p);
  }
  GT_INLINE __m512bh load_b_tail(const char* p, int count) { return load_a_tail(p, count); }
};

}  // namespace
}  // namespace gemmtune
