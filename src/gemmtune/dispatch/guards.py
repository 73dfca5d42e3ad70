"""When a call must not go to a kernel that works on raw memory, and when it is like one that was prepared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.memory import is_known, is_subclass
from ..core.torch_compat import TensorGuards as _TensorGuards
from ..core.torch_compat import forward_ad, is_fake
from ..core.torch_compat import get_tracing_state as _tracing
from ..core.torch_compat import is_any_autocast_enabled as _autocast
from ..core.torch_compat import len_torch_dispatch_stack as _dispatch_modes
from ..core.torch_compat import peek_interpreter_stack as _interpreters

Guard = Callable[..., bool]


def make_guard(*tensors: Tensor) -> Guard:
    """A function that says of as many operands whether they are as these, in the state that this thread is in now.

    It compares Python type, dtype, device, sizes, strides, requires_grad, and what the dispatcher would do with them:
    autocast, transforms, tracing, inference mode, lazy negation. It need not see dispatch modes, forward-mode levels
    or whether gradients are on.
    """
    places: dict[int, int] = {}
    first = [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
    if len(places) == len(tensors):
        return _guard_of_distinct(tensors)
    # torch's check is false of a tensor that is given twice
    distinct = list(places.values())
    check = _guard_of_distinct([tensors[place] for place in distinct])
    repeated = [(place, former) for place, former in enumerate(first) if place != former]

    def check_repeated(*given: Any) -> bool:
        for place, former in repeated:
            if given[place] is not given[former]:
                return False
        return check(*[given[place] for place in distinct])

    return check_repeated


def _guard_of_distinct(tensors: Sequence[Tensor]) -> Guard:
    if _TensorGuards is not None:
        try:
            check: Guard = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            if check(*tensors):
                return check
        except (RuntimeError, TypeError, ValueError):  # other arguments in this torch, or tensors it does not take
            pass
    return _guard_in_python(tensors)


def _guard_in_python(tensors: Sequence[Tensor]) -> Guard:
    """The same, ten times as slow."""
    seen = _guarded_properties(tensors)  # not the tensors themselves, which must not be kept

    def check(*given: Any) -> bool:
        return (
            not state_needs_torch()
            and all(isinstance(tensor, Tensor) for tensor in given)
            and _guarded_properties(given) == seen
        )

    return check


def _guarded_properties(tensors: Sequence[Tensor]) -> list[Any]:
    return [
        torch.is_inference_mode_enabled(),
        *(
            (type(t), t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.is_neg(), t.is_inference())
            for t in tensors
        ),
    ]


def state_needs_torch() -> bool:
    """A transform, mode, trace, forward-mode level or autocast is active: PyTorch must see the operation itself."""
    return in_transform() or in_dispatch_mode() or bool(_autocast())


def in_transform() -> bool:
    """Whether a transform (vmap, grad, functionalize), a forward-mode level or jit's tracer is active."""
    return _interpreters() is not None or forward_ad._current_level >= 0 or _tracing() is not None


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode (make_fx, fake tensors) wants to see every operator."""
    return bool(_dispatch_modes() > 0)


def needs_torch(tensor: Any) -> bool:
    """Not an ordinary tensor of a CPU or CUDA device: a subclass, another device, what a transform wrapped, a lazy
    negation, or no memory behind it."""
    return is_unusual(tensor) or not (tensor.is_cpu or tensor.is_cuda)


def is_unusual(tensor: Any) -> bool:
    """``needs_torch``, whatever the device."""
    if is_subclass(tensor):
        return True
    if tensor.is_cpu or tensor.is_cuda:
        return not is_known(tensor)
    return bool(tensor.is_neg())


def is_shape_only(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values (meta, or torch's FakeTensor)."""
    return tensor.is_meta or is_fake(tensor)


def is_capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph: nothing may be loaded meanwhile."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def is_autocast_on(device_type: str) -> bool:
    """Whether autocast decides the dtypes of ops on this kind of device."""
    return _autocast() and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
