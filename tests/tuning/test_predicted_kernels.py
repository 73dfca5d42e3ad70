"""Kernels for M between the tuned ones: estimates choose them, and measured times correct the estimates."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from gemmtune import backends
from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence, Sample, Verdict
from gemmtune.core.problem import Dim, Problem
from gemmtune.core.workloads import bmm_problem, build
from gemmtune.testing import hostile_backend
from gemmtune.tuning import predicted_kernels
from gemmtune.tuning.plan_pool import PoolKernel, kernel_pool
from gemmtune.tuning.predicted_kernels import (
    _first_candidates,
    expected_kernels,
    kernels_of_libraries,
    kernels_of_other_templates,
    kernels_with_other_clusters,
    list_ahead,
    predict_kernels,
)
from gemmtune.tuning.sizes import SizeRange
from helpers.factories import make_target
from helpers.gpus import H200, PROBLEM_OF_DTYPE, legal_candidates
from helpers.serving import decide

PROBLEM = PROBLEM_OF_DTYPE["int8wo"]
TUNED = (1, 16, 128, 2048)
SIZES = SizeRange(1, 8192, TUNED)


def estimate(candidate: Candidate, m: int, problem: Problem = PROBLEM) -> float:
    seconds = backends.get(candidate.backend).estimated_s(problem.with_m(m), candidate, H200)
    assert seconds is not None
    return seconds


def fastest(m: int, template: str, problem: Problem = PROBLEM) -> Candidate:
    """Return the candidate of a template that is estimated to be the fastest at M."""
    backend = "triton" if template in ("tiled", "converted", "persistent") else "cuda"
    candidates = legal_candidates(backends.get(backend), problem.with_m(m))
    return next(candidate for candidate in candidates if candidate.template == template)


def decision(m: int, *candidates: Candidate, slower: float = 1.0, problem: Problem = PROBLEM) -> Decision:
    """Return a Decision whose candidates took ``slower`` times their estimates."""
    rows = []
    for candidate in candidates:
        seconds = slower * estimate(candidate, m, problem)
        sample = Sample(seconds, seconds, seconds, 50, 0.5, 0.49, 0.51)
        rows.append(Evidence(candidate.to_dict(), candidate.id, "finalist", None, "", Verdict("within_bound"), sample))
    return decide(problem.with_m(m), *rows)


DECISIONS = [
    decision(1, fastest(1, "skinny")),
    decision(16, fastest(16, "skinny")),
    decision(128, fastest(128, "mixed")),
    decision(2048, fastest(2048, "converted")),
]


LIMIT = devices.get("cuda").profile.max_predicted


def predicted(decisions: Sequence[Decision], limit: int = LIMIT, without: Sequence[str] = ()) -> list[PoolKernel]:
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


def test_a_kernel_that_needs_a_round_of_tiles_less_at_few_m_only_is_predicted() -> None:
    problem = build(1, 1024, 8192, "int8wo")
    decisions = [
        decision(m, fastest(m, template, problem), problem=problem)
        for m, template in ((1, "skinny"), (16, "skinny"), (128, "mixed"), (2048, "converted"))
    ]
    kernels = predict_kernels(problem, H200, decisions, kernel_pool(decisions), SIZES, {}, (), LIMIT)
    tiles = {(kernel.candidate["bm"], kernel.candidate["bn"]) for kernel in kernels if 6336 in kernel.predicted_for}
    # 99 x 4 tiles are three each for 132 multiprocessors; one more row of the output needs a fourth.
    assert (64, 256) in tiles
    assert all(m in range(1, 8193) and m not in TUNED for kernel in kernels for m in kernel.predicted_for)


@pytest.mark.parametrize("last", [512, 1024, 1100, 8192])
def test_expected_times_are_compared_at_rows_of_tiles_inside_of_the_range(last: int) -> None:
    listed_at = [1, 200, min(last, 1000)]
    grid = predicted_kernels._dense_grid(listed_at, SizeRange(1, last, TUNED))
    assert grid == sorted(set(grid))
    assert set(listed_at) <= set(grid)
    dense = set(grid) - set(listed_at)
    assert dense == {m for m in range(1024, last + 1, 64) if m not in TUNED}
    assert predicted_kernels._dense_grid([], SizeRange(1, last, TUNED)) == []


def test_kernels_are_legal_at_the_m_that_they_are_loaded_for() -> None:
    for kernel in predicted(DECISIONS):
        backend = backends.get(kernel.candidate.backend)
        assert not backend.why_illegal(PROBLEM.with_m(kernel.tuned_m), kernel.candidate, H200)


def test_number_of_kernels_is_limited_and_the_most_useful_come_first() -> None:
    kernels = predicted(DECISIONS)
    assert len(kernels) > 3
    first = [kernel.id for kernel in kernels[:3]]
    few = [kernel.id for kernel in predicted(DECISIONS, limit=3)]
    assert few[:3] == first
    assert len(few) <= 6  # with a variant of each
    assert predicted(DECISIONS, limit=0) == []


def test_variants_have_the_tile_of_a_kernel_and_about_its_estimate() -> None:
    problem = PROBLEM_OF_DTYPE["fp8"]  # slabs of a tile differ in how they order its products
    decisions = [decision(m, fastest(m, "slab", problem), problem=problem) for m in (128, 2048)]
    kernels = predict_kernels(problem, H200, decisions, kernel_pool(decisions), SIZES, {}, (), 4)
    chosen, variants = kernels[:4], kernels[4:]
    assert variants
    for variant in variants:
        (kernel,) = (k for k in chosen if tile(k) == tile(variant) and k.predicted_for == variant.predicted_for)
        ratios = [
            estimate(variant.candidate, m, problem) / estimate(kernel.candidate, m, problem)
            for m in kernel.predicted_for
        ]
        assert min(ratios) <= 1.05
    assert len({kernel.id for kernel in kernels}) == len(kernels)


def tile(kernel: PoolKernel) -> tuple[object, ...]:
    config = dict(kernel.candidate.config)
    return kernel.candidate.template, config["bm"], config["bn"], config["split"]


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


def test_candidates_listed_ahead_are_not_listed_again() -> None:
    _first_candidates.cache_clear()
    list_ahead(PROBLEM, H200, SIZES)
    listed = _first_candidates.cache_info().misses
    assert listed
    assert expected_kernels(PROBLEM, H200, DECISIONS, SIZES, {})
    assert _first_candidates.cache_info().misses == listed


def test_an_error_while_listing_ahead_is_left_to_the_call_that_needs_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads need not wait long for the interpreter lock meanwhile, and afterwards as before: two listings, each
    of which would restore the other's setting, do not run at once."""
    usual_s, during = sys.getswitchinterval(), list[tuple[float, bool]]()

    def fail(*_: object) -> None:
        during.append((sys.getswitchinterval(), predicted_kernels._SHORT_TURNS.locked()))
        raise RuntimeError("no candidates")

    _first_candidates.cache_clear()
    monkeypatch.setattr(type(backends.get("cuda")), "candidates", fail)
    list_ahead(PROBLEM, H200, SIZES)
    (short_s, is_alone), *_ = during
    assert short_s < 0.1 * usual_s
    assert is_alone
    assert sys.getswitchinterval() == usual_s
    with pytest.raises(RuntimeError, match="no candidates"):
        expected_kernels(PROBLEM, H200, DECISIONS, SIZES, {})


def test_expected_kernels_for_many_rows_do_not_overlap() -> None:
    """They are timed without overlap, and no Decision tests them with it."""
    expected = expected_kernels(PROBLEM, H200, DECISIONS, SIZES, {})
    assert {kernel.overlap for kernel in expected} == {True, False}
    assert all(kernel.overlap == (min(kernel.predicted_for) <= 512) for kernel in expected)


def test_failed_and_faulty_candidates_are_not_expected() -> None:
    expected = expected_kernels(PROBLEM, H200, DECISIONS, SIZES, {})
    others = kernels_of_other_templates(PROBLEM, H200, DECISIONS, kernel_pool(DECISIONS), SIZES, ())
    first, second = predicted(DECISIONS)[:2]
    assert [kernel.id for kernel in expected] == [kernel.id for kernel in (*others, *predicted(DECISIONS))]
    decisions = [*DECISIONS[:3], with_failure(DECISIONS[3], first.candidate)]
    ids = {kernel.id for kernel in expected_kernels(PROBLEM, H200, decisions, SIZES, {}, [second.id])}
    assert ids
    assert not {first.id, second.id} & ids


def test_templates_that_no_decision_found_fast_are_expected_at_the_last_m() -> None:
    """The decision for M = 2048 has another template of Triton's, and none has its conversion."""
    tiled = decision(2048, fastest(2048, "tiled"))
    decisions = [*DECISIONS[:3], tiled]

    def others(decisions: Sequence[Decision], last: int = 8192, without: Sequence[str] = ()) -> list[PoolKernel]:
        sizes = SizeRange(1, last, TUNED)
        return kernels_of_other_templates(PROBLEM, H200, decisions, kernel_pool(decisions), sizes, without)

    found = {kernel.candidate.template: kernel for kernel in others(decisions)}
    assert not {"skinny", "mixed", "tiled"} & set(found)  # the decisions have these
    converted = found["converted"]
    assert converted.candidate == fastest(8192, "converted")
    assert converted.predicted_for == {4096, 8192}
    assert converted.id in {kernel.id for kernel in expected_kernels(PROBLEM, H200, decisions, SIZES, {})}
    assert converted.id not in {kernel.id for kernel in others(decisions, without=[converted.id])}
    assert not others(decisions, last=4096)
    assert not others(DECISIONS[:3])  # Triton's candidates were not asked for


def test_recorded_calls_weigh_more() -> None:
    """With calls at one M alone, the first kernel is the best one there."""
    m = 406
    first = predict_kernels(PROBLEM, H200, DECISIONS, kernel_pool(DECISIONS), SIZES, {m: 1000}, (), 1)[0]
    best = min(
        (kernel for kernel in predicted(DECISIONS, limit=100) if m in kernel.predicted_for),
        key=lambda kernel: estimate(kernel.candidate, m),
    )
    assert estimate(first.candidate, m) <= estimate(best.candidate, m)


def test_first_kernels_for_the_last_m_are_expected_on_a_device_without_a_limit() -> None:
    """One of each packed layout's templates, and of those for the raw weight that were fast at the largest tuned M."""
    assert devices.get("cpu").profile.max_predicted == 0
    target, problem = make_target(), build(192, 256, 512, "fp32")
    native = backends.get("native")
    by_layout = {native.packing_of(problem, c): c for c in legal_candidates(native, problem, target)}
    assert by_layout
    sizes = SizeRange(1, 512, (8, 192))

    def expected(m: int, *candidates: Candidate) -> list[PoolKernel]:
        sample = Sample(1e-3, 1e-3, 1e-3, 50, 0.5, 0.49, 0.51)
        rows = [
            Evidence(c.to_dict(), c.id, "finalist", native.packing_of(problem, c), "", Verdict("within_bound"), sample)
            for c in candidates
        ]
        return expected_kernels(problem, target, [decide(problem.with_m(m), *rows)], sizes, {})

    kernels = expected(192, *by_layout.values())
    assert {(k.packing, k.candidate.template) for k in kernels} == {(p, c.template) for p, c in by_layout.items()}
    listed = legal_candidates(native, problem.with_m(512), target)
    for kernel in kernels:
        same = [
            c
            for c in listed
            if (c.template, native.packing_of(problem, c)) == (kernel.candidate.template, kernel.packing)
        ]
        assert kernel.id == same[0].id
        assert (kernel.tuned_m, kernel.predicted_for) == (512, {314, 512})
    packed = by_layout.keys() - {None}
    assert packed
    assert {kernel.packing for kernel in expected(8, *by_layout.values())} == packed
    sizes = SizeRange(1, 192, (8, 192))
    assert expected(192, *by_layout.values()) == []


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


def test_a_backend_that_does_not_name_layouts_has_no_expected_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has one that this process does not know."""
    monkeypatch.setattr(backends, "_PLUGINS", dict(backends.plugins()))
    backends.register("hostile", hostile_backend.ENTRY_POINT)
    problem, sizes = build(192, 256, 512, "fp32"), SizeRange(1, 512, (192,))
    for candidate in (Candidate.make("hostile", "good", kind="good"), Candidate.make("gone", "kernel")):
        sample = Sample(1e-3, 1e-3, 1e-3, 50, 0.5, 0.49, 0.51)
        row = Evidence(candidate.to_dict(), candidate.id, "finalist", None, "", Verdict("within_bound"), sample)
        assert expected_kernels(problem, make_target(), [decide(problem, row)], sizes, {}) == []
    backends.get.cache_clear()


INT8 = PROBLEM_OF_DTYPE["int8"]


BATCHED = bmm_problem(8, 16, 256, 512, "bfloat16")


def ranks_at(m: int, *ranks: int, problem: Problem = INT8, dim: Dim = "m") -> Decision:
    """Return a Decision that timed some of cuBLASLt's ranks, the first one fastest, at an M or at a batch."""
    problem, rows = problem.with_size(dim, m), []
    for position, rank in enumerate(ranks):
        sizes = {name: problem.size(name) for name in problem.dims}
        candidate = Candidate.make("cublaslt", "ranked", **sizes, rank=rank)
        seconds = (1.0 + position) * 1e-5
        sample = Sample(seconds, seconds, seconds, 50, 0.5, 0.49, 0.51)
        rows.append(Evidence(candidate.to_dict(), candidate.id, "finalist", None, "", Verdict("within_bound"), sample))
    return decide(problem, *rows)


def listed(decisions: Sequence[Decision], sizes: SizeRange = SIZES, without: Sequence[str] = ()) -> list[PoolKernel]:
    return kernels_of_libraries(INT8, H200, kernel_pool(decisions), sizes, without)


def test_a_library_lists_its_kernels_for_m_between_the_tuned_ones_and_for_the_last() -> None:
    kernels = listed([ranks_at(m, 1) for m in TUNED])
    assert [kernel.tuned_m for kernel in kernels] == [m for m in (384, 896, 8192) for _ in range(8)]
    assert kernels[0].id == "cublaslt/ranked[m=384,rank=0]"
    assert all(kernel.candidate["m"] == kernel.tuned_m and kernel.packing is None for kernel in kernels)
    expected = {kernel.tuned_m: kernel.predicted_for for kernel in kernels}
    assert expected == {384: {222, 384, 587}, 896: {587, 896, 1355}, 8192: {4096, 8192}}
    decisions = [ranks_at(m, 1) for m in TUNED]
    assert [k.id for k in expected_kernels(INT8, H200, decisions, SIZES, {})] == [kernel.id for kernel in kernels]
    assert [k.id for k in listed(decisions, without=[kernels[0].id])] == [kernel.id for kernel in kernels[1:]]


def test_a_library_lists_its_kernels_for_batches_between_the_tuned_ones() -> None:
    sizes = SizeRange(1, 1024, (1, 16, 128), dim="batch")
    decisions = [ranks_at(batch, 1, problem=BATCHED, dim="batch") for batch in sizes.tuned]
    kernels = [k for k in expected_kernels(BATCHED, H200, decisions, sizes, {}) if k.candidate.backend == "cublaslt"]
    assert [kernel.tuned_m for kernel in kernels] == [batch for batch in (3, 7, 46, 1024) for _ in range(8)]
    assert all(kernel.candidate["batch"] == kernel.tuned_m and kernel.candidate["m"] == 16 for kernel in kernels)
    assert all(kernel.tile_rows == 1 for kernel in kernels)
    expected = {kernel.tuned_m: kernel.predicted_for for kernel in kernels}
    assert expected == {3: {2, 3, 5}, 7: {5, 7, 11}, 46: {27, 46, 77}, 1024: {362, 1024}}


def test_a_library_lists_kernels_beside_the_m_at_which_it_is_fast() -> None:
    assert {kernel.tuned_m for kernel in listed([ranks_at(128, 0)])} == {384, 896}
    assert {kernel.tuned_m for kernel in listed([ranks_at(2048, 0)])} == {384, 896, 8192}
    assert listed([ranks_at(1, 0), ranks_at(16, 0)]) == []
    assert listed(DECISIONS) == []


def test_a_library_lists_no_kernels_between_tuned_m_that_are_close() -> None:
    assert listed([ranks_at(128, 0)], SizeRange(128, 600, (128, 300, 600))) == []


def test_a_tuned_last_m_is_not_listed_again() -> None:
    sizes = SizeRange(1, 8192, (1, 2048, 8192))
    assert {kernel.tuned_m for kernel in listed([ranks_at(2048, 0)], sizes)} == {384, 896, 4096}


def test_fast_kernels_of_the_largest_tuned_m_have_other_clusters_for_more_rows() -> None:
    problem = PROBLEM_OF_DTYPE["fp8"].with_m(2048)
    slabs = [c for c in legal_candidates(backends.get("cuda"), problem) if c.template == "slab" and c["cluster"] == 1]
    pool = [PoolKernel.of(slabs[0], 2048, None), PoolKernel.of(slabs[1], 128, None)]
    pool[0].fast_at, pool[1].fast_at = {2048}, {128}
    kernels = kernels_with_other_clusters(problem, H200, pool, SIZES, ())
    assert kernels
    for kernel in kernels:
        config = dict(kernel.candidate.config)
        assert config["cluster"] > 1
        assert {**config, "cluster": 1} == dict(slabs[0].config)
        assert (kernel.tuned_m, kernel.predicted_for) == (4096, {4096, 8192})
    assert kernels_with_other_clusters(problem, H200, pool, SIZES, [kernel.id for kernel in kernels]) == []
    assert kernels_with_other_clusters(problem, H200, pool, SizeRange(1, 4096, TUNED), ()) == []
    pool[0].fast_at = {128}
    assert kernels_with_other_clusters(problem, H200, pool, SIZES, ()) == []


def test_times_of_a_variant_correct_its_estimates() -> None:
    """Kernels of a variant that was slow at a tuned M are expected to be as slow in other tiles."""
    problem = PROBLEM_OF_DTYPE["int8"]
    slabs = [c for c in legal_candidates(backends.get("cuda"), problem.with_m(128)) if c.template == "slab"]
    rows = []
    for candidate in slabs[:40]:
        seconds = backends.get("cuda").estimated_s(problem.with_m(128), candidate, H200)
        assert seconds is not None
        seconds *= 3.0 if candidate["chunks"] == 2 else 1.0
        sample = Sample(seconds, seconds, seconds, 50, 0.5, 0.49, 0.51)
        rows.append(Evidence(candidate.to_dict(), candidate.id, "finalist", None, "", Verdict("within_bound"), sample))
    assert {candidate["chunks"] for candidate in slabs[:40]} >= {1, 2}
    decisions = [decide(problem.with_m(128), *rows)]
    kernels = predict_kernels(problem, H200, decisions, kernel_pool(decisions), SIZES, {}, (), 12)
    assert kernels
    assert 2 not in {kernel.candidate["chunks"] for kernel in kernels}


@pytest.mark.parametrize(("count", "expected"), [(1, 3.0 ** (1 / 3)), (18, 3.0**0.9)])
def test_times_of_few_kernels_of_a_variant_correct_its_estimates_less(count: int, expected: float) -> None:
    """The scale of the template, 1, counts as two kernels beside ``count`` that took three times their estimates."""
    problem = PROBLEM_OF_DTYPE["int8"].with_m(128)
    backend = backends.get("cuda")
    slabs = [c for c in legal_candidates(backend, problem) if c.template == "slab"]
    slow = [c for c in slabs if c["chunks"] == 2 and c["cluster"] == 1][:count]
    others = [c for c in slabs if c["chunks"] == 1][: 2 * count + 1]
    rows = []
    for candidate in (*slow, *others):
        seconds = backend.estimated_s(problem, candidate, H200)
        assert seconds is not None
        seconds *= 3.0 if candidate in slow else 1.0
        sample = Sample(seconds, seconds, seconds, 50, 0.5, 0.49, 0.51)
        rows.append(Evidence(candidate.to_dict(), candidate.id, "finalist", None, "", Verdict("within_bound"), sample))
    model = predicted_kernels._TimeModel(problem, H200, [decide(problem, *rows)], SIZES)
    kernel = PoolKernel.of(slow[0], 128, None)
    (template,) = model.scales
    estimate_s = backend.estimated_s(problem.with_m(200), slow[0], H200)
    assert estimate_s is not None
    assert model.seconds(kernel, {200: {template}})[200] == pytest.approx(expected * estimate_s)
