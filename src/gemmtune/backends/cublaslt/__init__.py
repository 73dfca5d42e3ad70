"""cuBLASLt's own algorithms: those that it ranks for a product. PyTorch's operators run the first of them."""

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
from ..gpu.rules import device_limits
from .product import RANKS, why_unsupported

RANKED = "ranked"
_FP8, _VECTORS = (8, 9), (9, 0)


class CublasLtBackend(Backend):
    """The cuBLASLt backend: available on NVIDIA GPUs with PyTorch's CUDA wheels, which contain cuBLASLt.

    A candidate is a rank in cuBLASLt's list of algorithms for ``m`` rows (and ``batch`` matrices), so that naming a
    candidate needs no GPU; loading it queries the list. The algorithm at a rank may change with the library's version.
    """

    name = "cublaslt"
    lists_by_m = True

    def available(self, target: Target) -> Availability:
        reason = not_nvidia(target) or _why_missing()
        return Availability(not reason, reason)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        reason = why_unsupported(problem) or _why_hardware_unsupported(problem, target)
        if reason:
            yield Illegal(Candidate.make(self.name, "*"), reason)
            return
        sizes = {dim: problem.size(dim) for dim in problem.dims}
        for rank in range(RANKS):
            yield Candidate.make(self.name, RANKED, **sizes, rank=rank)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return not_nvidia(target) or super().why_illegal(problem, candidate, target)

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        return None

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        from .kernel import RankedKernel

        candidate, reason = artifact.candidate, why_unsupported(problem)
        if candidate.template != RANKED or reason:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason or 'there is no such template'}")
        return RankedKernel(problem, candidate)

    def versions(self, target: Target) -> dict[str, str]:
        """Return cuBLASLt's own version, since the algorithm at a rank changes with it. cuBLAS, which ATen calls, is
        part of the same package."""
        if not_nvidia(target) or _why_missing():
            return {}
        from . import library

        return {"cublaslt": library.version()}

    def source_digest(self) -> str:
        return digest_of(Path(__file__).parent)


def _why_missing() -> str:
    """Return why the library cannot be loaded, or empty."""
    from . import library

    try:
        library.library()
    except UnsupportedError as error:
        return str(error)
    return ""


def _why_hardware_unsupported(problem: Problem, target: Target) -> str:
    """Return why a GPU of the target's compute capability does not support the problem's product, or empty."""
    capability = device_limits(target).capability
    if problem.family != "scaled_mm":
        return ""
    if capability < _FP8:
        return f"multiplying fp8 needs compute capability 8.9; got {target.capability}"
    if problem.epilogue[0].axis == "row" and capability < _VECTORS:
        return f"scales a row and a column need compute capability 9.0; got {target.capability}"
    return ""
