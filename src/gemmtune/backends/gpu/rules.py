"""Which Problems our GPU kernels support, whatever language they are written in, and the kernel parameters that follow
from a Problem."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...core.epilogue import Step
from ...core.problem import Problem, bits
from ...core.target import Target

MAX_STEPS = 5
HALVES = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
EPILOGUE_DTYPES = ("float32", "bfloat16", "float16", "int32")
INDEX_LIMIT = 2**31 - 2**10  # of rows, columns, K and tiles: kernels count in 32 bits, up to one tile beyond the last
OFFSET_LIMIT = 2**31  # elements: Triton kernels have 32-bit offsets within a tile
MAX_BATCH = 65535  # CUDA's and HIP's limit of a grid's second dimension, which counts batches
ALIGN = 16  # bytes; vector loads and TMA require addresses and rows that are multiples of it


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a GPU that constraints use.

    shared: bytes of shared memory that a program may use. capability: NVIDIA's compute capability, (0, 0) for other
    GPUs. warp: threads of a warp. arch: AMD's architecture (``gfx942``), empty for other GPUs.
    """

    multiprocessors: int
    shared: int
    capability: tuple[int, int]
    warp: int = 32
    arch: str = ""


def device_limits(target: Target) -> DeviceLimits:
    """Return the limits of a Target that is a GPU (``target.caches`` starts with the shared memory of a program)."""
    capability = target.compute_capability
    if target.is_amd:
        shared = target.caches[0] if target.caches and target.caches[0] else 64 << 10
        warp = 64 if target.capability.startswith("gfx9") else 32
        return DeviceLimits(target.cores, shared, capability, warp, target.capability)
    return DeviceLimits(target.cores, target.caches[0] if target.caches else 96 << 10, capability)


def why_no_gpu_kernel(problem: Problem) -> str:
    """Return why no template supports the Problem at all, in words; empty when some may."""
    a, b, family = problem.a.dtype, problem.b.dtype, problem.family
    if min(problem.m, problem.n, problem.k, problem.batch) == 0:
        return "there is nothing to multiply"
    if max(problem.m, problem.n, problem.k) > INDEX_LIMIT:
        return f"counts rows, columns and K in 32 bits: up to {INDEX_LIMIT}"
    if problem.batch > MAX_BATCH:
        return f"a grid has room for {MAX_BATCH} batches; got {problem.batch}"
    if family in ("mm", "bmm") and (a != b or a not in HALVES):
        return f"multiplies bfloat16 and float16 (float32 runs in cuBLAS, without tf32); got {a} x {b}"
    if family == "int_mm" and (a, b) != ("int8", "int8"):
        return f"multiplies int8 by int8; got {a} x {b}"
    if family == "scaled_mm" and (a not in FP8 or b not in FP8):
        return f"multiplies fp8 by fp8; got {a} x {b}"
    if family == "mixed_mm" and (a not in HALVES or b not in ("int8", "int4")):
        return f"takes bfloat16 or float16 activations beside int8 or int4 weights; got {a} x {b}"
    if problem.acc != ("int32" if family == "int_mm" else "float32"):
        return f"accumulates in {'int32' if family == 'int_mm' else 'float32'} only; got {problem.acc}"
    if problem.out.order != "row":
        return "writes row-major outputs only"
    if "strided" in (problem.a.layout.order, problem.b.layout.order):
        return "one stride of each operand must be 1"
    if problem.out_dtype in ("float64", "int64"):
        return f"no output of {problem.out_dtype}"
    return _why_epilogue_unsupported(problem) or _why_quant_unsupported(problem)


def _why_epilogue_unsupported(problem: Problem) -> str:
    steps = problem.epilogue
    if len(steps) > MAX_STEPS:
        return f"at most {MAX_STEPS} steps of epilogue; got {len(steps)}"
    for step in steps:
        if step.takes_tensor and step.dtype not in EPILOGUE_DTYPES:
            return f"no epilogue tensors of {step.dtype}"
        if step.kind == "cast" and step.dtype not in ("bfloat16", "float16", "float32"):
            return f"no cast to {step.dtype} within the epilogue"
        if problem.family == "bmm" and step.takes_tensor and step.axis in ("full", "row"):
            return "batched products take epilogue tensors of one element or a column each"
    if problem.family == "int_mm" and (reason := _why_not_int32(problem)):
        return reason
    if problem.out_dtype == "int32" and (problem.family != "int_mm" or float_at(problem) <= len(steps)):
        return "no float32 accumulator is rounded to int32"
    return ""


def _why_not_int32(problem: Problem) -> str:
    """Return why a step that is exact on integers cannot be computed in int32, or empty.

    These steps are not computed in float32 instead, since the reference stays exact there.
    """
    index = float_at(problem)
    step = problem.epilogue[index] if index < len(problem.epilogue) else None
    if step is None:
        return ""
    numbers = (step.lo, step.hi) if step.kind == "clamp" else (step.value,)
    integral = not any(math.isfinite(x) and x != int(x) for x in numbers)
    if integral and (step.kind == "clamp" or (step.kind in ("bias", "add") and step.dtype == "int32")):
        return f"computes {step.key} of integers in int32, which has no room for its numbers"
    return ""


def _why_quant_unsupported(problem: Problem) -> str:
    quant = problem.b.quant
    if problem.family != "mixed_mm":
        return ""
    if quant is None or quant.scale_dtype not in ("float32", "bfloat16", "float16"):
        return "needs weights with float scales"
    group = problem.k if quant.group is None else quant.group
    if problem.b.dtype == "int8":
        if quant.zero_point and quant.group is None:
            return "int8 weights with a zero point per channel are not offered: give them groups"
        if quant.group is not None and (group % 32 or problem.k % group):
            return f"groups must divide K and be multiples of 32; got {group} of K = {problem.k}"
        return ""
    if problem.k % 128 or (group % 64 and group < problem.k):
        return f"int4 weights want K to be a multiple of 128 and groups of 64; got K = {problem.k}, groups of {group}"
    return "" if problem.b.constant else "int4 weights are shuffled once: gemmtune.pack(weight, scale=..., bits=4)"


def float_at(problem: Problem) -> int:
    """Return the index of the epilogue step before which an integer accumulator becomes float32; an index beyond the
    last step means never."""
    for index, step in enumerate(problem.epilogue):
        if not stays_integer(step):
            return index
    return len(problem.epilogue) if problem.out_dtype not in ("int32", "int8", "uint8") else MAX_STEPS + 1


def stays_integer(step: Step) -> bool:
    """Return whether kernels compute a step on an int32 accumulator in int32, exactly.

    These are the steps that the reference computes exactly on integers (``reference._needs_float``), if their numbers
    fit int32.
    """
    if step.kind == "clamp":
        return _is_int32(step.lo, -math.inf) and _is_int32(step.hi, math.inf)
    if step.kind in ("bias", "add"):
        return step.dtype == "int32" and _is_int32(step.value)
    return step.kind == "relu" or (step.kind == "mul" and step.dtype == "int32")


def _is_int32(x: float, infinity: float | None = None) -> bool:
    return x == infinity or (math.isfinite(x) and x == int(x) and -(2**31) <= x < 2**31)


def step_constants(step: Step | None, integer: bool = False) -> tuple[str, str, float, float | None, float | None]:
    """Return a step's kind, axis, value, lo and hi in the form that kernels are generated from. None stands for a step
    that does nothing.

    integer: whether the accumulator is int32 in this step; then numbers other than a value of 1.0 are ints.
    """
    if step is None:
        return "", "", 1.0, None, None
    if step.kind == "clamp":
        low = None if step.lo == -math.inf else int(step.lo) if integer else step.lo
        high = None if step.hi == math.inf else int(step.hi) if integer else step.hi
        return "clamp", "", 1.0, low, high
    if step.kind == "cast":
        return ("" if step.dtype == "float32" else f"cast.{step.dtype}"), "", 1.0, None, None
    if step.kind == "scale" and not step.takes_tensor:
        return "number", "", step.value, None, None
    value = 1.0 if step.kind == "mul" else step.value  # mul has none (epilogue.Step)
    return (
        step.kind,
        step.axis if step.takes_tensor else "",
        int(value) if integer and value != 1.0 else value,
        None,
        None,
    )


def leading_dimension(layout_ld: int | None, order: str, rows: int, columns: int) -> int:
    """Return the leading dimension of an operand of rows x columns."""
    return layout_ld if layout_ld is not None else (columns if order == "row" else rows)


def leading_dimensions(problem: Problem, m: int) -> tuple[int, int, int]:
    """Return the leading dimensions of A, B (packed, if it is int4) and the output, for m rows."""
    a, b, out = problem.a.layout, problem.b.layout, problem.out
    ldb = problem.k // 2 if problem.b.dtype == "int4" else leading_dimension(b.ld, b.order, problem.k, problem.n)
    return leading_dimension(a.ld, a.order, m, problem.k), ldb, leading_dimension(out.ld, out.order, m, problem.columns)


def aligned_leads(problem: Problem) -> tuple[bool, bool, bool]:
    """Return whether the leading dimensions of A, B and the output are multiples of 16 bytes, as vector loads and TMA
    require."""
    a, b, out = problem.a, problem.b, problem.out
    stored_k = problem.k // 2 if b.dtype == "int4" else problem.k
    b_bits = 8 if b.dtype == "int4" else bits(b.dtype)
    sizes = (
        leading_dimension(a.layout.ld, a.layout.order, problem.m, problem.k) * bits(a.dtype)
        if a.layout.order == "row"
        else 0,
        leading_dimension(b.layout.ld, b.layout.order, stored_k, problem.n) * b_bits,
        leading_dimension(out.ld, out.order, problem.m, problem.columns) * bits(problem.out_dtype),
    )
    a_ok, b_ok, out_ok = (size % (8 * ALIGN) == 0 for size in sizes)
    # Where A's columns are contiguous, its leading dimension depends on M, which is not fixed in a Plan.
    return a_ok and a.layout.order == "row", b_ok, out_ok
