"""The oracle: every Problem in float64, or exact for integers, with the scale of a correct kernel's error.

``reference(problem, a, b, aux)`` gives an Oracle: what the output is before its final rounding, and how far a
correct kernel may be from it. With A and B as given, the accumulator's error is at most

    lambda * sqrt(k) * u_acc * (|A| |B|)

(Higham and Mary 2019, "A new approach to probabilistic rounding error analysis", theorem 3.1). lambda = 4 here: the
theorem takes every rounding error at its extreme u; real ones are spread over [-u, u] (standard deviation
u / sqrt(3)), so 4 stands for 6.9 standard deviations, 1e-11 an element, even for a sequential sum of one sign.
The epilogue carries that error along by its Lipschitz constants and adds a few roundings of its own.

How exact the oracle is:
  - integers: exact at every size (products and sums of 8-bit integers stay far below 2**53).
  - M <= 256, or at most 10 GFLOP, and anything on a GPU: float64 throughout; every element of the output is checked
    (and no setting that lets float32 products be tf32 ones matters).
  - larger: float32 products, block by block. A random projection in float64 (Freivalds) certifies each block: an
    element off by more than about one error unit fails the block, which is then computed again in float64. The
    oracle's own float32 error is added to the bound. So here, too, every element is checked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..core.epilogue import Step
from ..core.problem import Problem

if TYPE_CHECKING:
    from ..core.weights import QuantWeight

LAMBDA = 4.0
UNIT = {
    "float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3,
}  # fmt: skip
INTEGERS = ("int8", "uint8", "int32", "int64", "int4")

# Hopper's matrix units add fp8 products with some 14 bits below the largest of those they add at once, for all alike
# (DeepSeek-AI 2024, "DeepSeek-V3 technical report", 3.3.2): on an H200 torch._scaled_mm without fast accumulation and
# our kernels gave the same number at the worst element. Of the 32 products of one instruction each may lose
# 2**-13 of the
# largest: errors of either sign, whose sum spreads as the root of the products' sum of squares, FP8_UNIT * FP8_SPREAD
# times that; FP8_UNIT * |A||B| covers what truncation does to products of one sign. Without the spread, correct kernels
# were outside by up to 5.75 times (K = 128, values over all exponents); with it none of 2,000 problems
# (tests/gpu/test_triton.py). Sums that run on for all of K (fast accumulation) are another Problem.
FP8_UNIT, FP8_SPREAD = 2.0**-13, 48.0

# Those of Hopper align a product by its operands' exponents as written and keep 25 bits below the largest, so that a
# subnormal float16 errs as the smallest normal: this arithmetic gave every bit of what torch.mm, cuBLASLt and Triton
# computed on an H200 (benchmarks/results/gpu-fp16-subnormals-20261123.json); one product of 1,000 of cuBLASLt's was
# outside without. bfloat16's subnormals are under the flush-to-zero term. CPUs convert before they multiply.
_FP16_NORMAL, _ALIGNING = 2.0**-14, ("cuda",)

_FULL_ROWS = 256
_FULL_FLOPS = 10e9
_BLOCK_BYTES = 16 << 20  # of B in float64 at a time: stays in the last-level cache
_CHUNK = 1 << 21  # elements of the output that pass through the epilogue at a time
_GPU_BLOCK_BYTES, _GPU_CHUNK = 256 << 20, 1 << 26  # a GPU's time goes to launches otherwise
_TINY = 2.0**-126  # float32's and bfloat16's smallest normal: what flush-to-zero may take away


@dataclass(frozen=True, slots=True)
class Oracle:
    """What a correct kernel computes, and how far off it may be before the output is rounded.

    value: [M, N] ([batch, M, N] for bmm), before the final rounding; int64 for integer products without epilogue,
    else float64 (on a CPU float32 for problems beyond 10 GFLOP with M > 256). magnitude: float32, same shape; the
    allowed error is ``unit * magnitude``. An infinite magnitude marks an element that may be anything. Both lie where
    the operands do.
    """

    value: Tensor
    magnitude: Tensor
    unit: float


def reference(problem: Problem, a: Tensor, b: Tensor | QuantWeight, aux: Sequence[Tensor] = ()) -> Oracle:
    """The oracle for one set of operands (shapes as ``Kernel.run`` takes them), computed on their device.

    Memory beyond the result: about 100 MB, plus A in float64 (float32 for the largest problems); on a GPU some blocks
    of 256 MB of B and of as many columns of the output in float64.
    """
    return finish(problem, *products(problem, a, b), aux)


def is_integer(problem: Problem) -> bool:
    """Whether A @ B is a product of integers (its accumulator is then exact)."""
    return problem.a.dtype in INTEGERS and problem.b.dtype in INTEGERS and problem.b.quant is None


def is_large(problem: Problem, device: torch.device) -> bool:
    """Whether float64 throughout would take too long there (the module says what is done instead)."""
    return device.type == "cpu" and problem.m > _FULL_ROWS and problem.flops > _FULL_FLOPS and problem.acc != "float64"


def error_unit(problem: Problem) -> float:
    """``lambda * sqrt(k) * u_acc``, or one float32 rounding for integer products (their conversion)."""
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


def products(problem: Problem, a: Tensor, b: Tensor | QuantWeight) -> tuple[Tensor, Tensor]:
    """A @ B (float64, float32 beyond 10 GFLOP with many rows, or int64) and |A| @ |B| (float32, FTZ term included).

    ``a`` may have any number of rows: draws that share B are stacked, so that B is converted once.
    """
    a, b = a.detach(), b.detach() if isinstance(b, Tensor) else b
    if a.dim() == 3 and isinstance(b, Tensor):
        pairs = [_product(problem, a[i], b[i]) for i in range(a.shape[0])]
        if not pairs:
            return _empty(problem, a.shape[1], a.device, batch=True)
        return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])
    return _product(problem, a, b)


def finish(problem: Problem, acc: Tensor, magnitude: Tensor, aux: Sequence[Tensor]) -> Oracle:
    """Push accumulator and error through the epilogue. Works in place on both where it can."""
    unit = error_unit(problem)
    if not problem.epilogue:
        if is_integer(problem) and problem.out_dtype not in INTEGERS:  # one conversion to float32 on the way
            magnitude = acc.abs().to(torch.float32)
        return Oracle(acc, magnitude, unit)
    if not acc.is_floating_point():
        acc = acc.to(torch.float64)
    value, scale = (t if t.dim() == 3 else t.unsqueeze(0) for t in (acc, magnitude))
    rows = max(1, (_GPU_CHUNK if acc.is_cuda else _CHUNK) // max(1, value.shape[2]))
    for i in range(value.shape[0]):
        for r in range(0, value.shape[1], rows):
            part = (i, slice(r, r + rows))
            v, e = _epilogue(problem, value[part].double(), scale[part].double() * unit, aux, part)
            value[part] = v
            scale[part] = e / unit
    return Oracle(acc, magnitude, unit)


# --- products ---------------------------------------------------------------------------------------------------


def _empty(problem: Problem, rows: int, device: torch.device, batch: bool = False) -> tuple[Tensor, Tensor]:
    shape = (problem.batch, rows, problem.n) if batch else (rows, problem.n)
    dtype = torch.int64 if is_integer(problem) else torch.float64
    return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=torch.float32, device=device)


def _block(k: int, device: torch.device) -> int:
    """Columns of B that are multiplied at a time."""
    return max(16, (_GPU_BLOCK_BYTES if device.type != "cpu" else _BLOCK_BYTES) // (8 * max(k, 1)))


def _product(problem: Problem, a: Tensor, b: Any) -> tuple[Tensor, Tensor]:
    if is_integer(problem):
        return _integer_product(problem, a, b)
    acc, magnitude = _empty(problem, a.shape[0], a.device)
    if not (acc.numel() and problem.k):
        return acc, magnitude.fill_(_TINY / error_unit(problem))
    large = is_large(problem, a.device)
    if large:
        acc = acc.to(torch.float32)
    sized = _aligned(torch.nan_to_num(a.float(), 0.0, 0.0, 0.0).abs_(), a) if problem.acc != "float64" else a.abs()
    if a.is_cuda:
        sized = sized.double()
    a_top = _power(sized)
    sized = sized / a_top
    flushed = _TINY / error_unit(problem) if _flushes(problem) else 0.0
    a_sum = sized.sum(1, keepdim=True, dtype=torch.float64) * a_top
    wide = a.float() if large else a.double()
    step = _block(problem.k, a.device)
    for j in range(0, problem.n, step):
        block, size = _columns(b, slice(j, j + step), problem.k)
        part = (slice(None), slice(j, j + step))
        either = _flushed_infinity(problem, a, b, part[1])
        b_top = _power(size)
        b_sum = size.sum(0, keepdim=True)
        mag = (sized @ (size / b_top).to(sized.dtype)).double() * (a_top * b_top)
        mag += flushed * (a_sum + b_sum + problem.k)
        if problem.family == "scaled_mm":
            squares = (sized * sized) @ ((size / b_top).to(sized.dtype) ** 2)
            mag += FP8_SPREAD * squares.sqrt().double() * (a_top * b_top)
        if large:
            mag *= 2.0  # the oracle's own float32 sums
            acc[part] = _certified(wide, block, mag, error_unit(problem))
        else:
            acc[part] = wide @ block
        magnitude[part] = mag if either is None else mag.masked_fill_(either, math.inf)
    if not isinstance(b, Tensor):  # inf * (q - zero) is inf or NaN by how the sum is split: either is accepted
        magnitude[a.isinf().any(1)] = math.inf
    return acc, magnitude


def _aligned(size: Tensor, operand: Tensor) -> Tensor:
    """|operand| as far as a product's error goes: on a GPU no float16 but 0 counts as less than the smallest normal."""
    if operand.dtype != torch.float16 or operand.device.type not in _ALIGNING:
        return size
    return torch.where(size > 0.0, size.clamp(min=_FP16_NORMAL), size)


def _power(t: Tensor) -> float:
    """The power of two just above |t|: keeps the float32 magnitudes away from overflow and denormals."""
    top = float(t.max())
    return 2.0 ** max(-1000, math.frexp(top)[1]) if top > 0 and math.isfinite(top) else 1.0


def _flushed_infinity(problem: Problem, a: Tensor, b: Any, columns: slice) -> Tensor | None:
    """Which elements [M, columns] may be infinite or NaN: those with a subnormal, which may be flushed to 0, beside an
    infinity.

    None where there is none. A row or column with both counts as a whole.
    """
    if not _flushes(problem) or not isinstance(b, Tensor):
        return None
    block = b[:, columns]
    infinite, above = block.isinf().any(0), a.isinf().any(1, keepdim=True)
    either = None
    if bool(infinite.any()):
        either = _subnormal(a).any(1, keepdim=True) & infinite
    if bool(above.any()):
        places = a.isinf().any(0).nonzero().squeeze(1)  # of K: B's subnormals elsewhere meet finite numbers
        beside = above & _subnormal(block.index_select(0, places)).any(0)
        either = beside if either is None else either | beside
    return either


def _subnormal(t: Tensor) -> Tensor:
    return (t != 0) & (t.abs() < _TINY)


def _flushes(problem: Problem) -> bool:
    """bf16 dot instructions treat denormals as zero (and write none); float32 kernels may under FTZ mode."""
    return problem.acc != "float64" and bool({"bfloat16", "float32"} & {problem.a.dtype, problem.b.dtype})


def _certified(a: Tensor, block: Tensor, mag: Tensor, unit: float) -> Tensor:
    """a @ block in float32, certified by a projection on random signs in float64, else computed in float64.

    A float32 row's projection errs by about sqrt(columns) typical errors, and one unit is some sqrt(k) of those.
    Columns are projected that are finite and of usual size: of a far larger one the error would hide the others'. The
    others are computed in float64, as rows are that hold NaN or infinities.
    """
    fast = a @ block.float()
    generator = torch.Generator().manual_seed(block.shape[0] * 31 + block.shape[1])
    sizes = block.abs().amax(0)
    usual = sizes <= 16.0 * torch.where(sizes.isfinite(), sizes, 0.0).median()
    fast[:, ~usual] = (a.double() @ block[:, ~usual]).float()
    signs = (torch.randint(0, 2, (block.shape[1],), generator=generator).double() * 2 - 1) * usual
    through = torch.where(usual, block, 0.0) @ signs
    for r in range(0, a.shape[0], 1024):
        rows = slice(r, r + 1024)
        projected = torch.where(usual, fast[rows].double(), 0.0) @ signs
        bound = unit * torch.where(usual, mag[rows], 0.0).amax(1)
        if not bool(((projected - a[rows].double() @ through).abs() <= bound).all()):
            fast[rows] = (a[rows].double() @ block).float()
    return fast


def _integer_product(problem: Problem, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    narrow = {problem.a.dtype, problem.b.dtype} <= {"int8", "uint8"}
    if a.is_cuda and not narrow:  # CUDA multiplies no wide integers
        acc, magnitude = _integer_product(problem, a.cpu(), b.cpu())
        return acc.to(a.device), magnitude.to(a.device)
    acc, magnitude = _empty(problem, a.shape[0], a.device)
    wide = a.to(torch.float64 if narrow else torch.int64)  # below 2**53 in float64: exact, and far faster
    step = _block(problem.k, a.device)
    for j in range(0, problem.n, step):
        block = b[:, j : j + step].to(wide.dtype)
        acc[:, j : j + step] = (wide @ block).to(torch.int64)
    if problem.acc == "int32":  # hardware sums wrap
        acc = (acc + 2**31).remainder_(2**32).sub_(2**31)
    return acc, magnitude


def _columns(b: Any, columns: slice, k: int) -> tuple[Tensor, Tensor]:
    """Columns of B in float64, and their magnitude. For q - zero that is |q| + |zero|: kernels may split the sum."""
    if isinstance(b, Tensor):
        block = b[:, columns].double()
        return block, _aligned(torch.nan_to_num(block, 0.0, 0.0, 0.0).abs_(), b)
    q = _levels(b, columns, k)
    scale = _per_row(b.scale, b.quant.group, columns, k)
    if b.zero_point is not None:
        zero = _per_row(b.zero_point, b.quant.group, columns, k)
    elif b.dtype == "int4":
        zero = torch.full((1, 1), 8.0, dtype=torch.float64, device=q.device)
    else:
        return (block := q * scale), _size(block)
    parts = q.abs() + zero.abs()
    if b.dtype == "int4":  # nibbles are signed numbers beside 8, which kernels may take off both first
        parts = torch.maximum(parts, (q - 8.0).abs() + (zero - 8.0).abs())
    return (q - zero) * scale, torch.nan_to_num(parts * scale.abs(), 0.0, 0.0, 0.0)


def _levels(b: QuantWeight, columns: slice, k: int) -> Tensor:
    data = b.data[:, columns]
    if b.dtype != "int4":
        return data.double()
    q = torch.empty(2 * data.shape[0], data.shape[1], dtype=torch.float64, device=data.device)
    q[0::2] = data & 15
    q[1::2] = data >> 4
    return q[:k]


def _per_row(t: Tensor, group: int | None, columns: slice, k: int) -> Tensor:
    wide = t.detach()[..., columns].double()
    if wide.dim() == 1:
        return wide.unsqueeze(0)
    return wide.repeat_interleave(group or k, 0)[:k] if wide.shape[0] > 1 else wide


# --- epilogue ---------------------------------------------------------------------------------------------------


def _epilogue(
    problem: Problem, v: Tensor, e: Tensor, aux: Sequence[Tensor], part: tuple[int, slice]
) -> tuple[Tensor, Tensor]:
    """All steps on one block: v its values, e its errors, both float64."""
    u = UNIT["float32"] if problem.acc in ("int32", "tf32") else UNIT[problem.acc]
    u *= 2.0 if problem.acc == "float64" else 1.0  # the oracle rounds as much as the kernel does
    exact = is_integer(problem)
    tensors = iter(aux)
    for step in problem.epilogue:
        t = _tensor(next(tensors), step, part) if step.takes_tensor else torch.ones((), dtype=torch.float64)
        if exact and _needs_float(step):
            exact = False
            e = e + u * _size(v) * ~_in_float32(v)
        v, e = _step(step, v, e, t, 0.0 if exact else u)
    if exact:
        return v, e
    return v, e if problem.out_dtype in INTEGERS else e + u * _size(v)


def _size(v: Tensor) -> Tensor:
    """|v|, and 0 where v is not finite: an infinite error would let anything pass there."""
    return torch.nan_to_num(v.abs(), 0.0, 0.0, 0.0)


def _tensor(t: Tensor, step: Step, part: tuple[int, slice]) -> Tensor:
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
    """Whether an integer accumulator becomes float32 at this step."""
    if step.kind in ("relu", "clamp"):
        return any(math.isfinite(x) and x != int(x) for x in (step.lo, step.hi))
    if step.kind == "cast":
        return step.dtype not in INTEGERS
    return step.kind not in ("bias", "add", "mul") or step.dtype not in INTEGERS or step.value != int(step.value)


def _step(step: Step, v: Tensor, e: Tensor, t: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """One step in float64. The error: carried by the step's Lipschitz constant, plus roundings of u each."""
    match step.kind:
        case "scale" | "mul":
            return _scaled(v, e, t, step.value if step.kind == "scale" else 1.0, u)
        case "bias" | "add":
            addend = t * step.value
            out = v + addend
            exact = (e == 0.0) & _in_float32(addend) & _in_float32(out)
            return out, e + u * (_size(out) + _size(addend)) * ~exact
        case "relu":
            return v.clamp(min=0.0), e
        case "clamp":
            return v.clamp(step.lo, step.hi), e
        case "cast":
            return _cast(v, e, str(step.dtype))
    return _activate(step.kind, v, e, u)


def _scaled(v: Tensor, e: Tensor, t: Tensor, number: float, u: float) -> tuple[Tensor, Tensor]:
    """v times a tensor and a number, in any order.

    Nothing is rounded where v is known exactly and both factors are powers of two (or 0): a tie on the way to an
    integer is then a tie in every kernel. An infinite factor leaves nothing open but the sign of
    what may be 0; NaN, nothing.
    """
    factor = t * number
    out = v * factor
    exact = (e == 0.0) & _power_of_two(t) & _power_of_two(torch.tensor(number, dtype=torch.float64)) & _in_float32(out)
    settled = (e == 0.0) | factor.isnan() | (factor.isinf() & (v.abs() > e))
    carried = torch.where(settled, 0.0, torch.nan_to_num(e * factor.abs(), math.inf, math.inf))
    return out, carried + 2 * u * _size(out) * ~exact


def _power_of_two(t: Tensor) -> Tensor:
    """Which elements are powers of two, or 0."""
    mantissa, _ = torch.frexp(t)
    return (mantissa.abs() == 0.5) | (t == 0.0)


def _in_float32(v: Tensor) -> Tensor:
    """Which elements (float64) float32 holds exactly, subnormals left out: kernels may flush them."""
    return (v.float().double() == v) & ((v.abs() >= _TINY) | (v == 0.0))


def _activate(kind: str, v: Tensor, e: Tensor, u: float) -> tuple[Tensor, Tensor]:
    """gelu's slope is at most 1.13, silu's 1.1; 1 + erf and the like cancel, so their roundings scale with |x|.

    At -inf the textbook formulas give NaN and the limits 0: either is accepted. So is NaN for gelu's inf, which is what
    oneDNN's erf form (torch's own on the CPU) makes of it, and what later steps make of either.
    """
    if kind == "silu":
        out = torch.nn.functional.silu(v)
    else:
        out = torch.nn.functional.gelu(v, approximate="tanh" if kind == "gelu_tanh" else "none")
    allowed = 1.13 * e + 8 * u * _size(v)
    low = v == -math.inf
    either = v.isinf() if kind == "gelu" else low
    return out.masked_fill(low, 0.0), allowed.masked_fill(either, math.inf)


def _cast(v: Tensor, e: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """Integers: rounded (half to even) and saturated; error only where v is within e of a tie.

    Floats: left unrounded with half a unit in the last place more error, so both a kernel that rounds here and one
    that keeps more precision are correct. Beyond the dtype's range one has an infinity (NaN, the largest number) and
    the other has not: what comes of it may be anything.
    """
    if dtype in INTEGERS:
        out = to_integer(v, dtype)
        off = torch.maximum(to_integer(v + e, dtype) - out, out - to_integer(v - e, dtype))
        return out, off.masked_fill(e.isinf(), math.inf)
    if dtype not in UNIT:
        raise ValueError(f"cannot cast to {dtype!r} in an epilogue; known: {', '.join((*UNIT, *INTEGERS))}")
    info = torch.finfo(getattr(torch, dtype))
    floor = info.smallest_normal * UNIT[dtype]
    allowed = e + UNIT[dtype] * (_size(v) + e) + floor
    return v, allowed.masked_fill(v.isfinite() & (v.abs() + e > info.max), math.inf)


def to_integer(v: Tensor, dtype: str) -> Tensor:
    """v (float64) rounded half to even and saturated to an integer dtype's range, still float64; 0 for NaN."""
    info = torch.iinfo(getattr(torch, dtype))
    return torch.nan_to_num(v.round(), 0.0, math.inf, -math.inf).clamp_(float(info.min), float(info.max))
