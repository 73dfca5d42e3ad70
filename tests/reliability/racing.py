"""The race on the simulated clock: false winners, planted differences, disturbances, and its budget."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gemmtune.measure.race import Entrant, RaceResult, race
from gemmtune.testing.clock import FakeClock

from .checks import Outcome, check

BUDGET_S = 6.0


def _race(
    seed: int, challengers: Sequence[float], incumbents: Sequence[float], budget: float = BUDGET_S, **clock: float
) -> RaceResult:
    fake = FakeClock(seed, **clock)  # type: ignore[arg-type]
    field = [Entrant(f"aten{i}", fake.kernel(s), incumbent=True) for i, s in enumerate(incumbents)]
    field += [Entrant(f"native{i}", fake.kernel(s), group="g") for i, s in enumerate(challengers)]
    return race(field, fake, budget, seed=seed)


@check(
    "A/A: 1,000 sweeps of identical candidates (2 to 200), simulated clock, 2% noise, 1% drift",
    "false winner < 1%; Tie reported",
)
def identical_candidates(full: bool) -> Outcome:
    sweeps = 1000 if full else 60
    rng = random.Random(1)
    false = []
    for seed in range(sweeps):
        count = rng.choice((2, 3, 5, 10, 20, 50, 100, 200))
        result = _race(seed, [1e-3] * (count - 1), [1e-3], noise=0.02, drift=0.01)
        if result.outcome != "tie":
            false.append({"seed": seed, "count": count, "stopped": result.stopped})
    return Outcome(
        f"{len(false)} false winners in {sweeps} sweeps, {sweeps - len(false)} ties",
        len(false) < 0.01 * sweeps,
        {"sweeps": sweeps, "false": false},
    )


@check("A/A as above on a disturbed machine: 5% of timings stalled by 8 ms, 10% drift", "false winner < 1%")
def identical_candidates_disturbed(full: bool) -> Outcome:
    sweeps = 1000 if full else 60
    rng = random.Random(2)
    counts = [rng.choice((2, 5, 20, 100)) for _ in range(sweeps)]
    weather = {"noise": 0.02, "drift": 0.1, "stalls": 0.05}
    false = sum(
        _race(seed, [1e-3] * (count - 1), [1e-3], **weather).outcome != "tie" for seed, count in enumerate(counts)
    )
    return Outcome(f"{false} false winners in {sweeps} sweeps", false < 0.01 * sweeps, {"false": false})


@check(
    "known slow-downs of 1, 2, 5% of ATen behind one of 10 candidates, simulated clock, 2% noise, 1% drift",
    "found >= 80, 95, 99%",
)
def planted_differences(full: bool) -> Outcome:
    runs = 400 if full else 40
    found = {}
    for percent in (1, 2, 5):
        incumbent = 1e-3 * (1 + percent / 100)
        results = [_race(seed, [incumbent] * 9 + [1e-3], [incumbent], noise=0.02, drift=0.01) for seed in range(runs)]
        found[percent] = sum(r.outcome == "winner" and r.leader == "native9" for r in results) / runs
    # The short form's samples are small: each bar less three standard errors at itself.
    slack = 0.0 if full else 3.0 * (0.25 / runs) ** 0.5
    ok = all(found[percent] >= bar - slack for percent, bar in ((1, 0.80), (2, 0.95), (5, 0.99)))
    return Outcome(", ".join(f"{p}%: {share:.1%}" for p, share in found.items()), ok, {"runs": runs, "found": found})


@check("the same slow-downs seen from the other side: a challenger 1, 2, 5% slower than ATen", "never wins")
def slower_challengers(full: bool) -> Outcome:
    runs = 400 if full else 40
    wrong = sum(
        _race(seed, [1e-3 * (1 + percent / 100)], [1e-3], noise=0.02, drift=0.01).outcome != "tie"
        for percent in (1, 2, 5)
        for seed in range(runs)
    )
    return Outcome(f"{wrong} wins in {3 * runs} races", wrong == 0, {"wrong": wrong})


@check(
    "stalls of 8 ms (10% of timings) and a neighbour (20% noise, 20% drift) against a candidate 10% faster than ATen",
    "decisions as on a quiet machine; at most twice the budget",
)
def disturbed_decisions(full: bool) -> Outcome:
    runs = 300 if full else 30
    quiet = {"noise": 0.02}
    loud: tuple[dict[str, float], ...] = (
        {"noise": 0.02, "stalls": 0.1},
        {"noise": 0.2, "drift": 0.2},
        {"noise": 0.1, "stalls": 0.1, "drift": 0.2},
    )
    changed, longest, total = 0, 0.0, 0
    for seed in range(runs):
        for gain in (0.0, 0.1):
            times = [1e-3] * 4 + [1e-3 * (1 - gain)]
            expected = _race(seed, times, [1e-3], 2.0, **quiet)
            for weather in loud:
                result = _race(seed, times, [1e-3], 2.0, **weather)
                same = (result.outcome, gain and result.leader) == (expected.outcome, gain and expected.leader)
                changed, total = changed + (not same), total + 1
                longest = max(longest, result.seconds)
    # The short form's sample is small: the bar plus three standard errors at itself.
    most = 0.01 * total + (0.0 if full else 3.0 * (0.01 * total) ** 0.5)
    return Outcome(
        f"{changed} of {total} decisions changed; longest race {longest / 2.0:.2f}x its budget",
        changed <= most and longest <= 2.0 * 2.0 * 1.1,
        {"changed": changed, "total": total, "longest_s": longest},
    )


@check("the race's budget on a quiet simulated machine, 2 to 200 candidates of 50 us to 20 ms", "honoured within 10%")
def race_budget(full: bool) -> Outcome:
    rng = random.Random(3)
    over: list[float] = []
    for seed in range(500 if full else 40):
        base = 10 ** rng.uniform(-4.3, -1.7)
        times = [base * rng.uniform(0.8, 3.0) for _ in range(rng.choice((2, 10, 50, 200)))]
        budget = rng.choice((0.5, 2.0, 6.0))
        result = _race(seed, times, [base, base * 1.3], budget, noise=0.02)
        # One timing of the slowest is the finest step there is.
        over.append((result.seconds - max(times) - 500e-6) / budget)
    return Outcome(f"longest {max(over):.3f}x the budget", max(over) <= 1.1, {"longest": max(over), "races": len(over)})
