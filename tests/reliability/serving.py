"""Serving while everything it depends on changes: the store's file, the policy, the thread count, the table."""

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
from .isolation import apart
from .store_rewriter import decisions_for, rewriting

ROWS = (1, 3, 8)
FEW_KERNELS = 8  # of the dozens that the rewritten stores name
SAMPLED = 16  # in the storm one call in so many is timed, beside PyTorch's own


@dataclass(frozen=True)
class Served:
    """One op on fixed operands: ours, PyTorch's own for the same product, and the exact result."""

    name: str
    ours: Callable[[], Tensor]
    plain: Callable[[], Tensor]
    expected: Tensor
    problem: Problem

    def right(self, result: Tensor) -> bool:
        return result.dtype == self.expected.dtype and torch.equal(result, self.expected)


def _whole(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers: every sum of products is exact in any order, so that results compare bit for bit."""
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def _cases() -> list[Served]:
    """mm, linear, packed linear, int_mm and mixed_mm on 8x8 weights (16x16 where ATen's own op needs that)."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for m in ROWS:
        x, w, b = (_whole(generator, size, 8) for size in (m, 8, 8))
        ints, weights = (_whole(generator, size, 8, dtype=torch.int8) for size in (m, 8))
        wide, narrow = _whole(generator, m, 16, dtype=torch.bfloat16), _whole(generator, 16, 16, dtype=torch.int8)
        scale = torch.full((16,), 0.5, dtype=torch.bfloat16)
        packed = gemmtune.pack(w, layout=_layout(w))
        held = gemmtune.pack(narrow, scale=scale)
        made += [
            _served("mm", lambda x=x, b=b: gemmtune.mm(x, b), lambda x=x, b=b: torch.mm(x, b), mm.describe(x, b)),
            _served(
                "linear",
                lambda x=x, w=w: gemmtune.linear(x, w),
                lambda x=x, w=w: F.linear(x, w),
                linear.describe(x, w, None),
            ),
            _served(
                "packed linear",
                lambda x=x, p=packed: gemmtune.linear(x, p),
                lambda x=x, w=w: F.linear(x, w),
                linear.describe(x, packed, None),
            ),
            _served(
                "int_mm",
                lambda a=ints, w=weights: gemmtune.int_mm(a, w.t()),
                lambda a=ints, w=weights: torch._int_mm(a, w.t()),
                int_mm.describe(ints, weights.t()),
            ),
            _served(
                "mixed_mm",
                lambda a=wide, p=held: gemmtune.mixed_mm(a, p),
                lambda a=wide, w=narrow, s=scale: torch._weight_int8pack_mm(a, w, s),
                mixed_mm.describe_product(wide, held),
            ),
        ]
    return made


def _layout(weight: Tensor) -> str | None:
    """The native default's layout of a float weight, so that Decisions exist which serve it packed."""
    return gemmtune.pack(weight).layout


def _served(name: str, ours: Callable[[], Tensor], plain: Callable[[], Tensor], call: Call) -> Served:
    problem = call.problem
    expected = plain()
    raw = gemmtune.unpack(call.packed) if call.packed is not None else call.b
    if isinstance(raw, Tensor):  # PyTorch's own op is checked against a product in float64
        b = raw.t() if call.packed is not None else raw
        assert torch.equal(expected.double(), call.a.double() @ b.double()), name
    return Served(name, ours, plain, expected, problem)


Times = dict[str, tuple[list[int], list[int]]]  # nanoseconds of (ours, plain) by op


@dataclass
class Tally:
    """What threads found. errors: some of them, in words."""

    calls: int = 0
    wrong: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    times: Times = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Take in what another thread found (one at a time: see ``_MERGING``)."""
        self.calls, self.wrong, self.failed = (
            self.calls + other.calls, self.wrong + other.wrong, self.failed + other.failed,
        )  # fmt: skip
        self.errors += other.errors
        for name, (ours, plain) in other.times.items():
            held = self.times.setdefault(name, ([], []))
            held[0].extend(ours)
            held[1].extend(plain)


_MERGING = threading.Lock()


def _call_often(cases: Sequence[Served], count: int, seed: int, tally: Tally) -> None:
    """One thread's dispatches, each compared bit for bit."""
    mine = Tally(count, times={case.name: ([], []) for case in cases})
    order = random.Random(seed).sample(list(cases), len(cases))
    for index in range(count):
        case = order[index % len(order)]
        try:
            result = case.ours() if index % SAMPLED else _timed(case, mine.times)
            mine.wrong += not case.right(result)
        except Exception as error:  # the finding itself
            mine.failed += 1
            if len(mine.errors) < 20:
                mine.errors.append(f"{case.name}: {type(error).__name__}: {error}"[:500])
    with _MERGING:
        tally.add(mine)


def _timed(case: Served, times: Times) -> Tensor:
    start = time.perf_counter_ns()
    result = case.ours()
    middle = time.perf_counter_ns()
    case.plain()
    end = time.perf_counter_ns()
    ours, plain = times[case.name]
    ours.append(middle - start)
    plain.append(end - middle)
    return result


def _disturb(cases: Sequence[Served], end: threading.Event, tally: Tally) -> None:
    """Refresh, change the policy and the thread count, and dispatch under each of them."""
    rng = random.Random(3)
    changes: list[Callable[[], object]] = [
        gemmtune.refresh, gemmtune.refresh, gemmtune.refresh,
        lambda: policy("off"), lambda: policy("cached"), lambda: policy("cached"), lambda: policy("on-miss"),
        lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(2),
    ]  # fmt: skip
    while not end.wait(rng.uniform(0, 0.02)):
        rng.choice(changes)()
        _call_often(cases, 1, rng.randrange(1 << 30), tally)


def _storm(threads: int, calls: int, replies: Connection) -> None:
    """Runs in a process of its own, so that a crash is a finding and nobody's policy is changed."""
    logging.getLogger("gemmtune").setLevel(logging.CRITICAL)  # thousands of damaged records, once each
    with tempfile.TemporaryDirectory(prefix="gemmtune-serving-") as folder, torch.inference_mode():
        path = Path(folder) / "store.db"
        cases, targets, decisions = _prepare()
        RUNTIME.refresh(open_store(path))
        RUNTIME.miss_hook = lambda problem, _: _put_one(path, problem, targets[0], decisions[0])
        loaded = _watch_loading()
        start = time.perf_counter()
        with rewriting(path, targets, decisions):
            tally = _crowd(cases, threads, calls, loaded)
        seconds = time.perf_counter() - start
    figures = {name: _figures(*times) for name, times in tally.times.items()}
    tally.times = {}
    replies.send((tally, figures, seconds, RUNTIME.generation, len(loaded)))


def _prepare() -> tuple[list[Served], list[Target], list[list[Decision]]]:
    """Cases, and the Decisions for either thread count."""
    targets, decisions = [], []
    cases = _cases()
    for count in (2, 1):  # the crowd's threads start with the last
        torch.set_num_threads(count)
        targets.insert(0, current_target())
        decisions.insert(0, decisions_for((case.problem for case in cases), targets[0]))
    return cases, targets, decisions


def _watch_loading() -> set[str]:
    """The ids of the candidates that dispatch loads from now on: what the store's changes led to."""
    loaded: set[str] = set()
    load = RUNTIME._loader._load_now

    def noted(candidate: Candidate, problem: Problem, device: torch.device, foreign: bool) -> Kernel | None:
        kernel = load(candidate, problem, device, foreign)
        if kernel is not None:
            loaded.add(candidate.id)
        return kernel

    RUNTIME._loader._load_now = noted  # type: ignore[method-assign]
    return loaded


def _put_one(path: Path, problem: Problem, target: Target, decisions: Sequence[Decision]) -> None:
    """The on-miss hook: what was missing is decided at once."""
    store = open_store(path)
    with contextlib.suppress(StoreError):
        for decision in decisions:
            if decision.problem_key == problem.key:
                store.put(target, decision)
                break
    store.close()
    RUNTIME.refresh()


def _crowd(cases: Sequence[Served], threads: int, calls: int, loaded: set[str]) -> Tally:
    """The dispatches; once more, for a minute at most, while the store's changes have led to few kernels yet."""
    tally, end = Tally(), threading.Event()
    disturber = threading.Thread(target=_disturb, args=(cases, end, tally))
    disturber.start()
    deadline = time.monotonic() + 60.0
    while True:
        crowd = [threading.Thread(target=_call_often, args=(cases, calls, seed, tally)) for seed in range(threads)]
        for one in crowd:
            one.start()
        for one in crowd:
            one.join()
        if len(loaded) > FEW_KERNELS or time.monotonic() > deadline:
            break
    end.set()
    disturber.join()
    return tally


def _figures(ours: Sequence[int], plain: Sequence[int]) -> dict[str, float]:
    """p50 and p99 in microseconds, ours and PyTorch's own."""
    found = {}
    for name, times in (("ours", ours), ("plain", plain)):
        ordered = sorted(times)
        for percent in (50, 99):
            found[f"{name}_p{percent}"] = ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] / 1e3
    return found


@check(
    "32 threads x 10^5 dispatches (mm, linear, packed linear, int_mm, mixed_mm) while another process rewrites, "
    "damages and deletes the store, and a thread refreshes and changes policy and thread count",
    "0 wrong results, 0 exceptions",
)
def serving_under_rewrites(full: bool) -> Outcome:
    threads, calls = (32, 100_000) if full else (8, 3000)
    reply = apart(_storm, threads, calls, limit_s=1500 if full else 120)
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


def _quiet(calls: int, replies: Connection) -> None:
    """One thread, a store that lies still with tuned decisions: figures of every op on 8 rows."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-serving-") as folder, torch.inference_mode():
        torch.set_num_threads(1)
        chosen = [case for case in _cases() if case.problem.m == ROWS[-1]]
        gemmtune.tune([case.problem for case in chosen], budget=0.5, store=open_store(Path(folder) / "store.db"))
        times: Times = {case.name: ([], []) for case in chosen}
        for case in chosen:  # one op after the other: a hot loop, as a model's layer is one
            for index in range(-200, calls):
                result = _timed(case, times)
                if index < 0:
                    times[case.name] = ([], [])
                assert case.right(result)
    replies.send({name: _figures(*pair) for name, pair in times.items()})


@check(
    "what dispatch adds to PyTorch's own op on 8 rows (8x8; mixed_mm 16x16), timed call by call, one thread",
    "p50 <= 4 us more; p50 and p99 published",
    timed=True,
)
def dispatch_overhead(full: bool) -> Outcome:
    figures = apart(_quiet, 50_000 if full else 500, limit_s=300)
    if figures is None:
        return Outcome("the serving process died or hung", False)
    words = [
        f"{name} {row['ours_p50'] - row['plain_p50']:+.1f}/{row['ours_p99'] - row['plain_p99']:+.1f} us"
        for name, row in figures.items()
    ]
    worst = max(row["ours_p50"] - row["plain_p50"] for row in figures.values())
    return Outcome(f"p50/p99 over PyTorch's: {', '.join(words)}", worst <= 4.0, figures)
