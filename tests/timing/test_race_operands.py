"""The operands of a race: the copies on which kernels are called, and the memory limit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
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


class RecordingKernel(Kernel):
    """Kernel that records the addresses of B."""

    def __init__(self, name: str, packing: str | None, size: int = 0, backend: str = "x") -> None:
        self.candidate, self.problem, self.packing = Candidate.make(backend, name), PROBLEM, packing
        self.size = size
        self.b_addresses: list[int] = []

    def run(self, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
        data = b.data[0] if isinstance(b, PackedWeight) else b
        self.b_addresses.append(data.data_ptr())

    def pack(self, b: Any) -> PackedWeight:
        data = b.new_empty(self.size // 4) if self.size else b.clone()
        return PackedWeight(str(self.packing), (data,), PROBLEM.n, PROBLEM.k, "float32")


def make_operands(*kernels: RecordingKernel, problem: Problem = PROBLEM) -> RaceOperands:
    return RaceOperands({kernel.candidate.id: kernel for kernel in kernels}, problem, devices.of(TARGET), 0, None)


def test_last_level_cache_of_a_cpu() -> None:
    assert last_level_cache(TARGET) == MB
    assert last_level_cache(Target("cpu", "x", "y", caches=(1, 2, 0))) == 2
    assert last_level_cache(Target("cpu", "x", "y")) == 32 * MB


def test_kernels_of_one_layout_rotate_over_its_copies() -> None:
    first, second = RecordingKernel("a", "p"), RecordingKernel("b", "p")
    operands = make_operands(first, second)
    for _ in range(4):
        for entrant in operands._entrants:
            entrant.run(0)
    addresses = [pointer for pair in zip(first.b_addresses, second.b_addresses, strict=True) for pointer in pair]
    copies = len(set(addresses))
    assert copies == 2  # one MB each, twice the cache in total
    assert all(x != y for x, y in itertools.pairwise(addresses))


def test_raw_and_packed_kernels_have_separate_copies() -> None:
    raw, packed = RecordingKernel("raw", None), RecordingKernel("packed", "p")
    operands = make_operands(raw, packed)
    for entrant in operands._entrants:
        entrant.run(0)
    assert raw.b_addresses[0] != packed.b_addresses[0]
    assert [entrant.packing for entrant in operands._entrants] == [None, "p"]


def test_changing_operand_is_packed_in_each_call() -> None:
    problem = Problem("mm", 2, 256, 1024, Operand("float32"), Operand("float32", Layout("col")), "float32")
    packing_calls = []

    class Packing(RecordingKernel):
        def pack(self, b: Any) -> PackedWeight:
            packing_calls.append(1)
            return super().pack(b)

    operands = make_operands(Packing("p", "p"), problem=problem)
    assert packing_calls == []
    for _ in range(3):
        operands._entrants[0].run(0)
    assert len(packing_calls) == 3


def test_layouts_beyond_the_memory_limit_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices.HostTiming, "spare_bytes", 8 * MB)
    kernels = [RecordingKernel(name, name, 4 * MB) for name in "abcdef"]
    operands = make_operands(*kernels, RecordingKernel("raw", None))
    entrants = {entrant.id for entrant in operands._entrants}
    assert kernels[0].candidate.id in entrants
    assert kernels[-1].candidate.id in operands.excluded
    assert "x/raw" in entrants
    updates: list[LeaderUpdate] = []
    result = operands.race(0.05, 0, updates.append)
    assert {placement.id for placement in result.evidence.values()} == {k.candidate.id for k in kernels} | {"x/raw"}
    reasons = {placement.id: placement.reason for placement in result.evidence.values() if placement.sample is None}
    assert "no memory" in reasons[kernels[-1].candidate.id]


def test_layout_beyond_the_memory_limit_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing would allocate memory beyond the limit."""
    packed_layouts: list[str] = []

    class Packing(RecordingKernel):
        def pack(self, b: Any) -> PackedWeight:
            packed_layouts.append(str(self.packing))
            return super().pack(b)

    size = PROBLEM.weight_bytes
    monkeypatch.setattr(RaceOperands, "_room", lambda self: operand_bytes(PROBLEM) + 2 * size + size // 2)
    operands = make_operands(*(Packing(name, name, size) for name in "abcd"))
    assert packed_layouts == ["a", "b"]
    assert len(operands.excluded) == 2


def test_race_without_kernels_is_none_valid() -> None:
    assert make_operands().race(0.1, 0, lambda _: None).outcome == "none_valid"


def test_hot_operands_are_one_set_with_a_condition() -> None:
    kernel, aten = RecordingKernel("k", "x:a"), RecordingKernel("mm", None, backend="aten")
    operands = RaceOperands({k.candidate.id: k for k in (aten, kernel)}, PROBLEM, devices.of(TARGET), 0, None, hot=True)
    result = operands.race(0.2, 0, lambda leading: None)
    assert len(set(kernel.b_addresses)) == 1
    assert len(set(aten.b_addresses)) == 1
    for row in result.evidence.values():
        assert row.sample is not None
        assert row.sample.condition == "hot"
        assert row.sample.conditions["operands"] == "hot"
        assert row.sample.conditions["threads"] == "1"


def test_moved_operands_have_equal_values_and_strides() -> None:
    kernel, aten = RecordingKernel("k", "x:a"), RecordingKernel("mm", None, backend="aten")
    operands = RaceOperands({k.candidate.id: k for k in (aten, kernel)}, PROBLEM, devices.of(TARGET), 0, None)
    before = {name: pool.sets[0] for name, pool in operands._operands.items()}
    operands._move()
    for name, pool in operands._operands.items():
        (_, old, _), (inputs, new, _) = before[name], pool.sets[0]
        old, new = (b.data[0] if isinstance(b, PackedWeight) else b for b in (old, new))
        assert new.data_ptr() != old.data_ptr()
        assert new.stride() == old.stride()
        assert bool((new == old).all())
        assert name or inputs.b is pool.sets[0][1]


# --- other M


@pytest.mark.parametrize("m", [1, 3, 4])
def test_entrants_at_another_m_have_the_first_rows_of_the_same_operands(m: int) -> None:
    problem = replace(PROBLEM, m=4)
    calls: list[tuple[Tensor, Any, Tensor]] = []
    raw, packed = RecordingKernel("raw", None), RecordingKernel("packed", "p")
    for kernel in (raw, packed):
        kernel.run = lambda a, b, aux, out: calls.append((a, b, out))  # type: ignore[method-assign]
    operands = make_operands(raw, packed, problem=problem)
    entrants = operands.entrants_at(m)
    assert [(entrant.id, entrant.packing) for entrant in entrants] == [("x/raw", None), ("x/packed", "p")]
    for entrant in entrants * 2:
        entrant.run(0)
    for index, (a, b, out) in enumerate(calls):
        sets = operands._operands["p" if index % 2 else ""].sets
        (whole,) = (item for item in sets if item[1] is b)
        assert (tuple(a.shape), tuple(out.shape)) == ((m, problem.k), (m, problem.n))
        for part, tensor in ((a, whole[0].a), (out, whole[2])):
            assert part.data_ptr() == tensor.data_ptr()
            assert part.stride() == tensor.stride()
    assert len({id(b) for _, b, _ in calls}) == 4  # two copies of each layout, in turn


@pytest.mark.parametrize(("numbers", "expected"), [(None, [1, 2]), ({"x/a": 3, "x/b": 7}, [3, 7])])
def test_marker_has_the_number_of_the_running_kernel(numbers: dict[str, int] | None, expected: list[int]) -> None:
    seen: list[int] = []
    kernels = {name: RecordingKernel(name[-1], None) for name in ("x/a", "x/b")}
    for kernel in kernels.values():
        kernel.run = lambda *_: seen.append(operands._marker[0])  # type: ignore[method-assign]
    operands = RaceOperands(kernels, PROBLEM, devices.of(TARGET), 0, None, numbers=numbers)
    for entrant in (*operands.entrants_at(PROBLEM.m), *operands.entrants_at(1)):
        entrant.run(0)
    assert seen == expected * 2


# --- weights that are evicted


def used_weights(operands: RaceOperands) -> list[int]:
    return [weight.data_ptr() for weight in operands._take_used() if isinstance(weight, Tensor)]


def test_weights_that_were_used_are_taken_once() -> None:
    kernel = RecordingKernel("raw", None)
    operands = make_operands(kernel)
    (entrant,) = operands._entrants
    assert len(set(used_weights(operands))) == operands._sets == 2  # all are in the cache at first
    assert used_weights(operands) == []
    entrant.run(0)
    assert used_weights(operands) == kernel.b_addresses[-1:]
    for _ in range(2 * operands._sets):
        entrant.run(0)
    assert sorted(used_weights(operands)) == sorted(set(kernel.b_addresses))
    assert used_weights(operands) == []


def test_moved_weights_and_those_of_another_m_are_taken() -> None:
    kernel = RecordingKernel("raw", None)
    operands = make_operands(kernel)
    used_weights(operands)
    operands._move()
    assert len(set(used_weights(operands))) == operands._sets
    (entrant,) = operands.entrants_at(1)
    assert len(set(used_weights(operands))) == operands._sets
    entrant.run(0)
    assert used_weights(operands) == kernel.b_addresses[-1:]


def test_a_repeated_call_of_one_set_is_taken() -> None:
    kernel = RecordingKernel("raw", None, backend="aten")
    operands = make_operands(kernel)
    raced = operands.raced_kernel(kernel.candidate.id)
    used_weights(operands)
    for index in (1, 0, 1):
        raced.call(index)
        assert used_weights(operands) == kernel.b_addresses[-1:]


@pytest.mark.parametrize("evicts", [True, False])
def test_clock_of_a_host_evicts_the_weights_that_were_used(monkeypatch: pytest.MonkeyPatch, evicts: bool) -> None:
    """Or reads other memory where it cannot evict."""
    evicted: list[Any] = []
    monkeypatch.setattr(devices, "can_evict", lambda target: evicts)
    monkeypatch.setattr(devices, "evict", lambda weights: evicted.append(list(weights)))
    monkeypatch.setattr(devices, "Flush", lambda problem, target: lambda: evicted.append("read"))
    kernel = RecordingKernel("raw", None)
    operands = make_operands(kernel, problem=PROBLEM.with_m(1))
    operands._clock.time_round([operands._entrants[0].run] * 2, [1, 1])
    if evicts:
        assert [len(weights) for weights in evicted] == [2, 1]
    else:
        assert evicted == ["read", "read"]
