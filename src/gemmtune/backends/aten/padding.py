"""Products within the shape rules of CUDA's libraries: zeros are added around operands that do not keep them.

Everything here works on any device, so that the arithmetic is tested without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...core.torch_compat import int_mm, scaled_mm
from .cpu_rules import int_mm_takes_uint8

ALIGN = 16  # bytes that tensor cores and fp8 products want rows to be a multiple of; elements, to keep it simple
_INT_ROWS, _INT_ALIGN = 17, 8  # torch._int_mm on CUDA takes more than 16 rows, and K and N in multiples of 8
_FEW_ROWS = 32  # what fewer than 17 are padded to


def up(size: int, step: int) -> int:
    """The multiple of ``step`` at or above ``size``."""
    return -(-size // step) * step


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """The matrix [r, c] with zeros up to [rows, columns], row-major; itself when nothing is missing."""
    r, c = matrix.shape
    if (r, c) == (rows, columns):
        return matrix
    if matrix.dtype.itemsize > 1 or not matrix.dtype.is_floating_point:
        return functional.pad(matrix, (0, columns - c, 0, rows - r))
    # fp8 goes by its bytes: all zeros are 0.0
    return functional.pad(matrix.view(torch.uint8), (0, columns - c, 0, rows - r)).view(matrix.dtype)


def as_rows(matrix: Tensor) -> Tensor:
    """The matrix row-major, its rows on 16-byte boundaries where they were: a copy unless it is that already."""
    step = ALIGN // matrix.dtype.itemsize
    fits = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and matrix.data_ptr() % ALIGN == 0
    if fits and (matrix.stride(0) == matrix.shape[1] or matrix.stride(0) % step == 0):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def canonical_strides(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy of it where ``torch._int_mm`` (2.13, CPU) would misread its strides.

    One stride of 1 is taken for contiguous rows or columns, and the other one for the leading dimension, without a look
    at whether it is as long as a row (column): results are wrong, and memory beyond is read, for overlapping or
    expanded rows, and for a single row of strides (1, 1), as ``column.t()`` has. Measured over 20 layouts a side.
    """
    rows, cols = matrix.shape
    slow, fast = matrix.stride()
    if (slow, fast) == (cols, 1):
        return matrix
    if 1 in (rows, cols):
        return matrix.reshape(-1).view(rows, cols)
    if (fast == 1 and slow < cols) or (slow == 1 and fast < rows):
        return matrix.clone(memory_format=torch.contiguous_format)
    return matrix


def cpu_int_mm(a: Tensor, b: Tensor) -> Tensor:
    """``torch._int_mm`` on a CPU, of operands that lie anyhow; of uint8 activations with every torch."""
    if a.dtype == torch.uint8 and not int_mm_takes_uint8():
        signed, more = shifted(a, b)
        return cpu_int_mm(signed, b) + more
    return int_mm(canonical_strides(a), canonical_strides(b))


def on_boundary(vector: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if it starts off a 16-byte boundary."""
    return vector.clone() if vector.data_ptr() % ALIGN else vector


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` [M, N] in float32, not rounded in between; a, b: float32, bfloat16 or float16."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """``wide_mm`` for [batch, M, K] and [batch, K, N]."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def int_rules(m: int, n: int, k: int) -> str:
    """Why ``torch._int_mm`` does not take these sizes on CUDA, or empty."""
    if m < _INT_ROWS:
        return f"_int_mm wants more than 16 rows on CUDA; here are {m}"
    if n % _INT_ALIGN or k % _INT_ALIGN:
        return f"_int_mm wants K and N in multiples of 8 on CUDA; got K = {k}, N = {n}"
    return ""


def shifted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """int8 a' and int32 c [N] with ``a @ b == a' @ b + c`` for uint8 a [M, K] and int8 b [K, N]."""
    return (a ^ 128).view(torch.int8), 128 * b.sum(0, dtype=torch.int32)  # int32 sums wrap either way alike


def int_product(a: Tensor, b: Tensor, *, turned: bool = False) -> Tensor:
    """int8 or uint8 a [M, K] @ int8 b [K, N] -> int32, exact, for all sizes, by ``torch._int_mm`` within CUDA's rules.

    Those of sizes (``int_rules``), and of layouts: cuBLASLt multiplies a row-major by a column-major matrix. turned: as
    ``(B^T A^T)^T``. The result may be a view of something larger.
    """
    if a.dtype == torch.uint8:
        signed, more = shifted(a, b)
        return int_product(signed, b, turned=turned) + more
    if turned:
        return int_product(b.t(), a.t()).t()
    m, n = a.shape[0], b.shape[1]
    if 0 in (*a.shape, n):
        return torch.zeros(m, n, dtype=torch.int32, device=a.device)
    left, right = int_operands(a, b)
    out = int_mm(left, right)
    return out if out.shape == (m, n) else out[:m, :n]


def int_operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """int8 a [M, K] and b [K, N] as ``torch._int_mm`` takes them on CUDA: themselves where they fit."""
    (m, k), n = a.shape, b.shape[1]
    rows, inner, columns = m if m >= _INT_ROWS else _FEW_ROWS, up(k, _INT_ALIGN), up(n, _INT_ALIGN)
    return padded(as_rows(a), rows, inner), padded(as_rows(b.t()), columns, inner).t()


def scaled_rules(n: int, k: int) -> str:
    """Why ``torch._scaled_mm`` does not take these sizes on CUDA, or empty."""
    if n % ALIGN or k % ALIGN:
        return f"_scaled_mm wants K and N in multiples of 16 on CUDA; got K = {k}, N = {n}"
    return ""


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``torch._scaled_mm`` [M, N] of fp8 operands of any K, N, layout and address, within CUDA's rules: cuBLASLt wants
    scales and biases on 16-byte boundaries, too.

    scale_a, scale_b: one element each, or [M, 1] and [1, N]. out: contiguous, of ``out_dtype``; written where ATen can
    write it, and then returned. The result may be a view of something larger.
    """
    (m, k), n = a.shape, b.shape[1]
    inner, columns = up(k, ALIGN), up(n, ALIGN)
    left = padded(as_rows(a), m, inner)
    right = padded(as_rows(b.t()), columns, inner).t()
    if columns != n:
        scale_b = functional.pad(scale_b, (0, columns - n)) if scale_b.numel() == n and scale_b.dim() == 2 else scale_b
        bias = None if bias is None else functional.pad(bias, (0, columns - n))
    scale_a, scale_b = on_boundary(scale_a), on_boundary(scale_b)
    bias = None if bias is None else on_boundary(bias)
    if out is not None and columns == n and not out.data_ptr() % ALIGN:
        return scaled_mm(left, right, scale_a, scale_b, bias=bias, out_dtype=out_dtype, out=out)
    made = scaled_mm(left, right, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    return made if columns == n else made[:, :n]
