"""Run one benchmark in two checkouts, alternating, and compare: the cost of a change.

    python benchmarks/versus.py ../base --benchmark overhead --rounds 5
    python benchmarks/versus.py ../base --benchmark cpu --script this --rounds 3 --quick --budget 8
    python benchmarks/versus.py ../base --benchmark h200 --python python3 --rounds 2 --families bf16,fp8 --m 1,64

Create the other checkout with ``git worktree add`` and run ``make install`` in it. In each round both checkouts run the
benchmark, in random order, each with the gemmtune of its own ``.venv``, its own script and an empty store. With
``--script this`` both run this checkout's script. With ``--python PATH`` that interpreter runs both, with the src/ of
each checkout; then a checkout may be a folder that has no .git, and its name stands for its commit. A row's value is
gemmtune's time over PyTorch's in one process, so that a slower host cancels. The table shows the ratio of this
checkout's value to the other's (below 1: this one is faster): of the medians over rounds, with the least and the
greatest ratio of a round. All values are written to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import write_results

HERE = Path(__file__).resolve().parent.parent
Values = dict[str, float]


def overhead_values(document: Mapping[str, Any]) -> Values:
    """Return the values of overhead.py: times of calls and of the import over PyTorch's; seconds of a store hit and of
    an artifact look-up, for which PyTorch has no counterpart."""
    values = {name: gemmtune_us / torch_us for name, (torch_us, gemmtune_us) in document["rows"].items()}
    values["import gemmtune (over torch)"] = document["import_gemmtune_s"] / document["import_torch_s"]
    return {**values, "store hit [s]": document["store_hit_s"], "built kernel found [s]": document["artifact_found_s"]}


def cpu_values(document: Mapping[str, Any]) -> Values:
    """Return gemmtune's time over the best peer's by shape of cpu.py."""
    return {
        f"{row['family']} {row['m']}x{row['n']}x{row['k']}, {row['threads']} threads": 1.0 / row["speedup"]
        for row in document["rows"]
    }


def gpu_overhead_values(document: Mapping[str, Any]) -> Values:
    """Return the host times of gemmtune's ops in gpu_overhead.py over that of F.linear, and the seconds of problems
    that the store already has."""
    medians = {name: statistics.median(values) for name, values in document["rows"].items()}
    values = {
        name.replace(", ", " by "): median / medians["F.linear"]
        for name, median in medians.items()
        if name.startswith("gemmtune")
    }
    return {**values, "stored problems [s]": document["warm_s"]}


def h200_values(document: Mapping[str, Any]) -> Values:
    """Return gemmtune's time over the best peer's by shape of h200.py."""
    return {f"{row['family']} {row['m']}x{row['n']}x{row['k']}": 1.0 / row["speedup"] for row in document["rows"]}


VALUES: dict[str, Callable[[Mapping[str, Any]], Values]] = {
    "overhead": overhead_values,
    "cpu": cpu_values,
    "gpu_overhead": gpu_overhead_values,
    "h200": h200_values,
}


def run(checkout: Path, script_folder: Path, benchmark: str, python: str, arguments: list[str]) -> dict[str, Any]:
    """Run a benchmark of ``script_folder`` with a checkout's gemmtune; return its raw data.

    python: the interpreter that runs it with the checkout's src/; empty for that of the checkout's .venv. Raises
    CalledProcessError when the benchmark fails.
    """
    with tempfile.TemporaryDirectory(prefix="gemmtune-versus-") as folder:
        environment = {**os.environ, "OUT": folder, "GEMMTUNE_STORE": str(Path(folder) / "store.db")}
        if python:
            others = os.environ.get("PYTHONPATH", "")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout / "src"), others)))
        command = [
            python or str(checkout / ".venv" / "bin" / "python"), str(script_folder / f"{benchmark}.py"), *arguments,
        ]  # fmt: skip
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        paths = sorted(Path(folder).glob(f"{benchmark.replace('_', '-')}-*.json"))
        documents: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if len(documents) == 1:
            return documents[0]
        return {**documents[0], "rows": [row for document in documents for row in document["rows"]]}


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout; the name of a folder without .git."""
    if not (checkout / ".git").exists():
        return checkout.name
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout; other options are passed to the benchmark")
    parser.add_argument("--benchmark", choices=tuple(VALUES), default="overhead")
    parser.add_argument("--script", choices=("own", "this"), default="own", help="the script of the other checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default="", help="an interpreter that runs both [that of each checkout's .venv]")
    args, benchmark_args = parser.parse_known_args()
    checkouts = {"this": HERE, "other": args.other.resolve()}
    for checkout in checkouts.values():
        if not args.python and not (checkout / ".venv" / "bin" / "python").exists():
            sys.exit(f"{checkout} has no .venv: run make install there")
    rounds: dict[str, list[Values]] = {"this": [], "other": []}
    kernels: dict[str, list[list[str]]] = {"this": [], "other": []}
    commits: dict[str, str] = {}
    rng = random.Random(0)
    for number in range(args.rounds):
        for name in rng.sample(sorted(checkouts), 2):
            script_folder = (HERE if args.script == "this" else checkouts[name]) / "benchmarks"
            document = run(checkouts[name], script_folder, args.benchmark, args.python, benchmark_args)
            rounds[name].append(VALUES[args.benchmark](document))
            kernels[name].append(
                [row["kernel"] for row in document["rows"]] if args.benchmark in ("cpu", "h200") else []
            )
            commits[name] = commit_of(checkouts[name])
        pairs = {name: (value, rounds["other"][-1].get(name)) for name, value in rounds["this"][-1].items()}
        print(f"round {number + 1} of {args.rounds} (this, other): {pairs}", flush=True)
    common = [name for name in rounds["this"][0] if name in rounds["other"][0]]
    comparison = {}
    print(f"{'row':<44}{'this':>9}{'other':>9}{'ratio':>8}   least..most")
    for name in common:
        this, other = ([values[name] for values in rounds[which]] for which in ("this", "other"))
        round_ratios = [a / b for a, b in zip(this, other, strict=True)]
        ratio = statistics.median(this) / statistics.median(other)
        comparison[name] = {"this": this, "other": other, "ratio": ratio}
        print(f"{name:<44}{statistics.median(this):9.4g}{statistics.median(other):9.4g}{ratio:8.3f}   "
              f"{min(round_ratios):.3f}..{max(round_ratios):.3f}")  # fmt: skip
    geomean = statistics.geometric_mean(item["ratio"] for item in comparison.values())  # type: ignore[arg-type]
    print(f"geometric mean {geomean:.3f}; this {commits['this'][:12]}, other {commits['other'][:12]}")
    more = {"commits": commits, "arguments": benchmark_args, "kernels": kernels, "geomean": geomean}
    write_results(f"versus-{args.benchmark}", comparison, **more)


if __name__ == "__main__":
    main()
