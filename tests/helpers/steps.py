"""Work in steps, with nothing else to do during its waits."""

from __future__ import annotations

from gemmtune.tuning.turns import Steps, T, run_in_turns


def run_alone(steps: Steps[T]) -> T:
    """Run one piece of work to its end, and return its result."""
    (ended,) = run_in_turns([lambda: steps], lambda index, others: False)
    return ended.result
