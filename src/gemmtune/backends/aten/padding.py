"""Products within the shape rules of CUDA's libraries: operands that violate the rules are padded with zeros.

All functions of this module work on any device, so that their arithmetic is tested without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...core.torch_compat import int_mm, scaled_mm
from .cpu_rules import int_mm_takes_uint8

# Tensor cores and fp8 products want rows that are a multiple of so many bytes. Used as elements, too, for simplicity.
ALIGN = 16
_INT_ROWS, _INT_ALIGN = 17, 8  # torch._int_mm on CUDA takes more than 16 rows, and K and N in multiples of 8
_FEW_ROWS = 32  # rows that a matrix with fewer than 17 is padded to


def round_up(size: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is at least ``size``."""
    return -(-size // step) * step


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Return the matrix [r, c] padded with zeros to [rows, columns], row-major; the matrix itself when it has that
    shape."""
    r, c = matrix.shape
    if (r, c) == (rows, columns):
        return matrix
    if matrix.dtype.itemsize > 1 or not matrix.dtype.is_floating_point:
        return functional.pad(matrix, (0, columns - c, 0, rows - r))
    # pad does not take fp8: pad its bytes; a zero byte is 0.0
    return functional.pad(matrix.view(torch.uint8), (0, columns - c, 0, rows - r)).view(matrix.dtype)


def as_rows(matrix: Tensor) -> Tensor:
    """Return the matrix in row-major order, with rows that start on 16-byte boundaries where its row length allows: a
    copy unless the matrix already has this form."""
    step = ALIGN // matrix.dtype.itemsize
    fits = matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1] and matrix.data_ptr() % ALIGN == 0
    if fits and (matrix.stride(0) == matrix.shape[1] or matrix.stride(0) % step == 0):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def canonical_strides(matrix: Tensor) -> Tensor:
    """Return the matrix, or a copy of it where ``torch._int_mm`` (2.13, CPU) would misread its strides.

    If one stride is 1, ``_int_mm`` takes the rows or columns for contiguous and the other stride for the leading
    dimension, and does not check that the leading dimension is at least as long as a row (column). For overlapping or
    expanded rows, and for a single row with strides (1, 1), as ``column.t()`` has, results are wrong and memory beyond
    the matrix is read. Measured over 20 layouts of each operand.
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
    """Return ``torch._int_mm`` on a CPU, for operands with any strides, and for uint8 activations with every version of
    torch."""
    if a.dtype == torch.uint8 and not int_mm_takes_uint8():
        signed, correction = shift_to_int8(a, b)
        return cpu_int_mm(signed, b) + correction
    return int_mm(canonical_strides(a), canonical_strides(b))


def aligned_vector(vector: Tensor) -> Tensor:
    """Return the tensor, or a copy of it if it starts off a 16-byte boundary."""
    return vector.clone() if vector.data_ptr() % ALIGN else vector


def wide_mm(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` [M, N] in float32 without an intermediate rounding; a, b: float32, bfloat16 or float16."""
    if a.dtype == torch.float32:
        return torch.mm(a, b)
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


def wide_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Return the batched ``wide_mm`` of [batch, M, K] and [batch, K, N]."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    if a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())


def why_int_sizes_unsupported(m: int, n: int, k: int) -> str:
    """Return why ``torch._int_mm`` does not take these sizes on CUDA, or empty."""
    if m < _INT_ROWS:
        return f"_int_mm wants more than 16 rows on CUDA; here are {m}"
    if n % _INT_ALIGN or k % _INT_ALIGN:
        return f"_int_mm wants K and N in multiples of 8 on CUDA; got K = {k}, N = {n}"
    return ""


def shift_to_int8(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 a' and int32 c [N] with ``a @ b == a' @ b + c``, for uint8 a [M, K] and int8 b [K, N]."""
    return (a ^ 128).view(torch.int8), 128 * b.sum(0, dtype=torch.int32)  # int32 sums wrap in both forms alike


def int_product(a: Tensor, b: Tensor, *, turned: bool = False) -> Tensor:
    """Return int8 or uint8 a [M, K] @ int8 b [K, N] -> int32, exact, for all sizes and strides.

    It calls ``torch._int_mm`` within CUDA's rules: those for sizes (``why_int_sizes_unsupported``), and cuBLASLt's rule
    that a row-major matrix is multiplied by a column-major one. turned: compute ``(B^T A^T)^T``. The result may be
    a view of a larger tensor.
    """
    if a.dtype == torch.uint8:
        signed, correction = shift_to_int8(a, b)
        return int_product(signed, b, turned=turned) + correction
    if turned:
        return int_product(b.t(), a.t()).t()
    m, n = a.shape[0], b.shape[1]
    if 0 in (*a.shape, n):
        return torch.zeros(m, n, dtype=torch.int32, device=a.device)
    left, right = int_operands(a, b)
    out = int_mm(left, right)
    return out if out.shape == (m, n) else out[:m, :n]


def int_operands(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 a [M, K] and b [K, N] in the form that ``torch._int_mm`` takes on CUDA: unchanged where they have
    it."""
    (m, k), n = a.shape, b.shape[1]
    rows, inner, columns = m if m >= _INT_ROWS else _FEW_ROWS, round_up(k, _INT_ALIGN), round_up(n, _INT_ALIGN)
    return padded(as_rows(a), rows, inner), padded(as_rows(b.t()), columns, inner).t()


def why_scaled_sizes_unsupported(n: int, k: int) -> str:
    """Return why ``torch._scaled_mm`` does not take these sizes on CUDA, or empty."""
    if n % ALIGN or k % ALIGN:
        return f"_scaled_mm wants K and N in multiples of 16 on CUDA; got K = {k}, N = {n}"
    return ""


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``torch._scaled_mm`` [M, N] of fp8 operands with any K, N, layout and address.

    The operands are padded or copied to satisfy CUDA's rules; cuBLASLt requires scales and biases on 16-byte
    boundaries, too. scale_a, scale_b: one element each, or [M, 1] and [1, N]. out: contiguous, of ``out_dtype``; where
    ATen can write it directly, it is written and returned. The result may be a view of a larger tensor.
    """
    (m, k), n = a.shape, b.shape[1]
    if a.stride() == (k, 1) and b.stride() == (1, k) and not (k % ALIGN or n % ALIGN):
        # The usual case on its own, without nine more calls of functions.
        addresses = a.data_ptr() | b.data_ptr() | scale_a.data_ptr() | scale_b.data_ptr()
        if bias is None and out is None and not addresses % ALIGN:
            return scaled_mm(a, b, scale_a, scale_b, out_dtype=out_dtype)
    inner, columns = round_up(k, ALIGN), round_up(n, ALIGN)
    left = padded(as_rows(a), m, inner)
    right = padded(as_rows(b.t()), columns, inner).t()
    if columns != n:
        scale_b = functional.pad(scale_b, (0, columns - n)) if scale_b.numel() == n and scale_b.dim() == 2 else scale_b
        bias = None if bias is None else functional.pad(bias, (0, columns - n))
    scale_a, scale_b = aligned_vector(scale_a), aligned_vector(scale_b)
    bias = None if bias is None else aligned_vector(bias)
    if out is not None and columns == n and not out.data_ptr() % ALIGN:
        return scaled_mm(left, right, scale_a, scale_b, bias=bias, out_dtype=out_dtype, out=out)
    result = scaled_mm(left, right, scale_a, scale_b, bias=bias, out_dtype=out_dtype)
    return result if columns == n else result[:, :n]
