"""The C++ side's enumerations in Python (native/frame/types.hpp), and which instruction set multiplies which dtypes."""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "uint8": 4, "int32": 5, "int4": 6, "float8_e4m3fn": 7}
STEP_KINDS = ("scale", "bias", "add", "mul", "relu", "gelu", "gelu_tanh", "silu", "clamp", "cast")
GATE_ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh")
AXES = ("tensor", "row", "col", "full")
PACK_A = ("none", "rows", "panels")
LANES = 16
AMX_TILE_ROWS = 32  # of C, in two tile registers
AMX_BLOCK_BYTES = 1 << 20  # of A: half of the L2 cache, which has 2 MiB a core on every CPU with AMX so far
AMX_LEAST_ROWS = 128  # in a block of A: with fewer, reading B from memory again takes longer


@dataclass(frozen=True, slots=True)
class Compute:
    """How one instruction multiplies. kp: consecutive elements along K that it multiplies at a time. code: the value of
    native/frame/types.hpp's Compute."""

    name: str
    code: int
    kp: int
    integer: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of an element: ``kp`` of them have 4."""
        return 4 // self.kp


F32 = Compute("f32", 0, 1)
BF16 = Compute("bf16", 1, 2)
I16 = Compute("i16", 2, 2, integer=True)
U8S8 = Compute("u8s8", 3, 4, integer=True)
S8S8 = Compute("s8s8", 4, 4, integer=True)


@dataclass(frozen=True, slots=True)
class Unit:
    """One multiplier: an instruction set, its compute type, and the largest number of micro-tile rows per panel width.

    reads: weight dtypes that it converts in registers. expands: weight dtypes of which it can convert a block
    beforehand. rows: {panel columns: rows}. narrow: such a mapping for weight dtypes that are converted in registers,
    where their tiles differ. dots: weight dtypes that it multiplies along a contiguous K, unpacked.
    """

    isa: str
    compute: Compute
    reads: tuple[str, ...]
    expands: tuple[str, ...]
    rows: dict[int, int]
    narrow: dict[str, dict[int, int]] = field(default_factory=dict)
    dots: tuple[str, ...] = ()

    def tile_rows(self, weight: str, expanded: bool) -> dict[int, int]:
        return self.rows if expanded else self.narrow.get(weight, self.rows)


_WIDE = {64: 6, 48: 8, 32: 12, 16: 12}
_PAIRS = {64: 5, 48: 7, 32: 12, 16: 12}  # two vectors of B for each vector of columns
_FLOATS = ("float32", "bfloat16", "float16", "int8", "int4", "float8_e4m3fn")
SCALED = ("int8", "int4", "float8_e4m3fn")  # weights with scales beside floating activations

# Best first: the order in which the search tries them.
UNITS = (
    Unit(
        "amx", BF16, ("bfloat16", "int8", "int4"), ("int8", "int4"), {32: 32, 16: 32}, {"int8": _PAIRS, "int4": _PAIRS}
    ),
    Unit("amx", S8S8, ("int8",), (), {32: 32, 16: 32}),
    Unit("amx", U8S8, ("int8",), (), {32: 32, 16: 32}),
    Unit(
        "avx512_bf16",
        BF16,
        ("bfloat16", *SCALED),
        SCALED,
        _WIDE,
        {"int4": {64: 4, 48: 6, 32: 10, 16: 12}},
        ("bfloat16",),
    ),
    Unit("avx512_vnni", U8S8, ("int8",), (), _WIDE),
    Unit("avx512", F32, _FLOATS, _FLOATS[1:], _WIDE, {"int4": {64: 4, 48: 6, 32: 8, 16: 8}}, _FLOATS[:3]),
    Unit("avx512", I16, ("int8",), (), _WIDE),
    Unit("avx2", F32, _FLOATS, _FLOATS[1:], {16: 6}, {"int4": {16: 4}}),
    Unit("avx2", I16, ("int8",), (), {16: 6}),
    Unit("portable", F32, _FLOATS, _FLOATS[1:], {16: 4}),
    Unit("portable", I16, ("int8",), (), {16: 4}),
)


def can_multiply(unit: Unit, a: str, b: str) -> bool:
    """Whether the unit multiplies activations of dtype ``a`` by weights of dtype ``b``, directly or expanded."""
    if b not in unit.reads and b not in unit.expands:
        return False
    if unit.compute is F32:
        return a in ("float32", "bfloat16", "float16")
    if unit.compute is BF16:
        return a == "bfloat16"
    if unit.compute is S8S8:
        return a == "int8"
    if unit.compute is U8S8 and unit.isa == "amx":
        return a == "uint8"
    return a in ("int8", "uint8")
