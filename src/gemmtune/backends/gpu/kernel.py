"""Loaded GPU kernels: from operands to a launch.

What follows from shapes and strides (the grid, most arguments) is settled once, in ``bind``; a launch takes addresses.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...core import torch_compat
from ...core.candidate import Candidate
from ...core.codegen import compile_function
from ...core.epilogue import Step
from ...core.errors import KernelError
from ...core.memory import LOW, require_kernel_operands
from ...core.problem import Problem
from ...core.torch_compat import empty_cuda
from ...core.weights import PackedWeight, QuantWeight
from ..base import Kernel, Launch
from .alignment import MISALIGNED_MASK, batch_layouts, batched_launch, launch_aligned
from .artifact import Header, Tma
from .driver import Block, Capture, Function, Map, zeros
from .hip import HipFunction
from .int4 import INT4_BLOCKS, int4_layout, shuffle_int4
from .rules import INDEX_LIMIT, MAX_BATCH, leads

_COUNTER, _COUNTERS = 4, 4 << 20  # bytes of one, and of all that are made at a time
_BOUND = 256  # launches kept a kernel: one an M
_MAPS = 256  # descriptors kept a kernel: weights stay where they are


class Counters:
    """Zeros on one device, by which the programs of a kernel count who has left a partial sum; kernels leave them zero.

    Launches on one stream run one after the other and may share them. Others may not: each stream has its own, and each
    graph that is captured on it, since graphs may be replayed beside each other. Those of a graph are never given back:
    nothing says when it is gone. They are few: one for a tile.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], tuple[int, int]] = {}
        self._free = (0, 0)  # where, and how many bytes
        self._guard = threading.Lock()
        self._refill(0)  # where a kernel is loaded, there is time

    def of(self, stream: int, capture: int, count: int) -> int:
        """The address of at least so many. capture: the number of the stream's capture, or 0."""
        address, size = self._held.get((stream, capture), (0, 0))
        if size >= count:
            return address
        with self._guard:
            if self._free[1] < _COUNTER * count:
                self._refill(_COUNTER * count)
            address, left = self._free
            self._free = address + _COUNTER * count, left - _COUNTER * count
            self._held[stream, capture] = address, count
        return address

    def _refill(self, least: int) -> None:
        size = max(least, _COUNTERS)
        self._free = zeros(size), size


_counters: dict[int, Counters] = {}


def counters_of(device: int) -> Counters:
    """The device's, which is the current one; made at first use."""
    if device not in _counters:
        _counters[device] = Counters()
    return _counters[device]


def temporary(size: int) -> Tensor:
    """So many bytes of the current device for what is launched next on the current stream; to be kept until then.

    Of torch's allocator, as an op's own temporaries are: whoever gets them next comes after what was launched, and
    while a graph is captured they are the graph's.
    """
    return empty_cuda((size,), (1,), torch.uint8)


class Loaded:
    """A cubin on each device that it is called for."""

    def __init__(self, header: Header, cubin: bytes) -> None:
        self._header, self._cubin = header, cubin
        self._functions: dict[int, Function] = {}
        self(torch.cuda.current_device())  # now: a module cannot be loaded while a graph is captured

    def __call__(self, device: int) -> Function:
        held = self._functions.get(device)
        if held is None:
            kind = HipFunction if self._header.arch else Function
            held = self._functions[device] = kind(self._header, self._cubin, device)
        return held


class Settled(NamedTuple):
    """A launch but for its addresses. grid; values: of every argument, addresses 0; lines: of the launch's body, that
    pass A and B (they may use a_ptr, b_ptr, slots, parameters and stream); known: what else they use, by name."""

    grid: tuple[int, int]
    values: list[int]
    lines: list[str]
    known: dict[str, Any]


class GpuKernel(Kernel):
    """Cubins with what launching them needs; takes any M that its 32-bit arguments and its grid have room for (``bind``
    raises KernelError beyond). Matrices that start off a 16-byte boundary are copied.

    aligns_batches: whether it assumes that every matrix of a batch starts on such a boundary; where the batch stride is
    no multiple of it, the batch is copied.
    """

    aligns_batches: ClassVar[bool] = False

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        self.problem, self.candidate = problem, candidate
        self.header, cubin = parts[-1]
        self._bm, self._bn, self._block = self._tile(dict(candidate.config))
        self.packing = self.layout_of(problem, candidate)
        self.function = Loaded(self.header, cubin)
        self._bound: dict[tuple[int, ...], Launch] = {}
        self._tiles_n = -(-problem.n // self._bn)
        self._shares = "lock_ptr" in self.header.arguments
        if self._shares:
            device = torch.cuda.current_device()
            self.workspace_bytes, _ = self._shared(problem.m, device)
            counters_of(device)

    @classmethod
    def layout_of(cls, problem: Problem, candidate: Candidate) -> str | None:
        """Return the layout that a candidate's kernel wants its weight in; None for the raw weight."""
        if problem.b.dtype != "int4":
            return None
        return int4_layout(int(dict(candidate.config).get("bk", INT4_BLOCKS[0])))

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        """Rows and columns of a tile of the output; elements of K in a block."""
        return int(config["bm"]), int(config["bn"]), int(config["bk"])

    @property
    def can_overlap(self) -> bool:
        return self.function(torch.cuda.current_device()).follows

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
        names = ["s_ptr", "z_ptr"][: len(extra)] + [f"t{place}" for place, _ in _taking(problem)]
        if problem.family == "bmm":
            strides = a.stride(0), raw.stride(0)
            return self._bind_batches(m, device, strides, names)
        return self._kept(m, device, sizes, names, launch_aligned)

    def _bind_batches(self, m: int, device: int, strides: tuple[int, int], names: list[str]) -> Launch:
        """``bind`` for these batch strides of A and B (an epilogue of batches takes no matrices)."""
        layouts = batch_layouts(self.problem, m, strides, self.aligns_batches)
        copying = batched_launch(lambda *copies: self._bind_batches(m, device, copies, names), *layouts)
        if not all(layout.fits for layout in layouts):
            return copying
        sizes = {"batch_a": strides[0], "batch_b": strides[1], "batch_c": m * leads(self.problem, m)[2]}
        return self._kept(m, device, sizes, names, lambda _, *operands: copying(*operands))

    def _kept(
        self, m: int, device: int, sizes: dict[str, int], names: list[str], misaligned: Callable[..., None]
    ) -> Launch:
        """The launch for these sizes, made at their first sight. misaligned: called with it and the operands where one
        of these starts off a 16-byte boundary."""
        key = (m, device, *sizes.values())
        held = self._bound.get(key)
        if held is None:
            if len(self._bound) >= _BOUND:
                self._bound.clear()
            held = self._bound[key] = self._launcher(m, device, sizes, names, misaligned)
        return held

    def _shared(self, m: int, device: int) -> tuple[int, int]:
        """Bytes of partial sums, and counters of those that are there, for M rows: of kernels whose programs share
        tiles (those with the arguments ``ws_ptr`` and ``lock_ptr``)."""
        raise NotImplementedError(f"{self.candidate.id} leaves no partial sums")

    def _meeting(self, m: int, device: int) -> Callable[[Any, int, bool], Tensor] | None:
        """What puts into a launch's slots where its programs leave partial sums and count who did, on a stream and
        whether that is captured, and returns what must be kept until it is launched; None where programs do not share
        tiles."""
        if not self._shares:
            return None
        ws_at, lock_at = (self.header.arguments.index(name) for name in ("ws_ptr", "lock_ptr"))
        (size, count), counters = self._shared(m, device), counters_of(device)

        def meet(slots: Any, stream: int, captured: bool) -> Tensor:
            sums, capture = temporary(size), Capture.of(stream).number if captured else 0
            slots[ws_at], slots[lock_at] = sums.data_ptr(), counters.of(stream, capture, count)
            return sums

        return meet

    def _launcher(
        self, m: int, device: int, sizes: dict[str, int], names: list[str], misaligned: Callable[..., None]
    ) -> Launch:
        """What ``bind`` returns. sizes: arguments that follow from the operands' strides; names: of the arguments
        whose tensors come behind A and B; misaligned: as ``_kept`` has it."""
        reason = self._too_large(m)
        if reason:
            raise KernelError(f"{self.candidate.id} cannot be launched: {reason}")
        function, place = self.function(device), self.header.arguments.index
        settled = self._settled(m, device, sizes)
        meet, behind = self._meeting(m, device), "".join(f", {name}" for name in names)
        follows = function.follows and self.overlap
        go = "block.capture(stream, b, out) if captured else go()" if follows else "go()"
        asks = follows or meet is not None
        # Every tensor's address, by a name that no tensor has.
        addresses = ["c_ptr", "a_ptr", "b_ptr", *(f"{name}_at" for name in names)]
        values = ["out.data_ptr()", "a.data_ptr()", "b.data_ptr()", *(f"{name}.data_ptr()" for name in names)]
        return compile_function(
            "launch",
            f"def launch(out, a, b{behind}):",
            "    slots, config, go, parameters = block.held",
            f"    {', '.join(addresses)} = {', '.join(values)}",
            f"    if {' or '.join(f'{address} < {LOW}' for address in addresses[1:])}:",
            f"        require(a, b{behind})",
            f"    if (c_ptr | a_ptr | b_ptr) & {MISALIGNED_MASK}:",
            f"        return misaligned(launch, out, a, b{behind})",
            f"    config.stream = stream = stream_of({device})",
            *(["    captured = capturing()"] if asks else []),
            *(f"    {line}" for line in settled.lines),
            *(["    sums = meet(slots, stream, captured)"] if meet is not None else []),
            f"    slots[{place('c_ptr')}] = c_ptr",
            *(f"    slots[{place(name)}] = {name}_at" for name in names),
            f"    status = {go}",
            "    if status:",
            "        function.failed(status, go)",
            block=Block(function, settled.grid, settled.values), function=function, meet=meet,
            misaligned=misaligned, require=require_kernel_operands, stream_of=torch_compat.stream_of,
            capturing=torch_compat.is_capturing, **settled.known,
        )  # fmt: skip

    def _too_large(self, m: int) -> str:
        """Why M rows cannot be launched, in words; empty when they can."""
        if m > INDEX_LIMIT or -(-m // self._bm) * self._tiles_n > INDEX_LIMIT:
            return f"{m} rows, and their tiles, must be counted in 32 bits"
        return ""

    @abstractmethod
    def _settled(self, m: int, device: int, sizes: dict[str, int]) -> Settled:
        """What follows from M, the device and the operands' strides (``sizes``)."""


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


class GridKernel(GpuKernel):
    """A kernel whose programs are each given a place in a grid (``split`` of them share a tile's K), and its operands'
    addresses."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        self._split = int(dict(candidate.config)["split"])
        super().__init__(problem, candidate, parts)

    def _tiles(self, m: int) -> int:
        return -(-m // self._bm) * self._tiles_n * self.problem.batch

    def arguments(self, m: int, sizes: dict[str, int]) -> list[int]:
        """Every argument's value for M rows, addresses 0."""
        problem = self.problem
        lda, ldb, ldc = leads(problem, m)
        known = {"M": m, "N": problem.n, "K": problem.k, "lda": lda, "ldb": ldb, "ldc": ldc, **sizes}
        return [known.get(name, 0) for name in self.header.arguments]

    def _too_large(self, m: int) -> str:
        if self.grid(m)[0] > INDEX_LIMIT or self.problem.batch > MAX_BATCH:
            return f"a grid of {self.grid(m)} thread blocks; CUDA takes ({INDEX_LIMIT}, {MAX_BATCH})"
        return super()._too_large(m)

    def grid(self, m: int) -> tuple[int, int]:
        """Programs for M rows: tiles times parts of K, batches."""
        return self._tiles(m) // self.problem.batch * self._split, self.problem.batch

    def _settled(self, m: int, device: int, sizes: dict[str, int]) -> Settled:
        place = self.header.arguments.index
        passed = f"slots[{place('a_ptr')}], slots[{place('b_ptr')}] = a_ptr, b_ptr"
        return Settled(self.grid(m), self.arguments(m, sizes), [passed], {})


class _Maps(dict[int, Map]):
    """TMA descriptors of [rows, columns] matrices by their addresses, made when they are first asked for."""

    def __init__(self, tma: Tma, rows: int, columns: int, lead: int) -> None:
        self._of = tma, rows, columns, lead

    def __missing__(self, pointer: int) -> Map:
        tma, rows, columns, lead = self._of
        if len(self) >= _MAPS:
            self.clear()
        held = self[pointer] = Map(tma, pointer, rows, columns, lead)
        return held


class TmaKernel(GpuKernel):
    """A kernel whose programs go through the tiles in turns, A and B through TMA descriptors that are kept."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._weights = self._described("b_desc", problem.n, self._lead)  # which stay where they are, whatever M is

    @abstractmethod
    def _programs(self, m: int, device: int) -> int:
        """Blocks for M rows: they share the tiles among them."""

    @property
    def _lead(self) -> int:
        """The leading dimension of B as the kernel reads it."""
        return leads(self.problem, self.problem.m)[1]

    def _converting(self, device: int) -> Callable[[int, int], Tensor] | None:
        """What makes the B that the kernel reads of the given one's address, on a stream; None where that is the given
        one."""
        return None

    def _described(self, name: str, rows: int, lead: int) -> _Maps:
        # As many columns as K, but for packed int4, which lies without gaps.
        return _Maps(self.header.descriptors[name], rows, min(self.problem.k, lead), lead)

    def _settled(self, m: int, device: int, sizes: dict[str, int]) -> Settled:
        problem, ldb, programs = self.problem, self._lead, self._programs(m, device)
        lda, _, ldc = leads(problem, m)
        known = {
            "M": m, "N": problem.n, "K": problem.k, "ldc": ldc, "PROGRAMS": programs, "a_desc.shape0": m,
            "a_desc.shape1": problem.k, "a_desc.stride0": lda, "a_desc.stride1": 1, "b_desc.shape0": problem.n,
            "b_desc.shape1": problem.k, "b_desc.stride0": ldb, "b_desc.stride1": 1, **sizes,
        }  # fmt: skip
        arguments, convert = self.header.arguments, self._converting(device)
        lines = [
            *(["converted = convert(b_ptr, stream)", "b_ptr = converted.data_ptr()"] if convert is not None else []),
            "a_map, b_map = rows[a_ptr], weights[b_ptr]",  # by name: they must live until they are launched
            f"parameters[{arguments.index('a_desc')}] = a_map.address",
            f"parameters[{arguments.index('b_desc')}] = b_map.address",
        ]
        values = [known.get(name, 0) for name in arguments]
        rows = self._described("a_desc", m, lda)
        return Settled((programs, 1), values, lines, {"convert": convert, "rows": rows, "weights": self._weights})
