"""The progress display of a tuning run: live on a terminal, plain lines for other outputs."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ..core.events import (
    BestSoFar,
    CandidateTried,
    DecisionsUnstored,
    Event,
    PlanDone,
    PlanProgress,
    ProblemDone,
    ProblemStarted,
)  # fmt: skip
from ..core.printable import visible
from ..core.workloads import label, weight_label
from ..report.plan_rows import plan_line
from ..report.rows import summarize, time_text
from .common import plain_console, print_lines

if TYPE_CHECKING:
    from rich.console import Console, Group

    from ..core.decision import Decision
    from ..core.problem import Dim, Problem
    from ..core.tuned_plan import TunedPlan


class ProgressState:
    """The state of a tuning run, updated by the tuner's events.

    decisions: those of finished problems. plans: those of finished weights. cached: number of problems that the store
    had decided before. store_error: why decisions could not be stored. index, total, problem: the current problem.
    done: number of finished problems of the total. weight: of the current problem, for a plan. measuring: whether the
    weight's kernels are being timed at other M.
    trying: id of the latest candidate; tried, left: numbers of candidates tried and still to try; best: the fastest so
    far.
    """

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.plans: list[TunedPlan] = []
        self.measuring = False
        self.weight = ""
        self._started: Problem | None = None
        self._dim: Dim = "m"
        self._measured = 0
        self._measured_until = 0.0
        self.cached = 0
        self.store_error = ""
        self._unstored: dict[str, int] = {}  # number of decisions by Target
        self.index = self.total = self.done = 0
        self.problem = ""
        self.trying = ""
        self.tried = self.left = 0
        self.best: BestSoFar | None = None
        self._estimate_s: float | None = None
        self._estimated_at = time.monotonic()
        self._is_cached = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, ProblemStarted):
            self.index, self.total, self.problem = event.index, event.total, label(event.problem)
            self._started, self.weight, self.done = event.problem, weight_label(event.problem), event.index
            self.trying, self.tried, self.left, self.best = "", 0, 0, None
            self._is_cached = event.cached
            self.cached += event.cached
        elif isinstance(event, CandidateTried):
            self.trying, self.left = event.candidate_id, event.left
            self.tried += 1
        elif isinstance(event, BestSoFar):
            self.best = event
        elif isinstance(event, DecisionsUnstored):
            self._unstored[event.target_key] = event.count
            self.store_error = event.error or self.store_error
        elif isinstance(event, PlanProgress):
            self.measuring, self._measured, self._dim = True, event.measured, event.dim
            if self._started is not None:
                self.weight = weight_label(self._started, event.dim)
            self._measured_until = time.monotonic() + event.remaining_s
        elif isinstance(event, PlanDone):
            self.measuring = False
            self.plans += [event.plan] if event.plan is not None else []
        else:
            self._add_decision(event.decision)
            self.done = event.index + 1
            self._estimate_s, self._estimated_at = event.remaining_s, time.monotonic()

    def _add_decision(self, decision: Decision) -> None:
        """Add a decision, or replace the problem's earlier one if it was inconclusive."""
        keys = [earlier.problem_key for earlier in self.decisions]
        if decision.problem_key in keys and self.decisions[keys.index(decision.problem_key)].outcome == "inconclusive":
            self.decisions[keys.index(decision.problem_key)] = decision
        else:
            self.decisions.append(decision)

    @property
    def unstored(self) -> int:
        """The number of decisions that could not be stored."""
        return sum(self._unstored.values())

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the end of the run, by the tuner's latest estimate; None before the first estimate."""
        if self._estimate_s is None:
            return None
        return max(0.0, self._estimate_s - (time.monotonic() - self._estimated_at))

    def done_line(self, event: ProblemDone) -> str:
        """Return the line for a finished problem."""
        row = summarize(event.decision)
        if row.outcome == "winner":
            result = f"{row.speedup:.2f}x [{row.lo:.2f}-{row.hi:.2f}]  {time_text(row.best_s)}  {row.kernel}"
        elif row.outcome == "tie":
            result = f"tie, ATen serves  {time_text(row.best_s)}  {row.kernel}"
        elif row.outcome == "inconclusive":
            result = "inconclusive, the machine was disturbed: not stored, ATen serves"
        else:
            result = "no valid candidate" + (f": {event.decision.stopped}" if event.decision.stopped else "")
        origin = "from the store" if self._is_cached else f"{row.tried} tried in {row.seconds:.1f} s"
        return f"[{event.index + 1}/{event.total}] {row.label}  {result}  ({origin})"

    def plan_line(self, event: PlanDone) -> str:
        """Return the line for a weight that was tuned over a range of M."""
        left = f", {event.remaining} to come" if event.remaining else ""
        if event.plan is None:
            return f"{self.weight}: no plan, ATen's kernels serve where nothing else was decided{left}"
        return plan_line(event.plan) + left

    def measuring_line(self) -> str:
        """Return the line with the number of M at which a weight's kernels were timed so far and the time left."""
        left = max(0.0, self._measured_until - time.monotonic())
        sizes = "values of M" if self._dim == "m" else "batches"
        return f"{self._measured} {sizes} timed, at most {duration_text(left)} left for this weight"

    def status_line(self) -> str:
        """Return the line with the number of the current problem and the remaining time."""
        if self.measuring:
            return f"the kernels of {self.weight} at other {'M' if self._dim == 'm' else 'batches'}"
        remaining = self.remaining_s
        time_left = "estimating the time left" if remaining is None else f"about {duration_text(remaining)} left"
        return f"problem {self.index + 1} of {self.total} - {time_left}"

    def trying_line(self) -> str:
        """Return the line with the current candidate and the numbers of candidates tried and remaining."""
        if self.measuring:
            return self.measuring_line()
        if not self.trying:
            return "preparing operands and the reference result"
        return f"{self.tried} tried, {self.left} left: {self.trying}"

    def best_line(self) -> str:
        """Return the line with the fastest candidate so far and its speed-up over ATen."""
        if self.best is None:
            return "best so far: nothing measured yet"
        times = f"{time_text(self.best.median_s)}, {1 / self.best.ratio:.2f}x ATen" if self.best.ratio > 0 else ""
        return f"best so far: {times}  {self.best.candidate_id}"


def duration_text(seconds: float) -> str:
    """Return a duration as text: ``1:15`` for 75 seconds, ``42 s`` under a minute."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole >= 60 else f"{whole} s"


class PlainProgress:
    """Progress as plain lines for logs and pipes: one when a problem starts and one when it is finished, and the same
    for weights whose kernels are timed over a range of M."""

    def __init__(self, board: ProgressState, stream: TextIO) -> None:
        self._board = board
        self._stream = stream

    def __call__(self, event: Event) -> None:
        began = isinstance(event, PlanProgress) and not self._board.measuring
        self._board(event)
        if began:
            text = f"{self._board.status_line()}: {self._board.measuring_line()}"
        elif isinstance(event, PlanDone):
            text = self._board.plan_line(event)
        elif isinstance(event, ProblemStarted) and not event.cached:
            text = f"[{event.index + 1}/{event.total}] {label(event.problem)} ..."
        elif isinstance(event, ProblemDone):
            remaining = self._board.remaining_s
            text = self._board.done_line(event) + (f", about {duration_text(remaining)} left" if remaining else "")
        else:
            return
        print_lines(text, file=self._stream)


class LiveProgress:
    """Progress on a terminal: a line per finished problem, and below these the state of the current one, redrawn."""

    def __init__(self, board: ProgressState, out: Console) -> None:
        from rich.live import Live

        self._board = board
        self._console = out
        self.live = Live(get_renderable=self._render, console=out, refresh_per_second=4, transient=True)

    def __call__(self, event: Event) -> None:
        self._board(event)
        if isinstance(event, ProblemDone):
            self._console.print(self._board.done_line(event), soft_wrap=True)
        elif isinstance(event, PlanDone):
            self._console.print(self._board.plan_line(event), soft_wrap=True)

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        board = self._board
        head = Table.grid(padding=(0, 1))
        head.add_row(ProgressBar(total=max(1, board.total), completed=board.done, width=30), Text(board.status_line()))
        lines = [f"  {board.problem}", f"  {board.trying_line()}", f"  {board.best_line()}"]
        if board.measuring:  # the other lines are about the last problem
            lines = [f"  {board.trying_line()}"]
        return Group(head, *(Text(visible(line), no_wrap=True, overflow="ellipsis") for line in lines))


@contextmanager
def progress_display(
    board: ProgressState, *, hidden: bool = False
) -> Iterator[ProgressState | PlainProgress | LiveProgress]:
    """Yield the progress callback for the tuner.

    It displays on a terminal, prints plain lines to other outputs, and only updates the board if ``hidden``.
    """
    if hidden:
        yield board
    elif not sys.stdout.isatty():
        yield PlainProgress(board, sys.stdout)
    else:
        live = LiveProgress(board, plain_console())
        with live.live:
            yield live
