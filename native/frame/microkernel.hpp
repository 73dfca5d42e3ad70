// The micro-kernel, a template for every ISA: a tile of MR rows by NV vectors of 16 columns, in registers.
//
// Traits T load and convert B, broadcast a group of A and multiply-accumulate (docs/how-to/a-micro-kernel.md has them all):
//   Acc, AVec, BVec, StoredVec; kVectorBytes (B bytes per vector and row); kGroupsPerRow (groups in one B row);
//   load_stored(p), convert<S>(stored), broadcast(p), dot(acc, a, b), group_offset(s), zero(), and the updates of C.
#pragma once

#include <utility>

#include "types.hpp"

#define GT_UNROLL _Pragma("GCC unroll 32")

namespace gemmtune {
// Internal linkage: each ISA's translation unit compiles its own copy with its own flags. The linker could merge inline
// functions of several units, and a CPU would then run instructions that it lacks.
namespace {

// The rows of the output that the next tile is stored to. They are prefetched into the L2 while this tile is multiplied, a line with
// each row of B: stores to lines that are in no cache would delay the loads of A and B behind them.
class OutputLines {
 public:
  explicit OutputLines(const TileArgs& t) : row_(t.next_out), stride_(t.out_stride), bytes_(t.out_bytes), rows_(t.next_out_rows) {}
  __attribute__((always_inline)) void prefetch_line() {
    if (rows_ == 0) return;
    __builtin_prefetch(row_ + byte_, 0, 2);
    byte_ += 64;
    if (byte_ >= bytes_) byte_ = 0, row_ += stride_, --rows_;
  }

 private:
  const char* row_;
  int64_t byte_ = 0, stride_, bytes_, rows_;
};

// The same, and the rows of the matrices that the next tile's epilogue reads. A class of its own, since int8 products without such
// matrices took 3% longer with it (docs/notes/cpu.md).
class NextLines {
 public:
  explicit NextLines(const TileArgs& t) : args_(t), rows_{t.next_out, t.out_stride, t.out_bytes}, left_(t.next_out_rows) {}
  __attribute__((always_inline)) void prefetch_line() {
    if (left_ == 0) return;
    __builtin_prefetch(rows_.first + byte_, 0, 2);
    byte_ += 64;
    if (byte_ < rows_.bytes) return;
    byte_ = 0, rows_.first += rows_.stride;
    if (--left_ == 0 && matrix_ < args_.next_matrix_count) rows_ = args_.next_matrices[matrix_++], left_ = args_.next_out_rows;
  }

 private:
  const TileArgs& args_;
  Rows rows_;
  int64_t byte_ = 0, left_;
  int matrix_ = 0;
};

// Lines: what is prefetched for the next tile.
template <class T, int MR, int NV, class Lines>
struct Tile {
  typename T::Acc acc[MR][NV];

  // One base pointer for every three rows keeps address arithmetic in few registers.
  static const char* row_pointer(const char* const* base, int64_t stride, int r) { return base[r / 3] + (r % 3) * stride; }

  template <int S>
  __attribute__((always_inline)) void multiply_group(const char* const* base, int64_t a_row_stride, int64_t a_group_stride,
                                           const typename T::StoredVec* stored) {
    typename T::BVec b[NV];
    GT_UNROLL for (int j = 0; j < NV; ++j) b[j] = T::template convert<S>(stored[j]);
    const int64_t offset = T::group_offset(S) * a_group_stride;
    GT_UNROLL for (int r = 0; r < MR; ++r) {
      const typename T::AVec a = T::broadcast(row_pointer(base, a_row_stride, r) + offset);
      GT_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = T::dot(acc[r][j], a, b[j]);
    }
  }

  template <int... S>
  __attribute__((always_inline)) void multiply_row(std::integer_sequence<int, S...>, const char* const* base, int64_t a_row_stride,
                                            int64_t a_group_stride, const typename T::StoredVec* stored) {
    (multiply_group<S>(base, a_row_stride, a_group_stride, stored), ...);
  }

  __attribute__((always_inline)) void multiply(const TileArgs& t) {
    GT_UNROLL for (int r = 0; r < MR; ++r) GT_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = T::zero();
    constexpr int kBases = (MR + 2) / 3;
    const char* base[kBases];
    GT_UNROLL for (int i = 0; i < kBases; ++i) base[i] = t.a + i * 3 * t.a_row_stride;
    const char *b = t.b, *prefetch = t.prefetch;
    const int64_t a_row_stride = t.a_row_stride, a_group_stride = t.a_group_stride, b_stride = t.b_stride, prefetch_stride = t.prefetch_stride;
    Lines next(t);
    for (int64_t g = 0; g < t.groups; g += T::kGroupsPerRow) {
      GT_UNROLL for (int p = 0; p < NV * T::kVectorBytes; p += 64) __builtin_prefetch(prefetch + p, 0, 3);
      next.prefetch_line();
      typename T::StoredVec stored[NV];
      GT_UNROLL for (int j = 0; j < NV; ++j) stored[j] = T::load_stored(b + j * T::kVectorBytes);
      multiply_row(std::make_integer_sequence<int, T::kGroupsPerRow>{}, base, a_row_stride, a_group_stride, stored);
      GT_UNROLL for (int i = 0; i < kBases; ++i) base[i] += T::kGroupsPerRow * a_group_stride;
      b += b_stride;
      prefetch += prefetch_stride;
    }
  }

  __attribute__((always_inline)) void store(const TileArgs& t) {
    auto* c = static_cast<typename T::Scalar*>(t.c);
    GT_UNROLL for (int r = 0; r < MR; ++r) GT_UNROLL for (int j = 0; j < NV; ++j) {
      auto* p = c + r * t.ldc + j * kLanes;
      T::store(p, t.accumulate ? T::add(acc[r][j], T::load(p)) : acc[r][j]);
    }
  }

  // Store one segment: C (+)= scale * (acc - zero * row_sum).
  __attribute__((always_inline)) void store_scaled(const TileArgs& t) {
    auto* c = static_cast<float*>(t.c);
    GT_UNROLL for (int j = 0; j < NV; ++j) {
      const auto scale = T::load_f32(t.scale + j * kLanes);
      GT_UNROLL for (int r = 0; r < MR; ++r) {
        auto v = acc[r][j];
        if (t.zero != nullptr) v = T::subtract_product(v, T::load_f32(t.zero + j * kLanes), t.a_sum[r]);
        float* p = c + r * t.ldc + j * kLanes;
        T::store_f32(p, T::scale_add(v, scale, p, t.accumulate));
      }
    }
  }
};

// Advance to the next segment. rows: of B in a segment.
inline void advance_segment(TileArgs& t, int64_t rows) {
  t.a += t.segment_groups * t.a_group_stride;
  t.b += rows * t.b_stride;
  t.prefetch += rows * t.prefetch_stride;
  t.scale += t.scale_stride;
  if (t.zero != nullptr) t.zero += t.scale_stride, t.a_sum += t.a_sum_stride;
  t.accumulate = true;
  t.next_out_rows = 0;  // they have been prefetched
}

template <class T, int MR, int NV, class Lines>
__attribute__((noinline)) void run_tile_beside(const TileArgs& t) {
  Tile<T, MR, NV, Lines> tile;
  if constexpr (!T::kInteger) {
    if (t.scale != nullptr) {
      TileArgs segment = t;
      for (int64_t left = t.groups; left > 0; left -= t.segment_groups) {
        segment.groups = left < t.segment_groups ? left : t.segment_groups;
        tile.multiply(segment);
        tile.store_scaled(segment);
        advance_segment(segment, t.segment_groups / T::kGroupsPerRow);
      }
      return;
    }
  }
  tile.multiply(t);
  tile.store(t);
}

template <class T, int MR, int NV>
void run_tile(const TileArgs& t) {
  if (t.next_matrix_count == 0) run_tile_beside<T, MR, NV, OutputLines>(t);
  else run_tile_beside<T, MR, NV, NextLines>(t);
}

template <class T, int S>
__attribute__((always_inline)) inline void expand_group(const typename T::StoredVec* stored, int nv, char* dst, int64_t dst_stride) {
  for (int j = 0; j < nv; ++j) T::store_dense(dst + T::group_offset(S) * dst_stride + j * 64, T::template convert<S>(stored[j]));
}

template <class T, int... S>
void expand_rows(std::integer_sequence<int, S...>, const char* b, int64_t b_stride, int nv, int64_t groups, char* dst,
                 int64_t dst_stride) {
  for (int64_t g = 0; g < groups; g += T::kGroupsPerRow) {
    typename T::StoredVec stored[kMaxVectors];
    for (int j = 0; j < nv; ++j) stored[j] = T::load_stored(b + j * T::kVectorBytes);
    (expand_group<T, S>(stored, nv, dst, dst_stride), ...);
    b += b_stride;
    dst += T::kGroupsPerRow * dst_stride;
  }
}

template <class T>
void expand(const char* b, int64_t b_stride, int nv, int64_t groups, char* dst, int64_t dst_stride) {
  expand_rows<T>(std::make_integer_sequence<int, T::kGroupsPerRow>{}, b, b_stride, nv, groups, dst, dst_stride);
}

template <class T, int NV, int... R>
constexpr void set_tile_kernels(KernelSet& set, std::integer_sequence<int, R...>) {
  set.max_rows[NV] = sizeof...(R);
  ((set.tile[NV][R + 1] = &run_tile<T, R + 1, NV>), ...);
}

// Return the kernels of one (compute, B type). R1 to R4 are the most rows of a tile of 1 to 4 vectors: registers hold
// MR * NV accumulators, NV vectors of B and one broadcast of A. A narrower tile needs at least the rows of a wider one,
// because a panel's last columns run as a narrower tile of as many rows. Dense converts B for `expand`, where T converts it
// to another type than the dense kernels read.
template <class T, int R1, int R2, int R3, int R4, class Dense = T>
constexpr KernelSet make_kernel_set(Compute compute, DType b) {
  KernelSet set{};
  set.compute = compute;
  set.b = b;
  set.groups_per_row = T::kGroupsPerRow;
  set.vector_bytes = T::kVectorBytes;
  set_tile_kernels<T, 1>(set, std::make_integer_sequence<int, R1>{});
  if constexpr (R2 > 0) set_tile_kernels<T, 2>(set, std::make_integer_sequence<int, R2>{});
  if constexpr (R3 > 0) set_tile_kernels<T, 3>(set, std::make_integer_sequence<int, R3>{});
  if constexpr (R4 > 0) set_tile_kernels<T, 4>(set, std::make_integer_sequence<int, R4>{});
  set.expand = &expand<Dense>;
  return set;
}

}  // namespace
}  // namespace gemmtune
