"""A CUDA driver that launches nothing, and says what it was asked to launch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmtune.backends.gpu import driver, kernel
from gemmtune.core import torch_compat

STREAM = 7


class Driver:
    """What is launched, by name of the kernel: the grid, and every argument's eight bytes (``places``: where the last
    launch's lie).

    overlaps: whether each launch may begin before the kernel before it has ended. capture: the number of the capture
    that the stream is in, or 0; nodes: what was captured. beside: blocks that a multiprocessor has room for. run:
    called with each launch's grid and arguments, so that a test may do what a GPU would. temporaries: what launches
    asked torch's allocator for; memory: what they asked the driver for; mode: of capturing, on this thread.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int], list[int]]] = []
        self.names: list[str] = []
        self.arguments: dict[str, int] = {}
        self.statuses: list[int] = []
        self.starts: list[int] = []
        self.threads, self.shared = 128, 0
        self.places: list[int] = []
        self.overlaps: list[int] = []
        self.capture, self.version, self.beside = 0, 13000, 2
        self.nodes: list[int] = []
        self.run: Callable[[tuple[int, int], list[int]], None] | None = None
        self.temporaries: list[torch.Tensor] = []
        self.memory: list[Any] = []
        self.mode = 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        return 0

    def cuModuleGetFunction(self, handle: Any, module: Any, name: bytes) -> int:
        self.names.append(name.decode())
        handle._obj.value = len(self.names)
        return 0

    def cuTensorMapEncodeTiled(self, place: Any, dtype: Any, rank: Any, pointer: Any, *rest: Any) -> int:
        """What a descriptor says here: the address of its matrix, bytes an element, columns, rows, bytes from one row
        to the next, columns and rows of a box."""
        columns, rows = rest[0]
        words = (pointer.value, 1 << dtype.value, columns, rows, rest[1][0], *rest[2])
        (ctypes.c_uint64 * len(words)).from_address(place.value)[:] = words
        return 0

    def cuFuncSetAttribute(self, handle: Any, attribute: int, value: int) -> int:
        self.shared = value
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, beside: Any, handle: Any, threads: int, shared: Any) -> int:
        assert threads == self.threads
        beside._obj.value = self.beside
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        return 0

    def cuLaunchKernelEx(self, config: Any, handle: Any, start: Any, extra: None) -> int:
        if self.statuses:
            return self.statuses.pop(0)
        asked = driver._Config.from_address(config.value)
        assert (asked.z, asked.threads_x, asked.threads_y, asked.threads_z) == (1, self.threads, 1, 1)
        assert (asked.stream, extra) == (STREAM, None)
        attributes = (driver._Attribute * asked.count).from_address(asked.attributes)
        assert [(one.id, one.value) for one in attributes] == [(6, 1)] * asked.count  # that it may overlap the last one
        self.overlaps.append(asked.count)
        assert asked.shared == self.shared or (not self.shared and asked.shared <= 48 << 10)  # more must be asked for
        name = self.names[handle.value - 1]
        parameters = (ctypes.c_void_p * self.arguments[name]).from_address(start.value)
        self.places = list(parameters)
        values = [ctypes.c_uint64.from_address(address).value for address in self.places]
        self.launches.append((name, (asked.x, asked.y), values))
        self.starts.append(start.value)
        if self.run is not None:
            self.run((asked.x, asked.y), values)
        self.nodes.append(len(self.launches))
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, *places: Any) -> int:
        assert stream.value == STREAM
        status, number, _, nodes, count = places
        status._obj.value, number._obj.value, count._obj.value = self.capture > 0, self.capture, len(self.nodes[-1:])
        self._held = (ctypes.c_void_p * 1)(*self.nodes[-1:])
        nodes._obj.contents = ctypes.c_void_p.from_buffer(self._held)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        assert self.mode == 2  # what a graph being captured allows
        self.memory.append((ctypes.c_ubyte * size.value)(*[1] * min(size.value, 64)))
        address._obj.value = ctypes.addressof(self.memory[-1])
        return 0

    def cuStreamCreate(self, stream: Any, kind: int) -> int:
        assert kind == 1
        stream._obj.value = STREAM + 1
        return 0

    def cuMemsetD8Async(self, address: Any, value: Any, size: Any, stream: Any) -> int:
        assert stream.value == STREAM + 1
        ctypes.memset(address.value, value.value, size.value)
        return 0

    def cuStreamSynchronize(self, stream: Any) -> int:
        assert (self.mode, stream.value) == (2, STREAM + 1)
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        return self.cuStreamSynchronize(stream)

    def temporary(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """In the place of what launches ask torch's allocator by."""
        assert (len(shape), strides, dtype) == (1, (1,), torch.uint8)
        self.temporaries.append(torch.empty(shape, dtype=dtype))
        return self.temporaries[-1]


def simulated(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Such a driver in the place of the real one, and what of torch.cuda launching asks for."""
    made = Driver()
    monkeypatch.setattr(driver, "driver", lambda: made)
    driver._version.cache_clear()
    monkeypatch.setattr(kernel, "empty_cuda", made.temporary)
    monkeypatch.setattr(kernel, "_semaphores", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=6))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch_compat, "stream_of", lambda _: STREAM)
    monkeypatch.setattr(torch_compat, "is_capturing", lambda: made.capture > 0)
    return made
