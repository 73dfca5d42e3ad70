"""Guards: functions that say whether operands are like those of an earlier call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.torch_compat import TensorGuards as _TensorGuards
from .torch_state import is_special

Guard = Callable[..., bool]


def make_guard(*tensors: Tensor) -> Guard:
    """Return a guard: a function that says of as many operands whether they are like ``tensors`` in this thread's
    state.

    A guard compares Python type, dtype, device, sizes, strides, requires_grad, and the dispatcher's state: autocast,
    transforms, tracing, inference mode, lazy negation. It does not compare dispatch modes, forward-mode levels and
    whether gradients are on: ``cache.lookup`` and the cache's key do.
    """
    if len(set(map(id, tensors))) == len(tensors):
        return _guard_of_distinct(tensors)
    # torch's guard is false of a tensor that is passed twice.
    index_of: dict[int, int] = {}
    first = [index_of.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)]
    distinct = list(index_of.values())
    guard = _guard_of_distinct([tensors[index] for index in distinct])
    repeated = [(index, earlier) for index, earlier in enumerate(first) if index != earlier]

    def guard_repeated(*operands: Any) -> bool:
        for index, earlier in repeated:
            if operands[index] is not operands[earlier]:
                return False
        return guard(*[operands[index] for index in distinct])

    return guard_repeated


def make_guard_of_any_size(tensors: Sequence[Tensor], varying: Sequence[int]) -> Guard | None:
    """Return a guard as ``make_guard`` does that takes any sizes of the first dimensions, and any strides of those that
    these determine in a dense tensor; None where this torch has no such guard.

    tensors: no tensor twice. varying: for each, how many of its first dimensions may differ. A tensor of which the
    guard is true need not be dense if they are two or more.
    """
    if _TensorGuards is None:
        return None
    counts = list(zip(tensors, varying, strict=True))
    sizes = [[None] * count + list(tensor.shape[count:]) for tensor, count in counts]
    strides = [[None] * max(count - 1, 0) + list(tensor.stride()[max(count - 1, 0) :]) for tensor, count in counts]
    try:
        guard: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return guard if guard(*tensors) else None
    except (RuntimeError, TypeError, ValueError):  # as below
        return None


def exact_guard(*tensors: Tensor) -> Guard | None:
    """Return torch's guard of the tensors, of which none is passed twice; None where it has none for them. The guard
    may be false of the tensors themselves."""
    if _TensorGuards is None:
        return None
    try:
        guard: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        return guard
    except (RuntimeError, TypeError, ValueError):  # other arguments in this torch, or tensors it does not take
        return None


def _guard_of_distinct(tensors: Sequence[Tensor]) -> Guard:
    guard = exact_guard(*tensors)
    return guard if guard is not None and guard(*tensors) else _guard_in_python(tensors)


def _guard_in_python(tensors: Sequence[Tensor]) -> Guard:
    """Return a guard in Python, which takes ten times as long as torch's."""
    expected = _guarded_properties(tensors)  # not the tensors, whose memory the guard must not keep

    def guard(*operands: Any) -> bool:
        return (
            not is_special()
            and all(isinstance(tensor, Tensor) for tensor in operands)
            and _guarded_properties(operands) == expected
        )

    return guard


def _guarded_properties(tensors: Sequence[Tensor]) -> list[Any]:
    return [
        torch.is_inference_mode_enabled(),
        *(
            (type(t), t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.is_neg(), t.is_inference())
            for t in tensors
        ),
    ]
