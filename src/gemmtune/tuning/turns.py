"""Work in steps: while one piece waits for builds, another goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait until any of ``builds`` is done, but for at most ``seconds``; None: without a limit."""

    builds: Collection[Future[Any]] = ()
    seconds: float | None = None


# Work that yields each of its waits and returns a result. It is sent the seconds that other work took meanwhile.
Steps: TypeAlias = Generator[Pause, float, T]


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """The end of a piece of work. index: which it is. seconds: from its begin, without those of other work."""

    index: int
    result: T
    seconds: float


def run_in_turns(
    works: Sequence[Callable[[], Steps[T]]], may_begin: Callable[[int, Sequence[int]], bool]
) -> Iterator[Ended[T]]:
    """Run pieces of work, and yield the end of each.

    They begin in their order, each while all those in progress wait, if there are any. Of several that can go on, the
    first does. An error of one is raised, and ends the others.

    works: functions that return their steps. may_begin: whether the piece at an index may begin while others, of which
    it has the indices, are in progress.
    """
    running = list[_Running[T]]()
    begun, busy_s = 0, 0.0
    try:
        while running or begun < len(works):
            turn = next((item for item in running if item.can_continue), None)
            is_next = turn is None and begun < len(works)
            if is_next and (not running or may_begin(begun, [item.index for item in running])):
                turn = _Running(begun, works[begun], busy_s)
                running.append(turn)
                begun += 1
            if turn is None:
                _wait_for(running)
                continue
            start = time.perf_counter()
            ended = turn.go_on(busy_s)
            busy_s += time.perf_counter() - start
            turn.left_at_s = busy_s
            if ended:
                running.remove(turn)
                yield Ended(turn.index, turn.result[0], time.perf_counter() - turn.began - turn.others_s)
    finally:
        for item in running:
            item.steps.close()


class _Running(Generic[T]):
    """A piece of work in progress. left_at_s: what all pieces had taken together when it began to wait. others_s: what
    others took since it began."""

    def __init__(self, index: int, begin: Callable[[], Steps[T]], left_at_s: float) -> None:
        self.index, self.left_at_s = index, left_at_s
        self.began, self.others_s = time.perf_counter(), 0.0
        self.steps = begin()
        self.result: list[T] = []  # empty until it ends
        self._pause: Pause | None = None
        self.pause_ends = math.inf

    @property
    def builds(self) -> Collection[Future[Any]]:
        """Those that it waits for."""
        return () if self._pause is None else self._pause.builds

    @property
    def can_continue(self) -> bool:
        """Whether it waits no more."""
        is_over = self._pause is None or time.monotonic() >= self.pause_ends
        return is_over or any(build.done() for build in self.builds)

    def go_on(self, busy_s: float) -> bool:
        """Run it until it waits or ends, and return whether it ended. busy_s: what all pieces took so far."""
        others_s = busy_s - self.left_at_s
        self.others_s += others_s
        try:
            self._pause = next(self.steps) if self._pause is None else self.steps.send(others_s)
        except StopIteration as end:
            self.result.append(end.value)
            return True
        self.pause_ends = math.inf if self._pause.seconds is None else time.monotonic() + self._pause.seconds
        return False


def _wait_for(running: Sequence[_Running[T]]) -> None:
    """Wait until one piece of work can go on."""
    builds = {build for item in running for build in item.builds}
    ends = min(item.pause_ends for item in running)
    limit_s = None if ends == math.inf else max(0.0, ends - time.monotonic())
    if builds:
        wait(builds, limit_s, FIRST_COMPLETED)
    elif limit_s is not None:
        time.sleep(limit_s)
