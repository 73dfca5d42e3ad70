"""The times of a weight's kernels at many M. They are not in ``tuned_plan``, so that dispatch does not load msgspec."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def least_times(curves: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Return the least seconds by M of several kernels, each given by its seconds by M."""
    least: dict[int, float] = {}
    for times in curves:
        least |= {m: min(seconds, least.get(m, seconds)) for m, seconds in times.items()}
    return least
