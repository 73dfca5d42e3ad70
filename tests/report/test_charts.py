import json
import re
from dataclasses import replace

import pytest

from gemmtune.core.workloads import build
from gemmtune.report import interactive, svg
from gemmtune.report.charts import Scatter, charts, roofline_plot, spread_plot, time_bars
from helpers.factories import make_decision

DECISIONS = [make_decision(build(m, 4096, 4096, "bf16"), aten_s=1e-3) for m in (1, 64)]
CEILINGS = {"read": 30e9, "bfloat16": 200e9}


def test_time_bars_have_a_value_per_problem_and_backend() -> None:
    chart = time_bars(DECISIONS)
    assert list(chart.series) == ["aten", "native"]
    assert chart.series["aten"] == pytest.approx((1000.0, 1000.0))
    assert chart.series["native"] == pytest.approx((500.0, 500.0))


def test_roofline_points_have_intensity_and_rate() -> None:
    chart = roofline_plot(DECISIONS, CEILINGS)
    problem = build(1, 4096, 4096, "bf16")
    point = chart.series["native"][0]
    assert point.x == pytest.approx(problem.flops / problem.min_bytes)
    assert point.y == pytest.approx(problem.flops / 0.5e-3 / 1e9)
    assert "memory: 30.0 GB/s" in chart.lines


def test_roofline_note_has_the_source_of_the_ceilings() -> None:
    fast = roofline_plot(DECISIONS, CEILINGS)  # 64 rows at 0.5 ms are 4295 GFLOP/s: above the measured ceiling
    assert "arithmetic: 4295 GFLOP/s" in fast.lines
    assert "Arithmetic: the best any kernel here reached" in fast.note
    slow = roofline_plot([make_decision(build(1, 4096, 4096, "bf16"), aten_s=1.0)], CEILINGS)
    assert "arithmetic: 200 GFLOP/s" in slow.lines
    assert "ATen's 1024^3 product" in slow.note
    assert "none was measured" in roofline_plot(DECISIONS, {}).note


def test_spread_plot_is_relative_to_aten() -> None:
    chart = spread_plot(DECISIONS)
    assert chart.rows == ("1x4096x4096 bf16", "64x4096x4096 bf16")
    assert [point.x for point in chart.series["aten"]] == pytest.approx([1.0, 1.0])
    assert sorted(point.x for point in chart.series["native"]) == pytest.approx([0.5, 0.5, 2.0, 2.0])


def test_decisions_without_times_have_no_charts() -> None:
    assert charts([make_decision(outcome="none_valid")], CEILINGS) == []


def test_svg_marks_are_inside_the_frame() -> None:
    for chart in charts(DECISIONS, CEILINGS):
        text = svg.draw(chart)
        width, height = (float(v) for v in re.search(r'viewBox="0 0 (\S+) (\S+)"', text).groups())  # type: ignore[union-attr]
        marks = text.count("<circle") if isinstance(chart, Scatter) else text.count("<rect") - len(chart.series)
        assert marks == sum(len(group) for group in chart.series.values())
        assert all(0 <= float(x) <= width for x in re.findall(r'c?x="([\d.-]+)"', text))
        assert all(0 <= float(y) <= height for y in re.findall(r'c?y="([\d.-]+)"', text))


def test_plotly_figure_is_valid_json_without_a_closing_script_tag() -> None:
    for number, chart in enumerate(charts(DECISIONS, CEILINGS)):
        text = interactive.draw(chart, f"c{number}")
        assert text.count("</script>") == 1
        match = re.search(r"var f=(.*);Plotly", text)
        assert match is not None
        figure = json.loads(match.group(1))
        assert [trace["name"] for trace in figure["traces"]][:2] == ["aten", "native"]
        assert f'"c{number}"' in text


def test_equal_labels_are_made_distinct() -> None:
    problem = build(7, 509, 521, "bf16")
    other = replace(problem, b=replace(problem.b, constant=False))
    chart = time_bars([make_decision(problem), make_decision(other)])
    assert len(set(chart.labels)) == 2


def test_log_ticks_are_within_the_range() -> None:
    for lo, hi in ((10, 73), (2e-5, 0.3), (1e-6, 1e6), (0.4, 11)):
        ticks = svg.log_ticks(lo, hi)
        assert len(ticks) >= 2
        assert all(lo <= tick <= hi and f"{tick:g}".strip("0.e-+")[:1] in "125" for tick in ticks)


def test_svg_labels_start_inside_the_frame() -> None:
    label = "256x11008x4096 bf16 +bias +gelu_tanh +mul +add"
    drawn = svg.draw(replace(time_bars(DECISIONS), labels=(label,) * len(DECISIONS)))
    end_positions = [float(x) for x in re.findall(rf'x="([\d.]+)"[^>]*text-anchor="end">{re.escape(label)}', drawn)]
    assert len(end_positions) == len(DECISIONS)
    assert all(end > 6 * len(label) for end in end_positions)
