"""addmm: the epilogue step of its input."""

from __future__ import annotations

import pytest
import torch

from gemmtune.ops.addmm import describe


@pytest.mark.parametrize(
    ("shape", "beta", "step"),
    [
        ((5,), 1, ("bias", "col", 1.0)),
        ((1, 5), 2, ("bias", "col", 2.0)),
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


def test_beta_of_zero_excludes_the_input() -> None:
    call = describe(torch.full((3, 5), float("nan")), torch.ones(3, 4), torch.ones(4, 5), 0, 1)
    assert call.problem.epilogue == ()
