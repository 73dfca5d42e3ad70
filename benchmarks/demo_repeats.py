"""Run ``make demo``'s program repeatedly, with an empty store each time, and compare the ratios that it prints.

    python benchmarks/demo_repeats.py --runs 10

The demo prints, for each variant and workload, the ratio of tokens per second with its 95% interval over processes. Two
runs agree on a ratio if their intervals overlap. The table shows the median, the minimum and the maximum of each ratio
over runs, and the number of pairs of runs that agree. Each run tunes again, and may choose other kernels. All ratios
and the decisions of each run are written to benchmarks/results/, also after Ctrl-C.
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

from harness import write_results

from gemmtune.store import open_store

HERE = Path(__file__).resolve().parent.parent
_VARIANT = re.compile(r"^(\w+): outputs (same|NOT the same) within the bound$")
_RATE = re.compile(
    r"^  (.+?)\s+([\d.]+) ->\s+([\d.]+) tokens/s\s+([\d.]+)x \(([\d.]+)\.\.([\d.]+) over \d+ processes\)$"
)

Ratio = tuple[float, float, float]


def parse_ratios(text: str) -> dict[str, Ratio]:
    """Return (estimate, low, high) by variant and workload from the demo's output. Raises ValueError for wrong
    outputs."""
    ratios: dict[str, Ratio] = {}
    variant = ""
    for line in text.splitlines():
        if match := _VARIANT.match(line):
            variant = match[1]
            if match[2] != "same":
                raise ValueError(line)
        elif match := _RATE.match(line):
            ratios[f"{variant}, {match[1]}"] = (float(match[4]), float(match[5]), float(match[6]))
    return ratios


def read_decisions(path: Path) -> dict[str, dict[str, Any]]:
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
    """Run the demo; return its ratios and its decisions. Raises CalledProcessError when the demo fails."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-demo-") as folder:
        environment = {**os.environ, "GEMMTUNE_STORE": str(Path(folder) / "store.db")}
        command = [sys.executable, "examples/demo.py", "--report", str(Path(folder) / "report.html"), *arguments]
        finished = subprocess.run(command, cwd=HERE, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        return parse_ratios(finished.stdout), read_decisions(Path(folder) / "store.db")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="[10]; unknown options are passed to the demo")
    args, demo_args = parser.parse_known_args()
    rows: dict[str, list[Ratio]] = {}
    decisions: list[dict[str, dict[str, Any]]] = []
    for number in range(args.runs):
        try:
            run_ratios, run_decisions = run(demo_args)
        except KeyboardInterrupt:  # the finished runs are a result
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
    write_results("demo-repeats", rows, tuned=decisions)


if __name__ == "__main__":
    main()
