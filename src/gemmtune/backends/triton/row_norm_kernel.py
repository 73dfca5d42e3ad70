"""The Triton kernel of ``row_norm.py``, which imports this module when it launches it first."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents


@triton.jit
def gemmtune_row_norm(
    a_ptr, weight_ptr, bias_ptr, out_ptr, K, ld_a, eps,
    CENTERED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    """Normalise one row of ``a`` [M, K] per program into ``out`` [M, K]. CENTERED: whether the row's mean is subtracted
    first (a layer norm). BIASED: whether the bias is added. BLOCK: a power of two, K or more. SIGNALS: whether the next
    kernel may begin at once (``gpu/driver.py``): all work in front of this one has ended."""
    if SIGNALS:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < K
    values = tl.load(a_ptr + row * ld_a + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        values = tl.where(inside, values - tl.sum(values, 0) / K, 0.0)
    factor = tl.rsqrt(tl.sum(values * values, 0) / K + eps)
    result = values * factor * weight
    if BIASED:
        result += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * K + columns, result.to(out_ptr.dtype.element_ty), mask=inside)
