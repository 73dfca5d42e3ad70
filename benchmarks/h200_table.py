"""docs/figures.md's table of an H200 from raw results of h200.py: measures nothing.

    python benchmarks/h200_table.py                           the runs that are quoted there
    python benchmarks/h200_table.py 'h200-20261123-02*.json'  others, by names in benchmarks/results/

Ratios are medians over paired rounds, times of peers over gemmtune's, and geometric means of them over shapes: M <= 64,
then all M; of the best of PyTorch's forms, and of each where there are several. "of any run": max-autotune times its
candidates while it compiles, and its picks differ from run to run, so that here it takes the least that it took of
PyTorch's time for the shape in any stored run. With int4 weights, every peer is PyTorch's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from h200 import ALONE, AUTOTUNED, OURS
from harness import RESULTS, geomean, ratios
from plots import Row, plain_us, runs_of

QUOTED = ("h200-20261123-05520*.json", "h200-20261123-08*.json")
_KNOWN_S = 2.0  # all of a family's problems are known to a store within that


def peers(row: Row, autotuned: bool = True) -> list[str]:
    return [name for name in row["rounds_us"] if name not in (OURS, ALONE) and (autotuned or name != AUTOTUNED)]


def speed(row: Row, own: str = OURS, autotuned: bool = True) -> float:
    """How many times as fast as the better of its peers one of our entrants is."""
    best = min(peers(row, autotuned), key=lambda name: row["median_us"][name])
    return ratios(row["rounds_us"][best], row["rounds_us"][own]).median


def gain(row: Row) -> float:
    """What a kernel takes alone over what it takes where it may overlap the one before it."""
    return ratios(row["rounds_us"][ALONE], row["rounds_us"][OURS]).median


def speed_of_any_run(row: Row, runs: list[Row]) -> float:
    """As ``speed``, with max-autotune at its best."""
    shares = [run["median_us"][AUTOTUNED] / plain_us(run) for run in runs if AUTOTUNED in run["median_us"]]
    return speed(row, autotuned=False) * min([1.0, *shares])


def last_of(runs: list[Row]) -> Row:
    """The last of a shape's runs, of those beside max-autotune where there are any."""
    return ([run for run in runs if AUTOTUNED in run["median_us"]] or runs)[-1]


def means(found: list[tuple[int, float]]) -> str:
    """found: M and a ratio, of each shape."""
    few = [ratio for m, ratio in found if m <= 64]
    every = [ratio for _, ratio in found]
    return f"{geomean(few):.2f}x {geomean(every):.2f}x, worst {min(every):.3f}x"


def cold_s(paths: list[Path], family: str) -> float:
    """Seconds that tuning a problem of the family took, where the store did not know it."""
    found = [json.loads(path.read_text(encoding="utf-8")).get("tuning", {}).get(family) for path in paths]
    spent = [each for each in found if each and each["seconds"] > _KNOWN_S]
    problems = sum(each["problems"] for each in spent)
    return float(sum(each["seconds"] for each in spent) / problems) if problems else float("nan")


def main() -> None:
    paths = sorted({path for name in sys.argv[1:] or QUOTED for path in RESULTS.glob(name)})
    named = [last_of(rows) for rows in runs_of(paths).values()]
    ever = runs_of(sorted(RESULTS.glob("h200-*.json")))
    for family in dict.fromkeys(row["family"] for row in named):
        rows = [row for row in named if row["family"] == family]
        large = [row["floor"] for row in rows if row["m"] <= 16 and row["n"] * row["k"] >= 33e6]
        print(f"{family}, {len(rows)} shapes")
        print(f"  of PyTorch's                  {means([(row['m'], speed(row, autotuned=False)) for row in rows])}")
        for name in peers(rows[0], False) if len(peers(rows[0], False)) > 1 else ():
            each = [(row["m"], ratios(row["rounds_us"][name], row["rounds_us"][OURS]).median) for row in rows]
            print(f"    {name:27} {means(each)}, best {max(each, key=lambda found: found[1])[1]:.2f}x")
        print(f"  of the better of all          {means([(row['m'], speed(row)) for row in rows])}")
        if all(ALONE in row["rounds_us"] for row in rows):
            print(f"  the same, alone               {means([(row['m'], speed(row, ALONE)) for row in rows])}")
            longest = min(rows, key=gain)
            shape = f"{longest['m']}x{longest['n']}x{longest['k']}"
            print(f"  for following, at most        {1 / gain(longest) - 1:.1%} longer: {shape} by {longest['kernel']}")
        kept = [(row["m"], speed_of_any_run(row, ever[family, row["m"], row["n"], row["k"]])) for row in rows]
        print(f"  max-autotune's of any run     {means(kept)}")
        by_m = {m: [row for row in rows if row["m"] == m] for m in sorted({row["m"] for row in rows})}
        shown = (f"M {m} {geomean([speed(row, autotuned=False) for row in own]):.2f}x" for m, own in by_m.items())
        print(f"  of PyTorch's by M             {', '.join(shown)}")
        print(f"  of the memory floor           {min(large, default=float('nan')):.0%} at least")
        print(f"  tuning, nothing built before  {cold_s(paths, family):.1f} s a problem")


if __name__ == "__main__":
    main()
