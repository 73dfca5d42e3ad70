"""Summaries of TunedPlans for tables and plots: what serves over M, and how its time compares."""

from __future__ import annotations

import string
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..backends.aten import is_fallback
from ..core.problem import Problem
from ..core.workloads import weight_label
from .rows import backend_name

if TYPE_CHECKING:
    from ..core.tuned_plan import PlanKernel, TunedPlan

MAX_ROWS = 24  # of a table over M
ATEN = "ATen"  # the name of what plain PyTorch runs, in tables and plots


@dataclass(frozen=True, slots=True)
class LayoutSummary:
    """The summary of one layout of a TunedPlan.

    label: of the weight, ``Mx4096x4096 bf16``. size: "M"; "batch" for a plan over the batch, which this module calls M.
    packing: the layout; "" for the unpacked weight. kernels: number of kernels that serve in it. regret: the worst
    regret at a measured M, as a share; None if there is none. regret_m: the M at which it is. measured: number of M
    that were measured.
    """

    label: str
    size: str
    packing: str
    first: int
    last: int
    kernels: int
    intervals: int
    regret: float | None
    regret_m: int
    measured: int


@dataclass(frozen=True, slots=True)
class TimesAtM:
    """The times of the kernels of one layout at one M, in seconds per call.

    aten_s: plain PyTorch's on the unpacked weight; None where it was not timed. seconds: of the kernels that serve
    anywhere in the layout, by id, where they were timed. serves: id of the kernel that serves this M. regret: by how
    much its time exceeds the least in the layout, as a share.
    """

    m: int
    aten_s: float | None
    seconds: dict[str, float]
    serves: str
    regret: float | None


def summarize_layouts(plan: TunedPlan) -> list[LayoutSummary]:
    """Return the summaries of a plan's layouts."""
    return [_summarize(plan, packing) for packing in plan.intervals]


def _summarize(plan: TunedPlan, packing: str) -> LayoutSummary:
    sizes = measured_sizes(plan)
    regrets = [(regret, m) for m in sizes if (regret := plan.regret(m, packing)) is not None]
    regret, regret_m = max(regrets, key=lambda pair: pair[0], default=(None, 0))
    return LayoutSummary(
        label=plan_label(plan),
        size=size_name(plan),
        packing=packing,
        first=plan.first,
        last=plan.last,
        kernels=len(serving_kernels(plan, packing)),
        intervals=len(plan.intervals[packing]),
        regret=regret,
        regret_m=regret_m,
        measured=len(sizes),
    )


def plan_label(plan: TunedPlan) -> str:
    """Return a short description of a plan's weight: ``Mx4096x4096 bf16``."""
    return weight_label(Problem.from_dict(plan.problem), plan.dim)


def size_name(plan: TunedPlan) -> str:
    """Return what the sizes of a plan are: ``M`` or ``batch``."""
    return "M" if plan.dim == "m" else plan.dim


def plan_line(plan: TunedPlan) -> str:
    """Return a plan as one line: ``Mx64x96 fp32: M 1-512, 3 kernels in 5 intervals, worst regret 3.1% at M = 96``; of a
    ``config_key`` ``M 1-512 by power_of_2``."""
    rows = summarize_layouts(plan)
    kernels = len({interval.kernel for spans in plan.intervals.values() for interval in spans})
    intervals = sum(row.intervals for row in rows)
    keys = f" by {plan.config_key}" if plan.config_key else ""
    size = size_name(plan)
    text = f"{size} {plan.first}-{plan.last}{keys}, {_count(kernels, 'kernel')} in {_count(intervals, 'interval')}"
    if len(rows) > 1:
        text += f" of {len(rows)} layouts"
    worst = max((row for row in rows if row.regret is not None), key=lambda row: row.regret or 0.0, default=None)
    if worst is not None:
        text += f", worst regret {regret_text(worst.regret)}" + (
            f" at {size} = {worst.regret_m}" if worst.regret else ""
        )
    return f"{plan_label(plan)}: {text}"


def plan_document(plan: TunedPlan) -> dict[str, Any]:
    """Return a plan without its times, as a dict that can be written as JSON."""
    layouts = [
        {
            "layout": layout_name(row.packing),
            "intervals": [[span.first, span.last, span.kernel] for span in plan.intervals[row.packing]],
            "worst_regret": row.regret,
            "worst_regret_m": row.regret_m if row.regret is not None else None,
        }
        for row in summarize_layouts(plan)
    ]
    return {
        "plan": plan.plan_key,
        "label": plan_label(plan),
        "dim": plan.dim,
        "first": plan.first,
        "last": plan.last,
        "config_key": plan.config_key or None,
        "measured": len(measured_sizes(plan)),
        "layouts": layouts,
        "seconds": plan.seconds,
    }


def layout_name(packing: str) -> str:
    """Return the name of a layout for people: ``unpacked`` for the weight as it is."""
    return packing or "unpacked"


def measured_sizes(plan: TunedPlan) -> list[int]:
    """Return the M at which any kernel was timed, ascending."""
    return sorted({m for kernel in plan.kernels for m in kernel.times})


def plain_kernel(plan: TunedPlan) -> PlanKernel | None:
    """Return the kernel that is what plain PyTorch runs on the unpacked weight; None if it was not timed."""
    problem = Problem.from_dict(plan.problem)
    for kernel in plan.kernels:
        template = str(kernel.candidate.get("template"))
        if kernel.packing is None and backend_name(kernel) == "aten" and is_fallback(template, problem):
            return kernel
    return None


def serving_kernels(plan: TunedPlan, packing: str) -> list[PlanKernel]:
    """Return the kernels that serve in a layout, in the order of the M from which on they do."""
    ids = dict.fromkeys(interval.kernel for interval in plan.intervals.get(packing, ()))
    return [kernel for kernel in map(plan.find, ids) if kernel is not None]


def short_names(plan: TunedPlan) -> dict[str, str]:
    """Return a short name by the id of each kernel that serves: ids are too long for the columns of a table."""
    plain = plain_kernel(plan)
    names = {} if plain is None else {plain.id: ATEN}
    letters = [*string.ascii_uppercase, *(a + b for a in string.ascii_uppercase for b in string.ascii_uppercase)]
    serving = [kernel.id for packing in plan.intervals for kernel in serving_kernels(plan, packing)]
    unnamed = [name for name in dict.fromkeys(serving) if name not in names]
    return {**names, **dict(zip(unnamed, letters, strict=False))}


def intervals_text(plan: TunedPlan, packing: str, names: Mapping[str, str]) -> str:
    """Return the intervals of a layout as text: ``1-40: A, 41-128: ATen``. names: by kernel id."""
    spans = plan.intervals[packing]
    return ", ".join(f"{range_text(span.first, span.last)}: {names.get(span.kernel, span.kernel)}" for span in spans)


def range_text(first: int, last: int) -> str:
    """Return a range of M as text: ``41-128``; ``41`` if it has one."""
    return str(first) if first == last else f"{first}-{last}"


def times_over_m(plan: TunedPlan, packing: str) -> list[TimesAtM]:
    """Return the times of a layout at each M at which one of its serving kernels was timed, other than plain PyTorch's,
    which is timed for every layout; that counts where nothing else serves."""
    kernels, plain = serving_kernels(plan, packing), plain_kernel(plan)
    plain_times = {} if plain is None else plain.times
    others = [kernel for kernel in kernels if kernel is not plain]
    rows = []
    for m in sorted({m for kernel in others or kernels for m in kernel.times}):
        serving = plan.serving(m, packing)
        seconds = {kernel.id: kernel.times[m] for kernel in kernels if m in kernel.times}
        name = "" if serving is None else serving.id
        rows.append(TimesAtM(m, plain_times.get(m), seconds, name, plan.regret(m, packing)))
    return rows


def thinned(rows: Sequence[TimesAtM], limit: int = MAX_ROWS) -> list[TimesAtM]:
    """Return at most ``limit`` rows: the first, the last, that of the worst regret, and others at even distances."""
    if len(rows) <= limit:
        return list(rows)
    worst = max(range(len(rows)), key=lambda index: rows[index].regret or 0.0)
    steps = limit - 2
    shown = {worst, *(round(step * (len(rows) - 1) / steps) for step in range(steps + 1))}
    return [rows[index] for index in sorted(shown)]


def cannot_serve(plan: TunedPlan) -> dict[str, str]:
    """Return the kernels that were found unable to serve, with the reason: by id."""
    reasons = {}
    for kernel in plan.kernels:
        reason = kernel.reason
        if not reason and kernel.verdict is not None and not kernel.verdict.ok:
            reason = f"{kernel.verdict.kind.replace('_', ' ')}: {kernel.verdict.detail}".removesuffix(": ")
        if reason:
            reasons[kernel.id] = reason
    return reasons


def verified_text(kernel: PlanKernel, size: str = "M") -> str:
    """Return at which M a kernel's results were compared with the oracle: ``right at 12 M from 1 to 512``. size: what
    the sizes are."""
    if not kernel.verified or kernel.verdict is None:
        return f"not verified at {size} besides that of its decision"
    detail = f" (worst error {kernel.verdict.worst:.2f} of the bound)" if kernel.verdict.kind == "within_bound" else ""
    result = "right" if kernel.verdict.ok else kernel.verdict.kind.replace("_", " ")
    return f"{result} at {_sizes_text(kernel.verified, size)}{detail}"


def noise_text(plan: TunedPlan) -> str:
    """Return the noise of the times: the half width of their 95% intervals, as the least, the median and the most over
    M. Empty if it was not recorded."""
    values = sorted(plan.noise.values())
    if not values:
        return ""
    low, middle, high = values[0], values[len(values) // 2], values[-1]
    count = f"{len(values)} {_plural(size_name(plan))}"
    return f"+-{middle:.1%} in the median over {count} ({low:.1%} to {high:.1%}), with 95%"


def regret_text(regret: float | None) -> str:
    """Return a regret as text: ``3.1%``; ``-`` for None."""
    return "-" if regret is None else f"{regret:.1%}"


def _sizes_text(sizes: Collection[int], size: str) -> str:
    if len(sizes) == 1:
        return f"{size} = {next(iter(sizes))}"
    return f"{len(sizes)} {_plural(size)} from {min(sizes)} to {max(sizes)}"


def _plural(size: str) -> str:
    return size if size == "M" else f"{size}es"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
