"""Functions that construct the steps of an op's ``epilogue`` argument.

``gemmtune.linear(x, w, epilogue=[fuse.bias(b), fuse.gelu(approximate="tanh"), fuse.add(residual)])`` applies the steps
in order to the accumulator, which is then rounded once to the output's dtype. A tensor may have one element, or a shape
that broadcasts to the output [M, N]: [N], [1, N], [M, 1] or [M, N].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from .core.checks import DtypeError, ShapeError
from .core.epilogue import Axis, Kind, Step

_CASTS = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True, eq=False)
class BoundStep:
    """One epilogue step and its tensor.

    axis: of the tensor, when the constructor determines it; None: ``resolve`` derives it from the tensor's shape. tag:
    the text of step and axis that is part of dispatch's cache key.
    """

    step: Step
    tensor: Tensor | None = None
    axis: Axis | None = None
    tag: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", f"{self.step.key}/{self.axis}")


@dataclass(frozen=True, slots=True, eq=False)
class ArgumentStep(BoundStep):
    """The step of a tensor that is an argument of an op. name: its name in error messages, like ``linear(): bias``."""

    name: str = ""


def _make_bound(kind: Kind, tensor: Tensor, value: float = 1.0, axis: Axis | None = None) -> BoundStep:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"fuse.{kind}(): expected a Tensor; got {type(tensor).__name__}")
    if tensor.is_complex() or tensor.layout != torch.strided or tensor.is_nested:
        raise DtypeError(
            f"fuse.{kind}(): complex and sparse (and nested) tensors cannot be fused; got {tensor.dtype}, "
            f"{tensor.layout}"
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return BoundStep(Step(kind, axis or "full", dtype, float(value)), tensor, axis)


def bias(tensor: Tensor) -> BoundStep:
    """Return the step ``acc += tensor`` with a tensor of shape [N]."""
    return _make_bound("bias", tensor, axis="col")


def add(tensor: Tensor, value: float = 1.0) -> BoundStep:
    """Return the step ``acc += value * tensor`` with a residual [M, N], or a tensor that broadcasts to [M, N]."""
    return _make_bound("add", tensor, value)


def mul(tensor: Tensor) -> BoundStep:
    """Return the step ``acc *= tensor`` with a tensor that broadcasts to [M, N]."""
    return _make_bound("mul", tensor)


def scale(tensor: Tensor | float, axis: Axis | None = None) -> BoundStep:
    """Return the step ``acc *= tensor`` with a tensor per row (axis="row", [M]) or column ("col", [N]), or one number.

    axis: None: derived from the tensor's shape.
    """
    if isinstance(tensor, Tensor):
        return _make_bound("scale", tensor, axis=axis)
    if isinstance(tensor, bool) or not isinstance(tensor, int | float):
        raise TypeError(f"fuse.scale(): expected a Tensor or a number; got {type(tensor).__name__}")
    return BoundStep(Step("scale", "tensor", None, float(tensor)), None, "tensor")


def relu() -> BoundStep:
    """Return the step ``acc = max(acc, 0)``."""
    return BoundStep(Step("relu"))


def gelu(approximate: Literal["none", "tanh"] = "none") -> BoundStep:
    """Return the step GELU, as ``torch.nn.functional.gelu``: with the error function ("none") or "tanh"."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"fuse.gelu(): approximate must be 'none' or 'tanh'; got {approximate!r}")
    return BoundStep(Step("gelu" if approximate == "none" else "gelu_tanh"))


def silu() -> BoundStep:
    """Return the step ``acc = acc * sigmoid(acc)``."""
    return BoundStep(Step("silu"))


def clamp(lo: float = float("-inf"), hi: float = float("inf")) -> BoundStep:
    """Return the step ``acc = min(max(acc, lo), hi)``. Raises ValueError unless lo <= hi."""
    if not lo <= hi:
        raise ValueError(f"fuse.clamp(): expected lo <= hi; got lo = {lo}, hi = {hi}")
    return BoundStep(Step("clamp", lo=float(lo), hi=float(hi)))


def cast(dtype: torch.dtype) -> BoundStep:
    """Return the step that rounds ``acc`` to ``dtype``, as if an unfused op had stored it. Integers saturate."""
    if dtype not in _CASTS:
        raise TypeError(f"fuse.cast(): expected one of {', '.join(map(str, _CASTS))}; got {dtype}")
    return BoundStep(Step("cast", dtype=str(dtype).removeprefix("torch.")))


def resolve(
    bounds: Sequence[BoundStep], m: int, n: int, batch: int | None = None
) -> tuple[tuple[Step, ...], tuple[Tensor, ...]]:
    """Return the Steps with their axes, and their tensors in the shapes of these axes, for an output [M, N] or
    [batch, M, N]. Raises ShapeError when a tensor does not broadcast to the output."""
    pairs = [_resolve(bound, m, n, batch) for bound in bounds]
    return tuple(step for step, _ in pairs), tuple(tensor for _, tensor in pairs if tensor is not None)


def _resolve(bound: BoundStep, m: int, n: int, batch: int | None) -> tuple[Step, Tensor | None]:
    tensor = bound.tensor
    if tensor is None:
        return bound.step, None
    axis = bound.axis or _axis_of(tensor, m, n, batch)
    full = (m, n) if batch is None else (batch, m, n)
    shape = {"tensor": (), "row": (m,), "col": (n,), "full": full}[axis]
    count = 1
    for size in shape:
        count *= size
    if axis == "full":
        return replace(bound.step, axis=axis), _expand(tensor, full, _tensor_name(bound))
    if tensor.numel() != count:
        raise ShapeError(
            f"{_tensor_name(bound)} for axis {axis!r} of a {m}x{n} output has {count} element(s); got shape "
            f"{list(tensor.shape)}"
        )
    return replace(bound.step, axis=axis), tensor.reshape(shape).contiguous()


def _axis_of(tensor: Tensor, m: int, n: int, batch: int | None) -> Axis:
    if tensor.numel() == 1:
        return "tensor"
    shape = tuple(tensor.shape)
    if shape in ((n,), (1, n)):
        return "col"
    return "row" if shape == (m, 1) and batch is None else "full"


def _tensor_name(bound: BoundStep) -> str:
    """Return the name of a step's tensor for error messages."""
    return bound.name if isinstance(bound, ArgumentStep) else f"fuse.{bound.step.kind}(): a tensor"


def _expand(tensor: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    flat = tensor
    if tensor.dim() > len(shape) and tensor.shape[-1] == shape[-1] and len(shape) == 2:
        flat = tensor.reshape(-1, tensor.shape[-1])
    try:
        return flat.expand(shape).contiguous()
    except NotImplementedError:  # a tensor subclass that does not implement expand
        raise
    except RuntimeError as error:
        raise ShapeError(
            f"{name} of shape {list(tensor.shape)} does not broadcast to the output {list(shape)}"
        ) from error
