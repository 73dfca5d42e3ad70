"""The Problem: a description of one GEMM (shapes, dtypes, layouts, epilogue) as plain data.

``out[M, N] = epilogue(A[M, K] @ B[K, N])``, batched for bmm. Shapes are logical: a linear layer's weight of
shape [N, K] is the B operand [K, N] with column-major layout. dtypes are torch's names without ``torch.``;
4-bit weights are ``"int4"`` (two to a byte along K, low nibble first).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from . import plugins
from .epilogue import GATES, NORMS, Epilogue, Step, epilogue_key, gate_of, norm_of, norm_steps_of

Order = Literal["row", "col", "strided"]
Dim = Literal["m", "batch"]
"""A dimension that may differ between calls with one weight: the rows of A, or the matrices of a batch."""


class Family(NamedTuple):
    """A kind of product, which Problems name. batched: whether A, B and the output begin with a batch dimension."""

    name: str
    batched: bool = False


_FAMILIES = {
    family.name: family
    for family in (
        Family("mm"), Family("bmm", batched=True), Family("int_mm"), Family("mixed_mm"), Family("scaled_mm"),
    )
}  # fmt: skip
_NORMED = ("mm", "mixed_mm")  # families whose A may be normalised
FAMILIES = tuple(_FAMILIES)  # gemmtune's own; backends take these unless they say otherwise


def register_family(family: Family, module: str) -> None:
    """Add a family from outside. module: the module that registers it when it is imported; workers import it too.

    A Problem of an added family is computed by a backend only if that backend declares it. Registering a name again
    replaces the family. Raises ValueError for a name that is built in, or that is not lower-case letters and ``_``.
    """
    if family.name in FAMILIES or not re.fullmatch("[a-z_]+", family.name):
        raise ValueError(f"a family needs a name of its own of lower-case letters and _; got {family.name!r}")
    _FAMILIES[family.name] = family
    plugins.add(module)


_BITS: dict[str, int] = {
    "float64": 64, "float32": 32, "bfloat16": 16, "float16": 16, "int32": 32, "int64": 64,
    "int8": 8, "uint8": 8, "int4": 4, "float8_e4m3fn": 8, "float8_e5m2": 8,
}  # fmt: skip


def bits(dtype: str) -> int:
    """Return the width of one element in bits. Raises KeyError for a dtype that no Problem can have."""
    return _BITS[dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """The memory layout of a matrix.

    order: ``row`` or ``col`` names the dimension whose elements follow one another; with ``strided``, neither stride
    is 1. ld: the stride of the slow dimension in elements (the leading dimension). None means dense: the stride follows
    from the shape, so that the layout stays valid when M changes.
    """

    order: Order = "row"
    ld: int | None = None

    @property
    def key(self) -> str:
        return self.order[0] if self.ld is None else f"{self.order[0]}{self.ld}"


@dataclass(frozen=True, slots=True)
class Quant:
    """The quantization of a weight-only operand: ``W[k, n] = (q[k, n] - zero[g, n]) * scale[g, n]``, g = k // group.

    group: number of elements along K that share a scale; None: one group (a scale per output channel).
    scale_dtype: dtype of the scale (and zero-point) tensors, whose shape is [N] (group None) or [ceil(K / group), N].
    zero_point: whether a zero-point tensor accompanies the scale. Without it the zero point is 0 for int8 and float8
    (float8 never has one), and 8 for int4 (whose stored nibbles are 0..15).
    """

    group: int | None = None
    scale_dtype: str = "float32"
    zero_point: bool = False

    @property
    def key(self) -> str:
        return f"g{self.group or 'N'}.{self.scale_dtype}{'.zp' if self.zero_point else ''}"


@dataclass(frozen=True, slots=True)
class Operand:
    """One input matrix of a Problem.

    constant: whether the values never change between calls, so that the operand may be packed. align: guaranteed
    alignment of the first element in bytes; 0: only that of one element. quant: the quantization of a weight-only
    operand; None for other operands.
    """

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
_BATCH_OF_KEY = re.compile(r"^([a-z_]+\|b)\d+(?=\.m\d)")


def plan_keys_of(problem_key: str) -> tuple[str, ...]:
    """Return the plan keys of the Problem that ``problem_key`` names: over M, and over the batch if it has one. Those
    of a plan key: itself."""
    keys = [pattern.sub(r"\1*", problem_key, count=1) for pattern in (_M_OF_KEY, _BATCH_OF_KEY)]
    return tuple(key for key in dict.fromkeys(keys) if key != problem_key) or (problem_key,)


@dataclass(frozen=True, slots=True)
class Problem:
    """One GEMM to be solved. Frozen and hashable; ``key`` is its canonical name.

    out: the output's layout. acc: the accumulator's dtype. A Problem with a narrower accumulator than the default is a
    different Problem, which users request explicitly.
    """

    family: str
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
        if self.family not in _FAMILIES:
            raise ValueError(f"family must be one of {', '.join(_FAMILIES)}; got {self.family!r}")
        for name in ("m", "n", "k", "batch"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise ValueError(f"{name} must be a non-negative int; got {size!r}")
        for step in self.epilogue:
            if step.kind in NORMS or step.kind == "norm_bias":
                self._check_norm()
            elif step.kind in GATES:
                self._check_gate()
        object.__setattr__(self, "_key", f"{self._head()}m{self.m}{self._tail()}")

    def _check_norm(self) -> None:
        norm, steps = norm_of(self.epilogue), norm_steps_of(self.epilogue)
        if norm is None or any(step.kind in NORMS or step.kind == "norm_bias" for step in self.epilogue[len(steps) :]):
            raise ValueError(
                f"a norm ({' or '.join(NORMS)}) must be the first step of an epilogue, and the only norm; norm_bias "
                "may only follow it"
            )
        if len(steps) > 1 and norm.kind != "layer_norm":
            raise ValueError(f"norm_bias belongs to a layer_norm; got one behind {norm.kind}")
        is_inner = all(step.axis == "inner" and step.dtype is not None for step in steps)
        if not is_inner or self.family not in _NORMED or bits(self.a.dtype) < 16:
            raise ValueError(
                f"{norm.kind} takes a weight (and norm_bias a bias) of axis 'inner' and floating activations of "
                f"{' or '.join(_NORMED)}; got axes {', '.join(repr(step.axis) for step in steps)}, dtypes "
                f"{', '.join(str(step.dtype) for step in steps)}, and {self.a.dtype} activations of {self.family}"
            )
        if not 0.0 <= norm.value < float("inf"):
            raise ValueError(f"{norm.kind} needs a finite eps of 0 or more; got {norm.value!r}")
        if len(steps) > 1 and steps[1].value != 1.0:
            raise ValueError(f"norm_bias has no factor; got {steps[1].value!r}")

    def _check_gate(self) -> None:
        if gate_of(self.epilogue) is None or sum(step.kind in GATES for step in self.epilogue) > 1:
            raise ValueError(f"{', '.join(GATES)}: one of them must be the last step of an epilogue")
        if self.is_batched or self.n % 2:
            raise ValueError(
                f"{self.epilogue[-1].kind} takes products that are not batched, with an even number of columns; got "
                f"{self.family} with N = {self.n}"
            )

    def _head(self) -> str:
        batch = f"b{self.batch}." if self.is_batched else ""
        return f"{self.family}|{batch}"

    def _tail(self) -> str:
        tail = f".n{self.n}.k{self.k}|{self.a.key}|{self.b.key}|{self.out_dtype}:{self.out.key}|{self.acc}"
        return f"{tail}|{epilogue_key(self.epilogue)}" if self.epilogue else tail

    @property
    def key(self) -> str:
        """The canonical name. Two Problems have equal keys exactly when they are equal."""
        return self._key

    @property
    def plan_key(self) -> str:
        """The key with ``*`` in place of M: the key of a Plan, which serves every M."""
        return self.plan_key_over("m")

    def plan_key_over(self, dim: Dim) -> str:
        """Return the key with ``*`` in place of a dimension: the key of a Plan, which serves every size of it.

        Raises ValueError for the batch of a Problem without one.
        """
        if dim == "m":
            return f"{self._head()}m*{self._tail()}"
        if not self.is_batched:
            raise ValueError(f"{self.family} has no batch, so that no plan can be one over the batch: {self.key}")
        return f"{self.family}|b*.m{self.m}{self._tail()}"

    @property
    def dims(self) -> tuple[Dim, ...]:
        """The dimensions that a Plan may serve every size of."""
        return ("m", "batch") if self.is_batched else ("m",)

    def size(self, dim: Dim) -> int:
        """Return M, or the batch."""
        return self.m if dim == "m" else self.batch

    def with_size(self, dim: Dim, size: int) -> Problem:
        """Return a copy of this Problem with another M, or another batch."""
        return replace(self, m=size) if dim == "m" else replace(self, batch=size)

    def with_m(self, m: int) -> Problem:
        """Return a copy of this Problem with another M."""
        return replace(self, m=m)

    @property
    def is_mm_alone(self) -> bool:
        """Whether ``torch.mm`` computes it, with nothing before or after."""
        return self.family == "mm" and self.out_dtype == self.a.dtype and not self.epilogue

    @property
    def norm(self) -> Step | None:
        """The step that normalises A's rows before the product; None where there is none."""
        return norm_of(self.epilogue)

    @property
    def norm_steps(self) -> Epilogue:
        """The steps that normalise A's rows, each with a tensor [K]: the norm and, of a layer norm, its bias."""
        return norm_steps_of(self.epilogue)

    def without_norm(self) -> Problem:
        """Return the Problem of the normalised A; this Problem where no step normalises it."""
        return self if self.norm is None else replace(self, epilogue=self.epilogue[len(self.norm_steps) :])

    def without_gate(self) -> Problem:
        """Return the Problem of both halves of the columns; this Problem where no step multiplies them."""
        return self if self.gate is None else replace(self, epilogue=self.epilogue[:-1])

    @property
    def is_batched(self) -> bool:
        """Whether A, B and the output begin with a batch dimension."""
        return _FAMILIES[self.family].batched

    @property
    def gate(self) -> Step | None:
        """The last step that multiplies one half of the columns by the other; None where there is none."""
        return gate_of(self.epilogue)

    @property
    def columns(self) -> int:
        """The columns of the output: N, or N / 2 where half of them are a gate."""
        return self.n if self.gate is None else self.n // 2

    @property
    def out_shape(self) -> tuple[int, ...]:
        """The shape of the output: [M, columns], or [batch, M, columns]."""
        return (self.batch, self.m, self.columns) if self.is_batched else (self.m, self.columns)

    @property
    def is_empty(self) -> bool:
        """Whether M, N, K or the batch is 0, so that there is nothing to multiply."""
        return min(self.m, self.n, self.k, self.batch) == 0

    @property
    def flops(self) -> int:
        """The number of operations. A multiply-add counts as two; the epilogue is not counted."""
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def weight_bytes(self) -> int:
        """The size in bytes of B before packing, including scales and zero points."""
        total = self.batch * self.k * self.n * bits(self.b.dtype) // 8
        quant = self.b.quant
        if quant is not None:
            groups = 1 if quant.group is None else -(-self.k // quant.group)
            total += groups * self.n * bits(quant.scale_dtype) // 8 * (2 if quant.zero_point else 1)
        return total

    @property
    def min_bytes(self) -> int:
        """The least memory traffic in bytes (the roofline's): each input is read once, the output is written once."""
        outer = self.batch * self.m * (self.k * bits(self.a.dtype) + self.columns * bits(self.out_dtype)) // 8
        return outer + self.weight_bytes + sum(self._step_bytes(step) for step in self.epilogue)

    def _step_bytes(self, step: Step) -> int:
        if not step.takes_tensor or step.dtype is None:
            return 0
        full = self.batch * self.m * self.n
        count = {"tensor": 1, "row": self.m, "col": self.n, "full": full, "inner": self.k}[step.axis]
        return count * bits(step.dtype) // 8

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that can be stored as JSON; infinities become strings. Inverse of ``from_dict``."""
        data = asdict(self)
        del data["_key"]
        for step in data["epilogue"]:
            step["lo"], step["hi"] = repr(step["lo"]), repr(step["hi"])
        data["epilogue"] = list(data["epilogue"])
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Problem:
        """Build a Problem from the data of ``to_dict``, which may lack fields that have a default.

        Raises ValueError, TypeError or KeyError for malformed data.
        """
        fields = dict(data)
        fields["a"], fields["b"] = _operand(fields["a"]), _operand(fields["b"])
        fields["out"] = Layout(**fields.get("out", {}))
        fields["epilogue"] = tuple(
            Step(**{**step, **{name: float(step[name]) for name in ("lo", "hi") if name in step}})
            for step in fields.get("epilogue", ())
        )
        problem = cls(**fields)
        bits(problem.a.dtype), bits(problem.b.dtype), bits(problem.out_dtype)
        return problem


def _operand(data: Mapping[str, Any]) -> Operand:
    fields = dict(data)
    fields["layout"] = Layout(**fields.get("layout", {}))
    if fields.get("quant") is not None:
        fields["quant"] = Quant(**fields["quant"])
    return Operand(**fields)
