"""The CUDA driver by ctypes: loading cubins and launching them, with no compiler and no Triton at run time.

A launch writes what changed since the last one (addresses) into its thread's Block and calls ``cuLaunchKernelEx``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import KernelError
from ..base import OVERLAP
from .artifact import B_EARLY, FOLLOWING, NEXT_LATE, Header, Tma

_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED = 48 << 10  # beyond it a kernel must ask
_NO_CONTEXT = 201
_MAP_BYTES = 128
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_OVERLAPPING = 12030  # the first driver (CUDA 12.3) whose graphs know of kernels that overlap
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_FEW_BLOCKS = 4  # of a multiprocessor: with more small ones the next kernel does best late, too


@functools.cache
def driver() -> Any:
    """libcuda; its functions keep the interpreter's lock, since they return at once. Raises KernelError without it."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
        return library
    except OSError as error:
        raise KernelError(f"the NVIDIA driver's library cannot be loaded: {error}") from error


@functools.cache
def _version() -> int:
    """Of CUDA, as the driver has it: 12030 for 12.3."""
    found = ctypes.c_int()
    return 0 if driver().cuDriverGetVersion(ctypes.byref(found)) else found.value


def _check(status: int, doing: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        words = (text.value or b"unknown error").decode()
        raise KernelError(f"{doing}: CUDA error {status} ({words})")


class Function:
    """A kernel of a cubin, loaded for one device; a Block launches it. Modules are never unloaded."""

    def __init__(self, header: Header, cubin: bytes, device: int) -> None:
        self.header, self.device = header, device
        self.threads, self.shared = header.lanes * header.warps, header.shared
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current on this thread
            self.handle = self._load(cubin)
            self.follows = self._follows()
            # Asked here, where the context is current: a Block may be made on a thread that has none yet.
            self.few = self._few() if self.follows else 0

    def _load(self, cubin: bytes) -> int:
        """The kernel's handle."""
        header, module, handle = self.header, ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {header.name}")
        name = header.name.encode()
        _check(driver().cuModuleGetFunction(ctypes.byref(handle), module, name), f"finding {header.name}")
        if header.shared > _STATIC_SHARED:
            status = driver().cuFuncSetAttribute(handle, _SHARED_LIMIT, header.shared)
            _check(status, f"asking for {header.shared} bytes of shared memory")
        return int(handle.value or 0)

    def _follows(self) -> bool:
        """Whether it may begin before the kernel before it has ended."""
        return self.header.waits and _version() >= _OVERLAPPING

    def _few(self) -> int:
        """How many blocks begin at a time, or a few for each multiprocessor."""
        beside = ctypes.c_int()
        asked = (ctypes.c_void_p(self.handle), self.threads, ctypes.c_size_t(self.shared))
        status = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(beside), *asked)
        _check(status, f"asking how many blocks of {self.header.name} fit")
        multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
        return int(min(beside.value, _FEW_BLOCKS) * multiprocessors)

    def failed(self, status: int, launch: Callable[[], int]) -> None:
        """Launch once more where that may help; raises KernelError where the driver refuses."""
        if status == _NO_CONTEXT:  # a thread that has not used CUDA yet
            torch.cuda.current_stream(self.device).query()
            status = launch()
        if status:
            _check(status, f"launching {self.header.name}")

    def launcher(self, config: Any, parameters: int) -> Callable[[], int]:
        """What launches it as a ``_Config`` says, with the arguments whose addresses lie at ``parameters``, and returns
        the driver's status."""
        # Made once: what ctypes has to convert in a call costs as much as the call.
        fixed = (ctypes.addressof(config), self.handle, parameters)
        return functools.partial(driver().cuLaunchKernelEx, *map(ctypes.c_void_p, fixed), None)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


_ATTRIBUTE = _Attribute(_OVERLAP, 0, 1)


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def zeros(size: int) -> int:
    """The address of so many zero bytes on the current device, for as long as the process lives.

    Not of torch's allocator: what that gives while a graph is captured or warmed up may be the graph's. Works while one
    is captured, too.
    """
    address, stream, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    library, doing = driver(), f"asking for {size} bytes"
    _check(library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), doing)
    try:
        _check(library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), doing)
        _check(library.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), doing)
        _check(library.cuMemsetD8Async(address, ctypes.c_ubyte(0), ctypes.c_size_t(size), stream), doing)
        _check(library.cuStreamSynchronize(stream), doing)
        _check(library.cuStreamDestroy_v2(stream), doing)
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return int(address.value or 0)


class Capture(NamedTuple):
    """What a stream is being captured into. number: which no other capture has (0: the stream is in none); ends: the
    nodes that its next one will come after."""

    number: int
    ends: tuple[int, ...]

    @classmethod
    def of(cls, stream: int) -> Capture:
        status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        places = [ctypes.byref(held) for held in (status, number, graph, nodes, count)]
        found = driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *places)
        _check(found, "asking what a stream is captured into")
        if status.value != _CAPTURING:
            return cls(0, ())
        return cls(number.value, tuple(nodes[place] or 0 for place in range(count.value)))


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of memory, from ``first`` up to ``end``, between which a tensor lies."""

    first: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> Span:
        steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.data_ptr(), tensor.data_ptr() + (steps + 1) * tensor.element_size())

    def meets(self, other: Span) -> bool:
        return self.first < other.end and other.first < self.end


@dataclass(frozen=True, slots=True)
class _Last:
    """The last kernel of a stream that was captured: where the capture stood behind it, and what it writes."""

    place: Capture
    writes: Span


_last: dict[int, _Last] = {}


class Block(threading.local):
    """A prepared launch; every thread has its own. values: of all arguments but descriptors (0 in their places),
    pointers as integers.

    held: slots (the arguments, 8 bytes each), config (its ``stream`` says where), launch, which launches what they hold
    and returns CUDA's status (what is not 0 is for ``Function.failed``), and parameters: where the arguments lie, in
    which those of descriptors are put.
    """

    def __init__(self, function: Function, grid: tuple[int, int], values: Sequence[int]) -> None:
        names, scratch = function.header.arguments, function.header.scratch
        slots = (ctypes.c_uint64 * len(names))(*values)
        self._unused = (ctypes.c_uint64 * max(1, scratch))()  # what Triton wants and its kernels do not use
        own = [ctypes.addressof(slots) + 8 * place for place in range(len(names))]
        addresses = (*own, *([ctypes.addressof(self._unused)] * scratch))
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        config = _Config(*grid, 1, function.threads, 1, 1, function.shared)
        config.attributes = ctypes.addressof(_ATTRIBUTE)  # of which there are 0
        launch = function.launcher(config, ctypes.addressof(parameters))
        self.held: tuple[Any, _Config, Callable[[], int], Any] = (slots, config, launch, parameters)
        if function.follows:
            # Letting the next one begin when the last of many blocks has takes longer (docs/cuda.md).
            self._following = names.index(FOLLOWING)
            slots[self._following] = NEXT_LATE if grid[0] * grid[1] > function.few else 0

    def capture(self, stream: int, b: Tensor, out: Tensor) -> int:
        """``launch`` of a function that ``follows`` into a graph that is being captured from the stream; B and C of the
        product: ``b``, ``out``.

        A kernel that comes right behind one of ours may begin as soon as that one's blocks all have (programmatic
        dependent launch), and read B early, unless it is what that one writes. Whatever comes before the two has ended
        by then: the first one has waited for it. Nowhere else is it known what comes before, and behind other kernels,
        which do not say when the next may begin, it would only take longer (docs/cuda.md).
        """
        slots, config, launch, _ = self.held
        if os.environ.get(OVERLAP) == "0":
            return launch()
        at, last = self._following, _last.pop(stream, None)
        usual = slots[at]
        if last is not None and last.place == Capture.of(stream):
            config.count = 1
            if not last.writes.meets(Span.of(b)):
                slots[at] = usual | B_EARLY
        status = launch()
        config.count, slots[at] = 0, usual
        place = Capture.of(stream)
        if not status and len(place.ends) == 1:
            _last[stream] = _Last(place, Span.of(out))
        return status


class Map:
    """A TMA descriptor (CUtensorMap) of a row-major matrix [rows, columns]. Raises KernelError when CUDA refuses it."""

    def __init__(self, tma: Tma, pointer: int, rows: int, columns: int, lead: int) -> None:
        self._memory = (ctypes.c_uint8 * (2 * _MAP_BYTES))()
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _MAP_BYTES
        status = driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            ctypes.c_int(tma.dtype),
            ctypes.c_uint32(2),
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * 2)(columns, rows),
            (ctypes.c_uint64 * 2)(lead * tma.element, lead * tma.element * rows),
            (ctypes.c_uint32 * 2)(tma.block[1], tma.block[0]),
            (ctypes.c_uint32 * 2)(1, 1),
            ctypes.c_int(0),
            ctypes.c_int(tma.swizzle),
            ctypes.c_int(_L2_128B),
            ctypes.c_int(0),
        )
        _check(status, f"describing a [{rows}, {columns}] matrix to TMA")
