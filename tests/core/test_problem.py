"""Problems: what may be in front of a product."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Problem, plan_keys_of
from gemmtune.core.workloads import bmm_problem, build, int_problem, weight_only_problem

NORM, GELU = Step("rms_norm", "inner", "bfloat16", value=1e-6), Step("gelu")
LAYER_NORM, NORM_BIAS = Step("layer_norm", "inner", "bfloat16", value=1e-5), Step("norm_bias", "inner", "bfloat16")


@pytest.mark.parametrize("problem", [build(2, 24, 32, "bf16"), weight_only_problem(2, 24, 32)])
def test_norm_is_part_of_the_key_and_of_the_stored_data(problem: Problem) -> None:
    normed = replace(problem, epilogue=(NORM, GELU))
    assert normed.key.endswith("rms_norm.inner.bfloat16*1e-06;gelu")
    assert normed.min_bytes == problem.min_bytes + 2 * 32
    assert Problem.from_dict(normed.to_dict()) == normed
    assert normed.norm == NORM
    assert normed.without_norm() == replace(problem, epilogue=(GELU,))


def test_layer_norm_has_a_step_for_its_bias() -> None:
    norm, bias = LAYER_NORM, NORM_BIAS
    plain = replace(build(2, 24, 32, "bf16"), epilogue=(GELU,))
    for steps in ((norm,), (norm, bias)):
        normed = replace(plain, epilogue=(*steps, GELU))
        assert (normed.norm, normed.norm_steps, normed.without_norm()) == (norm, steps, plain)
        assert Problem.from_dict(normed.to_dict()) == normed
    assert normed.key.endswith("layer_norm.inner.bfloat16*1e-05;norm_bias.inner.bfloat16;gelu")
    assert (plain.norm_steps, plain.without_norm()) == ((), plain)


def test_output_of_a_gate_has_half_the_columns() -> None:
    problem = replace(build(3, 24, 32, "bf16"), epilogue=(NORM, Step("swiglu")))
    assert (problem.columns, problem.out_shape) == (12, (3, 12))
    assert problem.gate == Step("swiglu")
    assert problem.key.endswith(";swiglu")
    assert Problem.from_dict(problem.to_dict()) == problem
    assert problem.min_bytes == build(3, 24, 32, "bf16").min_bytes + 2 * 32 - 2 * 3 * 12


@pytest.mark.parametrize(
    ("problem", "epilogue", "message"),
    [
        (build(2, 24, 32, "bf16"), (Step("swiglu"), GELU), "the last step"),
        (build(2, 24, 32, "bf16"), (Step("geglu"), Step("swiglu")), "one of them"),
        (build(2, 23, 32, "bf16"), (Step("swiglu"),), "even number of columns; got mm with N = 23"),
        (bmm_problem(3, 2, 24, 32, "bfloat16"), (Step("geglu_tanh"),), "got bmm with N = 24"),
    ],
)
def test_gates_that_no_product_can_have_are_refused(problem: Problem, epilogue: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(problem, epilogue=epilogue)


def test_problem_without_a_norm_is_returned_unchanged() -> None:
    problem = replace(build(2, 24, 32, "bf16"), epilogue=(GELU,))
    assert problem.norm is None
    assert problem.without_norm() is problem


@pytest.mark.parametrize(
    ("problem", "epilogue", "message"),
    [
        (build(2, 24, 32, "bf16"), (GELU, NORM), "the first step"),
        (build(2, 24, 32, "bf16"), (NORM, NORM), "the only norm"),
        (build(2, 24, 32, "bf16"), (NORM_BIAS,), "may only follow it"),
        (build(2, 24, 32, "bf16"), (NORM, NORM_BIAS), "belongs to a layer_norm; got one behind rms_norm"),
        (build(2, 24, 32, "bf16"), (LAYER_NORM, GELU, NORM_BIAS), "may only follow it"),
        (build(2, 24, 32, "bf16"), (LAYER_NORM, replace(NORM_BIAS, value=2.0)), "has no factor; got 2.0"),
        (build(2, 24, 32, "bf16"), (LAYER_NORM, replace(NORM_BIAS, axis="col")), "got axes 'inner', 'col'"),
        (bmm_problem(3, 2, 24, 32, "bfloat16"), (NORM,), "activations of bmm"),
        (int_problem(2, 24, 32), (NORM,), "int8 activations of int_mm"),
        (build(2, 24, 32, "bf16"), (replace(NORM, axis="col"),), "axes 'col'"),
        (build(2, 24, 32, "bf16"), (replace(NORM, dtype=None),), "dtypes None"),
        (build(2, 24, 32, "bf16"), (replace(NORM, value=-1.0),), "got -1.0"),
        (build(2, 24, 32, "bf16"), (replace(NORM, value=float("nan")),), "got nan"),
    ],
)
def test_norms_that_no_product_can_have_are_refused(problem: Problem, epilogue: tuple[Step, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(problem, epilogue=epilogue)


def test_plan_keys_leave_one_dimension_free() -> None:
    problem = bmm_problem(3, 2, 24, 32, "bfloat16")
    assert problem.plan_key == problem.plan_key_over("m")
    for dim in problem.dims:
        others = [problem.with_size(dim, size) for size in (1, 70)]
        assert {other.plan_key_over(dim) for other in others} == {problem.plan_key_over(dim)}
        assert [other.size(dim) for other in others] == [1, 70]
    over_m, over_batch = problem.plan_key_over("m"), problem.plan_key_over("batch")
    assert problem.with_size("batch", 4).plan_key != over_m
    assert problem.with_m(4).plan_key_over("batch") != over_batch
    assert plan_keys_of(problem.key) == (over_m, over_batch)
    assert [plan_keys_of(key) for key in (over_m, over_batch)] == [(over_m,), (over_batch,)]


def test_products_without_a_batch_have_a_plan_over_m_only() -> None:
    problem = build(2, 24, 32, "bf16")
    assert problem.dims == ("m",)
    assert plan_keys_of(problem.key) == (problem.plan_key,)
    with pytest.raises(ValueError, match="mm has no batch"):
        problem.plan_key_over("batch")
