"""Kernels for M between the tuned ones: estimates choose them, and measured times correct the estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from gemmtune import backends
from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.problem import Problem
from gemmtune.tuning.plan_pool import PoolKernel, kernel_pool
from gemmtune.tuning.predicted_kernels import expected_kernels, kernels_chosen_by_m, predict_kernels
from gemmtune.tuning.sizes import SizeRange
from helpers.factories import make_target
from helpers.gpus import H200, PROBLEM_OF_DTYPE, legal_candidates
from helpers.serving import decide

PROBLEM = PROBLEM_OF_DTYPE["int8wo"]
TUNED = (1, 16, 128, 2048)
SIZES = SizeRange(1, 8192, TUNED)


def estimate(candidate: Candidate, m: int) -> float:
    seconds = backends.get(candidate.backend).estimated_s(PROBLEM.with_m(m), candidate, H200)
    assert seconds is not None
    return seconds


def fastest(m: int, template: str) -> Candidate:
    """Return the candidate of a template that is estimated to be the fastest at M."""
    backend = "triton" if template in ("tiled", "converted", "persistent") else "cuda"
    candidates = legal_candidates(backends.get(backend), PROBLEM.with_m(m))
    return next(candidate for candidate in candidates if candidate.template == template)


def decision(m: int, *candidates: Candidate, slower: float = 1.0) -> Decision:
    """Return a Decision whose candidates took ``slower`` times their estimates."""
    rows = []
    for candidate in candidates:
        seconds = slower * estimate(candidate, m)
        sample = Sample(seconds, seconds, seconds, 50, 0.5, 0.49, 0.51)
        rows.append(Evidence(candidate.to_dict(), candidate.id, "finalist", None, "", Verdict("within_bound"), sample))
    return decide(PROBLEM.with_m(m), *rows)


DECISIONS = [
    decision(1, fastest(1, "skinny")),
    decision(16, fastest(16, "skinny")),
    decision(128, fastest(128, "mixed")),
    decision(2048, fastest(2048, "converted")),
]


def predicted(decisions: Sequence[Decision], limit: int = 12, without: Sequence[str] = ()) -> list[PoolKernel]:
    return predict_kernels(PROBLEM, H200, decisions, kernel_pool(decisions), SIZES, {}, without, limit)


def test_predicted_kernels_are_expected_to_be_faster_than_those_of_the_decisions() -> None:
    kernels = predicted(DECISIONS)
    pool = {kernel.id for kernel in kernel_pool(DECISIONS)}
    mixed = fastest(128, "mixed")
    assert kernels
    for kernel in kernels:
        assert kernel.id not in pool
        assert kernel.tuned_m in range(1, 8193)
        assert kernel.predicted_for
        assert not kernel.predicted_for & set(TUNED)
        assert kernel.tile_rows == dict(kernel.candidate.config)["bm"]
    tiles = [kernel for kernel in kernels if kernel.candidate.template == "mixed"]
    assert tiles
    for kernel in tiles:
        assert all(estimate(kernel.candidate, m) < estimate(mixed, m) for m in kernel.predicted_for)
    assert any(323 <= m <= 813 for kernel in tiles for m in kernel.predicted_for)


def test_kernels_are_legal_at_the_m_that_they_are_loaded_for() -> None:
    for kernel in predicted(DECISIONS):
        backend = backends.get(kernel.candidate.backend)
        assert not backend.why_illegal(PROBLEM.with_m(kernel.tuned_m), kernel.candidate, H200)


def test_number_of_kernels_is_limited_and_the_most_useful_come_first() -> None:
    kernels = predicted(DECISIONS)
    assert len(kernels) > 3
    assert [kernel.id for kernel in predicted(DECISIONS, limit=3)] == [kernel.id for kernel in kernels[:3]]
    assert predicted(DECISIONS, limit=0) == []


def test_excluded_candidates_are_not_chosen() -> None:
    first = predicted(DECISIONS)[0].id
    assert first not in {kernel.id for kernel in predicted(DECISIONS, without=[first])}


def test_only_templates_of_the_decisions_are_considered() -> None:
    templates = {kernel.candidate.template for kernel in predicted(DECISIONS[:2])}
    assert templates == {"skinny"}


def test_measured_times_correct_estimates() -> None:
    slow = decision(128, fastest(128, "mixed"), slower=20.0)
    kernels = predicted([*DECISIONS[:2], slow, DECISIONS[3]])
    faster = {
        m for kernel in predicted(DECISIONS) if kernel.candidate.template == "mixed" for m in kernel.predicted_for
    }
    assert max(faster) > 300
    slower = {m for kernel in kernels if kernel.candidate.template == "mixed" for m in kernel.predicted_for}
    assert all(m < 200 for m in slower)  # where no other template has candidates


def test_decisions_without_times_predict_nothing() -> None:
    assert predicted([decision(m) for m in TUNED]) == []


def with_failure(found: Decision, candidate: Candidate) -> Decision:
    """Return the Decision with a candidate that failed."""
    verdict = Verdict("wrong", "an element is off")
    row = Evidence(candidate.to_dict(), candidate.id, "failed", None, "wrong", verdict)
    return msgspec.structs.replace(found, evidence=(*found.evidence, row))


def test_failed_and_faulty_candidates_are_not_expected() -> None:
    expected = expected_kernels(PROBLEM, H200, DECISIONS, SIZES, {})
    assert [kernel.id for kernel in expected] == [kernel.id for kernel in predicted(DECISIONS)]
    first, second = expected[0], expected[1]
    decisions = [*DECISIONS[:3], with_failure(DECISIONS[3], first.candidate)]
    ids = {kernel.id for kernel in expected_kernels(PROBLEM, H200, decisions, SIZES, {}, [second.id])}
    assert ids
    assert not {first.id, second.id} & ids


def test_recorded_calls_weigh_more() -> None:
    """With calls at one M alone, the first kernel is the best one there."""
    m = 406
    first = predict_kernels(PROBLEM, H200, DECISIONS, kernel_pool(DECISIONS), SIZES, {m: 1000}, (), 1)[0]
    best = min(
        (kernel for kernel in predicted(DECISIONS, limit=100) if m in kernel.predicted_for),
        key=lambda kernel: estimate(kernel.candidate, m),
    )
    assert estimate(first.candidate, m) <= estimate(best.candidate, m)


def test_nothing_is_expected_on_a_device_without_a_limit() -> None:
    assert devices.get("cpu").profile.max_predicted == 0
    cpu_decision = decide(Problem.from_dict(DECISIONS[0].problem))
    assert expected_kernels(PROBLEM, make_target(), [cpu_decision], SIZES, {}) == []


@pytest.mark.parametrize("dtype", PROBLEM_OF_DTYPE)
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_candidates_are_listed_in_the_order_of_their_estimates(name: str, dtype: str) -> None:
    backend = backends.get(name)
    for m in (1, 40, 300, 3000):
        problem = replace(PROBLEM_OF_DTYPE[dtype], m=m)
        by_template: dict[str, list[float]] = {}
        for candidate in legal_candidates(backend, problem):
            seconds = backend.estimated_s(problem, candidate, H200)
            assert seconds is not None
            assert 1e-6 < seconds < 0.1
            by_template.setdefault(candidate.template, []).append(seconds)
        assert all(times == sorted(times) for times in by_template.values())


def test_unknown_template_has_no_estimate() -> None:
    assert backends.get("cuda").estimated_s(PROBLEM, Candidate.make("cuda", "other"), H200) is None
    assert backends.get("aten").estimated_s(PROBLEM, Candidate.make("aten", "mm"), H200) is None


INT8 = PROBLEM_OF_DTYPE["int8"]


def ranks_at(m: int, *ranks: int, slower: float = 1.0) -> Decision:
    """Return a Decision that timed some of cuBLASLt's ranks, the first one fastest."""
    rows = []
    for position, rank in enumerate(ranks):
        candidate = Candidate.make("cublaslt", "ranked", rank=rank)
        seconds = (slower + position) * 1e-5
        sample = Sample(seconds, seconds, seconds, 50, 0.5, 0.49, 0.51)
        rows.append(Evidence(candidate.to_dict(), candidate.id, "finalist", None, "", Verdict("within_bound"), sample))
    return decide(INT8.with_m(m), *rows)


def test_a_library_that_chooses_by_m_is_expected_to_be_fast_far_from_the_tuned_m() -> None:
    decisions = [ranks_at(m, 1) for m in TUNED]
    (kernel,) = kernels_chosen_by_m(INT8, H200, decisions, SIZES, ())
    assert (kernel.id, kernel.tuned_m, kernel.packing) == ("cublaslt/ranked[rank=0]", 4096, None)
    assert kernel.predicted_for >= {4, 45, 512, 2896, 4096, 5793}
    assert not kernel.predicted_for & {*TUNED}
    assert [k.id for k in expected_kernels(INT8, H200, decisions, SIZES, {})] == [kernel.id]
    also_tuned = [ranks_at(m, 0) for m in TUNED]
    assert kernels_chosen_by_m(INT8, H200, also_tuned, SIZES, ()) == [kernel]
    assert kernels_chosen_by_m(INT8, H200, decisions, SIZES, {kernel.id}) == []


def test_a_library_is_not_expected_to_be_fast_between_tuned_m_that_are_close() -> None:
    sizes = SizeRange(128, 600, (128, 300, 600))
    assert kernels_chosen_by_m(INT8, H200, [ranks_at(128, 0)], sizes, ()) == []


def test_libraries_that_were_not_timed_are_not_asked() -> None:
    assert kernels_chosen_by_m(INT8, H200, DECISIONS, SIZES, ()) == []
