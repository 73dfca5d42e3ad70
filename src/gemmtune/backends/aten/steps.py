"""The Epilogue in ATen elementwise ops. Pure and differentiable, so that the plain fallbacks can share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...epilogue import Step

_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype by the name Problems use; ValueError for a name that is none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a torch dtype")
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """The name Problems use for a torch dtype (``torch.bfloat16`` -> ``bfloat16``)."""
    return str(dtype).removeprefix("torch.")


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype an accumulator of this dtype is worked on: float32, or float64 and int32 as they are."""
    return dtype if dtype in (torch.float64, torch.int32, torch.int64) else torch.float32


def apply(acc: Tensor, steps: Sequence[Step], aux: Sequence[Tensor]) -> Tensor:
    """Run the steps on ``acc`` [.., M, N] (float32, float64 or int32) and return the result, still wide."""
    tensors = iter(aux)
    for step in steps:
        acc = _one(acc, step, tensors)
    return acc


def finish(acc: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the output's dtype; integers to nearest even, saturating."""
    if acc.dtype == dtype:
        return acc
    if dtype in _INTEGERS and acc.is_floating_point():
        info = torch.iinfo(dtype)
        # float32 cannot hold the largest int32, so the clamp happens in float64.
        return acc.double().round().clamp(info.min, info.max).to(dtype)
    if dtype in (torch.int8, torch.uint8):
        info = torch.iinfo(dtype)
        return acc.clamp(info.min, info.max).to(dtype)
    return acc.to(dtype)


def _one(acc: Tensor, step: Step, tensors: Iterator[Tensor]) -> Tensor:
    kind = step.kind
    if kind == "relu":
        return acc.relu()
    if step.takes_tensor:
        tensor = _broadcastable(next(tensors), step)
        if _stays_integer(acc, step, tensor):
            return acc + tensor
        acc = _floating(acc)
        return _with_tensor(acc, step, tensor.to(acc.dtype))
    acc = _floating(acc)
    if kind == "gelu":
        return functional.gelu(acc)
    if kind == "gelu_tanh":
        return functional.gelu(acc, approximate="tanh")
    if kind == "silu":
        return functional.silu(acc)
    if kind == "clamp":
        return acc.clamp(step.lo, step.hi)
    if kind == "cast":
        return finish(acc, dtype_of(step.dtype or "float32")).to(acc.dtype)
    if kind == "scale":
        return acc * step.value
    raise ValueError(f"epilogue step {step.key!r} needs a tensor: give its dtype")


def _with_tensor(acc: Tensor, step: Step, tensor: Tensor) -> Tensor:
    if step.kind == "mul":
        return acc * tensor
    if step.kind == "scale":
        return acc * tensor if step.value == 1.0 else acc * (tensor * step.value)
    return acc + tensor if step.value == 1.0 else acc + tensor * step.value


def _stays_integer(acc: Tensor, step: Step, tensor: Tensor) -> bool:
    """An integer bias on an integer accumulator is exact, as long as nothing scales it."""
    plain = step.kind in ("bias", "add") and step.value == 1.0
    return plain and acc.dtype == torch.int32 and tensor.dtype in _INTEGERS


def _floating(acc: Tensor) -> Tensor:
    return acc if acc.is_floating_point() else acc.float()


def _broadcastable(tensor: Tensor, step: Step) -> Tensor:
    if step.axis == "row":
        return tensor.unsqueeze(-1)
    return tensor.reshape(()) if step.axis == "tensor" else tensor
