"""The report's first answer: what a forward of each model saves, and in which layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from .cells import number, rows_table, seconds
from .escaped import escape
from .layers import Layer, Model, Saving, Use, forward, saving
from .rows import disturbance, duration, summarize

if TYPE_CHECKING:
    from ..core.decision import Decision


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
        "Calls of a forward times what one takes by its decision, each problem by itself. What else a forward does "
        "takes its time besides; gemmtune.optimize() times the whole. A layer's numbers are written *."
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
    return text + (f" Calls that are not decided, and left out: {found.undecided}." if found.undecided else "")


def _layers_table(layers: Sequence[Layer], disturbed: Collection[str]) -> str:
    heads = ("layer", "modules", "problem (MxNxK)", "calls", "ATen", "served", "saved", "share of it", "kernel")
    total = sum(layer.saved_s for layer in layers) or 1.0
    body = "".join(_layer_row(layer, total, layer.problem_key in disturbed) for layer in layers)
    return rows_table(heads, body)


def _layer_row(layer: Layer, total_s: float, disturbed: bool) -> str:
    row = layer.row
    label = row.label if row is not None else layer.problem_key
    times = "".join(seconds(value) for value in (layer.aten_s, layer.served_s, layer.saved_s))
    serves = "not decided" if row is None else row.kernel if row.outcome == "winner" else "ATen"
    mark = " <span class='disturbed'>(disturbed)</span>" if disturbed else ""
    return (
        f"<tr><td>{escape(layer.name or '(outside of its modules)')}</td>{number(layer.modules)}"
        f"<td>{escape(label)}{mark}</td>{number(layer.calls)}{times}"
        f"{number(layer.saved_s / total_s, f'{layer.saved_s / total_s:.0%}')}<td>{escape(serves)}</td></tr>"
    )
