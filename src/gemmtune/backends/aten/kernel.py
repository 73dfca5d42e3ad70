"""What all ATen kernels share: a product by one ATen op, then whatever of the epilogue it did not fuse."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

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
from .fusion import Fused, rest_after
from .steps import apply, dtype_of, finish

_CUBLAS = torch.backends.cuda.matmul
_REDUCED = {
    "bfloat16": "allow_bf16_reduced_precision_reduction", "float16": "allow_fp16_reduced_precision_reduction",
}  # fmt: skip
FLOATS = ("float32", "float64", "bfloat16", "float16")

_ROUNDED_BY_COPYING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class AtenKernel(Kernel):
    """One ATen formulation. Subclasses name themselves, say what they refuse and compute the product."""

    template: ClassVar[str]
    family: ClassVar[tuple[str, ...]] = ("mm",)
    cuda_only: ClassVar[bool] = False
    counts_writes: ClassVar[bool] = True
    # The names in torch_internals of operators that the template needs and that a torch may not have.
    operators: ClassVar[tuple[str, ...]] = ()

    def __init__(self, problem: Problem, candidate: Candidate) -> None:
        self.problem, self.candidate = problem, candidate
        config = dict(candidate.config)
        reason = self.refuses(problem, config)
        if reason:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason}")
        self.fused = self.fuses(problem)
        rest, reason = rest_after(problem, self.natural(problem), self.fused)
        if rest is None:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason}")
        self.rest: Epilogue = rest
        self.out_dtype = dtype_of(problem.out_dtype)
        self._reduced = _REDUCED.get(problem.a.dtype)
        self.packing = self.layout(problem, config)
        self.workspace_bytes = self.scratch(problem)
        self.prepare(config)

    @classmethod
    def configs(cls, problem: Problem) -> list[dict[str, Scalar]]:
        """The configs this template offers."""
        return [{}]

    @classmethod
    def refuses(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        """Why the op cannot compute this problem's product; empty when it can."""
        return ""

    @classmethod
    def refuses_cpu(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        """Why this version of torch cannot compute it on a CPU beyond what ``refuses`` says; empty when it can."""
        return ""

    @classmethod
    def refuses_cuda(cls, problem: Problem, config: Mapping[str, Scalar], target: Target) -> str:
        """Why the op is not for this GPU beyond what ``refuses`` says; empty when it is."""
        return ""

    @classmethod
    def illegal(cls, problem: Problem, config: Mapping[str, Scalar]) -> str:
        """Why the whole candidate is illegal (the product, or rounding before the epilogue); empty when legal."""
        for name in cls.operators:
            if getattr(torch_compat, name) is None:
                return f"torch {torch.__version__} has no operator _{name}"
        reason = cls.refuses(problem, config)
        return reason or rest_after(problem, cls.natural(problem), cls.fuses(problem))[1]

    @classmethod
    def natural(cls, problem: Problem) -> str:
        """The dtype the op leaves its product in."""
        return problem.a.dtype

    @classmethod
    def fuses(cls, problem: Problem) -> Fused:
        """The part of the epilogue the op computes itself."""
        return Fused()

    @classmethod
    def layout(cls, problem: Problem, config: Mapping[str, Scalar]) -> str | None:
        """The packing wanted for B, or None."""
        return None

    @classmethod
    def scratch(cls, problem: Problem) -> int:
        """Bytes allocated besides the output: a wide accumulator when the epilogue is not all fused."""
        direct = not problem.epilogue and problem.out_dtype == cls.natural(problem)
        return 0 if direct else 4 * problem.batch * problem.m * problem.n

    def prepare(self, config: Mapping[str, Scalar]) -> None:
        """Set up what ``product`` needs, once."""

    @abstractmethod
    def product(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        """The fused part of the work, in a new tensor [.., M, N] of the natural dtype."""

    def _precisely(self, a: Tensor, compute: Callable[..., Any], *operands: Any) -> Any:
        """``compute(*operands)``, on a GPU with sums kept in float32: PyTorch lets cuBLAS add the parts of a split K in
        bfloat16 or float16 unless told otherwise, which is far outside the bound (tests/gpu/test_serving.py)."""
        if not a.is_cuda or self._reduced is None:
            return compute(*operands)
        held = getattr(_CUBLAS, self._reduced)
        if not held:
            return compute(*operands)
        setattr(_CUBLAS, self._reduced, False)
        try:
            return compute(*operands)
        finally:
            setattr(_CUBLAS, self._reduced, held)

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        """Compute into a new tensor."""
        return finish(self._unrounded(a, b, aux), self.out_dtype)

    def _unrounded(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        acc: Tensor = self._precisely(a, self.product, a, b, aux)
        if not self.rest and acc.dtype == self.out_dtype:
            return acc
        wide = acc if self.natural(self.problem) in ("float64", "int32") else acc.float()
        return apply(wide, self.rest, aux[self.fused.tensors :])

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        # Rounding on the way into ``out`` is what ``functional`` does on its way into a new tensor: a race must not
        # charge for one more pass over it.
        result = self._unrounded(a, b, aux)
        out.copy_(result if self.out_dtype in _ROUNDED_BY_COPYING else finish(result, self.out_dtype))


class WritesOut(AtenKernel):
    """A kernel whose op can write into ``out`` itself when nothing is left of the epilogue."""

    @abstractmethod
    def write(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        """``product`` into ``out``, which has the natural dtype."""

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        if self.rest or dtype_of(self.natural(self.problem)) != self.out_dtype:
            out.copy_(self.functional(a, b, aux))
        else:
            self._precisely(a, self.write, a, b, aux, out)


class Sliced(AtenKernel):
    """A kernel whose product may be a view of something larger: a new tensor is made dense."""

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        return super().functional(a, b, aux).contiguous()

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        out.copy_(super().functional(a, b, aux))


def packed_as(b: Any, layout: str) -> PackedWeight:
    """``b``, which must be a PackedWeight in ``layout``. Raises PackedWeightError."""
    if not isinstance(b, PackedWeight) or b.layout != layout:
        given = f"layout {b.layout!r}" if isinstance(b, PackedWeight) else type(b).__name__
        raise PackedWeightError(f"expected a weight packed as {layout!r}; got {given}. Pack it again")
    return b


def constant_b(problem: Problem) -> str:
    """Why B cannot be packed, or empty."""
    return "" if problem.b.constant else "packs its weight, and this operand is not constant"


def dense_weight_bytes(problem: Problem, dtype: str) -> int:
    """Bytes of B as a dense matrix of ``dtype``."""
    return problem.batch * problem.k * problem.n * bits(dtype) // 8


def empty_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product over K = 0: zeros [.., M, N]."""
    return torch.zeros(*a.shape[:-1], b.shape[-1], dtype=dtype, device=a.device)


def copied(b: Tensor, layout: str, problem: Problem) -> PackedWeight:
    """A contiguous copy of B [K, N] in the order ``layout`` ends with."""
    data = b.contiguous() if layout.endswith("row") else b.t().contiguous().t()
    if data.data_ptr() == b.data_ptr():
        data = b.clone()
    return dense_pack(layout, data, problem)


def dense_pack(layout: str, data: Tensor, problem: Problem) -> PackedWeight:
    """The PackedWeight of a plain floating or integer weight."""
    b = problem.b
    return PackedWeight(layout, (data,), problem.n, problem.k, b.dtype, None, "", b.layout.order)
