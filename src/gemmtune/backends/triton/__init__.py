"""Triton: our own GPU kernels, cross-compiled to cubins without a GPU and launched through the driver.

space.py has the templates and their search space, kernels.py the kernels; docs/notes/triton.md has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...core.candidate import Candidate, Illegal
from ...core.problem import Problem
from ...core.target import Target
from ...core.weights import PackedWeight
from ..gpu.backend import GpuBackend, not_nvidia
from ..gpu.int4 import INT4_BLOCKS, unshuffle_int4
from . import space
from .compiler import compile_spec, make_spec, triton_version, why_unusable
from .kernel import TEMPLATES


class TritonBackend(GpuBackend):
    """The Triton backend: available with Triton 3.6 or newer, on NVIDIA GPUs (with TMA on Hopper) and on AMD GPUs,
    where it has never run. Triton compiles the kernels; it does not launch them."""

    name = "triton"
    preload = ("gemmtune.backends.triton.preloaded",)
    templates = TEMPLATES

    def _why_not_on_target(self, target: Target) -> str:
        return space.why_unsupported_amd(target) if target.is_amd else not_nvidia(target)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def estimated_s(self, problem: Problem, candidate: Candidate, target: Target) -> float | None:
        return space.estimated_s(problem, candidate, target)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return self._why_not_on_target(target) or space.why_illegal(problem, candidate, target)

    def _why_no_compiler(self) -> str:
        return why_unusable(triton_version())

    def versions(self, target: Target) -> dict[str, str]:
        return {"triton": triton_version()} if self.available(target) else {}

    def _recipe(self, problem: Problem, candidate: Candidate, target: Target) -> tuple[str, Callable[[], bytes]]:
        compilation = make_spec(problem, candidate)
        return compilation.key(target.capability, self.source_digest()), partial(compile_spec, compilation, target)

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        """Return a candidate for an int4 weight, which runs only packed; blocks of 128 suit every K and every M. None
        for other weights."""
        if problem.b.dtype != "int4" or not self.available(target):
            return None
        legal = (item for item in self.candidates(problem, target) if isinstance(item, Candidate))
        return next((candidate for candidate in legal if candidate["bk"] == INT4_BLOCKS[0]), None)

    def unpack(self, packed: PackedWeight) -> Any:
        return unshuffle_int4(packed)
