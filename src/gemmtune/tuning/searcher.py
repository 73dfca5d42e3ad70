"""The contract of search strategies.

A strategy decides which candidates of a Problem are tried, in which order, and when to stop. It never builds, verifies
or times anything, and it never sees a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.candidate import Candidate
from ..core.devices import TuningProfile


@dataclass(frozen=True)
class SearchOptions:
    """What a strategy is told besides the candidates.

    first: candidates to try before others. seed: for random choices; the same seed and times must give the same order.
    limit: the most candidates to ask for; None for any number. profile: constants of tuning on the kind of device that
    runs them.
    """

    first: Sequence[Candidate] = ()
    seed: int = 0
    limit: int | None = None
    profile: TuningProfile = field(default_factory=TuningProfile)


class Searcher(Protocol):
    """A strategy at work on one Problem. The tuner calls ``ask``, then ``tell`` for each candidate of the batch."""

    def ask(self) -> list[Candidate] | None:
        """Return the next candidates to time, none of them twice; None when the search is over."""

    def tell(self, candidate_id: str, seconds: float | None) -> None:
        """Take the screening time of a candidate that was asked for; None when it failed or was skipped."""

    @property
    def left(self) -> int:
        """An estimate of how many candidates are still to come, for the progress bar."""

    @property
    def likely(self) -> list[Candidate]:
        """The candidates that are likely to be asked for next, the likeliest first. Builders make them ahead; an empty
        list is always right."""


SearcherFactory = Callable[[Sequence[Candidate], SearchOptions], Searcher]
