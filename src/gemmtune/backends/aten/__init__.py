"""ATen: every formulation that PyTorch itself offers, each verified and raced like any other candidate.

The first legal candidate of a problem is the op that PyTorch's users would call. ``composite`` computes every problem.
On GPUs it is legal where no other template of PyTorch's own is, or where it has nothing to convert.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...core.candidate import Candidate, Illegal, Scalar
from ...core.epilogue import GATES, NORMS
from ...core.errors import KernelError, PackedWeightError
from ...core.problem import Problem
from ...core.target import Target
from ...core.weights import PackedWeight
from ..base import Artifact, Availability, Backend, Kernel
from .cuda_dense import BmmWide, MmActivated, MmPadded, MmPaddedOnce, MmWide
from .cuda_narrow import (
    Int4PackCuda,
    IntMmPadded,
    IntMmPaddedOnce,
    ScaledMmPadded,
    ScaledMmRounded,
    ScaledMmWide,
    Upcast,
    UpcastConverted,
    UpcastOnce,
    UpcastRounded,
)
from .dense import (
    Bmm,
    BmmTransposed,
    Composite,
    Mkldnn,
    Mm,
    MmCopied,
    MmRounded,
    MmTransposed,
    is_dense_layout,
    unpack_dense,
)
from .kernel import AtenKernel
from .norm import NormThen
from .quantized import (
    Dequantized,
    Int4Pack,
    Int8Pack,
    Int8PackRounded,
    IntMm,
    IntMmCopied,
    IntMmTransposed,
    ScaledMm,
    unpack_quantized,
)

_BUILTIN: tuple[type[AtenKernel], ...] = (
    Mm, MmRounded, Mkldnn, MmTransposed, MmCopied, MmWide, MmActivated, MmPadded, MmPaddedOnce, Bmm, BmmTransposed,
    BmmWide, IntMm, IntMmTransposed, IntMmCopied, IntMmPadded, IntMmPaddedOnce, Upcast, UpcastRounded, UpcastConverted,
    Int8Pack, Int8PackRounded, Int4Pack, Int4PackCuda, ScaledMm, ScaledMmPadded, ScaledMmRounded, ScaledMmWide,
    UpcastOnce, Dequantized, Composite,
)  # fmt: skip
_BY_NAME: dict[str, type[AtenKernel]] = {template.template: template for template in _BUILTIN}


def register(template: type[AtenKernel]) -> None:
    """Add a formulation from outside, for the families that it names. Its module's source is part of the Target.

    Registering a name again replaces that template. Raises ValueError for the name of a built-in template.
    """
    if template.template in {builtin.template for builtin in _BUILTIN}:
        raise ValueError(f"ATen's backend has a template called {template.template!r}")
    _BY_NAME[template.template] = template
    _digest.cache_clear()


def is_fallback(template: str, problem: Problem) -> bool:
    """Whether a template of this name runs what plain PyTorch runs on the raw weight of a Problem."""
    return template in _BY_NAME and _BY_NAME[template].runs_as_pytorch(problem.without_norm())


def has_plain_product(candidate: Candidate) -> bool:
    """Whether a candidate is ATen's, and differs from what plain PyTorch runs only by work in front of the same product
    that takes as long for any M."""
    return (
        candidate.backend == "aten"
        and candidate.template in _BY_NAME
        and _BY_NAME[candidate.template].has_plain_product
    )


def _templates(problem: Problem, target: Target | None) -> Iterator[type[AtenKernel]]:
    """Yield the templates of the problem's family. Those that exist only on other kinds of devices are skipped, so that
    they are not even listed as illegal."""
    device = "cpu" if target is None else target.device
    for template in _BY_NAME.values():
        if problem.family in template.family and (not template.device_types or device in template.device_types):
            yield template


def _why_illegal(
    template: type[AtenKernel], problem: Problem, config: Mapping[str, Scalar], target: Target | None
) -> str:
    if target is not None and target.device == "cuda":
        reason = template.why_unsupported_on_cuda(problem, config, target) or template.why_illegal(problem, config)
        return reason or _why_not_worth_converting(template, problem, target)
    return template.why_illegal(problem, config) or template.why_unsupported_on_cpu(problem, config)


_CONVERTING = (Composite, Dequantized)  # these multiply converted operands in float32, without tensor cores


def _why_not_worth_converting(template: type[AtenKernel], problem: Problem, target: Target) -> str:
    """Return why a product of operands that are converted to a wide dtype is not tried on a GPU: PyTorch has a product
    of narrower ones. Empty where it has none, and for other templates.

    The converted one is never the fastest where a product of narrower operands is exact, and a weight that is converted
    once takes four times its memory. A process's first product in float32 may take a second or two, since cuBLAS loads
    its kernels (1.7 s for fp8, every-m-20261128-142834; for int8 weights it made no difference on 2026-11-30).
    """
    if template not in _CONVERTING or problem.a.dtype == template.product_dtype(problem):
        return ""
    for other in _templates(problem, target):
        if other in _CONVERTING or not other.runs_as_pytorch(problem):
            continue
        if any(not _why_illegal(other, problem, config, target) for config in other.configs(problem)):
            return f"{other.template} multiplies narrower operands"
    return ""


class AtenBackend(Backend):
    """PyTorch's own operators. Always available."""

    name = "aten"
    special_steps = frozenset({*NORMS, *GATES})

    def takes(self, family: str) -> bool:
        return any(family in template.family for template in _BY_NAME.values())

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        problem = problem.without_norm()
        for template in _templates(problem, target):
            for config in template.configs(problem):
                candidate = Candidate.make(self.name, template.template, **config)
                reason = _why_illegal(template, problem, config, target)
                yield Illegal(candidate, reason) if reason else candidate

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        return _BY_NAME[candidate.template].layout(problem.without_norm(), dict(candidate.config))

    def default_candidate(self, problem: Problem, target: Target | None = None) -> Candidate:
        """Return the candidate that is the op PyTorch's users would call for this problem on a Target (default: a CPU).
        Raises KernelError where no template is legal."""
        problem = problem.without_norm()
        for template in _templates(problem, target):
            for config in template.configs(problem):
                takes_raw_b = template.layout(problem, {"order": "row"}) is None
                if takes_raw_b and not _why_illegal(template, problem, config, target):
                    return Candidate.make(self.name, template.template, **config)
        raise KernelError(f"no ATen formulation for {problem.key}")

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        return self._loaded(problem, artifact.candidate)

    @staticmethod
    def _loaded(problem: Problem, candidate: Candidate) -> AtenKernel | NormThen:
        template = _BY_NAME.get(candidate.template)
        if template is None:
            raise KernelError(f"the ATen backend has no template {candidate.template!r}; it has {', '.join(_BY_NAME)}")
        kernel = template(problem.without_norm(), candidate)
        return kernel if problem.norm is None else NormThen(problem, kernel)

    def compiles_in_calls(self, problem: Problem, candidate: Candidate, target: Target) -> bool:
        if target.device != "cuda" or target.is_amd:
            return False
        from ..triton.compiler import triton_version, why_unusable

        if why_unusable(triton_version()):
            return False
        try:
            return bool(self._loaded(problem, candidate).jit_calls())
        except KernelError:  # loading the candidate raises it
            return False

    def compile_early(self, problem: Problem, candidate: Candidate, target: Target) -> None:
        for kernel, operands in self._loaded(problem, candidate).jit_calls():
            kernel.compile_for(target, operands)

    def source_digest(self) -> str:
        return _digest()

    def unpack(self, packed: PackedWeight) -> Any:
        if is_dense_layout(packed.layout):
            return unpack_dense(packed)
        if packed.layout.startswith(("aten:int4pack/", "aten:int4pack_cuda/", "aten:dequant/", "aten:cast/")):
            return unpack_quantized(packed)
        raise PackedWeightError(f"layout {packed.layout!r} is not one of the ATen backend's")


@functools.cache
def _digest() -> str:
    paths = sorted(Path(__file__).parent.glob("*.py"))
    added = [template for template in _BY_NAME.values() if template not in _BUILTIN]
    text = b"".join(path.read_bytes() for path in [*paths, *sorted({Path(inspect.getfile(t)) for t in added})])
    return hashlib.sha256(text).hexdigest()[:16]
