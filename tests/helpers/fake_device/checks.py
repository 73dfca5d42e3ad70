"""Checks of what a registered kind of device can do: ``python -m helpers.fake_device.checks NAME``, one a process."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemmtune
from gemmtune.backends import names
from gemmtune.backends.aten.dense import Mm
from gemmtune.core import devices
from gemmtune.core.decision import Decision
from gemmtune.core.errors import UnsupportedError
from gemmtune.core.problem import Problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.store import MemoryStore, SqliteStore
from gemmtune.tuning.tuner import Budget, Tuner
from helpers.fake_device import MODULE, TYPE
from helpers.serving import TOY_RUNS, decide, evidence, register, toy

X, W = torch.randn(4, 96), torch.randn(64, 96)


def recorded_problem() -> Problem:
    with gemmtune.record() as recorded:
        gemmtune.linear(X.to(TYPE), W.to(TYPE))
    assert recorded.devices == (torch.device(TYPE, 0),)
    ((problem, _),) = recorded.on(f"{TYPE}:0")
    return problem


def tuned(problem: Problem, store: MemoryStore | SqliteStore, isolate: bool) -> Decision:
    tuner = Tuner(current_target(TYPE), names(TYPE), store, Budget(seconds=2.0), isolate=isolate)
    (decision,) = tuner.tune([(problem, 1)])
    return decision


def target() -> None:
    """The Target, and the errors of devices that do not exist."""
    found = current_target(TYPE)
    assert (found.device, found.torch_device) == (TYPE, torch.device(TYPE))
    assert {name for name, _ in found.sources} == {"aten"}
    assert found.key != current_target().key
    with pytest.raises(UnsupportedError, match="there is no fake:3: torch sees 1 fake"):
        current_target(f"{TYPE}:3")
    with pytest.raises(ValueError, match="cpu or cuda or fake"):
        current_target("mps")
    with pytest.raises(ValueError, match="a type of its own"):
        devices.register(devices.HostDevice(), __name__)


def tuning() -> None:
    """A problem is tuned in a worker process and in this one, by verified candidates of ATen, and stored."""
    problem = recorded_problem()
    with tempfile.TemporaryDirectory() as folder:
        store = SqliteStore(Path(folder) / "store.db")
        for isolate in (True, False):
            decision = tuned(problem, store, isolate) if isolate else tuned(problem, MemoryStore(), isolate)
            assert decision.target_key == current_target(TYPE).key
            assert decision.outcome in ("tie", "winner", "inconclusive")
            row = decision.find(decision.chosen)
            assert row is not None
            assert row.verdict is not None
            assert row.verdict.ok
            assert row.candidate["backend"] == "aten"
            assert row.sample is not None
            assert not {"aten/mkldnn", "native"} & {item.id.partition("#")[0] for item in decision.evidence}
        store.close()
    assert MODULE.synchronizations > 10  # timings wait for the device


def serving() -> None:
    """A stored decision's kernel serves calls on the device and no others, from the dispatch cache."""
    problem, store = recorded_problem(), MemoryStore()
    register()
    chosen = toy("", 1)
    decision = decide(problem, evidence(chosen, 0.1), chosen=chosen)
    store.put(current_target(TYPE), msgspec.structs.replace(decision, target_key=current_target(TYPE).key))
    RUNTIME.refresh(store)
    x, w = X.to(TYPE), W.to(TYPE)
    for _ in range(2):
        result = gemmtune.linear(x, w)
        assert result.device == x.device
        torch.testing.assert_close(result.cpu(), F.linear(X, W))
    out = torch.empty(4, 64, device=TYPE)
    assert gemmtune.linear(x, w, out=out) is out
    torch.testing.assert_close(out.cpu(), F.linear(X, W))
    assert len(TOY_RUNS) == 3
    gemmtune.linear(X, W)
    assert len(TOY_RUNS) == 3  # the CPU has no decision
    assert len(DISPATCH_CACHE) == 2
    weight = w.clone().requires_grad_()
    gemmtune.linear(x, weight).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad.cpu(), X.sum(0).expand(64, 96))


def model() -> None:
    """A model on the device is optimized and computes what it did."""
    net = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 32)).to(TYPE).eval().requires_grad_(False)
    expected = net(X.to(TYPE)).cpu()
    handle = gemmtune.optimize(net, X.to(TYPE), budget=1.0, store=MemoryStore(), m=None)
    assert set(handle.left) | set(handle.swapped) == {"0", "2"}
    torch.testing.assert_close(net(X.to(TYPE)).cpu(), expected)


def wrong() -> None:
    """A candidate that is wrong on the device is found."""
    product_out = Mm.product_out

    def off_in_the_last_element(self: Mm, a: Tensor, b: object, aux: Sequence[Tensor], out: Tensor) -> None:
        product_out(self, a, b, aux, out)
        out[-1, -1] += 1.0

    Mm.product_out = off_in_the_last_element  # type: ignore[method-assign]
    row = tuned(recorded_problem(), MemoryStore(), isolate=False).find("aten/mm")
    assert row is not None
    assert row.verdict is not None
    assert row.verdict.kind == "wrong"
    assert "[3, 63]" in row.verdict.detail


CHECKS = {check.__name__: check for check in (target, tuning, serving, model, wrong)}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
    # PyTorch's autograd thread of a device may release Python objects while the interpreter shuts down, and then the
    # process aborts ("terminate called without an active exception"). So does a backward in Python without gemmtune.
    sys.stdout.flush()
    os._exit(0)
