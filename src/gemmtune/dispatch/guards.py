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
    """Not an ordinary tensor of a CPU or CUDA device: a subclass, another device, or values behind a lazy negation."""
    return unusual(tensor) or not (tensor.is_cpu or tensor.is_cuda)


def unusual(tensor: Any) -> bool:
    """``special`` of a tensor whose device is known, as the hot path's keys name it."""
    kind = type(tensor)
    return (kind is not Tensor and kind is not Parameter) or tensor.is_neg()


def capturing(device: torch.device) -> bool:
    """Whether the device's current stream is being captured into a CUDA graph: nothing may be loaded meanwhile."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def autocasting(device_type: str) -> bool:
    """Whether autocast decides the dtypes of ops on this kind of device."""
    return _autocast() and torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
