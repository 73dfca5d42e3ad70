"""The report's HTML: a section per machine and dtype with plots and tables. Everything shown is escaped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..core import workloads
from ..core.problem import Problem
from . import interactive, svg
from .cells import SCRIPT, number, rows_table, seconds
from .charts import Chart, charts
from .escaped import escape
from .forwards import by_layer
from .rows import HOW, Row, disturbance, ordered, summarize

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.target import Target
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
_OUTCOMES = {
    "winner": "winner", "tie": "tie: ATen serves", "none_valid": "nothing valid", "inconclusive": "inconclusive",
}  # fmt: skip

Draw = Callable[[Chart, str], str]


def page(
    groups: Sequence[tuple[Target, Sequence[Decision]]], ceilings: Mapping[str, Mapping[str, float]], origin: str,
    models: Mapping[str, Mapping[str, Model]] | None = None,
) -> str:  # fmt: skip
    """The whole document. groups: decisions by target; ceilings: by target key; origin: the store's name; models: by
    name and target key."""
    script = interactive.library()
    draw: Draw = interactive.draw if script is not None else lambda chart, name: svg.draw(chart)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>gemmtune report</title>",
        f"<style>{_STYLE}</style>",
        f"<script>{script}</script>" if script is not None else "",
        "</head><body><h1>gemmtune report</h1>",
        f"<p class='note'>{escape(origin)}, {time.strftime('%Y-%m-%d %H:%M')}</p>",
    ]
    for place, (target, decisions) in enumerate(groups):
        here = {name: found[target.key] for name, found in (models or {}).items() if target.key in found}
        parts.append(_machine(target, decisions, ceilings.get(target.key, {}), draw, f"m{place}", here))
    return "\n".join([*parts, f"<script>{SCRIPT}</script>", "</body></html>\n"])


def _machine(
    target: Target, decisions: Sequence[Decision], ceilings: Mapping[str, float], draw: Draw, prefix: str,
    models: Mapping[str, Model],
) -> str:  # fmt: skip
    rows = ordered(decisions)
    versions = ", ".join(f"{name} {text}" for name, text in target.versions)
    parts = [
        f"<h2>{escape(target.name)}{_threads(target)}</h2>",
        by_layer(models, decisions),
        f"<p class='note'>{escape(' '.join(target.isa))}<br>{escape(versions)}<br>target {escape(target.key)}</p>",
        f"<p>{escape(overview([summarize(row) for row in rows]))}</p>",
    ]
    by_dtype: dict[str, list[Decision]] = {}
    for decision in rows:
        by_dtype.setdefault(workloads.dtype_name(Problem.from_dict(decision.problem)), []).append(decision)
    for place, (dtype, group) in enumerate(by_dtype.items()):
        parts.append(f"<h2>{escape(dtype)}</h2>")
        for index, chart in enumerate(charts(group, ceilings)):
            parts.append(f"<h3>{escape(chart.title)}</h3><p class='note'>{escape(chart.note)}</p>")
            parts.append(draw(chart, f"{prefix}d{place}c{index}"))
        parts.append(table(group))
    return "\n".join(parts)


def _threads(target: Target) -> str:
    """``, 2 threads``; nothing for a GPU."""
    return f", {target.threads} threads" if target.device == "cpu" else ""


def overview(rows: Iterable[Row]) -> str:
    """How many problems were won, tied or lost, and the geometric mean of the paired speed-ups over ATen."""
    every = list(rows)
    served = [row.speedup for row in every if row.outcome != "none_valid"]
    counts = {name: sum(row.outcome == name for row in every) for name in _OUTCOMES}
    mean = math.exp(sum(math.log(value) for value in served) / len(served)) if served else float("nan")
    text = f"{len(every)} problems: {counts['winner']} won, {counts['tie']} tied with ATen"
    if counts["none_valid"]:
        text += f", {counts['none_valid']} without a valid candidate"
    return text + (f". Geometric mean of the speed-up over ATen, ties counted as 1: {mean:.2f}x." if served else ".")


def table(decisions: Sequence[Decision]) -> str:
    """A row per problem: ATen, best, speed-up with its interval, which kernel, and why the race stopped."""
    heads = ("problem (MxNxK)", "outcome", "ATen", "best", "speed-up [95%]", "kernel", "tried", "why it stopped")
    return (
        rows_table(heads, "".join(_table_row(decision) for decision in decisions))
        + f"<p class='note'>{escape(HOW)}</p>"
    )


def _table_row(decision: Decision) -> str:
    row, trouble = summarize(decision), disturbance(decision)
    speed = f"{row.speedup:.2f}x [{row.lo:.2f}-{row.hi:.2f}]" if row.outcome == "winner" else "-"
    mark = f"<br><span class='disturbed'>disturbed: {escape(trouble)}</span>" if trouble else ""
    cells = (
        f"<td>{escape(row.label)}</td><td>{_OUTCOMES[row.outcome]}{mark}</td>"
        f"{seconds(row.aten_s)}{seconds(row.best_s)}{number(row.speedup, speed)}"
        f"<td>{_code(row.best_id)}</td>"
        f"{number(row.tried, f'{row.tried} (+{row.illegal} illegal)')}"
        f"<td>{escape(decision.stopped)}{_failures(decision)}</td>"
    )
    return f"<tr class='{row.outcome}'>{cells}</tr>"


def _code(candidate: str) -> str:
    """A candidate's id, which may break after its commas."""
    return f"<code>{escape(candidate).replace(',', ',<wbr>')}</code>"


def _failures(decision: Decision) -> str:
    bad = [row for row in decision.evidence if row.verdict is not None and not row.verdict.ok]
    if not bad:
        return ""
    items = "".join(
        f"<li>{_code(row.id)}: {escape(row.verdict.kind)} {escape(row.verdict.detail)}</li>"
        for row in bad
        if row.verdict is not None
    )
    return f"<details><summary>{len(bad)} refused</summary><ul>{items}</ul></details>"
