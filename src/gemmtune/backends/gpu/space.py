"""Search spaces in the order of a guess at their times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...core.candidate import Candidate, Illegal, is_same

Config = dict[str, Any]


def narrowed(axes: Mapping[str, Sequence[Any]], only: Config | None) -> list[Sequence[Any]]:
    """Return the values of every entry of a space; with ``only``, no more of them than that config's own."""
    if only is None:
        return list(axes.values())
    return [[value for value in values if is_same(only.get(name), value)] for name, values in axes.items()]


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
