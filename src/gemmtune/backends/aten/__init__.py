"""ATen: every way PyTorch itself offers, each verified and raced like any other candidate.

The first legal candidate of a problem is what PyTorch's users would call; ``composite`` is legal for every problem.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import KernelError, PackedWeightError
from ...problem import Problem
from ...target import Target
from ..base import Artifact, Availability, Backend, Candidate, Illegal, Kernel, PackedWeight
from .dense import Bmm, BmmTransposed, Composite, Mkldnn, Mm, MmCopied, MmTransposed, dense_layouts, undo_dense
from .kernel import AtenKernel
from .quantized import (
    Dequantized,
    Int4Pack,
    Int8Pack,
    IntMm,
    IntMmCopied,
    IntMmTransposed,
    ScaledMm,
    undo_quant,
)

_TEMPLATES: tuple[type[AtenKernel], ...] = (
    Mm, Mkldnn, MmTransposed, MmCopied, Bmm, BmmTransposed, IntMm, IntMmTransposed, IntMmCopied, Int8Pack, Int4Pack,
    ScaledMm, Dequantized, Composite,
)  # fmt: skip
_BY_NAME = {template.template: template for template in _TEMPLATES}


class AtenBackend(Backend):
    """PyTorch's own operators. Always available."""

    name = "aten"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        for template in _TEMPLATES:
            if problem.family not in template.family:
                continue
            for config in template.configs(problem):
                candidate = Candidate.make(self.name, template.template, **config)
                reason = template.illegal(problem, config)
                yield Illegal(candidate, reason) if reason else candidate

    def plain(self, problem: Problem) -> Candidate:
        """The candidate that is what PyTorch's users would call for this problem."""
        for template in _TEMPLATES:
            usual = problem.family in template.family and template.layout(problem, {"order": "row"}) is None
            if usual and not template.illegal(problem, {}):
                return Candidate.make(self.name, template.template)
        raise KernelError(f"no ATen formulation for {problem.key}")

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        candidate = artifact.candidate
        template = _BY_NAME.get(candidate.template)
        if template is None:
            raise KernelError(f"the ATen backend has no template {candidate.template!r}; it has {', '.join(_BY_NAME)}")
        return template(problem, candidate)

    def source_digest(self) -> str:
        return _digest()

    def unpack(self, packed: PackedWeight) -> Any:
        if dense_layouts(packed.layout):
            return undo_dense(packed)
        if packed.layout.startswith(("aten:int4pack/", "aten:dequant/")):
            return undo_quant(packed)
        raise PackedWeightError(f"layout {packed.layout!r} is not one of the ATen backend's")


@functools.cache
def _digest() -> str:
    text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]
