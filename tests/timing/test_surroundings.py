"""``compare``: the number of rounds, and the ratios that it returns."""

from __future__ import annotations

import random

import pytest

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Run
from gemmtune.timing.race_entry import RaceEntry
from gemmtune.timing.surroundings import ROUNDS, Comparison, Surrounding, compare

INCUMBENT_S, IDLE_S = 1e-3, 0.2e-3


def compared(ratios: dict[str, float], seed: int, seconds: float = 1e9) -> tuple[dict[str, Comparison], int]:
    """Return the comparison of a challenger whose variants take ``ratios`` of the baseline's time, and its rounds."""
    clock = FakeClock(seed, noise=0.01)
    rounds = 0

    def run_of(name: str, variant: str) -> Run:
        kernel = clock.kernel(IDLE_S + INCUMBENT_S * (ratios[variant] if name == "ours" else 1.0))

        def run(i: int) -> None:
            nonlocal rounds
            rounds += name != "ours"
            kernel(i)

        return run

    ours, aten = (
        RaceEntry(name, clock.kernel(INCUMBENT_S), name == "aten", None, calls=1, times={0: INCUMBENT_S})
        for name in ("ours", "aten")
    )
    surrounding = Surrounding("somewhere", run_of, lambda _: tuple(ratios), clock.kernel(IDLE_S))
    found = compare(surrounding, ours, aten, clock, random.Random(seed), clock.now() + seconds)
    return found, rounds


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("ratios", "rounds"),
    [({"": 0.5}, 8), ({"": 0.5, "overlap": 0.6}, 8), ({"": 0.5, "overlap": 0.97}, ROUNDS), ({"": 0.97}, ROUNDS)],
)
def test_only_what_is_clearly_faster_in_every_variant_is_timed_less(
    ratios: dict[str, float], rounds: int, seed: int
) -> None:
    found, timed = compared(ratios, seed)
    assert timed == rounds
    assert {name: comparison.ratio for name, comparison in found.items()} == pytest.approx(ratios, rel=0.03)


def test_without_time_for_six_rounds_nothing_is_known() -> None:
    assert compared({"": 0.5}, 1, seconds=5 * (INCUMBENT_S * 1.5 + 3 * IDLE_S))[0] == {}
