"""The forms in which a compiled graph's weights reach kernels: as they are, merged into one matrix, or packed.

A graph's weights are Parameters that the user may write to between calls. Nothing here assumes that they are frozen:

- Several weights [N, K] are merged *in place*: they become views of the rows of one matrix, so that there is no second
  copy and later writes to them reach the kernels. A weight whose memory another tensor shares cannot be moved: then the
  matrix is a copy.
- A copy, or a packed weight, is made anew when a weight's version counter or address has changed.

Inference tensors have no version counter: they are not packed, and a copy of several of them is made in every call.
Weights that change more often than a few times are no longer packed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..core import devices
from ..core.memory import is_subclass
from ..core.torch_compat import storage_use_count
from ..core.weights import PackedWeight

log = logging.getLogger("gemmtune")

MAX_CHANGES = 4  # a weight that was written more often is served unpacked
_OWN = 2  # uses of a storage that one tensor alone has: the tensor's, and that of the Python object that asks


class Versions:
    """The identities, addresses and version counters of tensors at one time."""

    __slots__ = ("addresses", "references", "versions")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """Raises RuntimeError for inference tensors."""
        self.references = tuple(weakref.ref(tensor) for tensor in tensors)
        self.addresses = tuple(tensor.data_ptr() for tensor in tensors)
        self.versions = tuple(tensor._version for tensor in tensors)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors are the same ones, at the same addresses, and nobody has written to them since."""
        for reference, address, version, tensor in zip(
            self.references, self.addresses, self.versions, tensors, strict=True
        ):
            if tensor._version != version or tensor.data_ptr() != address or reference() is not tensor:
                return False
        return True


def merged_in_place(weights: Sequence[Tensor]) -> Tensor | None:
    """Return the matrix of which contiguous matrices [N, K] are the rows, one behind the other; None if they are not
    the rows of one matrix."""
    first = weights[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for weight in weights:
        if weight.data_ptr() != address or weight.untyped_storage().data_ptr() != storage:
            return None
        address += weight.nbytes
    rows = sum(weight.shape[0] for weight in weights)
    return first.detach().as_strided((rows, first.shape[1]), (first.shape[1], 1))


def merge_in_place(weights: Sequence[Tensor]) -> Tensor | None:
    """Make contiguous matrices [N, K] the rows of one new matrix, and return it. None, and nothing is changed, where
    another tensor shares the memory of one of them, or where CUDA graphs are being captured."""
    if devices.is_capturing(weights[0].device) or not all(_is_movable(weight) for weight in weights):
        return None
    with torch.inference_mode(False), torch.no_grad():
        merged = torch.cat([weight.detach() for weight in weights])
        start = 0
        for weight in weights:
            weight.data = merged[start : start + weight.shape[0]]
            start += weight.shape[0]
    return merged


def _is_movable(weight: Tensor) -> bool:
    if is_subclass(weight) or weight.is_inference() or not weight.is_contiguous():
        return False
    storage = weight.untyped_storage()
    return storage.nbytes() == weight.nbytes and storage_use_count(storage) <= _OWN


class MergedWeights:
    """Several weights [N, K], or several vectors, as one.

    movable: whether the tensors are weights that may be merged in place. Others are vectors [N] or [1, N].
    """

    def __init__(self, movable: bool) -> None:
        self._movable = movable
        self._copy: Tensor | None = None
        self._versions: Versions | None = None
        self._addresses: tuple[int, ...] = ()
        self._merged: Tensor | None = None

    def get(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors, one behind the other along their first dimension."""
        if len(tensors) == 1:
            return tensors[0] if self._movable else tensors[0].reshape(-1)
        if self._merged is not None and self._addresses == tuple([tensor.data_ptr() for tensor in tensors]):
            return self._merged
        if self._copy is not None and self._versions is not None and self._versions.hold(tensors):
            return self._copy
        return _make_lasting(self._merge, tensors)

    def _merge(self, tensors: Sequence[Tensor]) -> Tensor:
        if self._movable:
            merged = merged_in_place(tensors)
            if merged is None:
                merged = merge_in_place(tensors)
            if merged is not None:
                self._merged, self._copy = merged, None
                self._addresses = tuple(tensor.data_ptr() for tensor in tensors)
                return merged
        copy = torch.cat([t.detach() if self._movable else t.detach().reshape(-1) for t in tensors])
        if any(tensor.is_inference() for tensor in tensors):  # they may have changed at the next call, unseen
            return copy
        if self._movable and self._copy is None:
            megabytes = copy.nbytes / 1e6
            log.info("a copy of %.0f MB: the memory of weights that are multiplied as one is shared", megabytes)
        self._copy, self._versions = copy, Versions(tensors)
        return copy


def _make_lasting(make: Callable[[Sequence[Tensor]], Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """Return ``make(tensors)``, which is kept unless there are inference tensors among them."""
    if any(tensor.is_inference() for tensor in tensors):
        return make(tensors)
    return devices.make_lasting(tensors[0].device, partial(make, tensors))


class GroupedScales:
    """The scales, or the zero points, of one weight or several as kernels take them: of one dtype, [groups, N], or [N]
    where there is one group. Made anew when one of the tensors has changed.

    dtype: of the result. groups: of each column.
    """

    def __init__(self, dtype: torch.dtype, groups: int) -> None:
        self._dtype, self._groups = dtype, groups
        self._versions: Versions | None = None
        self._whole: Tensor | None = None

    def get(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the tensors [N, groups], one behind the other along N."""
        if self._whole is not None and self._versions is not None and self._versions.hold(tensors):
            return self._whole
        return _make_lasting(self._join, tensors)

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        rows = torch.cat([tensor.detach().reshape(-1, self._groups) for tensor in tensors]).to(self._dtype)
        whole = rows.t().contiguous() if self._groups > 1 else rows.reshape(-1)
        if not any(tensor.is_inference() for tensor in tensors):  # those may have changed at the next call, unseen
            self._whole, self._versions = whole, Versions(tensors)
        return whole


_PACKED: dict[tuple[int, ...], tuple[Versions, dict[str, PackedWeight]]] = {}


class PackedForms:
    """The packed forms of one weight, which all graphs of this process share."""

    def __init__(self) -> None:
        self._versions: Versions | None = None
        self._packed: dict[str, PackedWeight] = {}
        self._changes = 0

    @property
    def changes_often(self) -> bool:
        """Whether the weight has been written to more than a few times."""
        return self._changes > MAX_CHANGES

    def get(self, tensors: Sequence[Tensor], layout: str) -> PackedWeight | None:
        """Return the weight of these tensors packed into ``layout``; None if it has to be packed first."""
        if self._versions is not None and self._versions.hold(tensors):
            return self._packed.get(layout)
        key = tuple(id(tensor) for tensor in tensors)
        shared = _PACKED.get(key)
        if shared is None or not shared[0].hold(tensors):
            return None
        self._versions, self._packed = shared
        return self._packed.get(layout)

    def put(self, tensors: Sequence[Tensor], layout: str, packed: PackedWeight) -> None:
        """Keep a packed form of the weight of these tensors. Raises RuntimeError for inference tensors."""
        if self._versions is None or not self._versions.hold(tensors):
            self._changes += self._versions is not None
            self._versions, self._packed = Versions(tensors), {}
            key = tuple(id(tensor) for tensor in tensors)
            if key not in _PACKED:
                for tensor in tensors:
                    weakref.finalize(tensor, _PACKED.pop, key, None)
            _PACKED[key] = (self._versions, self._packed)
        self._packed[layout] = packed
