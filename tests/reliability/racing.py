"""Checks of the race on the simulated clock: false winners, planted differences, disturbances, and its budget."""

from __future__ import annotations

import random
from collections.abc import Sequence

from gemmtune.testing.clock import FakeClock
from gemmtune.timing.clock import Run
from gemmtune.timing.machine import MachineState
from gemmtune.timing.race import Entrant, RaceResult, RaceSetup, race
from gemmtune.timing.surroundings import Surrounding

from .checks import Outcome, check

BUDGET_S = 6.0


def _race(
    seed: int, challengers: Sequence[float], incumbents: Sequence[float], budget: float = BUDGET_S, **clock: float
) -> RaceResult:
    """Race candidates of these times on a simulated clock with these disturbances."""
    fake = FakeClock(seed, **clock)  # type: ignore[arg-type]
    entrants = [Entrant(f"aten{i}", fake.kernel(s), is_baseline=True) for i, s in enumerate(incumbents)]
    entrants += [Entrant(f"native{i}", fake.kernel(s), packing="g") for i, s in enumerate(challengers)]
    return race(entrants, fake, budget, seed=seed)


@check(
    "A/A: 1,000 sweeps of identical candidates (2 to 200), simulated clock, 2% noise, 1% drift",
    "false winner < 1%; Tie reported",
)
def identical_candidates(full: bool) -> Outcome:
    sweeps = 1000 if full else 60
    rng = random.Random(1)
    false_winners = []
    for seed in range(sweeps):
        count = rng.choice((2, 3, 5, 10, 20, 50, 100, 200))
        result = _race(seed, [1e-3] * (count - 1), [1e-3], noise=0.02, drift=0.01)
        if result.outcome != "tie":
            false_winners.append({"seed": seed, "count": count, "stopped": result.stopped})
    return Outcome(
        f"{len(false_winners)} false winners in {sweeps} sweeps, {sweeps - len(false_winners)} ties",
        len(false_winners) < 0.01 * sweeps,
        {"sweeps": sweeps, "false": false_winners},
    )


@check("A/A as above on a disturbed machine: 5% of timings stalled by 8 ms, 10% drift", "false winner < 1%")
def identical_candidates_disturbed(full: bool) -> Outcome:
    sweeps = 1000 if full else 60
    rng = random.Random(2)
    counts = [rng.choice((2, 5, 20, 100)) for _ in range(sweeps)]
    disturbances = {"noise": 0.02, "drift": 0.1, "stalls": 0.05}
    false_winners = sum(
        _race(seed, [1e-3] * (count - 1), [1e-3], **disturbances).outcome == "winner"
        for seed, count in enumerate(counts)
    )
    return Outcome(
        f"{false_winners} false winners in {sweeps} sweeps", false_winners < 0.01 * sweeps, {"false": false_winners}
    )


@check(
    "known slow-downs of 1, 2, 5% of ATen behind one of 10 candidates, simulated clock, 2% noise, 1% drift",
    "found >= 80, 95, 99%",
)
def planted_differences(full: bool) -> Outcome:
    runs = 400 if full else 40
    found_shares = {}
    for percent in (1, 2, 5):
        incumbent = 1e-3 * (1 + percent / 100)
        results = [_race(seed, [incumbent] * 9 + [1e-3], [incumbent], noise=0.02, drift=0.01) for seed in range(runs)]
        found_shares[percent] = sum(r.outcome == "winner" and r.leader == "native9" for r in results) / runs
    # The short form's samples are small: each bar minus three standard errors of it.
    margin = 0.0 if full else 3.0 * (0.25 / runs) ** 0.5
    ok = all(found_shares[percent] >= bar - margin for percent, bar in ((1, 0.80), (2, 0.95), (5, 0.99)))
    return Outcome(
        ", ".join(f"{p}%: {share:.1%}" for p, share in found_shares.items()), ok, {"runs": runs, "found": found_shares}
    )


@check("the same slow-downs seen from the other side: a challenger 1, 2, 5% slower than ATen", "never wins")
def slower_challengers(full: bool) -> Outcome:
    runs = 400 if full else 40
    wrong = sum(
        _race(seed, [1e-3 * (1 + percent / 100)], [1e-3], noise=0.02, drift=0.01).outcome == "winner"
        for percent in (1, 2, 5)
        for seed in range(runs)
    )
    return Outcome(f"{wrong} wins in {3 * runs} races", wrong == 0, {"wrong": wrong})


@check(
    "stalls of 8 ms (10% of timings) and a neighbour (20% noise, 20% drift) against a candidate 10% faster than ATen",
    "decisions as on a quiet machine, or inconclusive; at most twice the budget",
)
def disturbed_decisions(full: bool) -> Outcome:
    runs = 300 if full else 30
    quiet_options = {"noise": 0.02}
    disturbed_options: tuple[dict[str, float], ...] = (
        {"noise": 0.02, "stalls": 0.1},
        {"noise": 0.2, "drift": 0.2},
        {"noise": 0.1, "stalls": 0.1, "drift": 0.2},
    )
    changed, longest, total, undecided_gains = 0, 0.0, 0, 0
    for seed in range(runs):
        for gain in (0.0, 0.1):
            times = [1e-3] * 4 + [1e-3 * (1 - gain)]
            expected = _race(seed, times, [1e-3], 2.0, **quiet_options)
            for options in disturbed_options:
                result = _race(seed, times, [1e-3], 2.0, **options)
                is_same = (result.outcome, gain and result.leader) == (expected.outcome, gain and expected.leader)
                undecided = result.outcome == "inconclusive"
                changed, total = changed + (not is_same and not undecided), total + 1
                # Equal candidates can only be inconclusive under such noise.
                undecided_gains += undecided and gain > 0.0
                longest = max(longest, result.seconds)
    # The short form's sample is small: the bar plus three standard errors of it.
    max_changed = 0.01 * total + (0.0 if full else 3.0 * (0.01 * total) ** 0.5)
    return Outcome(
        f"{changed} of {total} decisions changed, {undecided_gains} gains inconclusive; longest race "
        f"{longest / 2.0:.2f}x its budget",
        changed <= max_changed and undecided_gains <= 0.1 * total and longest <= 2.0 * 2.0 * 1.1,
        {"changed": changed, "inconclusive": undecided_gains, "total": total, "longest_s": longest},
    )


@check("the race's budget on a quiet simulated machine, 2 to 200 candidates of 50 us to 20 ms", "honoured within 10%")
def race_budget(full: bool) -> Outcome:
    rng = random.Random(3)
    shares_of_budget: list[float] = []
    for seed in range(500 if full else 40):
        base = 10 ** rng.uniform(-4.3, -1.7)
        times = [base * rng.uniform(0.8, 3.0) for _ in range(rng.choice((2, 10, 50, 200)))]
        budget = rng.choice((0.5, 2.0, 6.0))
        result = _race(seed, times, [base, base * 1.3], budget, noise=0.02)
        # The race cannot stop within one timing of the slowest candidate.
        shares_of_budget.append((result.seconds - max(times) - 500e-6) / budget)
    return Outcome(
        f"longest {max(shares_of_budget):.3f}x the budget",
        max(shares_of_budget) <= 1.1,
        {"longest": max(shares_of_budget), "races": len(shares_of_budget)},
    )


def _stalling(clock: FakeClock, seconds: float, every: int, stall_s: float) -> Run:
    """Return a kernel that takes ``seconds``, and ``stall_s`` more in every ``every``-th call."""
    calls = 0

    def run(i: int) -> None:
        nonlocal calls
        calls += 1
        clock.kernel(seconds + (stall_s if calls % every == 0 else 0.0))(i)

    return run


@check(
    "challengers that stall by themselves (5 to 50 ms and more in every 2nd to 5th call; of calls below 0.5 ms every "
    "13th): their median is 5% to 40% better than ATen's, their mean 15% or more worse; on quiet machines and on ones "
    "that stall as well",
    "win in < 1%",
)
def stalling_challengers(full: bool) -> Outcome:
    runs, wins, rows = 1000 if full else 60, 0, []
    rng = random.Random(7)
    for seed in range(runs):
        base, time_ratio = 10 ** rng.uniform(-4.5, -2.0), rng.uniform(0.6, 0.95)
        every, stall = rng.choice((2, 3, 5, 13 if base < 0.5e-3 else 5)), rng.choice((5e-3, 20e-3, 50e-3))
        stall = max(stall, every * base * (1.15 - time_ratio))  # the mean is worse
        fake = FakeClock(seed, noise=0.02, stalls=rng.choice((0.0, 0.03)))
        entrants = [Entrant("aten", fake.kernel(base), is_baseline=True)]
        entrants.append(Entrant("stalls", _stalling(fake, time_ratio * base, every, stall), packing="g"))
        result = race(entrants, fake, BUDGET_S, seed=seed)
        if result.outcome == "winner":
            wins += 1
            rows.append({"base": base, "share": time_ratio, "every": every, "stall": stall, "why": result.stopped})
    return Outcome(f"{wins} wins in {runs} races", wins < 0.01 * runs, {"wins": rows})


@check(
    "surroundings in which a challenger that is 1% to 20% faster alone is 2% to 20% slower, or as much faster",
    "wins on < 1% where it is slower, on >= 98% where it is faster",
)
def disagreeing_surroundings(full: bool) -> Outcome:
    runs, wrong, right_wins, agreeing = 600 if full else 60, 0, 0, 0
    rng = random.Random(8)
    for seed in range(runs):
        alone, slower = 1.0 - rng.uniform(0.01, 0.2), seed % 2 == 0
        around = 1.0 + rng.uniform(0.02, 0.2) if slower else alone
        fake, idle = FakeClock(seed, noise=0.01), 1e-3 * rng.uniform(0.05, 1.0)
        times = {"aten": 1e-3, "ours": 1e-3 * around}
        surrounding = Surrounding(
            "there", lambda n, _, f=fake, t=times, i=idle: f.kernel(i + t[n]), idle=fake.kernel(idle)
        )
        entrants = [Entrant("aten", fake.kernel(1e-3), is_baseline=True), Entrant("ours", fake.kernel(1e-3 * alone))]
        won = race(entrants, fake, BUDGET_S, seed=seed, setup=RaceSetup(surroundings=[surrounding])).outcome == "winner"
        wrong += slower and won
        agreeing, right_wins = agreeing + (not slower), right_wins + (not slower and won)
    min_share = 0.98 if full else 0.9
    counts = f"{wrong} of {runs - agreeing} slower ones won; {right_wins} of {agreeing} faster ones did"
    return Outcome(
        counts, wrong < 0.01 * runs and right_wins >= min_share * agreeing, {"wrong": wrong, "kept": right_wins}
    )


class _ContendedMachine:
    """Machine whose cores other processes need."""

    def read_state(self) -> MachineState:
        return MachineState(load=1.5, contention=True)


@check(
    "busy hosts: equals, gains of 10%, and ATen's calls slowed down a hundredfold during the race, where others need "
    "the cores",
    "no tie is decided, no gain invented, no hundredfold speed-up believed",
)
def busy_hosts(full: bool) -> Outcome:
    runs, faults = 300 if full else 40, 0
    for seed in range(runs):
        fake = FakeClock(seed, noise=0.05, stalls=0.05)
        slowed, gain = seed % 3 == 2, 0.1 if seed % 3 == 1 else 0.0
        earlier = {"aten": 1e-3, "ours": 1e-3}
        entrants = [Entrant("aten", fake.kernel(0.1 if slowed else 1e-3), is_baseline=True)]
        entrants.append(Entrant("ours", fake.kernel(1e-3 * (1 - gain))))
        outcome = race(
            entrants, fake, 4.0, seed=seed, setup=RaceSetup(machine=_ContendedMachine(), earlier_s=earlier)
        ).outcome
        faults += outcome not in (("winner", "inconclusive") if gain else ("inconclusive",))
    return Outcome(f"{faults} of {runs} decided", faults == 0, {"runs": runs, "faults": faults})


@check(
    "weights that lie raw beside a packed copy that is faster: the raw layout's own duel against ATen on the raw "
    "weight (raw kernels 5% to 60% faster than that, or 2% to 30% slower)",
    "right on >= 99%",
)
def raw_baselines(full: bool) -> Outcome:
    runs, right = 400 if full else 50, 0
    rng = random.Random(9)
    for seed in range(runs):
        fake, faster = FakeClock(seed, noise=0.02, drift=0.01), seed % 2 == 0
        ratio = 1.0 - rng.uniform(0.05, 0.6) if faster else 1.0 + rng.uniform(0.02, 0.3)
        entrants = [Entrant("aten/raw", fake.kernel(1e-3), is_baseline=True, packing="")]
        entrants.append(Entrant("aten/packed", fake.kernel(1e-3 * ratio * 0.95), is_baseline=True, packing="aten:copy"))
        entrants.append(Entrant("ours/raw", fake.kernel(1e-3 * ratio), packing=""))
        layout = race(entrants, fake, BUDGET_S, seed=seed).layouts.get("")
        right += (layout is not None and layout.outcome == "winner") == faster
    return Outcome(f"{right} of {runs} right", right >= (0.99 if full else 0.95) * runs, {"right": right})
