"""CUDA C++ kernels of our own for products of few and of some rows, compiled by NVRTC.

The kernels: skinny.cu, slab.cu, mixed.cu; their search spaces: space.py; what they are and gain: docs/cuda.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from ...core.candidate import Candidate, Illegal
from ...core.problem import Problem
from ...core.target import Target
from ..gpu.artifact import Header, encode_kernel
from ..gpu.backend import GpuBackend, not_nvidia
from ..gpu.kernel import GpuKernel
from ..gpu.rules import device_of
from . import space
from .compiler import MISSING, compile_source, version
from .kernel import Mixed, Skinny, Slab
from .source import MIXED, SKINNY, SLAB, generate

_WAITING = (9, 0)  # the first compute capability whose kernels can wait for those before them


class CudaBackend(GpuBackend):
    """Available on NVIDIA GPUs where NVRTC is found, which PyTorch's CUDA wheels bring."""

    name = space.NAME
    missing = MISSING
    templates: ClassVar[Mapping[str, type[GpuKernel]]] = {SKINNY: Skinny, SLAB: Slab, MIXED: Mixed}

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return self._why_not_on_target(target) or space.why_illegal(problem, candidate, target)

    def _compiler_version(self) -> str:
        return version()

    def versions(self, target: Target) -> dict[str, str]:
        return {"nvrtc": version()} if version() and not not_nvidia(target) else {}

    def _recipe(self, problem: Problem, candidate: Candidate, target: Target) -> tuple[str, Callable[[], bytes]]:
        made = generate(problem, candidate.template, dict(candidate.config))
        capability = device_of(target).capability

        def make() -> bytes:
            cubin = compile_source(made.text, capability, made.arch, made.registers)
            header = Header(
                candidate.template, len(cubin), made.shared, made.warps, made.arguments, 0, made.descriptors,
                waits=capability >= _WAITING,
            )  # fmt: skip
            return encode_kernel(header, cubin)

        parts = (made.text, target.capability, self.source_digest(), version())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest(), make
