"""Timing of a problem's candidates: the cold screening time of each, and the preparation of a race on rotated
operands."""

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
from ..verify.inputs import CPU, Inputs, allocate, operand_bytes, operand_set_count, timing_sets
from ..verify.recheck import RacedKernel
from .clock import Clock, CpuClock, Latency
from .cuda_clock import CudaClock, TorchGpu
from .machine import Machine
from .outcome import LeaderUpdate, Placement, Raced
from .plausible import least_s
from .race import Entrant, RaceSetup, race
from .surrounding_work import CallSite, cpu_surroundings, gpu_surroundings
from .surroundings import Surrounding

BASELINE_BACKEND = "aten"

_DEFAULT_LLC = 32 << 20
_SHORT_S = 100e-6  # below this, one call is too short for the clock, and its operands are too small to be evicted
_BATCH_S = 300e-6
_SLOW_S = 50e-3
_STALL_S = 20e-3  # seconds that a busy machine may add to one call
_SCREENING_TIMINGS = 3  # timings per candidate
_MUCH_FASTER = 0.6
_SETTING_UP_S = 0.2  # seconds that a first call may need for compiling, or for memory of its own

# Worker memory may reach 4x the operands + 500 MB. torch and the interpreter take some 200 MB of it, and the temporary
# allocations of packing and calls are not all known beforehand, so that a race keeps half an operand set in reserve.
# While candidates are tried, the generated B, a packed one and the memory for flushing the cache take their part too.
_OPERAND_SHARE = 3.5
_FIXED_BYTES = 176 << 20
_GPU_BYTES = 2 << 30  # replaces _FIXED_BYTES on a GPU, whose memory is plentiful
_LARGE_BYTES = 64 << 20
# Up to this size of the weight there is memory for another copy, which SpeedReference's kernel reads.
PACED_BYTES = _LARGE_BYTES
_SCRATCH_SHARE = 2
_SCRATCH_BYTES = 150 << 20

_PAUSE_S = 10e-6
_FLUSH_SHARE = 2.0  # multiple of the last-level cache: random replacement keeps some lines longer than its size
_MAX_FLUSH_BYTES = 128 << 20
_COLD_SHARE = 3.0  # operand sets that together take this multiple of the cache evict one another
_COLD_MIN_SHARE = 1 / 128  # operands of a smaller share of the cache are timed in long batches, cached or not


def packs_each_call(kernel: Kernel, problem: Problem) -> bool:
    """Whether every call packs the weight. Packing time is never hidden for an operand that is not constant."""
    return kernel.packing is not None and not problem.b.constant


def empty_output(problem: Problem, device: torch.device = CPU) -> Tensor:
    """Return an uninitialised output in the Problem's layout: [M, N], or [batch, M, N] for bmm."""
    shape = problem.out_shape
    return allocate(shape, problem.out, problem.out_dtype, device=device)


def on_gpu(target: Target) -> bool:
    """Whether a Target's kernels run on a GPU."""
    return target.device != "cpu"


class SpeedReference:
    """The machine's present speed relative to the beginning, measured by timing one reference kernel beside each
    candidate.

    Candidates are tried one after the other, and where others compute on the same machine its speed changes by a tenth
    from one second to the next. The reference kernel is the first that worked and is none of ATen's (some of which are
    slow beyond reason), or a later one that is much faster.
    """

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None
        self._calls = 1  # calls that are timed together
        self._first_s = 0.0  # seconds per call when the kernel was chosen, at the speed of the beginning
        self._times: deque[float] = deque(maxlen=2 * _SCREENING_TIMINGS)

    def now(self) -> float:
        """Return the time of a call over its time in the beginning, by the last few timings; 1.0 without any."""
        return min(self._times) / self._first_s if self._times else 1.0

    def look(self, flush: Callable[[], None]) -> None:
        """Time the reference kernel once, after ``flush`` (as a batch of calls when one is too short)."""
        if self._call is not None:
            flush()
            self._times.append(_timed(self._call, self._calls))

    def warm_up(self) -> None:
        """Call the reference kernel as often as a candidate is called before it is timed.

        The flush does not empty the cache everywhere (some hosts have 480 MB of it). On such a host the kernel's weight
        would be in the cache when the kernel was chosen and not beside later candidates, and these would look up to
        five times as fast as they are.
        """
        if self._call is not None:
            for _ in range(_SCREENING_TIMINGS):
                self._call()

    def offer(self, call: Callable[[], None], seconds: float) -> None:
        """Consider a kernel that works as the reference. seconds: its least time, at the speed of the beginning."""
        if self._call is None or seconds < _MUCH_FASTER * self._first_s:
            self._call, self._first_s, self._calls = call, seconds, _batch(seconds)
            self._times.clear()


def screening_times(
    call: Callable[[], None],
    flush: Callable[[], None],
    worth_s: float | None = None,
    pace: SpeedReference | None = None,
) -> tuple[float, ...]:
    """Return the screening times of a call: three times in seconds, each after ``flush`` emptied the cache, scaled to
    the machine's speed at the beginning of ``pace``.

    Calls too short to be timed alone are timed in batches, on operands that stay in the cache. Slow calls are timed
    twice (their operands are large, or their time is not the memory's). A call that is slower than ``worth_s`` even
    when warm returns the one time that showed it. The very first call, which sets things up, does not count, unless it
    takes so long that setting things up cannot be why.
    """
    first_s = _timed(call, 1)
    if worth_s is not None and first_s > 4.0 * worth_s + _SETTING_UP_S:
        return (first_s,)
    warm_s = _timed(call, 1)
    if worth_s is not None and warm_s > 2.0 * worth_s + _STALL_S:
        return (warm_s,)
    if warm_s > _SLOW_S:
        return (warm_s, _timed(call, 1))
    warm_s = min(warm_s, _timed(call, 1))
    calls, times, pace = _batch(warm_s), [], pace or SpeedReference()
    flush_cache = flush if calls == 1 else lambda: None
    pace.warm_up()
    for _ in range(_SCREENING_TIMINGS):
        pace.look(flush_cache)
        flush_cache()
        times.append(_timed(call, calls))
    return tuple(seconds / pace.now() for seconds in times)


def _batch(seconds: float) -> int:
    """Return the number of calls that are timed together: one, unless a call is too short for that."""
    return math.ceil(_BATCH_S / max(seconds, 1e-7)) if seconds < _SHORT_S else 1


def _timed(call: Callable[[], None], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def scratch_allowance(problem: Problem) -> int:
    """Return the bytes of scratch that a candidate may need besides its operands, unless it is the only candidate."""
    return _SCRATCH_SHARE * operand_bytes(problem) + _SCRATCH_BYTES


class Flush:
    """A flush of the last-level cache, by reading twice as much memory; it does nothing for operands of thrice the
    cache.

    On a GPU the read is enqueued on the current stream. (Writing would leave dirty lines, which have to be written back
    at the cost of the next call.)
    """

    def __init__(self, problem: Problem, target: Target) -> None:
        size = last_level_cache(target)
        is_needed = operand_bytes(problem) < _COLD_SHARE * size
        bytes_ = int(_FLUSH_SHARE * size) if on_gpu(target) else min(int(_FLUSH_SHARE * size), _MAX_FLUSH_BYTES)
        device = target.torch_device
        self._memory = torch.ones(bytes_ // 4, dtype=torch.int32, device=device) if is_needed else None

    def __call__(self) -> None:
        if self._memory is not None:
            self._memory.max()


def last_level_cache(target: Target) -> int:
    """Return the bytes of the target's last-level cache, a GPU's L2 (32 MiB where it is unknown)."""
    caches = target.caches[2:] if on_gpu(target) else target.caches
    return next((size for size in reversed(caches) if size), _DEFAULT_LLC)


class RaceOperands:
    """Loaded kernels with rotated operand sets in every layout that the kernels need, ready to race.

    Kernels of one layout use its copies in turn, so that each call has the copy that was used least recently; all
    layouts have equally many copies. The cache is emptied before each timing, unless the copies fill it: otherwise a
    layout that many kernels share would be warmer than others. marker_fd: a file of at least one byte, in which the
    number of the running kernel is noted (1 + its index), so that the parent can tell which kernel the process died in.
    hot: one operand set serves every call. conditions: what Samples state besides the race's own conditions. latency:
    how a GPU's calls are timed (see ``cuda_clock.CudaClock``). machine: the source of load and clock since its last
    reading.

    On a GPU operands are never moved: graphs hold their addresses, and its memory is spread over all channels by a hash
    of the address, so that no address is better than another.
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
        self._operands: dict[str, _OperandPool] = {}
        self._outputs: list[Tensor] = []
        self._cuda: TorchGpu | None = None
        self._clock: Clock = CpuClock()
        self._move_s = 0.0  # seconds for packing all copies
        self.excluded: dict[str, str] = {}
        self._entrants = self._prepare_entrants(kernels, target, seed)

    def _prepare_entrants(self, kernels: Mapping[str, Kernel], target: Target, seed: int) -> list[Entrant]:
        """Return the entrants in the given order, as long as there is memory for their layouts and their scratch.

        Every layout has equally many copies: with fewer of them calls come back to a copy sooner, and have more of it
        in the cache.
        """
        (first,) = timing_sets(self._problem, 1, seed, self._device)
        started = time.perf_counter()
        packed, scratch = self._pack_first(kernels, first)
        set_s = time.perf_counter() - started
        sizes = [copy.nbytes for _, copy in packed.values()]
        set_bytes = operand_bytes(self._problem) + sum(sizes)
        wanted_copies = max(_copies(self._problem, target, size) for size in (self._problem.weight_bytes, *sizes))
        count = 1 if self._hot else max(1, min(wanted_copies, (self._room() - scratch) // max(set_bytes, 1)))
        self._clock = self._make_clock(target, count)
        self._move_s = count * set_s
        sets = [first, *timing_sets(self._problem, count - 1, seed + 1, self._device)]
        # On a GPU two outputs in turn: a model soon reads its results, and writes to the same memory again, all in the
        # L2.
        distinct_outputs = [empty_output(self._problem, self._device) for _ in (sets[:2] if self._gpu else sets)]
        self._outputs = distinct_outputs
        outputs = [distinct_outputs[index % len(distinct_outputs)] for index in range(count)]
        self._operands[""] = _OperandPool([(item, item.b, out) for item, out in zip(sets, outputs, strict=True)], None)
        for layout, (packer, copy) in packed.items():
            copies = [copy, *(packer.pack(item.b) for item in sets[1:])]
            self._operands[layout] = _OperandPool(list(zip(sets, copies, outputs, strict=True)), packer)
        return [
            Entrant(
                name,
                self._runner(kernel, self._operands[self._layout(kernel)], index),
                kernel.candidate.backend == BASELINE_BACKEND,
                kernel.packing or "",
            )
            for index, (name, kernel) in enumerate(kernels.items())
            if name not in self.excluded
        ]

    def _make_clock(self, target: Target, count: int) -> Clock:
        """Return the clock for ``count`` operand sets; it empties the cache where the sets do not fill it.

        On a GPU it always does: every graph begins with the same set, whatever ran before.
        """
        set_bytes, cache = operand_bytes(self._problem), last_level_cache(target)
        if self._gpu:
            chill = None if self._hot else Flush(self._problem, target)
            self._cuda = TorchGpu(self._device)
            return CudaClock(self._cuda, chill=chill, latency=self._latency, marker=self._marker)
        if not self._hot and set_bytes >= _COLD_MIN_SHARE * cache and set_bytes * count < _COLD_SHARE * cache:
            return CpuClock(Flush(self._problem, target), count)
        return CpuClock()

    def _pack_first(
        self, kernels: Mapping[str, Kernel], item: Inputs
    ) -> tuple[dict[str, tuple[Kernel, PackedWeight]], int]:
        """Return one copy of B in each layout that there is memory for, with a kernel that packs it, and the bytes of
        scratch needed."""
        available = self._room() - operand_bytes(self._problem)
        packed: dict[str, tuple[Kernel, PackedWeight]] = {}
        admitted = scratch = 0  # scratch: the largest need of one kernel; one kernel runs at a time
        for index, (name, kernel) in enumerate(kernels.items()):
            self._marker[0] = min(index + 1, 255)
            # ATen's best and its first rival always race, even where a scratch as large as the operands is needed.
            scratch_needed = max(scratch, kernel.workspace_bytes)
            remaining = available - scratch_needed if admitted > 1 else available
            if remaining < 0:
                self.excluded[name] = f"no memory for its {kernel.workspace_bytes >> 20} MB of scratch in the race"
                continue
            layout = self._layout(kernel)
            if layout and layout not in packed:
                # Packed weights are as large as raw ones or larger: a copy that cannot fit is not even tried.
                copy = kernel.pack(item.b) if self._problem.weight_bytes <= remaining else None
                if copy is None or copy.nbytes > remaining:
                    self.excluded[name] = f"no memory for operands packed as {layout} beside those of faster candidates"
                    copy = None  # freed before the next one is packed
                    continue
                packed[layout] = (kernel, copy)
                available -= copy.nbytes
            admitted, scratch = admitted + 1, scratch_needed
        return packed, scratch

    def _room(self) -> int:
        return int(_OPERAND_SHARE * operand_bytes(self._problem)) + (_GPU_BYTES if self._gpu else _FIXED_BYTES)

    def _layout(self, kernel: Kernel) -> str:
        return "" if packs_each_call(kernel, self._problem) else (kernel.packing or "")

    def _runner(self, kernel: Kernel, operands: _OperandPool, index: int) -> Callable[[int], None]:
        marker, call, number = self._marker, self._call(kernel), min(index + 1, 255)
        next_operands = operands.at if self._gpu else operands.next

        def run(i: int) -> None:
            marker[0] = number
            inputs, b, out = next_operands(i)
            call(inputs.a, b, inputs.aux, out)

        return run

    def _call(self, kernel: Kernel) -> Callable[..., None]:
        """Return a function for one call on prepared operands, packing included where each call packs."""
        return _pack_and_run(kernel) if packs_each_call(kernel, self._problem) else kernel.run

    def race(
        self,
        budget_s: float,
        seed: int,
        progress: Callable[[LeaderUpdate], None],
        earlier_s: Mapping[str, float] = {},
    ) -> Raced:
        """Race for ``budget_s`` seconds and return the result; see ``race.race``. earlier_s: seconds per call before
        the race, by id."""
        if not self._entrants:
            return Raced("none_valid", None, "there was nothing to race", self._excluded_placements(), {})

        def report(best: BestSoFar) -> None:
            if math.isfinite(best.ratio):
                progress(LeaderUpdate(best.candidate_id, best.median_s, best.ratio))

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
        placements = tuple(
            Placement(row.id, row.stage, row.reason, row.sample, row.fault) for row in result.standings.values()
        )
        return Raced(
            result.outcome, result.leader, result.stopped, placements + self._excluded_placements(),
            result.alternatives, result.layouts,
        )  # fmt: skip

    def _surroundings(self) -> list[Surrounding]:
        """Return the surroundings in which a winner must be no slower.

        None for a GPU's eager launches: they are timed by the host's clock, which does not see the kernels around them.
        """
        if self._cuda is None:
            return cpu_surroundings(self._call_site, self._outputs)
        if self._latency != "graph":
            return []
        pause = functools.partial(self._cuda.sleep, _PAUSE_S)
        return gpu_surroundings(
            self._call_site, self._outputs, pause, lambda name: self._kernels[name].can_overlap
        )  # fmt: skip

    def _call_site(self, name: str | None) -> CallSite:
        """Return how a kernel is called in the race; for None, the operand sets of raw weights and no call."""
        kernel = None if name is None else self._kernels[name]
        pool = self._operands["" if kernel is None else self._layout(kernel)]
        return CallSite(pool.at if self._gpu else pool.next, None if kernel is None else self._call(kernel))

    def raced_kernel(self, name: str) -> RacedKernel:
        """Return a raced kernel with a function that calls it as the race did, for ``recheck``."""
        (entrant,) = (entrant for entrant in self._entrants if entrant.id == name)
        kernel = self._kernels[name]
        pool = self._operands[self._layout(kernel)]

        def call(index: int) -> list[int]:
            pool.set_next(index)
            last_set: dict[int, int] = {}  # by output address; several sets may share an output
            for i in self._clock.call_again(entrant.run, index):
                last_set[pool.sets[i % len(pool.sets)][2].data_ptr()] = i % len(pool.sets)
            return list(last_set.values())

        return RacedKernel(kernel, call, pool.sets)

    def _move(self) -> None:
        """Move every B to other memory; see ``elimination.RaceSetup``."""
        for pool in self._operands.values():
            pool.move()

    def _excluded_placements(self) -> tuple[Placement, ...]:
        return tuple(Placement(name, "screened", reason, None) for name, reason in self.excluded.items())


class _OperandPool:
    """Operand sets in one layout, used in turn. packer: a kernel that packs B into this layout; None for the raw B."""

    def __init__(self, sets: list[tuple[Inputs, Any, Tensor]], packer: Kernel | None) -> None:
        self._sets, self._packer, self._next = sets, packer, 0

    @property
    def sets(self) -> list[tuple[Inputs, Any, Tensor]]:
        """All operand sets."""
        return self._sets

    def set_next(self, index: int) -> None:
        """Make ``next`` return the set with this index."""
        self._next = index - 1

    def next(self, _: int) -> tuple[Inputs, Any, Tensor]:
        """Return the next set in turn, whichever kernel asks."""
        self._next = (self._next + 1) % len(self._sets)
        return self._sets[self._next]

    def at(self, i: int) -> tuple[Inputs, Any, Tensor]:
        """Return the set of call ``i``."""
        return self._sets[i % len(self._sets)]

    def move(self) -> None:
        """Allocate new memory for each B before the old is freed (for a large B: after it, for lack of memory)."""
        for index, (inputs, b, out) in enumerate(self._sets):
            if self._packer is not None:
                if b.nbytes > _LARGE_BYTES:
                    self._sets[index], b = (inputs, None, out), None
                self._sets[index] = (inputs, self._packer.pack(inputs.b), out)
            elif _bytes(b) <= _LARGE_BYTES and (dense := _dense_copy(b)) is not None:
                self._sets[index] = (replace(inputs, b=dense), dense, out)


def _bytes(b: Tensor | QuantWeight) -> int:
    return (b.data if isinstance(b, QuantWeight) else b).nbytes


def _dense_copy(b: Tensor | QuantWeight) -> Tensor | QuantWeight | None:
    """Return a copy of B with the same strides; None where B has gaps, which a copy would close."""
    if isinstance(b, QuantWeight):
        data = _dense_copy(b.data)
        return replace(b, data=data) if isinstance(data, Tensor) else None
    copy = b.clone()
    return copy if copy.stride() == b.stride() else None


def _pack_and_run(kernel: Kernel) -> Callable[..., None]:
    return lambda a, b, aux, out: kernel.run(a, kernel.pack(b), aux, out)


def _copies(problem: Problem, target: Target, weight_bytes: int) -> int:
    """Return how many copies of an operand set together fill the last-level cache, as far as memory allows."""
    if on_gpu(target):
        return operand_set_count(problem, target)
    wanted_copies = 1 + last_level_cache(target) // max(weight_bytes, 1)
    return max(1, min(wanted_copies, operand_set_count(problem, target)))
