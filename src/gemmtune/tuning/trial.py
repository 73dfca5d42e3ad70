"""One Problem's way to a Decision: explore, confirm, race. The tuner runs one Trial for each problem it tunes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from .. import backends
from ..backends.base import Artifact
from ..core.candidate import Candidate
from ..core.decision import Decision, Outcome, Verdict
from ..core.errors import StoreError, WorkerError
from ..core.events import BestSoFar, CandidateTried, Progress
from ..core.problem import Problem
from ..core.target import Target
from ..core.verdict import FAULTS
from ..store.base import Store
from ..timing.machine import allowed_cpus
from ..timing.outcome import Leading, Raced
from ..workers.builds import is_prebuilt
from ..workers.worker import Hands, WorkerLost
from .candidates import INCUMBENT, enumerate_candidates
from .ledger import Ledger, Row
from .local_search import Search

log = logging.getLogger("gemmtune")

Build = Callable[[Problem, Iterable[Candidate], Target], Mapping[str, Artifact | Verdict]]
BuildAhead = Callable[[Problem, Iterable[Candidate], Target], None]

DEFAULT_S = 6.0
DEFAULT_GPU_S = 3.0  # its timings are short and steady; what building takes is not counted

# Shares of the budget by whose end a phase hands over to the next; the race has the rest. Making operands and oracle
# counts for no more than its share: on a busy machine it could eat all that choosing needs.
OPEN_SHARE = 0.3
EXPLORE_END, CONFIRM_END = 0.5, 0.75
# Without a budget of the user's, problems whose single calls are slow may take more than the default.
OVERDRAWN = 1.5
LEAST_OTHERS = 4  # candidates besides ATen's that are tried even when ATen's alone took the share for exploring

CLOSE = 1.3  # rough times within this of the best may turn out fastest in a race
CLOSE_INCUMBENT = 1.5  # ATen's ways are few: a wider net keeps "ATen" honest
UNSURE_INCUMBENT = 1.15  # within this a few rough times do not tell which of ATen's ways is the fastest
RAW_WORTH = 8.0  # a raw weight's kernels are raced up to here behind packed ones
OFFERED = 5.0  # a packing's fastest candidate is confirmed up to here, for Plans that share one packing over many M

MAX_RACED, MAX_INCUMBENTS, MAX_PACKINGS = 16, 4, 4
MAX_RACED_GPU, RACE_GPU_S = 12, 1.2  # rough times say more there, and rounds repeat to a few tenths of a percent
# So many of the fastest, by rough times within this factor, are timed once more when there is time to spare: each was
# timed in a moment of its own, and a busy neighbour of half a second doubles what it meets.
LOOKED_AT_AGAIN, DOUBTFUL = 24, 3.0
LOOKED_AT_AGAIN_GPU = 8  # which nobody else keeps busy; its clock may still be rising when the first are timed
SLOW_DUEL_CALLS = 80  # calls of the leader that a race needs to decide anything, whatever is left of the default
# Of a user's budget: ATen's share, and the pairs of timings that a race is left at least: 12 of its duel, and the
# rounds before it.
ATEN_END, RACE_PAIRS = 0.35, 16
CHECK_CALLS = 16  # that checking a candidate makes at least: some on each draw, and one at each other M

# A GPU's templates list their likeliest configurations first, and trying one takes milliseconds.
GPU_SEARCH: dict[str, int] = {"seeds": 12, "leaders": 2, "patience": 12}
BUILT_AHEAD = 12  # of each template

TRIED_IN_LAYOUT = 2  # candidates in each layout of the weight's other M that are tried before the search's own

FORGET = ("build_failed", "unsupported")  # failures that need no remembering: trying again costs nothing


class Trial:
    """Tunes one problem with a worker's hands. Candidates are listed at once, while a worker may still be starting.

    build: builds candidates before they are tried (see ``workers.builds.Builders``); None leaves it to the hands.
    build_ahead: begins to build what may be tried next, while others are timed; None where that would disturb. hot:
    race on operands in the cache. layouts: names of the packed layouts that the same weight has kernels in at other M,
    the fastest first; a candidate in each of the first is tried, checked and raced before others, because one layout
    serves all M of a weight. Raises ValueError for an unknown backend name.
    """

    def __init__(
        self,
        problem: Problem,
        target: Target,
        names: Sequence[str],
        store: Store,
        hands: Hands,
        progress: Progress,
        seed: int,
        *,
        build: Build | None = None,
        build_ahead: BuildAhead | None = None,
        hot: bool = False,
        layouts: Sequence[str] = (),
    ) -> None:
        self._problem, self._target, self._store = problem, target, store
        self._build, self._build_ahead, self._hot = build, build_ahead, hot
        self._hands, self._progress, self._seed = hands, progress, seed
        self._layouts = tuple(layouts[:MAX_PACKINGS])
        self._candidates, illegal = enumerate_candidates(problem, target, names)
        self._ledger = Ledger(self._candidates, illegal)
        self._started = time.perf_counter()
        self._gpu = target.device != "cpu"
        self._default_s = DEFAULT_GPU_S if self._gpu else DEFAULT_S
        self._most_raced = MAX_RACED_GPU if self._gpu else MAX_RACED
        self._seconds, self._strict = self._default_s, False
        self._made: dict[str, Artifact | Verdict] = {}
        self._best_s = self._slowest_s = 0.0
        self._overhead_s = 0.0  # upper bound of what a timing takes besides its calls, as emptying the caches
        self._others = 0

    def run(self, seconds: float | None, limit: int | None) -> Decision:
        """Tune within ``seconds`` and at most ``limit`` candidates.

        seconds: kept within 10%, unless the first look at ATen and one other takes longer; None is 6 (3 on a GPU), and
        more for problems whose single calls are slow. Raises WorkerError when the problem cannot be worked on at all.
        """
        self._started = began = time.perf_counter()
        self._seconds, self._strict = seconds or self._default_s, seconds is not None
        self._hands.open(self._problem, self._seed)
        if not self._strict:
            self._started = max(self._started, time.perf_counter() - OPEN_SHARE * self._seconds)
        stopped = self._explore(limit)
        self._look_again()
        self._confirm()
        raced = self._race()
        self._note_places(raced)
        decision = self._decision(raced.outcome, raced.leader, f"{stopped}; {raced.stopped}", raced.groups)
        layouts = {name: item for name, item in raced.layouts.items() if self._ledger[item.candidate].eligible}
        return msgspec.structs.replace(decision, seconds=time.perf_counter() - began, layouts=layouts)

    def give_up(self, reason: str) -> Decision:
        """The decision when the problem could not be worked on: none valid, with whatever is known. Not for keeping."""
        for row in self._ledger.rows():
            row.eligible = False
        return self._decision("none_valid", None, reason, {})

    # Explore

    def _explore(self, limit: int | None) -> str:
        """Try candidates as the search asks for them. Returns why it stopped."""
        candidates = self._forget_failures()
        first = self._first_in_layouts(candidates)
        search = Search(candidates, first=first, seed=self._seed, limit=limit, **(GPU_SEARCH if self._gpu else {}))
        self._make(first_builds(candidates))
        tried = 0
        while (batch := search.ask()) is not None:
            batch = self._built(batch, search)
            if self._build_ahead is not None:
                likely = [candidate for candidate in search.likely if candidate.id not in self._made]
                # Half of the processors: the other half is there at once for what turns out to be wanted instead.
                self._build_ahead(self._problem, likely[: max(1, len(allowed_cpus()) // 2)], self._target)
            for place, candidate in enumerate(batch):
                if self._must_skip(candidate):
                    search.tell(candidate.id, None)
                    continue
                if self._must_stop(candidate):
                    return f"the share of the budget for exploring was spent after {tried} candidates"
                row = self._attempt(candidate)
                search.tell(candidate.id, row.rough_s if row.times_s else None)
                tried += 1
                self._tell_tried(row, self._left(search.left + len(batch) - place - 1, tried))
        return f"the search ended after {tried} candidates"

    def _first_in_layouts(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The first candidates listed in each of the layouts that other M of the weight use."""
        groups: dict[str | None, list[Candidate]] = {layout: [] for layout in self._layouts}
        for candidate in candidates if groups else ():
            if candidate.backend == INCUMBENT:
                continue  # all of its candidates are tried
            group = groups.get(self._layout_of(candidate))
            if group is not None and len(group) < TRIED_IN_LAYOUT:
                group.append(candidate)
        return [candidate for group in groups.values() for candidate in group]

    def _layout_of(self, candidate: Candidate) -> str | None:
        try:
            return backends.get(candidate.backend).packing_of(self._problem, candidate)
        except NotImplementedError:  # only the loaded kernel can tell
            return None

    def _look_again(self) -> None:
        """Time the fastest once more, in another moment, while exploring has time left."""
        others = [row for row in self._ledger.timed() if not row.incumbent]
        for row in _within(others, DOUBTFUL)[: LOOKED_AT_AGAIN_GPU if self._gpu else LOOKED_AT_AGAIN]:
            if self._spent() > EXPLORE_END:
                return
            result = self._hands.attempt(row.candidate, self._deadline(), self._worth_s(row.candidate))
            row.verdict = result.verdict if row.verdict is None else row.verdict
            if result.verdict is not None and not result.verdict.ok:
                row.times_s = ()
                self._fail(row, result.verdict)
            else:
                row.times_s += result.times_s

    def _make(self, batch: Sequence[Candidate]) -> Mapping[str, Artifact | Verdict]:
        """What became of each. Building takes no time of the default budget: it is shared by many problems."""
        if self._build is not None and batch:
            start = time.perf_counter()
            self._made |= self._build(self._problem, batch, self._target)
            if not self._strict:
                self._started += time.perf_counter() - start
        return self._made

    def _built(self, batch: Sequence[Candidate], search: Search) -> list[Candidate]:
        """Those of a batch that could be built, all before any of them is timed. Builders that would be idle meanwhile
        build what the search may ask for next."""
        todo = [candidate for candidate in batch if candidate.id not in self._made]
        spare = -len(todo) % len(allowed_cpus()) if todo and self._gpu else 0
        if spare:
            todo += [candidate for candidate in search.likely if candidate.id not in self._made][:spare]
        made = self._make(todo)
        for candidate in batch:
            found = made.get(candidate.id)
            if isinstance(found, Verdict):
                self._fail(self._ledger[candidate.id], found)
                search.tell(candidate.id, None)
        return [candidate for candidate in batch if not isinstance(made.get(candidate.id), Verdict)]

    def _forget_failures(self) -> list[Candidate]:
        """The candidates without those that are remembered to have failed here, or at any M by a fault of theirs."""
        failures = self._store.failures(self._target, self._problem.plan_key)
        failures |= self._store.failures(self._target, self._problem.key)
        for candidate in self._candidates:
            if candidate.id in failures:
                verdict = failures[candidate.id]
                self._ledger.fail(candidate.id, verdict, f"not tried again: {verdict.kind} before")
        return [candidate for candidate in self._candidates if candidate.id not in failures]

    def _must_stop(self, candidate: Candidate) -> bool:
        """ATen's are all tried, and some others in any case, unless that takes far more than the budget."""
        spent = self._spent()
        if candidate.backend == INCUMBENT:
            return not self._strict and spent > OVERDRAWN and self._ledger.best(incumbent=True) is not None
        if self._strict:
            late = spent > EXPLORE_END and (self._others >= LEAST_OTHERS or spent > CONFIRM_END)
            return self._others > 0 and (late or self._gone_s() + self._reserve_s() > self._seconds)
        # Twice that for the others: one of ATen's ways that is slow beyond reason must not leave it without a rival.
        return spent > EXPLORE_END and (self._others >= LEAST_OTHERS or spent > 2 * OVERDRAWN)

    def _must_skip(self, candidate: Candidate) -> bool:
        """Within a user's budget ATen's further ways must leave time for a rival."""
        if not self._strict or candidate.backend != INCUMBENT or self._spent() < ATEN_END:
            return False
        if self._ledger.best(incumbent=True) is None:
            return False
        self._ledger[candidate.id].reason = "the share of the budget for ATen's ways was spent before its turn"
        return True

    def _reserve_s(self) -> float:
        """Seconds that checking and racing the best of either side will take."""
        base = self._ledger.best(incumbent=True)
        pair_s = self._best_s + (base.rough_s if base is not None else 0.0) + 2.0 * self._overhead_s
        return 2.0 * self._slowest_s + RACE_PAIRS * pair_s

    def _attempt(self, candidate: Candidate) -> Row:
        start = time.perf_counter()
        result = self._hands.attempt(candidate, self._deadline(), self._worth_s(candidate))
        row = self._ledger[candidate.id]
        row.stage, row.verdict, row.packing = "screened", result.verdict, result.packing
        row.packing_s, row.workspace_bytes, row.times_s = result.packing_s, result.workspace_bytes, result.times_s
        self._others += candidate.backend != INCUMBENT
        if result.verdict is None:
            row.reason = f"{row.rough_s / self._best_s:.1f}x the best rough time: not worth checking"
        elif not result.verdict.ok:
            row.times_s = ()
            self._fail(row, result.verdict)
        if row.times_s:
            took = time.perf_counter() - start
            overhead_s = max(0.0, took / len(row.times_s) - row.rough_s)
            self._overhead_s = min(self._overhead_s, overhead_s) if self._slowest_s else overhead_s
            self._slowest_s = max(self._slowest_s, took)
        return row

    def _worth_s(self, candidate: Candidate) -> float | None:
        """The rough time beyond which a candidate has no chance in a race; None while there is none to compare with."""
        if candidate.backend == INCUMBENT:
            base = self._ledger.best(incumbent=True)
            return CLOSE_INCUMBENT * base.rough_s if base is not None else None
        return CLOSE * self._best_s if self._best_s else None

    def _deadline(self) -> float | None:
        """Many times what the slowest needed; the worker's own limit until one has worked."""
        return max(3.0, 10.0 * self._slowest_s) if self._slowest_s else None

    def _fail(self, row: Row, verdict: Verdict) -> None:
        self._ledger.fail(row.id, verdict)
        if verdict.kind in FORGET or (row.incumbent and verdict.kind in ("wrong", "unstable")):
            return  # checking ATen again is cheap, and losing it for good is not
        try:
            self._store.remember_failure(self._target, self._problem.key, row.id, verdict)
            if verdict.kind in FAULTS:  # such a kernel may not serve another M of the Plan
                self._store.remember_failure(self._target, self._problem.plan_key, row.id, verdict)
        except StoreError as error:
            log.debug("a failure is not remembered: %s", error)

    def _tell_tried(self, row: Row, left: int) -> None:
        median_s = row.rough_s if row.times_s else None
        self._progress(CandidateTried(row.id, row.verdict, median_s, left))
        if median_s is not None and (not self._best_s or median_s < self._best_s):
            self._best_s = median_s
            base = self._ledger.best(incumbent=True)
            self._progress(BestSoFar(row.id, median_s, median_s / base.rough_s if base is not None else 1.0))

    def _left(self, known: int, tried: int) -> int:
        """Candidates still to come: those the search knows of, as far as the time for exploring will reach."""
        rest = max(0.0, EXPLORE_END - self._spent()) * self._seconds
        each = self._spent() * self._seconds / tried
        return min(known, int(rest / each) + 1 if each > 0 else known)

    # Confirm

    def _confirm(self) -> None:
        """Check the promising ones fully: only these can be served. The best of each packing come first: the layout
        that a weight's other M decide for must have a kernel of its own here."""
        rows = _one_a_packing_first(self._promising(), self._layouts)
        count = len({row.packing for row in rows})
        for row in rows[:count] + _by_packing(rows[count:]):
            if self._leaves_race_time(row):
                self._check(row)
        for incumbent in (True, False):  # whatever the clock says, the best of either side is worth a look
            rows = [row for row in self._ledger.timed() if row.incumbent == incumbent]
            for row in rows[: None if incumbent else MAX_RACED]:
                if self._ledger.best(incumbent=incumbent, eligible=True) is not None:
                    break
                self._check(row)
        if not self._strict:  # nor must calls that take the budget alone settle which of ATen's ways serves
            rows = [row for row in self._ledger.timed() if row.incumbent]
            for row in _within(rows, UNSURE_INCUMBENT)[:MAX_INCUMBENTS]:
                self._check(row)
            self._confirm_raw_pair()

    def _leaves_race_time(self, row: Row) -> bool:
        """Return whether a check of ``row`` ends in this phase and, within a user's budget, leaves the race its time.

        ATen's plain way on a quantised weight may be 50 times slower than the rest: checking that took what the race
        needed, which then could not tell that a kernel four times as fast as ATen's best is faster.
        """
        end_s = self._gone_s() + CHECK_CALLS * row.rough_s
        return end_s < CONFIRM_END * self._seconds and not (self._strict and self._seconds < end_s + self._reserve_s())

    def _confirm_raw_pair(self) -> None:
        """Check the fastest kernel and ATen's fastest way on the raw weight, whatever the clock says: unless both are
        checked the raw layout has no duel, and plain ATen serves a raw weight. A kernel that fails makes room for the
        next, up to ``MAX_PACKINGS`` times."""
        for _ in range(MAX_PACKINGS):
            pair = self._raw_pair([row for row in self._ledger.timed() if row.stage != "failed"])
            for row in pair:
                self._check(row)
            if all(row.eligible for row in pair):
                return

    def _promising(self) -> list[Row]:
        """What may win a race, or be a packing's best in a Plan that shares it."""
        rows = self._ledger.timed()
        incumbents = [row for row in rows if row.incumbent]
        others = [row for row in rows if not row.incumbent]
        chosen = _within(incumbents, CLOSE_INCUMBENT)[:MAX_INCUMBENTS]
        chosen += [row for row in incumbents if row.packing is None][:1]
        chosen += _within(others, CLOSE)[: self._most_raced]
        firsts = {row.packing: row for row in reversed(_within(rows, OFFERED))}
        chosen += sorted(firsts.values(), key=lambda row: row.rough_s)[:MAX_PACKINGS]
        chosen += [firsts[layout] for layout in self._layouts if layout in firsts]
        return list({row.id: row for row in chosen}.values())

    def _check(self, row: Row) -> None:
        if row.eligible or row.stage == "failed":
            return
        verdict = self._hands.confirm(row.candidate, self._deadline()).verdict
        if verdict.kind == "crashed" and row.incumbent:  # ATen may have died of what another kernel did to the heap
            verdict = self._hands.confirm(row.candidate, self._deadline()).verdict
        if verdict.ok:
            row.verdict, row.eligible = verdict, True
        else:
            self._fail(row, verdict)

    # Race

    def _race(self) -> Raced:
        """Race the eligible. A candidate that brings the worker down, or is wrong after it was raced, is out, and the
        rest race again."""
        unexplained = 0
        while rows := self._entrants():
            budget_s = self._race_seconds(rows)
            try:
                candidates = [row.candidate for row in rows]
                earlier_s = {row.id: row.rough_s for row in rows}
                raced = self._hands.race(
                    candidates, budget_s, self._seed, self._tell_leading, self._hot, earlier_s
                )  # fmt: skip
                if not raced.faults:
                    return raced
                for name, verdict in raced.faults.items():
                    self._fail(self._ledger[name], verdict)
                continue
            except WorkerLost as loss:
                if loss.candidate_id is not None:
                    self._fail(self._ledger[loss.candidate_id], loss.verdict)
                    continue
                unexplained += 1
                reason = f"the race was lost: {loss.verdict.detail}"
            except WorkerError as error:
                unexplained += 1
                reason = f"the race failed: {error}"
            if unexplained == 2:
                return self._unraced(reason)
        return Raced("none_valid", None, "no candidate passed its checks", (), {})

    def _entrants(self) -> list[Row]:
        """ATen's best first, then the others, then more of ATen's: where memory is short, the last go without."""
        rows = [row for row in self._ledger.timed() if row.eligible]
        incumbents = _within([row for row in rows if row.incumbent], CLOSE_INCUMBENT)[:MAX_INCUMBENTS]
        others = _within([row for row in rows if not row.incumbent], CLOSE_INCUMBENT)
        others = _one_a_packing_first(others, self._layouts)
        raw = self._raw_pair(rows)
        incumbents += [row for row in raw if row.incumbent and row not in incumbents]
        others[1:1] = [row for row in raw if not row.incumbent and row not in others[:1]]
        others = list({row.id: row for row in others}.values())
        best_s = min((row.rough_s for row in rows), default=1.0)
        others = others[: max(3, min(self._most_raced, int(self._rest_s() / (20 * best_s))))]
        for row in rows:
            if row not in incumbents and row not in others:
                row.reason = row.reason or f"{row.rough_s / best_s:.2f}x the best rough time: not raced"
        return incumbents[:1] + others + incumbents[1:]

    def _raw_pair(self, rows: Sequence[Row]) -> list[Row]:
        """The fastest of either side that take the weight as it lies: a weight that is not packed is served by one of
        the two. None where ATen's is far ahead, or both are far behind the best."""
        raw = [row for row in rows if row.packing is None]
        own = next((row for row in raw if not row.incumbent), None)
        base = next((row for row in raw if row.incumbent), None)
        if own is None or base is None:
            return []
        return [own, base] if own.rough_s <= min(CLOSE * base.rough_s, RAW_WORTH * rows[0].rough_s) else []

    def _race_seconds(self, rows: Sequence[Row]) -> float:
        """What is left of the budget; unless it is the user's, more when calls are so slow that it decides nothing."""
        if self._strict:
            return max(self._rest_s(), 0.05 * self._seconds)
        slow = SLOW_DUEL_CALLS * min(row.rough_s for row in rows)
        rest = min(self._rest_s(), RACE_GPU_S) if self._gpu else self._rest_s()
        return max(rest, min(0.75 * self._seconds, slow), 0.05 * self._seconds)

    def _tell_leading(self, leading: Leading) -> None:
        self._progress(BestSoFar(leading.id, leading.median_s, leading.ratio))

    def _unraced(self, reason: str) -> Raced:
        """Without a race nothing is decided: ATen serves if it is right."""
        base = self._ledger.best(incumbent=True, eligible=True)
        return Raced("inconclusive" if base else "none_valid", base.id if base else None, reason, (), {})

    def _note_places(self, raced: Raced) -> None:
        for place in raced.placed:
            row = self._ledger[place.id]
            if place.stage == "failed":
                self._fail(row, Verdict(place.fault, place.reason))
                continue
            row.stage = "screened" if place.stage == "untried" else place.stage
            row.reason, row.sample = place.reason, place.sample

    # The outcome

    def _decision(self, outcome: Outcome, chosen: str | None, stopped: str, raced: dict[str, str]) -> Decision:
        return Decision(
            problem_key=self._problem.key,
            problem=self._problem.to_dict(),
            target_key=self._target.key,
            outcome=outcome,
            chosen=chosen,
            evidence=self._ledger.evidence(),
            alternatives=self._ledger.alternatives(raced),
            stopped=stopped,
            seconds=time.perf_counter() - self._started,
            seed=self._seed,
            created=time.time(),
        )

    def _spent(self) -> float:
        """The share of the budget that is gone."""
        return (time.perf_counter() - self._started) / self._seconds

    def _gone_s(self) -> float:
        return self._spent() * self._seconds

    def _rest_s(self) -> float:
        return max(0.0, 1.0 - self._spent()) * self._seconds


def first_builds(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first of each template that has to be built: the search asks for them all, a few at a time."""
    firsts: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in candidates:
        if not is_prebuilt(backends.get(candidate.backend)):
            firsts.setdefault((candidate.backend, candidate.template), []).append(candidate)
    return [candidate for group in firsts.values() for candidate in group[:BUILT_AHEAD]]


def _within(rows: Sequence[Row], factor: float) -> list[Row]:
    """Those within ``factor`` of the first; rows are sorted by rough time."""
    return [row for row in rows if row.rough_s <= factor * rows[0].rough_s]


def _one_a_packing_first(rows: Sequence[Row], layouts: Sequence[str] = ()) -> list[Row]:
    """The best overall, then the best of each packing, those in ``layouts`` first, then the rest: a Plan compares
    packings by raced times."""
    firsts = list({row.packing: row for row in reversed(rows)}.values())
    firsts.sort(key=lambda row: (row is not rows[0], row.packing not in layouts, row.rough_s))
    taken = {row.id for row in firsts}
    return firsts + [row for row in rows if row.id not in taken]


def _by_packing(rows: Iterable[Row]) -> list[Row]:
    """The same rows with those of one packing side by side, so that each layout is packed once."""
    groups: dict[str | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.packing, []).append(row)
    return [row for group in groups.values() for row in group]
