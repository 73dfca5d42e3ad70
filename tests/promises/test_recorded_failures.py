"""Tests that a candidate that was wrong, unstable, crashed or hung at one M serves no M of its Plan."""

from __future__ import annotations

import msgspec
import pytest
import torch

import gemmtune
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Verdict
from gemmtune.core.problem import Problem, plan_keys_of
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore
from gemmtune.store.base import Store
from helpers.serving import TOY_RUNS, decide, evidence, register, store_decision, toy

W = torch.randn(5, 4)
FAULTS = [Verdict("wrong", "out[0, 0] is 1"), Verdict("unstable"), Verdict("crashed", "signal 11"), Verdict("hung")]


def problem(m: int) -> Problem:
    return linear_problem(m, 5, 4, "float32", constant=False)


@pytest.fixture(autouse=True)
def toy_backend() -> None:
    register()
    TOY_RUNS.clear()


def is_served_by_kernel(m: int) -> bool:
    """Check the result of m rows, and return whether a tuned kernel served them."""
    TOY_RUNS.clear()
    x = torch.randn(m, 4)
    torch.testing.assert_close(gemmtune.linear(x, W), x @ W.t())
    return bool(TOY_RUNS)


@pytest.mark.parametrize("verdict", FAULTS, ids=lambda verdict: verdict.kind)
@pytest.mark.parametrize("key", [problem(16).key, problem(16).plan_key], ids=["problem", "plan"])
def test_a_recorded_fault_excludes_a_candidate_at_every_m_of_its_plan(
    own_store: MemoryStore, key: str, verdict: Verdict
) -> None:
    """Older stores have the fault under the Problem's key alone."""
    store_decision(own_store, problem(32), evidence(toy(), 0.1), chosen=toy())
    assert is_served_by_kernel(32)
    own_store.remember_failure(current_target(), key, toy().id, verdict)
    RUNTIME.refresh()
    assert not any(is_served_by_kernel(m) for m in (1, 16, 32, 300))


@pytest.mark.parametrize("kind", ["out_of_memory", "build_failed", "unsupported"])
def test_a_candidate_that_is_out_of_memory_or_unsupported_at_one_m_may_serve_another(
    own_store: MemoryStore, kind: str
) -> None:
    store_decision(own_store, problem(32), evidence(toy(), 0.1), chosen=toy())
    own_store.remember_failure(current_target(), problem(4096).key, toy().id, Verdict(kind))  # type: ignore[arg-type]
    RUNTIME.refresh()
    assert is_served_by_kernel(32)


def test_a_wrong_verdict_in_the_evidence_of_a_decision_excludes_a_candidate_at_every_m(own_store: MemoryStore) -> None:
    """ATen's faults are not recorded as failures; they are in the evidence of each decision."""
    candidate = Candidate.make("aten", "mm_t")
    wrong = msgspec.structs.replace(evidence(candidate, 0.1), verdict=Verdict("wrong"), stage="failed", sample=None)
    store_decision(own_store, problem(32), evidence(candidate, 0.1), chosen=candidate)
    kernel = RUNTIME.kernel_for(problem(32))
    assert kernel is not None
    assert kernel.candidate == candidate
    own_store.put(current_target(), _tie_with_evidence(wrong))
    RUNTIME.refresh()
    assert RUNTIME.kernel_for(problem(32)) is None


def _tie_with_evidence(row: Evidence) -> Decision:
    decision = decide(problem(16))
    return msgspec.structs.replace(decision, evidence=(row, *decision.evidence))


def test_a_fault_of_one_plan_does_not_exclude_the_candidate_from_another(own_store: MemoryStore) -> None:
    store_decision(own_store, problem(32), evidence(toy(), 0.1), chosen=toy())
    other = linear_problem(16, 5, 8, "float32", constant=False)
    own_store.remember_failure(current_target(), other.plan_key, toy().id, Verdict("crashed"))
    RUNTIME.refresh()
    assert is_served_by_kernel(32)


def test_the_default_all_failures_of_a_store_has_the_failures_of_its_decisions(own_store: MemoryStore) -> None:
    """Stores of plug-ins may be older than the method ``all_failures``."""
    own_store.put(current_target(), decide(problem(16)))
    own_store.remember_failure(current_target(), problem(16).plan_key, toy().id, Verdict("crashed"))
    assert Store.all_failures(own_store, current_target()) == own_store.all_failures(current_target())


def test_the_plan_key_is_derived_from_a_problem_key() -> None:
    batched = Problem("bmm", 7, 5, 4, problem(1).a, problem(1).b, "float32", batch=12)
    for item in (problem(16), linear_problem(3, 5, 4, "bfloat16"), batched):
        assert plan_keys_of(item.key)[0] == plan_keys_of(item.plan_key)[0] == item.plan_key
