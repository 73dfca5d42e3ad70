"""Search spaces in the order of a guess at their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ..base import Candidate, Illegal

Config = dict[str, Any]


def ranked(
    backend: str,
    template: str,
    configs: Iterable[Config],
    illegal: Callable[[Config], str],
    seconds: Callable[[Config], float],
) -> tuple[list[Candidate], list[Illegal]]:
    """The legal candidates of a template, fastest by the guess first, and the others with why they are not."""
    legal: list[tuple[float, int, Candidate]] = []
    refused: list[Illegal] = []
    for place, config in enumerate(configs):
        candidate, why = Candidate.make(backend, template, **config), illegal(config)
        if why:
            refused.append(Illegal(candidate, why))
        else:
            legal.append((seconds(config), place, candidate))
    legal.sort(key=lambda item: item[:2])
    return [candidate for _, _, candidate in legal], refused
