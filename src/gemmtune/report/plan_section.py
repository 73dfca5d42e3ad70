"""The report's section on weights that were tuned over a range of M: plots and a table of the kernels that serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core.problem import Problem
from ..core.workloads import dtype_name
from .cells import code_element, number_cell, rows_table, time_cell
from .charts import Chart
from .escaped import escape
from .plan_charts import plan_curves
from .plan_rows import (
    ATEN,
    cannot_serve,
    layout_name,
    noise_text,
    plan_label,
    plan_line,
    range_text,
    regret_text,
    serving_kernels,
    short_names,
    size_name,
    thinned,
    times_over_m,
    verified_text,
)

if TYPE_CHECKING:
    from ..core.tuned_plan import TunedPlan

Draw = Callable[[Chart, str], str]


def by_weight(plans: Sequence[TunedPlan], ceilings: Mapping[str, float], draw: Draw, prefix: str) -> str:
    """Return the HTML of the plans of one machine; empty without plans.

    ceilings: the machine's, as measured. draw: draws a chart under a name. prefix: of these names.
    """
    if not plans:
        return ""
    return "\n".join(
        ["<h2>Weights tuned over a range of M</h2>"]
        + [_weight(plan, ceilings, draw, f"{prefix}p{index}") for index, plan in enumerate(sorted_plans(plans))]
    )


def sorted_plans(plans: Sequence[TunedPlan]) -> list[TunedPlan]:
    """Return plans sorted for display: by dtype, K and N."""

    def sort_key(plan: TunedPlan) -> tuple[str, int, int, str]:
        problem = Problem.from_dict(plan.problem)
        return dtype_name(problem), problem.k, problem.n, plan.plan_key

    return sorted(plans, key=sort_key)


def _weight(plan: TunedPlan, ceilings: Mapping[str, float], draw: Draw, prefix: str) -> str:
    noise = noise_text(plan)
    parts = [
        f"<h3>{escape(plan_label(plan))}</h3>",
        f"<p>{escape(plan_line(plan))}.{escape(f' Noise of the times: {noise}.' if noise else '')}</p>",
    ]
    for index, chart in enumerate(plan_curves(plan, ceilings)):
        parts.append(f"<h4>{escape(chart.title)}</h4><p class='note'>{escape(chart.note)}</p>")
        parts.append(draw(chart, f"{prefix}c{index}"))
    return "\n".join([*parts, _kernels_table(plan), *_times_tables(plan), _refused_list(plan)])


def _kernels_table(plan: TunedPlan) -> str:
    names, size = short_names(plan), size_name(plan)
    rows = []
    for packing, spans in plan.intervals.items():
        for kernel in serving_kernels(plan, packing):
            own = ", ".join(range_text(span.first, span.last) for span in spans if span.kernel == kernel.id)
            rows.append(
                f"<tr><td>{escape(names[kernel.id])}</td><td>{escape(layout_name(packing))}</td><td>{escape(own)}</td>"
                f"<td>{code_element(kernel.id)}</td>{number_cell(kernel.tuned_m)}"
                f"<td>{escape(verified_text(kernel, size))}</td></tr>"
            )
    return rows_table(("name", "layout", f"serves {size}", "kernel", f"tuned at {size}", "verified"), "".join(rows))


def _times_tables(plan: TunedPlan) -> list[str]:
    """Return a table of each layout's times over M, which says in text what its plot shows."""
    names, tables = short_names(plan), []
    for packing in plan.intervals:
        kernels = [kernel.id for kernel in serving_kernels(plan, packing) if names[kernel.id] != ATEN]
        body = ""
        for row in thinned(times_over_m(plan, packing)):
            times = "".join(time_cell(value) for value in (row.aten_s, *map(row.seconds.get, kernels)))
            regret = number_cell(-1.0 if row.regret is None else row.regret, regret_text(row.regret))
            body += f"<tr>{number_cell(row.m)}{times}<td>{escape(names.get(row.serves, '-'))}</td>{regret}</tr>"
        heads = (size_name(plan), ATEN, *(names[kernel] for kernel in kernels), "serves", "regret")
        table = rows_table(heads, body)
        summary = f"<summary>times over {size_name(plan)}, {escape(layout_name(packing))}</summary>"
        tables.append(f"<details>{summary}<div>{table}</div></details>")
    return tables


def _refused_list(plan: TunedPlan) -> str:
    refused = cannot_serve(plan)
    if not refused:
        return ""
    items = "".join(f"<li>{code_element(name)}: {escape(reason)}</li>" for name, reason in refused.items())
    return f"<details><summary>{len(refused)} kernels cannot serve</summary><ul>{items}</ul></details>"
