"""addmm: the epilogue steps of its input, beta and alpha; PyTorch's function for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune.ops import addmm
from gemmtune.ops.addmm import describe


@pytest.mark.parametrize(
    ("shape", "beta", "step"),
    [
        ((5,), 1, ("bias", "col", 1.0)),
        ((1, 5), 1, ("bias", "col", 1.0)),
        ((1, 5), 2, ("bias", "col", 2.0)),
        ((3, 5), 1, ("add", "full", 1.0)),
        ((3, 5), 2, ("add", "full", 2.0)),
        ((3, 1), 1, ("add", "row", 1.0)),
        ((1,), 1, ("add", "tensor", 1.0)),
    ],
)
def test_vector_along_the_columns_is_a_bias_and_other_inputs_are_addends(
    shape: tuple[int, ...], beta: float, step: tuple[str, str, float]
) -> None:
    call = describe(torch.ones(shape), torch.ones(3, 4), torch.ones(4, 5), beta, 1)
    (first,) = call.problem.epilogue
    assert (first.kind, first.axis, first.value) == step
    assert first.dtype == "float32"


def test_input_of_one_element_is_no_bias_of_one_column() -> None:
    (step,) = describe(torch.ones(1), torch.ones(3, 4), torch.ones(4, 1)).problem.epilogue
    assert (step.kind, step.axis) == ("add", "tensor")


def test_beta_of_zero_excludes_the_input() -> None:
    call = describe(torch.full((3, 5), float("nan")), torch.ones(3, 4), torch.ones(4, 5), 0, 1)
    assert call.problem.epilogue == ()


def test_alpha_scales_the_product_before_the_input_is_added() -> None:
    call = describe(torch.ones(5), torch.ones(3, 4), torch.ones(4, 5), 2, 3)
    assert [(step.kind, step.value) for step in call.problem.epilogue] == [("scale", 3.0), ("bias", 2.0)]
    assert [step.kind for step in describe(torch.ones(5), torch.ones(3, 4), torch.ones(4, 5)).problem.epilogue] == [
        "bias"
    ]


def test_only_integers_of_one_dtype_need_pytorch() -> None:
    a, b, addend = (torch.ones(shape) for shape in ((3, 4), (4, 5), (5,)))
    packed = gemmtune.pack(b.t().contiguous(), layout="aten:row")
    for operands, required in (
        ((addend.int(), a.int(), b.int()), True), ((addend, a, b), False), ((addend, a.int(), b.int()), False),
        ((addend.int(), a.int(), packed), False),
    ):  # fmt: skip
        function = addmm.SPEC.torch_function(*operands, 1, 1)
        assert function is not None
        assert function.required is required


def test_integers_are_computed_by_torch_with_beta_and_alpha() -> None:
    addend, a, b = torch.arange(5), torch.arange(12).view(3, 4), torch.arange(20).view(4, 5)
    expected = torch.addmm(addend, a, b, beta=2, alpha=3)
    assert torch.equal(gemmtune.addmm(addend, a, b, beta=2, alpha=3), expected)
    out = torch.empty_like(expected)
    for _ in range(2):
        assert gemmtune.addmm(addend, a, b, beta=2, alpha=3, out=out.zero_()) is out
        assert torch.equal(out, expected)


@pytest.mark.parametrize("beta", [1, 0.5])
def test_out_is_written_with_beta_and_alpha(beta: float) -> None:
    addend, a, b = torch.randn(3, 5), torch.randn(3, 4), torch.randn(4, 5)
    out = torch.empty(3, 5)
    for _ in range(2):
        assert gemmtune.addmm(addend, a, b, beta=beta, alpha=2.0, out=out.zero_()) is out
        torch.testing.assert_close(out, torch.addmm(addend, a, b, beta=beta, alpha=2.0))


@pytest.mark.parametrize(("name", "value"), [("beta", None), ("alpha", "2"), ("alpha", torch.ones(()))])
def test_factor_that_is_no_number_is_named(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=rf"addmm\(\): {name} must be a number, not {type(value).__name__}"):
        gemmtune.addmm(torch.ones(5), torch.ones(3, 4), torch.ones(4, 5), **{name: value})  # type: ignore[arg-type]


def test_calls_of_torch_are_recorded_with_their_steps() -> None:
    addend, a = torch.ones(5), torch.ones(3, 4)
    weight: Tensor = nn.Parameter(torch.ones(4, 5))
    with torch.no_grad(), gemmtune.record() as recording:
        torch.addmm(addend, a, weight, beta=2, alpha=3)
        addend.addmm(a, weight.detach())
    (first, _), (second, _) = recording.problems
    assert first == describe(addend, a, weight, 2, 3, constant=True).problem
    assert second.epilogue == describe(addend, a, weight).problem.epilogue
