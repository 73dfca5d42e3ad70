import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from gemmtune.cli.progress import LiveProgress, PlainProgress, ProgressState, duration_text, progress_display
from gemmtune.core.decision import Verdict
from gemmtune.core.events import BestSoFar, CandidateTried, Event, ProblemDone, ProblemStarted
from gemmtune.core.workloads import build
from helpers.factories import NATIVE, make_decision

PROBLEM = build(16, 4096, 4096, "bf16")
EVENTS: list[Event] = [
    ProblemStarted(0, 2, PROBLEM),
    CandidateTried("aten/linear", Verdict("within_bound"), 2e-3, 5),
    BestSoFar("aten/linear", 2e-3, 1.0),
    CandidateTried(NATIVE.id, Verdict("within_bound"), 1e-3, 4),
    BestSoFar(NATIVE.id, 1e-3, 0.5),
]
DONE = ProblemDone(0, 2, make_decision(PROBLEM), 75.0)


def feed(watcher: object, *events: Event) -> None:
    for event in events:
        watcher(event)  # type: ignore[operator]


def test_board_tells_what_is_tried_what_leads_and_what_is_left() -> None:
    board = ProgressState()
    feed(board, EVENTS[0])
    assert "preparing" in board.trying_line()
    assert "nothing measured" in board.best_line()
    assert "estimating" in board.status_line()
    feed(board, *EVENTS[1:])
    assert board.trying_line() == f"2 tried, 4 left: {NATIVE.id}"
    assert board.best_line() == f"best so far: 1.00 ms, 2.00x ATen  {NATIVE.id}"
    feed(board, DONE)
    assert board.remaining_s is not None
    assert 70 < board.remaining_s <= 75
    assert "problem 1 of 2" in board.status_line()
    assert board.decisions == [DONE.decision]


def test_a_new_problem_forgets_the_last_ones_leader() -> None:
    board = ProgressState()
    feed(board, *EVENTS, DONE, ProblemStarted(1, 2, PROBLEM, cached=True))
    assert board.best is None
    assert board.cached == 1


@pytest.mark.parametrize(
    ("outcome", "words"), [("winner", "2.00x [1.96-2.04]"), ("tie", "tie, ATen"), ("none_valid", "no valid candidate")]
)
def test_done_lines(outcome: str, words: str) -> None:
    board = ProgressState()
    feed(board, EVENTS[0])
    line = board.done_line(ProblemDone(0, 2, make_decision(PROBLEM, outcome), None))
    assert line.startswith("[1/2] 16x4096x4096 bf16")
    assert words in line


def test_done_line_says_why_nothing_is_valid() -> None:
    board = ProgressState()
    feed(board, EVENTS[0])
    decision = replace(make_decision(PROBLEM, "none_valid"), stopped="it does not fit into memory")
    assert "no valid candidate: it does not fit into memory" in board.done_line(ProblemDone(0, 2, decision, None))


def test_plain_progress_prints_a_line_at_start_and_end() -> None:
    stream = io.StringIO()
    feed(PlainProgress(ProgressState(), stream), *EVENTS, DONE)
    first, second = stream.getvalue().splitlines()
    assert first == "[1/2] 16x4096x4096 bf16 ..."
    assert second.startswith("[1/2] 16x4096x4096 bf16  2.00x")
    assert second.endswith("left")


def test_cached_problems_say_so() -> None:
    stream = io.StringIO()
    feed(
        PlainProgress(ProgressState(), stream),
        ProblemStarted(0, 1, PROBLEM, cached=True),
        ProblemDone(0, 1, DONE.decision, 0),
    )
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("(from the store)")


def test_live_display_shows_the_same() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, highlight=False, width=120, _environ={})
    live = LiveProgress(ProgressState(), console)
    with live.live:
        feed(live, *EVENTS)
        live.live.refresh()
        feed(live, DONE)
    text = stream.getvalue()
    for part in ("problem 1 of 2", "2 tried, 4 left", "best so far: 1.00 ms", "2.00x [1.96-2.04]"):
        assert part in text


def test_hidden_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    board = ProgressState()
    with progress_display(board, hidden=True) as progress:
        feed(progress, *EVENTS, DONE)
    assert capsys.readouterr().out == ""
    assert len(board.decisions) == 1


def test_clock() -> None:
    assert duration_text(42.4) == "42 s"
    assert duration_text(75) == "1:15"
    assert duration_text(3601) == "60:01"
