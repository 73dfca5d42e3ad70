"""Compare the times that several tunings of a weight found, and count a plan's kernels by what counts as noise.

    python benchmarks/repeatability.py                              all runs of every_m.py on GPUs in benchmarks/results
    python benchmarks/repeatability.py every-m-20261128-22*.json*   the plans of these runs

No GPU is needed. Two runs of ``every_m.py`` on one day that tuned the same weight on a card of the same name are
compared, the one with the next. At an M that both timed, a kernel's share is its time over that of the kernel that was
the fastest in both runs together. The first table has by how much the logarithm of a share differs between the runs,
over the square root of 2: what one run contributes. Shares above 1.1 are left out. "Noise" is what a run itself found
(95% of a median, ``TunedPlan.noise``), the root of the mean square of both.

The second table chooses the kernels of each plan again, from its times, for several values of ``curves.REPEATABLE``. A
regret is a kernel's time over the least at a measured M, without allowance for noise, less 1; a kernel that was not
timed there counts with its time at the next larger M.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS

from gemmtune.core import devices
from gemmtune.tuning import curves as tuning_curves
from gemmtune.tuning import kernel_choice
from gemmtune.tuning.curves import Curves

Row = dict[str, Any]
Run = tuple[str, Row]  # the day and the card; the row of a weight

LAST_M = 8192  # of the range that is tuned on a GPU by default
NOISES = (0.003, 0.006, 0.012, 0.02, 0.03)
ALLOWANCES = (0.0, 0.01, 0.015, 0.02, 0.025)
BOUND = 0.05


def rows_of(paths: Iterable[Path]) -> Iterator[Run]:
    """Yield the weights of runs on GPUs with a plan for all M, with the day and the card."""
    for path in paths:
        content = path.read_bytes()
        data = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        for row in data["rows"] if data.get("gpu") else ():
            if row.get("plan_us") and row.get("noise") and row["last"] == LAST_M:
                yield f"{path.name.split('-')[2]} {data['gpu']['name']}", row


def times_of(row: Row) -> dict[str, dict[int, float]]:
    """Return the microseconds of a weight's kernels by M."""
    return {name: {int(m): us for m, us in by_m.items()} for name, by_m in row["plan_us"].items() if by_m}


def differences(first: Row, second: Row) -> Iterator[tuple[float, float]]:
    """Yield the noise and the difference of each kernel's share at each M that both runs timed."""
    a, b = times_of(first), times_of(second)
    for m in map(int, first["noise"].keys() & second["noise"].keys()):
        both = [name for name in a.keys() & b.keys() if m in a[name] and m in b[name]]
        if len(both) < 2:
            continue
        fastest = min(both, key=lambda name: a[name][m] * b[name][m])
        noise = math.hypot(first["noise"][str(m)], second["noise"][str(m)]) / math.sqrt(2)
        for name in both:
            shares = [math.log(times[name][m] / times[fastest][m]) for times in (a, b)]
            if name != fastest and sum(shares) / 2 <= math.log(1.1):
                yield noise, abs(shares[0] - shares[1]) / math.sqrt(2)


def print_differences(runs: Iterable[Run]) -> None:
    by_weight: dict[tuple[str, str, int, int], list[Row]] = defaultdict(list)
    for where, row in runs:
        by_weight[where, row["family"], row["k"], row["n"]].append(row)
    found: dict[float, list[float]] = defaultdict(list)
    pairs = 0
    for rows in by_weight.values():
        for first, second in itertools.pairwise(rows):
            pairs += 1
            for noise, difference in differences(first, second):
                found[next((limit for limit in NOISES if noise <= limit), math.inf)].append(difference)
    print(f"{pairs} pairs of runs\nnoise up to   times  difference: median    90%     95%")
    for limit, values in sorted(found.items()):
        median, *_, p90, p95 = (sorted(values)[int(share * len(values))] for share in (0.5, 0.9, 0.95))
        print(f"{limit:11.1%} {len(values):7}  {median:18.2%} {p90:6.2%}  {p95:6.2%}")


def curves_of(row: Row) -> Curves:
    """Return the times of a weight's kernels. ATen's plain op may serve a raw weight only."""
    seconds = {name: {m: 1e-6 * us for m, us in by_m.items()} for name, by_m in times_of(row).items()}
    plain = next((name for name in seconds if row["layout"] is None and is_plain(name)), "")
    noise = {int(m): share for m, share in row["noise"].items()}
    return Curves(1, LAST_M, seconds, plain, noise=noise, waves=True)


def is_plain(name: str) -> bool:
    """Whether a candidate is ATen's plain op."""
    return name.split("[")[0] in ("aten/mm", "aten/scaled_mm", "aten/int_mm", "aten/composite")


def print_kernels(rows: Sequence[Row]) -> None:
    weights = {(row["family"], row["k"], row["n"]): curves_of(row) for row in rows}
    print(f"\n{len(weights)} plans\nallowance  kernels  mean regret  worst in the mean  worst of all")
    for allowance in ALLOWANCES:
        tuning_curves.REPEATABLE = allowance
        counts, means, worst = [], [], []
        for curves in weights.values():
            chosen = kernel_choice.choose_kernels(curves, BOUND, devices.get("cuda").profile.max_kernels)
            served = kernel_choice.serving(curves, chosen, BOUND)
            regrets = [
                max(0.0, curves.usable(name, m) / curves.best(m) - 1)
                for m, name in served.items()
                if curves.best(m) < math.inf
            ]
            counts.append(len(set(served.values())))
            means.append(statistics.mean(regrets))
            worst.append(max(regrets))
        print(
            f"{allowance:9.1%} {statistics.mean(counts):8.2f} {statistics.mean(means):12.2%}"
            f" {statistics.mean(worst):18.1%} {max(worst):13.1%}"
        )


def main() -> None:
    paths = [RESULTS / name for name in sys.argv[1:]] or sorted(RESULTS.glob("every-m-*.json*"))
    runs = list(rows_of(paths))
    if len(sys.argv) == 1:
        print_differences(runs)
    print_kernels([row for _, row in runs])


if __name__ == "__main__":
    main()
