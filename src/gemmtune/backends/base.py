"""The contract every backend keeps: four methods, and the data that passes through them.

Adding a backend changes no file but its own room, one line in ``backends/__init__.py`` and one conformance
subclass (docs/adding-a-backend.md).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..core.candidate import Candidate, Illegal

if TYPE_CHECKING:
    from torch import Tensor

    from ..core.problem import Problem
    from ..core.target import Target
    from ..core.weights import PackedWeight

NOT_LISTED = "the backend lists no such candidate for this problem"

OVERLAP = "GEMMTUNE_OVERLAP"  # "0": every kernel begins when the one before it has ended (docs/cuda.md)


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a backend can be used on a Target; ``reason`` is in words a user can act on (empty when it can)."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


@dataclass(frozen=True, slots=True)
class Artifact:
    """What building left on disk. ``path`` is None when there is nothing (ATen, prebuilt native kernels)."""

    candidate: Candidate
    digest: str
    path: Path | None = None


Launch = Callable[..., None]  # what Kernel.bind returns


class Kernel(ABC):
    """A loaded Artifact: a callable for one Problem with any M (``problem.m`` is where it was tuned).

    packing: the layout its constant B must be packed in (a PackedWeight with that ``layout``), or None when it
    takes the raw operand. workspace_bytes: scratch it allocates besides its output. overlap: whether launches
    captured into a CUDA graph begin before the kernel in front of them ends, where ``can_overlap``; to be set before
    the first call. counts_writes: whether ``run`` writes ``out`` by PyTorch's ops, which count that in its version
    counter (autograd finds stale saved tensors by it); for other kernels dispatch does.
    """

    candidate: Candidate
    problem: Problem
    packing: str | None = None
    workspace_bytes: int = 0
    overlap: bool = True
    counts_writes: ClassVar[bool] = False

    @property
    def can_overlap(self) -> bool:
        """Whether captured launches can begin before the kernel in front of them ends (programmatic dependent
        launch)."""
        return False

    @abstractmethod
    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        """Compute ``out[...] = epilogue(a @ b)``.

        a: [M, K] ([batch, M, K] for bmm). b: Tensor [K, N] (or [batch, K, N]), a QuantWeight for a raw weight-only
        operand, or a PackedWeight when ``packing`` is not None. aux: the epilogue's tensors in order, shapes as
        their Step's axis says (broadcasting already resolved, last dimension contiguous). out: [M, N] of
        ``problem.out_dtype``, row-major, with memory. Nothing is validated here (the caller has), but that operands
        that are read by address have memory.
        """

    @property
    def has_functional(self) -> bool:
        """Whether ``functional`` is the kernel's own and not made of ``run``."""
        return type(self).functional is not Kernel.functional

    def functional(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Tensor:
        """Return the result in a new tensor, with operands as ``run`` has them. Kernels that allocate their output
        themselves override this."""
        import torch  # here, so that the command line answers `--help` without torch

        rows = (a.shape[0], a.shape[1]) if self.problem.family == "bmm" else (a.shape[0],)
        out = torch.empty((*rows, self.problem.n), dtype=getattr(torch, self.problem.out_dtype), device=a.device)
        self.run(a, b, aux, out)
        return out

    def bind(self, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch | None:
        """``run`` for operands of just these shapes and strides on their device, by addresses alone; None where a
        kernel looks at more than that.

        The result is called ``launch(out, a, b, *aux)``, a weight's scales and zero points (a PackedWeight's tensors)
        coming behind its matrix. Any view of the same memory will do: a weight need not be transposed, nor a scale
        be given its kernel's shape, which is what makes a call cheap for the host.
        """
        return None

    def pack(self, b: Any) -> PackedWeight:
        """Pack a raw B (Tensor or QuantWeight) into ``self.packing``. Only called when packing is not None."""
        raise NotImplementedError(f"{self.candidate.id} takes its operand unpacked")


class Backend(ABC):
    """A source of kernels. ``name`` is the word users type (``--backends aten,native``).

    preload: modules that building imports; the processes that build are forked from one that has them.
    """

    name: ClassVar[str]
    preload: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def available(self, target: Target) -> Availability:
        """Whether this backend works on the target, or the reason it does not."""

    @abstractmethod
    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        """The legal candidates, most promising first, and the illegal ones with their reasons; lazily."""

    def why_illegal(self, problem: Problem, candidate: Candidate, target: Target) -> str:
        """Return why ``candidate`` may not run for ``problem`` on ``target``; empty when it may.

        It may exactly when the backend's kernels run on the target and ``candidates`` lists it, with values of the same
        types. Dispatch asks before it loads a candidate from a store, which anyone may have written. A backend with a
        large space overrides this so that an answer takes well under a millisecond.
        """
        wanted, reason = candidate.identity, ""
        for item in self.candidates(problem, target):
            if not isinstance(item, Illegal):
                if item.identity == wanted:
                    return ""
            elif item.candidate.identity == wanted or item.candidate.identity in (
                (self.name, "*", ()), (*wanted[:2], ()),
            ):  # fmt: skip
                reason = item.reason
        return reason or NOT_LISTED

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        """Return the layout that a legal candidate's kernel wants its constant operand in (``Kernel.packing``), without
        loading it; None for the raw operand.

        Raises NotImplementedError where only a loaded kernel can tell (the default).
        """
        raise NotImplementedError(f"{self.name} does not say which layout {candidate.id} wants before it is loaded")

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        """Build a candidate: pure, needs no device, safe in a pool of processes. Prebuilt backends inherit this."""
        return Artifact(candidate, digest=self.source_digest())

    def artifact(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact | None:
        """What ``build`` made of a candidate before, if it is still there: nothing is built. Cheap."""
        return None

    @abstractmethod
    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        """Load in the process that will run it. Raises KernelError when it cannot."""

    @abstractmethod
    def source_digest(self) -> str:
        """A short hash of everything of ours that decides what the kernels compute; part of the Target."""

    def versions(self, target: Target) -> dict[str, str]:
        """Return the versions, by name, of every compiler and library whose change makes a kernel another one.

        They become part of the Target, so that what was verified with another version is a miss. What PyTorch, CUDA and
        the driver are is there already. A library that is not installed has no entry. Cheap after the first call, and
        imports no compiler. On a CPU ``target`` is whole without them: stores keep answering.
        """
        return {}

    def default_packing(self, problem: Problem, target: Target) -> Candidate | None:
        """A candidate whose layout suits most M, for packing a weight nobody has tuned; None when there is none."""
        return None

    def rejects(self, packed: PackedWeight) -> str:
        """Why this process cannot run a weight packed by this backend (another CPU's layout), or empty."""
        return ""

    def unpack(self, packed: PackedWeight) -> Any:
        """The raw operand a PackedWeight of this backend came from (Tensor [K, N] or QuantWeight), bit for bit."""
        raise NotImplementedError(f"{self.name} packs no weights")
