"""Checks of dispatch while the store's file, the policy, the thread count and the dispatch cache change."""

from __future__ import annotations

import contextlib
import logging
import random
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gemmtune
from gemmtune.backends.base import Kernel
from gemmtune.core.call import Call
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.errors import StoreError
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.dispatch import RUNTIME, current_target, policy
from gemmtune.ops import int_mm, linear, mixed_mm, mm
from gemmtune.store import open_store

from .checks import Outcome, check
from .isolation import call_in_process
from .store_rewriter import decisions_for, rewriting

ROWS = (1, 3, 8)
FEW_KERNELS = 8  # of the dozens of candidates in the rewritten stores
SAMPLED = 16  # one of so many calls under load is timed, together with PyTorch's own op


@dataclass(frozen=True)
class OpCase:
    """Calls of gemmtune's and of PyTorch's op with fixed operands, their exact result, and the problem."""

    name: str
    gemmtune_call: Callable[[], Tensor]
    torch_call: Callable[[], Tensor]
    expected: Tensor
    problem: Problem

    def is_exact(self, result: Tensor) -> bool:
        """Return whether a result equals the expected one, bit for bit."""
        return result.dtype == self.expected.dtype and torch.equal(result, self.expected)


def _random_integers(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return small random integers: sums of their products are exact in every order, and results equal bit for bit."""
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def _cases() -> list[OpCase]:
    """Return cases of mm, linear, packed linear, int_mm and mixed_mm with 8x8 weights (16x16 where ATen needs that)."""
    generator = torch.Generator().manual_seed(1)
    cases = []
    for m in ROWS:
        x, w, b = (_random_integers(generator, size, 8) for size in (m, 8, 8))
        ints, weights = (_random_integers(generator, size, 8, dtype=torch.int8) for size in (m, 8))
        bfloat16_rows, int8_weight = (
            _random_integers(generator, m, 16, dtype=torch.bfloat16),
            _random_integers(generator, 16, 16, dtype=torch.int8),
        )
        scale = torch.full((16,), 0.5, dtype=torch.bfloat16)
        packed = gemmtune.pack(w, layout=_native_layout(w))
        packed_int8 = gemmtune.pack(int8_weight, scale=scale)
        cases += [
            _make_case("mm", lambda x=x, b=b: gemmtune.mm(x, b), lambda x=x, b=b: torch.mm(x, b), mm.describe(x, b)),
            _make_case(
                "linear",
                lambda x=x, w=w: gemmtune.linear(x, w),
                lambda x=x, w=w: F.linear(x, w),
                linear.describe(x, w, None),
            ),
            _make_case(
                "packed linear",
                lambda x=x, p=packed: gemmtune.linear(x, p),
                lambda x=x, w=w: F.linear(x, w),
                linear.describe(x, packed, None),
            ),
            _make_case(
                "int_mm",
                lambda a=ints, w=weights: gemmtune.int_mm(a, w.t()),
                lambda a=ints, w=weights: torch._int_mm(a, w.t()),
                int_mm.describe(ints, weights.t()),
            ),
            _make_case(
                "mixed_mm",
                lambda a=bfloat16_rows, p=packed_int8: gemmtune.mixed_mm(a, p),
                lambda a=bfloat16_rows, w=int8_weight, s=scale: torch._weight_int8pack_mm(a, w, s),
                mixed_mm.describe_product(bfloat16_rows, packed_int8),
            ),
        ]
    return cases


def _native_layout(weight: Tensor) -> str | None:
    """Return the native default layout of a float weight: stored decisions then serve it packed."""
    return gemmtune.pack(weight).layout


def _make_case(name: str, gemmtune_call: Callable[[], Tensor], torch_call: Callable[[], Tensor], call: Call) -> OpCase:
    """Return a case whose expected result is that of PyTorch's op, checked against a product in float64."""
    problem = call.problem
    expected = torch_call()
    raw = gemmtune.unpack(call.packed) if call.packed is not None else call.b
    if isinstance(raw, Tensor):
        b = raw.t() if call.packed is not None else raw
        assert torch.equal(expected.double(), call.a.double() @ b.double()), name
    return OpCase(name, gemmtune_call, torch_call, expected, problem)


Times = dict[str, tuple[list[int], list[int]]]  # nanoseconds of (gemmtune's calls, PyTorch's calls) by op


@dataclass
class Tally:
    """Counts of calls and faults of some threads, texts of some exceptions, and times."""

    calls: int = 0
    wrong: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    times: Times = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add the counts of another thread. Threads add one at a time: see ``_MERGING``."""
        self.calls, self.wrong, self.failed = (
            self.calls + other.calls, self.wrong + other.wrong, self.failed + other.failed,
        )  # fmt: skip
        self.errors += other.errors
        for name, (gemmtune_ns, torch_ns) in other.times.items():
            times = self.times.setdefault(name, ([], []))
            times[0].extend(gemmtune_ns)
            times[1].extend(torch_ns)


_MERGING = threading.Lock()


def _call_repeatedly(cases: Sequence[OpCase], count: int, seed: int, tally: Tally) -> None:
    """Run ``count`` calls in this thread, compare each result bit for bit, and add the counts to ``tally``."""
    own_tally = Tally(count, times={case.name: ([], []) for case in cases})
    order = random.Random(seed).sample(list(cases), len(cases))
    for index in range(count):
        case = order[index % len(order)]
        try:
            result = case.gemmtune_call() if index % SAMPLED else _timed(case, own_tally.times)
            own_tally.wrong += not case.is_exact(result)
        except Exception as error:  # any exception is a finding
            own_tally.failed += 1
            if len(own_tally.errors) < 20:
                own_tally.errors.append(f"{case.name}: {type(error).__name__}: {error}"[:500])
    with _MERGING:
        tally.add(own_tally)


def _timed(case: OpCase, times: Times) -> Tensor:
    """Time one call of gemmtune and one of PyTorch, and return gemmtune's result."""
    start = time.perf_counter_ns()
    result = case.gemmtune_call()
    middle = time.perf_counter_ns()
    case.torch_call()
    end = time.perf_counter_ns()
    gemmtune_ns, torch_ns = times[case.name]
    gemmtune_ns.append(middle - start)
    torch_ns.append(end - middle)
    return result


def _disturb(cases: Sequence[OpCase], end: threading.Event, tally: Tally) -> None:
    """Refresh, change the policy or the thread count at random moments, and call an op after each change."""
    rng = random.Random(3)
    changes: list[Callable[[], object]] = [
        gemmtune.refresh, gemmtune.refresh, gemmtune.refresh,
        lambda: policy("off"), lambda: policy("cached"), lambda: policy("cached"), lambda: policy("on-miss"),
        lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(2),
    ]  # fmt: skip
    while not end.wait(rng.uniform(0, 0.02)):
        rng.choice(changes)()
        _call_repeatedly(cases, 1, rng.randrange(1 << 30), tally)


def _serve_under_load(threads: int, calls: int, connection: Connection) -> None:
    """Serve while the store is rewritten, and send the counts. Runs in a separate process, which may crash."""
    logging.getLogger("gemmtune").setLevel(logging.CRITICAL)  # each of thousands of damaged records causes a warning
    with tempfile.TemporaryDirectory(prefix="gemmtune-serving-") as folder, torch.inference_mode():
        path = Path(folder) / "store.db"
        cases, targets, decisions = _prepare()
        RUNTIME.refresh(open_store(path))
        RUNTIME.miss_hook = lambda problem, _: _store_decision(path, problem, targets[0], decisions[0])
        loaded = _record_loaded_candidates()
        start = time.perf_counter()
        with rewriting(path, targets, decisions):
            tally = _call_in_threads(cases, threads, calls, loaded)
        seconds = time.perf_counter() - start
    figures = {name: _figures(*times) for name, times in tally.times.items()}
    tally.times = {}
    connection.send((tally, figures, seconds, RUNTIME.generation, len(loaded)))


def _prepare() -> tuple[list[OpCase], list[Target], list[list[Decision]]]:
    """Return the cases, and the target and decisions of each thread count."""
    targets, decisions = [], []
    cases = _cases()
    for count in (2, 1):  # the threads start with the last count
        torch.set_num_threads(count)
        targets.insert(0, current_target())
        decisions.insert(0, decisions_for((case.problem for case in cases), targets[0]))
    return cases, targets, decisions


def _record_loaded_candidates() -> set[str]:
    """Return a set to which the id of every candidate is added that dispatch loads from now on."""
    loaded: set[str] = set()
    load = RUNTIME._loader._load_now

    def recording_load(candidate: Candidate, *args: Any) -> Kernel | None:
        kernel = load(candidate, *args)
        if kernel is not None:
            loaded.add(candidate.id)
        return kernel

    RUNTIME._loader._load_now = recording_load  # type: ignore[method-assign]
    return loaded


def _store_decision(path: Path, problem: Problem, target: Target, decisions: Sequence[Decision]) -> None:
    """Store a decision for a missing problem at once, as the hook of the policy on-miss."""
    store = open_store(path)
    with contextlib.suppress(StoreError):
        for decision in decisions:
            if decision.problem_key == problem.key:
                store.put(target, decision)
                break
    store.close()
    RUNTIME.refresh()


def _call_in_threads(cases: Sequence[OpCase], threads: int, calls: int, loaded: set[str]) -> Tally:
    """Call ops in threads, and repeat for a minute at most until dispatch has loaded more than ``FEW_KERNELS``."""
    tally, end = Tally(), threading.Event()
    disturber = threading.Thread(target=_disturb, args=(cases, end, tally))
    disturber.start()
    deadline = time.monotonic() + 60.0
    while True:
        workers = [
            threading.Thread(target=_call_repeatedly, args=(cases, calls, seed, tally)) for seed in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if len(loaded) > FEW_KERNELS or time.monotonic() > deadline:
            break
    end.set()
    disturber.join()
    return tally


def _figures(gemmtune_ns: Sequence[int], torch_ns: Sequence[int]) -> dict[str, float]:
    """Return median and 99th percentile of gemmtune's ("ours") and PyTorch's ("plain") calls, in microseconds."""
    percentiles = {}
    for name, times in (("ours", gemmtune_ns), ("plain", torch_ns)):
        ordered = sorted(times)
        for percent in (50, 99):
            percentiles[f"{name}_p{percent}"] = ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] / 1e3
    return percentiles


@check(
    "32 threads x 10^5 dispatches (mm, linear, packed linear, int_mm, mixed_mm) while another process rewrites, "
    "damages and deletes the store, and a thread refreshes and changes policy and thread count",
    "0 wrong results, 0 exceptions",
)
def serving_under_rewrites(full: bool) -> Outcome:
    threads, calls = (32, 100_000) if full else (8, 3000)
    reply = call_in_process(_serve_under_load, threads, calls, limit_s=1500 if full else 120)
    if reply is None:
        return Outcome("the serving process died or hung", False)
    tally, figures, seconds, generations, kernels = reply
    return Outcome(
        f"{tally.wrong} wrong, {tally.failed} exceptions in {tally.calls:,} dispatches; {kernels} different kernels "
        f"served, the table was emptied {generations} times",
        # Few kernels would mean that the store's changes never reached dispatch.
        tally.wrong == tally.failed == 0 and tally.calls >= threads * calls and kernels > FEW_KERNELS,
        {
            "wrong": tally.wrong, "failed": tally.failed, "errors": tally.errors[:20], "calls": tally.calls,
            "kernels": kernels, "emptied": generations, "seconds": seconds, "under_load_us": figures,
        },
    )  # fmt: skip


def _time_without_load(calls: int, connection: Connection) -> None:
    """Time every op on 8 rows in one thread, with tuned decisions in an unchanged store, and send the percentiles."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-serving-") as folder, torch.inference_mode():
        torch.set_num_threads(1)
        chosen = [case for case in _cases() if case.problem.m == ROWS[-1]]
        gemmtune.tune([case.problem for case in chosen], budget=0.5, store=open_store(Path(folder) / "store.db"))
        times: Times = {case.name: ([], []) for case in chosen}
        for case in chosen:  # one op after the other, in a hot loop as a model's layer
            for index in range(-200, calls):
                result = _timed(case, times)
                if index < 0:
                    times[case.name] = ([], [])
                assert case.is_exact(result)
    connection.send({name: _figures(*pair) for name, pair in times.items()})


@check(
    "what dispatch adds to PyTorch's own op on 8 rows (8x8; mixed_mm 16x16), timed call by call, one thread",
    "p50 <= 4 us more; p50 and p99 published",
    timed=True,
)
def dispatch_overhead(full: bool) -> Outcome:
    figures = call_in_process(_time_without_load, 50_000 if full else 500, limit_s=300)
    if figures is None:
        return Outcome("the serving process died or hung", False)
    texts = [
        f"{name} {row['ours_p50'] - row['plain_p50']:+.1f}/{row['ours_p99'] - row['plain_p99']:+.1f} us"
        for name, row in figures.items()
    ]
    worst = max(row["ours_p50"] - row["plain_p50"] for row in figures.values())
    return Outcome(f"p50/p99 over PyTorch's: {', '.join(texts)}", worst <= 4.0, figures)
