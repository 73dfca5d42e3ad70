"""Timing of several kernels at many M, for the intervals of a Plan.

The operands are those of a race. They are prepared for the largest M of a band, and smaller M use their first rows: a
weight is packed once for many M.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from ..backends.base import Kernel
from ..core.decision import Verdict
from ..core.problem import Dim, Problem
from ..verify.row_stack import rows_are_views
from .clock import Clock
from .devices import DeviceTiming
from .race import Entrant
from .race_entry import EntrantError, RaceEntry
from .race_operands import RaceOperands

BANDS = (64, 512, 4096)  # operands are shared by the M up to each of these; larger M share those of the largest
_FLOOR_S = 200e-6  # the least duration of one timing: shorter than in a race, which decides by smaller differences
_ROUNDS = 7
_MIN_ROUNDS = 2
# A kernel further behind the fastest of its layout than this factor is timed no more, after one and after three rounds.
_FAR_BEHIND, _BEHIND = 1.6, 1.15
_OTHER_LAYOUT = 2.0  # the same for the fastest of all layouts
# A kernel is not timed, since it would slow all rounds, if its calibration takes more than this many seconds and more
# than this multiple of the shortest calibration.
_SLOW_S, _SLOW = 0.3, 8.0
# A calibration that took this long was one call, of which what only a first call does is a small part: it counts as a
# timing, unless it took longer than the next by more than a share. With M = 512, PyTorch's op takes 0.51 s for fp32
# 4096x11008 on one thread of an EPYC (every-m-20261130-121236).
_COUNTED_S, _FIRST_CALL = 0.1, 0.15


class SizesTimed(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    """The times of kernels at several M.

    times: seconds per call by M and candidate id, comparable within one M. noise: by M, the half width of the 95%
    interval of such a time, relative to it. faults: kernels that raised an exception, by id. excluded: kernels that
    there was no memory for, with the reason, by id.
    """

    times: dict[int, dict[str, float]] = {}
    noise: dict[int, float] = {}
    faults: dict[str, Verdict] = {}
    excluded: dict[str, str] = {}


def band_of(m: int, last: int) -> int:
    """Return the M whose operands serve ``m``, where ``last`` is the largest M of the sweep."""
    return min(next((band for band in BANDS if m <= band), last), last)


class SizeSweep:
    """The operands of several kernels, for timing them at many M.

    kernels, numbers: by id; see ``RaceOperands``. last: the largest M. dim: "batch" where what is called M here is the
    batch of the Problem.
    """

    def __init__(
        self,
        kernels: Mapping[str, Kernel],
        problem: Problem,
        timing: DeviceTiming,
        seed: int,
        marker_fd: int | None,
        *,
        last: int,
        dim: Dim = "m",
        hot: bool = False,
        numbers: Mapping[str, int] | None = None,
    ) -> None:
        self.kernels, self.last, self._numbers = dict(kernels), last, numbers
        self._problem, self._timing, self._seed, self._marker_fd, self._hot = problem, timing, seed, marker_fd, hot
        self._dim: Dim = dim
        self._operands: tuple[int, RaceOperands] | None = None
        self._shares_rows = dim == "m" and rows_are_views(problem)

    def time(self, sizes: Mapping[int, Sequence[str]], budget_s: float, load_s: float = 0.0) -> SizesTimed:
        """Time the kernels ``sizes[m]`` at each M for about ``budget_s`` seconds in total, at least two rounds each.
        load_s: as for ``time_entrants``."""
        result = SizesTimed()
        started = time.perf_counter()
        for done, m in enumerate(sorted(sizes)):
            remaining_s = budget_s - (time.perf_counter() - started)
            operands = self._operands_for(m)
            result.excluded |= operands.excluded
            wanted = [name for name in sizes[m] if name not in result.faults]
            rows = m if self._dim == "m" else self._problem.m
            entrants = [entrant for entrant in operands.entrants_at(rows) if entrant.id in wanted]
            share_s = max(remaining_s, 0.0) / (len(sizes) - done)
            times, noise, faults = time_entrants(entrants, operands.new_clock(), share_s, self._seed + m, load_s)
            result.times[m], result.noise[m] = times, noise
            result.faults |= faults
        return result

    def _operands_for(self, m: int) -> RaceOperands:
        """Return operands that serve ``m``; those of another band are freed first."""
        size = band_of(m, self.last) if self._shares_rows else m
        if self._operands is None or self._operands[0] != size:
            self._operands = None
            problem = self._problem.with_size(self._dim, size)
            operands = RaceOperands(
                self.kernels, problem, self._timing, self._seed, self._marker_fd, hot=self._hot, numbers=self._numbers
            )
            self._operands = size, operands
        return self._operands[1]


def time_entrants(
    entrants: Sequence[Entrant], clock: Clock, budget_s: float, seed: int, load_s: float = 0.0
) -> tuple[dict[str, float], float, dict[str, Verdict]]:
    """Time entrants in interleaved rounds. Return the seconds per call by id, the noise, and the verdicts on those that
    raised.

    A time is the median over the rounds of the entrant's time divided by the round's level: the machine's speed in that
    round relative to all rounds. Kernels that are far behind are timed in the first rounds only.

    load_s: seconds for which the entrants keep the device busy before the first round; timings are then as long as in a
    paired test, so that it stays busy.
    """
    entries = [RaceEntry(item.id, item.run, item.is_baseline, item.packing) for item in entrants]
    rng, started, round_s, least_s = random.Random(seed), clock.now(), 0.0, math.inf
    for entry in sorted(entries, key=lambda entry: not entry.is_baseline):
        least_s = min(least_s, _calibrate(entry, clock, least_s, clock.paired_timing_s if load_s else _FLOOR_S))
    if load_s:
        _keep_busy(entries, clock, load_s)
    first = round_ = _count_calibrations(entries)
    while round_ < _ROUNDS:
        active = [entry for entry in entries if entry.active]
        elapsed_s = clock.now() - started
        if not active or (round_ >= _MIN_ROUNDS and elapsed_s + round_s > budget_s):
            break
        rng.shuffle(active)
        if not _time_round(active, round_, clock):
            continue  # with one entry less
        round_s = clock.now() - started - elapsed_s
        _drop_slow(entries, round_)
        round_ += 1
    for entry in entries:
        if first and set(entry.times) == {0, 1} and entry.times[0] > (1.0 + _FIRST_CALL) * entry.times[1]:
            del entry.times[0]
    faults = {entry.id: Verdict("crashed", entry.reason) for entry in entries if entry.stage == "failed"}
    times, noise = _levelled([entry for entry in entries if entry.times and entry.stage != "failed"])
    return times, noise, faults


def _calibrate(entry: RaceEntry, clock: Clock, least_s: float, timing_s: float) -> float:
    """Count the calls of an entry's timings, of ``timing_s`` or more. Return the seconds that this took.

    An entry with which it took far longer than ``least_s`` is not timed. Where it took ``_COUNTED_S``, it is the
    entry's time in round 0.
    """
    started = clock.now()
    try:
        entry.calls = clock.calls_for(entry.guarded, timing_s)
    except EntrantError as error:
        entry.drop("failed", str(error))
        return math.inf
    seconds = clock.now() - started
    if not entry.is_baseline and seconds > max(_SLOW_S, _SLOW * least_s):
        entry.drop("eliminated", "far behind in its first calls")
    elif clock.calibrates_once and entry.calls == 1 and seconds >= _COUNTED_S:
        entry.times[0] = seconds
    return seconds


def _count_calibrations(entries: Sequence[RaceEntry]) -> int:
    """Return the number of the first round: 1 if the calibrations of all entries count as round 0, else 0."""
    active = [entry for entry in entries if entry.active]
    if active and all(entry.times for entry in active):
        _drop_slow(entries, 0)
        return 1
    for entry in active:
        entry.times.clear()
    return 0


def _keep_busy(entries: Sequence[RaceEntry], clock: Clock, seconds: float) -> None:
    """Run rounds of all entries for some seconds. Their times do not count."""
    started = clock.now()
    while clock.now() - started < seconds and (active := [entry for entry in entries if entry.active]):
        if _time_round(active, 0, clock):
            for entry in active:
                entry.times.clear()


def _time_round(active: Sequence[RaceEntry], round_: int, clock: Clock) -> bool:
    """Time each entry once. Return whether all were timed: an entry that raises fails, and the round has to be
    repeated."""
    try:
        seconds = clock.time_round([entry.guarded for entry in active], [entry.calls for entry in active])
    except EntrantError as error:
        error.entry.drop("failed", str(error))
        return False
    for entry, value in zip(active, seconds, strict=True):
        entry.times[round_] = value
    return True


def _drop_slow(entries: Sequence[RaceEntry], round_: int) -> None:
    """Stop timing the entries that are far behind. ATen's stay: the others are compared with them."""
    timed = [entry for entry in entries if entry.active and entry.times]
    best = {packing: min(e.median for e in timed if e.packing == packing) for packing in {e.packing for e in timed}}
    factor = _FAR_BEHIND if round_ < _MIN_ROUNDS else _BEHIND
    for entry in timed:
        limit_s = min(factor * best[entry.packing], _OTHER_LAYOUT * min(best.values()))
        if not entry.is_baseline and entry.median > limit_s:
            entry.drop("eliminated", "far behind")


def _levelled(entries: Sequence[RaceEntry]) -> tuple[dict[str, float], float]:
    """Return the entries' times with each round's level removed, and their noise.

    The level is that of these entries themselves, so that removing it takes away a part of their noise, too: all of it
    for a single entry, whose times are left as they are.
    """
    if not entries:
        return {}, 0.0
    rounds = max(len(entry.times) for entry in entries)
    whole = [entry for entry in entries if len(entry.times) == rounds]
    level = {
        round_: median(entry.times[round_] / entry.median for entry in whole if round_ in entry.times)
        for round_ in set().union(*(entry.times for entry in whole if len(whole) > 1))
    }
    share = math.sqrt(len(whole) / max(len(whole) - 1, 1))
    times, spreads = {}, []
    for entry in entries:
        values = sorted(seconds / level.get(round_, 1.0) for round_, seconds in entry.times.items())
        times[entry.id] = median(values)
        if entry in whole:
            spreads.append(share * _half_width(values))
    return times, median(spreads)


def _half_width(values: Sequence[float]) -> float:
    """Return the half width of the 95% interval of the median of sorted values, relative to it. It is 1.96 * 1.2533
    standard errors, with the standard deviation from the interquartile range (1.349 standard deviations)."""
    count = len(values)
    spread = values[-1 - count // 4] - values[count // 4]
    return 1.96 * 1.2533 * spread / 1.349 / math.sqrt(count) / values[count // 2]
