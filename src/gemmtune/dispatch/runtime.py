"""The table the ops look into, and everything that fills it on first sight.

Hot: ``TABLE.get(key)`` gives the variants of a key, and the first whose check is true of the operands serves the call.
Cold (once per variant): the Plan of the Problem is built from the store's decisions for the operands' Target, its
kernel loaded if its backend calls it legal, and what serves remembered. Nothing here tunes or verifies: two hooks lead
to the modules above that do.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, get_args

import torch

from .. import backends
from ..backends.base import Kernel
from ..backends.location import artifacts_in
from ..core.candidate import Candidate, Illegal
from ..core.errors import PackedWeightError, StoreBusy, UnsupportedError
from ..core.printable import visible
from ..core.problem import Problem
from ..core.target import Target, current_cpu, current_cuda
from ..core.weights import PackedWeight
from .cache import DISPATCH_CACHE, GuardedEntry, insert
from .guards import is_capturing
from .hooks import late_bound
from .index import DecisionIndex
from .policies import Policy

if TYPE_CHECKING:
    from ..core.decision import Verdict
    from ..store.base import Store

log = logging.getLogger("gemmtune")
# Kernels of a layout that are verified, at most, when no tuning has verified any.
_MOST_VERIFIED = 4
# A tuned M this many times larger or smaller still answers under on-miss; beyond it, it is a miss.
_NEAR = 4
LOOK_AGAIN_S = 0.5  # after a store was found busy, in seconds
CPU = torch.device("cpu")
_SERVED = ("cpu", "cuda")

# What Indices and loaded kernels are kept under: the CPU with a number of threads, or a GPU by its index.
_Place = tuple[str, int]


class Runtime:
    """Policy, store and loaded kernels of this process. One instance, ``RUNTIME``; tests make their own stores."""

    def __init__(self) -> None:
        self.policy: Policy = "cached"
        self.observer: Callable[[Problem, torch.device], None] | None = None
        # Set by name, since what they lead to is above this package; None turns one off.
        self.miss_hook: Callable[[Problem, torch.device], None] | None = late_bound(
            "gemmtune.tuning.api", "tune_missing"
        )
        self.verify_hook: Callable[[Kernel, Problem, torch.device], Verdict] | None = late_bound(
            "gemmtune.verify.untuned", "verify_kernel"
        )
        self.generation = 0
        self._lock = threading.RLock()
        self._tuning = threading.Lock()
        self._store: Store | None = None
        self._indices: dict[_Place, DecisionIndex] = {}
        self._kernels: dict[tuple[Any, str, _Place], Kernel | None] = {}
        self._verified: dict[tuple[Any, str, _Place], bool] = {}
        self._asked: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self._busy_until = 0.0

    def refresh(self, store: Store | None = None) -> None:
        """Forget everything prepared and reread the store on the next first sight. store: use this one from now on."""
        with self._lock:
            if store is not None:
                self._store = store
            self._forget()
            self._indices.clear()
            self._kernels.clear()  # not what was verified: that holds as long as the process
            self._asked.clear()
            self._busy_until = 0.0

    def observe(self, observer: Callable[[Problem, torch.device], None] | None) -> bool:
        """Report every Problem and where it runs to ``observer``; while there is one nothing is remembered, so that
        none is missed. None: to nobody any more. False, and nothing changes, when there is another."""
        with self._lock:
            if observer is not None and self.observer is not None:
                return False
            self.observer = observer
            self._forget()
            return True

    def set_policy(self, name: Policy) -> None:
        """Serve by another policy from now on; what was prepared under the former one is forgotten."""
        with self._lock:
            self.policy = name
            self.refresh()

    def _forget(self) -> None:
        """Empty the table. What other threads are preparing meanwhile is of an older generation: not remembered."""
        self.generation += 1
        DISPATCH_CACHE.clear()

    def cache_entry(self, key: Any, entry: GuardedEntry, guarded: tuple[Any, ...], generation: int) -> None:
        """Add an entry to the dispatch cache, for operands like ``guarded``; a key that cannot be hashed is not added.

        generation: ``self.generation`` before the entry's function was prepared. An entry of an older generation was
        made from decisions or a policy that no longer hold: it serves its own call only.
        """
        with self._lock:
            if self.observer is None and generation == self.generation:
                with suppress(TypeError):
                    insert(key, entry, guarded)

    def kernel_for(
        self, problem: Problem, packed: PackedWeight | None = None, device: torch.device = CPU
    ) -> Kernel | None:
        """The kernel that serves a Problem on ``device`` now, or None for the plain PyTorch op.

        A packed weight is served by a kernel of its layout whatever the policy. While a CUDA graph is captured only
        what was loaded before serves (None, for a packed weight too, when that is nothing). None for a packed weight
        also means that every kernel of its layout failed verification: PyTorch then serves the unpacked weight. Raises
        PackedWeightError when nothing in this process can run a packed weight.
        """
        if device.type not in _SERVED:
            return None
        if self.policy == "on-miss" and not is_capturing(device):
            self._tune_missing(problem, device)
        with self._lock:
            if packed is not None:
                return self._packed_kernel(problem, packed, device)
            if self.policy == "off":
                return None
            index = self._index_now(device)
            if index is None:
                return None
            return self._planned(index, problem, None, device) or self._from_constant(index, problem, device)

    def index(self, device: torch.device = CPU) -> DecisionIndex:
        """The decisions of a device's present Target (a CPU's thread count included). Waits for whoever writes them."""
        place = _place(device)
        with self._lock:
            if place not in self._indices:
                self._indices[place] = DecisionIndex.read(self.store(), current_target(device), self.warn_once)
            return self._indices[place]

    def _index_now(self, device: torch.device) -> DecisionIndex | None:
        """The same for a call that is to be served now: None where the store is being written, and for LOOK_AGAIN_S
        after, lest each first call waits for it. What is prepared meanwhile serves its own call only."""
        with self._lock:
            store = self.store()
            if _place(device) not in self._indices and store is not None:
                try:
                    if time.monotonic() >= self._busy_until:
                        with store.in_a_hurry():
                            return self.index(device)
                except StoreBusy:
                    self._busy_until = time.monotonic() + LOOK_AGAIN_S
                    self.warn_once("the store is being written: PyTorch's own kernels serve until it can be read")
                self.generation += 1
                return None
            return self.index(device)

    def warn_once(self, text: str) -> None:
        """One line through the ``gemmtune`` logger, the first time it comes up."""
        with self._lock:
            if text in self._warned:
                return
            self._warned.add(text)
        log.warning("%s", visible(text))

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

    def artifacts(self) -> AbstractContextManager[None]:
        """Return a block in which backends build into, and load from, the artifacts of the store in use."""
        store = self.store()
        return artifacts_in(None if store is None else store.artifacts_directory)

    def after_fork(self) -> None:
        """In a forked child: the locks anew, since the thread that held one may not have come along."""
        self._lock, self._tuning = threading.RLock(), threading.Lock()

    def _tune_missing(self, problem: Problem, device: torch.device) -> None:
        """Give the on-miss hook its chance, once a problem.

        Not under the lock, because tuning takes seconds: meanwhile the other threads are served by what there is. One
        tuning at a time, since two would disturb each other's timings; what misses during it is asked for later.
        """
        hook = self.miss_hook
        if hook is None or not self._misses(problem, device) or not self._tuning.acquire(blocking=False):
            return
        try:
            if self._misses(problem, device):  # still: another thread may just have tuned it
                self._asked.add((problem.key, str(device)))
                hook(problem, device)
        finally:
            self._tuning.release()
            with self._lock:  # after the release, so that nobody who was turned away is remembered
                self._forget()
                self._indices.clear()
                self._asked.add((problem.key, str(device)))  # a refresh by the hook forgot that

    def _misses(self, problem: Problem, device: torch.device) -> bool:
        """Whether nothing near was tuned, and the hook was not asked either."""
        with self._lock:
            asked = (problem.key, str(device)) in self._asked
            index = None if asked else self._index_now(device)
            return index is not None and not index.has_near(problem, _NEAR)

    def _planned(
        self, index: DecisionIndex, problem: Problem, packing: str | None, device: torch.device
    ) -> Kernel | None:
        """The Plan's kernel for the Problem's M. A packed weight has to be served by some kernel of its layout: where
        the one for the nearest tuned M cannot be, by that for the next nearest."""
        plan = index.plan(problem.plan_key, packing)
        if plan is None:
            return None
        for entry in plan.ranked(problem.m) if packing is not None else [plan.pick(problem.m)]:
            if entry.candidate is not None:
                kernel = self._load(entry.candidate, problem.with_m(entry.m), device, packing, foreign=True)
                if kernel is not None:
                    kernel.overlap = entry.overlap
                    return kernel
        return None

    def _from_constant(self, index: DecisionIndex, problem: Problem, device: torch.device) -> Kernel | None:
        """Kernels tuned for a constant weight serve a changing one too, if they take it as it lies."""
        if problem.b.constant or index.plan(problem.plan_key, None) is not None:
            return None
        kernel = self._planned(index, as_constant(problem), None, device)
        failed = index.failed(problem.plan_key)
        return None if kernel is None or kernel.candidate.id in failed else kernel

    def _packed_kernel(self, problem: Problem, packed: PackedWeight, device: torch.device) -> Kernel | None:
        backend = backends.get(packed.layout.partition(":")[0])
        reason = backend.rejects(packed)
        if reason:
            raise PackedWeightError(f"the packed weight ({packed.layout}) cannot run here: {reason}. Pack it again")
        kernel = None
        if self.policy != "off":
            index = self._index_now(device)
            kernel = None if index is None else self._planned(index, problem, packed.layout, device)
        return kernel or self._untuned(problem, packed, device)

    def _untuned(self, problem: Problem, packed: PackedWeight, device: torch.device) -> Kernel | None:
        """A kernel for a packed weight that no Plan covers: the backend's default, else its first of that layout.

        Nobody verified it when it was tuned, so it is verified here before it first serves. None when the kernels of
        the layout are wrong, or while a CUDA graph is captured. Raises PackedWeightError when there is none.
        """
        rounded = problem.with_m(1 << max(0, problem.m - 1).bit_length())
        index = self._index_now(device)
        failed = index.failed(problem.plan_key) if index is not None else frozenset()
        refused = 0
        for candidate in _of_layout_first(rounded, packed.layout, current_target(device)):
            kernel = None if candidate.id in failed else self._load(candidate, rounded, device, packed.layout)
            if kernel is not None and self._is_verified(kernel, device):
                return kernel
            refused += kernel is not None or candidate.id in failed
            if refused == _MOST_VERIFIED:
                break
        if is_capturing(device):
            return None
        if refused:
            self.warn_once(
                f"no kernel for weights packed as {packed.layout!r} is right for {problem.key}: PyTorch serves, and "
                "unpacks the weight in every call. Use the weight unpacked"
            )
            return None
        raise PackedWeightError(
            f"no kernel here takes a weight packed as {packed.layout!r} for {problem.key}. Unpack it, or pack the "
            "weight again on this machine"
        )

    def _is_verified(self, kernel: Kernel, device: torch.device) -> bool:
        """Whether a kernel that no tuning has verified gives right results; found out once a process."""
        key = (kernel.candidate.identity, kernel.problem.plan_key, _place(device))
        hook = self.verify_hook
        if is_capturing(device):  # what a graph captures must be known to be right before
            return self._verified.get(key, hook is None)
        if key not in self._verified and hook is not None:
            with current(device):
                verdict = hook(kernel, kernel.problem, device)
            self._verified[key] = verdict.ok
            if not verdict.ok:
                self.warn_once(
                    f"{kernel.candidate.id} failed verification for {kernel.problem.key} ({verdict.kind}: "
                    f"{verdict.detail}) and is not served"
                )
        return self._verified.get(key, True)

    def _load(
        self, candidate: Candidate, problem: Problem, device: torch.device, packing: str | None, foreign: bool = False
    ) -> Kernel | None:
        """The kernel, loaded at its first use; None when it cannot be, when it takes its weight in another ``packing``,
        or while a CUDA graph is captured.

        foreign: the candidate comes from a store, which anyone may have written, and not from its backend.
        """
        key = (candidate.identity, problem.key, _place(device))
        if key not in self._kernels:
            if is_capturing(device):
                return None
            self._kernels[key] = self._load_now(candidate, problem, device, foreign)
        kernel = self._kernels[key]
        if kernel is None or kernel.packing == packing:
            return kernel
        if foreign:
            self.warn_once(
                f"{candidate.id} is not served: it takes its weight {_packed_words(kernel.packing)}, and a stored "
                f"decision has it for one {_packed_words(packing)} (`gemmtune store verify`)"
            )
        return None

    def _load_now(self, candidate: Candidate, problem: Problem, device: torch.device, foreign: bool) -> Kernel | None:
        try:
            backend, target = backends.get(candidate.backend), current_target(device)
            reason = backend.why_illegal(problem, candidate, target) if foreign else ""
            if reason:
                self.warn_once(
                    f"a stored decision names {candidate.id} for {problem.key}, which is not legal there ({reason}); "
                    "it is not served (`gemmtune store verify`)"
                )
                return None
            with current(device), self.artifacts():
                return backend.load(backend.build(problem, candidate, target), problem)
        except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, ImportError) as error:
            # RuntimeError: KernelError is one, and so is what a GPU raises.
            self.warn_once(f"{candidate.id} cannot be loaded ({error}); PyTorch's own kernel serves")
            return None


def _of_layout_first(problem: Problem, layout: str, target: Target) -> Iterator[Candidate]:
    """The legal candidates of the backend that a layout is named after, its default first. Those that are known to
    take another layout are left out."""
    backend = backends.get(layout.partition(":")[0])
    default = backend.default_packing(problem, target)
    if default is not None:
        yield default
    for candidate in backend.candidates(problem, target):
        if isinstance(candidate, Illegal) or (default is not None and candidate.identity == default.identity):
            continue
        try:
            if backend.packing_of(problem, candidate) != layout:
                continue
        except NotImplementedError:
            pass  # the loaded kernel tells
        yield candidate


def _packed_words(packing: str | None) -> str:
    return "as it is" if packing is None else f"packed as {packing}"


RUNTIME = Runtime()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RUNTIME.after_fork)


def as_constant(problem: Problem) -> Problem:
    """The same Problem with its B operand constant (and A dense, as constant problems are described)."""
    if problem.a.layout.key != "r":
        return problem
    return replace(problem, b=replace(problem.b, constant=True))


def current_target(device: str | torch.device = "cpu") -> Target:
    """The Target that decisions are kept under: this CPU with torch's threads now, or a GPU (``"cuda"``: the current
    one), with the sources of every importable backend for it, and the versions of what these depend on. Raises
    ValueError for another kind of device, UnsupportedError where there is no such GPU."""
    place = torch.device(device)
    if place.type not in _SERVED:
        raise ValueError(f"device must be cpu or cuda (cuda:1 ...); got {str(device)!r}")
    if place.type == "cpu":
        return _with_versions(current_cpu(_sources("cpu")))
    _require_gpu(place)
    return _with_versions(current_cuda(_sources("cuda"), place.index))


def _require_gpu(device: torch.device) -> None:
    if not torch.cuda.is_available():
        raise UnsupportedError("there is no CUDA device that torch can use here; `gemmtune doctor` says what there is")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise UnsupportedError(f"there is no {device}: torch sees {count} CUDA device(s), cuda:0 to cuda:{count - 1}")


def _sources(device: str) -> dict[str, str]:
    """The digest of every backend for a kind of device; one whose room cannot be imported is left out rather than
    taking the ops down."""
    found: dict[str, str] = {}
    for name in backends.names(device):
        try:
            found.update(backends.sources([name]))
        except (ImportError, AttributeError) as error:
            RUNTIME.warn_once(f"backend {name} cannot be imported ({error})")
    return found


def _with_versions(target: Target) -> Target:
    """The Target with the versions of what its backends' kernels depend on; of those backends that can be imported."""
    found: dict[str, str] = {}
    for name in backends.names(target.device):
        try:
            found.update(backends.versions(target, [name]))
        except (ImportError, AttributeError):  # _sources has said so
            continue
    return target.with_versions(found)


def _place(device: torch.device) -> _Place:
    if device.type == "cpu":
        return "cpu", torch.get_num_threads()
    return device.type, torch.cuda.current_device() if device.index is None else device.index


def current(device: torch.device) -> AbstractContextManager[object]:
    """A block in which a GPU is the current one; nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


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
    """Set how this process serves: ``cached`` (what was tuned; the default), ``on-miss`` (tune what was not, at the
    first call: seconds each), ``off`` (plain PyTorch). As a context manager it restores the former policy.

    Raises ValueError for another name.
    """
    if name not in get_args(Policy):
        raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}; got {name!r}")
    former = RUNTIME.policy
    RUNTIME.set_policy(name)
    return PolicyScope(former)
