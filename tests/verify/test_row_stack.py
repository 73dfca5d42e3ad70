"""Verification at other M: right kernels pass, and faults that show at one M only are found there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemmtune.core.candidate import Candidate
from gemmtune.core.devices import CPU
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.testing import hostile
from gemmtune.verify import row_stack
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.row_counts import other_row_counts
from gemmtune.verify.row_stack import RowCountVerifier, RowStack, TimeLimit, part_of, parts_of, row_groups
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


def checked(problem: Problem, run: Run, time_limit_s: float = AMPLE_S) -> tuple[str, str]:
    verdict = RowCountVerifier(problem, make_reference_cases(problem, 0)).verify(run, TILED, time_limit_s)
    return verdict.kind, verdict.detail


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.key)
def test_a_right_kernel_passes_at_every_m(problem: Problem) -> None:
    seen: list[int] = []
    right = hostile.correct(problem)

    def run(inputs: Inputs, out: Tensor) -> None:
        assert inputs.a.shape[-2] == out.shape[-2]
        seen.append(out.shape[-2])
        right(inputs, out)

    rows = RowCountVerifier(problem, make_reference_cases(problem, 0))
    for _ in range(2):  # on operands that were made, and on those that were kept
        assert rows.verify(run, TILED, AMPLE_S).ok
        assert set(seen) == set(other_row_counts(problem, TILED))
        assert all(seen.count(m) >= 2 for m in set(seen))
        seen.clear()
    assert not rows.touched()


@pytest.mark.parametrize("problem", PROBLEMS[:5] + PROBLEMS[8:], ids=lambda problem: problem.key)
def test_operands_of_one_m_are_laid_out_as_alone(problem: Problem) -> None:
    """Dense rows, even M on a boundary and odd ones off it, and the poison of guards behind the last row."""
    draws = make_reference_cases(problem, 0)
    for counts in row_groups(problem, other_row_counts(problem, TILED), CPU):
        stack = RowStack.make(problem, draws, counts)
        assert stack is not None
        assert len({m % 2 for m in counts}) == 1
        for part in stack.parts:
            a = part_of(problem, stack.draw.inputs, part).a
            assert a.shape == (part.m, problem.k)
            shifted = counts[0] % 2 == 1 and problem.a.align == 0
            assert a.data_ptr() % 16 == (a.element_size() if shifted else 0)
        for part in stack.parts[:-1]:
            behind = stack.draw.inputs.a[part.start + part.m]
            assert bool(behind.isnan().all() if behind.is_floating_point() else (behind == behind[0]).all())
        places = [place for m in counts for place in stack.draw.bank.places(m)]  # type: ignore[union-attr]
        known = stack.draw.bank.value[places]  # type: ignore[union-attr]
        assert torch.allclose(stack.draw.value.double(), known.double(), 0.0, 0.0, equal_nan=True)


@pytest.mark.parametrize("layout", [5, 6, 7])
def test_an_m_is_alone_where_a_part_would_have_another_layout(layout: int) -> None:
    problem = PROBLEMS[layout]
    assert all(len(group) == 1 for group in row_groups(problem, other_row_counts(problem, TILED), CPU))


def test_few_comparisons_hold_many_m() -> None:
    counts = list(other_row_counts(PLAIN, TILED))
    groups = row_groups(PLAIN, counts, CPU)
    assert sorted(m for group in groups for m in group) == sorted(counts)
    assert len(groups) == 2
    wide = replace(PLAIN, n=1 << 16)
    assert all(sum(group) <= 2 or len(group) == 1 for group in row_groups(wide, counts, CPU))


# --- faults ------------------------------------------------------------------------------------------------------


def only_at(m: int, spoil: Callable[[Inputs, Tensor], None], problem: Problem) -> Run:
    """A right kernel, but for what ``spoil`` does at one M."""
    right = hostile.correct(problem)

    def run(inputs: Inputs, out: Tensor) -> None:
        right(inputs, out)
        if out.shape[-2] == m:
            spoil(inputs, out)

    return run


def last_element(inputs: Inputs, out: Tensor) -> None:
    out[..., -1, -1] = 77


def beyond(inputs: Inputs, out: Tensor) -> None:
    out.as_strided((1,), (1,), out.storage_offset() + (out.shape[-2] - 1) * out.stride(-2) + out.shape[-1]).fill_(1)


def into_a(inputs: Inputs, out: Tensor) -> None:
    inputs.a[..., -1, -1] = 3


@pytest.mark.parametrize("m", [1, 2, 15, 17, 127])
@pytest.mark.parametrize(("spoil", "word"), [
    (last_element, "expected"), (beyond, "overwritten"), (into_a, "wrote into its inputs"),
])  # fmt: skip
@pytest.mark.parametrize("problem", [PROBLEMS[i] for i in (0, 2, 4, 5, 7, 8)], ids=lambda problem: problem.key)
def test_a_fault_at_one_m_is_found_and_named(
    problem: Problem, spoil: Callable[[Inputs, Tensor], None], word: str, m: int
) -> None:
    if spoil is beyond and problem.family == "bmm":
        pytest.skip("behind the first of a batch's outputs is the second")
    kind, detail = checked(problem, only_at(m, spoil, problem))
    assert kind == "wrong"
    assert word in detail
    assert f"M = {m})" in detail


@pytest.mark.parametrize("problem", [PLAIN, PROBLEMS[8]], ids=lambda problem: problem.key)
def test_an_element_that_is_not_written_is_found_whatever_is_expected(problem: Problem) -> None:
    """The first poison may be what is right there (NaN, a byte): the second is not."""
    right = hostile.correct(problem)

    def run(inputs: Inputs, out: Tensor) -> None:
        before = out[..., -1, -1].clone()
        right(inputs, out)
        if out.shape[-2] == 17:
            out[..., -1, -1] = before

    assert checked(problem, run)[0] == "wrong"


def test_a_kernel_that_is_wrong_once_is_unstable() -> None:
    calls = 0
    right = hostile.correct(PLAIN)

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        right(inputs, out)
        calls += 1
        if calls == 3:
            out[-1, -1] = 77.0

    kind, detail = checked(PLAIN, run)
    assert kind == "unstable"
    assert "not so when called again" in detail


def test_what_a_kernel_wrote_into_is_made_anew() -> None:
    rows = RowCountVerifier(PLAIN, make_reference_cases(PLAIN, 0))
    assert not rows.verify(only_at(17, into_a, PLAIN), TILED, AMPLE_S).ok
    assert rows.touched()


# --- time and memory ---------------------------------------------------------------------------------------------


def test_time_that_has_passed_ends_it_after_the_first_m(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()
    right = hostile.correct(PLAIN)

    def run(inputs: Inputs, out: Tensor) -> None:
        seen.add(out.shape[-2])
        right(inputs, out)

    assert checked(PLAIN, run, 0.0)[0] == "within_bound"
    assert seen == {1}


def test_patience_runs_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(row_stack.time, "perf_counter", lambda: now)
    patience = TimeLimit(1.0)
    now = 50.0
    assert not patience.over()
    patience.start()
    now = 50.5
    patience.start()
    assert not patience.over()
    now = 51.5
    assert patience.over()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = RowCountVerifier(PLAIN, make_reference_cases(PLAIN, 0))
    for tile, kept in ((16, 1), (32, 3), (16, 3)):  # odd M; odd and even ones
        assert rows.verify(hostile.correct(PLAIN), Candidate.make("any", "kernel", bm=tile), AMPLE_S).ok
        assert len(rows._kept) == kept
    monkeypatch.setattr(row_stack, "_CACHE_BYTES", 1)
    assert rows.verify(hostile.correct(PLAIN), Candidate.make("any", "kernel", bm=8), AMPLE_S).ok
    assert len(rows._kept) == 1


def test_parts_begin_on_boundaries_with_rows_between() -> None:
    assert parts_of((1, 15, 16, 17)) == ((0, 1), (16, 15), (32, 16), (64, 17))
