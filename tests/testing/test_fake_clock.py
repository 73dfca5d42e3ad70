"""The simulated clock does what it says: known means, noise, drift, stalls, and no real time."""

from __future__ import annotations

import math
from statistics import median, pstdev

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Clock


def times(clock: FakeClock, seconds: float, count: int) -> list[float]:
    run = clock.kernel(seconds)
    return [clock.time_round([run], [1])[0] for _ in range(count)]


def test_is_a_clock() -> None:
    clock: Clock = FakeClock(0)
    assert clock.now() == 0.0


def test_without_noise_it_is_exact() -> None:
    clock = FakeClock(0, noise=0.0)
    assert clock.time_round([clock.kernel(1e-3), clock.kernel(2e-3)], [4, 2]) == pytest.approx([1e-3, 2e-3])
    assert clock.now() == pytest.approx(8e-3)
    assert clock.calls_for(clock.kernel(1e-4), 4.5e-4) == 5
    assert clock.calls_for(lambda i: None, 5e-4) == 1


def test_noise_has_the_stated_spread_and_seed() -> None:
    one = times(FakeClock(1, noise=0.02), 1e-3, 2000)
    assert pstdev(map(math.log, one)) == pytest.approx(0.02, rel=0.1)
    assert median(one) == pytest.approx(1e-3, rel=0.005)
    assert one == times(FakeClock(1, noise=0.02), 1e-3, 2000)
    assert one != times(FakeClock(2, noise=0.02), 1e-3, 2000)


def test_drift_goes_there_and_back() -> None:
    found = times(FakeClock(0, noise=0.0, drift=0.1, drift_s=1.0), 1e-3, 1000)
    assert max(found) / min(found) == pytest.approx(1.1 / 1.0, rel=0.01)
    assert found[0] == pytest.approx(1e-3)


def test_stalls_hit_their_share() -> None:
    found = times(FakeClock(0, noise=0.0, stalls=0.1, stall_s=8e-3), 1e-3, 2000)
    assert sum(t > 5e-3 for t in found) / 2000 == pytest.approx(0.1, abs=0.02)
