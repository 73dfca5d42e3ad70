// The epilogue of one accumulator tile, row by row in the L1 cache, and the conversion to the output type.
#pragma once

#include "mathfun.hpp"
#include "types.hpp"

namespace gemmtune {
namespace {

constexpr int kMaxTileCols = 256;  // of a tile whose steps are computed: run_pointwise's are wider than the micro-kernels'
static_assert(kMaxTileCols >= kLanes * kMaxVectors, "an epilogue's tile is a micro-kernel's");

inline float load_scalar(const char* p, DType t, int64_t i) {
  switch (t) {
    case DType::f32: return reinterpret_cast<const float*>(p)[i];
    case DType::bf16: return bf16_to_f32(reinterpret_cast<const uint16_t*>(p)[i]);
    case DType::f16: return f16_to_f32(reinterpret_cast<const uint16_t*>(p)[i]);
    case DType::s8: return static_cast<float>(reinterpret_cast<const int8_t*>(p)[i]);
    case DType::u8: return static_cast<float>(reinterpret_cast<const uint8_t*>(p)[i]);
    default: return static_cast<float>(reinterpret_cast<const int32_t*>(p)[i]);
  }
}

// Load one row of an epilogue tensor as fp32. Each dtype has a loop of its own so that the loop vectorises.
inline void load_row(const char* p, DType t, int64_t first, int n, float* dst) {
  switch (t) {
    case DType::f32: std::memcpy(dst, reinterpret_cast<const float*>(p) + first, sizeof(float) * n); return;
    case DType::bf16: {
      const auto* s = reinterpret_cast<const uint16_t*>(p) + first;
      for (int i = 0; i < n; ++i) dst[i] = bf16_to_f32(s[i]);
      return;
    }
    case DType::f16: {
      const auto* s = reinterpret_cast<const uint16_t*>(p) + first;
      for (int i = 0; i < n; ++i) dst[i] = f16_to_f32(s[i]);
      return;
    }
    default:
      for (int i = 0; i < n; ++i) dst[i] = load_scalar(p, t, first + i);
  }
}

// Load one element of an integer epilogue tensor.
inline int64_t load_integer(const char* p, DType t, int64_t i) {
  switch (t) {
    case DType::s8: return reinterpret_cast<const int8_t*>(p)[i];
    case DType::u8: return reinterpret_cast<const uint8_t*>(p)[i];
    default: return reinterpret_cast<const int32_t*>(p)[i];
  }
}

inline int64_t clamp_int(int64_t v, int64_t lo, int64_t hi) {
  v = v < lo ? lo : v;
  return v > hi ? hi : v;
}

// Return x * y, saturating at kSaturationLimit. The product is unsigned, so that its overflow is defined; it is used only
// where the double approximation is within the limit.
inline int64_t saturating_mul(int64_t x, int64_t y) {
  const double approximate = static_cast<double>(x) * static_cast<double>(y);
  const auto product = static_cast<int64_t>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y));
  const int64_t limit = approximate < 0.0 ? -kSaturationLimit : kSaturationLimit;
  return approximate <= -static_cast<double>(kSaturationLimit) || approximate >= static_cast<double>(kSaturationLimit) ? limit : product;
}

inline int64_t min_value(DType t) { return t == DType::s8 ? -128 : t == DType::u8 ? 0 : -2147483648LL; }
inline int64_t max_value(DType t) { return t == DType::s8 ? 127 : t == DType::u8 ? 255 : 2147483647LL; }

// Apply a step that keeps an integer accumulator exact to one row of int64: relu, clamp with integral bounds, bias, add and
// mul with integers (times an integral value), cast to an integer type.
inline void apply_exact_step(const EpilogueArgs& e, const Step& s, const Aux* aux, int r, int64_t* v) {
  const int n = e.cols;
  int64_t lo = -kSaturationLimit, hi = kSaturationLimit;
  if (s.has_tensor) {
    const bool by_column = s.axis == Axis::col || s.axis == Axis::full;
    const int64_t first = s.axis == Axis::col ? e.col0
                          : s.axis == Axis::full ? e.batch * aux->batch_stride + (e.row0 + r) * aux->ld + e.col0
                          : s.axis == Axis::row ? e.row0 + r : 0;
    const int half = e.gate == Gate::none ? n : n / 2;
    for (int i = 0; i < n; ++i) {
      const int64_t column = i < half ? i : i - half + e.right;
      const int64_t t = load_integer(aux->data, s.dtype, first + (by_column ? column : 0));
      v[i] = s.kind == StepKind::mul ? saturating_mul(v[i], t) : v[i] + saturating_mul(t, s.int_value);
    }
  } else if (s.kind == StepKind::relu) {
    lo = 0;
  } else if (s.kind == StepKind::clamp) {
    lo = s.int_lo, hi = s.int_hi;
  } else {
    lo = min_value(s.dtype), hi = max_value(s.dtype);
  }
  for (int i = 0; i < n; ++i) v[i] = clamp_int(v[i], lo, hi);
}

// Store an int64 row to an integer output, saturating.
inline void store_integers(const int64_t* v, int n, DType t, char* out) {
  const int64_t lo = min_value(t), hi = max_value(t);
  for (int i = 0; i < n; ++i) {
    const int64_t saturated = clamp_int(v[i], lo, hi);
    if (t == DType::s8) reinterpret_cast<int8_t*>(out)[i] = static_cast<int8_t>(saturated);
    else if (t == DType::u8) reinterpret_cast<uint8_t*>(out)[i] = static_cast<uint8_t>(saturated);
    else reinterpret_cast<int32_t*>(out)[i] = static_cast<int32_t>(saturated);
  }
}

inline void cast_row(float* x, int n, DType t) {
  switch (t) {
    case DType::bf16:
      for (int i = 0; i < n; ++i) x[i] = bf16_to_f32(f32_to_bf16(x[i]));
      return;
    case DType::f16:
      for (int i = 0; i < n; ++i) x[i] = f16_to_f32(f32_to_f16(x[i]));
      return;
    case DType::s8:
      for (int i = 0; i < n; ++i) x[i] = static_cast<float>(round_to_int(x[i], -128.0f, 127.0f));
      return;
    case DType::u8:
      for (int i = 0; i < n; ++i) x[i] = static_cast<float>(round_to_int(x[i], 0.0f, 255.0f));
      return;
    case DType::s32:
      for (int i = 0; i < n; ++i) x[i] = static_cast<float>(round_to_s32(x[i]));
      return;
    default: return;
  }
}

// Replace n floats by combine(float, load(i)), whole vectors first: their loops have a fixed length, which compilers vectorise
// without a remainder.
template <class Load, class Combine>
inline void combine_row(float* __restrict x, int n, const Load& load, const Combine& combine) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int j = 0; j < kLanes; ++j) x[i + j] = combine(x[i + j], load(i + j));
  for (; i < n; ++i) x[i] = combine(x[i], load(i));
}

// Replace the elements x of a tile by combine(x, element of a step's tensor), broadcast along its axis. load(i): element i of the
// tensor as a float. In a tile with a gate, each half of the columns lies beside the other half's in the tensor.
template <class Load, class Combine>
inline void combine_tile(const EpilogueArgs& e, Axis axis, const Aux& aux, const Load& load, const Combine& combine) {
  const int parts = e.gate == Gate::none ? 1 : 2, n = e.cols / parts;
  auto* x = static_cast<float*>(e.c);
  for (int r = 0; r < e.rows; ++r, x += e.ldc) {
    if (axis != Axis::col && axis != Axis::full) {
      const float value = load(axis == Axis::row ? e.row0 + r : 0);
      combine_row(x, e.cols, [=](int64_t) { return value; }, combine);
      continue;
    }
    const int64_t row = axis == Axis::col ? 0 : e.batch * aux.batch_stride + (e.row0 + r) * aux.ld;
    for (int part = 0; part < parts; ++part) {
      const int64_t first = row + e.col0 + part * e.right;
      combine_row(x + part * n, n, [&](int64_t i) { return load(first + i); }, combine);
    }
  }
}

template <class Load>
inline void apply_loaded_step(const EpilogueArgs& e, const Step& s, const Aux& aux, const Load& load) {
  const float value = s.value;
  switch (s.kind) {
    case StepKind::scale: return combine_tile(e, s.axis, aux, load, [=](float x, float t) { return x * (value * t); });
    case StepKind::mul: return combine_tile(e, s.axis, aux, load, [](float x, float t) { return x * t; });
    default: return combine_tile(e, s.axis, aux, load, [=](float x, float t) { return x + value * t; });
  }
}

// Apply a step with a tensor to the whole tile. Row by row, with the tensor's row converted to floats on the stack, a residual took
// 1.0 to 1.4 ms of 256x2048x2048 by int8 weights, which take 3.4 to 3.9 without it (AMX; docs/notes/cpu.md).
inline void apply_tensor_step(const EpilogueArgs& e, const Step& s, const Aux& aux) {
  switch (s.dtype) {
    case DType::f32: {
      const auto* data = reinterpret_cast<const float*>(aux.data);
      return apply_loaded_step(e, s, aux, [=](int64_t i) { return data[i]; });
    }
    case DType::bf16: {
      const auto* data = reinterpret_cast<const uint16_t*>(aux.data);
      return apply_loaded_step(e, s, aux, [=](int64_t i) { return bf16_to_f32(data[i]); });
    }
    case DType::f16: {
      const auto* data = reinterpret_cast<const uint16_t*>(aux.data);
      return apply_loaded_step(e, s, aux, [=](int64_t i) { return f16_to_f32(data[i]); });
    }
    default: return apply_loaded_step(e, s, aux, [&](int64_t i) { return load_scalar(aux.data, s.dtype, i); });
  }
}

inline void apply_scalar_step(const Step& s, int n, float* x) {
  switch (s.kind) {
    case StepKind::scale:
      for (int i = 0; i < n; ++i) x[i] *= s.value;
      return;
    case StepKind::relu:  // this comparison keeps NaN, as ATen does
      for (int i = 0; i < n; ++i) x[i] = x[i] < 0.0f ? 0.0f : x[i];
      return;
    case StepKind::gelu:
      for (int i = 0; i < n; ++i) x[i] = gelu_f32(x[i]);
      return;
    case StepKind::gelu_tanh:
      for (int i = 0; i < n; ++i) x[i] = gelu_tanh_f32(x[i]);
      return;
    case StepKind::silu:
      for (int i = 0; i < n; ++i) x[i] = silu_f32(x[i]);
      return;
    case StepKind::clamp:
      for (int i = 0; i < n; ++i) {
        const float low = x[i] < s.lo ? s.lo : x[i];
        x[i] = low > s.hi ? s.hi : low;
      }
      return;
    case StepKind::cast: cast_row(x, n, s.dtype); return;
    default: return;
  }
}

// Convert the tile, whose elements are of type From, by convert(element, column), and store it to the output. These stores often
// miss the L1, and stores are written in their order, so that one to the stack in between would wait for them: when the variables
// of this loop were on the stack, with those of the steps, an AMX tile of 32 rows took 0.6 us longer (docs/notes/cpu.md).
template <class From, class To, class Convert>
inline void store_rows(const EpilogueArgs& e, const Convert& convert) {
  const int rows = e.rows, cols = e.cols;
  const int64_t ldc = e.ldc, ldo = e.ldo;
  const auto* __restrict from = static_cast<const From*>(e.c);
  auto* __restrict to = reinterpret_cast<To*>(e.out);
  for (int r = 0; r < rows; ++r, from += ldc, to += ldo) {
    int i = 0;
    for (; i + kLanes <= cols; i += kLanes)
      for (int j = 0; j < kLanes; ++j) to[i + j] = convert(from[i + j], i + j);
    for (; i < cols; ++i) to[i] = convert(from[i], i);
  }
}

#if defined(__AVX512BF16__)
// Store float accumulators, or what steps made of them, as bfloat16 by vcvtneps2bf16, which flushes subnormals as vdpbf16ps does.
// f32_to_bf16 takes about ten instructions for each vector.
inline void store_bfloat16(const EpilogueArgs& e) {
  const auto* from = static_cast<const float*>(e.c);
  auto* to = reinterpret_cast<uint16_t*>(e.out);
  for (int r = 0; r < e.rows; ++r, from += e.ldc, to += e.ldo) {
    int i = 0;
    for (; i + kLanes <= e.cols; i += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
    if (i == e.cols) continue;
    const auto mask = static_cast<__mmask16>((1u << (e.cols - i)) - 1);
    _mm256_mask_storeu_epi16(to + i, mask, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, from + i)));
  }
}
#endif

inline void store_floats(const EpilogueArgs& e) {
#if defined(__AVX512BF16__)
  if (e.out_dtype == DType::bf16 && !e.integer) return store_bfloat16(e);
#endif
  switch (e.out_dtype) {
    case DType::f32: return store_rows<float, float>(e, [](float x, int) { return x; });
    case DType::bf16: return store_rows<float, uint16_t>(e, [](float x, int) { return f32_to_bf16(x); });
    case DType::f16: return store_rows<float, uint16_t>(e, [](float x, int) { return f32_to_f16(x); });
    case DType::s8: return store_rows<float, int8_t>(e, [](float x, int) { return static_cast<int8_t>(round_to_int(x, -128.0f, 127.0f)); });
    case DType::u8: return store_rows<float, uint8_t>(e, [](float x, int) { return static_cast<uint8_t>(round_to_int(x, 0.0f, 255.0f)); });
    default: return store_rows<float, int32_t>(e, [](float x, int) { return round_to_s32(x); });
  }
}

// Apply the leading exact steps to row r of int32 accumulators. Returns how many steps they are; `v` then holds the row, and
// `*aux` points to the tensor of the next step.
inline int run_exact_steps(const EpilogueArgs& e, int r, const int32_t* acc, const Aux** aux, int64_t* v) {
  for (int i = 0; i < e.cols; ++i) v[i] = acc[i];
  int s = 0;
  for (; s < e.n_steps && e.steps[s].exact; ++s) apply_exact_step(e, e.steps[s], e.steps[s].has_tensor ? (*aux)++ : nullptr, r, v);
  return s;
}

// Return an accumulator without its compensation; unsigned, because integer products wrap.
inline int32_t compensated(int32_t x, int32_t compensation) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) - static_cast<uint32_t>(compensation));
}

// Subtract the compensation of n columns, if there is any, from a row of int32 accumulators, and replace them by change(value),
// whose type has their size. Whole vectors are copied to arrays first, since compilers vectorise no loop whose stores may change
// what it reads: element by element, a fifth of the time of int8 products with K = 256 was spent here (AVX512-VNNI).
template <class Change>
inline void change_row(void* row, const int32_t* compensation, int n, const Change& change) {
  auto* bytes = static_cast<char*>(row);
  for (int i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? n - i : kLanes;
    int32_t values[kLanes] = {}, less[kLanes] = {};
    decltype(change(0)) results[kLanes];
    static_assert(sizeof results == sizeof values, "the results replace the accumulators");
    std::memcpy(values, bytes + 4 * i, count == kLanes ? sizeof values : 4 * count);
    if (compensation != nullptr) std::memcpy(less, compensation + i, count == kLanes ? sizeof less : 4 * count);
    for (int j = 0; j < kLanes; ++j) results[j] = change(compensated(values[j], less[j]));
    std::memcpy(bytes + 4 * i, results, count == kLanes ? sizeof results : 4 * count);
  }
}

// Replace the first half of a row by its activation times the second half.
template <class Activation>
inline void multiply_halves(float* x, int half, const Activation& activation) {
  const float* factor = x + half;
  for (int i = 0; i < half; ++i) x[i] = activation(x[i]) * factor[i];
}

inline void apply_gate(Gate gate, float* x, int half) {
  switch (gate) {
    case Gate::silu: return multiply_halves(x, half, silu_f32);
    case Gate::gelu: return multiply_halves(x, half, gelu_f32);
    case Gate::gelu_tanh: return multiply_halves(x, half, gelu_tanh_f32);
    default: return;
  }
}

constexpr bool is_integer(DType t) { return t == DType::s8 || t == DType::u8 || t == DType::s32; }

// Convert the tile's int32 accumulators to floats, behind the leading steps that keep them exact. exact: whether there are any, or
// the output takes the integers. aux: the tensors of the steps; set to that of the next step. Returns how many steps are done, or
// -1 if all are, and the integers are stored to the output.
inline int finish_integers(const EpilogueArgs& e, bool exact, const Aux** aux) {
  int done = 0;
  for (int r = 0; r < e.rows; ++r) {
    auto* v = static_cast<int32_t*>(e.c) + r * e.ldc;
    if (!exact) {
      change_row(v, e.compensation, e.cols, [](int32_t value) { return static_cast<float>(value); });
      continue;
    }
    if (e.compensation != nullptr) change_row(v, e.compensation, e.cols, [](int32_t value) { return value; });
    int64_t integers[kMaxTileCols];
    *aux = e.aux;
    done = run_exact_steps(e, r, v, aux, integers);
    if (done == e.n_steps && e.gate == Gate::none && is_integer(e.out_dtype)) {
      store_integers(integers, e.cols, e.out_dtype, e.out + r * e.ldo * (bits(e.out_dtype) / 8));
      if (r == e.rows - 1) return -1;
      continue;
    }
    float* x = static_cast<float*>(e.c) + r * e.ldc;
    for (int i = 0; i < e.cols; ++i) x[i] = static_cast<float>(integers[i]);
  }
  return done;
}

void run_epilogue(const EpilogueArgs& e) {
  const bool exact = e.integer && (e.n_steps > 0 ? e.steps[0].exact : is_integer(e.out_dtype));
  const bool gated = e.gate != Gate::none;
  if (e.integer && e.n_steps == 0 && e.out_dtype == DType::s32 && !gated) {
    const int32_t* __restrict compensation = e.compensation;
    if (compensation == nullptr) store_rows<int32_t, int32_t>(e, [](int32_t x, int) { return x; });
    else store_rows<int32_t, int32_t>(e, [=](int32_t x, int i) { return compensated(x, compensation[i]); });
    return;
  }
  const Aux* aux = e.aux;
  const int done = e.integer ? finish_integers(e, exact, &aux) : 0;
  if (done < 0) return;
  auto* const x = static_cast<float*>(e.c);
  for (int s = done; s < e.n_steps; ++s) {
    if (e.steps[s].has_tensor) apply_tensor_step(e, e.steps[s], *aux++);
    else for (int r = 0; r < e.rows; ++r) apply_scalar_step(e.steps[s], e.cols, x + r * e.ldc);
  }
  EpilogueArgs result = e;
  if (gated) {
    result.cols /= 2;
    for (int r = 0; r < e.rows; ++r) apply_gate(e.gate, x + r * e.ldc, result.cols);
  }
  store_floats(result);
}

// Compute the steps, and the gate, from floating-point rows in memory, a tile in the L1 cache at a time.
void run_pointwise(const PointwiseArgs& p) {
  constexpr int kRows = 8;
  float tile[kRows * kMaxTileCols];
  const bool gated = p.gate != Gate::none;
  const int64_t columns = gated ? p.n / 2 : p.n, most = gated ? kMaxTileCols / 2 : kMaxTileCols;
  const int64_t src_row = p.src_stride * (bits(p.src_dtype) / 8), out_element = bits(p.out_dtype) / 8;
  EpilogueArgs e{};
  e.c = tile, e.ldc = kMaxTileCols;
  e.gate = p.gate, e.right = columns;
  e.steps = p.steps, e.n_steps = p.n_steps, e.aux = p.aux;
  e.ldo = p.ldo, e.out_dtype = p.out_dtype;
  for (int64_t row = 0; row < p.rows; row += kRows) {
    e.rows = static_cast<int>(p.rows - row < kRows ? p.rows - row : kRows);
    e.row0 = p.row0 + row;
    for (e.col0 = 0; e.col0 < columns; e.col0 += most) {
      const int width = static_cast<int>(columns - e.col0 < most ? columns - e.col0 : most);
      for (int r = 0; r < e.rows; ++r) {
        const char* src = p.src + (row + r) * src_row;
        load_row(src, p.src_dtype, e.col0, width, tile + r * kMaxTileCols);
        if (gated) load_row(src, p.src_dtype, e.col0 + e.right, width, tile + r * kMaxTileCols + width);
      }
      e.cols = gated ? 2 * width : width;
      e.out = p.out + (row * p.ldo + e.col0) * out_element;
      run_epilogue(e);
    }
  }
}

}  // namespace
}  // namespace gemmtune
