#include "pack_b.hpp"

#include <omp.h>

#include <algorithm>
#include <cstring>

#include "convert.hpp"

namespace gemmtune {
namespace {

// Copies one panel of whole-byte elements, transposing in blocks so that either stride may be the small one.
template <class E>
void pack_panel(const PackedShape& s, const E* src, int64_t ks, int64_t ns, int64_t n0, E* dst) {
  const int64_t kp = s.k_per_row(), columns = s.columns(), valid = std::min(columns, s.n - n0);
  constexpr int64_t kBlock = 64;
  for (int64_t k0 = 0; k0 < s.k; k0 += kBlock) {
    const int64_t k1 = std::min(s.k, k0 + kBlock);
    for (int64_t n = 0; n < valid; ++n) {
      const E* column = src + (n0 + n) * ns;
      for (int64_t k = k0; k < k1; ++k) dst[(k / kp) * columns * kp + s.place(k, n)] = column[k * ks];
    }
  }
}

template <class E>
void unpack_panel(const PackedShape& s, const E* src, int64_t n0, E* dst, int64_t ks, int64_t ns) {
  const int64_t kp = s.k_per_row(), columns = s.columns(), valid = std::min(columns, s.n - n0);
  for (int64_t n = 0; n < valid; ++n)
    for (int64_t k = 0; k < s.k; ++k) dst[(n0 + n) * ns + k * ks] = src[(k / kp) * columns * kp + s.place(k, n)];
}

constexpr int nibble_k(int i) { return 2 * (i % 4) + i / 4; }

uint32_t pack_word(const PackedShape& s, const uint8_t* column, int64_t ks, int64_t k0) {
  uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const int64_t k = k0 + nibble_k(i);
    const uint32_t q = k < s.k ? (column[(k / 2) * ks] >> (4 * (k % 2))) & 15u : 8u;
    word |= q << (4 * i);
  }
  return word;
}

void pack_panel_s4(const PackedShape& s, const uint8_t* src, int64_t ks, int64_t ns, int64_t n0, uint32_t* dst) {
  const int64_t columns = s.columns(), valid = std::min(columns, s.n - n0);
  for (int64_t row = 0; row < s.k_rows(); ++row)
    for (int64_t n = 0; n < columns; ++n)
      dst[row * columns + n] = n < valid ? pack_word(s, src + (n0 + n) * ns, ks, row * 8) : 0x88888888u;
}

void unpack_panel_s4(const PackedShape& s, const uint32_t* src, int64_t n0, uint8_t* dst, int64_t ks, int64_t ns) {
  const int64_t columns = s.columns(), valid = std::min(columns, s.n - n0);
  for (int64_t n = 0; n < valid; ++n) {
    uint8_t* column = dst + (n0 + n) * ns;
    for (int64_t k = 0; k < s.k; k += 2) column[(k / 2) * ks] = 0;
    for (int64_t row = 0; row < s.k_rows(); ++row)
      for (int i = 0; i < 8; ++i) {
        const int64_t k = row * 8 + nibble_k(i);
        if (k < s.k) column[(k / 2) * ks] |= static_cast<uint8_t>(((src[row * columns + n] >> (4 * i)) & 15u) << (4 * (k % 2)));
      }
  }
}

void compensate(const PackedShape& s, const int8_t* src, int64_t ks, int64_t ns, int64_t n0, int32_t* out) {
  for (int64_t n = 0; n < s.columns(); ++n) {
    int32_t total = 0;
    if (n0 + n < s.n)
      for (int64_t k = 0; k < s.k; ++k) total += src[(n0 + n) * ns + k * ks];
    out[n0 + n] = static_cast<int32_t>(128u * static_cast<uint32_t>(total));  // wraps as the products do
  }
}

void pack_one(const PackedShape& s, const char* src, int64_t ks, int64_t ns, int64_t n0, char* dst) {
  if (s.b == DType::s4) return pack_panel_s4(s, reinterpret_cast<const uint8_t*>(src), ks, ns, n0, reinterpret_cast<uint32_t*>(dst));
  std::memset(dst, 0, s.k_rows() * s.row_bytes());
  switch (bits(s.b)) {
    case 32: return pack_panel(s, reinterpret_cast<const uint32_t*>(src), ks, ns, n0, reinterpret_cast<uint32_t*>(dst));
    case 16: return pack_panel(s, reinterpret_cast<const uint16_t*>(src), ks, ns, n0, reinterpret_cast<uint16_t*>(dst));
    default: return pack_panel(s, reinterpret_cast<const uint8_t*>(src), ks, ns, n0, reinterpret_cast<uint8_t*>(dst));
  }
}

void unpack_one(const PackedShape& s, const char* src, int64_t n0, char* dst, int64_t ks, int64_t ns) {
  if (s.b == DType::s4) return unpack_panel_s4(s, reinterpret_cast<const uint32_t*>(src), n0, reinterpret_cast<uint8_t*>(dst), ks, ns);
  switch (bits(s.b)) {
    case 32: return unpack_panel(s, reinterpret_cast<const uint32_t*>(src), n0, reinterpret_cast<uint32_t*>(dst), ks, ns);
    case 16: return unpack_panel(s, reinterpret_cast<const uint16_t*>(src), n0, reinterpret_cast<uint16_t*>(dst), ks, ns);
    default: return unpack_panel(s, reinterpret_cast<const uint8_t*>(src), n0, reinterpret_cast<uint8_t*>(dst), ks, ns);
  }
}

// Whole 4-byte groups along a contiguous K move as words.
template <class W>
void block_words(const char* src, int64_t n_bytes, int64_t groups, int64_t n, int64_t columns, char* dst) {
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
void block_elements(const E* src, int64_t ks, int64_t ns, int64_t k, int64_t n, int64_t columns, int64_t kp, D* dst, F convert) {
  for (int64_t i = 0; i < k; ++i)
    for (int64_t j = 0; j < n; ++j) dst[(i / kp) * columns * kp + j * kp + i % kp] = convert(src[i * ks + j * ns]);
}

}  // namespace

void pack_b(const PackedShape& s, const char* src, int64_t ks, int64_t ns, char* dst, int32_t* compensation) {
  const int64_t panels = s.panels(), panel_bytes = s.k_rows() * s.row_bytes();
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p) {
    pack_one(s, src, ks, ns, p * s.columns(), dst + p * panel_bytes);
    if (compensation != nullptr) compensate(s, reinterpret_cast<const int8_t*>(src), ks, ns, p * s.columns(), compensation);
  }
}

void unpack_b(const PackedShape& s, const char* packed, char* dst, int64_t ks, int64_t ns) {
  const int64_t panels = s.panels(), panel_bytes = s.k_rows() * s.row_bytes();
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < panels; ++p) unpack_one(s, packed + p * panel_bytes, p * s.columns(), dst, ks, ns);
}

void pack_block(Compute compute, DType b, const char* src, int64_t ks, int64_t ns, int64_t k0, int64_t k1, int64_t n0,
                int64_t n, int64_t columns, char* dst, int32_t* compensation) {
  const int64_t kp = group_size(compute), k = k1 - k0, groups = (k + kp - 1) / kp, element = bits(b) / 8;
  const int64_t valid = std::min(columns, n - n0);
  const char* first = src + (k0 * ks + n0 * ns) * element;
  if (valid < columns || k % kp != 0) std::memset(dst, 0, groups * block_row_bytes(compute, columns));
  const bool same_type = element * kp == kGroupBytes;
  if (same_type && ks == 1 && k % kp == 0) {
    block_words<uint32_t>(first, ns * element, groups, valid, columns, dst);
  } else if (compute == Compute::f32) {
    auto* out = reinterpret_cast<float*>(dst);
    const auto* half = reinterpret_cast<const uint16_t*>(first);
    if (b == DType::bf16) block_elements(half, ks, ns, k, valid, columns, kp, out, bf16_to_f32);
    else if (b == DType::f16) block_elements(half, ks, ns, k, valid, columns, kp, out, f16_to_f32);
    else block_elements(reinterpret_cast<const float*>(first), ks, ns, k, valid, columns, kp, out, [](float v) { return v; });
  } else if (compute == Compute::bf16) {
    block_elements(reinterpret_cast<const uint16_t*>(first), ks, ns, k, valid, columns, kp, reinterpret_cast<uint16_t*>(dst), [](uint16_t v) { return v; });
  } else {
    block_elements(reinterpret_cast<const int8_t*>(first), ks, ns, k, valid, columns, kp, reinterpret_cast<int8_t*>(dst), [](int8_t v) { return v; });
  }
  if (compensation == nullptr) return;
  const auto* bytes = reinterpret_cast<const int8_t*>(first);
  for (int64_t j = 0; j < valid; ++j) {
    int32_t total = 0;
    for (int64_t i = 0; i < k; ++i) total += bytes[i * ks + j * ns];
    compensation[j] = static_cast<int32_t>(static_cast<uint32_t>(compensation[j]) + 128u * static_cast<uint32_t>(total));
  }
}

}  // namespace gemmtune
