"""The state of serving in this process: policy, store, decisions and loaded kernels.

``Runtime.kernel_for`` answers a call that the dispatch cache does not serve: the Plan of its Problem is built from the
store's decisions for the operands' Target, and the Plan's kernel is loaded. Nothing here tunes or verifies: two hooks
lead to the packages above that do.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from .. import backends
from ..backends.base import Kernel
from ..backends.location import artifacts_in
from ..core import devices
from ..core.devices import CPU, DeviceKey
from ..core.errors import PackedWeightError, StoreBusy
from ..core.printable import visible
from ..core.problem import Problem
from ..core.target import Target
from ..core.weights import PackedWeight
from . import cache
from .forms import Forms
from .guards import Guard
from .hooks import late_bound
from .index import DecisionIndex
from .loader import KernelLoader, VerifyHook
from .plan import Plan
from .plan_kernels import PlanKernels
from .policies import Policy
from .targets import target_of

if TYPE_CHECKING:
    from ..store.base import Store

log = logging.getLogger("gemmtune")

MISS_FACTOR = 4  # under on-miss, a tuned M this many times larger or smaller still serves
RETRY_S = 0.5  # after a store was found busy, in seconds

Observer = Callable[[Problem, torch.device], None]


class Choice(NamedTuple):
    """What serves a Problem.

    kernel: None for the plain PyTorch op. plan: the kernels for calls that differ from it in M, or batch, only, where a
    Plan says so; None where there is none, and for a packed weight that its Plan does not serve.
    """

    kernel: Kernel | None
    plan: PlanKernels | None = None


class Runtime:
    """Policy, store, decisions and loaded kernels of this process. There is one instance, ``RUNTIME``.

    observer: called with every Problem and the device that it runs on. miss_hook: tunes a Problem for a device under
    the policy ``on-miss``. verify_hook: verifies a kernel that no tuning has verified. None turns a hook off.
    generation: counts the times that prepared functions became invalid.
    """

    def __init__(self) -> None:
        self.policy: Policy = "cached"
        self.observer: Observer | None = None
        # By name, since they are in packages above this one.
        self.miss_hook: Observer | None = late_bound("gemmtune.tuning.api", "tune_missing")
        self.verify_hook: VerifyHook | None = late_bound("gemmtune.verify.untuned", "verify_kernel")
        self.generation = 0
        self._lock = threading.RLock()
        self._tuning = threading.Lock()
        self._store: Store | None = None
        self._indices: dict[DeviceKey, DecisionIndex] = {}
        self._plan_kernels: dict[tuple[int, DeviceKey, frozenset[str]], PlanKernels] = {}  # by Plan (its address)
        self._loader = KernelLoader(lambda device: current_target(device), self.artifacts, self.warn_once)
        self._asked: set[tuple[str, str]] = set()
        self._warned: set[str] = set()
        self._busy_until = 0.0

    def refresh(self, store: Store | None = None) -> None:
        """Invalidate everything prepared and read the store again at the next miss. store: use this one from now on."""
        with self._lock:
            if store is not None:
                self._store = store
            self._invalidate()
            self._forget_decisions()
            self._loader.clear()
            self._asked.clear()
            self._busy_until = 0.0

    def observe(self, observer: Observer | None) -> bool:
        """Report every Problem and its device to ``observer``; None ends that. While there is an observer nothing is
        cached, so that it sees every call. Returns False, and changes nothing, when there is another observer."""
        with self._lock:
            if observer is not None and self.observer is not None:
                return False
            self.observer = observer
            self._invalidate()
            return True

    def set_policy(self, name: Policy) -> None:
        """Serve by another policy from now on."""
        with self._lock:
            self.policy = name
            self.refresh()

    def _forget_decisions(self) -> None:
        """Forget what was read of the store, and the kernels of its Plans."""
        self._indices.clear()
        self._plan_kernels.clear()

    def _invalidate(self) -> None:
        """Empty the dispatch cache. What other threads are preparing meanwhile has an older generation, and is not
        cached."""
        self.generation += 1
        cache.clear()

    def cache_entry(
        self, key: Any, function: Callable[..., Any], guarded: tuple[Any, ...], generation: int,
        described: cache.DescribedEntry | None = None, guard: Guard | None = None,
    ) -> None:  # fmt: skip
        """Add a function to the dispatch cache that serves operands like ``guarded`` (``cache.insert``).

        generation: ``self.generation`` before the function was prepared. One of an older generation was made from
        decisions or a policy that no longer hold: it serves its own call only. described: serves other M, except under
        the policy "on-miss", which tunes each M. guard: as for ``cache.insert``.
        """
        with self._lock:
            if self.observer is not None or generation != self.generation:
                return
            entries = cache.DISPATCH_CACHE
            if guard is not None and key not in entries and len(entries) < cache.MAX_KEYS:
                entries[key] = ((guard, function),)  # as cache.insert does; a call with a new M waits for it
            else:
                cache.insert(key, function, guarded, None if self.policy == "on-miss" else described, guard)

    def kernel_for(
        self, problem: Problem, packed: PackedWeight | None = None, device: torch.device = CPU
    ) -> Kernel | None:
        """Return the kernel of ``choose``, which serves a Problem on ``device`` now, or None for the plain PyTorch op.
        Raises as ``choose``."""
        return self.choose(problem, packed, device).kernel

    def choose(self, problem: Problem, packed: PackedWeight | None = None, device: torch.device = CPU) -> Choice:
        """Return what serves a Problem on ``device`` now: a kernel, or None for the plain PyTorch op.

        A packed weight is served by a kernel of its layout under every policy. While a CUDA graph is captured only
        loaded kernels serve (None, for a packed weight too, when there is none). None for a packed weight also means
        that every kernel of its layout failed verification: PyTorch then serves the unpacked weight. Raises
        PackedWeightError when nothing in this process can run a packed weight.
        """
        if not devices.is_served(device):
            return Choice(None)
        if self.policy == "on-miss" and not devices.is_capturing(device):
            self._tune_missing(problem, device)
        with self._lock:
            if packed is not None:
                return self._choose_packed(problem, packed, device)
            index = None if self.policy == "off" else self._index_now(device)
            if index is None:
                return Choice(None)
            plan, tuned = index.raw_plan(problem)
            return self._choose_of_plan(plan, tuned, problem, None, device, index.failed(problem.plan_key))

    def forms(self, problem: Problem, packed: PackedWeight, device: torch.device) -> Forms | None:
        """Return which form of a packed weight serves each M, now; None for one that is kept packed only, where nothing
        was tuned, and under the policy "off": the packed form then serves."""
        if packed.raw is None or not devices.is_served(device):
            return None
        with self._lock:
            index = None if self.policy == "off" else self._index_now(device)
            return None if index is None else index.forms(problem.plan_key, packed.layout)

    def index(self, device: torch.device = CPU) -> DecisionIndex:
        """Return the decisions for a device's present Target (a CPU's number of threads is part of it). Waits for other
        processes that are writing the store."""
        key = devices.get(device.type).key(device)
        with self._lock:
            if key not in self._indices:
                self._indices[key] = DecisionIndex.read(self.store(), current_target(device), self.warn_once)
            return self._indices[key]

    def _index_now(self, device: torch.device) -> DecisionIndex | None:
        """Return ``index(device)`` for a call that is to be served now: None where the store is being written, and for
        ``RETRY_S`` after, so that not every first call waits for it. What is prepared meanwhile is not cached."""
        with self._lock:
            store = self.store()
            if devices.get(device.type).key(device) not in self._indices and store is not None:
                try:
                    if time.monotonic() >= self._busy_until:
                        with store.short_timeout():
                            return self.index(device)
                except StoreBusy:
                    self._busy_until = time.monotonic() + RETRY_S
                    self.warn_once("the store is being written: PyTorch's own kernels serve until it can be read")
                self.generation += 1
                return None
            return self.index(device)

    def warn_once(self, text: str) -> None:
        """Log one line through the ``gemmtune`` logger, the first time that this process has it."""
        with self._lock:
            if text in self._warned:
                return
            self._warned.add(text)
        log.warning("%s", visible(text))

    def store(self) -> Store | None:
        """Return the store in use (opened on first need), or None when it cannot be opened."""
        with self._lock:
            if self._store is None:
                try:
                    from ..store import open_store

                    self._store = open_store()
                except Exception as error:  # whatever is wrong with the store, PyTorch can still serve
                    self.warn_once(f"the store cannot be opened ({error}); PyTorch's own kernels serve")
            return self._store

    def artifacts(self) -> AbstractContextManager[None]:
        """Return a context in which backends build into, and load from, the artifacts of the store in use."""
        store = self.store()
        return artifacts_in(None if store is None else store.artifacts_directory)

    def after_fork(self) -> None:
        """Make new locks in a forked child: the thread that held one is not in the child."""
        self._lock, self._tuning = threading.RLock(), threading.Lock()

    def _tune_missing(self, problem: Problem, device: torch.device) -> None:
        """Call the miss hook, once for each Problem and device.

        Not under the lock, because tuning takes seconds: meanwhile other threads are served by what there is. One
        tuning at a time, since two would disturb each other's timings; a miss during it is tuned at its next call.
        """
        hook = self.miss_hook
        if hook is None or not self._is_miss(problem, device) or not self._tuning.acquire(blocking=False):
            return
        try:
            if self._is_miss(problem, device):  # another thread may just have tuned it
                if len(self._asked) >= cache.MAX_KEYS:
                    self._asked.clear()
                self._asked.add((problem.key, str(device)))
                hook(problem, device)
        finally:
            self._tuning.release()
            with self._lock:  # after the release, so that no call that found the lock taken is cached
                self._invalidate()
                self._forget_decisions()
                self._asked.add((problem.key, str(device)))  # a refresh by the hook cleared that

    def _is_miss(self, problem: Problem, device: torch.device) -> bool:
        """Whether no M near the Problem's was tuned, and the hook was not called for it either."""
        with self._lock:
            asked = (problem.key, str(device)) in self._asked
            index = None if asked else self._index_now(device)
            return index is not None and not index.has_near(problem, MISS_FACTOR)

    def kernel_of_size(self, kernels: PlanKernels, size: int) -> Kernel | None:
        """Return ``kernels.of_size(size)``. Safe in any thread."""
        with self._lock:
            return kernels.of_size(size)

    def _choose_of_plan(
        self, plan: Plan | None, tuned: Problem, problem: Problem, packing: str | None, device: torch.device,
        faulty: Collection[str] = (),
    ) -> Choice:  # fmt: skip
        """Return the Plan's choice for the Problem. tuned: a Problem that the Plan was made for, of any size."""
        if plan is None:
            return Choice(None)
        kernels = self._kernels_of(plan, tuned, packing, device, faulty)
        return Choice(kernels.of_size(problem.size(plan.dim)), kernels)

    def _kernels_of(
        self, plan: Plan, tuned: Problem, packing: str | None, device: torch.device, faulty: Collection[str]
    ) -> PlanKernels:
        """Return the kernels of a Plan. Those of its intervals that need no build are loaded, unless a CUDA graph is
        being captured: otherwise the first call with an M that needs one would wait for it."""
        key = id(plan), devices.get(device.type).key(device), frozenset(faulty)  # a PlanKernels keeps its Plan
        kernels = self._plan_kernels.get(key)
        if kernels is None:
            load = partial(self._loader.load, device=device, packing=packing, from_store=True)
            kernels = PlanKernels(plan, tuned, load, faulty)
            if not devices.is_capturing(device):
                kernels.load_intervals(partial(load, builds=False))
                self._plan_kernels[key] = kernels
        return kernels

    def preload(self, problem: Problem, packing: str | None, device: torch.device) -> int:
        """Load every kernel that the Problem's Plans may serve, so that CUDA graphs that are captured at any M, or
        batch, find it. Return their number."""
        with self._lock:
            index = self._index_now(device)
            plans = [] if index is None else [index.plan(problem.plan_key_over(dim), packing) for dim in problem.dims]
            count = 0
            for plan in filter(None, plans):
                entries = [interval.entry for interval in plan.intervals] + list(plan.entries)
                wanted = {(e.candidate, e.m) for e in entries if e.candidate is not None}
                for candidate, size in wanted:
                    tuned = problem.with_size(plan.dim, size)
                    kernel = self._loader.load(candidate, tuned, device, packing, from_store=True)
                    count += kernel is not None
            return count

    def _choose_packed(self, problem: Problem, packed: PackedWeight, device: torch.device) -> Choice:
        reason = backends.get(packed.owner).why_unreadable(packed)
        if reason:
            raise PackedWeightError(f"the packed weight ({packed.layout}) cannot run here: {reason}. Pack it again")
        index = self._index_now(device)
        if self.policy != "off" and index is not None:
            plan = index.plan(problem.plan_key, packed.layout)
            choice = self._choose_of_plan(plan, problem, problem, packed.layout, device)
            if choice.kernel is not None:
                return choice
        faulty = index.failed(problem.plan_key) if index is not None else frozenset()
        kernel, refused = self._loader.load_untuned(problem, packed.layout, device, faulty, self.verify_hook)
        if kernel is not None or devices.is_capturing(device):
            return Choice(kernel)
        if refused:
            self.warn_once(
                f"no kernel for weights packed as {packed.layout!r} is right for {problem.plan_key}: PyTorch serves, "
                "and unpacks the weight in every call. Use the weight unpacked"
            )
            return Choice(None)
        raise PackedWeightError(
            f"no kernel here takes a weight packed as {packed.layout!r} for {problem.key}. Unpack it, or pack the "
            "weight again on this machine"
        )


def current_target(device: str | torch.device = "cpu") -> Target:
    """Return the Target that decisions are stored under: this CPU with torch's present number of threads, or a GPU
    (``"cuda"``: the current one), with the sources and versions of every backend that can be imported.

    Raises ValueError for another kind of device, UnsupportedError where there is no such GPU.
    """
    return target_of(device, RUNTIME.warn_once)


RUNTIME = Runtime()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RUNTIME.after_fork)


class PolicyScope:
    """The result of ``policy()``, which is in force already. As a context manager it restores the former policy."""

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
