"""An op family of a plug-in is recorded, tuned, verified, stored, served and traced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune.backends.aten import AtenBackend
from gemmtune.core.checks import ShapeError
from gemmtune.core.problem import Family, Problem, register_family
from gemmtune.core.target import Target, current_cpu
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore, SqliteStore
from gemmtune.tuning.tuner import Budget, Tuner
from helpers import grouped_toy as plugin
from helpers.grouped_toy import fallback, grouped_toy

X, W1, W2 = torch.randn(8, 32), torch.randn(24, 32), torch.randn(24, 32)
BUDGET = Budget(seconds=8.0)


@pytest.fixture
def operands() -> tuple[Tensor, Tensor, Tensor]:
    return X.clone(), W1, W2


def recorded_problem() -> Problem:
    expected = fallback(X, W1, W2)
    with gemmtune.record() as recording:
        result = grouped_toy(X, W1, W2)
    torch.testing.assert_close(result, expected)
    ((problem, count),) = recording.problems
    assert count == 1
    return problem


def test_family_is_recorded() -> None:
    problem = recorded_problem()
    assert (problem.family, problem.batch, problem.m, problem.n, problem.k) == ("grouped_toy", 2, 4, 24, 32)
    assert Problem.from_dict(problem.to_dict()) == problem
    assert problem.key.startswith("grouped_toy|b2.m4.n24.k32|")


@pytest.mark.parametrize("isolate", [True, False])
def test_family_is_tuned_verified_stored_and_served(
    tmp_path: Path, isolate: bool, operands: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only ATen has a candidate; the other backends do not take the family. A worker process imports the plug-in."""
    store = SqliteStore(tmp_path / "store.db")
    target = current_target()
    tuner = Tuner(target, ["native"], store, BUDGET, isolate=isolate)
    plugin.ORACLE_CALLS.clear()
    (decision,) = tuner.tune([(recorded_problem(), 1)])
    if decision.outcome == "inconclusive":  # on a loaded machine; the evidence is valid
        decision = msgspec.structs.replace(decision, outcome="tie")
        store.put(target, decision)
    assert decision.outcome == "tie"
    assert decision.chosen == "aten/grouped_bmm"
    row = decision.find(decision.chosen)
    assert row is not None
    assert row.verdict is not None
    assert row.verdict.ok
    assert bool(plugin.ORACLE_CALLS) != isolate  # the worker's process called the oracle
    reasons = {row.id: row.reason for row in decision.evidence if row.stage == "illegal"}
    assert reasons["native/*"] == "native does not take problems of the family grouped_toy"
    assert store.get(target, recorded_problem().key) == decision
    assert store.verify() == []
    calls: list[int] = []
    product = plugin.GroupedBmm.product
    monkeypatch.setattr(plugin.GroupedBmm, "product", lambda *arguments: (calls.append(1), product(*arguments))[1])
    RUNTIME.refresh(store)
    try:
        for _ in range(2):
            torch.testing.assert_close(grouped_toy(*operands), fallback(*operands))
        assert len(calls) == 2
    finally:
        RUNTIME.refresh(MemoryStore())
        store.close()


def test_wrong_candidate_of_the_family_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_a_column(self: object, a: Tensor, b: Tensor, aux: object) -> Tensor:
        out = torch.bmm(a, b)
        out[1, :, -1] = out[1, :, 0]
        return out

    monkeypatch.setattr(plugin.GroupedBmm, "product", off_by_a_column)
    target: Target = replace(current_cpu(), threads=1)
    (decision,) = Tuner(target, ["aten"], MemoryStore(), BUDGET, isolate=False).tune([(recorded_problem(), 1)])
    assert decision.outcome == "none_valid"


def test_gradients_torch_compile_errors_and_autocast(operands: tuple[Tensor, Tensor, Tensor]) -> None:
    x = operands[0].requires_grad_()
    grouped_toy(x, W1, W2).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[0], W1.sum(0))
    torch.testing.assert_close(x.grad[-1], W2.sum(0))
    compiled = torch.compile(lambda a, b, c: grouped_toy(a, b, c) * 2, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, W1, W2), fallback(X, W1, W2) * 2)
    with pytest.raises(ShapeError, match="two weights"):
        grouped_toy(X[:3], W1, W2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_toy(X, W1, W2).dtype == torch.bfloat16


def test_taken_and_invalid_family_names_raise_value_error() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        register_family(Family("mm"), __name__)
    with pytest.raises(ValueError, match="lower-case"):
        register_family(Family("Grouped-2"), __name__)
    with pytest.raises(ValueError, match="family must be one of"):
        replace(recorded_problem(), family="nobody")
    assert AtenBackend().takes("grouped_toy")
