"""``gemmtune.tune`` and the on-miss hook. The tuner is imported only when something is tuned."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..core import devices
from ..core.devices import CPU
from ..core.errors import UnsupportedError
from ..core.problem import Problem
from ..dispatch import runtime

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.events import Progress
    from ..core.problem import Dim
    from ..core.target import Target
    from ..store.base import Store
    from .config_keys import ConfigKey
    from .sizes import Sizes
    from .tuner import Budget
    from .worker_pool import WorkerPool

log = logging.getLogger("gemmtune")

POLL_S = 1.0  # seconds between two looks at whether another process is done tuning a problem that this process serves


def tune(
    model_or_problems: nn.Module | Iterable[Problem | tuple[Problem, int]],
    example_inputs: Any = None,
    *,
    budget: float | Budget | None = None,
    store: Store | None = None,
    backends: Sequence[str] | None = None,
    progress: Progress | None = None,
    force: bool = False,
    operands: Literal["cold", "hot"] = "cold",
    device: str | torch.device | None = None,
    latency: Literal["graph", "eager"] = "graph",
    search: str = "local",
    m: Sizes | None = None,
    batch: Sizes | None = None,
    config_key: ConfigKey | None = None,
) -> list[Decision]:
    """Find the fastest correct kernel for each Problem, store the decisions and return them.

    model_or_problems: a model (with ``example_inputs`` as ``optimize`` takes them), or Problems, alone or with counts
    (as ``record().problems`` has them). budget: seconds per problem (kept within 10%; None: 6, 3 on a GPU, more where
    single calls are slow), or a ``tuner.Budget``. store: by default the user's. backends: names to try (ATen always
    is); by default all for the device. operands: whether kernels are timed on operands from memory or from the cache;
    samples state which. force: tune problems again that the store has decisions for. device: ``"cpu"``, ``"cuda"`` (the
    current GPU) or ``"cuda:1"``; by default the devices that the model ran on, and the CPU for Problems. latency: what
    ranks kernels on a GPU: time in a CUDA graph, or ``"eager"``, launching included. search: the name of a
    search strategy (``tuning.search.register`` adds one). Ctrl-C keeps the finished
    decisions; a problem that another process is tuning is waited for. A decision that a disturbed machine left
    ``inconclusive`` is not stored; one line in the log reports how many. Afterwards the ops serve from the new
    decisions. Two processes with torch loaded may wait a minute for the next tuning, whose start they shorten by
    seconds.

    m: the M that each weight is to be served at: ``"all"`` (1 to 8192 on a GPU, 1 to 512 on a CPU), a ``range``, or
    hints as ``[64, 256, 4096]``, which are the M that are tuned by themselves where all M are served. A few M are
    tuned, and their kernels are timed at others: the store then has a plan for the weight, with the kernel for each M,
    besides the decisions. None: each Problem is tuned for its own M only.

    batch: the batches that each batched product (bmm) is to be served at, for its own M, as ``m`` has M: ``"all"`` is 1
    to 1024 on a GPU and 1 to 128 on a CPU, fewer where the operands take more than 2 GB (CPU: 128 MB), as ``m`` has
    fewer M for a batched product. The plans take B unpacked. Other Problems are tuned as ``m`` says. None: batched
    products are, too, each batch by itself.

    config_key: coarsens ``m``: all M of the range that have one key share one kernel, the one that a tuning of the M
    that represents the key found (the key itself where a run of its M has it). ``"power_of_2"``: the key is the next
    power of two; a function returns the key of an M, an int. Each key costs a tuning. ``"exact"``: each tuned M is its
    own key, and the store has no plan. None: measurements find the intervals of M that share a kernel.

    Raises TypeError, ValueError, UnsupportedError (no such device on this machine), WorkerError.
    """
    from ..store import open_store
    from .config_keys import require_keyed_range
    from .tuner import inconclusive_summary

    if operands not in ("cold", "hot"):
        raise ValueError(f"tune(): operands must be 'cold' or 'hot'; got {operands!r}")
    require_keyed_range(config_key, m)
    if latency not in ("graph", "eager"):
        raise ValueError(f"tune(): latency must be 'graph' or 'eager'; got {latency!r}")
    by_device = _by_device(model_or_problems, example_inputs, device)
    decision_store = store if store is not None else runtime.RUNTIME.store() or open_store()
    decisions: list[Decision] = []
    try:
        for target_device, problems in by_device:
            decisions += tune_on_device(
                problems, target_device, decision_store, budget=budget, backends=backends, progress=progress,
                force=force, operands=operands, latency=latency, search=search, m=m, batch=batch,
                config_key=config_key,
            )  # fmt: skip
    finally:
        runtime.RUNTIME.refresh(decision_store)
    if words := inconclusive_summary(decisions):
        log.warning("%s", words)
    return decisions


def tune_on_device(
    problems: Iterable[tuple[Problem, int]],
    device: str | torch.device,
    store: Store,
    *,
    budget: float | Budget | None = None,
    backends: Sequence[str] | None = None,
    progress: Progress | None = None,
    force: bool = False,
    operands: Literal["cold", "hot"] = "cold",
    latency: Literal["graph", "eager"] = "graph",
    search: str = "local",
    m: Sizes | None = None,
    batch: Sizes | None = None,
    config_key: ConfigKey | None = None,
    more: Callable[[], Sequence[tuple[Problem, int]]] | None = None,
    expected: Sequence[Problem] = (),
    pool: WorkerPool | None = None,
) -> list[Decision]:
    """Tune counted Problems for one device and return their decisions: the part that ``tune`` and the command line
    share.

    The arguments are those of ``tune``. more: asked for further Problems, which the same worker tunes, each time that
    all are decided, until it has none; not for a range of M. expected: Problems that ``more`` may return, whose first
    builds may begin before it does. pool: the worker to use, from ``start_workers``; None
    starts one and ends it. Decisions that the store cannot take are reported to ``progress``
    (``DecisionsUnstored``); dispatch is not refreshed.
    """
    from ..core.events import silent
    from .plan_tuner import PlanTuner
    from .tuner import Budget, Tuner

    limit = budget if isinstance(budget, Budget) else Budget(seconds=None if budget is None else float(budget))
    names = _backend_names(backends, torch.device(device).type)
    profile = devices.get(torch.device(device).type).profile

    @functools.cache
    def tuner(of_range: bool) -> Tuner:
        each = replace(limit, default_s=profile.tuned_m_s) if of_range else limit
        return Tuner(
            tuning_target(device), names, store, each, progress or silent,
            force=force, hot=operands == "hot", latency=latency, search=search,
        )  # fmt: skip

    def tune_range(members: list[tuple[Problem, int]], sizes: Sizes, pool: WorkerPool, dim: Dim) -> list[Decision]:
        plan_tuner = PlanTuner(
            tuner(True), tuning_target(device), store,
            # A budget of the user is one for a Problem: timing at other M may take as long as three of them.
            seconds=None if limit.seconds is None else 3.0 * limit.seconds,
            force=force, hot=operands == "hot", progress=progress or silent,
            config_key=config_key if dim == "m" else None, dim=dim,
        )  # fmt: skip
        return plan_tuner.tune(members, sizes, pool)[0]

    decisions: list[Decision] = []
    counted = list(problems)
    batched = [pair for pair in counted if batch is not None and pair[0].is_batched]
    others = [pair for pair in counted if pair not in batched]
    with closing(tuner(m is not None).new_pool()) if pool is None else nullcontext(pool) as pool:
        pool.expected = list(expected)
        if others and m is not None:
            decisions += tune_range(others, m, pool, "m")
        remaining: Sequence[tuple[Problem, int]] = others if m is None else ()
        while remaining:
            decisions += tuner(False).tune(remaining, pool)
            remaining = more() if more is not None else ()
        if batched and batch is not None:
            decisions += tune_range(batched, batch, pool, "batch")
    return decisions


def start_workers(device: str | torch.device, store: Store) -> WorkerPool:
    """Begin to start the processes that tuning on a device needs, and return without waiting: each imports torch, which
    takes seconds. The caller closes the pool. Raises ValueError and UnsupportedError as ``tuning_target``."""
    from .tuner import Tuner

    kind = torch.device(device).type
    pool = Tuner(tuning_target(device), _backend_names(None, kind), store).new_pool()
    pool.start()
    return pool


def tuning_target(device: str | torch.device) -> Target:
    """Return the Target of a device that this process can tune for. Raises ValueError and UnsupportedError.

    Workers run on the first device of a kind that they see. Equal ones have one Target; a device that differs has to
    be the first.
    """
    target = runtime.current_target(device)
    kind = devices.get(target.device)
    if not kind.is_host and target.key != runtime.current_target(f"{kind.type}:0").key:
        first = f"{kind.type.upper()}_VISIBLE_DEVICES"
        raise UnsupportedError(
            f"tuning runs on the first {kind.name} device, and {device} ({target.name}) is not like it: set {first} so "
            "that it comes first"
        )
    return target


def tune_missing(problem: Problem, device: torch.device) -> None:
    """Tune a problem on a dispatch miss (the on-miss hook). A tuning that fails costs a warning, and PyTorch serves.

    PyTorch also serves while another process tunes the problem: serving does not wait, and looks the problem up again
    when that is over.
    """
    store, target = runtime.RUNTIME.store(), runtime.current_target(device)
    if store is None:
        return
    try:
        from ..core.events import silent
        from .tuner import Budget, Tuner

        tuner = Tuner(tuning_target(device), _backend_names(None, device.type), store, Budget(), silent, wait=False)
        decisions = tuner.tune([(problem, 1)])
    except Exception as error:  # the caller asked for a product, not for tuning: PyTorch serves it in any case
        runtime.RUNTIME.warn_once(f"tuning on a miss failed ({error}); PyTorch's own kernels serve")
        return
    if decisions:
        runtime.RUNTIME.refresh(store)
    else:
        _refresh_when_decided(store, target, problem.key)


_poll_thread: threading.Thread | None = None


def _refresh_when_decided(store: Store, target: Target, problem_key: str) -> None:
    """Refresh dispatch once the other process has decided or given up, so that the next call looks the problem up
    again.

    Only one thread polls at a time: when its problem is done, the refresh makes every other waiting problem ask again
    too.
    """
    global _poll_thread

    def poll() -> None:
        global _poll_thread
        while True:
            time.sleep(POLL_S)
            if store.lease_remaining_s(target, problem_key) is None:
                break
        _poll_thread = None  # before refreshing: a later problem needs a new thread
        runtime.RUNTIME.refresh()

    if _poll_thread is None or not _poll_thread.is_alive():  # a forked child has no threads of its parent
        _poll_thread = threading.Thread(target=poll, name="gemmtune-look-later", daemon=True)
        _poll_thread.start()


def _by_device(
    model_or_problems: Any, example_inputs: Any, device: str | torch.device | None
) -> list[tuple[torch.device, list[tuple[Problem, int]]]]:
    """Return the Problems to tune by device: a model's Problems on the devices that they ran on, unless ``device`` is
    given."""
    tuned_device = CPU if device is None else torch.device(device)
    if not isinstance(model_or_problems, nn.Module):
        return [(tuned_device, _problems(model_or_problems, example_inputs))]
    if example_inputs is None:
        raise TypeError("tune(): a model needs example_inputs, the arguments of the calls to tune for")
    from ..ops.calls import run
    from ..ops.record import record

    with record() as recorded:
        run(model_or_problems, example_inputs)
    if device is not None:
        return [(tuned_device, recorded.problems)]
    return [(ran_on, recorded.on(ran_on)) for ran_on in recorded.devices if devices.is_served(ran_on)]


def _problems(problems: Any, example_inputs: Any) -> list[tuple[Problem, int]]:
    if example_inputs is not None:
        raise TypeError("tune(): example_inputs go with a model; Problems need none")
    if isinstance(problems, Problem):
        return [(problems, 1)]
    pairs = [(item, 1) if isinstance(item, Problem) else item for item in problems]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Problem)):
            raise TypeError(f"tune(): expected Problems or (Problem, count) pairs; got {type(pair).__name__}")
    return pairs


def _backend_names(names: Sequence[str] | None, device: str) -> tuple[str, ...]:
    from .. import backends

    if names is None:
        return backends.names(device)
    if isinstance(names, str):
        raise TypeError(f"tune(): backends must be a sequence of names; got the string {names!r}")
    for name in names:
        backends.get(name)
    return tuple(names)
