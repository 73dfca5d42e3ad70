"""Exploration with a scripted search, worker and clock: what is built, tried and skipped, and when exploring ends."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from gemmtune import backends
from gemmtune.backends.base import Artifact, Availability, Backend, Kernel
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.decision import Verdict
from gemmtune.core.devices import TuningProfile
from gemmtune.core.events import BestSoFar, CandidateTried
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.store import MemoryStore
from gemmtune.testing.store_suite import PROBLEM, TARGET
from gemmtune.tuning import exploration, time_budget
from gemmtune.tuning.exploration import Exploration, first_builds
from gemmtune.tuning.ledger import Ledger
from gemmtune.tuning.searcher import SearchOptions
from gemmtune.tuning.session_context import SessionContext
from gemmtune.tuning.time_budget import TimeBudget
from gemmtune.workers.protocol import Attempted
from helpers.builds import finished
from helpers.steps import run_alone

OK = Verdict("within_bound")
WRONG = Verdict("wrong", "one element")


def make(backend: str, count: int, template: str = "t") -> list[Candidate]:
    return [Candidate.make(backend, template, i=i) for i in range(count)]


ATEN, X = make("aten", 3), make("x", 8)


class Prebuilt(Backend):
    """Backend that has nothing to build. Its candidate i has the layout ``x:<i % 2>``."""

    name = "x"

    def available(self, target: Target) -> Availability:
        return Availability(True)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        yield from X

    def load(self, artifact: Artifact, problem: Problem) -> Kernel:
        raise NotImplementedError

    def source_digest(self) -> str:
        return ""

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        return f"x:{int(candidate['i']) % 2}"


class Compiled(Prebuilt):
    """Backend that builds its candidates. Only a loaded kernel knows its layout."""

    def build(self, problem: Problem, candidate: Candidate, target: Target) -> Artifact:
        raise NotImplementedError

    def packing_of(self, problem: Problem, candidate: Candidate) -> str | None:
        raise NotImplementedError


class CompilesInCalls(Prebuilt):
    """Backend that has nothing to build, and whose first calls for PROBLEM compile something."""

    def compiles_in_calls(self, problem: Problem, candidate: Candidate, target: Target) -> bool:
        return problem == PROBLEM


class Clock:
    """Fake of the module ``time``."""

    def __init__(self) -> None:
        self.now = 64.0

    def perf_counter(self) -> float:
        return self.now


class ListedSearch:
    """A search that asks for the given batches, and notes what it is told."""

    left = 0

    def __init__(self, *batches: Sequence[Candidate], likely: Sequence[Candidate] = ()) -> None:
        self._batches, self.likely = list(batches), list(likely)
        self.told: list[tuple[str, float | None]] = []
        self.candidates: Sequence[Candidate] = ()
        self.options = SearchOptions()

    def __call__(self, candidates: Sequence[Candidate], options: SearchOptions) -> ListedSearch:
        self.candidates, self.options = candidates, options
        return self

    def ask(self) -> list[Candidate] | None:
        return list(self._batches.pop(0)) if self._batches else None

    def tell(self, candidate_id: str, seconds: float | None) -> None:
        self.told.append((candidate_id, seconds))


class ScriptedWorker:
    """A worker whose attempt of a candidate takes ``trial_s`` seconds and returns what ``replies`` has for it."""

    def __init__(self, clock: Clock, trial_s: float = 0.0) -> None:
        self.clock, self.trial_s = clock, trial_s
        self.replies: dict[str, Attempted] = {}
        self.tried: list[Candidate] = []
        self.cutoffs: list[float | None] = []
        self.deadlines: list[float | None] = []
        self.calls: list[str] = []

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self, problem: Problem) -> None:
        self.calls.append(f"resume {problem.key}")

    def attempt(self, candidate: Candidate, deadline_s: float | None, cutoff_s: float | None) -> Attempted:
        self.tried.append(candidate)
        self.cutoffs.append(cutoff_s)
        self.deadlines.append(deadline_s)
        self.clock.now += self.trial_s
        return self.replies.get(candidate.id, Attempted(OK, times_s=(0.25,)))


class Session:
    """An Exploration of ``candidates`` and what it works with. budget_s: the budget; strict: whether it is a user's."""

    def __init__(
        self, clock: Clock, search: ListedSearch, *, candidates: Sequence[Candidate] = (*ATEN, *X),
        trial_s: float = 0.0, budget_s: float = 8.0, strict: bool = True, layouts: Sequence[str] = (),
        build: Any = None, build_ahead: Any = None, profile: TuningProfile | None = None,
    ) -> None:  # fmt: skip
        self.events: list[Any] = []
        self.worker, self.store = ScriptedWorker(clock, trial_s), MemoryStore()
        self.context = SessionContext(
            PROBLEM, TARGET, self.store, self.worker, self.events.append, 5, profile or TuningProfile(), layouts,  # type: ignore[arg-type]
            Ledger(candidates, []), TimeBudget(budget_s, strict),
        )  # fmt: skip
        self.exploration = Exploration(self.context, candidates, search, build, build_ahead)

    def run(self, limit: int | None) -> str:
        """Explore, and return the reason why that ended."""
        return run_alone(self.exploration.steps(limit))

    @property
    def tried(self) -> list[Candidate]:
        return self.worker.tried


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    for module in (exploration, time_budget):
        monkeypatch.setattr(module, "time", fake)
    registered = {"aten": Prebuilt(), "x": Prebuilt(), "y": Compiled()}
    monkeypatch.setattr(backends, "get", registered.__getitem__)
    return fake


@pytest.fixture
def processors(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the number of processors that may build: 4."""
    monkeypatch.setattr(exploration, "allowed_cpus", lambda: frozenset(range(4)))
    return 4


# --- order and end -----------------------------------------------------------------------------------------------


def test_search_gets_the_candidates_and_the_options(clock: Clock) -> None:
    search = ListedSearch(ATEN[:1])
    session = Session(clock, search)
    assert session.run(7) == "the search ended after 1 candidates"
    assert search.candidates == [*ATEN, *X]
    assert (list(search.options.first), search.options.seed, search.options.limit) == ([], 5, 7)
    assert search.told == [(ATEN[0].id, 0.25)]
    assert session.tried == ATEN[:1]


@pytest.mark.parametrize(
    ("budget_s", "trial_s", "tried"),
    [
        (8.0, 1.0, 5),  # half of the budget, exactly, is not more than half of it
        (8.0, 0.875, 5),
        (8.0, 1.25, 4),
        (8.0, 2.0, 4),  # four candidates besides ATen's are tried until three quarters are spent
        (6.0, 2.0, 3),
        (2.0, 4.0, 1),  # one in any case
    ],
)
def test_exploring_ends_at_its_share_of_a_users_budget(
    clock: Clock, budget_s: float, trial_s: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionContext, "reserve_s", lambda self: 0.0)
    session = Session(clock, ListedSearch(X), trial_s=trial_s, budget_s=budget_s)
    reason = session.run(None)
    assert session.tried == X[:tried]
    assert reason == f"the share of the budget for exploring was spent after {tried} candidates"


@pytest.mark.parametrize(("reserve_s", "tried"), [(5.0, 4), (5.5, 3), (6.0, 3), (7.5, 1), (100.0, 1)])
def test_exploring_leaves_a_users_race_its_time(
    clock: Clock, reserve_s: float, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SessionContext, "reserve_s", lambda self: reserve_s)
    session = Session(clock, ListedSearch(X), trial_s=1.0, budget_s=8.0)
    session.run(None)
    assert session.tried == X[:tried]


@pytest.mark.parametrize(
    ("trial_s", "tried"),
    [
        (1.0, 5),
        (0.875, 5),
        (1.25, 4),
        (8.0, 4),  # three times the budget, exactly, is not more than it
        (8.5, 3),
        (25.0, 1),
    ],
)
def test_exploring_ends_at_its_share_of_the_default_budget(clock: Clock, trial_s: float, tried: int) -> None:
    session = Session(clock, ListedSearch(X), trial_s=trial_s, budget_s=8.0, strict=False)
    session.run(None)
    assert session.tried == X[:tried]


@pytest.mark.parametrize(("trial_s", "tried"), [(5.5, 3), (6.0, 2), (11.5, 2), (12.0, 1), (13.0, 1)])
def test_all_of_atens_candidates_are_tried_unless_that_takes_half_as_much_again(
    clock: Clock, trial_s: float, tried: int
) -> None:
    session = Session(clock, ListedSearch(ATEN), trial_s=trial_s, budget_s=8.0, strict=False)
    session.run(None)
    assert session.tried == ATEN[:tried]


def test_slow_candidates_of_aten_leave_the_default_budget_a_rival(clock: Clock) -> None:
    search = ListedSearch([*ATEN, *X])
    session = Session(clock, search, trial_s=6.0, budget_s=8.0, strict=False)
    session.run(None)
    assert session.tried == [*ATEN[:2], *X[:3]]  # not the third of ATen's, and others until three times the budget
    assert search.told[2] == (ATEN[2].id, None)


def test_further_candidate_of_atens_ends_after_four_of_the_longest_trials(clock: Clock) -> None:
    session = Session(clock, ListedSearch([*ATEN, X[0]]), trial_s=1.0, budget_s=100.0, strict=False)
    session.run(None)
    assert session.worker.deadlines == [None, 4.0, 4.0, 10.0]


def test_short_trial_of_atens_is_not_ended_before_three_seconds(clock: Clock) -> None:
    session = Session(clock, ListedSearch([*ATEN, X[0]]), trial_s=0.25, budget_s=100.0, strict=False)
    session.run(None)
    assert session.worker.deadlines == [None, 3.0, 3.0, 3.0]


def test_exploring_continues_until_one_of_atens_candidates_works(clock: Clock) -> None:
    session = Session(clock, ListedSearch(ATEN), trial_s=100.0, budget_s=8.0, strict=False)
    session.worker.replies[ATEN[0].id] = Attempted(WRONG, times_s=(0.5,))
    session.run(None)
    assert session.tried == ATEN[:2]


@pytest.mark.parametrize(("trial_s", "tried"), [(0.25, 3), (1.0, 3), (1.5, 2), (3.0, 1)])
def test_further_candidates_of_atens_are_skipped_after_their_share_of_a_users_budget(
    clock: Clock, trial_s: float, tried: int
) -> None:
    search = ListedSearch([*ATEN, X[0]])
    session = Session(clock, search, trial_s=trial_s, budget_s=8.0)
    session.run(None)
    assert session.tried == [*ATEN[:tried], X[0]]
    assert [name for name, seconds in search.told if seconds is None] == [c.id for c in ATEN[tried:]]
    reasons = [session.context.ledger[c.id].reason for c in ATEN]
    text = "the share of the budget for ATen's candidates was spent before its turn"
    assert reasons == [""] * tried + [text] * (3 - tried)


def test_atens_share_ends_when_it_is_spent_exactly(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exploration, "ATEN_END", 0.25)
    session = Session(clock, ListedSearch(ATEN), trial_s=2.0, budget_s=8.0)
    session.run(None)
    assert session.tried == ATEN[:1]


def test_share_of_aten_does_not_end_before_one_of_its_candidates_works(clock: Clock) -> None:
    session = Session(clock, ListedSearch([*ATEN, X[0]]), trial_s=4.0, budget_s=8.0)
    session.worker.replies[ATEN[0].id] = Attempted(WRONG)
    session.run(None)
    assert session.tried == [ATEN[0], ATEN[1], X[0]]


# --- layouts of other M ------------------------------------------------------------------------------------------


def test_first_two_candidates_in_each_layout_of_other_m_are_tried_first(clock: Clock) -> None:
    search = ListedSearch()
    candidates = [*ATEN, *X, *make("y", 2)]
    Session(clock, search, candidates=candidates, layouts=["x:1", "x:other", "x:0"]).run(None)
    assert list(search.options.first) == [X[1], X[3], X[0], X[2]]
    assert search.candidates == candidates


def test_candidates_in_layouts_of_other_m_leave_four_of_the_searchs_own_their_turn(clock: Clock) -> None:
    """They are fast at other M, and may take ten times as long as the best at this one."""
    search = ListedSearch(X)
    session = Session(clock, search, trial_s=2.0, budget_s=8.0, strict=False, layouts=["x:0"])
    session.run(None)
    assert list(search.options.first) == [X[0], X[2]]
    assert session.tried == X[:6]  # two in the layout, and four others


# --- earlier failures --------------------------------------------------------------------------------------------


def test_candidates_that_failed_before_are_not_tried(clock: Clock) -> None:
    search = ListedSearch()
    session = Session(clock, search)
    session.store.remember_failure(TARGET, PROBLEM.key, X[1].id, Verdict("crashed", "signal 11"))
    session.store.remember_failure(TARGET, PROBLEM.plan_key, X[2].id, WRONG)
    session.run(None)
    assert search.candidates == [*ATEN, X[0], *X[3:]]
    rows = [session.context.ledger[candidate.id] for candidate in X[:3]]
    assert [row.stage for row in rows] == ["untried", "failed", "failed"]
    assert [row.reason for row in rows] == ["", "not tried again: crashed before", "not tried again: wrong before"]


# --- builds ------------------------------------------------------------------------------------------------------


def test_first_builds_are_the_first_of_each_template_that_needs_building(clock: Clock) -> None:
    first, second = make("y", 15, "first"), make("y", 3, "second")
    mixed = [second[0], *first, *X, *second[1:]]
    turns = [candidate for pair in zip(second, first[:3], strict=True) for candidate in pair]
    assert first_builds(PROBLEM, mixed, TARGET, 12) == [*turns, *first[3:12]]
    assert first_builds(PROBLEM, mixed, TARGET, 6) == [*turns, *first[3:6]]
    assert first_builds(PROBLEM, X, TARGET, 12) == []


def test_what_first_calls_compile_is_among_the_first_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "get", lambda _: CompilesInCalls())
    assert first_builds(PROBLEM, X, TARGET, 2) == X[:2]
    assert first_builds(PROBLEM.with_m(PROBLEM.m + 1), X, TARGET, 2) == []


class Builds:
    """A ``build`` that notes its calls. slow_s: the seconds that a call takes. failing: ids whose build fails.
    unfinished: those whose build does not end by itself."""

    def __init__(
        self, clock: Clock, slow_s: float = 0.0, failing: Iterable[Candidate] = (), unfinished: Iterable[Candidate] = ()
    ) -> None:
        self.clock, self.slow_s, self.failing = clock, slow_s, {candidate.id for candidate in failing}
        self.unfinished = {candidate.id for candidate in unfinished}
        self.calls: list[list[Candidate]] = []
        self.futures: dict[str, Future[Artifact | Verdict]] = {}

    def __call__(
        self, problem: Problem, candidates: Iterable[Candidate], target: Target
    ) -> dict[str, Future[Artifact | Verdict]]:
        assert (problem, target) == (PROBLEM, TARGET)
        self.calls.append(list(candidates))
        self.clock.now += self.slow_s
        failure = Verdict("build_failed", "no")
        self.futures |= {
            c.id: Future()
            if c.id in self.unfinished
            else finished(failure if c.id in self.failing else Artifact(c, ""))
            for c in self.calls[-1]
        }
        return {c.id: self.futures[c.id] for c in self.calls[-1]}


Y = make("y", 20)


def test_batches_are_built_before_they_are_tried(clock: Clock) -> None:
    builds, search = Builds(clock, failing=[Y[1], Y[13]]), ListedSearch(Y[:3], Y[10:15], X[:1])
    session = Session(clock, search, candidates=[*X, *Y], build=builds)
    session.run(None)
    assert builds.calls == [Y[:12], Y[12:15], X[:1]]
    assert session.tried == [Y[0], Y[2], Y[10], Y[11], Y[12], Y[14], X[0]]
    assert [name for name, seconds in search.told if seconds is None] == [Y[1].id, Y[13].id]
    rows = [session.context.ledger[candidate.id] for candidate in (Y[1], Y[13])]
    assert [(row.stage, row.reason) for row in rows] == [("failed", "no")] * 2


@pytest.mark.parametrize(("strict", "elapsed_s"), [(True, 3.0), (False, 0.0)])
def test_building_takes_time_of_a_users_budget_only(clock: Clock, strict: bool, elapsed_s: float) -> None:
    builds = Builds(clock, slow_s=3.0)
    session = Session(clock, ListedSearch(), candidates=Y, build=builds, strict=strict)
    session.run(None)
    assert builds.calls == [Y[:12]]
    assert session.context.budget.elapsed_s == elapsed_s


def test_later_builds_count_beyond_the_limit_and_the_first_ones_never(clock: Clock) -> None:
    """The first builds wait for the start of the builders, however long it takes."""
    search = ListedSearch(Y[12:13], Y[13:14])
    session = Session(clock, search, candidates=Y, build=Builds(clock, slow_s=3.0))
    session.context.budget = TimeBudget(60.0, strict=False, excludable_s=4.0)
    session.run(None)
    assert session.tried == Y[12:14]
    assert session.context.budget.elapsed_s == 2.0  # of two later builds of 3 s


def test_nothing_is_built_without_builders_or_candidates(clock: Clock) -> None:
    session = Session(clock, ListedSearch(Y[:2]), candidates=Y)
    session.run(None)
    assert session.tried == Y[:2]
    builds = Builds(clock)
    Session(clock, ListedSearch(X[:2]), candidates=X, build=builds).run(None)
    assert builds.calls == [X[:2]]  # the builders know that these need no building


@pytest.mark.parametrize(
    ("overlap", "batch", "ahead"),
    [
        (True, Y[12:15], Y[16:17]),  # three of four builders are busy
        (True, Y[12:16], []),
        (True, Y[12:13], Y[16:19]),
        (True, Y[:2], []),  # nothing has to wait for a build
        (False, Y[12:15], []),
    ],
)
def test_idle_builders_build_what_the_search_may_ask_for_next(
    clock: Clock, processors: int, overlap: bool, batch: list[Candidate], ahead: list[Candidate]
) -> None:
    builds = Builds(clock)
    search = ListedSearch(batch, likely=[Y[0], Y[1], *Y[16:20]])
    profile = TuningProfile(builds_overlap=overlap)
    session = Session(clock, search, candidates=Y, build=builds, profile=profile)
    session.run(None)
    later = [*(candidate for candidate in batch if candidate not in Y[:12]), *ahead]
    assert builds.calls == [Y[:12], *([later] if later else [])]
    assert session.tried == batch


def test_first_builds_go_on_while_candidates_are_tried_where_that_disturbs_nothing(clock: Clock) -> None:
    """Six of each template are begun. Waiting for them takes no time of the budget, and no other candidate is waited
    for."""
    builds, ahead = Builds(clock, slow_s=3.0), list[list[Candidate]]()
    session = Session(
        clock, ListedSearch(Y[:2], Y[2:3], likely=Y[16:20]), candidates=Y, build=builds, strict=False,
        build_ahead=lambda problem, candidates, target: ahead.append(list(candidates)),
        profile=TuningProfile(builds_overlap=True),
    )  # fmt: skip
    session.run(None)
    assert ahead[0] == Y[:6]
    assert builds.calls == [Y[:2], Y[2:3]]
    assert session.tried == Y[:3]
    assert session.context.budget.elapsed_s == 0.0


def overlapping_session(clock: Clock, search: ListedSearch, builds: Builds, **options: Any) -> Session:
    return Session(clock, search, candidates=Y, build=builds, build_ahead=lambda *_: None, **options)


def test_others_are_tried_while_a_slow_candidate_is_built_where_that_disturbs_nothing(clock: Clock) -> None:
    builds, search = Builds(clock, unfinished=Y[1:2]), ListedSearch(Y[:3], Y[4:6], Y[6:8])
    session = overlapping_session(clock, search, builds)

    def attempt(candidate: Candidate, *limits: float | None) -> Attempted:
        if candidate == Y[5]:
            builds.futures[Y[1].id].set_result(Artifact(Y[1], ""))
        return ScriptedWorker.attempt(session.worker, candidate, *limits)  # type: ignore[arg-type]

    session.worker.attempt = attempt  # type: ignore[assignment, method-assign]
    session.run(None)
    assert session.tried == [Y[0], Y[2], Y[4], Y[5], Y[1], Y[6], Y[7]]
    assert [name for name, _ in search.told] == [candidate.id for candidate in session.tried]


def test_search_goes_on_when_the_only_finished_build_failed(clock: Clock) -> None:
    builds = Builds(clock, failing=Y[:1], unfinished=Y[1:2])
    session = overlapping_session(clock, ListedSearch(Y[:2], Y[4:6]), builds)
    session.context.budget = TimeBudget(0.02, strict=False, excludable_s=0.0)
    session.run(None)
    assert session.tried == Y[4:6]


def test_slow_build_that_fails_late_is_told_to_the_search(clock: Clock) -> None:
    builds, search = Builds(clock, unfinished=Y[1:2]), ListedSearch(Y[:2], Y[4:5])
    session = overlapping_session(clock, search, builds)

    def attempt(candidate: Candidate, *limits: float | None) -> Attempted:
        if candidate == Y[4]:
            builds.futures[Y[1].id].set_result(Verdict("build_failed", "no"))
        return ScriptedWorker.attempt(session.worker, candidate, *limits)  # type: ignore[arg-type]

    session.worker.attempt = attempt  # type: ignore[assignment, method-assign]
    session.run(None)
    assert session.tried == [Y[0], Y[4]]
    assert search.told[-1] == (Y[1].id, None)
    assert session.context.ledger[Y[1].id].stage == "failed"


def test_first_build_of_a_template_is_waited_for_however_long_others_were_tried(clock: Clock) -> None:
    """A backend that builds slowly has a chance, too."""
    slow = Candidate.make("y", "slow", i=0)
    builds, search = Builds(clock, unfinished=[slow]), ListedSearch([*Y[:3], slow], Y[4:6])
    session = Session(clock, search, candidates=[*Y, slow], build=builds, build_ahead=lambda *_: None, strict=False)
    timer = threading.Timer(0.2, lambda: builds.futures[slow.id].set_result(Artifact(slow, "")))
    timer.start()
    session.run(None)
    timer.join()
    assert session.tried == [*Y[:3], slow, *Y[4:6]]


@pytest.mark.parametrize("strict", [True, False])
def test_other_work_during_a_wait_has_the_worker_and_takes_none_of_the_budget(clock: Clock, strict: bool) -> None:
    """Others take 5 s of a wait of 6. What is left of it counts as a build's: not at all here, unless the budget is a
    user's."""
    builds = Builds(clock, unfinished=Y[:1])
    session = overlapping_session(clock, ListedSearch(Y[:1]), builds, strict=strict, budget_s=64.0)
    session.context.budget.excludable_s = 8.0
    steps = session.exploration.steps(None)
    pause = next(steps)
    assert session.worker.calls == ["pause"]
    assert pause.builds == {builds.futures[Y[0].id]}
    clock.now += 6.0
    builds.futures[Y[0].id].set_result(Artifact(Y[0], ""))
    with pytest.raises(StopIteration):
        steps.send(5.0)
    assert session.worker.calls == ["pause", f"resume {PROBLEM.key}"]
    assert session.tried == Y[:1]
    assert session.context.others_s == 5.0
    assert session.context.budget.elapsed_s == pytest.approx(1.0 if strict else 0.0)
    assert session.context.budget.excludable_s == 8.0


def test_exploration_that_is_ended_during_a_wait_leaves_no_paused_problem(clock: Clock) -> None:
    session = overlapping_session(clock, ListedSearch(Y[:1]), Builds(clock, unfinished=Y[:1]))
    steps = session.exploration.steps(None)
    next(steps)
    steps.close()
    assert session.worker.calls == ["pause", f"resume {PROBLEM.key}"]


def test_last_builds_are_waited_for_where_builds_are_not_counted(clock: Clock) -> None:
    builds = Builds(clock, unfinished=Y[1:2])
    session = overlapping_session(clock, ListedSearch(Y[:2]), builds, strict=False, budget_s=0.02)
    timer = threading.Timer(0.2, lambda: builds.futures[Y[1].id].set_result(Artifact(Y[1], "")))
    timer.start()
    session.run(None)
    timer.join()
    assert session.tried == Y[:2]


def test_last_builds_are_waited_for_in_the_time_for_exploring_only(clock: Clock) -> None:
    builds = Builds(clock, unfinished=Y[1:2])
    session = overlapping_session(clock, ListedSearch(Y[:2]), builds, budget_s=0.02)
    stopped = session.run(None)
    assert session.tried == Y[:1]
    assert stopped == "the time for exploring was spent before 1 more candidates were built"


def test_half_of_the_processors_build_ahead(clock: Clock, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[Candidate]] = []

    def build_ahead(problem: Problem, candidates: Iterable[Candidate], target: Target) -> None:
        assert (problem, target) == (PROBLEM, TARGET)
        calls.append(list(candidates))

    search = ListedSearch(Y[:1], likely=Y[4:12])
    Session(clock, search, candidates=Y, build=Builds(clock), build_ahead=build_ahead).run(None)
    assert calls == [Y[:6], Y[6:8]]
    monkeypatch.setattr(exploration, "allowed_cpus", lambda: frozenset({0}))
    search = ListedSearch(Y[:1], likely=Y[4:12])
    Session(clock, search, candidates=Y, build=Builds(clock), build_ahead=build_ahead).run(None)
    assert calls[2:] == [Y[:6], Y[6:7]]


# --- one candidate -----------------------------------------------------------------------------------------------


def test_row_has_the_results_of_the_trial(clock: Clock) -> None:
    session = Session(clock, ListedSearch(X[:1]), trial_s=1.0)
    session.worker.replies[X[0].id] = Attempted(OK, "x:0", 0.125, 77, (0.5, 0.25))
    session.run(None)
    row = session.context.ledger[X[0].id]
    assert (row.stage, row.verdict, row.packing, row.packing_s, row.workspace_bytes) == (
        "screened",
        OK,
        "x:0",
        0.125,
        77,
    )
    assert (row.times_s, row.reason, row.eligible) == ((0.5, 0.25), "", False)


@pytest.mark.parametrize(
    ("trial_s", "ahead", "strict", "spent_s"),
    [(2.0, True, False, 0.25), (2.0, True, True, 2.0), (2.0, False, False, 2.0), (0.34375, True, False, 0.34375)],
)
def test_setting_things_up_takes_none_of_the_default_budget(
    clock: Clock, trial_s: float, ahead: bool, strict: bool, spent_s: float
) -> None:
    session = Session(
        clock, ListedSearch(ATEN[:1]), trial_s=trial_s, strict=strict, build_ahead=(lambda *_: None) if ahead else None
    )
    session.run(None)
    assert session.context.budget.elapsed_s == spent_s
    assert session.context.slowest_s == spent_s


@pytest.mark.parametrize(("candidates", "spent_s"), [(ATEN[:2], 2.0), (X[:1], 2.0)])
def test_only_two_seconds_of_setting_up_and_none_of_other_backends_are_not_counted(
    clock: Clock, candidates: Sequence[Candidate], spent_s: float
) -> None:
    """Each attempt takes 2 s, 1.75 of them without its call."""
    session = Session(clock, ListedSearch(candidates), trial_s=2.0, strict=False, build_ahead=lambda *_: None)
    session.run(None)
    assert session.context.budget.elapsed_s == spent_s


@pytest.mark.parametrize(("call_s", "spent_s"), [(0.75, 0.25), (0.375, 0.625)])
def test_first_call_that_sets_things_up_takes_none_of_the_default_budget(
    clock: Clock, call_s: float, spent_s: float
) -> None:
    """The first attempt takes 0.25 s in its call, the second one all of its time."""
    session = Session(clock, ListedSearch(ATEN[:2]), trial_s=call_s, strict=False, build_ahead=lambda *_: None)
    session.worker.replies[ATEN[1].id] = Attempted(None, times_s=(call_s,))
    session.run(None)
    assert session.context.budget.elapsed_s == spent_s


def test_candidate_too_slow_to_be_checked_has_the_reason(clock: Clock) -> None:
    session = Session(clock, ListedSearch(X[:2]))
    session.worker.replies[X[1].id] = Attempted(None, times_s=(0.625,))
    session.run(None)
    row = session.context.ledger[X[1].id]
    assert (row.stage, row.reason) == ("screened", "2.5x the best screening time: not worth checking")


def test_failed_candidate_has_no_times(clock: Clock) -> None:
    search = ListedSearch(X[:1])
    session = Session(clock, search, trial_s=1.0, budget_s=80.0)
    session.worker.replies[X[0].id] = Attempted(WRONG, times_s=(0.25,))
    session.run(None)
    row = session.context.ledger[X[0].id]
    assert (row.stage, row.times_s, row.reason) == ("failed", (), "one element")
    assert search.told == [(X[0].id, None)]
    assert (session.context.slowest_s, session.context.overhead_s, session.context.best_s) == (0.0, 0.0, 0.0)
    assert session.events == [CandidateTried(X[0].id, WRONG, None, 0)]


def test_slowest_trial_and_least_overhead_are_kept(clock: Clock) -> None:
    session = Session(clock, ListedSearch(X[:3]), budget_s=80.0)
    trials = iter([(1.0, (0.25,)), (2.0, (0.5, 0.75)), (0.5, (0.75,))])
    seen: list[tuple[float, float]] = []

    def attempt(candidate: Candidate, deadline_s: float | None, cutoff_s: float | None) -> Attempted:
        seen.append((session.context.slowest_s, session.context.overhead_s))
        elapsed_s, times_s = next(trials)
        clock.now += elapsed_s
        return Attempted(OK, times_s=times_s)

    session.worker.attempt = attempt  # type: ignore[method-assign]
    session.run(None)
    seen.append((session.context.slowest_s, session.context.overhead_s))
    assert seen == [(0.0, 0.0), (1.0, 0.75), (2.0, 0.5), (2.0, 0.0)]


def test_cutoff_counts_from_the_best_of_aten_and_from_the_best_of_all(clock: Clock) -> None:
    session = Session(clock, ListedSearch([X[0], ATEN[0], ATEN[1], X[1]]), budget_s=800.0)
    session.worker.replies[ATEN[0].id] = Attempted(OK, times_s=(2.0,))
    session.worker.replies[ATEN[1].id] = Attempted(OK, times_s=(4.0,))
    session.run(None)
    assert session.worker.cutoffs == [None, None, 1.5 * 2.0, 1.3 * 0.25]


def test_events_tell_each_trial_and_each_new_best(clock: Clock) -> None:
    search = ListedSearch([X[0], ATEN[0], X[1], X[2]])
    session = Session(clock, search, budget_s=80.0)
    for candidate, seconds in ((X[0], 1.0), (ATEN[0], 0.5), (X[1], 0.5), (X[2], 0.125)):
        session.worker.replies[candidate.id] = Attempted(OK, times_s=(seconds,))
    session.run(None)
    assert session.events == [
        CandidateTried(X[0].id, OK, 1.0, 3),
        BestSoFar(X[0].id, 1.0, 1.0),
        CandidateTried(ATEN[0].id, OK, 0.5, 2),
        BestSoFar(ATEN[0].id, 0.5, 1.0),
        CandidateTried(X[1].id, OK, 0.5, 1),
        CandidateTried(X[2].id, OK, 0.125, 0),
        BestSoFar(X[2].id, 0.125, 0.25),
    ]


def test_candidates_left_are_those_that_the_time_allows(clock: Clock) -> None:
    search = ListedSearch(X)
    search.left = 100
    session = Session(clock, search, trial_s=0.5, budget_s=8.0, strict=False)
    session.run(None)
    left = [event.left for event in session.events if isinstance(event, CandidateTried)]
    assert left == [8, 7, 6, 5, 4, 3, 2, 1]  # (4.0 - 0.5 * tried) / 0.5, and the one that begins before the end
    search = ListedSearch(X[:3])
    search.left = 2
    session = Session(clock, search, trial_s=0.5, budget_s=80.0)
    session.run(None)
    assert [event.left for event in session.events if isinstance(event, CandidateTried)] == [4, 3, 2]


# --- second timings ----------------------------------------------------------------------------------------------


def retimed(clock: Clock, times: dict[Candidate, float], *, retimed: int = 24, trial_s: float = 0.0) -> Session:
    """Return a session after all candidates with times were tried once, and the fastest a second time (in 1/16 s)."""
    session = Session(clock, ListedSearch(list(times)), budget_s=80.0, profile=TuningProfile(retimed=retimed))
    for candidate, seconds in times.items():
        session.worker.replies[candidate.id] = Attempted(OK, times_s=(seconds,))
    session.run(None)
    session.tried.clear()
    for candidate in times:
        session.worker.replies[candidate.id] = Attempted(None, times_s=(0.0625,))
    session.worker.trial_s = trial_s
    session.exploration.retime_fastest()
    return session


def test_fastest_candidates_but_atens_are_timed_again(clock: Clock) -> None:
    times = {ATEN[0]: 0.25, X[0]: 1.0, X[1]: 3.0, X[2]: 3.0625}
    session = retimed(clock, times)
    assert session.tried == X[:2]
    rows = [session.context.ledger[candidate.id] for candidate in times]
    assert [row.times_s for row in rows] == [(0.25,), (1.0, 0.0625), (3.0, 0.0625), (3.0625,)]
    assert [row.verdict for row in rows] == [OK] * 4
    assert retimed(clock, times, retimed=1).tried == X[:1]


@pytest.mark.parametrize(("trial_s", "count"), [(20.0, 3), (40.0, 2), (40.5, 1)])
def test_second_timings_end_with_the_share_for_exploring(clock: Clock, trial_s: float, count: int) -> None:
    assert len(retimed(clock, dict.fromkeys(X, 1.0), trial_s=trial_s).tried) == count


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [(None, OK, OK), (OK, None, OK), (None, None, None), (OK, Verdict("exact"), OK), (None, WRONG, WRONG)],
)
def test_second_timing_gives_a_verdict_only_where_there_is_none(
    clock: Clock, first: Verdict | None, second: Verdict | None, expected: Verdict | None
) -> None:
    session = Session(clock, ListedSearch(X[:2]))
    session.worker.replies[X[1].id] = Attempted(first, times_s=(0.25,))
    session.run(None)
    session.worker.replies[X[1].id] = Attempted(second, times_s=(0.5,))
    session.exploration.retime_fastest()
    row = session.context.ledger[X[1].id]
    assert row.verdict == expected
    assert row.times_s == (() if second == WRONG else (0.25, 0.5))
    assert (row.stage == "failed") == (second == WRONG)


def test_candidate_that_is_wrong_in_its_second_timing_fails(clock: Clock) -> None:
    session = Session(clock, ListedSearch(X[:1]))
    session.run(None)
    session.worker.replies[X[0].id] = Attempted(WRONG, times_s=(0.5,))
    session.exploration.retime_fastest()
    row = session.context.ledger[X[0].id]
    assert (row.stage, row.times_s, row.verdict) == ("failed", (), WRONG)
    assert set(session.store.failures(TARGET, PROBLEM.key)) == {X[0].id}
