"""Kernels that a library chooses at M where it is faster than at others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gemmtune.core.candidate import Candidate
from gemmtune.core.workloads import build, weight_only_problem
from gemmtune.tuning import library_kernels, plain_scan
from gemmtune.tuning.curves import Curves
from gemmtune.tuning.library_kernels import kernels_chosen_by_library
from gemmtune.tuning.plain_times import LibraryAlgorithms, sizes_to_ask
from gemmtune.tuning.plan_pool import PoolKernel
from gemmtune.tuning.sizes import SizeRange
from helpers.curves import PLAIN
from helpers.gpus import H200
from helpers.serving import decide, evidence

PROBLEM = build(128, 1024, 8192, "bf16")
FIRST, LAST = 256, 1024
SIZES = SizeRange(1, 8192, (128, 2048))
RANKED = Candidate.make("cublaslt", "ranked", m=128, rank=0)
DECISIONS = [decide(PROBLEM, evidence(RANKED, 2.0))]


def slow_from(first: int, last: int) -> Callable[[int], str]:
    """Return a choice of the algorithm "fast", but of "slow" from one M to another."""
    return lambda m: "slow" if first <= m <= last else "fast"


def curves_of(algorithm: Callable[[int], str], seconds: dict[str, float], kernel_s: float = 40e-6) -> Curves:
    """Return curves of a plain op that takes what each algorithm takes, and of a kernel."""
    algorithms = LibraryAlgorithms({m: algorithm(m) for m in sizes_to_ask(FIRST, LAST)})
    scan = {m: seconds[algorithm(m)] for m in plain_scan.sizes_to_scan([(FIRST, LAST)], algorithms)}
    times = {PLAIN: {m: seconds[algorithm(m)] for m in (FIRST, LAST)}, "k": dict.fromkeys((FIRST, LAST), kernel_s)}
    return Curves(1, 8192, times, PLAIN, waves=True, scan=scan, algorithms=algorithms)


def chosen(curves: Curves, **options: object) -> list[PoolKernel]:
    return kernels_chosen_by_library(PROBLEM, H200, DECISIONS, curves, SIZES, (), **options)  # type: ignore[arg-type]


def test_algorithm_of_a_larger_m_is_a_kernel_for_m_with_a_slower_one() -> None:
    (kernel,) = chosen(curves_of(slow_from(577, 704), {"fast": 20e-6, "slow": 30e-6}))
    assert kernel.id == "cublaslt/ranked[m=705,rank=0]"
    assert (kernel.tuned_m, kernel.packing, kernel.is_plain, kernel.fast_at) == (705, None, False, set())
    assert 705 in kernel.predicted_for  # its time there bounds that at fewer rows
    assert kernel.predicted_for - {705} <= set(range(577, 705))


def test_m_far_below_that_of_an_algorithm_do_not_count() -> None:
    """An algorithm for many rows is slow for few, whatever it takes at one M."""
    (kernel,) = chosen(curves_of(slow_from(256, 700), {"fast": 20e-6, "slow": 30e-6}))
    assert min(kernel.predicted_for) >= 700 / 1.25 - 1


@pytest.mark.parametrize("case", ["a kernel is as fast", "no M below", "little is gained", "few M"])
def test_no_kernel_is_chosen_where_it_saves_nothing(case: str) -> None:
    curves = {
        "a kernel is as fast": curves_of(slow_from(577, 704), {"fast": 20e-6, "slow": 30e-6}, kernel_s=20.2e-6),
        "no M below": curves_of(slow_from(FIRST, 400), {"fast": 30e-6, "slow": 20e-6}),
        "little is gained": curves_of(slow_from(577, 704), {"fast": 20e-6, "slow": 20.4e-6}),
        "few M": curves_of(slow_from(697, 704), {"fast": 20e-6, "slow": 21e-6}),
    }[case]
    assert chosen(curves) == []


def test_algorithms_that_save_most_come_first_and_none_twice() -> None:
    def algorithm(m: int) -> str:
        return "slow" if m < 512 else "a" if m < 576 else "slow" if m < 832 else "b" if m < 896 else "last"

    curves = curves_of(algorithm, {"slow": 30e-6, "a": 20e-6, "b": 25e-6, "last": 31e-6})
    kernels = chosen(curves)
    assert [kernel.id for kernel in kernels] == ["cublaslt/ranked[m=512,rank=0]", "cublaslt/ranked[m=832,rank=0]"]
    others = kernels_chosen_by_library(PROBLEM, H200, DECISIONS, curves, SIZES, [kernels[0].id])
    assert [kernel.id for kernel in others] == [kernels[1].id]


def test_few_kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    curves = curves_of(lambda m: f"fast{m}" if m % 64 == 0 else "slow", {
        "slow": 30e-6, **{f"fast{m}": 20e-6 for m in range(FIRST, LAST + 1, 64)},
    })  # fmt: skip
    assert len(chosen(curves)) == library_kernels._MOST
    monkeypatch.setattr(library_kernels, "_MOST", 2)
    assert len(chosen(curves)) == 2


def test_nothing_is_chosen_without_the_library() -> None:
    curves = curves_of(slow_from(577, 704), {"fast": 20e-6, "slow": 30e-6})
    assert kernels_chosen_by_library(PROBLEM, H200, [decide(PROBLEM)], curves, SIZES, ()) == []
    assert chosen(replace(curves, algorithms=LibraryAlgorithms({}))) == []
    assert chosen(replace(curves, scan={})) == []
    assert chosen(curves.without([PLAIN])) == []
    other = weight_only_problem(128, 1024, 8192)  # which the library does not multiply
    assert kernels_chosen_by_library(other, H200, [decide(other, evidence(RANKED, 2.0))], curves, SIZES, ()) == []
