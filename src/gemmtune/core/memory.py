"""Which tensors may be handed by their address to code that reads memory: native kernels, GPU kernels and libraries.

A tensor subclass, a tensor that a transform wrapped, or one whose storage was freed has dtype, shape and strides like
any other; its address is 0, or that of something else.
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

# The dispatch keys of ordinary tensors of CPUs and GPUs; a tensor with any other key is unknown. They are listed, since
# a tensor made at import would lack some of them when the first use of gemmtune is inside ``torch.inference_mode()``.
_ORDINARY = _Keys(_Key.ADInplaceOrView)
for _key in (_Key.CPU, _Key.AutogradCPU, _Key.AutocastCPU, _Key.CUDA, _Key.AutogradCUDA, _Key.AutocastCUDA):
    _ORDINARY = _ORDINARY | _Keys(_key)
_FOREIGN = ~_ORDINARY.raw_repr()  # a difference of key sets would keep the bits of backends

# Addresses below are looked at twice. A tensor without memory has its storage offset, in bytes, for an address. Linux
# has heaps and CUDA's memory far above, but for programs that are not position-independent and some memory pools.
LOW = 1 << 40


def is_subclass(tensor: Any) -> bool:
    """Whether it is no tensor of torch's own types."""
    kind = type(tensor)
    return kind is not Tensor and kind is not Parameter


def is_known(tensor: Tensor) -> bool:
    """Whether it is an ordinary dense tensor of a CPU or GPU whose values are in memory."""
    return not is_subclass(tensor) and not _keys(tensor).raw_repr() & _FOREIGN and _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    # In this order: under jit's tracer numel() gives a tensor.
    return tensor.untyped_storage().data_ptr() != 0 or tensor.numel() == 0


def why_unknown(tensor: Any) -> str:
    """Return why no address of the tensor may be taken, in words that follow "is"; empty when it may."""
    if not isinstance(tensor, Tensor):
        return f"no tensor but a {type(tensor).__name__}"
    if is_subclass(tensor):
        return f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a subclass of torch.Tensor"
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized:
        return f"no dense tensor (layout {tensor.layout}, dtype {tensor.dtype})"
    if not (tensor.is_cpu or tensor.is_cuda):
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


def require(where: str, **tensors: Any) -> None:
    """Raise TypeError when no address of one of the tensors (by their names; None is passed over) may be taken.

    where: what was called, as messages begin.
    """
    for name, tensor in tensors.items():
        reason = "" if tensor is None else why_unknown(tensor)
        if reason:
            raise TypeError(
                f"{where}: {name} is {reason}, and kernels read memory by its address. Give a plain dense tensor (of a "
                "subclass its dequantize(), full_tensor() or as_subclass(torch.Tensor); of freed weights those that "
                "were gathered again), outside of transforms"
            )


def require_packed_data(where: str, tensors: Sequence[Any]) -> None:
    """``require`` for what a PackedWeight holds. oneDNN's opaque tensors will do, since only its own ops read them, and
    so will tensors that are all on meta, which nothing serves."""
    for place, tensor in enumerate(tensors):
        if is_subclass(tensor) or not (tensor.is_mkldnn or (tensor.is_meta and tensors[0].is_meta)):
            require(where, **{f"data[{place}]": tensor})


def require_kernel_operands(*tensors: Tensor) -> None:
    """``require`` for a kernel that met an address below ``LOW`` among these operands' (and outputs')."""
    for place, tensor in enumerate(tensors):
        if not tensor.untyped_storage().data_ptr():  # the rest costs 1 us, and memory pools of CUDA begin below LOW
            require("a kernel was called", **{f"operand {place}": tensor})


def require_memory(*operands: Any) -> None:
    """Raise TypeError for an ordinary tensor whose storage was freed: PyTorch's elementwise ops crash on those."""
    for place, tensor in enumerate(operands):
        ordinary = not is_subclass(tensor) and not _keys(tensor).raw_repr() & _FOREIGN
        if ordinary and not _has_memory(tensor):
            require("gemmtune was called", **{f"operand {place}": tensor})


def address(where: str, name: str, tensor: Tensor) -> int:
    """The tensor's address. Raises as ``require``; not for the hot path."""
    require(where, **{name: tensor})
    return tensor.data_ptr()
