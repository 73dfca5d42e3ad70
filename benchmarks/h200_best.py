"""gemmtune's times on an H200 against max-autotune at its best: whatever it picked in any stored run. Measures nothing.

    python benchmarks/h200_best.py h200-20261123-0403*.json ...     (names in benchmarks/results/, one or more runs)

max-autotune times its candidates while it compiles, and picks differ from run to run. For each shape of the named runs:
the best of the peers there and of PyTorch's time there times the least that max-autotune took of PyTorch's in any run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable

from h200 import OURS
from harness import RESULTS, geomean
from plots import Row, plain_us

AUTOTUNED = "Inductor"


def rows_of(patterns: Iterable[str]) -> dict[tuple[str, int, int, int], list[Row]]:
    """Rows of the runs by shape."""
    found: dict[tuple[str, int, int, int], list[Row]] = {}
    for path in sorted({path for pattern in patterns for path in RESULTS.glob(pattern)}):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            found.setdefault((row["family"], row["m"], row["n"], row["k"]), []).append(row)
    return found


def main() -> None:
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    ever = rows_of(["h200-*.json"])
    families: dict[str, list[tuple[int, float]]] = {}
    for shape, rows in rows_of(sys.argv[1:]).items():
        row = rows[-1]
        shares = [
            held["median_us"][AUTOTUNED] / plain_us(held) for held in ever[shape] if AUTOTUNED in held["median_us"]
        ]
        best = min([plain_us(row), *(share * plain_us(row) for share in shares)])
        families.setdefault(shape[0], []).append((shape[1], best / row["median_us"][OURS]))
    for family, ratios in families.items():
        few = [ratio for m, ratio in ratios if m <= 64]
        every = [ratio for _, ratio in ratios]
        print(f"{family:<7} M <= 64 {geomean(few):.2f}x, all M {geomean(every):.2f}x, worst {min(every):.2f}x")


if __name__ == "__main__":
    main()
