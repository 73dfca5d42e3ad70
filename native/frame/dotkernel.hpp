// Dot products along a contiguous K, a template for every ISA that has them: MR rows of A by up to four columns of B, one
// vector of K at a time, one horizontal sum per result at the end.
//
// Traits T: Acc, AVec, BVec; kElements (elements of K per vector); kABytes, kBBytes (bytes of kElements); load_a, load_b;
// load_a_tail, load_b_tail (the first `count` elements, zeros beyond); dot(acc, a, b); zero(); sum(acc).
#pragma once

#include "microkernel.hpp"

namespace gemmtune {
namespace {

template <class T, int MR, int NC>
void run_dot(const DotArgs& d) {
  typename T::Acc acc[MR][NC];
  GT_UNROLL for (int r = 0; r < MR; ++r) GT_UNROLL for (int j = 0; j < NC; ++j) acc[r][j] = T::zero();
  const char *a = d.a, *b = d.b;
  const int64_t a_row_stride = d.a_row_stride, b_col_stride = d.b_col_stride, prefetch = d.prefetch;
  int64_t k = d.k;
  for (; k >= T::kElements; k -= T::kElements, a += T::kABytes, b += T::kBBytes) {
    typename T::BVec column[NC];
    GT_UNROLL for (int j = 0; j < NC; ++j) {
      __builtin_prefetch(b + j * b_col_stride + prefetch, 0, 3);
      column[j] = T::load_b(b + j * b_col_stride);
    }
    GT_UNROLL for (int r = 0; r < MR; ++r) {
      const typename T::AVec row = T::load_a(a + r * a_row_stride);
      GT_UNROLL for (int j = 0; j < NC; ++j) acc[r][j] = T::dot(acc[r][j], row, column[j]);
    }
  }
  if (k > 0) {
    GT_UNROLL for (int j = 0; j < NC; ++j) {
      const typename T::BVec column = T::load_b_tail(b + j * b_col_stride, static_cast<int>(k));
      GT_UNROLL for (int r = 0; r < MR; ++r)
        acc[r][j] = T::dot(acc[r][j], T::load_a_tail(a + r * a_row_stride, static_cast<int>(k)), column);
    }
  }
  GT_UNROLL for (int r = 0; r < MR; ++r) GT_UNROLL for (int j = 0; j < NC; ++j) {
    float* c = d.c + r * d.ldc + j;
    const float sum = T::sum(acc[r][j]);
    *c = d.accumulate ? *c + sum : sum;
  }
}

template <class T, int MR>
void run_dot_columns(const DotArgs& d) {
  switch (d.columns) {
    case 4: return run_dot<T, MR, 4>(d);
    case 3: return run_dot<T, MR, 3>(d);
    case 2: return run_dot<T, MR, 2>(d);
    default: return run_dot<T, MR, 1>(d);
  }
}

template <class T>
constexpr KernelSet add_dot_kernels(KernelSet set) {
  set.dot[1] = &run_dot_columns<T, 1>;
  set.dot[2] = &run_dot_columns<T, 2>;
  set.dot[3] = &run_dot_columns<T, 3>;
  set.dot[4] = &run_dot_columns<T, 4>;
  return set;
}

}  // namespace
}  // namespace gemmtune
