"""The steps of an epilogue behind a product of PyTorch's, by one Triton kernel on a GPU, as ``torch.compile`` has them.

By ATen's operators each step is a kernel of its own that reads and writes a float32 matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...core.epilogue import GATES, Epilogue
from ..gpu.rules import EPILOGUE_DTYPES, MAX_STEPS, stays_integer, step_constants
from .jit_kernel import JitCall, JitKernel

_FLOATS = ("float32", "bfloat16", "float16")
_ELEMENTS = 1024  # of a program: 8 for each thread of 4 warps, which it loads by 16 bytes in two bytes' dtypes
_MOST_COLUMNS = 65535 * _ELEMENTS  # by the limit of a grid's second dimension


class Pointwise(JitKernel):
    """A kernel that computes steps from a matrix, for matrices of any number of rows. Made by ``pointwise_of``."""

    def __init__(self, steps: Epilogue) -> None:
        super().__init__()
        gate = GATES[steps[-1].kind] if steps and steps[-1].kind in GATES else ""
        self._steps = steps[:-1] if gate else steps
        self._constants: dict[str, Any] = {"GATE": gate}
        for index in range(MAX_STEPS):
            step = self._steps[index] if index < len(self._steps) else None
            values = zip(("KIND", "AXIS", "VALUE", "LO", "HI"), step_constants(step), strict=True)
            self._constants |= {f"{name}{index}": value for name, value in values}

    def run(self, acc: Tensor, aux: Sequence[Tensor], out: Tensor) -> bool:
        """Compute the steps from ``acc`` [M, N] into ``out`` [M, N] ([M, N / 2] for a gate) on their GPU's current
        stream, and return True. aux: the steps' tensors.

        Returns False, and does nothing, for matrices that it does not take (on a CPU, or with rows that are not dense),
        and as ``JitKernel._try_launch``.
        """
        matrices = (acc, out, *(t for t in aux if t.dim() == 2))
        if not acc.is_cuda or any(t.dim() != 2 or t.stride(1) != 1 for t in matrices):
            return False
        if not out.numel() or out.shape[1] > _MOST_COLUMNS:
            return False
        return self._try_launch(out, (acc, *aux), lambda: self.launch(acc, aux, out))

    def call(self, operands: tuple[Any, ...], signals: bool) -> JitCall:
        from .pointwise_kernel import gemmtune_pointwise

        acc, aux, out = operands
        m, n = out.shape
        columns = min(_ELEMENTS, 1 << max(4, (n - 1).bit_length()))
        rows = _ELEMENTS // columns
        tensors, leads = self._arguments(aux)
        args = (acc, out, *tensors, m, n, acc.stride(0), out.stride(0), *leads)
        constants = {"ROWS": rows, "COLUMNS": columns, "SIGNALS": signals, "num_warps": 4, **self._constants}
        return JitCall(gemmtune_pointwise, (-(-m // rows), -(-n // columns)), args, constants)

    def _arguments(self, aux: Sequence[Tensor]) -> tuple[list[Tensor | None], list[int]]:
        """Return the tensor of each step, and its leading dimension."""
        remaining = iter(aux)
        tensors: list[Tensor | None] = [None] * MAX_STEPS
        leads = [0] * MAX_STEPS
        for index, step in enumerate(self._steps):
            if step.takes_tensor:
                tensor = next(remaining)
                tensors[index] = tensor
                leads[index] = tensor.stride(0) if step.axis == "full" else 0
        return tensors, leads


def pointwise_of(steps: Epilogue, acc_dtype: str, out_dtype: str) -> Pointwise | None:
    """Return a kernel of ``steps`` from a matrix of ``acc_dtype`` to one of ``out_dtype``; None where there is none
    that computes what ATen's operators compute (``aten/steps.py``), or no step."""
    own = steps[:-1] if steps and steps[-1].kind in GATES else steps
    if not steps or len(own) > MAX_STEPS or out_dtype not in _FLOATS:
        return None
    if acc_dtype not in (*_FLOATS, "int32") or (acc_dtype == "int32" and own and stays_integer(own[0])):
        return None
    for step in own:
        if step.takes_tensor and step.dtype not in EPILOGUE_DTYPES:
            return None
        if step.axis == "inner" or (step.kind == "cast" and step.dtype not in _FLOATS):
            return None
    return Pointwise(steps)
