"""Checks whether a tensor's address may be passed to native kernels, GPU kernels and libraries.

A tensor subclass, a tensor that a transform wrapped, and a tensor whose storage was freed have a dtype, a shape and
strides like any other tensor, but their address is 0 or that of unrelated memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .torch_compat import DispatchKey as _Key
from .torch_compat import DispatchKeySet as _Keys
from .torch_compat import dispatch_keys as _keys

# The dispatch keys of ordinary tensors on every known kind of device. They are listed instead of read from a tensor
# created at import, which would lack some keys when gemmtune is first imported inside ``torch.inference_mode()``.
_ORDINARY = _Keys(_Key.ADInplaceOrView)
for _key in (_Key.CPU, _Key.AutogradCPU, _Key.AutocastCPU, _Key.CUDA, _Key.AutogradCUDA, _Key.AutocastCUDA):
    _ORDINARY = _ORDINARY | _Keys(_key)
_FOREIGN = ~_ORDINARY.raw_repr()  # a difference of key sets would retain the backends' bits
_DEVICE_TYPES = {"cpu", "cuda"}

# A tensor with an address below this gets a full check. The address of a tensor without memory is its storage offset in
# bytes. On Linux, heaps and CUDA memory have far larger addresses, except in programs that are not position-independent
# and in some memory pools.
LOWEST_USUAL_ADDRESS = 1 << 40


def add_device(type: str, dispatch_keys: Sequence[str]) -> None:
    """Count tensors on another type of device as ordinary. dispatch_keys: names of the keys that they have."""
    global _ORDINARY, _FOREIGN
    for name in dispatch_keys:
        _ORDINARY = _ORDINARY | _Keys(getattr(_Key, name))
    _FOREIGN = ~_ORDINARY.raw_repr()
    _DEVICE_TYPES.add(type)


def is_subclass(tensor: Any) -> bool:
    """Whether the object's type is neither torch.Tensor nor torch.nn.Parameter."""
    cls = type(tensor)
    return cls is not Tensor and cls is not Parameter


def is_addressable(tensor: Tensor) -> bool:
    """Whether the tensor is an ordinary dense tensor on a known kind of device, whose values are in memory."""
    return not is_subclass(tensor) and not _keys(tensor).raw_repr() & _FOREIGN and _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    # In this order: under jit's tracer numel() gives a tensor.
    return tensor.untyped_storage().data_ptr() != 0 or tensor.numel() == 0


def why_not_addressable(tensor: Any) -> str:
    """Return why the tensor's address must not be used, in words that follow "is"; empty when it may be used."""
    if not isinstance(tensor, Tensor):
        return f"no tensor but a {type(tensor).__name__}"
    if is_subclass(tensor):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a subclass of torch.Tensor"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        return f"no dense tensor (layout {tensor.layout}, dtype {tensor.dtype})"
    if tensor.device.type not in _DEVICE_TYPES:
        return f"on {tensor.device}"
    if _keys(tensor).raw_repr() & _FOREIGN:
        keys = str(_keys(tensor) - _ORDINARY).removeprefix("DispatchKeySet")
        return f"no ordinary tensor but one that a transform or a mode of torch made (dispatch key {keys})"
    if not _has_memory(tensor):
        return "a tensor without memory: its storage was resized to 0 bytes, as FSDP does between uses"
    reach = tensor.storage_offset() + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and (reach + 1) * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "a tensor that reaches beyond its storage, which was resized"
    return ""


def require_addressable(where: str, **tensors: Any) -> None:
    """Raise TypeError unless the addresses of all tensors may be used.

    where: name of the called function, with which the message begins. tensors: by name; None is skipped.
    """
    for name, tensor in tensors.items():
        reason = "" if tensor is None else why_not_addressable(tensor)
        if reason:
            raise TypeError(
                f"{where}: {name} is {reason}, and kernels read memory by its address. Give a plain dense tensor (of a "
                "subclass its dequantize(), full_tensor() or as_subclass(torch.Tensor); of freed weights those that "
                "were gathered again), outside of transforms"
            )


def require_packed_data(where: str, tensors: Sequence[Any]) -> None:
    """Raise TypeError as ``require_addressable`` does, for the tensors of a PackedWeight.

    oneDNN's opaque tensors are accepted, since only oneDNN's ops read them. Tensors that are all on the meta device are
    accepted, since no kernel is called with them.
    """
    for i, tensor in enumerate(tensors):
        if is_subclass(tensor) or not (tensor.is_mkldnn or (tensor.is_meta and tensors[0].is_meta)):
            require_addressable(where, **{f"data[{i}]": tensor})


def require_kernel_operands(*tensors: Tensor) -> None:
    """Raise TypeError as ``require_addressable`` does, for a kernel's operands and outputs when an address is below
    ``LOWEST_USUAL_ADDRESS``."""
    for i, tensor in enumerate(tensors):
        # The full check takes 1 us, and CUDA's memory pools may begin below LOW.
        if not tensor.untyped_storage().data_ptr():
            require_addressable("a kernel was called", **{f"operand {i}": tensor})


def require_memory(*operands: Any) -> None:
    """Raise TypeError for an ordinary tensor whose storage was freed: PyTorch's elementwise ops crash on those."""
    for i, tensor in enumerate(operands):
        ordinary = not is_subclass(tensor) and not _keys(tensor).raw_repr() & _FOREIGN
        if ordinary and not _has_memory(tensor):
            require_addressable("gemmtune was called", **{f"operand {i}": tensor})


def address(where: str, name: str, tensor: Tensor) -> int:
    """Return the tensor's address. Raises TypeError as ``require_addressable`` does. Too slow for the hot path."""
    require_addressable(where, **{name: tensor})
    return tensor.data_ptr()
