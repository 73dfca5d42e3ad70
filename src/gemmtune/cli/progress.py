"""Showing a tuning run as it happens: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from ..core.events import BestSoFar, CandidateTried, Event, ProblemDone, ProblemStarted
from ..core.printable import visible
from ..core.workloads import label
from ..report.rows import duration, summarize
from .common import console, say

if TYPE_CHECKING:
    from rich.console import Console, Group

    from ..core.decision import Decision


class Board:
    """What a watcher wants to know, kept up to date from the events: what is tried, what leads, what is left."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.cached = 0
        self.unstored, self.store_error = 0, ""  # decisions that the store did not take, and why
        self.index = self.total = 0
        self.problem = ""
        self.trying = ""
        self.tried = self.left = 0
        self.best: BestSoFar | None = None
        self._remaining: float | None = None
        self._since = time.monotonic()
        self._now_cached = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, ProblemStarted):
            self.index, self.total, self.problem = event.index, event.total, label(event.problem)
            self.trying, self.tried, self.left, self.best = "", 0, 0, None
            self._now_cached = event.cached
            self.cached += event.cached
        elif isinstance(event, CandidateTried):
            self.trying, self.left = event.candidate_id, event.left
            self.tried += 1
        elif isinstance(event, BestSoFar):
            self.best = event
        else:
            self._note(event.decision)
            self._remaining, self._since = event.remaining_s, time.monotonic()

    def _note(self, decision: Decision) -> None:
        """Keep a decision; one that was inconclusive before is replaced."""
        keys = [known.problem_key for known in self.decisions]
        if decision.problem_key in keys and self.decisions[keys.index(decision.problem_key)].outcome == "inconclusive":
            self.decisions[keys.index(decision.problem_key)] = decision
        else:
            self.decisions.append(decision)

    @property
    def remaining_s(self) -> float | None:
        """Seconds left by the tuner's last estimate; None before there is one."""
        if self._remaining is None:
            return None
        return max(0.0, self._remaining - (time.monotonic() - self._since))

    def done_line(self, event: ProblemDone) -> str:
        """One line for a finished problem."""
        row = summarize(event.decision)
        if row.outcome == "winner":
            what = f"{row.speedup:.2f}x [{row.lo:.2f}-{row.hi:.2f}]  {duration(row.best_s)}  {row.kernel}"
        elif row.outcome == "tie":
            what = f"tie, ATen serves  {duration(row.best_s)}  {row.kernel}"
        elif row.outcome == "inconclusive":
            what = "inconclusive, the machine was disturbed: not stored, ATen serves"
        else:
            what = "no valid candidate" + (f": {event.decision.stopped}" if event.decision.stopped else "")
        origin = "from the store" if self._now_cached else f"{row.tried} tried in {row.seconds:.1f} s"
        return f"[{event.index + 1}/{event.total}] {row.label}  {what}  ({origin})"

    def status_line(self) -> str:
        """Where the whole run stands, with the time left."""
        left = self.remaining_s
        until = "estimating the time left" if left is None else f"about {clock(left)} left"
        return f"problem {self.index + 1} of {self.total} - {until}"

    def trying_line(self) -> str:
        """The candidate in hand, and how many are left."""
        if not self.trying:
            return "preparing operands and the reference result"
        return f"{self.tried} tried, {self.left} left: {self.trying}"

    def best_line(self) -> str:
        """The leader and how it stands against ATen."""
        if self.best is None:
            return "best so far: nothing measured yet"
        times = f"{duration(self.best.median_s)}, {1 / self.best.ratio:.2f}x ATen" if self.best.ratio > 0 else ""
        return f"best so far: {times}  {self.best.candidate_id}"


def clock(seconds: float) -> str:
    """``75`` as ``1:15``; under a minute ``42 s``."""
    whole = round(seconds)
    return f"{whole // 60}:{whole % 60:02d}" if whole >= 60 else f"{whole} s"


class PlainProgress:
    """A line per finished problem, for logs and pipes."""

    def __init__(self, board: Board, stream: TextIO) -> None:
        self._board = board
        self._stream = stream

    def __call__(self, event: Event) -> None:
        self._board(event)
        if isinstance(event, ProblemStarted) and not event.cached:
            text = f"[{event.index + 1}/{event.total}] {label(event.problem)} ..."
        elif isinstance(event, ProblemDone):
            left = self._board.remaining_s
            text = self._board.done_line(event) + (f", about {clock(left)} left" if left else "")
        else:
            return
        say(text, file=self._stream)


class LiveProgress:
    """Finished problems scroll by; three lines below them tell what is happening now."""

    def __init__(self, board: Board, out: Console) -> None:
        from rich.live import Live

        self._board = board
        self._console = out
        self.live = Live(get_renderable=self._render, console=out, refresh_per_second=4, transient=True)

    def __call__(self, event: Event) -> None:
        self._board(event)
        if isinstance(event, ProblemDone):
            self._console.print(self._board.done_line(event), soft_wrap=True)

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        board = self._board
        head = Table.grid(padding=(0, 1))
        done = len(board.decisions)
        head.add_row(ProgressBar(total=max(1, board.total), completed=done, width=30), Text(board.status_line()))
        lines = (f"  {board.problem}", f"  {board.trying_line()}", f"  {board.best_line()}")
        return Group(head, *(Text(visible(line), no_wrap=True, overflow="ellipsis") for line in lines))


@contextmanager
def watching(board: Board, *, hidden: bool = False) -> Iterator[Board | PlainProgress | LiveProgress]:
    """The progress to hand to the tuner: live on a terminal, plain lines elsewhere, nothing but the board if hidden."""
    if hidden:
        yield board
    elif not sys.stdout.isatty():
        yield PlainProgress(board, sys.stdout)
    else:
        live = LiveProgress(board, console())
        with live.live:
            yield live
