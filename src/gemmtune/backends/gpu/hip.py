"""AMD's driver by ctypes, as driver.py has NVIDIA's: loading code objects and launching them. Never run: no AMD GPU was
there to try it on. tests/backends/test_rocm.py has what it asks of the library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...core.errors import KernelError, UnsupportedError
from .driver import Function
from .wheels import first_of


def _places() -> Iterator[str]:
    """Where HIP's library may be: what came with PyTorch, which has loaded it, then the system's."""
    own = Path(torch.__file__).parent / "lib"
    yield from map(str, sorted(own.glob("libamdhip64.so*")))
    yield from ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")


@functools.cache
def library() -> Any:
    """libamdhip64; its functions keep the interpreter's lock, since they return at once. Raises KernelError without."""
    try:
        found = first_of(_places(), "AMD's HIP library cannot be loaded: is this PyTorch for ROCm?", ctypes.PyDLL)
    except UnsupportedError as error:
        raise KernelError(str(error)) from error
    found.hipGetErrorString.restype = ctypes.c_char_p
    return found


def _check(status: int, doing: str) -> None:
    if status:
        words = library().hipGetErrorString(status) or b"unknown error"
        raise KernelError(f"{doing}: HIP error {status} ({words.decode()})")


class HipFunction(Function):
    """A kernel of a code object, loaded for one device. None follows another early."""

    def _load(self, cubin: bytes) -> int:
        name, module, handle = self.header.name, ctypes.c_void_p(), ctypes.c_void_p()
        _check(library().hipModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        _check(library().hipModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"finding {name}")
        return int(handle.value or 0)

    def _follows(self) -> bool:
        return False

    def failed(self, status: int, launch: Callable[[], int]) -> None:
        """Raises KernelError: HIP has a context on every thread."""
        _check(status, f"launching {self.header.name}")

    def launcher(self, config: Any, parameters: int) -> Callable[[], int]:
        block = (config.threads_x, config.threads_y, config.threads_z)
        fixed = (ctypes.c_void_p(self.handle), config.x, config.y, config.z, *block, config.shared)
        launch, start = library().hipModuleLaunchKernel, ctypes.c_void_p(parameters)
        return lambda: int(launch(*fixed, ctypes.c_void_p(config.stream), start, None))
