"""Verification of kernels that serve without having been tuned: the default layout of a packed weight.

Dispatch calls ``verify_kernel`` before such a kernel first serves (``dispatch.runtime``'s verify_hook).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .backends.base import Kernel, QuantWeight
from .decision import Verdict
from .measure.inputs import Inputs
from .measure.verify import prepare, verify
from .problem import Problem

# Rows that are verified: one; an odd number below a tile's; one more than four of the widest micro-tiles of a CPU or
# one tile of a GPU. K, N, dtypes and the epilogue are the Problem's own.
ROWS = (1, 5, 65)
_SEED = 1
_PATIENCE_S = 20e-3  # of repeating a run, for each number of rows


def verify_kernel(kernel: Kernel, problem: Problem, device: torch.device) -> Verdict:
    """Return the Verdict on a loaded kernel from runs in this process with a few numbers of rows.

    The weight is drawn and packed once for all of them. Takes a fraction of a second for 4096 x 4096. Whatever running
    raises, for want of memory too, is a Verdict "crashed".
    """
    b: Tensor | QuantWeight | None = None
    packed: Any = None
    worst = Verdict("exact")
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autocast(device.type, enabled=False):
        try:
            for m in ROWS:
                wanted = problem.with_m(m)
                draws = prepare(wanted, _SEED, b=b, device=device)
                if b is None:
                    b = draws[0].inputs.b
                    packed = b if kernel.packing is None else kernel.pack(b)

                def run(inputs: Inputs, out: Tensor, weight: Any = packed) -> None:
                    kernel.run(inputs.a, weight, inputs.aux, out)

                verdict = verify(run, wanted, draws, _PATIENCE_S)
                if not verdict.ok:
                    return Verdict(verdict.kind, f"with {m} rows: {verdict.detail}", verdict.worst)
                worst = max(worst, verdict, key=lambda verdict: verdict.worst)
        except Exception as error:  # a kernel may raise anything, and so may a device without memory
            return Verdict("crashed", f"{type(error).__name__} while verifying: {error}"[:2000])
    return worst
