"""AMD's driver through ctypes, the counterpart of driver.py: it loads and launches code objects.

This code has never run on an AMD GPU, since none was available. tests/backends/test_rocm.py checks the calls that it
makes to the library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...core.errors import KernelError, UnsupportedError
from .driver import Function
from .wheels import load_first


def _library_names() -> Iterator[str]:
    """Yield the possible names of HIP's library: the one that comes with PyTorch, which has loaded it, then the
    system's."""
    own = Path(torch.__file__).parent / "lib"
    yield from map(str, sorted(own.glob("libamdhip64.so*")))
    yield from ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so")


@functools.cache
def library() -> Any:
    """Return libamdhip64. Its functions do not release the interpreter's lock, since they return at once. Raises
    KernelError where it cannot be loaded."""
    try:
        hip = load_first(
            _library_names(), "AMD's HIP library cannot be loaded: is this PyTorch for ROCm?", ctypes.PyDLL
        )
    except UnsupportedError as error:
        raise KernelError(str(error)) from error
    hip.hipGetErrorString.restype = ctypes.c_char_p
    return hip


def _check(status: int, action: str) -> None:
    if status:
        reason = library().hipGetErrorString(status) or b"unknown error"
        raise KernelError(f"{action}: HIP error {status} ({reason.decode()})")


class HipFunction(Function):
    """A kernel of a code object, loaded for one device. Programmatic dependent launch is not supported."""

    def _load(self, cubin: bytes) -> int:
        name, module, handle = self.header.name, ctypes.c_void_p(), ctypes.c_void_p()
        _check(library().hipModuleLoadData(ctypes.byref(module), cubin), f"loading {name}")
        _check(library().hipModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"finding {name}")
        return int(handle.value or 0)

    def _configure(self, device: int) -> int:
        return 0

    def _supports_pdl(self) -> bool:
        return False

    def retry_or_raise(self, status: int, launch: Callable[[], int]) -> None:
        """Raise KernelError. Launching again would not help: HIP has a context on every thread."""
        _check(status, f"launching {self.header.name}")

    def bind_launch(self, config: Any, parameters: int) -> Callable[[], int]:
        handle, start = ctypes.c_void_p(self.handle), ctypes.c_void_p(parameters)
        launch_kernel = library().hipModuleLaunchKernel

        def launch() -> int:
            grid, block = (config.x, config.y, config.z), (config.threads_x, config.threads_y, config.threads_z)
            stream = ctypes.c_void_p(config.stream)
            return int(launch_kernel(handle, *grid, *block, config.shared, stream, start, None))

        return launch
