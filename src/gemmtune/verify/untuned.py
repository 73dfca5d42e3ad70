"""Verification of kernels that serve without having been tuned: the default layout of a packed weight.

Dispatch calls ``verify_kernel`` before such a kernel first serves (``dispatch.runtime``'s verify_hook).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.base import Kernel
from ..core.decision import Verdict
from ..core.problem import Problem
from ..core.torch_compat import DisableTorchFunction
from .draws import at_rows, prepare
from .inputs import Inputs
from .verify import verify

# Rows that operands are drawn for; the answers for other numbers of rows are those of the same rows. K, N, dtypes and
# the epilogue are the Problem's own.
_DRAWN, _OTHERS = 5, (1, 65)
_SEED = 1
_PATIENCE_S = 20e-3  # of repeating a run, for each number of rows


def verify_kernel(kernel: Kernel, problem: Problem, device: torch.device) -> Verdict:
    """Return the Verdict on a loaded kernel from runs in this process with a few numbers of rows.

    Takes a fraction of a second for 4096 x 4096. Whatever running raises, for want of memory too, is a Verdict
    "crashed".
    """
    with torch.no_grad(), DisableTorchFunction(), torch.autocast(device.type, enabled=False):
        try:
            return _verified(kernel, problem.with_m(_DRAWN), device)
        except Exception as error:  # a kernel may raise anything, and so may a device without memory
            return Verdict("crashed", f"{type(error).__name__} while verifying: {error}"[:2000])


def _verified(kernel: Kernel, problem: Problem, device: torch.device) -> Verdict:
    packed: dict[int, Any] = {}

    def run(inputs: Inputs, out: Tensor) -> None:
        source = inputs.b if inputs.source is None else inputs.source
        if kernel.packing is None:
            weight: Any = inputs.b
        else:
            weight = packed[id(source)] = packed.get(id(source)) or kernel.pack(source)
        kernel.run(inputs.a, weight, inputs.aux, out)

    draws = prepare(problem, _SEED, device=device)
    worst = verify(run, problem, draws, _PATIENCE_S)
    for m in _OTHERS:
        draw = at_rows(problem, draws, m)
        if not worst.ok or draw is None:
            break
        worst = max(worst, verify(run, problem, (draw,), _PATIENCE_S), key=lambda found: (not found.ok, found.worst))
    return worst
