"""Timing on a GPU: calls are captured into CUDA graphs and replayed between events, behind a pause that hides their
launching.

``CudaClock`` and ``screening_times`` use the device through the protocol ``Gpu``: ``TorchGpu`` implements it with
torch.cuda, ``testing.clock.FakeGpu`` simulates it. The clock works on one stream of its own, since the default stream
cannot be captured.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

from .clock import Latency, Run, gc_disabled

# Calls in one graph: a kernel of 1 us nearly fills the floor of a timing, and capturing takes 4 ms.
_MAX_GRAPH_CALLS = 384
# Launches of one callable that wait behind a pause: the launch queue holds about a thousand kernels.
_MAX_EAGER_CALLS = 64
ROUND_PAUSE_S = 200e-6  # a round's pause: the host enqueues the first timings meanwhile
_LAUNCH_GUESS_S = 50e-6  # host seconds per launch, until it is measured
# Calls that take so long together tell how many fill a timing, if a pause hid their launching: events have steps of
# 0.5 us. The pause for 16 calls takes 1.2 ms, most of what counting took for calls of 10 us.
_COUNTED_S = 20e-6
PAUSE_MARGIN = 1.5  # a pause is this multiple of the last launching time
_HOST_TIMING_S = 1e-3  # the duration of a timing of work that events do not see
MIN_KERNEL_S = 0.5e-6  # no kernel is faster: less time between events means that the kernel ran elsewhere


_BATCH, _LAUNCHES, _LAUNCH_S = 16, 200, 10e-3  # Launches timed for their own cost, and the seconds allowed for it.


class EmptyGraph(Exception):
    """The error of captured work that launched nothing on the current stream."""


class Event(Protocol):
    """A moment on the stream."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the moment has passed. Raises the errors of the kernels before it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from this event to ``end``, both passed."""


class Graph(Protocol):
    """Captured work, which ``replay`` launches."""

    def replay(self) -> None: ...


class Gpu(Protocol):
    """The operations of a device that timing needs. All times are in seconds."""

    def now(self) -> float:
        """Return the time of the host's clock."""

    def rest(self) -> None:
        """Let other threads run for some microseconds."""

    def stream(self) -> AbstractContextManager[object]:
        """Return a context in which the timing stream is the current one."""

    def event(self) -> Event: ...

    def sleep(self, seconds: float) -> None:
        """Enqueue work that keeps the stream busy for ``seconds``; returns at once."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Return the captured launches of ``work``. Raises the exceptions of ``work``, EmptyGraph, or the reason why
        capturing failed."""

    def mark(self, number: int) -> None:
        """Enqueue a note of a number (1 to 255), written when the stream reaches it."""

    def reached(self) -> int:
        """Return the last number noted, 0 for none; works also when the device's context is lost."""

    def synchronize(self) -> None:
        """Wait for the whole device. Raises the errors of its kernels."""


# --- the clock --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _CallableState:
    """The state of one callable.

    number: its number in the marker. host_s: host seconds per launch. graph: holds ``calls`` calls. uncaptured: why
    there is no graph. without_graph: it was timed call by call, because another callable of the round has no graph.
    off_stream: its work is not on the stream, so that events do not see it; nor did the events see it when its calls
    were counted. calls_per_timing: the calls that then fill a timing.
    """

    number: int = 0
    host_s: float = 0.0
    graph: Graph | None = None
    calls: int = 0
    uncaptured: str = ""
    without_graph: bool = False
    off_stream: bool = False
    calls_per_timing: int = 0


class CudaClock:
    """A clock for a GPU: each callable is captured into a graph of the calls that one timing makes, and the graph is
    replayed.

    All timings of a round are enqueued behind a pause, and waited for once. A callable that cannot be captured is
    launched call by call behind a pause of its own; its conditions state this. Every timing begins with operand set 0,
    so that callables that share operands have the same ones; operands in common with the timing before must be evicted
    from the cache.

    flush: enqueues work that empties the L2; called before each timing. latency: ``eager`` times back-to-back launches
    by the host's clock, as a user without graphs experiences them. marker: callables write their number into its first
    byte when they are called, and the clock does so when it replays them, so that the parent of a dead or hanging
    process can identify the kernel.
    """

    calibrates_once = False
    paired_timing_s = 2e-3  # with pauses of 0.3 ms between timings: busy enough to reach the power limit

    def __init__(
        self,
        gpu: Gpu,
        *,
        flush: Callable[[], object] | None = None,
        latency: Latency = "graph",
        marker: mmap.mmap | bytearray | None = None,
    ) -> None:
        self._gpu, self._flush, self._latency = gpu, flush, latency
        self._marker = bytearray(1) if marker is None else marker
        self._states: dict[Run, _CallableState] = {}

    def now(self) -> float:
        return self._gpu.now()

    def calls_for(self, run: Run, floor_s: float) -> int:
        state = self._states[run] = _CallableState()
        with self._gpu.stream():
            self._gpu.synchronize()
            run(0)
            self._gpu.synchronize()
            state.number = self._marker[0]
            calls = 1
            while True:
                pause_s = PAUSE_MARGIN * calls * (state.host_s or _LAUNCH_GUESS_S)
                elapsed_s = (
                    self._time_by_host(run, calls)
                    if self._latency == "eager"
                    else self._time_eagerly(run, state, calls)
                )
                is_hidden = self._latency == "graph" and calls * state.host_s <= pause_s
                enough_s = min(floor_s / 2.0, _COUNTED_S) if is_hidden else floor_s / 2.0
                if elapsed_s >= enough_s or calls >= _MAX_EAGER_CALLS:
                    return max(1, min(_MAX_GRAPH_CALLS, math.ceil(calls * floor_s / max(elapsed_s, 1e-9))))
                calls = min(_MAX_EAGER_CALLS, calls * 4)

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        with gc_disabled(), self._gpu.stream():
            timings = [self._prepare(run, n) for run, n in zip(runs, calls, strict=True)]
            # Kernels that wait in the queue and nodes of a graph need not follow each other equally closely: in one
            # round all callables are timed the same way.
            graphs = not any(state.uncaptured for _, state, _ in timings)
            if not graphs:
                timings = [(run, state, min(n, _MAX_EAGER_CALLS)) for run, state, n in timings]
                for _, state, _ in timings:
                    state.without_graph = not state.uncaptured
            times = self._time_enqueued([timing for timing in timings if self._is_on_stream(timing[1])], graphs)
            for run, state, _ in timings:
                if state.uncaptured and times.get(run, MIN_KERNEL_S) < MIN_KERNEL_S:
                    state.off_stream = True
                    del times[run]
            return [times[run] if run in times else self._time_off_stream(run, state, n) for run, state, n in timings]

    def call_again(self, run: Run, operand_set: int) -> Sequence[int]:
        """Replay the graph of ``run``; the two outputs then hold the results of the graph's last two calls."""
        state = self._states.setdefault(run, _CallableState())
        with self._gpu.stream():
            self._gpu.synchronize()  # operands may have been overwritten on another stream
            self._marker[0] = state.number or self._marker[0]
            if state.graph is None:
                run(operand_set)
            else:
                state.graph.replay()
            self._gpu.synchronize()
        return (operand_set,) if state.graph is None else range(state.calls)[-2:]

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        state = self._states.get(run)
        if state is None:
            return {}
        without_graph = "beside one that cannot be captured" if state.without_graph else ""
        reason = state.uncaptured or without_graph if self._latency == "graph" else "as asked for, by the host's clock"
        conditions = {"timed": f"eager: {reason}" if reason else "graph"}
        if finalist:
            with suppress(Exception):  # its timings stay valid, whatever it raises now
                conditions["launch_us"] = f"{1e6 * self._launch_s(run):.1f}"
        return conditions

    def _is_on_stream(self, state: _CallableState) -> bool:
        """Whether events see the callable's work."""
        return self._latency == "graph" and not state.off_stream

    def _prepare(self, run: Run, calls: int) -> tuple[Run, _CallableState, int]:
        """Return the callable with its state and the calls of its next timing, after capturing its graph where it can
        have one."""
        state, calls = self._states.setdefault(run, _CallableState()), _rounded(calls)
        if self._latency == "graph" and not state.uncaptured and state.calls != calls:
            self._capture(run, state, calls)
        return run, state, min(calls, _MAX_EAGER_CALLS) if state.uncaptured else calls

    def _capture(self, run: Run, state: _CallableState, calls: int) -> None:
        """Capture a graph of ``calls`` calls and replay it once (which uploads it), or record the reason why there is
        none."""

        def work() -> None:
            for i in range(calls):
                run(i)

        try:
            graph = self._gpu.capture(work)
        except EmptyGraph as error:
            state.graph, state.uncaptured, state.off_stream = None, str(error), True
        except Exception as error:  # it ran before: any error now is the reason why it cannot be captured
            state.graph, state.uncaptured = None, first_line(error)
        else:
            state.number = state.number or self._marker[0]  # noted during capturing
            graph.replay()
            self._gpu.synchronize()
            state.graph, state.calls = graph, calls

    def _time_enqueued(self, timings: Sequence[tuple[Run, _CallableState, int]], graphs: bool) -> dict[Run, float]:
        """Return the seconds per call of timings that are enqueued one behind the other, as graphs or call by call."""
        if not timings:
            return {}
        events = []
        self._gpu.sleep(ROUND_PAUSE_S)
        for run, state, n in timings:
            if self._flush is not None:
                self._flush()
            self._gpu.mark(state.number)
            events.append(self._enqueue_timing(run, state, n, graphs))
        self._wait(events[-1][1])
        return {
            run: start.elapsed_time(end) * 1e-3 / n for (run, _, n), (start, end) in zip(timings, events, strict=True)
        }

    def _enqueue_timing(self, run: Run, state: _CallableState, calls: int, graphs: bool = True) -> tuple[Event, Event]:
        """Enqueue one timing between two events, and return the events."""
        start, end = self._gpu.event(), self._gpu.event()
        graph = state.graph if graphs else None
        if graph is None:
            self._gpu.sleep(PAUSE_MARGIN * calls * (state.host_s or _LAUNCH_GUESS_S))
        start.record()
        if graph is not None:
            graph.replay()
        else:
            started = self._gpu.now()
            for i in range(calls):
                run(i)
            state.host_s = (self._gpu.now() - started) / calls
        end.record()
        return start, end

    def _time_eagerly(self, run: Run, state: _CallableState, calls: int) -> float:
        """Return the seconds that ``calls`` calls take together, with their launching hidden by a pause."""
        start, end = self._enqueue_timing(run, state, calls)
        self._gpu.synchronize()
        return start.elapsed_time(end) * 1e-3

    def _time_by_host(self, run: Run, calls: int) -> float:
        """Return the seconds that ``calls`` calls take together by the host's clock, launching included."""
        if self._flush is not None:
            self._flush()
        self._gpu.synchronize()
        started = self._gpu.now()
        for i in range(calls):
            run(i)
        self._gpu.synchronize()
        return self._gpu.now() - started

    def _time_off_stream(self, run: Run, state: _CallableState, calls: int) -> float:
        """Return the seconds per call by the host's clock."""
        if state.off_stream:
            state.calls_per_timing = state.calls_per_timing or max(
                1, math.ceil(_HOST_TIMING_S / max(self._time_by_host(run, 1), 1e-9))
            )
            calls = min(calls, state.calls_per_timing)
        return self._time_by_host(run, calls) / calls

    def _wait(self, last: Event) -> None:
        """Wait until the last event has passed, updating the marker to the running callable meanwhile."""
        try:
            while not last.query():
                self._update_marker()
                self._gpu.rest()
        finally:
            self._update_marker()

    def _update_marker(self) -> None:
        self._marker[0] = self._gpu.reached() or self._marker[0]

    def _launch_s(self, run: Run) -> float:
        """Return the host seconds of one launch: the median over single calls, few at a time, so that none of them
        waits.

        It times 200 calls, fewer where they are slow: work that is slow on the device is not delayed by the host.
        """
        times: list[float] = []
        started = self._gpu.now()
        with gc_disabled(), self._gpu.stream():
            while not times or (len(times) < _LAUNCHES and self._gpu.now() - started < _LAUNCH_S):
                self._gpu.synchronize()
                for i in range(_BATCH):
                    start = self._gpu.now()
                    run(i)
                    times.append(self._gpu.now() - start)
            self._gpu.synchronize()
        return median(times)


def _rounded(calls: int) -> int:
    """Return ``calls`` rounded up to one of four sizes between powers of two, so that one call more needs no new
    graph."""
    step = 1 << max(0, calls.bit_length() - 3)
    return min(_MAX_GRAPH_CALLS, -(-calls // step) * step)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
