"""What kernels that Triton compiles when they are first called share: when they are launched, and what happens where
Triton fails. (Kernels of products are compiled by builders, and launched by ``gpu/driver.py``.)"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ...core.devices import is_capturing
from ...core.target import Target
from ...core.torch_compat import increment_version
from ..gpu.driver import record_captured
from .compiler import gpu_target, triton_version, why_unusable

log = logging.getLogger("gemmtune")

_SIGNALS_FROM = (9, 0)  # the first compute capability with programmatic dependent launch


class JitCall(NamedTuple):
    """A call of a function of Triton's, with positional arguments and constants, for a grid of programs."""

    function: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


class JitKernel(ABC):
    """A Triton kernel that computes what is in front of a product, or behind it, for any number of rows."""

    _broken: ClassVar[bool] = False  # Triton could not compile or launch a kernel in this process

    def __init__(self) -> None:
        self._launched: set[tuple[object, ...]] = set()

    @abstractmethod
    def call(self, operands: tuple[Any, ...], signals: bool) -> JitCall:
        """Return the call for operands as those of ``run``. signals: as ``signals`` says of their device."""

    def launch(self, *operands: Any) -> None:
        """Launch the kernel, which Triton compiles where it has not done so yet. operands: as for ``run``."""
        function, grid, args, constants = self.call(operands, signals(operands[0].device))
        function[grid](*args, **constants)

    def compile_for(self, target: Target, operands: tuple[Any, ...]) -> None:
        """Compile the kernel, and what Triton launches it with, into Triton's cache, where another process's first
        launch finds them, as for operands on a GPU that start at multiples of 16 bytes. Needs no GPU, but NVIDIA's
        driver library. For processes that build: afterwards this one launches no Triton kernel.

        target: the GPU, one of NVIDIA's. operands: as for ``run``, on PyTorch's device "meta".
        """
        from triton.backends.nvidia.driver import CudaLauncher, CudaUtils
        from triton.runtime import driver

        driver.set_active(_CompileOnlyDriver(target))
        function, grid, args, constants = self.call(operands, target.compute_capability >= _SIGNALS_FROM)
        compiled = function.warmup(*args, grid=grid, **constants)
        # Two modules in C, which take GCC longer than the kernel takes Triton: one for all kernels, and one for each
        # signature.
        CudaUtils()
        CudaLauncher(compiled.src, compiled.metadata)

    def _try_launch(self, out: Tensor, operands: Iterable[Tensor], launch: Callable[[], None]) -> bool:
        """Have ``launch`` write into ``out`` on its GPU's current stream, and return True. operands: what it reads.

        Returns False, and does nothing, where Triton is missing or failed; for tensors of several elements that start
        off a 16-byte boundary, for which Triton would compile another copy of the kernel; and while a CUDA graph is
        captured before the first call with operands for which Triton makes the same code: it would be loaded meanwhile.
        """
        if JitKernel._broken:
            return False
        tensors = [tensor for tensor in (out, *operands) if tensor.dim()]
        if any(tensor.data_ptr() % 16 for tensor in tensors if tensor.numel() > 1):
            return False
        code = tuple((t.dtype, t.shape[-1], t.stride(0) % 16, t.data_ptr() % 16) for t in tensors)
        if code not in self._launched and (why_unusable(triton_version()) or is_capturing(out.device)):
            return False
        try:
            if out.get_device() == torch.cuda.current_device():
                launch()
            else:  # Triton launches on the current one
                with torch.cuda.device(out.device):
                    launch()
        except Exception as error:  # Triton's compiler has no exception class of its own
            JitKernel._broken = True
            log.warning("Triton cannot run the steps beside PyTorch's products (%s): ATen's operators do", error)
            return False
        self._launched.add(code)
        if signals(out.device) and is_capturing(out.device):
            record_captured(torch.cuda.current_stream(out.device).cuda_stream, out)
        increment_version((out,))  # as PyTorch's operators do: autograd detects stale saved tensors by it
        return True


@functools.lru_cache(maxsize=16)
def signals(device: torch.device) -> bool:
    """Whether a kernel on a device can signal that the next one in the stream may begin (``griddepcontrol``)."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= _SIGNALS_FROM
    )


class _CompileOnlyDriver:
    """What Triton asks of its driver to compile a kernel for a GPU that need not be there."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return -1

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return gpu_target(self._target)
