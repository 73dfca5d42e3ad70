"""The times of ATen's plain op at every M, from those at some M and the algorithms that its library chooses.

cuBLAS chooses one of many algorithms for each M. In bfloat16 8192x1024 takes 25.5 us at M = 687, 34.1 at 688 and 22.0
at 689, each by another algorithm or the same one in other tiles (H200, ``benchmarks/library_algorithms.py``). With one
algorithm, and in one row of tiles, more rows take no longer: what a tile lacks is filled with zeros, which takes time.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping

# Of 128 changes of cuBLAS's algorithm, 127 were at a multiple of it or at the M behind one (H200, 1,380 M of six
# ranges, ``benchmarks/library_algorithms.py``).
_STEP = 8
# The most rows between two timed M on which the time between them is based, with one algorithm and where algorithms
# are not known: there the library may choose another.
_REACH, _UNKNOWN_REACH = 256, 40


def sizes_to_ask(first: int, last: int) -> list[int]:
    """Return the M at which to ask for algorithms first to know them from ``first`` to ``last``, ascending: each
    multiple of 8, and the M beside it."""
    starts = range(_STEP * (first // _STEP), last + 1, _STEP)
    return [m for start in starts for m in (start, start + 1, start + _STEP - 1) if m]


class LibraryAlgorithms:
    """The algorithms that a library chooses for ATen's plain op.

    names: of the algorithms, by the M that were asked (``sizes_to_ask``). At M between two of these with one algorithm
    that have no multiple of 8 between them, it is the same. unclear: the M between two of these with different ones.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names, runs, self.unclear = names, list[tuple[int, int, str]](), list[int]()
        for m in sorted(names):
            start, before, name = runs[-1] if runs else (m, m, names[m])
            adjoins = m == before + 1 or m // _STEP == before // _STEP
            if runs and adjoins and name == names[m]:
                runs[-1] = start, m, name
            else:
                self.unclear += range(before + 1, m) if adjoins else ()
                runs.append((m, m, names[m]))
        self._runs, self._starts = runs, [start for start, _, _ in runs]

    def at(self, m: int) -> str:
        """Return the name of the algorithm at M; empty where it is not known."""
        index = bisect_right(self._starts, m) - 1
        return self._runs[index][2] if index >= 0 and m <= self._runs[index][1] else ""

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, str]]:
        """Yield (first M, last M, name) of each run of M with one algorithm, from ``first`` to ``last``; also the runs
        of M at which it is not known, whose name is empty."""
        index = max(bisect_right(self._starts, first) - 1, 0)
        for start, end, name in self._runs[index:]:
            if start > last:
                break
            if end >= first:
                if first < start:
                    yield first, start - 1, ""
                yield max(first, start), min(end, last), name
                first = end + 1
        if first <= last:
            yield first, last, ""


NO_ALGORITHMS = LibraryAlgorithms({})


class PlainTimes:
    """The times of ATen's plain op between the M at which it was timed.

    times: seconds by M.
    """

    def __init__(self, times: Mapping[int, float], algorithms: LibraryAlgorithms) -> None:
        self._times, self._algorithms = times, algorithms
        self._sizes = dict[str, list[int]]()  # ascending, by algorithm
        for m in sorted(times):
            self._sizes.setdefault(algorithms.at(m), []).append(m)
        self._first, self._last = min(times, default=1), max(times, default=0)
        self._least = [0.0] * (self._last - self._first + 1)  # 0.0: not known
        for first, last, name in algorithms.runs(self._first, self._last):
            self._fill(first, last, name)

    def _fill(self, first: int, last: int, name: str) -> None:
        """Compute the least seconds from ``first`` to ``last``, where the library chooses one algorithm."""
        sizes, times, reach = self._sizes.get(name, []), self._times, _REACH if name else _UNKNOWN_REACH
        index = max(bisect_right(sizes, first) - 1, 0)
        for a, b in itertools.pairwise(sizes[index : bisect_left(sizes, last, index) + 1]):
            start, end = max(a, first) - self._first, min(b, last) - self._first + 1
            if b - a <= reach and start < end:
                self._least[start:end] = [min(times[a], times[b])] * (end - start)
        for m in sizes[bisect_left(sizes, first) : bisect_right(sizes, last)]:
            self._least[m - self._first] = times[m]

    def at_least(self, first: int, last: int) -> float | None:
        """Return the least seconds that the op takes at M from ``first`` to ``last``. None where that is not known."""
        if first < self._first or last > self._last:
            return None
        return min(self._least[first - self._first : last - self._first + 1]) or None

    def expected(self, m: int) -> float | None:
        """Return the seconds that the op takes at M: its time there, or a value on the line between those at the next M
        on either side with the same algorithm. None where that is not known."""
        if m in self._times:
            return self._times[m]
        name = self._algorithms.at(m)
        sizes = self._sizes.get(name, [])
        index = bisect_left(sizes, m)
        if not 0 < index < len(sizes) or sizes[index] - sizes[index - 1] > (_REACH if name else _UNKNOWN_REACH):
            return None
        a, b = sizes[index - 1], sizes[index]
        return self._times[a] + (self._times[b] - self._times[a]) * (m - a) / (b - a)
