"""LocalSearch: order, neighbourhoods, and how much of a space it needs to find the best."""

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
    """240 configs with a hole: the largest tiles do not fit."""
    return [
        Candidate.make(backend, template, mr=mr, nr=nr, kc=kc, order=order)
        for mr in MR for nr in NR for kc in KC for order in ORDERS if mr * nr <= 384
    ]  # fmt: skip


def cost(candidate: Candidate) -> float:
    """A bowl with its floor at mr=6, nr=64, kc=512, order=nmk."""
    if candidate.backend == "aten":
        return 5.0
    steps = (
        abs(MR.index(int(candidate["mr"])) - 3)
        + abs(NR.index(int(candidate["nr"])) - 3)
        + abs(KC.index(int(candidate["kc"])) - 2)
        + 2 * (candidate["order"] != "nmk")
    )
    return 1.0 + 0.2 * steps


def drive(search: LocalSearch, time: Callable[[Candidate], float | None]) -> list[Candidate]:
    tried = []
    while (batch := search.ask()) is not None:
        assert batch
        for candidate in batch:
            search.tell(candidate.id, time(candidate))
            tried.append(candidate)
    return tried


def test_the_incumbents_come_first_then_seeds_in_turns() -> None:
    others = grid()[:20] + grid(template="gemv")[:20]
    search = LocalSearch([*ATEN, *others], seeds=2)
    assert search.ask() == ATEN
    assert search.ask() == [others[0], others[20]]
    assert search.ask() == [others[1], others[21]]


def test_those_to_be_tried_first_follow_the_incumbents() -> None:
    others = grid()[:20]
    search = LocalSearch([*ATEN, *others], first=[others[7], others[9]], seeds=8)
    assert search.likely[:2] == [others[7], others[9]]
    assert search.left == len(ATEN) + 2 + 7  # one of the first is among the seeds, too
    assert search.ask() == ATEN
    assert search.ask() == [others[7], others[9]]
    assert search.ask() == [others[0]]


def test_the_best_is_found_in_a_fraction_of_the_space() -> None:
    tried = drive(LocalSearch([*ATEN, *grid()]), cost)
    assert min(map(cost, tried)) == 1.0
    assert len(tried) < len(grid()) / 2


def test_nothing_is_asked_twice_and_everything_asked_is_legal() -> None:
    space = [*ATEN, *grid()]
    tried = drive(LocalSearch(space), cost)
    assert len({candidate.id for candidate in tried}) == len(tried)
    assert set(tried) <= set(space)


def test_neighbours_of_the_leader_differ_in_one_entry() -> None:
    space = grid()
    search = LocalSearch(space, seeds=1, leaders=1, explore=0)
    (seed,) = search.ask() or []
    search.tell(seed.id, 1.0)
    around = search.ask() or []
    changed = [[name for name, value in candidate.config if seed[name] != value] for candidate in around]
    assert sorted(changed) == [["kc"], ["mr"], ["nr"], ["order"], ["order"]]
    assert {candidate["mr"] for candidate in around} == {1, 2}


def test_what_is_likely_next_is_asked_for_unless_it_turns_hopeless() -> None:
    search = LocalSearch([*ATEN, *grid(), *grid(template="gemv")], seeds=3)
    asked: set[str] = set()
    while (batch := search.ask()) is not None:
        likely = [candidate.id for candidate in search.likely]
        assert len(set(likely)) == len(likely)
        asked |= {candidate.id for candidate in batch}
        assert not asked & set(likely)
        for candidate in batch:
            search.tell(candidate.id, cost(candidate) if candidate.template != "gemv" else 100.0)
        if batch == ATEN:  # the seeds of either template, before anything is known of them
            assert len(search.likely) == 6
    tried = [name for name in asked if "gemm[" in name]
    assert len(tried) > 20


def test_likely_after_the_seeds_are_the_leaders_neighbours() -> None:
    search = LocalSearch([*ATEN, *grid()], seeds=3, leaders=1)
    for _ in range(4):
        for candidate in search.ask() or []:
            search.tell(candidate.id, cost(candidate))
    predicted = {candidate.id for candidate in search.likely}
    assert {candidate.id for candidate in search.ask() or []} <= predicted


def test_a_hopeless_template_is_given_up_after_two() -> None:
    good, bad = grid()[:10], grid(template="slow")[:10]
    tried = drive(LocalSearch([*good, *bad]), lambda c: 10.0 if c.template == "slow" else 1.0)
    assert sum(candidate.template == "slow" for candidate in tried) == 2


def test_a_failing_template_is_given_up_after_two() -> None:
    good, bad = grid()[:10], grid(template="bad")[:10]
    tried = drive(LocalSearch([*good, *bad]), lambda c: None if c.template == "bad" else 1.0)
    assert sum(candidate.template == "bad" for candidate in tried) == 2


def test_failures_do_not_lead() -> None:
    tried = drive(LocalSearch(grid()), lambda c: None if c["order"] == "nmk" else cost(c))
    assert min(cost(c) for c in tried if c["order"] != "nmk") == pytest.approx(1.4)


def test_the_limit_holds() -> None:
    assert len(drive(LocalSearch([*ATEN, *grid()], limit=17), cost)) == 17


def test_no_candidates() -> None:
    assert LocalSearch([]).ask() is None


def test_left_counts_down_to_nothing() -> None:
    search = LocalSearch([*ATEN, *grid()], seeds=3)
    assert search.left == len(ATEN) + 3
    drive(search, cost)
    assert search.left == 0


def test_tell_wants_a_known_id() -> None:
    with pytest.raises(KeyError):
        LocalSearch(ATEN).tell("native/other", 1.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 1000))
def test_deterministic_by_seed_and_answers(seed: int, noise: int) -> None:
    def noisy() -> Callable[[Candidate], float]:
        source = random.Random(noise)
        return lambda candidate: cost(candidate) * source.uniform(0.98, 1.02)

    space = [*ATEN, *grid()]
    assert drive(LocalSearch(space, seed=seed), noisy()) == drive(LocalSearch(space, seed=seed), noisy())


def test_it_goes_on_while_things_get_better_and_stops_when_they_do_not() -> None:
    candidates = grid()
    flat = drive(LocalSearch(candidates, patience=8), lambda c: 1.0)
    impatient = drive(LocalSearch(candidates, patience=0), lambda c: 1.0)
    assert len(impatient) <= len(flat) < len(candidates)
    order = {candidate.id: place for place, candidate in enumerate(candidates)}
    better = drive(LocalSearch(candidates, patience=8), lambda c: 1.0 / (1 + order[c.id]))
    assert len(better) > len(flat)


def test_only_an_improvement_by_a_percent_prolongs_the_search() -> None:
    candidates = grid()

    def tried(patience: int, factor: float) -> int:
        """Return the number of candidates that are tried while each one takes ``factor`` of the previous one's time."""
        seconds = itertools.accumulate(itertools.repeat(factor), initial=1.0, func=lambda before, f: before * f)
        return len(drive(LocalSearch(candidates, patience=patience), lambda _: next(seconds)))

    assert tried(8, 0.98) > tried(0, 0.98)
    assert tried(8, 0.9999) == tried(0, 0.9999)
