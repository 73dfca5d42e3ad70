"""Work in turns: which piece goes on when others wait, what each is told of the others' time, and how errors end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from gemmtune.tuning import turns
from gemmtune.tuning.turns import Pause, Steps, run_in_turns
from helpers.steps import run_alone


class Clock:
    """Fake of the module ``time``. Sleeping takes no real time."""

    def __init__(self) -> None:
        self.now = 16.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(turns, "time", fake)
    return fake


class Pieces:
    """Pieces of work that note what happens. Each takes 1 s before and 2 s after a pause."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.log = clock, list[str]()
        self.builds: dict[str, Future[None]] = {}
        self.sent: dict[str, float] = {}

    def work(self, name: str, on_pause: Callable[[], None] = lambda: None) -> Callable[[], Steps[str]]:
        """Return a piece that waits for the future of its name. on_pause: called before it does."""

        def steps() -> Steps[str]:
            self.log.append(f"{name} begins")
            self.clock.now += 1.0
            on_pause()
            try:
                self.sent[name] = yield Pause([self.builds.setdefault(name, Future())])
            finally:
                self.log.append(f"{name} goes on")
            self.clock.now += 2.0
            return name.upper()

        return steps

    def finish(self, *names: str) -> None:
        for name in names:
            self.builds.setdefault(name, Future()).set_result(None)


def two(index: int, others: Sequence[int]) -> bool:
    """Whether a piece may begin: two may be in progress."""
    return len(others) < 2


@pytest.fixture
def pieces(clock: Clock) -> Pieces:
    return Pieces(clock)


def test_work_alone_goes_on_when_any_build_is_done_and_is_sent_no_time_of_others() -> None:
    first, second = Future[int](), Future[int]()

    def steps() -> Steps[list[object]]:
        threading.Timer(0.01, second.set_result, [3]).start()
        others_s = yield Pause([first, second])
        return [others_s, first.done(), second.result()]

    assert run_alone(steps()) == [0.0, False, 3]


def test_work_without_pauses_returns_its_result() -> None:
    def steps() -> Steps[int]:
        if not __debug__:
            yield Pause()
        return 7

    assert run_alone(steps()) == 7


def test_pause_without_builds_ends_after_its_seconds(clock: Clock) -> None:
    def steps() -> Steps[float]:
        yield Pause(seconds=0.25)
        return clock.now

    assert run_alone(steps()) == 16.25


def test_pause_ends_after_its_seconds_although_no_build_is_done() -> None:
    def steps() -> Steps[bool]:
        build = Future[None]()
        yield Pause([build], seconds=0.01)
        return build.done()

    assert not run_alone(steps())


def test_next_piece_begins_while_the_first_waits_and_the_first_goes_on_before_it(pieces: Pieces) -> None:
    """b waits, too: then a, whose build ended, goes on, although that of b ended before."""
    works = [pieces.work("a"), pieces.work("b", on_pause=lambda: pieces.finish("b", "a")), pieces.work("c")]
    pieces.finish("c")
    ended = list(run_in_turns(works, two))
    assert pieces.log == ["a begins", "b begins", "a goes on", "b goes on", "c begins", "c goes on"]
    assert [(item.index, item.result) for item in ended] == [(0, "A"), (1, "B"), (2, "C")]


def test_pieces_are_told_the_seconds_of_others_which_are_not_theirs(pieces: Pieces) -> None:
    """a waits while b takes 1 s; b while a takes 2."""
    works = [pieces.work("a"), pieces.work("b", on_pause=lambda: pieces.finish("b", "a"))]
    ended = list(run_in_turns(works, two))
    assert pieces.sent == {"a": 1.0, "b": 2.0}
    assert [item.seconds for item in ended] == [3.0, 3.0]


def test_later_piece_may_end_first(pieces: Pieces) -> None:
    works = [pieces.work("a"), pieces.work("b", on_pause=lambda: pieces.finish("b"))]
    ends = run_in_turns(works, two)
    assert next(ends).index == 1
    pieces.finish("a")
    assert [item.index for item in ends] == [0]


def test_piece_that_may_not_begin_does_when_no_other_is_in_progress(pieces: Pieces) -> None:
    asked: list[tuple[int, list[int]]] = []

    def may_begin(index: int, others: Sequence[int]) -> bool:
        asked.append((index, list(others)))
        pieces.finish("a")
        return False

    pieces.finish("b")
    works = [pieces.work("a"), pieces.work("b")]
    list(run_in_turns(works, may_begin))
    assert pieces.log == ["a begins", "a goes on", "b begins", "b goes on"]
    assert asked == [(1, [0])]


def test_error_of_one_piece_is_raised_and_ends_the_others(pieces: Pieces) -> None:
    def fail() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(run_in_turns([pieces.work("a"), pieces.work("b", on_pause=fail), pieces.work("c")], two))
    assert pieces.log == ["a begins", "b begins", "a goes on"]
    assert pieces.sent == {}
