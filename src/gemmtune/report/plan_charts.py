"""The report's plots of a TunedPlan: the time of what serves over M, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..core.problem import Problem
from .charts import Band, Curves, Point, machine_ceilings
from .plan_rows import (
    ATEN,
    intervals_text,
    layout_name,
    measured_sizes,
    plain_kernel,
    plan_label,
    regret_text,
    serving_kernels,
    short_names,
    size_name,
    summarize_layouts,
)
from .rows import time_text

if TYPE_CHECKING:
    from ..core.tuned_plan import PlanKernel, TunedPlan

_FLOOR = "floor of the machine"
_LISTED = 24  # intervals of a layout that the note of its plot lists


def plan_curves(plan: TunedPlan, ceilings: Mapping[str, float]) -> list[Curves]:
    """Return a plot for each layout of a plan; none if nothing was timed. ceilings: the machine's, as measured."""
    if not measured_sizes(plan):
        return []
    floor, source = _floor(plan, ceilings)
    return [_layout_curves(plan, packing, floor, source) for packing in plan.intervals]


def _layout_curves(plan: TunedPlan, packing: str, floor: tuple[tuple[float, float], ...], source: str) -> Curves:
    names, plain = short_names(plan), plain_kernel(plan)
    kernels = {names[kernel.id]: kernel for kernel in serving_kernels(plan, packing)}
    drawn = ({} if plain is None else {ATEN: plain}) | kernels
    series = {
        name: _points(kernel, plan.scan if kernel is plain else {}, size_name(plan)) for name, kernel in drawn.items()
    }
    bands = tuple(
        Band(span.first, span.last + 1, names[span.kernel]) for span in plan.intervals[packing] if span.kernel in names
    )
    (summary,) = [row for row in summarize_layouts(plan) if row.packing == packing]
    worst = f"Worst regret {regret_text(summary.regret)}" + (
        f" at {summary.size} = {summary.regret_m}" if summary.regret else ""
    )
    count = len(plan.intervals[packing])
    served = intervals_text(plan, packing, names) if count <= _LISTED else f"{count} intervals, in the table of kernels"
    note = (
        f"Median time of a call of the kernels that serve, and of ATen on the unpacked weight, which may be timed at "
        f"more of them. The background has the colour of the kernel that serves: {served}. {worst}. The floor is the "
        f"least traffic at the memory ceiling or the operations at the arithmetic ceiling, whichever takes longer. "
        f"{source}"
    )
    title = f"{plan_label(plan)}, {layout_name(packing)}: time over {summary.size}"
    return Curves(title, note, summary.size, "us per call", series, {_FLOOR: floor}, bands)


def _points(kernel: PlanKernel, scan: Mapping[int, float], size: str) -> tuple[Point, ...]:
    """Return the points of a kernel at the M at which it was timed. scan: its seconds at other M. size: what the sizes
    are."""
    return tuple(
        Point(m, seconds * 1e6, f"{size} = {m}: {time_text(seconds)}, {kernel.id}")
        for m, seconds in sorted({**scan, **kernel.times}.items())
    )


def _floor(plan: TunedPlan, ceilings: Mapping[str, float]) -> tuple[tuple[tuple[float, float], ...], str]:
    """Return the least microseconds that the machine needs at each measured M, and a note with the ceilings'
    sources."""
    problem = Problem.from_dict(plan.problem)
    problems = {m: problem.with_size(plan.dim, m) for m in measured_sizes(plan)}
    reached = [
        (problems[m].flops / problems[m].min_bytes, problems[m].flops / seconds / 1e9)
        for kernel in plan.kernels
        for m, seconds in kernel.times.items()
    ]
    bandwidth, peak, source = machine_ceilings(reached, problem.a.dtype, ceilings)
    return tuple(
        (float(m), 1e-3 * max(at_m.min_bytes / bandwidth, at_m.flops / peak)) for m, at_m in problems.items()
    ), source
