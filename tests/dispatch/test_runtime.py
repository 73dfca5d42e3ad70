"""The kernel that serves a call, by M, thread count and policy, and with stores that fail."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

import gemmtune
from gemmtune import backends
from gemmtune.backends.base import Artifact, Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Verdict
from gemmtune.core.errors import PackedWeightError, StoreBusy
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.core.workloads import bmm_problem, linear_problem
from gemmtune.dispatch import RUNTIME, current_target, policy, portfolio, runtime
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.store import MemoryStore
from helpers.factories import make_legal_plan
from helpers.forking import passes_in_forked_child
from helpers.serving import TOY_RUNS, ToyBackend, decide, evidence, plan_of_toys, register, store_decision, toy

W = torch.randn(5, 4)


def problem(m: int, constant: bool = False) -> Problem:
    return linear_problem(m, 5, 4, "float32", constant=constant)


@pytest.fixture(autouse=True)
def toys() -> None:
    register()
    TOY_RUNS.clear()


def run_linear(m: int) -> tuple[str, int, int] | None:
    """Check the result of ``linear`` on m rows, and return the run of the toy kernel (None: PyTorch served)."""
    TOY_RUNS.clear()
    x = torch.randn(m, 4)
    torch.testing.assert_close(gemmtune.linear(x, W), torch.nn.functional.linear(x, W))
    return TOY_RUNS[-1] if TOY_RUNS else None


def test_m_selects_the_plan_entry(own_store: MemoryStore) -> None:
    for m, tag in ((1, 1), (16, 2), (64, 3)):
        store_decision(own_store, problem(m), evidence(toy("", tag), 0.1), chosen=toy("", tag))
    runs = [run_linear(m) for m in (1, 3, 8, 30, 40, 1000)]
    assert [row and (row[0], row[1]) for row in runs] == [
        (toy("", 1).id, 1), (toy("", 2).id, 16), (toy("", 2).id, 16), (toy("", 3).id, 64), (toy("", 3).id, 64), None
    ]  # fmt: skip
    assert [row and row[2] for row in runs] == [1, 3, 8, 30, 40, None]


def test_pytorch_serves_ties_and_none_valid(own_store: MemoryStore) -> None:
    store_decision(own_store, problem(1))
    assert run_linear(1) is None
    empty = Decision(problem(2).key, problem(2).to_dict(), current_target().key, "none_valid", None, ())
    own_store.put(current_target(), empty)
    RUNTIME.refresh()
    assert run_linear(2) is None


BATCHED = bmm_problem(3, 2, 24, 32, "bfloat16")


def store_plan_over_the_batch(store: MemoryStore) -> None:
    """Store a plan by which a kernel that is not PyTorch's own serves batches from 2 to 9."""
    plan = make_legal_plan(BATCHED, current_target())
    kernel = plan.kernels[0].id
    over_batch = msgspec.structs.replace(
        plan, dim="batch", plan_key=BATCHED.plan_key_over("batch"), first=2, last=9,
        intervals={"": (PlanInterval(2, 9, kernel),)},
    )  # fmt: skip
    store.put_plan(current_target(), over_batch)
    RUNTIME.refresh(store)


def kernel_at(batch: int, m: int = 2) -> str | None:
    kernel = RUNTIME.kernel_for(BATCHED.with_m(m).with_size("batch", batch))
    return None if kernel is None else kernel.candidate.id


def test_plan_over_the_batch_serves_its_batches(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portfolio, "is_plain_op", lambda *_: False)  # so that ATen's own candidate is a kernel
    store_plan_over_the_batch(own_store)
    served = kernel_at(2)
    assert served is not None
    assert [kernel_at(batch) for batch in (1, 2, 5, 9, 10)] == [None, served, served, served, None]
    assert kernel_at(5, m=3) is None
    index = RUNTIME.index()
    assert [index.has_near(BATCHED.with_size("batch", batch), 1) for batch in (1, 9)] == [False, True]
    assert RUNTIME.preload(BATCHED, None, torch.device("cpu")) == 1


def test_decision_and_plan_over_m_come_before_that_over_the_batch(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portfolio, "is_plain_op", lambda *_: False)
    store_decision(own_store, BATCHED, evidence(toy(), 0.1), chosen=toy())
    store_plan_over_the_batch(own_store)
    assert kernel_at(3) == toy().id
    assert kernel_at(4) not in (toy().id, None)


@pytest.mark.parametrize("key", [BATCHED.with_size("batch", 7).key, BATCHED.plan_key_over("batch")])
def test_kernel_that_failed_at_a_batch_serves_none(
    key: str, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portfolio, "is_plain_op", lambda *_: False)
    store_plan_over_the_batch(own_store)
    kernel = kernel_at(5)
    assert kernel is not None
    own_store.remember_failure(current_target(), key, kernel, Verdict("wrong"))
    RUNTIME.refresh(own_store)
    assert kernel_at(5) is None


@pytest.fixture
def loaded(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Store a plan of two toy kernels, and return the ids of those that are loaded, in their order."""
    loaded: list[str] = []
    load = ToyBackend.load

    def record(backend: ToyBackend, artifact: Artifact, problem: Problem) -> Kernel:
        loaded.append(artifact.candidate.id)
        return load(backend, artifact, problem)

    monkeypatch.setattr(ToyBackend, "load", record)
    own_store.put_plan(current_target(), plan_of_toys(problem(8)))
    RUNTIME.refresh(own_store)
    return loaded


def test_first_call_loads_the_kernels_of_all_intervals(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No later M waits for a kernel to be loaded. While a CUDA graph is captured, none is."""
    with monkeypatch.context() as capturing:
        capturing.setattr(runtime.devices, "is_capturing", lambda _: True)
        assert RUNTIME.kernel_for(problem(3)) is None
    assert loaded == []
    for m, tag in ((3, 1), (9, 2), (64, 1)):
        kernel = RUNTIME.kernel_for(problem(m))
        assert kernel is not None
        assert kernel.candidate.id == toy("", tag).id
        assert loaded == [toy("", 1).id, toy("", 2).id]


def test_kernels_that_have_to_be_built_are_loaded_when_an_m_needs_them(
    loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ToyBackend, "artifact", lambda *_: None)
    for m, expected in ((3, [1]), (5, [1]), (9, [1, 2]), (64, [1, 2])):
        assert RUNTIME.kernel_for(problem(m)) is not None
        assert loaded == [toy("", tag).id for tag in expected]


class BusyStore(MemoryStore):
    """Store that raises StoreBusy while it is ``busy``. reads: how often its decisions were asked for."""

    busy, reads = True, 0

    def decisions(self, target: Target) -> Iterator[Decision]:
        self.reads += 1
        if self.busy:
            raise StoreBusy("another process writes")
        return iter(list(super().decisions(target)))


def test_busy_store_is_read_later_and_once(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(runtime.time, "monotonic", lambda: now)
    store = BusyStore()
    store_decision(store, problem(3), evidence(toy(), 0.1), chosen=toy())
    store.reads = 0
    RUNTIME.refresh(store)
    generation = RUNTIME.generation
    assert run_linear(3) is None
    assert (store.reads, RUNTIME.generation) == (1, generation + 1)
    store.busy = False
    assert run_linear(3) is None  # soon after
    assert store.reads == 1
    now += runtime.RETRY_S
    assert run_linear(3)
    store.busy = True
    generation = RUNTIME.generation
    assert run_linear(4)  # a new M, which the decision serves, too
    assert (store.reads, RUNTIME.generation) == (2, generation)


def test_second_call_does_not_look_up_the_kernel(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store_decision(own_store, problem(3), evidence(toy(), 0.1), chosen=toy())
    assert run_linear(3)
    monkeypatch.setattr(RUNTIME, "choose", lambda *_: pytest.fail("looked up again"))
    assert run_linear(3)


@pytest.fixture
def restored_thread_count() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("restored_thread_count")
def test_thread_count_selects_the_target(own_store: MemoryStore) -> None:
    torch.set_num_threads(1)
    store_decision(own_store, problem(3), evidence(toy("", 1), 0.1), chosen=toy("", 1))
    torch.set_num_threads(2)
    store_decision(own_store, problem(3), evidence(toy("", 2), 0.1), chosen=toy("", 2))
    for count in (1, 2, 1):
        torch.set_num_threads(count)
        assert run_linear(3) == (toy("", count).id, 3, 3)
    torch.set_num_threads(3)
    assert run_linear(3) is None


def test_policy_off_serves_pytorch_within_its_scope(own_store: MemoryStore) -> None:
    store_decision(own_store, problem(3), evidence(toy(), 0.1), chosen=toy())
    with policy("off"):
        assert run_linear(3) is None
    assert run_linear(3)
    with pytest.raises(ValueError, match="one of cached, on-miss, off; got 'never'"):
        policy("never")  # type: ignore[arg-type]


def test_on_miss_tunes_once_per_distant_m(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[int] = []

    def tune(problem_: Problem, device: torch.device) -> None:
        tuned.append(problem_.m)
        own_store.put(
            current_target(), decide(problem_, evidence(toy("", problem_.m), 0.1), chosen=toy("", problem_.m))
        )

    monkeypatch.setattr(RUNTIME, "miss_hook", tune)
    assert run_linear(1) is None
    with policy("on-miss"):
        rows = [run_linear(m) for m in (1, 4, 5, 19, 1)]
    assert tuned == [1, 5]
    assert [row and row[1] for row in rows] == [1, 1, 5, 5, 1]


@pytest.mark.parametrize(
    "forget", [RUNTIME.refresh, lambda: RUNTIME.set_policy("cached"), lambda: RUNTIME.observe(None)]
)
def test_entry_prepared_before_a_refresh_is_not_cached(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> None:
    """Another thread calls ``forget`` between the choice of a kernel and the insertion into the cache."""
    x, packed = torch.randn(3, 4), gemmtune.pack(W, layout="toy:plain")
    ints = torch.ones(3, 4, dtype=torch.int8)
    weight_only = gemmtune.pack(ints[:, :2].t().contiguous().t(), scale=torch.ones(3), layout="toy:plain")
    calls = (
        lambda: gemmtune.linear(x, W),
        lambda: gemmtune.mm(x, packed),
        lambda: gemmtune.int_mm(ints, ints.t()),
        lambda: gemmtune.mixed_mm(x[:, :2], weight_only),
    )
    original = RUNTIME.choose

    def choose_and_forget(*args: object) -> object:
        choice = original(*args)  # type: ignore[arg-type]
        thread = threading.Thread(target=forget)
        thread.start()
        thread.join()
        return choice

    monkeypatch.setattr(RUNTIME, "choose", choose_and_forget)
    for call in calls:
        call()
        assert not DISPATCH_CACHE
    monkeypatch.setattr(RUNTIME, "choose", original)
    for count, call in enumerate(calls):
        call()
        assert len(DISPATCH_CACHE) == count + 1


def test_other_threads_are_served_while_a_miss_is_tuned(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned: list[int] = []

    def tune(problem_: Problem, device: torch.device) -> None:
        served_meanwhile: list[bool] = []
        x = torch.randn(100, 4)
        thread = threading.Thread(
            target=lambda: served_meanwhile.append(torch.equal(gemmtune.linear(x, W), torch.nn.functional.linear(x, W)))
        )
        thread.start()
        thread.join(30)
        assert served_meanwhile == [True]  # other threads neither wait nor tune
        tuned.append(problem_.m)

    monkeypatch.setattr(RUNTIME, "miss_hook", tune)
    with policy("on-miss"):
        for m in (1, 1, 100, 100):
            run_linear(m)
    assert tuned == [1, 100]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_locks_are_reset_in_a_forked_child() -> None:
    """The process forks while another thread chooses a kernel."""
    assert passes_in_forked_child(RUNTIME._lock, lambda: RUNTIME._lock.acquire(timeout=5))


def test_raw_weight_is_served_by_the_best_unpacked_kernel(own_store: MemoryStore) -> None:
    rows = (evidence(toy("plain"), 0.1), evidence(toy(""), 0.2))
    store_decision(own_store, problem(3, constant=True), *rows, chosen=toy("plain"))
    assert run_linear(3) == (toy("").id, 3, 3)


def test_packed_weight_is_served_by_a_kernel_of_its_layout(own_store: MemoryStore) -> None:
    x = torch.randn(3, 4)
    expected = torch.nn.functional.linear(x, W)
    untuned = gemmtune.pack(W, layout="toy:other")
    torch.testing.assert_close(gemmtune.linear(x, untuned), expected)
    assert TOY_RUNS[-1][0] == toy("other").id
    rows = (evidence(toy("plain"), 0.1), evidence(toy("other", 7), 0.5))
    store_decision(own_store, problem(3, constant=True), *rows, chosen=toy("plain"))
    assert gemmtune.pack(W, m=3).layout == "toy:plain"
    torch.testing.assert_close(gemmtune.linear(x, untuned), expected)
    assert TOY_RUNS[-1][0] == toy("other", 7).id
    with policy("off"):
        torch.testing.assert_close(gemmtune.linear(x.t().contiguous().t(), untuned), expected)


def test_unusable_packed_weights_raise_before_a_kernel_runs() -> None:
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
    """Store whose reads fail."""

    def decisions(self, target: Target | None = None) -> Iterator[Decision]:
        raise OSError("the disk is gone")


def test_unreadable_store_warns_once_and_pytorch_serves(caplog: pytest.LogCaptureFixture) -> None:
    RUNTIME.refresh(BrokenStore())
    with caplog.at_level(logging.WARNING, logger="gemmtune"):
        assert run_linear(3) is None
        RUNTIME.refresh()
        assert run_linear(3) is None
    assert [record.message for record in caplog.records] == [
        "the store cannot be read (the disk is gone); PyTorch's own kernels serve"
    ]


def test_malformed_decision_is_ignored(own_store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    valid = decide(problem(3), evidence(toy(), 0.1), chosen=toy())
    malformed = Decision("x", {"family": "mm"}, valid.target_key, "tie", None, ())

    class MixedStore(MemoryStore):
        def decisions(self, target: Target | None = None) -> Iterator[Decision]:
            yield from (malformed, valid)

    RUNTIME.refresh(MixedStore())
    assert run_linear(3)
    assert "malformed" in caplog.text


def test_pytorch_serves_where_a_kernel_cannot_load(own_store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    missing = backends.base.Candidate.make("aten", "gone")
    store_decision(own_store, problem(3), evidence(missing, 0.1), chosen=missing)
    assert run_linear(3) is None
    assert "names aten/gone" in caplog.text
    assert "not legal there" in caplog.text


def test_number_of_cached_keys_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.dispatch.cache.MAX_KEYS", 4)
    for m in range(1, 9):
        assert run_linear(m) is None
    assert len(DISPATCH_CACHE) == 4


def test_concurrent_calls_and_refreshes_return_correct_results(own_store: MemoryStore) -> None:
    store_decision(own_store, problem(3), evidence(toy(), 0.1), chosen=toy())
    x = torch.randn(3, 4)
    expected = torch.nn.functional.linear(x, W)
    results: list[bool] = []

    def work() -> None:
        for m in range(200):
            results.append(torch.allclose(gemmtune.linear(x[: 1 + m % 3], W), expected[: 1 + m % 3], atol=1e-5))
            if m % 50 == 0:
                gemmtune.refresh()

    threads_ = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads_:
        thread.start()
    for thread in threads_:
        thread.join()
    assert len(results) == 1600
    assert all(results)


def test_config_without_required_entries_logs_a_warning(
    own_store: MemoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A malformed decision must not raise an error in a model's forward."""
    candidate = Candidate.make("native", "gemm")
    problem = linear_problem(3, 5, 4, "float32", constant=False)
    store_decision(own_store, problem, evidence(candidate, 0.1), chosen=candidate)
    assert RUNTIME.kernel_for(problem) is None
    assert "names native/gemm" in caplog.text
    assert "not legal there" in caplog.text
