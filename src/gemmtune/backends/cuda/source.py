"""From a Problem and a candidate to CUDA C++: constants, parameters, ``ptx.cu``, a template with its epilogue."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...epilogue import Step
from ...errors import KernelError
from ...problem import Problem, bits
from ..gpu.artifact import Tma
from ..gpu.rules import HALVES, STEPS, float_at, step_constants

TYPES = {
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float", "int32": "int", "int8": "signed char",
    "uint8": "unsigned char", "float8_e4m3fn": "unsigned char", "float8_e5m2": "unsigned char", "int4": "unsigned char",
}  # fmt: skip
_KINDS = {"PLAIN": 0, "INT8": 1, "INT4": 2}
_FP8 = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_WGMMA = {"bfloat16": "bf16", "float16": "f16", "int8": "s8", **_FP8}
SKINNY, SLAB, MIXED = "skinny", "slab", "mixed"
REGISTERS = 65536  # of a multiprocessor
_GROUP, _GROUP_ROWS = 128, 64  # threads and rows that wgmma takes
CHUNK_BYTES = 128  # of a row, as TMA lays them for wgmma
MIXED_STEP = 128  # elements of K in a stage of ``mixed``
_BOUNDARY = 1024  # where TMA's swizzle starts anew
_BARRIERS = 16  # bytes of a pair
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
        threads = _GROUP
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
    lines = [f"#define {name} {value}" for name, value in constants.items()]
    lines.append("#define PARAMETERS " + ", ".join(f"{kind} {name}" for name, kind in parameters.items()))
    lines.append(f"typedef {'int' if problem.family == 'int_mm' else 'float'} sum_t;")
    lines += [primitives] if primitives is not None else map(_file, files)
    lines.append(f"typedef {TYPES[problem.out_dtype]} c_t;")
    lines.append(f"typedef {'int' if _stays_int(problem) else 'float'} value_t;")
    lines += map(_file, common)
    vectors = _vectors(problem, _GROUP_ROWS if template == SLAB else config["bm"], config["bn"], threads)
    text = _file(f"{template}.cu")
    text = _written(text, "AHEAD", [vector.ahead(place) for place, vector in enumerate(vectors.values())])
    text = _written(text, "KEPT", [vector.keep(place) for place, vector in enumerate(vectors.values())])
    text = _written(text, "EPILOGUE", _epilogue(problem, vectors))
    return Source("\n".join(lines) + "\n" + text, tuple(parameters), **made)


def _written(text: str, mark: str, lines: list[str]) -> str:
    """A template with statements in the place of a comment."""
    before, found, after = text.partition(f"// {mark}\n")
    assert found, mark
    indent = before[before.rindex("\n") + 1 :]
    return before + f"\n{indent}".join(lines) + "\n" + after


@dataclass(frozen=True, slots=True)
class _Vector:
    """A vector that the epilogue takes, and where a kernel keeps it (vectors.cu).

    name, type: of its elements' pointer. axis: what there is one for: ``row``, ``col`` or ``tensor``. count: elements
    that a group of ``threads`` keeps, from ``offset`` on. integer: taken before integer sums become numbers.
    """

    name: str
    type: str
    axis: str
    count: int
    threads: int
    offset: int
    integer: bool

    def ahead(self, place: int) -> str:
        first, last = {"row": ("top", "M - 1"), "col": ("n0", "N - 1")}.get(self.axis, ("0", "0"))
        kind = f"Ahead<{self.type}, {self.count}, {self.threads}>"
        return f"const {kind} ahead{place}({self.name}, {first}, {last}, member);"

    def keep(self, place: int) -> str:
        return f"ahead{place}.{'integers' if self.integer else 'numbers'}(kept + {self.offset}, member);"

    def element(self) -> str:
        at = {"row": " + y", "col": " + x"}.get(self.axis, "")
        return f"kept[{self.offset}{at}].{'whole' if self.integer else 'number'}"


def _vectors(problem: Problem, rows: int, columns: int, threads: int) -> dict[str, _Vector]:
    """By their pointers' names: those of a tile, or of a group's part of it, of so many rows and columns."""
    taken: list[tuple[str, str, str, bool]] = []
    if problem.b.quant is not None and not scale_group(problem):
        taken.append(("s_ptr", problem.b.quant.scale_dtype, "col", False))
    turn = float_at(problem) if problem.family == "int_mm" else 0
    for place, step in enumerate(problem.epilogue):
        if step.takes_tensor and step.axis != "full":
            taken.append((f"t{place}", str(step.dtype), step.axis, place < turn))
    found: dict[str, _Vector] = {}
    offset = 0
    for name, dtype, axis, integer in taken:
        count = {"row": rows, "col": columns}.get(axis, 1)
        found[name] = _Vector(name, TYPES[dtype], axis, count, threads, offset, integer)
        offset += count
    return found


def kept_words(problem: Problem, rows: int, columns: int) -> int:
    """Words of shared memory for what the epilogue takes of vectors, for so many rows and columns."""
    return sum(vector.count for vector in _vectors(problem, rows, columns, 1).values())


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


def mixed_warps(problem: Problem, config: dict[str, Any]) -> int:
    """Those that multiply, and the one that fetches, or the four that give their registers to the others."""
    return int(config["bn"] // 16 + (4 if mixed_more(problem, config) else 1))


def mixed_registers(problem: Problem, config: dict[str, Any]) -> int:
    """About as many as the compiler uses for a thread that multiplies."""
    kept = 74 if problem.b.dtype == "int4" else 64
    return int(config["bm"] // 2 * (2 if scale_group(problem) else 1) + kept)


def mixed_more(problem: Problem, config: dict[str, Any]) -> int:
    """What a thread that multiplies has when those that fetch keep 24; 0: it does with as many as all can have alike.

    A block has as many as it started with, alike for all: who waits for more than is left waits forever.
    """
    return _more(config["bn"] // 64, mixed_registers(problem, config))


def _more(groups: int, wanted: int) -> int:
    if wanted <= alike(4 * groups + 1):
        return 0
    return min(240, ((groups + 1) * alike(4 * groups + 4) - 24) // groups // 8 * 8)


def alike(warps: int) -> int:
    """Registers that each thread of a block can have, as ptxas hands them out: to four warps at a time."""
    return min(255, REGISTERS // (128 * -(-warps // 4)) // 8 * 8)


def mixed_shared(problem: Problem, config: dict[str, Any]) -> int:
    """Bytes of shared memory: stages with a pair of barriers each, or the tile's sums where that is more, what putting
    them on a boundary of 1 KB may take, and vectors."""
    bm, bn, split, stages = (config[name] for name in ("bm", "bn", "split", "stages"))
    sums = _sent(bm, bn, split) if split > 1 else 4 * bm * _mixed_across(config)
    most = max(stages * mixed_stage(problem, config), sums)
    return int(most + _BARRIERS * (stages + 1) + _BOUNDARY + 4 * kept_words(problem, bm, bn))


def mixed_stages(problem: Problem, config: dict[str, Any], room: int) -> int:
    """As many stages as so many bytes of shared memory hold."""
    besides = _BOUNDARY + _BARRIERS + 4 * kept_words(problem, config["bm"], config["bn"])
    return (room - besides) // (mixed_stage(problem, config) + _BARRIERS)


def mixed_stage(problem: Problem, config: dict[str, Any]) -> int:
    """Bytes of a stage."""
    return int(2 * CHUNK_BYTES * config["bm"] + MIXED_STEP * bits(problem.b.dtype) // 8 * config["bn"])


def _mixed_across(config: dict[str, Any]) -> int:
    """Sums from one of C's rows to the next: those that a warp writes at a time lie in different banks."""
    return int(config["bn"] + 4)


def slab_warps(problem: Problem, config: dict[str, Any]) -> int:
    """As ``mixed_warps``."""
    return 4 * _slab_groups(config) + (4 if slab_more(problem, config) else 1)


def _slab_groups(config: dict[str, Any]) -> int:
    """Groups of four warps that multiply: 64 rows each, or what there is."""
    return int(-(-config["bm"] // _GROUP_ROWS))


def slab_registers(problem: Problem, config: dict[str, Any]) -> int:
    """As ``mixed_registers``."""
    sums = config["bn"] // 2
    if problem.family == "scaled_mm":
        sums += config["turns"] * sums // config["pieces"]
    return int(sums + 40)


def slab_more(problem: Problem, config: dict[str, Any]) -> int:
    """As ``mixed_more``."""
    return _more(_slab_groups(config), slab_registers(problem, config))


def slab_shared(problem: Problem, config: dict[str, Any]) -> int:
    """Bytes of shared memory: stages, or, where blocks share K, what they send each other in the stages' place, if that
    is more; a pair of barriers for each, what putting them on a boundary of 1 KB may take, and vectors."""
    stages = config["stages"] * _slab_stage(config) + _slab_beyond(config)
    if config["split"] > 1:
        stages = max(stages, _sent(config["bn"], _GROUP_ROWS * _slab_groups(config), config["split"]))
    return int(stages + _BARRIERS * config["stages"] + _slab_besides(problem, config))


def _slab_besides(problem: Problem, config: dict[str, Any]) -> int:
    vectors = 2 * _slab_groups(config) * 4 * kept_words(problem, _GROUP_ROWS, config["bn"])
    return int(_BOUNDARY + (_BARRIERS if config["split"] > 1 else 0) + vectors)


def _slab_beyond(config: dict[str, Any]) -> int:
    """What wgmma reads of more rows than the last stage has."""
    return CHUNK_BYTES * max(0, int(_GROUP_ROWS - config["bm"] - config["chunks"] * config["bn"]))


def _slab_stage(config: dict[str, Any]) -> int:
    return int(config["chunks"] * CHUNK_BYTES * (config["bm"] + config["bn"]))


def _sent(own: int, others: int, split: int) -> int:
    """Bytes that blocks which share K send each of them (sums.cu): sums of some of ``own`` columns (or rows), of which
    8 stay together, times all ``others``."""
    return 4 * 8 * -(-own // (8 * split)) * split * others


def slab_stages(problem: Problem, config: dict[str, Any], room: int) -> int:
    """As many stages as so many bytes of shared memory hold."""
    return (room - _slab_besides(problem, config) - _slab_beyond(config)) // (_slab_stage(config) + _BARRIERS)


def run_of(problem: Problem) -> int:
    """Elements of K in the 16 bytes that a lane reads of B at a time."""
    return 128 // bits(problem.b.dtype)


def scale_group(problem: Problem) -> int:
    """Elements of K that share a scale and are scaled as they are summed; 0: the sum is scaled, or nothing is."""
    quant = problem.b.quant
    if quant is None or (quant.group is None and not quant.zero_point):
        return 0
    return problem.k if quant.group is None else quant.group


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
        "KEPT": kept_words(problem, _GROUP_ROWS, config["bn"]),
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
        "ACROSS": _mixed_across(config),
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
    return found


def _stays_int(problem: Problem) -> bool:
    """Whether sums are integers until they are rounded."""
    return problem.family == "int_mm" and float_at(problem) > len(problem.epilogue)


def _epilogue(problem: Problem, vectors: dict[str, _Vector]) -> list[str]:
    """Statements from ``sum`` of one element to what is rounded, once, to its place."""
    lines, name = [], "sum"
    turn = float_at(problem) if problem.family == "int_mm" else STEPS + 1
    if problem.b.quant is not None and not scale_group(problem):
        lines.append(f"sum *= {vectors['s_ptr'].element()};")
    for place, step in enumerate((*problem.epilogue, None)):
        if place == turn:
            lines.append("float value = (float)sum;")
            name = "value"
        if step is not None:
            integer = problem.family == "int_mm" and name == "sum"
            lines += _step(step, place, name, integer, vectors.get(f"t{place}"))
    lines.append(f"return {name};")
    return lines


def _step(step: Step, place: int, v: str, integer: bool, vector: _Vector | None) -> list[str]:
    kind, _, value, low, high = step_constants(step)
    tensor = vector.element() if vector else f"t{place}[(long long)m * ld{place} + n]"
    if not (vector or integer):
        tensor = f"number({tensor})"
    if value != 1.0:
        tensor += f" * {_float(value)}"
    statements = {
        "": [],
        "relu": [f"{v} = {v} < 0 ? 0 : {v};"],  # keeps NaN
        "gelu": [f"{v} = 0.5f * {v} * (1.0f + erff({v} * {_float(0.5**0.5)}));"],
        # 1 + tanh(u) = 2 sigmoid(2u)
        "gelu_tanh": [f"{v} = {v} / (1.0f + expf(-1.5957691216057308f * ({v} + 0.044715f * {v} * {v} * {v})));"],
        "silu": [f"{v} = {v} / (1.0f + expf(-{v}));"],
        "number": [f"{v} *= {_float(value)};"],
        "scale": [f"{v} *= {tensor};"],
        "mul": [f"{v} *= {tensor};"],
        "bias": [f"{v} += {tensor};"],
        "add": [f"{v} += {tensor};"],
        "clamp": [
            *([] if low is None else [f"{v} = {v} < {_float(low)} ? {_float(low)} : {v};"]),
            *([] if high is None else [f"{v} = {v} > {_float(high)} ? {_float(high)} : {v};"]),
        ],
        "cast.bfloat16": [f"{v} = rounded<bfloat16>({v});"],
        "cast.float16": [f"{v} = rounded<float16>({v});"],
    }
    return statements[kind]


def _float(x: float) -> str:
    """A literal of the float32 nearest to x."""
    nearest = ctypes.c_float(x).value
    if math.isinf(nearest):
        return f"__int_as_float({'0x7f800000' if nearest > 0 else '0xff800000'})"
    return f"{nearest.hex()}f"


@functools.cache
def _file(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
