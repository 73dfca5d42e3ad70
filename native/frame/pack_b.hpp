// The packed layout of B; its packing and unpacking.
//
// A panel has 16 * nv columns and ceil(K / (kp * groups_per_row)) rows of nv * vector_bytes bytes. Within a row, the kp
// consecutive k of a column's group are adjacent. int4 stores 8 k in a 32-bit word: nibble i holds k = 2 * (i % 4) + i / 4,
// unsigned (0 to 15, padding 8). int8 and float8 for the bf16 kernels store 16 columns at the even k, then these 16 columns
// at the odd k. Columns and k beyond the matrix are zero.
#pragma once

#include <cstdint>

#include "types.hpp"

namespace gemmtune {

struct PackedShape {
  DType b;
  Compute compute;
  int64_t n, k;
  int nv;

  int64_t columns() const { return static_cast<int64_t>(nv) * kLanes; }
  int64_t panels() const { return (n + columns() - 1) / columns(); }
  int64_t padded_n() const { return panels() * columns(); }
  int64_t k_per_row() const { return b == DType::s4 ? 8 : group_size(compute); }
  int64_t k_rows() const { return (k + k_per_row() - 1) / k_per_row(); }
  int64_t row_bytes() const { return columns() * k_per_row() * bits(b) / 8; }
  // Offset of (k, column n of the panel) within its row, in elements; whole-byte types only.
  int64_t offset_in_row(int64_t k, int64_t n) const {
    const int64_t kp = k_per_row();
    if ((b == DType::s8 || b == DType::f8) && compute == Compute::bf16) return n / kLanes * 2 * kLanes + k % 2 * kLanes + n % kLanes;
    return n * kp + k % kp;
  }
  int64_t bytes() const { return panels() * k_rows() * row_bytes(); }
};

// Pack and unpack a whole B. Strides are in elements. For int4 the unpacked matrix is [ceil(k / 2), n] bytes of two k each,
// low nibble first, and strides are in bytes. compensation: [padded_n] int32 = 128 * column sums, or null.
void pack_b(const PackedShape& shape, const char* src, int64_t k_stride, int64_t n_stride, char* dst, int32_t* compensation);
void unpack_b(const PackedShape& shape, const char* packed, char* dst, int64_t k_stride, int64_t n_stride);

// Return the bytes of one row (a group of k) of a block: 4 for each column, but 2 for the int16 kernels, which widen int8 on
// load.
constexpr int64_t block_row_bytes(Compute compute, int64_t columns) {
  return columns * (compute == Compute::i16 ? 2 : kGroupBytes);
}

// Pack one block of an unpacked B as dense rows of `compute`: k in [k0, k1), columns [n0, n0 + columns). Add 128 * the
// column sums to compensation (one per column of the block) unless it is null.
void pack_block(Compute compute, DType b, const char* src, int64_t k_stride, int64_t n_stride, int64_t k0, int64_t k1,
                int64_t n0, int64_t n, int64_t columns, char* dst, int32_t* compensation);

}  // namespace gemmtune
