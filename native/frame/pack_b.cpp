#include "pack_b.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "convert.hpp"

namespace gemmtune {
namespace {

// Pack one panel of whole-byte elements. The transpose is blocked so that either stride of the source may be 1.
template <class E>
void pack_panel(const PackedShape& s, const E* src, int64_t k_stride, int64_t n_stride, int64_t n0, E* dst) {
  const int64_t kp = s.k_per_row(), columns = s.columns(), valid = std::min(columns, s.n - n0);
  constexpr int64_t kBlock = 64;
  for (int64_t k0 = 0; k0 < s.k; k0 += kBlock) {
    const int64_t k1 = std::min(s.k, k0 + kBlock);
    for (int64_t n = 0; n < valid; ++n) {
      const E* column = src + (n0 + n) * n_stride;
      for (int64_t k = k0; k < k1; ++k) dst[(k / kp) * columns * kp + s.offset_in_row(k, n)] = column[k * k_stride];
    }
  }
}

template <class E>
void unpack_panel(const PackedShape& s, const E* src, int64_t n0, E* dst, int64_t k_stride, int64_t n_stride) {
  const int64_t kp = s.k_per_row(), columns = s.columns(), valid = std::min(columns, s.n - n0);
  for (int64_t n = 0; n < valid; ++n)
    for (int64_t k = 0; k < s.k; ++k) dst[(n0 + n) * n_stride + k * k_stride] = src[(k / kp) * columns * kp + s.offset_in_row(k, n)];
}

constexpr int nibble_k(int i) { return 2 * (i % 4) + i / 4; }

uint32_t pack_word(const PackedShape& s, const uint8_t* column, int64_t k_stride, int64_t k0) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const int64_t k = k0 + nibble_k(i);
    const uint32_t q = k < s.k ? (column[(k / 2) * k_stride] >> (4 * (k % 2))) & 15u : 8u;
    word |= q << (4 * i);
  }
  return word;
}

void pack_panel_s4(const PackedShape& s, const uint8_t* src, int64_t k_stride, int64_t n_stride, int64_t n0, uint32_t* dst) {
  const int64_t columns = s.columns(), valid = std::min(columns, s.n - n0);
  for (int64_t row = 0; row < s.k_rows(); ++row)
    for (int64_t n = 0; n < columns; ++n)
      dst[row * columns + n] = n < valid ? pack_word(s, src + (n0 + n) * n_stride, k_stride, row * 8) : 0x88888888u;
}

void unpack_panel_s4(const PackedShape& s, const uint32_t* src, int64_t n0, uint8_t* dst, int64_t k_stride, int64_t n_stride) {
  const int64_t columns = s.columns(), valid = std::min(columns, s.n - n0);
  for (int64_t n = 0; n < valid; ++n) {
    uint8_t* column = dst + (n0 + n) * n_stride;
    for (int64_t k = 0; k < s.k; k += 2) column[(k / 2) * k_stride] = 0;
    for (int64_t row = 0; row < s.k_rows(); ++row)
      for (int i = 0; i < 8; ++i) {
        const int64_t k = row * 8 + nibble_k(i);
        if (k < s.k) column[(k / 2) * k_stride] |= static_cast<uint8_t>(((src[row * columns + n] >> (4 * i)) & 15u) << (4 * (k % 2)));
      }
  }
}

void compute_compensation(const PackedShape& s, const int8_t* src, int64_t k_stride, int64_t n_stride, int64_t n0, int32_t* out) {
  for (int64_t n = 0; n < s.columns(); ++n) {
    int32_t total = 0;
    if (n0 + n < s.n)
      for (int64_t k = 0; k < s.k; ++k) total += src[(n0 + n) * n_stride + k * k_stride];
    out[n0 + n] = static_cast<int32_t>(128u * static_cast<uint32_t>(total));  // wraps as the products do
  }
}

void pack_any_panel(const PackedShape& s, const char* src, int64_t k_stride, int64_t n_stride, int64_t n0, char* dst) {
  if (s.b == DType::s4) return pack_panel_s4(s, reinterpret_cast<const uint8_t*>(src), k_stride, n_stride, n0, reinterpret_cast<uint32_t*>(dst));
  std::memset(dst, 0, s.k_rows() * s.row_bytes());
  switch (bits(s.b)) {
    case 32: return pack_panel(s, reinterpret_cast<const uint32_t*>(src), k_stride, n_stride, n0, reinterpret_cast<uint32_t*>(dst));
    case 16: return pack_panel(s, reinterpret_cast<const uint16_t*>(src), k_stride, n_stride, n0, reinterpret_cast<uint16_t*>(dst));
    default: return pack_panel(s, reinterpret_cast<const uint8_t*>(src), k_stride, n_stride, n0, reinterpret_cast<uint8_t*>(dst));
  }
}

void unpack_any_panel(const PackedShape& s, const char* src, int64_t n0, char* dst, int64_t k_stride, int64_t n_stride) {
  if (s.b == DType::s4) return unpack_panel_s4(s, reinterpret_cast<const uint32_t*>(src), n0, reinterpret_cast<uint8_t*>(dst), k_stride, n_stride);
  switch (bits(s.b)) {
    case 32: return unpack_panel(s, reinterpret_cast<const uint32_t*>(src), n0, reinterpret_cast<uint32_t*>(dst), k_stride, n_stride);
    case 16: return unpack_panel(s, reinterpret_cast<const uint16_t*>(src), n0, reinterpret_cast<uint16_t*>(dst), k_stride, n_stride);
    default: return unpack_panel(s, reinterpret_cast<const uint8_t*>(src), n0, reinterpret_cast<uint8_t*>(dst), k_stride, n_stride);
  }
}

// Transpose whole groups along a contiguous K, each as one word W.
template <class W>
void transpose_words(const char* src, int64_t n_bytes, int64_t groups, int64_t n, int64_t columns, char* dst) {
  auto* out = reinterpret_cast<W*>(dst);
  constexpr int64_t kTile = 16;
  for (int64_t g0 = 0; g0 < groups; g0 += kTile) {
    const int64_t g1 = std::min(groups, g0 + kTile);
    for (int64_t j = 0; j < n; ++j) {
      const char* column = src + j * n_bytes;
      for (int64_t g = g0; g < g1; ++g) std::memcpy(out + g * columns + j, column + g * sizeof(W), sizeof(W));
    }
  }
}

template <class E, class D, class F>
void convert_elements(const E* src, int64_t k_stride, int64_t n_stride, int64_t k, int64_t n, int64_t columns, int64_t kp, D* dst, F convert) {
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < n; ++j) dst[(i / kp) * columns * kp + j * kp + i % kp] = convert(src[i * k_stride + j * n_stride]);
}

}  // namespace

void pack_b(const PackedShape& s, const char* src, int64_t k_stride, int64_t n_stride, char* dst, int32_t* compensation) {
  const int64_t panels = s.panels(), panel_bytes = s.k_rows() * s.row_bytes();
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    pack_any_panel(s, src, k_stride, n_stride, p * s.columns(), dst + p * panel_bytes);
    if (compensation != nullptr) compute_compensation(s, reinterpret_cast<const int8_t*>(src), k_stride, n_stride, p * s.columns(), compensation);
  }
}

void unpack_b(const PackedShape& s, const char* packed, char* dst, int64_t k_stride, int64_t n_stride) {
  const int64_t panels = s.panels(), panel_bytes = s.k_rows() * s.row_bytes();
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p) unpack_any_panel(s, packed + p * panel_bytes, p * s.columns(), dst, k_stride, n_stride);
}

void pack_block(Compute compute, DType b, const char* src, int64_t k_stride, int64_t n_stride, int64_t k0, int64_t k1, int64_t n0,
                int64_t n, int64_t columns, char* dst, int32_t* compensation) {
  const int64_t kp = group_size(compute), k = k1 - k0, groups = (k + kp - 1) / kp, element = bits(b) / 8;
  const int64_t valid = std::min(columns, n - n0);
  const char* first = src + (k0 * k_stride + n0 * n_stride) * element;
  if (valid < columns || k % kp != 0) std::memset(dst, 0, groups * block_row_bytes(compute, columns));
  const bool same_type = element * kp == kGroupBytes;
  if (same_type && k_stride == 1 && k % kp == 0) {
    transpose_words<uint32_t>(first, n_stride * element, groups, valid, columns, dst);
  } else if (compute == Compute::f32) {
    auto* out = reinterpret_cast<float*>(dst);
    const auto* half = reinterpret_cast<const uint16_t*>(first);
    if (b == DType::bf16) convert_elements(half, k_stride, n_stride, k, valid, columns, kp, out, bf16_to_f32);
    else if (b == DType::f16) convert_elements(half, k_stride, n_stride, k, valid, columns, kp, out, f16_to_f32);
    else convert_elements(reinterpret_cast<const float*>(first), k_stride, n_stride, k, valid, columns, kp, out, [](float v) { return v; });
  } else if (compute == Compute::bf16) {
    convert_elements(reinterpret_cast<const uint16_t*>(first), k_stride, n_stride, k, valid, columns, kp, reinterpret_cast<uint16_t*>(dst), [](uint16_t v) { return v; });
  } else {
    convert_elements(reinterpret_cast<const int8_t*>(first), k_stride, n_stride, k, valid, columns, kp, reinterpret_cast<int8_t*>(dst), [](int8_t v) { return v; });
  }
  if (compensation == nullptr) return;
  const auto* bytes = reinterpret_cast<const int8_t*>(first);
  for (int64_t j = 0; j < valid; ++j) {
    int32_t total = 0;
    for (int64_t i = 0; i < k; ++i) total += bytes[i * k_stride + j * n_stride];
    compensation[j] = static_cast<int32_t>(static_cast<uint32_t>(compensation[j]) + 128u * static_cast<uint32_t>(total));
  }
}

}  // namespace gemmtune
