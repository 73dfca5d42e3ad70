"""The report's plots as data, drawn from decisions: what to show, not how to draw it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.problem import Problem
from ..core.workloads import label
from .rows import backend_of, best_by_backend, duration, measured, median_s, summarize

if TYPE_CHECKING:
    from ..core.decision import Decision


@dataclass(frozen=True, slots=True)
class Bars:
    """Grouped bars on a logarithmic axis: a group per label, a bar per series (None: not measured)."""

    title: str
    note: str
    unit: str
    labels: tuple[str, ...]
    series: dict[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class Point:
    """One mark; ``text`` is shown on hovering."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """Marks (and lines) on a logarithmic x axis; y is logarithmic too, or, with ``rows``, an index into them."""

    title: str
    note: str
    x_title: str
    y_title: str
    series: dict[str, tuple[Point, ...]]
    lines: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    rows: tuple[str, ...] = ()


Chart = Bars | Scatter


def charts(decisions: Sequence[Decision], ceilings: Mapping[str, float]) -> list[Chart]:
    """The plots of one group of decisions (one target, one dtype); fewer when nothing was measured."""
    timed = [decision for decision in decisions if measured(decision)]
    return [times(timed), roofline(timed, ceilings), spread(timed)] if timed else []


def _aten_first(names: Iterable[str]) -> list[str]:
    """So that a backend has the same colour in every plot."""
    return sorted(names, key=lambda name: (name != "aten", name))


def _labels(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """A label per decision, numbered where problems differ only in what labels leave out (layouts, alignment).

    Plots take equal labels for one row.
    """
    seen: Counter[str] = Counter()
    found = []
    for decision in decisions:
        text = label(Problem.from_dict(decision.problem))
        seen[text] += 1
        found.append(text if seen[text] == 1 else f"{text} ({seen[text]})")
    return tuple(found)


def times(decisions: Sequence[Decision]) -> Bars:
    """Time a call by shape and backend: the best valid kernel of each backend."""
    best = [best_by_backend(decision) for decision in decisions]
    series: dict[str, tuple[float | None, ...]] = {}
    for name in _aten_first({name for row in best for name in row}):
        seconds = [median_s(row.get(name)) for row in best]
        series[name] = tuple(None if value is None else value * 1e6 for value in seconds)
    labels = _labels(decisions)
    note = "Median time of a call, best valid kernel of each backend. Lower is better; the axis is logarithmic."
    return Bars("Time by shape and backend", note, "us", labels, series)


def roofline(decisions: Sequence[Decision], ceilings: Mapping[str, float]) -> Scatter:
    """Achieved rate against what memory and arithmetic allow, from each problem's least traffic."""
    series: dict[str, list[Point]] = {}
    for decision in decisions:
        problem = Problem.from_dict(decision.problem)
        for name, row in best_by_backend(decision).items():
            if row.sample is not None:
                rate = problem.flops / row.sample.median_s
                text = f"{label(problem)}: {rate / 1e9:.1f} GFLOP/s, {duration(row.sample.median_s)}, {row.id}"
                series.setdefault(name, []).append(Point(problem.flops / problem.min_bytes, rate / 1e9, text))
    marks = {name: tuple(series[name]) for name in _aten_first(series)}
    lines, note = _ceiling_lines(decisions, marks, ceilings)
    title = "Achieved against the roofline"
    return Scatter(title, note, "operations per byte of least traffic", "GFLOP/s (int8: GOP/s)", marks, lines)


def _ceiling_lines(
    decisions: Sequence[Decision], marks: Mapping[str, Sequence[Point]], ceilings: Mapping[str, float]
) -> tuple[dict[str, tuple[tuple[float, float], ...]], str]:
    """The two ceilings over the plotted range, and in words where each comes from."""
    points = [point for group in marks.values() for point in group]
    dtype = Problem.from_dict(decisions[0].problem).a.dtype
    observed = max(point.y for point in points)
    measured_peak = ceilings.get("int8" if dtype == "uint8" else dtype, 0.0) / 1e9
    peak = max(observed, measured_peak)
    read, source = ceilings.get("read", 0.0) / 1e9, "measured by summing 256 MB with the same threads"
    if read <= 0:
        read, source = (
            max(point.y / point.x for point in points),
            "the best any kernel here reached (none was measured)",
        )
    origin = "ATen's 1024^3 product" if measured_peak >= observed else "the best any kernel here reached"
    left, right = min(point.x for point in points) / 2, max(point.x for point in points) * 2
    corner = min(max(peak / read, left), right)
    lines: dict[str, tuple[tuple[float, float], ...]] = {
        f"memory: {read:.1f} GB/s": ((left, left * read), (corner, corner * read)),
        f"arithmetic: {peak:.0f} GFLOP/s": ((corner, peak), (right, peak)),
    }
    note = (
        f"Ceilings of this machine, not of a data sheet. Memory: {source}. Arithmetic: {origin}. "
        "Problems that fit into a cache can lie above the memory line."
    )
    return lines, note


def spread(decisions: Sequence[Decision]) -> Scatter:
    """Every valid candidate's time over ATen's best, a row per problem."""
    series: dict[str, list[Point]] = {}
    for place, decision in enumerate(decisions):
        aten_s = summarize(decision).aten_s or measured(decision)[0].sample.median_s  # type: ignore[union-attr]
        for row in measured(decision):
            if row.sample is not None:
                ratio = row.sample.median_s / aten_s
                text = f"{row.id}: {ratio:.3f}x ATen's time, {duration(row.sample.median_s)}, {row.stage}"
                series.setdefault(backend_of(row), []).append(Point(ratio, place, text))
    rows = _labels(decisions)
    note = "Median time of every valid candidate over that of ATen's best one: left of 1 is faster than ATen."
    marks = {name: tuple(series[name]) for name in _aten_first(series)}
    return Scatter("Spread of the candidates", note, "time / ATen's best", "", marks, rows=rows)
