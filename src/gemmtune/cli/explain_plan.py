"""The part of ``gemmtune explain`` about a weight that was tuned over a range of M."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..core.plan_times import PACKED, RAW
from ..core.problem import Problem
from ..core.workloads import dtype_name
from ..report.plan_rows import (
    ATEN,
    cannot_serve,
    intervals_text,
    layout_name,
    noise_text,
    plan_label,
    plan_line,
    regret_text,
    serving_kernels,
    short_names,
    size_name,
    summarize_layouts,
    thinned,
    times_over_m,
    verified_text,
)
from ..report.rows import time_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ..core.target import Target
    from ..core.tuned_plan import PlanKernel, TunedPlan
    from ..report.plan_rows import TimesAtM
    from ..store.base import Store


def matching_plans(store: Store, target: Target | None, shape: tuple[int, int, int], dtype: str) -> list[TunedPlan]:
    """Return the stored plans whose range has the M of a shape, and those over the batch of products with its M, for
    its N and K and a name of dtypes (``dtype_name``), of one target or (None) of all."""
    m, n, k = shape
    matches = []
    for plan in store.plans(target):
        problem = Problem.from_dict(plan.problem)
        has_m = plan.first <= m <= plan.last if plan.dim == "m" else problem.m == m
        if has_m and (problem.n, problem.k, dtype_name(problem)) == (n, k, dtype):
            matches.append(plan)
    return matches


def plan_answer(plan: TunedPlan, m: int) -> list[str]:
    """Return the line for the plan, and one for each layout with what serves M in it; for a plan over the batch, one
    with what serves each batch."""
    lines = [f"plan {plan_line(plan)}"]
    if plan.dim == "batch":
        return [*lines, *(f"served by batch: {intervals_text(plan, packing, {})}" for packing in plan.intervals)]
    for packing in plan.intervals:
        kernel = plan.serving(m, packing)
        name = "nothing" if kernel is None else kernel.id
        timed = "" if kernel is None or m not in kernel.times else f", {time_text(kernel.times[m])} a call"
        lines.append(f"M = {m}, {layout_name(packing)}: {name} serves{timed}")
    return lines


def plan_json(plan: TunedPlan, m: int, *, brief: bool = False) -> dict[str, Any]:
    """Return a plan as a dict that can be written as JSON: the record, what serves M in each layout (over the batch:
    the intervals), the times over all measured M, and the kernels that cannot serve. brief: only what serves."""
    if plan.dim == "batch":
        serves: dict[str, Any] = {
            layout_name(packing): [[span.first, span.last, span.kernel] for span in spans]
            for packing, spans in plan.intervals.items()
        }
    else:
        serving = {layout_name(packing): plan.serving(m, packing) for packing in plan.intervals}
        serves = {name: None if kernel is None else kernel.id for name, kernel in serving.items()}
    if brief:
        return {"plan": plan.plan_key, "serves": serves}
    import msgspec

    times = {layout_name(packing): [asdict(row) for row in times_over_m(plan, packing)] for packing in plan.intervals}
    record = msgspec.to_builtins(plan)
    return {**record, "serves": serves, "times_over_m": times, "cannot_serve": cannot_serve(plan)}


def show_plan(plan: TunedPlan, m: int, out: Console, *, brief: bool = False) -> None:
    """Print what serves M by a plan and, unless ``brief``, its intervals, times, kernels and noise."""
    for line in plan_answer(plan, m):
        out.print(line, soft_wrap=True)
    if brief:
        return
    out.print()
    out.print(plan_label(plan), style="bold", soft_wrap=True, end="  ")
    out.print(plan.plan_key, soft_wrap=True)
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(plan.created))
    out.print(f"made {created} in {plan.seconds:.1f} s, seed {plan.seed}, target {plan.target_key}")
    if plan.config_key:
        out.print(
            f"config_key: {plan.config_key}; each interval has the kernel that was tuned for its key", soft_wrap=True
        )
    if plan.counts:
        counts = ", ".join(f"{size} ({count})" for size, count in sorted(plan.counts.items()))
        out.print(f"{size_name(plan)} that a model ran at, with calls: {counts}", soft_wrap=True)
    if text := noise_text(plan):
        out.print(f"noise of the times: {text}", soft_wrap=True)
    names = short_names(plan)
    for summary in summarize_layouts(plan):
        out.print()
        out.print(f"{layout_name(summary.packing)}: worst regret {regret_text(summary.regret)}", style="bold")
        out.print(f"served by {size_name(plan)}: {intervals_text(plan, summary.packing, names)}", soft_wrap=True)
        out.print(_times_table(plan, summary.packing, names))
        if slower := _surcharges_text(plan, summary.packing):
            out.print(slower, soft_wrap=True)
        for kernel in serving_kernels(plan, summary.packing):
            out.print(f"{names[kernel.id]:<4}  {_kernel_text(kernel, plan)}", soft_wrap=True)
    _show_other_kernels(plan, out, names)


def _show_other_kernels(plan: TunedPlan, out: Console, names: Mapping[str, str]) -> None:
    refused = cannot_serve(plan)
    if refused:
        out.print()
        out.print(f"cannot serve ({len(refused)}):", soft_wrap=True)
        for name, reason in refused.items():
            out.print(f"  {name}: {reason}", soft_wrap=True)
    others = [kernel for kernel in plan.kernels if kernel.id not in names and kernel.id not in refused]
    if others:
        out.print()
        out.print(f"timed too, and not chosen ({len(others)}):", soft_wrap=True)
        for kernel in others:
            out.print(f"  {kernel.id}", soft_wrap=True)
    out.print()


def _kernel_text(kernel: PlanKernel, plan: TunedPlan) -> str:
    surcharge = kernel.surcharge
    slower = f"; among other work it takes {surcharge:.2f}x these times" if surcharge > 1.0 else ""
    is_expected = plan.tuned and kernel.tuned_m not in plan.tuned
    source = "expected by its backend to be fast" if is_expected else "from the decision"
    size = size_name(plan)
    return f"{kernel.id}: {source} at {size} = {kernel.tuned_m}; {verified_text(kernel, size)}{slower}"


def _surcharges_text(plan: TunedPlan, packing: str) -> str:
    """Return by how much the kernels of a layout are slower beside ATen's among other work than in the table, at the M
    of the decisions; empty where they are not."""
    by_m = plan.surcharges.get(PACKED if packing else RAW, {})
    slower = [f"{factor:.2f}x at {size_name(plan)} = {m}" for m, factor in sorted(by_m.items()) if factor >= 1.005]
    return f"among other work kernels take longer than these times: {', '.join(slower)}" if slower else ""


def _times_table(plan: TunedPlan, packing: str, names: Mapping[str, str]) -> Table:
    """Return the table "time over M" of a layout: measured M, the times of ATen and of what serves, which one serves,
    and its regret."""
    from .tables import empty_table

    kernels = [kernel.id for kernel in serving_kernels(plan, packing) if names[kernel.id] != ATEN]
    table = empty_table()
    for name in (size_name(plan), ATEN, *(names[kernel] for kernel in kernels), "serves", "regret"):
        table.add_column(name, justify="left" if name == "serves" else "right", no_wrap=True)
    rows = times_over_m(plan, packing)
    for row in thinned(rows):
        table.add_row(*_cells(row, kernels, names))
    if len(rows) > len(thinned(rows)):
        table.caption, table.caption_justify = f"{len(thinned(rows))} of the {len(rows)} measured sizes", "left"
    return table


def _cells(row: TimesAtM, kernels: Sequence[str], names: Mapping[str, str]) -> list[str]:
    times = [time_text(row.seconds.get(kernel)) for kernel in kernels]
    return [str(row.m), time_text(row.aten_s), *times, names.get(row.serves, "-"), regret_text(row.regret)]
