"""The report's plots as data, computed from decisions. ``svg`` and ``interactive`` draw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..core.problem import Problem
from ..core.workloads import label
from .rows import backend_name, best_by_backend, median_s, summarize, time_text, timed_candidates

if TYPE_CHECKING:
    from ..core.decision import Decision


@dataclass(frozen=True, slots=True)
class Bars:
    """Grouped bars on a logarithmic axis: a group per label, a bar per series. A value is None if not measured."""

    title: str
    note: str
    unit: str
    labels: tuple[str, ...]
    series: dict[str, tuple[float | None, ...]]


@dataclass(frozen=True, slots=True)
class Point:
    """One mark of a Scatter. ``text`` is shown when the pointer is over it."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class Scatter:
    """Marks and lines on a logarithmic x axis. y is logarithmic too, or an index into ``rows`` if there are rows."""

    title: str
    note: str
    x_title: str
    y_title: str
    series: dict[str, tuple[Point, ...]]
    lines: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Band:
    """The x from ``first`` to ``last`` that are shaded in the colour of the series ``name``."""

    first: float
    last: float
    name: str


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines with marks on logarithmic axes, dashed lines without marks, and shaded ranges of x behind them."""

    title: str
    note: str
    x_title: str
    y_title: str
    series: dict[str, tuple[Point, ...]]
    dashed: dict[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    bands: tuple[Band, ...] = ()

    @property
    def points(self) -> list[tuple[float, float]]:
        """All x and y that are drawn."""
        marks = [(point.x, point.y) for group in self.series.values() for point in group]
        return marks + [point for line in self.dashed.values() for point in line]


Chart = Bars | Scatter | Curves


def charts(decisions: Sequence[Decision], ceilings: Mapping[str, float]) -> list[Chart]:
    """Return the plots of the decisions for one target and dtype; none if nothing was measured."""
    timed = [decision for decision in decisions if timed_candidates(decision)]
    return [time_bars(timed), roofline_plot(timed, ceilings), spread_plot(timed)] if timed else []


def _aten_first(names: Iterable[str]) -> list[str]:
    """Sort backends by name with ATen first, so that a backend has the same colour in every plot."""
    return sorted(names, key=lambda name: (name != "aten", name))


def _labels(decisions: Iterable[Decision]) -> tuple[str, ...]:
    """Return a label per decision. Equal labels are numbered, because plots would merge their rows.

    Labels are equal if problems differ only in properties that labels omit (layouts, alignment).
    """
    counts: Counter[str] = Counter()
    labels = []
    for decision in decisions:
        text = label(Problem.from_dict(decision.problem))
        counts[text] += 1
        labels.append(text if counts[text] == 1 else f"{text} ({counts[text]})")
    return tuple(labels)


def time_bars(decisions: Sequence[Decision]) -> Bars:
    """Return the plot of the time per call by shape and backend, for the best valid kernel of each backend."""
    best = [best_by_backend(decision) for decision in decisions]
    series: dict[str, tuple[float | None, ...]] = {}
    for name in _aten_first({name for row in best for name in row}):
        seconds = [median_s(row.get(name)) for row in best]
        series[name] = tuple(None if value is None else value * 1e6 for value in seconds)
    labels = _labels(decisions)
    note = "Median time of a call, best valid kernel of each backend. Lower is better; the axis is logarithmic."
    return Bars("Time by shape and backend", note, "us", labels, series)


def roofline_plot(decisions: Sequence[Decision], ceilings: Mapping[str, float]) -> Scatter:
    """Return the roofline plot: the achieved rate over operations per byte of each problem's minimum traffic."""
    series: dict[str, list[Point]] = {}
    for decision in decisions:
        problem = Problem.from_dict(decision.problem)
        for name, row in best_by_backend(decision).items():
            if row.sample is not None:
                rate = problem.flops / row.sample.median_s
                text = f"{label(problem)}: {rate / 1e9:.1f} GFLOP/s, {time_text(row.sample.median_s)}, {row.id}"
                series.setdefault(name, []).append(Point(problem.flops / problem.min_bytes, rate / 1e9, text))
    marks = {name: tuple(series[name]) for name in _aten_first(series)}
    lines, note = _ceiling_lines(decisions, marks, ceilings)
    title = "Achieved against the roofline"
    return Scatter(title, note, "operations per byte of least traffic", "GFLOP/s (int8: GOP/s)", marks, lines)


def _ceiling_lines(
    decisions: Sequence[Decision], marks: Mapping[str, Sequence[Point]], ceilings: Mapping[str, float]
) -> tuple[dict[str, tuple[tuple[float, float], ...]], str]:
    """Return the lines of the memory and arithmetic ceilings over the plotted range, and a note with their sources."""
    points = [(point.x, point.y) for group in marks.values() for point in group]
    dtype = Problem.from_dict(decisions[0].problem).a.dtype
    bandwidth, peak, note = machine_ceilings(points, dtype, ceilings)
    left, right = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
    corner = min(max(peak / bandwidth, left), right)
    lines: dict[str, tuple[tuple[float, float], ...]] = {
        f"memory: {bandwidth:.1f} GB/s": ((left, left * bandwidth), (corner, corner * bandwidth)),
        f"arithmetic: {peak:.0f} GFLOP/s": ((corner, peak), (right, peak)),
    }
    return lines, f"{note} Problems that fit into a cache can lie above the memory line."


def machine_ceilings(
    points: Sequence[tuple[float, float]], dtype: str, ceilings: Mapping[str, float]
) -> tuple[float, float, str]:
    """Return a machine's memory bandwidth in GB/s, its arithmetic rate in GFLOP/s, and a note with their sources.

    points: operations per byte, and GFLOP/s, of every kernel that was timed. dtype: of A. ceilings: as measured, in
    bytes and operations per second; where there is none, the best that a kernel reached counts.
    """
    observed = max(rate for _, rate in points)
    measured_peak = ceilings.get("int8" if dtype == "uint8" else dtype, 0.0) / 1e9
    peak = max(observed, measured_peak)
    bandwidth, memory_source = ceilings.get("read", 0.0) / 1e9, "measured by summing 256 MB with the same threads"
    if bandwidth <= 0:
        bandwidth, memory_source = (
            max(rate / intensity for intensity, rate in points),
            "the best any kernel here reached (none was measured)",
        )
    arithmetic_source = "ATen's 1024^3 product" if measured_peak >= observed else "the best any kernel here reached"
    note = f"Ceilings of this machine, not of a data sheet. Memory: {memory_source}. Arithmetic: {arithmetic_source}."
    return bandwidth, peak, note


def spread_plot(decisions: Sequence[Decision]) -> Scatter:
    """Return the plot of every valid candidate's time over the time of ATen's best, with a row per problem."""
    series: dict[str, list[Point]] = {}
    for index, decision in enumerate(decisions):
        aten_s = summarize(decision).aten_s or timed_candidates(decision)[0].sample.median_s  # type: ignore[union-attr]
        for row in timed_candidates(decision):
            if row.sample is not None:
                ratio = row.sample.median_s / aten_s
                text = f"{row.id}: {ratio:.3f}x ATen's time, {time_text(row.sample.median_s)}, {row.stage}"
                series.setdefault(backend_name(row), []).append(Point(ratio, index, text))
    rows = _labels(decisions)
    note = "Median time of every valid candidate over that of ATen's best one: left of 1 is faster than ATen."
    marks = {name: tuple(series[name]) for name in _aten_first(series)}
    return Scatter("Spread of the candidates", note, "time / ATen's best", "", marks, rows=rows)
