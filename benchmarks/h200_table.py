"""Print the H200 table of docs/figures.md from raw results of h200.py; this script measures nothing.

    python benchmarks/h200_table.py                           the runs that docs/figures.md quotes
    python benchmarks/h200_table.py 'h200-20261123-02*.json'  other runs, by file names in benchmarks/results/

A ratio is the median over paired rounds of a peer's time over gemmtune's. The table shows geometric means over shapes,
for M <= 64 and for all M: of the best of PyTorch's eager forms, and of each form if there are several. "of any run":
max-autotune times its candidates while it compiles, and its choices differ between runs; this line uses the smallest
ratio of its time to PyTorch's in any stored run of the shape. For int4 weights, all peers count as PyTorch's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from h200 import ALONE, AUTOTUNED, OURS
from harness import RESULTS, geomean, paired_ratios
from plots import Row, runs_of, torch_us

QUOTED = ("h200-20261123-05520*.json", "h200-20261123-08*.json")
_STORE_HIT_S = 2.0  # a family is tuned within this time if the store has all of its decisions


def peer_names(row: Row, autotuned: bool = True) -> list[str]:
    """Return the names of the entrants that are not gemmtune's, with or without max-autotune."""
    return [name for name in row["rounds_us"] if name not in (OURS, ALONE) and (autotuned or name != AUTOTUNED)]


def speed(row: Row, own: str = OURS, autotuned: bool = True) -> float:
    """Return the speed of one of gemmtune's entrants over its fastest peer."""
    best = min(peer_names(row, autotuned), key=lambda name: row["median_us"][name])
    return paired_ratios(row["rounds_us"][best], row["rounds_us"][own]).median


def overlap_gain(row: Row) -> float:
    """Return a kernel's time without overlap over its time with overlap of the previous kernel (PDL)."""
    return paired_ratios(row["rounds_us"][ALONE], row["rounds_us"][OURS]).median


def speed_of_any_run(row: Row, runs: list[Row]) -> float:
    """Return ``speed`` with max-autotune's smallest ratio to PyTorch's time in any of ``runs``."""
    shares = [run["median_us"][AUTOTUNED] / torch_us(run) for run in runs if AUTOTUNED in run["median_us"]]
    return speed(row, autotuned=False) * min([1.0, *shares])


def last_of(runs: list[Row]) -> Row:
    """Return the last of a shape's runs, of those with max-autotune if there are any."""
    return ([run for run in runs if AUTOTUNED in run["median_us"]] or runs)[-1]


def format_means(pairs: list[tuple[int, float]]) -> str:
    """Format the geometric means of (M, ratio) pairs for M <= 64 and for all M, and the smallest ratio."""
    small_m = [ratio for m, ratio in pairs if m <= 64]
    all_m = [ratio for _, ratio in pairs]
    return f"{geomean(small_m):.2f}x {geomean(all_m):.2f}x, worst {min(all_m):.3f}x"


def empty_store_s(paths: list[Path], family: str) -> float:
    """Return the seconds of tuning per problem of a family, in runs whose store was empty."""
    stored = [json.loads(path.read_text(encoding="utf-8")).get("tuning", {}).get(family) for path in paths]
    runs = [run for run in stored if run and run["seconds"] > _STORE_HIT_S]
    problems = sum(run["problems"] for run in runs)
    return float(sum(run["seconds"] for run in runs) / problems) if problems else float("nan")


def main() -> None:
    paths = sorted({path for name in sys.argv[1:] or QUOTED for path in RESULTS.glob(name)})
    last_rows = [last_of(rows) for rows in runs_of(paths).values()]
    all_runs = runs_of(sorted(RESULTS.glob("h200-*.json")))
    for family in dict.fromkeys(row["family"] for row in last_rows):
        rows = [row for row in last_rows if row["family"] == family]
        large = [row["floor"] for row in rows if row["m"] <= 16 and row["n"] * row["k"] >= 33e6]
        print(f"{family}, {len(rows)} shapes")
        torch_ratios = [(row["m"], speed(row, autotuned=False)) for row in rows]
        print(f"  of PyTorch's                  {format_means(torch_ratios)}")
        for name in peer_names(rows[0], False) if len(peer_names(rows[0], False)) > 1 else ():
            ratios = [(row["m"], paired_ratios(row["rounds_us"][name], row["rounds_us"][OURS]).median) for row in rows]
            print(f"    {name:27} {format_means(ratios)}, best {max(ratio for _, ratio in ratios):.2f}x")
        print(f"  of the better of all          {format_means([(row['m'], speed(row)) for row in rows])}")
        if all(ALONE in row["rounds_us"] for row in rows):
            print(f"  the same, alone               {format_means([(row['m'], speed(row, ALONE)) for row in rows])}")
            longest = min(rows, key=overlap_gain)
            shape = f"{longest['m']}x{longest['n']}x{longest['k']}"
            slowdown = 1 / overlap_gain(longest) - 1
            print(f"  for following, at most        {slowdown:.1%} longer: {shape} by {longest['kernel']}")
        best_runs = [(row["m"], speed_of_any_run(row, all_runs[family, row["m"], row["n"], row["k"]])) for row in rows]
        print(f"  max-autotune's of any run     {format_means(best_runs)}")
        by_m = {m: [row for row in rows if row["m"] == m] for m in sorted({row["m"] for row in rows})}
        by_m_text = (f"M {m} {geomean([speed(row, autotuned=False) for row in own]):.2f}x" for m, own in by_m.items())
        print(f"  of PyTorch's by M             {', '.join(by_m_text)}")
        print(f"  of the memory floor           {min(large, default=float('nan')):.0%} at least")
        print(f"  tuning, nothing built before  {empty_store_s(paths, family):.1f} s a problem")


if __name__ == "__main__":
    main()
