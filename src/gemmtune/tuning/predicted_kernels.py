"""Kernels that no tuned M has tried, and that are expected to be fast at M between them.

A tile of 112 rows is the fastest for M = 217, and for no M that is tuned by default. Backends estimate the time of
their candidates (``Backend.estimated_s``). The times that were measured at the tuned M correct the estimates.

A library that lists its kernels for each M (``Backend.lists_by_m``) lists others far from the tuned M. They are
expected to be fast there. Above the largest tuned M, other clusters of the kernels that were fast there are, and on
devices without estimates the candidates that backends list first.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from .. import backends
from ..backends.base import Backend
from ..core import devices
from ..core.candidate import Candidate, Illegal
from ..core.decision import Decision
from ..core.problem import Problem
from ..core.target import Target
from .curves import Curves, point_weights
from .plan_pool import PoolKernel, failed_candidates, kernel_pool, overlap_without_test, timed_rows
from .sizes import SizeRange

_APART = 2.5  # the ratio of M for which libraries are asked
# M for which libraries are asked are multiples of it, and larger: with fewer rows every kernel takes as long as reading
# the weight.
_ROW_STEP = 128
# M for which candidates are listed. With three, kernels that fill the multiprocessors at M between them were missed. In
# a simulation (estimates with random errors, six weights; a script that was not kept) the best of the pool took 1.8% to
# 5.3% longer in the mean than the best of all candidates, with six M 1.2% to 4.6%.
_PER_OCTAVE = 6
# From _DENSE_FROM on, expected times are compared at each multiple of _DENSE_STEP. Between two M for which candidates
# are listed a kernel may need a round of tiles less than all others: of converted int8 weights 8192x1024, 64 x 256
# tiles from M = 6273 to 6336, where plans took 1.24 and 1.34 of their time (H100, every-m-20261127-205554, -210542).
_DENSE_FROM, _DENSE_STEP = 1024, 64
_TIMED_AT = 3  # M at which an expected kernel is timed: those with the largest gains,
_TIMED_APART = 1.5  # and more that are this factor from each of those, for kernels that are fast at many M
_LISTED = 6  # the first candidates of a template that are considered at an M
_VARIED = 8  # kernels of which a variant with the same tile is tried, too
_VARIANT_WITHIN = 0.05  # the share by which a variant may be slower by the estimates: they are no better than that
_TEMPLATE_COUNTS = 2  # the weight of a template's scale, where that of a variant is the number of its timed kernels
_LEAST_GAIN = 0.01  # an estimated gain below this share of the time is not expected
_MOST_GAIN = 1.0  # of a kernel, where nothing else has an estimate
_TURN_S = 2e-4  # seconds for which the listing on a thread keeps Python's interpreter lock
_SHORT_TURNS = threading.Lock()  # held by the thread in ``short_turns``
_TILE_SIZES = ("bm", "bn", "split")

_Config = tuple[tuple[str, object], ...]  # names and values


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
    device's ``TuningProfile.max_predicted`` with their variants, those that libraries list for other M, and clusters
    and other templates for many rows. With a limit of 0, those that are listed first for the last M. Candidates that
    failed in a Decision or are ``faulty`` are not among them."""
    limit = devices.get(target.device).profile.max_predicted
    without = failed_candidates(decisions) | set(faulty)
    loaded = backends.names()  # a store may have Decisions of a plugin that is not loaded
    pool = [kernel for kernel in kernel_pool(decisions, faulty, sizes.dim) if kernel.candidate.backend in loaded]
    if not limit:
        return kernels_for_last_size(problem, target, pool, sizes, without)
    expected = [
        *kernels_of_libraries(problem, target, pool, sizes, without),
        *kernels_with_other_clusters(problem, target, pool, sizes, without),
        *kernels_of_other_templates(problem, target, decisions, pool, sizes, without),
        *predict_kernels(problem, target, decisions, pool, sizes, counts, without, limit),
    ]
    for kernel in expected:
        kernel.overlap = overlap_without_test(kernel.predicted_for)
    return expected


def list_ahead(problem: Problem, target: Target, sizes: SizeRange) -> None:
    """List the candidates that ``expected_kernels`` considers, so that a later call need not: that takes 2 to 4 s for a
    GPU's kernels. To be called on a thread of its own. Never raises: the later call raises a backend's error."""
    with contextlib.suppress(Exception), short_turns():
        for name in backends.names(target.device):
            for m in _grid(sizes):
                _first_candidates(backends.get(name), sizes.at(problem, m), target)


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Return a context for a thread that computes while others talk to a worker: these have Python's interpreter lock
    after ``_TURN_S``; by default after 5 ms. The setting is the process's: a second thread waits for the first.

    Beside a listing with the default, a byte to another process and back took 7.5 ms, with this 0.44, alone 0.02 (two
    cores of an EPYC, by hand). The first Decision of a process's second weight tried 7 candidates in its time, and
    tries 34 and 55 (benchmarks/results/tuning-timeline-h100-20261128.txt).
    """
    with _SHORT_TURNS:
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(_TURN_S)
        try:
            yield
        finally:
            sys.setswitchinterval(usual_s)


def kernels_for_last_size(
    problem: Problem, target: Target, pool: Sequence[PoolKernel], sizes: SizeRange, without: Collection[str]
) -> list[PoolKernel]:
    """Return the candidate that is listed first for the last M, of each packed layout's templates, and of those for the
    raw weight that were fast at the largest tuned M, unless it is in ``pool``; none if the last M is tuned. without:
    ids of candidates that are not returned.

    A layout that was fast at fewer rows only may be the best for many: on a host whose pace changes, only panels of 16
    columns were fast at M = 128 of bfloat16 768x3072, and no kernel with panels of 32 was timed that is as fast as
    ATen's op at M = 300.
    """
    largest = max(sizes.tuned, default=sizes.last)
    if sizes.last <= largest:
        return []
    fast = (kernel for kernel in pool if kernel.packing is not None or largest in kernel.fast_at)
    templates = {_Template.of(kernel.candidate, kernel.packing) for kernel in fast}
    listed = _listed(problem, sizes, sizes.last, target, templates)
    first = {_Template.of(kernel.candidate, kernel.packing): kernel for kernel in reversed(listed)}
    excluded = {kernel.id for kernel in pool} | set(without)
    kernels = [kernel for kernel in first.values() if kernel.id not in excluded]
    for kernel in kernels:
        kernel.predicted_for = {round(math.sqrt(largest * sizes.last)), sizes.last}
    return kernels


def kernels_of_libraries(
    problem: Problem, target: Target, pool: Sequence[PoolKernel], sizes: SizeRange, without: Collection[str]
) -> list[PoolKernel]:
    """Return the kernels that libraries list for M in wide gaps between tuned M, and for the last M.

    A library is asked where a Decision at an end of the gap has a fast kernel of it. without: ids of candidates that
    are not returned.
    """
    ends = [sizes.first, *(m for m in sizes.tuned if sizes.first < m < sizes.last), sizes.last]
    kernels = list[PoolKernel]()
    for a, b in itertools.pairwise(ends):
        is_fast = {kernel.candidate.backend for kernel in pool if kernel.fast_at & {a, b}}
        libraries = [name for name in sorted(is_fast) if backends.get(name).lists_by_m]
        listed = _listed_sizes(a, b, b in sizes.tuned, _ROW_STEP if sizes.dim == "m" else 1)
        for m, (below, above) in listed.items() if libraries else ():
            near = {m, round(math.sqrt(below * m)), round(math.sqrt(m * above))}
            for kernel in _kernels_listed_at(problem, sizes, m, target, libraries):
                if kernel.id not in without:
                    kernel.predicted_for = {size for size in near if size not in sizes.tuned}
                    kernels.append(kernel)
    return kernels


def kernels_with_other_clusters(
    problem: Problem, target: Target, pool: Sequence[PoolKernel], sizes: SizeRange, without: Collection[str]
) -> list[PoolKernel]:
    """Return the kernels of ``pool`` that were fast at the largest tuned M with other clusters of blocks, for larger M;
    none if the last M is not far above. without: ids of candidates that are not returned.

    Blocks of a cluster share what they read. With many rows that is faster by up to 9% (fp8 8192x1024, M = 2773, H100),
    with few it is not, and estimates do not tell.
    """
    largest = max(sizes.tuned, default=sizes.last)
    if sizes.last < _APART * largest:
        return []
    middle = round(math.sqrt(largest * sizes.last))
    at_middle = sizes.at(problem, middle)
    excluded, kernels = {kernel.id for kernel in pool} | set(without), list[PoolKernel]()
    for kernel in (kernel for kernel in pool if largest in kernel.fast_at):
        config, backend = dict(kernel.candidate.config), backends.get(kernel.candidate.backend)
        for other in backend.candidates(at_middle, target) if "cluster" in config else ():
            if isinstance(other, Illegal) or other.template != kernel.candidate.template or other.id in excluded:
                continue
            if {**dict(other.config), "cluster": config["cluster"]} == config:
                excluded.add(other.id)
                kernels.append(PoolKernel.of(other, middle, kernel.packing, dim=sizes.dim))
                kernels[-1].predicted_for = {middle, sizes.last}
    return kernels


def kernels_of_other_templates(
    problem: Problem,
    target: Target,
    decisions: Sequence[Decision],
    pool: Sequence[PoolKernel],
    sizes: SizeRange,
    without: Collection[str],
) -> list[PoolKernel]:
    """Return the candidate that is listed first for the last M, of each template with estimates that has no kernel in
    ``pool``, in the pool's layouts; none if the last M is not far above the largest tuned one. decisions: name the
    backends. without: ids of candidates that are not returned.

    Triton's conversion of int8 weights is the fastest for many rows, and was missing where the Decision for M = 2048
    had no time to try it: plans took 1.14 to 1.17 of its time above M = 4096 (4096x4096, H100).
    """
    largest = max(sizes.tuned, default=sizes.last)
    if sizes.last < _APART * largest:
        return []
    at_last, packings = sizes.at(problem, sizes.last), {kernel.packing for kernel in pool}
    pool_templates = {_Template.of(kernel.candidate, kernel.packing) for kernel in pool}
    tried = {str(row.candidate.get("backend")) for decision in decisions for row in decision.evidence}
    by_template: dict[_Template, PoolKernel] = {}
    for name in sorted(tried & set(backends.names())):
        backend = backends.get(name)
        for candidate, template in _first_candidates(backend, at_last, target):
            is_wanted = template not in pool_templates and template.packing in packings and candidate.id not in without
            if is_wanted and backend.estimated_s(at_last, candidate, target):
                kernel = PoolKernel.of(candidate, sizes.last, template.packing, dim=sizes.dim)
                by_template.setdefault(template, kernel)
    for kernel in by_template.values():
        kernel.predicted_for = {round(math.sqrt(largest * sizes.last)), sizes.last}
    return list(by_template.values())


def _listed_sizes(a: int, b: int, b_is_tuned: bool, step: int) -> dict[int, tuple[int, int]]:
    """Return the M between ``a`` and ``b`` for which libraries are asked, each with the next such M or end on either
    side. They are about a factor of ``_APART`` from each other, multiples of ``step``. ``b`` is among them if the
    gap is wide, unless it is tuned."""
    count = (round(math.log(b / a) / math.log(_APART)) if b > a else 0) - 1
    ratios = [(b / a) ** (i / (count + b_is_tuned)) for i in range(1, count + 1)]
    inside = [step * math.ceil(a * ratio / step) for ratio in ratios]
    inside = [m for m in inside if max(step, a) < m < b] + ([] if b_is_tuned or count < 1 else [b])
    return {m: (below, above) for below, m, above in zip([a, *inside], inside, [*inside[1:], b], strict=False)}


def _kernels_listed_at(
    problem: Problem, sizes: SizeRange, m: int, target: Target, libraries: Sequence[str]
) -> list[PoolKernel]:
    """Return all kernels that some backends list for the Problem at M."""
    at_m = sizes.at(problem, m)
    return [
        PoolKernel.of(candidate, m, backends.get(name).packing_of(at_m, candidate), dim=sizes.dim)
        for name in libraries
        for candidate in backends.get(name).candidates(at_m, target)
        if not isinstance(candidate, Illegal)
    ]


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
    expected to be fast, and variants of the first ``_VARIED``: the same tiles with another depth of a step or other
    stages, expected to be about as fast.

    They are chosen greedily, so that the expected time falls most: the sum over M of the share by which a kernel is
    expected to be faster than the fastest of its layout that is chosen already or in the pool, weighted by the calls
    that M is expected to have (``Curves.weight``). decisions: those of the pool. counts: recorded calls by M. without:
    ids of candidates that are not chosen.
    """
    model = _TimeModel(problem, target, decisions, sizes)
    listed_at = _grid(sizes) if model.scales else []
    templates = {_Template.of(kernel.candidate, kernel.packing) for kernel in pool} & set(model.scales)
    listed = {m: _listed(problem, sizes, m, target, templates) for m in listed_at}
    options = {kernel.id: kernel for m in listed_at for kernel in listed[m] if kernel.id not in without}
    grid = _dense_grid(listed_at, sizes)
    weights = point_weights(Curves(sizes.first, sizes.last, {"": dict.fromkeys(grid, 0.0)}, counts=counts))
    supporting = {m: {_Template.of(kernel.candidate, kernel.packing) for kernel in listed[m]} for m in listed_at}
    supported = {m: supporting[min(listed_at, key=lambda size: abs(size - m))] for m in grid}
    seconds = {kernel.id: model.seconds(kernel, supported) for kernel in (*pool, *options.values())}
    best = {kernel.packing: dict.fromkeys(grid, math.inf) for kernel in pool}

    def add(kernel: PoolKernel) -> None:
        """Count a kernel among those that there are."""
        least, own = best[kernel.packing], seconds[kernel.id]
        best[kernel.packing] = {m: min(least[m], own[m]) for m in grid}

    for kernel in pool:
        add(kernel)
        options.pop(kernel.id, None)

    def gains_of(kernel: PoolKernel) -> dict[int, float]:
        """Return the gain of a kernel, weighted, at the M where it is worth counting."""
        least, own = best[kernel.packing], seconds[kernel.id]
        gains = {m: _gain(least[m], own[m]) for m in grid}
        return {m: weights[m] * gain for m, gain in gains.items() if gain > _LEAST_GAIN}

    chosen: list[PoolKernel] = []
    worth = {name: sum(gains_of(kernel).values()) for name, kernel in options.items()}
    while options and len(chosen) < limit:
        # What a kernel is worth only falls as others are chosen: what the first is worth now decides.
        name = max(worth, key=lambda item: worth[item])
        gains = gains_of(options[name])
        if sum(gains.values()) < worth[name]:
            worth[name] = sum(gains.values())
            continue
        if not gains:
            break
        kernel = options.pop(name)
        del worth[name]
        kernel.predicted_for = sizes_to_time(sorted(gains, key=lambda m: -gains[m]))
        add(kernel)
        chosen.append(kernel)
    variants = (_variant(kernel, options.values(), seconds) for kernel in chosen[:_VARIED])
    return chosen + [variant for variant in variants if variant is not None]


def sizes_to_time(worthy: Iterable[int]) -> set[int]:
    """Return the M at which an expected kernel is timed. worthy: those at which it is expected to be fast, by gain."""
    sizes: list[int] = []
    for m in worthy:
        if len(sizes) < _TIMED_AT or all(max(m, size) >= _TIMED_APART * min(m, size) for size in sizes):
            sizes.append(m)
    return set(sizes)


def _variant(
    kernel: PoolKernel, options: Iterable[PoolKernel], seconds: Mapping[str, Mapping[int, float]]
) -> PoolKernel | None:
    """Return the option with the least estimate that has the kernel's tile and another configuration; None where the
    estimates say that it is much slower. seconds: the estimates by id and M."""
    m = min(kernel.predicted_for, key=lambda m: seconds[kernel.id][m])
    same = [option for option in options if _tile(option) == _tile(kernel)]
    variant = min(same, key=lambda option: seconds[option.id][m], default=None)
    if variant is None or seconds[variant.id][m] > (1.0 + _VARIANT_WITHIN) * seconds[kernel.id][m]:
        return None
    variant.predicted_for = set(kernel.predicted_for)
    return variant


def _tile(kernel: PoolKernel) -> tuple[object, ...]:
    """Return the template and the sizes that decide which part of the output a block of threads computes."""
    config = dict(kernel.candidate.config)
    template = _Template.of(kernel.candidate, kernel.packing)
    return (*template, *(config.get(name) for name in (*_TILE_SIZES, "cluster", "fitted")))


def _apart_from_tile(candidate: Candidate) -> _Config:
    """Return a candidate's configuration without the sizes of its tile, whether they are fitted to M, and without the
    stages that fit beside it."""
    return tuple((name, value) for name, value in candidate.config if name not in (*_TILE_SIZES, "fitted", "stages"))


class _TimeModel:
    """The expected times of one weight's kernels: estimates of their backends, scaled to the times that were measured
    at the nearest tuned M: by the mean, of the logarithms, of the template's scale, which counts as
    ``_TEMPLATE_COUNTS`` kernels, and of that of the kernels of the same variant that were timed there.

    Kernels of one variant have other tiles, for which an estimate may be wrong by another factor. In a replay of 16
    runs (2,076 M of fp8, int8 and bfloat16, a script that was not kept) the kernel that was expected to be the fastest
    was 5.7% slower than the fastest one in the mean by the variant's scale alone (fp8, M = 33 to 512), 3.9% by this
    mean.

    scales: measured over estimated time, by template and tuned M. Templates without estimates have none.
    """

    def __init__(self, problem: Problem, target: Target, decisions: Sequence[Decision], sizes: SizeRange) -> None:
        self._target = target
        self._at = functools.cache(functools.partial(sizes.at, problem))
        self._estimates = _estimates_of(problem.plan_key_over(sizes.dim), target)
        self._nearest_to: dict[tuple[_Template, int], int] = {}
        ratios: dict[_Template, dict[int, list[float]]] = {}
        of_variants: dict[tuple[_Template, int, _Config], list[float]] = {}
        for decision in decisions:
            at_m = Problem.from_dict(decision.problem)
            m = at_m.size(sizes.dim)
            for row in timed_rows(decision.evidence):
                candidate = Candidate.from_dict(row.candidate)
                estimate = backends.get(candidate.backend).estimated_s(at_m, candidate, target)
                if estimate and row.sample is not None:
                    template, ratio = _Template.of(candidate, row.packing), row.sample.median_s / estimate
                    ratios.setdefault(template, {}).setdefault(m, []).append(ratio)
                    of_variants.setdefault((template, m, _apart_from_tile(candidate)), []).append(ratio)
        self.scales = {template: {m: median(values) for m, values in by_m.items()} for template, by_m in ratios.items()}
        self._variants = {
            (template, m, variant): _mean_scale(median(values), len(values), self.scales[template][m])
            for (template, m, variant), values in of_variants.items()
        }

    def seconds(self, kernel: PoolKernel, supported: Mapping[int, Collection[_Template]]) -> dict[int, float]:
        """Return the expected seconds of a kernel by M. supported: the templates that have candidates at each M;
        without the kernel's its time is infinite, since its estimates were made for other M."""
        template = _Template.of(kernel.candidate, kernel.packing)
        variant, scales = _apart_from_tile(kernel.candidate), self.scales.get(template, {})
        scale_at = {m: self._variants.get((template, m, variant), scale) for m, scale in scales.items()}
        return {
            m: scale_at[self._nearest(template, m)] * self._estimated_s(kernel.candidate, m)
            if template in templates
            else math.inf
            for m, templates in supported.items()
        }

    def _nearest(self, template: _Template, m: int) -> int:
        """Return the tuned M nearest to M at which the template was timed."""
        key = template, m
        if key not in self._nearest_to:
            self._nearest_to[key] = min(self.scales[template], key=lambda tuned: abs(math.log(tuned / m)))
        return self._nearest_to[key]

    def _estimated_s(self, candidate: Candidate, m: int) -> float:
        """Return the backend's estimate of a candidate's seconds at M; infinite where it has none."""
        key = candidate, m
        if key not in self._estimates:
            estimate = backends.get(candidate.backend).estimated_s(self._at(m), candidate, self._target)
            self._estimates[key] = estimate or math.inf
        return self._estimates[key]


def _mean_scale(scale: float, count: int, template_scale: float) -> float:
    """Return the mean, by logarithms, of ``scale`` with a weight of ``count`` and ``template_scale`` with a weight of
    ``_TEMPLATE_COUNTS``."""
    return math.exp(math.log(scale / template_scale) * count / (count + _TEMPLATE_COUNTS)) * template_scale


@functools.lru_cache(maxsize=2)
def _estimates_of(plan_key: str, target: Target) -> dict[tuple[Candidate, int], float]:
    """Return the dict to which one weight's estimates are added, by candidate and M: ``expected_kernels`` is called
    twice for a weight, and asks for some 40,000 of them."""
    return {}


def _gain(before_s: float, seconds: float) -> float:
    """Return the share by which a kernel is expected to be faster than another time."""
    return min(before_s / seconds - 1.0, _MOST_GAIN) if seconds < math.inf else 0.0


def _grid(sizes: SizeRange) -> list[int]:
    """Return M evenly spaced by ratio, without those that were tuned."""
    steps = _PER_OCTAVE * sizes.last.bit_length()
    spaced = {round(2.0 ** (step / _PER_OCTAVE)) for step in range(steps + 1)}
    return sorted(m for m in spaced if sizes.first <= m <= sizes.last and m not in sizes.tuned)


def _dense_grid(listed_at: Sequence[int], sizes: SizeRange) -> list[int]:
    """Return ``listed_at``, the M for which candidates are listed, with the multiples of ``_DENSE_STEP`` from
    ``_DENSE_FROM`` on that are in the range and were not tuned; ascending. Empty if ``listed_at`` is."""
    dense = range(_DENSE_FROM, sizes.last + 1, _DENSE_STEP) if listed_at else range(0)
    return sorted({*listed_at, *(m for m in dense if m >= sizes.first and m not in sizes.tuned)})


def _listed(
    problem: Problem, sizes: SizeRange, m: int, target: Target, templates: Collection[_Template]
) -> list[PoolKernel]:
    """Return the first candidates of each template for the Problem at M. A backend whose kernels name their layouts
    only after loading has none."""
    names = sorted({template.backend for template in templates})
    return [
        PoolKernel.of(candidate, m, template.packing, dim=sizes.dim)
        for name in names
        for candidate, template in _first_candidates(backends.get(name), sizes.at(problem, m), target)
        if template in templates
    ]


@functools.lru_cache(maxsize=1024)  # those of two weights
def _first_candidates(backend: Backend, problem: Problem, target: Target) -> tuple[tuple[Candidate, _Template], ...]:
    """Return the first ``_LISTED`` candidates of each template and layout, and as many of those for plans.

    Cached, since they are listed for the same Problems before the last Decision and after it.
    """
    result: list[tuple[Candidate, _Template]] = []
    for listed in (backend.candidates(problem, target), backend.plan_candidates(problem, target)):
        count: dict[_Template, int] = {}
        for candidate in listed:
            if isinstance(candidate, Illegal):
                continue
            try:
                template = _Template.of(candidate, backend.packing_of(problem, candidate))
            except NotImplementedError:
                break
            if count.get(template, 0) < _LISTED:
                count[template] = count.get(template, 0) + 1
                result.append((candidate, template))
    return tuple(result)
