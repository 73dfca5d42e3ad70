"""Timing on a GPU: calls captured into graphs, replayed between events, behind a pause that hides their launching.

``CudaClock`` and ``rough_times`` know the device as a ``Gpu``: ``TorchGpu`` is torch.cuda's, ``testing.clock.FakeGpu``
a simulated one. The clock works on one stream of its own, since the default one cannot be captured.
"""

from __future__ import annotations

import functools
import math
import mmap
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch

from ..core.torch_compat import cuda_sleep, end_allocate_to_pool, release_pool
from .clock import Latency, Run, collector_at_rest

_MOST_CALLS = 384  # in one graph: a kernel of 1 us fills the floor of a timing nearly, and capturing takes 4 ms
_MOST_EAGER = 64  # launches of one callable that wait behind a pause: the launch queue holds about a thousand kernels
_HEAD_S = 200e-6  # a round's pause: the host enqueues the first lanes meanwhile
_GUESS_S = 50e-6  # what a launch costs the host, as long as nobody knows
_SPARE = 1.5  # a pause is so much longer than launching took before
_LONG_S = 1e-3  # a timing of what events do not see
_LEAST_S = 0.5e-6  # no kernel is faster: less between events means that it is not there

_CYCLES_S = 2e9  # of a GPU's clock, at most: a slower one makes pauses longer

_BATCH, _LAUNCHES, _LAUNCH_S = 16, 200, 10e-3  # launches timed for their own cost, and seconds that may take

_COLD_CALLS, _COLD_SLOW_CALLS, _COLD_SLOW_S = 5, 2, 5e-3
_SETTING_UP_S = 0.5  # what a first call may need: modules are loaded, libraries choose their kernels
_STALL_S = 2e-3
_SLOW_S = 50e-3


class EmptyGraph(Exception):
    """What was captured launched nothing on the current stream."""


class Event(Protocol):
    """A moment on the stream."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether it has passed. Raises what kernels before it did wrong."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from here to ``end``, both passed."""


class Graph(Protocol):
    """Captured work."""

    def replay(self) -> None: ...


class Gpu(Protocol):
    """What timing needs of a device. Seconds throughout."""

    def now(self) -> float:
        """The host's clock."""

    def rest(self) -> None:
        """Let other threads run for some microseconds."""

    def stream(self) -> AbstractContextManager[object]:
        """Makes the stream that timing is done on the current one."""

    def event(self) -> Event: ...

    def sleep(self, seconds: float) -> None:
        """Keep the stream busy, without waiting for it."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Capture what ``work`` launches. Raises what it raises, EmptyGraph, or why it cannot be captured."""

    def mark(self, number: int) -> None:
        """Note a number (1 to 255) when the stream gets here."""

    def reached(self) -> int:
        """The last number noted, 0 for none; also when the device's context is lost."""

    def synchronize(self) -> None:
        """Wait for the whole device. Raises what kernels did wrong."""


# --- the clock --------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Known:
    """What is known of one callable. number: its place in the marker. host_s: what launching it once costs the host.

    graph holds ``calls`` calls. uncaptured: why there is none. beside: it was timed as one that has none. unseen: its
    work is not on the stream, so that events
    do not see it, nor did those that its calls were counted with: ``fits`` of them fill a timing.
    """

    number: int = 0
    host_s: float = 0.0
    graph: Graph | None = None
    calls: int = 0
    uncaptured: str = ""
    beside: bool = False
    unseen: bool = False
    fits: int = 0


class CudaClock:
    """A GPU's time: each callable is captured into a graph of the calls that a timing makes, and replayed.

    All lanes of a round are enqueued behind a pause, and waited for once. A callable that cannot be captured is
    launched call by call behind a pause of its own; its conditions say so. Every timing begins with operand set 0, so
    that lanes that share operands find the same ones; what they have in common with the timing before must be driven
    out of the cache.

    chill: enqueues what empties the L2, called before each timing. latency: ``eager`` times launches back to back by
    the host's clock, as who has no graphs meets them. marker: callables write their number into its first byte when
    they are called; so does the clock when it replays them, for whoever finds the process dead or hanging.
    """

    duel_s = 2e-3  # with pauses of 0.3 ms between: busy enough to meet the power limit

    def __init__(
        self,
        gpu: Gpu,
        *,
        chill: Callable[[], object] | None = None,
        latency: Latency = "graph",
        marker: mmap.mmap | bytearray | None = None,
    ) -> None:
        self._gpu, self._chill, self._latency = gpu, chill, latency
        self._marker = bytearray(1) if marker is None else marker
        self._known: dict[Run, _Known] = {}

    def now(self) -> float:
        return self._gpu.now()

    def calls_for(self, run: Run, floor_s: float) -> int:
        known = self._known[run] = _Known()
        with self._gpu.stream():
            self._gpu.synchronize()
            run(0)
            self._gpu.synchronize()
            known.number = self._marker[0]
            calls = 1
            while True:
                took = self._by_host(run, calls) if self._latency == "eager" else self._eagerly(run, known, calls)
                if took >= floor_s / 2.0 or calls >= _MOST_EAGER:
                    return max(1, min(_MOST_CALLS, math.ceil(calls * floor_s / max(took, 1e-9))))
                calls = min(_MOST_EAGER, calls * 4)

    def time_round(self, runs: Sequence[Run], calls: Sequence[int]) -> list[float]:
        with collector_at_rest(), self._gpu.stream():
            lanes = [self._ready(run, n) for run, n in zip(runs, calls, strict=True)]
            # Kernels that wait in the queue and nodes of a graph need not follow each other equally closely: in one
            # round all are timed the same way.
            graphs = not any(known.uncaptured for _, known, _ in lanes)
            if not graphs:
                lanes = [(run, known, min(n, _MOST_EAGER)) for run, known, n in lanes]
                for _, known, _ in lanes:
                    known.beside = not known.uncaptured
            times = self._enqueued([lane for lane in lanes if self._on_stream(lane[1])], graphs)
            for run, known, _ in lanes:
                if known.uncaptured and times.get(run, _LEAST_S) < _LEAST_S:
                    known.unseen = True
                    del times[run]
            return [times[run] if run in times else self._off_stream(run, known, n) for run, known, n in lanes]

    def call_again(self, run: Run, place: int) -> Sequence[int]:
        """Replay its graph; the results of a graph's last two calls are what its two outputs hold then."""
        known = self._known.setdefault(run, _Known())
        with self._gpu.stream():
            self._gpu.synchronize()  # operands may have been overwritten on another stream
            self._marker[0] = known.number or self._marker[0]
            if known.graph is None:
                run(place)
            else:
                known.graph.replay()
            self._gpu.synchronize()
        return (place,) if known.graph is None else range(known.calls)[-2:]

    def conditions(self, run: Run, finalist: bool) -> dict[str, str]:
        known = self._known.get(run)
        if known is None:
            return {}
        beside = "beside one that cannot be captured" if known.beside else ""
        why = known.uncaptured or beside if self._latency == "graph" else "as asked for, by the host's clock"
        found = {"timed": f"eager: {why}" if why else "graph"}
        if finalist:
            with suppress(Exception):  # its timings stand, whatever it raises now
                found["launch_us"] = f"{1e6 * self._launch_s(run):.1f}"
        return found

    def _on_stream(self, known: _Known) -> bool:
        """Whether events see what it does."""
        return self._latency == "graph" and not known.unseen

    def _ready(self, run: Run, calls: int) -> tuple[Run, _Known, int]:
        """The callable with its graph, if it shall and can have one, and as many calls as its next timing makes."""
        known, calls = self._known.setdefault(run, _Known()), _rounded(calls)
        if self._latency == "graph" and not known.uncaptured and known.calls != calls:
            self._capture(run, known, calls)
        return run, known, min(calls, _MOST_EAGER) if known.uncaptured else calls

    def _capture(self, run: Run, known: _Known, calls: int) -> None:
        """A graph of ``calls`` calls, replayed once (it is uploaded then), or the reason why there is none."""

        def work() -> None:
            for i in range(calls):
                run(i)

        try:
            graph = self._gpu.capture(work)
        except EmptyGraph as error:
            known.graph, known.uncaptured, known.unseen = None, str(error), True
        except Exception as error:  # it ran before: whatever it raises now is why it cannot be captured
            known.graph, known.uncaptured = None, _first_line(error)
        else:
            known.number = known.number or self._marker[0]  # which capturing has noted
            graph.replay()
            self._gpu.synchronize()
            known.graph, known.calls = graph, calls

    def _enqueued(self, lanes: Sequence[tuple[Run, _Known, int]], graphs: bool) -> dict[Run, float]:
        """Seconds per call of lanes that are enqueued one behind the other, as graphs or call by call."""
        if not lanes:
            return {}
        bounds = []
        self._gpu.sleep(_HEAD_S)
        for run, known, n in lanes:
            if self._chill is not None:
                self._chill()
            self._gpu.mark(known.number)
            bounds.append(self._bounded(run, known, n, graphs))
        self._wait(bounds[-1][1])
        return {
            run: start.elapsed_time(end) * 1e-3 / n for (run, _, n), (start, end) in zip(lanes, bounds, strict=True)
        }

    def _bounded(self, run: Run, known: _Known, calls: int, graphs: bool = True) -> tuple[Event, Event]:
        """Enqueue one timing between two events."""
        start, end = self._gpu.event(), self._gpu.event()
        graph = known.graph if graphs else None
        if graph is None:
            self._gpu.sleep(_SPARE * calls * (known.host_s or _GUESS_S))
        start.record()
        if graph is not None:
            graph.replay()
        else:
            began = self._gpu.now()
            for i in range(calls):
                run(i)
            known.host_s = (self._gpu.now() - began) / calls
        end.record()
        return start, end

    def _eagerly(self, run: Run, known: _Known, calls: int) -> float:
        """Seconds that ``calls`` calls take together, their launching hidden."""
        start, end = self._bounded(run, known, calls)
        self._gpu.synchronize()
        return start.elapsed_time(end) * 1e-3

    def _by_host(self, run: Run, calls: int) -> float:
        """Seconds that ``calls`` calls take together, launching and all, by the host's clock."""
        if self._chill is not None:
            self._chill()
        self._gpu.synchronize()
        began = self._gpu.now()
        for i in range(calls):
            run(i)
        self._gpu.synchronize()
        return self._gpu.now() - began

    def _off_stream(self, run: Run, known: _Known, calls: int) -> float:
        """Seconds per call by the host's clock."""
        if known.unseen:
            known.fits = known.fits or max(1, math.ceil(_LONG_S / max(self._by_host(run, 1), 1e-9)))
            calls = min(calls, known.fits)
        return self._by_host(run, calls) / calls

    def _wait(self, last: Event) -> None:
        """Until the last event has passed, noting who is running meanwhile."""
        try:
            while not last.query():
                self._note()
                self._gpu.rest()
        finally:
            self._note()

    def _note(self) -> None:
        self._marker[0] = self._gpu.reached() or self._marker[0]

    def _launch_s(self, run: Run) -> float:
        """What launching it costs the host: the median over single calls, few at a time, so that none of them waits.

        200 of them, fewer where they are slow: what is slow on the device is not held up by the host.
        """
        times: list[float] = []
        began = self._gpu.now()
        with collector_at_rest(), self._gpu.stream():
            while not times or (len(times) < _LAUNCHES and self._gpu.now() - began < _LAUNCH_S):
                self._gpu.synchronize()
                for i in range(_BATCH):
                    start = self._gpu.now()
                    run(i)
                    times.append(self._gpu.now() - start)
            self._gpu.synchronize()
        return median(times)


def _rounded(calls: int) -> int:
    """A few more calls, one of four sizes between powers of two: a graph is not captured again for one call more."""
    step = 1 << max(0, calls.bit_length() - 3)
    return min(_MOST_CALLS, -(-calls // step) * step)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


# --- rough times ------------------------------------------------------------------------------------------------


def rough_times(
    gpu: Gpu,
    call: Callable[[], object],
    chill: Callable[[], object],
    worth_s: float | None = None,
    latency: Latency = "graph",
) -> tuple[float, ...]:
    """Seconds a call, five times (slow ones twice), each after ``chill`` emptied the L2, launching hidden by a pause.

    One that is not worth it even warm gives the one time that showed it. The very first call, which sets things up,
    does not count, unless it takes so long that setting things up cannot be why. latency: with ``eager`` a call takes
    no less than launching it. Raises what the calls did wrong.

    On the current stream, the default one as a rule: what launches there whatever the current one is shows its time,
    and its fault in a race alone. What launches anywhere else gives its time until the device was done.
    """
    with collector_at_rest():
        gpu.synchronize()
        first, _ = _alone(gpu, call)
        if worth_s is not None and first > 4.0 * worth_s + _SETTING_UP_S:
            return (first,)
        warm, host_s = _alone(gpu, call)
        if warm > _SLOW_S or (worth_s is not None and warm > 2.0 * worth_s + _STALL_S):
            return (warm,)
        bounds, launches = [], []
        count = _COLD_CALLS if warm < _COLD_SLOW_S else _COLD_SLOW_CALLS
        gpu.sleep(_HEAD_S + _SPARE * count * host_s)
        for _ in range(count):
            chill()
            start, end = gpu.event(), gpu.event()
            start.record()
            began = gpu.now()
            call()
            launches.append(gpu.now() - began)
            end.record()
            bounds.append((start, end))
        gpu.synchronize()
    least = median(launches) if latency == "eager" else 0.0
    times = [start.elapsed_time(end) * 1e-3 for start, end in bounds]
    if min(times) < _LEAST_S:
        return (warm,)
    return tuple(max(least, seconds) for seconds in times)


def _alone(gpu: Gpu, call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call until it was done, and until it was launched."""
    began = gpu.now()
    call()
    launched = gpu.now() - began
    gpu.synchronize()
    return gpu.now() - began, launched


# --- torch.cuda -------------------------------------------------------------------------------------------------


class TorchGpu:
    """torch.cuda as a ``Gpu``. Its graphs share a pool of memory, which goes with it."""

    def __init__(self, device: torch.device) -> None:
        self._index = _index(device)
        self._stream = _stream(self._index)
        self._new_pool()
        self._numbers = torch.arange(256, dtype=torch.uint8, device=f"cuda:{self._index}").unbind()
        self._reached = torch.zeros((), dtype=torch.uint8, pin_memory=True)

    def now(self) -> float:
        return time.perf_counter()

    def rest(self) -> None:
        time.sleep(20e-6)

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def sleep(self, seconds: float) -> None:
        cuda_sleep(round(seconds * _CYCLES_S))

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # a pool that its graphs have let go of cannot be captured into again
            self._new_pool()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            work()
        except BaseException:  # Ctrl-C too must not leave the stream capturing
            with suppress(Exception):  # ending a broken capture may fail as well; what broke it is what counts
                self._end(graph)
            raise
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*CUDA Graph is empty")
                self._end(graph)
        except Warning:
            raise EmptyGraph("it launches nothing on the current stream") from None
        self._graphs.add(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. Where it broke off, torch leaves the allocator recording to the pool for it: not here."""
        try:
            graph.capture_end()
        except Warning:
            raise
        except Exception:  # whatever CUDA or the allocator make of it
            with suppress(Exception):  # it may have got as far as that itself
                end_allocate_to_pool(self._index, self._pool)
                release_pool(self._index, self._pool)
            self._new_pool()
            raise

    def _new_pool(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # those captured into it

    def mark(self, number: int) -> None:
        self._reached.copy_(self._numbers[number], non_blocking=True)

    def reached(self) -> int:
        return int(self._reached)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    """The one stream of this process for timing: libraries keep a workspace for each stream they meet."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def warm_up(device: torch.device) -> None:
    """Make the context, and load what every problem needs. Takes a second or so in a new process."""
    a = torch.ones(16, 16, dtype=torch.float64, device=device)
    (a @ a).sum().item()
    torch.cuda.synchronize(device)


def limit_device_memory(device: torch.device, allowance: int) -> None:
    """Let torch allocate ``allowance`` bytes of device memory more than it has now; 0 changes nothing.

    Beyond it allocations raise torch.OutOfMemoryError, which costs a candidate.
    """
    if allowance > 0:
        total = torch.cuda.get_device_properties(device).total_memory
        share = (torch.cuda.memory_allocated(device) + allowance) / max(total, 1)
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), _index(device))


def context_fault(device: torch.device) -> str:
    """Why this process can do nothing more on the device, in words; empty while it can, or never used it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return _first_line(error)
    return ""
