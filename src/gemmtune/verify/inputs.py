"""Operands: random, reproducible, laid out as the Problem says, spanning what their dtype can hold.

Two kinds. ``make_inputs`` draws every element (verification); ``timing_sets`` tiles a smaller random block at odd
offsets, which is much cheaper on a CPU and as unpredictable to caches and multipliers (timing). Both draw on the
device where the operands shall lie; equal seeds give equal operands on one kind of device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.epilogue import Step
from ..core.problem import Layout, Operand, Problem, Quant
from ..core.target import Target
from ..core.weights import QuantWeight

CPU = torch.device("cpu")
GUARD = 4096  # bytes before and after an operand that is checked with; keeps torch's 64-byte alignment
WIDE_INTEGERS = 1000  # the largest int32 and int64 operand: sums of products stay far inside the dtype
_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}  # elements drawn at a time: in the cache, or few launches
_POOL = (1 << 20) + 7  # odd: tiles do not line up with rows or pages
_SPREAD = {"int8": 74.0, "uint8": 147.0, "int4": 4.6, "float8_e4m3fn": 110.0, "float8_e5m2": 9000.0}  # rms
_DEFAULT_LLC = 32 << 20
_MAX_SETS = 64
# Times its L2 that operand sets come to (four are not enough: docs/measuring.md), and bytes of its memory at most.
_GPU_SHARE, _GPU_BYTES = 16, 2 << 30

Source = Callable[[tuple[int, ...], Layout, str], Tensor]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of operands as ``Kernel.run`` takes them: a, raw b (Tensor or QuantWeight), the epilogue's tensors.

    source: a B of equal values elsewhere, of which a packed copy may exist already; None when b is the only one.
    """

    a: Tensor
    b: Tensor | QuantWeight
    aux: tuple[Tensor, ...] = ()
    source: Tensor | QuantWeight | None = None


def make_inputs(
    problem: Problem,
    seed: int,
    *,
    b: Tensor | QuantWeight | None = None,
    offset: int = 0,
    gap: int = 0,
    device: torch.device = CPU,
) -> Inputs:
    """Operands drawn from ``seed`` on ``device``; equal arguments give equal operands.

    Floats are normal, integers span their full range, fp8 numbers their exponents. b: use this B instead of drawing one
    (a weight shared by several draws). offset: elements to shift the start of A and of the B that is drawn by. gap:
    elements between the matrices of a batch.

    All of it lies between guards: a kernel that reads beyond an operand, or in the gaps between its rows, and uses
    what it finds there meets NaN (integers: -127 or 129).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def draw(shape: tuple[int, ...], layout: Layout, dtype: str) -> Tensor:
        out = allocate(shape, layout, dtype, offset, guard=True, device=device, gap=gap)
        fill_random(out, dtype, generator)
        return out

    a = draw(logical_shape(problem, problem.m, problem.k), problem.a.layout, problem.a.dtype)
    if b is None:
        b = guarded_weight(_weight(problem, draw, generator), offset)
    return Inputs(a, b, tuple(guarded_copy(t, offset) for t in epilogue_tensors(problem, generator)))


def timing_sets(problem: Problem, count: int, seed: int, device: torch.device = CPU) -> list[Inputs]:
    """``count`` distinct operand sets for timing (about 50 ms per 100 MB on a CPU, 0.1 ms on a GPU)."""
    generator = torch.Generator(device).manual_seed(seed)
    pools: dict[str, Tensor] = {}

    def tile(shape: tuple[int, ...], layout: Layout, dtype: str) -> Tensor:
        if device.type != "cpu":  # drawing there is as fast as copying, and takes fewer launches than tiles
            out = allocate(shape, layout, dtype, device=device)
            fill_random(out, dtype, generator)
            return out
        if dtype not in pools:
            pools[dtype] = allocate((_POOL,), Layout(), dtype)
            fill_random(pools[dtype], dtype, generator)
        return _tiled(shape, layout, dtype, pools[dtype], generator)

    sets = []
    for _ in range(count):
        a = tile(logical_shape(problem, problem.m, problem.k), problem.a.layout, problem.a.dtype)
        sets.append(Inputs(a, _weight(problem, tile, generator), epilogue_tensors(problem, generator)))
    return sets


def operand_bytes(problem: Problem) -> int:
    """Bytes of one operand set: inputs, epilogue tensors and the output."""
    return problem.min_bytes


def rotations(problem: Problem, target: Target) -> int:
    """Operand sets to rotate through so that each call finds its operands cold: together beyond twice the L3, or
    sixteen times a GPU's L2.

    At most 64, and no more than fit in three times the operands plus 256 MB (a GPU: 2 GB).
    """
    cache = target.caches[2] if len(target.caches) > 2 and target.caches[2] else _DEFAULT_LLC
    size = max(1, operand_bytes(problem))
    share, fits = 2, (3 * size + (256 << 20)) // size
    if target.device != "cpu":
        share, fits = _GPU_SHARE, _GPU_BYTES // size
    return max(2, min(math.ceil(share * cache / size) + 1, fits, _MAX_SETS))


# --- memory -----------------------------------------------------------------------------------------------------


def logical_shape(problem: Problem, rows: int, columns: int) -> tuple[int, ...]:
    """[rows, columns], or [batch, rows, columns] for bmm."""
    return (problem.batch, rows, columns) if problem.family == "bmm" else (rows, columns)


def allocate(
    shape: tuple[int, ...],
    layout: Layout,
    dtype: str,
    offset: int = 0,
    *,
    guard: bool = False,
    device: torch.device = CPU,
    gap: int = 0,
) -> Tensor:
    """Uninitialised memory of a logical shape in a layout; vectors are dense. offset: elements before its start.

    guard: leave ``GUARD`` bytes of poison on either side, and poison in the gaps between rows. gap: elements between
    the matrices of a batch.
    """
    torch_dtype = getattr(torch, "uint8" if dtype == "int4" else dtype)
    if len(shape) < 2:
        return _memory(math.prod(shape), torch_dtype, guard, False, device).view(shape)
    batch, (rows, columns) = math.prod(shape[:-2]), shape[-2:]
    slow, fast = (columns, rows) if layout.order == "col" else (rows, columns)
    inner = 2 if layout.order == "strided" else 1
    lead = max(layout.ld or fast * inner, 1)
    if inner == 2 and lead < 2 * fast:
        raise ValueError(f"a strided layout of {fast} columns needs ld >= {2 * fast}; got {lead}")
    flat = _memory(batch * (slow * lead + gap) + offset, torch_dtype, guard, lead > fast or gap > 0, device)
    strides = (1, lead) if layout.order == "col" else (lead, inner)
    full = (batch, rows, columns)
    view = flat.as_strided(full, (slow * lead + gap, *strides), flat.storage_offset() + offset)
    return view if len(shape) == 3 else view[0]


def _memory(count: int, dtype: torch.dtype, guard: bool, gaps: bool, device: torch.device) -> Tensor:
    """``count`` elements, uninitialised unless there are gaps between rows to be guarded."""
    if not guard:
        return torch.empty(count, dtype=dtype, device=device)
    room = GUARD // dtype.itemsize
    whole = torch.empty(count + 2 * room, dtype=dtype, device=device)
    for part in (whole,) if gaps else (whole[:room], whole[room + count :]):
        fill_guard(part)
    return whole[room : room + count]


def fill_guard(t: Tensor) -> None:
    """Fill a tensor with what is beside operands: NaN, or bytes of 0x81 in integers."""
    if t.dtype.is_floating_point:
        t.fill_(math.nan)
    else:
        t.copy_(torch.full((t.element_size(),), 0x81, dtype=torch.uint8, device=t.device).view(t.dtype).expand(t.shape))


def guarded_copy(t: Tensor, offset: int = 0) -> Tensor:
    """A copy of a dense tensor between guards, ``offset`` elements behind the first."""
    copy = _memory(t.numel() + offset, t.dtype, True, False, t.device)[offset:].view(t.shape)
    return copy.copy_(t)


def guarded_weight(b: Tensor | QuantWeight, offset: int = 0) -> Tensor | QuantWeight:
    """B with its scales and zero points between guards, as its data are."""
    if isinstance(b, Tensor):
        return b
    zero_point = None if b.zero_point is None else guarded_copy(b.zero_point, offset)
    return replace(b, scale=guarded_copy(b.scale, offset), zero_point=zero_point)


def misaligned_weight(problem: Problem, b: Tensor | QuantWeight) -> Tensor | QuantWeight:
    """A copy of B between guards that starts one element behind a boundary."""
    data = b.data if isinstance(b, QuantWeight) else b
    copy = allocate(tuple(data.shape), problem.b.layout, problem.b.dtype, 1, guard=True, device=data.device)
    copy.copy_(data)
    return guarded_weight(replace(b, data=copy), 1) if isinstance(b, QuantWeight) else copy


def _dense(out: Tensor) -> Tensor | None:
    """The memory of a tensor without gaps as one flat view, or None."""
    flipped = out.transpose(-1, -2) if out.dim() > 1 else out
    for view in (out, flipped):
        if view.is_contiguous():
            return view.reshape(-1)
    return None


# --- values -----------------------------------------------------------------------------------------------------


def fill_random(out: Tensor, dtype: str, generator: torch.Generator, *, extremes: bool = False) -> None:
    """Random values over the dtype's range, every element drawn. extremes: integers and fp8 are the largest of either
    sign (and fp8 the smallest)."""
    flat = _dense(out)
    if flat is None:
        dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        fill_random(dense, dtype, generator, extremes=extremes)
        out.copy_(dense)
        return
    chunk = _CHUNK[out.device.type]
    for start in range(0, flat.numel(), chunk):
        piece = flat[start : start + chunk]
        piece.copy_(_values(piece.numel(), dtype, generator, extremes))


def _values(count: int, dtype: str, generator: torch.Generator, extremes: bool) -> Tensor:
    if dtype in ("int8", "uint8", "int4"):
        return _bytes(count, dtype, generator, extremes)
    if dtype.startswith("float8"):
        raw = _bytes(count, "uint8", generator, False)
        # all exponents but those of NaN and infinity: the top bit of the exponent is cleared where all are set
        top = 0x7F if dtype == "float8_e4m3fn" else 0x7C
        raw = torch.where((raw & top) == top, raw & 0xBF, raw)
        if extremes:
            largest = 0x7E if dtype == "float8_e4m3fn" else 0x7B
            raw = torch.where((raw & 1).bool(), largest | (raw & 0x80), 1).to(torch.uint8)
        return raw.view(getattr(torch, dtype))
    if dtype in ("int32", "int64"):
        whole = getattr(torch, dtype)
        low, high = -WIDE_INTEGERS, WIDE_INTEGERS + 1
        return torch.randint(low, high, (count,), generator=generator, dtype=whole, device=generator.device)
    wide = torch.float64 if dtype == "float64" else torch.float32
    return torch.randn(count, generator=generator, dtype=wide, device=generator.device)


def _bytes(count: int, dtype: str, generator: torch.Generator, extremes: bool) -> Tensor:
    words = torch.empty(-(-count // 8), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    raw = words.view(torch.uint8)[:count]
    if extremes:
        low, high = {"int8": (0x80, 0x7F), "uint8": (0, 0xFF), "int4": (0, 0xFF)}[dtype]
        raw = torch.where((raw & 1).bool(), high, low).to(torch.uint8)
    return raw.view(torch.int8) if dtype == "int8" else raw


def _tiled(shape: tuple[int, ...], layout: Layout, dtype: str, pool: Tensor, generator: torch.Generator) -> Tensor:
    out = allocate(shape, layout, dtype)
    flat = _dense(out)
    if flat is None:
        out.copy_(_tiled(shape, Layout(), dtype, pool, generator))
        return out
    at = 0
    while at < flat.numel():
        start = int(torch.randint(0, _POOL // 2, (), generator=generator)) | 1
        piece = pool[start : start + flat.numel() - at]
        flat[at : at + piece.numel()].copy_(piece)
        at += piece.numel()
    return out


# --- weights and epilogue tensors -------------------------------------------------------------------------------


def _rms(dtype: str) -> float:
    return _SPREAD.get(dtype, 577.0 if dtype in ("int32", "int64") else 1.0)


def _weight(problem: Problem, draw: Source, generator: torch.Generator) -> Tensor | QuantWeight:
    operand = problem.b
    if operand.quant is None:
        return draw(logical_shape(problem, problem.k, problem.n), operand.layout, operand.dtype)
    stored = -(-problem.k // 2) if operand.dtype == "int4" else problem.k
    data = draw((stored, problem.n), operand.layout, operand.dtype)
    scale, zero = _quant_tensors(problem, operand, operand.quant, generator)
    return QuantWeight(data, scale, zero, problem.k, operand.quant, operand.dtype)


def _quant_tensors(
    problem: Problem, operand: Operand, quant: Quant, generator: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Scales near 1 / (sqrt(K) * spread), so that outputs are near 1; zero points near the middle of the range."""
    shape = (problem.n,) if quant.group is None else (-(-problem.k // quant.group), problem.n)
    dtype = getattr(torch, quant.scale_dtype)
    size = 1.0 / (math.sqrt(max(problem.k, 1)) * _rms(operand.dtype))
    scale = ((torch.rand(shape, generator=generator, device=generator.device) + 0.5) * size).to(dtype)
    if not quant.zero_point:
        return scale, None
    middle, reach = (8, 3) if operand.dtype == "int4" else (0, 10)
    zero = torch.randint(middle - reach, middle + reach + 1, shape, generator=generator, device=generator.device)
    return scale, zero.to(dtype)


def epilogue_tensors(problem: Problem, generator: torch.Generator) -> tuple[Tensor, ...]:
    """The epilogue's tensors, each of a size that matters beside the accumulator as it then is."""
    level = math.sqrt(max(problem.k, 1)) * _rms(problem.a.dtype) * _rms(problem.b.dtype)
    if problem.b.quant is not None:
        level = _rms(problem.a.dtype)
    scales = sum(step.kind == "scale" and step.takes_tensor for step in problem.epilogue)
    plain = math.prod(abs(s.value) for s in problem.epilogue if s.kind == "scale" and not s.takes_tensor)
    narrow = level > 1000.0 or problem.out_dtype in ("int8", "uint8")
    goal = 40.0 if problem.out_dtype in ("int8", "uint8") else 1.0
    size = (goal / (level * max(plain, 1e-30))) ** (1.0 / scales) if scales and narrow else 1.0
    tensors = []
    for step in problem.epilogue:
        if step.takes_tensor:
            tensors.append(_step_tensor(problem, step, size, level, generator))
        if step.kind == "scale":
            level *= size if step.takes_tensor else abs(step.value)
    return tuple(tensors)


def _step_tensor(problem: Problem, step: Step, size: float, level: float, generator: torch.Generator) -> Tensor:
    full = logical_shape(problem, problem.m, problem.n)
    shape = {"tensor": (1,), "row": (problem.m,), "col": (problem.n,), "full": full}[step.axis]
    device = generator.device
    if step.kind == "scale":
        drawn = torch.rand(shape, generator=generator, device=device)
        values = (drawn + 0.5) * (size / max(abs(step.value), 1e-30))
    elif step.kind == "mul":
        values = torch.randn(shape, generator=generator, device=device)
    else:
        values = torch.randn(shape, generator=generator, device=device) * level
    dtype = getattr(torch, str(step.dtype))
    if dtype.is_floating_point:
        return values.to(dtype)
    info = torch.iinfo(dtype)
    return values.double().round_().clamp_(info.min, info.max).to(dtype)
