"""The types of a check and its outcome, and the registry of all checks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# The import of each module registers its checks.
MODULES = (
    "racing", "kernels", "verifying", "faults", "workers", "storing", "hostile_data", "forging", "commands", "serving",
    "every_m",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Outcome of a check: the report's text (``measured``), whether the bar holds (``ok``), and raw data (``data``)."""

    measured: str
    ok: bool
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """Check of one property, a row of the report.

    ``subject`` and ``bar`` are the row's first two columns. ``run(full)`` runs the check at full size, or at a size
    that takes a few seconds. A ``timed`` check times real work, so that only ``make reliability`` runs it.
    """

    name: str
    subject: str
    bar: str
    run: Callable[[bool], Outcome]
    timed: bool = False


_MAX_FINDINGS = 5  # how many findings the text has; the raw data has all


def findings_text(wrong: Sequence[str]) -> str:
    """Return the first findings as text; empty if there are none."""
    return "" if not wrong else ": " + "; ".join(wrong[:_MAX_FINDINGS])


_CHECKS: dict[str, Check] = {}


def check(subject: str, bar: str, *, timed: bool = False) -> Callable[[Callable[[bool], Outcome]], Check]:
    """Register the decorated function (its name, with dashes) as a check."""

    def register(run: Callable[[bool], Outcome]) -> Check:
        registered = Check(run.__name__.replace("_", "-"), subject, bar, run, timed)
        assert registered.name not in _CHECKS, f"two checks are called {registered.name}"
        _CHECKS[registered.name] = registered
        return registered

    return register


def all_checks() -> dict[str, Check]:
    """Return every check by its name, in the order of ``MODULES``."""
    for module in MODULES:
        importlib.import_module(f"reliability.{module}")
    return dict(_CHECKS)
