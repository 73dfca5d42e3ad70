"""Ops in ``torch.compile``: PyTorch's own functions, in one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gemmtune

ONE = torch.tensor(1.0)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    return gemmtune.scaled_mm(a, b, ONE, ONE, out_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("op", "expected", "a", "b"),
    [
        (gemmtune.mm, torch.mm, torch.randn(3, 4), torch.randn(4, 5)),
        (gemmtune.bmm, torch.bmm, torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
        (
            scaled,
            lambda a, b: torch._scaled_mm(a, b, ONE, ONE, out_dtype=torch.bfloat16),
            torch.randn(16, 32).to(torch.float8_e4m3fn),
            torch.randn(16, 32).to(torch.float8_e4m3fn).t(),
        ),
    ],
    ids=["mm", "bmm", "scaled_mm"],
)
def test_op_is_pytorchs_in_one_graph(
    op: Callable[..., Tensor], expected: Callable[..., Tensor], a: Tensor, b: Tensor
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: op(a, b) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), expected(a, b) + 1)
