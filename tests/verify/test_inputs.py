"""Operands: layouts, ranges of values, reproducibility, and the number of sets."""

from __future__ import annotations

import pytest
import torch

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.core.weights import QuantWeight
from gemmtune.verify.inputs import make_inputs, operand_bytes, operand_set_count, timing_sets

TARGET = Target("cpu", "test", "x86_64", caches=(32 << 10, 1 << 20, 32 << 20))


def make_mm(m: int, n: int, k: int, a: Operand, b: Operand, out: str = "float32", **kwargs: object) -> Problem:
    return Problem("mm", m, n, k, a, b, out, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        (Layout(), (7, 1)),
        (Layout("row", 9), (9, 1)),
        (Layout("col"), (1, 5)),
        (Layout("col", 8), (1, 8)),
        (Layout("strided"), (14, 2)),
        (Layout("strided", 20), (20, 2)),
    ],
)
@pytest.mark.parametrize("timing", [False, True])
def test_operands_have_the_strides_of_their_layout(layout: Layout, strides: tuple[int, int], timing: bool) -> None:
    problem = make_mm(5, 3, 7, Operand("float32", layout), Operand("float32"))
    a = timing_sets(problem, 1, 1)[0].a if timing else make_inputs(problem, 1).a
    assert a.shape == (5, 7)
    assert a.stride() == strides
    assert bool(a.isfinite().all())
    assert a.unique().numel() == 35


def test_strided_layout_with_a_small_ld_raises_value_error() -> None:
    with pytest.raises(ValueError, match="ld >= 14"):
        make_inputs(make_mm(5, 3, 7, Operand("float32", Layout("strided", 9)), Operand("float32")), 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"])
def test_equal_seeds_give_equal_operands(dtype: str) -> None:
    problem = make_mm(8, 6, 40, Operand(dtype), Operand(dtype))
    first, second = (make_inputs(problem, 3) for _ in range(2))
    other = make_inputs(problem, 4)
    assert isinstance(first.b, torch.Tensor)
    assert isinstance(second.b, torch.Tensor)
    assert torch.equal(first.a.double(), second.a.double())
    assert torch.equal(first.b.double(), second.b.double())
    assert not torch.equal(first.a.double(), other.a.double())


@pytest.mark.parametrize(("dtype", "low", "high"), [("int8", -128, 127), ("uint8", 0, 255)])
def test_integer_operands_span_their_range(dtype: str, low: int, high: int) -> None:
    a = make_inputs(make_mm(100, 1, 200, Operand(dtype), Operand("int8"), "int32", acc="int32"), 1).a
    counts = torch.bincount(a.flatten().int() - low, minlength=256)
    assert (int(a.min()), int(a.max())) == (low, high)
    assert int(counts.min()) > 30  # 78 expected of each of 256 values


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_operands_span_the_exponents_and_are_finite(dtype: str) -> None:
    a = make_inputs(make_mm(100, 1, 200, Operand(dtype), Operand(dtype)), 1).a.float()
    assert bool(a.isfinite().all())
    assert float(a.abs().max()) >= 0.4 * torch.finfo(getattr(torch, dtype)).max
    exponents = torch.frexp(a[a != 0]).exponent.unique()
    assert exponents.numel() >= (15 if dtype == "float8_e4m3fn" else 29)


def test_int4_weights_have_nibbles_scales_and_zero_points() -> None:
    quant = Quant(32, "float32", True)
    b = Operand("int4", Layout("col"), quant=quant)
    problem = Problem("mixed_mm", 2, 16, 129, Operand("bfloat16"), b, "bfloat16")
    weight = make_inputs(problem, 1).b
    assert isinstance(weight, QuantWeight)
    assert weight.data.shape == (65, 16)
    assert weight.data.stride() == (1, 65)
    assert weight.scale.shape == (5, 16)
    assert bool((weight.scale > 0).all())
    assert weight.zero_point is not None
    assert set(torch.cat([weight.data & 15, weight.data >> 4]).flatten().tolist()) == set(range(16))


def test_outputs_of_quantised_weights_have_a_standard_deviation_near_one() -> None:
    quant = Quant()
    problem = Problem("mixed_mm", 4, 64, 4096, Operand("bfloat16"), Operand("int8", quant=quant), "bfloat16")
    inputs = make_inputs(problem, 1)
    assert isinstance(inputs.b, QuantWeight)
    out = inputs.a.double() @ (inputs.b.data.double() * inputs.b.scale.double())
    assert 0.3 < float(out.std()) < 3.0


def test_requantised_outputs_use_the_range_without_saturation() -> None:
    steps = (Step("scale", "row", "float32"), Step("scale", "col", "float32"))
    problem = Problem("int_mm", 16, 64, 512, Operand("int8"), Operand("int8"), "int8", steps, acc="int32")
    inputs = make_inputs(problem, 1)
    assert isinstance(inputs.b, torch.Tensor)
    out = (inputs.a.double() @ inputs.b.double()) * inputs.aux[0].double()[:, None] * inputs.aux[1].double()
    assert 15 < float(out.std()) < 100


def test_weight_is_shared_and_an_offset_misaligns_a() -> None:
    problem = make_mm(3, 5, 8, Operand("float32"), Operand("float32"))
    first = make_inputs(problem, 1)
    second = make_inputs(problem, 2, b=first.b, offset=1)
    assert second.b is first.b
    assert first.a.data_ptr() % 64 == 0
    assert second.a.data_ptr() % 64 == 4
    assert not torch.equal(first.a, second.a)


def test_timing_sets_have_distinct_unstructured_values() -> None:
    problem = make_mm(64, 2000, 1000, Operand("bfloat16"), Operand("bfloat16", Layout("col"), constant=True))
    first, second = timing_sets(problem, 2, 5)
    assert isinstance(first.b, torch.Tensor)
    assert isinstance(second.b, torch.Tensor)
    assert first.b.data_ptr() != second.b.data_ptr()
    assert float((first.b == second.b).float().mean()) < 0.05
    assert float((first.b[:, 0] == first.b[:, 1]).float().mean()) < 0.05
    assert 0.9 < float(first.b.float().std()) < 1.1


def test_operand_sets_exceed_the_cache_within_a_memory_limit() -> None:
    def linear(n: int, k: int) -> Problem:
        return make_mm(1, n, k, Operand("bfloat16"), Operand("bfloat16", constant=True), "bfloat16")

    for problem in (linear(64, 64), linear(1024, 1024), linear(4096, 4096), linear(11008, 4096)):
        count, size = operand_set_count(problem, TARGET), operand_bytes(problem)
        assert 2 <= count <= 64
        assert count * size > 2 * (32 << 20) or count == 64
        assert count * size <= 3 * size + (256 << 20)
    assert operand_set_count(linear(64, 64), TARGET) == 64
    assert operand_set_count(linear(11008, 4096), TARGET) == 2
    assert operand_set_count(linear(1024, 1024), Target("cpu", "unknown", "x86_64")) == operand_set_count(
        linear(1024, 1024), TARGET
    )
