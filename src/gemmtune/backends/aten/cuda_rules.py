"""Which operands ATen's ops take on CUDA, as functions that return the reason in words."""

from __future__ import annotations

from ...core.problem import Problem
from .padding import why_scaled_sizes_unsupported

HALVES = ("bfloat16", "float16")
_FP8 = (8, 9)  # the lowest compute capability with fp8 products
_FEW_ROWS = 16


def why_too_many_rows(problem: Problem) -> str:
    """Return why a product that ends in a transposing copy is not offered on CUDA; empty for few rows."""
    return "" if problem.m <= _FEW_ROWS else "ends in a transposing copy on CUDA, which pays for 16 rows or fewer"


def why_byte_layout_unsupported(problem: Problem) -> str:
    """Return why cuBLASLt does not take one-byte operands in these layouts, or empty."""
    a, b = problem.a.layout, problem.b.layout
    if a.order == "row" and b.order == "col" and not ((a.ld or 0) % 16 or (b.ld or 0) % 16):
        return ""
    return "cuBLASLt wants a row-major and a column-major operand of bytes, with rows in multiples of 16"


def why_scaled_layout_unsupported(problem: Problem) -> str:
    """Return why ``_scaled_mm`` does not take operands of these sizes and layouts, or empty."""
    return why_byte_layout_unsupported(problem) or why_scaled_sizes_unsupported(problem.n, problem.k)


def why_fp8_unsupported(problem: Problem, capability: tuple[int, int]) -> str:
    """Return why a GPU of this compute capability cannot multiply these fp8 dtypes, or empty."""
    if capability < _FP8:
        return f"fp8 products need compute capability 8.9; this GPU has {capability[0]}.{capability[1]}"
    if problem.a.dtype == problem.b.dtype == "float8_e5m2":
        return "cuBLASLt does not multiply float8_e5m2 by float8_e5m2"
    return ""


def why_scales_unsupported(problem: Problem, capability: tuple[int, int]) -> str:
    """Return why ``_scaled_mm`` does not take this combination of scales, bias and output dtype, or empty."""
    out, bias = problem.out_dtype, problem.epilogue[2:3]
    row_scales = bool(problem.epilogue) and problem.epilogue[0].axis == "row"
    if row_scales and out.startswith("float8"):
        return "_scaled_mm with scales per row wants an output of 16 or 32 bits on CUDA"
    if bias and out == "float32":
        return "_scaled_mm takes no bias into float32 on CUDA"
    dtypes = HALVES if out.startswith("float8") else (out,)
    if bias and bias[0].dtype not in dtypes:
        return f"_scaled_mm wants a bias of {' or '.join(dtypes)} for {out} on CUDA; got {bias[0].dtype}"
    return why_fp8_unsupported(problem, capability)
