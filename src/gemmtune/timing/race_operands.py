"""The operands of a race: loaded kernels, and rotated operand sets in every layout that the kernels need."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Kernel
from ..core.decision import Evidence
from ..core.devices import CPU, is_host
from ..core.events import BestSoFar
from ..core.problem import Problem
from ..core.weights import PackedWeight, QuantWeight
from ..verify.inputs import Inputs, allocate, operand_bytes, timing_sets
from ..verify.recheck import RacedKernel
from ..verify.row_stack import Part, part_of
from .clock import Clock, CpuClock
from .devices import DeviceTiming, OperandSets
from .eviction import Weight
from .outcome import LeaderUpdate, RaceResult
from .race import Entrant, RaceSetup, race
from .surrounding_work import CallSite

BASELINE_BACKEND = "aten"


# Worker memory may reach 4x the operands + 500 MB. torch and the interpreter take some 200 MB of it, and the temporary
# allocations of packing and calls are not all known beforehand, so that a race keeps half an operand set in reserve.
# While candidates are tried, the generated B, a packed one and the memory for flushing the cache take their part too.
_OPERAND_SHARE = 3.5
_LARGE_BYTES = 64 << 20
_SCRATCH_SHARE = 2
_SCRATCH_BYTES = 150 << 20
# Fewer than any CPU reads of operands that are not in its cache. With a weight of 2.4 MB, int8 768x3072, ATen's kernel
# took 44 us before a race, on operands in the cache, and 251 us in it (one thread of an EPYC).
_COLD_BYTES_PER_S = 4e9


def packs_each_call(kernel: Kernel, problem: Problem) -> bool:
    """Whether every call packs the weight. Packing time is never hidden for an operand that is not constant."""
    return kernel.packing is not None and not problem.b.constant


def empty_output(problem: Problem, device: torch.device = CPU) -> Tensor:
    """Return an uninitialised output in the Problem's layout: [M, N], or [batch, M, N] for bmm."""
    shape = problem.out_shape
    return allocate(shape, problem.out, problem.out_dtype, device=device)


def scratch_allowance(problem: Problem) -> int:
    """Return the bytes of scratch that a candidate may need besides its operands, unless it is the only candidate."""
    return _SCRATCH_SHARE * operand_bytes(problem) + _SCRATCH_BYTES


class RaceOperands:
    """Loaded kernels with rotated operand sets in every layout that the kernels need, ready to race.

    Kernels of one layout use its copies in turn, so that each call has the copy that was used least recently; all
    layouts have equally many copies. Weights are not in the cache when a timing begins (``eviction.py``; other
    devices' caches are emptied), unless the copies fill it: otherwise a layout that many kernels share would be warmer
    than others. marker_fd: a file of at least one byte, in which the number of the running kernel is noted, so that the
    parent can tell which kernel the process died in. numbers: these numbers by id; None: 1 + the kernel's index.
    hot: one operand set serves every call. conditions: what Samples state besides the race's own conditions. timing:
    of the kernels' device.
    """

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        problem: Problem,
        timing: DeviceTiming,
        seed: int,
        marker_fd: int | None,
        *,
        hot: bool = False,
        conditions: Mapping[str, str] = {},
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        self._numbers = numbers or {name: index + 1 for index, name in enumerate(kernels)}
        self._problem, self._hot, self._timing, self._kernels = problem, hot, timing, dict(kernels)
        self._conditions = {"operands": "hot" if hot else "cold", **timing.conditions, **conditions}
        self._marker = mmap.mmap(marker_fd, mmap.PAGESIZE) if marker_fd is not None else bytearray(1)
        self._sets = 1  # the number of operand sets
        self._operands: dict[str, _OperandPool] = {}
        self._timed: Mapping[str, _OperandPool] = {}  # those of the entrants that were made last
        self._outputs: list[Tensor] = []
        self._clock: Clock = CpuClock()
        self._move_s = 0.0  # seconds for packing all copies
        self.excluded: dict[str, str] = {}
        self._entrants = self._prepare_entrants(kernels, seed)

    def _prepare_entrants(self, kernels: Mapping[str, Kernel], seed: int) -> list[Entrant]:
        """Return the entrants in the given order, as long as there is memory for their layouts and their scratch.

        Every layout has equally many copies: with fewer of them calls come back to a copy sooner, and have more of it
        in the cache.
        """
        (first,) = timing_sets(self._problem, 1, seed, self._timing.device)
        started = time.perf_counter()
        packed, scratch = self._pack_first(kernels, first)
        set_s = time.perf_counter() - started
        sizes = [copy.nbytes for _, copy in packed.values()]
        set_bytes = operand_bytes(self._problem) + sum(sizes)
        wanted_copies = max(self._timing.copies(self._problem, size) for size in (self._problem.weight_bytes, *sizes))
        count = 1 if self._hot else max(1, min(wanted_copies, (self._room() - scratch) // max(set_bytes, 1)))
        self._sets = count
        self._clock = self.new_clock()
        self._move_s = count * set_s
        sets = [first, *timing_sets(self._problem, count - 1, seed + 1, self._timing.device)]
        buffered_sets = sets[: self._timing.output_buffers]
        distinct_outputs = [empty_output(self._problem, self._timing.device) for _ in buffered_sets]
        self._outputs = distinct_outputs
        outputs = [distinct_outputs[index % len(distinct_outputs)] for index in range(count)]
        self._operands[""] = _OperandPool([(item, item.b, out) for item, out in zip(sets, outputs, strict=True)], None)
        for layout, (packer, copy) in packed.items():
            copies = [copy, *(packer.pack(item.b) for item in sets[1:])]
            self._operands[layout] = _OperandPool(list(zip(sets, copies, outputs, strict=True)), packer)
        return self._entrants_on(self._operands)

    def new_clock(self) -> Clock:
        """Return a clock for timings on these operands."""
        sets = OperandSets(self._problem, self._sets, self._hot, self._marker, self._take_used)
        return self._timing.clock(sets)

    def _take_used(self) -> list[Weight]:
        """Return the weights that the entrants which were made last used since the last call of this method."""
        return [weight for pool in self._timed.values() for weight in pool.take_used()]

    def entrants_at(self, m: int) -> list[Entrant]:
        """Return the entrants at another M: those of the Problem on the first ``m`` rows of its operands.

        The Problem's layouts permit that (``row_stack.rows_are_views``), or ``m`` is its own M.
        """
        if m == self._problem.m:
            return self._entrants_on(self._operands)
        return self._entrants_on({name: pool.first_rows(self._problem, m) for name, pool in self._operands.items()})

    def _entrants_on(self, operands: Mapping[str, _OperandPool]) -> list[Entrant]:
        self._timed = operands
        return [
            Entrant(
                name,
                self._runner(kernel, operands[self._layout(kernel)], self._number(name)),
                kernel.candidate.backend == BASELINE_BACKEND,
                kernel.packing,
                kernel.candidate.to_dict(),
            )
            for name, kernel in self._kernels.items()
            if name not in self.excluded
        ]

    def _pack_first(
        self, kernels: Mapping[str, Kernel], item: Inputs
    ) -> tuple[dict[str, tuple[Kernel, PackedWeight]], int]:
        """Return one copy of B in each layout that there is memory for, with a kernel that packs it, and the bytes of
        scratch needed."""
        available = self._room() - operand_bytes(self._problem)
        packed: dict[str, tuple[Kernel, PackedWeight]] = {}
        admitted = scratch = 0  # scratch: the largest need of one kernel; one kernel runs at a time
        for name, kernel in kernels.items():
            self._marker[0] = self._number(name)
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
        return int(_OPERAND_SHARE * operand_bytes(self._problem)) + self._timing.spare_bytes

    def _layout(self, kernel: Kernel) -> str:
        return "" if packs_each_call(kernel, self._problem) else (kernel.packing or "")

    def _number(self, name: str) -> int:
        return min(self._numbers[name], 255)  # a byte; no list of candidates is that long

    def _runner(self, kernel: Kernel, operands: _OperandPool, number: int) -> Callable[[int], None]:
        marker, call = self._marker, self._call(kernel)
        next_operands = operands.at if self._timing.indexed else operands.next

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
    ) -> RaceResult:
        """Race for ``budget_s`` seconds and return the result; see ``race.race``. earlier_s: seconds per call before
        the race, by id."""
        if not self._entrants:
            return RaceResult("none_valid", stopped="there was nothing to race", evidence=self._excluded_evidence())

        def report(best: BestSoFar) -> None:
            if math.isfinite(best.ratio):
                progress(LeaderUpdate(best.candidate_id, best.median_s, best.ratio))

        setup = RaceSetup(
            machine=self._timing.machine,
            conditions=self._conditions,
            move=self._move if self._timing.moves_weights and not self._hot and self._problem.b.constant else None,
            move_s=self._move_s,
            surroundings=self._timing.surroundings(self._call_site, self._outputs, self._can_overlap),
            least_s=self._timing.least_s(self._problem),
            earlier_s=earlier_s,
            cold_s=self._cold_s,
        )
        result = race(self._entrants, self._clock, budget_s, seed=seed, progress=report, setup=setup)
        result.evidence |= self._excluded_evidence()
        return result

    @property
    def _cold_s(self) -> float:
        """Return ``RaceSetup.cold_s``: 0.0 for a race on operands in the cache, and on a GPU, where calls are timed on
        operands that are not in the cache before the race, too."""
        is_warm = self._hot or not is_host(self._timing.target.device)
        return 0.0 if is_warm else operand_bytes(self._problem) / _COLD_BYTES_PER_S

    def _can_overlap(self, name: str) -> bool:
        return self._kernels[name].can_overlap

    def _call_site(self, name: str | None) -> CallSite:
        """Return how a kernel is called in the race; for None, the operand sets of raw weights and no call."""
        kernel = None if name is None else self._kernels[name]
        pool = self._operands["" if kernel is None else self._layout(kernel)]
        return CallSite(pool.at if self._timing.indexed else pool.next, None if kernel is None else self._call(kernel))

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

    def _excluded_evidence(self) -> dict[str, Evidence]:
        return {
            name: Evidence(self._kernels[name].candidate.to_dict(), name, "screened", reason=reason)
            for name, reason in self.excluded.items()
        }


class _OperandPool:
    """Operand sets in one layout, used in turn. packer: a kernel that packs B into this layout; None for the raw B."""

    def __init__(self, sets: list[tuple[Inputs, Any, Tensor]], packer: Kernel | None) -> None:
        self.sets, self._packer = sets, packer
        # Modulo the number of sets, the index of the set that was used last, and of the last one that was taken.
        self._next, self._taken = 0, -len(sets)

    def first_rows(self, problem: Problem, m: int) -> _OperandPool:
        """Return a pool of the first ``m`` rows of these operands, which share the weights."""
        part = Part(0, m)
        sets = [(part_of(problem, inputs, part), b, out.narrow(-2, 0, m)) for inputs, b, out in self.sets]
        return _OperandPool(sets, None)

    def set_next(self, index: int) -> None:
        """Make ``next`` return the set with this index."""
        self._taken += index - 1 - self._next
        self._next = index - 1

    def next(self, _: int) -> tuple[Inputs, Any, Tensor]:
        """Return the next set in turn, whichever kernel asks."""
        self._next += 1
        return self.sets[self._next % len(self.sets)]

    def take_used(self) -> list[Weight]:
        """Return the weights of the sets that ``next`` returned since the last call of this method; all of them in the
        first call, and after ``move``."""
        first = max(self._taken, self._next - len(self.sets)) + 1
        used = [self.sets[index % len(self.sets)][1] for index in range(first, self._next + 1)]
        self._taken = self._next
        return used

    def at(self, i: int) -> tuple[Inputs, Any, Tensor]:
        """Return the set of call ``i``."""
        return self.sets[i % len(self.sets)]

    def move(self) -> None:
        """Allocate new memory for each B before the old is freed (for a large B: after it, for lack of memory)."""
        self._taken = self._next - len(self.sets)
        for index, (inputs, b, out) in enumerate(self.sets):
            if self._packer is not None:
                if b.nbytes > _LARGE_BYTES:
                    self.sets[index], b = (inputs, None, out), None
                self.sets[index] = (inputs, self._packer.pack(inputs.b), out)
            elif _bytes(b) <= _LARGE_BYTES and (dense := _dense_copy(b)) is not None:
                self.sets[index] = (replace(inputs, b=dense), dense, out)


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
