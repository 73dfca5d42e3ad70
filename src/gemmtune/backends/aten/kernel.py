"""The common part of all ATen kernels: one ATen op computes the product, then the steps of the epilogue that it did not
fuse follow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ...core import torch_compat
from ...core.candidate import Candidate, Scalar
from ...core.epilogue import Epilogue
from ...core.errors import KernelError, PackedWeightError
from ...core.problem import Problem, bits
from ...core.target import Target
from ...core.weights import PackedWeight
from ..base import Kernel
from ..native.pointwise import cpu_pointwise_of
from .fusion import Fused, remaining_epilogue
from .steps import apply_steps, dtype_of, round_to_dtype

if TYPE_CHECKING:
    from ..triton.jit_kernel import JitKernel
    from ..triton.pointwise import Pointwise

# A Triton kernel that is compiled in its first call, and operands like those of a call, on PyTorch's device "meta".
JitCalls = list[tuple["JitKernel", tuple[Any, ...]]]

_CUBLAS = torch.backends.cuda.matmul
_REDUCTION_FLAGS = {
    "bfloat16": "allow_bf16_reduced_precision_reduction", "float16": "allow_fp16_reduced_precision_reduction",
}  # fmt: skip
FLOATS = ("float32", "float64", "bfloat16", "float16")

_COPY_ROUNDS_TO = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AtenKernel(Kernel):
    """One ATen formulation. A subclass names its template, says which problems its op cannot compute, and computes the
    product.

    device_types: the kinds of devices that have the op; empty for all. is_fallback: whether plain PyTorch runs the same
    op on an unpacked weight, for some Problems at least (``runs_as_pytorch``). has_plain_product: whether it differs
    from that op only by work in front of the same product that takes as long for any M. has_cpu_kernel_behind: whether
    one kernel computes the steps behind the product on a CPU, too; gates always have one. accumulator: the dtype of the
    product; empty for that of A.
    """

    template: ClassVar[str]
    family: ClassVar[tuple[str, ...]] = ("mm",)
    device_types: ClassVar[tuple[str, ...]] = ()
    is_fallback: ClassVar[bool] = False
    has_plain_product: ClassVar[bool] = False
    has_cpu_kernel_behind: ClassVar[bool] = False
    counts_writes: ClassVar[bool] = True
    accumulator: ClassVar[str] = ""
    # Names in core.torch_compat of the operators that the template needs and that some versions of torch lack.
    operators: ClassVar[tuple[str, ...]] = ()

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        config = dict(candidate.config)
        reason = self.why_unsupported(problem, config)
        if reason:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason}")
        self.fused = self.fused_prefix(problem)
        remaining, reason = self.remaining_steps(problem)
        if remaining is None:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason}")
        self.remaining: Epilogue = remaining
        self._pointwise = steps_kernel(remaining, self.product_dtype(problem), problem.out_dtype)
        self._cpu_pointwise = None
        if problem.gate is not None or self.has_cpu_kernel_behind:
            self._cpu_pointwise = cpu_pointwise_of(remaining, self.product_dtype(problem), problem.out_dtype)
        self.out_dtype = dtype_of(problem.out_dtype)
        self._reduction_flag = _REDUCTION_FLAGS.get(problem.a.dtype)
        self.packing = self.layout(problem, config)
        self.workspace_bytes = self.scratch_bytes(problem)
        self.prepare(config)

    @classmethod
    def configs(cls, problem: Problem) -> list[dict[str, Scalar]]:
        """Return the configs that this template offers."""
        return [{}]

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        """Return why the op cannot compute this problem's product; empty when it can."""
        return ""

    @classmethod
    def why_unsupported_on_cpu(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        """Return why this version of torch cannot compute the product on a CPU, beyond what ``why_unsupported`` covers;
        empty when it can."""
        return ""

    @classmethod
    def why_unsupported_on_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        """Return why the op is not offered on this GPU, beyond what ``why_unsupported`` covers; empty when it is."""
        return ""

    @classmethod
    def why_illegal(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        """Return why the whole candidate is illegal (the op is missing, cannot compute the product, or would round
        before the epilogue); empty when it is legal."""
        for name in cls.operators:
            if getattr(torch_compat, name) is None:
                return f"torch {torch.__version__} has no operator _{name}"
        reason = cls.why_unsupported(problem, config)
        return reason or cls.remaining_steps(problem)[1]

    @classmethod
    def runs_as_pytorch(cls, problem: Problem) -> bool:
        """Whether plain PyTorch runs the same op for this Problem on an unpacked weight. The answer must not depend on
        M: a plan for a range of M has one op of PyTorch's."""
        return cls.is_fallback

    @classmethod
    def product_dtype(cls, problem: Problem) -> str:
        """Return the dtype in which the op returns its product."""
        return cls.accumulator or problem.a.dtype

    @classmethod
    def fused_prefix(cls, problem: Problem) -> Fused:
        """Return the part of the epilogue that the op computes itself."""
        return Fused()

    @classmethod
    def remaining_steps(cls, problem: Problem) -> tuple[Epilogue | None, str]:
        """Return the steps behind the op, or None and the reason why they cannot follow it."""
        return remaining_epilogue(problem, cls.product_dtype(problem), cls.fused_prefix(problem))

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        """Return the layout that B must be packed in, or None for the raw operand."""
        return None

    @classmethod
    def scratch_bytes(cls, problem: Problem) -> int:
        """Return the bytes that are allocated besides the output: a 32-bit accumulator unless the op writes the final
        result."""
        direct = not problem.epilogue and problem.out_dtype == cls.product_dtype(problem)
        return 0 if direct else 4 * problem.batch * problem.m * problem.n

    def prepare(self, config: Mapping[str, Scalar]) -> None:
        """Set up what ``product`` needs, once, when the kernel is loaded."""

    @abstractmethod
    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        """Return the fused part of the computation in a new tensor [.., M, N] of ``product_dtype``."""

    def keep_torch_flags(self) -> None:
        if self.runs_as_pytorch(self.problem):
            self._reduction_flag = None

    def library_product(self) -> Problem | None:
        """Return the Problem of the product that cuBLAS computes for the op on a GPU, if plain PyTorch runs the op.
        None where it computes none, or one that a Problem does not describe."""
        return None

    def library_algorithm(self, m: int) -> str:
        product = self.library_product() if self.runs_as_pytorch(self.problem) else None
        if product is None:
            return ""
        from ..cublaslt.choice import chosen_algorithm

        return chosen_algorithm(product, m)

    def jit_calls(self) -> JitCalls:
        """Return the Triton kernels beside the product that a call on a GPU launches, for dense operands with the
        Problem's sizes."""
        return self._steps_calls(self._pointwise, self.remaining, self.product_dtype(self.problem))

    def _steps_calls(self, kernel: Pointwise | None, steps: Epilogue, dtype: str) -> JitCalls:
        """Return the call of a kernel that computes ``steps`` from a product of ``dtype``; none where there is no
        kernel, or the product is no matrix."""
        problem = self.problem
        if kernel is None or problem.is_batched or problem.is_empty:
            return []
        m, n = problem.m, problem.n
        aux = [
            torch.empty((m, n) if step.axis == "full" else n, dtype=dtype_of(step.dtype), device="meta")
            for step in steps
            if step.takes_tensor and step.dtype is not None
        ]
        acc, out = (
            torch.empty(m, columns, dtype=dtype_of(name), device="meta")
            for columns, name in ((n, dtype), (problem.columns, problem.out_dtype))
        )
        return [(kernel, (acc, aux, out))]

    def _without_reduced_precision(self, a: Tensor, compute: Callable[..., Any], *operands: Any) -> Any:
        """Return ``compute(*operands)``, on a GPU with all sums in float32.

        By default PyTorch lets cuBLAS add the partial sums of a split-K product in bfloat16 or float16, which is far
        outside the error bound (tests/gpu/test_serving.py).
        """
        if not a.is_cuda or self._reduction_flag is None:
            return compute(*operands)
        previous = getattr(_CUBLAS, self._reduction_flag)
        if not previous:
            return compute(*operands)
        setattr(_CUBLAS, self._reduction_flag, False)
        try:
            return compute(*operands)
        finally:
            setattr(_CUBLAS, self._reduction_flag, previous)

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        """Return the result in a new tensor."""
        if self._pointwise is not None and a.is_cuda:
            return super().functional(a, b, aux)  # ``run`` computes the remaining steps by one kernel
        return round_to_dtype(self._before_rounding(self._product(a, b, aux), aux), self.out_dtype)

    def _product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        acc: Tensor = self._without_reduced_precision(a, self.product, a, b, aux)
        return acc

    def _steps_by_kernel(self, acc: Tensor, aux: Sequence[Tensor], out: Tensor) -> bool:
        """Compute the remaining steps from the product into ``out`` by one kernel, and return True; False where there
        is none for these tensors. aux: the steps' tensors."""
        kernel = self._pointwise if acc.is_cuda else self._cpu_pointwise
        return kernel is not None and kernel.run(acc, aux, out)

    def _before_rounding(self, acc: Tensor, aux: Sequence[Tensor]) -> Tensor:
        """Return what the remaining steps make of the product."""
        if not self.remaining and acc.dtype == self.out_dtype:
            return acc
        wide = acc if self.product_dtype(self.problem) in ("float64", "int32") else acc.float()
        return apply_steps(wide, self.remaining, aux[self.fused.tensors :])

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        acc = self._product(a, b, aux)
        if self._steps_by_kernel(acc, aux[self.fused.tensors :], out):
            return
        # ``copy_`` rounds while it copies, as ``functional`` rounds into its new tensor: a race must not charge this
        # variant for one more pass over the output.
        result = self._before_rounding(acc, aux)
        out.copy_(result if self.out_dtype in _COPY_ROUNDS_TO else round_to_dtype(result, self.out_dtype))


def steps_kernel(steps: Epilogue, acc_dtype: str, out_dtype: str) -> Pointwise | None:
    """Return ``triton.pointwise.pointwise_of`` of the same arguments; None without steps. It is imported when a kernel
    needs it: the Triton backend's modules take time that ``import gemmtune`` must not."""
    if not steps:
        return None
    from ..triton.pointwise import pointwise_of

    return pointwise_of(steps, acc_dtype, out_dtype)


class OutVariantKernel(AtenKernel):
    """A kernel whose op has an out variant, which is used when no step of the epilogue remains after the op."""

    def matrix(self, b: Any) -> Tensor:
        """Return the B operand as a Tensor [K, N]."""
        tensor: Tensor = b
        return tensor

    @abstractmethod
    def product_out(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        """Write the result of ``product`` into ``out``, which has ``product_dtype``."""

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if self.remaining or dtype_of(self.product_dtype(self.problem)) != self.out_dtype:
            super().run(a, b, aux, out)
        else:
            self._without_reduced_precision(a, self.product_out, a, b, aux, out)


class CopiedKernel(OutVariantKernel):
    """A kernel with a constant weight that is copied once into the other memory order, for use with a kernel that takes
    the weight as it is: ``class MmCopied(CopiedKernel, Mm)``."""

    is_fallback = False

    @classmethod
    def configs(cls, problem: Problem) -> list[dict[str, Scalar]]:
        return [{"order": order} for order in ("row", "col")]

    @classmethod
    def why_unsupported(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        if problem.b.layout.ld is None and problem.b.layout.order == config["order"]:
            return f"the weight already is {config['order']}-major"
        return why_not_packable(problem) or super().why_unsupported(problem, config)

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        return f"aten:{config['order']}"

    def matrix(self, b: Any) -> Tensor:
        return require_layout(b, self.packing or "").data[0]

    def pack(self, b: Any) -> PackedWeight:
        return contiguous_copy(b, self.packing or "", self.problem)


class SlicedKernel(AtenKernel):
    """A kernel whose product may be a view of a larger tensor; ``functional`` returns a contiguous copy of such a
    view."""

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return super().functional(a, b, aux).contiguous()

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        AtenKernel.run(self, a, b, aux, out)


def require_layout(b: Any, layout: str) -> PackedWeight:
    """Return ``b``, which must be a PackedWeight in ``layout``. Raises PackedWeightError otherwise."""
    if not isinstance(b, PackedWeight) or b.layout != layout:
        actual = f"layout {b.layout!r}" if isinstance(b, PackedWeight) else type(b).__name__
        raise PackedWeightError(f"expected a weight packed as {layout!r}; got {actual}. Pack it again")
    return b


def why_not_packable(problem: Problem) -> str:
    """Return why B cannot be packed, or empty."""
    return "" if problem.b.constant else "packs its weight, and this operand is not constant"


def dense_weight_bytes(problem: Problem, dtype: str) -> int:
    """Return the bytes of B as a dense matrix of ``dtype``."""
    return problem.batch * problem.k * problem.n * bits(dtype) // 8


def contiguous_copy(b: Tensor, layout: str, problem: Problem) -> PackedWeight:
    """Return a contiguous copy of B [K, N] in the memory order that ``layout`` ends with (row or col)."""
    data = b.contiguous() if layout.endswith("row") else b.t().contiguous().t()
    if data.data_ptr() == b.data_ptr():
        data = b.clone()
    return dense_packed_weight(layout, data, problem)


def dense_packed_weight(layout: str, data: Tensor, problem: Problem) -> PackedWeight:
    """Return the PackedWeight of a weight without quantisation, with ``data`` as its only tensor."""
    b = problem.b
    return PackedWeight(layout, (data,), problem.n, problem.k, b.dtype, None, "", b.layout.order)
