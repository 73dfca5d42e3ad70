"""The M that a weight is tuned for: a range, and the M of it that are tuned by themselves.

Batched products may be tuned for a range of their batch instead: what is called M here is then the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ..core.devices import TuningProfile
from ..core.problem import Dim, Problem

Sizes = Literal["all"] | range | Sequence[int]
"""``"all"``; a ``range`` of M with step 1; or hints: M that are tuned, where all M are to be served."""

_NAMES: Mapping[Dim, str] = {"m": "M", "batch": "batches"}
_NEAR = 2.5  # a default M within this factor of one that is tuned anyway is left out
_NEAR_END = 4.5  # the same for an end of the range


class KeyRun(NamedTuple):
    """Consecutive M, from ``first`` to ``last``, that have one key (``config_keys.py``)."""

    first: int
    last: int
    key: int


class SizeRange(NamedTuple):
    """The M from ``first`` to ``last``, and those among them that are tuned by themselves, ascending.

    runs, config_key: where keys divide the range, the runs of M with one key, and the name of the ``config_key``. dim:
    the dimension whose sizes are called M.
    """

    first: int
    last: int
    tuned: tuple[int, ...]
    runs: tuple[KeyRun, ...] = ()
    config_key: str = ""
    dim: Dim = "m"

    def at(self, problem: Problem, m: int) -> Problem:
        """Return a Problem of the weight at another M."""
        return problem.with_size(self.dim, m)


def parse_sizes(
    m: Sizes, profile: TuningProfile, recorded: Iterable[int] = (), problem: Problem | None = None, dim: Dim = "m"
) -> SizeRange:
    """Return the SizeRange that a user's ``m`` stands for; with the dim "batch", a user's ``batch``.

    recorded: M that a model ran at. They are tuned too, and extend the range of ``"all"`` and of hints. problem: one of
    the weight's; of a batched product, whose operands grow with M and with the batch, ``"all"`` and hints have a range
    in which they take ``batched_bytes`` at most. Raises TypeError and ValueError for an ``m`` that is none of
    ``Sizes``.
    """
    recorded = sorted({size for size in recorded if size > 0})
    usual_last, usual = _defaults(profile, problem, dim)
    if isinstance(m, str):
        if m != "all":
            raise ValueError(f'{dim} must be "all", a range or a sequence of int; got {m!r}')
        first, last, hints = 1, max(usual_last, *recorded, 1), list(recorded)
    elif isinstance(m, range):
        if m.step != 1 or len(m) == 0 or m.start < 1:
            raise ValueError(
                f"a range of {_NAMES[dim]} must have step 1, begin at 1 or later and not be empty; got {m!r}"
            )
        first, last = m.start, m.stop - 1
        hints = [size for size in recorded if first <= size <= last]
    else:
        hints = _require_hints(m, dim)
        first, last = 1, max(usual_last, *hints, *recorded)
        return SizeRange(first, last, tuple(sorted({*hints, *recorded})), dim=dim)
    return SizeRange(first, last, _with_defaults(first, last, hints, usual), dim=dim)


def _defaults(profile: TuningProfile, problem: Problem | None, dim: Dim) -> tuple[int, tuple[int, ...]]:
    """Return the last M of the range ``"all"``, and the M that are tuned by default."""
    last, usual = (profile.last_m, profile.tuned_m) if dim == "m" else (profile.last_batch, profile.tuned_batches)
    if problem is None or not problem.is_batched:
        return last, usual
    first, second = (problem.with_size(dim, size).min_bytes for size in (1, 2))
    most = 1 + max(0, profile.batched_bytes - first) // max(1, second - first)
    return min(last, most), usual


def _require_hints(m: Sequence[int], dim: Dim) -> list[int]:
    sizes = list(m) if isinstance(m, Iterable) else None
    if sizes is None or not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f'{dim} must be "all", a range or a sequence of int; got {m!r}')
    if not sizes or min(sizes) < 1:
        raise ValueError(f"hints for {_NAMES[dim]} must be positive, and there must be one at least; got {m!r}")
    return sizes


def _with_defaults(first: int, last: int, hints: list[int], usual: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``hints`` with the ``usual`` M between ``first`` and ``last`` that are near none of them, and with the two
    ends where nothing else is near them."""
    sizes = list(hints)
    for size, factor in (*((size, _NEAR) for size in usual), (first, _NEAR_END), (last, _NEAR_END)):
        if first <= size <= last and all(max(size, other) >= factor * min(size, other) for other in sizes):
            sizes.append(size)
    return tuple(sorted(sizes or [last]))
