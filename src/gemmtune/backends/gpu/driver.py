"""The CUDA driver through ctypes: it loads and launches cubins, with no compiler and no Triton at run time.

All launches of a function in a thread share its LaunchArgs: a launch writes its grid and its arguments there and calls
``cuLaunchKernelEx``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.errors import KernelError
from ..base import CAPTURE_FACTS, OVERLAP
from .artifact import B_EARLY, PDL_ARGUMENT, Header, Tma

_STATIC_SHARED = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_MOST_SHARED = 81  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
_RESERVED_SHARED = 111  # CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK
_DEFAULT_SHARED_BYTES = 48 << 10  # a kernel that uses more must ask for it
_NO_CONTEXT = 201
_TENSOR_MAP_BYTES = 128
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B
_PDL_DRIVER_VERSION = 12030  # the first driver (CUDA 12.3) whose graphs support programmatic dependent launch (PDL)
_CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_PDL_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MAX_TENSOR_MAPS = 2048  # of one TensorMaps, each of some 400 bytes
_EARLY_BLOCKS = 8  # of a multiprocessor, at most: with more blocks it is faster to let the next kernel begin late


@functools.cache
def driver() -> Any:
    """Return libcuda. Its functions do not release the interpreter's lock, since they return at once. Raises
    KernelError where it cannot be loaded."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        library.cuLaunchKernelEx.argtypes = [pointer] * 4
        return library
    except OSError as error:
        raise KernelError(f"the NVIDIA driver's library cannot be loaded: {error}") from error


@functools.cache
def _version() -> int:
    """Return the CUDA version that the driver supports, as the driver encodes it: 12030 for 12.3."""
    version = ctypes.c_int()
    return 0 if driver().cuDriverGetVersion(ctypes.byref(version)) else version.value


def _check(status: int, action: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise KernelError(f"{action}: CUDA error {status} ({reason})")


class Function:
    """A kernel of a cubin, loaded for one device. Modules are never unloaded.

    args: the arguments with which each thread launches it. pack_head: returns what of a launch does not depend on
    addresses, the bytes of the LaunchArgs' memory, from the grid's two sizes, ``fixed_head`` and the values of all
    arguments (0 for addresses and descriptors). pdl: whether the kernel may begin before the preceding kernel has ended
    (programmatic dependent launch). early_trigger_blocks: the largest grid whose kernels let the next one begin early;
    0 without PDL. multiprocessors: those of the device.
    """

    def __init__(self, header: Header, cubin: bytes, device: int) -> None:
        self.header, self.device = header, device
        self.threads, self.shared = header.lanes * header.warps, header.shared
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current on this thread
            self.handle = self._load(cubin)
            self.pdl = self._supports_pdl()
            self.multiprocessors = int(torch.cuda.get_device_properties(device).multi_processor_count)
            self.early_trigger_blocks = self._configure(device)
        self.args = LaunchArgs(self)
        self.pack_head = struct.Struct(f"{_CONFIG_FORMAT}{len(header.arguments)}Q").pack
        self.fixed_head = (1, self.threads, 1, 1, self.shared, 0, ctypes.addressof(_PDL_LAUNCH_ATTRIBUTE), 0)

    def _load(self, cubin: bytes) -> int:
        """Load the cubin and return the kernel's handle."""
        header, module, handle = self.header, ctypes.c_void_p(), ctypes.c_void_p()
        _check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {header.name}")
        name = header.name.encode()
        _check(driver().cuModuleGetFunction(ctypes.byref(handle), module, name), f"finding {header.name}")
        if header.shared > _DEFAULT_SHARED_BYTES:
            status = driver().cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, header.shared)
            _check(status, f"asking for {header.shared} bytes of shared memory")
        return int(handle.value or 0)

    def _supports_pdl(self) -> bool:
        """Whether the kernel may begin before the preceding kernel has ended (programmatic dependent launch)."""
        return self.header.waits and _version() >= _PDL_DRIVER_VERSION

    def _configure(self, device: int) -> int:
        """Set the kernel's attributes, and return ``early_trigger_blocks``.

        A LaunchArgs, which needs that number, may be created on a thread that has no context yet.
        """
        resident = self._resident_blocks()
        self._prefer_shared_memory(resident)
        return min(resident, _EARLY_BLOCKS) * self.multiprocessors if self.pdl else 0

    def _resident_blocks(self) -> int:
        """Return how many blocks run on a multiprocessor at a time."""
        resident = ctypes.c_int()
        arguments = (ctypes.c_void_p(self.handle), self.threads, ctypes.c_size_t(self.shared))
        status = driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(ctypes.byref(resident), *arguments)
        _check(status, f"asking how many blocks of {self.header.name} fit")
        return resident.value

    def _prefer_shared_memory(self, blocks: int) -> None:
        """Have multiprocessors divide their memory into shared memory, as much as some blocks need, and L1 cache.

        Without a preference, a kernel that begins while blocks of the preceding one still run takes that one's
        division: one for a single block with 200 KB of shared memory leaves a tenth of the L1 cache to a kernel that
        reads A through it (docs/notes/cuda.md). The driver may ignore the preference.
        """
        static, handle = ctypes.c_int(), ctypes.c_void_p(self.handle)
        _check(driver().cuFuncGetAttribute(ctypes.byref(static), _STATIC_SHARED, handle), "asking for shared memory")
        block = static.value + self.shared + self._device_attribute(_RESERVED_SHARED)
        percent = -(-100 * blocks * block // self._device_attribute(_MOST_SHARED))
        driver().cuFuncSetAttribute(handle, _SHARED_CARVEOUT, min(100, percent))

    def _device_attribute(self, attribute: int) -> int:
        """Return an attribute of the device."""
        value = ctypes.c_int()
        status = driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, self.device)
        _check(status, f"asking for attribute {attribute} of the device")
        return value.value

    def retry_or_raise(self, status: int, launch: Callable[[], int]) -> None:
        """Launch once more where that may help; raise KernelError where the driver rejects the launch."""
        if status == _NO_CONTEXT:  # this thread has not used CUDA yet
            torch.cuda.current_stream(self.device).query()
            status = launch()
        if status:
            _check(status, f"launching {self.header.name}")

    def bind_launch(self, config: Any, parameters: int) -> Callable[[], int]:
        """Return a function that launches the kernel with the given ``_Config`` and returns the driver's status.
        parameters: the address of the array of the arguments' addresses."""
        # Converted once: converting arguments in ctypes at each call costs as much as the call.
        addresses = (ctypes.addressof(config), self.handle, parameters)
        return functools.partial(driver().cuLaunchKernelEx, *map(ctypes.c_void_p, addresses), None)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("unused", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


_PDL_LAUNCH_ATTRIBUTE = _Attribute(_PDL_ATTRIBUTE, 0, 1)


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *[(name, ctypes.c_uint) for name in ("x", "y", "z", "threads_x", "threads_y", "threads_z", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


_CONFIG_FORMAT = "7I4xQQI4x"  # of _Config, for struct


def alloc_zeroed(size: int) -> int:
    """Allocate ``size`` zero bytes on the current device and return their address; they are never freed.

    The memory does not come from torch's allocator: memory that torch's allocator returns while a graph is captured or
    warmed up may belong to that graph. The function also works while a graph is captured.
    """
    address, stream, mode = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(_RELAXED)
    library, action = driver(), f"asking for {size} bytes"
    _check(library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), action)
    try:
        _check(library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), action)
        _check(library.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING), action)
        _check(library.cuMemsetD8Async(address, ctypes.c_ubyte(0), ctypes.c_size_t(size), stream), action)
        _check(library.cuStreamSynchronize(stream), action)
        _check(library.cuStreamDestroy_v2(stream), action)
    finally:
        library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return int(address.value or 0)


class CaptureState(NamedTuple):
    """The state of a stream's capture into a CUDA graph. id: the unique number of the capture (0: the stream is not
    being captured). dependencies: the graph nodes that the stream's next node will depend on."""

    id: int
    dependencies: tuple[int, ...]

    @classmethod
    def of(cls, stream: int) -> CaptureState:
        status, id, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
        nodes, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_size_t()
        results = [ctypes.byref(result) for result in (status, id, graph, nodes, count)]
        query_status = driver().cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *results)
        _check(query_status, "asking what a stream is captured into")
        if status.value != _CAPTURING:
            return cls(0, ())
        return cls(id.value, tuple(nodes[index] or 0 for index in range(count.value)))


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """The memory range of a tensor: addresses from ``start`` up to, but without, ``end``."""

    start: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryRange:
        last_element = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return cls(tensor.data_ptr(), tensor.data_ptr() + (last_element + 1) * tensor.element_size())

    def overlaps(self, other: MemoryRange) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(frozen=True, slots=True)
class _LastKernel:
    """The last kernel that was captured from a stream: the capture's state after it, and the memory that it writes."""

    position: CaptureState
    writes: MemoryRange


_last_kernels: dict[int, _LastKernel] = {}


def record_captured(stream: int, out: Tensor) -> None:
    """Record that the kernel that was captured last from a stream signals when the next one may begin, after all work
    in front of it has ended, and writes ``out`` alone. Nothing is recorded where the stream is not captured."""
    position = CaptureState.of(stream)
    if len(position.dependencies) == 1:
        _last_kernels[stream] = _LastKernel(position, MemoryRange.of(out))


_INDUCTOR_KERNELS = (b"triton_poi_", b"triton_red_", b"triton_per_")  # pointwise, reductions, persistent reductions
_KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_NODE_PARAMETERS_WORDS = 16  # at least the size of CUDA_KERNEL_NODE_PARAMS, whose first word is the function


def _follows_inductor(position: CaptureState) -> bool:
    """Whether the last captured node is a kernel of Inductor's, by its name. False where the driver does not tell."""
    if len(position.dependencies) != 1:
        return False
    library, node, kind = driver(), ctypes.c_void_p(position.dependencies[0]), ctypes.c_int(-1)
    if library.cuGraphNodeGetType(node, ctypes.byref(kind)) or kind.value != _KERNEL_NODE:
        return False
    parameters, name = (ctypes.c_void_p * _NODE_PARAMETERS_WORDS)(), ctypes.c_char_p()
    if library.cuGraphKernelNodeGetParams_v2(node, parameters) or not parameters[0]:
        return False
    if _version() < _PDL_DRIVER_VERSION or library.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(parameters[0])):
        return False
    return (name.value or b"").startswith(_INDUCTOR_KERNELS)


class LaunchArgs(threading.local):
    """The grid and the arguments with which a thread launches a function; every thread has its own.

    prepared: a tuple of memory (all of which a launch replaces by the bytes of ``Function.pack_head``), slots (the
    arguments in it, 8 bytes each, for addresses), config (whose ``stream`` the launch sets), launch (a function that
    launches the kernel and returns CUDA's status; pass a status other than 0 to ``Function.retry_or_raise``), and
    parameters (the array of the arguments' addresses, into which the launch writes the addresses of descriptors).
    """

    def __init__(self, function: Function) -> None:
        names, scratch = function.header.arguments, function.header.scratch
        memory = (ctypes.c_uint8 * (ctypes.sizeof(_Config) + 8 * len(names)))()
        config = _Config.from_buffer(memory)
        slots = (ctypes.c_uint64 * len(names)).from_buffer(memory, ctypes.sizeof(_Config))
        # Scratch pointers that Triton adds and its kernels do not use.
        self._unused = (ctypes.c_uint64 * max(1, scratch))()
        start = ctypes.addressof(slots)
        addresses = (*range(start, start + 8 * len(names), 8), *([ctypes.addressof(self._unused)] * scratch))
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        launch = function.bind_launch(config, ctypes.addressof(parameters))
        self.prepared: tuple[memoryview, Any, _Config, Callable[[], int], Any] = (
            memoryview(memory).cast("B"), slots, config, launch, parameters
        )  # fmt: skip
        self._pdl_slot = names.index(PDL_ARGUMENT) if function.pdl else 0

    def launch_captured(self, stream: int, b: Tensor, out: Tensor) -> int:
        """Launch a function with ``pdl`` into the graph that is being captured from the stream, and return CUDA's
        status. b, out: B and C of the product.

        With programmatic dependent launch, a kernel that directly follows one of ``record_captured`` may begin once all
        blocks of that kernel have begun, and may read B early, unless that kernel writes B. All work before that kernel
        has ended by then, since that kernel has waited for it. Outside a capture the preceding work is not known. The
        same holds after Inductor's kernels where they signal (``CAPTURE_FACTS``). After other kernels, which do not
        signal when the next kernel may begin, PDL would only take longer (docs/notes/cuda.md).
        """
        _, slots, config, launch, _ = self.prepared
        if os.environ.get(OVERLAP) == "0":
            return launch()
        slot, last, position = self._pdl_slot, _last_kernels.pop(stream, None), CaptureState.of(stream)
        flags = slots[slot]
        if last is not None and last.position == position:
            config.count = 1
            if not last.writes.overlaps(MemoryRange.of(b)):
                slots[slot] = flags | B_EARLY
        elif CAPTURE_FACTS.inductor_signals and _follows_inductor(position):
            config.count, slots[slot] = 1, flags | B_EARLY
        status = launch()
        config.count, slots[slot] = 0, flags
        if not status:
            record_captured(stream, out)
        return status


_Sizes, _Boxes = ctypes.c_uint64 * 2, ctypes.c_uint32 * 2
# The memory of the arguments that change from one descriptor to the next: the addresses of the descriptor and of the
# matrix, the matrix's columns and rows, the columns and rows that TMA loads at a time.
_ENCODING_FORMAT = "4Q2I"
_MAPS_AT_ONCE = 32  # descriptors whose memory is allocated together


class TensorMap(NamedTuple):
    """A TMA descriptor (CUtensorMap). address: the descriptor's, a multiple of 128. memory: what must stay alive while
    the address is used; several descriptors share it."""

    address: int
    memory: Any


class TensorMaps(dict[tuple[int, int], TensorMap]):
    """The TMA descriptors of row-major matrices with as many columns, by the number of rows and the matrix's address;
    each is made when it is first looked up, which raises KernelError when CUDA rejects it.

    lead: elements from one row to the next. clips_boxes: whether TMA loads no more rows at a time than the matrix has.
    """

    def __init__(self, tma: Tma, columns: int, lead: int, clips_boxes: bool = False) -> None:
        self._box_rows, self._columns, self._clips_boxes = tma.block[0], columns, clips_boxes
        self._box_columns, self._lock, self._unused = tma.block[1], threading.Lock(), _empty_maps()
        # The arguments of CUDA's function are converted once, and their memory is changed where they differ: a first
        # call with an M waits for this.
        self._changes = bytearray(struct.calcsize(_ENCODING_FORMAT))
        self._encode = functools.partial(
            driver().cuTensorMapEncodeTiled,
            ctypes.c_void_p.from_buffer(self._changes, 0),
            ctypes.c_int(tma.dtype),
            ctypes.c_uint32(2),
            ctypes.c_void_p.from_buffer(self._changes, 8),
            _Sizes.from_buffer(self._changes, 16),
            (ctypes.c_uint64 * 1)(lead * tma.element),
            _Boxes.from_buffer(self._changes, 32),
            _Boxes(1, 1),
            ctypes.c_int(0),
            ctypes.c_int(tma.swizzle),
            ctypes.c_int(_L2_128B),
            ctypes.c_int(0),
        )

    def __missing__(self, key: tuple[int, int]) -> TensorMap:
        rows, pointer = key
        with self._lock:
            if not self._unused:
                self._unused = _empty_maps()
            result = self._unused.pop()
            box_rows = min(self._box_rows, rows) if self._clips_boxes else self._box_rows
            _pack_encoding(self._changes, 0, result.address, pointer, self._columns, rows, self._box_columns, box_rows)
            status = self._encode()
        if status:
            _check(status, f"describing a [{rows}, {self._columns}] matrix to TMA")
        if len(self) >= MAX_TENSOR_MAPS:
            self.clear()
        self[key] = result
        return result


_pack_encoding = struct.Struct(_ENCODING_FORMAT).pack_into


def _empty_maps() -> list[TensorMap]:
    """Return descriptors that describe nothing yet."""
    memory = (ctypes.c_uint8 * ((_MAPS_AT_ONCE + 1) * _TENSOR_MAP_BYTES))()
    start = ctypes.addressof(memory)
    first = start + -start % _TENSOR_MAP_BYTES
    return [TensorMap(first + index * _TENSOR_MAP_BYTES, memory) for index in range(_MAPS_AT_ONCE)]
