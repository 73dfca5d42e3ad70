"""Removing operands from all caches of the host, so that the next call reads them from memory.

Reading other memory does not do that where the last-level cache is large and other machines use it, too: a Xeon with
480 MB kept a weight of 32 MB through a read of 128 MB while they were idle, and a kernel took 0.7 of its time then.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ..core import torch_compat
from ..core.devices import is_host
from ..core.target import Target
from ..core.weights import PackedWeight, QuantWeight
from ..verify.inputs import Inputs


def can_evict(target: Target) -> bool:
    """Whether ``evict`` works for operands of kernels on the target: on x86 hosts with CLFLUSHOPT, and with the native
    kernels' build."""
    return is_host(target.device) and _can_evict_lines()


def evict(operands: Iterable[tuple[Inputs, Any, Tensor]]) -> None:
    """Remove operand sets from all caches. operands: inputs, the weight that is read in place of theirs, output."""
    from ..backends.native import _native

    tensors = [t for inputs, b, out in operands for t in (inputs.a, *inputs.aux, *_tensors_of(b), out)]
    for address, size in {_memory_of(tensor) for tensor in tensors}:
        _native.evict(address, size)


@functools.cache
def _can_evict_lines() -> bool:
    try:
        from ..backends.native import _native
    except ImportError:
        return False
    return _native.can_evict()


def _memory_of(tensor: Tensor) -> tuple[int, int]:
    """Return the address and the bytes of a tensor's storage."""
    if tensor.is_mkldnn:
        return int(torch_compat.mkldnn_address(tensor)), int(torch_compat.mkldnn_bytes(tensor))
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _tensors_of(b: Tensor | QuantWeight | PackedWeight) -> tuple[Tensor, ...]:
    if isinstance(b, PackedWeight):
        return b.data
    if isinstance(b, QuantWeight):
        return (b.data, b.scale, *(() if b.zero_point is None else (b.zero_point,)))
    return (b,)
