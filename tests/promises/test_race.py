"""Tests of the race: stalls of a kernel count against it, every layout has its own baseline, a winner must also win in
its surroundings, and a race on a disturbed machine is inconclusive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import BACK_TO_BACK, Decision, Evidence, LayoutDecision, Sample, Verdict
from gemmtune.core.workloads import build
from gemmtune.dispatch import build_plan, choose_packing
from gemmtune.store import MemoryStore
from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Run
from gemmtune.timing.machine import CpuMachine, MachineState
from gemmtune.timing.plausible import least_cpu_s, least_gpu_s
from gemmtune.timing.race import Entrant, RaceResult, RaceSetup, race
from gemmtune.timing.surroundings import OVERLAP, Surrounding
from helpers.factories import make_target

STALL_S = 20e-3


def stalling(clock: FakeClock, seconds: float, every: int) -> Run:
    """Return a kernel that takes ``seconds``, and 20 ms more in every ``every``-th call."""
    calls = 0

    def run(i: int) -> None:
        nonlocal calls
        calls += 1
        clock.kernel(seconds + (STALL_S if calls % every == 0 else 0.0))(i)

    return run


# --- stalls of a kernel -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [50e-6, 0.5e-3, 1e-3, 10e-3])
@pytest.mark.parametrize("seed", range(5))
def test_a_kernel_that_stalls_every_fifth_call_does_not_win(seconds: float, seed: int) -> None:
    clock = FakeClock(seed, noise=0.02)
    entrants = [
        Entrant("aten", clock.kernel(seconds), is_baseline=True),
        Entrant("stalls", stalling(clock, 0.85 * seconds, 5), packing="g"),
    ]
    assert race(entrants, clock, 3.0, seed=seed).outcome == "tie"


@pytest.mark.parametrize("seed", range(5))
def test_rare_stalls_that_make_the_mean_slower_do_not_win(seed: int) -> None:
    clock = FakeClock(seed, noise=0.02)
    entrants = [
        Entrant("aten", clock.kernel(0.5e-3), is_baseline=True),
        Entrant("stalls", stalling(clock, 0.425e-3, 50), packing="g"),
    ]
    result = race(entrants, clock, 3.0, seed=seed)
    assert result.outcome == "tie"
    assert "its mean time, stalls counted" in result.stopped


@pytest.mark.parametrize("seed", range(8))
def test_stalls_of_the_machine_do_not_prevent_a_win(seed: int) -> None:
    clock = FakeClock(seed, noise=0.02, stalls=0.05)
    entrants = [
        Entrant("aten", clock.kernel(1e-3), is_baseline=True),
        Entrant("faster", clock.kernel(0.9e-3), packing="g"),
    ]
    assert race(entrants, clock, 6.0, seed=seed).outcome == "winner"


# --- the baseline of the raw layout -----------------------------------------------------------------------------


def layouts_race(raw_aten: float, raw: float, packed_aten: float, **noise: float) -> RaceResult:
    """Race ATen on a packed copy, ATen on the raw weight and another kernel on the raw weight, by their times."""
    clock = FakeClock(3, **{"noise": 0.01, **noise})  # type: ignore[arg-type]
    entrants = [
        Entrant("aten/packed", clock.kernel(packed_aten), is_baseline=True, packing="aten:copy"),
        Entrant("aten/raw", clock.kernel(raw_aten), is_baseline=True, packing=""),
        Entrant("ours/raw", clock.kernel(raw), packing=""),
    ]
    return race(entrants, clock, 6.0, seed=3)


def test_a_raw_kernel_wins_its_layout_even_if_a_packed_copy_is_faster() -> None:
    result = layouts_race(raw_aten=1.61e-3, raw=0.885e-3, packed_aten=0.87e-3)
    assert (result.outcome, result.leader) == ("tie", "aten/packed")
    layout = result.layouts[""]
    assert (layout.outcome, layout.candidate, layout.baseline) == ("winner", "ours/raw", "aten/raw")
    assert layout.ratio == pytest.approx(0.55, rel=0.02)


def test_a_raw_kernel_that_does_not_beat_plain_aten_does_not_win_its_layout() -> None:
    layouts = layouts_race(raw_aten=0.885e-3, raw=0.9e-3, packed_aten=0.5e-3).layouts
    assert "" not in layouts or layouts[""].outcome == "tie"


ATEN_COPY = Candidate.make("aten", "upcast_once")
ATEN_RAW = Candidate.make("aten", "upcast")
OURS_RAW = Candidate.make("cuda", "mixed", bm=160)


def decision_of(layout: LayoutDecision | None) -> Decision:
    """Return a decision with the times that an H200 had for 640x6400x5120 with int8 weights."""
    problem = build(640, 6400, 5120, "int8wo")

    def evidence(candidate: Candidate, seconds: float, packing: str | None = None) -> Evidence:
        ratio = seconds / 87e-6
        sample = Sample(seconds, seconds, seconds, 50, ratio, ratio, ratio, conditions={"timed": "graph"})
        return Evidence(
            candidate.to_dict(), candidate.id, "finalist", packing, verdict=Verdict("within_bound"), sample=sample
        )

    return Decision(
        problem.key, problem.to_dict(), "t", "tie", ATEN_COPY.id,
        (evidence(ATEN_COPY, 87e-6, "aten:cast/bfloat16"), evidence(ATEN_RAW, 161e-6), evidence(OURS_RAW, 88.5e-6)),
        {"": OURS_RAW.id, "aten:cast/bfloat16": ATEN_COPY.id},
        layouts={} if layout is None else {"": layout},
    )  # fmt: skip


def test_a_raw_weight_is_served_by_the_winner_of_the_raw_layout() -> None:
    won = LayoutDecision("winner", OURS_RAW.id, ATEN_RAW.id, 0.55, 0.54, 0.56)
    plan = build_plan([decision_of(won)], None)
    assert plan is not None
    assert plan.entries[0].candidate == OURS_RAW
    assert choose_packing([decision_of(won)]) == "aten:cast/bfloat16"  # where memory for the copy is allowed


def test_a_candidate_that_won_among_other_work_is_served() -> None:
    surroundings = {"behind an elementwise kernel": 0.9, BACK_TO_BACK: 1.01}
    won = LayoutDecision("winner", OURS_RAW.id, ATEN_RAW.id, 1.01, 1.0, 1.012, surroundings)
    plan = build_plan([decision_of(won)], None)
    assert plan is not None
    assert plan.entries[0].candidate == OURS_RAW
    assert plan.entries[0].seconds == pytest.approx(0.9 * 161e-6)


def test_a_candidate_that_is_slower_in_a_surrounding_is_not_served() -> None:
    tied = LayoutDecision("tie", OURS_RAW.id, ATEN_RAW.id, 0.97, 0.96, 0.98, {"behind an elementwise kernel": 1.04})
    plan = build_plan([decision_of(tied)], None)
    assert plan is not None
    assert plan.entries[0].candidate != OURS_RAW


# --- surroundings -----------------------------------------------------------------------------------------------


def make_surrounding(
    clock: FakeClock, times: dict[str, float], idle_s: float = 0.2e-3, variants: dict[str, float] | None = None
) -> Surrounding:
    """Return a surrounding in which entrants take ``times``, and variants of a challenger take ``variants``."""

    def run_of(name: str, variant: str) -> Run:
        kernel_s = times[name] if not variant or variants is None else variants[variant]
        return clock.kernel(idle_s + kernel_s)

    names = ("", *(variants or {}))
    return Surrounding("somewhere", run_of, lambda _: names, clock.kernel(idle_s))


def race_in(seed: int, alone: Sequence[float], around: Sequence[float], **options: object) -> RaceResult:
    """Race ATen (1 ms) and challengers that take ``alone`` by themselves and ``around`` in a surrounding."""
    clock = FakeClock(seed, noise=0.005)
    entrants = [Entrant("aten", clock.kernel(1e-3), is_baseline=True)]
    entrants += [Entrant(f"ours{i}", clock.kernel(s), packing=f"g{i}") for i, s in enumerate(alone)]
    times = {"aten": 1e-3} | {f"ours{i}": s for i, s in enumerate(around)}
    surrounding = make_surrounding(clock, times, **options)  # type: ignore[arg-type]
    return race(entrants, clock, 6.0, seed=seed, setup=RaceSetup(surroundings=[surrounding]))


@pytest.mark.parametrize("seed", range(5))
def test_a_kernel_that_is_faster_alone_and_slower_in_a_surrounding_ties(seed: int) -> None:
    result = race_in(seed, [0.97e-3], [1.04e-3])
    assert (result.outcome, result.leader) == ("tie", "aten")
    assert "somewhere" in result.stopped
    layout = result.layouts["g0"]
    assert layout.outcome == "tie"
    assert layout.surroundings["somewhere"] == pytest.approx(1.04, rel=0.01)
    assert layout.worst_ratio == pytest.approx(1.04, rel=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_a_kernel_that_is_faster_alone_and_in_a_surrounding_wins(seed: int) -> None:
    result = race_in(seed, [0.9e-3], [0.95e-3])
    assert (result.outcome, result.leader) == ("winner", "ours0")
    assert result.layouts["g0"].surroundings["somewhere"] == pytest.approx(0.95, rel=0.01)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("alone", "around", "outcome"), [(1.008, 0.88, "winner"), (1.008, 0.99, "tie"), (1.03, 0.88, "tie")]
)
def test_a_kernel_as_fast_back_to_back_wins_if_it_is_clearly_faster_among_other_work(
    alone: float, around: float, outcome: str, seed: int
) -> None:
    """Back to back a kernel may overlap with itself, which it cannot do in a model."""
    result = race_in(seed, [alone * 1e-3], [around * 1e-3])
    assert result.outcome == outcome
    if outcome == "winner":
        layout = result.layouts["g0"]
        assert layout.outcome == "winner"
        assert layout.worst_ratio == pytest.approx(around, rel=0.01)
        assert "among other work" in result.stopped


def test_the_second_challenger_wins_if_the_first_is_slower_in_a_surrounding() -> None:
    result = race_in(1, [0.90e-3, 0.903e-3], [1.05e-3, 0.92e-3])
    assert (result.outcome, result.leader) == ("winner", "ours1")


def test_overlap_is_disabled_for_a_kernel_that_it_slows_down() -> None:
    slower = race_in(2, [0.9e-3], [0.9e-3], variants={OVERLAP: 1.02e-3})
    assert slower.outcome == "winner"
    assert not slower.layouts["g0"].overlap
    faster = race_in(2, [0.9e-3], [0.9e-3], variants={OVERLAP: 0.8e-3})
    assert faster.layouts["g0"].overlap


# --- a disturbed machine ----------------------------------------------------------------------------------------


class FixedMachine:
    """Machine that always reports one MachineState."""

    def __init__(self, machine_state: MachineState) -> None:
        self._machine_state = machine_state

    def read_state(self) -> MachineState:
        return self._machine_state


def two_entrants(clock: FakeClock, gain: float) -> list[Entrant]:
    """Return ATen and a challenger that is faster by the fraction ``gain``."""
    return [Entrant("aten", clock.kernel(1e-3), is_baseline=True), Entrant("ours", clock.kernel((1 - gain) * 1e-3))]


def test_a_tie_under_contention_is_inconclusive() -> None:
    clock = FakeClock(1, noise=0.02)
    setup = RaceSetup(machine=FixedMachine(MachineState(load=1.5, contention=True)))
    result = race(two_entrants(clock, 0.0), clock, 6.0, setup=setup)
    assert result.outcome == "inconclusive"
    assert "others kept the cores busy" in result.stopped


def test_a_clear_winner_under_contention_is_a_winner() -> None:
    clock = FakeClock(1, noise=0.02)
    setup = RaceSetup(machine=FixedMachine(MachineState(load=1.5, contention=True)))
    assert race(two_entrants(clock, 0.1), clock, 6.0, setup=setup).outcome == "winner"


def test_noise_that_may_hide_a_gain_is_inconclusive() -> None:
    outcomes = {race(two_entrants(clock, 0.03), clock, 0.3, seed=seed).outcome
                for seed in range(20) for clock in [FakeClock(seed, noise=0.3)]}  # fmt: skip
    assert "inconclusive" in outcomes
    assert "tie" not in outcomes


def test_a_time_far_above_the_time_before_the_race_is_inconclusive() -> None:
    """A winner at 7601x was once recorded for 1x256x8: ATen waited for its threads in every call of the race."""
    clock = FakeClock(1, noise=0.02)
    entrants = [Entrant("aten", clock.kernel(8e-3), is_baseline=True), Entrant("ours", clock.kernel(1e-6))]
    result = race(entrants, clock, 6.0, setup=RaceSetup(earlier_s={"aten": 3e-6, "ours": 1e-6}))
    assert (result.outcome, result.leader) == ("inconclusive", "aten")
    assert "3 us before it" in result.stopped


def test_a_time_below_the_least_possible_time_fails_the_entrant() -> None:
    clock = FakeClock(1, noise=0.02)
    entrants = [Entrant("aten", clock.kernel(1e-3), is_baseline=True), Entrant("nothing", clock.kernel(1e-6))]
    result = race(entrants, clock, 6.0, setup=RaceSetup(least_s=1e-4))
    assert (result.outcome, result.leader) == ("tie", "aten")
    standing = result.evidence["nothing"]
    assert standing.stage == "failed"
    assert standing.verdict is not None
    assert standing.verdict.kind == "wrong"
    assert "cannot have computed it" in standing.reason


def test_the_least_possible_time_is_below_measured_times() -> None:
    """The measured times are those of REFERENCE.md: two cores of a Zen 4, one H200."""
    cpu = replace(make_target(), isa=("avx512_bf16",))
    h200 = replace(cpu, device="cuda", capability="9.0", cores=132)
    assert 1e-3 < least_cpu_s(build(256, 4096, 4096, "bf16"), cpu) < 38e-3 / 2
    assert 20e-6 < least_gpu_s(build(4096, 4096, 4096, "bf16"), h200) < 139e-6
    assert least_gpu_s(build(1, 4096, 4096, "bf16"), h200) < 7.6e-6


def test_load_of_other_processes_on_the_needed_cores_is_contention(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtune.timing import machine

    accounts = [machine._Accounts(0.0, 0.0, 0.0, 0.0), machine._Accounts(1.0, 3.0, 2.0, 0.0)]
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)

    def machine_state(threads: int) -> MachineState:
        rows = iter(accounts)
        monkeypatch.setattr(CpuMachine, "_accounts", lambda self: next(rows))
        return CpuMachine(threads).read_state()

    assert machine_state(2).contention
    assert not machine_state(1).contention


def test_stores_refuse_inconclusive_decisions() -> None:
    import msgspec

    decision = msgspec.structs.replace(decision_of(None), outcome="inconclusive", target_key=make_target().key)
    with pytest.raises(ValueError, match="inconclusive"):
        MemoryStore().put(make_target(), decision)
