"""Shared code of the benchmarks: interleaved timing, medians with quartiles, and files of raw results."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemmtune.dispatch import current_target

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Entrant:
    """Function to time. run(i) uses operand set i; calls: the number of calls of the op that one run makes."""

    run: Callable[[int], Any]
    calls: int = 1


@dataclass(frozen=True)
class Spread:
    """Median and lower and upper quartile of a sample, with the raw values."""

    median: float
    low: float
    high: float
    times: tuple[float, ...]

    @classmethod
    def of(cls, times: Sequence[float]) -> Spread:
        low, median, high = statistics.quantiles(times, n=4) if len(times) > 1 else (times[0],) * 3
        return cls(median, low, high, tuple(times))


def interleave(
    entrants: Mapping[str, Entrant], *, sets: int, seconds: float, rounds: tuple[int, int] = (9, 101), seed: int = 0
) -> dict[str, list[float]]:
    """Return the seconds per call of every entrant, one value per round: index r of every list is round r.

    Each round times every entrant once, in a new random order. A fast entrant runs repeatedly, for about half a
    millisecond, each time on the next operand set. The rounds end after ``seconds``; ``rounds`` is their least and
    greatest number.
    """
    repeats = {name: _choose_repeats(entrant, sets) for name, entrant in entrants.items()}
    times: dict[str, list[float]] = {name: [] for name in entrants}
    order, rng, first_set = list(entrants), random.Random(seed), 0
    deadline = time.perf_counter() + seconds
    while len(times[order[0]]) < rounds[0] or (time.perf_counter() < deadline and len(times[order[0]]) < rounds[1]):
        rng.shuffle(order)
        for name in order:
            first_set += 1
            times[name].append(_time_run(entrants[name], repeats[name], first_set, sets))
    return times


def _time_run(entrant: Entrant, repeats: int, first_set: int, sets: int) -> float:
    start = time.perf_counter()
    for repeat in range(repeats):
        entrant.run((first_set + repeat) % sets)
    return (time.perf_counter() - start) / (repeats * entrant.calls)


def _choose_repeats(entrant: Entrant, sets: int) -> int:
    """Warm up on every operand set; return the number of runs that take half a millisecond."""
    for index in range(sets):
        entrant.run(index)
    run_s = min(_time_run(entrant, 1, index, sets) for index in range(sets)) * entrant.calls
    return max(1, math.ceil(0.5e-3 / max(run_s, 1e-7)))


def paired_ratios(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """Return the speed of ``fast`` over ``slow``, paired by round, so that a slowdown of the host cancels."""
    return Spread.of([a / b for a, b in zip(slow, fast, strict=True)])


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else float("nan")


def operand_sets(weight_bytes: int, *, max_sets: int = 24) -> int:
    """Return how many copies of a weight exceed twice the last-level cache (32 MB when unknown)."""
    caches = current_target().caches
    cache = max(caches, default=0) or 32 << 20
    return max(2, min(max_sets, math.ceil(2 * cache / max(1, weight_bytes)) + 1))


def write_results(name: str, rows: Any, **extra: Any) -> Path:
    """Write raw results as ``save_results`` does, and print where."""
    path = save_results(name, rows, **extra)
    print(f"raw data: {path}")
    return path


def save_results(name: str, rows: Any, **extra: Any) -> Path:
    """Write raw results, with the machine and the commit, to <name>-<time>.json in benchmarks/results/ (or in $OUT).

    extra: further entries of the file. A ``made`` among them is its time: the file of an earlier time is replaced.
    """
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(exist_ok=True)
    document = {**describe_run(name), **extra, "rows": rows}
    path = folder / f"{name}-{document['made']}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return path


def describe_run(name: str) -> dict[str, Any]:
    """Return the first entries of a results file: the benchmark, the time, the commit and the machine."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return {"benchmark": name, "made": stamp, "commit": current_commit(), "target": current_target().to_dict()}


def card_name(device: str) -> str:
    """Return the name of a GPU; empty for a CPU, which is the Target of every results file."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else ""


def current_commit() -> str:
    """Return the checked-out commit, with ``+`` when tracked files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
