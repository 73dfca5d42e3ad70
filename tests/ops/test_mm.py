"""mm: its Problem, errors with the caller's names, and PyTorch's function for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gemmtune
from gemmtune import fuse
from gemmtune.core.checks import DtypeError, ShapeError
from gemmtune.core.errors import PackedWeightError
from gemmtune.ops import mm

A, B = torch.randn(3, 4), torch.randn(4, 5)


def test_problem_has_the_sizes_and_the_dtypes() -> None:
    problem = mm.describe(A.bfloat16(), B.bfloat16()).problem
    assert (problem.family, problem.m, problem.n, problem.k) == ("mm", 3, 5, 4)
    assert (problem.out_dtype, problem.acc) == ("bfloat16", "float32")
    assert mm.describe(A, B, torch.float16).problem.out_dtype == "float16"
    assert mm.describe(A.double(), B.double()).problem.acc == "float64"


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: gemmtune.mm(A[0], B), r"^mm\(\): input must be a matrix, got 1-D"),
        (lambda: gemmtune.mm(A, B[0]), r"^mm\(\): mat2 must be a matrix, got 1-D"),
        (lambda: gemmtune.addmm(B[0], A[None], B), r"^addmm\(\): mat1 must be a matrix, got 3-D"),
        (lambda: gemmtune.addmm(B[0], A, B[0]), r"^addmm\(\): mat2 must be a matrix, got 1-D"),
    ],
)
def test_operand_that_is_no_matrix_is_named(call: Callable[[], object], text: str) -> None:
    with pytest.raises(ShapeError, match=text):
        call()


def test_packed_weight_is_checked_against_the_input() -> None:
    packed = gemmtune.pack(B.t().contiguous(), layout="aten:row")
    with pytest.raises(PackedWeightError, match="K = 4, and the input has K = 3"):
        gemmtune.mm(A[:, :3], packed)
    with pytest.raises(PackedWeightError, match=r"^mm\(\): the packed weight holds float32; this call needs bfloat16"):
        gemmtune.mm(A.bfloat16(), packed)
    with pytest.raises(DtypeError, match="the operands' dtype"):
        gemmtune.mm(A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn), epilogue=[fuse.relu()])


def test_only_integers_of_one_dtype_need_pytorch() -> None:
    packed = gemmtune.pack(B.t().contiguous(), layout="aten:row")
    operands: list[tuple[Any, Any]] = [(A.int(), B.int()), (A, B), (A.int(), packed)]
    functions = [mm.SPEC.torch_function(*pair) for pair in operands]
    assert [function is not None and function.required for function in functions] == [True, False, False]


def test_product_by_a_parameter_is_recorded_as_constant() -> None:
    for weight, constant in ((nn.Parameter(B), True), (B, False)):
        with gemmtune.record() as recording:
            torch.mm(A, weight)
        ((problem, count),) = recording.problems
        assert (problem.b.constant, count) == (constant, 1)
