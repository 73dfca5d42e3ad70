"""Argument checks of the ops, with error messages like PyTorch's.

Each error class is a RuntimeError, like PyTorch's errors, and also a TypeError or ValueError where that applies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .errors import GemmtuneError, PackedWeightError
from .weights import PackedWeight

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALAR_TYPE_NAMES = {
    torch.float32: "float", torch.float64: "double", torch.bfloat16: "c10::BFloat16", torch.float16: "c10::Half",
}  # fmt: skip
# The PyTorch function that supports tensors which the op does not: complex, sparse and, for some, nested tensors.
_TORCH_FUNCTIONS = {
    "linear": "torch.nn.functional.linear",
    "mm": "torch.mm",
    "addmm": "torch.addmm",
    "bmm": "torch.bmm",
}


class ShapeError(GemmtuneError, ValueError):
    """Operands with incompatible shapes."""


class DtypeError(GemmtuneError, TypeError):
    """An operand with a dtype, layout or device that the op does not support."""


class GradError(GemmtuneError):
    """A request for a gradient of an op or operand that has none."""


def require_tensor(op: str, name: str, position: int, value: Any, *, packed: bool = False) -> None:
    """Raise TypeError or DtypeError unless ``value`` is a dense real Tensor.

    position: of the argument, counted from 1, for the message. packed: whether a PackedWeight is accepted, too.
    """
    if packed and isinstance(value, PackedWeight):
        return
    if not isinstance(value, Tensor):
        expected = "Tensor or PackedWeight" if packed else "Tensor"
        raise TypeError(
            f"{op}(): argument '{name}' (position {position}) must be {expected}, not {type(value).__name__}"
        )
    use = f"Use {_TORCH_FUNCTIONS[op]}" if op in _TORCH_FUNCTIONS else "Pass a dense tensor of real numbers"
    if value.is_complex():
        raise DtypeError(f"{op}(): complex tensors are not supported; {name} is {value.dtype}. {use}")
    if value.is_nested:
        raise DtypeError(f"{op}(): nested tensors are not supported; {name} is one. {use}, or pad it")
    if value.layout != torch.strided:
        raise DtypeError(f"{op}(): sparse tensors are not supported; {name} has layout {value.layout}. {use}")


def require_matrix(op: str, name: str, value: Tensor) -> None:
    """Raise ShapeError unless ``value`` has two dimensions."""
    if value.dim() != 2:
        raise ShapeError(f"{op}(): {name} must be a matrix, got {value.dim()}-D tensor")


def require_equal_inner_size(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Raise ShapeError, with torch's message, unless the inner dimensions of shapes [M, K] and [K, N] are equal."""
    if a[-1] != b[-2]:
        raise ShapeError(f"mat1 and mat2 shapes cannot be multiplied ({a[-2]}x{a[-1]} and {b[-2]}x{b[-1]})")


def require_same_dtype(a: torch.dtype, b: torch.dtype) -> None:
    """Raise DtypeError, with torch's message, unless the dtypes of two floating-point operands are equal."""
    if a != b:
        raise DtypeError(
            f"expected m1 and m2 to have the same dtype, but got: {_scalar_type_name(a)} != {_scalar_type_name(b)}"
        )


def require_dtype(op: str, name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    """Raise DtypeError, naming the allowed dtypes, unless ``dtype`` is one of them."""
    if dtype not in allowed:
        names = ", ".join(str(option).removeprefix("torch.") for option in allowed)
        raise DtypeError(f"{op}(): expected {name} to be one of {names}; got {str(dtype).removeprefix('torch.')}")


def require_same_device(op: str, *named: tuple[str, Any]) -> None:
    """Raise DtypeError unless all tensors are on one device. named: (name, value); other values are skipped."""
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor)]
    first_name, first = tensors[0]
    for name, value in tensors[1:]:
        if value.device != first.device:
            raise DtypeError(
                f"{op}(): expected all tensors to be on the same device, but {first_name} is on {first.device} and "
                f"{name} is on {value.device}"
            )


def require_matching_packed_weight(
    op: str, weight: PackedWeight, k: int, dtypes: tuple[str, ...], *, quantized: bool
) -> None:
    """Raise PackedWeightError unless the packed weight has this K, one of ``dtypes``, and is quantized or not as asked.

    quantized: whether the op takes a weight-only (quantized) weight.
    """
    if (weight.quant is not None) != quantized:
        kind, other = ("weight-only", "mixed_mm") if weight.quant is not None else ("plain", "linear, mm or int_mm")
        raise PackedWeightError(f"{op}(): got a packed {kind} weight ({weight.dtype}); pass it to {other}")
    if weight.k != k:
        raise PackedWeightError(f"{op}(): the packed weight has K = {weight.k}, and the input has K = {k}")
    if weight.dtype not in dtypes:
        raise PackedWeightError(
            f"{op}(): the packed weight holds {weight.dtype}; this call needs {' or '.join(dtypes)}. Pack it again"
        )


def require_out_dtype(op: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return ``dtype``. Raises DtypeError unless it is allowed, and TypeError unless it is a torch.dtype."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{op}(): out_dtype must be a torch.dtype, not {type(dtype).__name__}")
    require_dtype(op, "out_dtype", dtype, allowed)
    return dtype


def require_output(out: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Raise TypeError, DtypeError or ShapeError unless ``out`` can hold the result.

    An ``out`` without elements is resized, as PyTorch does.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"argument 'out' must be Tensor, not {type(out).__name__}")
    if out.is_nested or out.layout != torch.strided:
        raise DtypeError("Expected out tensor to be dense, but it is a sparse or nested tensor")
    if out.dtype != dtype:
        raise DtypeError(f"Expected out tensor to have dtype {dtype}, but got {out.dtype} instead")
    if out.device != device:
        raise DtypeError(f"Expected out tensor to be on {device}, but it is on {out.device}")
    if out.numel() == 0 and tuple(out.shape) != shape:
        out.resize_(shape)
    if tuple(out.shape) != shape:
        raise ShapeError(f"Expected out tensor to have shape {list(shape)}, but got {list(out.shape)}")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ShapeError("out has elements that share memory (it was expanded): clone() it first")


def require_no_grad(op: str, what: str, *tensors: Any) -> None:
    """Raise GradError when gradients are enabled and one of the tensors requires one.

    what: the operand or product that has no gradient, for the message.
    """
    if not torch.is_grad_enabled():
        return
    if any(isinstance(value, Tensor) and value.requires_grad for value in tensors):
        raise GradError(
            f"{op}(): {what} has no gradient, and an operand requires one. Wrap the call in torch.no_grad(), detach() "
            "the operand, or use the unpacked floating-point weight"
        )


def require_no_grad_with_out(op: str, *tensors: Any) -> None:
    """Raise GradError when a call with out= would need a gradient, which torch does not support for out variants."""
    if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in tensors):
        raise GradError(
            f"{op}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )


def _scalar_type_name(dtype: torch.dtype) -> str:
    return _SCALAR_TYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
