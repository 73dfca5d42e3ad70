"""The packed layouts of a constant weight: their names, packing and unpacking.

``native:k<kp>/<dtype>/nr<columns>``: panels of ``nr`` columns in which ``kp`` consecutive elements along K are
adjacent. For int8 and float8 under bf16 products (``k2s``; native/frame/pack_b.hpp) elements with even and with odd k
are separated. One layout serves every micro-tile of its width and every M.

``.../halves``: for a gate (``Problem.gate``). Half of a panel's columns are consecutive ones of the weight's left half,
the other half are those of its right half that they are multiplied by.
"""

from __future__ import annotations

import mmap
import re
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.errors import PackedWeightError
from ...core.memory import address
from ...core.problem import Problem, bits
from ...core.torch_compat import empty_cpu
from ...core.weights import PackedWeight, QuantWeight
from .traits import BF16, DTYPES, F32, I16, LANES, U8S8, Compute

_NAME = re.compile(r"native:k(1|2|2s|4)/([a-z0-9_]+)/nr(16|32|48|64)(/halves)?")
# For each kind a compute type that packs in this way; all compute types of a kind pack alike.
_COMPUTE_BY_KIND = {"1": F32, "2": I16, "2s": BF16, "4": U8S8}
_ALIGN = 64
_LARGE_PAGE = 2 << 20  # of x86-64 and, with pages of 4 KiB, of AArch64


@dataclass(frozen=True, slots=True)
class Packing:
    """A packed layout. kind: how elements along K are stored together (``1``, ``2``, ``2s`` or ``4``). dtype: the
    weight's. nr: columns of a panel. halves: whether they are from both halves of the weight's columns."""

    kind: str
    dtype: str
    nr: int
    halves: bool = False

    @classmethod
    def of(cls, compute: Compute, dtype: str, nr: int, halves: bool = False) -> Packing:
        split = compute is BF16 and dtype in ("int8", "float8_e4m3fn")
        return cls("2s" if split else str(compute.kp), dtype, nr, halves)

    @classmethod
    def parse(cls, name: str) -> Packing:
        """Return the layout with a name. Raises PackedWeightError for a name that is not one of this backend's
        layouts."""
        match = _NAME.fullmatch(name)
        if match is None or match[2] not in DTYPES:
            raise PackedWeightError(f"{name!r} is not a layout of the native backend")
        return cls(match[1], match[2], int(match[3]), match[4] is not None)

    @property
    def name(self) -> str:
        return f"native:k{self.kind}/{self.dtype}/nr{self.nr}{'/halves' if self.halves else ''}"

    @property
    def kp(self) -> int:
        return int(self.kind[0])

    @property
    def shape_args(self) -> tuple[int, int]:
        """(dtype code, compute code), as the C++ functions take them."""
        return DTYPES[self.dtype], _COMPUTE_BY_KIND[self.kind].code

    def padded_n(self, n: int) -> int:
        return -(-n // self.nr) * self.nr

    def order_of_columns(self, n: int) -> Tensor | None:
        """Return the indices [N] of a weight's columns in the order in which they are packed; None where that is their
        own. n: a multiple of ``nr`` with ``halves``."""
        if not self.halves:
            return None
        return torch.arange(n).reshape(2, -1, self.nr // 2).transpose(0, 1).reshape(n)

    def nbytes(self, n: int, k: int) -> int:
        """Return the bytes of the packed panels, without scales or compensation."""
        k_multiple = 8 if self.dtype == "int4" else self.kp
        element = bits(self.dtype)
        return -(-k // k_multiple) * k_multiple * self.padded_n(n) * element // 8


def aligned_bytes(size: int) -> Tensor:
    """Return an uninitialised uint8 tensor that starts on a cache-line boundary.

    A tensor of at least a large page starts on a large page of newly mapped memory. A weight of a few megabytes in
    memory that was in use before gets few large pages or none (/proc/self/smaps shows them). The rest of the mapping is
    never touched.
    """
    from . import _native

    if size >= _LARGE_PAGE and sys.platform == "linux":
        memory = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _LARGE_PAGE
        data = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
    else:
        buffer = torch.empty(size + _ALIGN, dtype=torch.uint8)
        data = buffer.narrow(0, -buffer.data_ptr() % _ALIGN, size)
    _native.advise_huge_pages(address("packing", "new memory", data), size)
    return data


def pack(packing: Packing, b: Tensor | QuantWeight, problem: Problem) -> PackedWeight:
    """Pack B [K, N] (any strides). The result's data: panels, then compensation for k4, then scales and zero points if
    B is quantised.

    Raises TypeError for a B that kernels cannot read by its address (``memory.require_addressable``).
    """
    from . import _native

    raw = b.data if isinstance(b, QuantWeight) else b
    k, n = problem.k, problem.n
    start = address("packing", "the weight", raw)
    raw_order, columns = "col" if raw.stride(0) == 1 else "row", packing.order_of_columns(n)
    if columns is not None:
        raw = _select_columns(raw, columns)
        start = raw.data_ptr()
    panels = aligned_bytes(packing.nbytes(n, k))
    extra: list[Tensor] = []
    if packing.kp == 4:
        extra.append(torch.zeros(packing.padded_n(n), dtype=torch.int32))
    compensation = address("packing", "new memory", extra[0]) if extra else 0
    dtype, compute = packing.shape_args
    nv = packing.nr // LANES
    _native.pack(dtype, compute, n, k, nv, start, raw.stride(0), raw.stride(1), panels.data_ptr(), compensation)
    quant = None
    if isinstance(b, QuantWeight):
        quant = b.quant
        values = [t if columns is None else t[..., columns] for t in (b.scale, b.zero_point) if t is not None]
        extra += [_padded_groups(t, packing.padded_n(n)) for t in values]
    return PackedWeight(packing.name, (panels, *extra), n, k, packing.dtype, quant, "", raw_order)


def _select_columns(raw: Tensor, columns: Tensor) -> Tensor:
    """Return a copy of columns of a weight [K, N], in its memory order."""
    raw = raw.detach()
    return raw.t()[columns].t() if raw.stride(0) == 1 else raw[:, columns]


def _padded_groups(values: Tensor, columns: int) -> Tensor:
    """Return values [N] or [groups, N] as [groups, columns], with zeros beyond N."""
    rows = values.reshape(1, -1) if values.dim() < 2 else values
    out = rows.new_zeros(rows.shape[0], columns)
    out[:, : rows.shape[1]] = rows
    return out


def unpack(packed: PackedWeight) -> Any:
    """Return the Tensor [K, N] or QuantWeight that was packed, bit for bit, in its original memory order.

    Raises PackedWeightError when the packed tensors are too small, and TypeError when kernels cannot read them by
    address.
    """
    from . import _native

    packing = Packing.parse(packed.layout)
    n, k = packed.n, packed.k
    rows = -(-k // 2) if packing.dtype == "int4" else k
    dtype = torch.uint8 if packing.dtype == "int4" else getattr(torch, packing.dtype)
    # empty_cpu allocates real memory under any transform or mode. torch.empty would return a tensor that functionalize
    # or a fake mode wraps.
    raw = empty_cpu((rows, n), (1, rows) if packed.raw_order == "col" else (n, 1), dtype)
    code, compute = packing.shape_args
    panels = packed.data[0]
    start = address("unpacking", "the packed weight", panels)
    if panels.nbytes < packing.nbytes(n, k):
        raise PackedWeightError(
            f"a weight [{k}, {n}] packed as {packed.layout} takes {packing.nbytes(n, k)} bytes, and this one holds "
            f"{panels.nbytes}. Pack it again"
        )
    _native.unpack(
        code, compute, n, k, packing.nr // LANES, start, address("unpacking", "new memory", raw), raw.stride(0),
        raw.stride(1),
    )  # fmt: skip
    columns = packing.order_of_columns(n)
    if columns is not None:
        columns = columns.argsort()
        raw = _select_columns(raw, columns)
    if packed.quant is None:
        return raw
    scale, *zero = ((t[:, :n] if columns is None else t[:, columns]).contiguous() for t in packed.data[1:])
    if packed.quant.group is None:
        scale, zero = scale.reshape(n), [t.reshape(n) for t in zero]
    return QuantWeight(raw, scale, zero[0] if zero else None, k, packed.quant, packed.dtype)
