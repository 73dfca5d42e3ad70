"""Which operands the operators of this torch take on a CPU, where versions of torch differ: each operator is tried
once, on a few elements."""

from __future__ import annotations

from functools import cache

import torch

from ...core.problem import Problem
from ...core.torch_compat import DisableTorchDispatch, DisableTorchFunction, int_mm, scaled_mm


@cache
def int_mm_takes_uint8() -> bool:
    """Whether ``torch._int_mm`` multiplies uint8 by int8 (torch 2.9 to 2.11 raise RuntimeError)."""
    with DisableTorchFunction(), DisableTorchDispatch():  # an active mode would answer for another device
        a, b = torch.full((1, 2), 200, dtype=torch.uint8), torch.ones(2, 1, dtype=torch.int8)
        try:
            return int(int_mm(a, b)) == 400
        except RuntimeError:
            return False


@cache
def scaled_mm_takes_rows() -> bool:
    """Whether ``torch._scaled_mm`` takes one scale per row and column (in torch 2.9 to 2.11 an internal assertion
    fails)."""
    with DisableTorchFunction(), DisableTorchDispatch():
        a, one = torch.ones(2, 16).to(torch.float8_e4m3fn), torch.ones(2, 1)
        try:
            return bool((scaled_mm(a, a.t(), one, one.t(), out_dtype=torch.float32) == 16).all())
        except RuntimeError:
            return False


def why_no_uint8(problem: Problem) -> str:
    """Return why ``torch._int_mm`` does not take the problem's activations on a CPU; empty when it does."""
    if problem.a.dtype != "uint8" or int_mm_takes_uint8():
        return ""
    return f"_int_mm of torch {torch.__version__} takes no uint8 on CPUs"


def why_no_row_scales(problem: Problem) -> str:
    """Return why ``torch._scaled_mm`` does not take the problem's scales on a CPU; empty when it does."""
    if problem.epilogue[0].axis == "tensor" or scaled_mm_takes_rows():
        return ""
    return f"_scaled_mm of torch {torch.__version__} takes one scale per tensor on CPUs"
