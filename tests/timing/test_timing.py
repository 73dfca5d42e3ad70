"""Rough timing and the set-up of a race: what is called how often, on which copies, within which memory."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight
from gemmtune.timing import timing
from gemmtune.timing.outcome import LeaderUpdate
from gemmtune.timing.timing import RaceOperands, last_level_cache, screening_times
from gemmtune.verify.inputs import operand_bytes

MB = 1 << 20
TARGET = Target("cpu", "small cache", "x86_64", caches=(32 << 10, 1 << 18, 1 << 20), threads=1)
PROBLEM = Problem("mm", 2, 256, 1024, Operand("float32"), Operand("float32", Layout("col"), constant=True), "float32")


class Recorder(Kernel):
    """Notes which B it was called with."""

    def __init__(self, name: str, packing: str | None, size: int = 0, backend: str = "x") -> None:
        self.candidate, self.problem, self.packing = Candidate.make(backend, name), PROBLEM, packing
        self.size = size
        self.seen: list[int] = []

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        data = b.data[0] if isinstance(b, PackedWeight) else b
        self.seen.append(data.data_ptr())

    def pack(self, b: Any) -> PackedWeight:
        data = b.new_empty(self.size // 4) if self.size else b.clone()
        return PackedWeight(str(self.packing), (data,), PROBLEM.n, PROBLEM.k, "float32")


def track(*kernels: Recorder, problem: Problem = PROBLEM) -> RaceOperands:
    return RaceOperands({kernel.candidate.id: kernel for kernel in kernels}, problem, TARGET, 0, None)


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

    assert len(screening_times(slow, lambda: pytest.fail("flushed"), worth_s=0.01)) == 1
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

    assert len(screening_times(call, lambda: None, worth_s=1e-3)) == 1
    assert len(calls) == 2


def test_the_last_level_cache() -> None:
    assert last_level_cache(TARGET) == MB
    assert last_level_cache(Target("cpu", "x", "y", caches=(1, 2, 0))) == 2
    assert last_level_cache(Target("cpu", "x", "y")) == 32 * MB


def test_kernels_of_one_layout_take_its_copies_in_turn() -> None:
    first, second = Recorder("a", "p"), Recorder("b", "p")
    laid = track(first, second)
    for _ in range(4):
        for entrant in laid._entrants:
            entrant.run(0)
    together = [pointer for pair in zip(first.seen, second.seen, strict=True) for pointer in pair]
    copies = len(set(together))
    assert copies == 2  # one MB each, twice the cache
    assert all(x != y for x, y in itertools.pairwise(together))


def test_raw_and_packed_kernels_have_their_own() -> None:
    raw, packed = Recorder("raw", None), Recorder("packed", "p")
    laid = track(raw, packed)
    for entrant in laid._entrants:
        entrant.run(0)
    assert raw.seen[0] != packed.seen[0]
    assert [entrant.group for entrant in laid._entrants] == ["", "p"]


def test_packing_counts_for_an_operand_that_is_not_constant() -> None:
    problem = Problem("mm", 2, 256, 1024, Operand("float32"), Operand("float32", Layout("col")), "float32")
    packs = []

    class Packing(Recorder):
        def pack(self, b: Any) -> PackedWeight:
            packs.append(1)
            return super().pack(b)

    laid = track(Packing("p", "p"), problem=problem)
    assert packs == []
    for _ in range(3):
        laid._entrants[0].run(0)
    assert len(packs) == 3


def test_layouts_beyond_the_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_FIXED_BYTES", 8 * MB)
    kernels = [Recorder(name, name, 4 * MB) for name in "abcdef"]
    laid = track(*kernels, Recorder("raw", None))
    raced = {entrant.id for entrant in laid._entrants}
    assert kernels[0].candidate.id in raced
    assert kernels[-1].candidate.id in laid.excluded
    assert "x/raw" in raced
    seen: list[LeaderUpdate] = []
    result = laid.race(0.05, 0, seen.append)
    assert {place.id for place in result.placed} == {k.candidate.id for k in kernels} | {"x/raw"}
    left_out = {place.id: place.reason for place in result.placed if place.sample is None}
    assert "no memory" in left_out[kernels[-1].candidate.id]


def test_a_layout_that_cannot_fit_is_not_packed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing it would take the very memory that there is none of."""
    packs: list[str] = []

    class Packing(Recorder):
        def pack(self, b: Any) -> PackedWeight:
            packs.append(str(self.packing))
            return super().pack(b)

    size = PROBLEM.weight_bytes
    monkeypatch.setattr(RaceOperands, "_room", lambda self: operand_bytes(PROBLEM) + 2 * size + size // 2)
    laid = track(*(Packing(name, name, size) for name in "abcd"))
    assert packs == ["a", "b"]
    assert len(laid.excluded) == 2


def test_nothing_to_race() -> None:
    assert track().race(0.1, 0, lambda _: None).outcome == "none_valid"


def test_hot_operands_are_one_set_and_samples_say_so() -> None:
    kernel, aten = Recorder("k", "x:a"), Recorder("mm", None, backend="aten")
    made = RaceOperands({k.candidate.id: k for k in (aten, kernel)}, PROBLEM, TARGET, 0, None, hot=True)
    result = made.race(0.2, 0, lambda leading: None)
    assert len(set(kernel.seen)) == 1
    assert len(set(aten.seen)) == 1
    for row in result.placed:
        assert row.sample is not None
        assert row.sample.condition == "hot"
        assert row.sample.conditions["operands"] == "hot"
        assert row.sample.conditions["threads"] == "1"


def test_operands_move_and_stay_what_they_are() -> None:
    kernel, aten = Recorder("k", "x:a"), Recorder("mm", None, backend="aten")
    made = RaceOperands({k.candidate.id: k for k in (aten, kernel)}, PROBLEM, TARGET, 0, None)
    before = {name: stock._sets[0] for name, stock in made._operands.items()}
    made._move()
    for name, stock in made._operands.items():
        (_, old, _), (inputs, new, _) = before[name], stock._sets[0]
        old, new = (b.data[0] if isinstance(b, PackedWeight) else b for b in (old, new))
        assert new.data_ptr() != old.data_ptr()
        assert new.stride() == old.stride()
        assert bool((new == old).all())
        assert name or inputs.b is stock._sets[0][1]


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
    monkeypatch.setattr(timing, "time", made)
    return made


@pytest.mark.parametrize("seconds", [1e-3, 10e-6], ids=["alone", "in batches"])
def test_rough_times_are_as_at_the_pace_of_the_beginning(machine: _Machine, seconds: float) -> None:
    pace, flushed = timing.SpeedReference(), []
    known = machine.kernel(seconds)
    first = timing.screening_times(known, lambda: flushed.append(1), None, pace)
    pace.offer(known, min(first))
    machine.pace = 1.4
    later = timing.screening_times(machine.kernel(1.1 * seconds), lambda: flushed.append(1), None, pace)
    assert first == pytest.approx([seconds] * 3)
    assert later == pytest.approx([1.1 * seconds] * 3)
    assert bool(flushed) == (seconds > 100e-6)


def test_a_pace_is_told_by_the_first_kernel_or_a_much_faster_one(machine: _Machine) -> None:
    pace = timing.SpeedReference()
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

    pace, known = timing.SpeedReference(), kernel("known", 1e-3)
    pace.offer(known, min(timing.screening_times(known, lambda: None, None, pace)))
    for name in ("second", "third"):
        calls.clear()  # another weight was packed
        assert timing.screening_times(kernel(name, 2e-3), lambda: None, None, pace) == pytest.approx([2e-3] * 3)
    assert pace.now() == pytest.approx(1.0)
