"""The kernels that a Plan may have: those that were fast at one of the M that were tuned by themselves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..core.candidate import Candidate
from ..core.decision import Decision, Evidence
from ..core.problem import Problem
from ..dispatch.portfolio import is_plain_op
from ..verify.row_counts import tile_rows

WITHIN = 1.15  # a kernel is timed at other M if it took at most this multiple of its layout's least time at one M
LAYOUT_WITHIN = 1.25  # a packed layout is, if its least time at one M is within this factor of the least of all
MAX_PER_DECISION = 4  # of one layout


@dataclass
class PoolKernel:
    """A candidate with the M of the Decision that it is loaded for, its layout, and the M at which it was fast.

    is_plain: whether it is ATen's plain op, which may serve any M. tile_rows: the rows of its output tile; 1 where they
    are not known.
    """

    candidate: Candidate
    tuned_m: int
    packing: str | None
    overlap: bool = True
    is_plain: bool = False
    tile_rows: int = 1
    found_at: set[int] = field(default_factory=set)

    @property
    def id(self) -> str:
        return self.candidate.id


def kernel_pool(decisions: Sequence[Decision], faulty: Collection[str] = ()) -> list[PoolKernel]:
    """Return the kernels of Decisions that differ in M only: ATen's plain op, then the fastest of each layout at each
    M, the most often fast first.

    Candidates that failed at any of the M are left out, and so are those that are ``faulty`` at another M, other than
    ATen's plain op. No kernel is compared with them.
    """
    failed = {row.id for decision in decisions for row in decision.evidence if row.verdict and not row.verdict.ok}
    pool: dict[str, PoolKernel] = {}
    for decision in decisions:
        problem = Problem.from_dict(decision.problem)
        for row in _fast_rows(decision, problem, failed, faulty):
            _add(pool, row, problem, decision)
    return sorted(pool.values(), key=lambda kernel: (not kernel.is_plain, -len(kernel.found_at)))


def _add(pool: dict[str, PoolKernel], row: Evidence, problem: Problem, decision: Decision) -> None:
    candidate = Candidate.from_dict(row.candidate)
    tested = [layout for layout in decision.layouts.values() if layout.candidate == row.id]
    kernel = pool.get(row.id)
    if kernel is None:
        kernel = pool[row.id] = PoolKernel(
            candidate, problem.m, row.packing, is_plain=_is_plain(problem, row),
            tile_rows=tile_rows(candidate),
        )  # fmt: skip
    kernel.overlap = kernel.overlap and all(layout.overlap for layout in tested)
    kernel.found_at.add(problem.m)


def _fast_rows(
    decision: Decision, problem: Problem, failed: Collection[str], faulty: Collection[str]
) -> list[Evidence]:
    """Return the rows of ATen's plain op and of the fastest candidates of each layout."""
    timed = [row for row in _timed(decision.evidence) if row.id not in failed]
    timed = [row for row in timed if row.id not in faulty or _is_plain(problem, row)]
    timed.sort(key=_seconds)
    chosen: list[Evidence] = []
    least: dict[str | None, float] = {}
    count: dict[str | None, int] = {}
    for row in timed:
        layout_s = least.setdefault(row.packing, _seconds(row))
        if _is_plain(problem, row):
            chosen.append(row)
        elif (
            (row.packing is None or layout_s <= LAYOUT_WITHIN * _seconds(timed[0]))
            and _seconds(row) <= WITHIN * layout_s
            and count.get(row.packing, 0) < MAX_PER_DECISION
        ):
            count[row.packing] = count.get(row.packing, 0) + 1
            chosen.append(row)
    return chosen


def _is_plain(problem: Problem, row: Evidence) -> bool:
    return row.packing is None and is_plain_op(problem, Candidate.from_dict(row.candidate))


def _timed(rows: Iterable[Evidence]) -> list[Evidence]:
    return [row for row in rows if row.sample is not None and row.stage not in ("failed", "illegal", "untried")]


def _seconds(row: Evidence) -> float:
    """Return a candidate's time relative to ATen's best in the same rounds: machines change their speed meanwhile."""
    return row.sample.ratio if row.sample is not None else float("inf")
