"""Guided search with an ask-and-tell interface: seeds of every template, then the neighbours of the leaders."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ..core.candidate import Candidate, Scalar
from .candidates import BASELINE_BACKEND

Template = tuple[str, str]

_BETTER = 0.99
_LEAST_WAVE = 4  # seeds of a wave


class LocalSearch:
    """A guided search, which decides from the times so far which candidates to try next.

    It is deterministic for a given seed and given times. All baselines (ATen's candidates) come first, then those of
    ``first``. Then come the first ``seeds`` of each (backend, template), in turns of about four candidates or more,
    skipping the remainder of a template that is hopeless: the best of its first two took over ``hopeless`` times as
    long as the best of all, or that of its first four over ``behind`` times. Then comes, around the ``leaders``
    fastest, every legal candidate that differs in one config entry (sizes: by one legal step). While the best has
    improved by 1% within the last ``patience`` candidates, the search continues in small batches: around four times as
    many leaders (screening times can rank the true best below the first few), then ``explore`` random ones from
    templates that are not hopeless. The search ends when all of these are tried, or after ``limit`` candidates.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        *,
        first: Sequence[Candidate] = (),
        seed: int = 0,
        seeds: int = 5,
        leaders: int = 3,
        explore: int = 4,
        patience: int = 24,
        hopeless: float = 2.0,
        behind: float = 2.0,
        limit: int | None = None,
    ) -> None:
        self._rank = {candidate.id: rank for rank, candidate in enumerate(candidates)}
        self._by_id = {candidate.id: candidate for candidate in candidates}
        self._neighbours = _Neighbours(candidates)
        self._random = random.Random(seed)
        self._leaders, self._explore, self._patience = leaders, explore, patience
        self._most_behind = ((2, hopeless), (4, behind))
        self._budget_left = len(self._by_id) if limit is None else limit
        self._asked: set[str] = set()
        self._times: dict[str, float] = {}
        self._times_by_template: dict[Template, list[float]] = defaultdict(list)
        self._best, self._since_better = float("inf"), 0
        self._baselines = [c for c in candidates if c.backend == BASELINE_BACKEND]
        self._first = list(first)
        self._seeds = _seed_waves([c for c in candidates if c.backend != BASELINE_BACKEND], seeds)

    def ask(self) -> list[Candidate] | None:
        """Return the next candidates to time, or None when the search is over."""
        for wave in self._waves():
            batch = [candidate for candidate in wave if candidate.id not in self._asked][: self._budget_left]
            if batch:
                self._budget_left -= len(batch)
                self._asked.update(candidate.id for candidate in batch)
                return batch
        return None

    def tell(self, candidate_id: str, seconds: float | None) -> None:
        """Record the time of one candidate that was asked for; None when it failed. Raises KeyError for an unknown
        id."""
        candidate = self._by_id[candidate_id]
        self._times_by_template[template_of(candidate)].append(float("inf") if seconds is None else seconds)
        self._since_better += 1
        if seconds is not None:
            self._times[candidate_id] = seconds
            if seconds < _BETTER * self._best:
                self._best, self._since_better = seconds, 0

    @property
    def left(self) -> int:
        """The number of candidates that the search may still ask for, by the present ranking (it grows with new
        leaders' neighbours)."""
        expected = {c.id for c in (*self._baselines, *self._first)}
        expected |= {c.id for wave in self._seeds for c in self._without_hopeless(wave)}
        expected |= {c.id for leader in self._ranking()[: self._leaders] for c in self._neighbours.of(leader)}
        return min(self._budget_left, len(expected - self._asked))

    @property
    def likely(self) -> list[Candidate]:
        """The candidates that the search may ask for next, the likeliest first, without those chosen at random. Those
        around further leaders are among them only when there are no others: most searches end before.

        In a replay of 32 searches (fp8 and int8 weights, H200; a script that was not kept) 194 kernels are built for
        the four M of a weight, 274 with all of them, half of which were not asked for.
        """
        seeds = [self._first, *(self._without_hopeless(wave) for wave in self._seeds)]
        near = self._not_asked([*seeds, *self._around(self._leaders)])
        return near or self._not_asked(self._around(4 * self._leaders))

    def _not_asked(self, waves: Iterable[list[Candidate]]) -> list[Candidate]:
        """Return the candidates of some waves that were not asked for, each once."""
        candidates = {candidate.id: candidate for wave in waves for candidate in wave}
        return [candidate for name, candidate in candidates.items() if name not in self._asked]

    def _waves(self) -> Iterator[list[Candidate]]:
        """Yield the candidates that may be asked for next, the most promising first."""
        yield self._baselines
        yield self._first
        for wave in self._seeds:
            yield self._without_hopeless(wave)
        yield from self._around(self._leaders)
        if self._since_better < self._patience:
            for wave in self._around(4 * self._leaders):
                yield [c for c in self._without_hopeless(wave) if c.id not in self._asked][: self._explore]
            yield self._random_picks()

    def _around(self, leaders: int) -> Iterator[list[Candidate]]:
        for leader in self._ranking()[:leaders]:
            yield sorted(self._neighbours.of(leader), key=lambda candidate: self._rank[candidate.id])

    def _ranking(self) -> list[Candidate]:
        """Return the timed candidates that have neighbours to offer, fastest first."""
        ids = sorted(self._times, key=lambda name: (self._times[name], self._rank[name]))
        return [self._by_id[name] for name in ids if self._by_id[name].backend != BASELINE_BACKEND]

    def _random_picks(self) -> list[Candidate]:
        remaining = [c for name, c in self._by_id.items() if name not in self._asked]
        remaining = self._without_hopeless(remaining)
        return self._random.sample(remaining, min(self._explore, len(remaining)))

    def _without_hopeless(self, candidates: list[Candidate]) -> list[Candidate]:
        """Return the candidates without those of a template whose times have shown that it is far from the best."""
        best = min(self._times.values(), default=float("inf"))
        return [c for c in candidates if not self._is_hopeless(template_of(c), best)]

    def _is_hopeless(self, template: Template, best: float) -> bool:
        times = self._times_by_template.get(template, [])
        return any(len(times) >= count and min(times) > ratio * best for count, ratio in self._most_behind)


class _Neighbours:
    """The neighbours of a candidate: legal candidates that differ in a single config entry, sizes by one step among the
    legal ones."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates_by_line: dict[tuple[object, ...], list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            for name, _ in candidate.config:
                self._candidates_by_line[_line(candidate, name)].append(candidate)

    def of(self, candidate: Candidate) -> list[Candidate]:
        neighbours: dict[str, Candidate] = {}
        for name, value in candidate.config:
            line = self._candidates_by_line[_line(candidate, name)]
            near = _adjacent(line, name, value) if _is_number(value) else line
            neighbours.update((other.id, other) for other in near)
        neighbours.pop(candidate.id, None)
        return list(neighbours.values())


def _line(candidate: Candidate, name: str) -> tuple[object, ...]:
    """Return the key of the line of candidates that agree in every entry except ``name``."""
    other_entries = tuple((key, value) for key, value in candidate.config if key != name)
    return (candidate.backend, candidate.template, name, other_entries)


def _adjacent(line: list[Candidate], name: str, value: Scalar) -> list[Candidate]:
    below = [c for c in line if _is_number(c[name]) and c[name] < value]  # type: ignore[operator]
    above = [c for c in line if _is_number(c[name]) and c[name] > value]  # type: ignore[operator]
    # Zero and negative values are switches ("all of K", "the next block"), not sizes, so that each is a neighbour of
    # every value.
    nearest = [c for c in (*below, *above) if float(c[name]) <= 0]
    if below:
        nearest.append(max(below, key=lambda c: float(c[name])))
    if above:
        nearest.append(min(above, key=lambda c: float(c[name])))
    return nearest


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def template_of(candidate: Candidate) -> Template:
    """Return the backend and the template of a candidate."""
    return (candidate.backend, candidate.template)


def _seed_waves(candidates: Sequence[Candidate], seeds: int) -> list[list[Candidate]]:
    """Return waves of candidates: wave i has the i-th candidate of every template, so that a short budget still tries
    some of each. With few templates a wave has several of each: those of a wave are built at once."""
    groups: dict[Template, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        groups[template_of(candidate)].append(candidate)
    each = max(1, _LEAST_WAVE // max(1, len(groups)))
    return [
        [candidate for group in groups.values() for candidate in group[i : min(i + each, seeds)]]
        for i in range(0, seeds, each)
    ]
