"""The table the ops look into, and everything that fills it on first sight.

Hot: ``TABLE.get(key)``. Cold (once per key): the Plan of the Problem is built from the store's decisions for this
Target, its kernel loaded, and the prepared entry remembered. Nothing here tunes; the on-miss policy calls a hook that
``gemmtune.api`` installs.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

import torch

from .. import backends
from ..backends.base import Candidate, Illegal, Kernel, PackedWeight
from ..errors import KernelError, PackedWeightError
from ..problem import Problem
from ..target import Target, current_cpu
from .index import Index
from .policies import Policy

if TYPE_CHECKING:
    from ..store.base import Store

log = logging.getLogger("gemmtune")
Entry = Callable[..., Any]

TABLE: dict[Any, Entry] = {}
_LIMIT = 8192
# A tuned M this many times larger or smaller still answers under on-miss; beyond it, it is a miss.
_NEAR = 4


class Runtime:
    """Policy, store and loaded kernels of this process. One instance, ``RUNTIME``; tests make their own stores."""

    def __init__(self) -> None:
        self.policy: Policy = "cached"
        self.observer: Callable[[Problem], None] | None = None
        self.miss_hook: Callable[[Problem], None] | None = None
        self.generation = 0
        self._lock = threading.RLock()
        self._tuning = threading.Lock()
        self._store: Store | None = None
        self._indices: dict[int, Index] = {}
        self._kernels: dict[tuple[str, str, int], Kernel | None] = {}
        self._asked: set[str] = set()
        self._warned: set[str] = set()

    def refresh(self, store: Store | None = None) -> None:
        """Forget every prepared entry and reread the store on the next first sight. store: use this one from now on."""
        with self._lock:
            if store is not None:
                self._store = store
            self._forget()
            self._indices.clear()
            self._kernels.clear()
            self._asked.clear()

    def observe(self, observer: Callable[[Problem], None] | None) -> None:
        """Report every Problem to ``observer``; while there is one no entry is remembered, so that none is missed."""
        with self._lock:
            self.observer = observer
            self._forget()

    def set_policy(self, name: Policy) -> None:
        """Serve by another policy from now on; what was prepared under the former one is forgotten."""
        with self._lock:
            self.policy = name
            self.refresh()

    def _forget(self) -> None:
        """Empty the table. What other threads are preparing meanwhile is of an older generation: not remembered."""
        self.generation += 1
        TABLE.clear()

    def remember(self, key: Any, entry: Entry, generation: int) -> None:
        """Keep an entry for the hot path; the oldest goes when the table is full.

        generation: ``self.generation`` before the entry was prepared. An older one was made of what is forgotten by
        now (decisions, policy), so that it serves its own call only.
        """
        with self._lock:
            if self.observer is not None or generation != self.generation:
                return
            while len(TABLE) >= _LIMIT:
                del TABLE[next(iter(TABLE))]
            TABLE[key] = entry

    def kernel_for(self, problem: Problem, packed: PackedWeight | None = None) -> Kernel | None:
        """The kernel that serves a Problem here and now, or None for the plain PyTorch op.

        A packed weight is served by a kernel of its layout whatever the policy. Raises PackedWeightError when
        nothing in this process can run it.
        """
        if self.policy == "on-miss":
            self._tune_missing(problem)
        with self._lock:
            if packed is not None:
                return self._packed_kernel(problem, packed)
            if self.policy == "off":
                return None
            index = self.index()
            return self._planned(index, problem, None) or self._from_constant(index, problem)

    def index(self) -> Index:
        """The decisions of the present Target (its thread count included)."""
        threads = torch.get_num_threads()
        with self._lock:
            if threads not in self._indices:
                self._indices[threads] = Index.read(self.store(), current_target(), self.warn_once)
            return self._indices[threads]

    def warn_once(self, text: str) -> None:
        """One line through the ``gemmtune`` logger, the first time it comes up."""
        with self._lock:
            if text in self._warned:
                return
            self._warned.add(text)
        log.warning("%s", text)

    def store(self) -> Store | None:
        """The store in use (opened on first need), or None when it cannot be opened."""
        with self._lock:
            if self._store is None:
                try:
                    from ..store import open_store

                    self._store = open_store()
                except Exception as error:  # whatever ails the store, PyTorch can still serve
                    self.warn_once(f"the store cannot be opened ({error}); PyTorch's own kernels serve")
            return self._store

    def after_fork(self) -> None:
        """In a forked child: the locks anew, since the thread that held one may not have come along."""
        self._lock, self._tuning = threading.RLock(), threading.Lock()

    def _tune_missing(self, problem: Problem) -> None:
        """Give the on-miss hook its chance, once a problem.

        Not under the lock, because tuning takes seconds: meanwhile the other threads are served by what there is. One
        tuning at a time, since two would disturb each other's timings; what misses during it is asked for later.
        """
        hook = self.miss_hook
        if hook is None or not self._misses(problem) or not self._tuning.acquire(blocking=False):
            return
        try:
            if self._misses(problem):  # still: another thread may just have tuned it
                self._asked.add(problem.key)
                hook(problem)
        finally:
            self._tuning.release()
            with self._lock:  # after the release, so that nobody who was turned away is remembered
                self._forget()
                self._indices.clear()
                self._asked.add(problem.key)  # a refresh by the hook forgot that

    def _misses(self, problem: Problem) -> bool:
        """Whether nothing near was tuned, and the hook was not asked either."""
        with self._lock:
            return problem.key not in self._asked and not self.index().has_near(problem, _NEAR)

    def _planned(self, index: Index, problem: Problem, packing: str | None) -> Kernel | None:
        plan = index.plan(problem.plan_key, packing)
        if plan is None:
            return None
        entry = plan.pick(problem.m)
        return None if entry.candidate is None else self._load(entry.candidate, problem.with_m(entry.m))

    def _from_constant(self, index: Index, problem: Problem) -> Kernel | None:
        """Kernels tuned for a constant weight serve a changing one too, if they take it as it lies."""
        if problem.b.constant or index.plan(problem.plan_key, None) is not None:
            return None
        return self._planned(index, as_constant(problem), None)

    def _packed_kernel(self, problem: Problem, packed: PackedWeight) -> Kernel:
        backend = backends.get(packed.layout.partition(":")[0])
        reason = backend.rejects(packed)
        if reason:
            raise PackedWeightError(f"the packed weight ({packed.layout}) cannot run here: {reason}. Pack it again")
        kernel = None
        if self.policy != "off":
            kernel = self._planned(self.index(), problem, packed.layout)
        if kernel is None:
            kernel = self._untuned(problem, packed)
        if kernel is None or kernel.packing != packed.layout:
            raise PackedWeightError(
                f"no kernel here takes a weight packed as {packed.layout!r} for {problem.key}. Unpack it, or pack the "
                "weight again on this machine"
            )
        return kernel

    def _untuned(self, problem: Problem, packed: PackedWeight) -> Kernel | None:
        """A kernel for a packed weight that no Plan covers: the backend's default, else its first of that layout."""
        backend = backends.get(packed.layout.partition(":")[0])
        rounded = problem.with_m(1 << max(0, problem.m - 1).bit_length())
        default = backend.default_packing(rounded)
        if default is not None:
            kernel = self._load(default, rounded)
            if kernel is not None and kernel.packing == packed.layout:
                return kernel
        for candidate in backend.candidates(rounded, current_target()):
            kernel = None if isinstance(candidate, Illegal) else self._load(candidate, rounded)
            if kernel is not None and kernel.packing == packed.layout:
                return kernel
        return None

    def _load(self, candidate: Candidate, problem: Problem) -> Kernel | None:
        key = (candidate.id, problem.key, torch.get_num_threads())
        if key not in self._kernels:
            self._kernels[key] = self._load_now(candidate, problem)
        return self._kernels[key]

    def _load_now(self, candidate: Candidate, problem: Problem) -> Kernel | None:
        try:
            backend = backends.get(candidate.backend)
            return backend.load(backend.build(problem, candidate, current_target()), problem)
        except (KernelError, ValueError, LookupError, TypeError, OverflowError, ImportError) as error:
            # A record may come from anywhere: a config without what its template needs is one that cannot be loaded.
            self.warn_once(f"{candidate.id} cannot be loaded ({error}); PyTorch's own kernel serves")
            return None


RUNTIME = Runtime()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RUNTIME.after_fork)


def as_constant(problem: Problem) -> Problem:
    """The same Problem with its B operand constant (and A dense, as constant problems are described)."""
    from dataclasses import replace

    if problem.a.layout.key != "r":
        return problem
    return replace(problem, b=replace(problem.b, constant=True))


def current_target() -> Target:
    """The Target decisions are kept under: this CPU, torch's threads now, and every importable backend's sources."""
    return current_cpu(_sources())


def _sources() -> dict[str, str]:
    """Every backend's digest; one whose room cannot be imported is left out rather than taking the ops down."""
    found: dict[str, str] = {}
    for name in backends.names():
        try:
            found.update(backends.sources([name]))
        except (ImportError, AttributeError) as error:
            RUNTIME.warn_once(f"backend {name} cannot be imported ({error})")
    return found


class PolicyScope:
    """What ``policy()`` returns: already in force; as a context manager it restores the former policy."""

    def __init__(self, former: Policy) -> None:
        self._former: Policy = former

    def __enter__(self) -> PolicyScope:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        RUNTIME.set_policy(self._former)


def policy(name: Policy) -> PolicyScope:
    """Set the policy of this process: ``cached`` (serve what was tuned), ``on-miss`` (tune what was not), ``off``
    (plain PyTorch). Raises ValueError for another name."""
    if name not in get_args(Policy):
        raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}; got {name!r}")
    former = RUNTIME.policy
    RUNTIME.set_policy(name)
    return PolicyScope(former)
