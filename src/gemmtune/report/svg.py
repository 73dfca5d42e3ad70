"""Charts as inline SVG, for machines without plotly. Nothing is loaded; <title> elements are the hover text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .charts import Bars, Chart, Curves, Scatter
from .escaped import escape

COLOURS = ("#7a869a", "#1f6feb", "#d9822b", "#2da44e", "#8250df", "#cf222e", "#0a7d91", "#bf3989")
_WIDTH, _RIGHT_MARGIN, _TOP_MARGIN = 960, 20, 34
_MAX_LABEL_LENGTH = 60


@dataclass(frozen=True, slots=True)
class _LogAxis:
    """A logarithmic axis, which maps values between lo and hi (both positive) to pixels between start and end."""

    lo: float
    hi: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        fraction = (math.log10(value) - math.log10(self.lo)) / (math.log10(self.hi) - math.log10(self.lo))
        return self.start + fraction * (self.end - self.start)

    def ticks(self) -> list[float]:
        return log_ticks(self.lo, self.hi)


def log_ticks(lo: float, hi: float) -> list[float]:
    """Return the ticks between lo and hi: 1, 2 and 5 of each decade, or only 1 for more than four decades."""
    decades = range(math.floor(math.log10(lo)), math.ceil(math.log10(hi)) + 1)
    wanted = (1, 2, 5) if len(decades) <= 5 else (1,)
    # Parsed from text, so that a tick is 2e-05 and not 2.0000000000000002e-05.
    return [tick for d in decades for t in wanted if lo <= (tick := float(f"{t}e{d}")) <= hi]


def log_range(values: Iterable[float], margin: float = 1.25) -> tuple[float, float]:
    """Return the range of the positive values, extended by the factor ``margin`` downwards and by 1.25 upwards."""
    positive = [value for value in values if value > 0] or [1.0]
    return min(positive) / margin, max(positive) * 1.25


def _axis(values: Iterable[float], start: float, end: float, margin: float = 1.25) -> _LogAxis:
    return _LogAxis(*log_range(values, margin), start, end)


def draw(chart: Chart) -> str:
    """Return the chart as an <svg> element."""
    if isinstance(chart, Bars):
        return _bars(chart)
    return _curves(chart) if isinstance(chart, Curves) else _scatter(chart)


def _plot_left(labels: Sequence[str]) -> float:
    """Return the x coordinate at which the plot begins: right of the longest label, at about 6 pixels per character."""
    return 24 + 6.2 * min(_MAX_LABEL_LENGTH, max((len(text) for text in labels), default=0))


def _row_label(left: float, y: float, text: str) -> str:
    shown = text if len(text) <= _MAX_LABEL_LENGTH else text[: _MAX_LABEL_LENGTH - 1] + "\u2026"
    return _text(left - 8, y, shown, "end")


def _bars(chart: Bars) -> str:
    """Return horizontal bars, a group per label. They are horizontal so that long labels stay readable."""
    left = _plot_left(chart.labels)
    thick, gap = 12, 10
    names = list(chart.series)
    height = _TOP_MARGIN + len(chart.labels) * (thick * len(names) + gap) + 40
    axis = _axis((v for row in chart.series.values() for v in row if v), left, _WIDTH - _RIGHT_MARGIN, margin=2.0)
    parts = [_legend(names, left), *_x_grid(axis, height - 36, f"{chart.unit} per call")]
    y = float(_TOP_MARGIN)
    for index, text in enumerate(chart.labels):
        parts.append(_row_label(left, y + thick * len(names) / 2 + 4, text))
        for series_index, name in enumerate(names):
            value = chart.series[name][index]
            if value:
                parts.append(
                    _bar(
                        axis,
                        value,
                        y + series_index * thick,
                        thick - 1,
                        series_index,
                        f"{name}: {value:.4g} {chart.unit}",
                    )
                )
        y += thick * len(names) + gap
    return _svg(height, parts, chart.title)


def _bar(axis: _LogAxis, value: float, y: float, thick: int, series_index: int, text: str) -> str:
    width = max(1.0, axis(value) - axis.start)
    colour = COLOURS[series_index % len(COLOURS)]
    title = f"<title>{escape(text)}</title>"
    return f'<rect x="{axis.start:.1f}" y="{y:.1f}" width="{width:.1f}" height="{thick}" fill="{colour}">{title}</rect>'


def _scatter(chart: Scatter) -> str:
    names, left = list(chart.series), _plot_left(chart.rows or (chart.y_title,))
    height = _TOP_MARGIN + (22 * len(chart.rows) + 46 if chart.rows else 400)
    bottom = height - 36
    points = [(p.x, p.y) for group in chart.series.values() for p in group]
    all_points = points + [point for line in chart.lines.values() for point in line]
    x = _axis((point[0] for point in all_points), left, _WIDTH - _RIGHT_MARGIN)
    parts = [_legend([*names, *chart.lines], left), *_x_grid(x, bottom, chart.x_title)]
    if chart.rows:
        parts += [_row_label(left, _TOP_MARGIN + 22 * i + 18, text) for i, text in enumerate(chart.rows)]
        heights = {point: _TOP_MARGIN + 22 * point[1] + 14 for point in all_points}
        if x.lo < 1 < x.hi:
            parts.append(
                f'<line x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{_TOP_MARGIN - 6}" y2="{bottom:.1f}" class="even"/>'
            )
    else:
        y = _axis((point[1] for point in all_points), bottom, _TOP_MARGIN)
        parts += _y_grid(y, chart.y_title, left)
        heights = {point: y(point[1]) for point in all_points}
    for index, line in enumerate(chart.lines.values(), start=len(names)):
        parts.append(_polyline([(x(px), heights[px, py]) for px, py in line], COLOURS[index % len(COLOURS)]))
    for index, group in enumerate(chart.series.values()):
        for p in group:
            title = f"<title>{escape(p.text)}</title>"
            attributes = f'cx="{x(p.x):.1f}" cy="{heights[p.x, p.y]:.1f}" r="4" fill="{COLOURS[index % len(COLOURS)]}"'
            parts.append(f'<circle {attributes} fill-opacity="0.7">{title}</circle>')
    return _svg(height, parts, chart.title)


def _curves(chart: Curves) -> str:
    left, height = _plot_left((chart.y_title,)), _TOP_MARGIN + 400
    bottom = height - 36
    x = _axis((point[0] for point in chart.points), left, _WIDTH - _RIGHT_MARGIN)
    y = _axis((point[1] for point in chart.points), bottom, _TOP_MARGIN)
    colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate([*chart.series, *chart.dashed])}
    parts = [_legend(list(colours), left)]
    for band in chart.bands:
        start, end = (min(max(edge, x.lo), x.hi) for edge in (band.first, band.last))
        size = f'x="{x(start):.1f}" width="{x(end) - x(start):.1f}" y="{_TOP_MARGIN - 6}" height="{bottom - 28:.1f}"'
        title = f"<title>{escape(band.name)}</title>"
        parts.append(f'<rect {size} fill="{colours[band.name]}" fill-opacity="0.15">{title}</rect>')
    parts += [*_x_grid(x, bottom, chart.x_title), *_y_grid(y, chart.y_title, left)]
    for name, group in chart.series.items():
        parts.append(_polyline([(x(p.x), y(p.y)) for p in group], colours[name]))
        for p in group:
            attributes = f'cx="{x(p.x):.1f}" cy="{y(p.y):.1f}" r="3" fill="{colours[name]}"'
            parts.append(f"<circle {attributes}><title>{escape(p.text)}</title></circle>")
    for name, line in chart.dashed.items():
        parts.append(_polyline([(x(px), y(py)) for px, py in line], colours[name], ' stroke-dasharray="6 4"'))
    return _svg(height, parts, f"{chart.title}. {chart.note}")


def _polyline(pixels: Iterable[tuple[float, float]], colour: str, more: str = "") -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{more}/>'


def _legend(names: Sequence[str], left: float) -> str:
    parts, x = [], left
    for index, name in enumerate(names):
        parts.append(f'<rect x="{x:.0f}" y="8" width="12" height="12" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(_text(x + 16, 18, name))
        x += 40 + 7 * len(name)
    return "".join(parts)


def _x_grid(axis: _LogAxis, bottom: float, title: str) -> list[str]:
    parts = [_text((axis.start + axis.end) / 2, bottom + 32, title, "middle")]
    for tick in axis.ticks():
        x = axis(tick)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP_MARGIN - 6}" y2="{bottom:.1f}" class="grid"/>')
        parts.append(_text(x, bottom + 15, f"{tick:g}", "middle"))
    return parts


def _y_grid(axis: _LogAxis, title: str, left: float) -> list[str]:
    parts = [_text(8, _TOP_MARGIN + 10, title)]
    for tick in axis.ticks():
        y = axis(tick)
        parts.append(f'<line x1="{left:.1f}" x2="{_WIDTH - _RIGHT_MARGIN}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(_text(left - 8, y + 4, f"{tick:g}", "end"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Iterable[str], description: str) -> str:
    """Return the <svg> element. description: what a screen reader says instead of the picture."""
    frame = f'viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(description)}"'
    return f"<svg {frame}>{''.join(parts)}</svg>"
