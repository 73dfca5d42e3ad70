"""FakeClock: means, noise, drift and stalls, without real time."""

from __future__ import annotations

import math
from statistics import median, pstdev

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Clock


def measure(clock: FakeClock, seconds: float, count: int) -> list[float]:
    run = clock.kernel(seconds)
    return [clock.time_round([run], [1])[0] for _ in range(count)]


def test_fake_clock_is_a_clock() -> None:
    clock: Clock = FakeClock(0)
    assert clock.now() == 0.0


def test_times_are_exact_without_noise() -> None:
    clock = FakeClock(0, noise=0.0)
    assert clock.time_round([clock.kernel(1e-3), clock.kernel(2e-3)], [4, 2]) == pytest.approx([1e-3, 2e-3])
    assert clock.now() == pytest.approx(8e-3)
    assert clock.calls_for(clock.kernel(1e-4), 4.5e-4) == 5
    assert clock.calls_for(lambda i: None, 5e-4) == 1


def test_noise_has_the_requested_spread_and_seed() -> None:
    times = measure(FakeClock(1, noise=0.02), 1e-3, 2000)
    assert pstdev(map(math.log, times)) == pytest.approx(0.02, rel=0.1)
    assert median(times) == pytest.approx(1e-3, rel=0.005)
    assert times == measure(FakeClock(1, noise=0.02), 1e-3, 2000)
    assert times != measure(FakeClock(2, noise=0.02), 1e-3, 2000)


def test_drift_has_the_requested_range() -> None:
    times = measure(FakeClock(0, noise=0.0, drift=0.1, drift_s=1.0), 1e-3, 1000)
    assert max(times) / min(times) == pytest.approx(1.1 / 1.0, rel=0.01)
    assert times[0] == pytest.approx(1e-3)


def test_stalls_have_the_requested_rate() -> None:
    times = measure(FakeClock(0, noise=0.0, stalls=0.1, stall_s=8e-3), 1e-3, 2000)
    assert sum(t > 5e-3 for t in times) / 2000 == pytest.approx(0.1, abs=0.02)
