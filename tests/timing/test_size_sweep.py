"""Timing of kernels at many M: times on the simulated clock, kernels that are dropped or fail, and shared operands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Verdict
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight
from gemmtune.testing.clock import FakeClock
from gemmtune.timing import devices, size_sweep
from gemmtune.timing.clock import Run
from gemmtune.timing.race import Entrant
from gemmtune.timing.size_sweep import BANDS, SizeSweep, band_of, time_entrants
from gemmtune.verify.row_stack import rows_are_views

AMPLE_S = 60.0


def make_entrants(clock: FakeClock, seconds: Mapping[str, float], packing: str | None = None) -> list[Entrant]:
    """Return an entrant for each name; those whose names begin with "aten" are ATen's."""
    return [
        Entrant(name, clock.kernel(s), is_baseline=name.startswith("aten"), packing=packing)
        for name, s in seconds.items()
    ]


def raising_in_call(clock: FakeClock, number: int, seconds: float = 1e-4) -> Run:
    """Return a kernel that raises in its call of this number, counted from 1, and in all later ones."""
    calls: list[int] = []
    run = clock.kernel(seconds)

    def call(i: int) -> None:
        calls.append(i)
        if len(calls) >= number:
            raise ValueError(f"call {len(calls)}")
        run(i)

    return call


# --- time_entrants


@pytest.mark.parametrize("drift", [0.0, 0.2])
def test_ratios_of_times_are_true_within_their_noise(drift: float) -> None:
    """The machine's speed drifts by 20% while each round takes a fifth of the period."""
    true = {"aten": 1e-4, "a": 0.95e-4, "b": 1.02e-4, "c": 1.05e-4}
    errors, noises = [], []
    for seed in range(60):
        clock = FakeClock(seed, noise=0.01, drift=drift, drift_s=5e-3)
        times, noise, faults = time_entrants(make_entrants(clock, true), clock, AMPLE_S, seed)
        assert faults == {}
        noises.append(noise)
        ratios = [times[name] / times["aten"] / (true[name] / true["aten"]) for name in ("a", "b", "c")]
        errors += [abs(ratio - 1.0) / (2.0**0.5 * noise) for ratio in ratios]
    assert median(noises) < (0.04 if drift else 0.012)
    assert sum(error <= 1.0 for error in errors) / len(errors) > 0.85


def test_slow_drift_does_not_change_ratios() -> None:
    """In each round all kernels run at nearly the same speed of the machine, and rounds are made comparable."""
    true = {"aten": 1e-4, "a": 0.9e-4, "b": 1.1e-4}
    for seed in range(30):
        clock = FakeClock(seed, noise=0.002, drift=0.3, drift_s=20e-3)
        times, noise, _ = time_entrants(make_entrants(clock, true), clock, AMPLE_S, seed)
        assert [times[name] / times["aten"] for name in ("a", "b")] == pytest.approx([0.9, 1.1], rel=0.05)
        assert noise < 0.1


def test_stalls_do_not_change_times() -> None:
    true = {"aten": 1e-4, "a": 0.9e-4, "b": 1.1e-4}
    errors = []
    for seed in range(40):
        clock = FakeClock(seed, noise=0.005, stalls=0.03)
        times, _, _ = time_entrants(make_entrants(clock, true), clock, AMPLE_S, seed)
        errors += [abs(times[name] / true[name] - 1.0) for name in times]
    assert sorted(errors)[int(0.9 * len(errors))] < 0.01


def test_noise_is_that_of_the_clock() -> None:
    noises = {}
    for sigma in (0.001, 0.01):
        clock = FakeClock(3, noise=sigma)
        noises[sigma] = time_entrants(
            make_entrants(clock, {f"k{i}": (1.0 + 0.01 * i) * 1e-4 for i in range(9)}), clock, AMPLE_S, 3
        )[1]
    # The half width of the 95% interval of a median of seven timings is 1.96 * 1.2533 / sqrt(7) deviations.
    for sigma, noise in noises.items():
        assert 0.4 * sigma < noise < 1.9 * sigma


@pytest.mark.parametrize("count", [1, 2, 3])
def test_noise_of_few_kernels_is_not_underestimated(count: int) -> None:
    """The level of a round is taken from the same timings."""
    noises = []
    for seed in range(50):
        clock = FakeClock(seed, noise=0.01)
        noises.append(
            time_entrants(make_entrants(clock, {f"k{i}": 1e-4 for i in range(count)}), clock, AMPLE_S, seed)[1]
        )
    assert 0.007 < median(noises) < 0.014


def test_entrants_keep_the_device_busy_before_they_are_timed_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 0.1 s of work, in timings as long as in a paired test, take two thirds of the time of later work."""
    clock = FakeClock(0, noise=0.001)
    monkeypatch.setattr(clock, "paired_timing_s", 2e-3)
    worked: list[float] = []

    def throttled(seconds: float) -> Run:
        runs = [clock.kernel(seconds), clock.kernel(1.5 * seconds)]

        def run(i: int) -> None:
            busy = sum(worked) >= 0.1
            worked.append(seconds)
            runs[busy](i)

        return run

    def times(load_s: float) -> dict[str, float]:
        worked.clear()
        entrants = [
            Entrant(name, throttled(s), is_baseline=False, packing=None) for name, s in (("a", 1e-4), ("b", 2e-4))
        ]
        return time_entrants(entrants, clock, 0.02, 0, load_s)[0]

    assert times(0.0) == pytest.approx({"a": 1e-4, "b": 2e-4}, rel=0.01)
    assert times(0.2) == pytest.approx({"a": 1.5e-4, "b": 3e-4}, rel=0.01)


def test_entrant_that_raises_under_load_fails_alone() -> None:
    clock = FakeClock(0, noise=0.001)
    raising = raising_in_call(clock, 300)
    entrants = [*make_entrants(clock, {"sound": 1e-4}), Entrant("raises", raising, is_baseline=False, packing=None)]
    times, _, faults = time_entrants(entrants, clock, AMPLE_S, 0, 0.2)
    assert (set(times), set(faults)) == ({"sound"}, {"raises"})


def count_timings(
    monkeypatch: pytest.MonkeyPatch, entrants: Callable[[FakeClock], list[Entrant]], budget_s: float = AMPLE_S
) -> tuple[dict[str, int], dict[str, float]]:
    """Return how many timings each entrant had, and the times."""
    counts: dict[str, int] = {}
    original = size_sweep._time_round

    def time_round(active: Sequence[Any], round_: int, clock: Any) -> bool:
        done = original(active, round_, clock)
        for entry in active:
            counts[entry.id] = len(entry.times)
        return done

    monkeypatch.setattr(size_sweep, "_time_round", time_round)
    clock = FakeClock(0, noise=0.001)
    times, _, _ = time_entrants(entrants(clock), clock, budget_s, 0)
    return counts, times


def test_slow_kernels_are_dropped_and_aten_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"fast": 1e-4, "close": 1.1e-4, "behind": 1.4e-4, "far": 2e-4, "aten": 5e-4, "aten_slow": 9e-4}
    counts, times = count_timings(monkeypatch, lambda clock: make_entrants(clock, seconds))
    assert counts == {"fast": 7, "close": 7, "behind": 3, "far": 1, "aten": 7, "aten_slow": 7}
    for name, s in seconds.items():
        assert times[name] == pytest.approx(s, rel=0.01)


def test_kernels_are_compared_with_those_of_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def entrants(clock: FakeClock) -> list[Entrant]:
        raw = make_entrants(clock, {"raw": 1e-4})
        packed = make_entrants(clock, {"packed": 1.9e-4, "packed_slow": 2.3e-4}, "p")
        return [*raw, *packed, *make_entrants(clock, {"far": 2.2e-4}, "q")]

    counts, times = count_timings(monkeypatch, entrants)
    assert counts == {"raw": 7, "packed": 7, "packed_slow": 1, "far": 1}
    assert set(times) == set(counts)


@pytest.mark.parametrize(("budget_s", "rounds"), [(0.0, 2), (5.5e-3, 4), (AMPLE_S, 7)])
def test_budget_limits_the_rounds(monkeypatch: pytest.MonkeyPatch, budget_s: float, rounds: int) -> None:
    """Calibration lasts 0.55 ms, and a round of two calls of each kernel 1.1 ms."""
    seconds = {f"k{i}": 1.1e-4 for i in range(5)}
    counts, _ = count_timings(monkeypatch, lambda clock: make_entrants(clock, seconds), budget_s)
    assert set(counts.values()) == {rounds}


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({"aten": 0.2, "a": 0.15, "far": 0.4}, {"aten": 2, "a": 2, "far": 1}),
        ({"aten": 0.2, "a": 0.15, "quick": 0.05}, {"aten": 3, "a": 2, "quick": 3}),  # not those of all kernels count
    ],
)
def test_calibrations_of_slow_kernels_count_as_a_round(seconds: dict[str, float], expected: dict[str, int]) -> None:
    clock, calls = FakeClock(0, noise=0.001), dict.fromkeys(seconds, 0)

    def counted(entrant: Entrant) -> Entrant:
        def run(i: int) -> None:
            calls[entrant.id] += 1
            entrant.run(i)

        return replace(entrant, run=run)

    times, _, _ = time_entrants(list(map(counted, make_entrants(clock, seconds))), clock, 0.0, 0)
    assert calls == expected
    assert times == pytest.approx(seconds, rel=0.01)


def test_a_slow_first_call_does_not_count() -> None:
    """As that of a kernel that is compiled in its first call."""
    clock, calls = FakeClock(0, noise=0.001), [0.26, 0.2]
    kernels = [clock.kernel(seconds) for seconds in calls]
    entrants = make_entrants(clock, {"aten": 0.2, "a": 0.19})
    compiled = replace(entrants[1], run=lambda i: (kernels.pop(0) if len(kernels) > 1 else kernels[0])(i))
    times, _, _ = time_entrants([entrants[0], compiled], clock, 0.0, 0)
    assert times == pytest.approx({"aten": 0.2, "a": 0.2}, rel=0.01)


def test_calibrations_of_a_clock_that_calls_more_than_once_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClock, "calibrates_once", False)
    counts, _ = count_timings(monkeypatch, lambda clock: make_entrants(clock, {"aten": 0.2, "a": 0.15}), budget_s=0.0)
    assert counts == {"aten": 2, "a": 2}


@pytest.mark.parametrize("number", [1, 2, 4, 9])
def test_entrant_that_raises_fails_alone(number: int) -> None:
    clock = FakeClock(0, noise=0.001)
    bad = Entrant("bad", raising_in_call(clock, number))
    others = make_entrants(clock, {"aten": 1e-4, "a": 0.9e-4})
    times, _, faults = time_entrants([others[0], bad, others[1]], clock, AMPLE_S, 0)
    assert faults == {"bad": Verdict("crashed", f"raised ValueError: call {number}")}
    assert times == pytest.approx({"aten": 1e-4, "a": 0.9e-4}, rel=0.01)


def test_others_are_timed_twice_although_each_round_has_one_that_raises() -> None:
    clock = FakeClock(0, noise=0.001)
    bad = [Entrant(f"bad{i}", raising_in_call(clock, 2 + 2 * i)) for i in range(3)]
    good = make_entrants(clock, {"a": 1e-4})
    times, _, faults = time_entrants([*bad, *good], clock, 0.0, 0)
    assert set(faults) == {"bad0", "bad1"} | ({"bad2"} & set(faults))
    assert "a" in times


def test_nothing_to_time() -> None:
    assert time_entrants([], FakeClock(), 1.0, 0) == ({}, 0.0, {})
    clock = FakeClock()
    times, _, faults = time_entrants([Entrant("bad", raising_in_call(clock, 1))], clock, 1.0, 0)
    assert (times, set(faults)) == ({}, {"bad"})


# --- SizeSweep

TARGET = Target("cpu", "small cache", "x86_64", caches=(32 << 10, 1 << 18, 1 << 20), threads=1)
PROBLEM = Problem("mm", 16, 64, 96, Operand("float32"), Operand("float32", Layout("col"), constant=True), "float32")


class RecordingKernel(Kernel):
    """Correct kernel that records the shapes of its calls and how often its weight was packed."""

    def __init__(self, name: str, packing: str | None = None, backend: str = "x") -> None:
        self.candidate, self.problem, self.packing = Candidate.make(backend, name), PROBLEM, packing
        self.shapes: set[tuple[int, int]] = set()
        self.packed = 0
        self.fails_from = 1 << 30

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        self.shapes.add((a.shape[0], out.shape[0]))
        if a.shape[0] >= self.fails_from:
            raise ValueError("too many rows")
        torch.mm(a, b.data[0] if isinstance(b, PackedWeight) else b, out=out)

    def pack(self, b: Any) -> PackedWeight:
        self.packed += 1
        return PackedWeight(str(self.packing), (b.clone(),), PROBLEM.n, PROBLEM.k, "float32")


def make_sweep(*kernels: RecordingKernel, problem: Problem = PROBLEM, last: int = 100, hot: bool = True) -> SizeSweep:
    by_id = {kernel.candidate.id: kernel for kernel in kernels}
    return SizeSweep(by_id, problem, devices.of(TARGET), 0, None, last=last, hot=hot)


@pytest.mark.parametrize(("m", "last", "band"), [
    (1, 512, 64), (64, 512, 64), (65, 512, 512), (10, 33, 33), (513, 8192, 4096), (4097, 8192, 8192), (1, 1, 1),
])  # fmt: skip
def test_band_of_an_m(m: int, last: int, band: int) -> None:
    assert band_of(m, last) == band
    assert sorted(BANDS) == list(BANDS)


def test_kernels_are_timed_at_each_m_where_they_are_asked_for() -> None:
    aten, raw, packed = RecordingKernel("mm", None, "aten"), RecordingKernel("raw"), RecordingKernel("packed", "p")
    ids = [kernel.candidate.id for kernel in (aten, raw, packed)]
    sizes = {1: ids, 5: ids[:2], 64: ids[1:], 100: ids[2:]}
    timed = make_sweep(aten, raw, packed).time(sizes, 0.0)
    assert {m: set(times) for m, times in timed.times.items()} == {m: set(names) for m, names in sizes.items()}
    assert all(seconds > 0.0 for times in timed.times.values() for seconds in times.values())
    assert set(timed.noise) == set(sizes)
    assert (timed.faults, timed.excluded) == ({}, {})
    assert {m for m, _ in packed.shapes} == {1, 64, 100}
    assert all(rows == out_rows for kernel in (aten, raw, packed) for rows, out_rows in kernel.shapes)


def test_weight_is_packed_once_for_a_band() -> None:
    packed = RecordingKernel("packed", "p")
    sweep = make_sweep(packed)
    name = packed.candidate.id
    sweep.time({m: [name] for m in (1, 2, 33, 64)}, 0.0)
    assert packed.packed == 1
    sweep.time({m: [name] for m in (7, 8)}, 0.0)
    assert packed.packed == 1
    sweep.time({m: [name] for m in (65, 100)}, 0.0)
    assert packed.packed == 2


@pytest.mark.parametrize("problem", [
    replace(PROBLEM, a=Operand("float32", Layout("col"))), replace(PROBLEM, out=Layout("col")),
    replace(PROBLEM, out=Layout(ld=128)),
])  # fmt: skip
def test_operands_are_made_anew_where_rows_are_no_views(problem: Problem) -> None:
    assert not rows_are_views(problem)
    packed = RecordingKernel("packed", "p")
    packed.run = lambda a, b, aux, out: packed.shapes.add((a.shape[0], out.shape[0]))  # type: ignore[method-assign]
    make_sweep(packed, problem=problem).time({m: [packed.candidate.id] for m in (1, 2, 33)}, 0.0)
    assert packed.packed == 3
    assert packed.shapes == {(1, 1), (2, 2), (33, 33)}


def test_kernel_that_raises_is_not_timed_at_larger_m() -> None:
    good, bad = RecordingKernel("good"), RecordingKernel("bad")
    bad.fails_from = 10
    timed = make_sweep(good, bad).time({m: [good.candidate.id, bad.candidate.id] for m in (5, 10, 20, 30)}, 0.0)
    assert {m: set(times) for m, times in timed.times.items()} == {
        5: {good.candidate.id, bad.candidate.id}, 10: {good.candidate.id}, 20: {good.candidate.id},
        30: {good.candidate.id},
    }  # fmt: skip
    assert timed.faults == {bad.candidate.id: Verdict("crashed", "raised ValueError: too many rows")}
    assert max(m for m, _ in bad.shapes) == 10


def test_layouts_beyond_the_memory_limit_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(RecordingKernel):
        def pack(self, b: Any) -> PackedWeight:
            return PackedWeight(str(self.packing), (b.new_empty(2 << 20),), PROBLEM.n, PROBLEM.k, "float32")

        def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None: ...

    monkeypatch.setattr(devices.HostTiming, "spare_bytes", 12 << 20)
    first, second, raw = Large("first", "p"), Large("second", "q"), RecordingKernel("raw")
    ids = [kernel.candidate.id for kernel in (first, second, raw)]
    timed = make_sweep(first, second, raw).time({5: ids}, 0.0)
    assert set(timed.times[5]) == {ids[0], ids[2]}
    assert set(timed.excluded) == {ids[1]}
    assert "no memory" in timed.excluded[ids[1]]


def test_tensors_of_the_epilogue_have_the_rows_of_the_m() -> None:
    problem = replace(
        PROBLEM,
        epilogue=(Step("scale", "row", "float32"), Step("bias", "col", "float32"), Step("add", "full", "float32")),
    )
    shapes: set[tuple[tuple[int, ...], ...]] = set()
    kernel = RecordingKernel("k")
    kernel.run = lambda a, b, aux, out: shapes.add(tuple(tuple(t.shape) for t in (a, b, *aux, out)))  # type: ignore
    make_sweep(kernel, problem=problem).time({3: [kernel.candidate.id]}, 0.0)
    (shape,) = shapes
    assert shape[:2] == ((3, 96), (96, 64))
    assert shape[2][0] == 3
    assert shape[3][0] == 64
    assert shape[4:] == ((3, 64), (3, 64))
