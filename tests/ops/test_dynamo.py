"""Ops in ``torch.compile``: PyTorch's own functions in one graph, or a break for what a graph cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune import fuse
from gemmtune.ops.dynamo import apply_epilogue, graph_break

ONE = torch.tensor(1.0)
A, B, BIAS, RESIDUAL = torch.randn(3, 4), torch.randn(4, 5), torch.randn(5), torch.randn(3, 5)
STACK = torch.randn(2, 3, 4)
I8 = torch.ones(3, 8, dtype=torch.int8)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    return gemmtune.scaled_mm(a, b, ONE, ONE, out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "expected", "a", "b"),
    [
        (gemmtune.mm, torch.mm, A, B),
        (
            lambda a, b: gemmtune.mm(a, b, epilogue=[fuse.add(RESIDUAL)], out_dtype=torch.float64),
            lambda a, b: (torch.mm(a, b) + RESIDUAL).double(),
            A,
            B,
        ),
        (gemmtune.bmm, torch.bmm, STACK, torch.randn(2, 4, 5)),
        (
            lambda a, b: gemmtune.addmm(BIAS, a, b, beta=2, alpha=3),
            lambda a, b: torch.addmm(BIAS, a, b, beta=2, alpha=3),
            A,
            B,
        ),
        (lambda a, b: gemmtune.linear(a, b.t(), BIAS), lambda a, b: a @ b + BIAS, STACK, B),
        (lambda a, b: gemmtune.linear(a, b.t(), epilogue=[fuse.relu()]), lambda a, b: torch.relu(a @ b), A, B),
        (
            scaled,
            lambda a, b: torch._scaled_mm(a, b, ONE, ONE, out_dtype=torch.bfloat16),
            torch.randn(16, 32).to(torch.float8_e4m3fn),
            torch.randn(16, 32).to(torch.float8_e4m3fn).t(),
        ),
    ],
    ids=["mm", "mm with an epilogue", "bmm", "addmm", "linear 3-D", "linear with an epilogue", "scaled_mm"],
)
def test_op_is_pytorchs_in_one_graph(
    op: Callable[..., Tensor], expected: Callable[..., Tensor], a: Tensor, b: Tensor
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: op(a, b) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), expected(a, b) + 1)


BREAKS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "mm out": (lambda a, out: gemmtune.mm(a, B, out=out), torch.empty(3, 5)),
    "bmm out": (lambda a, out: gemmtune.bmm(a[None], B[None], out=out), torch.empty(1, 3, 5)),
    "addmm out": (lambda a, out: gemmtune.addmm(BIAS, a, B, beta=2, alpha=3, out=out), torch.empty(3, 5)),
    "linear out": (lambda a, out: gemmtune.linear(a, B.t(), BIAS, out=out), torch.empty(3, 5)),
    "linear 3-D with an epilogue": (
        lambda a, residual: gemmtune.linear(a[None], B.t(), BIAS, epilogue=[fuse.mul(residual)]), RESIDUAL,
    ),
    "int_mm": (lambda a, b: gemmtune.int_mm(b, b.t(), out_dtype=torch.float32), I8),
    "mixed_mm": (lambda a, b: gemmtune.mixed_mm(a[:, :3], b, torch.ones(8)), I8),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAKS)
def test_op_that_no_graph_can_hold_runs_eagerly(name: str) -> None:
    op, other = BREAKS[name]
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: op(a, b) + 1, backend="eager")
    expected = op(A, other.clone()) + 1
    torch.testing.assert_close(compiled(A, other), expected)
    if "out" in name:
        torch.testing.assert_close(other + 1, expected)


@pytest.mark.parametrize(
    "op",
    [
        lambda a, packed: gemmtune.mm(a, packed),
        lambda a, packed: gemmtune.linear(a, packed),
        lambda a, packed: gemmtune.addmm(BIAS, a, packed, beta=2, alpha=3),
    ],
    ids=["mm", "linear", "addmm"],
)
def test_packed_weight_breaks_the_graph(op: Callable[..., Tensor]) -> None:
    packed = gemmtune.pack(B.t().contiguous(), layout="aten:row")
    torch._dynamo.reset()
    compiled = torch.compile(lambda a: op(a, packed) + 1, backend="eager")
    torch.testing.assert_close(compiled(A), op(A, packed) + 1)


def test_graph_break_returns_what_the_op_returns() -> None:
    def op(*args: Any, **options: Any) -> Any:
        return args, options

    assert graph_break(op, 1, 2, three=3) == ((1, 2), {"three": 3})


def test_product_without_an_epilogue_is_returned_in_the_outputs_dtype() -> None:
    assert apply_epilogue(A, (), None) is A
    assert apply_epilogue(A, (), torch.float32) is A
    assert torch.equal(apply_epilogue(A, (), torch.bfloat16), A.bfloat16())


def test_epilogue_is_computed_wide_and_rounded_once() -> None:
    product, residual = torch.full((1, 2), 1.0).bfloat16(), torch.full((1, 2), 2.0**-10)
    steps = [fuse.add(residual), fuse.scale(4.0), fuse.relu()]
    result = apply_epilogue(product, steps, None)
    assert result.dtype == torch.bfloat16
    assert torch.equal(result, ((product.float() + residual) * 4.0).bfloat16())
    exact = apply_epilogue(product, steps, torch.float32)
    assert exact.dtype == torch.float32
    assert torch.equal(exact, (product.float() + residual) * 4.0)
