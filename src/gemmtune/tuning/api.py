"""``gemmtune.tune``, and what the on-miss policy does: here serving meets the tuner, which is imported only to tune."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..core.errors import UnsupportedError
from ..core.problem import Problem
from ..dispatch import runtime
from ..dispatch.targets import CPU

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.events import Progress
    from ..core.target import Target
    from ..store.base import Store
    from .tuner import Budget

log = logging.getLogger("gemmtune")

LOOK_S = 1.0  # how often to look whether another process is done tuning a problem that is to be served here


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
) -> list[Decision]:
    """Find the fastest correct kernel for each Problem and keep the decisions in the store.

    model_or_problems: a model (with ``example_inputs`` as ``optimize`` takes them), or Problems, alone or with counts
    (as ``record().problems`` has them). budget: seconds per problem (kept within 10%; None: 6, 3 on a GPU, more where
    single calls are slow), or a ``tuner.Budget``. store: default the user's. backends: names to try (ATen always is);
    default all for the device. operands: whether kernels are timed on operands from memory or from the cache; samples
    say which. force: tune again what the store already knows. device: ``"cpu"``, ``"cuda"``
    (the current GPU) or ``"cuda:1"``; by default where the model ran, and the CPU for Problems. latency: what ranks on
    a GPU: time in a CUDA graph, or ``"eager"``, launching included. Ctrl-C keeps what is finished; a problem that
    another process is tuning is waited for. What a disturbed machine left ``inconclusive`` is not stored; one line
    says so. From then on the ops serve from the new decisions. Raises TypeError, ValueError, UnsupportedError (no such
    device here), WorkerError.
    """
    from ..core.events import silent
    from ..store import open_store
    from .tuner import Budget, Tuner, busy_words

    if operands not in ("cold", "hot"):
        raise ValueError(f"tune(): operands must be 'cold' or 'hot'; got {operands!r}")
    if latency not in ("graph", "eager"):
        raise ValueError(f"tune(): latency must be 'graph' or 'eager'; got {latency!r}")
    asked = _by_device(model_or_problems, example_inputs, device)
    limit = budget if isinstance(budget, Budget) else Budget(seconds=None if budget is None else float(budget))
    keeper = store if store is not None else runtime.RUNTIME.store() or open_store()
    decisions: list[Decision] = []
    try:
        for place, problems in asked:
            tuner = Tuner(
                tuning_target(place), _backend_names(backends, place.type), keeper, limit, progress or silent,
                force=force, hot=operands == "hot", latency=latency,
            )  # fmt: skip
            decisions += tuner.tune(problems)
    finally:
        runtime.RUNTIME.refresh(keeper)
    if words := busy_words(decisions):
        log.warning("%s", words)
    return decisions


def tuning_target(device: str | torch.device) -> Target:
    """The Target of a device that can be tuned for from here. Raises ValueError and UnsupportedError.

    Workers run on the first GPU they see. Equal GPUs have one Target; for one that differs it has to be the first.
    """
    target = runtime.current_target(device)
    if target.device == "cuda" and target.key != runtime.current_target("cuda:0").key:
        raise UnsupportedError(
            f"tuning runs on the first GPU, and {device} ({target.name}) is not like it: set CUDA_VISIBLE_DEVICES so "
            "that it comes first"
        )
    return target


def tune_missing(problem: Problem, device: torch.device) -> None:
    """The on-miss hook: a tuning that fails costs a warning, and PyTorch serves.

    So it does while another process tunes the problem: serving does not wait, and looks again when that is over.
    """
    store, target = runtime.RUNTIME.store(), runtime.current_target(device)
    if store is None:
        return
    try:
        from ..core.events import silent
        from .tuner import Budget, Tuner

        tuner = Tuner(tuning_target(device), _backend_names(None, device.type), store, Budget(), silent, wait=False)
        decided = tuner.tune([(problem, 1)])
    except Exception as error:  # the caller asked for a product, not for tuning: it is served in any case
        runtime.RUNTIME.warn_once(f"tuning on a miss failed ({error}); PyTorch's own kernels serve")
        return
    if decided:
        runtime.RUNTIME.refresh(store)
    else:
        _look_later(store, target, problem.key)


_looker: threading.Thread | None = None


def _look_later(store: Store, target: Target, problem_key: str) -> None:
    """Once the other process has decided or given up, forget what is prepared, so that the next call looks again.

    One thread at a time: when its problem is done, every other one that waits is asked for again too.
    """
    global _looker

    def look() -> None:
        global _looker
        while True:
            time.sleep(LOOK_S)
            if store.leased(target, problem_key) is None:
                break
        _looker = None  # before refreshing: who comes later needs a thread of its own
        runtime.RUNTIME.refresh()

    if _looker is None or not _looker.is_alive():  # a fork leaves threads behind
        _looker = threading.Thread(target=look, name="gemmtune-look-later", daemon=True)
        _looker.start()


def _by_device(
    given: Any, example_inputs: Any, device: str | torch.device | None
) -> list[tuple[torch.device, list[tuple[Problem, int]]]]:
    """What to tune, and where: a model's Problems where they ran, unless a device is named."""
    place = CPU if device is None else torch.device(device)
    if not isinstance(given, nn.Module):
        return [(place, _problems(given, example_inputs))]
    if example_inputs is None:
        raise TypeError("tune(): a model needs example_inputs, the arguments of the calls to tune for")
    from ..ops.calls import run
    from ..ops.record import record

    with record() as recorded:
        run(given, example_inputs)
    if device is not None:
        return [(place, recorded.problems)]
    return [(found, recorded.on(found)) for found in recorded.devices if found.type in ("cpu", "cuda")]


def _problems(given: Any, example_inputs: Any) -> list[tuple[Problem, int]]:
    if example_inputs is not None:
        raise TypeError("tune(): example_inputs go with a model; Problems need none")
    if isinstance(given, Problem):
        return [(given, 1)]
    pairs = [(item, 1) if isinstance(item, Problem) else item for item in given]
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Problem)):
            raise TypeError(f"tune(): expected Problems or (Problem, count) pairs; got {type(pair).__name__}")
    return pairs


def _backend_names(asked: Sequence[str] | None, device: str) -> tuple[str, ...]:
    from .. import backends

    if asked is None:
        return backends.names(device)
    if isinstance(asked, str):
        raise TypeError(f"tune(): backends must be a sequence of names; got the string {asked!r}")
    for name in asked:
        backends.get(name)
    return tuple(asked)
