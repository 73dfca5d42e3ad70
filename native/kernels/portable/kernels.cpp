// Kernels for any CPU: GCC/Clang vector extensions, which compile to the instructions of the baseline.
#include "../../frame/epilogue.hpp"
#include "../../frame/microkernel.hpp"
#include "../../frame/pack_a.hpp"

#define GT_INLINE static inline __attribute__((always_inline))

namespace gemmtune {
namespace {

typedef float Vf __attribute__((vector_size(64), aligned(4)));
typedef int32_t Vi __attribute__((vector_size(64), aligned(4)));

template <class V, class F>
GT_INLINE V generate(F value) {
  V v;
  GT_UNROLL for (int i = 0; i < kLanes; ++i) v[i] = value(i);
  return v;
}

struct Fma {
  using Scalar = float;
  using Acc = Vf;
  using AVec = float;
  using BVec = Vf;
  static constexpr bool kInteger = false;
  static constexpr int kGroupsPerRow = 1;
  static constexpr int group_offset(int s) { return s; }
  GT_INLINE Vf zero() { return Vf{}; }
  GT_INLINE Vf load(const float* p) { return *reinterpret_cast<const Vf*>(p); }
  GT_INLINE void store(float* p, Vf v) { *reinterpret_cast<Vf*>(p) = v; }
  GT_INLINE Vf add(Vf x, Vf y) { return x + y; }
  GT_INLINE Vf load_f32(const float* p) { return load(p); }
  GT_INLINE void store_f32(float* p, Vf v) { store(p, v); }
  GT_INLINE Vf subtract_product(Vf v, Vf zero, float sum) { return v - zero * sum; }
  GT_INLINE Vf scale_add(Vf v, Vf scale, const float* c, bool accumulate) { return accumulate ? load(c) + v * scale : v * scale; }
  GT_INLINE float broadcast(const char* p) {
    float v;
    __builtin_memcpy(&v, p, 4);
    return v;
  }
  GT_INLINE Vf dot(Vf acc, float a, Vf b) { return acc + a * b; }
  GT_INLINE void store_dense(char* p, Vf v) { store(reinterpret_cast<float*>(p), v); }
};

struct FmaF32 : Fma {
  using StoredVec = Vf;
  static constexpr int kVectorBytes = 64;
  GT_INLINE StoredVec load_stored(const char* p) { return load(reinterpret_cast<const float*>(p)); }
  template <int S> GT_INLINE Vf convert(StoredVec v) { return v; }
};

template <float (*Widen)(uint16_t)>
struct FmaHalf : Fma {
  using StoredVec = const uint16_t*;
  static constexpr int kVectorBytes = 32;
  GT_INLINE StoredVec load_stored(const char* p) { return reinterpret_cast<const uint16_t*>(p); }
  template <int S> GT_INLINE Vf convert(StoredVec p) { return generate<Vf>([p](int i) { return Widen(p[i]); }); }
};

struct FmaS8 : Fma {
  using StoredVec = const int8_t*;
  static constexpr int kVectorBytes = 16;
  GT_INLINE StoredVec load_stored(const char* p) { return reinterpret_cast<const int8_t*>(p); }
  template <int S> GT_INLINE Vf convert(StoredVec p) { return generate<Vf>([p](int i) { return static_cast<float>(p[i]); }); }
};

struct FmaF8 : Fma {
  using StoredVec = const uint8_t*;
  static constexpr int kVectorBytes = 16;
  GT_INLINE StoredVec load_stored(const char* p) { return reinterpret_cast<const uint8_t*>(p); }
  template <int S> GT_INLINE Vf convert(StoredVec p) { return generate<Vf>([p](int i) { return f8_to_f32(p[i]); }); }
};

struct FmaS4 : Fma {
  using StoredVec = const uint32_t*;
  static constexpr int kVectorBytes = 64;
  static constexpr int kGroupsPerRow = 8;
  static constexpr int group_offset(int s) { return 2 * (s % 4) + s / 4; }
  GT_INLINE StoredVec load_stored(const char* p) { return reinterpret_cast<const uint32_t*>(p); }
  template <int S> GT_INLINE Vf convert(StoredVec p) {
    return generate<Vf>([p](int i) { return static_cast<float>(static_cast<int>((p[i] >> (4 * S)) & 15u) - 8); });
  }
};

struct MaddS8 {
  using Scalar = int32_t;
  using Acc = Vi;
  struct AVec {
    int32_t even, odd;
  };
  struct BVec {
    Vi even, odd;
  };
  using StoredVec = const int8_t*;
  static constexpr bool kInteger = true;
  static constexpr int kGroupsPerRow = 1;
  static constexpr int kVectorBytes = 32;
  static constexpr int group_offset(int s) { return s; }
  GT_INLINE Vi zero() { return Vi{}; }
  GT_INLINE Vi load(const int32_t* p) { return *reinterpret_cast<const Vi*>(p); }
  GT_INLINE void store(int32_t* p, Vi v) { *reinterpret_cast<Vi*>(p) = v; }
  GT_INLINE Vi add(Vi x, Vi y) { return x + y; }
  GT_INLINE StoredVec load_stored(const char* p) { return reinterpret_cast<const int8_t*>(p); }
  template <int S> GT_INLINE BVec convert(StoredVec p) {
    return {generate<Vi>([p](int i) { return int32_t{p[2 * i]}; }), generate<Vi>([p](int i) { return int32_t{p[2 * i + 1]}; })};
  }
  GT_INLINE AVec broadcast(const char* p) {
    int16_t v[2];
    __builtin_memcpy(v, p, 4);
    return {v[0], v[1]};
  }
  GT_INLINE Vi dot(Vi acc, AVec a, BVec b) { return acc + a.even * b.even + a.odd * b.odd; }
  GT_INLINE void store_dense(char* p, BVec v) {
    auto* d = reinterpret_cast<int16_t*>(p);
    for (int i = 0; i < kLanes; ++i) {
      d[2 * i] = static_cast<int16_t>(v.even[i]);
      d[2 * i + 1] = static_cast<int16_t>(v.odd[i]);
    }
  }
};

constexpr KernelSet kSets[] = {
    make_kernel_set<FmaF32, 4, 0, 0, 0>(Compute::f32, DType::f32),
    make_kernel_set<FmaHalf<&bf16_to_f32>, 4, 0, 0, 0>(Compute::f32, DType::bf16),
    make_kernel_set<FmaHalf<&f16_to_f32>, 4, 0, 0, 0>(Compute::f32, DType::f16),
    make_kernel_set<FmaS8, 4, 0, 0, 0>(Compute::f32, DType::s8),
    make_kernel_set<FmaF8, 4, 0, 0, 0>(Compute::f32, DType::f8),
    make_kernel_set<FmaS4, 4, 0, 0, 0>(Compute::f32, DType::s4),
    make_kernel_set<MaddS8, 4, 0, 0, 0>(Compute::i16, DType::s8),
};

}  // namespace

extern const IsaOps kPortableOps;
const IsaOps kPortableOps = {"portable", kSets, sizeof(kSets) / sizeof(kSets[0]), &run_epilogue, &run_pointwise, &pack_activations, &row_sums};

}  // namespace gemmtune
