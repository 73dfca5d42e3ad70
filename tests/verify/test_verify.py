"""Verification: every planted fault is rejected, no correct kernel is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.weights import QuantWeight
from gemmtune.testing import hostile
from gemmtune.verify.adversarial import row_kinds, weight_kinds
from gemmtune.verify.inputs import Inputs
from gemmtune.verify.oracle import reference
from gemmtune.verify.verify import Run, make_reference_cases, verify

COL = Layout("col")
INT8 = Operand("int8", COL, constant=True, quant=Quant())
EPILOGUE = (Step("bias", "col", "float32"), Step("scale", "tensor", value=0.5))


def linear(m: int, n: int, k: int, dtype: str, **kwargs: object) -> Problem:
    return Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=True), dtype, **kwargs)  # type: ignore[arg-type]


def int8(m: int, n: int, k: int, out: str = "int32", epilogue: tuple[Step, ...] = ()) -> Problem:
    operand = Operand("int8", COL, constant=True)
    return Problem("int_mm", m, n, k, Operand("int8"), operand, out, epilogue, acc="int32")


def problem_for(dtype: str, m: int, n: int, k: int) -> Problem:
    return int8(m, n, k) if dtype == "int8" else linear(m, n, k, dtype)


def b_of(inputs: Inputs) -> Tensor:
    assert isinstance(inputs.b, Tensor)
    return inputs.b


# What depends on the run, or on what the output held before, shows as a difference between runs where it can.
KINDS = {
    "race": ("unstable",),
    "rare race": ("unstable", "wrong"),
    "adds to the output": ("unstable", "wrong"),
}
PLAIN_FAULTS = [name for name in hostile.FAULTY_KERNELS if name not in ("reversed epilogue", "NaN swallowed")]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k", [64, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("fault", PLAIN_FAULTS)
def test_planted_faults_are_rejected(fault: str, dtype: str, k: int, seed: int) -> None:
    problem = problem_for(dtype, 16, 96, k)
    verdict = verify(hostile.FAULTY_KERNELS[fault](problem), problem, make_reference_cases(problem, seed))
    assert verdict.kind in KINDS.get(fault, ("wrong",))
    assert verdict.detail
    assert verdict.worst > 1.0 or any(word in verdict.detail for word in ("bytes", "scaled", "never written", "inputs"))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("fault", [name for name in PLAIN_FAULTS if name not in ("x1.002", "8x8 block 10% off")])
def test_planted_faults_are_rejected_for_few_rows(fault: str, m: int) -> None:
    problem = linear(m, 33, 129, "bfloat16")
    assert not verify(hostile.FAULTY_KERNELS[fault](problem), problem, make_reference_cases(problem, 1)).ok


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_the_order_of_the_epilogue_matters(dtype: str) -> None:
    problem = replace(problem_for(dtype, 16, 96, 64), epilogue=EPILOGUE, out_dtype="float32")
    draws = make_reference_cases(problem, 0)
    assert not verify(hostile.reversed_epilogue(problem), problem, draws).ok
    assert verify(hostile.correct(problem), problem, draws).kind == "within_bound"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("m", [1, 16])
def test_nan_must_not_be_swallowed(dtype: str, m: int) -> None:
    problem = linear(m, 96, 64, dtype)
    verdict = verify(hostile.nan_swallowed(problem), problem, make_reference_cases(problem, 0))
    assert verdict.kind == "wrong"
    assert "in a row of A that is NaN" in verdict.detail


@pytest.mark.parametrize("k", [64, 1024, 16384])
def test_a_scale_of_two_in_a_thousand_is_seen_in_aggregate_alone(k: int) -> None:
    """Factor chosen so that no element leaves its bound: only slope can tell (bf16 rounds by up to 0.4%)."""
    problem = linear(64, 256, k, "bfloat16")
    draws = tuple(replace(d, tolerance=2 * d.tolerance).marked({}) for d in make_reference_cases(problem, 0)[:1])
    verdict = verify(hostile.scaled(problem), problem, draws)
    assert verdict.kind == "wrong"
    assert "scaled by 1.00" in verdict.detail
    assert verify(hostile.correct(problem), problem, draws).ok


def test_an_offset_is_seen_in_aggregate() -> None:
    problem = linear(64, 256, 1024, "bfloat16")
    draws = tuple(replace(d, tolerance=100 * d.tolerance).marked({}) for d in make_reference_cases(problem, 0)[:1])

    def run(inputs: Inputs, out: Tensor) -> None:
        out.copy_(hostile.value(problem, inputs) + 0.03)

    assert "on average" in verify(run, problem, draws).detail


def test_the_detail_says_where_and_by_how_much() -> None:
    problem = linear(8, 9, 32, "float32")

    def run(inputs: Inputs, out: Tensor) -> None:
        torch.mm(inputs.a, b_of(inputs), out=out)
        out[5, 7] += 1.0

    detail = verify(run, problem, make_reference_cases(problem, 0)).detail
    assert detail.startswith("out[5, 7] is ")
    assert "times the bound (uniform draw)" in detail


def test_gaps_between_rows_are_guarded() -> None:
    problem = linear(4, 6, 32, "float32", out=Layout("row", 8))
    draws = make_reference_cases(problem, 0)

    def run(inputs: Inputs, out: Tensor) -> None:
        assert out.stride() == (8, 1)
        out.copy_(inputs.a @ b_of(inputs))

    def trespass(inputs: Inputs, out: Tensor) -> None:
        run(inputs, out)
        out.as_strided((1,), (1,), out.storage_offset() + 7).zero_()

    assert verify(run, problem, draws).ok
    assert verify(trespass, problem, draws).detail.startswith("4 bytes between the rows of the output")


def test_a_write_before_the_output_is_seen() -> None:
    problem = linear(4, 6, 32, "bfloat16")

    def run(inputs: Inputs, out: Tensor) -> None:
        torch.mm(inputs.a, b_of(inputs), out=out)
        out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()

    assert "2 bytes before the output" in verify(run, problem, make_reference_cases(problem, 0)).detail


def test_differences_within_the_bound_are_recorded_not_punished() -> None:
    problem = linear(4, 6, 512, "float32")
    calls = 0

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        half = 256 if calls % 2 else 128
        b = b_of(inputs)
        out.copy_(inputs.a[:, :half] @ b[:half] + inputs.a[:, half:] @ b[half:])

    verdict = verify(run, problem, make_reference_cases(problem, 0))
    assert verdict.ok
    assert verdict.detail == "repeated runs differ within the bound"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("m", [1, 5, 64])
def test_every_kind_of_row_and_column_is_drawn_for_every_m(dtype: str, m: int) -> None:
    problem = problem_for(dtype, m, 96, 70)
    draws = make_reference_cases(problem, 3)
    assert draws[0].kind == "uniform"
    assert {row for draw in draws for row in draw.rows} >= set(row_kinds(problem))
    assert {kind for draw in draws for kind in draw.columns.weight} == set(weight_kinds(problem))
    values = [draw.value.double().nan_to_num(7.0, 1e30, -1e30) for draw in draws]
    assert all(not torch.equal(x, y) for i, x in enumerate(values) for y in values[:i])


@pytest.mark.parametrize("family", ["mm", "bmm", "int_mm", "mixed_mm", "scaled_mm"])
def test_every_draw_has_its_own_answer(family: str) -> None:
    """The answers that are taken from the first draw's are those of these operands."""
    base = {
        "mm": linear(6, 5, 9, "float32", epilogue=(Step("scale", "row", "float32"), Step("add", "full", "float32"))),
        "bmm": Problem("bmm", 6, 5, 9, Operand("bfloat16"), Operand("bfloat16"), "bfloat16", batch=2),
        "int_mm": int8(6, 5, 9),
        "mixed_mm": Problem(
            "mixed_mm", 6, 5, 9, Operand("bfloat16"), Operand("int4", COL, constant=True, quant=Quant()), "bfloat16"
        ),
        "scaled_mm": Problem(
            "scaled_mm", 6, 5, 9, Operand("float8_e4m3fn"), Operand("float8_e4m3fn", COL, constant=True), "bfloat16"
        ),
    }[family]
    for draw in make_reference_cases(base, 5):
        expected = reference(base, draw.inputs.a, draw.inputs.b, draw.inputs.aux)
        torch.testing.assert_close(draw.value, expected.value, rtol=1e-9, atol=1e-30, equal_nan=True)


def test_operands_lie_between_guards() -> None:
    problem = replace(linear(4, 6, 32, "float32"), a=Operand("float32", Layout("row", 40)))
    for draw in make_reference_cases(problem, 0):
        a, b = draw.inputs.a, b_of(draw.inputs)
        assert a.data_ptr() % 64 == b.data_ptr() % 64 == (0 if draw.kind == "uniform" else 4)
        gaps = a.as_strided((3, 8), (40, 1), a.storage_offset() + 32)
        before, after = (
            b.as_strided((1,), (1,), b.storage_offset() - 1),
            b.as_strided((1,), (1,), b.storage_offset() + 192),
        )
        for poison in (gaps, before, after):
            assert bool(poison.isnan().all())


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (linear(4, 6, 32, "float32", epilogue=EPILOGUE), "the epilogue's tensor 0"),
        (linear(4, 6, 32, "float32"), "A"),
        (linear(4, 6, 32, "float32"), "B"),
        (
            replace(linear(4, 6, 32, "float32"), family="mixed_mm", b=Operand("int8", COL, True, quant=Quant())),
            "B's scales",
        ),
    ],
)
def test_a_kernel_that_writes_into_its_inputs_is_named(problem: Problem, name: str) -> None:
    draws = make_reference_cases(problem, 0)

    def run(inputs: Inputs, out: Tensor) -> None:
        hostile.correct(problem)(inputs, out)
        victim = {"A": inputs.a, "B": inputs.b}.get(name)
        if name == "B's scales":
            assert isinstance(inputs.b, QuantWeight)
            victim = inputs.b.scale
        victim = inputs.aux[0] if victim is None else victim
        assert isinstance(victim, Tensor)
        victim.as_strided((1,), (1,), victim.storage_offset() - 1).zero_()

    verdict = verify(run, problem, draws)
    assert verdict.kind == "wrong"
    assert verdict.detail.startswith(f"it wrote into its inputs, or just beside them: {name} ")
    assert draws[0].touched() == name


def test_a_race_that_shows_in_one_call_of_four_is_found_by_running_again() -> None:
    problem = linear(4, 6, 32, "float32")
    verdict = verify(hostile.rare_race(problem), problem, make_reference_cases(problem, 0))
    assert verdict.kind == "unstable"
    assert verdict.detail.startswith("two runs on the same operands differ, and out[3, ")


def test_draws_share_a_constant_weight_and_only_that() -> None:
    constant = make_reference_cases(linear(4, 8, 16, "bfloat16"), 0)
    assert len({id(d.inputs.b) for d in constant if d.kind == "adversarial"}) <= 4
    large = make_reference_cases(linear(4, 1024, 1024, "bfloat16"), 0)
    assert {d.kind for d in large} == {"uniform", "adversarial"}
    assert {id(d.inputs.b if d.inputs.source is None else d.inputs.source) for d in large} == {id(large[0].inputs.b)}
    free = make_reference_cases(replace(linear(4, 8, 16, "bfloat16"), b=Operand("bfloat16", COL)), 0)
    assert free[0].inputs.b is not free[1].inputs.b
    assert not torch.equal(free[0].inputs.a.double(), free[1].inputs.a.double())


def test_a_starts_off_alignment_unless_the_problem_promises_it() -> None:
    free = linear(4, 8, 16, "bfloat16")
    promised = replace(free, a=Operand("bfloat16", align=64))
    assert make_reference_cases(free, 0)[1].inputs.a.data_ptr() % 64 == 2
    assert all(draw.inputs.a.data_ptr() % 64 == 0 for draw in make_reference_cases(promised, 0))


def test_no_draws_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one case"):
        verify(lambda inputs, out: None, linear(1, 1, 1, "float32"), ())


def test_what_a_kernel_raises_passes_through() -> None:
    def run(inputs: Inputs, out: Tensor) -> None:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        verify(run, linear(1, 1, 1, "float32"), make_reference_cases(linear(1, 1, 1, "float32"), 0))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 4), (3, 0, 4), (3, 5, 0), (1, 1, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_empty_and_single(m: int, n: int, k: int, dtype: str) -> None:
    problem = problem_for(dtype, m, n, k)
    assert verify(hostile.correct(problem), problem, make_reference_cases(problem, 0)).ok


def test_large_problems_are_checked_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.verify.oracle._FULL_ROWS", 8)
    monkeypatch.setattr("gemmtune.verify.oracle._FULL_FLOPS", 1.0)
    problem = linear(64, 96, 256, "bfloat16")
    draws = make_reference_cases(problem, 0)
    assert verify(lambda i, out: torch.mm(i.a, b_of(i), out=out) is None, problem, draws).ok  # type: ignore[arg-type]
    assert all(d.value.dtype == torch.float32 for d in draws)
    for row, column in ((0, 0), (63, 95), (31, 50)):

        def run(inputs: Inputs, out: Tensor, row: int = row, column: int = column) -> None:
            torch.mm(inputs.a, b_of(inputs), out=out)
            out[row, column] *= 1.1

        assert verify(run, problem, draws).detail.startswith(f"out[{row}, {column}]")


# --- correct kernels -------------------------------------------------------------------------------------------


def _mm(inputs: Inputs, out: Tensor) -> None:
    torch.mm(inputs.a, b_of(inputs), out=out)


def _linear(inputs: Inputs, out: Tensor) -> None:
    out.copy_(torch.nn.functional.linear(inputs.a, b_of(inputs).t()))


def _split_k(inputs: Inputs, out: Tensor) -> None:
    half = inputs.a.shape[1] // 2
    a, b = inputs.a.float(), b_of(inputs).float()
    out.copy_(a[:, :half] @ b[:half] + a[:, half:] @ b[half:])


def _int_mm(inputs: Inputs, out: Tensor) -> None:
    out.copy_(torch._int_mm(inputs.a, b_of(inputs)))


def _requantised(inputs: Inputs, out: Tensor) -> None:
    row, col = inputs.aux
    scaled = torch._int_mm(inputs.a, b_of(inputs)).float() * row[:, None] * col
    out.copy_(scaled.round().clamp(-128, 127))


def _fused(inputs: Inputs, out: Tensor) -> None:
    bias, residual = inputs.aux
    acc = inputs.a.float() @ b_of(inputs).float() + bias.float()
    out.copy_(torch.nn.functional.gelu(acc) + residual.float())


def _weight_only(inputs: Inputs, out: Tensor) -> None:
    weight = inputs.b
    assert isinstance(weight, QuantWeight)
    out.copy_(inputs.a.float() @ (weight.data.float() * weight.scale.float()))


def _int8pack(inputs: Inputs, out: Tensor) -> None:
    weight = inputs.b
    assert isinstance(weight, QuantWeight)
    out.copy_(torch._weight_int8pack_mm(inputs.a, weight.data.t().contiguous(), weight.scale))


@st.composite
def correct_cases(draw: st.DrawFn) -> tuple[Problem, Run]:
    m, n = draw(st.sampled_from([1, 2, 5, 17, 64])), draw(st.integers(1, 200))
    k = draw(st.one_of(st.integers(1, 300), st.sampled_from([1024, 4096])))
    kind = draw(st.sampled_from(["mm", "linear", "split", "int8", "requantised", "fused", "weight", "int8pack"]))
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    constant = draw(st.booleans())
    plain = Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=constant), dtype)
    quant = Operand("int8", COL, constant=True, quant=Quant(scale_dtype="bfloat16"))
    if kind in ("int8", "requantised"):
        steps = (Step("scale", "row", "float32"), Step("scale", "col", "float32"))
        k = max(k, 2)  # ATen's own: with K = 1 and a column-major B it returns unwritten memory
        return (int8(m, n, k), _int_mm) if kind == "int8" else (int8(m, n, k, "int8", steps), _requantised)
    if kind in ("weight", "int8pack"):
        if kind == "int8pack":
            # ATen's kernel reads out of bounds (and may crash) for other K, and crashes when operands are not aligned.
            aligned, quant = Operand("bfloat16", align=32), replace(quant, align=32)
            return Problem("mixed_mm", m, n, max(32, k - k % 32), aligned, quant, "bfloat16"), _int8pack
        problem = Problem("mixed_mm", m, n, k, Operand("bfloat16"), quant, "bfloat16")
        return problem, _weight_only
    if kind == "fused":
        steps = (Step("bias", "col", dtype), Step("gelu"), Step("add", "full", dtype))
        return replace(plain, epilogue=steps), _fused
    if dtype == "bfloat16" and kind != "split":
        # ATen's own, on CPUs with AMX (torch 2.13): for other K a NaN in a row of A comes out in the row before, too.
        plain = Problem("mm", m, n, -32 * (-k // 32), Operand(dtype), Operand(dtype, COL, constant=constant), dtype)
    return plain, {"mm": _mm, "linear": _linear, "split": _split_k}[kind]


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=correct_cases(), seed=st.integers(0, 2**20))
def test_correct_kernels_are_never_rejected(case: tuple[Problem, Run], seed: int) -> None:
    problem, run = case
    verdict = verify(run, problem, make_reference_cases(problem, seed))
    assert verdict.ok, f"{problem.key} {run}: {verdict}"
    assert verdict.kind == "exact" or problem.out_dtype != "int32"
    assert verdict.kind == "within_bound" or problem.out_dtype in ("int8", "int32")


def test_batched_problems() -> None:
    problem = Problem("bmm", 5, 7, 33, Operand("bfloat16"), Operand("bfloat16"), "bfloat16", batch=3)
    draws = make_reference_cases(problem, 0)
    assert verify(lambda i, out: torch.bmm(i.a, b_of(i), out=out) is None, problem, draws).ok  # type: ignore[arg-type]

    def run(inputs: Inputs, out: Tensor) -> None:
        torch.bmm(inputs.a, b_of(inputs), out=out)
        out[2, 4, 6] *= 1.1

    assert verify(run, problem, draws).detail.startswith("out[2, 4, 6]")


def test_fp8_with_scales() -> None:
    steps = (Step("scale", "row", "float32"), Step("scale", "col", "float32"))
    operand = Operand("float8_e4m3fn")
    problem = Problem("scaled_mm", 9, 40, 256, operand, replace(operand, layout=COL), "bfloat16", steps)

    def run(inputs: Inputs, out: Tensor) -> None:
        row, col = inputs.aux
        out.copy_((inputs.a.float() @ b_of(inputs).float()) * row[:, None] * col)

    assert verify(run, problem, make_reference_cases(problem, 0)).ok
    assert not verify(hostile.dropped_k_tail(problem), problem, make_reference_cases(problem, 0)).ok


def test_rounding_the_weight_first_is_not_the_same_problem() -> None:
    """A weight dequantised to bfloat16 has lost bits that the bound does not give away."""
    operand = Operand("int8", COL, constant=True, quant=Quant())
    problem = Problem("mixed_mm", 16, 96, 512, Operand("bfloat16"), operand, "bfloat16")

    def run(inputs: Inputs, out: Tensor) -> None:
        weight = inputs.b
        assert isinstance(weight, QuantWeight)
        out.copy_(inputs.a.float() @ (weight.data * weight.scale).bfloat16().float())

    assert verify(run, problem, make_reference_cases(problem, 0)).kind == "wrong"
    assert verify(_weight_only, problem, make_reference_cases(problem, 0)).ok


def test_an_overflowing_output_may_be_infinite_or_saturated() -> None:
    problem = linear(2, 64, 16, "float16")
    draws = tuple(
        replace(d, value=d.value * 1e6, tolerance=d.tolerance * 1e6).marked({})
        for d in make_reference_cases(problem, 0)[:1]
    )

    def run(inputs: Inputs, out: Tensor) -> None:
        out.copy_(hostile.value(problem, inputs) * 1e6)

    def saturating(inputs: Inputs, out: Tensor) -> None:
        out.copy_((hostile.value(problem, inputs) * 1e6).clamp(-65504, 65504))

    def negated(inputs: Inputs, out: Tensor) -> None:
        out.copy_(hostile.value(problem, inputs) * -1e6)

    finite_only = draws[:1]
    assert verify(run, problem, finite_only).ok
    assert verify(saturating, problem, finite_only).ok
    assert not verify(negated, problem, finite_only).ok


def test_a_cast_within_the_epilogue_may_shift_the_mean() -> None:
    """Values on float16's grid plus a number off it round to bfloat16 with a preferred side: a correct kernel's do."""
    steps = (Step("cast", dtype="float16"), Step("add", "tensor", "float16", 0.25))
    problem = Problem("mm", 132, 176, 8, Operand("bfloat16"), Operand("bfloat16"), "bfloat16", steps)

    def run(inputs: Inputs, out: Tensor) -> None:
        out.copy_((inputs.a.float() @ b_of(inputs).float()).half().float() + 0.25 * inputs.aux[0].float())

    for seed in range(8):
        assert verify(run, problem, make_reference_cases(problem, seed)).ok


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_products_of_wide_integers_are_checked(dtype: str) -> None:
    problem = Problem("mm", 4, 5, 6, Operand(dtype), Operand(dtype), dtype, acc=dtype)
    for seed in range(8):  # by turns every kind of column is among the few that there are
        draws = make_reference_cases(problem, seed)

        def run(inputs: Inputs, out: Tensor) -> None:
            torch.mm(inputs.a, b_of(inputs), out=out)

        def off_by_one(inputs: Inputs, out: Tensor) -> None:
            torch.mm(inputs.a, b_of(inputs), out=out).view(-1)[-1].add_(1)

        assert verify(run, problem, draws).ok
        assert verify(off_by_one, problem, draws).kind == "wrong"
