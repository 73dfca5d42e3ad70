"""Screening times: how often a candidate is called, and what a changing machine does to its times."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from gemmtune.timing import screening
from gemmtune.timing.screening import screening_times


def test_a_short_call_is_timed_in_batches_and_never_flushed() -> None:
    calls = []
    times = screening_times(lambda: calls.append(1), lambda: pytest.fail("flushed"))
    assert len(times) == 3
    assert len(calls) > 100


def test_a_longer_call_is_flushed_before_each_timing() -> None:
    flushes = []
    assert len(screening_times(lambda: time.sleep(1e-3), lambda: flushes.append(1))) == 3
    assert len(flushes) == 3


def test_a_first_call_slow_beyond_reason_is_the_only_one() -> None:
    calls = []

    def slow() -> None:
        calls.append(1)
        time.sleep(0.3)

    assert len(screening_times(slow, lambda: pytest.fail("flushed"), cutoff_s=0.01)) == 1
    assert len(calls) == 1


def test_a_slow_call_is_made_three_times_in_all() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.06)

    times = screening_times(call, lambda: pytest.fail("flushed"))
    assert len(times) == 2
    assert len(calls) == 3
    assert min(times) >= 0.06


def test_a_hopeless_call_is_made_twice() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.03)

    assert len(screening_times(call, lambda: None, cutoff_s=1e-3)) == 1
    assert len(calls) == 2


class _Machine:
    """Stands in for ``time``: kernels take seconds at a pace that the test sets."""

    def __init__(self) -> None:
        self.now, self.pace = 0.0, 1.0

    def perf_counter(self) -> float:
        return self.now

    def kernel(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds * self.pace

        return call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _Machine:
    made = _Machine()
    monkeypatch.setattr(screening, "time", made)
    return made


@pytest.mark.parametrize("seconds", [1e-3, 10e-6], ids=["alone", "in batches"])
def test_rough_times_are_as_at_the_pace_of_the_beginning(machine: _Machine, seconds: float) -> None:
    pace, flushed = screening.SpeedReference(), []
    known = machine.kernel(seconds)
    first = screening_times(known, lambda: flushed.append(1), None, pace)
    pace.offer(known, min(first))
    machine.pace = 1.4
    later = screening_times(machine.kernel(1.1 * seconds), lambda: flushed.append(1), None, pace)
    assert first == pytest.approx([seconds] * 3)
    assert later == pytest.approx([1.1 * seconds] * 3)
    assert bool(flushed) == (seconds > 100e-6)


def test_a_pace_is_told_by_the_first_kernel_or_a_much_faster_one(machine: _Machine) -> None:
    pace = screening.SpeedReference()
    assert pace.now() == 1.0
    pace.look(lambda: pytest.fail("there is no kernel to empty the cache for"))
    assert pace.now() == 1.0
    pace.offer(machine.kernel(1e-3), 1e-3)
    pace.offer(machine.kernel(5.0), 0.8e-3)  # not much faster: the first stays
    machine.pace = 2.0
    pace.look(lambda: None)
    assert pace.now() == pytest.approx(2.0)
    pace.offer(machine.kernel(0.4e-3), 0.4e-3)
    pace.look(lambda: None)
    assert pace.now() == pytest.approx(2.0)


def test_a_cache_that_no_flush_empties_does_not_look_like_a_slower_machine(machine: _Machine) -> None:
    """Such a cache keeps the weight of a kernel that was called three times since others packed theirs."""
    calls: Counter[str] = Counter()

    def kernel(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            machine.now += seconds * (1.0 if calls[name] >= 3 else 1.75)
            calls[name] += 1

        return call

    pace, known = screening.SpeedReference(), kernel("known", 1e-3)
    pace.offer(known, min(screening_times(known, lambda: None, None, pace)))
    for name in ("second", "third"):
        calls.clear()  # another weight was packed
        assert screening_times(kernel(name, 2e-3), lambda: None, None, pace) == pytest.approx([2e-3] * 3)
    assert pace.now() == pytest.approx(1.0)
