"""CUDA C++ kernels of our own for products of few rows, compiled by NVRTC in a tenth of a second.

The kernel: skinny.cu; its search space: space.py; what it is and what it gains: docs/cuda.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

from ...errors import KernelError
from ...problem import Problem
from ...target import Target
from ..base import Candidate, Illegal
from ..gpu.artifact import Header, packed
from ..gpu.backend import GpuBackend
from ..gpu.kernel import GpuKernel
from ..gpu.rules import device_of
from . import space
from .compiler import compile_source, version
from .source import Source, generate


class CudaBackend(GpuBackend):
    """Available on NVIDIA GPUs where NVRTC is found, which PyTorch's CUDA wheels bring. Serving does not need it."""

    name = space.NAME
    compiler = "NVRTC, NVIDIA's run-time compiler, was not found: pip install nvidia-cuda-nvrtc"

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def _compiler_version(self) -> str:
        return version()

    def _key(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        parts = (_source(problem, candidate).text, target.capability, self.source_digest(), version())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def _compile(self, problem: Problem, candidate: Candidate, target: Target) -> bytes:
        made = _source(problem, candidate)
        cubin = compile_source(made.text, device_of(target).capability)
        return packed(Header(candidate.template, len(cubin), 0, int(candidate["warps"]), made.arguments, 0), cubin)

    def _templates(self) -> Mapping[str, type[GpuKernel]]:
        from .kernel import Skinny

        return {space.TEMPLATE: Skinny}


def _source(problem: Problem, candidate: Candidate) -> Source:
    if candidate.template != space.TEMPLATE:
        raise KernelError(f"the CUDA backend has no template {candidate.template!r}; it has {space.TEMPLATE}")
    return generate(problem, dict(candidate.config))
