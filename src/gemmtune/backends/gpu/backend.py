"""The common base of the backends whose kernels are cubins, whatever language the kernels are written in."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from ...core.candidate import Candidate
from ...core.errors import KernelError
from ...core.problem import Problem
from ...core.target import Target
from ..base import Artifact, Availability, Backend, Kernel
from .artifact import artifacts, decode_kernels, digest_of
from .kernel import GpuKernel
from .rules import device_limits, why_no_gpu_kernel

_MIN_CAPABILITY = (8, 0)


def not_nvidia(target: Target) -> str:
    """Return why kernels for NVIDIA's GPUs do not run on a Target, or empty."""
    if target.device != "cuda":
        return f"runs on GPUs; this target is a {target.device}"
    if dict(target.versions).get("hip", "None") != "None":
        return "speaks to NVIDIA's libraries; on ROCm there is the Triton backend"
    if device_limits(target).capability < _MIN_CAPABILITY:
        return f"needs compute capability 8.0; {target.name} has {target.capability}"
    return ""


class GpuBackend(Backend):
    """A backend whose kernels are compiled to cubins for NVIDIA GPUs from compute capability 8.0.

    Compiling needs no GPU. A cubin is stored beside the store under the hash of everything that it is compiled from
    (the compiler's version, too), and is launched through the driver: serving a built kernel compiles nothing.

    templates: the class that launches each template's kernels.
    """

    templates: ClassVar[Mapping[str, type[GpuKernel]]]

    @abstractmethod
    def _why_no_compiler(self) -> str:
        """Return why there is no compiler that can build the kernels and what the user can do, or empty."""

    @abstractmethod
    def _recipe(self, problem: Problem, candidate: Candidate, target: Target) -> tuple[str, Callable[[], bytes]]:
        """Return the hex digest of everything that goes into an artifact, and a function that builds the artifact.

        The function raises UnsupportedError without a compiler and KernelError when compiling fails. ``_recipe`` itself
        raises KernelError for a template that this backend does not have.
        """

    def _why_not_on_target(self, target: Target) -> str:
        """Return why the backend's kernels do not run on a Target, or empty."""
        return not_nvidia(target)

    def available(self, target: Target) -> Availability:
        reason = self._why_not_on_target(target) or self._why_no_compiler()
        return Availability(not reason, reason)

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        return self._why_not_on_target(target) or super().why_illegal(problem, candidate, target)

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        return self.templates[candidate.template].layout_of(problem, candidate)

    def artifact(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact | None:
        key, _ = self._recipe(problem, candidate, target)
        path = artifacts().get(key)
        return None if path is None else Artifact(candidate, key, path)

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        key, make = self._recipe(problem, candidate, target)
        path = artifacts().get(key) or artifacts().put(key, make())
        return Artifact(candidate, key, path)

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        candidate = artifact.candidate
        template = self.templates.get(candidate.template)
        reason = why_no_gpu_kernel(problem)
        if template is None or reason:
            raise KernelError(f"{candidate.id} cannot run {problem.key}: {reason or 'there is no such template'}")
        if artifact.path is None:
            raise KernelError(f"{candidate.id} has not been built")
        try:
            body = artifact.path.read_bytes()
        except OSError as error:
            raise KernelError(f"{candidate.id}: its artifact cannot be read ({error})") from error
        return template(problem, candidate, decode_kernels(body))

    def source_digest(self) -> str:
        return digest_of(Path(inspect.getfile(type(self))).parent)
