// AVX512-VNNI: vpdpbusd, unsigned activations by signed weights, exact in int32 (it does not saturate).
#include "../../frame/epilogue.hpp"
#include "../../frame/microkernel.hpp"
#include "../../frame/pack_a.hpp"
#include "../avx512/vec512.hpp"

namespace gemmtune {
namespace {

struct Vnni : Int512 {
  using BVec = __m512i;
  using StoredVec = __m512i;
  static constexpr int kVectorBytes = 64;
  GT_INLINE StoredVec load_stored(const char* p) { return _mm512_loadu_si512(p); }
  template <int S> GT_INLINE __m512i convert(StoredVec v) { return v; }
  GT_INLINE __m512i dot(__m512i acc, __m512i a, __m512i b) { return _mm512_dpbusd_epi32(acc, a, b); }
  GT_INLINE void store_dense(char* p, __m512i v) { _mm512_storeu_si512(p, v); }
};

constexpr KernelSet kSets[] = {make_kernel_set<Vnni, 12, 12, 8, 6>(Compute::u8s8, DType::s8)};

}  // namespace

extern const IsaOps kAvx512VnniOps;
const IsaOps kAvx512VnniOps = {"avx512_vnni", kSets, 1, &run_epilogue, &run_pointwise, &pack_activations, &row_sums};

}  // namespace gemmtune
