"""What else the machine does, and keeping to the idle part of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.machine import CpuMachine, CpuPinning, MachineState
from gemmtune.timing.race import Entrant, RaceSetup, race


class Changing:
    """A machine whose weather is the next of a list each time, then the last for ever."""

    def __init__(self, *weathers: MachineState) -> None:
        self.left = [MachineState(), *weathers]

    def weather(self) -> MachineState:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


def test_what_differs_is_said_and_trifles_are_not() -> None:
    assert MachineState(0.1, 3000).differs(MachineState(0.2, 3050)) == ""
    assert "0.1 to 1.0 cores" in MachineState(0.1, 3000).differs(MachineState(1.0, 3000))
    assert "3000 to 2500 MHz" in MachineState(0.1, 3000).differs(MachineState(0.1, 2500))
    assert MachineState(0.0, 0.0).differs(MachineState(0.0, 2500)) == ""  # unknown before


def test_this_machine_has_a_weather() -> None:
    machine = CpuMachine()
    time.sleep(0.05)
    weather = machine.weather()
    assert 0.0 <= weather.load <= 2 * (os.cpu_count() or 1)
    assert weather.frequency >= 0.0
    assert "cores" in weather.words()["load"]


def test_own_work_is_no_load() -> None:
    machine = CpuMachine()
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    own = os.times()
    assert own.user > 0.0
    assert machine.weather().load <= (os.cpu_count() or 1) - 0.4  # one core was ours


def duel_of(machine: Changing, gain: float = 0.05) -> dict[str, str]:
    clock = FakeClock(1, noise=0.02)
    field = [Entrant("aten", clock.kernel(1e-3), is_baseline=True), Entrant("ours", clock.kernel(1e-3 * (1 - gain)))]
    result = race(field, clock, 6.0, setup=RaceSetup(machine=machine, conditions={"operands": "cold"}))
    assert result.outcome == "winner"
    return result.conditions


def test_a_duel_is_fought_again_when_the_load_changes() -> None:
    conditions = duel_of(Changing(MachineState(0.0), MachineState(1.0)))
    assert "0.0 to 1.0 cores" in conditions["repeated"]
    assert conditions["load"] == "1.0 cores"
    assert conditions["operands"] == "cold"


def test_a_duel_in_steady_weather_is_fought_once() -> None:
    assert "repeated" not in duel_of(Changing(MachineState(1.0), MachineState(1.1)))


@pytest.fixture
def affinity() -> Iterator[set[int]]:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this platform has no CPU affinity")
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_pins_keep_to_as_many_cpus_as_there_are_threads(affinity: set[int]) -> None:
    pins = CpuPinning()
    pins.choose(1, settle_s=0.01)
    if len(affinity) > 1:
        assert len(os.sched_getaffinity(0)) == 1
        assert pins.words == f"CPUs {min(os.sched_getaffinity(0))}"
    else:
        assert pins.words == ""


def test_pins_leave_a_process_alone_that_needs_every_cpu(affinity: set[int]) -> None:
    pins = CpuPinning()
    pins.choose(len(affinity), settle_s=0.01)
    assert os.sched_getaffinity(0) == affinity
    assert pins.words == ""
