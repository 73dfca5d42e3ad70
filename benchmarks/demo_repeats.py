"""Does ``make demo`` tell the same story each time? Runs of the demo with an empty store each, and their ratios.

    python benchmarks/demo_repeats.py --runs 10

The demo prints, for each variant and workload, the ratio of tokens a second with its 95% interval over processes. Two
runs agree on one when their intervals overlap. The table has the ratio's median over runs, the least and the most, and
how many pairs of runs agree. Each run tunes anew, so that another kernel may serve. Writes all ratios, and each run's
decisions, to benchmarks/results/; Ctrl-C ends it with the runs that there are.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import write

from gemmtune.store import open_store

HERE = Path(__file__).resolve().parent.parent
_VARIANT = re.compile(r"^(\w+): outputs (same|NOT the same) within the bound$")
_PACE = re.compile(
    r"^  (.+?)\s+([\d.]+) ->\s+([\d.]+) tokens/s\s+([\d.]+)x \(([\d.]+)\.\.([\d.]+) over \d+ processes\)$"
)

Ratio = tuple[float, float, float]


def ratios(text: str) -> dict[str, Ratio]:
    """(estimate, low, high) by variant and workload from what the demo printed. Raises ValueError for wrong outputs."""
    found: dict[str, Ratio] = {}
    variant = ""
    for line in text.splitlines():
        if match := _VARIANT.match(line):
            variant = match[1]
            if match[2] != "same":
                raise ValueError(line)
        elif match := _PACE.match(line):
            found[f"{variant}, {match[1]}"] = (float(match[4]), float(match[5]), float(match[6]))
    return found


def tuned(path: Path) -> dict[str, dict[str, Any]]:
    """Return the decisions of the store at ``path`` by problem key: outcome, chosen candidate, each layout's best."""
    store = open_store(path)
    try:
        return {
            decision.problem_key: {
                "outcome": decision.outcome, "chosen": decision.chosen, "layouts": dict(decision.alternatives)
            }
            for decision in store.decisions()
        }  # fmt: skip
    finally:
        store.close()


def run(arguments: list[str]) -> tuple[dict[str, Ratio], dict[str, dict[str, Any]]]:
    """The ratios of one run, and what it tuned. Raises CalledProcessError when the demo fails."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-demo-") as folder:
        environment = {**os.environ, "GEMMTUNE_STORE": str(Path(folder) / "store.db")}
        command = [sys.executable, "examples/demo.py", "--report", str(Path(folder) / "report.html"), *arguments]
        ended = subprocess.run(command, cwd=HERE, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return ratios(ended.stdout), tuned(Path(folder) / "store.db")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="[10]; what is not known here is the demo's")
    args, passed = parser.parse_known_args()
    rows: dict[str, list[Ratio]] = {}
    decisions: list[dict[str, dict[str, Any]]] = []
    for number in range(args.runs):
        try:
            run_ratios, run_decisions = run(passed)
        except KeyboardInterrupt:  # what there is, is a result
            break
        decisions.append(run_decisions)
        for name, ratio in run_ratios.items():
            rows.setdefault(name, []).append(ratio)
        print(f"run {number + 1} of {args.runs}: {run_ratios}", flush=True)
    print(f"{'':<28}{'median':>8}{'least':>8}{'most':>8}  pairs of runs that agree")
    for name, runs in rows.items():
        pairs = list(itertools.combinations(runs, 2))
        agree = sum(a[1] <= b[2] and b[1] <= a[2] for a, b in pairs)
        centers = [center for center, _, _ in runs]
        print(f"{name:<28}{statistics.median(centers):7.2f}x{min(centers):7.2f}x{max(centers):7.2f}x  "
              f"{agree} of {len(pairs)}")  # fmt: skip
    write("demo-repeats", rows, tuned=decisions)


if __name__ == "__main__":
    main()
