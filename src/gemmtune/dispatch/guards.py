"""When a call must not go to a kernel that works on raw memory: the checks of the hot path, a few dozen ns each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_interpreters = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state
_autocast = torch._C._is_any_autocast_enabled


def special_state() -> bool:
    """A transform, mode, trace, forward-mode level or autocast is active: PyTorch must see the operation itself."""
    return (
        _interpreters() is not None
        or _dispatch_modes() > 0
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or _autocast()
    )


def special(tensor: Any) -> bool:
    """Not an ordinary dense CPU tensor: a subclass, another device, or values behind a lazy negation."""
    kind = type(tensor)
    return (kind is not Tensor and kind is not Parameter) or not tensor.is_cpu or tensor.is_neg()


def autocasting(device_type: str) -> bool:
    """Whether autocast decides the dtypes of ops on this kind of device."""
    return _autocast() and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
