// AVX512-BF16: vdpbf16ps.
#include "../../frame/epilogue.hpp"
#include "../../frame/pack_a.hpp"
#include "dot.hpp"

namespace gemmtune {
namespace {

constexpr KernelSet kSets[] = {
    add_dot_kernels<RowDotBf16>(make_kernel_set<DotBf16, 12, 12, 8, 6>(Compute::bf16, DType::bf16)),
    make_kernel_set<DotS8, 12, 12, 8, 6>(Compute::bf16, DType::s8), make_kernel_set<DotF8, 12, 12, 8, 6>(Compute::bf16, DType::f8),
    make_kernel_set<DotS4, 12, 10, 6, 4>(Compute::bf16, DType::s4),
};

}  // namespace

extern const IsaOps kAvx512Bf16Ops;
const IsaOps kAvx512Bf16Ops = {"avx512_bf16",  kSets,     sizeof(kSets) / sizeof(kSets[0]), &run_epilogue, &pack_activations,
                               &row_sums};

}  // namespace gemmtune
