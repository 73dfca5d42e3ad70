"""cuBLASLt's own algorithms: those that it ranks for a product, of which PyTorch's operators run the first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...core.candidate import Candidate, Illegal
from ...core.errors import KernelError, UnsupportedError
from ...core.problem import Problem
from ...core.target import Target
from ..base import Artifact, Availability, Backend, Kernel
from ..gpu.artifact import digest_of
from ..gpu.backend import not_nvidia
from ..gpu.rules import device_of
from .product import RANKS, refuses

RANKED = "ranked"
_FP8, _VECTORS = (8, 9), (9, 0)


class CublasLtBackend(Backend):
    """Available on NVIDIA GPUs beside PyTorch's CUDA wheels, which bring cuBLASLt.

    A candidate is a place in cuBLASLt's ranking of its algorithms for the Problem, so that nothing is asked of a GPU to
    name it; loading it asks. What stands there may change with the library's version.
    """

    name = "cublaslt"

    def available(self, target: Target) -> Availability:
        reason = not_nvidia(target) or _missing()
        return Availability(not reason, reason)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        reason = refuses(problem) or _hardware(problem, target)
        if reason:
            yield Illegal(Candidate.make(self.name, "*"), reason)
            return
        for rank in range(RANKS):
            yield Candidate.make(self.name, RANKED, rank=rank)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return not_nvidia(target) or super().why_illegal(problem, candidate, target)

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        return None

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        from .kernel import RankedKernel

        candidate, reason = artifact.candidate, refuses(problem)
        if candidate.template != RANKED or reason:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason or 'there is no such template'}")
        return RankedKernel(problem, candidate)

    def versions(self, target: Target) -> dict[str, str]:
        """cuBLASLt's own: what stands at a rank changes with it. cuBLAS, which ATen calls, is of the same package."""
        if not_nvidia(target) or _missing():
            return {}
        from . import library

        return {"cublaslt": library.version()}

    def source_digest(self) -> str:
        return digest_of(Path(__file__).parent)


def _missing() -> str:
    """Why the library cannot be had, or empty."""
    from . import library

    try:
        library.library()
    except UnsupportedError as error:
        return str(error)
    return ""


def _hardware(problem: Problem, target: Target) -> str:
    """Why a GPU of this compute capability has no such product, or empty."""
    have = device_of(target).capability
    if problem.family != "scaled_mm":
        return ""
    if have < _FP8:
        return f"multiplying fp8 needs compute capability 8.9; got {target.capability}"
    if problem.epilogue[0].axis == "row" and have < _VECTORS:
        return f"scales a row and a column need compute capability 9.0; got {target.capability}"
    return ""
