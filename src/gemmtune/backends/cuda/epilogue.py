"""A Problem's epilogue as CUDA C++, and the vectors that it reads."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from ...core.epilogue import GATES, Step
from ...core.problem import Problem, Quant, bits
from ..gpu.rules import MAX_STEPS, float_at, step_constants

TYPES = {
    "bfloat16": "bfloat16", "float16": "float16", "float32": "float", "int32": "int", "int8": "signed char",
    "uint8": "unsigned char", "float8_e4m3fn": "unsigned char", "float8_e5m2": "unsigned char", "int4": "unsigned char",
}  # fmt: skip


_NO_VECTORS = ("full", "inner")  # axes of tensors that are not loaded as vectors


@dataclass(frozen=True, slots=True)
class Vector:
    """A vector that the epilogue reads, and where a kernel stores it in shared memory (vectors.cu).

    name: the name of its pointer. type: the type of its elements. axis: ``row``, ``col`` or ``tensor``. count: elements
    that a group of ``threads`` stores, beginning at ``offset``. integer: whether it is used before integer sums become
    floats. gated: whether the tile's columns are some of the left half of B's, then as many of the right half.
    """

    name: str
    type: str
    axis: str
    count: int
    threads: int
    offset: int
    integer: bool
    gated: bool = False

    def load_statement(self, index: int) -> str:
        first, last = {"row": ("top", "M - 1"), "col": ("n0", "N - 1")}.get(self.axis, ("0", "0"))
        if not self._in_halves:
            return f"const {self._ahead(self.count)} ahead{index}({self.name}, {first}, {last}, member);"
        return (
            f"const {self._ahead(self.count // 2)} ahead{index}({self.name}, n0, N / 2 - 1, member), "
            f"ahead{index}_right({self.name}, N / 2 + n0, N - 1, member);"
        )

    def store_statement(self, index: int) -> str:
        store = "integers" if self.integer else "numbers"
        statement = f"ahead{index}.{store}(kept + {self.offset}, member);"
        if self._in_halves:
            statement += f" ahead{index}_right.{store}(kept + {self.offset + self.count // 2}, member);"
        return statement

    @property
    def _in_halves(self) -> bool:
        return self.gated and self.axis == "col"

    def _ahead(self, count: int) -> str:
        return f"Ahead<{self.type}, {count}, {self.threads}>"

    def expression(self) -> str:
        at = {"row": " + y", "col": " + x"}.get(self.axis, "")
        return f"kept[{self.offset}{at}].{'whole' if self.integer else 'number'}"


def epilogue_vectors(problem: Problem, rows: int, columns: int, threads: int) -> dict[str, Vector]:
    """Return the vectors of a tile, or of a group's part of a tile, with so many rows and columns, by their pointers'
    names."""
    float_index = float_at(problem) if problem.family == "int_mm" else 0
    loaded = [
        (f"t{index}", str(step.dtype), step.axis, index < float_index)
        for index, step in enumerate(problem.epilogue)
        if step.takes_tensor and step.axis not in _NO_VECTORS
    ]
    if (quant := _quant_of_sums(problem)) is not None:
        loaded.insert(0, ("s_ptr", quant.scale_dtype, "col", False))
    vectors: dict[str, Vector] = {}
    offset = 0
    for name, dtype, axis, integer in loaded:
        count = _length(axis, rows, columns)
        vectors[name] = Vector(name, TYPES[dtype], axis, count, threads, offset, integer, problem.gate is not None)
        offset += count
    return vectors


def vector_words(problem: Problem, rows: int, columns: int) -> int:
    """Return the words of shared memory for the epilogue's vectors (``epilogue_vectors``), for so many rows and
    columns. Search spaces ask for it for each configuration."""
    steps = (step for step in problem.epilogue if step.takes_tensor and step.axis not in _NO_VECTORS)
    words = sum(_length(step.axis, rows, columns) for step in steps)
    return words + (columns if _quant_of_sums(problem) is not None else 0)


def _length(axis: str, rows: int, columns: int) -> int:
    """Return the elements of a vector along an axis of a tile."""
    return rows if axis == "row" else columns if axis == "col" else 1


def _quant_of_sums(problem: Problem) -> Quant | None:
    """Return the quantisation of a weight whose scales the final sums are multiplied by; None without such scales."""
    return None if scale_group(problem) else problem.b.quant


def scale_group(problem: Problem) -> int:
    """Return how many elements of K share a scale that is applied while summing; 0 where the final sum is scaled, or
    nothing is."""
    quant = problem.b.quant
    if quant is None or (quant.group is None and not quant.zero_point):
        return 0
    return problem.k if quant.group is None else quant.group


def result_is_int(problem: Problem) -> bool:
    """Whether sums are integers until they are rounded."""
    return problem.family == "int_mm" and float_at(problem) > len(problem.epilogue)


def matrix_members(problem: Problem) -> list[str]:
    """Return the members of a structure with an element of each matrix of the result's shape that the epilogue
    reads."""
    return [f"{TYPES[str(step.dtype)]} t{index};" for index, step in _matrices(problem)]


def matrix_reads(problem: Problem) -> list[str]:
    """Return the statements that load the ``elements`` of row m and column n (``matrix_members``)."""
    return [f"elements.t{index} = {_element(index)};" for index, _ in _matrices(problem)]


def matrix_prefetches(problem: Problem) -> list[str]:
    """Return the statements that have the L2 fetch what ``matrix_reads`` loads."""
    return [f"prefetch(&{_element(index)});" for index, _ in _matrices(problem)]


def matrix_sector(problem: Problem) -> int:
    """Return how many elements of the widest of these matrices are in 32 bytes, the least that the L2 fetches; 0
    without matrices, and for a gate, whose kernels do not fetch them ahead."""
    widths = [bits(str(step.dtype)) // 8 for _, step in _matrices(problem)]
    return 32 // max(widths) if widths and problem.gate is None else 0


def _matrices(problem: Problem) -> list[tuple[int, Step]]:
    """Return the steps with matrices of the result's shape, with their indices."""
    return [(index, step) for index, step in enumerate(problem.epilogue) if step.takes_tensor and step.axis == "full"]


def _element(index: int) -> str:
    return f"t{index}[(long long)m * ld{index} + n]"


def epilogue_statements(problem: Problem, vectors: dict[str, Vector], *, loaded: bool = False) -> list[str]:
    """Return the statements that compute an element's result from its ``sum``. It is then rounded once and stored, or
    is one factor of a gate. (Norms, which are in front of the product, and gates are parts of the templates.)

    loaded: whether the elements of matrices are in ``elements`` (``matrix_members``); they are loaded here otherwise.
    """
    lines, name = [], "sum"
    float_index = float_at(problem) if problem.family == "int_mm" else MAX_STEPS + 1
    if _quant_of_sums(problem) is not None:
        lines.append(f"sum *= {vectors['s_ptr'].expression()};")
    for index, step in enumerate((*problem.epilogue, None)):
        if index == float_index:
            lines.append("float value = (float)sum;")
            name = "value"
        if step is not None and step.axis != "inner" and step.kind not in GATES:
            integer = problem.family == "int_mm" and name == "sum"
            vector = vectors.get(f"t{index}")
            element = vector.expression() if vector else f"elements.t{index}" if loaded else _element(index)
            lines += _step(step, name, integer, element if vector or integer else f"number({element})")
    lines.append(f"return {name};")
    return lines


def gate_statements(problem: Problem) -> list[str]:
    """Return the statements that apply the activation of the Problem's gate to ``gate``."""
    step = problem.gate
    return [] if step is None else _step(Step(GATES[step.kind]), "gate", False, "")


def _step(step: Step, v: str, integer: bool, tensor: str) -> list[str]:
    """Return the statements of a step. v: the variable that it changes. tensor: an expression of its tensor's
    element."""
    kind, _, value, low, high = step_constants(step, integer)
    literal = _int if integer else float_literal
    if value != 1.0:
        tensor += f" * {literal(value)}"
    statements = {
        "": [],
        "relu": [f"{v} = {v} < 0 ? 0 : {v};"],  # keeps NaN
        "gelu": [f"{v} = 0.5f * {v} * (1.0f + erff({v} * {float_literal(0.5**0.5)}));"],
        # 1 + tanh(u) = 2 sigmoid(2u)
        "gelu_tanh": [f"{v} *= logistic(1.5957691216057308f * ({v} + 0.044715f * {v} * {v} * {v}));"],
        "silu": [f"{v} *= logistic({v});"],
        "number": [f"{v} *= {float_literal(value)};"],
        "scale": [f"{v} *= {tensor};"],
        "mul": [f"{v} *= {tensor};"],
        "bias": [f"{v} += {tensor};"],
        "add": [f"{v} += {tensor};"],
        "clamp": [
            *([] if low is None else [f"{v} = {v} < {literal(low)} ? {literal(low)} : {v};"]),
            *([] if high is None else [f"{v} = {v} > {literal(high)} ? {literal(high)} : {v};"]),
        ],
        "cast.bfloat16": [f"{v} = rounded<bfloat16>({v});"],
        "cast.float16": [f"{v} = rounded<float16>({v});"],
    }
    return statements[kind]


def _int(x: float) -> str:
    """Return a literal of an int32."""
    return "(-2147483647 - 1)" if x == -(2**31) else str(int(x))


def float_literal(x: float) -> str:
    """Return a literal of the float32 nearest to x."""
    nearest = ctypes.c_float(x).value
    if math.isinf(nearest):
        return f"__int_as_float({'0x7f800000' if nearest > 0 else '0xff800000'})"
    return f"{nearest.hex()}f"
