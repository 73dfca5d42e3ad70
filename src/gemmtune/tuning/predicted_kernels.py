"""Kernels that no tuned M has tried, and that are expected to be fast at M between them.

A tile of 112 rows is the fastest for M = 217, and for no M that is tuned by default. Backends estimate the time of
their candidates (``Backend.estimated_s``). The times that were measured at the tuned M correct the estimates.

A candidate by which a library chooses its kernel for the M of each call (``Backend.chooses_by_m``) is another kernel
far from the tuned M. It is expected to be fast there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from .. import backends
from ..core import devices
from ..core.candidate import Candidate, Illegal
from ..core.decision import Decision
from ..core.problem import Problem
from ..core.target import Target
from .intervals import Curves, point_weights
from .plan_pool import PoolKernel, failed_candidates, kernel_pool, timed_rows
from .sizes import SizeRange

_FAR = 4.0  # between two tuned M with this ratio, a library's choice may be another kernel than at both
_PER_OCTAVE = 3  # M for which candidates are listed
_LISTED = 3  # the first candidates of a template that are considered at an M
_LEAST_GAIN = 0.03  # an estimated gain below this share of the time is not expected
_MOST_GAIN = 1.0  # of a kernel, where nothing else has an estimate


class _Template(NamedTuple):
    """A template of a backend, with the layout in which its kernels take the weight."""

    backend: str
    name: str
    packing: str | None

    @classmethod
    def of(cls, candidate: Candidate, packing: str | None) -> _Template:
        return cls(candidate.backend, candidate.template, packing)


def expected_kernels(
    problem: Problem,
    target: Target,
    decisions: Sequence[Decision],
    sizes: SizeRange,
    counts: Mapping[int, int],
    faulty: Collection[str] = (),
) -> list[PoolKernel]:
    """Return the kernels that are expected to be fast where those of the Decisions are not: by estimates up to the
    device's ``TuningProfile.max_predicted``, and those of libraries that choose by M, which a Decision may have, too.
    Candidates that failed in a Decision or are ``faulty`` are not among them."""
    limit = devices.get(target.device).profile.max_predicted
    if not limit:
        return []
    without = failed_candidates(decisions) | set(faulty)
    pool = kernel_pool(decisions, faulty)
    by_m = kernels_chosen_by_m(problem, target, decisions, sizes, without)
    return by_m + predict_kernels(problem, target, decisions, pool, sizes, counts, without, limit)


def kernels_chosen_by_m(
    problem: Problem, target: Target, decisions: Sequence[Decision], sizes: SizeRange, without: Collection[str]
) -> list[PoolKernel]:
    """Return the first candidate of each library that chooses by M, expected to be fast in the gaps between tuned M
    whose ends have a ratio of ``_FAR`` or more. Without such a gap, none.

    Only libraries of which a Decision has a time are asked. without: ids of candidates that are not returned.
    """
    rows = [row for decision in decisions for row in timed_rows(decision.evidence)]
    names = {
        backend for row in rows if backends.get(backend := Candidate.from_dict(row.candidate).backend).chooses_by_m
    }
    ends = [sizes.first, *(m for m in sizes.tuned if sizes.first < m < sizes.last), sizes.last]
    middles = [(a, b, round(math.sqrt(a * b))) for a, b in itertools.pairwise(ends) if b >= _FAR * a]
    found = list[PoolKernel]()
    for name in sorted(names) if middles else ():
        m = middles[-1][2]
        candidates = backends.get(name).candidates(problem.with_m(m), target)
        candidate = next((c for c in candidates if not isinstance(c, Illegal)), None)
        if candidate is not None and candidate.id not in without:
            kernel = PoolKernel.of(candidate, m, backends.get(name).packing_of(problem.with_m(m), candidate))
            kernel.predicted_for = {
                size
                for a, b, middle in middles
                for size in (round(math.sqrt(a * middle)), middle, round(math.sqrt(middle * b)))
            }
            found.append(kernel)
    return found


def predict_kernels(
    problem: Problem,
    target: Target,
    decisions: Sequence[Decision],
    pool: Sequence[PoolKernel],
    sizes: SizeRange,
    counts: Mapping[int, int],
    without: Collection[str],
    limit: int,
) -> list[PoolKernel]:
    """Return up to ``limit`` kernels of the templates and layouts in ``pool``, each with the M for which it is
    expected to be fast.

    They are chosen greedily, so that the expected time falls most: the sum over M of the share by which a kernel is
    expected to be faster than the fastest of its layout that is chosen already or in the pool, weighted by the calls
    that M is expected to have (``Curves.weight``). decisions: those of the pool. counts: recorded calls by M. without:
    ids of candidates that are not chosen.
    """
    model = _TimeModel(problem, target, decisions)
    grid = _grid(sizes) if model.scales else []
    weights = point_weights(Curves(sizes.first, sizes.last, {"": dict.fromkeys(grid, 0.0)}, counts=counts))
    templates = {_Template.of(kernel.candidate, kernel.packing) for kernel in pool} & set(model.scales)
    listed = {m: _listed(problem.with_m(m), target, templates) for m in grid}
    options = {kernel.id: kernel for m in grid for kernel in listed[m] if kernel.id not in without}
    supported = {m: {_Template.of(kernel.candidate, kernel.packing) for kernel in listed[m]} for m in grid}
    seconds = {
        kernel.id: {m: model.seconds(kernel, m, supported[m]) for m in grid} for kernel in (*pool, *options.values())
    }
    best = {(k.packing, m): math.inf for k in pool for m in grid}
    for kernel in pool:
        best |= {(kernel.packing, m): min(best[kernel.packing, m], seconds[kernel.id][m]) for m in grid}
        options.pop(kernel.id, None)
    chosen: list[PoolKernel] = []
    while options and len(chosen) < limit:
        gains = {
            name: {m: _gain(best[kernel.packing, m], seconds[name][m]) for m in grid}
            for name, kernel in options.items()
        }
        worth = {
            name: sum(weights[m] * gain for m, gain in by_m.items() if gain > _LEAST_GAIN)
            for name, by_m in gains.items()
        }
        name = max(worth, key=lambda item: worth[item])
        if worth[name] <= 0.0:
            break
        kernel = options.pop(name)
        kernel.predicted_for = {m for m in grid if gains[name][m] > _LEAST_GAIN}
        best |= {(kernel.packing, m): min(best[kernel.packing, m], seconds[name][m]) for m in grid}
        chosen.append(kernel)
    return chosen


class _TimeModel:
    """The expected times of one weight's kernels: estimates of their backends, scaled by template to the times that
    were measured at the nearest tuned M.

    scales: measured over estimated time, by template and tuned M. Templates without estimates have none.
    """

    def __init__(self, problem: Problem, target: Target, decisions: Sequence[Decision]) -> None:
        self._problem, self._target = problem, target
        ratios: dict[_Template, dict[int, list[float]]] = {}
        for decision in decisions:
            at_m = Problem.from_dict(decision.problem)
            for row in timed_rows(decision.evidence):
                candidate = Candidate.from_dict(row.candidate)
                estimate = backends.get(candidate.backend).estimated_s(at_m, candidate, target)
                if estimate and row.sample is not None:
                    by_m = ratios.setdefault(_Template.of(candidate, row.packing), {})
                    by_m.setdefault(at_m.m, []).append(row.sample.median_s / estimate)
        self.scales = {template: {m: median(values) for m, values in by_m.items()} for template, by_m in ratios.items()}

    def seconds(self, kernel: PoolKernel, m: int, templates: Collection[_Template]) -> float:
        """Return the expected seconds of a kernel at M; infinite unless its template is one of ``templates``, those
        that have candidates there: the estimates of the others were made for other M."""
        template = _Template.of(kernel.candidate, kernel.packing)
        if template not in templates:
            return math.inf
        scales = self.scales[template]
        backend = backends.get(kernel.candidate.backend)
        estimate = backend.estimated_s(self._problem.with_m(m), kernel.candidate, self._target)
        nearest = min(scales, key=lambda tuned: abs(math.log(tuned / m)))
        return math.inf if not estimate else scales[nearest] * estimate


def _gain(before_s: float, seconds: float) -> float:
    """Return the share by which a kernel is expected to be faster than another time."""
    return min(before_s / seconds - 1.0, _MOST_GAIN) if seconds < math.inf else 0.0


def _grid(sizes: SizeRange) -> list[int]:
    """Return M evenly spaced by ratio, without those that were tuned."""
    steps = _PER_OCTAVE * sizes.last.bit_length()
    spaced = {round(2.0 ** (step / _PER_OCTAVE)) for step in range(steps + 1)}
    return sorted(m for m in spaced if sizes.first <= m <= sizes.last and m not in sizes.tuned)


def _listed(problem: Problem, target: Target, templates: Collection[_Template]) -> list[PoolKernel]:
    """Return the first candidates of each template for a Problem."""
    found, count = [], dict.fromkeys(templates, 0)
    for name in sorted({template.backend for template in templates}):
        backend = backends.get(name)
        for candidate in backend.candidates(problem, target):
            if isinstance(candidate, Illegal):
                continue
            template = _Template.of(candidate, backend.packing_of(problem, candidate))
            if count.get(template, _LISTED) < _LISTED:
                count[template] += 1
                found.append(PoolKernel.of(candidate, problem.m, template.packing))
    return found
