"""The first phase of a tuning session: candidates are built, timed a few times and checked, as a search asks for
them."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future

from .. import backends
from ..backends.base import Artifact
from ..core.candidate import Candidate
from ..core.decision import Verdict
from ..core.events import BestSoFar, CandidateTried
from ..core.problem import Problem
from ..core.target import Target
from ..timing.machine import allowed_cpus
from .candidates import BASELINE_BACKEND
from .ledger import Row
from .local_search import Template, template_of
from .searcher import Searcher, SearcherFactory, SearchOptions
from .selection import CLOSE, CLOSE_BASELINE, within
from .session_context import SessionContext
from .time_budget import TimeBudget
from .turns import Pause, Steps

# Begins to build candidates, and returns the future of each outcome by its id.
Build = Callable[[Problem, Iterable[Candidate], Target], Mapping[str, Future[Artifact | Verdict]]]
BuildAhead = Callable[[Problem, Iterable[Candidate], Target], None]

# Shares of the budget at which exploring and confirming end; the race has the remainder.
EXPLORE_END, CONFIRM_END = 0.5, 0.75
# Without a user's budget, a problem whose single calls are slow may take this multiple of the default budget.
DEFAULT_OVERRUN = 1.5
ATEN_END = 0.35  # ATen's share of a user's budget
# A further candidate of ATen's is ended after this multiple of the longest trial so far, where others have ten.
# bfloat16 products with a row-major weight take PyTorch over ten times as long as others on CPUs without AVX-512.
ATEN_PATIENCE = 4.0
# Candidates other than ATen's, of the search's own choice, that are tried even when the share for exploring is spent by
# ATen's and by those in the layouts of other M. With 256 rows, kernels in the layouts that served one row took ten
# times as long as the first of the others; with none of these tried, PyTorch's operator served.
MIN_OTHERS = 4
# The fastest candidates whose screening times are within this factor are timed once more when there is time to spare:
# each was timed at another moment, and a busy neighbour of half a second doubles the times during that moment.
RETIMED_WITHIN = 3.0
BUILT_AHEAD = 12  # of each template
# The same for the Problem that is tuned, where candidates are timed while others are built: on a GPU the search leaves
# templates that are behind out after their first four, and with 12 of each the kernels that it does ask for waited for
# some that it does not. Builds for later Problems wait for all others, so that these have 12 of each.
BUILT_AHEAD_OVERLAPPING = 6
# On a GPU, an attempt of one of ATen's candidates that takes SETTING_UP_S longer than its calls has set up something
# for the whole process: a library has loaded kernels, or Triton has compiled the one beside a product. So has a first
# call of FIRST_CALL_S (one of over 2 s is measured as if it were slow). As builds, that takes none of the default
# budget, up to so many seconds of a Problem. The first Problem with a residual had time for 9 candidates, others for 34
# to 54 (compile-timeline-h200-20261128.txt); the first fp8 one on a machine for 6, since the first product in float32
# took 1.7 s, others for 12 to 36 (every-m-20261128-142834, -151448).
SETTING_UP_S, FIRST_CALL_S, MOST_SETTING_UP_S = 0.1, 0.4, 2.0
# Candidates tried, before the search's own, in each layout that the weight has kernels in at other M.
TRIED_PER_LAYOUT = 2


class Exploration:
    """The exploration of one Problem's candidates; their rows of the ledger have the results.

    candidates: the legal ones. search: makes the search strategy. build, build_ahead: as for ``TuningSession``.
    """

    def __init__(
        self,
        context: SessionContext,
        candidates: Sequence[Candidate],
        search: SearcherFactory,
        build: Build | None,
        build_ahead: BuildAhead | None,
    ) -> None:
        self._context, self._candidates, self._search = context, candidates, search
        self._worker, self._ledger, self._profile = context.worker, context.ledger, context.profile
        self._build, self._build_ahead = build, build_ahead
        self._builds: dict[str, Future[Artifact | Verdict]] = {}
        self._first: set[str] = set()  # ids of the candidates whose builds begin first
        self._in_layouts: set[str] = set()  # ids of the candidates that are tried for the layouts of other M
        self._others_tried = self._others_of_search = 0  # tried candidates other than ATen's: all, without _in_layouts
        self._templates_tried: set[Template] = set()
        self._setting_up_left_s = MOST_SETTING_UP_S

    @property
    def _budget(self) -> TimeBudget:
        return self._context.budget

    def steps(self, limit: int | None) -> Steps[str]:
        """Try candidates in the order of the search, except those that take long to build where builds disturb no
        timing: others are tried meanwhile. Return the reason why exploring ended."""
        candidates = self._forget_failures()
        first = self._first_in_layouts(candidates)
        self._in_layouts = {candidate.id for candidate in first}
        search = self._search(candidates, SearchOptions(first, self._context.seed, limit, self._profile))
        count = BUILT_AHEAD if self._build_ahead is None else BUILT_AHEAD_OVERLAPPING
        yield from self._begin_builds(first_builds(self._context.problem, candidates, self._context.target, count))
        tried, late = 0, list[Candidate]()
        while (batch := search.ask()) is not None or late:
            is_last, wanted = batch is None, [*late, *(batch or ())]
            batch, late = yield from self._built(wanted, search, is_last)
            if is_last and late == wanted:
                return f"the time for exploring was spent before {len(late)} more candidates were built"
            if self._build_ahead is not None:
                begun = self._first | self._builds.keys()
                likely = [candidate for candidate in search.likely if candidate.id not in begun]
                # Half of the processors: the other half stays free for candidates that turn out to be wanted instead.
                self._build_ahead(
                    self._context.problem, likely[: max(1, len(allowed_cpus()) // 2)], self._context.target
                )
            for position, candidate in enumerate(batch):
                if self._must_skip(candidate):
                    search.tell(candidate.id, None)
                    continue
                if self._must_stop(candidate):
                    return f"the share of the budget for exploring was spent after {tried} candidates"
                row = self._attempt(candidate)
                search.tell(candidate.id, row.screening_s if row.times_s else None)
                tried += 1
                self._report_tried(row, self._candidates_left(search.left + len(batch) - position - 1, tried))
        return f"the search ended after {tried} candidates"

    def _first_in_layouts(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the first TRIED_PER_LAYOUT candidates in each layout that the weight uses at other M."""
        by_layout: dict[str | None, list[Candidate]] = {layout: [] for layout in self._context.layouts}
        for candidate in candidates if by_layout else ():
            if candidate.backend == BASELINE_BACKEND:
                continue  # every candidate of ATen is tried anyway
            group = by_layout.get(self._layout_of(candidate))
            if group is not None and len(group) < TRIED_PER_LAYOUT:
                group.append(candidate)
        return [candidate for group in by_layout.values() for candidate in group]

    def _layout_of(self, candidate: Candidate) -> str | None:
        try:
            return backends.get(candidate.backend).packing_of(self._context.problem, candidate)
        except NotImplementedError:  # only the loaded kernel has this name
            return None

    def retime_fastest(self) -> None:
        """Time the fastest candidates once more, at another moment, while exploring has time to spare."""
        others = [row for row in self._ledger.timed() if not row.is_baseline]
        for row in within(others, RETIMED_WITHIN)[: self._profile.retimed]:
            if self._budget.share_spent > EXPLORE_END:
                return
            result = self._worker.attempt(row.candidate, self._context.deadline_s(), self._cutoff_s(row.candidate))
            row.verdict = result.verdict if row.verdict is None else row.verdict
            if result.verdict is not None and not result.verdict.ok:
                row.times_s = ()
                self._context.fail(row, result.verdict)
            else:
                row.times_s += result.times_s

    def _begin_builds(self, candidates: Sequence[Candidate]) -> Steps[None]:
        """Build the first candidates; where builds disturb no timing, only begin to."""
        self._first = {candidate.id for candidate in candidates}
        if self._build_ahead is None:
            yield from self._build_now(candidates, candidates)
        else:
            self._build_ahead(self._context.problem, candidates, self._context.target)

    def _build_now(
        self,
        to_build: Sequence[Candidate],
        wanted: Sequence[Candidate],
        most_late: int = 0,
        limit_s: float | None = None,
    ) -> Steps[list[Candidate]]:
        """Build candidates. Return, of those ``wanted``, the ones whose builds are not done when only ``most_late`` are
        left, and one of each template was built or tried before; or after ``limit_s`` seconds without a build.

        This takes no time of the default budget, because one build serves many problems: none where all are among the
        first, which wait for the start of the builders, and else as ``TimeBudget.excludable_s`` says. What other work
        takes meanwhile is no time of this budget either.
        """
        start, others_s = time.perf_counter(), 0.0
        if self._build is not None and to_build:
            self._builds |= self._build(self._context.problem, to_build, self._context.target)
        builds = {candidate.id: self._builds[candidate.id] for candidate in wanted if candidate.id in self._builds}
        pending = {build for build in builds.values() if not build.done()}
        while len(pending) > most_late or self._without_any(wanted, builds, pending):
            others_s += yield from self._pause(Pause(frozenset(pending), limit_s))
            done = {build for build in pending if build.done()}
            if not done:
                break
            pending -= done
        self._budget.exclude(others_s, limited=False)
        if not self._budget.strict:
            is_first = self._first.issuperset(builds)
            self._budget.exclude(time.perf_counter() - start - others_s, limited=not is_first)
        return [candidate for candidate in wanted if builds.get(candidate.id) in pending]

    def _pause(self, pause: Pause) -> Steps[float]:
        """Wait, and leave the worker to other work meanwhile. Return the seconds that it took."""
        self._worker.pause()
        try:
            others_s = yield pause
        finally:
            self._worker.resume(self._context.problem)
        self._context.others_s += others_s
        return others_s

    def _without_any(
        self,
        wanted: Sequence[Candidate],
        builds: Mapping[str, Future[Artifact | Verdict]],
        pending: Collection[Future[Artifact | Verdict]],
    ) -> bool:
        """Whether all candidates of a template are still being built, and none was tried: a backend that builds slowly
        must not lose because others build fast."""
        late = {template_of(candidate) for candidate in wanted if builds.get(candidate.id) in pending}
        built = {template_of(candidate) for candidate in wanted if builds.get(candidate.id) not in pending}
        return not late <= built | self._templates_tried

    def _built(
        self, wanted: Sequence[Candidate], search: Searcher, is_last: bool
    ) -> Steps[tuple[list[Candidate], list[Candidate]]]:
        """Return those of the wanted candidates whose build succeeded, and those that are still being built: none, or,
        where builds disturb no timing, up to half of them. is_last: whether the search asks for no others; builds are
        then waited for in the time for exploring, and in that for builds which is not counted.

        Builders that would be idle meanwhile build the candidates that the search may ask for next, unless these are
        built while others are timed.
        """
        to_build = [candidate for candidate in wanted if candidate.id not in self._builds]
        fills = to_build and self._profile.builds_overlap and self._build_ahead is None
        idle_builders = -len(to_build) % len(allowed_cpus()) if fills else 0
        if idle_builders:
            to_build += [candidate for candidate in search.likely if candidate.id not in self._builds][:idle_builders]
        if is_last:
            left_s = max(0.0, EXPLORE_END * self._budget.seconds - self._budget.elapsed_s)
            left_s += 0.0 if self._budget.strict else self._budget.excludable_s
            late = yield from self._build_now(to_build, wanted, len(wanted) - 1, None if left_s == math.inf else left_s)
        else:
            most_late = 0 if self._build_ahead is None else len(wanted) // 2
            late = yield from self._build_now(to_build, wanted, most_late)
        ready = list[Candidate]()
        for candidate in wanted:
            build = self._builds.get(candidate.id)
            if candidate in late:
                continue
            if build is not None and isinstance(failure := build.result(), Verdict):
                self._context.fail(self._ledger[candidate.id], failure)
                search.tell(candidate.id, None)
            else:
                ready.append(candidate)
        return ready, late

    def _forget_failures(self) -> list[Candidate]:
        """Return the candidates without those whose failure the store remembers: on this problem, or at any M of its
        Plan when the candidate itself was at fault."""
        failures = self._context.store.failures(self._context.target, self._context.problem.plan_key)
        failures |= self._context.store.failures(self._context.target, self._context.problem.key)
        for candidate in self._candidates:
            if candidate.id in failures:
                verdict = failures[candidate.id]
                self._ledger.fail(candidate.id, verdict, f"not tried again: {verdict.kind} before")
        return [candidate for candidate in self._candidates if candidate.id not in failures]

    def _must_stop(self, candidate: Candidate) -> bool:
        """Whether exploring ends before ``candidate``, which it never does before one of ATen's (see ``_must_skip``).

        Some others are tried in any case, unless that takes far more than the budget.
        """
        if candidate.backend == BASELINE_BACKEND:
            return False
        share_spent = self._budget.share_spent
        if self._budget.strict:
            too_late = share_spent > EXPLORE_END and (self._others_of_search >= MIN_OTHERS or share_spent > CONFIRM_END)
            return self._others_tried > 0 and (
                too_late or self._budget.elapsed_s + self._context.reserve_s() > self._budget.seconds
            )
        # Twice that for the others: one candidate of ATen's that is slow beyond reason must not leave it without a
        # rival.
        return share_spent > EXPLORE_END and (self._others_of_search >= MIN_OTHERS or share_spent > 2 * DEFAULT_OVERRUN)

    def _must_skip(self, candidate: Candidate) -> bool:
        """Whether a candidate of ATen's is skipped, because ATen's further candidates must leave time for a rival."""
        end = ATEN_END if self._budget.strict else DEFAULT_OVERRUN
        if candidate.backend != BASELINE_BACKEND or self._budget.share_spent < end:
            return False
        if self._ledger.best(is_baseline=True) is None:
            return False
        self._ledger[candidate.id].reason = "the share of the budget for ATen's candidates was spent before its turn"
        return True

    def _attempt(self, candidate: Candidate) -> Row:
        start = time.perf_counter()
        result = self._worker.attempt(candidate, self._deadline_s(candidate), self._cutoff_s(candidate))
        row = self._ledger[candidate.id]
        row.stage, row.verdict, row.packing = "screened", result.verdict, result.packing
        row.packing_s, row.workspace_bytes, row.times_s = result.packing_s, result.workspace_bytes, result.times_s
        self._others_tried += candidate.backend != BASELINE_BACKEND
        self._others_of_search += candidate.backend != BASELINE_BACKEND and candidate.id not in self._in_layouts
        self._templates_tried.add(template_of(candidate))
        if result.verdict is None:
            row.reason = f"{row.screening_s / self._context.best_s:.1f}x the best screening time: not worth checking"
        elif not result.verdict.ok:
            row.times_s = ()
            self._context.fail(row, result.verdict)
        if row.times_s:
            elapsed_s = time.perf_counter() - start
            calls_s = sum(seconds for seconds in row.times_s if seconds < FIRST_CALL_S)
            elapsed_s -= self._exclude_setting_up(candidate, elapsed_s - calls_s)
            overhead_s = max(0.0, elapsed_s / len(row.times_s) - row.screening_s)
            self._context.overhead_s = (
                min(self._context.overhead_s, overhead_s) if self._context.slowest_s else overhead_s
            )
            self._context.slowest_s = max(self._context.slowest_s, elapsed_s)
        return row

    def _exclude_setting_up(self, candidate: Candidate, setup_s: float) -> float:
        """Do not count what an attempt that has just ended set up, and return the seconds (see ``SETTING_UP_S``).
        setup_s: the attempt's seconds without those of its calls."""
        sets_up = candidate.backend == BASELINE_BACKEND and self._build_ahead is not None and setup_s > SETTING_UP_S
        if self._budget.strict or not sets_up:
            return 0.0
        seconds = min(setup_s, self._setting_up_left_s)
        self._setting_up_left_s -= seconds
        self._budget.exclude(seconds)
        return seconds

    def _deadline_s(self, candidate: Candidate) -> float | None:
        """Return the seconds that the first trial of a candidate may take; None for the worker's own limit."""
        return (
            self._context.deadline_s(ATEN_PATIENCE)
            if candidate.backend == BASELINE_BACKEND
            else self._context.deadline_s()
        )

    def _cutoff_s(self, candidate: Candidate) -> float | None:
        """Return the screening time in seconds beyond which a candidate has no chance in a race.

        None while there is no time to compare with.
        """
        if candidate.backend == BASELINE_BACKEND:
            baseline = self._ledger.best(is_baseline=True)
            return CLOSE_BASELINE * baseline.screening_s if baseline is not None else None
        return CLOSE * self._context.best_s if self._context.best_s else None

    def _report_tried(self, row: Row, candidates_left: int) -> None:
        median_s = row.screening_s if row.times_s else None
        self._context.progress(CandidateTried(row.id, row.verdict, median_s, candidates_left))
        if median_s is not None and (not self._context.best_s or median_s < self._context.best_s):
            self._context.best_s = median_s
            baseline = self._ledger.best(is_baseline=True)
            self._context.progress(
                BestSoFar(row.id, median_s, median_s / baseline.screening_s if baseline is not None else 1.0)
            )

    def _candidates_left(self, listed: int, tried: int) -> int:
        """Return how many candidates are still to come: those that the search has listed, limited to the number that
        the remaining time for exploring allows."""
        remaining_s = max(0.0, EXPLORE_END - self._budget.share_spent) * self._budget.seconds
        each_s = self._budget.share_spent * self._budget.seconds / tried
        return min(listed, int(remaining_s / each_s) + 1 if each_s > 0 else listed)


def first_builds(problem: Problem, candidates: Iterable[Candidate], target: Target, count: int) -> list[Candidate]:
    """Return the candidates to build first: the first ``count`` of each template that needs building, the first of each
    template first.

    The search asks for them, a few at a time, in about this order, but for those of templates that are far behind.
    """
    firsts: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in candidates:
        backend = backends.get(candidate.backend)
        if not backend.is_prebuilt or backend.compiles_in_calls(problem, candidate, target):
            firsts.setdefault((candidate.backend, candidate.template), []).append(candidate)
    waves = itertools.zip_longest(*(group[:count] for group in firsts.values()))
    return [candidate for wave in waves for candidate in wave if candidate is not None]
