"""Loaded Triton kernels: from operands to a launch.

What follows from shapes and strides (the grid, most arguments) is settled once, in ``bind``; a launch takes addresses.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...epilogue import Step
from ...errors import PackedWeightError
from ...problem import Problem, bits
from ..base import Candidate, Kernel, Launch, PackedWeight, QuantWeight
from .compiler import CONVERTED_ITEMS, Header
from .driver import Block, Function, Map
from .space import INT4_BLOCKS, int4_layout, leads

_ALIGN = 16
_MISPLACED = _ALIGN - 1  # bits of an address that must not be set
_LOCKS = 1 << 20  # counters a device, handed out to kernels as they are loaded
_SPACE = 32 << 20  # bytes of sums that a stream gets at first
_MAPS = 256  # descriptors kept a kernel: weights stay where they are
_BOUND = 256  # launches kept a kernel: one an M


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
    """Cubins with what launching them needs; takes any M. Matrices that start off a 16-byte boundary are copied."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        self.problem, self.candidate = problem, candidate
        self.header, cubin = parts[-1]
        config = dict(candidate.config)
        self._bm, self._bn = int(config["bm"]), int(config["bn"])
        self._block = int(config["bk"])
        self.packing = int4_layout(self._block) if problem.b.dtype == "int4" else None
        self.function = Loaded(self.header, cubin)
        self._bound: dict[tuple[int, ...], Launch] = {}
        self._tiles_n = -(-problem.n // self._bn)

    def pack(self, b: Any) -> PackedWeight:
        return shuffle_int4(b, self.problem, self._block)

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.bind(a, b, aux)(out, a, *_tensors(b), *aux)

    def bind(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch:
        problem, (raw, *extra) = self.problem, _tensors(b)
        m, device = a.shape[-2], a.device.index
        sizes = {
            f"ld{place}": tensor.stride(-2) if tensor.shape[-2] > 1 else problem.n
            for (place, step), tensor in zip(_taking(problem), aux, strict=True) if step.axis == "full"
        }  # fmt: skip
        if problem.family == "bmm":
            sizes |= {"batch_a": a.stride(0), "batch_b": raw.stride(0), "batch_c": m * leads(problem, m)[2]}
        key = (m, device, *sizes.values())
        held = self._bound.get(key)
        if held is None:
            names = ["s_ptr", "z_ptr"][: len(extra)] + [f"t{place}" for place, _ in _taking(problem)]
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            held = self._bound[key] = self._launcher(m, device, sizes, names)
        return held

    @abstractmethod
    def _launcher(self, m: int, device: int, sizes: dict[str, int], names: list[str]) -> Launch:
        """What ``bind`` returns. sizes: arguments that follow from the operands' strides; names: of the arguments
        whose tensors come behind A and B."""


def _tensors(b: Any) -> tuple[Tensor, ...]:
    """The matrix, and the scales (and zero points) that go with it."""
    if isinstance(b, PackedWeight):
        return b.data
    if isinstance(b, QuantWeight):
        return (b.data, b.scale) if b.zero_point is None else (b.data, b.scale, b.zero_point)
    return (b,)


def _taking(problem: Problem) -> list[tuple[int, Step]]:
    """The epilogue's steps that take a tensor, by their place."""
    return [(place, step) for place, step in enumerate(problem.epilogue) if step.takes_tensor]


def _put(slots: Any, places: Sequence[int], tensors: Sequence[Tensor]) -> None:
    """Addresses into their arguments' slots."""
    for place, tensor in zip(places, tensors, strict=True):
        slots[place] = tensor.data_ptr()


def _shifted(launch: Launch, out: Tensor, a: Tensor, b: Tensor, rest: Sequence[Tensor]) -> None:
    """The launch, on copies of the matrices that start off a 16-byte boundary."""
    result = _fitting(out)
    launch(result, _fitting(a), _fitting(b), *rest)
    if result is not out:
        out.copy_(result)


def _fitting(t: Tensor) -> Tensor:
    """The tensor, or a copy of it that starts on a 16-byte boundary, with its strides."""
    if not t.data_ptr() & _MISPLACED:
        return t
    copy = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    return copy.copy_(t)


class Tiled(TritonKernel):
    """The template ``tiled``: a grid of tiles times parts of K."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._split = int(dict(candidate.config)["split"])
        tiles = self._tiles(problem.m)
        self.workspace_bytes = self._sums_bytes(tiles) if self._split > 1 else 0
        self._counters: dict[tuple[int, int], Tensor] = {}

    def _tiles(self, m: int) -> int:
        return -(-m // self._bm) * self._tiles_n * self.problem.batch

    def _sums_bytes(self, tiles: int) -> int:
        return tiles * self._split * self._bm * self._bn * 4

    def arguments(self, m: int, sizes: dict[str, int]) -> list[int]:
        """Every argument's value for M rows, addresses 0."""
        problem = self.problem
        lda, ldb, ldc = leads(problem, m)
        known = {"M": m, "N": problem.n, "K": problem.k, "lda": lda, "ldb": ldb, "ldc": ldc, **sizes}
        return [known.get(name, 0) for name in self.header.arguments]

    def grid(self, m: int) -> tuple[int, int]:
        """Programs for M rows: tiles times parts of K, batches."""
        return self._tiles(m) // self.problem.batch * self._split, self.problem.batch

    def _launcher(self, m: int, device: int, sizes: dict[str, int], names: list[str]) -> Launch:
        function, place = self.function(device), self.header.arguments.index
        block = Block(function, self.grid(m), self.arguments(m, sizes))
        c_at, a_at, b_at = place("c_ptr"), place("a_ptr"), place("b_ptr")
        others = [place(name) for name in names]
        sums = (place("ws_ptr"), place("lock_ptr")) if self._split > 1 else None
        stream_of, tiles = torch._C._cuda_getCurrentRawStream, self._tiles(m)

        def launch(out: Tensor, a: Tensor, b: Tensor, *rest: Tensor) -> None:
            slots, config, go = block.held
            c_ptr, a_ptr, b_ptr = out.data_ptr(), a.data_ptr(), b.data_ptr()
            if (c_ptr | a_ptr | b_ptr) & _MISPLACED:
                _shifted(launch, out, a, b, rest)
                return
            config.stream = stream = stream_of(device)
            if sums is not None:
                slots[sums[0]], slots[sums[1]] = self._common(device, stream, tiles)
            slots[c_at], slots[a_at], slots[b_at] = c_ptr, a_ptr, b_ptr
            if rest:
                _put(slots, others, rest)
            status = go()
            if status:
                function.failed(status, go)

        return launch

    def _common(self, device: int, stream: int, tiles: int) -> tuple[int, int]:
        """Where a stream's kernels leave partial sums, and this kernel's counters."""
        key = (device, stream)
        held = self._counters.get(key)
        if held is None or held.numel() < tiles:
            held = self._counters[key] = scratch_of(device).counters(max(tiles, 2 * self._tiles_n))
        return scratch_of(device).sums(stream, self._sums_bytes(tiles)), held.data_ptr()


class Persistent(TritonKernel):
    """The template ``persistent``: as many programs as fit, A and B through TMA descriptors that are kept."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._maps: dict[tuple[int, int, int], Map] = {}

    def _launcher(self, m: int, device: int, sizes: dict[str, int], names: list[str]) -> Launch:
        problem = self.problem
        lda, _, ldc = leads(problem, m)
        ldb, matrix = self._matrix(device)
        tiles = -(-m // self._bm) * self._tiles_n
        programs = min(tiles, torch.cuda.get_device_properties(device).multi_processor_count)
        known = {
            "M": m, "N": problem.n, "K": problem.k, "ldc": ldc, "PROGRAMS": programs, "a_desc.shape0": m,
            "a_desc.shape1": problem.k, "a_desc.stride0": lda, "a_desc.stride1": 1, "b_desc.shape0": problem.n,
            "b_desc.shape1": problem.k, "b_desc.stride0": ldb, "b_desc.stride1": 1, **sizes,
        }  # fmt: skip
        function, arguments = self.function(device), self.header.arguments
        block = Block(function, (programs, 1), [known.get(name, 0) for name in arguments])
        c_at, others = arguments.index("c_ptr"), [arguments.index(name) for name in names]
        stream_of = torch._C._cuda_getCurrentRawStream

        def launch(out: Tensor, a: Tensor, b: Tensor, *rest: Tensor) -> None:
            slots, config, go = block.held
            c_ptr, a_ptr, b_ptr = out.data_ptr(), a.data_ptr(), b.data_ptr()
            if (c_ptr | a_ptr | b_ptr) & _MISPLACED:
                _shifted(launch, out, a, b, rest)
                return
            config.stream = stream = stream_of(device)
            right = self._map("b_desc", matrix(b_ptr, stream), problem.n, ldb)
            maps = (self._map("a_desc", a_ptr, m, lda), right)  # which live until they are launched
            block.describe(maps)
            slots[c_at] = c_ptr
            _put(slots, others, rest)
            status = go()
            if status:
                function.failed(status, go)

        return launch

    def _matrix(self, device: int) -> tuple[int, Callable[[int, int], int]]:
        """The leading dimension of B as the kernel reads it, and its address from that of B and the stream."""
        return leads(self.problem, self.problem.m)[1], lambda address, stream: address

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

    def _matrix(self, device: int) -> tuple[int, Callable[[int, int], int]]:
        function, size = self._convert(device), self.workspace_bytes
        block = Block(function, (-(-self._count // CONVERTED_ITEMS), 1), (0, 0, self._count))

        def convert(address: int, stream: int) -> int:
            slots, config, go = block.held
            place = scratch_of(device).sums(stream, size)
            slots[0], slots[1], config.stream = address, place, stream
            status = go()
            if status:
                function.failed(status, go)
            return place

        return self.problem.k, convert


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
