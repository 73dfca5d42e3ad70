"""A Problem: what is multiplied, as data.

``out[M, N] = epilogue(A[M, K] @ B[K, N])``, batched for bmm. Shapes are logical: a linear layer's weight of
shape [N, K] is the B operand [K, N] with column-major layout. dtypes are torch's names without ``torch.``;
4-bit weights are ``"int4"`` (two to a byte along K, low nibble first).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from .epilogue import Epilogue, Step, epilogue_key

Family = Literal["mm", "bmm", "int_mm", "mixed_mm", "scaled_mm"]
Order = Literal["row", "col", "strided"]

FAMILIES: tuple[Family, ...] = ("mm", "bmm", "int_mm", "mixed_mm", "scaled_mm")

_BITS: dict[str, int] = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int32": 32, "int64": 64,
    "int8": 8, "uint8": 8, "int4": 4, "float8_e4m3fn": 8, "float8_e5m2": 8,
}  # fmt: skip


def bits(dtype: str) -> int:
    """Width of one element in bits; KeyError for a dtype no Problem can have."""
    return _BITS[dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a matrix lies in memory. ``ld`` is the stride of the slow dimension in elements.

    ``ld = None`` means dense (it follows from the shape, so it stays true when M changes). ``strided``: neither
    stride is 1.
    """

    order: Order = "row"
    ld: int | None = None

    @property
    def key(self) -> str:
        return self.order[0] if self.ld is None else f"{self.order[0]}{self.ld}"


@dataclass(frozen=True, slots=True)
class Quant:
    """How a weight-only operand is quantised: ``W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]``, g = k // group.

    group: elements of K that share a scale; None = one group (a scale per output channel).
    scale_dtype: dtype of the scale (and zero-point) tensors, shape [N] (group None) or [ceil(K / group), N].
    zero_point: whether a zero-point tensor travels with the scale. Without one: 0 for int8 and float8 (which never
    has one), 8 for int4 (whose stored nibbles are 0..15).
    """

    group: int | None = None
    scale_dtype: str = "float32"
    zero_point: bool = False

    @property
    def key(self) -> str:
        return f"g{self.group or 'N'}.{self.scale_dtype}{'.zp' if self.zero_point else ''}"


@dataclass(frozen=True, slots=True)
class Operand:
    """One input matrix: dtype, layout, alignment in bytes (0 = only its element's), constant or not."""

    dtype: str
    layout: Layout = Layout()
    constant: bool = False
    align: int = 0
    quant: Quant | None = None

    @property
    def key(self) -> str:
        text = f"{self.dtype}:{self.layout.key}"
        if self.align:
            text += f":a{self.align}"
        if self.quant is not None:
            text += f":{self.quant.key}"
        return text + (":const" if self.constant else "")


_M_OF_KEY = re.compile(r"^([a-z_]+\|(?:b\d+\.)?m)\d+(?=\.n\d)")


def plan_key_of(problem_key: str) -> str:
    """Return the plan key of the Problem that ``problem_key`` names; a plan key is returned as it is."""
    return _M_OF_KEY.sub(r"\1*", problem_key, count=1)


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM to be solved. Frozen and hashable; ``key`` is its canonical name.

    acc is the accumulator's dtype. A narrower one than the default is a different Problem that users ask for.
    """

    family: Family
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    out_dtype: str
    epilogue: Epilogue = ()
    batch: int = 1
    out: Layout = Layout()
    acc: str = "float32"
    _key: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {self.family!r}")
        for name in ("m", "n", "k", "batch"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"{name} must be a non-negative int; got {size!r}")
        object.__setattr__(self, "_key", f"{self._head()}m{self.m}{self._tail()}")

    def _head(self) -> str:
        batch = f"b{self.batch}." if self.family == "bmm" else ""
        return f"{self.family}|{batch}"

    def _tail(self) -> str:
        tail = f".n{self.n}.k{self.k}|{self.a.key}|{self.b.key}|{self.out_dtype}:{self.out.key}|{self.acc}"
        return f"{tail}|{epilogue_key(self.epilogue)}" if self.epilogue else tail

    @property
    def key(self) -> str:
        """Canonical name: equal Problems have equal keys, different ones different keys."""
        return self._key

    @property
    def plan_key(self) -> str:
        """The key with M left free: what a Plan answers for."""
        return f"{self._head()}m*{self._tail()}"

    def with_m(self, m: int) -> Problem:
        """The same Problem for another M."""
        return replace(self, m=m)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to multiply: M, N, K or the batch is 0."""
        return min(self.m, self.n, self.k, self.batch) == 0

    @property
    def flops(self) -> int:
        """Multiply-adds counted as two operations; the epilogue is not counted."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def weight_bytes(self) -> int:
        """Bytes of B as given, scales and zero points included."""
        total = self.batch * self.k * self.n * bits(self.b.dtype) // 8
        quant = self.b.quant
        if quant is not None:
            groups = 1 if quant.group is None else -(-self.k // quant.group)
            total += groups * self.n * bits(quant.scale_dtype) // 8 * (2 if quant.zero_point else 1)
        return total

    @property
    def min_bytes(self) -> int:
        """Least traffic: each input read once, the output written once (the roofline's bytes)."""
        outer = self.batch * self.m * (self.k * bits(self.a.dtype) + self.n * bits(self.out_dtype)) // 8
        return outer + self.weight_bytes + sum(self._step_bytes(step) for step in self.epilogue)

    def _step_bytes(self, step: Step) -> int:
        if not step.takes_tensor or step.dtype is None:
            return 0
        count = {"tensor": 1, "row": self.m, "col": self.n, "full": self.batch * self.m * self.n}[step.axis]
        return count * bits(step.dtype) // 8

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready data; ``Problem.from_dict`` is its inverse (infinities travel as strings)."""
        data = asdict(self)
        del data["_key"]
        for step in data["epilogue"]:
            step["lo"], step["hi"] = repr(step["lo"]), repr(step["hi"])
        data["epilogue"] = list(data["epilogue"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """Rebuild and validate. Raises ValueError, TypeError or KeyError on anything malformed."""
        fields = dict(data)
        fields["a"], fields["b"] = _operand(fields["a"]), _operand(fields["b"])
        fields["out"] = Layout(**fields["out"])
        fields["epilogue"] = tuple(
            Step(**{**step, "lo": float(step["lo"]), "hi": float(step["hi"])}) for step in fields["epilogue"]
        )
        problem = cls(**fields)
        bits(problem.a.dtype), bits(problem.b.dtype), bits(problem.out_dtype)
        return problem


def _operand(data: Mapping[str, Any]) -> Operand:
    fields = dict(data)
    fields["layout"] = Layout(**fields["layout"])
    if fields.get("quant") is not None:
        fields["quant"] = Quant(**fields["quant"])
    return Operand(**fields)
