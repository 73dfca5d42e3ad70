"""Simulated time: a clock with kernels of known speed under seeded noise, drift and stalls, and a GPU with a stream.

No real time passes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..timing.clock import FLOOR_S, Run
from ..timing.cuda_clock import EmptyGraph


class FakeClock:
    """A ``timing.clock.Clock`` whose kernels, made by ``kernel``, only move its hands.

    noise: standard deviation of a timing, relative (log-normal). drift: relative change of speed over ``drift_s``
    simulated seconds, there and back (a sine). stalls: share of timings that lose ``stall_s`` seconds. chill_s: seconds
    that pass before each timing, as emptying the caches takes them; they are no part of it.
    """

    duel_s = FLOOR_S

    def __init__(
        self,
        seed: int = 0,
        *,
        noise: float = 0.02,
        drift: float = 0.0,
        drift_s: float = 1.0,
        stalls: float = 0.0,
        stall_s: float = 8e-3,
        chill_s: float = 0.0,
    ) -> None:
        self._rng, self._chill_s = random.Random(seed), chill_s
        self._noise, self._drift, self._drift_s = noise, drift, drift_s
        self._stalls, self._stall_s = stalls, stall_s
        self._time = 0.0
        self._next = 0

    def kernel(self, seconds: float) -> Run:
        """A callable that takes ``seconds`` of this clock's time."""

        def run(i: int) -> None:
            self._time += seconds

        return run

    def now(self) -> float:
        return self._time

    def calls_for(self, run: Run, floor_s: float) -> int:
        took = self._batch(run, 1)
        return max(1, math.ceil(floor_s / took)) if took > 0.0 else 1

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        times = []
        for run, n in zip(runs, calls, strict=True):
            self._time += self._chill_s
            times.append(self._batch(run, n) / n)
        return times

    def call_again(self, run: Run, place: int) -> Sequence[int]:
        run(place)
        return (place,)

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        return {}

    def _batch(self, run: Run, calls: int) -> float:
        start = self._time
        for i in range(self._next, self._next + calls):
            run(i)
        self._next += calls
        took = self._time - start
        took *= math.exp(self._rng.gauss(0.0, self._noise))
        took *= 1.0 + self._drift / 2.0 * math.sin(2.0 * math.pi * start / self._drift_s)
        if self._rng.random() < self._stalls:
            took += self._stall_s
        self._time = start + took
        return took


def _harmless() -> str:
    return ""


Work = tuple[float, Callable[[], str]]
"""What the stream does: seconds, and what is wrong with it once it is done (empty: nothing)."""


class FakeGpu:
    """A ``timing.cuda_clock.Gpu`` with one stream, whose kernels, made by ``kernel``, only take time on it.

    host, device: seconds, where the host's clock stands and when the stream will have done all it has. launch_s: what
    replaying a graph, recording an event or pausing costs the host. log: what was done, in order.
    """

    def __init__(self, launch_s: float = 5e-6) -> None:
        self.host = self.device = 0.0
        self.launch_s = launch_s
        self.log: list[str] = []
        self._lost, self._lost_at = "", math.inf
        self._inside = 0
        self._captured: list[Work] | None = None
        self._marks: list[tuple[float, int]] = []

    def kernel(
        self,
        seconds: float,
        host_s: float = 10e-6,
        *,
        uncapturable: bool = False,
        elsewhere: bool = False,
        fault: Callable[[], str] = _harmless,
        before: Callable[[int], object] | None = None,
    ) -> Run:
        """A callable that takes ``seconds`` of the stream, and ``host_s`` of the host to launch.

        uncapturable: it raises while a graph is captured. elsewhere: it runs on another stream. fault: asked each time
        that the stream does it; what it says is what the context is lost of. before: called first, with the operand
        set.
        """

        def run(i: int) -> None:
            if before is not None:
                before(i)
            self.host += host_s
            if self._captured is not None and uncapturable:
                raise RuntimeError("operation not permitted when stream is capturing\nand more of it")
            if elsewhere:
                self.host += seconds
            elif self._captured is not None:
                self._captured.append((seconds, fault))
            else:
                self._run((seconds, fault))

        return run

    def now(self) -> float:
        return self.host

    def rest(self) -> None:
        self.host += 50e-6

    @contextmanager
    def stream(self) -> Iterator[None]:
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def sleep(self, seconds: float) -> None:
        if self._captured is not None:
            self._captured.append((seconds, _harmless))
        else:
            self._enqueue("sleep", seconds)

    def chill(self) -> None:
        """What a ``Flush`` does."""
        self._enqueue("chill", 40e-6)

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        assert self._inside, "the default stream cannot be captured"
        self._captured = []
        try:
            work()
            works = self._captured
        finally:
            self._captured = None
        self.log.append(f"capture {len(works)}")
        if not works:
            raise EmptyGraph("it launches nothing on the current stream")
        return FakeGraph(self, works)

    def mark(self, number: int) -> None:
        self._marks.append((self._enqueue("mark", 0.0), number))

    def reached(self) -> int:
        now = min(self.host, self._lost_at)
        return next((number for at, number in reversed(self._marks) if at <= now), 0)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)
        self.check()

    def check(self) -> None:
        """Raise what a kernel that the stream has done did wrong."""
        if self.host >= self._lost_at:
            raise RuntimeError(self._lost)

    def replay(self, works: Sequence[Work]) -> None:
        """Have the stream do what was captured."""
        self._enqueue(f"replay {len(works)}", 0.0)
        for work in works:
            self._run(work)

    def _enqueue(self, what: str, seconds: float) -> float:
        """Returns when the stream will have done it."""
        assert self._captured is None, f"{what} while capturing"
        self.log.append(what)
        self.host += self.launch_s
        self._run((seconds, _harmless))
        return self.device

    def _run(self, work: Work) -> None:
        seconds, fault = work
        self.device = max(self.device, self.host) + seconds
        if said := fault():
            self._lost, self._lost_at = said, min(self._lost_at, self.device)


@dataclass(slots=True)
class FakeEvent:
    """A moment on a FakeGpu's stream."""

    gpu: FakeGpu
    at: float = field(default=math.inf)

    def record(self) -> None:
        self.gpu.host += self.gpu.launch_s
        self.at = max(self.gpu.device, self.gpu.host)

    def query(self) -> bool:
        self.gpu.check()
        return self.at <= self.gpu.host

    def elapsed_time(self, end: FakeEvent, /) -> float:
        assert max(self.at, end.at) <= self.gpu.host, "read before it has passed"
        return 1e3 * (end.at - self.at)


@dataclass(slots=True)
class FakeGraph:
    """Captured work of a FakeGpu."""

    gpu: FakeGpu
    works: list[Work]

    def replay(self) -> None:
        self.gpu.replay(self.works)
