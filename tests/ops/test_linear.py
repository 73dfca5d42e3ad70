"""linear: its Problem for each shape of input and bias, and PyTorch's functions for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gemmtune
from gemmtune import fuse
from gemmtune.core.checks import ShapeError
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch.specialize import adapt_args
from gemmtune.ops import linear
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy

X, W, BIAS = torch.randn(2, 3, 4), torch.randn(5, 4), torch.randn(5)


def make_packed() -> Any:
    return gemmtune.pack(W, layout="aten:row")


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (0, 4), (2, 0, 4), (2, 3, 0), (0,)])
def test_leading_sizes_of_the_input_are_the_rows(shape: tuple[int, ...]) -> None:
    x, w = torch.ones(shape), torch.ones(5, shape[-1])
    call = linear.describe(x, w)
    rows = torch.Size(shape[:-1]).numel()
    assert (call.problem.family, call.problem.m, call.problem.n, call.problem.k) == ("mm", rows, 5, shape[-1])
    assert call.shape == (*shape[:-1], 5)
    assert tuple(call.a.shape) == (rows, shape[-1])
    assert (call.a is x) == (len(shape) == 2)


@pytest.mark.parametrize(
    ("x", "bias", "steps"),
    [
        ((3, 4), None, []),
        ((3, 4), (5,), [("bias", "col")]),
        ((2, 3, 4), (5,), [("bias", "col")]),
        ((3, 4), (1,), [("add", "tensor")]),
        ((3, 4), (), [("add", "tensor")]),
        ((3, 4), (1, 5), [("add", "col")]),
        ((3, 4), (3, 1), [("add", "row")]),
        ((3, 4), (3, 5), [("add", "full")]),
        ((2, 3, 4), (3, 5), [("add", "full")]),
        ((2, 3, 4), (2, 1, 5), [("add", "full")]),
        ((4,), (1, 5), [("add", "col")]),
    ],
)
def test_vector_bias_is_a_bias_and_what_broadcasts_is_added(
    x: tuple[int, ...], bias: tuple[int, ...] | None, steps: list[tuple[str, str]]
) -> None:
    call = linear.describe(torch.ones(x), W, None if bias is None else torch.ones(bias))
    assert [(step.kind, step.axis) for step in call.problem.epilogue] == steps


def test_bias_comes_before_the_epilogue() -> None:
    steps = linear.describe(X, W, BIAS, [fuse.relu()]).problem.epilogue
    assert [step.kind for step in steps] == ["bias", "relu"]


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((torch.ones(()), W), r"got input \[\] and weight \[5, 4\]"),
        ((X, W[None]), r"got input \[2, 3, 4\] and weight \[1, 5, 4\]"),
        ((X, W, torch.ones(2, 2, 5)), r"a bias of shape \[2, 2, 5\] does not broadcast to the result \[2, 3, 5\]"),
        ((X[0], W, torch.ones(4)), r"linear\(\): bias of shape \[4\] does not broadcast"),
        ((X[0], W, torch.ones(2, 5)), r"linear\(\): bias of shape \[2, 5\] does not broadcast"),
    ],
)
def test_operands_of_other_shapes_raise_shape_error(args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        gemmtune.linear(*args)


def test_error_of_a_packed_weight_names_the_input_alone() -> None:
    with pytest.raises(ShapeError, match=r"got input \[\]$"):
        gemmtune.linear(torch.ones(()), make_packed())


def test_vector_as_the_weight_is_pytorchs() -> None:
    function = linear.SPEC.torch_function(input=X, weight=W[0], bias=None)
    assert function is not None
    assert function.required
    for _ in range(2):
        torch.testing.assert_close(gemmtune.linear(X, W[0]), F.linear(X, W[0]))


def test_integers_need_pytorch_and_other_operands_do_not() -> None:
    for weight, x, bias, required in (
        (W.int(), X.int(), None, True), (W, X, BIAS, False), (make_packed(), X.int(), None, False),
    ):  # fmt: skip
        function = linear.SPEC.torch_function(input=x, weight=weight, bias=bias)
        assert function is not None
        assert function.required is required


@pytest.mark.parametrize(
    ("x", "bias", "has_function", "has_out"),
    [
        ((3, 4), None, True, True),
        ((3, 4), (5,), True, True),
        ((2, 3, 4), (5,), True, False),
        ((4,), None, True, False),
        ((3, 4), (1,), False, False),
        ((3, 4), (1, 5), False, False),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_pytorchs_function_takes_a_bias_by_column_and_its_out_variant_takes_matrices(
    x: tuple[int, ...], bias: tuple[int, ...] | None, has_function: bool, has_out: bool, packed: bool
) -> None:
    weight = make_packed() if packed else W
    function = linear.SPEC.torch_function(
        input=torch.ones(x), weight=weight, bias=None if bias is None else torch.ones(bias)
    )
    assert (function is not None) == has_function
    assert (function is not None and function.out is not None) == has_out


def test_pytorchs_function_of_integers_has_no_out_variant() -> None:
    function = linear.SPEC.torch_function(input=X[0].int(), weight=W.int(), bias=None)
    assert function is not None
    assert function.out is None


@pytest.mark.parametrize("bias", [None, BIAS])
@pytest.mark.parametrize("served", [False, True])
def test_out_is_written_by_kernels_and_by_pytorch(
    bias: Tensor | None, served: bool, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    if served:
        problem = linear_problem(3, 5, 4, "float32", bias=bias is not None, constant=False)
        store_decision(own_store, problem, evidence(toy(), 0.1), chosen=toy())
    TOY_RUNS.clear()
    out = torch.empty(3, 5)
    assert gemmtune.linear(X[0], W, bias, out=out) is out
    monkeypatch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))
    assert gemmtune.linear(X[0], W, bias, out=out.zero_()) is out
    torch.testing.assert_close(out, F.linear(X[0], W, bias))
    assert len(TOY_RUNS) == 2 * served


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_get_matrices(shape: tuple[int, ...], strided: bool, packed: bool) -> None:
    x = torch.randn(*shape[:-1], 9)[..., 1:9:2] if strided else torch.randn(shape)
    weight = make_packed() if packed else W
    call = linear.describe(x, weight)
    a, b, aux = adapt_args(call, (x, weight))(x, weight)
    assert aux == ()
    assert tuple(a.shape) == tuple(call.a.shape)
    assert torch.equal(a, x.reshape(-1, 4))
    assert a.is_contiguous() == (packed or not strided)
    assert b is weight if packed else b.data_ptr() == W.data_ptr()
    if not packed:
        assert tuple(b.shape) == (4, 5)


def test_products_by_parameters_and_their_views_are_recorded_as_constant() -> None:
    layer = nn.Linear(4, 5)
    with torch.no_grad(), gemmtune.record() as recording:
        layer(X)
        F.linear(X, W, BIAS)
    assert recording.problems == [
        (linear_problem(6, 5, 4, "float32", bias=True), 1),
        (linear_problem(6, 5, 4, "float32", bias=True, constant=False), 1),
    ]
