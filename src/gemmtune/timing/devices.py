"""How kernels are timed on each kind of device, in the process that measures.

``of(target)`` returns the ``DeviceTiming`` that the Target's ``core.devices.Device`` names. A race and a worker ask it
for everything that differs between kinds of devices.
"""

from __future__ import annotations

import functools
import importlib
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..core import devices
from ..core.problem import Problem
from ..core.target import Target
from ..verify.inputs import operand_bytes, operand_set_count
from .clock import Clock, CpuClock, Latency
from .cuda_clock import CudaClock
from .cuda_screening import screening_times as cuda_screening_times
from .eviction import Weight, can_evict, evict
from .flush import COLD_SHARE, Flush, last_level_cache
from .machine import CpuMachine, Machine
from .nvml import cuda_machine
from .plausible import least_cpu_s, least_gpu_s
from .screening import SpeedReference, screening_times
from .surrounding_work import CallSite, cpu_surroundings, gpu_surroundings
from .surroundings import Surrounding
from .torch_gpu import TorchGpu, context_fault, limit_device_memory, warm_up

CallSiteOf = Callable[[str | None], CallSite]

_COLD_MIN_SHARE = 1 / 128  # operands of a smaller share of the cache are timed in long batches, cached or not
_PAUSE_S = 10e-6
# Up to this size of the weight there is memory for another copy, which SpeedReference's kernel reads.
_REFERENCE_BYTES = 64 << 20


@dataclass(frozen=True)
class OperandSets:
    """The rotated operand sets of a race.

    count: number of sets. marker: where the number of the running kernel is noted (see ``RaceOperands``). take_used:
    returns the weights that were used since it was called last, of all layouts.
    """

    problem: Problem
    count: int
    hot: bool
    marker: mmap.mmap | bytearray
    take_used: Callable[[], Iterable[Weight]]


class DeviceTiming:
    """How kernels are timed on one device. This class serves every kind of device by the host's clock: a timing ends
    when the device has done its work.

    spare_bytes: memory that a race may use besides a multiple of one operand set. output_buffers: number of output
    buffers that the calls of a race write in turn; None: one for each operand set. indexed: whether a call's number
    determines its operand set (calls that are replayed from a graph); else each call takes the next set. moves_weights:
    whether a weight's address can matter, so that a race moves weights to other memory between its parts.
    """

    spare_bytes = 2 << 30
    output_buffers: int | None = None
    indexed = False
    moves_weights = False

    def __init__(self, target: Target, latency: Latency = "graph") -> None:
        self.target, self.latency, self.device = target, latency, target.torch_device
        # None where a call returns when it is done: waiting would add to its time.
        self._wait = None if devices.is_host(target.device) else self.synchronize

    @property
    def machine(self) -> Machine | None:
        """The source of others' load and of the clock frequency; None where there is none."""
        return None

    @property
    def conditions(self) -> dict[str, str]:
        """What every Sample of this device states."""
        return {}

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        devices.get(self.target.device).synchronize(self.device)

    def copies(self, problem: Problem, weight_bytes: int) -> int:
        """Return how many operand sets a race rotates through. weight_bytes: of the weight in the kernels' layout."""
        return operand_set_count(problem, self.target)

    def clock(self, sets: OperandSets) -> Clock:
        """Return the clock of a race; it empties the cache where the operand sets do not fill it."""
        return CpuClock(*_cold_options(sets, self.target), synchronize=self._wait)

    def screening_times(
        self,
        call: Callable[[], None],
        flush: Callable[[], None],
        cutoff_s: float | None,
        reference: SpeedReference | None,
    ) -> tuple[float, ...]:
        """Return a candidate's screening times in seconds. cutoff_s: a slower call has no chance; None for no limit.
        reference: measures the machine's speed beside the calls."""

        wait = self._wait
        if wait is None:
            return screening_times(call, flush, cutoff_s, reference)

        def call_and_wait() -> None:
            call()
            wait()

        return screening_times(call_and_wait, flush, cutoff_s, reference)

    def speed_reference(self, problem: Problem) -> SpeedReference | None:
        """Return a new SpeedReference for a Problem's candidates; None where they are timed without one."""
        return None

    def surroundings(
        self, call_site: CallSiteOf, outputs: Sequence[Tensor], can_overlap: Callable[[str], bool]
    ) -> list[Surrounding]:
        """Return the surroundings in which a winner must be no slower. The arguments are those of
        ``surrounding_work.gpu_surroundings``."""
        return cpu_surroundings(call_site, outputs)

    def least_s(self, problem: Problem) -> float:
        """Return the least number of seconds that a call takes; 0.0 where no bound is known."""
        return 0.0

    # --- the worker process

    def warm_up(self) -> None:
        """Load what every problem needs, at the start of a worker."""

    def limit_memory(self, allowance: int) -> bool:
        """Let this process allocate ``allowance`` bytes of the device's memory more than now. False where operands are
        in the host's memory, which the worker limits."""
        return False

    def fault(self) -> str:
        """Return why this process can do nothing more on the device, in words; empty while it can."""
        return ""


class HostTiming(DeviceTiming):
    """This machine's CPU."""

    spare_bytes = 176 << 20
    moves_weights = True

    def __init__(self, target: Target, latency: Latency = "graph") -> None:
        super().__init__(target, latency)
        self._machine = CpuMachine(target.threads)

    @property
    def machine(self) -> Machine | None:
        return self._machine

    @property
    def conditions(self) -> dict[str, str]:
        return {"threads": str(self.target.threads)}

    def copies(self, problem: Problem, weight_bytes: int) -> int:
        wanted_copies = 1 + last_level_cache(self.target) // max(weight_bytes, 1)
        return max(1, min(wanted_copies, operand_set_count(problem, self.target)))

    def speed_reference(self, problem: Problem) -> SpeedReference | None:
        return SpeedReference() if problem.weight_bytes <= _REFERENCE_BYTES else None

    def least_s(self, problem: Problem) -> float:
        return least_cpu_s(problem, self.target)


class CudaTiming(DeviceTiming):
    """A GPU, timed by its own events around replayed CUDA graphs. The device is not used before something asks for it.

    Operands are never moved: graphs hold their addresses, and its memory is spread over all channels by a hash of the
    address, so that no address is better than another. Two outputs are used in turn: a model soon reads its results,
    and writes to the same memory again, all in the L2.
    """

    output_buffers = 2
    indexed = True

    @functools.cached_property
    def _gpu(self) -> TorchGpu:
        return TorchGpu(self.device)

    @functools.cached_property
    def machine(self) -> Machine | None:
        return cuda_machine(self.device)

    def synchronize(self) -> None:
        self._gpu.synchronize()

    def clock(self, sets: OperandSets) -> Clock:
        # It always empties the cache: every graph begins with the same set, whatever ran before.
        flush = None if sets.hot else Flush(sets.problem, self.target)
        return CudaClock(self._gpu, flush=flush, latency=self.latency, marker=sets.marker)

    def screening_times(
        self,
        call: Callable[[], None],
        flush: Callable[[], None],
        cutoff_s: float | None,
        reference: SpeedReference | None,
    ) -> tuple[float, ...]:
        return cuda_screening_times(self._gpu, call, flush, cutoff_s, self.latency)

    def surroundings(
        self, call_site: CallSiteOf, outputs: Sequence[Tensor], can_overlap: Callable[[str], bool]
    ) -> list[Surrounding]:
        if self.latency != "graph":  # the host's clock, which times launches, does not see the kernels around them
            return []
        return gpu_surroundings(call_site, outputs, functools.partial(self._gpu.sleep, _PAUSE_S), can_overlap)

    def least_s(self, problem: Problem) -> float:
        return least_gpu_s(problem, self.target)

    def warm_up(self) -> None:
        warm_up(self.device)

    def limit_memory(self, allowance: int) -> bool:
        # A GPU's context reserves address space beyond any limit for this process.
        limit_device_memory(self.device, allowance)
        return True

    def fault(self) -> str:
        return context_fault(self.device)


def of(target: Target, latency: Latency = "graph") -> DeviceTiming:
    """Return the DeviceTiming of a Target's kind of device. Raises ValueError for an unknown kind."""
    module, _, name = devices.get(target.device).timing.partition(":")
    timing: DeviceTiming = getattr(importlib.import_module(module), name)(target, latency)
    return timing


def _cold_options(sets: OperandSets, target: Target) -> tuple[Callable[[], None], int] | tuple[()]:
    """Return the flush and the most calls of one timing for a CpuClock; nothing where no flush is needed."""
    set_bytes, cache = operand_bytes(sets.problem), last_level_cache(target)
    if not sets.hot and set_bytes >= _COLD_MIN_SHARE * cache and set_bytes * sets.count < COLD_SHARE * cache:
        flush = (lambda: evict(sets.take_used())) if can_evict(target) else Flush(sets.problem, target)
        return flush, sets.count
    return ()
