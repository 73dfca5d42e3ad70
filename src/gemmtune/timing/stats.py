"""Statistics for timings: robust, rank-based, and exact where it counts.

Timings have heavy one-sided tails (a stalled barrier, a busy neighbour), so nothing here uses a mean or a variance.
Ratios are compared on the log scale, pair by pair, with both times taken in one round: drift cancels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with bounds that contain it with probability ``level`` (the attained one, not the requested one)."""

    center: float
    lo: float
    hi: float
    level: float


def mad(values: Sequence[float]) -> float:
    """Return the median absolute deviation, scaled by 1.4826 to the standard deviation of a normal distribution."""
    center = median(values)
    return 1.4826 * median(abs(v - center) for v in values)


def drift(values: Sequence[float]) -> float:
    """Return the relative change of the median from the first third to the last; 0.0 when it is within the noise or n <
    9.

    Noise: three standard errors of the difference of two medians (1.2533 * sigma / sqrt(n) each).
    """
    third = len(values) // 3
    if third < 3:
        return 0.0
    first, last = values[:third], values[-third:]
    noise = 1.2533 * math.hypot(mad(first), mad(last)) / math.sqrt(third)
    change = median(last) - median(first)
    return change / median(first) if abs(change) > 3.0 * noise else 0.0


def median_interval(values: Sequence[float], alpha: float = 0.05) -> Interval:
    """Return the two-sided distribution-free interval of the median (sign test, order statistics; exact).

    With too few values for 1 - alpha (fewer than 6 for 0.05) the bounds are the extremes, and ``level`` is the
    probability that they attain: 1 - 2 ** (1 - n).
    """
    ordered = sorted(values)
    n = len(ordered)
    skip, below = 0, 2.0**-n
    tail = below
    while skip + 1 < (n + 1) // 2:
        below *= (n - skip) / (skip + 1)
        if 2.0 * (tail + below) > alpha:
            break
        tail += below
        skip += 1
    return Interval(median(ordered), ordered[skip], ordered[n - 1 - skip], max(0.0, 1.0 - 2.0 * tail))


def shift_interval(values: Sequence[float], alpha: float = 0.05) -> Interval:
    """Return the Hodges-Lehmann estimate with its two-sided signed-rank interval (Wilcoxon): the centre of symmetric
    values.

    It is about half again as sharp as the sign test for log ratios of paired timings, which are symmetric when the
    order within a pair is random. Exact up to n = 30, then normal with continuity correction. With too few values the
    bounds are the extremes and ``level`` is the probability that they attain. O(n**2).
    """
    n = len(values)
    column = np.asarray(values, dtype=np.float64)
    walsh = ((column[:, None] + column[None, :]) * 0.5)[np.triu_indices(n)]
    skip, tail = _signed_rank_cut(n, alpha / 2.0)
    middle, last = (len(walsh) - 1) // 2, len(walsh) - 1
    ranks = sorted({skip, middle, last - middle, last - skip})
    ordered_at = dict(zip(ranks, np.partition(walsh, ranks)[ranks].tolist(), strict=True))
    center = (ordered_at[middle] + ordered_at[last - middle]) / 2.0
    return Interval(center, ordered_at[skip], ordered_at[last - skip], max(0.0, 1.0 - 2.0 * tail))


@functools.lru_cache(maxsize=1024)
def _signed_rank_cut(n: int, tail: float) -> tuple[int, float]:
    """Return how many Walsh averages may be skipped at each end, and the probability that the centre lies beyond one
    end."""
    if n > 30:
        mean, sigma = n * (n + 1) / 4.0, math.sqrt(n * (n + 1) * (2 * n + 1) / 24.0)
        cut = mean + NormalDist().inv_cdf(tail) * sigma - 0.5
        return max(0, math.floor(cut)), tail
    ways = [1] + [0] * (n * (n + 1) // 2)
    for rank in range(1, n + 1):
        for total in range(len(ways) - 1, rank - 1, -1):
            ways[total] += ways[total - rank]
    # P(T <= c) for the signed-rank sum T: the interval that skips c averages misses on one side when T < c + 1.
    reached, cut = ways[0], 0
    while cut + 1 < len(ways) // 2 and (reached + ways[cut + 1]) / 2**n <= tail:
        cut += 1
        reached += ways[cut]
    return cut, reached / 2**n


def log_ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Return the logarithms of the paired ratios times[i] / base[i]."""
    return [math.log(t / b) for t, b in zip(times, base, strict=True)]


def ratio_interval(times: Sequence[float], base: Sequence[float], alpha: float = 0.05) -> Interval:
    """Return the interval of the paired ratio times / base (signed-rank on logs)."""
    shift = shift_interval(log_ratios(times, base), alpha)
    return Interval(math.exp(shift.center), math.exp(shift.lo), math.exp(shift.hi), shift.level)


def spend(alpha: float, look: int) -> float:
    """Return the share of ``alpha`` for look 1, 2, 3, ...; the shares sum to alpha however many looks there are (6 /
    (pi j)**2)."""
    return alpha * 6.0 / (math.pi * look) ** 2


def slower_than(times: Sequence[float], base: Sequence[float], alpha: float) -> Interval | None:
    """Return the interval of times / base when it lies wholly above 1 with error probability at most alpha, else
    None."""
    interval = ratio_interval(times, base, 2.0 * alpha)
    return interval if interval.lo > 1.0 and (1.0 - interval.level) / 2.0 <= alpha * (1 + 1e-9) else None


def binomial_tail(least: int, trials: int, chance: float) -> float:
    """Return P(X >= least) of a binomial X of ``trials`` trials that succeed with probability ``chance`` each
    (exact)."""
    return math.fsum(
        math.comb(trials, hits) * chance**hits * (1.0 - chance) ** (trials - hits) for hits in range(least, trials + 1)
    )
