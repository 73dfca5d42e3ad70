"""The report's first section: the time that a forward of each model saves, in total and by layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from .cells import number_cell, rows_table, time_cell
from .escaped import escape
from .layers import Layer, Model, Saving, Use, forward, saving
from .rows import disturbances_of, summarize, time_text

if TYPE_CHECKING:
    from ..core.decision import Decision


def by_layer(models: Mapping[str, Model], decisions: Sequence[Decision]) -> str:
    """Return the HTML with the time that a forward of each model saves, and a table by layer.

    Without models, it has the time saved by calling each problem once.
    """
    rows = {decision.problem_key: summarize(decision) for decision in decisions}
    if not models:
        once = Model(("",), tuple(Use(0, "", key, 1) for key in rows))
        sentence = _saving_text("Each of these problems, called once", saving(forward(once, 0, rows)))
        hint = "Tuned as a model (gemmtune tune file.py:factory), this says what a forward saves, and in which layers."
        return f"<p class='answer'>{sentence}</p><p class='note'>{hint}</p>"
    disturbed = {decision.problem_key for decision in decisions if disturbances_of(decision)}
    parts = []
    for name, model in models.items():
        for call, inputs in enumerate(model.inputs):
            layers = forward(model, call, rows)
            if layers:
                label = f"One forward of {escape(name)} with {escape(inputs)}"
                parts.append(
                    f"<p class='answer'>{_saving_text(label, saving(layers))}</p>{_layers_table(layers, disturbed)}"
                )
    note = (
        "Calls of a forward times what one takes by its decision, each problem by itself. What else a forward does "
        "takes its time besides; gemmtune.optimize() times the whole. A layer's numbers are written *."
    )
    return "\n".join([*parts, f"<p class='note'>{note}</p>"])


def _saving_text(label: str, total: Saving) -> str:
    """Return the text of a saving: the times with ATen and with the chosen kernels, and their difference.

    label: whose times they are; the subject of the first sentence.
    """
    text = (
        f"{label}: matrix multiplies take {time_text(total.aten_s)} with ATen and {time_text(total.served_s)} with "
        f"what serves. <b>{time_text(total.aten_s - total.served_s)} saved</b> "
        f"[{time_text(total.lo_s)} to {time_text(total.hi_s)}]"
    )
    text += f", {total.aten_s / total.served_s:.2f}x." if total.served_s > 0 else "."
    return text + (f" Calls that are not decided, and left out: {total.undecided}." if total.undecided else "")


def _layers_table(layers: Sequence[Layer], disturbed: Collection[str]) -> str:
    heads = ("layer", "modules", "problem (MxNxK)", "calls", "ATen", "served", "saved", "share of it", "kernel")
    total = sum(layer.saved_s for layer in layers) or 1.0
    body = "".join(_layer_row(layer, total, layer.problem_key in disturbed) for layer in layers)
    return rows_table(heads, body)


def _layer_row(layer: Layer, total_s: float, disturbed: bool) -> str:
    row = layer.row
    label = row.label if row is not None else layer.problem_key
    times = "".join(time_cell(value) for value in (layer.aten_s, layer.served_s, layer.saved_s))
    serves = "not decided" if row is None else row.kernel if row.outcome == "winner" else "ATen"
    mark = " <span class='disturbed'>(disturbed)</span>" if disturbed else ""
    return (
        f"<tr><td>{escape(layer.name or '(outside of its modules)')}</td>{number_cell(layer.modules)}"
        f"<td>{escape(label)}{mark}</td>{number_cell(layer.calls)}{times}"
        f"{number_cell(layer.saved_s / total_s, f'{layer.saved_s / total_s:.0%}')}<td>{escape(serves)}</td></tr>"
    )
