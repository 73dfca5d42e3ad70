"""CUDA C++ kernels of our own for products of few rows, compiled by NVRTC.

The kernel: skinny.cu; its search space: space.py; what it is and what it gains: docs/cuda.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from ...errors import KernelError
from ...problem import Problem
from ...target import Target
from ..base import Candidate, Illegal
from ..gpu.artifact import Header, packed
from ..gpu.backend import GpuBackend
from ..gpu.kernel import GpuKernel
from ..gpu.rules import device_of
from . import space
from .compiler import MISSING, compile_source, version
from .kernel import Skinny
from .source import generate


class CudaBackend(GpuBackend):
    """Available on NVIDIA GPUs where NVRTC is found, which PyTorch's CUDA wheels bring."""

    name = space.NAME
    missing = MISSING
    templates: ClassVar[Mapping[str, type[GpuKernel]]] = {space.TEMPLATE: Skinny}

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def _compiler_version(self) -> str:
        return version()

    def _recipe(self, problem: Problem, candidate: Candidate, target: Target) -> tuple[str, Callable[[], bytes]]:
        if candidate.template != space.TEMPLATE:
            raise KernelError(f"the CUDA backend has no template {candidate.template!r}; it has {space.TEMPLATE}")
        made = generate(problem, dict(candidate.config))

        def make() -> bytes:
            cubin = compile_source(made.text, device_of(target).capability)
            return packed(Header(candidate.template, len(cubin), 0, int(candidate["warps"]), made.arguments, 0), cubin)

        parts = (made.text, target.capability, self.source_digest(), version())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest(), make
