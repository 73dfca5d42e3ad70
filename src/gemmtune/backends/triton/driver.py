"""The CUDA driver by ctypes: loading cubins and launching them, with no compiler and no Triton at run time.

A launch writes what changed since the last one (addresses) into its thread's arrays and calls ``cuLaunchKernel``.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...errors import KernelError
from .compiler import Header, Tma

_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED = 48 << 10  # beyond it a kernel must ask
_NO_CONTEXT = 201
_MAP_BYTES = 128
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B

Send = Callable[..., None]  # see Function.bound


@functools.cache
def driver() -> Any:
    """libcuda; its functions keep the interpreter's lock, since they return at once. Raises KernelError without it."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        library.cuLaunchKernel.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
        return library
    except OSError as error:
        raise KernelError(f"the NVIDIA driver's library cannot be loaded: {error}") from error


def _check(status: int, doing: str) -> None:
    if status:
        text = ctypes.c_char_p()
        driver().cuGetErrorString(status, ctypes.byref(text))
        words = (text.value or b"unknown error").decode()
        raise KernelError(f"{doing}: CUDA error {status} ({words})")


class Function:
    """A kernel of a cubin, loaded for one device; ``bound`` gives what launches it. Modules are never unloaded."""

    def __init__(self, header: Header, cubin: bytes, device: int) -> None:
        self.header, self.device = header, device
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current on this thread
            module, handle = ctypes.c_void_p(), ctypes.c_void_p()
            _check(driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {header.name}")
            name = header.name.encode()
            _check(driver().cuModuleGetFunction(ctypes.byref(handle), module, name), f"finding {header.name}")
            if header.shared > _STATIC_SHARED:
                status = driver().cuFuncSetAttribute(handle, _SHARED_LIMIT, header.shared)
                _check(status, f"asking for {header.shared} bytes of shared memory")
        self.handle, self.threads, self.shared = handle.value, 32 * header.warps, header.shared
        self._launch = driver().cuLaunchKernel

    def bound(self, grid: tuple[int, int], values: Sequence[int], moving: Sequence[int]) -> Send:
        """``send(stream, addresses, maps)``: launches with these values of all arguments but descriptors (0 in their
        places; pointers as integers), but for ``addresses`` in the places of ``moving``; maps: the descriptors in
        order. send raises KernelError when the driver refuses."""
        launch, handle, threads, shared = self._launch, self.handle, self.threads, self.shared
        (x, y), described = grid, self._described()
        own = threading.local()

        def send(stream: int, addresses: Sequence[int], maps: Sequence[Map] = ()) -> None:
            try:
                slots, parameters, start = own.held
            except AttributeError:
                slots, parameters, _ = held = self.block(values)
                start = ctypes.c_void_p(ctypes.addressof(parameters))
                own.block, own.held = held, (slots, parameters, start)
            for place, address in zip(moving, addresses, strict=True):
                slots[place] = address
            for place, made in zip(described, maps, strict=True):
                parameters[place] = made.address
            status = launch(handle, x, y, 1, threads, 1, 1, shared, stream, start, None)
            if status == _NO_CONTEXT:  # a thread that has not used CUDA yet
                torch.cuda.current_stream(self.device).query()
                status = launch(handle, x, y, 1, threads, 1, 1, shared, stream, start, None)
            if status:
                _check(status, f"launching {self.header.name}")

        return send

    def block(self, values: Sequence[int]) -> tuple[Any, Any, Any]:
        """A launch's arguments, for one thread at a time: a slot an argument, the addresses of the slots (and, in the
        places of descriptors, whatever is put there), and a word for what Triton wants and does not use."""
        names = self.header.arguments
        count = len(names) + self.header.scratch
        slots = (ctypes.c_uint64 * len(names))(*values)
        unused = (ctypes.c_uint64 * max(1, self.header.scratch))()
        own = [ctypes.addressof(slots) + 8 * place for place in range(len(names))]
        parameters = (ctypes.c_void_p * count)(*own, *([ctypes.addressof(unused)] * self.header.scratch))
        return slots, parameters, unused

    def _described(self) -> tuple[int, ...]:
        return tuple(place for place, name in enumerate(self.header.arguments) if name in self.header.descriptors)


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
