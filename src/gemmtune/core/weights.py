"""Constant B operands that are more than a matrix: weight-only quantised ones, and packed ones."""

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
    """A weight-only operand as users hold it. See ``problem.Quant`` for the formula.

    data: int8 or float8_e4m3fn [K, N], or uint8 [ceil(K / 2), N] of int4 pairs along K; any strides. scale, zero_point:
    [N] or [groups, N]. ``k`` is the logical K (an odd K cannot be told from the int4 data).
    """

    data: Tensor
    scale: Tensor
    zero_point: Tensor | None
    k: int
    quant: Quant
    dtype: str


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A constant B operand in the one layout its Plan's kernels share.

    layout: the layout's name, ``"<backend>:<anything>"``; that backend packs and unpacks ``data``, which others may
    read. n, k, dtype and quant say what was packed; ``machine`` names the ISA family it is valid for. ``bias`` and the
    like never live here. ``raw_order`` is that of the weight it came from, so that unpacking gives the same tensor
    back. Two packed weights are equal only when they are one. Raises TypeError for ``data`` that kernels cannot read by
    address (tensor subclasses, say); copies and unpickled ones are checked, too.
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

    def __post_init__(self) -> None:
        from .memory import require_packed_data  # here, so that the command line answers `--help` without torch

        require_packed_data(f"PackedWeight({self.layout!r})", self.data)
        quant = self.quant.key if self.quant is not None else ""
        parts = [self.layout, self.n, self.k, self.dtype, quant, self.machine, self.raw_order]
        parts += [self.device] if self.data and self.device.type != "cpu" else []
        object.__setattr__(self, "_key", "|".join(str(part) for part in parts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and unpickled ones are checked as new ones are: a mode may have put other tensors in these places."""
        return type(self), tuple(getattr(self, held.name) for held in fields(self))

    @property
    def key(self) -> str:
        """Names everything but the values: packed weights with equal keys are served by the same kernels."""
        return self._key

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self.data[0].device

    @property
    def nbytes(self) -> int:
        """Bytes held. An opaque (oneDNN) tensor shows no storage: its elements are counted."""
        return sum(t.nbytes if t.is_mkldnn else t.untyped_storage().nbytes() for t in self.data)

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape [K, N]."""
        return (self.k, self.n)
