"""Loaded Triton kernels: from operands to a launch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import PackedWeightError
from ...problem import Problem, bits
from ..base import Candidate, Kernel, PackedWeight, QuantWeight
from .compiler import CONVERTED_ITEMS, Header
from .driver import Function, Map
from .space import INT4_BLOCKS, int4_layout, leads

_ALIGN = 16
_LOCKS = 1 << 20  # counters a device, handed out to kernels as they are loaded
_SPACE = 32 << 20  # bytes of sums that a stream gets at first
_MAPS = 256  # descriptors kept a kernel: weights stay where they are


class Scratch:
    """What kernels share on one device: zeroed counters, and for each stream a place for partial sums or a converted B.

    Kernels leave their counters at zero. Two launches of one kernel must not share counters at one time: launches
    on one stream never do; each stream has counters and sums of its own.
    """

    def __init__(self, device: int) -> None:
        self._device = torch.device("cuda", device)
        self._locks = torch.zeros(_LOCKS, dtype=torch.int32, device=self._device)
        self._used = 0
        self._sums: dict[int, Tensor] = {}
        self._guard = threading.Lock()

    def counters(self, count: int) -> Tensor:
        """So many zeros of the kernel's own for as long as it lives."""
        with self._guard:
            if self._used + count > self._locks.numel():
                self._locks = torch.zeros(max(_LOCKS, count), dtype=torch.int32, device=self._device)
                self._used = 0
            part = self._locks[self._used : self._used + count]
            self._used += count
            return part

    def sums(self, stream: int, size: int) -> int:
        """The address of at least ``size`` bytes for one stream's kernels, which run one after the other."""
        held = self._sums.get(stream)
        if held is None or held.numel() < size:
            # The old memory may still be in use on its stream: the allocator waits for that before it reuses it there.
            held = self._sums[stream] = torch.empty(max(size, _SPACE), dtype=torch.uint8, device=self._device)
        return held.data_ptr()


_scratch: dict[int, Scratch] = {}


def scratch_of(device: int) -> Scratch:
    """The device's; made at first use."""
    if device not in _scratch:
        _scratch[device] = Scratch(device)
    return _scratch[device]


class Loaded:
    """A cubin on each device that it is called for."""

    def __init__(self, header: Header, cubin: bytes) -> None:
        self._header, self._cubin = header, cubin
        self._functions: dict[int, Function] = {}
        self(torch.cuda.current_device())  # now: a module cannot be loaded while a graph is captured

    def __call__(self, device: int) -> Function:
        held = self._functions.get(device)
        if held is None:
            held = self._functions[device] = Function(self._header, self._cubin, device)
        return held


class TritonKernel(Kernel):
    """Cubins with what launching them needs; takes any M. Operands that start off a 16-byte boundary are copied."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        self.problem, self.candidate = problem, candidate
        self.header, cubin = parts[-1]
        config = dict(candidate.config)
        self._bm, self._bn = int(config["bm"]), int(config["bn"])
        self._block = int(config["bk"])
        self.packing = int4_layout(self._block) if problem.b.dtype == "int4" else None
        self._function = Loaded(self.header, cubin)
        self._tiles_n = -(-problem.n // self._bn)

    def pack(self, b: Any) -> PackedWeight:
        return shuffle_int4(b, self.problem, self._block)

    def _weight(self, b: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The matrix, and the scales (and zero points) that go with it."""
        if isinstance(b, PackedWeight):
            return b.data[0], b.data[1:]
        if isinstance(b, QuantWeight):
            return b.data, (b.scale,) if b.zero_point is None else (b.scale, b.zero_point)
        return b, ()


def _fitting(t: Tensor) -> Tensor:
    """The tensor, or a copy of it that starts on a 16-byte boundary, with its strides."""
    if t.data_ptr() % _ALIGN == 0:
        return t
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return copy.copy_(t)


class Tiled(TritonKernel):
    """The template ``tiled``: a grid of tiles times parts of K."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        header = self.header
        self._split = int(dict(candidate.config)["split"])
        tiles = -(-problem.m // self._bm) * self._tiles_n * problem.batch
        self.workspace_bytes = self._sums_bytes(tiles) if self._split > 1 else 0
        self._counters: dict[tuple[int, int], Tensor] = {}
        self._places = {name: place for place, name in enumerate(header.arguments)}
        known = dict.fromkeys(header.arguments, 0) | {"N": problem.n, "K": problem.k}
        known["lda"], known["ldb"], known["ldc"] = leads(problem, problem.m)
        self._values = [known[name] for name in header.arguments]
        self._m_place = self._places["M"]
        # With contiguous columns A's leading dimension is M.
        self._lda_place = self._places["lda"] if problem.a.layout.order == "col" and not problem.a.layout.ld else None
        self._plain = not (problem.family == "bmm" or self._split > 1 or problem.epilogue or problem.b.quant)

    def _sums_bytes(self, tiles: int) -> int:
        return tiles * self._split * self._bm * self._bn * 4

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        raw, extra = (b, ()) if self._plain else self._weight(b)
        a_at, b_at, out_at = a.data_ptr(), raw.data_ptr(), out.data_ptr()
        if (a_at | b_at | out_at) & 15:
            self._shifted(a, b, aux, out)
            return
        m = a.shape[-2]
        values = self._values.copy()
        values[0], values[1], values[2], values[self._m_place] = a_at, b_at, out_at, m
        device = a.device.index
        stream = torch._C._cuda_getCurrentRawStream(device)
        tiles = -(-m // self._bm) * self._tiles_n
        if self._lda_place is not None:
            values[self._lda_place] = m
        if not self._plain:
            self._add(values, a, raw, extra, aux, out, tiles, stream)
        self._function(device)((tiles * self._split, self.problem.batch), values, (), stream)

    def _shifted(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        raw, _ = self._weight(b)
        fitting = _fitting(raw)
        if fitting is not raw:
            b = replace(b, data=fitting) if isinstance(b, QuantWeight) else fitting
        result = _fitting(out)
        self.run(_fitting(a), b, aux, result)
        if result is not out:
            out.copy_(result)

    def _add(
        self, values: list[int], a: Tensor, raw: Tensor, extra: Sequence[Tensor], aux: Sequence[Tensor], out: Tensor,
        tiles: int, stream: int,
    ) -> None:  # fmt: skip
        """What only some kernels take: scales, batches, a place for partial sums, the epilogue's tensors."""
        problem, places = self.problem, self._places
        if extra:
            values[places["s_ptr"]] = extra[0].data_ptr()
            if len(extra) > 1:
                values[places["z_ptr"]] = extra[1].data_ptr()
        if problem.family == "bmm":
            values[places["batch_a"]], values[places["batch_b"]] = a.stride(0), raw.stride(0)
            values[places["batch_c"]] = out.stride(0)
        if self._split > 1:
            count, device = tiles * problem.batch, a.device.index
            values[places["ws_ptr"]] = scratch_of(device).sums(stream, self._sums_bytes(count))
            values[places["lock_ptr"]] = self._locks(device, stream, count)
        if aux:
            known: dict[str, int] = {}
            _add_aux(problem, known, aux)
            for name, value in known.items():
                values[places[name]] = value

    def _locks(self, device: int, stream: int, count: int) -> int:
        key = (device, stream)
        held = self._counters.get(key)
        if held is None or held.numel() < count:
            held = self._counters[key] = scratch_of(device).counters(max(count, 2 * self._tiles_n))
        return held.data_ptr()


def _add_aux(problem: Problem, known: dict[str, int], aux: Sequence[Tensor]) -> None:
    tensors = iter(aux)
    for place, step in enumerate(problem.epilogue):
        if step.takes_tensor:
            tensor = next(tensors)
            known[f"t{place}"] = tensor.data_ptr()
            if step.axis == "full":
                known[f"ld{place}"] = tensor.stride(-2) if tensor.shape[-2] > 1 else problem.n


class Persistent(TritonKernel):
    """The template ``persistent``: as many programs as fit, A and B through TMA descriptors that are kept."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._ldb = leads(problem, problem.m)[1]
        self._maps: dict[tuple[int, int, int], Map] = {}

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        problem = self.problem
        raw, extra = self._weight(b)
        result = out
        if (a.data_ptr() | raw.data_ptr() | out.data_ptr()) % _ALIGN:
            a, raw, result = _fitting(a), _fitting(raw), _fitting(out)
        m, device = a.shape[0], a.device.index
        lda, _, ldc = leads(problem, m)
        stream = torch._C._cuda_getCurrentRawStream(device)
        b_at, ldb = self._matrix(raw, device, stream)
        maps = (self._map("a_desc", a.data_ptr(), m, lda), self._map("b_desc", b_at, problem.n, ldb))
        tiles = -(-m // self._bm) * self._tiles_n
        programs = min(tiles, _multiprocessors(device))
        known = {
            "a_desc": 0, "b_desc": 0, "c_ptr": result.data_ptr(), "M": m, "N": problem.n, "K": problem.k, "ldc": ldc,
            "PROGRAMS": programs, "a_desc.shape0": m, "a_desc.shape1": problem.k, "a_desc.stride0": lda,
            "a_desc.stride1": 1, "b_desc.shape0": problem.n, "b_desc.shape1": problem.k, "b_desc.stride0": ldb,
            "b_desc.stride1": 1,
        }  # fmt: skip
        if extra:
            known["s_ptr"] = extra[0].data_ptr()
        if aux:
            _add_aux(problem, known, aux)
        values = [known[name] for name in self.header.arguments]
        self._function(device)((programs, 1), values, maps, stream)
        if result is not out:
            out.copy_(result)

    def _matrix(self, raw: Tensor, device: int, stream: int) -> tuple[int, int]:
        """The address of B as the kernel reads it, and its leading dimension."""
        return raw.data_ptr(), self._ldb

    def _map(self, name: str, pointer: int, rows: int, lead_: int) -> Map:
        key = (pointer, rows, lead_)
        held = self._maps.get(key)
        if held is None:
            if len(self._maps) >= _MAPS:
                self._maps.clear()
            held = self._maps[key] = Map(self.header.descriptors[name], pointer, rows, self.problem.k, lead_)
        return held


class Converted(Persistent):
    """The template ``converted``: B into A's dtype, in memory that one stream's kernels share; then ``persistent``."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._convert = Loaded(*parts[0])
        self._count = problem.n * problem.k
        self.workspace_bytes = self._count * bits(problem.a.dtype) // 8

    def _matrix(self, raw: Tensor, device: int, stream: int) -> tuple[int, int]:
        place = scratch_of(device).sums(stream, self.workspace_bytes)
        grid = (-(-self._count // CONVERTED_ITEMS), 1)
        self._convert(device)(grid, (raw.data_ptr(), place, self._count), (), stream)
        return place, self.problem.k


_counts: dict[int, int] = {}


def _multiprocessors(device: int) -> int:
    if device not in _counts:
        _counts[device] = torch.cuda.get_device_properties(device).multi_processor_count
    return _counts[device]


TEMPLATES: dict[str, type[TritonKernel]] = {"tiled": Tiled, "persistent": Persistent, "converted": Converted}


# --- int4 -----------------------------------------------------------------------------------------------------------


def shuffle_int4(b: QuantWeight, problem: Problem, block: int) -> PackedWeight:
    """int4 weights [K/2, N] (pairs along K) as [N, K/2]: byte j of a block holds its elements j and block / 2 + j.

    So the kernel reads A in runs, where pairs of neighbours would want every other element of it.
    """
    low, high = b.data & 15, b.data >> 4
    codes = torch.stack((low, high), dim=1).reshape(2 * b.data.shape[0], -1)[: problem.k]  # [K, N]
    blocks = codes.t().reshape(problem.n, problem.k // block, 2, block // 2)
    data = (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).reshape(problem.n, problem.k // 2).contiguous()
    extra = [b.scale.reshape(-1, problem.n).contiguous()]
    if b.zero_point is not None:
        extra.append(b.zero_point.to(b.scale.dtype).reshape(-1, problem.n).contiguous())
    order = "col" if b.data.stride(0) == 1 else "row"
    return PackedWeight(int4_layout(block), (data, *extra), problem.n, problem.k, "int4", b.quant, "", order)


def unshuffle_int4(packed: PackedWeight) -> QuantWeight:
    """What ``shuffle_int4`` made it of, bit for bit, in its first memory order."""
    block = next((size for size in INT4_BLOCKS if packed.layout == int4_layout(size)), None)
    if block is None or packed.quant is None:
        raise PackedWeightError(f"layout {packed.layout!r} is not one of the Triton backend's")
    blocks = packed.data[0].reshape(packed.n, packed.k // block, block // 2)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=2).reshape(packed.n, packed.k // 2, 2)
    pairs = codes[..., 0] | (codes[..., 1] << 4)  # [N, K/2]
    data = pairs.contiguous().t() if packed.raw_order == "col" else pairs.t().contiguous()
    tensors = [t.reshape(packed.n) if packed.quant.group is None else t for t in packed.data[1:]]
    zero = tensors[1] if len(tensors) > 1 else None
    return QuantWeight(data, tensors[0], zero, packed.k, packed.quant, "int4")
