"""Draw the plots of the H200 from raw results; this script measures nothing.

    python benchmarks/plots.py benchmarks/results/h200-A.json ...     (the default: the files named in SOURCES)

It writes docs/plots/*.svg: time by shape and backend for each family, time against the floor, and M = 1 to 8192 on one
weight. If several files have a shape, the last file is used.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from h200 import ALONE, AUTOTUNED, OURS
from harness import RESULTS

from gemmtune.report import svg
from gemmtune.report.charts import Bars, Chart, Point, Scatter

HERE = Path(__file__).parent
FOLDER = HERE.parent / "docs" / "plots"
SOURCES = (
    "h200-20261121-045106.json", "h200-20261121-044052.json", "h200-20261121-043522.json", "h200-20261121-050825.json",
    "h200-20261122-064305.json", "h200-20261122-064458.json", "h200-20261122-063618.json", "h200-20261122-063816.json",
    "h200-20261122-065148.json", "h200-20261122-065241.json", "h200-20261122-065342.json",
    "h200-20261122-110243.json", "h200-20261122-110446.json", "h200-20261122-125215.json", "h200-20261122-125346.json",
    "h200-20261122-134327.json", "h200-20261122-134406.json", "h200-20261122-163913.json", "h200-20261122-163950.json",
    "h200-20261122-164023.json", "h200-20261122-165424.json", "h200-20261122-190325.json", "h200-20261122-190324.json",
    "h200-20261122-190459.json", "h200-20261122-191156-a.json", "h200-20261122-191156-b.json",
    "h200-20261122-191357.json", "h200-20261122-191347.json", "h200-20261122-225927.json", "h200-20261122-230302.json",
    "h200-20261122-230354.json", "h200-20261122-230430.json", "h200-20261123-013601.json", "h200-20261123-013934.json",
    "h200-20261123-014039.json", "h200-20261123-014125.json", "h200-20261123-020013.json", "h200-20261123-020015.json",
    "h200-20261123-020043-a.json", "h200-20261123-020043-b.json", "h200-20261123-020135.json",
    "h200-20261123-020140.json", "h200-20261123-040153.json", "h200-20261123-040329.json",
    "h200-20261123-040433.json", "h200-20261123-040443.json", "h200-20261123-040532.json",
    "h200-20261123-053759.json", "h200-20261123-053834.json", "h200-20261123-055207.json",
    "h200-20261123-055208.json", "h200-20261123-055344.json", "h200-20261123-055347.json",
    "h200-20261123-082326.json", "h200-20261123-082445.json", "h200-20261123-082545.json",
    "h200-20261123-082546.json", "h200-20261123-082732.json", "h200-20261123-082735.json",
    "h200-20261123-083519.json", "h200-20261123-083604.json",
)  # fmt: skip
NAMES = {
    "bf16": "bf16", "fp8": "fp8, row-wise scales", "int8": "int8 x int8 -> int32",
    "int8wo": "int8 weights, bf16 activations", "int4wo": "int4 weights (groups of 128), bf16 activations",
}  # fmt: skip
_PEAKS = {"bf16": 989e12, "int8wo": 989e12, "int4wo": 989e12, "fp8": 1979e12, "int8": 1979e12}
_NOT_PEERS = (OURS, ALONE, AUTOTUNED)
_BARS_M = (1, 16, 64, 256, 1024)
_STYLE = (
    "<style>text{font:12px sans-serif;fill:#57606a}.grid{stroke:#d0d7de;stroke-width:.5}svg{background:#fff}</style>"
)

Row = dict[str, Any]


def runs_of(paths: list[Path]) -> dict[tuple[str, int, int, int], list[Row]]:
    """Return rows by family, M, N and K, in the order of the files."""
    rows_by_shape: dict[tuple[str, int, int, int], list[Row]] = {}
    for path in paths:
        for row in json.loads(path.read_text())["rows"]:
            rows_by_shape.setdefault((row["family"], row["m"], row["n"], row["k"]), []).append(row)
    return rows_by_shape


def floor_us(row: Row) -> float:
    """Return the larger of two times: all operands read or written once at the card's bandwidth, all FLOPs at its
    peak."""
    memory_us = row["floor"] * row["median_us"][OURS]
    return max(memory_us, 2e6 * row["m"] * row["n"] * row["k"] / _PEAKS[row["family"]])


def torch_us(row: Row) -> float:
    """Return the time of PyTorch's fastest eager form."""
    return min(us for name, us in row["median_us"].items() if name not in _NOT_PEERS)


def bars_by_shape(family: str, rows: list[Row]) -> Bars:
    """Return a chart of time by shape and backend. All eager forms of PyTorch share one series."""
    shown = sorted((row for row in rows if row["m"] in _BARS_M), key=lambda row: (row["k"], row["n"], row["m"]))
    peers = dict.fromkeys(name for row in shown for name in row["median_us"] if name not in _NOT_PEERS)
    peer = ", ".join(peers)

    def times(names: tuple[str, ...]) -> tuple[float | None, ...]:
        return tuple(
            next((row["median_us"][name] for name in names if name in row["median_us"]), None) for row in shown
        )

    series = {peer: times(tuple(peers)), OURS: times((OURS,))}
    if any(AUTOTUNED in row["median_us"] for row in shown):
        series[f"{AUTOTUNED} max-autotune"] = times((AUTOTUNED,))
    labels = tuple(f"M {row['m']}, {row['k']} -> {row['n']}" for row in shown)
    return Bars(NAMES[family], "", "us", labels, series)


def scatter_against_floor(rows: list[Row]) -> Scatter:
    """Return a chart of every row's time against its floor (``floor_us``)."""
    series = {
        NAMES[family]: tuple(
            Point(floor_us(row), row["median_us"][OURS], f"M {row['m']}, {row['k']} -> {row['n']}")
            for row in rows
            if row["family"] == family
        )
        for family in dict.fromkeys(row["family"] for row in rows)
    }
    least, most = min(map(floor_us, rows)), max(map(floor_us, rows))
    lines = {"the floor": ((least, least), (most, most))}
    return Scatter("", "", "us at 4.46 TB/s and the datasheet's dense peak", "us, gemmtune", series, lines)


def scatter_over_m(family: str, rows: list[Row]) -> Scatter:
    """Return a chart of time over M on one weight."""
    family_rows = sorted((row for row in rows if row["family"] == family), key=lambda row: row["m"])
    series = {
        name: tuple(Point(float(row["m"]), us(row), f"{name}, M {row['m']}") for row in family_rows)
        for name, us in (("PyTorch", torch_us), (OURS, lambda row: row["median_us"][OURS]))
    }
    lines = {"the floor": tuple((float(row["m"]), floor_us(row)) for row in family_rows)}
    return Scatter(NAMES[family], "", "M (rows of activations), K = N = 4096", f"us, {family}", series, lines)


def save(name: str, chart: Chart) -> None:
    """Write a chart to docs/plots as a standalone SVG file."""
    text = svg.draw(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    start = text.index(">") + 1
    (FOLDER / f"{name}.svg").write_text(text[:start] + _STYLE + text[start:] + "\n")


def main() -> None:
    paths = [Path(text) for text in sys.argv[1:]] or [RESULTS / name for name in SOURCES]
    rows_by_shape = {shape: rows[-1] for shape, rows in runs_of(paths).items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    families = [family for family in NAMES if any(key[0] == family for key in rows_by_shape)]
    for family in families:
        family_rows = [row for row in rows_by_shape.values() if row["family"] == family]
        save(f"h200-{family}", bars_by_shape(family, family_rows))
        sweep = [row for row in family_rows if row["n"] == row["k"] == 4096]
        if len(sweep) > len(_BARS_M) + 1:
            save(f"h200-{family}-m", scatter_over_m(family, sweep))
    save("h200-floor", scatter_against_floor(list(rows_by_shape.values())))


if __name__ == "__main__":
    main()
