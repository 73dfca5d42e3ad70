"""The steps of an epilogue behind a product of PyTorch's, by one native kernel on a CPU, as ``torch.compile`` has them.

By ATen's operators each step is a kernel of its own that reads and writes a float32 matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...core.epilogue import Epilogue
from ...core.errors import KernelError
from ...core.memory import LOWEST_USUAL_ADDRESS
from ...core.torch_compat import increment_version
from .kernel import aux_pointers, encoded_steps
from .traits import DTYPES

_FLOATS = ("float32", "bfloat16", "float16")


class CpuPointwise:
    """A kernel that computes steps from a matrix, for matrices of any number of rows. Made by ``cpu_pointwise_of``."""

    def __init__(self, steps: Epilogue, acc_dtype: str, out_dtype: str, isa: str) -> None:
        from . import _native

        config = {"src": DTYPES[acc_dtype], "out": DTYPES[out_dtype], **encoded_steps(steps)}
        self._run = _native.Pointwise(isa, config).run

    def run(self, acc: Tensor, aux: Sequence[Tensor], out: Tensor) -> bool:
        """Compute the steps from ``acc`` [M, N] into ``out`` [M, N] ([M, N / 2] for a gate), and return True. aux: the
        steps' tensors.

        Returns False, and does nothing, for matrices that it does not take: not on a CPU, without an address, or with
        rows that are not dense.
        """
        tensors = (acc, out, *aux)
        if any(not t.is_cpu or (t.dim() == 2 and t.stride(1) != 1) for t in tensors):
            return False
        if any(t.data_ptr() < LOWEST_USUAL_ADDRESS for t in tensors):
            return False
        m, n = acc.shape
        self._run(m, n, acc.data_ptr(), acc.stride(0), out.data_ptr(), out.stride(0), aux_pointers(aux))
        increment_version((out,))  # as PyTorch's operators do: autograd detects stale saved tensors by it
        return True


def cpu_pointwise_of(steps: Epilogue, acc_dtype: str, out_dtype: str) -> CpuPointwise | None:
    """Return a kernel of ``steps`` from a matrix of ``acc_dtype`` to one of ``out_dtype``, which are floating; None for
    other dtypes, for steps with tensors of other dtypes, and where the native kernels were not built."""
    from . import usable_isas

    step_dtypes = {step.dtype for step in steps if step.dtype is not None}
    if not steps or {acc_dtype, out_dtype} - set(_FLOATS) or step_dtypes - set(_FLOATS):
        return None
    try:
        return CpuPointwise(steps, acc_dtype, out_dtype, usable_isas()[-1])
    except KernelError:
        return None
