"""The oracle: the expected result of a Problem in float64 (exact for integers), and the error of a correct kernel.

``reference(problem, a, b, aux)`` returns an Oracle: the output before its final rounding, and the largest difference
from it that a correct kernel may have. For given A and B, the accumulator's error is at most

    lambda * sqrt(k) * u_acc * (|A| |B|)

(Higham and Mary 2019, "A new approach to probabilistic rounding error analysis", theorem 3.1). Here lambda = 4. The
theorem assumes that every rounding error has its extreme size u; real errors are spread over [-u, u] (standard
deviation u / sqrt(3)), so that 4 corresponds to 6.9 standard deviations, a probability of 1e-11 per element, even for a
sequential sum of terms of one sign. The epilogue multiplies this error by its Lipschitz constants and adds a few
roundings of its own.

Precision of the oracle:
  - integers: exact at every size (products and sums of 8-bit integers stay far below 2**53).
  - M <= 256, or at most 10 GFLOP, and every Problem on a GPU: float64 throughout. Every element of the output is
    checked, and a setting that computes float32 products in tf32 has no effect.
  - larger: float32 products, one block at a time. A random projection in float64 (Freivalds) certifies each block: an
    element whose error exceeds about one error unit fails the block, which is then computed again in float64. The
    oracle's own float32 error is added to the bound. So every element is checked here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core import devices
from ..core.devices import is_host
from ..core.epilogue import GATES, Step
from ..core.problem import Problem

if TYPE_CHECKING:
    from ..core.weights import QuantWeight

LAMBDA = 4.0
UNIT = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3,
}  # fmt: skip
INTEGERS = ("int8", "uint8", "int32", "int64", "int4")

# Hopper's matrix units align the fp8 products of one instruction to the largest of them and keep some 14 bits below it
# (DeepSeek-AI 2024, "DeepSeek-V3 technical report", 3.3.2): on an H200, torch._scaled_mm without fast accumulation and
# gemmtune's kernels gave the same number at the worst element. Each of the 32 products of one instruction may lose
# 2**-13 of the largest one. These errors have either sign; their sum has a spread of FP8_UNIT * FP8_SPREAD times the
# root of the products' sum of squares. FP8_UNIT * |A||B| covers the truncation of products of one sign. Without the
# spread, correct kernels exceeded the bound by up to 5.75 times (K = 128, values over all exponents); with it, none of
# 2,000 problems did (tests/gpu/test_triton.py). Sums over all of K in the matrix units (fast accumulation) are another
# Problem.
FP8_UNIT, FP8_SPREAD = 2.0**-13, 48.0

# Hopper's matrix units align a float16 product by the exponent fields of its operands and keep 25 bits below the
# largest product, so that a subnormal float16 has the error of the smallest normal number. This arithmetic reproduced
# every bit of the results of torch.mm, cuBLASLt and Triton on an H200
# (benchmarks/results/gpu-fp16-subnormals-20261123.json); without it, one of 1,000 products of cuBLASLt was outside of
# the bound. The flush-to-zero term covers bfloat16's subnormals. CPUs convert operands before they multiply.
_FP16_SMALLEST_NORMAL = 2.0**-14

_FULL_ROWS = 256
_FULL_FLOPS = 10e9
_BLOCK_BYTES = 16 << 20  # block of B in float64: it stays in the last-level cache
_CHUNK = 1 << 21  # output elements for which the epilogue is computed at a time
_DEVICE_BLOCK_BYTES, _DEVICE_CHUNK = 256 << 20, 1 << 26  # with smaller ones, launches dominate on a GPU
_SMALLEST_NORMAL = 2.0**-126  # smallest normal of float32 and bfloat16: flush-to-zero may change a value by that


@dataclass(frozen=True, slots=True)
class Oracle:
    """The expected result of a Problem, and the error that a correct kernel may have before it rounds the output.

    value: [M, N] ([batch, M, N] for bmm), before the final rounding; int64 for integer products without epilogue,
    else float64 (on a CPU float32 for problems beyond 10 GFLOP with M > 256). magnitude: float32, of the same shape;
    the permitted error is ``unit * magnitude``. For an element with an infinite magnitude every result is accepted.
    Both tensors are on the operands' device.
    """

    value: Tensor
    magnitude: Tensor
    unit: float


def reference(problem: Problem, a: Tensor, b: Tensor | QuantWeight, aux: Sequence[Tensor] = ()) -> Oracle:
    """Compute the Oracle of one set of operands, in the shapes of ``Kernel.run``, on their device.

    Memory beyond the result: about 100 MB, plus A in float64 (float32 for the largest problems). On a GPU: some blocks
    of 256 MB of B, and as many columns of the output, in float64.
    """
    return apply_epilogue(problem, *products(problem, a, b, aux), aux)


def is_integer(problem: Problem) -> bool:
    """Whether A @ B is a product of integers, whose accumulator is exact."""
    return problem.a.dtype in INTEGERS and problem.b.dtype in INTEGERS and problem.b.quant is None


def is_large(problem: Problem, device: torch.device) -> bool:
    """Whether float64 throughout would take too long on ``device``; see the module's docstring for the alternative."""
    return is_host(device.type) and problem.m > _FULL_ROWS and problem.flops > _FULL_FLOPS and problem.acc != "float64"


def error_unit(problem: Problem) -> float:
    """Return ``lambda * sqrt(k) * u_acc``; for integer products one float32 rounding, that of their conversion."""
    if is_integer(problem):
        return UNIT["float32"]
    root = LAMBDA * math.sqrt(max(problem.k, 1))
    if problem.acc == "tf32":  # each operand is first rounded to 11 bits, then sums are kept in float32
        return root * UNIT["float32"] + 2.0 * UNIT["float16"]
    if problem.acc not in UNIT:
        raise ValueError(f"no error bound is known for accumulator {problem.acc!r}; known: {', '.join(UNIT)}, tf32")
    if problem.family == "scaled_mm":
        return max(FP8_UNIT, root * UNIT[problem.acc])
    # float64: the oracle rounds as much as the kernel does.
    return root * UNIT[problem.acc] * (2.0 if problem.acc == "float64" else 1.0)


Products = Callable[[Problem, Tensor, Any], tuple[Tensor, Tensor]]
_PRODUCTS: dict[str, Products] = {}


def register(family: str, compute: Products) -> None:
    """Set the oracle of an added family (``core.problem.register_family``): it computes what ``products`` returns, the
    product in float64 and the product of absolute values in float32.

    Without one, the oracle multiplies matrices, or batches of them.
    """
    _PRODUCTS[family] = compute


def products(problem: Problem, a: Tensor, b: Tensor | QuantWeight, aux: Sequence[Tensor] = ()) -> tuple[Tensor, Tensor]:
    """Compute (A @ B, |A| @ |B|). aux: the epilogue's tensors, of which only those of a norm are used.

    A @ B is float64, float32 beyond 10 GFLOP with many rows, or int64. |A| @ |B| is float32 and includes the term for
    flush-to-zero. ``a`` may have any number of rows: test cases that share B are stacked, so that B is converted once.
    """
    a, b = a.detach(), b.detach() if isinstance(b, Tensor) else b
    if problem.family in _PRODUCTS:
        return _PRODUCTS[problem.family](problem, a, b)
    if a.dim() == 3 and isinstance(b, Tensor):
        pairs = [_product(problem, a[i], b[i]) for i in range(a.shape[0])]
        if not pairs:
            return _empty(problem, a.shape[1], a.device, batch=True)
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
    return _product(problem, a, b) if problem.norm is None else _normed_product(problem, a, b, aux)


def apply_epilogue(problem: Problem, acc: Tensor, magnitude: Tensor, aux: Sequence[Tensor]) -> Oracle:
    """Apply the epilogue to the accumulator and to its error. Overwrites both tensors where the shape stays."""
    unit = error_unit(problem)
    if not problem.epilogue:
        if is_integer(problem) and problem.out_dtype not in INTEGERS:  # for one conversion to float32
            magnitude = acc.abs().to(torch.float32)
        return Oracle(acc, magnitude, unit)
    if not acc.is_floating_point():
        acc = acc.to(torch.float64)
    value, scale = (t if t.dim() == 3 else t.unsqueeze(0) for t in (acc, magnitude))
    results = (value, scale)
    if problem.gate is not None:
        acc, magnitude = (torch.empty_like(t[:, : problem.columns]) for t in (acc, magnitude))
        results = (acc.unsqueeze(0), magnitude.unsqueeze(0))
    rows = max(1, (_CHUNK if is_host(acc.device.type) else _DEVICE_CHUNK) // max(1, value.shape[2]))
    for i in range(value.shape[0]):
        for r in range(0, value.shape[1], rows):
            part = (i, slice(r, r + rows))
            v, e = _epilogue(problem, value[part].double(), scale[part].double() * unit, aux, part)
            results[0][part] = v
            results[1][part] = e / unit
    return Oracle(acc, magnitude, unit)


# --- products ---------------------------------------------------------------------------------------------------


def _empty(problem: Problem, rows: int, device: torch.device, batch: bool = False) -> tuple[Tensor, Tensor]:
    shape = (problem.batch, rows, problem.n) if batch else (rows, problem.n)
    dtype = torch.int64 if is_integer(problem) else torch.float64
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=torch.float32, device=device)


def _block_columns(k: int, device: torch.device) -> int:
    """Return the number of columns of B in one block."""
    return max(16, (_BLOCK_BYTES if is_host(device.type) else _DEVICE_BLOCK_BYTES) // (8 * max(k, 1)))


def _product(problem: Problem, a: Tensor, b: Any) -> tuple[Tensor, Tensor]:
    if is_integer(problem):
        return _integer_product(problem, a, b)
    acc, magnitude = _empty(problem, a.shape[0], a.device)
    if not (acc.numel() and problem.k):
        return acc, magnitude.fill_(_SMALLEST_NORMAL / error_unit(problem))
    large = is_large(problem, a.device)
    if large:
        acc = acc.to(torch.float32)
    a_abs = (
        _with_alignment_error(torch.nan_to_num(a.float(), 0.0, 0.0, 0.0).abs_(), a)
        if problem.acc != "float64"
        else a.abs()
    )
    if not is_host(a.device.type):
        a_abs = a_abs.double()
    a_top = _power_of_two_above(a_abs)
    a_abs = a_abs / a_top
    flushed = _SMALLEST_NORMAL / error_unit(problem) if _flushes(problem) else 0.0
    a_sum = a_abs.sum(1, keepdim=True, dtype=torch.float64) * a_top
    a_wide = a.float() if large else a.double()
    step = _block_columns(problem.k, a.device)
    for j in range(0, problem.n, step):
        block, b_abs = _columns(b, slice(j, j + step), problem.k)
        part = (slice(None), slice(j, j + step))
        accept_any = _flushed_infinity(problem, a, b, part[1])
        b_top = _power_of_two_above(b_abs)
        b_sum = b_abs.sum(0, keepdim=True)
        mag = (a_abs @ (b_abs / b_top).to(a_abs.dtype)).double() * (a_top * b_top)
        mag += flushed * (a_sum + b_sum + problem.k)
        if problem.family == "scaled_mm":
            squares = (a_abs * a_abs) @ ((b_abs / b_top).to(a_abs.dtype) ** 2)
            mag += FP8_SPREAD * squares.sqrt().double() * (a_top * b_top)
        if large:
            mag *= 2.0  # the oracle's own float32 sums
            acc[part] = _certified(a_wide, block, mag, error_unit(problem))
        else:
            acc[part] = a_wide @ block
        magnitude[part] = mag if accept_any is None else mag.masked_fill_(accept_any, math.inf)
    if not isinstance(b, Tensor):  # inf * (q - zero) is inf or NaN, depending on how the sum is split
        magnitude[a.isinf().any(1)] = math.inf
    return acc, magnitude


def _normed_product(problem: Problem, a: Tensor, b: Any, aux: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute the product of A's normalised rows, and its error in units of ``error_unit``. aux: begins with the norm's
    weight, and the bias of a layer norm that has one.

    Kernels round the normalised rows, or A times the norm's weight, to A's dtype: twice at most for each element, by u
    each time. These errors are independent, so that their sum has a spread of the root of the products' sum of squares
    (as in Higham and Mary's theorem, with the same lambda). The row's factor has the error of a sum of K squares, the
    mean that a layer norm subtracts that of a sum of K numbers, which all elements of the row share. Where float32 has
    no room for the sum of squares, every result is accepted.
    """
    norm, tensors = problem.norm, [t.detach().double() for t in aux[: len(problem.norm_steps)]]
    assert norm is not None
    wide, factor = a.double(), tensors[0]
    total = wide.square().sum(1, keepdim=True)
    is_centered = norm.kind == "layer_norm"
    centered = wide - wide.mean(1, keepdim=True) if is_centered else wide
    mean_square = centered.square().sum(1, keepdim=True) / problem.k + norm.value
    scale = mean_square.rsqrt()
    normed = centered * scale * factor
    sizes = torch.nan_to_num(normed, 0.0, 0.0, 0.0).abs_()
    if len(tensors) > 1:
        normed = normed + tensors[1]
        sizes += _finite_abs(tensors[1])
    acc, magnitude = _product(problem, normed, b)
    uncertain = ((total > 2.0**126) & total.isfinite()) | (mean_square < 2.0**-100)
    flushed = _SMALLEST_NORMAL * torch.nan_to_num(scale * factor.abs().max(), 0.0, 0.0, 0.0)
    # Of each normalised element before its weight, in units of ``error_unit``.
    mean_error = torch.nan_to_num(wide.abs().mean(1, keepdim=True) * scale, 0.0, 0.0, 0.0) if is_centered else None
    unit, step = error_unit(problem), _block_columns(problem.k, a.device)
    for j in range(0, problem.n, step):
        columns = (slice(None), slice(j, j + step))
        _, b_abs = _columns(b, columns[1], problem.k)
        spread = (sizes.square() @ b_abs.square()).sqrt() * (2.0 * LAMBDA * UNIT[problem.a.dtype])
        lost = flushed * b_abs.sum(0, keepdim=True)
        magnitude[columns] += (spread + lost) / unit + _finite_abs(acc[columns].double())
        if mean_error is not None:
            magnitude[columns] += mean_error * (factor.abs() @ b_abs)
    return acc, magnitude.masked_fill_(uncertain, math.inf)


def _with_alignment_error(size: Tensor, operand: Tensor) -> Tensor:
    """Return |operand| for the error bound; on a GPU, nonzero float16 values are at least the smallest normal number.

    size: |operand|.
    """
    if operand.dtype != torch.float16 or not devices.get(operand.device.type).aligns_fp16_products:
        return size
    return torch.where(size > 0.0, size.clamp(min=_FP16_SMALLEST_NORMAL), size)


def _power_of_two_above(t: Tensor) -> float:
    """Return the power of two just above max(t). Division by it keeps float32 magnitudes normal and finite."""
    top = float(t.amax())  # which takes a twentieth of ``max()`` where columns are contiguous
    return 2.0 ** max(-1000, math.frexp(top)[1]) if top > 0 and math.isfinite(top) else 1.0


def _flushed_infinity(problem: Problem, a: Tensor, b: Any, columns: slice) -> Tensor | None:
    """Return the mask [M, columns] of elements that may be either infinite or NaN; None when there are none.

    Such an element has a product of an infinity and a subnormal, which a kernel may flush to 0. The mask includes all
    elements of a row or column that has an infinity and a subnormal.
    """
    if not _flushes(problem) or not isinstance(b, Tensor):
        return None
    block = b[:, columns]
    infinite_columns, infinite_rows = _infinite_columns(block), a.isinf().any(1, keepdim=True)
    mask = None
    if bool(infinite_columns.any()):
        mask = _subnormal(a).any(1, keepdim=True) & infinite_columns
    if bool(infinite_rows.any()):
        k_indices = a.isinf().any(0).nonzero().squeeze(1)  # B's other subnormals are multiplied by finite numbers
        row_mask = infinite_rows & _subnormal(block.index_select(0, k_indices)).any(0)
        mask = row_mask if mask is None else mask | row_mask
    return mask


def _infinite_columns(block: Tensor) -> Tensor:
    """Return the mask [columns] of the columns with an infinity. Takes a tenth of ``isinf().any(0)`` where there are
    few."""
    mask = ~block.abs().amax(0).isfinite()  # a NaN hides an infinity
    indices = mask.nonzero().squeeze(1)
    mask[indices] = block.index_select(1, indices).isinf().any(0)
    return mask


def _subnormal(t: Tensor) -> Tensor:
    return (t != 0) & (t.abs() < _SMALLEST_NORMAL)


def _flushes(problem: Problem) -> bool:
    """Whether kernels may flush subnormals to zero: bf16 dot instructions do, float32 kernels may in FTZ mode."""
    return problem.acc != "float64" and bool({"bfloat16", "float32"} & {problem.a.dtype, problem.b.dtype})


def _certified(a: Tensor, block: Tensor, mag: Tensor, unit: float) -> Tensor:
    """Compute a @ block in float32 and certify it with a projection on random signs in float64.

    Rows that fail are computed in float64, like rows with NaN or infinities. The projection of a float32 row has an
    error of about sqrt(columns) typical errors, and ``unit`` is some sqrt(k) typical errors. Only finite columns of
    usual size are projected, since the error of a much larger column would hide the others'. The other columns are
    computed in float64.
    """
    result = a @ block.float()
    generator = torch.Generator().manual_seed(block.shape[0] * 31 + block.shape[1])
    sizes = block.abs().amax(0)
    usual = sizes <= 16.0 * torch.where(sizes.isfinite(), sizes, 0.0).median()
    result[:, ~usual] = (a.double() @ block[:, ~usual]).float()
    signs = (torch.randint(0, 2, (block.shape[1],), generator=generator).double() * 2 - 1) * usual
    projected_block = torch.where(usual, block, 0.0) @ signs
    for r in range(0, a.shape[0], 1024):
        rows = slice(r, r + 1024)
        projected = torch.where(usual, result[rows].double(), 0.0) @ signs
        bound = unit * torch.where(usual, mag[rows], 0.0).amax(1)
        if not bool(((projected - a[rows].double() @ projected_block).abs() <= bound).all()):
            result[rows] = (a[rows].double() @ block).float()
    return result


def _integer_product(problem: Problem, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    narrow = {problem.a.dtype, problem.b.dtype} <= {"int8", "uint8"}
    if not is_host(a.device.type) and not narrow:  # CUDA has no products of int32 or int64
        acc, magnitude = _integer_product(problem, a.cpu(), b.cpu())
        return acc.to(a.device), magnitude.to(a.device)
    acc, magnitude = _empty(problem, a.shape[0], a.device)
    wide = a.to(torch.float64 if narrow else torch.int64)  # below 2**53 in float64: exact, and far faster
    step = _block_columns(problem.k, a.device)
    for j in range(0, problem.n, step):
        block = b[:, j : j + step].to(wide.dtype)
        acc[:, j : j + step] = (wide @ block).to(torch.int64)
    if problem.acc == "int32":  # int32 sums wrap in hardware
        acc = (acc + 2**31).remainder_(2**32).sub_(2**31)
    return acc, magnitude


def _columns(b: Any, columns: slice, k: int) -> tuple[Tensor, Tensor]:
    """Return columns of B in float64, and their magnitude.

    The magnitude of q - zero is |q| + |zero|, since kernels may sum both parts separately.
    """
    if isinstance(b, Tensor):
        block = b[:, columns].double()
        return block, _with_alignment_error(torch.nan_to_num(block, 0.0, 0.0, 0.0).abs_(), b)
    q = _unpacked_values(b, columns, k)
    scale = _expand_groups(b.scale, b.quant.group, columns, k)
    if b.zero_point is not None:
        zero = _expand_groups(b.zero_point, b.quant.group, columns, k)
    elif b.dtype == "int4":
        zero = torch.full((1, 1), 8.0, dtype=torch.float64, device=q.device)
    else:
        return (block := q * scale), _finite_abs(block)
    parts = q.abs() + zero.abs()
    if b.dtype == "int4":  # kernels may first subtract 8 from both, for signed values
        parts = torch.maximum(parts, (q - 8.0).abs() + (zero - 8.0).abs())
    return (q - zero) * scale, torch.nan_to_num(parts * scale.abs(), 0.0, 0.0, 0.0)


def _unpacked_values(b: QuantWeight, columns: slice, k: int) -> Tensor:
    data = b.data[:, columns]
    if b.dtype != "int4":
        return data.double()
    q = torch.empty(2 * data.shape[0], data.shape[1], dtype=torch.float64, device=data.device)
    q[0::2] = data & 15
    q[1::2] = data >> 4
    return q[:k]


def _expand_groups(t: Tensor, group: int | None, columns: slice, k: int) -> Tensor:
    wide = t.detach()[..., columns].double()
    if wide.dim() == 1:
        return wide.unsqueeze(0)
    return wide.repeat_interleave(group or k, 0)[:k] if wide.shape[0] > 1 else wide


# --- epilogue ---------------------------------------------------------------------------------------------------


def _epilogue(
    problem: Problem, v: Tensor, e: Tensor, aux: Sequence[Tensor], part: tuple[int, slice]
) -> tuple[Tensor, Tensor]:
    """Apply all steps to one block. v: its values, e: its errors, both float64. part: (batch index, rows)."""
    u = UNIT["float32"] if problem.acc in ("int32", "tf32") else UNIT[problem.acc]
    u *= 2.0 if problem.acc == "float64" else 1.0  # the oracle rounds as much as the kernel does
    exact = is_integer(problem)
    tensors = iter(aux)
    for step in problem.epilogue:
        if step.axis == "inner":  # of the norm in front of the product
            next(tensors)
            continue
        t = _tensor_for_block(next(tensors), step, part) if step.takes_tensor else torch.ones((), dtype=torch.float64)
        if exact and _needs_float(step):
            exact = False
            e = e + u * _finite_abs(v) * ~_in_float32(v)
        v, e = _step(step, v, e, t, 0.0 if exact else u)
    if exact:
        return v, e
    return v, e if problem.out_dtype in INTEGERS else e + u * _finite_abs(v)


def _finite_abs(v: Tensor) -> Tensor:
    """Return |v|, and 0 where v is not finite: with an infinite error, every result would be accepted."""
    return torch.nan_to_num(v.abs(), 0.0, 0.0, 0.0)


def _tensor_for_block(t: Tensor, step: Step, part: tuple[int, slice]) -> Tensor:
    wide = t.detach()
    if step.axis == "tensor":
        return wide.reshape(()).double()
    if step.axis == "col":
        return wide.double()
    if step.axis == "row":
        rows = wide if wide.dim() == 1 else wide.reshape(-1, wide.shape[-1])[part[0]]
        return rows[part[1]].double().unsqueeze(1)
    return (wide[part] if wide.dim() == 3 else wide[part[1]]).double()


def _needs_float(step: Step) -> bool:
    """Whether this step converts an integer accumulator to float32."""
    if step.kind in ("relu", "clamp"):
        return any(math.isfinite(x) and x != int(x) for x in (step.lo, step.hi))
    if step.kind == "cast":
        return step.dtype not in INTEGERS
    return step.kind not in ("bias", "add", "mul") or step.dtype not in INTEGERS or step.value != int(step.value)


def _step(step: Step, v: Tensor, e: Tensor, t: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """Apply one step in float64. The error is multiplied by the step's Lipschitz constant, plus roundings of u each."""
    match step.kind:
        case "scale" | "mul":
            return _scaled(v, e, t, step.value if step.kind == "scale" else 1.0, u)
        case "bias" | "add":
            addend = t * step.value
            out = v + addend
            exact = (e == 0.0) & _in_float32(addend) & _in_float32(out)
            return out, e + u * (_finite_abs(out) + _finite_abs(addend)) * ~exact
        case "relu":
            return v.clamp(min=0.0), e
        case "clamp":
            return v.clamp(step.lo, step.hi), e
        case "cast":
            return _cast(v, e, str(step.dtype))
    return _gated(step, v, e, u) if step.kind in GATES else _activate(step.kind, v, e, u)


def _gated(step: Step, v: Tensor, e: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """Multiply the activation of the left half of the columns by the right half.

    Beside an infinity, the result is uncertain; beside a NaN it is NaN.
    """
    (gate, value), (gate_e, value_e) = v.chunk(2, -1), e.chunk(2, -1)
    gate, gate_e = _activate(GATES[step.kind], gate, gate_e, u)
    out = gate * value
    error = gate.abs() * value_e + value.abs() * gate_e + gate_e * value_e + u * out.abs()
    return out, torch.nan_to_num(error, math.inf, math.inf).masked_fill_(gate.isnan() | value.isnan(), 0.0)


def _scaled(v: Tensor, e: Tensor, t: Tensor, number: float, u: float) -> tuple[Tensor, Tensor]:
    """Multiply v by a tensor and a number, in any order.

    The product is exact where v is exact and both factors are powers of two (or 0): a tie in a later conversion to an
    integer is then a tie in every kernel. With an infinite factor, the result is uncertain only where v may be 0 or has
    an uncertain sign; with a NaN factor, it is certain.
    """
    factor = t * number
    out = v * factor
    exact = (e == 0.0) & _power_of_two(t) & _power_of_two(torch.tensor(number, dtype=torch.float64)) & _in_float32(out)
    certain = (e == 0.0) | factor.isnan() | (factor.isinf() & (v.abs() > e))
    propagated = torch.where(certain, 0.0, torch.nan_to_num(e * factor.abs(), math.inf, math.inf))
    return out, propagated + 2 * u * _finite_abs(out) * ~exact


def _power_of_two(t: Tensor) -> Tensor:
    """Return the mask of elements that are powers of two, or 0."""
    mantissa, _ = torch.frexp(t)
    return (mantissa.abs() == 0.5) | (t == 0.0)


def _in_float32(v: Tensor) -> Tensor:
    """Return the mask of float64 elements that float32 represents exactly, without subnormals, which may be flushed."""
    return (v.float().double() == v) & ((v.abs() >= _SMALLEST_NORMAL) | (v == 0.0))


def _activate(kind: str, v: Tensor, e: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """Apply gelu, gelu_tanh or silu.

    The slope of gelu is at most 1.13, and that of silu 1.1. Terms like 1 + erf cancel, so that their roundings are
    proportional to |x|. At -inf the textbook formulas give NaN, and the limits are 0: both are accepted. At inf, gelu
    may give NaN, too, as oneDNN's erf form (torch's implementation on the CPU) does. Later steps then accept every
    result.
    """
    if kind == "silu":
        out = torch.nn.functional.silu(v)
    else:
        out = torch.nn.functional.gelu(v, approximate="tanh" if kind == "gelu_tanh" else "none")
    allowed = 1.13 * e + 8 * u * _finite_abs(v)
    is_negative_infinity = v == -math.inf
    accept_any = v.isinf() if kind == "gelu" else is_negative_infinity
    return out.masked_fill(is_negative_infinity, 0.0), allowed.masked_fill(accept_any, math.inf)


def _cast(v: Tensor, e: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Cast v to a dtype.

    Integers are rounded (half to even) and saturated; there is an error only where v is within e of a tie.

    Floats are not rounded; instead, the error grows by half a unit in the last place. So a kernel that rounds here and
    one that keeps more precision are both correct. Beyond the dtype's range, the former has an infinity (NaN, the
    largest number) and the latter does not: every result is accepted.
    """
    if dtype in INTEGERS:
        out = to_integer(v, dtype)
        off = torch.maximum(to_integer(v + e, dtype) - out, out - to_integer(v - e, dtype))
        return out, off.masked_fill(e.isinf(), math.inf)
    if dtype not in UNIT:
        raise ValueError(f"cannot cast to {dtype!r} in an epilogue; known: {', '.join((*UNIT, *INTEGERS))}")
    info = torch.finfo(getattr(torch, dtype))
    floor = info.smallest_normal * UNIT[dtype]
    allowed = e + UNIT[dtype] * (_finite_abs(v) + e) + floor
    return v, allowed.masked_fill(v.isfinite() & (v.abs() + e > info.max), math.inf)


def to_integer(v: Tensor, dtype: str) -> Tensor:
    """Return v (float64) rounded half to even and saturated to an integer dtype's range, as float64; 0 for NaN."""
    info = torch.iinfo(getattr(torch, dtype))
    return torch.nan_to_num(v.round(), 0.0, math.inf, -math.inf).clamp_(float(info.min), float(info.max))
