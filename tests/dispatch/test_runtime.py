"""What serves a call: by M, by thread count, by policy; with stores that misbehave."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import gemmtune
from gemmtune import backends
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision
from gemmtune.core.errors import PackedWeightError
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import RUNTIME, current_target, policy
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.store import MemoryStore
from helpers.forking import passes_in_forked_child
from helpers.serving import TOY_RUNS, decide, evidence, register, store_decision, toy

W = torch.randn(5, 4)


def problem(m: int, constant: bool = False) -> Problem:
    return linear_problem(m, 5, 4, "float32", constant=constant)


@pytest.fixture(autouse=True)
def toys() -> None:
    register()
    TOY_RUNS.clear()


def served(m: int) -> tuple[str, int, int] | None:
    """Which kernel ran ``linear`` on m rows (None: plain PyTorch), checking the result."""
    TOY_RUNS.clear()
    x = torch.randn(m, 4)
    torch.testing.assert_close(gemmtune.linear(x, W), torch.nn.functional.linear(x, W))
    return TOY_RUNS[-1] if TOY_RUNS else None


def test_m_picks_the_entry(own_store: MemoryStore) -> None:
    for m, tag in ((1, 1), (16, 2), (64, 3)):
        store_decision(own_store, problem(m), evidence(toy("", tag), 0.1), chosen=toy("", tag))
    picked = [served(m) for m in (1, 3, 8, 30, 40, 1000)]
    assert [row and (row[0], row[1]) for row in picked] == [
        (toy("", tag).id, m) for m, tag in ((1, 1), (1, 1), (16, 2), (16, 2), (64, 3), (64, 3))
    ]
    assert [row and row[2] for row in picked] == [1, 3, 8, 30, 40, 1000]


def test_ties_and_none_valid_are_plain(own_store: MemoryStore) -> None:
    store_decision(own_store, problem(1))
    assert served(1) is None
    empty = Decision(problem(2).key, problem(2).to_dict(), current_target().key, "none_valid", None, ())
    own_store.put(current_target(), empty)
    RUNTIME.refresh()
    assert served(2) is None


def test_the_hot_path_does_not_ask_twice(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store_decision(own_store, problem(3), evidence(toy(), 0.1), chosen=toy())
    assert served(3)
    monkeypatch.setattr(RUNTIME, "kernel_for", lambda *_: pytest.fail("looked up again"))
    assert served(3)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_another_thread_count_is_another_target(own_store: MemoryStore) -> None:
    torch.set_num_threads(1)
    store_decision(own_store, problem(3), evidence(toy("", 1), 0.1), chosen=toy("", 1))
    torch.set_num_threads(2)
    store_decision(own_store, problem(3), evidence(toy("", 2), 0.1), chosen=toy("", 2))
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        assert served(3) == (toy("", count).id, 3, 3)
    torch.set_num_threads(3)
    assert served(3) is None


def test_policy_off_is_plain_and_a_scope(own_store: MemoryStore) -> None:
    store_decision(own_store, problem(3), evidence(toy(), 0.1), chosen=toy())
    with policy("off"):
        assert served(3) is None
    assert served(3)
    with pytest.raises(ValueError, match="one of cached, on-miss, off; got 'never'"):
        policy("never")  # type: ignore[arg-type]


def test_on_miss_asks_once_per_far_m(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def tune(missing: Problem, device: torch.device) -> None:
        asked.append(missing.m)
        own_store.put(current_target(), decide(missing, evidence(toy("", missing.m), 0.1), chosen=toy("", missing.m)))

    monkeypatch.setattr(RUNTIME, "miss_hook", tune)
    assert served(1) is None
    with policy("on-miss"):
        rows = [served(m) for m in (1, 4, 5, 19, 1)]
    assert asked == [1, 5]
    assert [row and row[1] for row in rows] == [1, 1, 5, 5, 1]


@pytest.mark.parametrize(
    "forget", [RUNTIME.refresh, lambda: RUNTIME.set_policy("cached"), lambda: RUNTIME.observe(None)]
)
def test_what_was_prepared_before_a_refresh_is_not_remembered(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> None:
    """Another thread's refresh between the choice of a kernel and its being remembered, made to happen every time."""
    x, packed = torch.randn(3, 4), gemmtune.pack(W, layout="toy:plain")
    ints = torch.ones(3, 4, dtype=torch.int8)
    weight_only = gemmtune.pack(ints[:, :2].t().contiguous().t(), scale=torch.ones(3), layout="toy:plain")
    calls = (
        lambda: gemmtune.linear(x, W),
        lambda: gemmtune.mm(x, packed),
        lambda: gemmtune.int_mm(ints, ints.t()),
        lambda: gemmtune.mixed_mm(x[:, :2], weight_only),
    )
    choose = RUNTIME.kernel_for

    def interrupted(*args: object) -> object:
        kernel = choose(*args)  # type: ignore[arg-type]
        another = threading.Thread(target=forget)
        another.start()
        another.join()
        return kernel

    monkeypatch.setattr(RUNTIME, "kernel_for", interrupted)
    for call in calls:
        call()
        assert not DISPATCH_CACHE
    monkeypatch.setattr(RUNTIME, "kernel_for", choose)
    for count, call in enumerate(calls):
        call()
        assert len(DISPATCH_CACHE) == count + 1


def test_other_threads_are_served_while_a_miss_is_tuned(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[int] = []

    def tune(missing: Problem, device: torch.device) -> None:
        served_meanwhile: list[bool] = []
        x = torch.randn(100, 4)
        other = threading.Thread(
            target=lambda: served_meanwhile.append(torch.equal(gemmtune.linear(x, W), torch.nn.functional.linear(x, W)))
        )
        other.start()
        other.join(30)
        assert served_meanwhile == [True]  # nobody waits, and nobody else tunes
        tuned.append(missing.m)

    monkeypatch.setattr(RUNTIME, "miss_hook", tune)
    with policy("on-miss"):
        for m in (1, 1, 100, 100):
            served(m)
    assert tuned == [1, 100]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_locks_of_its_own() -> None:
    """A fork while another thread chooses a kernel."""
    assert passes_in_forked_child(RUNTIME._lock, lambda: RUNTIME._lock.acquire(timeout=5))


def test_a_constant_decision_serves_a_raw_weight_as_it_lies(own_store: MemoryStore) -> None:
    rows = (evidence(toy("plain"), 0.1), evidence(toy(""), 0.2))
    store_decision(own_store, problem(3, constant=True), *rows, chosen=toy("plain"))
    assert served(3) == (toy("").id, 3, 3)


def test_packed_weights(own_store: MemoryStore) -> None:
    x = torch.randn(3, 4)
    wanted = torch.nn.functional.linear(x, W)
    untuned = gemmtune.pack(W, layout="toy:other")
    torch.testing.assert_close(gemmtune.linear(x, untuned), wanted)
    assert TOY_RUNS[-1][0] == toy("other").id
    rows = (evidence(toy("plain"), 0.1), evidence(toy("other", 7), 0.5))
    store_decision(own_store, problem(3, constant=True), *rows, chosen=toy("plain"))
    assert gemmtune.pack(W, m=3).layout == "toy:plain"
    torch.testing.assert_close(gemmtune.linear(x, untuned), wanted)
    assert TOY_RUNS[-1][0] == toy("other", 7).id
    with policy("off"):
        torch.testing.assert_close(gemmtune.linear(x.t().contiguous().t(), untuned), wanted)


def test_packed_for_elsewhere_is_refused_before_anything_runs() -> None:
    from dataclasses import replace

    packed = gemmtune.pack(W, layout="toy:plain")
    TOY_RUNS.clear()
    with pytest.raises(PackedWeightError, match="cannot run here: it was packed for amx"):
        gemmtune.linear(torch.randn(3, 4), replace(packed, machine="amx"))
    with pytest.raises(PackedWeightError, match="no kernel here takes a weight packed as 'toy:unheard'"):
        gemmtune.linear(torch.randn(3, 4), replace(packed, layout="toy:unheard"))
    with pytest.raises(PackedWeightError, match="the packed weight has K = 4, and the input has K = 6"):
        gemmtune.linear(torch.randn(3, 6), packed)
    with pytest.raises(PackedWeightError, match="holds float32; this call needs bfloat16"):
        gemmtune.linear(torch.randn(3, 4).bfloat16(), packed)
    assert TOY_RUNS == []


class BrokenStore(MemoryStore):
    """Every read fails."""

    def decisions(self, target: Target | None = None) -> Iterator[Decision]:
        raise OSError("the disk is gone")


def test_an_unreadable_store_warns_once_and_aten_serves(caplog: pytest.LogCaptureFixture) -> None:
    RUNTIME.refresh(BrokenStore())
    with caplog.at_level(logging.WARNING, logger="gemmtune"):
        assert served(3) is None
        RUNTIME.refresh()
        assert served(3) is None
    assert [record.message for record in caplog.records] == [
        "the store cannot be read (the disk is gone); PyTorch's own kernels serve"
    ]


def test_a_malformed_decision_is_a_miss(own_store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    good = decide(problem(3), evidence(toy(), 0.1), chosen=toy())
    bad = Decision("x", {"family": "mm"}, good.target_key, "tie", None, ())

    class Mixed(MemoryStore):
        def decisions(self, target: Target | None = None) -> Iterator[Decision]:
            yield from (bad, good)

    RUNTIME.refresh(Mixed())
    assert served(3)
    assert "malformed" in caplog.text


def test_a_kernel_that_cannot_load_is_plain(own_store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    gone = backends.base.Candidate.make("aten", "gone")
    store_decision(own_store, problem(3), evidence(gone, 0.1), chosen=gone)
    assert served(3) is None
    assert "names aten/gone" in caplog.text
    assert "not legal there" in caplog.text


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.dispatch.cache.MAX_KEYS", 4)
    for m in range(1, 9):
        assert served(m) is None
    assert len(DISPATCH_CACHE) == 4


def test_many_threads_at_first_sight(own_store: MemoryStore) -> None:
    store_decision(own_store, problem(3), evidence(toy(), 0.1), chosen=toy())
    x = torch.randn(3, 4)
    wanted = torch.nn.functional.linear(x, W)
    results: list[bool] = []

    def work() -> None:
        for m in range(200):
            results.append(torch.allclose(gemmtune.linear(x[: 1 + m % 3], W), wanted[: 1 + m % 3], atol=1e-5))
            if m % 50 == 0:
                gemmtune.refresh()

    crowd = [threading.Thread(target=work) for _ in range(8)]
    for one in crowd:
        one.start()
    for one in crowd:
        one.join()
    assert len(results) == 1600
    assert all(results)


def test_a_config_that_lacks_what_its_template_needs_costs_a_warning(
    own_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Data from anywhere must not raise into a model's forward."""
    candidate = Candidate.make("native", "gemm")
    problem = linear_problem(3, 5, 4, "float32", constant=False)
    store_decision(own_store, problem, evidence(candidate, 0.1), chosen=candidate)
    assert RUNTIME.kernel_for(problem) is None
    assert "names native/gemm" in caplog.text
    assert "not legal there" in caplog.text
