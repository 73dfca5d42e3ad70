"""The tables that the commands print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.table import Table

from ..report.plan_rows import layout_name, regret_text, summarize_layouts
from ..report.rows import TIMES_NOTE, DecisionSummary, best_by_backend, median_s, sorted_decisions, summarize, time_text

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.tuned_plan import TunedPlan


_BENCH_TIMES_NOTE = (
    "Each backend's median time of a call. The ratio: the median of the ratios of neighbouring timings by turns, which "
    "drift does not move; so it need not be the ratio of two medians."
)

_REGRET_NOTE = (
    "Regret: by how much the kernel that serves takes longer than the fastest one of the same layout that was timed at "
    "that M, noise included."
)


def speedup_text(row: DecisionSummary) -> str:
    """Return the paired speed-up over ATen with its 95% interval, ``1.52x [1.49-1.55]``, or the outcome if there is no
    winner."""
    if row.outcome != "winner":
        return {"tie": "tie", "inconclusive": "inconclusive"}.get(row.outcome, "nothing valid")
    return f"{row.speedup:.2f}x [{row.lo:.2f}-{row.hi:.2f}]"


def empty_table(caption: str = "") -> Table:
    """Return a table without rows and columns, in the style of all tables that the commands print."""
    return Table(
        box=None, pad_edge=False, header_style="bold", caption=caption or None, caption_justify="left",
        caption_style="dim",
    )  # fmt: skip


def decisions_table(decisions: Iterable[Decision]) -> Table:
    """Return a table with a row per problem: ATen's time, the best time, the speed-up with its interval, the kernel."""
    table = empty_table(TIMES_NOTE)
    table.add_column("problem (MxNxK)", no_wrap=True)
    for name in ("ATen", "best"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("speed-up [95%]", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for decision in sorted_decisions(decisions):
        row = summarize(decision)
        table.add_row(row.label, time_text(row.aten_s), time_text(row.best_s), speedup_text(row), row.kernel)
    return table


def plans_table(plans: Iterable[TunedPlan]) -> Table:
    """Return a table with a row per layout of each plan: the range of M or of the batch, what serves, and the worst
    regret."""
    table = empty_table(_REGRET_NOTE)
    for name in ("weight (MxNxK)", "sizes", "layout"):
        table.add_column(name, no_wrap=True)
    for name in ("kernels", "intervals", "worst regret"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans:
        for row in summarize_layouts(plan):
            regret = regret_text(row.regret) + (f" at {row.size} = {row.regret_m}" if row.regret else "")
            table.add_row(
                row.label, f"{row.size} {row.first}-{row.last}", layout_name(row.packing), str(row.kernels),
                str(row.intervals), regret,
            )  # fmt: skip
    return table


def bench_table(decisions: Iterable[Decision], backends: Iterable[str]) -> Table:
    """Return a table with a row per problem: the best time of each backend, and the winner's speed-up over ATen."""
    names = list(backends)
    table = empty_table(_BENCH_TIMES_NOTE)
    table.add_column("problem (MxNxK)", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("fastest vs ATen [95%]", no_wrap=True)
    table.add_column("kernel", overflow="fold")
    for decision in sorted_decisions(decisions):
        row, best = summarize(decision), best_by_backend(decision)
        times = [time_text(median_s(best.get(name))) for name in names]
        table.add_row(row.label, *times, speedup_text(row), row.kernel)
    return table
