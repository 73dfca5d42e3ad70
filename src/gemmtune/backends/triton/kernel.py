"""Loaded Triton kernels: one class for each template."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from ...core.candidate import Candidate
from ...core.problem import Problem, bits
from ..gpu.artifact import Header
from ..gpu.driver import Function
from ..gpu.kernel import GpuKernel, GridKernel, LoadedCubin, TmaKernel, alloc_workspace
from ..gpu.rules import OFFSET_LIMIT, leading_dimensions
from .compiler import CONVERTED_ITEMS


class Tiled(GridKernel):
    """The template ``tiled``: a grid of tiles times parts of K."""

    def _too_large(self, m: int) -> str:
        reach = int(self.candidate["bk"]) * leading_dimensions(self.problem, m)[0]
        if self.problem.a.layout.order == "col" and reach >= OFFSET_LIMIT:  # its leading dimension depends on M
            return f"elements of a tile of A lie {reach} apart, further than 32 bits tell"
        return super()._too_large(m)

    def _partial_sum_sizes(self, m: int, device: int) -> tuple[int, int]:
        tiles = self._tiles(m)
        return tiles * self._split * self._bm * self._bn * 4, max(tiles, 2 * self._tiles_n)


class Persistent(TmaKernel):
    """The template ``persistent``: at most one program for each multiprocessor; A and B are read through TMA."""

    def _programs(self, function: Function) -> tuple[str, dict[str, int]]:
        numbers = {"bm": self._bm, "tiles_n": self._tiles_n, "multiprocessors": function.multiprocessors}
        # Where programs share tiles, all programs are needed even for few tiles.
        every = "multiprocessors" if self._shares_tiles else "min(-(-m // bm) * tiles_n, multiprocessors)"
        return every, numbers

    def _partial_sum_sizes(self, m: int, device: int) -> tuple[int, int]:
        programs = self.function(device).multiprocessors
        return programs * self._bm * self._bn * 4, 2 * programs


class Converted(Persistent):
    """The template ``converted``: a kernel converts B to A's dtype, into a workspace; then the ``persistent`` kernel
    runs."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._convert = LoadedCubin(*parts[0])
        self._count = problem.n * problem.k
        self.workspace_bytes = self._count * bits(problem.a.dtype) // 8

    @property
    def _ldb(self) -> int:
        return self.problem.k

    def _converter(self, device: int) -> Callable[[int, int], Tensor]:
        function, size = self._convert(device), self.workspace_bytes
        grid = -(-self._count // CONVERTED_ITEMS)
        head = function.pack_head(grid, 1, *function.fixed_head, 0, 0, self._count)

        def convert(address: int, stream: int) -> Tensor:
            workspace = alloc_workspace(size)
            memory, slots, config, go, _ = function.args.prepared
            memory[:] = head
            slots[0], slots[1], config.stream = address, workspace.data_ptr(), stream
            status = go()
            if status:
                function.retry_or_raise(status, go)
            return workspace

        return convert


TEMPLATES: dict[str, type[GpuKernel]] = {"tiled": Tiled, "persistent": Persistent, "converted": Converted}
