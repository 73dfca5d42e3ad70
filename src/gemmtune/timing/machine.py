"""The state of the machine: others' load and the clock frequency, so that a race can detect changes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

_LOAD_CHANGED = 0.25  # cores
_FREQUENCY_CHANGED = 0.05
# Cores that others use, cores that are missing, and the share of time that the hypervisor takes.
_CONTENDING_CORES, _MISSING_CORES, _STOLEN_SHARE = 0.5, 0.25, 0.1


@dataclass(frozen=True, slots=True)
class MachineState:
    """The state of the machine during one period.

    load: cores that other processes kept busy. frequency: MHz, 0.0 when unknown. stolen: the share of all cores' time
    that the hypervisor gave to other virtual machines. contention: whether others needed the cores that the kernels'
    threads run on.
    """

    load: float = 0.0
    frequency: float = 0.0
    stolen: float = 0.0
    contention: bool = False

    def differs(self, other: MachineState) -> str:
        """Return the change between the two states, in words; empty when it does not matter."""
        if abs(self.load - other.load) > _LOAD_CHANGED:
            return f"others' load went from {self.load:.1f} to {other.load:.1f} cores"
        return describe_clock_change(self, other)

    def words(self) -> dict[str, str]:
        """Return the state as entries for a Sample's conditions."""
        conditions = {"load": f"{self.load:.1f} cores"}
        if self.frequency:
            conditions["clock"] = f"{self.frequency:.0f} MHz"
        if self.stolen > 0.01:
            conditions["stolen"] = f"{self.stolen:.0%}"
        return conditions


def describe_clock_change(before: MachineState, after: MachineState) -> str:
    """Return how the clock frequency changed, in words; empty when it changed by at most 5%, or is unknown."""
    if min(before.frequency, after.frequency) > 0.0:
        change = after.frequency / before.frequency - 1.0
        if abs(change) > _FREQUENCY_CHANGED:
            return f"the clock went from {before.frequency:.0f} to {after.frequency:.0f} MHz"
    return ""


class Machine(Protocol):
    """A source of machine states: ``read_state`` returns the state since the previous call."""

    def read_state(self) -> MachineState: ...


class CpuMachine:
    """This machine, by the kernel's own accounts (/proc/stat through psutil) and cpufreq where there is one.

    threads: those of the kernels; others contend when their load and these threads exceed the cores.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._last = self._accounts()
        self._frequencies = [
            path
            for cpu in sorted(allowed_cpus())
            if (path := Path(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq")).exists()
        ]

    def read_state(self) -> MachineState:
        """Return the state since the last call (or construction). Periods below 20 ms have no load: the kernel counts
        in ticks."""
        before, now = self._last, self._accounts()
        elapsed = now.at - before.at
        if elapsed < 0.02:
            return MachineState(frequency=self._frequency())
        self._last = now
        others_s = (now.busy - before.busy) - (now.own - before.own)
        cores = max(1, os.cpu_count() or 1)
        stolen = max(0.0, (now.stolen - before.stolen) / (elapsed * cores))
        load = max(0.0, others_s / elapsed)
        is_crowded = load > _CONTENDING_CORES and load + min(self._threads, cores) > cores + _MISSING_CORES
        return MachineState(load, self._frequency(), stolen, is_crowded or stolen > _STOLEN_SHARE)

    def _accounts(self) -> _Accounts:
        times, own = psutil.cpu_times(), os.times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        stolen = getattr(times, "steal", 0.0)
        guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # already counted in user
        return _Accounts(time.monotonic(), sum(times) - idle - stolen - guest, own.user + own.system, stolen)

    def _frequency(self) -> float:
        """Return the highest frequency of the allowed CPUs, in MHz."""
        frequencies = [0.0]
        for path in self._frequencies:
            try:
                frequencies.append(int(path.read_text(encoding="ascii")) / 1000.0)
            except (OSError, ValueError):
                continue
        return max(frequencies)


@dataclass(frozen=True, slots=True)
class _Accounts:
    """Times in seconds: the moment of reading, all cores' busy time, this process's own, and the time that the
    hypervisor took."""

    at: float
    busy: float
    own: float
    stolen: float


def allowed_cpus() -> set[int]:
    """Return the CPUs that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class CpuPinning:
    """A pinning of the process to as many CPUs as it has threads: the least busy ones of different cores.

    It has no effect (``words`` is empty) where affinity cannot be set, or where the threads need every CPU anyway.
    """

    def __init__(self) -> None:
        self._allowed = allowed_cpus()
        self.words = ""

    def choose(self, threads: int, settle_s: float = 0.05) -> None:
        """Choose CPUs again, by their load during ``settle_s`` seconds."""
        self.words = ""
        if not hasattr(os, "sched_setaffinity") or threads >= len(self._allowed):
            return
        try:
            os.sched_setaffinity(0, self._allowed)
            chosen = _least_busy(self._allowed, settle_s)[:threads]
            if len(chosen) < threads:
                return
            for thread in Path("/proc/self/task").iterdir():  # running OpenMP threads have their own masks
                os.sched_setaffinity(int(thread.name), chosen)
        except (OSError, ValueError):
            return
        self.words = f"CPUs {', '.join(map(str, sorted(chosen)))}"


def _least_busy(allowed: set[int], settle_s: float) -> list[int]:
    """Return one CPU of each core, the idlest first."""
    times_before = psutil.cpu_times(percpu=True)
    time.sleep(settle_s)
    times_after = psutil.cpu_times(percpu=True)
    busy = {cpu: -(times_after[cpu].idle - times_before[cpu].idle) for cpu in allowed if cpu < len(times_after)}
    used_cores: set[str] = set()
    chosen = []
    for cpu in sorted(busy, key=lambda cpu: (busy[cpu], cpu)):
        siblings = _siblings(cpu)
        if siblings not in used_cores:
            used_cores.add(siblings)
            chosen.append(cpu)
    return chosen


def _siblings(cpu: int) -> str:
    """Return the hardware threads that share this CPU's core, as the kernel lists them; the CPU itself when unknown."""
    try:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)
