"""The choice of kernels from simulated times, and which of them serves each measured M."""

from __future__ import annotations

import math

import pytest
from hypothesis import given

from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.tuning import intervals, kernel_choice
from gemmtune.tuning.curves import MARGIN, REPEATABLE, Curves, point_weights
from helpers.curves import BOUND, MOST, PLAIN, SIZES, sample_curves, serve, simulated_curves, staircase


@given(simulated_curves())
def test_regret_is_within_the_bound_at_measured_m(curves: Curves) -> None:
    """Beyond what another tuning may find."""
    for m, name in serve(curves).items():
        assert curves.regret(name, m) <= BOUND + REPEATABLE


@given(simulated_curves())
def test_kernels_that_serve_are_no_slower_than_plain(curves: Curves) -> None:
    if curves.plain:
        for m, name in serve(curves).items():
            plain_s = curves.times[PLAIN][m]
            assert name == PLAIN or curves.times[name][m] <= (1.0 - MARGIN) * plain_s


@given(simulated_curves())
def test_each_chosen_kernel_is_needed(curves: Curves) -> None:
    chosen = kernel_choice.choose_kernels(curves, BOUND, MOST)
    assert len(chosen) == len(set(chosen)) <= MOST + 1
    assert (PLAIN in chosen) == bool(curves.plain)
    others = [name for name in chosen if name != PLAIN]
    assert others or curves.plain
    if len(others) > 1:  # without one of them, the bound or the mean regret is exceeded
        choice = kernel_choice._Choice(curves, BOUND)
        score = choice.score(chosen)
        for name in others:
            without = choice.score([c for c in chosen if c != name])
            assert without.excess > max(score.excess, 0.0) or without.cost > score.cost


@pytest.mark.parametrize(("share", "chosen"), [(0.97, True), (0.985, True), (0.995, False), (1.0, False), (1.2, False)])
def test_kernel_must_be_faster_than_plain_by_the_margin(share: float, chosen: bool) -> None:
    plain = staircase(2.0, 0.01)
    curves = sample_curves({PLAIN: plain, "k": lambda m: share * plain(m)}, plain=PLAIN)
    assert ("k" in kernel_choice.choose_kernels(curves, BOUND, MOST)) == chosen
    assert set(serve(curves).values()) == {"k" if chosen else PLAIN}


def test_kernel_that_later_ones_make_needless_is_dropped() -> None:
    """The all-rounder is chosen first: it exceeds the bound by the least."""
    low, high = staircase(1.0, 1e-3), staircase(1.5, 0.0)
    best = {m: min(low(m), high(m)) for m in SIZES}
    models = {
        "all": lambda m: 1.06 * best[m],
        "low": lambda m: best[m] if m < 64 else 3.0 * best[m],
        "high": lambda m: best[m] if m >= 64 else 3.0 * best[m],
    }
    curves = sample_curves(models)
    choice = kernel_choice._Choice(curves, BOUND)
    first = min(models, key=lambda name: choice.score([name]))
    assert first == "all"
    assert sorted(kernel_choice.choose_kernels(curves, BOUND, MOST)) == ["high", "low"]


def test_a_chosen_kernel_is_exchanged_where_that_saves_a_further_one() -> None:
    """Greedily, "middle" is the first, and needs "low" and "high" beside it; "middle" and "high" make way for two."""
    models = {
        "middle": lambda m: 1.0 if 8 <= m <= 128 else 1.1,
        "low": lambda m: 1.0 if m < 30 else 1.3,
        "high": lambda m: 1.0 if m > 30 else 1.3,
    }
    curves = sample_curves(models, (1, 3, 8, 17, 32, 65, 128, 257, 512))
    choice = kernel_choice._Choice(curves, BOUND)
    assert min(models, key=lambda name: choice.score([name])) == "middle"
    assert choice.exchange(["middle", "low"], choice.score(["middle", "low"]))[0] == ["low", "high"]
    assert sorted(kernel_choice.choose_kernels(curves, BOUND, MOST)) == ["high", "low"]


def test_one_kernel_serves_what_it_can_within_the_bound() -> None:
    models = {f"k{index}": lambda m, i=index: 1.0 + 0.002 * ((m + i) % 5) for index in range(5)}
    curves = sample_curves(models)
    assert len(kernel_choice.choose_kernels(curves, BOUND, MOST)) == 1


def test_number_of_kernels_is_limited() -> None:
    sizes = [1 << exponent for exponent in range(MOST + 2)]
    models = {f"k{m}": lambda m, own=m: 1.0 if m == own else 3.0 for m in sizes}
    curves = Curves(1, sizes[-1], {name: {m: model(m) for m in sizes} for name, model in models.items()})
    assert len(kernel_choice.choose_kernels(curves, BOUND, MOST)) == MOST


def test_limited_kernels_serve_where_most_calls_are() -> None:
    sizes = [1 << exponent for exponent in range(MOST + 2)]
    times = {f"k{own}": {m: 1.0 if m == own else 1.3 for m in sizes} for own in sizes}
    counts = dict.fromkeys(sizes[2:], 100)
    chosen = kernel_choice.choose_kernels(Curves(1, sizes[-1], times, counts=counts), BOUND, MOST)
    assert set(chosen) == {f"k{m}" for m in sizes[2:]}


def test_slow_kernel_does_not_serve_one_m_between_two_that_it_serves() -> None:
    """Few changes from M to M count less than the bound, even where the weight of one M is small."""
    sizes = (*SIZES[:-1], 399, 400, 401, 512)
    models = {"a": lambda m: 1.08 if m == 400 else 1.0, "b": lambda m: 1.0 if m == 400 else 1.2}
    curves = sample_curves(models, sizes)
    assert point_weights(curves)[400] < 0.1 * point_weights(curves)[1]
    assert {m for m, name in serve(curves).items() if name == "b"} == {400}


def test_small_gain_does_not_change_the_kernel() -> None:
    sizes = (*SIZES[:-1], 399, 400, 401, 512)
    models = {"a": lambda m: 1.02 if m == 400 else 1.0, "b": lambda m: 1.0 if m in (1, 400) else 1.2}
    curves = sample_curves({**models, "c": lambda m: 0.5 if m == 1 else 3.0}, sizes)
    assert kernel_choice.serving(curves, ["a", "b", "c"], BOUND)[400] == "a"


def test_m_where_only_plain_was_timed_are_no_evidence_for_it() -> None:
    times = {PLAIN: dict.fromkeys((8, 16, 32, 64), 2.0), "k": {8: 1.0, 64: 1.0}, "out": {16: 0.5, 64: 0.5}}
    curves = Curves(8, 64, times, PLAIN).without({"out"})
    assert curves.sizes == [8, 64]
    assert intervals.intervals(curves, serve(curves)) == (PlanInterval(8, 64, "k"),)
    assert Curves(8, 64, times, PLAIN).without({"out", "k"}).sizes == [8, 16, 32, 64]
    assert Curves(8, 64, times, PLAIN).without({PLAIN}).plain == ""


def test_plain_serves_above_the_m_at_which_kernels_were_timed() -> None:
    times = {PLAIN: dict.fromkeys((1, 8, 64, 512), 2.0), "k": {8: 1.0, 64: 1.0}}
    curves = Curves(1, 512, times, PLAIN).without(())
    assert curves.sizes == [1, 8, 64, 512]
    assert intervals.intervals(curves, serve(curves)) == (PlanInterval(1, 64, "k"), PlanInterval(65, 512, PLAIN))


@pytest.mark.parametrize(("seconds", "served"), [(1.9, "k"), (2.1, PLAIN)])
def test_kernel_that_was_not_timed_at_an_m_takes_no_longer_there_than_at_a_larger_one(
    seconds: float, served: str
) -> None:
    """PyTorch's op served M = 483 in twice the time of a chosen kernel that had been timed at 456 and 512 only."""
    times = {PLAIN: {1: 1.0, 456: 2.0, 483: 2.0, 512: 4.0}, "k": {456: 1.0, 512: seconds}, "a": {483: 1.8}}
    curves = Curves(1, 512, times, PLAIN)
    assert curves.usable("k", 483) == (seconds if served == "k" else math.inf)
    assert kernel_choice.serving(curves, [PLAIN, "k"], BOUND) == {1: PLAIN, 456: "k", 483: served, 512: "k"}
    assert curves.at_most("a", 512) == math.inf
