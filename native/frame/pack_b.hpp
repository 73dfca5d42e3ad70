// The packed layout of B and the code that writes and reads it back.
//
// Columns lie in panels of 16 * nv; a panel is ceil(K / (kp * rows_per_load)) rows of nv * vector_bytes bytes. Within a
// row, column n of the panel holds the kp consecutive k of its group side by side (int4: 8 k in a 32-bit word, nibble i
// holding k = 2 * (i % 4) + i / 4, as stored, so 0..15 with 8 for padding; int8 and float8 for the bf16 kernels: 16
// columns at the even k, then the same 16 at the odd k). Columns and k beyond the matrix are zero.
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
  // Where (k, column n of the panel) lies within its row, in elements; whole-byte types only.
  int64_t place(int64_t k, int64_t n) const {
    const int64_t kp = k_per_row();
    if ((b == DType::s8 || b == DType::f8) && compute == Compute::bf16) return n / kLanes * 2 * kLanes + k % 2 * kLanes + n % kLanes;
    return n * kp + k % kp;
  }
  int64_t bytes() const { return panels() * k_rows() * row_bytes(); }
};

// Strides in elements; for int4 the source holds two k to a byte, low nibble first, and strides are in bytes of a
// [ceil(k / 2), n] matrix. compensation: [padded_n] int32 = 128 * column sums, or null.
void pack_b(const PackedShape& shape, const char* src, int64_t k_stride, int64_t n_stride, char* dst, int32_t* compensation);
void unpack_b(const PackedShape& shape, const char* packed, char* dst, int64_t k_stride, int64_t n_stride);

// Bytes of one row (a group of k) of a block: 4 per column, except that the int16 kernels widen int8 as they load it.
constexpr int64_t block_row_bytes(Compute compute, int64_t columns) {
  return columns * (compute == Compute::i16 ? 2 : kGroupBytes);
}

// One block of an unpacked B as the dense rows of `compute`: k in [k0, k1), columns [n0, n0 + columns). Adds to
// compensation (per column of the block) when it is not null.
void pack_block(Compute compute, DType b, const char* src, int64_t k_stride, int64_t n_stride, int64_t k0, int64_t k1,
                int64_t n0, int64_t n, int64_t columns, char* dst, int32_t* compensation);

}  // namespace gemmtune
