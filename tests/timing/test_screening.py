"""Screening times: the number of calls, and the correction for a changing machine speed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from gemmtune.timing import screening
from gemmtune.timing.screening import screening_times


def test_short_call_is_timed_in_batches_without_flushes() -> None:
    calls = []
    times = screening_times(lambda: calls.append(1), lambda: pytest.fail("flushed"))
    assert len(times) == 3
    assert len(calls) > 100


def test_longer_call_is_timed_after_a_flush() -> None:
    flushes = []
    assert len(screening_times(lambda: time.sleep(1e-3), lambda: flushes.append(1))) == 3
    assert len(flushes) == 3


def test_very_slow_first_call_is_the_only_one() -> None:
    calls = []

    def slow() -> None:
        calls.append(1)
        time.sleep(0.3)

    assert len(screening_times(slow, lambda: pytest.fail("flushed"), cutoff_s=0.01)) == 1
    assert len(calls) == 1


def test_call_beyond_the_cutoff_is_made_twice() -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.03)

    assert len(screening_times(call, lambda: None, cutoff_s=1e-3)) == 1
    assert len(calls) == 2


class _FakeTime:
    """Fake of the module ``time``: kernels take their seconds times ``slowdown``, which the test sets."""

    def __init__(self) -> None:
        self.now, self.slowdown = 0.0, 1.0

    def perf_counter(self) -> float:
        return self.now

    def kernel(self, seconds: float) -> Callable[[], None]:
        def call() -> None:
            self.now += seconds * self.slowdown

        return call


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> _FakeTime:
    fake_time = _FakeTime()
    monkeypatch.setattr(screening, "time", fake_time)
    return fake_time


@pytest.mark.parametrize(("first_s", "expected"), [(0.065, [0.06, 0.065]), (0.07, [0.06, 0.06])])
def test_first_of_slow_calls_counts_if_it_is_as_fast_as_the_second(
    machine: _FakeTime, first_s: float, expected: list[float]
) -> None:
    calls = []

    def call() -> None:
        calls.append(1)
        machine.kernel(first_s if len(calls) == 1 else 0.06)()

    assert screening_times(call, lambda: pytest.fail("flushed")) == pytest.approx(expected)
    assert len(calls) == (2 if first_s in expected else 3)


@pytest.mark.parametrize("seconds", [1e-3, 10e-6], ids=["alone", "in batches"])
def test_screening_times_are_corrected_to_the_initial_speed(machine: _FakeTime, seconds: float) -> None:
    reference, flushes = screening.SpeedReference(), []
    kernel = machine.kernel(seconds)
    first = screening_times(kernel, lambda: flushes.append(1), None, reference)
    reference.offer(kernel, min(first))
    machine.slowdown = 1.4
    later = screening_times(machine.kernel(1.1 * seconds), lambda: flushes.append(1), None, reference)
    assert first == pytest.approx([seconds] * 3)
    assert later == pytest.approx([1.1 * seconds] * 3)
    assert bool(flushes) == (seconds > 100e-6)


def test_speed_reference_is_the_first_kernel_or_a_much_faster_one(machine: _FakeTime) -> None:
    reference = screening.SpeedReference()
    assert reference.now() == 1.0
    reference.look(lambda: pytest.fail("there is no kernel to empty the cache for"))
    assert reference.now() == 1.0
    reference.offer(machine.kernel(1e-3), 1e-3)
    reference.offer(machine.kernel(5.0), 0.8e-3)  # not much faster: the first kernel stays the reference
    machine.slowdown = 2.0
    reference.look(lambda: None)
    assert reference.now() == pytest.approx(2.0)
    reference.offer(machine.kernel(0.4e-3), 0.4e-3)
    reference.look(lambda: None)
    assert reference.now() == pytest.approx(2.0)


def test_warm_cache_of_the_reference_is_not_a_speed_change(machine: _FakeTime) -> None:
    """Such a cache keeps a kernel's weight once the kernel was called three times since another weight was packed."""
    calls: Counter[str] = Counter()

    def kernel(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            machine.now += seconds * (1.0 if calls[name] >= 3 else 1.75)
            calls[name] += 1

        return call

    reference, reference_kernel = screening.SpeedReference(), kernel("known", 1e-3)
    reference.offer(reference_kernel, min(screening_times(reference_kernel, lambda: None, None, reference)))
    for name in ("second", "third"):
        calls.clear()  # another weight was packed
        assert screening_times(kernel(name, 2e-3), lambda: None, None, reference) == pytest.approx([2e-3] * 3)
    assert reference.now() == pytest.approx(1.0)
