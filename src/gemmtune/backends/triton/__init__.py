"""Triton: our own GPU kernels, cross-compiled to cubins without a GPU and launched through the driver.

Templates and their search space: space.py; the kernels: kernels.py; what was measured: docs/triton.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import KernelError
from ...problem import Problem
from ...target import Target
from ..base import Artifact, Availability, Backend, Candidate, Illegal, Kernel, PackedWeight
from ..gpu.artifact import artifacts, digest_of, unpack
from ..gpu.int4 import INT4_BLOCKS
from ..gpu.rules import device_of, refusal
from . import space
from .compiler import compile_spec, spec, triton_version

_LEAST = (8, 0)


class TritonBackend(Backend):
    """Available on NVIDIA GPUs with Triton installed; on Hopper with TMA. Compiling needs Triton, serving does not."""

    name = "triton"
    preload = ("triton", "triton.compiler", "triton.backends.nvidia.compiler")

    def available(self, target: Target) -> Availability:
        if target.device != "cuda":
            return Availability(False, f"runs on GPUs; this target is a {target.device}")
        if dict(target.versions).get("hip", "None") != "None":
            return Availability(False, "its launcher speaks to NVIDIA's driver; ROCm is not supported yet")
        if device_of(target).capability < _LEAST:
            return Availability(False, f"needs compute capability 8.0; {target.name} has {target.capability}")
        if not triton_version():
            return Availability(False, "Triton is not installed: pip install 'gemmtune[cuda]'")
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        return space.candidates(problem, target)

    def artifact(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact | None:
        key = spec(problem, candidate).key(target.capability, self.source_digest())
        path = artifacts().get(key)
        return None if path is None else Artifact(candidate, key, path)

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        wanted = spec(problem, candidate)
        key = wanted.key(target.capability, self.source_digest())
        path = artifacts().get(key)
        if path is None:
            path = artifacts().put(key, compile_spec(wanted, target))
        return Artifact(candidate, key, path)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        from .kernel import TEMPLATES

        candidate = artifact.candidate
        template = TEMPLATES.get(candidate.template)
        reason = refusal(problem)
        if template is None or reason:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason or 'there is no such template'}")
        if artifact.path is None:
            raise KernelError(f"{candidate.id} has not been built")
        try:
            body = artifact.path.read_bytes()
        except OSError as error:
            raise KernelError(f"{candidate.id}: its artifact cannot be read ({error})") from error
        return template(problem, candidate, unpack(body))

    def source_digest(self) -> str:
        return digest_of(Path(__file__).parent)

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        """int4 weights run packed only; blocks of 128 suit every K and every M."""
        if problem.b.dtype != "int4" or not self.available(target):
            return None
        legal = (item for item in self.candidates(problem, target) if isinstance(item, Candidate))
        return next((candidate for candidate in legal if candidate["bk"] == INT4_BLOCKS[0]), None)

    def unpack(self, packed: PackedWeight) -> Any:
        from ..gpu.int4 import unshuffle_int4

        return unshuffle_int4(packed)
