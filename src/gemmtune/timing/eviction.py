"""Removing weights from all caches of the host, so that the next call reads them from memory.

Reading other memory does not do that where the last-level cache is large and other machines use it, too: a Xeon with
480 MB kept a weight of 32 MB through a read of 128 MB while they were idle, and a kernel took 0.7 of its time then.
A model's activations and outputs are in the caches when a product begins, its weights are not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import Tensor

from ..core import torch_compat
from ..core.devices import is_host
from ..core.target import Target
from ..core.weights import PackedWeight, QuantWeight

Weight = Tensor | QuantWeight | PackedWeight


def can_evict(target: Target) -> bool:
    """Whether ``evict`` works for weights on the target: on x86 hosts with CLFLUSHOPT, and with the native kernels'
    build."""
    return is_host(target.device) and _can_evict_lines()


def evict(weights: Iterable[Weight]) -> None:
    """Remove weights from all caches of the host."""
    from ..backends.native import _native

    for address, size in {_memory_of(tensor) for weight in weights for tensor in _tensors_of(weight)}:
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


def _tensors_of(weight: Weight) -> tuple[Tensor, ...]:
    if isinstance(weight, PackedWeight):
        return weight.data
    if isinstance(weight, QuantWeight):
        return (weight.data, weight.scale, *(() if weight.zero_point is None else (weight.zero_point,)))
    return (weight,)
