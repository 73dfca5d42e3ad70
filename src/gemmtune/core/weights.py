"""Weights that are more than one matrix: quantized for weight-only products, or packed for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .candidate import Scalar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .problem import Quant


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """A quantized B operand in the form that users pass. ``problem.Quant`` has the formula.

    data: int8 or float8_e4m3fn [K, N], or uint8 [ceil(K / 2), N] with two int4 values along K in each byte; any
    strides. scale, zero_point: [N] or [groups, N]. k: the logical K, which the int4 data do not determine when it is
    odd. dtype: torch's name of the elements' dtype, or ``int4``.
    """

    data: Tensor
    scale: Tensor
    zero_point: Tensor | None
    k: int
    quant: Quant
    dtype: str

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape [K, N]."""
        return (self.k, self.data.shape[1])


def layout_owner(layout: str) -> str:
    """Return the name of the backend that packs and unpacks a layout, whose name is ``<owner>:<anything>``."""
    return layout.partition(":")[0]


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A constant B operand in the layout that all kernels of its Plan share.

    layout: name of the layout, whose owner (``layout_owner``) packs and unpacks ``data``; other backends may read it.
    n, k, dtype, quant: properties of the weight before packing. machine: the ISA family for which the packed data are
    valid. raw_order: memory order of the weight before packing, so that unpacking restores an equal tensor. A bias or
    other epilogue tensor is never part of a PackedWeight. raw: the weight [N, K] before packing, for a floating or int8
    weight that is kept in both forms: each M is served by the form that is faster there (``dispatch.forms``). raw_t:
    its transpose [K, N].

    Two packed weights are equal only when they are one object. Raises TypeError for tensors that kernels cannot read
    by address (for example tensor subclasses), and ValueError for a ``raw`` that is not the same weight's; copying and
    unpickling repeat these checks.
    """

    layout: str
    data: tuple[Tensor, ...] = field(repr=False)
    n: int
    k: int
    dtype: str
    quant: Quant | None = None
    machine: str = ""
    raw_order: str = "col"
    meta: Mapping[str, Scalar] = field(default_factory=dict)
    _key: str = field(default="", compare=False, repr=False)
    raw: Tensor | None = field(default=None, repr=False)
    raw_t: Tensor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        from .memory import require_packed_data  # imported here so that `gemmtune --help` does not load torch

        require_packed_data(f"PackedWeight({self.layout!r})", self.data)
        quant = self.quant.key if self.quant is not None else ""
        parts = [self.layout, self.n, self.k, self.dtype, quant, self.machine, self.raw_order]
        parts += [self.device] if self.data and self.device.type != "cpu" else []
        if self.raw is not None:
            self._add_raw(self.raw)
            parts += ["raw", self.raw.stride()]
        object.__setattr__(self, "_key", "|".join(str(part) for part in parts))

    def _add_raw(self, raw: Tensor) -> None:
        """Check the raw form, and set its transpose, which products need at each call."""
        from .memory import require_packed_data

        require_packed_data(f"PackedWeight({self.layout!r})", (raw,))
        found = (tuple(raw.shape), str(raw.dtype).removeprefix("torch."), raw.device)
        if found != ((self.n, self.k), self.dtype, self.device):
            raise ValueError(f"PackedWeight({self.layout!r}): its raw form is another weight's: {found}")
        object.__setattr__(self, "raw_t", raw.t())

    @property
    def owner(self) -> str:
        """The backend that packs and unpacks the layout."""
        return layout_owner(self.layout)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the constructor and its arguments.

        Copying and unpickling thus run the checks of ``__post_init__``: a torch mode may have replaced the tensors.
        """
        return type(self), tuple(getattr(self, attribute.name) for attribute in fields(self) if attribute.init)

    @property
    def key(self) -> str:
        """A key of every property except the values: packed weights with equal keys are served by the same kernels."""
        return self._key

    @property
    def device(self) -> torch.device:
        """The device of the packed tensors."""
        return self.data[0].device

    @property
    def nbytes(self) -> int:
        """The memory size in bytes, of both forms where both are kept. An opaque (oneDNN) tensor exposes no storage, so
        its elements are counted."""
        packed = sum(t.nbytes if t.is_mkldnn else t.untyped_storage().nbytes() for t in self.data)
        return packed + (0 if self.raw is None else self.raw.nbytes)

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape [K, N]."""
        return (self.k, self.n)
