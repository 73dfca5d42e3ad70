"""Comparison among other work: the number of rounds and the ratios."""

from __future__ import annotations

import random

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Run
from gemmtune.timing.race_entry import RaceEntry
from gemmtune.timing.surroundings import ROUNDS, Comparison, Surrounding, compare

BASELINE_S, IDLE_S = 1e-3, 0.2e-3


def run_comparison(ratios: dict[str, float], seed: int, seconds: float = 1e9) -> tuple[dict[str, Comparison], int]:
    """Compare a challenger whose variants take ``ratios`` of the baseline's time. Return the results and the rounds."""
    clock = FakeClock(seed, noise=0.01)
    rounds = 0

    def run_of(name: str, variant: str) -> Run:
        kernel = clock.kernel(IDLE_S + BASELINE_S * (ratios[variant] if name == "ours" else 1.0))

        def run(i: int) -> None:
            nonlocal rounds
            rounds += name != "ours"
            kernel(i)

        return run

    challenger, baseline = (
        RaceEntry(name, clock.kernel(BASELINE_S), name == "aten", None, calls=1, times={0: BASELINE_S})
        for name in ("ours", "aten")
    )
    surrounding = Surrounding("somewhere", run_of, lambda _: tuple(ratios), clock.kernel(IDLE_S))
    comparisons = compare(surrounding, challenger, baseline, clock, random.Random(seed), clock.now() + seconds)
    return comparisons, rounds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("ratios", "rounds"),
    [({"": 0.5}, 8), ({"": 0.5, "overlap": 0.6}, 8), ({"": 0.5, "overlap": 0.97}, ROUNDS), ({"": 0.97}, ROUNDS)],
)
def test_clearly_faster_challenger_needs_fewer_rounds(ratios: dict[str, float], rounds: int, seed: int) -> None:
    comparisons, timed_rounds = run_comparison(ratios, seed)
    assert timed_rounds == rounds
    assert {name: comparison.ratio for name, comparison in comparisons.items()} == pytest.approx(ratios, rel=0.03)


def test_comparison_without_time_for_six_rounds_is_empty() -> None:
    assert run_comparison({"": 0.5}, 1, seconds=5 * (BASELINE_S * 1.5 + 3 * IDLE_S))[0] == {}
