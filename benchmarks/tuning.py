"""Measure the cost of tuning: seconds and peak memory of each problem, with an empty store each.

    python benchmarks/tuning.py [--families int8wo,bf16] [--m 1,64] [--budget S]

Memory is the growth of this process and its children together since the start, sampled every 20 ms. The limit is 4
times the size of the problem's operands plus 500 MB.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from harness import write_results

from gemmtune.core.workloads import build, label
from gemmtune.dispatch import current_target
from gemmtune.store import open_store
from gemmtune.tuning.tuner import Budget, Tuner

WEIGHTS = ((4096, 4096), (11008, 4096), (4096, 11008))


class PeakMemory:
    """Context manager that samples the memory of this process and its children; ``growth`` is the peak minus the start
    in bytes."""

    def __enter__(self) -> PeakMemory:
        self._process = psutil.Process()
        self._start, self._peak, self._stop = self._memory_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return max(0, self._peak - self._start)

    def _sample(self) -> None:
        while not self._stop.wait(0.02):
            self._peak = max(self._peak, self._memory_bytes())

    def _memory_bytes(self) -> int:
        total = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            try:
                memory = child.memory_full_info()
                total += getattr(memory, "uss", memory.rss)  # does not count the shared pages of libraries twice
            except psutil.Error:
                continue
        return total


def measure(family: str, m: int, k: int, n: int, budget: float | None) -> dict[str, Any]:
    """Tune one problem with an empty store. ``seconds_with_start`` includes the start of its worker process."""
    problem = build(m, n, k, family)
    with tempfile.TemporaryDirectory(prefix="gemmtune-tuning-") as folder:
        store = open_store(Path(folder) / "store.db")
        tuner = Tuner(current_target(), ("aten", "native"), store, Budget(seconds=budget))
        start = time.perf_counter()
        with PeakMemory() as memory:
            (decision,) = tuner.tune([(problem, 1)])
        total = time.perf_counter() - start
        store.close()
    limit_bytes = 4 * problem.min_bytes + 500e6
    row = {
        "problem": label(problem),
        "seconds": decision.seconds,
        "seconds_with_start": total,
        "peak_mb": memory.growth / 1e6,
        "allowed_mb": limit_bytes / 1e6,
        "tried": sum(row.stage not in ("illegal", "untried") for row in decision.evidence),
        "outcome": decision.outcome,
        "chosen": decision.chosen,
    }
    print(
        f"{row['problem']:<28} {decision.seconds:5.1f} s ({total:.1f} with the worker's start)  "
        f"peak {row['peak_mb']:.0f} of {row['allowed_mb']:.0f} MB  "
        f"{row['tried']} tried  {decision.outcome} {decision.chosen}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="int8wo,int8,bf16,fp32")
    parser.add_argument("--m", default="1,16,64,256")
    parser.add_argument("--budget", type=float, help="seconds a problem [the library's default]")
    parser.add_argument("--quick", action="store_true", help="one weight only")
    args = parser.parse_args()
    rows = [
        measure(family, int(m), k, n, args.budget)
        for family in args.families.split(",")
        for k, n in (WEIGHTS[:1] if args.quick else WEIGHTS)
        for m in args.m.split(",")
    ]
    write_results("tuning", rows, budget=args.budget)


if __name__ == "__main__":
    main()
