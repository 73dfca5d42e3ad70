"""Checks of operands: true of what is like those that they were made of, false of everything else."""

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
    """A Tensor subclass that does nothing but persist."""


@pytest.fixture(params=["torch", "python", "refused"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own check; and those in Python where torch has none, or takes other arguments."""

    def refuse(*_: Any, **__: Any) -> None:
        raise TypeError("TensorGuards: other arguments")

    if request.param != "torch":
        monkeypatch.setattr(guards, "_TensorGuards", refuse if request.param == "refused" else None)
    elif guards._TensorGuards is None:
        pytest.skip("this torch has no TensorGuards")
    yield
    gemmtune.refresh()  # what was prepared with such checks


def holds(check: guards.Guard, *operands: Any) -> bool:
    """As ``cache.lookup`` asks."""
    return cache.is_reachable() and check(*operands)


def test_it_holds_of_what_is_alike() -> None:
    check = guards.make_guard(X, W)
    assert holds(check, X, W)
    assert holds(check, torch.zeros(3, 4), torch.ones(5, 4))
    assert holds(check, torch.randn(4, 4)[1:], W)


OTHERS: dict[str, Callable[[], Any]] = {
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


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("place", [0, 1])
def test_it_does_not_hold_of_other(name: str, place: int) -> None:
    check, operands = guards.make_guard(X, X.clone()), [X, X.clone()]
    assert holds(check, *operands)
    operands[place] = OTHERS[name]()
    assert not holds(check, *operands)
    if name not in ("a fake tensor", "no tensor", "nothing"):  # of which none is made
        assert not holds(guards.make_guard(*operands), X, X.clone())


def test_a_tensor_made_for_inference_is_another() -> None:
    with torch.inference_mode():
        x = torch.zeros(3, 4)
        check = guards.make_guard(x, W)
        assert holds(check, torch.ones(3, 4), W)
        assert not holds(check, X, W)
    assert not holds(guards.make_guard(X, W), x, W)


def test_it_does_not_hold_of_what_requires_a_gradient() -> None:
    """Whether gradients are on is in the keys of the ops."""
    leaf = torch.zeros(3, 4, requires_grad=True)
    check = guards.make_guard(leaf, W)
    assert holds(check, torch.ones(3, 4, requires_grad=True), W)
    assert not holds(check, X, W)


STATES: dict[str, Callable[[Callable[[Tensor], Tensor]], object]] = {
    "vmap": lambda ask: torch.vmap(ask)(torch.randn(2, 3, 4)),
    "jvp": lambda ask: torch.func.jvp(ask, (X,), (X,)),
    "grad": lambda ask: torch.func.grad(lambda x: ask(x).sum())(X),
    "trace": lambda ask: torch.jit.trace(lambda x: ask(x) + 1, (X,), check_trace=False),
}
BLOCKS: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "fake": FakeTensorMode,
    "forward": forward_ad.dual_level,
    "a mode": TorchDispatchMode,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", [*STATES, *BLOCKS])
def test_it_does_not_hold_in_another_state(name: str) -> None:
    """Neither of the operands that the state is about, nor of what the check was made of."""
    check = guards.make_guard(X, W)
    seen: list[bool] = []

    def ask(x: Tensor) -> Tensor:
        seen.extend((holds(check, x, W), holds(check, X, W)))
        return x

    if name in STATES:
        STATES[name](ask)
    else:
        with BLOCKS[name]():
            ask(X)
    assert seen == [False, False]
    assert holds(check, X, W)


def test_a_tensor_given_twice_is_known_again() -> None:
    same, apart = guards.make_guard(X, X, W), guards.make_guard(X, X.clone(), W)
    other = torch.zeros(3, 4)
    assert holds(same, other, other, W)
    assert not holds(same, X, other, W)
    assert holds(apart, X, other, W)
    assert not holds(same, X.double(), X.double(), W)


def test_no_tensor_is_kept() -> None:
    x = torch.randn(3, 4)
    gone = weakref.ref(x)
    checks = [guards.make_guard(x, W), guards.make_guard(x, x)]
    del x
    gc.collect()
    assert gone() is None
    assert checks


def test_ops_are_served_by_either(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    put_in_store(own_store, linear_problem(3, 5, 4, "float32", constant=False), evidence(toy(), 0.1), chosen=toy())
    wanted = torch.nn.functional.linear(X, W)
    torch.testing.assert_close(gemmtune.linear(X, W), wanted)
    monkeypatch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))
    TOY_RUNS.clear()
    torch.testing.assert_close(gemmtune.linear(X.clone(), W), wanted)
    assert len(TOY_RUNS) == 1
