"""Loading kernels for dispatch, once per process, Problem and device; and verifying those that no tuning verified."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .. import backends
from ..backends.base import Kernel
from ..core import devices
from ..core.candidate import Candidate, Illegal
from ..core.devices import DeviceKey
from ..core.problem import Problem
from ..core.target import Target
from ..core.weights import layout_owner

if TYPE_CHECKING:
    from ..core.decision import Verdict

Warn = Callable[[str], None]
TargetOf = Callable[[torch.device], Target]
VerifyHook = Callable[[Kernel, Problem, torch.device], "Verdict"]

MAX_VERIFIED = 4  # kernels of a layout that are verified when no tuning has verified any
_Key = tuple[Any, str, DeviceKey]  # a candidate's identity, a problem's (or a plan's) key, a device


class _NotBuilt(Exception):
    """A kernel has to be built before it can be loaded."""


class KernelLoader:
    """The kernels that this process has loaded, and what verification found of them.

    target_of: the Target of a device. artifacts: returns a context in which backends build into, and load from, the
    store's artifacts. warn: called with one line about what cannot be served. Not thread-safe: ``Runtime`` locks.
    """

    def __init__(self, target_of: TargetOf, artifacts: Callable[[], AbstractContextManager[None]], warn: Warn) -> None:
        self._target_of, self._artifacts, self._warn = target_of, artifacts, warn
        self._kernels: dict[_Key, Kernel | None] = {}
        self._verified: dict[_Key, bool] = {}

    def clear(self) -> None:
        """Forget the loaded kernels. What was verified stays: it holds as long as the process."""
        self._kernels.clear()

    def load(
        self,
        candidate: Candidate,
        problem: Problem,
        device: torch.device,
        packing: str | None,
        *,
        from_store: bool = False,
        builds: bool = True,
    ) -> Kernel | None:
        """Return the kernel, loaded at its first use. None when it cannot be loaded, when it takes its weight in
        another ``packing``, or when a CUDA graph is being captured and it is not loaded yet.

        from_store: the candidate comes from a store, which anyone may have written, and not from its backend: it is
        loaded only if its backend says that it is legal. builds: whether a kernel that has to be built is; otherwise
        None is returned for it.
        """
        key = (candidate.identity, problem.key, devices.get(device.type).key(device))
        if key not in self._kernels:
            if devices.is_capturing(device):
                return None
            try:
                self._kernels[key] = self._load_now(candidate, problem, device, from_store, builds)
            except _NotBuilt:
                return None
        kernel = self._kernels[key]
        if kernel is None or kernel.packing == packing:
            return kernel
        if from_store:
            self._warn(
                f"{candidate.id} is not served: it takes its weight {_packing_words(kernel.packing)}, and a stored "
                f"decision has it for one {_packing_words(packing)} (`gemmtune store verify`)"
            )
        return None

    def _load_now(
        self, candidate: Candidate, problem: Problem, device: torch.device, from_store: bool, builds: bool
    ) -> Kernel | None:
        """Return the kernel; None where it cannot be loaded. Raises _NotBuilt for one that has to be built, unless
        ``builds``."""
        try:
            backend, target = backends.get(candidate.backend), self._target_of(device)
            reason = backend.why_family_unsupported(problem)
            if from_store:
                reason = reason or backend.why_illegal(problem, candidate, target)
            if reason:
                self._warn(
                    f"a stored decision names {candidate.id} for {problem.key}, which is not legal there ({reason}); "
                    "it is not served (`gemmtune store verify`)"
                )
                return None
            with devices.get(device.type).guard(device), self._artifacts():
                make = backend.build if builds else backend.artifact
                artifact = make(problem, candidate, target)
                if artifact is None:
                    raise _NotBuilt
                return backend.load(artifact, problem)
        except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, ImportError) as error:
            # RuntimeError: KernelError is one, and so is what a GPU raises.
            self._warn(f"{candidate.id} cannot be loaded ({error}); PyTorch's own kernel serves")
            return None

    def load_untuned(
        self,
        problem: Problem,
        packing: str,
        device: torch.device,
        faulty: Collection[str],
        verify: VerifyHook | None,
    ) -> tuple[Kernel | None, bool]:
        """Return a verified kernel for a weight in a layout that no decision covers: the backend's default, else its
        first of that layout; and whether a kernel of that layout is wrong.

        faulty: ids of candidates that are known to be. verify: verifies a kernel; None trusts all of them.
        """
        rounded = problem.with_m(1 << max(0, problem.m - 1).bit_length())
        refused = 0
        for candidate in _candidates_of_layout(rounded, packing, self._target_of(device)):
            kernel = None if candidate.id in faulty else self.load(candidate, rounded, device, packing)
            if kernel is not None and self._is_verified(kernel, device, verify):
                return kernel, False
            refused += kernel is not None or candidate.id in faulty
            if refused == MAX_VERIFIED:
                break
        return None, refused > 0

    def _is_verified(self, kernel: Kernel, device: torch.device, verify: VerifyHook | None) -> bool:
        """Whether a kernel gives right results; found out once a process."""
        key = (kernel.candidate.identity, kernel.problem.plan_key, devices.get(device.type).key(device))
        if devices.is_capturing(device):  # what a graph captures must be known to be right before
            return self._verified.get(key, verify is None)
        if key not in self._verified and verify is not None:
            with devices.get(device.type).guard(device):
                verdict = verify(kernel, kernel.problem, device)
            self._verified[key] = verdict.ok
            if not verdict.ok:
                self._warn(
                    f"{kernel.candidate.id} failed verification for {kernel.problem.key} ({verdict.kind}: "
                    f"{verdict.detail}) and is not served"
                )
        return self._verified.get(key, True)


def _candidates_of_layout(problem: Problem, packing: str, target: Target) -> Iterator[Candidate]:
    """Yield the legal candidates of a layout's owner, its default first, then those of other backends that read the
    layout. Candidates that are known to take another layout are left out."""
    for name in backends.readers(packing, target.device):
        backend = backends.get(name)
        default = backend.default_packing(problem, target) if name == layout_owner(packing) else None
        if default is not None:
            yield default
        for candidate in backend.candidates(problem, target):
            if isinstance(candidate, Illegal) or (default is not None and candidate.identity == default.identity):
                continue
            try:
                if backend.packing_of(problem, candidate) != packing:
                    continue
            except NotImplementedError:
                pass  # the loaded kernel tells
            yield candidate


def _packing_words(packing: str | None) -> str:
    return "as it is" if packing is None else f"packed as {packing}"
