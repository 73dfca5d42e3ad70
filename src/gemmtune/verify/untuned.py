"""Verification of kernels that serve without tuning: those of a packed weight in the default layout.

Dispatch calls ``verify_kernel`` (as ``dispatch.runtime``'s verify_hook) before the first use of such a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends.base import Kernel
from ..core.decision import Verdict
from ..core.problem import Problem
from ..core.torch_compat import DisableTorchFunction
from .inputs import Inputs
from .reference_cases import case_for_rows, make_reference_cases
from .verify import allowed_rounding, verify

# M of the test cases, and other M, whose test cases reuse their rows and results. K, N, dtypes and the epilogue are the
# Problem's.
_M, _OTHER_M = 5, (1, 65)
_SEED = 1
_PATIENCE_S = 20e-3  # for repeated runs at each M


def verify_kernel(kernel: Kernel, problem: Problem, device: torch.device) -> Verdict:
    """Return the Verdict of a loaded kernel from runs in this process at a few M.

    It takes a fraction of a second for 4096 x 4096. An exception during the runs, including out of memory, gives the
    Verdict "crashed".
    """
    with torch.no_grad(), DisableTorchFunction(), torch.autocast(device.type, enabled=False):
        try:
            return _verify(kernel, problem.with_m(_M), device)
        except Exception as error:  # a kernel may raise anything, and so may a device without memory
            return Verdict("crashed", f"{type(error).__name__} while verifying: {error}"[:2000])


def _verify(kernel: Kernel, problem: Problem, device: torch.device) -> Verdict:
    packed: dict[int, Any] = {}

    def run(inputs: Inputs, out: Tensor) -> None:
        source = inputs.b if inputs.source is None else inputs.source
        if kernel.packing is None:
            weight: Any = inputs.b
        else:
            weight = packed[id(source)] = packed.get(id(source)) or kernel.pack(source)
        kernel.run(inputs.a, weight, inputs.aux, out)

    cases = make_reference_cases(problem, _SEED, device=device)
    worst = verify(run, problem, cases, _PATIENCE_S, rounding=allowed_rounding(kernel))
    for m in _OTHER_M:
        case = case_for_rows(problem, cases, m)
        if not worst.ok or case is None:
            break
        other = verify(run, problem, (case,), _PATIENCE_S, rounding=allowed_rounding(kernel))
        worst = max(worst, other, key=lambda verdict: (not verdict.ok, verdict.worst))
    return worst
