"""The contract of a backend: four required methods, and the data classes that pass through them.

To add a backend, write its own package, add one line to ``backends/__init__.py`` and one conformance subclass
(docs/how-to/a-backend.md). No other file changes.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..core.candidate import Candidate, Illegal
from ..core.problem import FAMILIES

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.problem import Problem
    from ..core.target import Target
    from ..core.weights import PackedWeight

NOT_LISTED = "the backend lists no such candidate for this problem"

OVERLAP = "GEMMTUNE_OVERLAP"  # "0": every kernel begins after the preceding kernel has ended (docs/notes/cuda.md)


class Availability(NamedTuple):
    """Whether a backend can be used on a Target. ``reason`` says why it cannot, in words that a user can act on; it is
    empty when the backend can be used."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


class Artifact(NamedTuple):
    """The result of a build. ``path`` is what the build wrote to disk, or None when a build writes nothing (ATen,
    prebuilt native kernels)."""

    candidate: Candidate
    digest: str
    path: Path | None = None


Launch = Callable[..., None]  # what Kernel.bind returns


class CaptureFacts(threading.local):
    """What the launches of this thread may assume while they are captured into a CUDA graph.

    inductor_signals: whether Inductor's Triton kernels signal when the next kernel may begin (``triton.enable_pdl``),
    do so after all work in front of them has ended, and write to no weight.
    """

    inductor_signals = False


CAPTURE_FACTS = CaptureFacts()


class Rounding(NamedTuple):
    """A rounding to ``dtype`` of what the first ``steps`` steps of an epilogue return; with 0 steps, of the product
    (a weight-only one before or after it is scaled)."""

    steps: int
    dtype: str


class Kernel(ABC):
    """A loaded Artifact: a callable for one Problem that accepts any M (``problem.m`` is the M that it was tuned for).

    packing: the layout that a constant B must be packed in (B is then a PackedWeight with that ``layout``), or None
    when the kernel takes the raw operand. workspace_bytes: scratch memory that the kernel allocates besides its output.
    overlap: whether launches that are captured into a CUDA graph may begin before the preceding kernel ends, if
    ``can_overlap``; set it before the first call. counts_writes: whether ``run`` writes ``out`` through PyTorch's ops,
    which increment the version counter of ``out`` (autograd detects stale saved tensors by this counter); for other
    kernels dispatch increments it. rounding: a rounding before the last one, for which verification allows; only what
    PyTorch runs, eagerly or compiled, may have one.
    """

    candidate: Candidate
    problem: Problem
    packing: str | None = None
    workspace_bytes: int = 0
    overlap: bool = True
    counts_writes: ClassVar[bool] = False
    rounding: Rounding | None = None

    @property
    def can_overlap(self) -> bool:
        """Whether captured launches can begin before the preceding kernel ends (programmatic dependent launch, PDL)."""
        return False

    @abstractmethod
    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        """Compute ``out[...] = epilogue(a @ b)``.

        a: [M, K] ([batch, M, K] for bmm). b: a Tensor [K, N] (or [batch, K, N]), a QuantWeight for a raw weight-only
        operand, or a PackedWeight when ``packing`` is not None. aux: the epilogue's tensors in the order of its steps;
        each has the shape that its Step's axis implies (broadcasting is already resolved, the last dimension is
        contiguous). out: [M, N] of ``problem.out_dtype``, row-major, in allocated memory that no operand has a part of.

        The caller has validated the operands. ``run`` only checks that the operands that it reads by address have
        memory.
        """

    def keep_torch_flags(self) -> None:
        """Leave the flags of ``torch.backends`` as they are in later calls of ``run``, if plain PyTorch runs the same
        op: for timing what users run without gemmtune. Its results may then be outside the error bound."""
        return

    @property
    def has_functional(self) -> bool:
        """Whether the kernel's class implements ``functional`` itself, instead of inheriting the version that calls
        ``run``."""
        return type(self).functional is not Kernel.functional

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        """Return the result in a new tensor. The operands are as for ``run``. Kernels that allocate their output
        themselves override this method."""
        import torch  # here, so that the command line answers `--help` without torch

        leading = (a.shape[0], a.shape[1]) if self.problem.is_batched else (a.shape[0],)
        out = torch.empty(
            (*leading, self.problem.columns), dtype=getattr(torch, self.problem.out_dtype), device=a.device
        )
        self.run(a, b, aux, out)
        return out

    def bind(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch | None:
        """Return a launch for operands with exactly these shapes and strides on their device, or None where the kernel
        depends on more than that.

        The result is called as ``launch(out, a, b, *aux)`` and reads only the operands' addresses. A weight's scales
        and zero points (the tensors of a PackedWeight) follow its matrix. Every argument may be any view of the same
        memory: the caller need not transpose a weight or reshape a scale, which keeps the cost of a call on the host
        low.
        """
        return None

    def bind_any_m(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch | None:
        """Return a launch, as ``bind`` does, for operands that differ from these in M only, or None where there is
        none. All tensors that depend on M are dense, and M is not 1 unless no such tensor is in aux. The launch raises
        KernelError or UnsupportedError, before anything is written, where the kernel does not take the M."""
        return None

    def library_algorithm(self, m: int) -> str:
        """Return a name of the algorithm that a library chooses for the kernel's product at M: equal names where it
        runs the same kernel. Empty where no library chooses, or where its choice is not known (the default)."""
        return ""

    def pack(self, b: Any) -> PackedWeight:
        """Return a raw B (Tensor or QuantWeight) packed into ``self.packing``. Only called when ``packing`` is not
        None."""
        raise NotImplementedError(f"{self.candidate.id} takes its operand unpacked")


class Backend(ABC):
    """A source of kernels. ``name`` is the word that users type (``--backends aten,native``).

    shared_layouts: the names of other backends whose packed layouts this one's kernels take, too. preload: modules that
    a build imports; the processes that build are forked from a process that has imported them. special_steps: the
    kinds of steps that some candidates compute, of those that few do: norms in front of products (``Problem.norm``),
    and gates (``Problem.gate``). lists_by_m: whether candidates are the kernels that a library lists for the Problem's
    M, so that they are others for each M; loading one costs no build.
    """

    name: ClassVar[str]
    shared_layouts: ClassVar[tuple[str, ...]] = ()
    preload: ClassVar[tuple[str, ...]] = ()
    special_steps: ClassVar[frozenset[str]] = frozenset()
    lists_by_m: ClassVar[bool] = False

    def takes(self, family: str) -> bool:
        """Whether the backend may have candidates for Problems of a family. By default, for gemmtune's own; a backend
        declares others by overriding this. ``candidates`` is not called for a family that it does not take."""
        return family in FAMILIES

    def why_family_unsupported(self, problem: Problem) -> str:
        """Return why the backend has no candidates for a Problem's family, or for its norm or gate; empty when it may
        have some."""
        if not self.takes(problem.family):
            return f"{self.name} does not take problems of the family {problem.family}"
        for step in (problem.norm, problem.gate):
            if step is not None and step.kind not in self.special_steps:
                return f"{self.name} computes no {step.kind}"
        return ""

    @abstractmethod
    def available(self, target: Target) -> Availability:
        """Return whether this backend works on the target, with the reason if it does not."""

    @abstractmethod
    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        """Yield the legal candidates, most promising first, and the illegal ones with their reasons; lazily."""

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        """Return why ``candidate`` may not run for ``problem`` on ``target``; empty when it may.

        A candidate may run exactly when the backend's kernels run on the target and ``candidates`` lists the candidate,
        with values of equal types. Dispatch asks before it loads a candidate from a store, which anyone may have
        written. A backend with a large space overrides this method so that an answer takes well under a millisecond.
        """
        identity, reason = candidate.identity, ""
        for item in self.candidates(problem, target):
            if not isinstance(item, Illegal):
                if item.identity == identity:
                    return ""
            elif item.candidate.identity == identity or item.candidate.identity in (
                (self.name, "*", ()), (*identity[:2], ()),
            ):  # fmt: skip
                reason = item.reason
        return reason or NOT_LISTED

    def plan_candidates(self, problem: Problem, target: Target) -> Sequence[Candidate]:
        """Return the legal candidates that only plans for a range of M try, the least estimates first (none by
        default): kernels that adapt to M, which at one M are no faster than those that ``candidates`` lists."""
        return ()

    def estimated_s(self, problem: Problem, candidate: Candidate, target: Target) -> float | None:
        """Return the estimated seconds of a call, comparable between the candidates of one template and between M;
        None where there is no estimate (the default).

        ``candidates`` yields them in this order. Tuning for every M builds the candidates with the least estimates at M
        that are not tuned by themselves. A backend with estimates implements ``packing_of``, too.
        """
        return None

    def code_paths(self, problem: Problem, candidate: Candidate, target: Target) -> Callable[[int], Hashable] | None:
        """Return a function from M to a value, where a legal candidate's kernel chooses among copies of its code by M:
        equal values for M that have the same copy. None for kernels with one (the default).

        A Plan's kernel is verified in each of the copies that it runs.
        """
        return None

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        """Return the layout in which a legal candidate's kernel takes its constant operand (``Kernel.packing``),
        without loading the kernel; None for the raw operand.

        Raises NotImplementedError where only a loaded kernel can tell (the default).
        """
        raise NotImplementedError(f"{self.name} does not say which layout {candidate.id} wants before it is loaded")

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        """Build a candidate and return its artifact. A build is pure, needs no device and is safe in a pool of
        processes. Prebuilt backends inherit this implementation, which builds nothing."""
        return Artifact(candidate, digest=self.source_digest())

    @property
    def is_prebuilt(self) -> bool:
        """Whether the backend has nothing to build, because it comes with its kernels."""
        return type(self).build is Backend.build

    def artifact(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact | None:
        """Return what an earlier ``build`` of a candidate wrote, if it still exists, or what a prebuilt backend's
        returns; else None. Cheap: builds nothing."""
        return self.build(problem, candidate, target) if self.is_prebuilt else None

    def compiles_in_calls(self, problem: Problem, candidate: Candidate, target: Target) -> bool:
        """Whether the first call of a prebuilt backend's candidate compiles what ``compile_early`` can. By default
        not."""
        return False

    def compile_early(self, problem: Problem, candidate: Candidate, target: Target) -> None:
        """Compile what the first call of a candidate would, where another process finds it; needs no device. Called in
        processes that build, for candidates of which ``compiles_in_calls`` is true."""
        raise NotImplementedError(f"{self.name} compiles nothing in calls")

    @abstractmethod
    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        """Load an artifact in the process that will run it. Raises KernelError when it cannot be loaded."""

    @abstractmethod
    def source_digest(self) -> str:
        """Return a short hash of all of gemmtune's own sources that decide what the kernels compute; part of the
        Target."""

    def versions(self, target: Target) -> dict[str, str]:
        """Return the versions, by name, of every compiler and library whose change changes the kernels.

        They become part of the Target, so that a kernel verified with another version is a miss. The versions of
        PyTorch, CUDA and the driver are in the Target already. A library that is not installed has no entry. The method
        is cheap after the first call and imports no compiler. A CPU ``target`` is complete without these versions, so
        that existing stores keep answering.
        """
        return {}

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        """Return a candidate whose layout suits most M, for packing a weight that has not been tuned; None when there
        is none."""
        return None

    def why_unreadable(self, packed: PackedWeight) -> str:
        """Return why this process cannot run a weight packed by this backend (another CPU's layout), or empty."""
        return ""

    def unpack(self, packed: PackedWeight) -> Any:
        """Return the raw operand that a PackedWeight of this backend was packed from (Tensor [K, N] or QuantWeight),
        bit for bit."""
        raise NotImplementedError(f"{self.name} packs no weights")
