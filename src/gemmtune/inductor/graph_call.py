"""GraphCall: a product in a compiled graph, as plain data that the generated code contains."""

from __future__ import annotations

import json
from typing import Any, Literal, NamedTuple

import torch

from ..backends.aten.steps import dtype_of
from ..core.problem import Problem

Form = Literal["linear", "matrix", "weight_only", "int4pack"]


class GraphCall(NamedTuple):
    """A product ``epilogue(a @ b)`` in a graph, without its tensors.

    problem: with the M of the compilation; M may be another in each call. form: what the operands behind ``a`` are.
      - ``linear``: weights [N, K], one for each part, which are multiplied as one matrix.
      - ``matrix``: b [K, N] ([batch, K, N] for a batched product), with the strides that the Problem names.
      - ``weight_only``: integer weights [N, K], one for each part, then their scales [N] ([N, groups] where groups of K
        have one each), then, if the Problem's weight has zero points, those of each part, in the scales' shape.
      - ``int4pack``: int4 weights in the layout of ``_weight_int4pack_mm``, one for each part, then their scales and
        zeros [groups, N, 2].
    parts: the N of each weight. aux_in_parts: the position of the epilogue's tensor [N] that comes in parts, too (a
    bias, the scales of a weight's columns); None: none does. Its parts follow the weights, and the epilogue's other
    tensors follow them, each in the shape of its step's axis.
    """

    problem: Problem
    form: Form = "linear"
    parts: tuple[int, ...] = ()
    aux_in_parts: int | None = None

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return dtype_of(self.problem.out_dtype)

    @property
    def weight_count(self) -> int:
        """The number of operands behind ``a`` that make up b."""
        quant = self.problem.b.quant
        if not self.parts:
            return 1
        if self.form == "int4pack":
            return 2 * len(self.parts)
        return len(self.parts) * (1 if self.form == "linear" or quant is None else 2 + quant.zero_point)

    @property
    def part_count(self) -> int:
        """The number of operands that make up the epilogue's tensor that comes in parts; 0 if none does."""
        return 0 if self.aux_in_parts is None else len(self.parts)

    @property
    def simpler(self) -> GraphCall | None:
        """The call without the norm in front of the product, or else without the gate behind it; None with neither."""
        problem, position = self.problem, self.aux_in_parts
        if problem.norm is not None:
            if position is not None:
                position -= len(problem.norm_steps)  # whose tensors are the first of the epilogue
            return self._replace(problem=problem.without_norm(), aux_in_parts=position)
        return None if problem.gate is None else self._replace(problem=problem.without_gate())

    def to_json(self) -> str:
        """Return the text of which ``from_json`` makes an equal GraphCall."""
        return json.dumps({**self._asdict(), "problem": self.problem.to_dict()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GraphCall:
        """Return the GraphCall of ``to_json``'s text. Raises ValueError, KeyError or TypeError for any other text."""
        data: dict[str, Any] = json.loads(text)
        return cls(Problem.from_dict(data["problem"]), data["form"], tuple(data["parts"]), data["aux_in_parts"])
