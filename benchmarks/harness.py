"""What the benchmarks share: interleaved timing, medians with their spread, and raw results with their machine."""

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

from gemmtune.dispatch import current_target

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Entrant:
    """Something to time. run(i) does its work on operand set i; calls: how many calls of the op that is."""

    run: Callable[[int], Any]
    calls: int = 1


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of seconds a call, with the raw times."""

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
    """Time every entrant once a round, in an order shuffled each round, for ``seconds`` in all.

    A turn of a fast entrant is repeated until it lasts about half a millisecond, each repeat on the next operand set.
    rounds: the least and the most. Returns seconds a call, by round: entry r of every list is of the same round.
    """
    repeats = {name: _repeats(entrant, sets) for name, entrant in entrants.items()}
    times: dict[str, list[float]] = {name: [] for name in entrants}
    order, rng, turn = list(entrants), random.Random(seed), 0
    deadline = time.perf_counter() + seconds
    while len(times[order[0]]) < rounds[0] or (time.perf_counter() < deadline and len(times[order[0]]) < rounds[1]):
        rng.shuffle(order)
        for name in order:
            turn += 1
            times[name].append(_turn(entrants[name], repeats[name], turn, sets))
    return times


def _turn(entrant: Entrant, repeats: int, turn: int, sets: int) -> float:
    start = time.perf_counter()
    for step in range(repeats):
        entrant.run((turn + step) % sets)
    return (time.perf_counter() - start) / (repeats * entrant.calls)


def _repeats(entrant: Entrant, sets: int) -> int:
    """Warm up on every operand set, then choose how many runs make half a millisecond."""
    for index in range(sets):
        entrant.run(index)
    once = min(_turn(entrant, 1, index, sets) for index in range(sets)) * entrant.calls
    return max(1, math.ceil(0.5e-3 / max(once, 1e-7)))


def ratios(slow: Sequence[float], fast: Sequence[float]) -> Spread:
    """How many times faster ``fast`` is, round by round: paired, so that a slow moment of the host cancels."""
    return Spread.of([a / b for a, b in zip(slow, fast, strict=True)])


def geomean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else float("nan")


def operand_sets(weight_bytes: int, *, most: int = 24) -> int:
    """How many copies of a weight exceed twice the last-level cache (32 MB when unknown)."""
    caches = current_target().caches
    cache = max(caches, default=0) or 32 << 20
    return max(2, min(most, math.ceil(2 * cache / max(1, weight_bytes)) + 1))


def write(name: str, rows: Any, **more: Any) -> Path:
    """Keep raw results as <name>-<time>.json in benchmarks/results/, or in $OUT when that is set, with the machine and
    the commit they come from."""
    folder = Path(os.environ.get("OUT") or RESULTS)
    folder.mkdir(exist_ok=True)
    document = header(name)
    path = folder / f"{name}-{document['made']}.json"
    path.write_text(json.dumps({**document, **more, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"raw data: {path}")
    return path


def header(name: str) -> dict[str, Any]:
    """What raw results of now begin with: when, at which commit and on which machine they were made."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return {"benchmark": name, "made": stamp, "commit": commit(), "target": current_target().to_dict()}


def commit() -> str:
    """The checked-out commit, with ``+`` when tracked files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
