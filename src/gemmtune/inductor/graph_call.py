"""GraphCall: a product in a compiled graph, as plain data that the generated code contains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..backends.aten.steps import dtype_of
from ..core.problem import Problem
from ..core.weights import QuantWeight

Form = Literal["linear", "matrix", "weight_only"]


class GraphCall(NamedTuple):
    """A product ``epilogue(a @ b)`` in a graph, without its tensors.

    problem: with the M of the compilation; M may be another in each call. form: what the operands behind ``a`` are.
      - ``linear``: weights [N, K], one for each part, which are multiplied as one matrix.
      - ``matrix``: b [K, N] ([batch, K, N] for a batched product), with the strides that the Problem names.
      - ``weight_only``: integer weights [N, K], one for each part, then their scales [N].
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
        return len(self.parts) * (2 if self.form == "weight_only" else 1) if self.parts else 1

    @property
    def part_count(self) -> int:
        """The number of operands that make up the epilogue's tensor that comes in parts; 0 if none does."""
        return 0 if self.aux_in_parts is None else len(self.parts)

    def matrix(self, weights: Sequence[Tensor]) -> Tensor | QuantWeight:
        """Return b of the weights' operands, one weight each (``weights`` and scales are merged already)."""
        if self.form == "matrix":
            return weights[0]
        if self.form == "linear":
            return weights[0].t()
        quant = self.problem.b.quant
        assert quant is not None
        data, scale = weights
        return QuantWeight(data.t(), scale.reshape(-1), None, self.problem.k, quant, self.problem.b.dtype)

    def to_json(self) -> str:
        """Return the text of which ``from_json`` makes an equal GraphCall."""
        return json.dumps({**self._asdict(), "problem": self.problem.to_dict()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> GraphCall:
        """Return the GraphCall of ``to_json``'s text. Raises ValueError, KeyError or TypeError for any other text."""
        data: dict[str, Any] = json.loads(text)
        return cls(Problem.from_dict(data["problem"]), data["form"], tuple(data["parts"]), data["aux_in_parts"])
