"""LocalSearch: order, neighbourhoods, and the part of a search space that it tries before the best candidate."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.core.candidate import Candidate
from gemmtune.tuning.local_search import LocalSearch

MR, NR, KC, ORDERS = (1, 2, 4, 6, 8), (16, 32, 48, 64), (128, 256, 512, 1024), ("mnk", "nmk", "knm")
ATEN = [Candidate.make("aten", name) for name in ("mm", "linear_t", "mkldnn")]


def grid(backend: str = "native", template: str = "gemm") -> list[Candidate]:
    """Return the candidates of a grid of 240 configs without the largest tiles."""
    return [
        Candidate.make(backend, template, mr=mr, nr=nr, kc=kc, order=order)
        for mr in MR for nr in NR for kc in KC for order in ORDERS if mr * nr <= 384
    ]  # fmt: skip


def cost(candidate: Candidate) -> float:
    """Return a convex cost with its minimum at mr=6, nr=64, kc=512, order=nmk."""
    if candidate.backend == "aten":
        return 5.0
    steps = (
        abs(MR.index(int(candidate["mr"])) - 3)
        + abs(NR.index(int(candidate["nr"])) - 3)
        + abs(KC.index(int(candidate["kc"])) - 2)
        + 2 * (candidate["order"] != "nmk")
    )
    return 1.0 + 0.2 * steps


def run_search(search: LocalSearch, time: Callable[[Candidate], float | None]) -> list[Candidate]:
    tried = []
    while (batch := search.ask()) is not None:
        assert batch
        for candidate in batch:
            search.tell(candidate.id, time(candidate))
            tried.append(candidate)
    return tried


def test_baselines_are_first_then_seeds_of_each_template() -> None:
    others = grid()[:20] + grid(template="gemv")[:20]
    search = LocalSearch([*ATEN, *others], seeds=3)
    assert search.ask() == ATEN
    assert search.ask() == [*others[:2], *others[20:22]]
    assert search.ask() == [others[2], others[22]]


def test_turns_of_many_templates_have_one_seed_of_each() -> None:
    grids = [grid(template=f"t{index}")[:3] for index in range(5)]
    search = LocalSearch([candidate for group in grids for candidate in group], seeds=2)
    for turn in range(2):
        assert search.ask() == [group[turn] for group in grids]


def test_first_candidates_follow_the_baselines() -> None:
    others = grid()[:20]
    search = LocalSearch([*ATEN, *others], first=[others[7], others[9]], seeds=8)
    assert search.likely[:2] == [others[7], others[9]]
    assert search.left == len(ATEN) + 2 + 7  # one of the first is also a seed
    assert search.ask() == ATEN
    assert search.ask() == [others[7], others[9]]
    assert search.ask() == others[:4]


def test_best_candidate_is_tried_within_half_of_the_space() -> None:
    tried = run_search(LocalSearch([*ATEN, *grid()]), cost)
    assert min(map(cost, tried)) == 1.0
    assert len(tried) < len(grid()) / 2


def test_candidates_are_asked_once_and_from_the_space() -> None:
    space = [*ATEN, *grid()]
    tried = run_search(LocalSearch(space), cost)
    assert len({candidate.id for candidate in tried}) == len(tried)
    assert set(tried) <= set(space)


def test_neighbours_of_the_leader_differ_in_one_entry() -> None:
    space = grid()
    search = LocalSearch(space, seeds=1, leaders=1, explore=0)
    (seed,) = search.ask() or []
    search.tell(seed.id, 1.0)
    neighbours = search.ask() or []
    changed_entries = [[name for name, value in candidate.config if seed[name] != value] for candidate in neighbours]
    assert sorted(changed_entries) == [["kc"], ["mr"], ["nr"], ["order"], ["order"]]
    assert {candidate["mr"] for candidate in neighbours} == {1, 2}


def test_likely_candidates_are_distinct_and_not_yet_asked() -> None:
    search = LocalSearch([*ATEN, *grid(), *grid(template="gemv")], seeds=3)
    asked: set[str] = set()
    while (batch := search.ask()) is not None:
        likely = [candidate.id for candidate in search.likely]
        assert len(set(likely)) == len(likely)
        asked |= {candidate.id for candidate in batch}
        assert not asked & set(likely)
        for candidate in batch:
            search.tell(candidate.id, cost(candidate) if candidate.template != "gemv" else 100.0)
        if batch == ATEN:  # the seeds of both templates, before they have times
            assert len(search.likely) == 6
    tried = [name for name in asked if "gemm[" in name]
    assert len(tried) > 20


def test_likely_candidates_include_the_next_batch() -> None:
    search = LocalSearch([*ATEN, *grid()], seeds=3, leaders=1)
    for _ in range(4):
        for candidate in search.ask() or []:
            search.tell(candidate.id, cost(candidate))
    predicted = {candidate.id for candidate in search.likely}
    assert {candidate.id for candidate in search.ask() or []} <= predicted


def test_slow_template_is_dropped_after_two_candidates() -> None:
    fast, slow = grid()[:10], grid(template="slow")[:10]
    tried = run_search(LocalSearch([*fast, *slow]), lambda c: 10.0 if c.template == "slow" else 1.0)
    assert sum(candidate.template == "slow" for candidate in tried) == 2


@pytest.mark.parametrize(("ratio", "count"), [(1.29, 10), (1.31, 4), (2.1, 2)])
def test_template_that_is_behind_is_dropped_after_four_candidates(ratio: float, count: int) -> None:
    fast, slow = grid()[:10], grid(template="slow")[:10]
    search = LocalSearch([*fast, *slow], seeds=10, behind=1.3)
    tried = run_search(search, lambda c: ratio if c.template == "slow" else 1.0)
    assert sum(candidate.template == "slow" for candidate in tried) == count
    assert sum(candidate.template != "slow" for candidate in tried) == 10


def test_failing_template_is_dropped_after_two_candidates() -> None:
    valid, failing = grid()[:10], grid(template="bad")[:10]
    tried = run_search(LocalSearch([*valid, *failing]), lambda c: None if c.template == "bad" else 1.0)
    assert sum(candidate.template == "bad" for candidate in tried) == 2


def test_failed_candidates_are_no_leaders() -> None:
    tried = run_search(LocalSearch(grid()), lambda c: None if c["order"] == "nmk" else cost(c))
    assert min(cost(c) for c in tried if c["order"] != "nmk") == pytest.approx(1.4)


def test_search_stops_at_its_limit() -> None:
    assert len(run_search(LocalSearch([*ATEN, *grid()], limit=17), cost)) == 17


def test_search_without_candidates_ends() -> None:
    assert LocalSearch([]).ask() is None


def test_left_ends_at_zero() -> None:
    search = LocalSearch([*ATEN, *grid()], seeds=3)
    assert search.left == len(ATEN) + 3
    run_search(search, cost)
    assert search.left == 0


def test_tell_raises_key_error_for_an_unknown_id() -> None:
    with pytest.raises(KeyError):
        LocalSearch(ATEN).tell("native/other", 1.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_search_is_deterministic_by_seed_and_times(seed: int, noise: int) -> None:
    def noisy() -> Callable[[Candidate], float]:
        source = random.Random(noise)
        return lambda candidate: cost(candidate) * source.uniform(0.98, 1.02)

    space = [*ATEN, *grid()]
    assert run_search(LocalSearch(space, seed=seed), noisy()) == run_search(LocalSearch(space, seed=seed), noisy())


def test_search_continues_while_times_improve() -> None:
    candidates = grid()
    flat = run_search(LocalSearch(candidates, patience=8), lambda c: 1.0)
    impatient = run_search(LocalSearch(candidates, patience=0), lambda c: 1.0)
    assert len(impatient) <= len(flat) < len(candidates)
    order = {candidate.id: index for index, candidate in enumerate(candidates)}
    improving = run_search(LocalSearch(candidates, patience=8), lambda c: 1.0 / (1 + order[c.id]))
    assert len(improving) > len(flat)


def test_only_an_improvement_by_a_percent_prolongs_the_search() -> None:
    candidates = grid()

    def tried(patience: int, factor: float) -> int:
        """Return the number of candidates tried when each one takes ``factor`` times as long as the one before."""
        seconds = itertools.accumulate(itertools.repeat(factor), initial=1.0, func=lambda before, f: before * f)
        return len(run_search(LocalSearch(candidates, patience=patience), lambda _: next(seconds)))

    assert tried(8, 0.98) > tried(0, 0.98)
    assert tried(8, 0.9999) == tried(0, 0.9999)
