"""Our CUDA C++ kernels for products with few and with more rows, compiled by NVRTC.

The kernels are skinny.cu, slab.cu and mixed.cu; space.py has their search spaces; docs/notes/cuda.md describes them and
their measured gains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

from ...core.candidate import Candidate, Illegal
from ...core.epilogue import GATES, NORMS
from ...core.problem import Problem
from ...core.target import Target
from ..gpu.artifact import Header, artifacts, encode_kernel
from ..gpu.backend import GpuBackend, not_nvidia
from ..gpu.kernel import GpuKernel
from ..gpu.rules import device_limits
from . import space
from .compiler import MISSING, compile_source, version
from .kernel import Mixed, Skinny, Slab
from .source import MIXED, SKINNY, SLAB, Source, generate

_PDL_CAPABILITY = (9, 0)  # the first compute capability with programmatic dependent launch
_COMPILERS = 4  # copies of a fitted kernel that a worker compiles at a time; other workers compile, too


class CudaBackend(GpuBackend):
    """The CUDA C++ backend: available on NVIDIA GPUs where NVRTC is installed, which PyTorch's CUDA wheels contain."""

    name = space.NAME
    shared_layouts = ("triton",)  # int4 weights
    special_steps = frozenset({*NORMS, *GATES})
    templates: ClassVar[Mapping[str, type[GpuKernel]]] = {SKINNY: Skinny, SLAB: Slab, MIXED: Mixed}

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def plan_candidates(self, problem: Problem, target: Target) -> Sequence[Candidate]:
        return space.plan_candidates(problem, target)

    def estimated_s(self, problem: Problem, candidate: Candidate, target: Target) -> float | None:
        return space.estimated_s(problem, candidate, target)

    def code_paths(self, problem: Problem, candidate: Candidate, target: Target) -> Callable[[int], Hashable] | None:
        return space.code_paths(problem, candidate, target)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return self._why_not_on_target(target) or space.why_illegal(problem, candidate, target)

    def _why_no_compiler(self) -> str:
        return "" if version() else MISSING

    def versions(self, target: Target) -> dict[str, str]:
        return {"nvrtc": version()} if version() and not not_nvidia(target) else {}

    def _recipe(self, problem: Problem, candidate: Candidate, target: Target) -> tuple[str, Callable[[], bytes]]:
        device, template = device_limits(target), candidate.template
        sources = [
            generate(problem, template, config)
            for config in space.copies(problem, template, dict(candidate.config), device)
        ]

        def key_of(texts: Sequence[str]) -> str:
            parts = (*texts, target.capability, self.source_digest(), version())
            return hashlib.sha256("\0".join(parts).encode()).hexdigest()

        def compile_kernel(source: Source) -> bytes:
            cubin = compile_source(source.text, device.capability, source.arch, source.registers)
            header = Header(
                template, len(cubin), source.shared, source.warps, source.arguments, 0, source.descriptors,
                waits=device.capability >= _PDL_CAPABILITY, split=source.split,
            )  # fmt: skip
            return encode_kernel(header, cubin)

        def compile_copy(source: Source) -> bytes:
            """Return the kernel from the artifacts where another candidate has the same copy."""
            key = key_of([source.text])
            path = artifacts().get(key) or artifacts().put(key, compile_kernel(source))
            return path.read_bytes()

        def compile_artifact() -> bytes:
            if len(sources) == 1:
                return compile_kernel(sources[0])
            with ThreadPoolExecutor(_COMPILERS) as pool:  # NVRTC compiles without the GIL
                return b"".join(pool.map(compile_copy, sources))

        return key_of([source.text for source in sources]), compile_artifact
