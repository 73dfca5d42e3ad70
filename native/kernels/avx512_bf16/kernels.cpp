// AVX512-BF16: vdpbf16ps.
#include "../../frame/epilogue.hpp"
#include "../../frame/pack_a.hpp"
#include "dot.hpp"

namespace gemmtune {
namespace {

// Return the kernels of int8 weights. One row is multiplied by fp32 FMAs: a pair for vdpbf16ps takes a shift and an OR, which pay only
// where several rows share it.
constexpr KernelSet int8_set() {
  KernelSet set = make_kernel_set<DotS8, 12, 12, 8, 6>(Compute::bf16, DType::s8);
  set.tile[1][1] = &run_tile<FmaPairsS8, 1, 1>;
  set.tile[2][1] = &run_tile<FmaPairsS8, 1, 2>;
  set.tile[3][1] = &run_tile<FmaPairsS8, 1, 3>;
  set.tile[4][1] = &run_tile<FmaPairsS8, 1, 4>;
  return set;
}

constexpr KernelSet kSets[] = {
    add_dot_kernels<RowDotBf16>(make_kernel_set<DotBf16, 12, 12, 8, 6>(Compute::bf16, DType::bf16)),
    int8_set(), make_kernel_set<DotF8, 12, 12, 8, 6>(Compute::bf16, DType::f8),
    make_kernel_set<DotS4, 12, 10, 6, 4>(Compute::bf16, DType::s4),
};

}  // namespace

extern const IsaOps kAvx512Bf16Ops;
const IsaOps kAvx512Bf16Ops = {"avx512_bf16",  kSets,     sizeof(kSets) / sizeof(kSets[0]), &run_epilogue, &run_pointwise, &pack_activations,
                               &row_sums};

}  // namespace gemmtune
