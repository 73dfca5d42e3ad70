"""Charts drawn by plotly.js in the browser. The page embeds the library once and the charts' data as JSON, so that no
network is needed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

from .charts import Bars, Chart, Curves, Scatter
from .escaped import escape
from .svg import COLOURS, log_range, log_ticks


def library() -> str | None:
    """Return the source of plotly.js; None if plotly is not installed (``pip install 'gemmtune[report]'``)."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        return None
    source: str = get_plotlyjs()
    return source


def draw(chart: Chart, name: str) -> str:
    """Return a div with the id ``name`` and the script that draws the chart into it."""
    if isinstance(chart, Bars):
        traces = _bars(chart)
    else:
        traces = _curves(chart) if isinstance(chart, Curves) else _scatter(chart)
    # "</" inside a script element could end the element, even within a JSON string.
    data = json.dumps({"traces": traces, "layout": _layout(chart)}).replace("</", "<\\/")
    draw_it = f'var f={data};Plotly.newPlot("{name}",f.traces,f.layout,{{responsive:true,displaylogo:false}});'
    return f'<div id="{name}"></div><script>(function(){{{draw_it}}})();</script>'


def _bars(chart: Bars) -> list[dict[str, Any]]:
    return [
        {
            "type": "bar",
            "name": escape(name),
            "x": [escape(text) for text in chart.labels],
            "y": list(values),
            "marker": {"color": COLOURS[index % len(COLOURS)]},
            "hovertemplate": f"%{{x}}<br>%{{y:.4g}} {escape(chart.unit)}",
        }
        for index, (name, values) in enumerate(chart.series.items())
    ]


def _scatter(chart: Scatter) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for index, (name, points) in enumerate(chart.series.items()):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape(name),
                "x": [point.x for point in points],
                "y": [escape(chart.rows[int(point.y)]) if chart.rows else point.y for point in points],
                "text": [escape(point.text) for point in points],
                "hovertemplate": "%{text}",
                "marker": {"color": COLOURS[index % len(COLOURS)], "size": 8, "opacity": 0.7},
            }
        )
    for index, (name, line) in enumerate(chart.lines.items(), start=len(traces)):
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": escape(name),
                "x": [point[0] for point in line],
                "y": [point[1] for point in line],
                "line": {"color": COLOURS[index % len(COLOURS)]},
                "hoverinfo": "name",
            }
        )
    return traces


def _curves(chart: Curves) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for name, points in chart.series.items():
        x, y, text = [p.x for p in points], [p.y for p in points], [escape(p.text) for p in points]
        traces.append({"mode": "lines+markers", "name": name, "x": x, "y": y, "text": text, "hovertemplate": "%{text}"})
    for name, line in chart.dashed.items():
        dash: dict[str, Any] = {"mode": "lines", "line": {"dash": "dash"}, "hoverinfo": "name"}
        traces.append({**dash, "name": name, "x": [point[0] for point in line], "y": [point[1] for point in line]})
    for trace, colour in zip(traces, itertools.cycle(COLOURS), strict=False):
        trace |= {"type": "scatter", "name": escape(trace["name"])}
        trace["line"] = {**trace.get("line", {}), "color": colour}
    return traces


def _curves_layout(chart: Curves) -> dict[str, Any]:
    colours = dict(zip(chart.series, itertools.cycle(COLOURS), strict=False))
    frame = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "layer": "below", "opacity": 0.15, "line": {"width": 0}}
    bands = [{**frame, "x0": b.first, "x1": b.last, "fillcolor": colours[b.name]} for b in chart.bands]
    x = _log_axis((point[0] for point in chart.points), chart.x_title)
    y = _log_axis((point[1] for point in chart.points), chart.y_title)
    return {"xaxis": x, "yaxis": y, "shapes": bands, "height": 480}


def _log_axis(values: Iterable[float], title: str, margin: float = 1.25) -> dict[str, Any]:
    """Return a logarithmic axis with full numbers at its ticks (plotly's own are bare digits: 2, 5, 10, 2, 5).

    margin: factor between the start of the axis and the smallest value.
    """
    lo, hi = log_range(values, margin)
    ticks = log_ticks(lo, hi)
    return {
        "type": "log",
        "title": {"text": escape(title)},
        "range": [math.log10(lo), math.log10(hi)],
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
    }


def _layout(chart: Chart) -> dict[str, Any]:
    common: dict[str, Any] = {
        "margin": {"t": 50, "r": 20},
        # The legend is above the plot, whatever its height, so that it never covers a mark.
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom"},
        "showlegend": True,
    }
    if isinstance(chart, Bars):
        values = [value for row in chart.series.values() for value in row if value]
        # The axis starts below the shortest bar, which would otherwise have no length.
        y = _log_axis(values, f"{chart.unit} per call", margin=2.0)
        return {
            **common,
            "barmode": "group",
            "yaxis": y,
            "xaxis": {"automargin": True, "tickangle": -35},
            "height": 440,
        }
    if isinstance(chart, Curves):
        return {**common, **_curves_layout(chart)}
    points = [(p.x, p.y) for group in chart.series.values() for p in group]
    points += [point for line in chart.lines.values() for point in line]
    x = _log_axis((point[0] for point in points), chart.x_title)
    if chart.rows:
        # List all rows with the first on top, also rows with a single mark.
        rows = {"type": "category", "categoryarray": [escape(r) for r in reversed(chart.rows)], "automargin": True}
        rows["range"] = [-0.7, len(chart.rows) - 0.3]
        line = {"width": 1, "dash": "dot"}
        line_at_1 = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "line": line}
        return {**common, "xaxis": x, "yaxis": rows, "shapes": [line_at_1], "height": 140 + 26 * len(chart.rows)}
    y = _log_axis((point[1] for point in points), chart.y_title)
    return {**common, "xaxis": x, "yaxis": y, "height": 480}
