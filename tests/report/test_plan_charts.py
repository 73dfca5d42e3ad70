import json
import re

import pytest
from msgspec.structs import replace

from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.report import interactive, svg
from gemmtune.report.charts import Band, Curves
from gemmtune.report.plan_charts import plan_curves
from helpers.plans import LARGE, PLAIN_S, PROBLEM, SMALL, planted_plan, simulated, staircase

SIZES = [1, 16, 48, 128]
PACKED = simulated("packed", staircase(2.0, 1.0, 16), rows=16, packing="panels")
PLAN = planted_plan(
    PROBLEM,
    [SMALL, LARGE, PACKED],
    {"": [(1, 40, SMALL), (41, 128, LARGE)], "panels": [(1, 128, PACKED)]},
    SIZES,
    target_key="t",
)
CEILINGS = {"read": 30e9, "float32": 200e9}


def curves() -> Curves:
    return plan_curves(PLAN, CEILINGS)[0]


def test_each_layout_has_a_chart_with_aten() -> None:
    raw, packed = plan_curves(PLAN, CEILINGS)
    assert raw.title == "Mx64x96 fp32, unpacked: time over M"
    assert packed.title == "Mx64x96 fp32, panels: time over M"
    assert list(raw.series) == ["ATen", "A", "B"]
    assert list(packed.series) == ["ATen", "C"]
    assert {p.x: p.y for p in raw.series["ATen"]} == pytest.approx({m: PLAIN_S(m) * 1e6 for m in SIZES})
    assert raw.series["A"][1].text == f"M = 16: 5.00 us, {SMALL.id}"


def test_aten_is_drawn_at_the_sizes_of_its_scan_too() -> None:
    (raw, packed) = plan_curves(replace(PLAN, scan={16: 9.0, 33: 2e-5, 100: 3e-5}), CEILINGS)
    for chart in (raw, packed):
        drawn = {p.x: p.y for p in chart.series["ATen"]}
        assert list(drawn) == [1, 16, 33, 48, 100, 128]
        assert (drawn[33], drawn[100]) == pytest.approx((20.0, 30.0))
        assert drawn[16] == pytest.approx(PLAIN_S(16) * 1e6)  # beside other kernels
    assert [p.x for p in raw.series["A"]] == SIZES


def test_many_intervals_are_counted_in_the_note() -> None:
    spans = tuple(PlanInterval(m, m, (SMALL, LARGE)[m % 2].id) for m in range(1, 129))
    chart, _ = plan_curves(replace(PLAN, intervals={**PLAN.intervals, "": spans}), CEILINGS)
    assert "serves: 128 intervals, in the table of kernels. " in chart.note
    assert len(chart.bands) == 128


def test_bands_are_the_intervals() -> None:
    assert curves().bands == (Band(1, 41, "A"), Band(41, 129, "B"))
    assert "1-40: A, 41-128: B" in curves().note
    assert "Worst regret 11.1% at M = 48" in curves().note


def test_floor_is_the_longer_of_traffic_and_arithmetic() -> None:
    (line,) = curves().dashed.values()
    assert [m for m, _ in line] == SIZES
    for m, microseconds in line:
        at_m = PROBLEM.with_m(int(m))
        assert microseconds == pytest.approx(1e6 * max(at_m.min_bytes / 30e9, at_m.flops / 200e9))


def test_floor_without_ceilings_touches_the_fastest_time() -> None:
    chart = plan_curves(PLAN, {})[0]
    assert "none was measured" in chart.note
    (line,) = chart.dashed.values()
    floor, fastest = dict(line), {m: min(k.times[m] for k in PLAN.kernels) * 1e6 for m in SIZES}
    assert all(floor[m] <= fastest[m] * (1 + 1e-9) for m in SIZES)
    assert min(fastest[m] / floor[m] for m in SIZES) == pytest.approx(1.0)


def test_plan_without_times_has_no_chart() -> None:
    kernels = tuple(replace(kernel, times={}) for kernel in PLAN.kernels)
    assert plan_curves(replace(PLAN, kernels=kernels), CEILINGS) == []


def test_svg_has_lines_marks_and_bands_inside_the_frame() -> None:
    text = svg.draw(curves())
    width, height = (float(v) for v in re.search(r'viewBox="0 0 (\S+) (\S+)"', text).groups())  # type: ignore[union-attr]
    assert text.count("<polyline") == 4
    assert text.count("stroke-dasharray") == 1
    assert text.count("<circle") == 12
    assert text.count("fill-opacity") == 2
    assert all(0 <= float(x) <= width for x in re.findall(r'c?x="([\d.-]+)"', text))
    assert all(0 <= float(y) <= height for y in re.findall(r'c?y="([\d.-]+)"', text))
    bands = re.findall(r'<rect x="([\d.]+)" width="([\d.]+)" y="([\d.]+)" height="([\d.]+)"', text)
    (x, w, y, h), (x2, *_) = ((float(v) for v in band) for band in bands)
    assert x + w == pytest.approx(x2, abs=0.2)
    assert w > 0
    assert y + h <= height


def test_svg_has_a_text_alternative() -> None:
    label = re.search(r'role="img" aria-label="([^"]*)"', svg.draw(curves()))
    assert label is not None
    assert "time over M. Median time of a call" in label.group(1)
    assert "1-40: A, 41-128: B" in label.group(1)


def test_plotly_figure_has_lines_and_shapes() -> None:
    match = re.search(r"var f=(.*);Plotly", interactive.draw(curves(), "c0"))
    assert match is not None
    figure = json.loads(match.group(1))
    assert [trace["name"] for trace in figure["traces"]] == ["ATen", "A", "B", "floor of the machine"]
    assert [trace["mode"] for trace in figure["traces"]] == ["lines+markers"] * 3 + ["lines"]
    assert [trace["line"]["color"] for trace in figure["traces"]] == list(svg.COLOURS[:4])
    assert figure["traces"][3]["line"]["dash"] == "dash"
    assert [(s["x0"], s["x1"], s["fillcolor"]) for s in figure["layout"]["shapes"]] == [
        (1, 41, svg.COLOURS[1]), (41, 129, svg.COLOURS[2]),
    ]  # fmt: skip
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"
