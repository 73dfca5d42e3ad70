"""The CUDA C++ of a candidate for a Problem: constants, parameters, ``ptx.cu``, and a template with its epilogue."""

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
    equal_registers,
    mixed_raised_registers,
    mixed_row_stride,
    mixed_shared,
    mixed_warps,
    slab_raised_registers,
    slab_shared,
    slab_warps,
)
from .epilogue import (
    TYPES,
    epilogue_statements,
    epilogue_vectors,
    float_literal,
    gate_statements,
    matrix_members,
    matrix_prefetches,
    matrix_reads,
    matrix_sector,
    result_is_int,
    scale_group,
    vector_words,
)

_WEIGHT_KINDS = {"PLAIN": 0, "INT8": 1, "INT4": 2}
_PDL_FLAGS = {"B_EARLY": B_EARLY, "NEXT_LATE": NEXT_LATE}
_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_WGMMA = {"bfloat16": "bf16", "float16": "f16", "int8": "s8", **_FP8}
SKINNY, SLAB, MIXED = "skinny", "slab", "mixed"
# A band of tiles (``TileOrder`` in rows.cu) has at least so many rows, as many times more as blocks share A's rows, and
# more while they are this many bytes of A: a part of the L2 cache, which also holds what other blocks read.
_BAND_ROWS, _BAND_BYTES = 1024, 16 << 20
_TMA_TYPES = {8: 0, 16: 1}  # CU_TENSOR_MAP_DATA_TYPE_UINT8, _UINT16
_SWIZZLE_64B, _SWIZZLE_128B = 2, 3  # CU_TENSOR_MAP_SWIZZLE_*


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text, and the data that launching it takes.

    arguments: the names of its parameters, in order. warps: warps of a block. shared: bytes of shared memory that it
    must ask for. descriptors: TMA descriptors by parameter. arch: the suffix of the compute capability for features
    that later ones do not have, or empty. registers: the registers with which a thread must start, where threads hand
    registers on. split: the blocks that share K, of ``mixed``.
    """

    text: str
    arguments: tuple[str, ...]
    warps: int
    shared: int = 0
    descriptors: dict[str, Tma] = field(default_factory=dict)
    arch: str = ""
    registers: int = 0
    split: int = 1


def generate(problem: Problem, template: str, config: dict[str, Any], primitives: str | None = None) -> Source:
    """Return the kernel of a candidate's ``config`` for a Problem. It depends on divisibility, not on sizes.

    primitives: source that replaces ``ptx.cu`` (and ``hopper.cu``) where a CPU runs the kernel. Raises KernelError for
    a template that this backend does not have.
    """
    if template == SKINNY:
        constants, launch = _skinny(problem, config), {"warps": config["warps"]}
        threads = 32 * config["warps"]
    elif template == SLAB:
        constants, launch = _slab(problem, config), _slab_launch(problem, config)
        threads = GROUP
    elif template == MIXED:
        constants, launch = _mixed(problem, config), _mixed_launch(problem, config)
        threads = 2 * config["bn"]
    else:
        raise KernelError(f"the CUDA backend has no template {template!r}; it has {SKINNY}, {SLAB} and {MIXED}")
    uses_tma = "descriptors" in launch
    files, common = ["ptx.cu"], ["numbers.cu", "vectors.cu"]
    if uses_tma:
        files.append("hopper.cu")
        common += ["sums.cu", "rows.cu"]
    parameters = _parameters(problem, uses_tma)
    constants |= _common(problem, config) | _PDL_FLAGS
    lines = [f"#define {name} {value}" for name, value in constants.items()]
    lines.append("#define PARAMETERS " + ", ".join(f"{kind} {name}" for name, kind in parameters.items()))
    lines.append(f"typedef {'int' if problem.family == 'int_mm' else 'float'} sum_t;")
    lines += [primitives] if primitives is not None else map(_read_source, files)
    lines.append(f"typedef {TYPES[problem.out_dtype]} c_t;")
    lines.append(f"typedef {'int' if result_is_int(problem) else 'float'} value_t;")
    if problem.b.quant is not None:
        lines.append(f"typedef {TYPES[problem.b.quant.scale_dtype]} scale_t;")
    lines += map(_read_source, common)
    vectors = epilogue_vectors(problem, GROUP_ROWS if template == SLAB else config["bm"], config["bn"], threads)
    text = _read_source(f"{template}.cu")
    text = _insert_statements(
        text, "AHEAD", [vector.load_statement(index) for index, vector in enumerate(vectors.values())]
    )
    text = _insert_statements(
        text, "KEPT", [vector.store_statement(index) for index, vector in enumerate(vectors.values())]
    )
    if template == MIXED:
        text = _insert_statements(text, "MEMBERS", matrix_members(problem))
        text = _insert_statements(text, "ELEMENTS", matrix_reads(problem))
    text = _insert_statements(text, "PREFETCH", matrix_prefetches(problem))
    text = _insert_statements(text, "EPILOGUE", epilogue_statements(problem, vectors, loaded=template == MIXED))
    if template in (SKINNY, SLAB):
        text = _insert_statements(text, "GATE", gate_statements(problem))
    return Source("\n".join(lines) + "\n" + text, tuple(parameters), **launch)


def _insert_statements(text: str, mark: str, lines: list[str]) -> str:
    """Return a template's text in which statements replace a marker comment."""
    head, marker, tail = text.partition(f"// {mark}\n")
    assert marker, mark
    indent = head[head.rindex("\n") + 1 :]
    return head + f"\n{indent}".join(lines) + "\n" + tail


def _slab_launch(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    columns = config["bn"] // (2 if problem.gate is not None else 1)  # of a gate, from either half of B
    a, b = _box(problem.a.dtype, config["bm"] // config["cluster"]), _box(problem.a.dtype, columns)
    return {
        "warps": slab_warps(problem, config),
        "shared": slab_shared(problem, config),
        "descriptors": {"a_desc": a, "b_desc": b},
        "arch": "a",
        "registers": equal_registers(slab_warps(problem, config)) if slab_raised_registers(problem, config) else 0,
    }


def _box(dtype: str, rows: int) -> Tma:
    """Return the TMA descriptor of a chunk of 128 bytes of ``rows`` rows."""
    width = bits(dtype)
    return Tma(_SWIZZLE_128B, width // 8, _TMA_TYPES[width], (rows, 8 * CHUNK_BYTES // width))


def _mixed_launch(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    row = MIXED_STEP * bits(problem.b.dtype) // 8
    swizzle = _SWIZZLE_64B if row == 64 else _SWIZZLE_128B
    return {
        "warps": mixed_warps(problem, config),
        "split": config["split"],
        "shared": mixed_shared(problem, config),
        "descriptors": {
            "a_desc": _box(problem.a.dtype, config["bm"]),
            "b_desc": Tma(swizzle, 1, _TMA_TYPES[8], (config["bn"], row)),
        },
        "arch": "a",
        "registers": equal_registers(mixed_warps(problem, config)) if mixed_raised_registers(problem, config) else 0,
    }  # fmt: skip


def elements_per_load(problem: Problem) -> int:
    """Return the elements of K in the 16 bytes of B that a lane loads at a time."""
    return 128 // bits(problem.b.dtype)


def _common(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    """Return the constants that all templates have."""
    return {
        "BM": config["bm"],
        "BN": config["bn"],
        "SPLIT": config["split"],
        "GATED": int(problem.gate is not None),
        "RMS_NORM": int(problem.norm is not None and problem.norm.kind == "rms_norm"),
        "LAYER_NORM": int(problem.norm is not None and problem.norm.kind == "layer_norm"),
        "NORM_BIAS": int(len(problem.norm_steps) > 1),
        "SECTOR": matrix_sector(problem),
        "EPS": float_literal(0.0 if problem.norm is None else problem.norm.value),
        "FAST_MATH": int(problem.out_dtype in HALVES),
        "WIDTH": bits(problem.a.dtype) // 8,
        "HALF": int(problem.a.dtype == "float16"),
        "MMA": f'"{_instruction(problem)}"',
        "SUM": '"r"' if problem.family == "int_mm" else '"f"',
    }


def _skinny(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    mixed = problem.family == "mixed_mm"
    group = scale_group(problem)
    return {
        **_WEIGHT_KINDS,
        "WARPS": config["warps"],
        "SIDE": config["side"],
        "DEPTH": config["depth"],
        "CLUSTER": config["split"],
        "KIND": {"int8": "INT8", "int4": "INT4"}[problem.b.dtype] if mixed else "PLAIN",
        "ONE": _ones(problem),
        "KEPT": vector_words(problem, config["bm"], config["bn"]),
        "B_BYTES": max(1, bits(problem.b.dtype) // 8),
        "EVEN_K": int(problem.k % (4 * elements_per_load(problem)) == 0),
        "GROUP": group,
        "ZERO": int(problem.b.quant is not None and problem.b.quant.zero_point),
        "BATCHED": int(problem.family == "bmm"),
    }


def _slab(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_bands(config),
        "STAGES": config["stages"],
        "CHUNKS": config["chunks"],
        "SHARE": config["cluster"],
        "CLUSTER": config["cluster"] * config["split"],
        "WARPS": slab_warps(problem, config),
        "REGISTERS": slab_raised_registers(problem, config),
        "KEPT": vector_words(problem, GROUP_ROWS, config["bn"]),
        "STEPWISE": int(problem.family == "scaled_mm"),
        "PIECES": config["pieces"],
        "TURNS": config["turns"],
        "ONE": 0,  # used for narrow weights only
        "PRODUCTS": " ".join(_products(problem, config["bn"] // config["pieces"])),
    }


def _mixed(problem: Problem, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_WEIGHT_KINDS,
        **_bands(config),
        "STAGES": config["stages"],
        "SHARE": 1,
        "CLUSTER": config["split"],
        "WARPS": mixed_warps(problem, config),
        "REGISTERS": mixed_raised_registers(problem, config),
        "KEPT": vector_words(problem, config["bm"], config["bn"]),
        "KIND": {"int8": "INT8", "int4": "INT4"}[problem.b.dtype],
        "GROUP": scale_group(problem),
        "ACROSS": mixed_row_stride(config),
        "ONE": _ones(problem),
        "PRODUCTS": _mixed_product(problem, config["bm"]),
    }


def _bands(config: dict[str, Any]) -> dict[str, Any]:
    """Return the constants of ``TileOrder`` (rows.cu)."""
    rows = _BAND_ROWS * int(config.get("cluster", 1))
    return {"BAND_TILES": max(1, rows // int(config["bm"])), "BAND_BYTES": _BAND_BYTES}


def _ones(problem: Problem) -> str:
    """Return a literal with 1.0 twice, in the dtype of A (bfloat16 or float16)."""
    return "0x3c003c00u" if problem.a.dtype == "float16" else "0x3f803f80u"


def _mixed_product(problem: Problem, rows: int) -> str:
    """Return the wgmma of 64 columns of B, in registers, and ``rows`` rows of A."""
    kind = _WGMMA[problem.a.dtype]
    left = [f'"r"(a.r[{i}])' for i in range(4)]
    return _wgmma(f"m64n{rows}k16.f32.{kind}.{kind}", ", 1, 1, 0", range(rows // 2), "f", left, "rows_of(b)")


def _products(problem: Problem, bn: int) -> list[str]:
    """Return the wgmma for ``bn`` columns: one, or two where integers do not have this width (PTX ISA, wgmma: n of
    .s8)."""
    exact = problem.family == "int_mm"
    depth, scales = (16, ", 1, 1, 0, 0") if problem.a.dtype in HALVES else (32, "" if exact else ", 1, 1")
    types = ".".join(("s32" if exact else "f32", _WGMMA[problem.a.dtype], _WGMMA[problem.b.dtype]))
    widths = (bn - 24, 24) if exact and bn > 24 and bn % 16 else (bn,)
    instructions, column = [], 0
    for width in widths:
        shape, sums = f"m64n{width}k{depth}.{types}", range(column // 2, (column + width) // 2)
        right = f"rows_of(b + {column * CHUNK_BYTES // 16})"
        instructions.append(_wgmma(shape, scales, sums, "r" if exact else "f", ['"l"(rows_of(a))'], right))
        column += width
    return instructions


def _wgmma(shape: str, scales: str, sums: range, kind: str, left: list[str], right: str) -> str:
    """Return the wgmma instruction that adds to some elements of ``d``. left: asm's operands of A (an address or four
    registers); right: the address of B."""
    count = len(sums)
    accumulators = ", ".join(f"%{i}" for i in range(count))
    inputs = ", ".join(f"%{count + i}" for i in range(len(left)))
    first = inputs if len(left) == 1 else f"{{{inputs}}}"
    last = count + len(left)
    results = ", ".join(f'"+{kind}"(d[{i}])' for i in sums)
    return (
        f'asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{last + 1}, 0;\\n'
        f"wgmma.mma_async.sync.aligned.{shape} {{{accumulators}}}, {first}, %{last}, p{scales};\\n}}"
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


def _parameters(problem: Problem, uses_tma: bool) -> dict[str, str]:
    """Return the types of the kernel's parameters by name. uses_tma: A and B are passed as TMA descriptors."""
    quant = problem.b.quant
    if uses_tma:
        parameters = dict.fromkeys(("a_desc", "b_desc"), "const __grid_constant__ Map")
    else:
        parameters = {"b_ptr": f"const {TYPES[problem.b.dtype]}*", "a_ptr": f"const {TYPES[problem.a.dtype]}*"}
    parameters["c_ptr"] = f"{TYPES[problem.out_dtype]}*"
    if quant is not None:
        parameters["s_ptr"] = f"const {TYPES[quant.scale_dtype]}*"
        if quant.zero_point:
            parameters["z_ptr"] = f"const {TYPES[quant.scale_dtype]}*"
    tensor_steps = [(index, step) for index, step in enumerate(problem.epilogue) if step.takes_tensor]
    parameters |= {f"t{index}": f"const {TYPES[str(step.dtype)]}*" for index, step in tensor_steps}
    parameters |= dict.fromkeys(("M", "N", "K"), "int")
    parameters |= dict.fromkeys(("lda", "ldb", "ldc"), "long long")
    if problem.family == "bmm":
        parameters |= dict.fromkeys(("batch_a", "batch_b", "batch_c"), "long long")
    parameters |= {f"ld{index}": "long long" for index, step in tensor_steps if step.axis == "full"}
    return parameters | {PDL_ARGUMENT: "int"}


@functools.cache
def _read_source(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
