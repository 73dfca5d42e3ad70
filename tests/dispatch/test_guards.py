"""Guards: true for operands like those that they were made from, false for all others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import gemmtune
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import cache, guards
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, toy
from helpers.serving import store_decision as put_in_store

X, W = torch.randn(3, 4), torch.randn(5, 4)


class Marked(Tensor):
    """Tensor subclass without any behaviour of its own."""


@pytest.fixture(params=["torch", "python", "refused"], autouse=True)
def guard_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Select torch's guard, or the guard in Python for a torch without one or with other arguments."""

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("TensorGuards: other arguments")

    if request.param != "torch":
        monkeypatch.setattr(guards, "_TensorGuards", refuse if request.param == "refused" else None)
    elif guards._TensorGuards is None:
        pytest.skip("this torch has no TensorGuards")
    yield request.param
    gemmtune.refresh()  # drop the entries with such guards


def holds(guard: guards.Guard, *operands: Any) -> bool:
    """Return whether ``cache.lookup`` would accept the guard."""
    return cache.is_reachable() and guard(*operands)


def test_guard_holds_for_like_operands() -> None:
    guard = guards.make_guard(X, W)
    assert holds(guard, X, W)
    assert holds(guard, torch.zeros(3, 4), torch.ones(5, 4))
    assert holds(guard, torch.randn(4, 4)[1:], W)


UNLIKE_OPERANDS: dict[str, Callable[[], Any]] = {
    "a parameter": lambda: nn.Parameter(X, requires_grad=False),
    "a subclass": lambda: X.as_subclass(Marked),
    "a fake tensor": lambda: FakeTensorMode().from_tensor(X),
    "a dtype": lambda: X.bfloat16(),
    "an integer": lambda: X.view(torch.int32),
    "a device": lambda: X.to("meta"),
    "sizes": lambda: torch.randn(4, 4),
    "dimensions": lambda: X[None],
    "strides": lambda: torch.randn(4, 3).t(),
    "a gradient": lambda: X.clone().requires_grad_(),
    "a negation": lambda: torch._neg_view(X),
    "no tensor": lambda: 5,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("name", UNLIKE_OPERANDS)
@pytest.mark.parametrize("position", [0, 1])
def test_guard_rejects_unlike_operands(name: str, position: int) -> None:
    guard, operands = guards.make_guard(X, X.clone()), [X, X.clone()]
    assert holds(guard, *operands)
    operands[position] = UNLIKE_OPERANDS[name]()
    assert not holds(guard, *operands)
    if name not in ("a fake tensor", "no tensor", "nothing"):  # no guard is made from these
        assert not holds(guards.make_guard(*operands), X, X.clone())


def test_guard_distinguishes_inference_tensors() -> None:
    with torch.inference_mode():
        x = torch.zeros(3, 4)
        guard = guards.make_guard(x, W)
        assert holds(guard, torch.ones(3, 4), W)
        assert not holds(guard, X, W)
    assert not holds(guards.make_guard(X, W), x, W)


def test_guard_distinguishes_requires_grad() -> None:
    """A guard ignores the grad mode, which is in the keys of the ops."""
    leaf = torch.zeros(3, 4, requires_grad=True)
    guard = guards.make_guard(leaf, W)
    assert holds(guard, torch.ones(3, 4, requires_grad=True), W)
    assert not holds(guard, X, W)


STATES: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "vmap": lambda evaluate: torch.vmap(evaluate)(torch.randn(2, 3, 4)),
    "jvp": lambda evaluate: torch.func.jvp(evaluate, (X,), (X,)),
    "grad": lambda evaluate: torch.func.grad(lambda x: evaluate(x).sum())(X),
    "trace": lambda evaluate: torch.jit.trace(lambda x: evaluate(x) + 1, (X,), check_trace=False),
}
MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake": FakeTensorMode,
    "forward": forward_ad.dual_level,
    "a mode": TorchDispatchMode,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [*STATES, *MODES])
def test_guard_is_false_under_transforms_and_modes(name: str) -> None:
    """The guard is false for the operands of the state and for those that it was made from."""
    guard = guards.make_guard(X, W)
    results: list[bool] = []

    def evaluate(x: Tensor) -> Tensor:
        results.extend((holds(guard, x, W), holds(guard, X, W)))
        return x

    if name in STATES:
        STATES[name](evaluate)
    else:
        with MODES[name]():
            evaluate(X)
    assert results == [False, False]
    assert holds(guard, X, W)


def test_guard_distinguishes_shared_operands() -> None:
    shared_guard, separate_guard = guards.make_guard(X, X, W), guards.make_guard(X, X.clone(), W)
    other = torch.zeros(3, 4)
    assert holds(shared_guard, other, other, W)
    assert not holds(shared_guard, X, other, W)
    assert holds(separate_guard, X, other, W)
    assert not holds(shared_guard, X.double(), X.double(), W)


def test_guard_holds_no_reference_to_a_tensor() -> None:
    x = torch.randn(3, 4)
    reference = weakref.ref(x)
    guard_list = [guards.make_guard(x, W), guards.make_guard(x, x)]
    del x
    gc.collect()
    assert reference() is None
    assert guard_list


def test_ops_are_served_with_each_kind_of_guard(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    put_in_store(own_store, linear_problem(3, 5, 4, "float32", constant=False), evidence(toy(), 0.1), chosen=toy())
    expected = torch.nn.functional.linear(X, W)
    torch.testing.assert_close(gemmtune.linear(X, W), expected)
    monkeypatch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))
    TOY_RUNS.clear()
    torch.testing.assert_close(gemmtune.linear(X.clone(), W), expected)
    assert len(TOY_RUNS) == 1


def test_guard_of_any_size_compares_all_but_the_first_sizes(guard_kind: str) -> None:
    a, bias = torch.randn(2, 3, 8), torch.randn(8)
    guard = guards.make_guard_of_any_size((a, bias), (2, 0))
    if guard_kind != "torch":
        assert guard is None
        return
    assert guard is not None
    assert guard(torch.randn(5, 7, 8), torch.randn(8))
    assert guard(torch.randn(5, 7, 16)[:, ::2, :8].contiguous(), bias)
    unlike = [
        (torch.randn(2, 3, 9), bias), (a, torch.randn(9)), (a.double(), bias), (a[0], bias), (a[..., :4], bias),
        (torch.randn(2, 3, 8, requires_grad=True), bias), (a, nn.Parameter(bias)), (torch.randn(2, 8, 3).mT, bias),
    ]  # fmt: skip
    assert not any(guard(*operands) for operands in unlike)
    matrix = guards.make_guard_of_any_size((a[0],), (1,))
    assert matrix is not None
    assert matrix(torch.randn(9, 8))
    assert not matrix(torch.randn(9, 16)[:, :8])  # its rows have gaps
    with torch.autocast("cpu"):
        assert not matrix(torch.randn(9, 8))


def test_each_m_is_described_without_a_guard_of_any_size(own_store: MemoryStore, guard_kind: str) -> None:
    weight = torch.randn(4, 8)
    for m in (2, 3):
        x = torch.randn(m, 8)
        torch.testing.assert_close(gemmtune.linear(x, weight), x @ weight.t())
    assert bool(cache.DESCRIBED_CALLS) == (guard_kind == "torch")
