"""The contract of a store: data in, data out, never code."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from ..core.printable import visible
from ..core.problem import plan_key_of
from ..core.target import Target
from .legality import review

log = logging.getLogger("gemmtune")
Report = Callable[[str], None]
HURRY_S = 0.03  # what serving's reads wait for a writer, in seconds

if TYPE_CHECKING:
    from ..core.decision import Decision, Verdict
    from .lease import Lease


def kept_keys(keep: Target | Collection[Target] | None) -> tuple[str, ...]:
    """The keys of the Targets that ``prune`` is to keep; empty for all of them."""
    if keep is None:
        return ()
    return (keep.key,) if isinstance(keep, Target) else tuple(target.key for target in keep)


def warn(line: str) -> None:
    """One line through the ``gemmtune`` logger; names in it may be anybody's."""
    log.warning("%s", visible(line))


_STORES: weakref.WeakSet[Store] = weakref.WeakSet()


class Store(ABC):
    """Keeps Decisions and remembered failures per Target. One transaction a record.

    Readers meet damage as a miss (and warn once); writers raise StoreError.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.damage: list[str] = []  # what reading took for misses so far, one line each
        _STORES.add(self)

    def check(self) -> None:
        """Raise StoreError, saying what is there instead, when there is something that cannot be read as a store.

        Readers go on without it; who was asked for this very store calls this first.
        """
        return

    def check_writable(self) -> None:
        """Write and take back a record. Raises StoreError when the store cannot be written."""
        return

    def in_a_hurry(self) -> AbstractContextManager[None]:
        """Return a block in which this thread's reads wait some tens of milliseconds at most for a writer, and then
        raise StoreBusy, where others wait for seconds and take what they cannot read for a miss."""
        return nullcontext()

    @property
    def artifacts_directory(self) -> Path | None:
        """The directory for what backends build for this store's decisions; None: that of the default store."""
        return None

    @abstractmethod
    def get(self, target: Target, problem_key: str) -> Decision | None:
        """The decision, or None when there is none for exactly this target."""

    @abstractmethod
    def put(self, target: Target, decision: Decision) -> None:
        """Keep (or replace) one decision; durable when this returns."""

    @abstractmethod
    def decisions(self, target: Target | None = None) -> Iterator[Decision]:
        """Every decision of one target, or of all, newest first."""

    @abstractmethod
    def targets(self) -> list[Target]:
        """Every target with a decision."""

    @abstractmethod
    def remember_failure(self, target: Target, problem_key: str, candidate_id: str, verdict: Verdict) -> None:
        """A candidate that crashed, hung or was wrong is not tried again on this target."""

    @abstractmethod
    def failures(self, target: Target, problem_key: str) -> dict[str, Verdict]:
        """Remembered failures by candidate id. ``problem_key`` may be a plan key: faults that hold for every M are
        remembered under that, too."""

    def all_failures(self, target: Target) -> dict[str, dict[str, Verdict]]:
        """Return a target's remembered failures by problem key or plan key, then by candidate id.

        The default asks for those of the decided problems and their Plans.
        """
        keys = {decision.problem_key for decision in self.decisions(target)}
        keys |= {plan_key_of(key) for key in keys}
        return {key: failures for key in sorted(keys) if (failures := self.failures(target, key))}

    @abstractmethod
    def lease(self, target: Target, problem_key: str, ttl_s: float) -> Lease | None:
        """The right to tune this problem for ``ttl_s`` seconds (at most an hour); None while somebody else holds it.

        A holder that died or let it run out loses it. Raises StoreError when the store cannot be written.
        """

    @abstractmethod
    def leased(self, target: Target, problem_key: str) -> float | None:
        """Seconds until the lease that somebody holds now runs out; None when nobody holds one."""

    @abstractmethod
    def export(self, path: Path, target: Target | None = None) -> int:
        """Write one readable, versioned JSON file; returns the number of decisions."""

    @abstractmethod
    def import_(self, path: Path, report: Report = warn) -> int:
        """Validate everything in an exported file, then keep it all or nothing; returns the number kept.

        Decisions that would serve a kernel which is not legal for their Problem and Target are left out; ``report`` is
        called with one line for each.
        """

    @abstractmethod
    def prune(self, *, keep: Target | Collection[Target] | None = None, older_than_s: float | None = None) -> int:
        """Delete decisions of other targets than ``keep`` and/or older than an age; returns the number deleted."""

    @abstractmethod
    def verify(self, unchecked: Report | None = None) -> list[str]:
        """Damage found, and kernels that would be served and are not legal, in words, one line each; empty when the
        store is sound. ``unchecked`` is called with one line for each kernel of which this installation cannot tell:
        dispatch checks it where it serves."""

    def _illegal(self, unchecked: Report | None) -> list[str]:
        """Return a line for each kernel that a sound Decision would serve and that is not legal."""
        lines: list[str] = []
        for target in self.targets():
            for decision in self.decisions(target):
                found = review(target, decision)
                lines += found.illegal
                for line in found.unchecked if unchecked is not None else ():
                    unchecked(line)  # type: ignore[misc]
        return lines

    @abstractmethod
    def close(self) -> None:
        """Release what is open. Idempotent."""


def _after_fork() -> None:
    """In a forked child: the locks anew, since the thread that held one may not have come along."""
    for store in list(_STORES):
        store._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
