"""Whether PyTorch itself must see a call: because of PyTorch's state in this thread, or of an operand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core import devices
from ..core.memory import is_addressable, is_subclass
from ..core.torch_compat import forward_ad, is_fake
from ..core.torch_compat import get_tracing_state as _tracing
from ..core.torch_compat import is_any_autocast_enabled as _autocast
from ..core.torch_compat import len_torch_dispatch_stack as _dispatch_modes
from ..core.torch_compat import peek_interpreter_stack as _interpreters


def is_special() -> bool:
    """Whether PyTorch must see each operation: a transform, mode, trace, forward-mode level or autocast is active."""
    return in_transform() or in_dispatch_mode() or bool(_autocast())


def in_transform() -> bool:
    """Whether a transform (vmap, grad, functionalize), a forward-mode level or jit's tracer is active."""
    return _interpreters() is not None or forward_ad._current_level >= 0 or _tracing() is not None


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode (make_fx, fake tensors) wants to see every operator."""
    return bool(_dispatch_modes() > 0)


def is_autocast_on(device_type: str) -> bool:
    """Whether autocast decides the dtypes of ops on this kind of device."""
    return _autocast() and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)


def are_ordinary(tensors: Iterable[Any]) -> bool:
    """Whether all tensors are ordinary ones, in an ordinary state of PyTorch."""
    return not is_special() and not any(map(is_unusual, tensors))


def needs_torch(*tensors: Any) -> bool:
    """Whether only PyTorch can compute with the tensors in its present state: they are not ordinary, or on a kind of
    device that gemmtune does not know."""
    return not are_ordinary(tensors) or not all(devices.is_served(tensor.device) for tensor in tensors)


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
