"""Statistics: coverage of the intervals, robustness, and small cases computed by hand."""

from __future__ import annotations

import itertools
import math
import random
from statistics import median

import pytest

from gemmtune.timing import stats


def test_mad_estimates_the_standard_deviation_despite_stalls() -> None:
    rng = random.Random(1)
    values = [rng.gauss(10.0, 0.5) for _ in range(1000)] + [100.0] * 30
    assert stats.mad(values) == pytest.approx(0.5, rel=0.15)


def test_median_interval_of_small_samples() -> None:
    interval = stats.median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0])  # 1 - 2 * 2**-6
    assert (interval.center, interval.lo, interval.hi, interval.level) == (3.5, 1.0, 6.0, 1 - 2 / 64)
    nine = stats.median_interval([float(i) for i in range(1, 10)])  # without one value on each side: 1 - 2 * 10 / 512
    assert (nine.lo, nine.hi, nine.level) == (2.0, 8.0, 1 - 20 / 512)


def test_interval_level_of_few_values() -> None:
    assert stats.median_interval([1.0, 2.0, 3.0]).level == 0.75
    assert stats.shift_interval([1.0, 2.0, 3.0]).level == 0.75
    assert stats.median_interval([1.0]) == stats.Interval(1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("tail", [0.3, 0.1, 0.025, 0.001])
def test_signed_rank_cuts_match_enumeration(n: int, tail: float) -> None:
    signs = itertools.product((0, 1), repeat=n)
    sums = [sum(rank * sign for rank, sign in zip(range(1, n + 1), sign_vector, strict=True)) for sign_vector in signs]
    cut, reached = stats._signed_rank_cut(n, tail)
    assert reached == sum(total <= cut for total in sums) / 2**n
    assert reached <= tail or cut == 0
    assert sum(total <= cut + 1 for total in sums) / 2**n > tail or cut + 1 >= (n * (n + 1) // 2 + 1) // 2


def test_normal_approximation_agrees_with_the_exact_distribution() -> None:
    exact = stats._signed_rank_cut(30, 0.025)[0]
    n = 30
    approximate = n * (n + 1) / 4 - 1.96 * math.sqrt(n * (n + 1) * (2 * n + 1) / 24) - 0.5
    assert abs(exact - math.floor(approximate)) <= 1


@pytest.mark.parametrize("n", [8, 25, 50])
@pytest.mark.parametrize("stalls", [0.0, 0.05])
def test_intervals_have_their_nominal_coverage(n: int, stalls: float) -> None:
    rng = random.Random(n)
    misses = {"sign": 0, "rank": 0}
    trials = 600
    for _ in range(trials):
        stalled = [rng.choice((-2.0, 2.0)) if rng.random() < stalls else 0.0 for _ in range(n)]
        values = [rng.gauss(0.0, 0.02) + stall for stall in stalled]
        for name, interval in (("sign", stats.median_interval(values)), ("rank", stats.shift_interval(values))):
            misses[name] += not interval.lo <= 0.0 <= interval.hi
    assert misses["sign"] <= 0.05 * trials + 3 * math.sqrt(0.05 * trials)
    assert misses["rank"] <= 0.05 * trials + 3 * math.sqrt(0.05 * trials)


def test_signed_rank_interval_is_narrower_than_the_sign_interval() -> None:
    rng = random.Random(3)
    sign = rank = 0.0
    for _ in range(50):
        values = [rng.gauss(0.0, 1.0) for _ in range(40)]
        sign += stats.median_interval(values).hi - stats.median_interval(values).lo
        rank += stats.shift_interval(values).hi - stats.shift_interval(values).lo
    assert rank < 0.9 * sign


def test_ratio_interval_cancels_drift() -> None:
    rng = random.Random(4)
    speed = [1.0 + 0.5 * i / 50 for i in range(50)]
    base = [s * math.exp(rng.gauss(0.0, 0.01)) for s in speed]
    fast = [0.95 * s * math.exp(rng.gauss(0.0, 0.01)) for s in speed]
    interval = stats.ratio_interval(fast, base)
    assert interval.lo < 0.95 < interval.hi
    assert interval.hi - interval.lo < 0.01


def test_alpha_spending_sums_to_less_than_alpha() -> None:
    shares = [stats.spend(0.05, look) for look in range(1, 5000)]
    assert shares == sorted(shares, reverse=True)
    assert 0.049 < math.fsum(shares) < 0.05


def test_slower_than_needs_enough_pairs() -> None:
    rng = random.Random(5)
    base = [math.exp(rng.gauss(0.0, 0.02)) for _ in range(30)]
    slow = [1.1 * math.exp(rng.gauss(0.0, 0.02)) for _ in range(30)]
    interval = stats.slower_than(slow, base, 1e-4)
    assert interval is not None
    assert interval.lo < 1.1 < interval.hi
    assert stats.slower_than(base, slow, 1e-4) is None
    assert stats.slower_than(slow[:5], base[:5], 1e-4) is None  # five pairs cannot be significant at this level


def test_drift_is_zero_for_noise() -> None:
    rng = random.Random(6)
    steady = [math.exp(rng.gauss(0.0, 0.02)) for _ in range(60)]
    drifting = [t * (1.0 + 0.2 * i / 60) for i, t in enumerate(steady)]
    assert stats.drift(steady) == 0.0
    assert 0.08 < stats.drift(drifting) < 0.2
    assert stats.drift([1.0, 2.0, 3.0]) == 0.0
    assert median(steady) == pytest.approx(1.0, abs=0.02)


def test_drift_is_relative_to_the_first_median() -> None:
    rng = random.Random(7)
    values = [(1.0 + 0.2 * i / 60) * math.exp(rng.gauss(0.0, 0.02)) for i in range(60)]
    assert stats.drift([1e-3 * value for value in values]) == pytest.approx(stats.drift(values), rel=1e-9)


@pytest.mark.parametrize("n", [6, 11, 20, 41])
def test_median_intervals_are_the_narrowest_that_the_binomial_distribution_allows(n: int) -> None:
    interval = stats.median_interval([float(i) for i in range(n)])
    skipped = round(interval.lo)
    assert interval.hi == n - 1 - skipped
    assert interval.level == pytest.approx(1.0 - 2.0 * sum(math.comb(n, i) for i in range(skipped + 1)) / 2**n)
    assert interval.level >= 0.95
    assert 2.0 * sum(math.comb(n, i) for i in range(skipped + 2)) / 2**n > 0.05


def test_mad_of_a_few_values_by_hand() -> None:
    assert stats.mad([1.0, 2.0, 4.0, 8.0, 100.0]) == pytest.approx(1.4826 * 3.0)
    assert stats.mad([3.0]) == 0.0


def test_drift_by_hand() -> None:
    """Without any noise the change of the medians of the first and the last third counts."""
    assert stats.drift([2.0] * 3 + [7.0] * 3 + [3.0] * 3) == 0.5
    assert stats.drift([4.0] * 3 + [7.0] * 3 + [3.0] * 3) == -0.25
    assert stats.drift([2.0, 2.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]) == 0.0


def test_drift_within_three_standard_errors_is_none() -> None:
    """The spread of both thirds is 1.4826 * 0.1: three standard errors are 1.2533 * 1.4826 * 0.1 * sqrt(2 / 3) * 3."""
    limit = 3.0 * 1.2533 * 1.4826 * 0.1 * math.sqrt(2.0 / 3.0)
    for factor, expected in ((0.99, 0.0), (1.01, 1.01 * limit)):
        first = [0.9, 1.0, 1.1]
        values = [*first, 5.0, 5.0, 5.0, *[value + factor * limit for value in first]]
        assert stats.drift(values) == pytest.approx(expected)


@pytest.mark.parametrize("n", [31, 40, 100])
def test_signed_rank_cut_of_many_values_is_the_normal_one_with_continuity_correction(n: int) -> None:
    mean, sigma = n * (n + 1) / 4, math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    for tail, quantile in ((0.025, -1.959964), (0.005, -2.575829), (0.25, -0.674490)):
        assert stats._signed_rank_cut(n, tail) == (math.floor(mean + quantile * sigma - 0.5), tail)
    assert stats._signed_rank_cut(n, 1e-200)[0] == 0


def test_shift_interval_of_three_values_by_hand() -> None:
    """The averages of 1, 2 and 6 in pairs are 1, 1.5, 2, 3.5, 4 and 6."""
    interval = stats.shift_interval([1.0, 6.0, 2.0])
    assert (interval.center, interval.lo, interval.hi) == (2.75, 1.0, 6.0)
    wide = stats.shift_interval([1.0, 6.0, 2.0], alpha=0.5)
    assert (wide.lo, wide.hi, wide.level) == (1.5, 4.0, 0.5)


def test_ratio_interval_is_that_of_the_logarithms() -> None:
    times, base = [2.0, 3.0, 8.0, 5.0], [1.0, 2.0, 2.0, 5.0]
    assert stats.log_ratios(times, base) == pytest.approx([math.log(2.0), math.log(1.5), math.log(4.0), 0.0])
    shift = stats.shift_interval(stats.log_ratios(times, base))
    interval = stats.ratio_interval(times, base)
    assert (interval.lo, interval.hi) == pytest.approx((1.0, 4.0))
    assert interval.center == pytest.approx(math.exp(shift.center))
    assert interval.level == shift.level


def test_alpha_of_a_look_falls_with_its_square() -> None:
    assert stats.spend(0.05, 1) == pytest.approx(0.05 * 6 / math.pi**2)
    assert stats.spend(0.05, 3) == pytest.approx(0.05 * 6 / math.pi**2 / 9)


@pytest.mark.parametrize("n", [5, 6, 7])
def test_slower_than_is_as_sure_as_it_says(n: int) -> None:
    """Of n pairs that are all slower the chance is 2**-n."""
    slow, base = [1.5] * n, [1.0] * n
    assert stats.slower_than(slow, base, 2.0**-n) is not None
    assert stats.slower_than(slow, base, 0.99 * 2.0**-n) is None
    assert stats.slower_than(base, base, 0.5) is None


@pytest.mark.parametrize(("least", "trials", "chance"), [(0, 5, 0.3), (2, 5, 0.3), (5, 5, 0.3), (3, 4, 0.75)])
def test_binomial_tail_is_the_sum_of_its_terms(least: int, trials: int, chance: float) -> None:
    outcomes = itertools.product((0, 1), repeat=trials)
    expected = sum(
        math.prod(chance if hit else 1.0 - chance for hit in outcome) for outcome in outcomes if sum(outcome) >= least
    )
    assert stats.binomial_tail(least, trials, chance) == pytest.approx(expected)


def test_binomial_tail_beyond_all_trials_is_zero() -> None:
    assert stats.binomial_tail(6, 5, 0.3) == 0.0
