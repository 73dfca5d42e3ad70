"""Gradients through tuned kernels (a toy kernel in float64), and GradError for ops without gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune.core.checks import GradError
from gemmtune.ops import addmm, bmm, linear, mm
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


X, W, B, A, C = leaf(3, 4), leaf(5, 4), leaf(5), leaf(4, 5), leaf(3, 5)
BATCH_A, BATCH_B = leaf(2, 3, 4), leaf(2, 4, 5)

CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], Callable[[], object]]] = {
    "mm": (gemmtune.mm, (X, A), lambda: mm.describe(X, A)),
    "linear": (gemmtune.linear, (X, W, B), lambda: linear.describe(X, W, B)),
    "linear 3-D": (gemmtune.linear, (leaf(2, 3, 4), W), lambda: linear.describe(leaf(2, 3, 4), W, None)),
    "addmm": (
        lambda c, x, a: gemmtune.addmm(c, x, a, beta=0.5, alpha=2.0), (C, X, A),
        lambda: addmm.describe(C, X, A, 0.5, 2.0),
    ),
    "addmm row": (gemmtune.addmm, (B, X, A), lambda: addmm.describe(B, X, A, 1, 1)),
    "bmm": (gemmtune.bmm, (BATCH_A, BATCH_B), lambda: bmm.describe(BATCH_A, BATCH_B)),
}  # fmt: skip


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradcheck_passes_with_pytorch_and_a_tuned_kernel(name: str, served: bool, own_store: MemoryStore) -> None:
    register()
    function, inputs, describe = CASES[name]
    if served:
        call = describe()
        store_decision(own_store, call.problem, evidence(toy(), 0.1), chosen=toy())  # type: ignore[attr-defined]
    TOY_RUNS.clear()
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)
    assert bool(TOY_RUNS) == served


def test_only_operands_that_require_grad_get_a_gradient(own_store: MemoryStore) -> None:
    register()
    x, w = torch.randn(3, 4, dtype=torch.float64), leaf(5, 4)
    store_decision(own_store, linear.describe(x, w, None).problem, evidence(toy(), 0.1), chosen=toy())
    gemmtune.linear(x, w).sum().backward()
    torch.testing.assert_close(w.grad, torch.ones(3, 5, dtype=torch.float64).t() @ x)
    assert x.grad is None
    with torch.no_grad():
        assert not gemmtune.linear(x, w).requires_grad


def test_gradcheck_passes_with_an_epilogue() -> None:
    x, w = leaf(3, 4), leaf(5, 4)
    steps = lambda r: [gemmtune.fuse.gelu(), gemmtune.fuse.add(r)]  # noqa: E731
    assert torch.autograd.gradcheck(lambda x, w, r: gemmtune.linear(x, w, epilogue=steps(r)), (x, w, leaf(3, 5)))


def test_packed_weights_raise_grad_error() -> None:
    packed = gemmtune.pack(torch.randn(5, 4), layout="aten:row")
    x = torch.randn(3, 4, requires_grad=True)
    bias = torch.randn(5, requires_grad=True)
    for call in (
        lambda: gemmtune.linear(x, packed),
        lambda: gemmtune.linear(x.detach(), packed, bias),
        lambda: gemmtune.mm(x, packed),
        lambda: gemmtune.addmm(bias, x.detach(), packed),
        lambda: gemmtune.linear(x, packed, epilogue=[gemmtune.fuse.relu()]),
    ):
        for _ in range(2):
            with pytest.raises(GradError, match="a packed weight has no gradient"):
                call()
    with torch.no_grad():
        assert gemmtune.linear(x, packed, bias).shape == (3, 5)
