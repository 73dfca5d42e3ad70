"""Machine state of the CPU, and pinning to idle CPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.machine import CpuMachine, CpuPinning, MachineState
from gemmtune.timing.race import Entrant, RaceSetup, race


class FakeMachine:
    """Machine that returns the states of a list in turn, and the last one from then on."""

    def __init__(self, *states: MachineState) -> None:
        self.states = [MachineState(), *states]

    def read_state(self) -> MachineState:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]


def test_differs_reports_changes_of_load_and_frequency() -> None:
    assert MachineState(0.1, 3000).differs(MachineState(0.2, 3050)) == ""
    assert "0.1 to 1.0 cores" in MachineState(0.1, 3000).differs(MachineState(1.0, 3000))
    assert "3000 to 2500 MHz" in MachineState(0.1, 3000).differs(MachineState(0.1, 2500))
    assert MachineState(0.0, 0.0).differs(MachineState(0.0, 2500)) == ""  # the frequency was unknown


def test_state_of_this_machine_is_plausible() -> None:
    machine = CpuMachine()
    time.sleep(0.05)
    state = machine.read_state()
    assert 0.0 <= state.load <= 2 * (os.cpu_count() or 1)
    assert state.frequency >= 0.0
    assert "cores" in state.words()["load"]


def test_load_excludes_this_process() -> None:
    machine = CpuMachine()
    end = time.perf_counter() + 0.3
    while time.perf_counter() < end:
        pass
    process_times = os.times()
    assert process_times.user > 0.0
    assert machine.read_state().load <= (os.cpu_count() or 1) - 0.4  # this process used one core


def race_conditions(machine: FakeMachine, gain: float = 0.05) -> dict[str, str]:
    clock = FakeClock(1, noise=0.02)
    entrants = [Entrant("aten", clock.kernel(1e-3), is_baseline=True), Entrant("ours", clock.kernel(1e-3 * (1 - gain)))]
    result = race(entrants, clock, 6.0, setup=RaceSetup(machine=machine, conditions={"operands": "cold"}))
    assert result.outcome == "winner"
    return result.conditions


def test_paired_test_is_repeated_when_the_load_changes() -> None:
    conditions = race_conditions(FakeMachine(MachineState(0.0), MachineState(1.0)))
    assert "0.0 to 1.0 cores" in conditions["repeated"]
    assert conditions["load"] == "1.0 cores"
    assert conditions["operands"] == "cold"


def test_paired_test_runs_once_under_a_steady_load() -> None:
    assert "repeated" not in race_conditions(FakeMachine(MachineState(1.0), MachineState(1.1)))


@pytest.fixture
def affinity() -> Iterator[set[int]]:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this platform has no CPU affinity")
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_pinning_selects_one_cpu_per_thread(affinity: set[int]) -> None:
    pinning = CpuPinning()
    pinning.choose(1, settle_s=0.01)
    if len(affinity) > 1:
        assert len(os.sched_getaffinity(0)) == 1
        assert pinning.words == f"CPUs {min(os.sched_getaffinity(0))}"
    else:
        assert pinning.words == ""


def test_pinning_is_skipped_when_all_cpus_are_needed(affinity: set[int]) -> None:
    pinning = CpuPinning()
    pinning.choose(len(affinity), settle_s=0.01)
    assert os.sched_getaffinity(0) == affinity
    assert pinning.words == ""
