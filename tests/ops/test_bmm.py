"""bmm: its Problem, and the Problems of matmul as PyTorch computes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune.core.checks import ShapeError
from gemmtune.core.problem import Layout
from gemmtune.ops import bmm


def matmul_problem(a: Tensor, b: Tensor) -> tuple[object, ...] | None:
    """Return family, batch, M, N, K and whether B is constant, of the one Problem of ``a @ b``; None without one."""
    with torch.no_grad(), gemmtune.record() as recording:
        a @ b
    if not recording.problems:
        return None
    ((problem, count),) = recording.problems
    assert count == 1
    return problem.family, problem.batch, problem.m, problem.n, problem.k, problem.b.constant


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((3, 4), (4, 5), ("mm", 1, 3, 5, 4, False)),
        ((2, 3, 4), (4, 5), ("mm", 1, 6, 5, 4, False)),
        ((2, 3, 4), (2, 4, 5), ("bmm", 2, 3, 5, 4, False)),
        ((3, 4), (2, 4, 5), ("bmm", 2, 3, 5, 4, False)),
        ((7, 1, 3, 4), (2, 4, 5), ("bmm", 14, 3, 5, 4, False)),
        ((4,), (4, 5), None),
        ((3, 4), (4,), None),
        ((4,), (2, 4, 5), None),
        ((2, 3, 4), (4,), None),
    ],
)
def test_matmul_is_recorded_as_a_matrix_or_a_batch(
    a: tuple[int, ...], b: tuple[int, ...], expected: tuple[object, ...] | None
) -> None:
    assert matmul_problem(torch.ones(a), torch.ones(b)) == expected


def test_matmul_by_a_parameter_is_recorded_as_constant() -> None:
    assert matmul_problem(torch.ones(2, 3, 4), nn.Parameter(torch.ones(4, 5))) == ("mm", 1, 6, 5, 4, True)


def test_reflected_matmul_is_recorded_with_its_operands_exchanged() -> None:
    a, b = torch.ones(3, 4), torch.ones(4, 5)
    with gemmtune.record() as recording:
        result = Tensor.__rmatmul__(b, a)
    assert result.shape == (3, 5)
    assert [(problem.m, problem.n, problem.k) for problem, _ in recording.problems] == [(3, 5, 4)]


def test_problem_has_the_batch_and_the_layouts() -> None:
    call = bmm.describe(torch.ones(2, 4, 3).mT, torch.ones(2, 4, 5))
    problem = call.problem
    assert (problem.batch, problem.m, problem.n, problem.k) == (2, 3, 5, 4)
    assert (problem.a.layout, problem.b.layout) == (Layout("col"), Layout("row"))
    assert (problem.out_dtype, problem.acc, problem.b.constant) == ("float32", "float32", False)
    assert call.shape == (2, 3, 5)


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        ((3, 4), (2, 4, 5), "^batch1 must be a 3D tensor"),
        ((2, 3, 4), (4, 5), "^batch2 must be a 3D tensor"),
        ((2, 3, 4), (1, 4, 5), r"to be: \[2, 4\] but got: \[1, 4\]"),
        ((2, 3, 4), (2, 5, 4), r"to be: \[2, 4\] but got: \[2, 5\]"),
    ],
)
def test_batches_of_other_sizes_raise_shape_error(a: tuple[int, ...], b: tuple[int, ...], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        gemmtune.bmm(torch.ones(a), torch.ones(b))


def test_out_is_written_and_returned() -> None:
    a, b = torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    out = torch.empty(2, 3, 5)
    for _ in range(2):
        assert gemmtune.bmm(a, b, out=out.zero_()) is out
        torch.testing.assert_close(out, torch.bmm(a, b))


def test_only_integers_need_pytorch() -> None:
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    functions = bmm.SPEC.torch_function(a.int(), b.int()), bmm.SPEC.torch_function(a, b)
    assert [function is not None and function.required for function in functions] == [True, False]
