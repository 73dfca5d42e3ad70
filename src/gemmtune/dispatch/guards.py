"""Guards: whether operands are like those of an earlier call; and whether PyTorch itself must see a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import devices
from ..core.memory import is_addressable, is_subclass
from ..core.torch_compat import TensorGuards as _TensorGuards
from ..core.torch_compat import forward_ad, is_fake
from ..core.torch_compat import get_tracing_state as _tracing
from ..core.torch_compat import is_any_autocast_enabled as _autocast
from ..core.torch_compat import len_torch_dispatch_stack as _dispatch_modes
from ..core.torch_compat import peek_interpreter_stack as _interpreters

Guard = Callable[..., bool]


def make_guard(*tensors: Tensor) -> Guard:
    """Return a guard: a function that says of as many operands whether they are like ``tensors`` in this thread's
    state.

    A guard compares Python type, dtype, device, sizes, strides, requires_grad, and the dispatcher's state: autocast,
    transforms, tracing, inference mode, lazy negation. It does not compare dispatch modes, forward-mode levels and
    whether gradients are on: ``cache.lookup`` and the cache's key do.
    """
    index_of: dict[int, int] = {}
    first = [index_of.setdefault(id(tensor), index) for index, tensor in enumerate(tensors)]
    if len(index_of) == len(tensors):
        return _guard_of_distinct(tensors)
    # torch's guard is false of a tensor that is passed twice.
    distinct = list(index_of.values())
    guard = _guard_of_distinct([tensors[index] for index in distinct])
    repeated = [(index, earlier) for index, earlier in enumerate(first) if index != earlier]

    def guard_repeated(*operands: Any) -> bool:
        for index, earlier in repeated:
            if operands[index] is not operands[earlier]:
                return False
        return guard(*[operands[index] for index in distinct])

    return guard_repeated


def _guard_of_distinct(tensors: Sequence[Tensor]) -> Guard:
    if _TensorGuards is not None:
        try:
            guard: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            if guard(*tensors):
                return guard
        except (RuntimeError, TypeError, ValueError):  # other arguments in this torch, or tensors it does not take
            pass
    return _guard_in_python(tensors)


def _guard_in_python(tensors: Sequence[Tensor]) -> Guard:
    """Return a guard in Python, which takes ten times as long as torch's."""
    expected = _guarded_properties(tensors)  # not the tensors, whose memory the guard must not keep

    def guard(*operands: Any) -> bool:
        return (
            not state_needs_torch()
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


def state_needs_torch() -> bool:
    """Whether PyTorch must see each operation: a transform, mode, trace, forward-mode level or autocast is active."""
    return in_transform() or in_dispatch_mode() or bool(_autocast())


def in_transform() -> bool:
    """Whether a transform (vmap, grad, functionalize), a forward-mode level or jit's tracer is active."""
    return _interpreters() is not None or forward_ad._current_level >= 0 or _tracing() is not None


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode (make_fx, fake tensors) wants to see every operator."""
    return bool(_dispatch_modes() > 0)


def needs_torch(tensor: Any) -> bool:
    """Whether only PyTorch can compute with a tensor: it is unusual, or on a kind of device that gemmtune does not
    know."""
    return is_unusual(tensor) or not devices.is_served(tensor.device)


def is_unusual(tensor: Any) -> bool:
    """Whether a tensor is a subclass, is wrapped by a transform, is lazily negated, or has no memory that gemmtune
    knows."""
    if is_subclass(tensor):
        return True
    if devices.is_served(tensor.device):
        return not is_addressable(tensor)
    return bool(tensor.is_neg())


def is_shape_only(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values (meta, or torch's FakeTensor)."""
    return tensor.is_meta or is_fake(tensor)


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a graph: nothing may be loaded meanwhile."""
    return devices.is_served(device) and devices.get(device.type).is_capturing(device)


def is_autocast_on(device_type: str) -> bool:
    """Whether autocast decides the dtypes of ops on this kind of device."""
    return _autocast() and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
