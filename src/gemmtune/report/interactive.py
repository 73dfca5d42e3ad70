"""Charts drawn by plotly.js in the reader's browser: the figures as JSON, the library embedded once, no network."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from .charts import Bars, Chart, Scatter
from .svg import COLOURS


def library() -> str | None:
    """The plotly.js source to embed; None when plotly is not installed (``pip install 'gemmtune[report]'``)."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError:
        return None
    source: str = get_plotlyjs()
    return source


def draw(chart: Chart, name: str) -> str:
    """A div called ``name`` and the script that draws the chart into it."""
    traces = _bars(chart) if isinstance(chart, Bars) else _scatter(chart)
    # "</" inside a script element could end it, whatever the JSON says.
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
            "marker": {"color": COLOURS[place % len(COLOURS)]},
            "hovertemplate": f"%{{x}}<br>%{{y:.4g}} {escape(chart.unit)}",
        }
        for place, (name, values) in enumerate(chart.series.items())
    ]


def _scatter(chart: Scatter) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = []
    for place, (name, points) in enumerate(chart.series.items()):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape(name),
                "x": [point.x for point in points],
                "y": [escape(chart.rows[int(point.y)]) if chart.rows else point.y for point in points],
                "text": [escape(point.text) for point in points],
                "hovertemplate": "%{text}",
                "marker": {"color": COLOURS[place % len(COLOURS)], "size": 8, "opacity": 0.7},
            }
        )
    for name, line in chart.lines.items():
        xs, ys = [point[0] for point in line], [point[1] for point in line]
        traces.append({"type": "scatter", "mode": "lines", "name": escape(name), "x": xs, "y": ys, "hoverinfo": "name"})
    return traces


def _layout(chart: Chart) -> dict[str, Any]:
    common: dict[str, Any] = {
        "margin": {"t": 20, "r": 20},
        "template": "plotly_white",
        "legend": {"orientation": "h", "y": 1.12},
    }
    if isinstance(chart, Bars):
        y = {"type": "log", "title": {"text": f"{escape(chart.unit)} per call"}}
        return {
            **common,
            "barmode": "group",
            "yaxis": y,
            "xaxis": {"automargin": True, "tickangle": -35},
            "height": 440,
        }
    x = {"type": "log", "title": {"text": escape(chart.x_title)}}
    if chart.rows:
        # Set out all rows, first on top, also those with a single mark.
        rows = {"type": "category", "categoryarray": [escape(r) for r in reversed(chart.rows)], "automargin": True}
        return {**common, "xaxis": x, "yaxis": rows, "height": 140 + 24 * len(chart.rows)}
    return {**common, "xaxis": x, "yaxis": {"type": "log", "title": {"text": escape(chart.y_title)}}, "height": 480}
