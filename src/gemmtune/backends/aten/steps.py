"""The Epilogue in ATen elementwise ops. Pure and differentiable, so that PyTorch fallbacks can share it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...core.epilogue import GATES, Epilogue, Step

_INTEGER_NAMES = ("int8", "uint8", "int32", "int64")
_WHOLE_LIMIT = 1 << 61  # largest integer between steps: far beyond any output, and the sum of two stays within int64
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype for the name that Problems use. Raises ValueError for a name that is not a torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that Problems use for a torch dtype (``torch.bfloat16`` -> ``bfloat16``)."""
    return str(dtype).removeprefix("torch.")


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which an accumulator of ``dtype`` is processed: float64, int32 and int64 unchanged, float32
    for all others."""
    return dtype if dtype in (torch.float64, torch.int32, torch.int64) else torch.float32


def normalize_rows(a: Tensor, norm: Epilogue, tensors: Sequence[Tensor]) -> Tensor:
    """Return the rows of ``a`` [M, K] normalised as ``norm`` says (``Problem.norm_steps``), in a's dtype. tensors: one
    [K] for each of the steps."""
    size, eps = (a.shape[-1],), norm[0].value
    if any(t.dtype != a.dtype for t in tensors):
        return normalize_rows(a.float(), norm, [t.float() for t in tensors]).to(a.dtype)
    if norm[0].kind == "layer_norm":
        return functional.layer_norm(a, size, tensors[0], tensors[1] if len(tensors) > 1 else None, eps)
    return functional.rms_norm(a, size, tensors[0], eps)


def apply_steps(acc: Tensor, steps: Sequence[Step], aux: Sequence[Tensor]) -> Tensor:
    """Run the steps on ``acc`` [.., M, N] (float32, float64 or int32) and return the result, still in the wide dtype.
    A norm, which is in front of the product, is not among them.

    Integers stay exact up to the first step that needs a float (``keeps_integer``).
    """
    tensors = iter(aux)
    for step in steps:
        acc = _apply_step(acc, step, tensors)
    return acc


def round_to_dtype(acc: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the output's dtype; to an integer dtype: to nearest even, saturating, with NaN as 0."""
    if acc.dtype == dtype:
        return acc
    if dtype not in _INTEGERS:
        return acc.to(dtype)
    info = torch.iinfo(dtype)
    if not acc.is_floating_point():
        return acc.clamp(max(info.min, torch.iinfo(acc.dtype).min), min(info.max, torch.iinfo(acc.dtype).max)).to(dtype)
    # float32 cannot hold the largest int32, so the clamp happens in float64. The integer that a NaN is converted to
    # depends on the processor: on x86 it is the lowest integer, whose low byte is 0.
    rounded = acc.double().round()
    if info.bits > 8:
        rounded = rounded.nan_to_num(0.0, torch.inf, -torch.inf)
    return rounded.clamp(info.min, info.max).to(dtype)


def _apply_step(acc: Tensor, step: Step, tensors: Iterator[Tensor]) -> Tensor:
    kind = step.kind
    if kind == "relu":
        return acc.relu()
    if not acc.is_floating_point() and keeps_integer(step):
        return _integer_step(acc, step, _broadcastable(next(tensors), step) if step.takes_tensor else None)
    acc = _as_float(acc)
    if kind in GATES:
        gate, value = acc.chunk(2, -1)
        return _apply_step(gate, Step(GATES[kind]), tensors) * value
    if step.takes_tensor:
        return _with_tensor(acc, step, _broadcastable(next(tensors), step).to(acc.dtype))
    if kind == "gelu":
        return functional.gelu(acc)
    if kind == "gelu_tanh":
        return functional.gelu(acc, approximate="tanh")
    if kind == "silu":
        return functional.silu(acc)
    if kind == "clamp":
        return acc.clamp(step.lo, step.hi)
    if kind == "cast":
        return round_to_dtype(acc, dtype_of(step.dtype or "float32")).to(acc.dtype)
    if kind == "scale":
        return acc * step.value
    raise ValueError(f"epilogue step {step.key!r} needs a tensor: give its dtype")


def keeps_integer(step: Step) -> bool:
    """Whether an integer accumulator stays exact in a step, as in the oracle (``reference._needs_float``).

    These steps are relu, clamp to whole bounds, bias, add and mul of integers (times a whole value), and cast to an
    integer dtype.
    """
    if step.kind == "relu":
        return True
    if step.kind == "clamp":
        return all(math.isinf(x) or x == math.trunc(x) for x in (step.lo, step.hi) if not math.isnan(x))
    if step.dtype not in _INTEGER_NAMES:
        return False
    return step.kind == "cast" or (
        step.kind in ("bias", "add", "mul") and math.isfinite(step.value) and step.value == math.trunc(step.value)
    )


def _integer_step(acc: Tensor, step: Step, tensor: Tensor | None) -> Tensor:
    """Return the result of a step that keeps integers, computed in int64 where int32 could overflow; beyond
    ``_WHOLE_LIMIT`` it saturates. The caller handles relu, for integers and floats alike."""
    if step.kind == "cast":
        return round_to_dtype(acc, dtype_of(str(step.dtype))).to(acc.dtype)
    if tensor is None:
        info = torch.iinfo(acc.dtype)
        return acc.clamp(
            max(_saturating_int(step.lo), info.min), min(max(_saturating_int(step.hi), info.min), info.max)
        )
    wide = acc.long()
    if step.kind == "mul":
        return _saturating_mul(wide, tensor, fits=acc.dtype == torch.int32)
    addend = (
        tensor.long() if step.value == 1.0 else _saturating_mul(tensor.long(), _saturating_int(step.value), fits=False)
    )
    if tensor.dtype == torch.int64:
        addend = addend.clamp(-_WHOLE_LIMIT, _WHOLE_LIMIT)
    return (wide + addend).clamp(-_WHOLE_LIMIT, _WHOLE_LIMIT)


def _saturating_mul(x: Tensor, y: Tensor | int, *, fits: bool) -> Tensor:
    """Return int64 ``x * y``, saturating at ``_WHOLE_LIMIT``. fits: x was int32, so that a product with an int32 cannot
    overflow."""
    product: Tensor = x * y
    if fits and isinstance(y, Tensor) and y.dtype != torch.int64:
        return product.clamp(-_WHOLE_LIMIT, _WHOLE_LIMIT)
    estimate = x.double() * (y.double() if isinstance(y, Tensor) else float(y))
    limit = torch.where(estimate < 0, -_WHOLE_LIMIT, _WHOLE_LIMIT)
    return torch.where(estimate.abs() < _WHOLE_LIMIT, product, limit)


def _saturating_int(value: float) -> int:
    return int(max(-_WHOLE_LIMIT, min(_WHOLE_LIMIT, value)))


def _with_tensor(acc: Tensor, step: Step, tensor: Tensor) -> Tensor:
    if step.kind == "mul":
        return acc * tensor
    if step.kind == "scale":
        return acc * tensor if step.value == 1.0 else acc * (tensor * step.value)
    return acc + tensor if step.value == 1.0 else acc + tensor * step.value


def _as_float(acc: Tensor) -> Tensor:
    return acc if acc.is_floating_point() else acc.float()


def _broadcastable(tensor: Tensor, step: Step) -> Tensor:
    if step.axis == "row":
        return tensor.unsqueeze(-1)
    return tensor.reshape(()) if step.axis == "tensor" else tensor
