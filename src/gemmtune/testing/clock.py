"""Simulated clocks for tests: ``FakeClock`` with seeded noise, drift and stalls, and ``FakeGpu`` with a stream.

Their kernels take a time that the test chooses. No real time passes.
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
    """A ``timing.clock.Clock`` with simulated time, which passes when one of its kernels (see ``kernel``) is called.

    noise: relative standard deviation of a timing (log-normal). drift: peak-to-peak relative change of a timing, a sine
    with a period of ``drift_s`` simulated seconds. stalls: fraction of timings that are ``stall_s`` seconds longer.
    chill_s: seconds that pass before each timing, for flushing the caches; they are not part of the timing.
    """

    paired_timing_s = FLOOR_S
    calibrates_once = True

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
        self._next_call = 0

    def kernel(self, seconds: float) -> Run:
        """Return a kernel that takes ``seconds`` of this clock's time."""

        def run(i: int) -> None:
            self._time += seconds

        return run

    def now(self) -> float:
        return self._time

    def calls_for(self, run: Run, floor_s: float) -> int:
        elapsed = self._batch(run, 1)
        return max(1, math.ceil(floor_s / elapsed)) if elapsed > 0.0 else 1

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        times = []
        for run, n in zip(runs, calls, strict=True):
            self._time += self._chill_s
            times.append(self._batch(run, n) / n)
        return times

    def call_again(self, run: Run, operand_set: int) -> Sequence[int]:
        run(operand_set)
        return (operand_set,)

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        return {}

    def _batch(self, run: Run, calls: int) -> float:
        start = self._time
        for i in range(self._next_call, self._next_call + calls):
            run(i)
        self._next_call += calls
        elapsed = self._time - start
        elapsed *= math.exp(self._rng.gauss(0.0, self._noise))
        elapsed *= 1.0 + self._drift / 2.0 * math.sin(2.0 * math.pi * start / self._drift_s)
        if self._rng.random() < self._stalls:
            elapsed += self._stall_s
        self._time = start + elapsed
        return elapsed


def _no_fault() -> str:
    return ""


StreamWork = tuple[float, Callable[[], str]]
"""An operation on the stream: its duration in seconds, and a function that returns its error (empty: none)."""


class FakeGpu:
    """A ``timing.cuda_clock.Gpu`` with one stream, whose kernels (see ``kernel``) only take time on the stream.

    host: the host's time in seconds. device: the time at which the stream will have finished its work. launch_s:
    seconds of host time to replay a graph, record an event or enqueue a sleep. log: the operations, in order.
    """

    def __init__(self, launch_s: float = 5e-6) -> None:
        self.host = self.device = 0.0
        self.launch_s = launch_s
        self.log: list[str] = []
        self._error, self._error_at = "", math.inf
        self._stream_depth = 0
        self._captured: list[StreamWork] | None = None
        self._marks: list[tuple[float, int]] = []

    def kernel(
        self,
        seconds: float,
        host_s: float = 10e-6,
        *,
        uncapturable: bool = False,
        elsewhere: bool = False,
        fault: Callable[[], str] = _no_fault,
        before: Callable[[int], object] | None = None,
    ) -> Run:
        """Return a kernel that takes ``seconds`` on the stream, and ``host_s`` on the host to launch.

        uncapturable: the kernel raises while a graph is captured. elsewhere: the kernel runs on another stream. fault:
        called each time the stream runs the kernel; if it returns an error, the context is lost with this error.
        before: called at the start of each call, with the index of the operand set.
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
        self._stream_depth += 1
        try:
            yield
        finally:
            self._stream_depth -= 1

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def sleep(self, seconds: float) -> None:
        if self._captured is not None:
            self._captured.append((seconds, _no_fault))
        else:
            self._enqueue("sleep", seconds)

    def chill(self) -> None:
        """Enqueue a flush of the caches, as ``Flush`` does."""
        self._enqueue("chill", 40e-6)

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        assert self._stream_depth, "the default stream cannot be captured"
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
        now = min(self.host, self._error_at)
        return next((number for done_at, number in reversed(self._marks) if done_at <= now), 0)

    def synchronize(self) -> None:
        self.host = max(self.host, self.device)
        self.check()

    def check(self) -> None:
        """Raise RuntimeError if a kernel that has run by now lost the context."""
        if self.host >= self._error_at:
            raise RuntimeError(self._error)

    def replay(self, works: Sequence[StreamWork]) -> None:
        """Enqueue captured work."""
        self._enqueue(f"replay {len(works)}", 0.0)
        for work in works:
            self._run(work)

    def _enqueue(self, name: str, seconds: float) -> float:
        """Enqueue an operation and log it. Return the time at which the stream will have finished it."""
        assert self._captured is None, f"{name} while capturing"
        self.log.append(name)
        self.host += self.launch_s
        self._run((seconds, _no_fault))
        return self.device

    def _run(self, work: StreamWork) -> None:
        seconds, fault = work
        self.device = max(self.device, self.host) + seconds
        if error := fault():
            self._error, self._error_at = error, min(self._error_at, self.device)


@dataclass(slots=True)
class FakeEvent:
    """A CUDA event of a FakeGpu. at: the time at which the stream reaches it; infinite before it is recorded."""

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
    """A CUDA graph of a FakeGpu."""

    gpu: FakeGpu
    works: list[StreamWork]

    def replay(self) -> None:
        self.gpu.replay(self.works)
