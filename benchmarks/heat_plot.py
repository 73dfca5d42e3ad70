"""Draw heat maps of ratios: as SVG, or as HTML by plotly (``pip install 'gemmtune[report]'``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from gemmtune.report.escaped import escape

# The M of the columns, and the ratios of each row by its label; None where nothing was measured.
Table = tuple[Sequence[int], Mapping[str, Sequence[float | None]]]

WORST = 2.0  # this ratio and larger ones have the darkest colour
_SIDE = 640  # pixels of a map
_LEFT, _TOP, _BOTTOM = 90, 40, 60
_LIGHT, _DARK, _UNKNOWN = (247, 251, 255), (180, 4, 38), "#d0d7de"
_STYLE = "<style>text{font:11px sans-serif;fill:#57606a}</style>"
_MAX_TICKS = 16


def save(path: Path, tables: Mapping[str, Table]) -> None:
    """Write the heat maps, by title, one below the other. Raises ImportError for HTML without plotly."""
    path.write_text(_html(tables) if path.suffix == ".html" else _svg(tables), encoding="utf-8")


def _colour(ratio: float | None) -> str:
    """Return the colour of a ratio, on a logarithmic scale from 1 to ``WORST``."""
    if ratio is None:
        return _UNKNOWN
    share = min(max(math.log(ratio) / math.log(WORST), 0.0), 1.0)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(_LIGHT, _DARK, strict=True))
    return f"rgb({red},{green},{blue})"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(tables: Mapping[str, Table]) -> str:
    step = _TOP + _SIDE + _BOTTOM
    parts = [part for index, (title, table) in enumerate(tables.items()) for part in _map(title, table, index * step)]
    size = f'viewBox="0 0 {_LEFT + _SIDE + 20} {step * len(tables)}"'
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="background:#fff">'
    return f"{frame}{_STYLE}{''.join(parts)}</svg>\n"


def _map(title: str, table: Table, offset: float) -> list[str]:
    """Return the elements of one heat map, ``offset`` pixels below the top."""
    columns, rows = table
    width, height, top = _SIDE / len(columns), _SIDE / len(rows), offset + _TOP
    parts = [_text(_LEFT, top - 16, f"{title}: {_SCALE}", "start")]
    for i, (label, ratios) in enumerate(rows.items()):
        for j, (m, ratio) in enumerate(zip(columns, ratios, strict=True)):
            value = "not timed" if ratio is None else f"{ratio:.3f}"
            frame = f'x="{_LEFT + j * width:.2f}" y="{top + i * height:.2f}" width="{width:.2f}" height="{height:.2f}"'
            hover = f"<title>{escape(f'kernel of {label} at M = {m}: {value}')}</title>"
            parts.append(f'<rect {frame} fill="{_colour(ratio)}">{hover}</rect>')
        if i % -(-len(rows) // _MAX_TICKS) == 0 or not label.isdecimal():
            parts.append(_text(_LEFT - 6, top + (i + 0.5) * height + 4, label, "end"))
    for j in range(0, len(columns), -(-len(columns) // _MAX_TICKS)):
        parts.append(_text(_LEFT + (j + 0.5) * width, top + _SIDE + 16, str(columns[j]), "middle"))
    parts.append(_text(_LEFT + _SIDE / 2, top + _SIDE + 36, "M", "middle"))
    return [*parts, _text(8, top - 4, "tuned M", "start")]


_SCALE = f"time over that of the M's own kernel, from 1 (light) to {WORST:g} (dark)"


def _html(tables: Mapping[str, Table]) -> str:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(rows=len(tables), cols=1, subplot_titles=[f"{title}: {_SCALE}" for title in tables])
    scale = [[0.0, _colour(1.0)], [1.0, _colour(WORST)]]
    for index, (columns, rows) in enumerate(tables.values(), 1):
        logs = [[None if ratio is None else math.log2(ratio) for ratio in ratios] for ratios in rows.values()]
        trace = go.Heatmap(
            x=[str(m) for m in columns], y=list(rows), z=logs, zmin=0.0, zmax=math.log2(WORST), colorscale=scale,
            text=[[None if ratio is None else f"{ratio:.3f}" for ratio in ratios] for ratios in rows.values()],
            hovertemplate="kernel of %{y} at M = %{x}: %{text}<extra></extra>", showscale=False,
        )  # fmt: skip
        figure.add_trace(trace, row=index, col=1)
        figure.update_xaxes(title_text="M", type="category", row=index, col=1)
        figure.update_yaxes(title_text="tuned M", type="category", autorange="reversed", row=index, col=1)
    figure.update_layout(height=760 * len(tables), width=860)
    return str(figure.to_html(include_plotlyjs=True))
