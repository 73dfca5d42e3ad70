"""Triton: our own GPU kernels, cross-compiled to cubins without a GPU and launched through the driver.

Templates and their search space: space.py; the kernels: kernels.py; what was measured: docs/triton.md.
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
from .compiler import compile_spec, spec, triton_version
from .kernel import TEMPLATES


class TritonBackend(GpuBackend):
    """Available with Triton installed, on NVIDIA GPUs (on Hopper with TMA) and on AMD's, where it was never run. Triton
    compiles and does not launch."""

    name = "triton"
    preload = ("gemmtune.backends.triton.preloaded",)
    missing = "Triton is not installed: pip install 'gemmtune[cuda]'"
    templates = TEMPLATES

    def _why_not_on_target(self, target: Target) -> str:
        return space.unknown_amd(target) if target.is_amd else not_nvidia(target)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return self._why_not_on_target(target) or space.why_illegal(problem, candidate, target)

    def _compiler_version(self) -> str:
        return triton_version()

    def versions(self, target: Target) -> dict[str, str]:
        return {"triton": triton_version()} if triton_version() and not self._why_not_on_target(target) else {}

    def _recipe(self, problem: Problem, candidate: Candidate, target: Target) -> tuple[str, Callable[[], bytes]]:
        wanted = spec(problem, candidate)
        return wanted.key(target.capability, self.source_digest()), partial(compile_spec, wanted, target)

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        """int4 weights run packed only; blocks of 128 suit every K and every M."""
        if problem.b.dtype != "int4" or not self.available(target):
            return None
        legal = (item for item in self.candidates(problem, target) if isinstance(item, Candidate))
        return next((candidate for candidate in legal if candidate["bk"] == INT4_BLOCKS[0]), None)

    def unpack(self, packed: PackedWeight) -> Any:
        return unshuffle_int4(packed)
