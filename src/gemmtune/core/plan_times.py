"""The times of a weight's kernels at many M. They are not in ``tuned_plan``, so that dispatch does not load msgspec."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

RAW, PACKED = "raw", "packed"  # forms of a weight


def least_times(curves: Iterable[Mapping[int, float]]) -> dict[int, float]:
    """Return the least seconds by M of several kernels, each given by its seconds by M."""
    least: dict[int, float] = {}
    for times in curves:
        least |= {m: min(seconds, least.get(m, seconds)) for m, seconds in times.items()}
    return least


def surcharge_at(surcharges: Mapping[str, Mapping[int, float]], packing: str, m: int) -> float:
    """Return the surcharge (``TunedPlan.surcharges``) of a layout ("" = unpacked) at M: that of the nearest M by ratio
    that has one; 1.0 where none has."""
    by_m = surcharges.get(PACKED if packing else RAW, {})
    return by_m[min(by_m, key=lambda tuned: abs(math.log(tuned / m)))] if by_m else 1.0
