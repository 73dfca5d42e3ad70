"""The report's HTML: a section per machine and dtype with plots and tables. Everything shown is escaped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from .. import workloads
from ..problem import Problem
from . import interactive, svg
from .charts import Chart, charts
from .escaped import escape
from .layers import Layer, Model, Saving, Use, forward, saving
from .rows import HOW, Row, disturbance, duration, ordered, summarize

if TYPE_CHECKING:
    from ..decision import Decision
    from ..target import Target

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

# Each table has a field above it that filters its rows; a click on a head sorts them, a second one the other way.
_SCRIPT = """
document.querySelectorAll('table').forEach(function (table) {
  var body = table.tBodies[0], field = table.previousElementSibling;
  field.oninput = function () {
    Array.from(body.rows).forEach(function (row) {
      row.hidden = !row.textContent.toLowerCase().includes(field.value.toLowerCase());
    });
  };
  table.querySelectorAll('th').forEach(function (head, place) {
    head.onclick = function () {
      var way = head.dataset.way = head.dataset.way === '1' ? '-1' : '1';
      function value(row) { var cell = row.cells[place]; return 'v' in cell.dataset ? +cell.dataset.v : cell.textContent; }
      Array.from(body.rows).sort(function (a, b) {
        var p = value(a), q = value(b);
        return way * (typeof p === 'number' ? p - q : p.localeCompare(q));
      }).forEach(function (row) { body.append(row); });
    };
  });
});
"""

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
    return "\n".join([*parts, f"<script>{_SCRIPT}</script>", "</body></html>\n"])


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
    for number, (dtype, group) in enumerate(by_dtype.items()):
        parts.append(f"<h2>{escape(dtype)}</h2>")
        for index, chart in enumerate(charts(group, ceilings)):
            parts.append(f"<h3>{escape(chart.title)}</h3><p class='note'>{escape(chart.note)}</p>")
            parts.append(draw(chart, f"{prefix}d{number}c{index}"))
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


def by_layer(models: Mapping[str, Model], decisions: Sequence[Decision]) -> str:
    """What a forward of each model saves, and by layer where. Without a model: what each problem once saves."""
    rows = {decision.problem_key: summarize(decision) for decision in decisions}
    if not models:
        once = Model(("",), tuple(Use(0, "", key, 1) for key in rows))
        words = _answer("Each of these problems, called once", saving(forward(once, 0, rows)))
        hint = "Tuned as a model (gemmtune tune file.py:factory), this says what a forward saves, and in which layers."
        return f"<p class='answer'>{words}</p><p class='note'>{hint}</p>"
    disturbed = {decision.problem_key for decision in decisions if disturbance(decision)}
    parts = []
    for name, model in models.items():
        for call, inputs in enumerate(model.inputs):
            layers = forward(model, call, rows)
            if layers:
                which = f"One forward of {escape(name)} with {escape(inputs)}"
                parts.append(
                    f"<p class='answer'>{_answer(which, saving(layers))}</p>{_layers_table(layers, disturbed)}"
                )
    note = (
        "Calls of a forward times what one takes by its decision, each problem by itself. What else a forward does takes "
        "its time besides; gemmtune.optimize() times the whole. A layer's numbers are written *."
    )
    return "\n".join([*parts, f"<p class='note'>{note}</p>"])


def _answer(what: str, found: Saving) -> str:
    """``what`` saves so much, in a sentence or two."""
    text = (
        f"{what}: matrix multiplies take {duration(found.aten_s)} with ATen and {duration(found.served_s)} with what "
        f"serves. <b>{duration(found.aten_s - found.served_s)} saved</b> "
        f"[{duration(found.lo_s)} to {duration(found.hi_s)}]"
    )
    text += f", {found.aten_s / found.served_s:.2f}x." if found.served_s > 0 else "."
    return text + (f" {found.undecided} more calls are not decided and left out." if found.undecided else "")


def _layers_table(layers: Sequence[Layer], disturbed: Collection[str]) -> str:
    heads = ("layer", "modules", "problem (MxNxK)", "calls", "ATen", "served", "saved", "share of it", "kernel")
    total = sum(layer.saved_s for layer in layers) or 1.0
    body = "".join(_layer_row(layer, total, layer.problem_key in disturbed) for layer in layers)
    return _table(heads, body)


def _layer_row(layer: Layer, total_s: float, disturbed: bool) -> str:
    row = layer.row
    label = row.label if row is not None else layer.problem_key
    times = "".join(_seconds(value) for value in (layer.aten_s, layer.served_s, layer.saved_s))
    serves = "not decided" if row is None else row.kernel if row.outcome == "winner" else "ATen"
    mark = " <span class='disturbed'>(disturbed)</span>" if disturbed else ""
    return (
        f"<tr><td>{escape(layer.name or '(outside of its modules)')}</td>{_number(layer.modules)}"
        f"<td>{escape(label)}{mark}</td>{_number(layer.calls)}{times}"
        f"{_number(layer.saved_s / total_s, f'{layer.saved_s / total_s:.0%}')}<td>{escape(serves)}</td></tr>"
    )


def table(decisions: Sequence[Decision]) -> str:
    """A row per problem: ATen, best, speed-up with its interval, which kernel, and why the race stopped."""
    heads = ("problem (MxNxK)", "outcome", "ATen", "best", "speed-up [95%]", "kernel", "tried", "why it stopped")
    return _table(heads, "".join(_table_row(decision) for decision in decisions)) + f"<p class='note'>{escape(HOW)}</p>"


def _table(heads: Sequence[str], body: str) -> str:
    """A table that sorts and filters."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    field = "<input type='search' placeholder='show rows with ...' aria-label='show rows with'>"
    return f"{field}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _number(value: float, text: str = "") -> str:
    """A cell that sorts by its value."""
    return f"<td class='n' data-v='{value:.9g}'>{escape(text or str(value))}</td>"


def _seconds(value: float | None) -> str:
    return _number(-1.0 if value is None else value, duration(value))


def _table_row(decision: Decision) -> str:
    row, trouble = summarize(decision), disturbance(decision)
    speed = f"{row.speedup:.2f}x [{row.lo:.2f}-{row.hi:.2f}]" if row.outcome == "winner" else "-"
    mark = f"<br><span class='disturbed'>disturbed: {escape(trouble)}</span>" if trouble else ""
    cells = (
        f"<td>{escape(row.label)}</td><td>{_OUTCOMES[row.outcome]}{mark}</td>"
        f"{_seconds(row.aten_s)}{_seconds(row.best_s)}{_number(row.speedup, speed)}"
        f"<td>{_code(row.best_id)}</td>"
        f"{_number(row.tried, f'{row.tried} (+{row.illegal} illegal)')}"
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
