"""Kernels that a library chooses for ATen's plain op at M where it is unusually fast, for M at which the library
chooses a slower one.

In bfloat16 8192x1024 cuBLAS takes 34 us at M = 704 to 727, and 20.3 us at 728, by an algorithm that computes fewer rows
as well (H200, ``benchmarks/library_algorithms.py``). A kernel of ``cublaslt`` runs the algorithm that is chosen for one
M at all others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .. import backends
from ..core.candidate import Illegal
from ..core.decision import Decision
from ..core.problem import Problem
from ..core.target import Target
from .curves import Curves, point_weights
from .plan_pool import PoolKernel
from .predicted_kernels import sizes_to_time
from .sizes import SizeRange

_MOST = 4  # kernels of a weight
_LEAST_WORTH = 0.0005  # the share of the time of all calls that a kernel is expected to save
_LEAST_GAIN = 0.03  # that counts at an M
_REACH = 1.25  # an algorithm counts for M down to this factor below one at which it was timed


def kernels_chosen_by_library(
    problem: Problem,
    target: Target,
    decisions: Sequence[Decision],
    curves: Curves,
    sizes: SizeRange,
    without: Collection[str],
) -> list[PoolKernel]:
    """Return up to ``_MOST`` kernels, those first that are expected to save most.

    Each runs the algorithm that the plain op runs at one scanned M, and takes at other M at most as long as the plain
    op with this algorithm at the next larger scanned M. The library's backend must have been tried in one of the
    ``decisions``. curves: those of the raw layout. without: ids of candidates that are not returned.
    """
    tried = {str(row.candidate.get("backend")) for decision in decisions for row in decision.evidence}
    libraries = [name for name in sorted(tried & set(backends.names())) if backends.get(name).lists_by_m]
    if not libraries or not curves.plain:
        return []
    curves = curves.at_scan_pace
    scanned = {m: min(s, curves.times[curves.plain].get(m, s)) for m, s in curves.scan.items()}
    algorithms = _bounds_by_algorithm(scanned, curves)
    weights = point_weights(replace(curves, times={"": dict.fromkeys({*curves.sizes, *scanned}, 0.0)}, plain=""))
    kernels = [name for name in curves.times if name != curves.plain]
    best = {m: min((s, *(curves.expected_or_most(name, m) for name in kernels))) for m, s in scanned.items()}
    chosen = list[PoolKernel]()
    while algorithms and len(chosen) < _MOST:
        gains = {name: _gains(best, bounds, weights) for name, bounds in algorithms.items()}
        name = max(gains, key=lambda name: sum(gains[name].values()))
        if sum(gains[name].values()) < _LEAST_WORTH:
            break
        bounds = algorithms.pop(name)
        worthy = sorted(gains[name], key=lambda m: -gains[name][m])
        kernel = _first_kernel(problem, target, libraries, sizes, bounds[worthy[0]].m)
        if kernel is not None and kernel.id not in without:
            # At the M that bound its time, and where it is expected to gain most.
            kernel.predicted_for = {bounds[worthy[0]].m, bounds[worthy[-1]].m, *sizes_to_time(worthy)}
            chosen.append(kernel)
            best |= {m: min(best[m], bound.seconds) for m, bound in bounds.items()}
    return chosen


class _Bound(NamedTuple):
    """The most seconds that an algorithm takes at an M, and the next larger M, at which it was timed."""

    seconds: float
    m: int


def _bounds_by_algorithm(scanned: Mapping[int, float], curves: Curves) -> dict[str, dict[int, _Bound]]:
    """Return what each known algorithm takes at most at scanned M, by its name and M."""
    sizes = dict[str, list[int]]()
    for m in sorted(scanned):
        sizes.setdefault(curves.algorithms.at(m), []).append(m)
    sizes.pop("", None)
    bounds = dict[str, dict[int, _Bound]]()
    for name, own in sizes.items():
        for m in scanned:
            index = bisect_left(own, m)
            if index < len(own) and own[index] <= _REACH * m:
                bounds.setdefault(name, {})[m] = _Bound(scanned[own[index]], own[index])
    return bounds


def _gains(best: Mapping[int, float], bounds: Mapping[int, _Bound], weights: Mapping[int, float]) -> dict[int, float]:
    """Return the share of the time of all calls that an algorithm is expected to save at each M, where it saves
    ``_LEAST_GAIN`` or more of the time there."""
    gains = {m: 1.0 - bound.seconds / best[m] for m, bound in bounds.items()}
    return {m: weights[m] * gain for m, gain in gains.items() if gain >= _LEAST_GAIN}


def _first_kernel(
    problem: Problem, target: Target, libraries: Sequence[str], sizes: SizeRange, m: int
) -> PoolKernel | None:
    """Return the kernel that the first of the libraries lists first for M; None where it has none."""
    for name in libraries:
        for candidate in backends.get(name).candidates(sizes.at(problem, m), target):
            if not isinstance(candidate, Illegal):
                return PoolKernel.of(candidate, m, None)
    return None
