"""Fake CUDA driver that records launches instead of running kernels."""

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


class FakeDriver:
    """Fake CUDA driver.

    launches: the kernel's name, the grid and the 8-byte values of the arguments of each launch.
    names: the kernels' names; a kernel's handle is its position, counted from 1. cubins: what each was loaded from.
    cubin: what the last launch's kernel was loaded from.
    arguments: the number of arguments of each kernel by name.
    statuses: error codes that the next launches return instead of running.
    argument_arrays: the address of each launch's array of pointers to arguments.
    argument_addresses: the addresses of the last launch's arguments.
    threads, static_shared: threads of a thread block, and its static shared memory in bytes.
    shared: the bytes of dynamic shared memory that each kernel asked for, by handle.
    carveouts: the percentage of a multiprocessor's memory that each kernel wants to be shared memory.
    pdl_flags: for each launch, 1 if it uses PDL (it may begin before the previous kernel has ended), else 0.
    capture: id of the stream's capture, or 0. nodes: the captured nodes. version: the driver's version.
    captured_names: the names of other libraries' captured kernels by node.
    blocks_per_multiprocessor: thread blocks that fit on a multiprocessor.
    run: called with the grid and the arguments of each launch, so that a test can compute a GPU's result.
    workspaces: tensors that launches requested from torch's allocator.
    memory: allocations that launches requested from the driver. mode: the capture mode of this thread.
    """

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int], list[int]]] = []
        self.names: list[str] = []
        self.arguments: dict[str, int] = {}
        self.statuses: list[int] = []
        self.argument_arrays: list[int] = []
        self.threads, self.static_shared = 128, 0
        self.shared: dict[int, int] = {}
        self.cubins: list[bytes] = []
        self.cubin = b""
        self.carveouts: list[int] = []
        self.argument_addresses: list[int] = []
        self.pdl_flags: list[int] = []
        self.capture, self.version, self.blocks_per_multiprocessor = 0, 13000, 2
        self.nodes: list[int] = []
        self.captured_names: dict[int, bytes] = {}
        self.run: Callable[[tuple[int, int], list[int]], None] | None = None
        self.workspaces: list[torch.Tensor] = []
        self.memory: list[Any] = []
        self.mode = 0

    def cuModuleLoadData(self, module: Any, cubin: bytes) -> int:
        self.cubin = cubin
        return 0

    def cuModuleGetFunction(self, handle: Any, module: Any, name: bytes) -> int:
        self.names.append(name.decode())
        self.cubins.append(self.cubin)
        handle._obj.value = len(self.names)
        return 0

    def cuTensorMapEncodeTiled(self, map_address: Any, dtype: Any, rank: Any, pointer: Any, *rest: Any) -> int:
        """Write a fake tensor map: the matrix's address, bytes per element, columns, rows, bytes from one row to the
        next, and the columns and rows of a box."""
        columns, rows = rest[0]
        fields = (pointer.value, 1 << dtype.value, columns, rows, rest[1][0], *rest[2])
        (ctypes.c_uint64 * len(fields)).from_address(map_address.value)[:] = fields
        return 0

    def cuFuncSetAttribute(self, handle: Any, attribute: int, value: int) -> int:
        if attribute == 8:
            self.shared[handle.value] = value
        else:
            assert attribute == 9
            self.carveouts.append(value)
        return 0

    def cuFuncGetAttribute(self, value: Any, attribute: int, handle: Any) -> int:
        assert attribute == 1
        value._obj.value = self.static_shared
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = {81: 228 << 10, 111: 1 << 10}[attribute]
        return 0

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, blocks: Any, handle: Any, threads: int, shared: Any) -> int:
        assert threads == self.threads
        blocks._obj.value = self.blocks_per_multiprocessor
        return 0

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> int:
        return 0

    def cuLaunchKernelEx(self, config: Any, handle: Any, start: Any, extra: None) -> int:
        if self.statuses:
            return self.statuses.pop(0)
        launch = driver._Config.from_address(config.value)
        assert (launch.z, launch.threads_x, launch.threads_y, launch.threads_z) == (1, self.threads, 1, 1)
        assert (launch.stream, extra) == (STREAM, None)
        attributes = (driver._Attribute * launch.count).from_address(launch.attributes)
        assert [(each.id, each.value) for each in attributes] == [(6, 1)] * launch.count  # the attribute for PDL
        self.pdl_flags.append(launch.count)
        # More than 48 KiB has to be requested.
        assert launch.shared == self.shared.get(handle.value, min(launch.shared, 48 << 10))
        name, self.cubin = self.names[handle.value - 1], self.cubins[handle.value - 1]
        parameters = (ctypes.c_void_p * self.arguments[name]).from_address(start.value)
        self.argument_addresses = list(parameters)
        values = [ctypes.c_uint64.from_address(address).value for address in self.argument_addresses]
        self.launches.append((name, (launch.x, launch.y), values))
        self.argument_arrays.append(start.value)
        if self.run is not None:
            self.run((launch.x, launch.y), values)
        self.nodes.append(len(self.launches))
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, *outputs: Any) -> int:
        assert stream.value == STREAM
        status, number, _, nodes, count = outputs
        status._obj.value, number._obj.value, count._obj.value = self.capture > 0, self.capture, len(self.nodes[-1:])
        self._dependencies = (ctypes.c_void_p * 1)(*self.nodes[-1:])
        nodes._obj.contents = ctypes.c_void_p.from_buffer(self._dependencies)
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = 0 if node.value in self.captured_names else 2  # a kernel, or a memset
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, parameters: Any) -> int:
        parameters[0] = node.value  # this driver's handle of a captured function
        return 0

    def cuFuncGetName(self, name: Any, function: Any) -> int:
        name._obj.value = self.captured_names[function.value]
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        assert self.mode == 2  # the mode in which allocations are allowed while a graph is captured
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

    def alloc_workspace(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new uint8 tensor and record it. It replaces the function by which launches use torch's allocator."""
        assert (len(shape), strides, dtype) == (1, (1,), torch.uint8)
        self.workspaces.append(torch.empty(shape, dtype=dtype))
        return self.workspaces[-1]


def install_fake_driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Replace the CUDA driver, and the functions of torch.cuda that launching uses, by fakes. Return the driver."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "driver", lambda: fake)
    driver._version.cache_clear()
    monkeypatch.setattr(kernel, "empty_cuda", fake.alloc_workspace)
    monkeypatch.setattr(kernel, "_semaphores", {})
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=6))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch_compat, "stream_of", lambda _: STREAM)
    monkeypatch.setattr(torch_compat, "is_capturing", lambda: fake.capture > 0)
    return fake
