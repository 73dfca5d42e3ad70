"""The conversion of a weight to its activations' dtype, by one Triton kernel on a GPU."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from .compiler import CONVERTED_ITEMS
from .jit_kernel import JitCall, JitKernel


class Conversion(JitKernel):
    """A kernel that converts the elements of a matrix to another dtype. Made by ``conversion``."""

    def run(self, source: Tensor, target: Tensor) -> bool:
        """Convert ``source`` [K, N] into ``target`` [K, N] on their GPU's current stream, and return True.

        Returns False, and does nothing, for tensors that it does not take (on a CPU, without elements, with different
        strides, or with memory between the elements), and as ``JitKernel._try_launch``.
        """
        if not source.is_cuda or not source.numel() or source.stride() != target.stride():
            return False
        if not (source.is_contiguous() or source.t().is_contiguous()):
            return False
        return self._try_launch(target, (source,), lambda: self.launch(source, target))

    def call(self, operands: tuple[Any, ...], signals: bool) -> JitCall:
        from .kernels import convert

        source, target = operands
        count, constants = source.numel(), {"ITEMS": CONVERTED_ITEMS, "num_warps": 4}
        return JitCall(convert, (-(-count // CONVERTED_ITEMS),), (source, target, count), constants)


@functools.cache
def conversion() -> Conversion:
    """Return the kernel, which all products share."""
    return Conversion()
