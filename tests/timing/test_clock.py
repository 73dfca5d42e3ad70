"""The CPU clock: call counts, rotation indices, the garbage collector. Most tests move its hands themselves."""

from __future__ import annotations

import gc

import pytest

from gemmtune.timing import clock as clock_module
from gemmtune.timing.clock import CpuClock


class Hands:
    """Replaces ``time.perf_counter_ns``: moves only when a kernel says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ns = 0
        monkeypatch.setattr(clock_module.time, "perf_counter_ns", lambda: self.ns)

    def take(self, seconds: float) -> None:
        self.ns += round(seconds * 1e9)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    return Hands(monkeypatch)


@pytest.mark.parametrize(("seconds", "calls"), [(1e-6, 500), (10e-6, 50), (400e-6, 2), (1e-3, 1), (0.1, 1)])
def test_one_timing_reaches_the_floor(hands: Hands, seconds: float, calls: int) -> None:
    assert CpuClock().calls_for(lambda i: hands.take(seconds), 500e-6) == calls


def test_a_slow_first_call_is_not_taken_for_the_rest(hands: Hands) -> None:
    def run(i: int) -> None:
        hands.take(5e-3 if i == 0 else 50e-6)

    assert CpuClock().calls_for(run, 500e-6) == 10


def test_a_kernel_without_cost_ends_calibration(hands: Hands) -> None:
    assert CpuClock().calls_for(lambda i: None, 500e-6) == 10_000


def test_times_are_per_call_and_in_order(hands: Hands) -> None:
    times = CpuClock().time_round([lambda i: hands.take(2e-3), lambda i: hands.take(1e-3)], [3, 5])
    assert times == pytest.approx([2e-3, 1e-3])


def test_operand_sets_rotate_over_all_callables(hands: Hands) -> None:
    seen: dict[str, list[int]] = {"a": [], "b": []}
    clock = CpuClock()
    for _ in range(2):
        clock.time_round([seen["a"].append, seen["b"].append], [2, 1])
    assert seen == {"a": [0, 1, 3, 4], "b": [2, 5]}


def test_the_garbage_collector_rests_only_meanwhile() -> None:
    states: list[bool] = []

    def fail(i: int) -> None:
        raise ZeroDivisionError

    assert gc.isenabled()
    CpuClock().time_round([lambda i: states.append(gc.isenabled())], [1])
    with pytest.raises(ZeroDivisionError):
        CpuClock().time_round([fail], [1])
    assert states == [False]
    assert gc.isenabled()


def test_now_moves_forward() -> None:
    clock = CpuClock()
    assert clock.now() <= clock.now()
