"""The CPU clock: call counts, rotation of operand sets, and the garbage collector, mostly on simulated time."""

from __future__ import annotations

import gc

import pytest

from gemmtune.timing import clock as clock_module
from gemmtune.timing.clock import CpuClock


class FakeTime:
    """Fake of ``time.perf_counter_ns`` that only kernels advance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr(clock_module.time, "perf_counter_ns", lambda: self.ns)

    def advance(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 500), (10e-6, 50), (400e-6, 2), (1e-3, 1), (0.1, 1)])
def test_call_count_reaches_the_minimum_time(fake_time: FakeTime, seconds: float, calls: int) -> None:
    assert CpuClock().calls_for(lambda i: fake_time.advance(seconds), 500e-6) == calls


def test_call_count_ignores_a_slow_first_call(fake_time: FakeTime) -> None:
    def run(i: int) -> None:
        fake_time.advance(5e-3 if i == 0 else 50e-6)

    assert CpuClock().calls_for(run, 500e-6) == 10


def test_call_count_of_a_free_kernel_is_bounded(fake_time: FakeTime) -> None:
    assert CpuClock().calls_for(lambda i: None, 500e-6) == 10_000


def test_times_are_per_call_in_the_order_of_the_kernels(fake_time: FakeTime) -> None:
    times = CpuClock().time_round([lambda i: fake_time.advance(2e-3), lambda i: fake_time.advance(1e-3)], [3, 5])
    assert times == pytest.approx([2e-3, 1e-3])


def test_operand_sets_rotate_over_all_kernels(fake_time: FakeTime) -> None:
    sets_by_kernel: dict[str, list[int]] = {"a": [], "b": []}
    clock = CpuClock()
    for _ in range(2):
        clock.time_round([sets_by_kernel["a"].append, sets_by_kernel["b"].append], [2, 1])
    assert sets_by_kernel == {"a": [0, 1, 3, 4], "b": [2, 5]}


def test_garbage_collector_is_disabled_only_during_a_round() -> None:
    states: list[bool] = []

    def fail(i: int) -> None:
        raise ZeroDivisionError

    assert gc.isenabled()
    CpuClock().time_round([lambda i: states.append(gc.isenabled())], [1])
    with pytest.raises(ZeroDivisionError):
        CpuClock().time_round([fail], [1])
    assert states == [False]
    assert gc.isenabled()


def test_now_is_monotonic() -> None:
    clock = CpuClock()
    assert clock.now() <= clock.now()
