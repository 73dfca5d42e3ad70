"""What else the machine is doing: others' load and the clock frequency, so that a race can tell when they change."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

_LOAD_MOVED = 0.25  # cores
_FREQUENCY_MOVED = 0.05
_CONTENDING, _CROWDED, _STOLEN = 0.5, 0.25, 0.1  # cores that others use, cores that are missing; share that is stolen


@dataclass(frozen=True, slots=True)
class Weather:
    """One stretch of time on this machine. load: cores that others kept busy; frequency: MHz, 0.0 when unknown.

    stolen: the share of all cores' time that the hypervisor gave to other guests. contention: whether others needed the
    cores that the kernels' threads run on.
    """

    load: float = 0.0
    frequency: float = 0.0
    stolen: float = 0.0
    contention: bool = False

    def differs(self, other: Weather) -> str:
        """What changed between the two, in words; empty when nothing did that matters."""
        if abs(self.load - other.load) > _LOAD_MOVED:
            return f"others' load went from {self.load:.1f} to {other.load:.1f} cores"
        return clock_moved(self, other)

    def words(self) -> dict[str, str]:
        """For a Sample's conditions."""
        found = {"load": f"{self.load:.1f} cores"}
        if self.frequency:
            found["clock"] = f"{self.frequency:.0f} MHz"
        if self.stolen > 0.01:
            found["stolen"] = f"{self.stolen:.0%}"
        return found


def clock_moved(before: Weather, after: Weather) -> str:
    """How the clock frequency changed, in words; empty when it did not by 5%, or is not known."""
    if min(before.frequency, after.frequency) > 0.0:
        change = after.frequency / before.frequency - 1.0
        if abs(change) > _FREQUENCY_MOVED:
            return f"the clock went from {before.frequency:.0f} to {after.frequency:.0f} MHz"
    return ""


class Machine(Protocol):
    """Says what the weather was since it was last asked."""

    def weather(self) -> Weather: ...


class CpuMachine:
    """This machine, by the kernel's own accounts (/proc/stat through psutil) and cpufreq where there is one.

    threads: of the kernels; others contend when their load and these threads exceed the cores.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._last = self._accounts()
        self._frequencies = [
            path
            for cpu in sorted(allowed_cpus())
            if (path := Path(f"/sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq")).exists()
        ]

    def weather(self) -> Weather:
        """Since the last call (or construction). Stretches below 20 ms say nothing: the kernel counts in ticks."""
        before, now = self._last, self._accounts()
        elapsed = now.at - before.at
        if elapsed < 0.02:
            return Weather(frequency=self._frequency())
        self._last = now
        others = (now.busy - before.busy) - (now.own - before.own)
        cores = max(1, os.cpu_count() or 1)
        stolen = max(0.0, (now.stolen - before.stolen) / (elapsed * cores))
        load = max(0.0, others / elapsed)
        crowded = load > _CONTENDING and load + min(self._threads, cores) > cores + _CROWDED
        return Weather(load, self._frequency(), stolen, crowded or stolen > _STOLEN)

    def _accounts(self) -> _Accounts:
        times, own = psutil.cpu_times(), os.times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        stolen = getattr(times, "steal", 0.0)
        guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)  # counted in user already
        return _Accounts(time.monotonic(), sum(times) - idle - stolen - guest, own.user + own.system, stolen)

    def _frequency(self) -> float:
        """The fastest of our CPUs, in MHz."""
        found = [0.0]
        for path in self._frequencies:
            try:
                found.append(int(path.read_text(encoding="ascii")) / 1000.0)
            except (OSError, ValueError):
                continue
        return max(found)


@dataclass(frozen=True, slots=True)
class _Accounts:
    """Seconds: when, all cores' busy time, this process's own, and what the hypervisor took."""

    at: float
    busy: float
    own: float
    stolen: float


def allowed_cpus() -> set[int]:
    """The CPUs that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


class Pins:
    """Keeps the process on as many CPUs as it has threads, the least busy ones of different cores.

    Left alone (``words`` is empty) where affinity cannot be set, or where the threads need every CPU anyway.
    """

    def __init__(self) -> None:
        self._allowed = allowed_cpus()
        self.words = ""

    def choose(self, threads: int, settle_s: float = 0.05) -> None:
        """Choose anew, by what the CPUs do during ``settle_s`` seconds."""
        self.words = ""
        if not hasattr(os, "sched_setaffinity") or threads >= len(self._allowed):
            return
        try:
            os.sched_setaffinity(0, self._allowed)
            chosen = _least_busy(self._allowed, settle_s)[:threads]
            if len(chosen) < threads:
                return
            for thread in Path("/proc/self/task").iterdir():  # threads that OpenMP has started keep a mask of their own
                os.sched_setaffinity(int(thread.name), chosen)
        except (OSError, ValueError):
            return
        self.words = f"CPUs {', '.join(map(str, sorted(chosen)))}"


def _least_busy(allowed: set[int], settle_s: float) -> list[int]:
    """One CPU of each core, the idlest first."""
    before = psutil.cpu_times(percpu=True)
    time.sleep(settle_s)
    after = psutil.cpu_times(percpu=True)
    busy = {cpu: -(after[cpu].idle - before[cpu].idle) for cpu in allowed if cpu < len(after)}
    taken: set[str] = set()
    chosen = []
    for cpu in sorted(busy, key=lambda cpu: (busy[cpu], cpu)):
        siblings = _siblings(cpu)
        if siblings not in taken:
            taken.add(siblings)
            chosen.append(cpu)
    return chosen


def _siblings(cpu: int) -> str:
    """The hardware threads that share this CPU's core, as the kernel lists them; the CPU itself when unknown."""
    try:
        path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)
