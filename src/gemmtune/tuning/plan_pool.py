"""The kernels that a Plan may have: those that were fast at one of the M that were tuned by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..backends.aten import has_plain_product
from ..core.candidate import Candidate
from ..core.decision import Decision, Evidence
from ..core.plan_times import PACKED, RAW
from ..core.problem import Dim, Problem
from ..dispatch.portfolio import is_fallback_template, tuned_point
from ..verify.row_counts import tile_rows

WITHIN = 1.15  # a kernel is timed at other M if it took at most this multiple of its layout's least time at one M
LAYOUT_WITHIN = 1.25  # a packed layout is, if its least time at one M is within this factor of the least of all
MAX_PER_DECISION = 3  # of one layout
# A kernel with the plain op's product is timed at other M if it was faster than the plain op, and took at most this
# multiple of the least time: the others need another round of tiles where the plain op's product does not.
_PLAIN_PRODUCT_WITHIN = 1.5
# Kernels for more rows that no Decision tested among other work are served as they are timed, without overlap: it saves
# a microsecond or two of a call, and blocks that start at different times may read the operands from memory again.
_OVERLAP_ROWS = 512

RowsOf = Callable[[Decision, str, Collection[str]], list[Evidence]]


@dataclass
class PoolKernel:
    """A candidate with the M that it is loaded for, and its layout.

    is_plain: whether it is ATen's plain op, which may serve any M. has_plain_product: whether it runs the same
    product, so that its time follows the plain op's. tile_rows: the rows of its output tile; 1 where they
    are not known. fast_at: the M of the Decisions in which it was fast. predicted_for: M without a Decision at which
    its backend expects it to be fast.
    """

    candidate: Candidate
    tuned_m: int
    packing: str | None
    overlap: bool = True
    is_plain: bool = False
    has_plain_product: bool = False
    tile_rows: int = 1
    fast_at: set[int] = field(default_factory=set)
    predicted_for: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, candidate: Candidate, tuned_m: int, packing: str | None, is_plain: bool = False, dim: Dim = "m"
    ) -> PoolKernel:
        """Return the kernel of a candidate, with the rows of its tile; over the batch there are none to count."""
        rows = tile_rows(candidate) if dim == "m" else 1
        return cls(
            candidate, tuned_m, packing, is_plain=is_plain,
            has_plain_product=packing is None and has_plain_product(candidate), tile_rows=rows,
        )  # fmt: skip

    @property
    def id(self) -> str:
        return self.candidate.id


def kernel_pool(decisions: Sequence[Decision], faulty: Collection[str] = (), dim: Dim = "m") -> list[PoolKernel]:
    """Return the kernels of Decisions that differ in M only: ATen's plain op, then the fastest of each layout at each
    M, the most often fast first. With the dim "batch" they differ in the batch, which is then called M here.

    Candidates that failed at any of the M are left out, and so are those that are ``faulty`` at another M, other than
    ATen's plain op. No kernel is compared with them.
    """
    return _pool(decisions, faulty, _fast_rows, dim)


def served_pool(decisions: Sequence[Decision], faulty: Collection[str] = (), dim: Dim = "m") -> list[PoolKernel]:
    """Return ATen's plain op and, for each layout of each Decision, the one kernel that serves its M in that layout, as
    ``kernel_pool`` does. ``fast_at`` has the M of these Decisions. A Decision by which ATen's plain op serves the raw
    layout adds no other kernel of it."""
    return _pool(decisions, faulty, _served_rows, dim)


def _pool(decisions: Sequence[Decision], faulty: Collection[str], rows_of: RowsOf, dim: Dim) -> list[PoolKernel]:
    """Return the kernels of the rows ``rows_of(decision, plain op, ids left out)``."""
    failed = failed_candidates(decisions)
    pool: dict[str, PoolKernel] = {}
    plain = _plain_op(decisions, failed, dim)
    for decision in decisions:
        problem = Problem.from_dict(decision.problem)
        for row in rows_of(decision, plain, {*failed, *faulty} - {plain}):
            if dim == "batch" and row.packing is not None:
                continue  # a packed weight has a batch of its own
            _add(pool, row, problem.size(dim), plain, dim)
    tested: dict[str, bool] = {}
    for layout in (layout for decision in decisions for layout in decision.layouts.values()):
        tested[layout.candidate] = tested.get(layout.candidate, True) and layout.overlap
    for kernel in pool.values():
        kernel.overlap = tested.get(kernel.id, dim == "batch" or overlap_without_test(kernel.fast_at))
    return sorted(pool.values(), key=lambda kernel: (not kernel.is_plain, -len(kernel.fast_at)))


def overlap_without_test(sizes: Iterable[int]) -> bool:
    """Return ``PoolKernel.overlap`` of a kernel for some M that no Decision tested among other work."""
    return min(sizes) <= _OVERLAP_ROWS


def failed_candidates(decisions: Iterable[Decision]) -> set[str]:
    """Return the ids of the candidates that failed in any of the Decisions."""
    return {row.id for decision in decisions for row in decision.evidence if row.verdict and not row.verdict.ok}


def _plain_op(decisions: Sequence[Decision], failed: Collection[str], dim: Dim) -> str:
    """Return the id of ATen's plain op: of its kernels that run what plain PyTorch runs on the raw weight, the fastest
    at the largest M at which one was timed. Empty when there is none.

    Others may run for few rows only, or be slow for many: ``torch._int_mm`` takes 17 rows or more on a GPU.
    """
    times: dict[int, dict[str, float]] = {}
    for decision in decisions:
        problem = Problem.from_dict(decision.problem)
        for row in timed_rows(decision.evidence):
            if row.packing is None and row.id not in failed and is_fallback_template(row.candidate, problem):
                times.setdefault(problem.size(dim), {})[row.id] = _seconds(row)
    at_largest = times[max(times)] if times else {}
    return min(at_largest, key=lambda name: at_largest[name], default="")


def _add(pool: dict[str, PoolKernel], row: Evidence, m: int, plain: str, dim: Dim) -> None:
    if row.id not in pool:
        pool[row.id] = PoolKernel.of(Candidate.from_dict(row.candidate), m, row.packing, row.id == plain, dim)
    pool[row.id].fast_at.add(m)


def surcharges_of(decisions: Iterable[Decision], dim: Dim = "m", falling: bool = False) -> dict[str, dict[int, float]]:
    """Return the surcharges of Decisions that differ in M only, or in the batch (``TunedPlan.surcharges``).

    At an M they are those of the layout whose test found the smallest ratio; all packed layouts share them, since they
    follow from what the other work leaves in the cache more than from the layout.

    falling: whether a surcharge above one at a smaller M is noise, and that one counts: on a CPU, what other work
    leaves in the cache matters less beside longer calls. The medians of 203 tests of packed weights are 1.033, 1.016,
    1.004, 1.004, 1.000 and 1.000 at M = 1, 8, 32, 48, 128 and 192. One of 1.134 at M = 128 made a packed layout look
    slower than ATen's plain op at M = 512, which then served all M, at M = 20 in 2.3 times the layout's time
    (every-m-20261129-020426). A GPU's rise from M = 16 to 128.
    """
    by_form: dict[str, dict[int, float]] = {}
    for decision in decisions:
        for form in (RAW, PACKED):
            tests = [test for packing, test in decision.layouts.items() if (PACKED if packing else RAW) == form]
            test = min(tests, key=lambda test: test.ratio, default=None)
            if test is not None and test.candidate != test.baseline:
                slower = max(1.0, test.worst_ratio / test.ratio)
                by_form.setdefault(form, {})[int(decision.problem[dim])] = slower
    if falling:
        for form, by_m in by_form.items():
            sizes = sorted(by_m)
            least = itertools.accumulate((by_m[m] for m in sizes), min)
            by_form[form] = dict(zip(sizes, least, strict=True))
    return by_form


def nearest_sizes(sizes: Iterable[int], m: int) -> set[int]:
    """Return the nearest size on either side of M, or the nearest two where one side has none; and M if it is one."""
    ordered = sorted(sizes)
    below, above = [size for size in ordered if size < m], [size for size in ordered if size > m]
    return {*below[-1 if above else -2 :], *above[: 1 if below else 2], *({m} & set(ordered))}


def _fast_rows(decision: Decision, plain: str, without: Collection[str]) -> list[Evidence]:
    """Return the rows of ATen's plain op, of faster candidates with its product, and of the fastest candidates of each
    layout."""
    timed = sorted((row for row in timed_rows(decision.evidence) if row.id not in without), key=_seconds)
    plain_s = next((_seconds(row) for row in timed if row.id == plain), 0.0)
    limit_s = min(plain_s, _PLAIN_PRODUCT_WITHIN * _seconds(timed[0])) if timed else 0.0
    chosen: list[Evidence] = []
    least: dict[str | None, float] = {}
    count: dict[str | None, int] = {}
    for row in timed:
        layout_s = least.setdefault(row.packing, _seconds(row))
        same_product = row.packing is None and has_plain_product(Candidate.from_dict(row.candidate))
        if row.id == plain or (same_product and _seconds(row) < limit_s):
            chosen.append(row)
        elif (
            (row.packing is None or layout_s <= LAYOUT_WITHIN * _seconds(timed[0]))
            and _seconds(row) <= WITHIN * layout_s
            and count.get(row.packing, 0) < MAX_PER_DECISION
        ):
            count[row.packing] = count.get(row.packing, 0) + 1
            chosen.append(row)
    return chosen


def _served_rows(decision: Decision, plain: str, without: Collection[str]) -> list[Evidence]:
    """Return the row of ATen's plain op, and that of the kernel that the Decision has serve each layout."""
    options = tuned_point(decision).options
    served = {option.candidate.id for packing, option in options.items() if packing is not None or option.beats_aten}
    return [row for row in timed_rows(decision.evidence) if row.id in {plain, *served} and row.id not in without]


def timed_rows(rows: Iterable[Evidence]) -> list[Evidence]:
    """Return the rows of the candidates that were timed in a race and did not fail."""
    return [row for row in rows if row.sample is not None and row.stage not in ("failed", "illegal", "untried")]


def _seconds(row: Evidence) -> float:
    """Return a candidate's time relative to ATen's best in the same rounds: machines change their speed meanwhile."""
    return row.sample.ratio if row.sample is not None else float("inf")
