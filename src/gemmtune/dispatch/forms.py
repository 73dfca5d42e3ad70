"""Which form of a weight serves each M, where the weight is kept in two: raw, and packed in one layout.

At an M that was measured, the raw form serves if the packed one takes longer than it by more than ``NO_SLOWER`` and the
noise: by the TunedPlan, and by Decisions at M that it does not know. Between two measured M of which the raw form
serves one, it serves all, since an M that was not measured should not be slower than plain PyTorch. Below the first
measured M, and above the last, the form serves that serves there.

Two forms are worth their memory only if at some measured M the raw form is faster by ``CLEARLY`` and the noise.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..core.problem import Problem
from .plan_layouts import NO_SLOWER, limit, mean, mean_shares, plain_times, shares_of
from .portfolio import (
    WORTHWHILE,
    TunedPoint,
    at_most,
    is_fallback_template,
    raw_seconds,
    shares_of_calls,
    total_seconds,
    without_raw,
)

if TYPE_CHECKING:
    from ..core.tuned_plan import TunedPlan

# The share of the raw form's time that the packed form takes longer at some M, if a weight is to be kept in both.
CLEARLY = 0.05


class Forms(NamedTuple):
    """The M that each form serves.

    changes: the M at which the serving form changes, ascending. raw_first: whether the raw form serves the M below the
    first of them. pays: whether the packed form serves some measured M, and the raw form is clearly faster at another.
    """

    changes: tuple[int, ...] = ()
    raw_first: bool = False
    pays: bool = False

    def is_raw(self, m: int) -> bool:
        """Whether the raw form serves M."""
        return self.raw_first != bool(bisect_right(self.changes, m) % 2)


class Ratio(NamedTuple):
    """The packed form's time over the raw one's at a measured M. The raw form serves if this is above ``limit``."""

    value: float
    limit: float = 1.0 + NO_SLOWER

    @property
    def is_raw(self) -> bool:
        return self.value > self.limit

    @property
    def is_clearly_raw(self) -> bool:
        return self.value > self.limit - NO_SLOWER + CLEARLY


def choose_forms(
    packing: str, points: Sequence[TunedPoint], tuned: TunedPlan | None = None, faulty: Collection[str] = ()
) -> Forms:
    """Return which M of a weight that is kept raw and packed are served by which form.

    points: the Decisions of the weight. tuned: its plan for a range of M: a layout that it has no times for serves no
    M. faulty: ids of kernels that must not serve; nor does a layout of the plan with such a kernel. Where no M was
    tuned in both forms, the packed one serves.
    """
    if tuned is None:
        return forms_by_ratios(_ratios_of_points(packing, points))
    packed, raw = shares_of(tuned, packing, faulty), _raw_shares(tuned, faulty)
    if not packed:
        return Forms(raw_first=True)
    ratios = {m: Ratio(share / raw[m], limit(tuned, m)) for m, share in packed.items() if m in raw}
    later = [p for p in points if p.m not in tuned.tuned and packing in p.options]
    return forms_by_ratios({**ratios, **_ratios_of_points(packing, later)})


def forms_by_ratios(ratios: Mapping[int, Ratio]) -> Forms:
    """Return the forms that serve all M, from the ratios at the measured ones."""
    sizes = sorted(ratios)
    served_raw = [ratios[m].is_raw for m in sizes]
    changes = [
        below + 1 if raw_above else above
        for (below, raw_below), (above, raw_above) in pairwise(zip(sizes, served_raw, strict=True))
        if raw_below != raw_above
    ]
    pays = any(ratio.is_clearly_raw for ratio in ratios.values()) and not all(served_raw)
    return Forms(tuple(changes), bool(served_raw and served_raw[0]), pays)


def _raw_shares(tuned: TunedPlan, faulty: Collection[str]) -> dict[int, float]:
    """Return the time of what serves the raw weight relative to plain PyTorch's, by measured M. Plain PyTorch serves it
    where a kernel is faulty."""
    return shares_of(tuned, "", faulty) or dict.fromkeys(plain_times(tuned), 1.0)


def _is_plain(tuned: TunedPlan, problem: Problem, m: int, faulty: Collection[str]) -> bool:
    """Whether plain PyTorch serves the raw weight at M, by a plan. problem: the plan's."""
    kernel = tuned.serving(m)
    return kernel is None or kernel.id in faulty or is_fallback_template(kernel.candidate, problem)


def _ratios_of_points(packing: str, points: Sequence[TunedPoint]) -> dict[int, Ratio]:
    """Return the ratios at the M of Decisions. Where the layout has no kernel, its time is an upper bound."""
    own = {p.m: p.options[packing].seconds for p in points if packing in p.options}
    timed = [p for p in points if own and raw_seconds(p) < float("inf")]
    return {p.m: Ratio(at_most(own, p.m) / raw_seconds(p)) for p in timed}


def rank_by_plan(
    tuned: TunedPlan, forms: Callable[[str], Forms], faulty: Collection[str] = (), *, raw_kernels: bool = True
) -> list[str]:
    """Return the layouts that are worth a second form of a weight, the raw one, by a plan; the best first.

    In the mean over M, as for ``rank_layouts_of_plan``, the two forms must take 1% less time than the raw weight alone,
    and less than any layout that may serve alone. Where plain PyTorch serves a weight in two forms, the call goes
    through gemmtune, too, so that its overhead counts. forms: of a layout. raw_kernels: as for ``rank_packings``.
    """
    plain, problem = plain_times(tuned), Problem.from_dict(tuned.problem)
    raw = {
        m: share + (tuned.overhead_s / plain[m] if m in plain and _is_plain(tuned, problem, m, faulty) else 0.0)
        for m, share in _raw_shares(tuned, faulty).items()
    }
    totals = {}
    for packing in filter(None, tuned.intervals):
        serving = forms(packing)
        if serving.pays:
            packed = shares_of(tuned, packing, faulty)
            totals[packing] = mean(tuned, {m: raw.get(m, s) if serving.is_raw(m) else s for m, s in packed.items()})
    alone = mean_shares(tuned, faulty, raw_kernels=raw_kernels)
    return _worthwhile(totals, alone[None], min(alone.values()))


def rank_by_points(
    points: Sequence[TunedPoint],
    forms: Callable[[str], Forms],
    weights: Mapping[int, float] | None = None,
    *,
    raw_kernels: bool = True,
) -> list[str]:
    """Return the layouts that are worth a second form of a weight, the raw one, by Decisions; the best first.

    As ``rank_by_plan``, with the total times over the tuned M. weights: as for ``rank_packings``.
    """
    share = shares_of_calls(points, weights)
    singles = total_seconds(points, share)
    totals = {}
    for packing in singles:
        serving = forms(packing)
        own = {p.m: p.options[packing].seconds for p in points if packing in p.options}
        if serving.pays:
            seconds = {p.m: raw_seconds(p) if serving.is_raw(p.m) else at_most(own, p.m) for p in points}
            totals[packing] = sum(share[m] * seconds[m] for m in seconds)
    raw = sum(share[p.m] * raw_seconds(p if raw_kernels else without_raw(p)) for p in points)
    return _worthwhile(totals, raw, min(raw, *singles.values()) if singles else raw)


def _worthwhile(totals: Mapping[str, float], raw: float, best: float) -> list[str]:
    """Return the layouts that beat, together with the raw form, the raw form by 1% and every form alone, the best
    first. totals: the times of both forms by layout. raw: the raw form's. best: the least of any form alone."""
    worth = [packing for packing, total in totals.items() if total < min(WORTHWHILE * raw, best)]
    return sorted(worth, key=lambda packing: (totals[packing], packing))
