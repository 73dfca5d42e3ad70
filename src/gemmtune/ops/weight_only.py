"""Recognition of weight-only quantised linears, from any library, by their attributes or by registered adapters."""

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
    """The tensors and format of a weight-only linear, as ``gemmtune.pack`` takes them.

    weight: int8 [N, K], or uint8 [N, ceil(K / 2)] with bits = 4. scale, zero_point: [N] or [groups, N]. bits: 8 or 4.
    group_size: the elements of K that share a scale; None for one scale per output channel. names: the module's
    attribute names of these tensors (keys ``weight``, ``scale``, ``zero_point``). transposed_scale: whether the
    module's own scales and zero points are [N, groups].
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
    """Register an adapter for weight-only modules of class ``cls`` and its subclasses.

    ``adapter(module)`` returns the module's WeightOnly, or None for a module that gemmtune must not change. Raises
    TypeError if ``cls`` is no subclass of torch.nn.Module.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"register_weight_only(): expected a subclass of torch.nn.Module; got {cls!r}")
    _ADAPTERS[cls] = adapter


def recognise(module: nn.Module) -> WeightOnly | None:
    """Return the WeightOnly of a module, from a registered adapter or from the module's attributes; None if the module
    is no weight-only linear."""
    for cls in type(module).__mro__:
        if cls in _ADAPTERS:
            return _ADAPTERS[cls](module)
    return None if type(module).__module__.startswith("gemmtune.") else _by_attributes(module)


def _by_attributes(module: nn.Module) -> WeightOnly | None:
    """Return the WeightOnly of a module that has ``weight``, scales, and perhaps zero points, a group size and a bias
    under usual names; None if it has not, or if their dtypes or shapes do not fit each other."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or is_subclass(weight):
        return None
    if weight.dim() != 2 or weight.dtype not in (torch.int8, torch.uint8):
        return None
    bits = 8 if weight.dtype == torch.int8 else 4
    scale_name, scale = _first_tensor(module, _SCALES)
    group = getattr(module, "group_size", getattr(module, "groupsize", None))
    if scale is None or not scale.is_floating_point() or (bits == 4 and not isinstance(group, int)):
        return None
    n, k = weight.shape[0], weight.shape[1] * (2 if bits == 4 else 1)
    orientation = _orientation(scale, n, k, group if isinstance(group, int) else None)
    if orientation is None:
        return None
    transposed, group = orientation
    zero_name, zero = _first_tensor(module, _ZEROS)
    bias = getattr(module, "bias", None)
    names = {"weight": "weight", "scale": scale_name, **({} if zero is None else {"zero_point": zero_name})}
    if zero is not None and zero.shape != scale.shape:
        return None
    return WeightOnly(
        weight, _transposed_if(scale, transposed), None if zero is None else _transposed_if(zero, transposed), bits,
        group, bias if isinstance(bias, Tensor) else None, names, transposed,
    )  # fmt: skip


def _transposed_if(tensor: Tensor, transposed: bool) -> Tensor:
    return tensor.t().contiguous() if transposed else tensor


def _first_tensor(module: nn.Module, names: tuple[str, ...]) -> tuple[str, Tensor | None]:
    """Return the first of ``names`` that is a tensor of the module, and that tensor; without any, ("", None)."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, Tensor) and not is_subclass(value):
            return name, value
    return "", None


def _orientation(scale: Tensor, n: int, k: int, group: int | None) -> tuple[bool, int | None] | None:
    """Return whether the scales are [N, groups], and the group size (None for one scale per output channel). Return
    None if their shape fits no weight [n, k].

    group: the module's group size, or None if it has none.
    """
    if tuple(scale.shape) == (n,):
        return False, None
    if scale.dim() != 2:
        return None
    for transposed, (rows, cols) in ((True, scale.shape), (False, reversed(scale.shape))):
        size = group if group is not None else (-(-k // cols) if cols else 0)
        if rows == n and size > 0 and -(-k // size) == cols:
            return transposed, size
    return None
