"""The Triton kernel of ``rms_norm.py``, which imports this module when it launches it first."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def gemmtune_rms_norm(
    a_ptr, weight_ptr, out_ptr, K, ld_a, eps,
    BLOCK: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    """Normalise one row of ``a`` [M, K] per program into ``out`` [M, K]. BLOCK: a power of two, K or more. SIGNALS:
    whether the next kernel may begin at once (``gpu/driver.py``): all work in front of this one has ended."""
    if SIGNALS:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    values = tl.load(a_ptr + row * ld_a + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / K + eps)
    result = values * factor * weight
    tl.store(out_ptr + row * K + columns, result.to(out_ptr.dtype.element_ty), mask=inside)
