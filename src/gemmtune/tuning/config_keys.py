"""The option ``config_key``, which coarsens M: all M of a range that have one key share one kernel, that of the M that
represents the key."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Literal

from .sizes import KeyRun, SizeRange, Sizes

ConfigKey = Literal["exact", "power_of_2"] | Callable[[int], int]
"""``"exact"``: each tuned M is its own key. ``"power_of_2"``: the key of M is the next power of two. Or a function that
returns the key of an M."""

NAMES = ("exact", "power_of_2")
MAX_RUNS = 256  # of consecutive M with one key


def require_keyed_range(config_key: object, m: Sizes | None) -> None:
    """Raise ValueError for an unknown name and without a range of M, TypeError for what is neither a name, a function
    nor None."""
    allowed = f"config_key must be None, {', '.join(map(repr, NAMES))} or a function of M that returns an int"
    if isinstance(config_key, str):
        if config_key not in NAMES:
            raise ValueError(f"{allowed}; got {config_key!r}")
    elif config_key is not None and not callable(config_key):
        raise TypeError(f"{allowed}; got {type(config_key).__name__}")
    if config_key is not None and m is None:
        raise ValueError("config_key divides a range of M: it needs m, which is None")


def keyed(sizes: SizeRange, config_key: ConfigKey | None) -> SizeRange:
    """Return the range with the runs of its keys, tuned at the M that represent them; the range as it is for None.

    ``"exact"`` has no runs, and tunes the same M as None. Raises TypeError when a function returns no int, ValueError
    when there are more than ``MAX_RUNS`` runs, and what the function raises.
    """
    if config_key is None:
        return sizes
    if config_key == "exact":
        return sizes._replace(config_key="exact")
    if config_key == "power_of_2":
        runs, name = _runs(_power_of_2, sizes.first, sizes.last), "power_of_2"
    else:
        runs, name = _runs(_checked(config_key), sizes.first, sizes.last), _function_name(config_key)
    return sizes._replace(tuned=tuple(sorted(set(representatives(runs).values()))), runs=runs, config_key=name)


def representatives(runs: Iterable[KeyRun]) -> dict[int, int]:
    """Return the M that represents each key: the key itself where one of its runs has it, else the last M of its first
    run."""
    chosen: dict[int, int] = {}
    for run in runs:
        if run.first <= run.key <= run.last:
            chosen[run.key] = run.key
        else:
            chosen.setdefault(run.key, run.last)
    return chosen


def _power_of_2(m: int) -> int:
    return 1 << (m - 1).bit_length()


def _checked(function: Callable[[int], int]) -> Callable[[int], int]:
    def key_of(m: int) -> int:
        key = function(m)
        if not isinstance(key, int) or isinstance(key, bool):
            raise TypeError(f"config_key must return an int for each M; for M = {m} it returned {key!r}")
        return key

    return key_of


def _runs(key_of: Callable[[int], int], first: int, last: int) -> tuple[KeyRun, ...]:
    """Return the runs of M with one key. Raises ValueError when there are more than ``MAX_RUNS``."""
    runs = []
    for key, group in groupby(range(first, last + 1), key_of):
        sizes = list(group)
        runs.append(KeyRun(sizes[0], sizes[-1], key))
    if len(runs) > MAX_RUNS:
        raise ValueError(
            f"config_key divides M from {first} to {last} into {len(runs)} runs of one key; {MAX_RUNS} are the most: "
            "give more neighboring M the same key, or tune a shorter range of m"
        )
    return tuple(runs)


def _function_name(function: Callable[[int], int]) -> str:
    """Return ``module.name`` of a function; of the type, for another object that can be called."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"
