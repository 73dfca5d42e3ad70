"""Two checkouts by the same benchmark, in turns: what a change costs.

    python benchmarks/versus.py ../base --benchmark overhead --rounds 5
    python benchmarks/versus.py ../base --benchmark cpu --script this --rounds 3 --quick --budget 8

The other checkout (made with ``git worktree add``, then ``make install`` in it) and this one run the benchmark, each
with the gemmtune of its own ``.venv`` and its own script, one after the other, in random order, each time with an empty
store. With ``--script this`` both run this checkout's script. A row's value is gemmtune's time over PyTorch's, both
taken in one process, so that a host that is slower in one turn does not count. The table has the ratio of this
checkout's value to the other's (below 1: this one is faster): of the medians over rounds, with the least and the most
of a round. Writes all values to benchmarks/results/.
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

from harness import write

HERE = Path(__file__).resolve().parent.parent
Values = dict[str, float]


def overhead_values(document: Mapping[str, Any]) -> Values:
    """Time of a call over PyTorch's by row of overhead.py, and of ``import gemmtune`` over ``import torch``; seconds of
    what has no rival there: the store's answer, a built kernel found."""
    values = {name: mine / plain for name, (plain, mine) in document["rows"].items()}
    values["import gemmtune (over torch)"] = document["import_gemmtune_s"] / document["import_torch_s"]
    return {**values, "store hit [s]": document["store_hit_s"], "built kernel found [s]": document["artifact_found_s"]}


def cpu_values(document: Mapping[str, Any]) -> Values:
    """Time over the best peer's by shape of cpu.py."""
    return {
        f"{row['family']} {row['m']}x{row['n']}x{row['k']}, {row['threads']} threads": 1.0 / row["speedup"]
        for row in document["rows"]
    }


VALUES: dict[str, Callable[[Mapping[str, Any]], Values]] = {"overhead": overhead_values, "cpu": cpu_values}


def run(checkout: Path, script: Path, benchmark: str, arguments: list[str]) -> dict[str, Any]:
    """The raw data of one run of the benchmark in the folder ``script`` by a checkout's gemmtune. Raises
    CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory(prefix="gemmtune-versus-") as folder:
        environment = {**os.environ, "OUT": folder, "GEMMTUNE_STORE": str(Path(folder) / "store.db")}
        command = [str(checkout / ".venv" / "bin" / "python"), str(script / f"{benchmark}.py"), *arguments]
        subprocess.run(command, cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(folder).glob(f"{benchmark}-*.json")
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document


def commit_of(checkout: Path) -> str:
    """The commit that is checked out there."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout; what is not known here is the benchmark's")
    parser.add_argument("--benchmark", choices=tuple(VALUES), default="overhead")
    parser.add_argument("--script", choices=("own", "this"), default="own", help="whose script the other one runs")
    parser.add_argument("--rounds", type=int, default=5)
    args, passed = parser.parse_known_args()
    checkouts = {"this": HERE, "other": args.other.resolve()}
    for checkout in checkouts.values():
        if not (checkout / ".venv" / "bin" / "python").exists():
            sys.exit(f"{checkout} has no .venv: run make install there")
    rounds: dict[str, list[Values]] = {"this": [], "other": []}
    kernels: dict[str, list[list[str]]] = {"this": [], "other": []}
    commits: dict[str, str] = {}
    rng = random.Random(0)
    for number in range(args.rounds):
        for name in rng.sample(sorted(checkouts), 2):
            script = (HERE if args.script == "this" else checkouts[name]) / "benchmarks"
            document = run(checkouts[name], script, args.benchmark, passed)
            rounds[name].append(VALUES[args.benchmark](document))
            kernels[name].append([row["kernel"] for row in document["rows"]] if args.benchmark == "cpu" else [])
            commits[name] = commit_of(checkouts[name])
        pairs = {name: (value, rounds["other"][-1].get(name)) for name, value in rounds["this"][-1].items()}
        print(f"round {number + 1} of {args.rounds} (this, other): {pairs}", flush=True)
    common = [name for name in rounds["this"][0] if name in rounds["other"][0]]
    found = {}
    print(f"{'row':<44}{'this':>9}{'other':>9}{'ratio':>8}   least..most")
    for name in common:
        mine, theirs = ([values[name] for values in rounds[which]] for which in ("this", "other"))
        pairs = [a / b for a, b in zip(mine, theirs, strict=True)]
        ratio = statistics.median(mine) / statistics.median(theirs)
        found[name] = {"this": mine, "other": theirs, "ratio": ratio}
        print(f"{name:<44}{statistics.median(mine):9.4g}{statistics.median(theirs):9.4g}{ratio:8.3f}   "
              f"{min(pairs):.3f}..{max(pairs):.3f}")  # fmt: skip
    geomean = statistics.geometric_mean(item["ratio"] for item in found.values())  # type: ignore[arg-type]
    print(f"geometric mean {geomean:.3f}; this {commits['this'][:12]}, other {commits['other'][:12]}")
    write(f"versus-{args.benchmark}", found, commits=commits, arguments=passed, kernels=kernels, geomean=geomean)


if __name__ == "__main__":
    main()
