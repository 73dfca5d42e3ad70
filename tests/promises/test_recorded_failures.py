"""A candidate that was wrong, unstable, crashed or hung at one M serves no M of its Plan."""

from __future__ import annotations

import msgspec
import pytest
import torch

import gemmtune
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Verdict
from gemmtune.core.problem import Problem, plan_key_of
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore
from gemmtune.store.base import Store
from helpers.serving import RAN, decide, evidence, register, serve, toy

W = torch.randn(5, 4)
FAULTS = [Verdict("wrong", "out[0, 0] is 1"), Verdict("unstable"), Verdict("crashed", "signal 11"), Verdict("hung")]


def problem(m: int) -> Problem:
    return linear_problem(m, 5, 4, "float32", constant=False)


@pytest.fixture(autouse=True)
def toys() -> None:
    register()
    RAN.clear()


def serves(m: int) -> bool:
    """Whether a tuned kernel serves m rows, whose result is right in any case."""
    RAN.clear()
    x = torch.randn(m, 4)
    torch.testing.assert_close(gemmtune.linear(x, W), x @ W.t())
    return bool(RAN)


@pytest.mark.parametrize("verdict", FAULTS, ids=lambda verdict: verdict.kind)
@pytest.mark.parametrize("key", [problem(16).key, problem(16).plan_key], ids=["problem", "plan"])
def test_a_remembered_fault_excludes_a_candidate_from_its_whole_plan(
    own_store: MemoryStore, key: str, verdict: Verdict
) -> None:
    """Older stores hold it under the Problem's key alone."""
    serve(own_store, problem(32), evidence(toy(), 0.1), chosen=toy())
    assert serves(32)
    own_store.remember_failure(current_target(), key, toy().id, verdict)
    RUNTIME.refresh()
    assert not any(serves(m) for m in (1, 16, 32, 300))


@pytest.mark.parametrize("kind", ["out_of_memory", "build_failed", "unsupported"])
def test_what_does_not_fit_at_one_m_may_serve_another(own_store: MemoryStore, kind: str) -> None:
    serve(own_store, problem(32), evidence(toy(), 0.1), chosen=toy())
    own_store.remember_failure(current_target(), problem(4096).key, toy().id, Verdict(kind))  # type: ignore[arg-type]
    RUNTIME.refresh()
    assert serves(32)


def test_a_decision_whose_evidence_calls_a_candidate_wrong_excludes_it_at_every_m(own_store: MemoryStore) -> None:
    """ATen's faults are not remembered as failures: the evidence of each decision tells them."""
    turned = Candidate.make("aten", "mm_t")
    wrong = msgspec.structs.replace(evidence(turned, 0.1), verdict=Verdict("wrong"), stage="failed", sample=None)
    serve(own_store, problem(32), evidence(turned, 0.1), chosen=turned)
    kernel = RUNTIME.kernel_for(problem(32))
    assert kernel is not None
    assert kernel.candidate == turned
    own_store.put(current_target(), _with(wrong))
    RUNTIME.refresh()
    assert RUNTIME.kernel_for(problem(32)) is None


def _with(row: Evidence) -> Decision:
    decision = decide(problem(16))
    return msgspec.structs.replace(decision, evidence=(row, *decision.evidence))


def test_a_fault_of_one_plan_says_nothing_of_another(own_store: MemoryStore) -> None:
    serve(own_store, problem(32), evidence(toy(), 0.1), chosen=toy())
    other = linear_problem(16, 5, 8, "float32", constant=False)
    own_store.remember_failure(current_target(), other.plan_key, toy().id, Verdict("crashed"))
    RUNTIME.refresh()
    assert serves(32)


def test_a_store_without_a_list_of_all_failures_is_asked_for_those_of_its_decisions(own_store: MemoryStore) -> None:
    """The method came later than stores of others."""
    own_store.put(current_target(), decide(problem(16)))
    own_store.remember_failure(current_target(), problem(16).plan_key, toy().id, Verdict("crashed"))
    assert Store.all_failures(own_store, current_target()) == own_store.all_failures(current_target())


def test_the_plan_key_can_be_told_from_a_problems_key() -> None:
    batched = Problem("bmm", 7, 5, 4, problem(1).a, problem(1).b, "float32", batch=12)
    for item in (problem(16), linear_problem(3, 5, 4, "bfloat16"), batched):
        assert plan_key_of(item.key) == plan_key_of(item.plan_key) == item.plan_key
