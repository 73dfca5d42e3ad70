"""Random, reproducible operands in a Problem's layouts, whose values span the range of their dtype.

``make_inputs`` draws every element, for verification. ``timing_sets`` copies a smaller random block at odd offsets, for
timing: on a CPU this is much cheaper, and the values are as unpredictable to caches and multipliers. Both draw on the
operands' device. Equal seeds give equal operands on devices of one type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.devices import CPU, is_host
from ..core.epilogue import NORMS, Step
from ..core.problem import Layout, Operand, Problem, Quant
from ..core.target import Target
from ..core.weights import QuantWeight
from .random_source import RandomSource

GUARD = 4096  # guard bytes before and after an operand in verification; preserves torch's 64-byte alignment
WIDE_INTEGERS = 1000  # largest magnitude of int32 and int64 elements: sums of products stay far within the dtype
# Elements drawn at a time: they fit the cache of a CPU; on other devices there are few launches.
_CHUNK, _DEVICE_CHUNK = 1 << 20, 1 << 26
_POOL = (1 << 20) + 7  # elements; odd, so that tiles do not align with rows or pages
_RMS = {"int8": 74.0, "uint8": 147.0, "int4": 4.6, "float8_e4m3fn": 110.0, "float8_e5m2": 9000.0}  # rms
_DEFAULT_LLC = 32 << 20
_MAX_SETS = 64
# On a GPU, operand sets occupy 16 times its L2 (four times is not enough: docs/explanation/measuring.md), but 2 GiB at
# most.
_GPU_L2_MULTIPLE, _GPU_BYTES = 16, 2 << 30

Source = Callable[[tuple[int, ...], Layout, str], Tensor]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One set of operands for ``Kernel.run``: a, the unpacked b, and the epilogue's tensors (aux).

    source: another B with equal values, for which a packed copy may exist already; None when there is only b.
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
    """Return random operands on ``device``; equal arguments give equal operands.

    Floats are normally distributed, integers span their full range, and fp8 numbers span all exponents. b: a B to use
    instead of a new one (a weight that several test cases share). offset: distance in elements of the start of A and of
    a new B from an aligned address. gap: number of elements between the matrices of a batch.

    All operands are between guards. A kernel that uses values beyond an operand, or in the gaps between its rows, reads
    NaN (integers: -127 or 129).
    """
    source = RandomSource(device, seed)

    def draw(shape: tuple[int, ...], layout: Layout, dtype: str) -> Tensor:
        out = allocate(shape, layout, dtype, offset, guard=True, device=device, gap=gap)
        fill_random(out, dtype, source)
        return out

    a = draw(logical_shape(problem, problem.m, problem.k), problem.a.layout, problem.a.dtype)
    if b is None:
        b = guarded_weight(_weight(problem, draw, source), offset)
    return Inputs(a, b, tuple(guarded_copy(t, offset) for t in epilogue_tensors(problem, source)))


def timing_sets(problem: Problem, count: int, seed: int, device: torch.device = CPU) -> list[Inputs]:
    """Return ``count`` distinct operand sets for timing (about 50 ms per 100 MB on a CPU, 0.1 ms on a GPU)."""
    source = RandomSource(device, seed)
    pools: dict[str, Tensor] = {}

    def tile(shape: tuple[int, ...], layout: Layout, dtype: str) -> Tensor:
        if not is_host(device.type):  # on a GPU, drawing is as fast as copying, and takes fewer launches than tiles
            out = allocate(shape, layout, dtype, device=device)
            fill_random(out, dtype, source)
            return out
        if dtype not in pools:
            pools[dtype] = allocate((_POOL,), Layout(), dtype)
            fill_random(pools[dtype], dtype, source)
        return _tile_from_pool(shape, layout, dtype, pools[dtype], source)

    sets = []
    for _ in range(count):
        a = tile(logical_shape(problem, problem.m, problem.k), problem.a.layout, problem.a.dtype)
        sets.append(Inputs(a, _weight(problem, tile, source), epilogue_tensors(problem, source)))
    return sets


def operand_bytes(problem: Problem) -> int:
    """Return the size in bytes of one operand set: inputs, epilogue tensors and the output."""
    return problem.min_bytes


def operand_set_count(problem: Problem, target: Target) -> int:
    """Return the number of operand sets to rotate through so that the operands of each call are not in a cache.

    Together the sets exceed twice the L3 of a CPU, or sixteen times the L2 of a GPU. There are at most 64, and their
    memory is at most three times one set's plus 256 MB (on a GPU: 2 GB).
    """
    cache = target.caches[2] if len(target.caches) > 2 and target.caches[2] else _DEFAULT_LLC
    size = max(1, operand_bytes(problem))
    cache_multiple, max_sets = 2, (3 * size + (256 << 20)) // size
    if not is_host(target.device):
        cache_multiple, max_sets = _GPU_L2_MULTIPLE, _GPU_BYTES // size
    return max(2, min(math.ceil(cache_multiple * cache / size) + 1, max_sets, _MAX_SETS))


# --- memory -----------------------------------------------------------------------------------------------------


def logical_shape(problem: Problem, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape [rows, columns], or [batch, rows, columns] for bmm."""
    return (problem.batch, rows, columns) if problem.is_batched else (rows, columns)


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
    """Allocate an uninitialized tensor of a logical shape in a layout; vectors are dense.

    offset: distance in elements of its start from an aligned address. guard: whether to add ``GUARD`` bytes of poison
    on either side, and poison in the gaps between rows. gap: number of elements between the matrices of a batch.
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
    """Allocate ``count`` elements. guard: between guards. gaps: the elements, too, are filled with poison."""
    if not guard:
        return torch.empty(count, dtype=dtype, device=device)
    guard_count = GUARD // dtype.itemsize
    whole = torch.empty(count + 2 * guard_count, dtype=dtype, device=device)
    for part in (whole,) if gaps else (whole[:guard_count], whole[guard_count + count :]):
        fill_guard(part)
    return whole[guard_count : guard_count + count]


def fill_guard(t: Tensor) -> None:
    """Fill a tensor with the poison of guards: NaN, or bytes of 0x81 for integers."""
    if t.dtype.is_floating_point:
        t.fill_(math.nan)
    else:
        t.copy_(torch.full((t.element_size(),), 0x81, dtype=torch.uint8, device=t.device).view(t.dtype).expand(t.shape))


def guarded_copy(t: Tensor, offset: int = 0) -> Tensor:
    """Return a copy of a dense tensor between guards. offset: number of elements between the guard and the copy."""
    copy = _memory(t.numel() + offset, t.dtype, True, False, t.device)[offset:].view(t.shape)
    return copy.copy_(t)


def guarded_weight(b: Tensor | QuantWeight, offset: int = 0) -> Tensor | QuantWeight:
    """Return B with its scales and zero points copied between guards; a plain matrix is returned unchanged."""
    if isinstance(b, Tensor):
        return b
    zero_point = None if b.zero_point is None else guarded_copy(b.zero_point, offset)
    return replace(b, scale=guarded_copy(b.scale, offset), zero_point=zero_point)


def misaligned_weight(problem: Problem, b: Tensor | QuantWeight) -> Tensor | QuantWeight:
    """Return a copy of B between guards that starts one element after an aligned address."""
    data = b.data if isinstance(b, QuantWeight) else b
    copy = allocate(tuple(data.shape), problem.b.layout, problem.b.dtype, 1, guard=True, device=data.device)
    copy.copy_(data)
    return guarded_weight(replace(b, data=copy), 1) if isinstance(b, QuantWeight) else copy


def as_bytes(t: Tensor) -> Tensor:
    """Return an fp8 tensor as bytes, which every device can index and join; any other tensor unchanged."""
    return t.view(torch.uint8) if t.is_floating_point() and t.element_size() == 1 else t


def _dense_view(out: Tensor) -> Tensor | None:
    """Return the memory of a tensor without gaps as one flat view; None when there are gaps."""
    transposed = out.transpose(-1, -2) if out.dim() > 1 else out
    for view in (out, transposed):
        if view.is_contiguous():
            return view.reshape(-1)
    return None


# --- values -----------------------------------------------------------------------------------------------------


def fill_random(out: Tensor, dtype: str, source: RandomSource, *, extremes: bool = False) -> None:
    """Fill a tensor with random values over the dtype's range.

    extremes: integers are the smallest or the largest value; fp8 numbers are the largest of either sign or the smallest
    positive one.
    """
    flat = _dense_view(out)
    if flat is None:
        dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        fill_random(dense, dtype, source, extremes=extremes)
        out.copy_(dense)
        return
    chunk = _CHUNK if is_host(out.device.type) else _DEVICE_CHUNK
    for start in range(0, flat.numel(), chunk):
        piece = flat[start : start + chunk]
        if dtype in ("float32", "float64"):
            source.fill_normal(piece)
        else:
            piece.copy_(_values(piece.numel(), dtype, source, extremes))


def _values(count: int, dtype: str, source: RandomSource, extremes: bool) -> Tensor:
    if dtype in ("int8", "uint8", "int4"):
        return _random_bytes(count, dtype, source, extremes)
    if dtype.startswith("float8"):
        raw = _random_bytes(count, "uint8", source, False)
        # All exponents except that of NaN and infinity: where all exponent bits are set, the top one is cleared.
        top = 0x7F if dtype == "float8_e4m3fn" else 0x7C
        raw = torch.where((raw & top) == top, raw & 0xBF, raw)
        if extremes:
            largest = 0x7E if dtype == "float8_e4m3fn" else 0x7B
            raw = torch.where((raw & 1).bool(), largest | (raw & 0x80), 1).to(torch.uint8)
        return raw.view(getattr(torch, dtype))
    if dtype in ("int32", "int64"):
        return source.integers(-WIDE_INTEGERS, WIDE_INTEGERS + 1, (count,), getattr(torch, dtype))
    return source.normal((count,))


def _random_bytes(count: int, dtype: str, source: RandomSource, extremes: bool) -> Tensor:
    raw = source.bytes(count)
    if extremes:
        low, high = {"int8": (0x80, 0x7F), "uint8": (0, 0xFF), "int4": (0, 0xFF)}[dtype]
        raw = torch.where((raw & 1).bool(), high, low).to(torch.uint8)
    return raw.view(torch.int8) if dtype == "int8" else raw


def _tile_from_pool(shape: tuple[int, ...], layout: Layout, dtype: str, pool: Tensor, source: RandomSource) -> Tensor:
    out = allocate(shape, layout, dtype)
    flat = _dense_view(out)
    if flat is None:
        out.copy_(_tile_from_pool(shape, Layout(), dtype, pool, source))
        return out
    position = 0
    while position < flat.numel():
        start = source.index(_POOL // 2) | 1
        piece = pool[start : start + flat.numel() - position]
        flat[position : position + piece.numel()].copy_(piece)
        position += piece.numel()
    return out


# --- weights and epilogue tensors -------------------------------------------------------------------------------


def _rms(dtype: str) -> float:
    return _RMS.get(dtype, 577.0 if dtype in ("int32", "int64") else 1.0)


def _weight(problem: Problem, draw: Source, source: RandomSource) -> Tensor | QuantWeight:
    operand = problem.b
    if operand.quant is None:
        return draw(logical_shape(problem, problem.k, problem.n), operand.layout, operand.dtype)
    stored = -(-problem.k // 2) if operand.dtype == "int4" else problem.k
    data = draw((stored, problem.n), operand.layout, operand.dtype)
    scale, zero = _quant_tensors(problem, operand, operand.quant, source)
    return QuantWeight(data, scale, zero, problem.k, operand.quant, operand.dtype)


def _quant_tensors(
    problem: Problem, operand: Operand, quant: Quant, source: RandomSource
) -> tuple[Tensor, Tensor | None]:
    """Return scales near 1 / (sqrt(K) * rms), so that outputs are near 1, and zero points near the range's middle."""
    shape = (problem.n,) if quant.group is None else (-(-problem.k // quant.group), problem.n)
    dtype = getattr(torch, quant.scale_dtype)
    size = 1.0 / (math.sqrt(max(problem.k, 1)) * _rms(operand.dtype))
    scale = ((source.uniform(shape) + 0.5) * size).to(dtype)
    if not quant.zero_point:
        return scale, None
    middle, reach = (8, 3) if operand.dtype == "int4" else (0, 10)
    zero = source.integers(middle - reach, middle + reach + 1, shape)
    return scale, zero.to(dtype)


def epilogue_tensors(problem: Problem, source: RandomSource) -> tuple[Tensor, ...]:
    """Return the epilogue's tensors, with values comparable in size to the accumulator at their step."""
    level = math.sqrt(max(problem.k, 1)) * _rms(problem.a.dtype) * _rms(problem.b.dtype)
    if problem.b.quant is not None:
        level = _rms(problem.a.dtype)
    scales = sum(step.kind == "scale" and step.takes_tensor for step in problem.epilogue)
    constant_scale = math.prod(abs(s.value) for s in problem.epilogue if s.kind == "scale" and not s.takes_tensor)
    normalize = level > 1000.0 or problem.out_dtype in ("int8", "uint8")
    target_size = 40.0 if problem.out_dtype in ("int8", "uint8") else 1.0
    size = (target_size / (level * max(constant_scale, 1e-30))) ** (1.0 / scales) if scales and normalize else 1.0
    tensors = []
    for step in problem.epilogue:
        if step.takes_tensor:
            tensors.append(_step_tensor(problem, step, size, level, source))
        if step.kind == "scale":
            level *= size if step.takes_tensor else abs(step.value)
    return tuple(tensors)


def _step_tensor(problem: Problem, step: Step, size: float, level: float, source: RandomSource) -> Tensor:
    full = logical_shape(problem, problem.m, problem.n)
    shapes = {"tensor": (1,), "row": (problem.m,), "col": (problem.n,), "full": full, "inner": (problem.k,)}
    shape = shapes[step.axis]
    if step.kind in NORMS:
        values = source.uniform(shape) + 0.5
    elif step.kind == "norm_bias":
        values = source.normal(shape)
    elif step.kind == "scale":
        values = (source.uniform(shape) + 0.5) * (size / max(abs(step.value), 1e-30))
    elif step.kind == "mul":
        values = source.normal(shape)
    else:
        values = source.normal(shape) * level
    dtype = getattr(torch, str(step.dtype))
    if dtype.is_floating_point:
        return values.to(dtype)
    info = torch.iinfo(dtype)
    return values.double().round_().clamp_(info.min, info.max).to(dtype)
