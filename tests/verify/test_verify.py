"""Verification rejects the faulty kernels and accepts the correct ones."""

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


def linear_problem(m: int, n: int, k: int, dtype: str, **kwargs: object) -> Problem:
    return Problem("mm", m, n, k, Operand(dtype), Operand(dtype, COL, constant=True), dtype, **kwargs)  # type: ignore[arg-type]


def int8_problem(m: int, n: int, k: int, out: str = "int32", epilogue: tuple[Step, ...] = ()) -> Problem:
    operand = Operand("int8", COL, constant=True)
    return Problem("int_mm", m, n, k, Operand("int8"), operand, out, epilogue, acc="int32")


def problem_for(dtype: str, m: int, n: int, k: int) -> Problem:
    return int8_problem(m, n, k) if dtype == "int8" else linear_problem(m, n, k, dtype)


def b_tensor(inputs: Inputs) -> Tensor:
    assert isinstance(inputs.b, Tensor)
    return inputs.b


# Faults that depend on the run, or on the output's previous values, can appear as a difference between runs.
EXPECTED_KINDS = {
    "race": ("unstable",),
    "rare race": ("unstable", "wrong"),
    "adds to the output": ("unstable", "wrong"),
}
PLAIN_FAULTS = [name for name in hostile.FAULTY_KERNELS if name not in ("reversed epilogue", "NaN swallowed")]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("k", [64, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("fault", PLAIN_FAULTS)
def test_faulty_kernels_are_rejected(fault: str, dtype: str, k: int, seed: int) -> None:
    problem = problem_for(dtype, 16, 96, k)
    verdict = verify(hostile.FAULTY_KERNELS[fault](problem), problem, make_reference_cases(problem, seed))
    assert verdict.kind in EXPECTED_KINDS.get(fault, ("wrong",))
    assert verdict.detail
    assert verdict.worst > 1.0 or any(word in verdict.detail for word in ("bytes", "scaled", "never written", "inputs"))


@pytest.mark.parametrize("m", [1, 3])
@pytest.mark.parametrize("fault", [name for name in PLAIN_FAULTS if name not in ("x1.002", "8x8 block 10% off")])
def test_faulty_kernels_are_rejected_for_few_rows(fault: str, m: int) -> None:
    problem = linear_problem(m, 33, 129, "bfloat16")
    assert not verify(hostile.FAULTY_KERNELS[fault](problem), problem, make_reference_cases(problem, 1)).ok


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_reversed_epilogue_is_rejected(dtype: str) -> None:
    problem = replace(problem_for(dtype, 16, 96, 64), epilogue=EPILOGUE, out_dtype="float32")
    test_cases = make_reference_cases(problem, 0)
    assert not verify(hostile.reversed_epilogue(problem), problem, test_cases).ok
    assert verify(hostile.correct(problem), problem, test_cases).kind == "within_bound"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize("m", [1, 16])
def test_swallowed_nan_is_rejected(dtype: str, m: int) -> None:
    problem = linear_problem(m, 96, 64, dtype)
    verdict = verify(hostile.nan_swallowed(problem), problem, make_reference_cases(problem, 0))
    assert verdict.kind == "wrong"
    assert "in a row of A that is NaN" in verdict.detail


@pytest.mark.parametrize("k", [64, 1024, 16384])
def test_small_scale_error_is_detected_by_the_slope(k: int) -> None:
    """The factor keeps each element within its bound: only the slope shows it (bf16 rounds by up to 0.4%)."""
    problem = linear_problem(64, 256, k, "bfloat16")
    test_cases = tuple(
        replace(case, tolerance=2 * case.tolerance).marked({}) for case in make_reference_cases(problem, 0)[:1]
    )
    verdict = verify(hostile.scaled(problem), problem, test_cases)
    assert verdict.kind == "wrong"
    assert "scaled by 1.00" in verdict.detail
    assert verify(hostile.correct(problem), problem, test_cases).ok


def test_small_offset_is_detected_by_the_mean() -> None:
    problem = linear_problem(64, 256, 1024, "bfloat16")
    test_cases = tuple(
        replace(case, tolerance=100 * case.tolerance).marked({}) for case in make_reference_cases(problem, 0)[:1]
    )

    def run(inputs: Inputs, out: Tensor) -> None:
        out.copy_(hostile.value(problem, inputs) + 0.03)

    assert "on average" in verify(run, problem, test_cases).detail


def test_detail_has_the_position_and_the_size_of_the_error() -> None:
    problem = linear_problem(8, 9, 32, "float32")

    def run(inputs: Inputs, out: Tensor) -> None:
        torch.mm(inputs.a, b_tensor(inputs), out=out)
        out[5, 7] += 1.0

    detail = verify(run, problem, make_reference_cases(problem, 0)).detail
    assert detail.startswith("out[5, 7] is ")
    assert "times the bound (uniform draw)" in detail


def test_write_between_the_rows_of_the_output_is_detected() -> None:
    problem = linear_problem(4, 6, 32, "float32", out=Layout("row", 8))
    test_cases = make_reference_cases(problem, 0)

    def run(inputs: Inputs, out: Tensor) -> None:
        assert out.stride() == (8, 1)
        out.copy_(inputs.a @ b_tensor(inputs))

    def write_into_the_gap(inputs: Inputs, out: Tensor) -> None:
        run(inputs, out)
        out.as_strided((1,), (1,), out.storage_offset() + 7).zero_()

    assert verify(run, problem, test_cases).ok
    assert verify(write_into_the_gap, problem, test_cases).detail.startswith("4 bytes between the rows of the output")


def test_write_before_the_output_is_detected() -> None:
    problem = linear_problem(4, 6, 32, "bfloat16")

    def run(inputs: Inputs, out: Tensor) -> None:
        torch.mm(inputs.a, b_tensor(inputs), out=out)
        out.as_strided((1,), (1,), out.storage_offset() - 1).zero_()

    assert "2 bytes before the output" in verify(run, problem, make_reference_cases(problem, 0)).detail


def test_differences_between_runs_within_the_bound_are_accepted() -> None:
    problem = linear_problem(4, 6, 512, "float32")
    calls = 0

    def run(inputs: Inputs, out: Tensor) -> None:
        nonlocal calls
        calls += 1
        half = 256 if calls % 2 else 128
        b = b_tensor(inputs)
        out.copy_(inputs.a[:, :half] @ b[:half] + inputs.a[:, half:] @ b[half:])

    verdict = verify(run, problem, make_reference_cases(problem, 0))
    assert verdict.ok
    assert verdict.detail == "repeated runs differ within the bound"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("m", [1, 5, 64])
def test_cases_have_all_kinds_of_rows_and_columns(dtype: str, m: int) -> None:
    problem = problem_for(dtype, m, 96, 70)
    test_cases = make_reference_cases(problem, 3)
    assert test_cases[0].kind == "uniform"
    assert {row for case in test_cases for row in case.rows} >= set(row_kinds(problem))
    assert {kind for case in test_cases for kind in case.columns.weight} == set(weight_kinds(problem))
    values = [case.value.double().nan_to_num(7.0, 1e30, -1e30) for case in test_cases]
    assert all(not torch.equal(x, y) for i, x in enumerate(values) for y in values[:i])


@pytest.mark.parametrize("family", ["mm", "bmm", "int_mm", "mixed_mm", "scaled_mm"])
def test_cases_have_the_reference_of_their_operands(family: str) -> None:
    """Expected values that are derived from the first case's equal the reference of each case's operands."""
    problem = {
        "mm": linear_problem(
            6, 5, 9, "float32", epilogue=(Step("scale", "row", "float32"), Step("add", "full", "float32"))
        ),
        "bmm": Problem("bmm", 6, 5, 9, Operand("bfloat16"), Operand("bfloat16"), "bfloat16", batch=2),
        "int_mm": int8_problem(6, 5, 9),
        "mixed_mm": Problem(
            "mixed_mm", 6, 5, 9, Operand("bfloat16"), Operand("int4", COL, constant=True, quant=Quant()), "bfloat16"
        ),
        "scaled_mm": Problem(
            "scaled_mm", 6, 5, 9, Operand("float8_e4m3fn"), Operand("float8_e4m3fn", COL, constant=True), "bfloat16"
        ),
    }[family]
    for case in make_reference_cases(problem, 5):
        expected = reference(problem, case.inputs.a, case.inputs.b, case.inputs.aux)
        torch.testing.assert_close(case.value, expected.value, rtol=1e-9, atol=1e-30, equal_nan=True)


def test_operands_are_surrounded_by_guard_bands() -> None:
    problem = replace(linear_problem(4, 6, 32, "float32"), a=Operand("float32", Layout("row", 40)))
    for case in make_reference_cases(problem, 0):
        a, b = case.inputs.a, b_tensor(case.inputs)
        assert a.data_ptr() % 64 == b.data_ptr() % 64 == (0 if case.kind == "uniform" else 4)
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
        (linear_problem(4, 6, 32, "float32", epilogue=EPILOGUE), "the epilogue's tensor 0"),
        (linear_problem(4, 6, 32, "float32"), "A"),
        (linear_problem(4, 6, 32, "float32"), "B"),
        (
            replace(
                linear_problem(4, 6, 32, "float32"), family="mixed_mm", b=Operand("int8", COL, True, quant=Quant())
            ),
            "B's scales",
        ),
    ],
)
def test_write_into_an_operand_is_detected_with_its_name(problem: Problem, name: str) -> None:
    test_cases = make_reference_cases(problem, 0)

    def run(inputs: Inputs, out: Tensor) -> None:
        hostile.correct(problem)(inputs, out)
        target = {"A": inputs.a, "B": inputs.b}.get(name)
        if name == "B's scales":
            assert isinstance(inputs.b, QuantWeight)
            target = inputs.b.scale
        target = inputs.aux[0] if target is None else target
        assert isinstance(target, Tensor)
        target.as_strided((1,), (1,), target.storage_offset() - 1).zero_()

    verdict = verify(run, problem, test_cases)
    assert verdict.kind == "wrong"
    assert verdict.detail.startswith(f"it wrote into its inputs, or just beside them: {name} ")
    assert test_cases[0].modified_operand() == name


def test_rare_race_is_detected_by_repeated_runs() -> None:
    problem = linear_problem(4, 6, 32, "float32")
    verdict = verify(hostile.rare_race(problem), problem, make_reference_cases(problem, 0))
    assert verdict.kind == "unstable"
    assert verdict.detail.startswith("two runs on the same operands differ, and out[3, ")


def test_cases_share_a_constant_weight_only() -> None:
    constant = make_reference_cases(linear_problem(4, 8, 16, "bfloat16"), 0)
    assert len({id(case.inputs.b) for case in constant if case.kind == "adversarial"}) <= 4
    large = make_reference_cases(linear_problem(4, 1024, 1024, "bfloat16"), 0)
    assert {case.kind for case in large} == {"uniform", "adversarial"}
    assert {id(case.inputs.b if case.inputs.source is None else case.inputs.source) for case in large} == {
        id(large[0].inputs.b)
    }
    changing = make_reference_cases(replace(linear_problem(4, 8, 16, "bfloat16"), b=Operand("bfloat16", COL)), 0)
    assert changing[0].inputs.b is not changing[1].inputs.b
    assert not torch.equal(changing[0].inputs.a.double(), changing[1].inputs.a.double())


def test_a_is_misaligned_unless_the_problem_has_an_alignment() -> None:
    unaligned = linear_problem(4, 8, 16, "bfloat16")
    aligned = replace(unaligned, a=Operand("bfloat16", align=64))
    assert make_reference_cases(unaligned, 0)[1].inputs.a.data_ptr() % 64 == 2
    assert all(case.inputs.a.data_ptr() % 64 == 0 for case in make_reference_cases(aligned, 0))


def test_verify_without_cases_raises_value_error() -> None:
    with pytest.raises(ValueError, match="at least one case"):
        verify(lambda inputs, out: None, linear_problem(1, 1, 1, "float32"), ())


def test_exceptions_of_a_kernel_propagate() -> None:
    def run(inputs: Inputs, out: Tensor) -> None:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        verify(run, linear_problem(1, 1, 1, "float32"), make_reference_cases(linear_problem(1, 1, 1, "float32"), 0))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 4), (3, 0, 4), (3, 5, 0), (1, 1, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_empty_and_single_element_problems_pass(m: int, n: int, k: int, dtype: str) -> None:
    problem = problem_for(dtype, m, n, k)
    assert verify(hostile.correct(problem), problem, make_reference_cases(problem, 0)).ok


def test_all_elements_of_large_problems_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.verify.oracle._FULL_ROWS", 8)
    monkeypatch.setattr("gemmtune.verify.oracle._FULL_FLOPS", 1.0)
    problem = linear_problem(64, 96, 256, "bfloat16")
    test_cases = make_reference_cases(problem, 0)
    assert verify(lambda i, out: torch.mm(i.a, b_tensor(i), out=out) is None, problem, test_cases).ok  # type: ignore[arg-type]
    assert all(case.value.dtype == torch.float32 for case in test_cases)
    for row, column in ((0, 0), (63, 95), (31, 50)):

        def run(inputs: Inputs, out: Tensor, row: int = row, column: int = column) -> None:
            torch.mm(inputs.a, b_tensor(inputs), out=out)
            out[row, column] *= 1.1

        assert verify(run, problem, test_cases).detail.startswith(f"out[{row}, {column}]")


# --- correct kernels -------------------------------------------------------------------------------------------


def _mm(inputs: Inputs, out: Tensor) -> None:
    torch.mm(inputs.a, b_tensor(inputs), out=out)


def _linear(inputs: Inputs, out: Tensor) -> None:
    out.copy_(torch.nn.functional.linear(inputs.a, b_tensor(inputs).t()))


def _split_k(inputs: Inputs, out: Tensor) -> None:
    half = inputs.a.shape[1] // 2
    a, b = inputs.a.float(), b_tensor(inputs).float()
    out.copy_(a[:, :half] @ b[:half] + a[:, half:] @ b[half:])


def _int_mm(inputs: Inputs, out: Tensor) -> None:
    out.copy_(torch._int_mm(inputs.a, b_tensor(inputs)))


def _requantised(inputs: Inputs, out: Tensor) -> None:
    row, col = inputs.aux
    scaled = torch._int_mm(inputs.a, b_tensor(inputs)).float() * row[:, None] * col
    out.copy_(scaled.round().clamp(-128, 127))


def _fused(inputs: Inputs, out: Tensor) -> None:
    bias, residual = inputs.aux
    acc = inputs.a.float() @ b_tensor(inputs).float() + bias.float()
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
        k = max(k, 2)  # with K = 1 and a column-major B, ATen returns uninitialised memory
        return (
            (int8_problem(m, n, k), _int_mm) if kind == "int8" else (int8_problem(m, n, k, "int8", steps), _requantised)
        )
    if kind in ("weight", "int8pack"):
        if kind == "int8pack":
            # ATen's kernel reads out of bounds (and may crash) for other K, and crashes for misaligned operands.
            aligned, quant = Operand("bfloat16", align=32), replace(quant, align=32)
            return Problem("mixed_mm", m, n, max(32, k - k % 32), aligned, quant, "bfloat16"), _int8pack
        problem = Problem("mixed_mm", m, n, k, Operand("bfloat16"), quant, "bfloat16")
        return problem, _weight_only
    if kind == "fused":
        steps = (Step("bias", "col", dtype), Step("gelu"), Step("add", "full", dtype))
        return replace(plain, epilogue=steps), _fused
    if dtype == "bfloat16" and kind != "split":
        # ATen on CPUs with AMX (torch 2.13) writes the NaN of a row of A into the previous row, too, for other K.
        plain = Problem("mm", m, n, -32 * (-k // 32), Operand(dtype), Operand(dtype, COL, constant=constant), dtype)
    return plain, {"mm": _mm, "linear": _linear, "split": _split_k}[kind]


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(case=correct_cases(), seed=st.integers(0, 2**20))
def test_correct_kernels_are_accepted(case: tuple[Problem, Run], seed: int) -> None:
    problem, run = case
    verdict = verify(run, problem, make_reference_cases(problem, seed))
    assert verdict.ok, f"{problem.key} {run}: {verdict}"
    assert verdict.kind == "exact" or problem.out_dtype != "int32"
    assert verdict.kind == "within_bound" or problem.out_dtype in ("int8", "int32")


def test_error_in_a_batched_output_is_detected() -> None:
    problem = Problem("bmm", 5, 7, 33, Operand("bfloat16"), Operand("bfloat16"), "bfloat16", batch=3)
    test_cases = make_reference_cases(problem, 0)
    assert verify(lambda i, out: torch.bmm(i.a, b_tensor(i), out=out) is None, problem, test_cases).ok  # type: ignore[arg-type]

    def run(inputs: Inputs, out: Tensor) -> None:
        torch.bmm(inputs.a, b_tensor(inputs), out=out)
        out[2, 4, 6] *= 1.1

    assert verify(run, problem, test_cases).detail.startswith("out[2, 4, 6]")


def test_fp8_product_with_scales_is_verified() -> None:
    steps = (Step("scale", "row", "float32"), Step("scale", "col", "float32"))
    operand = Operand("float8_e4m3fn")
    problem = Problem("scaled_mm", 9, 40, 256, operand, replace(operand, layout=COL), "bfloat16", steps)

    def run(inputs: Inputs, out: Tensor) -> None:
        row, col = inputs.aux
        out.copy_((inputs.a.float() @ b_tensor(inputs).float()) * row[:, None] * col)

    assert verify(run, problem, make_reference_cases(problem, 0)).ok
    assert not verify(hostile.dropped_k_tail(problem), problem, make_reference_cases(problem, 0)).ok


def test_rounding_the_dequantised_weight_is_rejected() -> None:
    """A weight dequantised to bfloat16 has rounding errors beyond the bound."""
    operand = Operand("int8", COL, constant=True, quant=Quant())
    problem = Problem("mixed_mm", 16, 96, 512, Operand("bfloat16"), operand, "bfloat16")

    def run(inputs: Inputs, out: Tensor) -> None:
        weight = inputs.b
        assert isinstance(weight, QuantWeight)
        out.copy_(inputs.a.float() @ (weight.data * weight.scale).bfloat16().float())

    assert verify(run, problem, make_reference_cases(problem, 0)).kind == "wrong"
    assert verify(_weight_only, problem, make_reference_cases(problem, 0)).ok


def test_overflowing_output_may_be_infinite_or_saturated() -> None:
    problem = linear_problem(2, 64, 16, "float16")
    test_cases = tuple(
        replace(case, value=case.value * 1e6, tolerance=case.tolerance * 1e6).marked({})
        for case in make_reference_cases(problem, 0)[:1]
    )

    def run(inputs: Inputs, out: Tensor) -> None:
        out.copy_(hostile.value(problem, inputs) * 1e6)

    def saturating(inputs: Inputs, out: Tensor) -> None:
        out.copy_((hostile.value(problem, inputs) * 1e6).clamp(-65504, 65504))

    def negated(inputs: Inputs, out: Tensor) -> None:
        out.copy_(hostile.value(problem, inputs) * -1e6)

    finite_only = test_cases[:1]
    assert verify(run, problem, finite_only).ok
    assert verify(saturating, problem, finite_only).ok
    assert not verify(negated, problem, finite_only).ok


def test_rounding_bias_of_a_cast_in_the_epilogue_is_accepted() -> None:
    """Multiples of float16's spacing plus an offset are rounded to bfloat16 with a bias, in correct kernels, too."""
    steps = (Step("cast", dtype="float16"), Step("add", "tensor", "float16", 0.25))
    problem = Problem("mm", 132, 176, 8, Operand("bfloat16"), Operand("bfloat16"), "bfloat16", steps)

    def run(inputs: Inputs, out: Tensor) -> None:
        out.copy_((inputs.a.float() @ b_tensor(inputs).float()).half().float() + 0.25 * inputs.aux[0].float())

    for seed in range(8):
        assert verify(run, problem, make_reference_cases(problem, seed)).ok


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_wrong_int32_and_int64_products_are_detected(dtype: str) -> None:
    problem = Problem("mm", 4, 5, 6, Operand(dtype), Operand(dtype), dtype, acc=dtype)
    for seed in range(8):  # the seeds cover each kind of column, of which a case has few
        test_cases = make_reference_cases(problem, seed)

        def run(inputs: Inputs, out: Tensor) -> None:
            torch.mm(inputs.a, b_tensor(inputs), out=out)

        def off_by_one(inputs: Inputs, out: Tensor) -> None:
            torch.mm(inputs.a, b_tensor(inputs), out=out).view(-1)[-1].add_(1)

        assert verify(run, problem, test_cases).ok
        assert verify(off_by_one, problem, test_cases).kind == "wrong"
