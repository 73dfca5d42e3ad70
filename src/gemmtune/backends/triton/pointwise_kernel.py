"""The Triton kernel of ``pointwise.py``, which imports this module when it launches it first."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .kernels import _ahead, _step


@triton.jit
def _after_steps(acc, r, c, M, N, tensors, leads, STEPS: tl.constexpr):
    """Return what all steps make of ``acc``, whose elements are in the rows ``r`` and the columns ``c`` of M x N."""
    for i in tl.static_range(5):
        values = _ahead(tensors[i], r, c, M, N, STEPS[i][1])
        acc = _step(
            acc, tensors[i], values, leads[i], r, c, M, N,
            STEPS[i][0], STEPS[i][1], STEPS[i][2], STEPS[i][3], STEPS[i][4],
        )  # fmt: skip
    return acc


@triton.jit(do_not_specialize=["M"])
def gemmtune_pointwise(
    acc_ptr, out_ptr, t0, t1, t2, t3, t4, M, N, ld_acc, ld_out, ld0, ld1, ld2, ld3, ld4,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATE: tl.constexpr, SIGNALS: tl.constexpr,
    KIND0: tl.constexpr, AXIS0: tl.constexpr, VALUE0: tl.constexpr, LO0: tl.constexpr, HI0: tl.constexpr,
    KIND1: tl.constexpr, AXIS1: tl.constexpr, VALUE1: tl.constexpr, LO1: tl.constexpr, HI1: tl.constexpr,
    KIND2: tl.constexpr, AXIS2: tl.constexpr, VALUE2: tl.constexpr, LO2: tl.constexpr, HI2: tl.constexpr,
    KIND3: tl.constexpr, AXIS3: tl.constexpr, VALUE3: tl.constexpr, LO3: tl.constexpr, HI3: tl.constexpr,
    KIND4: tl.constexpr, AXIS4: tl.constexpr, VALUE4: tl.constexpr, LO4: tl.constexpr, HI4: tl.constexpr,
):  # fmt: skip
    """Compute ROWS x COLUMNS elements of ``out`` [M, N] per program. GATE: the activation of the left half of the
    columns, by whose result the right half is multiplied (``acc`` then is [M, 2 * N]); empty: ``acc`` is [M, N].
    SIGNALS: whether the next kernel may begin at once (``gpu/driver.py``): all work in front of this one has ended."""
    if SIGNALS:
        gdc_launch_dependents()
    tensors, leads = (t0, t1, t2, t3, t4), (ld0, ld1, ld2, ld3, ld4)
    STEPS: tl.constexpr = (
        (KIND0, AXIS0, VALUE0, LO0, HI0), (KIND1, AXIS1, VALUE1, LO1, HI1), (KIND2, AXIS2, VALUE2, LO2, HI2),
        (KIND3, AXIS3, VALUE3, LO3, HI3), (KIND4, AXIS4, VALUE4, LO4, HI4),
    )  # fmt: skip
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    c = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (r < M) & (c < N)
    places = acc_ptr + r.to(tl.int64) * ld_acc + c
    acc = tl.load(places, mask=inside).to(tl.float32)
    if GATE == "":
        acc = _after_steps(acc, r, c, M, N, tensors, leads, STEPS)
    else:
        factor = tl.load(places + N, mask=inside).to(tl.float32)
        acc = _after_steps(acc, r, c, M, N, tensors, leads, STEPS)
        factor = _after_steps(factor, r, c + N, M, 2 * N, tensors, leads, STEPS)
        acc = _step(acc, None, 0, 0, r, c, M, N, GATE, "", 1.0, None, None) * factor
    tl.store(out_ptr + r.to(tl.int64) * ld_out + c, acc.to(out_ptr.dtype.element_ty), mask=inside)
