"""The memory of dispatch does not grow with the number of different M that were served."""

from __future__ import annotations

import gc
import linecache
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Verdict
from gemmtune.core.tuned_plan import PlanInterval, PlanKernel, TunedPlan
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import RUNTIME, build_plan, cache, current_target
from gemmtune.dispatch.cache import DISPATCH_CACHE, EntriesByStrides
from gemmtune.store import MemoryStore
from helpers.serving import ToyKernel, register, toy

LAST, SERVED = 100_000, 60_000  # the largest M that is called; the plan's intervals end at SERVED
PROBLEM = linear_problem(8, 1, 1, "float32", constant=False)
FIRST, SECOND = toy(tag=1), toy(tag=2)
WEIGHT = torch.tensor([[3.0]])


def plan_of(kernels: Sequence[Candidate], last: int, steps: int) -> TunedPlan:
    """Return a plan of ``steps`` intervals up to ``last``, served by ``kernels`` in turn."""
    rows = tuple(
        PlanKernel(k.to_dict(), k.id, 8, times={1: 1e-6, last: 1e-5}, verified=(1,), verdict=Verdict("within_bound"))
        for k in kernels
    )
    ends = [last * (index + 1) // steps for index in range(steps)]
    spans = zip([1, *(end + 1 for end in ends)], ends, strict=False)
    intervals = tuple(
        PlanInterval(first, end, kernels[index % len(kernels)].id) for index, (first, end) in enumerate(spans)
    )
    return TunedPlan(PROBLEM.plan_key, PROBLEM.to_dict(), current_target().key, 1, last, {"": intervals}, rows)


@pytest.fixture
def runs(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Store a plan of toy kernels for PROBLEM, and return the number of runs of each kernel by its id."""
    counts = dict.fromkeys((FIRST.id, SECOND.id), 0)

    def run(kernel: ToyKernel, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        counts[kernel.candidate.id] += 1
        torch.mul(a, b, out=out)  # the product of a column and a single number

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of few rows, waking other threads takes longer than the product
    register()
    monkeypatch.setattr(ToyKernel, "run", run)
    own_store.put_plan(current_target(), plan_of((FIRST, SECOND), SERVED, 40))
    RUNTIME.refresh(own_store)
    yield counts
    torch.set_num_threads(threads)


def entry_count() -> int:
    """Return the number of prepared functions in the dispatch cache."""
    return sum(
        sum(map(len, entries.by_strides.values())) if isinstance(entries, EntriesByStrides) else len(entries)
        for entries in DISPATCH_CACHE.values()
    )


def test_a_hundred_thousand_different_m_leave_a_bounded_cache(runs: dict[str, int]) -> None:
    rows = torch.arange(1.0, LAST + 1.0).view(LAST, 1)
    expected, process = 3.0 * rows, psutil.Process()
    objects = lines = resident = 0
    for m in range(1, LAST + 1):
        result = gemmtune.linear(rows[:m], WEIGHT)
        assert result.shape == (m, 1)
        if m % 997 == 0:
            assert torch.equal(result, expected[:m])
        if m == 2 * cache.MAX_KEYS:  # the cache has been full for a while
            gc.collect()
            objects, lines, resident = len(gc.get_objects()), len(linecache.cache), process.memory_info().rss
    assert min(runs.values()) > 0
    assert sum(runs.values()) == SERVED
    assert len(DISPATCH_CACHE) == entry_count() == cache.MAX_KEYS
    gc.collect()
    assert len(gc.get_objects()) < objects + 1000
    assert len(linecache.cache) == lines
    # An entry takes some 3 KB: if all 83,000 later ones had stayed, there would be 240 MB more.
    assert process.memory_info().rss < resident + (32 << 20)
    assert torch.equal(gemmtune.linear(rows[:5], WEIGHT), expected[:5])  # prepared anew: its entry was dropped
    assert sum(runs.values()) == SERVED + 1
    assert len(DISPATCH_CACHE) == cache.MAX_KEYS


def test_second_call_of_an_m_is_served_from_the_cache(runs: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(1.0, LAST + 1.0).view(LAST, 1)
    sizes = (1, 8, 1500, 1501, SERVED, SERVED + 1, LAST)  # served by both kernels, and by the plain op
    for m in sizes:
        gemmtune.linear(rows[:m], WEIGHT)
    served = dict(runs)
    assert min(served.values()) > 0
    assert sum(served.values()) == 5
    monkeypatch.setattr(RUNTIME, "cache_entry", lambda *_, **__: pytest.fail("not in the cache"))
    for m in sizes:
        assert torch.equal(gemmtune.linear(rows[:m], WEIGHT), 3.0 * rows[:m])
    assert runs == {name: 2 * count for name, count in served.items()}


@pytest.mark.parametrize("steps", [1, 64])
def test_choosing_by_m_allocates_nothing_that_stays(steps: int) -> None:
    plan = build_plan([], None, plan_of((FIRST, SECOND), SERVED, steps))
    assert plan is not None
    sizes = random.Random(steps).sample(range(1, LAST + 1), 20_000)
    plan.pick(1)
    plan.pick(LAST)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        picked = {id(plan.pick(m)) for m in sizes if m <= SERVED}
        count = sum(plan.pick(m).candidate is None for m in sizes)
        found = len(picked)
        del picked
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == steps  # the plan's own entries, none made for a call
    assert count == sum(m > SERVED for m in sizes)
    assert after - before < 2000
