"""Search spaces, ordered by the estimated time of their configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ...core.candidate import Candidate, Illegal, is_same

Config = dict[str, Any]


def axis_values(axes: Mapping[str, Sequence[Any]], only: Config | None) -> list[Sequence[Any]]:
    """Return the values of every axis of a space; with ``only``, just that config's value of each axis (none where the
    axis does not have it)."""
    if only is None:
        return list(axes.values())
    return [[value for value in values if is_same(only.get(name), value)] for name, values in axes.items()]


def rank_configs(
    backend: str,
    template: str,
    configs: Iterable[Config],
    why_illegal: Callable[[Config], str],
    seconds: Callable[[Config], float],
) -> tuple[list[Candidate], list[Illegal]]:
    """Return the legal candidates of a template, fastest by the estimate first, and the illegal ones with their
    reasons.

    why_illegal: returns why a config is illegal, or empty. seconds: returns the estimated time of a config.
    """
    legal: list[tuple[float, int, Candidate]] = []
    rejected: list[Illegal] = []
    for index, config in enumerate(configs):
        candidate, reason = Candidate.make(backend, template, **config), why_illegal(config)
        if reason:
            rejected.append(Illegal(candidate, reason))
        else:
            legal.append((seconds(config), index, candidate))
    legal.sort(key=lambda item: item[:2])
    return [candidate for _, _, candidate in legal], rejected
