"""Verification at other M: correct kernels pass, and a fault at one M is detected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtune.core.candidate import Candidate
from gemmtune.core.devices import CPU
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.testing import hostile
from gemmtune.timing.race_operands import empty_output
from gemmtune.verify import row_stack
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.row_counts import other_row_counts, tile_rows
from gemmtune.verify.row_stack import (
    Part,
    RowCountVerifier,
    RowStack,
    TimeLimit,
    part_of,
    parts_of,
    row_groups,
    rows_are_views,
)  # fmt: skip
from gemmtune.verify.verify import Run, make_reference_cases

COL = Layout("col")
TILED = Candidate.make("any", "kernel", bm=16)
AMPLE_S = 60.0


def linear(m: int, n: int, k: int, dtype: str = "float32", epilogue: tuple[Step, ...] = ()) -> Problem:
    return Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=True), dtype, epilogue)


def integers(m: int, n: int, k: int, out: str = "int32", epilogue: tuple[Step, ...] = ()) -> Problem:
    operand = Operand("int8", COL, constant=True)
    return Problem("int_mm", m, n, k, Operand("int8"), operand, out, epilogue, acc="int32")


SCALES = (Step("scale", "row", "float32"), Step("scale", "col", "float32"))
PLAIN = linear(16, 96, 64)
PROBLEMS = [
    PLAIN,
    linear(1, 40, 65, "bfloat16"),
    linear(16, 96, 64, "bfloat16", (Step("bias", "col", "bfloat16"), Step("add", "full", "bfloat16"))),
    linear(8, 96, 64, "float16", (Step("scale", "row", "float32"),)),
    replace(PLAIN, a=Operand("float32", align=16)),
    replace(PLAIN, a=Operand("float32", COL)),
    replace(PLAIN, out=Layout(ld=128)),
    replace(linear(8, 40, 64, "bfloat16"), family="bmm", batch=3, b=Operand("bfloat16")),
    integers(16, 96, 256),
    integers(16, 96, 64, "int8", (*SCALES, Step("bias", "col", "float32"))),
    Problem(
        "mixed_mm", 16, 96, 128, Operand("bfloat16"),
        Operand("int4", COL, constant=True, quant=Quant(32, "bfloat16", True)), "bfloat16",
    ),
]  # fmt: skip


def run_verifier(problem: Problem, run: Run, time_limit_s: float = AMPLE_S) -> tuple[str, str]:
    verdict = RowCountVerifier(problem, make_reference_cases(problem, 0)).verify(run, TILED, time_limit_s)
    return verdict.kind, verdict.detail


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_correct_kernel_passes_at_all_m(problem: Problem) -> None:
    row_counts: list[int] = []
    correct = hostile.correct(problem)

    def run(inputs: Inputs, out: Tensor) -> None:
        assert inputs.a.shape[-2] == out.shape[-2]
        row_counts.append(out.shape[-2])
        correct(inputs, out)

    verifier = RowCountVerifier(problem, make_reference_cases(problem, 0))
    for _ in range(2):  # on new operands, then on cached ones
        assert verifier.verify(run, TILED, AMPLE_S).ok
        assert set(row_counts) == set(other_row_counts(problem, TILED))
        assert all(row_counts.count(m) >= 2 for m in set(row_counts))
        row_counts.clear()
    assert not verifier.has_modified_operands()


@pytest.mark.parametrize("problem", PROBLEMS[:5] + PROBLEMS[8:], ids=lambda problem: problem.key)
def test_stacked_operands_have_the_layout_and_guards_of_single_ones(problem: Problem) -> None:
    """Rows are dense, even M are aligned, odd M are misaligned, and guard bands follow the last row."""
    test_cases = make_reference_cases(problem, 0)
    for counts in row_groups(problem, other_row_counts(problem, TILED), CPU):
        stack = RowStack.make(problem, test_cases, counts)
        assert stack is not None
        assert len({m % 2 for m in counts}) == 1
        for part in stack.parts:
            a = part_of(problem, stack.case.inputs, part).a
            assert a.shape == (part.m, problem.k)
            is_misaligned = counts[0] % 2 == 1 and problem.a.align == 0
            assert a.data_ptr() % 16 == (a.element_size() if is_misaligned else 0)
        for part in stack.parts[:-1]:
            guard_row = stack.case.inputs.a[part.start + part.m]
            assert bool(guard_row.isnan().all() if guard_row.is_floating_point() else (guard_row == guard_row[0]).all())
        positions = [position for m in counts for position in stack.case.bank.row_indices(m)]  # type: ignore[union-attr]
        expected = stack.case.bank.value[positions]  # type: ignore[union-attr]
        assert torch.allclose(stack.case.value.double(), expected.double(), 0.0, 0.0, equal_nan=True)


@pytest.mark.parametrize("layout", [5, 6, 7])
def test_m_is_not_stacked_where_its_layout_would_change(layout: int) -> None:
    problem = PROBLEMS[layout]
    assert all(len(group) == 1 for group in row_groups(problem, other_row_counts(problem, TILED), CPU))


def test_row_groups_stack_many_m() -> None:
    counts = list(other_row_counts(PLAIN, TILED))
    groups = row_groups(PLAIN, counts, CPU)
    assert sorted(m for group in groups for m in group) == sorted(counts)
    assert len(groups) == 2
    wide = replace(PLAIN, n=1 << 16)
    assert all(sum(group) <= 2 or len(group) == 1 for group in row_groups(wide, counts, CPU))


# --- faults ------------------------------------------------------------------------------------------------------


def faulty_at(m: int, fault: Callable[[Inputs, Tensor], None], problem: Problem) -> Run:
    """Return a kernel that is correct, except for the fault ``fault`` at one M."""
    correct = hostile.correct(problem)

    def run(inputs: Inputs, out: Tensor) -> None:
        correct(inputs, out)
        if out.shape[-2] == m:
            fault(inputs, out)

    return run


def wrong_last_element(inputs: Inputs, out: Tensor) -> None:
    out[..., -1, -1] = 77


def write_past_the_end(inputs: Inputs, out: Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() + (out.shape[-2] - 1) * out.stride(-2) + out.shape[-1]).fill_(1)


def write_into_a(inputs: Inputs, out: Tensor) -> None:
    inputs.a[..., -1, -1] = 3


@pytest.mark.parametrize("m", [1, 2, 15, 17, 127])
@pytest.mark.parametrize(("fault", "expected"), [
    (wrong_last_element, "expected"), (write_past_the_end, "overwritten"), (write_into_a, "wrote into its inputs"),
])  # fmt: skip
@pytest.mark.parametrize("problem", [PROBLEMS[i] for i in (0, 2, 4, 5, 7, 8)], ids=lambda problem: problem.key)
def test_fault_at_one_m_is_detected_with_its_m(
    problem: Problem, fault: Callable[[Inputs, Tensor], None], expected: str, m: int
) -> None:
    if fault is write_past_the_end and problem.family == "bmm":
        pytest.skip("behind the first of a batch's outputs is the second")
    kind, detail = run_verifier(problem, faulty_at(m, fault, problem))
    assert kind == "wrong"
    assert expected in detail
    assert f"M = {m})" in detail


@pytest.mark.parametrize("problem", [PLAIN, PROBLEMS[8]], ids=lambda problem: problem.key)
def test_unwritten_element_is_detected_for_any_expected_value(problem: Problem) -> None:
    """The first poison may equal the expected value (NaN, a byte); the second differs."""
    correct = hostile.correct(problem)

    def run(inputs: Inputs, out: Tensor) -> None:
        before = out[..., -1, -1].clone()
        correct(inputs, out)
        if out.shape[-2] == 17:
            out[..., -1, -1] = before

    assert run_verifier(problem, run)[0] == "wrong"


def test_kernel_that_is_wrong_once_is_unstable() -> None:
    calls = 0
    correct = hostile.correct(PLAIN)

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        correct(inputs, out)
        calls += 1
        if calls == 3:
            out[-1, -1] = 77.0

    kind, detail = run_verifier(PLAIN, run)
    assert kind == "unstable"
    assert "not so when called again" in detail


def test_operands_that_a_kernel_modified_are_reported() -> None:
    verifier = RowCountVerifier(PLAIN, make_reference_cases(PLAIN, 0))
    assert not verifier.verify(faulty_at(17, write_into_a, PLAIN), TILED, AMPLE_S).ok
    assert verifier.has_modified_operands()


# --- time and memory ---------------------------------------------------------------------------------------------


def test_expired_time_limit_stops_after_the_first_m(monkeypatch: pytest.MonkeyPatch) -> None:
    row_counts: set[int] = set()
    correct = hostile.correct(PLAIN)

    def run(inputs: Inputs, out: Tensor) -> None:
        row_counts.add(out.shape[-2])
        correct(inputs, out)

    assert run_verifier(PLAIN, run, 0.0)[0] == "within_bound"
    assert row_counts == {1}


def test_time_limit_starts_at_its_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(row_stack.time, "perf_counter", lambda: now)
    limit = TimeLimit(1.0)
    now = 50.0
    assert not limit.over()
    limit.start()
    now = 50.5
    limit.start()
    assert not limit.over()
    now = 51.5
    assert limit.over()


def test_number_of_cached_operands_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = RowCountVerifier(PLAIN, make_reference_cases(PLAIN, 0))
    for tile, cached in ((16, 1), (32, 3), (16, 3)):  # odd M; then odd and even M
        assert verifier.verify(hostile.correct(PLAIN), Candidate.make("any", "kernel", bm=tile), AMPLE_S).ok
        assert len(verifier._kept) == cached
    monkeypatch.setattr(row_stack, "_CACHE_BYTES", 1)
    assert verifier.verify(hostile.correct(PLAIN), Candidate.make("any", "kernel", bm=8), AMPLE_S).ok
    assert len(verifier._kept) == 1


def test_parts_start_at_aligned_rows_with_gaps() -> None:
    assert parts_of((1, 15, 16, 17)) == ((0, 1), (16, 15), (32, 16), (64, 17))


@pytest.mark.parametrize(("config", "rows"), [
    ({"bm": 64, "bn": 128}, 64), ({"mr": 6, "nr": 16}, 6), ({"block_m": 32}, 32), ({}, 1), ({"bn": 128}, 1),
    ({"bm": 0}, 1), ({"bm": "64"}, 1),
])  # fmt: skip
def test_tile_rows_of_a_config(config: dict[str, Any], rows: int) -> None:
    assert tile_rows(Candidate.make("any", "kernel", **config)) == rows


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_rows_are_views_where_the_first_rows_have_the_layout_of_a_smaller_problem(problem: Problem) -> None:
    """The first rows of larger operands have the strides that ``inputs`` gives to a Problem with fewer rows."""
    large, small = (make_reference_cases(problem.with_m(m), 0)[0].inputs for m in (24, 7))
    out_large, out_small = (empty_output(problem.with_m(m)) for m in (24, 7))
    views = part_of(problem, large, Part(0, 7)), out_large.narrow(-2, 0, 7)
    pairs = [(views[0].a, small.a), (views[1], out_small), *zip(views[0].aux, small.aux, strict=True)]
    equal = all((view.shape, view.stride()) == (whole.shape, whole.stride()) for view, whole in pairs)
    assert equal or not rows_are_views(problem)


def test_rows_are_no_views_with_batches_columns_or_gaps() -> None:
    assert [problem for problem in PROBLEMS if not rows_are_views(problem)] == [PROBLEMS[5], PROBLEMS[6], PROBLEMS[7]]
    assert not rows_are_views(replace(PLAIN, out=COL))
    assert rows_are_views(replace(PLAIN, out=Layout(ld=PLAIN.n)))
    assert rows_are_views(replace(PLAIN, a=Operand("float32", Layout(ld=128))))
