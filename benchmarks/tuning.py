"""What tuning costs: seconds and peak memory a problem, on fresh stores.

    python benchmarks/tuning.py [--families int8wo,bf16] [--m 1,64] [--budget S]

Memory is the growth of this process and its children together over their start, sampled every 20 ms; the bar is 4 times
the problem's operands plus 500 MB.
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
from harness import write

from gemmtune.core.workloads import build, label
from gemmtune.dispatch import current_target
from gemmtune.store import open_store
from gemmtune.tuning.tuner import Budget, Tuner

WEIGHTS = ((4096, 4096), (11008, 4096), (4096, 11008))


class PeakMemory:
    """Watches the resident memory of this process and its children; ``grown`` is the peak over the start, in bytes."""

    def __enter__(self) -> PeakMemory:
        self._me = psutil.Process()
        self._start, self._peak, self._stop = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        return max(0, self._peak - self._start)

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        total = self._me.memory_info().rss
        for child in self._me.children(recursive=True):
            try:
                memory = child.memory_full_info()
                total += getattr(memory, "uss", memory.rss)  # shared pages of libraries counted once
            except psutil.Error:
                continue
        return total


def measure(family: str, m: int, k: int, n: int, budget: float | None) -> dict[str, Any]:
    """Tune one problem from nothing, the start of its worker included in ``seconds_with_start``."""
    problem = build(m, n, k, family)
    with tempfile.TemporaryDirectory(prefix="gemmtune-tuning-") as folder:
        store = open_store(Path(folder) / "store.db")
        tuner = Tuner(current_target(), ("aten", "native"), store, Budget(seconds=budget))
        start = time.perf_counter()
        with PeakMemory() as memory:
            (decision,) = tuner.tune([(problem, 1)])
        total = time.perf_counter() - start
        store.close()
    allowed = 4 * problem.min_bytes + 500e6
    row = {
        "problem": label(problem),
        "seconds": decision.seconds,
        "seconds_with_start": total,
        "peak_mb": memory.grown / 1e6,
        "allowed_mb": allowed / 1e6,
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
    write("tuning", rows, budget=args.budget)


if __name__ == "__main__":
    main()
