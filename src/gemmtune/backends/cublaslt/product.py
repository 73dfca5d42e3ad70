"""The description of a Problem for cuBLASLt, which assumes column-major matrices: the product is computed as C^T = B^T
A^T."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.epilogue import Step
from ...core.problem import Problem
from ..gpu.rules import ALIGN, FP8, HALVES, aligned_leads, leading_dimensions, why_no_gpu_kernel

# cudaDataType_t (library_types.h)
TYPES = {
    "float32": 0, "float16": 2, "int8": 3, "int32": 10, "bfloat16": 14, "float8_e4m3fn": 28, "float8_e5m2": 29,
}  # fmt: skip
_IN_FLOAT32, _IN_INT32 = 68, 72  # cublasComputeType_t
_PLAIN, _RELU, _BIAS = 1, 2, 4  # CUBLASLT_EPILOGUE_*
_ONE_SCALE, _VECTORS = 0, 3  # CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, _OUTER_VEC_32F
BIAS_AT, _SCALE_A_AT, _SCALE_B_AT = 8, 17, 18  # CUBLASLT_MATMUL_DESC_*_POINTER
WORKSPACE = 32 << 20  # bytes, the size that PyTorch gives cuBLASLt on an H100
RANKS = 8  # how many of cuBLASLt's ranked algorithms are offered
_BYTE_MULTIPLE = 16  # sizes and leading dimensions of one-byte operands must be multiples of it


@dataclass(frozen=True, slots=True)
class Matrix:
    """A column-major matrix. dtype: a cudaDataType_t. lead: leading dimension in elements. stride: elements from one
    matrix of a batch to the next."""

    dtype: int
    rows: int
    columns: int
    lead: int
    batches: int = 1
    stride: int = 0


@dataclass(frozen=True, slots=True)
class Product:
    """The product d = epilogue(op(a) op(b)), where a is the Problem's B, and b is its A. turned: whether op
    transposes a, and b.

    scaling: CUBLASLT_MATMUL_MATRIX_SCALE_* of the scales of a and b; None without scales. pointers: the attributes that
    hold the addresses of the epilogue's tensors, in the Problem's order. m: the rows of the Problem's A. by_m: what is
    proportional to it: the name of a Matrix, of its field, and the field's value for one row.
    """

    m: int
    by_m: tuple[tuple[str, str, int], ...]
    a: Matrix
    b: Matrix
    d: Matrix
    turned: tuple[bool, bool]
    compute: int
    scale: int
    epilogue: int
    scaling: int | None
    pointers: tuple[int, ...]


def why_unsupported(problem: Problem) -> str:
    """Return why cuBLASLt is not used for the Problem, or empty."""
    if problem.family not in ("mm", "bmm", "int_mm", "scaled_mm"):
        return f"multiplies matrices of one kind of element; got {problem.family}"
    return why_no_gpu_kernel(problem) or _why_bytes_unsupported(problem) or _why_epilogue_unsupported(problem)


def _why_bytes_unsupported(problem: Problem) -> str:
    a, b = problem.a, problem.b
    if a.dtype in HALVES:
        return ""
    if a.dtype == b.dtype == "float8_e5m2":
        return "does not multiply float8_e5m2 by float8_e5m2"
    rows = (problem.n, problem.k, a.layout.ld or 0, b.layout.ld or 0, problem.out.ld or 0)
    if (a.layout.order, b.layout.order) != ("row", "col") or any(size % _BYTE_MULTIPLE for size in rows):
        return f"wants a row-major A and a column-major B of bytes, and K, N and rows in multiples of {_BYTE_MULTIPLE}"
    return ""


def _why_epilogue_unsupported(problem: Problem) -> str:
    if problem.out_dtype not in {"int_mm": ("int32",)}.get(problem.family, ("float32", *HALVES)):
        return f"writes no {problem.out_dtype}"
    remaining = problem.epilogue
    if problem.family == "scaled_mm":
        kinds = tuple((step.kind, step.axis) for step in remaining[:2])
        if kinds not in ((("scale", "tensor"),) * 2, (("scale", "row"), ("scale", "col"))):
            return "takes one scale per operand, both per tensor, or per row and column"
        if any(step.dtype != "float32" or step.value != 1.0 for step in remaining[:2]):
            return "takes its scales as float32 tensors"
        remaining = remaining[2:]
    if problem.family in ("bmm", "int_mm") and remaining:
        return "batched products and products of integers take no epilogue"
    if remaining and not all(aligned_leads(problem)):
        # Otherwise a bias is added after rounding the product to 16 bits, and relu makes NaN 0
        # (docs/notes/cublaslt.md).
        return f"takes no bias and no relu where rows of A, B or the output are no multiples of {ALIGN} bytes"
    if remaining and remaining[0].kind == "bias":
        if not _is_bias(remaining[0], problem):
            return "takes a bias a column of the output's dtype, of 16 bits"
        remaining = remaining[1:]
    if len(remaining) > 1 or (remaining and (remaining[0].kind != "relu" or problem.a.dtype in FP8)):
        # Its gelu uses a fast tanh: error up to 3 times the bound in 3 of 641 random problems (H200, torch 2.11+cu130).
        return "takes a bias, then relu"
    return ""


def _is_bias(step: Step, problem: Problem) -> bool:
    return (step.axis, step.value, step.dtype) == ("col", 1.0, problem.out_dtype) and problem.out_dtype in HALVES


def describe_product(problem: Problem, m: int, strides: tuple[int, int] = (0, 0)) -> Product:
    """Return the Product of a supported Problem with m rows. strides: elements from one matrix of A, and of B, to the
    next in a batch."""
    n, k = problem.n, problem.k
    lda, ldb, ldc = leading_dimensions(problem, m)
    a_transposed, b_transposed = problem.b.layout.order == "col", problem.a.layout.order == "col"
    a, b, batches = TYPES[problem.b.dtype], TYPES[problem.a.dtype], problem.batch
    steps = problem.epilogue
    kinds = {step.kind for step in steps}
    is_integer, has_bias = problem.family == "int_mm", "bias" in kinds
    scaling, pointers = None, (BIAS_AT,) if has_bias else ()
    if problem.family == "scaled_mm":
        scaling = _ONE_SCALE if steps[0].axis == "tensor" else _VECTORS
        pointers = (_SCALE_B_AT, _SCALE_A_AT, *pointers)
    by_m = [("b", "rows" if b_transposed else "columns", 1), ("d", "columns", 1)]
    if b_transposed and problem.a.layout.ld is None:
        by_m.append(("b", "lead", 1))
    if batches > 1:
        by_m.append(("d", "stride", ldc))
    return Product(
        m, tuple(by_m),
        Matrix(a, *((k, n) if a_transposed else (n, k)), ldb, batches, strides[1]),
        Matrix(b, *((m, k) if b_transposed else (k, m)), lda, batches, strides[0]),
        Matrix(TYPES[problem.out_dtype], n, m, ldc, batches, m * ldc),
        (a_transposed, b_transposed),
        _IN_INT32 if is_integer else _IN_FLOAT32,
        TYPES["int32" if is_integer else "float32"],
        (_BIAS if has_bias else 0) | (_RELU if "relu" in kinds else 0) or _PLAIN,
        scaling,
        pointers,
    )  # fmt: skip
