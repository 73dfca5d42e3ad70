"""The choice of one layout for a weight that was tuned for a range of M."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ..core.plan_times import least_times, surcharge_at
from ..core.problem import Problem
from .portfolio import WORTHWHILE, is_fallback_template

if TYPE_CHECKING:
    from ..core.tuned_plan import TunedPlan

# A packed layout must not be slower than plain PyTorch at any measured M by more than this share and the noise. Of the
# noise this much counts at most.
NO_SLOWER, MAX_NOISE = 0.02, 0.02


def rank_layouts_of_plan(
    tuned: TunedPlan, faulty: Collection[str] = (), *, raw_kernels: bool = True
) -> list[str | None]:
    """Return every layout of a TunedPlan that may serve, the best first; the raw weight (None) ends the list.

    A packed layout must take 1% less time than the raw weight in the mean over the measured M, each relative to plain
    PyTorch's time there, and weighed by the M for which it stands and by the calls that were recorded. It must not be
    slower than plain PyTorch at any of them, which cannot serve a packed weight. Where plain PyTorch was not timed,
    because no formulation of it is right or fast enough to race, the least times take its part, and a packed layout may
    be slower. raw_kernels: as for ``rank_packings``.
    """
    totals = mean_shares(tuned, faulty, raw_kernels=raw_kernels)
    raw = totals.pop(None)
    return [*sorted((p for p in totals if p and totals[p] < WORTHWHILE * raw), key=lambda p: (totals[p], p)), None]


def mean_shares(tuned: TunedPlan, faulty: Collection[str] = (), *, raw_kernels: bool = True) -> dict[str | None, float]:
    """Return the mean time, relative to plain PyTorch's, of each form that may serve a weight alone: the layouts that
    are nowhere slower than plain PyTorch, and the raw weight (None)."""
    plain = plain_times(tuned)
    shares = {packing: shares_of(tuned, packing, faulty) for packing in tuned.intervals}
    raw_shares = shares.pop("", {})
    raw = mean(tuned, raw_shares) if raw_kernels and raw_shares else 1.0 if plain else math.inf
    totals: dict[str | None, float] = {
        packing: mean(tuned, by_m)
        for packing, by_m in shares.items()
        if by_m and not (plain and any(share > limit(tuned, m) for m, share in by_m.items()))
    }
    return {**totals, None: raw}


def limit(tuned: TunedPlan, m: int) -> float:
    """Return the largest share of plain PyTorch's time that a packed layout may take at a measured M."""
    return largest_share(tuned.noise.get(m, 0.0))


def largest_share(noise: float) -> float:
    """Return the largest share of plain PyTorch's time that a packed layout may take at an M. noise: of the times
    there, relative."""
    return 1.0 + NO_SLOWER + min(noise, MAX_NOISE)


def plain_times(tuned: TunedPlan) -> dict[int, float]:
    """Return plain PyTorch's seconds by measured M; empty if it was timed nowhere."""
    problem, raw = Problem.from_dict(tuned.problem), (k for k in tuned.kernels if k.packing is None and k.times)
    return next((kernel.times for kernel in raw if is_fallback_template(kernel.candidate, problem)), {})


def shares_of(tuned: TunedPlan, packing: str, faulty: Collection[str] = ()) -> dict[int, float]:
    """Return the time of what serves in a layout ("" = unpacked) relative to plain PyTorch's, by measured M, in the
    surroundings where it is slowest; empty for a layout with a faulty kernel. Where plain PyTorch was not timed, the
    least times take its part."""
    if any(interval.kernel in faulty for interval in tuned.intervals.get(packing, ())):
        return {}
    reference = plain_times(tuned) or least_times(kernel.times for kernel in tuned.kernels)
    problem, shares = Problem.from_dict(tuned.problem), {}
    for m, seconds in reference.items():
        kernel = tuned.serving(m, packing)
        if kernel is not None and m in kernel.times:
            is_reference = packing == "" and is_fallback_template(kernel.candidate, problem)
            slower = kernel.surcharge * surcharge_at(tuned.surcharges, packing, m)
            served_s = kernel.times[m] if is_reference else kernel.times[m] * slower + tuned.overhead_s
            shares[m] = served_s / seconds
    return shares


def mean(tuned: TunedPlan, shares: Mapping[int, float]) -> float:
    """Return the weighted mean of shares by M; 1.0 without any."""
    sizes, recorded = sorted(shares), max(1, sum(tuned.counts.values()))
    total, weight = 0.0, 0.0
    for index, m in enumerate(sizes):
        below, above = sizes[max(index - 1, 0)], sizes[min(index + 1, len(sizes) - 1)]
        share = (above - below) / (2 * tuned.last) + math.log((above + 1) / (below + 1)) / math.log(tuned.last + 1)
        share += 2 * tuned.counts.get(m, 0) / recorded + 1e-9  # more than 0 where one M alone was measured
        total, weight = total + share * shares[m], weight + share
    return total / weight if weight else 1.0
