"""Recognising weight-only quantised linears, whatever library made them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..core.memory import is_subclass

_SCALES = ("scales", "scale", "weight_scale")
_ZEROS = ("zeros", "zero_points", "zero_point", "weight_zero_point")


@dataclass(frozen=True, slots=True)
class WeightOnly:
    """A weight-only linear as ``gemmtune.pack`` wants it.

    weight: int8 [N, K], or uint8 [N, ceil(K / 2)] with bits = 4. scale, zero_point: [N] or [groups, N]. names: what the
    module calls these tensors (keys ``weight``, ``scale``, ``zero_point``). transposed_scale: it holds [N, groups].
    """

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    bits: int = 8
    group_size: int | None = None
    bias: Tensor | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    transposed_scale: bool = False


Adapter = Callable[[nn.Module], WeightOnly | None]

_ADAPTERS: dict[type[nn.Module], Adapter] = {}


def register_weight_only(cls: type[nn.Module], adapter: Adapter) -> None:
    """Teach gemmtune another weight-only module: ``adapter(module)`` returns its WeightOnly, or None to leave it alone.

    Subclasses of ``cls`` are recognised too. Raises TypeError when ``cls`` is no Module class.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_weight_only(): expected a subclass of torch.nn.Module; got {cls!r}")
    _ADAPTERS[cls] = adapter


def recognise(module: nn.Module) -> WeightOnly | None:
    """The module as a weight-only linear, by a registered adapter or by its attributes; None when it is none."""
    for cls in type(module).__mro__:
        if cls in _ADAPTERS:
            return _ADAPTERS[cls](module)
    return None if type(module).__module__.startswith("gemmtune.") else _by_attributes(module)


def _by_attributes(module: nn.Module) -> WeightOnly | None:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or is_subclass(weight):
        return None
    if weight.dim() != 2 or weight.dtype not in (torch.int8, torch.uint8):
        return None
    bits = 8 if weight.dtype == torch.int8 else 4
    scale_name, scale = _first(module, _SCALES)
    group = getattr(module, "group_size", getattr(module, "groupsize", None))
    if scale is None or not scale.is_floating_point() or (bits == 4 and not isinstance(group, int)):
        return None
    n, k = weight.shape[0], weight.shape[1] * (2 if bits == 4 else 1)
    turned = _orientation(scale, n, k, group if isinstance(group, int) else None)
    if turned is None:
        return None
    transposed, group = turned
    zero_name, zero = _first(module, _ZEROS)
    bias = getattr(module, "bias", None)
    names = {"weight": "weight", "scale": scale_name, **({} if zero is None else {"zero_point": zero_name})}
    if zero is not None and zero.shape != scale.shape:
        return None
    return WeightOnly(
        weight, _turned(scale, transposed), None if zero is None else _turned(zero, transposed), bits, group,
        bias if isinstance(bias, Tensor) else None, names, transposed,
    )  # fmt: skip


def _turned(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.t().contiguous() if transposed else tensor


def _first(module: nn.Module, names: tuple[str, ...]) -> tuple[str, Tensor | None]:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, Tensor) and not is_subclass(value):
            return name, value
    return "", None


def _orientation(scale: Tensor, n: int, k: int, group: int | None) -> tuple[bool, int | None] | None:
    """Whether the scales are [N, groups], and the group size (None: per output channel); None if they fit nothing."""
    if tuple(scale.shape) == (n,):
        return False, None
    if scale.dim() != 2:
        return None
    for transposed, (rows, cols) in ((True, scale.shape), (False, reversed(scale.shape))):
        size = group if group is not None else (-(-k // cols) if cols else 0)
        if rows == n and size > 0 and -(-k // size) == cols:
            return transposed, size
    return None
