"""``gemmtune.scaled_mm``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import fuse
from ..core import checks
from ..core.call import Call
from ..core.torch_compat import scaled_mm as torch_scaled_mm
from ..dispatch.specialize import TorchFunction
from .operands import matrix_call
from .spec import OpSpec


def describe(
    mat1: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    scale_result: Tensor | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Call:  # fmt: skip
    """Return the Call of fp8 operands with float32 scales per tensor, or per row of mat1 and column of mat2.

    use_fast_accum changes nothing here: no accumulator is less exact than float32. Raises as ``scaled_mm``.
    """
    op = "scaled_mm"
    for name, value in (("mat1", mat1), ("mat2", mat2)):
        checks.require_matrix(op, name, value)
        checks.require_dtype(op, f"{name}'s dtype", value.dtype, checks.FLOAT8)
    checks.require_equal_inner_size(tuple(mat1.shape), tuple(mat2.shape))
    allowed = (*checks.FLOAT8, torch.float32, torch.bfloat16, torch.float16)
    out = checks.require_out_dtype(op, mat1.dtype if out_dtype is None else out_dtype, allowed)
    checks.require_tensor(op, "scale_a", 3, scale_a)
    checks.require_tensor(op, "scale_b", 4, scale_b)
    per_column = scale_b.numel() != 1
    arguments = {
        "scale_a": _scale_step("scale_a", scale_a, mat1.shape[0], "row", per_column),
        "scale_b": _scale_step("scale_b", scale_b, mat2.shape[1], "col", per_column),
    }
    if bias is not None:
        checks.require_tensor(op, "bias", 5, bias)
        arguments["bias"] = fuse.bias(bias)
    if scale_result is not None:
        checks.require_tensor(op, "scale_result", 6, scale_result)
    if scale_result is not None and out_dtype in checks.FLOAT8:
        # As torch._scaled_mm on CPU (2.13): it divides, and only when an fp8 out_dtype was asked for by name.
        arguments["scale_result"] = fuse.scale(scale_result.float().reciprocal(), axis="tensor")
    return matrix_call(op, mat1, mat2, out, arguments=arguments, names=("mat1", "mat2"), prefer="col")


def _scale_step(name: str, value: Tensor, size: int, axis: Any, together: bool) -> fuse.BoundStep:
    checks.require_dtype("scaled_mm", f"{name}'s dtype", value.dtype, (torch.float32,))
    if value.numel() == 1 and not (together and size == 1):
        return fuse.scale(value, axis="tensor")
    if value.numel() != size:
        raise checks.ShapeError(f"scaled_mm(): expected {name} with 1 or {size} elements; got {list(value.shape)}")
    return fuse.scale(value.reshape(-1), axis=axis)


def _needs_torch(
    mat1: Tensor, mat2: Tensor, scale_a: Any, scale_b: Any, scale_result: Any, use_fast_accum: bool
) -> bool:
    """Whether a call is for ``torch._scaled_mm`` alone: other devices than CPUs and GPUs, and what only GPUs know."""
    if mat1.is_cpu or mat1.is_meta:
        return False
    if not mat1.is_cuda or use_fast_accum or scale_result is not None:
        return True
    if not (mat1.dim() and mat2.dim() and isinstance(scale_a, Tensor) and isinstance(scale_b, Tensor)):
        return False  # describe raises the error
    per_row = scale_a.numel() in (1, mat1.shape[0]) and scale_b.numel() in (1, mat2.shape[-1])
    return not (per_row and scale_a.dtype == scale_b.dtype == torch.float32)


def _torch_function(
    mat1: Any, mat2: Any, scale_a: Any, scale_b: Any, bias: Any = None, scale_result: Any = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> TorchFunction | None:  # fmt: skip
    checks.require_tensor("scaled_mm", "mat1", 1, mat1)
    checks.require_tensor("scaled_mm", "mat2", 2, mat2)
    if not _needs_torch(mat1, mat2, scale_a, scale_b, scale_result, use_fast_accum):
        return None

    def functional(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch_scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)

    return TorchFunction(functional, required=True)


def _trace(**arguments: Any) -> Tensor:
    return torch_scaled_mm(*arguments.values())


SPEC = OpSpec(
    name="scaled_mm",
    operands=("mat1", "mat2", "scale_a", "scale_b", "bias"),
    describe=describe,
    trace=_trace,
    torch_function=_torch_function,
    settings=("out_dtype",),
    sizes=("scale_a",),
    differentiable=False,
    torch_in_special_states=False,
    packable=False,
    bypass="use_fast_accum or scale_result is not None",
)


@SPEC.public
def scaled_mm(  # type: ignore[empty-body]
    mat1: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """``torch._scaled_mm``: fp8 [M, K] @ fp8 [K, N], times scale_a and scale_b, plus bias [N].

    scales: float32, one element each, or [M, 1] and [1, N]. out_dtype: default mat1's. scale_result divides the output
    when an fp8 out_dtype is given (as ATen's CPU op does). On GPUs any K and N will do; what only GPUs know goes to
    ``torch._scaled_mm`` as it is: scale_result there, scales by blocks, and use_fast_accum=True, for whose accumulator
    no error bound is known, so that nothing else could be proven to be as good. Raises TypeError, ShapeError,
    DtypeError or GradError before anything runs.
    """
