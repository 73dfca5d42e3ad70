"""Example inputs of a model: each form that users may pass gives the arguments of one or more calls."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from gemmtune.ops.calls import as_calls, calls_of, run

X, Y = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    ("example_inputs", "calls"),
    [
        (X, [((X,), {})]),
        ((X, Y), [((X, Y), {})]),
        ({"x": X, "y": Y}, [((), {"x": X, "y": Y})]),
        (MappingProxyType({"x": X}), [((), {"x": X})]),
        ([X, (X, Y), {"y": Y}], [((X,), {}), ((X, Y), {}), ((), {"y": Y})]),
    ],
    ids=["tensor", "tuple", "dict", "another mapping", "list"],
)
def test_each_form_gives_the_arguments_of_its_calls(
    example_inputs: Any, calls: list[tuple[tuple[Tensor, ...], dict[str, Tensor]]]
) -> None:
    result = as_calls(example_inputs)
    assert len(result) == len(calls)
    for (args, kwargs), (expected_args, expected_kwargs) in zip(result, calls, strict=True):
        assert len(args) == len(expected_args)
        assert all(given is expected for given, expected in zip(args, expected_args, strict=True))
        assert type(kwargs) is dict
        assert kwargs.keys() == expected_kwargs.keys()
        assert all(kwargs[name] is expected for name, expected in expected_kwargs.items())


def test_other_inputs_raise_errors() -> None:
    with pytest.raises(TypeError, match="got int"):
        as_calls(3)
    with pytest.raises(TypeError, match="got list"):
        as_calls([[X]])
    with pytest.raises(ValueError, match="example_inputs is empty"):
        as_calls([])


def test_model_runs_once_on_each_example_without_gradients() -> None:
    seen: list[tuple[Tensor, bool]] = []

    def model(x: Tensor) -> None:
        seen.append((x, torch.is_grad_enabled()))

    first, second = calls_of(model, [X, {"x": Y}])
    assert seen == []
    second()
    first()
    run(model, (X,))
    assert [x is expected for (x, _), expected in zip(seen, (Y, X, X), strict=True)] == [True] * 3
    assert [grad_enabled for _, grad_enabled in seen] == [False] * 3
