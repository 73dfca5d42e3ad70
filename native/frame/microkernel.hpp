// The micro-kernel, once, for every ISA: a tile of MR rows by NV vectors of 16 columns held in registers.
//
// Traits T say how to load and convert B, broadcast a group of A and multiply-accumulate:
//   Acc, AVec, BVec, Raw; kVectorBytes (B bytes per vector and row); kRows (groups in one B row);
//   raw(p), convert<S>(raw), broadcast(p), dot(acc, a, b), group_offset(s), zero(), and the C update helpers.
#pragma once

#include <utility>

#include "types.hpp"

#define GT_UNROLL _Pragma("GCC unroll 32")

namespace gemmtune {
// Internal linkage: each ISA's translation unit compiles its own copy under its own flags; shared (inline) code could
// be merged across them by the linker and run instructions this CPU lacks.
namespace {

template <class T, int MR, int NV>
struct Tile {
  typename T::Acc acc[MR][NV];

  // Row pointers in bases of three rows keep the address arithmetic in few registers.
  static const char* row(const char* const* base, int64_t stride, int r) { return base[r / 3] + (r % 3) * stride; }

  template <int S>
  __attribute__((always_inline)) void step(const char* const* base, int64_t a_row, int64_t a_group,
                                           const typename T::Raw* raw) {
    typename T::BVec b[NV];
    GT_UNROLL for (int j = 0; j < NV; ++j) b[j] = T::template convert<S>(raw[j]);
    const int64_t offset = T::group_offset(S) * a_group;
    GT_UNROLL for (int r = 0; r < MR; ++r) {
      const typename T::AVec a = T::broadcast(row(base, a_row, r) + offset);
      GT_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = T::dot(acc[r][j], a, b[j]);
    }
  }

  template <int... S>
  __attribute__((always_inline)) void steps(std::integer_sequence<int, S...>, const char* const* base, int64_t a_row,
                                            int64_t a_group, const typename T::Raw* raw) {
    (step<S>(base, a_row, a_group, raw), ...);
  }

  __attribute__((always_inline)) void multiply(const TileArgs& t) {
    GT_UNROLL for (int r = 0; r < MR; ++r) GT_UNROLL for (int j = 0; j < NV; ++j) acc[r][j] = T::zero();
    constexpr int kBases = (MR + 2) / 3;
    const char* base[kBases];
    GT_UNROLL for (int i = 0; i < kBases; ++i) base[i] = t.a + i * 3 * t.a_row;
    const char *b = t.b, *ahead = t.prefetch;
    const int64_t a_row = t.a_row, a_group = t.a_group, b_step = t.b_step, ahead_step = t.prefetch_step;
    for (int64_t g = 0; g < t.groups; g += T::kRows) {
      GT_UNROLL for (int p = 0; p < NV * T::kVectorBytes; p += 64) __builtin_prefetch(ahead + p, 0, 3);
      typename T::Raw raw[NV];
      GT_UNROLL for (int j = 0; j < NV; ++j) raw[j] = T::raw(b + j * T::kVectorBytes);
      steps(std::make_integer_sequence<int, T::kRows>{}, base, a_row, a_group, raw);
      GT_UNROLL for (int i = 0; i < kBases; ++i) base[i] += T::kRows * a_group;
      b += b_step;
      ahead += ahead_step;
    }
  }

  __attribute__((always_inline)) void store(const TileArgs& t) {
    auto* c = static_cast<typename T::Scalar*>(t.c);
    GT_UNROLL for (int r = 0; r < MR; ++r) GT_UNROLL for (int j = 0; j < NV; ++j) {
      auto* p = c + r * t.ldc + j * kLanes;
      T::store(p, t.accumulate ? T::add(acc[r][j], T::load(p)) : acc[r][j]);
    }
  }

  // C (+)= scale * (acc - zero * row_sum): one quantisation group is done.
  __attribute__((always_inline)) void store_scaled(const TileArgs& t) {
    auto* c = static_cast<float*>(t.c);
    GT_UNROLL for (int j = 0; j < NV; ++j) {
      const auto scale = T::load_f32(t.scale + j * kLanes);
      GT_UNROLL for (int r = 0; r < MR; ++r) {
        auto v = acc[r][j];
        if (t.zero != nullptr) v = T::subtract_product(v, T::load_f32(t.zero + j * kLanes), t.a_sum[r * t.a_sum_stride]);
        float* p = c + r * t.ldc + j * kLanes;
        T::store_f32(p, T::scale_add(v, scale, p, t.accumulate));
      }
    }
  }
};

template <class T, int MR, int NV>
void run_tile(const TileArgs& t) {
  Tile<T, MR, NV> tile;
  tile.multiply(t);
  if constexpr (!T::kInteger) {
    if (t.scale != nullptr) return tile.store_scaled(t);
  }
  tile.store(t);
}

template <class T, int S>
__attribute__((always_inline)) inline void expand_step(const typename T::Raw* raw, int nv, char* dst, int64_t dst_step) {
  for (int j = 0; j < nv; ++j) T::store_dense(dst + T::group_offset(S) * dst_step + j * 64, T::template convert<S>(raw[j]));
}

template <class T, int... S>
void expand_rows(std::integer_sequence<int, S...>, const char* b, int64_t b_step, int nv, int64_t groups, char* dst,
                 int64_t dst_step) {
  for (int64_t g = 0; g < groups; g += T::kRows) {
    typename T::Raw raw[kMaxVectors];
    for (int j = 0; j < nv; ++j) raw[j] = T::raw(b + j * T::kVectorBytes);
    (expand_step<T, S>(raw, nv, dst, dst_step), ...);
    b += b_step;
    dst += T::kRows * dst_step;
  }
}

template <class T>
void expand(const char* b, int64_t b_step, int nv, int64_t groups, char* dst, int64_t dst_step) {
  expand_rows<T>(std::make_integer_sequence<int, T::kRows>{}, b, b_step, nv, groups, dst, dst_step);
}

template <class T, int NV, int... R>
void fill_rows(KernelSet& set, std::integer_sequence<int, R...>) {
  set.max_rows[NV] = sizeof...(R);
  ((set.tile[NV][R + 1] = &run_tile<T, R + 1, NV>), ...);
}

// Largest tiles: registers hold MR * NV accumulators + NV of B + one broadcast. A panel's last columns may need
// fewer vectors with the panel's own rows, so a narrower tile has at least the rows of a wider one. Dense: what expands B
// for the dense kernels, where T converts it to something else.
template <class T, int R1, int R2, int R3, int R4, class Dense = T>
KernelSet make_set(Compute compute, DType b) {
  KernelSet set{};
  set.compute = compute;
  set.b = b;
  set.rows_per_load = T::kRows;
  set.vector_bytes = T::kVectorBytes;
  fill_rows<T, 1>(set, std::make_integer_sequence<int, R1>{});
  if constexpr (R2 > 0) fill_rows<T, 2>(set, std::make_integer_sequence<int, R2>{});
  if constexpr (R3 > 0) fill_rows<T, 3>(set, std::make_integer_sequence<int, R3>{});
  if constexpr (R4 > 0) fill_rows<T, 4>(set, std::make_integer_sequence<int, R4>{});
  set.expand = &expand<Dense>;
  return set;
}

}  // namespace
}  // namespace gemmtune
