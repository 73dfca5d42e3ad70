"""Our CUDA C++ kernels for products with few and with more rows, compiled by NVRTC.

The kernels are skinny.cu, slab.cu and mixed.cu; space.py has their search spaces; docs/notes/cuda.md describes them and
their measured gains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from ...core.candidate import Candidate, Illegal
from ...core.epilogue import GATES
from ...core.problem import Problem
from ...core.target import Target
from ..gpu.artifact import Header, encode_kernel
from ..gpu.backend import GpuBackend, not_nvidia
from ..gpu.kernel import GpuKernel
from ..gpu.rules import device_limits
from . import space
from .compiler import MISSING, compile_source, version
from .kernel import Mixed, Skinny, Slab
from .source import MIXED, SKINNY, SLAB, generate

_PDL_CAPABILITY = (9, 0)  # the first compute capability with programmatic dependent launch


class CudaBackend(GpuBackend):
    """The CUDA C++ backend: available on NVIDIA GPUs where NVRTC is installed, which PyTorch's CUDA wheels contain."""

    name = space.NAME
    shared_layouts = ("triton",)  # int4 weights
    special_steps = frozenset({"rms_norm", *GATES})
    missing = MISSING
    templates: ClassVar[Mapping[str, type[GpuKernel]]] = {SKINNY: Skinny, SLAB: Slab, MIXED: Mixed}

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def plan_candidates(self, problem: Problem, target: Target) -> Sequence[Candidate]:
        return space.plan_candidates(problem, target)

    def estimated_s(self, problem: Problem, candidate: Candidate, target: Target) -> float | None:
        return space.estimated_s(problem, candidate, target)

    def code_paths(self, problem: Problem, candidate: Candidate, target: Target) -> Callable[[int], int] | None:
        return space.code_paths(problem, candidate, target)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return self._why_not_on_target(target) or space.why_illegal(problem, candidate, target)

    def _compiler_version(self) -> str:
        return version()

    def versions(self, target: Target) -> dict[str, str]:
        return {"nvrtc": version()} if version() and not not_nvidia(target) else {}

    def _recipe(self, problem: Problem, candidate: Candidate, target: Target) -> tuple[str, Callable[[], bytes]]:
        source = generate(problem, candidate.template, dict(candidate.config))
        capability = device_limits(target).capability

        def compile_artifact() -> bytes:
            cubin = compile_source(source.text, capability, source.arch, source.registers)
            header = Header(
                candidate.template, len(cubin), source.shared, source.warps, source.arguments, 0, source.descriptors,
                waits=capability >= _PDL_CAPABILITY,
            )  # fmt: skip
            return encode_kernel(header, cubin)

        parts = (source.text, target.capability, self.source_digest(), version())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest(), compile_artifact
