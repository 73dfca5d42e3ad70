"""The operands of a race: which copies kernels are called on, and within which memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from gemmtune.backends.base import Kernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight
from gemmtune.timing import devices
from gemmtune.timing.flush import last_level_cache
from gemmtune.timing.outcome import LeaderUpdate
from gemmtune.timing.race_operands import RaceOperands
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
    return RaceOperands({kernel.candidate.id: kernel for kernel in kernels}, problem, devices.of(TARGET), 0, None)


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
    assert [entrant.packing for entrant in laid._entrants] == [None, "p"]


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
    monkeypatch.setattr(devices.HostTiming, "spare_bytes", 8 * MB)
    kernels = [Recorder(name, name, 4 * MB) for name in "abcdef"]
    laid = track(*kernels, Recorder("raw", None))
    raced = {entrant.id for entrant in laid._entrants}
    assert kernels[0].candidate.id in raced
    assert kernels[-1].candidate.id in laid.excluded
    assert "x/raw" in raced
    seen: list[LeaderUpdate] = []
    result = laid.race(0.05, 0, seen.append)
    assert {place.id for place in result.evidence.values()} == {k.candidate.id for k in kernels} | {"x/raw"}
    left_out = {place.id: place.reason for place in result.evidence.values() if place.sample is None}
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
    made = RaceOperands({k.candidate.id: k for k in (aten, kernel)}, PROBLEM, devices.of(TARGET), 0, None, hot=True)
    result = made.race(0.2, 0, lambda leading: None)
    assert len(set(kernel.seen)) == 1
    assert len(set(aten.seen)) == 1
    for row in result.evidence.values():
        assert row.sample is not None
        assert row.sample.condition == "hot"
        assert row.sample.conditions["operands"] == "hot"
        assert row.sample.conditions["threads"] == "1"


def test_operands_move_and_stay_what_they_are() -> None:
    kernel, aten = Recorder("k", "x:a"), Recorder("mm", None, backend="aten")
    made = RaceOperands({k.candidate.id: k for k in (aten, kernel)}, PROBLEM, devices.of(TARGET), 0, None)
    before = {name: stock._sets[0] for name, stock in made._operands.items()}
    made._move()
    for name, stock in made._operands.items():
        (_, old, _), (inputs, new, _) = before[name], stock._sets[0]
        old, new = (b.data[0] if isinstance(b, PackedWeight) else b for b in (old, new))
        assert new.data_ptr() != old.data_ptr()
        assert new.stride() == old.stride()
        assert bool((new == old).all())
        assert name or inputs.b is stock._sets[0][1]
