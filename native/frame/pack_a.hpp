// Packing of A: conversion to the 4-byte groups of kp elements along K that a micro-kernel broadcasts.
#pragma once

#include "convert.hpp"
#include "types.hpp"

namespace gemmtune {
namespace {

template <class S>
inline float to_float(S v, DType t) {
  if constexpr (sizeof(S) == 4) return static_cast<float>(v);
  else if constexpr (sizeof(S) == 2) return t == DType::bf16 ? bf16_to_f32(static_cast<uint16_t>(v)) : f16_to_f32(static_cast<uint16_t>(v));
  else return static_cast<float>(v);
}

// Convert one row of `k` elements to contiguous elements of the compute type.
template <class S, class D, class F>
inline void convert_row(const S* src, int64_t stride, int64_t k, D* dst, F convert) {
  if (stride == 1)
    for (int64_t i = 0; i < k; ++i) dst[i] = convert(src[i]);
  else
    for (int64_t i = 0; i < k; ++i) dst[i] = convert(src[i * stride]);
}

template <class S>
void pack_row(const PackAArgs& p, const S* src, char* dst) {
  const DType t = p.dtype;
  switch (p.compute) {
    case Compute::f32:
      if (t == DType::bf16) convert_row(src, p.col_stride, p.k, reinterpret_cast<float*>(dst), [](S v) { return to_float(v, DType::bf16); });
      else if (t == DType::f16) convert_row(src, p.col_stride, p.k, reinterpret_cast<float*>(dst), [](S v) { return to_float(v, DType::f16); });
      else convert_row(src, p.col_stride, p.k, reinterpret_cast<float*>(dst), [](S v) { return to_float(v, DType::f32); });
      return;
    case Compute::bf16:
      convert_row(src, p.col_stride, p.k, reinterpret_cast<uint16_t*>(dst), [](S v) { return static_cast<uint16_t>(v); });
      return;
    case Compute::i16:
      convert_row(src, p.col_stride, p.k, reinterpret_cast<int16_t*>(dst), [](S v) { return static_cast<int16_t>(v); });
      return;
    case Compute::u8s8: {
      const uint8_t flip = t == DType::s8 ? 0x80 : 0;
      convert_row(src, p.col_stride, p.k, reinterpret_cast<uint8_t*>(dst), [flip](S v) { return static_cast<uint8_t>(static_cast<uint8_t>(v) ^ flip); });
      return;
    }
    default:
      convert_row(src, p.col_stride, p.k, reinterpret_cast<uint8_t*>(dst), [](S v) { return static_cast<uint8_t>(v); });
  }
}

template <class S>
void pack_rows(const PackAArgs& p) {
  const int64_t row_bytes = p.pad_groups * kGroupBytes;
  const int64_t data_bytes = p.k * (kGroupBytes / group_size(p.compute));
  for (int64_t r = 0; r < p.rows; ++r) {
    const S* src = reinterpret_cast<const S*>(p.src) + r * p.row_stride;
    char* row = p.dst + r * p.dst_row_stride;
    pack_row(p, src, row);
    std::memset(row + data_bytes, 0, row_bytes - data_bytes);
  }
}

void pack_activations_rowwise(const PackAArgs& p) {
  switch (bits(p.dtype)) {
    case 32: return pack_rows<float>(p);
    case 16: return pack_rows<uint16_t>(p);
    default: return p.dtype == DType::s8 ? pack_rows<int8_t>(p) : pack_rows<uint8_t>(p);
  }
}

// Pack rows of A, row-major or in panels. A panel's rows are converted one at a time into a contiguous strip of groups,
// which is then stored at the panel's stride.
void pack_activations(const PackAArgs& p) {
  if (p.panel == 0) return pack_activations_rowwise(p);
  constexpr int64_t kStrip = 256;
  alignas(64) uint32_t strip[kStrip];
  const int64_t kp = group_size(p.compute), element = bits(p.dtype) / 8;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t g = 0; g < p.pad_groups; g += kStrip) {
      PackAArgs chunk = p;
      chunk.panel = 0;
      chunk.rows = 1;
      chunk.src = p.src + (r * p.row_stride + g * kp * p.col_stride) * element;
      chunk.pad_groups = p.pad_groups - g < kStrip ? p.pad_groups - g : kStrip;
      const int64_t remaining = p.k - g * kp;
      chunk.k = remaining < 0 ? 0 : (remaining < chunk.pad_groups * kp ? remaining : chunk.pad_groups * kp);
      chunk.dst = reinterpret_cast<char*>(strip);
      pack_activations_rowwise(chunk);
      auto* dst = reinterpret_cast<uint32_t*>(p.dst) + g * p.panel + r;
      for (int64_t i = 0; i < chunk.pad_groups; ++i) dst[i * p.panel] = strip[i];
    }
}

// Sum A over each quantisation group, for zero points, into sums[quantisation group][row].
template <class S>
void sum_rows(const PackAArgs& p, int64_t quant_group, float* sums, int64_t stride) {
  for (int64_t r = 0; r < p.rows; ++r) {
    const S* src = reinterpret_cast<const S*>(p.src) + r * p.row_stride;
    for (int64_t k0 = 0, g = 0; k0 < p.k; k0 += quant_group, ++g) {
      const int64_t k1 = k0 + quant_group < p.k ? k0 + quant_group : p.k;
      float total = 0.0f;
      for (int64_t k = k0; k < k1; ++k) total += to_float(src[k * p.col_stride], p.dtype);
      sums[g * stride + r] = total;
    }
  }
}

void row_sums(const PackAArgs& p, int64_t quant_group, float* sums, int64_t stride) {
  switch (bits(p.dtype)) {
    case 32: return sum_rows<float>(p, quant_group, sums, stride);
    case 16: return sum_rows<uint16_t>(p, quant_group, sums, stride);
    default: return p.dtype == DType::s8 ? sum_rows<int8_t>(p, quant_group, sums, stride) : sum_rows<uint8_t>(p, quant_group, sums, stride);
  }
}

}  // namespace
}  // namespace gemmtune
