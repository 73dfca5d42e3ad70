"""Loaded GPU kernels: from operands to a launch.

``bind`` computes everything that follows from strides once, and a launch computes once for each M what follows from
that (the grid, most arguments). Later launches only read M and addresses.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...core import torch_compat
from ...core.candidate import Candidate
from ...core.codegen import function_maker
from ...core.epilogue import Step
from ...core.errors import KernelError
from ...core.memory import LOWEST_USUAL_ADDRESS, require_kernel_operands
from ...core.problem import Problem
from ...core.torch_compat import empty_cuda
from ...core.weights import PackedWeight, QuantWeight
from ..base import Kernel, Launch
from .alignment import MISALIGNED_MASK, batch_layouts, batched_launch, launch_aligned
from .any_batch import AnyBatch
from .artifact import NEXT_LATE, PDL_ARGUMENT, Header, Tma
from .driver import CaptureState, Function, TensorMaps, alloc_zeroed
from .hip import HipFunction
from .int4 import INT4_BLOCKS, int4_layout, shuffle_int4
from .rules import INDEX_LIMIT, MAX_BATCH, leading_dimensions

_SEMAPHORE_BYTES, _SEMAPHORE_POOL_BYTES = 4, 4 << 20  # bytes of one semaphore, and of all that are allocated at a time
_MAX_LAUNCHES = 256  # that a kernel caches: of batched products one for each M, of others mostly one
_MAX_SIZES = 4096  # values of M for which a launch remembers its values, some 300 bytes each


class Semaphores:
    """Split-K semaphores on one device: zeros with which the programs of a kernel count the partial sums that have been
    written. Kernels reset them to zero.

    Launches on one stream run one after the other and may share semaphores. Other launches may not: each stream has its
    own, and each graph that is captured on it, since graphs may be replayed concurrently. The semaphores of a graph are
    never freed, since nothing signals that the graph has been destroyed. They are few: one for each tile.
    """

    def __init__(self) -> None:
        self._allocated: dict[tuple[int, int], tuple[int, int]] = {}
        self._pool = (0, 0)  # address and bytes of the unused rest
        self._lock = threading.Lock()
        self._refill(0)  # allocated while a kernel is loaded, so that no launch has to wait for it

    def of(self, stream: int, capture: int, count: int) -> int:
        """Return the address of at least ``count`` semaphores. capture: the id of the stream's capture, or 0."""
        address, size = self._allocated.get((stream, capture), (0, 0))
        if size >= count:
            return address
        with self._lock:
            if self._pool[1] < _SEMAPHORE_BYTES * count:
                self._refill(_SEMAPHORE_BYTES * count)
            address, remaining = self._pool
            self._pool = address + _SEMAPHORE_BYTES * count, remaining - _SEMAPHORE_BYTES * count
            self._allocated[stream, capture] = address, count
        return address

    def _refill(self, minimum: int) -> None:
        size = max(minimum, _SEMAPHORE_POOL_BYTES)
        self._pool = alloc_zeroed(size), size


_semaphores: dict[int, Semaphores] = {}


def semaphores_of(device: int) -> Semaphores:
    """Return the semaphores of ``device``, which must be the current device; they are allocated at the first call."""
    if device not in _semaphores:
        _semaphores[device] = Semaphores()
    return _semaphores[device]


def alloc_workspace(size: int) -> Tensor:
    """Return ``size`` bytes of the current device for the next launch on the current stream; keep the tensor until the
    launch.

    The memory comes from torch's allocator, like an op's own temporaries: its next user on the stream runs after the
    launch, and memory that is allocated while a graph is captured belongs to that graph.
    """
    return empty_cuda((size,), (1,), torch.uint8)


class LoadedCubin:
    """A cubin; calling it with a device index returns the Function on that device, which the first call loads."""

    def __init__(self, header: Header, cubin: bytes) -> None:
        self.header, self._cubin = header, cubin
        self._functions: dict[int, Function] = {}
        self(torch.cuda.current_device())  # load now: a module cannot be loaded while a graph is captured

    def __call__(self, device: int) -> Function:
        function = self._functions.get(device)
        if function is None:
            function_class = HipFunction if self.header.arch else Function
            function = self._functions[device] = function_class(self.header, self._cubin, device)
        return function


class LaunchPlan(NamedTuple):
    """The source of a function's launches: Python lines and expressions.

    setup: lines that run once for each M; they may use kernel, m and device. grid, values: expressions of the grid's
    two sizes, and of the arguments that are no addresses, by name; they may use what ``setup`` assigns. lines: run in
    every launch; they may use m, a_ptr, b_ptr, stream and ``by_m``. by_m: names that ``setup`` assigns, or that
    ``names`` has for this function but not for others of the kernel. addresses, descriptors: the arguments for A and B,
    and the expressions of the addresses that are passed: the operands' own, or those of their descriptors. names: the
    other objects that the source uses.
    """

    setup: Sequence[str]
    grid: tuple[str, str]
    values: Mapping[str, str]
    lines: Sequence[str] = ()
    by_m: Sequence[str] = ()
    addresses: Mapping[str, str] = MappingProxyType({})
    descriptors: Mapping[str, str] = MappingProxyType({})
    names: Mapping[str, Any] = MappingProxyType({})


class GpuKernel(AnyBatch, Kernel):
    """Cubins with the data that launching them takes. A kernel takes any M, and any batch, that fits its 32-bit
    arguments and its grid (``bind`` raises KernelError beyond). Matrices that start off a 16-byte boundary are copied.

    aligns_batches: whether the kernel assumes that every matrix of a batch starts on such a boundary; a batch whose
    stride is not a multiple of 16 bytes is then copied.
    """

    aligns_batches: ClassVar[bool] = False

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__()
        self.problem, self.candidate = problem, candidate
        self.header, cubin = parts[-1]
        self._bm, self._bn, self._k_block = self._tile(dict(candidate.config))
        self.packing = self.layout_of(problem, candidate)
        self.function = LoadedCubin(self.header, cubin)
        self._bound: dict[tuple[int, ...], Launch] = {}
        # What makes launches, and by cubin what makes the values of an M, by what differs between launches.
        self._makers: dict[Any, tuple[Callable[..., Launch], dict[LoadedCubin, Callable[..., Any]]]] = {}
        self._checked_m = 0  # the largest M that is known to fit
        self._tiles_n = -(-problem.n // self._bn)
        is_fixed = problem.a.layout.order == problem.out.order == "row"
        self._fixed_leads = leading_dimensions(problem, problem.m) if is_fixed else None
        self._shares_tiles = "lock_ptr" in self.header.arguments
        if self._shares_tiles:
            device = torch.cuda.current_device()
            self.workspace_bytes, _ = self._partial_sum_sizes(problem.m, device)
            semaphores_of(device)

    @classmethod
    def layout_of(cls, problem: Problem, candidate: Candidate) -> str | None:
        """Return the layout in which a candidate's kernel takes its weight; None for the raw weight."""
        if problem.b.dtype != "int4":
            return None
        return int4_layout(int(dict(candidate.config).get("bk", INT4_BLOCKS[0])))

    def _leads(self, m: int) -> tuple[int, int, int]:
        """Return ``leading_dimensions`` for m rows."""
        return self._fixed_leads or leading_dimensions(self.problem, m)

    def _tile(self, config: dict[str, Any]) -> tuple[int, int, int]:
        """Return the rows and columns of a tile of the output, and the elements of K in a block."""
        return int(config["bm"]), int(config["bn"]), int(config["bk"])

    @property
    def can_overlap(self) -> bool:
        return self.function(torch.cuda.current_device()).pdl

    def pack(self, b: Any) -> PackedWeight:
        return shuffle_int4(b, self.problem, self._k_block)

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.bind(a, b, aux)(out, a, *_operand_tensors(b), *aux)

    def bind(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch:
        m = a.shape[-2]
        if self.problem.family != "bmm":
            self._require_fits(m)
            return self.bind_any_m(a, b, aux)
        kernel, strides = self.of_batch(a.shape[0]), (a.stride(0), b.stride(0))
        kernel._require_fits(m)
        return kernel._bind_batches(m, a.device.index, strides, self._names_behind(b))

    def bind_any_m(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch:
        problem, steps = self.problem, _tensor_steps(self.problem)
        sizes = {
            f"ld{index}": tensor.stride(-2) if tensor.shape[-2] > 1 else problem.n
            for (index, step), tensor in zip(steps, aux, strict=True) if step.axis == "full"
        }  # fmt: skip
        return self._cached_launch(a.device.index, sizes, self._names_behind(b), launch_aligned)

    def _names_behind(self, b: Any) -> tuple[str, ...]:
        """Return the names of the arguments whose tensors follow A and the matrix B in a launch."""
        quantization = ("s_ptr", "z_ptr")[: len(_operand_tensors(b)) - 1]
        return (*quantization, *(f"t{index}" for index, _ in _tensor_steps(self.problem)))

    def _bind_batches(self, m: int, device: int, strides: tuple[int, int], names: Sequence[str]) -> Launch:
        """Return the launch for these batch strides of A and B (a batched epilogue takes no matrices)."""
        layouts = batch_layouts(self.problem, m, strides, self.aligns_batches)
        copy_launch = batched_launch(lambda *copy_strides: self._bind_batches(m, device, copy_strides, names), *layouts)
        if not all(layout.fits for layout in layouts):
            return copy_launch
        sizes = {"batch_a": strides[0], "batch_b": strides[1], "batch_c": m * self._leads(m)[2]}
        return self._cached_launch(device, sizes, names, lambda _, *operands: copy_launch(*operands))

    def _cached_launch(
        self, device: int, sizes: dict[str, int], names: Sequence[str], misaligned: Callable[..., None]
    ) -> Launch:
        """Return the launch for these sizes and any M, from the kernel's cache where it has one.

        misaligned: a function that the launch calls with itself and the operands where one of them starts off a 16-byte
        boundary.
        """
        key = (device, self.overlap, *sizes.values())
        launch = self._bound.get(key)
        if launch is None:
            if len(self._bound) >= _MAX_LAUNCHES:
                self._bound.clear()
            launch = self._bound[key] = self._make_launch(device, sizes, names, misaligned)
        return launch

    def _partial_sum_sizes(self, m: int, device: int) -> tuple[int, int]:
        """Return the bytes of partial sums and the number of semaphores for M rows.

        Only for kernels whose programs share tiles (those with the arguments ``ws_ptr`` and ``lock_ptr``).
        """
        raise NotImplementedError(f"{self.candidate.id} leaves no partial sums")

    def _make_launch(
        self, device: int, sizes: dict[str, int], names: Sequence[str], misaligned: Callable[..., None]
    ) -> Launch:
        """Make the function that ``bind`` returns. It reads M from the output.

        sizes: the arguments that follow from the operands' strides. names: the names of the arguments whose tensors
        follow A and B. misaligned: see ``_cached_launch``.
        """
        function = self.function(device)
        uses_pdl, names_of_sizes = function.pdl and self.overlap, tuple(sizes)
        source = (function, uses_pdl, names, names_of_sizes)
        makers = self._makers.get(source)
        if makers is None:  # they are the same for all strides, and for all batches
            makers = self._makers[source] = self._launch_maker(function, uses_pdl, names, device), {}
        make, of_cubins = makers
        known: dict[int, Any] = {}

        def values_of(cubin: LoadedCubin) -> Callable[[int], Any]:
            maker = of_cubins.get(cubin)
            if maker is None:
                maker = of_cubins[cubin] = self._values_maker(cubin(device), uses_pdl, names_of_sizes, device)
            result: Callable[[int], Any] = maker(self, known, *sizes.values())
            return result

        make_values = self._by_copy(values_of, device) or values_of(self.function)
        if self.problem.family != "bmm":
            make_values(self.problem.m)  # the source is compiled now, so that no launch waits for it
        return make(self, misaligned, known.get, make_values)

    def _by_copy(self, values_of: Callable[[LoadedCubin], Any], device: int) -> Callable[[int], Any] | None:
        """Return a function from M to ``values_of(cubin)(M)`` of the cubin that serves M; None where one serves all M.
        All of a kernel's cubins have the same arguments."""
        return None

    def _launch_maker(self, function: Function, pdl: bool, names: Sequence[str], device: int) -> Callable[..., Launch]:
        """Return a function that makes launches. It takes the kernel, ``misaligned``, and two functions from M to the
        values of ``_names_by_m``: the first returns None where the second is to be called. pdl: whether launches may
        use PDL."""
        plan, arguments = self._launch_plan(function, device), self.header.arguments
        extra_parameters = "".join(f", {name}" for name in names)
        reads_capture = pdl or self._shares_tiles
        # The variables for the tensors' addresses have names that no tensor has.
        addresses = ["c_ptr", "a_ptr", "b_ptr", *(f"{name}_at" for name in names)]
        pointers = ["out.data_ptr()", "a.data_ptr()", "b.data_ptr()", *(f"{name}.data_ptr()" for name in names)]
        # The tensors of a norm are loaded 16 bytes at a time, as A is; those of other steps one element at a time.
        vector_loads = ["c_ptr", "a_ptr", "b_ptr", *(f"t{index}_at" for index in range(len(self.problem.norm_steps)))]
        written = {"c_ptr": "c_ptr", **plan.addresses, **{name: f"{name}_at" for name in names}}
        lines = [*plan.lines]
        if self._shares_tiles:
            lines += [
                "sums, capture = alloc_workspace(sum_bytes), capture_of(stream).id if captured else 0",
                "sums_ptr, locks_ptr = sums.data_ptr(), locks.of(stream, capture, lock_count)",
            ]
            written |= {"ws_ptr": "sums_ptr", "lock_ptr": "locks_ptr"}
        return function_maker(
            "launch",
            ("kernel", "misaligned", "known_values", "make_values"),
            f"def launch(out, a, b{extra_parameters}):",
            "    m = out.numel() // row_elements",
            f"    {', '.join(self._names_by_m(plan))} = known_values(m) or make_values(m)",
            "    args = function.args",
            "    memory, slots, config, go, parameters = args.prepared",
            f"    {', '.join(addresses)} = {', '.join(pointers)}",
            f"    if {' or '.join(f'{address} < {LOWEST_USUAL_ADDRESS}' for address in addresses[1:])}:",
            f"        require(a, b{extra_parameters})",
            f"    if ({' | '.join(vector_loads)}) & {MISALIGNED_MASK}:",
            f"        return misaligned(launch, out, a, b{extra_parameters})",
            f"    stream = stream_of({device})",
            *(["    captured = capturing()"] if reads_capture else []),
            *(f"    {line}" for line in lines),
            "    memory[:] = head",
            "    config.stream = stream",
            *(f"    slots[{arguments.index(name)}] = {address}" for name, address in written.items()),
            *(f"    parameters[{arguments.index(name)}] = {address}" for name, address in plan.descriptors.items()),
            f"    status = {'args.launch_captured(stream, b, out) if captured else go()' if pdl else 'go()'}",
            "    if status:",
            "        function.retry_or_raise(status, go)",
            setup=["row_elements = kernel.problem.columns * kernel.problem.batch"],
            require=require_kernel_operands, stream_of=torch_compat.stream_of, capturing=torch_compat.is_capturing,
            capture_of=CaptureState.of, alloc_workspace=alloc_workspace,
            locks=semaphores_of(device) if self._shares_tiles else None, device=device, **plan.names,
        )  # fmt: skip

    def _names_by_m(self, plan: LaunchPlan) -> list[str]:
        """Return the names of what a launch reads that depends on M."""
        return ["function", "head", *plan.by_m, *(["sum_bytes", "lock_count"] if self._shares_tiles else [])]

    def _values_maker(self, function: Function, pdl: bool, sizes: Sequence[str], device: int) -> Callable[..., Any]:
        """Return a function of the kernel, a dict and the values of ``sizes``. Its result is a function from M to the
        values of ``_names_by_m``, which it adds to the dict. sizes: the names of the arguments that follow from
        strides. pdl: as for ``_launch_maker``."""
        plan = self._launch_plan(function, device)
        setup = [*plan.setup, f"grid_x, grid_y = {', '.join(plan.grid)}"]
        if self._shares_tiles:
            setup.append("sum_bytes, lock_count = kernel._partial_sum_sizes(m, device)")
        values = {**plan.values, **{name: name for name in sizes}}
        if function.pdl:
            # With many blocks it takes longer to let the next kernel begin once the last of them has
            # (docs/notes/cuda.md).
            values[PDL_ARGUMENT] = f"{NEXT_LATE} if grid_x * grid_y > early_trigger_blocks else 0"
        packed = ", ".join(values.get(name, "0") for name in self.header.arguments)
        return function_maker(
            "values_of",
            ("kernel", "known", *sizes),
            "def values_of(m):",
            "    if m > kernel._checked_m:",
            "        kernel._require_fits(m)",
            *(f"    {line}" for line in setup),
            f"    head = pack_head(grid_x, grid_y, *fixed_head, {packed})",
            f"    if len(known) >= {_MAX_SIZES}:",
            "        known.clear()",
            f"    values = known[m] = {', '.join(self._names_by_m(plan))}",
            "    return values",
            function=function, pack_head=function.pack_head, fixed_head=function.fixed_head, device=device,
            early_trigger_blocks=function.early_trigger_blocks, **plan.names,
        )  # fmt: skip

    def _require_fits(self, m: int) -> None:
        """Raise KernelError where the kernel cannot be launched for M rows."""
        reason = self._too_large(m)
        if reason:
            raise KernelError(f"{self.candidate.id} cannot be launched: {reason}")
        self._checked_m = max(m, self._checked_m)

    def _too_large(self, m: int) -> str:
        """Return why the kernel cannot be launched for M rows, in words; empty when it can."""
        if m > INDEX_LIMIT or -(-m // self._bm) * self._tiles_n > INDEX_LIMIT:
            return f"{m} rows, and their tiles, must be counted in 32 bits"
        return ""

    @abstractmethod
    def _launch_plan(self, function: Function, device: int) -> LaunchPlan:
        """Return the source of the launches of a function on its device."""

    def _common_values(self) -> tuple[list[str], dict[str, str]]:
        """Return lines and values of a ``LaunchPlan``: the sizes, and the leading dimensions of A and the output."""
        values = {"M": "m", "N": str(self.problem.n), "K": str(self.problem.k)}
        if self._fixed_leads is None:
            return ["lda, _, ldc = kernel._leads(m)"], {**values, "lda": "lda", "ldc": "ldc"}
        lda, _, ldc = self._fixed_leads
        return [], {**values, "lda": str(lda), "ldc": str(ldc)}


def _operand_tensors(b: Any) -> tuple[Tensor, ...]:
    """Return the tensors of B: the matrix, then its scales and zero points if it has them."""
    if isinstance(b, PackedWeight):
        return b.data
    if isinstance(b, QuantWeight):
        return (b.data, b.scale) if b.zero_point is None else (b.data, b.scale, b.zero_point)
    return (b,)


def _tensor_steps(problem: Problem) -> list[tuple[int, Step]]:
    """Return the epilogue's steps that take a tensor, each with its index."""
    return [(index, step) for index, step in enumerate(problem.epilogue) if step.takes_tensor]


class GridKernel(GpuKernel):
    """A kernel that takes its operands' addresses and whose programs each compute the tile at their position in the
    grid (``split`` programs share a tile's K)."""

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        self._split = int(dict(candidate.config)["split"])
        super().__init__(problem, candidate, parts)

    def _tiles(self, m: int) -> int:
        return -(-m // self._bm) * self._tiles_n * self.problem.batch

    def _too_large(self, m: int) -> str:
        if self.grid(m)[0] > INDEX_LIMIT or self.problem.batch > MAX_BATCH:
            return f"a grid of {self.grid(m)} thread blocks; CUDA takes ({INDEX_LIMIT}, {MAX_BATCH})"
        return super()._too_large(m)

    def grid(self, m: int) -> tuple[int, int]:
        """Return the grid for M rows: (tiles times parts of K, batches)."""
        return self._tiles(m) // self.problem.batch * self._split, self.problem.batch

    def _launch_plan(self, function: Function, device: int) -> LaunchPlan:
        setup, values = self._common_values()
        rows = f"-(-m // {self._bm})"
        return LaunchPlan(
            setup, (f"{rows} * {self._tiles_n * self._split}", "kernel.problem.batch"),
            {**values, "ldb": str(self._leads(self.problem.m)[1])}, addresses={"a_ptr": "a_ptr", "b_ptr": "b_ptr"},
        )  # fmt: skip


class TmaKernel(GpuKernel):
    """A persistent kernel, whose programs loop over the tiles. It reads A and B through TMA descriptors, which are
    cached.

    clips_boxes: whether the kernel expects TMA to load M rows of A where that is less than its boxes have.
    """

    clips_boxes: ClassVar[bool] = False

    def __init__(self, problem: Problem, candidate: Candidate, parts: Sequence[tuple[Header, bytes]]) -> None:
        super().__init__(problem, candidate, parts)
        self._maps: dict[Any, TensorMaps] = {}  # by the arguments of ``_maps_of``

    @abstractmethod
    def _programs(self, function: Function) -> tuple[str, dict[str, int]]:
        """Return an expression of the number of programs for m rows, over which the tiles are distributed, and the
        numbers that it uses by name."""

    @property
    def _ldb(self) -> int:
        """Return the leading dimension of B as the kernel reads it."""
        return self._leads(self.problem.m)[1]

    def _converter(self, device: int) -> Callable[[int, int], Tensor] | None:
        """Return a function that converts B at an address, on a stream, into the B that the kernel reads; None where
        the kernel reads B itself."""
        return None

    def _maps_of(self, tma: Tma, lead: int, clips_boxes: bool = False) -> TensorMaps:
        """Return the descriptors of A, or of B, for all functions that read it alike."""
        key = (tma, lead, clips_boxes)
        if key not in self._maps:
            # K columns, except for packed int4: two of its elements share a byte, so that it has ``lead`` columns.
            self._maps[key] = TensorMaps(tma, min(self.problem.k, lead), lead, clips_boxes)
        return self._maps[key]

    def _launch_plan(self, function: Function, device: int) -> LaunchPlan:
        (setup, values), ldb = self._common_values(), self._ldb
        k, lda = str(self.problem.k), self._leads(self.problem.m)[0]  # A is row-major
        values |= {
            "PROGRAMS": "programs", "a_desc.shape0": "m", "a_desc.shape1": k, "a_desc.stride0": str(lda),
            "a_desc.stride1": "1", "b_desc.shape0": str(self.problem.n), "b_desc.shape1": k, "b_desc.stride0": str(ldb),
            "b_desc.stride1": "1",
        }  # fmt: skip
        convert, tma = self._converter(device), function.header.descriptors
        converting = ["converted = convert(b_ptr, stream)", "b_ptr = converted.data_ptr()"]
        programs, numbers = self._programs(function)
        return LaunchPlan(
            [*setup, f"programs = {programs}"], ("programs", "1"), values,
            # In variables, since they must stay alive until the launch.
            [
                *([] if convert is None else converting),
                f"a_map, b_map = a_maps[m, a_ptr], b_maps[{self.problem.n}, b_ptr]",
            ],
            by_m=("a_maps", "b_maps"),
            descriptors={"a_desc": "a_map.address", "b_desc": "b_map.address"},
            names={
                "a_maps": self._maps_of(tma["a_desc"], lda, self.clips_boxes),
                "b_maps": self._maps_of(tma["b_desc"], ldb), "convert": convert, **numbers,
            },
        )  # fmt: skip
