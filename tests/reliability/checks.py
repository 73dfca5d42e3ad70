"""What a check is, and the list of them all."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# A room's checks register themselves when its module is imported.
ROOMS = (
    "racing", "kernels", "verifying", "faults", "workers", "storing", "hostile_data", "forging", "commands", "serving",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """measured: the figures in words, as the report prints them. ok: whether the bar holds. data: raw, for JSON."""

    measured: str
    ok: bool
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """what, bar: the row's first two columns. timed: it times real work, so that only ``make reliability`` runs it.

    run(full): the check, at its full size or at one that takes a few seconds.
    """

    name: str
    what: str
    bar: str
    run: Callable[[bool], Outcome]
    timed: bool = False


_CHECKS: dict[str, Check] = {}


def check(what: str, bar: str, *, timed: bool = False) -> Callable[[Callable[[bool], Outcome]], Check]:
    """Register the decorated function (its name, with dashes) as a check."""

    def register(run: Callable[[bool], Outcome]) -> Check:
        made = Check(run.__name__.replace("_", "-"), what, bar, run, timed)
        assert made.name not in _CHECKS, f"two checks are called {made.name}"
        _CHECKS[made.name] = made
        return made

    return register


def all_checks() -> dict[str, Check]:
    """Every check by its name, room by room."""
    for room in ROOMS:
        importlib.import_module(f"reliability.{room}")
    return dict(_CHECKS)
