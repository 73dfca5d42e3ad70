"""The report's HTML: a section per machine and dtype with plots and tables. All text from the store is escaped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core import workloads
from ..core.problem import Problem
from . import interactive, svg
from .cells import SCRIPT, code_element, number_cell, rows_table, time_cell
from .charts import charts
from .escaped import escape
from .forwards import by_layer
from .plan_section import Draw, by_weight
from .rows import TIMES_NOTE, DecisionSummary, disturbances_of, sorted_decisions, summarize

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.target import Target
    from ..core.tuned_plan import TunedPlan
    from .layers import Model

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; max-width: 1200px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d0d7de; } h3 { margin-bottom: 0; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 3px 8px; border-bottom: 1px solid #eaeef2; vertical-align: top; }
td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.winner td:nth-child(2) { color: #1a7f37; font-weight: 600; } tr.none_valid td:nth-child(2) { color: #cf222e; }
code { font-size: 12px; overflow-wrap: anywhere; } .note { color: #59636e; margin-top: 0; }
.answer { font-size: 17px; } .disturbed { color: #9a6700; } th { cursor: pointer; } td.n { white-space: nowrap; }
input { margin: .5rem 0; width: 20rem; max-width: 100%; font: inherit; }
svg { width: 100%; font: 11px system-ui, sans-serif; } svg .grid { stroke: #d8dee4; stroke-width: 0.6; }
svg .even { stroke: #1f2328; stroke-dasharray: 2 3; }
"""
_OUTCOME_TEXTS = {
    "winner": "winner", "tie": "tie: ATen serves", "none_valid": "nothing valid", "inconclusive": "inconclusive",
}  # fmt: skip


def page(
    groups: Sequence[tuple[Target, Sequence[Decision]]], ceilings: Mapping[str, Mapping[str, float]], origin: str,
    models: Mapping[str, Mapping[str, Model]] | None = None, plans: Mapping[str, Sequence[TunedPlan]] | None = None,
) -> str:  # fmt: skip
    """Return the HTML document.

    groups: each target with its decisions. ceilings: the target's measured ceilings, by target key. origin: name of the
    store. models: the layers of tuned models, by model name and target key. plans: by target key.
    """
    script = interactive.library()
    draw: Draw = interactive.draw if script is not None else lambda chart, name: svg.draw(chart)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>gemmtune report</title>",
        f"<style>{_STYLE}</style>",
        f"<script>{script}</script>" if script is not None else "",
        "</head><body><h1>gemmtune report</h1>",
        f"<p class='note'>{escape(origin)}, {time.strftime('%Y-%m-%d %H:%M')}</p>",
    ]
    for section, (target, decisions) in enumerate(groups):
        models_of_target = {
            name: by_target[target.key] for name, by_target in (models or {}).items() if target.key in by_target
        }
        measured = ceilings.get(target.key, {})
        parts.append(_machine_section(target, decisions, measured, draw, f"m{section}", models_of_target))
        parts.append(by_weight((plans or {}).get(target.key, ()), measured, draw, f"m{section}"))
    return "\n".join([*parts, f"<script>{SCRIPT}</script>", "</body></html>\n"])


def _machine_section(
    target: Target, decisions: Sequence[Decision], ceilings: Mapping[str, float], draw: Draw, prefix: str,
    models: Mapping[str, Model],
) -> str:  # fmt: skip
    ordered = sorted_decisions(decisions)
    versions = ", ".join(f"{name} {text}" for name, text in target.versions)
    parts = [
        f"<h2>{escape(target.name)}{_threads_text(target)}</h2>",
        by_layer(models, decisions),
        f"<p class='note'>{escape(' '.join(target.isa))}<br>{escape(versions)}<br>target {escape(target.key)}</p>",
        f"<p>{escape(overview([summarize(row) for row in ordered]))}</p>",
    ]
    by_dtype: dict[str, list[Decision]] = {}
    for decision in ordered:
        by_dtype.setdefault(workloads.dtype_name(Problem.from_dict(decision.problem)), []).append(decision)
    for group_number, (dtype, group) in enumerate(by_dtype.items()):
        parts.append(f"<h2>{escape(dtype)}</h2>")
        for index, chart in enumerate(charts(group, ceilings)):
            parts.append(f"<h3>{escape(chart.title)}</h3><p class='note'>{escape(chart.note)}</p>")
            parts.append(draw(chart, f"{prefix}d{group_number}c{index}"))
        parts.append(table(group))
    return "\n".join(parts)


def _threads_text(target: Target) -> str:
    """Return the number of threads as text, ``, 2 threads``; an empty string for a GPU."""
    return f", {target.threads} threads" if target.is_cpu else ""


def overview(rows: Iterable[DecisionSummary]) -> str:
    """Return a sentence with the numbers of problems by outcome, and the geometric mean of the paired speed-ups."""
    summaries = list(rows)
    served = [row.speedup for row in summaries if row.outcome != "none_valid"]
    counts = {name: sum(row.outcome == name for row in summaries) for name in _OUTCOME_TEXTS}
    mean = math.exp(sum(math.log(value) for value in served) / len(served)) if served else float("nan")
    text = f"{len(summaries)} problems: {counts['winner']} won, {counts['tie']} tied with ATen"
    if counts["none_valid"]:
        text += f", {counts['none_valid']} without a valid candidate"
    return text + (f". Geometric mean of the speed-up over ATen, ties counted as 1: {mean:.2f}x." if served else ".")


def table(decisions: Sequence[Decision]) -> str:
    """Return a table with a row per problem: the times of ATen and of the best candidate, the speed-up with its
    interval, the kernel, and why the race stopped."""
    heads = ("problem (MxNxK)", "outcome", "ATen", "best", "speed-up [95%]", "kernel", "tried", "why it stopped")
    return (
        rows_table(heads, "".join(_table_row(decision) for decision in decisions))
        + f"<p class='note'>{escape(TIMES_NOTE)}</p>"
    )


def _table_row(decision: Decision) -> str:
    row, disturbances = summarize(decision), disturbances_of(decision)
    speed = f"{row.speedup:.2f}x [{row.lo:.2f}-{row.hi:.2f}]" if row.outcome == "winner" else "-"
    mark = f"<br><span class='disturbed'>disturbed: {escape(disturbances)}</span>" if disturbances else ""
    cells = (
        f"<td>{escape(row.label)}</td><td>{_OUTCOME_TEXTS[row.outcome]}{mark}</td>"
        f"{time_cell(row.aten_s)}{time_cell(row.best_s)}{number_cell(row.speedup, speed)}"
        f"<td>{code_element(row.best_id)}</td>"
        f"{number_cell(row.tried, f'{row.tried} (+{row.illegal} illegal)')}"
        f"<td>{escape(decision.stopped)}{_failures_list(decision)}</td>"
    )
    return f"<tr class='{row.outcome}'>{cells}</tr>"


def _failures_list(decision: Decision) -> str:
    failed = [row for row in decision.evidence if row.verdict is not None and not row.verdict.ok]
    if not failed:
        return ""
    items = "".join(
        f"<li>{code_element(row.id)}: {escape(row.verdict.kind)} {escape(row.verdict.detail)}</li>"
        for row in failed
        if row.verdict is not None
    )
    return f"<details><summary>{len(failed)} refused</summary><ul>{items}</ul></details>"
