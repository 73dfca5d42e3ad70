"""Timing of candidates as a job does it: a rough cold time each, and the set-up of a race on rotated operands."""

from __future__ import annotations

import functools
import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Kernel
from ..core.events import BestSoFar
from ..core.problem import Problem
from ..core.target import Target
from ..core.weights import PackedWeight, QuantWeight
from ..verify.inputs import CPU, Inputs, allocate, operand_bytes, rotations, timing_sets
from ..verify.recheck import RacedKernel
from .around import CallSite, cpu_surroundings, gpu_surroundings
from .clock import Clock, CpuClock, Latency
from .cuda_clock import CudaClock, TorchGpu
from .machine import Machine
from .outcome import Leading, Placed, Raced
from .plausible import least_s
from .race import Entrant, RaceSetup, race
from .surroundings import Surrounding

BASELINE_BACKEND = "aten"

_DEFAULT_LLC = 32 << 20
_SHORT_S = 100e-6  # below this one call is too short for the clock, and its operands too small to be evicted
_BATCH_S = 300e-6
_SLOW_S = 50e-3
_STALL_S = 20e-3  # what a busy machine may add to one call
_LOOKS = 3  # rough times a candidate
_MUCH_FASTER = 0.6
_SETTING_UP_S = 0.2  # what a first call may need for compiling, or for memory of its own

# Worker memory may reach 4x the operands + 500 MB; torch and the interpreter take some 200 MB of it, and what packing
# and calls allocate on their way is not all known beforehand, so that a race keeps half an operand set in hand. While
# candidates are tried, the drawn B, a packed one and what flushes the cache take their part too.
_OPERAND_SHARE = 3.5
_FIXED_BYTES = 176 << 20
_GPU_BYTES = 2 << 30  # instead of it: a GPU's memory is plentiful
_LARGE_BYTES = 64 << 20
PACED_BYTES = _LARGE_BYTES  # a weight up to here has room for another copy, which a pace's kernel reads
_SCRATCH_SHARE = 2
_SCRATCH_BYTES = 150 << 20

_PAUSE_S = 10e-6
_FLUSH_SHARE = 2.0  # of the last-level cache: what replaces lines at random keeps some of them longer than its size
_MOST_FLUSHED = 128 << 20
_COLD_SHARE = 3.0  # operand sets that together take so much of the cache evict one another
_COLD_LEAST = 1 / 128  # operands of a smaller share of the cache are timed in long batches, wherever they are


def packs_each_call(kernel: Kernel, problem: Problem) -> bool:
    """Whether packing belongs to every call: it is never hidden for an operand that is not constant."""
    return kernel.packing is not None and not problem.b.constant


def empty_output(problem: Problem, device: torch.device = CPU) -> Tensor:
    """An output as the Problem lays it out: [M, N], or [batch, M, N] for bmm."""
    shape = (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (problem.m, problem.n)
    return allocate(shape, problem.out, problem.out_dtype, device=device)


def on_gpu(target: Target) -> bool:
    """Whether a Target's kernels run on a GPU."""
    return target.device != "cpu"


class Pace:
    """How fast the machine is now, against when this began: a kernel timed beside each candidate tells.

    Candidates are tried one after the other, and where others compute on the same machine its pace changes by a tenth
    from one second to the next. The one kernel of a pace is the first that worked and is none of ATen's (whose ways can
    be slow beyond reason), or one that is much faster.
    """

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None
        self._calls = 1  # that are timed together
        self._first_s = 0.0  # what one took when the kernel was chosen, at the pace of the beginning
        self._times: deque[float] = deque(maxlen=2 * _LOOKS)

    def now(self) -> float:
        """The time of a call over what it would have been in the beginning, as the last few looks tell."""
        return min(self._times) / self._first_s if self._times else 1.0

    def look(self, flush: Callable[[], None]) -> None:
        """Time the kernel once (one too short for that: a batch of calls), after ``flush``."""
        if self._call is not None:
            flush()
            self._times.append(_timed(self._call, self._calls))

    def warm_up(self) -> None:
        """Call the kernel as often as a candidate is called before it is timed.

        Where the flush does not empty the cache (some hosts have 480 MB of it), the kernel's weight would be there when
        it was chosen and not beside later candidates, and these would look up to five times as fast as they are.
        """
        if self._call is not None:
            for _ in range(_LOOKS):
                self._call()

    def offer(self, call: Callable[[], None], seconds: float) -> None:
        """A kernel that works, and the least of its times at the pace of the beginning."""
        if self._call is None or seconds < _MUCH_FASTER * self._first_s:
            self._call, self._first_s, self._calls = call, seconds, _batch(seconds)
            self._times.clear()


def rough_times(
    call: Callable[[], None], flush: Callable[[], None], worth_s: float | None = None, pace: Pace | None = None
) -> tuple[float, ...]:
    """Seconds a call, three times, with ``flush`` emptying the cache before each; at the ``pace`` of its beginning.

    Calls too short to be timed alone are timed in batches, on operands that stay in the cache. Slow ones are timed
    twice (their operands are large, or their time is not the memory's), and one that is not worth it even warm gives
    the one time that showed it. The very first call, which sets things up, does not count, unless it takes so long that
    setting things up cannot be why.
    """
    first = _timed(call, 1)
    if worth_s is not None and first > 4.0 * worth_s + _SETTING_UP_S:
        return (first,)
    warm = _timed(call, 1)
    if worth_s is not None and warm > 2.0 * worth_s + _STALL_S:
        return (warm,)
    if warm > _SLOW_S:
        return (warm, _timed(call, 1))
    warm = min(warm, _timed(call, 1))
    calls, times, pace = _batch(warm), [], pace or Pace()
    chill = flush if calls == 1 else lambda: None
    pace.warm_up()
    for _ in range(_LOOKS):
        pace.look(chill)
        chill()
        times.append(_timed(call, calls))
    return tuple(seconds / pace.now() for seconds in times)


def _batch(seconds: float) -> int:
    """Calls that are timed together: one, unless it is too short for that."""
    return math.ceil(_BATCH_S / max(seconds, 1e-7)) if seconds < _SHORT_S else 1


def _timed(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def scratch_allowance(problem: Problem) -> int:
    """Bytes a candidate may need besides its operands, unless there is no other."""
    return _SCRATCH_SHARE * operand_bytes(problem) + _SCRATCH_BYTES


class Flush:
    """Empties the last-level cache by reading twice as much memory; nothing to do for operands thrice the cache.

    On a GPU that is enqueued on the current stream. (Writing would leave lines behind that have to be written back
    first, at the cost of what comes next.)
    """

    def __init__(self, problem: Problem, target: Target) -> None:
        size = last_level_cache(target)
        needed = operand_bytes(problem) < _COLD_SHARE * size
        bytes_ = int(_FLUSH_SHARE * size) if on_gpu(target) else min(int(_FLUSH_SHARE * size), _MOST_FLUSHED)
        device = target.torch_device
        self._memory = torch.ones(bytes_ // 4, dtype=torch.int32, device=device) if needed else None

    def __call__(self) -> None:
        if self._memory is not None:
            self._memory.max()


def last_level_cache(target: Target) -> int:
    """Bytes of the target's last-level cache, a GPU's L2 (32 MiB where it does not say)."""
    caches = target.caches[2:] if on_gpu(target) else target.caches
    return next((size for size in reversed(caches) if size), _DEFAULT_LLC)


class Track:
    """Loaded kernels with rotated operand sets in each layout that they want, ready to race.

    Kernels of one layout take its copies in turn, so that each call finds a copy that was not used since all others
    were; all layouts have equally many. The cache is emptied before each timing, unless the copies see to that: a
    layout that many kernels share would be warmer than others. marker_fd: a file of at least one byte, in which the
    number of the running kernel is noted (1 + its place), for whoever wants to know which one the process died in.
    hot: one operand set serves every call. conditions: what Samples are to say besides the race's own. latency: how a
    GPU's calls are timed (see ``cuda.CudaClock``). machine: its load and clock since it was last asked.

    On a GPU operands stay where they are: graphs hold their addresses, and its memory is spread over all channels by
    a hash of the address, so that no place is better than another.
    """

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        problem: Problem,
        target: Target,
        seed: int,
        marker_fd: int | None,
        *,
        hot: bool = False,
        conditions: Mapping[str, str] = {},
        latency: Latency = "graph",
        machine: Machine | None = None,
    ) -> None:
        self._problem, self._hot, self._latency, self._machine = problem, hot, latency, machine
        self._target, self._kernels = target, dict(kernels)
        self._gpu, self._device = on_gpu(target), target.torch_device
        threads = {} if self._gpu else {"threads": str(target.threads)}
        self._conditions = {"operands": "hot" if hot else "cold", **threads, **conditions}
        self._marker = mmap.mmap(marker_fd, mmap.PAGESIZE) if marker_fd is not None else bytearray(1)
        self._operands: dict[str, _Stock] = {}
        self._outputs: list[Tensor] = []
        self._timed_gpu: TorchGpu | None = None
        self._clock: Clock = CpuClock()
        self._move_s = 0.0  # what packing all copies took
        self.left_out: dict[str, str] = {}
        self._entrants = self._line_up(kernels, target, seed)

    def _line_up(self, kernels: Mapping[str, Kernel], target: Target, seed: int) -> list[Entrant]:
        """Entrants in the given order, as long as there is memory for their layouts and their scratch.

        Every layout has as many copies as every other: with fewer of them calls come back to a copy sooner, and find
        more of it in the cache.
        """
        (first,) = timing_sets(self._problem, 1, seed, self._device)
        began = time.perf_counter()
        packed, scratch = self._pack_first(kernels, first)
        each_s = time.perf_counter() - began
        sizes = [copy.nbytes for _, copy in packed.values()]
        each = operand_bytes(self._problem) + sum(sizes)
        wanted = max(_copies(self._problem, target, size) for size in (self._problem.weight_bytes, *sizes))
        count = 1 if self._hot else max(1, min(wanted, (self._room() - scratch) // max(each, 1)))
        self._clock = self._make_clock(target, count)
        self._move_s = count * each_s
        sets = [first, *timing_sets(self._problem, count - 1, seed + 1, self._device)]
        # On a GPU two outputs in turn: a model soon reads what it writes, and writes there again, all in the L2.
        made = [empty_output(self._problem, self._device) for _ in (sets[:2] if self._gpu else sets)]
        self._outputs = made
        outputs = [made[place % len(made)] for place in range(count)]
        self._operands[""] = _Stock([(item, item.b, out) for item, out in zip(sets, outputs, strict=True)], None)
        for layout, (packer, copy) in packed.items():
            copies = [copy, *(packer.pack(item.b) for item in sets[1:])]
            self._operands[layout] = _Stock(list(zip(sets, copies, outputs, strict=True)), packer)
        return [
            Entrant(
                name,
                self._runner(kernel, self._operands[self._layout(kernel)], place),
                kernel.candidate.backend == BASELINE_BACKEND,
                kernel.packing or "",
            )
            for place, (name, kernel) in enumerate(kernels.items())
            if name not in self.left_out
        ]

    def _make_clock(self, target: Target, count: int) -> Clock:
        """The clock for ``count`` operand sets; it empties the cache where they do not see to it.

        On a GPU it always does: graphs begin with the same set each time, whatever ran before.
        """
        own, cache = operand_bytes(self._problem), last_level_cache(target)
        if self._gpu:
            chill = None if self._hot else Flush(self._problem, target)
            self._timed_gpu = TorchGpu(self._device)
            return CudaClock(self._timed_gpu, chill=chill, latency=self._latency, marker=self._marker)
        if not self._hot and own >= _COLD_LEAST * cache and own * count < _COLD_SHARE * cache:
            return CpuClock(Flush(self._problem, target), count)
        return CpuClock()

    def _pack_first(
        self, kernels: Mapping[str, Kernel], item: Inputs
    ) -> tuple[dict[str, tuple[Kernel, PackedWeight]], int]:
        """One copy of B in each layout there is room for, with who packs it so; and the bytes of scratch needed."""
        room = self._room() - operand_bytes(self._problem)
        packed: dict[str, tuple[Kernel, PackedWeight]] = {}
        admitted = scratch = 0  # scratch: the most that one of them needs; one kernel runs at a time
        for place, (name, kernel) in enumerate(kernels.items()):
            self._marker[0] = min(place + 1, 255)
            # ATen's best and its first rival meet in any case, even where a scratch as large as the operands is needed.
            most = max(scratch, kernel.workspace_bytes)
            left = room - most if admitted > 1 else room
            if left < 0:
                self.left_out[name] = f"no memory for its {kernel.workspace_bytes >> 20} MB of scratch in the race"
                continue
            layout = self._layout(kernel)
            if layout and layout not in packed:
                # Packed weights are as large as raw ones or larger: what cannot fit is not even tried.
                copy = kernel.pack(item.b) if self._problem.weight_bytes <= left else None
                if copy is None or copy.nbytes > left:
                    self.left_out[name] = f"no memory for operands packed as {layout} beside those of faster candidates"
                    copy = None  # before the next one is packed
                    continue
                packed[layout] = (kernel, copy)
                room -= copy.nbytes
            admitted, scratch = admitted + 1, most
        return packed, scratch

    def _room(self) -> int:
        return int(_OPERAND_SHARE * operand_bytes(self._problem)) + (_GPU_BYTES if self._gpu else _FIXED_BYTES)

    def _layout(self, kernel: Kernel) -> str:
        return "" if packs_each_call(kernel, self._problem) else (kernel.packing or "")

    def _runner(self, kernel: Kernel, operands: _Stock, place: int) -> Callable[[int], None]:
        marker, call, number = self._marker, self._call(kernel), min(place + 1, 255)
        take = operands.at if self._gpu else operands.next

        def run(i: int) -> None:
            marker[0] = number
            inputs, b, out = take(i)
            call(inputs.a, b, inputs.aux, out)

        return run

    def _call(self, kernel: Kernel) -> Callable[..., None]:
        """One call on operands as they are handed out, packing included where each call packs."""
        return _packing_run(kernel) if packs_each_call(kernel, self._problem) else kernel.run

    def race(
        self,
        budget_s: float,
        seed: int,
        progress: Callable[[Leading], None],
        earlier_s: Mapping[str, float] = {},
    ) -> Raced:
        """Race for ``budget_s`` seconds; see ``race.race``. earlier_s: seconds per call before the race, by id."""
        if not self._entrants:
            return Raced("none_valid", None, "there was nothing to race", self._left_out(), {})

        def report(best: BestSoFar) -> None:
            if math.isfinite(best.ratio):
                progress(Leading(best.candidate_id, best.median_s, best.ratio))

        setup = RaceSetup(
            machine=self._machine,
            conditions=self._conditions,
            move=None if self._gpu or self._hot or not self._problem.b.constant else self._move,
            move_s=self._move_s,
            surroundings=self._surroundings(),
            least_s=least_s(self._problem, self._target),
            earlier_s=earlier_s,
        )
        result = race(self._entrants, self._clock, budget_s, seed=seed, progress=report, setup=setup)
        placed = tuple(
            Placed(row.id, row.stage, row.reason, row.sample, row.fault) for row in result.standings.values()
        )
        return Raced(
            result.outcome, result.leader, result.stopped, placed + self._left_out(), result.alternatives,
            result.layouts,
        )  # fmt: skip

    def _surroundings(self) -> list[Surrounding]:
        """Where a winner must hold. A GPU's eager launches are timed by the host's clock, to which other kernels around
        them mean nothing."""
        if self._timed_gpu is None:
            return cpu_surroundings(self._call_site, self._outputs)
        if self._latency != "graph":
            return []
        pause = functools.partial(self._timed_gpu.sleep, _PAUSE_S)
        return gpu_surroundings(
            self._call_site, self._outputs, pause, lambda name: self._kernels[name].can_overlap
        )  # fmt: skip

    def _call_site(self, name: str | None) -> CallSite:
        """How a kernel is called in the race; of None: the operand sets of raw weights, and no call."""
        kernel = None if name is None else self._kernels[name]
        stock = self._operands["" if kernel is None else self._layout(kernel)]
        return CallSite(stock.at if self._gpu else stock.next, None if kernel is None else self._call(kernel))

    def raced_kernel(self, name: str) -> RacedKernel:
        """A raced kernel with the path that it was raced along, for ``recheck``."""
        (entrant,) = (entrant for entrant in self._entrants if entrant.id == name)
        kernel = self._kernels[name]
        stock = self._operands[self._layout(kernel)]

        def call(place: int) -> list[int]:
            stock.turn_to(place)
            last: dict[int, int] = {}  # by output, which several sets may share
            for i in self._clock.call_again(entrant.run, place):
                last[stock.sets[i % len(stock.sets)][2].data_ptr()] = i % len(stock.sets)
            return list(last.values())

        return RacedKernel(kernel, call, stock.sets)

    def _move(self) -> None:
        """Put every B somewhere else in memory; see ``race.race``."""
        for stock in self._operands.values():
            stock.move()

    def _left_out(self) -> tuple[Placed, ...]:
        return tuple(Placed(name, "screened", reason, None) for name, reason in self.left_out.items())


class _Stock:
    """Operand sets in one layout, handed out in turn. packer: a kernel that packs B this way; None for B as it is."""

    def __init__(self, sets: list[tuple[Inputs, Any, Tensor]], packer: Kernel | None) -> None:
        self._sets, self._packer, self._next = sets, packer, 0

    @property
    def sets(self) -> list[tuple[Inputs, Any, Tensor]]:
        """All of them."""
        return self._sets

    def turn_to(self, place: int) -> None:
        """Have ``next`` hand out the set at ``place``."""
        self._next = place - 1

    def next(self, _: int) -> tuple[Inputs, Any, Tensor]:
        """The set whose turn it is, whoever asks."""
        self._next = (self._next + 1) % len(self._sets)
        return self._sets[self._next]

    def at(self, i: int) -> tuple[Inputs, Any, Tensor]:
        """The set of call ``i``."""
        return self._sets[i % len(self._sets)]

    def move(self) -> None:
        """New memory for each B, taken before the old is let go (large ones: after it, for want of room)."""
        for place, (inputs, b, out) in enumerate(self._sets):
            if self._packer is not None:
                if b.nbytes > _LARGE_BYTES:
                    self._sets[place], b = (inputs, None, out), None
                self._sets[place] = (inputs, self._packer.pack(inputs.b), out)
            elif _bytes(b) <= _LARGE_BYTES and (dense := _dense_copy(b)) is not None:
                self._sets[place] = (replace(inputs, b=dense), dense, out)


def _bytes(b: Tensor | QuantWeight) -> int:
    return (b.data if isinstance(b, QuantWeight) else b).nbytes


def _dense_copy(b: Tensor | QuantWeight) -> Tensor | QuantWeight | None:
    """B in the same layout elsewhere; None where it has gaps, which a copy would close."""
    if isinstance(b, QuantWeight):
        data = _dense_copy(b.data)
        return replace(b, data=data) if isinstance(data, Tensor) else None
    copy = b.clone()
    return copy if copy.stride() == b.stride() else None


def _packing_run(kernel: Kernel) -> Callable[..., None]:
    return lambda a, b, aux, out: kernel.run(a, kernel.pack(b), aux, out)


def _copies(problem: Problem, target: Target, weight_bytes: int) -> int:
    """Copies of an operand set that together fill the last-level cache, as far as memory allows."""
    if on_gpu(target):
        return rotations(problem, target)
    wanted = 1 + last_level_cache(target) // max(weight_bytes, 1)
    return max(1, min(wanted, rotations(problem, target)))
