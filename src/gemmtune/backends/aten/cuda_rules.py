"""What ATen's ops take on CUDA and what not, in words."""

from __future__ import annotations

from ...core.problem import Problem
from .padding import scaled_rules

HALVES = ("bfloat16", "float16")
_FP8 = (8, 9)  # the least compute capability with fp8 products
_FEW = 16


def few_rows(problem: Problem) -> str:
    """Why a product that ends in a transposing copy is not offered on CUDA; empty for few rows."""
    return "" if problem.m <= _FEW else "ends in a transposing copy on CUDA, which pays for 16 rows or fewer"


def bytes_layout(problem: Problem) -> str:
    """Why cuBLASLt does not take one-byte operands of these layouts, or empty."""
    a, b = problem.a.layout, problem.b.layout
    if a.order == "row" and b.order == "col" and not ((a.ld or 0) % 16 or (b.ld or 0) % 16):
        return ""
    return "cuBLASLt wants a row-major and a column-major operand of bytes, with rows in multiples of 16"


def scaled_layout(problem: Problem) -> str:
    """Why ``_scaled_mm`` does not take operands of these sizes and layouts, or empty."""
    return bytes_layout(problem) or scaled_rules(problem.n, problem.k)


def scaled_hardware(problem: Problem, at_least: tuple[int, int]) -> str:
    """Why a GPU of this compute capability has no product of these fp8 dtypes, or empty."""
    if at_least < _FP8:
        return f"fp8 products need compute capability 8.9; this GPU has {at_least[0]}.{at_least[1]}"
    if problem.a.dtype == problem.b.dtype == "float8_e5m2":
        return "cuBLASLt does not multiply float8_e5m2 by float8_e5m2"
    return ""


def scaled_kinds(problem: Problem, at_least: tuple[int, int]) -> str:
    """Why ``_scaled_mm`` has no such scales, bias and output, or empty."""
    out, bias = problem.out_dtype, problem.epilogue[2:3]
    rows = bool(problem.epilogue) and problem.epilogue[0].axis == "row"
    if rows and out.startswith("float8"):
        return "_scaled_mm with scales per row wants an output of 16 or 32 bits on CUDA"
    if bias and out == "float32":
        return "_scaled_mm takes no bias into float32 on CUDA"
    kinds = HALVES if out.startswith("float8") else (out,)
    if bias and bias[0].dtype not in kinds:
        return f"_scaled_mm wants a bias of {' or '.join(kinds)} for {out} on CUDA; got {bias[0].dtype}"
    return scaled_hardware(problem, at_least)
