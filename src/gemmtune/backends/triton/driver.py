"""The CUDA driver by ctypes: loading cubins and launching them, with no compiler and no Triton at run time.

A launch writes its arguments into one array per thread and calls ``cuLaunchKernel``: 2 to 3 us in all.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ...errors import KernelError
from .compiler import Header, Tma

_SHARED_LIMIT = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STATIC_SHARED = 48 << 10  # beyond it a kernel must ask
_NO_CONTEXT = 201
_MAP_BYTES = 128
_L2_128B = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B


@functools.cache
def _driver() -> Any:
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
        _driver().cuGetErrorString(status, ctypes.byref(text))
        words = (text.value or b"unknown error").decode()
        raise KernelError(f"{doing}: CUDA error {status} ({words})")


class Function:
    """A kernel of a cubin, loaded for one device: call it to launch. Modules are never unloaded."""

    def __init__(self, header: Header, cubin: bytes, device: int) -> None:
        self.header, self.device = header, device
        with torch.cuda.device(device):
            torch.cuda.current_stream().query()  # makes the device's context current on this thread
            module, handle = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), f"loading {header.name}")
            name = header.name.encode()
            _check(_driver().cuModuleGetFunction(ctypes.byref(handle), module, name), f"finding {header.name}")
            if header.shared > _STATIC_SHARED:
                status = _driver().cuFuncSetAttribute(handle, _SHARED_LIMIT, header.shared)
                _check(status, f"asking for {header.shared} bytes of shared memory")
        self._handle, self._threads, self._shared = handle.value, 32 * header.warps, header.shared
        self._launch = _driver().cuLaunchKernel
        self._blocks = threading.local()

    def __call__(self, grid: tuple[int, int], values: Sequence[int], maps: Sequence[Any], stream: int) -> None:
        """Launch on ``stream``. values: of all arguments but descriptors (0 in their places), pointers as integers;
        maps: the descriptors in order. Raises KernelError when the driver refuses."""
        try:
            slots, parameters, places, _ = self._blocks.held
        except AttributeError:
            slots, parameters, places, _ = self._blocks.held = self._block()
        slots[:] = values
        for place, made in zip(places, maps, strict=True):
            parameters[place] = made.address
        x, y = grid
        status = self._launch(self._handle, x, y, 1, self._threads, 1, 1, self._shared, stream, parameters, None)
        if status == _NO_CONTEXT:  # a thread that has not used CUDA yet
            torch.cuda.current_stream(self.device).query()
            status = self._launch(self._handle, x, y, 1, self._threads, 1, 1, self._shared, stream, parameters, None)
        if status:
            _check(status, f"launching {self.header.name}")

    def _block(self) -> tuple[Any, Any, tuple[int, ...], Any]:
        """This thread's own: a slot an argument, the slots' addresses, where descriptors belong, an unused word."""
        names = self.header.arguments
        count = len(names) + self.header.scratch
        slots = (ctypes.c_uint64 * len(names))()
        unused = (ctypes.c_uint64 * max(1, self.header.scratch))()
        own = [ctypes.addressof(slots) + 8 * place for place in range(len(names))]
        parameters = (ctypes.c_void_p * count)(*own, *([ctypes.addressof(unused)] * self.header.scratch))
        places = tuple(place for place, name in enumerate(names) if name in self.header.descriptors)
        return slots, parameters, places, unused


class Map:
    """A TMA descriptor (CUtensorMap) of a row-major matrix [rows, columns]. Raises KernelError when CUDA refuses it."""

    def __init__(self, tma: Tma, pointer: int, rows: int, columns: int, lead: int) -> None:
        self._memory = (ctypes.c_uint8 * (2 * _MAP_BYTES))()
        start = ctypes.addressof(self._memory)
        self.address = start + -start % _MAP_BYTES
        status = _driver().cuTensorMapEncodeTiled(
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
