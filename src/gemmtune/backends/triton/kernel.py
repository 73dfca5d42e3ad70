"""Loaded Triton kernels: one class a template."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...problem import Problem, bits
from ..base import Candidate, Launch
from ..gpu.artifact import Header
from ..gpu.driver import Block, Map
from ..gpu.kernel import MISPLACED, GpuKernel, GridKernel, Loaded, put, scratch_of, shifted
from ..gpu.rules import leads
from .compiler import CONVERTED_ITEMS

_MAPS = 256  # descriptors kept a kernel: weights stay where they are


class Tiled(GridKernel):
    """The template ``tiled``: a grid of tiles times parts of K."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        tiles = self._tiles(problem.m)
        if self._split > 1:
            self._sums, self.workspace_bytes = ("ws_ptr", "lock_ptr"), self._sums_bytes(tiles)
        self._counters: dict[tuple[int, int], Tensor] = {}

    def _sums_bytes(self, tiles: int) -> int:
        return tiles * self._split * self._bm * self._bn * 4

    def _common(self, device: int, stream: int, tiles: int) -> tuple[int, int]:
        """Where a stream's kernels leave partial sums, and this kernel's counters."""
        key = (device, stream)
        held = self._counters.get(key)
        if held is None or held.numel() < tiles:
            held = self._counters[key] = scratch_of(device).counters(max(tiles, 2 * self._tiles_n))
        return scratch_of(device).sums(stream, self._sums_bytes(tiles)), held.data_ptr()


class Persistent(GpuKernel):
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
            if (c_ptr | a_ptr | b_ptr) & MISPLACED:
                shifted(launch, out, a, b, rest)
                return
            config.stream = stream = stream_of(device)
            right = self._map("b_desc", matrix(b_ptr, stream), problem.n, ldb)
            maps = (self._map("a_desc", a_ptr, m, lda), right)  # which live until they are launched
            block.describe(maps)
            slots[c_at] = c_ptr
            put(slots, others, rest)
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


TEMPLATES: dict[str, type[GpuKernel]] = {"tiled": Tiled, "persistent": Persistent, "converted": Converted}
