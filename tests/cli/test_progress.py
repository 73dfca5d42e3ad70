import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from gemmtune.cli.progress import LiveProgress, PlainProgress, ProgressState, duration_text, progress_display
from gemmtune.core.decision import Verdict
from gemmtune.core.events import BestSoFar, CandidateTried, Event, PlanDone, PlanProgress, ProblemDone, ProblemStarted
from gemmtune.core.workloads import build
from helpers.factories import NATIVE, make_decision
from helpers.plans import LARGE, SMALL, planted_plan

PROBLEM = build(16, 4096, 4096, "bf16")
EVENTS: list[Event] = [
    ProblemStarted(0, 2, PROBLEM),
    CandidateTried("aten/linear", Verdict("within_bound"), 2e-3, 5),
    BestSoFar("aten/linear", 2e-3, 1.0),
    CandidateTried(NATIVE.id, Verdict("within_bound"), 1e-3, 4),
    BestSoFar(NATIVE.id, 1e-3, 0.5),
]
DONE = ProblemDone(0, 2, make_decision(PROBLEM), 75.0)


def send_events(progress: object, *events: Event) -> None:
    for event in events:
        progress(event)  # type: ignore[operator]


def test_state_has_the_current_candidate_the_best_and_the_remaining_time() -> None:
    state = ProgressState()
    send_events(state, EVENTS[0])
    assert "preparing" in state.trying_line()
    assert "nothing measured" in state.best_line()
    assert "estimating" in state.status_line()
    send_events(state, *EVENTS[1:])
    assert state.trying_line() == f"2 tried, 4 left: {NATIVE.id}"
    assert state.best_line() == f"best so far: 1.00 ms, 2.00x ATen  {NATIVE.id}"
    send_events(state, DONE)
    assert state.remaining_s is not None
    assert 70 < state.remaining_s <= 75
    assert "problem 1 of 2" in state.status_line()
    assert state.decisions == [DONE.decision]


def test_new_problem_resets_the_best() -> None:
    state = ProgressState()
    send_events(state, *EVENTS, DONE, ProblemStarted(1, 2, PROBLEM, cached=True))
    assert state.best is None
    assert state.cached == 1


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [("winner", "2.00x [1.96-2.04]"), ("tie", "tie, ATen"), ("none_valid", "no valid candidate")],
)
def test_done_line_has_the_outcome(outcome: str, expected: str) -> None:
    state = ProgressState()
    send_events(state, EVENTS[0])
    line = state.done_line(ProblemDone(0, 2, make_decision(PROBLEM, outcome), None))
    assert line.startswith("[1/2] 16x4096x4096 bf16")
    assert expected in line


def test_done_line_has_the_reason_of_none_valid() -> None:
    state = ProgressState()
    send_events(state, EVENTS[0])
    decision = replace(make_decision(PROBLEM, "none_valid"), stopped="it does not fit into memory")
    assert "no valid candidate: it does not fit into memory" in state.done_line(ProblemDone(0, 2, decision, None))


def test_plain_progress_prints_a_line_at_the_start_and_the_end() -> None:
    stream = io.StringIO()
    send_events(PlainProgress(ProgressState(), stream), *EVENTS, DONE)
    first, second = stream.getvalue().splitlines()
    assert first == "[1/2] 16x4096x4096 bf16 ..."
    assert second.startswith("[1/2] 16x4096x4096 bf16  2.00x")
    assert second.endswith("left")


def test_cached_problems_are_marked_as_from_the_store() -> None:
    stream = io.StringIO()
    send_events(
        PlainProgress(ProgressState(), stream),
        ProblemStarted(0, 1, PROBLEM, cached=True),
        ProblemDone(0, 1, DONE.decision, 0),
    )
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("(from the store)")


def test_live_display_shows_the_lines_of_the_state() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, highlight=False, width=120, _environ={})
    live = LiveProgress(ProgressState(), console)
    with live.live:
        send_events(live, *EVENTS)
        live.live.refresh()
        send_events(live, DONE)
    text = stream.getvalue()
    for expected in ("problem 1 of 2", "2 tried, 4 left", "best so far: 1.00 ms", "2.00x [1.96-2.04]"):
        assert expected in text


def test_hidden_display_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    state = ProgressState()
    with progress_display(state, hidden=True) as progress:
        send_events(progress, *EVENTS, DONE)
    assert capsys.readouterr().out == ""
    assert len(state.decisions) == 1


def test_duration_text() -> None:
    assert duration_text(42.4) == "42 s"
    assert duration_text(75) == "1:15"
    assert duration_text(3601) == "60:01"


PLAN = planted_plan(PROBLEM, [SMALL, LARGE], {"": [(1, 48, SMALL), (49, 128, LARGE)]}, [1, 48, 128], target_key="t")


def test_live_display_shows_the_m_that_are_timed_and_the_plan() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, highlight=False, width=120, _environ={})
    live = LiveProgress(ProgressState(), console)
    with live.live:
        send_events(live, *EVENTS, DONE, PlanProgress(PROBLEM.plan_key, 12, 65.2))
        live.live.refresh()
        send_events(live, PlanDone(PROBLEM.plan_key, PLAN, 3))
    text = stream.getvalue()
    assert "12 values of M timed, at most 1:05 left for this weight" in text
    assert "the kernels of Mx4096x4096 bf16 at other M" in text
    assert "Mx4096x4096 bf16: M 1-128, 2 kernels in 2 intervals, worst regret 0.0%, 3 to come" in text


def test_state_goes_on_with_problems_after_a_plan() -> None:
    state = ProgressState()
    send_events(state, *EVENTS, DONE, PlanProgress(PROBLEM.plan_key, 12, 65.2))
    assert "12 values of M" in state.trying_line()
    send_events(state, PlanDone(PROBLEM.plan_key, None, 1))
    assert state.plans == []
    send_events(state, ProblemStarted(0, 4, PROBLEM))
    assert "preparing" in state.trying_line()
    assert (state.done, state.total) == (0, 4)
