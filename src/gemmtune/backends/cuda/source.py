"""From a Problem and a candidate to CUDA C++: constants, parameters, ``ptx.cu``, a template with its epilogue."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import KernelError
from ...core.problem import Problem, bits
from ..gpu.artifact import B_EARLY, NEXT_LATE, PDL_ARGUMENT, Tma
from ..gpu.rules import HALVES
from .block import (
    CHUNK_BYTES,
    GROUP,
    GROUP_ROWS,
    MIXED_STEP,
    alike,
    mixed_across,
    mixed_more,
    mixed_shared,
    mixed_warps,
    slab_more,
    slab_shared,
    slab_warps,
)
from .epilogue import TYPES, epilogue_of, kept_words, scale_group, stays_int, vectors_of

_KINDS = {"PLAIN": 0, "INT8": 1, "INT4": 2}
_FOLLOWING = {"B_EARLY": B_EARLY, "NEXT_LATE": NEXT_LATE}
_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_WGMMA = {"bfloat16": "bf16", "float16": "f16", "int8": "s8", **_FP8}
SKINNY, SLAB, MIXED = "skinny", "slab", "mixed"
_TMA_TYPES = {8: 0, 16: 1}  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT16
_SWIZZLE_64B, _SWIZZLE_128B = 2, 3  # CU_TENSOR_MAP_SWIZZLE_*


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text, and what launching it takes: its parameters' names in order, the warps of a block, the bytes of
    shared memory it must ask for, and TMA's descriptors by parameter.

    arch: behind the compute capability, for what later ones do not have. registers: what a thread must start with,
    where threads hand them on.
    """

    text: str
    arguments: tuple[str, ...]
    warps: int
    shared: int = 0
    descriptors: dict[str, Tma] = field(default_factory=dict)
    arch: str = ""
    registers: int = 0


def generate(problem: Problem, template: str, config: dict[str, Any], primitives: str | None = None) -> Source:
    """The kernel that a candidate's ``config`` is for a Problem; sizes are no part of it but what divides what.

    primitives: what stands in the place of ``ptx.cu`` (and ``hopper.cu``), where it is not a GPU that runs it. Raises
    KernelError for a template that is none of ours.
    """
    if template == SKINNY:
        constants, made = _skinny(problem, config), {"warps": config["warps"]}
        threads = 32 * config["warps"]
    elif template == SLAB:
        constants, made = _slab(problem, config), _slab_launch(problem, config)
        threads = GROUP
    elif template == MIXED:
        constants, made = _mixed(problem, config), _mixed_launch(problem, config)
        threads = 2 * config["bn"]
    else:
        raise KernelError(f"the CUDA backend has no template {template!r}; it has {SKINNY}, {SLAB} and {MIXED}")
    described = "descriptors" in made
    files, common = ["ptx.cu"], ["numbers.cu", "vectors.cu"]
    if described:
        files.append("hopper.cu")
        common += ["sums.cu", "rows.cu"]
    parameters = _parameters(problem, described)
    lines = [f"#define {name} {value}" for name, value in (constants | _FOLLOWING).items()]
    lines.append("#define PARAMETERS " + ", ".join(f"{kind} {name}" for name, kind in parameters.items()))
    lines.append(f"typedef {'int' if problem.family == 'int_mm' else 'float'} sum_t;")
    lines += [primitives] if primitives is not None else map(_file, files)
    lines.append(f"typedef {TYPES[problem.out_dtype]} c_t;")
    lines.append(f"typedef {'int' if stays_int(problem) else 'float'} value_t;")
    if problem.b.quant is not None:
        lines.append(f"typedef {TYPES[problem.b.quant.scale_dtype]} scale_t;")
    lines += map(_file, common)
    vectors = vectors_of(problem, GROUP_ROWS if template == SLAB else config["bm"], config["bn"], threads)
    text = _file(f"{template}.cu")
    text = _written(text, "AHEAD", [vector.ahead(place) for place, vector in enumerate(vectors.values())])
    text = _written(text, "KEPT", [vector.keep(place) for place, vector in enumerate(vectors.values())])
    text = _written(text, "EPILOGUE", epilogue_of(problem, vectors))
    return Source("\n".join(lines) + "\n" + text, tuple(parameters), **made)


def _written(text: str, mark: str, lines: list[str]) -> str:
    """A template with statements in the place of a comment."""
    before, found, after = text.partition(f"// {mark}\n")
    assert found, mark
    indent = before[before.rindex("\n") + 1 :]
    return before + f"\n{indent}".join(lines) + "\n" + after


def _slab_launch(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    a, b = _box(problem.a.dtype, config["bm"] // config["cluster"]), _box(problem.a.dtype, config["bn"])
    return {
        "warps": slab_warps(problem, config),
        "shared": slab_shared(problem, config),
        "descriptors": {"a_desc": a, "b_desc": b},
        "arch": "a",
        "registers": alike(slab_warps(problem, config)) if slab_more(problem, config) else 0,
    }


def _box(dtype: str, rows: int) -> Tma:
    """A chunk of so many rows."""
    width = bits(dtype)
    return Tma(_SWIZZLE_128B, width // 8, _TMA_TYPES[width], (rows, 8 * CHUNK_BYTES // width))


def _mixed_launch(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    row = MIXED_STEP * bits(problem.b.dtype) // 8
    swizzle = _SWIZZLE_64B if row == 64 else _SWIZZLE_128B
    return {
        "warps": mixed_warps(problem, config),
        "shared": mixed_shared(problem, config),
        "descriptors": {
            "a_desc": _box(problem.a.dtype, config["bm"]),
            "b_desc": Tma(swizzle, 1, _TMA_TYPES[8], (config["bn"], row)),
        },
        "arch": "a",
        "registers": alike(mixed_warps(problem, config)) if mixed_more(problem, config) else 0,
    }  # fmt: skip


def run_of(problem: Problem) -> int:
    """Elements of K in the 16 bytes that a lane reads of B at a time."""
    return 128 // bits(problem.b.dtype)


def _skinny(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    mixed = problem.family == "mixed_mm"
    group = scale_group(problem)
    half = problem.a.dtype == "float16"
    return {
        **_KINDS,
        "BM": config["bm"],
        "BN": config["bn"],
        "WARPS": config["warps"],
        "SIDE": config["side"],
        "DEPTH": config["depth"],
        "SPLIT": config["split"],
        "CLUSTER": config["split"],
        "KIND": {"int8": "INT8", "int4": "INT4"}[problem.b.dtype] if mixed else "PLAIN",
        "HALF": int(half),
        "ONE": _ones(half),
        "WIDTH": bits(problem.a.dtype) // 8,
        "KEPT": kept_words(problem, config["bm"], config["bn"]),
        "B_BYTES": max(1, bits(problem.b.dtype) // 8),
        "EVEN_K": int(problem.k % (4 * run_of(problem)) == 0),
        "GROUP": group,
        "ZERO": int(problem.b.quant is not None and problem.b.quant.zero_point),
        "BATCHED": int(problem.family == "bmm"),
        "MMA": f'"{_instruction(problem)}"',
        "SUM": '"r"' if problem.family == "int_mm" else '"f"',
    }


def _slab(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "BM": config["bm"],
        "BN": config["bn"],
        "STAGES": config["stages"],
        "CHUNKS": config["chunks"],
        "SHARE": config["cluster"],
        "SPLIT": config["split"],
        "CLUSTER": config["cluster"] * config["split"],
        "WARPS": slab_warps(problem, config),
        "REGISTERS": slab_more(problem, config),
        "KEPT": kept_words(problem, GROUP_ROWS, config["bn"]),
        "WIDTH": bits(problem.a.dtype) // 8,
        "STEPWISE": int(problem.family == "scaled_mm"),
        "PIECES": config["pieces"],
        "TURNS": config["turns"],
        "HALF": int(problem.a.dtype == "float16"),
        "ONE": 0,  # of narrow weights
        "MMA": f'"{_instruction(problem)}"',
        "SUM": '"r"' if problem.family == "int_mm" else '"f"',
        "PRODUCTS": " ".join(_products(problem, config["bn"] // config["pieces"])),
    }


def _mixed(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    half = problem.a.dtype == "float16"
    return {
        **_KINDS,
        "BM": config["bm"],
        "BN": config["bn"],
        "STAGES": config["stages"],
        "SHARE": 1,
        "SPLIT": config["split"],
        "CLUSTER": config["split"],
        "WARPS": mixed_warps(problem, config),
        "REGISTERS": mixed_more(problem, config),
        "KEPT": kept_words(problem, config["bm"], config["bn"]),
        "KIND": {"int8": "INT8", "int4": "INT4"}[problem.b.dtype],
        "GROUP": scale_group(problem),
        "ACROSS": mixed_across(config),
        "WIDTH": 2,
        "HALF": int(half),
        "ONE": _ones(half),
        "MMA": f'"{_instruction(problem)}"',
        "SUM": '"f"',
        "PRODUCTS": _mixed_product(problem, config["bm"]),
    }


def _ones(half: bool) -> str:
    """1.0, twice."""
    return "0x3c003c00u" if half else "0x3f803f80u"


def _mixed_product(problem: Problem, rows: int) -> str:
    """wgmma of 64 columns of B, in registers, and so many rows of A."""
    kind = _WGMMA[problem.a.dtype]
    left = [f'"r"(a.r[{i}])' for i in range(4)]
    return _wgmma(f"m64n{rows}k16.f32.{kind}.{kind}", ", 1, 1, 0", range(rows // 2), "f", left, "rows_of(b)")


def _products(problem: Problem, bn: int) -> list[str]:
    """wgmma for ``bn`` columns: one, or two where integers know no such width (PTX ISA, wgmma: n of .s8)."""
    exact = problem.family == "int_mm"
    depth, scales = (16, ", 1, 1, 0, 0") if problem.a.dtype in HALVES else (32, "" if exact else ", 1, 1")
    types = ".".join(("s32" if exact else "f32", _WGMMA[problem.a.dtype], _WGMMA[problem.b.dtype]))
    widths = (bn - 24, 24) if exact and bn > 24 and bn % 16 else (bn,)
    made, column = [], 0
    for width in widths:
        shape, sums = f"m64n{width}k{depth}.{types}", range(column // 2, (column + width) // 2)
        right = f"rows_of(b + {column * CHUNK_BYTES // 16})"
        made.append(_wgmma(shape, scales, sums, "r" if exact else "f", ['"l"(rows_of(a))'], right))
        column += width
    return made


def _wgmma(shape: str, scales: str, sums: range, kind: str, left: list[str], right: str) -> str:
    """The instruction on some of ``d``: A as asm's operands ``left`` (an address or four registers), B at ``right``."""
    count = len(sums)
    places = ", ".join(f"%{i}" for i in range(count))
    given = ", ".join(f"%{count + i}" for i in range(len(left)))
    first = given if len(left) == 1 else f"{{{given}}}"
    last = count + len(left)
    results = ", ".join(f'"+{kind}"(d[{i}])' for i in sums)
    return (
        f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{last + 1}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.{shape} {{{places}}}, {first}, %{last}, p{scales};\\n}}"
        f'" : {results} : {", ".join(left)}, "l"({right}), "r"(add));'
    )


def _instruction(problem: Problem) -> str:
    a, b = problem.a.dtype, problem.b.dtype
    if a in HALVES:
        kind = "bf16" if a == "bfloat16" else "f16"
        return f"m16n8k16.row.col.f32.{kind}.{kind}.f32"
    if problem.family == "int_mm":
        return "m16n8k32.row.col.s32.s8.s8.s32"
    return f"m16n8k32.row.col.f32.{_FP8[b]}.{_FP8[a]}.f32"


def _parameters(problem: Problem, described: bool) -> dict[str, str]:
    """Types by name. described: TMA knows where A and B are."""
    quant = problem.b.quant
    if described:
        found = dict.fromkeys(("a_desc", "b_desc"), "const __grid_constant__ Map")
    else:
        found = {"b_ptr": f"const {TYPES[problem.b.dtype]}*", "a_ptr": f"const {TYPES[problem.a.dtype]}*"}
    found["c_ptr"] = f"{TYPES[problem.out_dtype]}*"
    if quant is not None:
        found["s_ptr"] = f"const {TYPES[quant.scale_dtype]}*"
        if quant.zero_point:
            found["z_ptr"] = f"const {TYPES[quant.scale_dtype]}*"
    taking = [(place, step) for place, step in enumerate(problem.epilogue) if step.takes_tensor]
    found |= {f"t{place}": f"const {TYPES[str(step.dtype)]}*" for place, step in taking}
    found |= dict.fromkeys(("M", "N", "K"), "int")
    found |= dict.fromkeys(("lda", "ldb", "ldc"), "long long")
    if problem.family == "bmm":
        found |= dict.fromkeys(("batch_a", "batch_b", "batch_c"), "long long")
    found |= {f"ld{place}": "long long" for place, step in taking if step.axis == "full"}
    return found | {PDL_ARGUMENT: "int"}


@functools.cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
