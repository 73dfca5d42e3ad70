"""Builders of common Problems, and the named workloads that benchmarks, documentation and the CLI share."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from .epilogue import Step
from .problem import Dim, Layout, Operand, Problem, Quant

Problems = list[tuple[Problem, int]]

# The values of the option --dtype, and their meaning.
DTYPES: dict[str, str] = {
    "fp64": "float64 activations and weights",
    "fp32": "float32 activations and weights",
    "bf16": "bfloat16 activations and weights, float32 accumulation",
    "fp16": "float16 activations and weights, float32 accumulation",
    "int8": "int8 x int8 -> int32",
    "fp8": "float8_e4m3fn x float8_e4m3fn -> bfloat16, with a scale per row of activations and column of weights",
    "int8wo": "bfloat16 activations, int8 weights with a scale per output channel",
    "fp8wo": "bfloat16 activations, float8_e4m3fn weights with a float32 scale per output channel",
    "int4wo": "bfloat16 activations, int4 weights with a scale and a zero point per group of 128",
}
_FLOATS = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# The values of --dtype that name one torch dtype, and its name.
TORCH_DTYPES = {**_FLOATS, "int8": "int8", "fp8": "float8_e4m3fn"}

# (K, N) of the weight matrices, as REFERENCE.md lists them.
_LLAMA_WEIGHTS = ((11008, 4096), (4096, 12288), (4096, 22016), (4096, 4096), (4096, 65536))
_LLAMA_SMALL_WEIGHTS = ((4096, 4096), (11008, 4096), (4096, 11008))


def linear_problem(m: int, n: int, k: int, dtype: str, *, bias: bool = False, constant: bool = True) -> Problem:
    """Return the Problem of ``F.linear(x[m, k], w[n, k], bias[n] if bias)``; w is the column-major B operand [k, n].

    dtype: torch's name of the dtype of x, w, bias and the output. constant: whether the weight never changes, so that
    it may be packed.
    """
    epilogue = (Step("bias", axis="col", dtype=dtype),) if bias else ()
    weight = Operand(dtype, Layout("col"), constant=constant)
    acc = "float64" if dtype == "float64" else "float32"
    return Problem("mm", m, n, k, Operand(dtype), weight, dtype, epilogue=epilogue, acc=acc)


def int_problem(m: int, n: int, k: int, *, a_dtype: str = "int8", constant: bool = True) -> Problem:
    """Return the Problem of ``a[m, k] @ w[n, k].T`` with int8 weights and an exact int32 output.

    a_dtype: ``int8`` or ``uint8``.
    """
    weight = Operand("int8", Layout("col"), constant=constant)
    return Problem("int_mm", m, n, k, Operand(a_dtype), weight, "int32", acc="int32")


def fp8_problem(m: int, n: int, k: int, *, rowwise: bool = True, out_dtype: str = "bfloat16") -> Problem:
    """Return the Problem of ``torch._scaled_mm(a[m, k], w[n, k].T, scale_a, scale_b)`` with float8_e4m3fn operands.

    rowwise: a scale per row of a and per row of w; otherwise one scale per tensor.
    """
    axes = ("row", "col") if rowwise else ("tensor", "tensor")
    scales = tuple(Step("scale", axis=axis, dtype="float32") for axis in axes)  # type: ignore[arg-type]
    fp8 = "float8_e4m3fn"
    return Problem("scaled_mm", m, n, k, Operand(fp8), Operand(fp8, Layout("col")), out_dtype, epilogue=scales)


def weight_only_problem(
    m: int,
    n: int,
    k: int,
    *,
    bits: int = 8,
    float8: bool = False,
    group: int | None = None,
    dtype: str = "bfloat16",
    scale_dtype: str | None = None,
    zero_point: bool = False,
    constant: bool = True,
) -> Problem:
    """Return the Problem of ``x[m, k] @ dequantized(w)[k, n]`` with integer weights, or float8_e4m3fn ones.

    bits: width of integer weights, 8 or 4; other values raise ValueError. float8: whether weights are float8_e4m3fn.
    group: number of elements along K that share a scale (None: one scale per output channel). dtype: torch's name of
    the dtype of x and the output; the default of scale_dtype.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 8 or 4; got {bits!r}")
    quant = Quant(group=group, scale_dtype=scale_dtype or dtype, zero_point=zero_point)
    weight = Operand("float8_e4m3fn" if float8 else f"int{bits}", Layout("col"), constant=constant, quant=quant)
    return Problem("mixed_mm", m, n, k, Operand(dtype), weight, dtype)


def bmm_problem(batch: int, m: int, n: int, k: int, dtype: str) -> Problem:
    """Return the Problem of ``torch.bmm(a[batch, m, k], b[batch, k, n])``, both row-major and not constant."""
    acc = "float64" if dtype == "float64" else "float32"
    return Problem("bmm", m, n, k, Operand(dtype), Operand(dtype), dtype, batch=batch, acc=acc)


def build(m: int, n: int, k: int, dtype: str, *, bias: bool = False) -> Problem:
    """Return the Problem for the command line's ``M,N,K --dtype``. dtype: a key of ``DTYPES``.

    Raises ValueError, naming the valid dtypes, for any other one, and for a bias with a dtype that does not permit it.
    """
    if dtype in _FLOATS:
        return linear_problem(m, n, k, _FLOATS[dtype], bias=bias)
    if bias:
        raise ValueError(f"bias goes with fp64, fp32, bf16 and fp16 only; got dtype {dtype!r}")
    if dtype == "int8":
        return int_problem(m, n, k)
    if dtype == "fp8":
        return fp8_problem(m, n, k)
    if dtype == "int8wo":
        return weight_only_problem(m, n, k)
    if dtype == "fp8wo":
        return weight_only_problem(m, n, k, float8=True, scale_dtype="float32")
    if dtype == "int4wo":
        return weight_only_problem(m, n, k, bits=4, group=128, zero_point=True)
    raise ValueError(f"unknown dtype {dtype!r}; known dtypes: {', '.join(DTYPES)}")


def dtype_name(problem: Problem) -> str:
    """Return the short name of a Problem's dtypes: a key of ``DTYPES`` if there is one, else the dtypes' names."""
    a, b = problem.a.dtype, problem.b.dtype
    short = {name: key for key, name in _FLOATS.items()}
    if problem.family == "mixed_mm":
        name = {"float8_e4m3fn": "fp8wo"}.get(b, f"{b}wo")
        return name if a == "bfloat16" else f"{short.get(a, a)} x {name}"
    if problem.family == "int_mm":
        return "int8" if a == b == "int8" and problem.out_dtype == "int32" else f"{a} x {b} -> {problem.out_dtype}"
    if problem.with_m(1) == fp8_problem(1, problem.n, problem.k):
        return "fp8"
    return short.get(a, a) if a == b == problem.out_dtype else f"{a} x {b} -> {problem.out_dtype}"


def label(problem: Problem) -> str:
    """Return a short description for tables, like ``16x4096x11008 bf16 +bias`` (M x N x K)."""
    return _label(problem, str(problem.m))


def weight_label(problem: Problem, dim: Dim = "m") -> str:
    """Return a short description of a Problem's weight, with any M: ``Mx4096x11008 bf16 +bias``. With the dim "batch",
    of a batched product with any batch: ``Bx16x128x512 bf16``."""
    return _label(problem, "M") if dim == "m" else _label(problem, str(problem.m), "B")


def _label(problem: Problem, m: str, count: str = "") -> str:
    batch = f"{count or problem.batch}x" if problem.is_batched else ""
    implied = 2 if problem.family == "scaled_mm" else 0  # the two scales of every fp8 Problem are not listed
    steps = "".join(f" +{step.kind}" for step in problem.epilogue[implied:])
    return f"{batch}{m}x{problem.n}x{problem.k} {dtype_name(problem)}{steps}"


def _grid(ms: Sequence[int], weights: Sequence[tuple[int, int]], dtype: str) -> list[Problem]:
    return [build(m, n, k, dtype) for k, n in weights for m in ms]


def _llama(dtype: str) -> list[Problem]:
    return _grid((1, 16, 64, 256, 1024, 4096), _LLAMA_WEIGHTS, dtype)


def _llama_small(dtype: str) -> list[Problem]:
    return _grid((1, 4, 16, 64, 256), _LLAMA_SMALL_WEIGHTS, dtype)


def _odd(dtype: str) -> list[Problem]:
    """Return Problems with odd or empty sizes, unaligned, transposed or strided operands, and batches of 0 and 1."""
    sizes = ((7, 4093, 4099), (3, 1, 769), (1, 769, 1), (3, 257, 4096), (0, 64, 64), (512, 3073, 768))
    problems = [build(m, n, k, dtype) for m, n, k in sizes]
    base = build(7, 509, 521, dtype)
    unaligned = replace(base, a=replace(base.a, layout=Layout("row", 523)))
    transposed = replace(base, a=replace(base.a, layout=Layout("col")))
    changing = replace(base, b=replace(base.b, constant=False))
    problems += [unaligned, transposed, changing]
    if base.family == "mm":
        strided = replace(changing, b=replace(changing.b, layout=Layout("strided", 1042)))
        problems += [strided, *(bmm_problem(batch, 7, 127, 131, base.a.dtype) for batch in (0, 1))]
    return problems


def _dynamic(dtype: str) -> list[Problem]:
    """Return Problems of one weight for 24 values of M from 1 to 8192 (log-uniform, reproducible), in random order."""
    rng = random.Random(0)
    ms = {1, 8192} | {round(2 ** rng.uniform(0, 13)) for _ in range(40)}
    picked = sorted(ms)[:: max(1, len(ms) // 24)]
    rng.shuffle(picked)
    return _grid(picked, ((4096, 4096),), dtype)


_WORKLOADS: dict[str, Callable[[str], list[Problem]]] = {
    "llama": _llama,
    "llama-small": _llama_small,
    "odd": _odd,
    "dynamic": _dynamic,
}


def names() -> tuple[str, ...]:
    """Return the names of all workloads."""
    return tuple(_WORKLOADS)


def workload(name: str, dtype: str = "bf16") -> Problems:
    """Return the Problems of a named workload, each with a call count of 1.

    Raises ValueError, naming the valid ones, for an unknown name or dtype.
    """
    if name not in _WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known workloads: {', '.join(names())}")
    return [(problem, 1) for problem in _WORKLOADS[name](dtype)]
