"""Guided search by ask and tell: seeds of every template, then the neighbours of the leaders."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ..core.candidate import Candidate, Scalar
from .candidates import BASELINE_BACKEND

Template = tuple[str, str]

_BETTER = 0.99


class Search:
    """Decides what to try next from the times so far. Deterministic for a given seed and given answers.

    The incumbent's candidates all come first, then those of ``first``. Then the first ``seeds`` of each (backend,
    template), in turns, skipping the rest of a template whose first two came out ``hopeless`` times slower than the
    best. Then, around the ``leaders`` fastest, every legal candidate that differs in one config entry (sizes: by one
    legal step). While the best has become better by 1% within the last ``patience`` candidates, it goes on a few at a
    time: around four times as many leaders (rough times can rank the true best below the first few), then ``explore``
    random ones from templates that are not hopeless. It ends when none of that is left to try, or after ``limit``
    candidates.
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
        limit: int | None = None,
    ) -> None:
        self._rank = {candidate.id: rank for rank, candidate in enumerate(candidates)}
        self._by_id = {candidate.id: candidate for candidate in candidates}
        self._neighbours = _Neighbours(candidates)
        self._random = random.Random(seed)
        self._leaders, self._explore, self._patience, self._hopeless = leaders, explore, patience, hopeless
        self._left = len(self._by_id) if limit is None else limit
        self._asked: set[str] = set()
        self._times: dict[str, float] = {}
        self._told: dict[Template, list[float]] = defaultdict(list)
        self._best, self._since_better = float("inf"), 0
        self._incumbents = [c for c in candidates if c.backend == BASELINE_BACKEND]
        self._first = list(first)
        self._seeds = _seed_waves([c for c in candidates if c.backend != BASELINE_BACKEND], seeds)

    def ask(self) -> list[Candidate] | None:
        """The next candidates to time, or None when the search is over."""
        for wave in self._waves():
            batch = [candidate for candidate in wave if candidate.id not in self._asked][: self._left]
            if batch:
                self._left -= len(batch)
                self._asked.update(candidate.id for candidate in batch)
                return batch
        return None

    def tell(self, candidate_id: str, seconds: float | None) -> None:
        """The time of one candidate that was asked for; None when it failed. Raises KeyError for an unknown id."""
        candidate = self._by_id[candidate_id]
        self._told[_template(candidate)].append(float("inf") if seconds is None else seconds)
        self._since_better += 1
        if seconds is not None:
            self._times[candidate_id] = seconds
            if seconds < _BETTER * self._best:
                self._best, self._since_better = seconds, 0

    @property
    def left(self) -> int:
        """How many more it may ask for, as far as is known now (it grows with new leaders' neighbours)."""
        known = {c.id for c in (*self._incumbents, *self._first)}
        known |= {c.id for wave in self._seeds for c in self._worth(wave)}
        known |= {c.id for leader in self._ranking()[: self._leaders] for c in self._neighbours.of(leader)}
        return min(self._left, len(known - self._asked))

    @property
    def likely(self) -> list[Candidate]:
        """What it may ask for next, the likeliest first, as far as that does not hang on chance."""
        waves = [self._first, *(self._worth(wave) for wave in self._seeds), *self._around(4 * self._leaders)]
        found = {candidate.id: candidate for wave in waves for candidate in wave}
        return [candidate for name, candidate in found.items() if name not in self._asked]

    def _waves(self) -> Iterator[list[Candidate]]:
        """What may be asked next, the most worthwhile first."""
        yield self._incumbents
        yield self._first
        for wave in self._seeds:
            yield self._worth(wave)
        yield from self._around(self._leaders)
        if self._since_better < self._patience:
            for wave in self._around(4 * self._leaders):
                yield [c for c in self._worth(wave) if c.id not in self._asked][: self._explore]
            yield self._random_picks()

    def _around(self, leaders: int) -> Iterator[list[Candidate]]:
        for leader in self._ranking()[:leaders]:
            yield sorted(self._neighbours.of(leader), key=lambda candidate: self._rank[candidate.id])

    def _ranking(self) -> list[Candidate]:
        """The timed candidates that have neighbours to offer, fastest first."""
        ids = sorted(self._times, key=lambda name: (self._times[name], self._rank[name]))
        return [self._by_id[name] for name in ids if self._by_id[name].backend != BASELINE_BACKEND]

    def _random_picks(self) -> list[Candidate]:
        rest = [c for name, c in self._by_id.items() if name not in self._asked]
        rest = self._worth(rest)
        return self._random.sample(rest, min(self._explore, len(rest)))

    def _worth(self, candidates: list[Candidate]) -> list[Candidate]:
        """Without those of a template that has shown, twice, to be far from the best."""
        best = min(self._times.values(), default=float("inf"))
        return [c for c in candidates if not self._is_hopeless(_template(c), best)]

    def _is_hopeless(self, template: Template, best: float) -> bool:
        told = self._told.get(template, [])
        return len(told) >= 2 and min(told) > self._hopeless * best


class _Neighbours:
    """Which legal candidates differ from one in a single config entry, sizes by one step among the legal ones."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._lines: dict[tuple[object, ...], list[Candidate]] = defaultdict(list)
        for candidate in candidates:
            for name, _ in candidate.config:
                self._lines[_line(candidate, name)].append(candidate)

    def of(self, candidate: Candidate) -> list[Candidate]:
        found: dict[str, Candidate] = {}
        for name, value in candidate.config:
            line = self._lines[_line(candidate, name)]
            near = _adjacent(line, name, value) if _is_number(value) else line
            found.update((other.id, other) for other in near)
        found.pop(candidate.id, None)
        return list(found.values())


def _line(candidate: Candidate, name: str) -> tuple[object, ...]:
    """Names the line of candidates that agree in everything but the entry ``name``."""
    rest = tuple((key, value) for key, value in candidate.config if key != name)
    return (candidate.backend, candidate.template, name, rest)


def _adjacent(line: list[Candidate], name: str, value: Scalar) -> list[Candidate]:
    below = [c for c in line if _is_number(c[name]) and c[name] < value]  # type: ignore[operator]
    above = [c for c in line if _is_number(c[name]) and c[name] > value]  # type: ignore[operator]
    # Zero and negative values are switches ("all of K", "the next block"), not sizes: no step leads to them.
    nearest = [c for c in (*below, *above) if float(c[name]) <= 0]
    if below:
        nearest.append(max(below, key=lambda c: float(c[name])))
    if above:
        nearest.append(min(above, key=lambda c: float(c[name])))
    return nearest


def _is_number(value: Scalar) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _template(candidate: Candidate) -> Template:
    return (candidate.backend, candidate.template)


def _seed_waves(candidates: Sequence[Candidate], seeds: int) -> list[list[Candidate]]:
    """Wave i holds the i-th candidate of every template: a short budget still sees something of each."""
    groups: dict[Template, list[Candidate]] = defaultdict(list)
    for candidate in candidates:
        groups[_template(candidate)].append(candidate)
    return [[group[i] for group in groups.values() if i < len(group)] for i in range(seeds)]
