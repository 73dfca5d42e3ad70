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

Check = Callable[..., bool]


def check_like(*tensors: Tensor) -> Check:
    """A function that says of as many operands whether they are as these, in the state that this thread is in now.

    It compares Python type, dtype, device, sizes, strides, requires_grad, and what the dispatcher would do with them:
    autocast, transforms, tracing, inference mode, lazy negation. It need not see dispatch modes, forward-mode levels
    or whether gradients are on.
    """
    places: dict[int, int] = {}
    first = [places.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
    if len(places) == len(tensors):
        return _check_distinct(tensors)
    # torch's check is false of a tensor that is given twice
    distinct = list(places.values())
    check = _check_distinct([tensors[place] for place in distinct])
    repeated = [(place, former) for place, former in enumerate(first) if place != former]

    def check_repeated(*given: Any) -> bool:
        for place, former in repeated:
            if given[place] is not given[former]:
                return False
        return check(*[given[place] for place in distinct])

    return check_repeated


def _check_distinct(tensors: Sequence[Tensor]) -> Check:
    if _TensorGuards is not None:
        try:
            check: Check = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
            if check(*tensors):
                return check
        except (RuntimeError, TypeError, ValueError):  # other arguments in this torch, or tensors it does not take
            pass
    return _check_in_python(tensors)


def _check_in_python(tensors: Sequence[Tensor]) -> Check:
    """The same, ten times as slow."""
    seen = _seen(tensors)  # not the tensors themselves, which must not be kept

    def check(*given: Any) -> bool:
        return not special_state() and all(isinstance(tensor, Tensor) for tensor in given) and _seen(given) == seen

    return check


def _seen(tensors: Sequence[Tensor]) -> list[Any]:
    return [
        torch.is_inference_mode_enabled(),
        *(
            (type(t), t.dtype, t.device, t.shape, t.stride(), t.requires_grad, t.is_neg(), t.is_inference())
            for t in tensors
        ),
    ]


def special_state() -> bool:
    """A transform, mode, trace, forward-mode level or autocast is active: PyTorch must see the operation itself."""
    return transformed() or needs_dispatcher() or bool(_autocast())


def transformed() -> bool:
    """Whether a transform (vmap, grad, functionalize), a forward-mode level or jit's tracer is active."""
    return _interpreters() is not None or forward_ad._current_level >= 0 or _tracing() is not None


def needs_dispatcher() -> bool:
    """Whether a dispatch mode (make_fx, fake tensors) wants to see every operator."""
    return bool(_dispatch_modes() > 0)


def special(tensor: Any) -> bool:
    """Not an ordinary tensor of a CPU or CUDA device: a subclass, another device, what a transform wrapped, a lazy
    negation, or no memory behind it."""
    return unusual(tensor) or not (tensor.is_cpu or tensor.is_cuda)


def unusual(tensor: Any) -> bool:
    """``special``, whatever the device."""
    if is_subclass(tensor):
        return True
    if tensor.is_cpu or tensor.is_cuda:
        return not is_known(tensor)
    return bool(tensor.is_neg())


def shape_only(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values (meta, or torch's FakeTensor)."""
    return tensor.is_meta or is_fake(tensor)


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph: nothing may be loaded meanwhile."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def autocasting(device_type: str) -> bool:
    """Whether autocast decides the dtypes of ops on this kind of device."""
    return _autocast() and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
