"""The norm in front of a product, by one Triton kernel on a GPU.

An RMS norm takes 1.8 us for 64 rows of 4096 elements, ATen's operator 4.6 (H100,
benchmarks/results/row-norm-h100-20261128.txt).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.epilogue import Kind
from .jit_kernel import JitCall, JitKernel

_FLOATS = {torch.bfloat16, torch.float16, torch.float32}
MOST_COLUMNS = 16384  # a program has a row in its registers: 64 elements a thread of 8 warps
_ELEMENTS_A_WARP = 512  # 16 bytes a thread, twice, in two bytes' dtypes


class RowNorm(JitKernel):
    """A kernel that normalises the rows of matrices, as a step of ``kind`` says. Made by ``row_norm_of``."""

    def __init__(self, kind: Kind, eps: float) -> None:
        super().__init__()
        self._kind, self._eps = kind, eps

    def run(self, a: Tensor, tensors: Sequence[Tensor], out: Tensor) -> bool:
        """Write the normalised rows of ``a`` [M, K] into ``out`` [M, K] on their GPU's current stream, and return True.
        They are computed in float32, and rounded once. tensors: the weight [K], and a layer norm's bias [K], if it has
        one.

        Returns False, and does nothing, for tensors that it does not take (on a CPU, of other dtypes than bfloat16,
        float16 and float32, with rows that are not dense or longer than 16384), and as ``JitKernel._try_launch``.
        """
        if not a.is_cuda or a.dim() != 2 or not a.numel() or a.shape[1] > MOST_COLUMNS:
            return False
        if (
            {t.dtype for t in (a, *tensors, out)} - _FLOATS
            or a.stride(1) != 1
            or any(t.stride(0) != 1 for t in tensors)
        ):
            return False
        return out.is_contiguous() and self._try_launch(out, (a, *tensors), lambda: self.launch(a, tensors, out))

    def call(self, operands: tuple[Any, ...], signals: bool) -> JitCall:
        from .row_norm_kernel import gemmtune_row_norm

        a, tensors, out = operands
        m, k = a.shape
        block = 1 << max(5, (k - 1).bit_length())
        constants = {
            "CENTERED": self._kind == "layer_norm", "BIASED": len(tensors) > 1, "BLOCK": block, "SIGNALS": signals,
            "num_warps": min(8, max(1, block // _ELEMENTS_A_WARP)),
        }  # fmt: skip
        return JitCall(gemmtune_row_norm, (m,), (a, tensors[0], tensors[-1], out, k, a.stride(0), self._eps), constants)


@functools.lru_cache(maxsize=64)
def row_norm_of(kind: Kind, eps: float) -> RowNorm:
    """Return the kernel for a kind of norm (``core.epilogue.NORMS``) and its eps."""
    return RowNorm(kind, eps)
