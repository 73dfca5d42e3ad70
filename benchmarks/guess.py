"""Evaluate the CUDA backend's order of ``slab`` and ``mixed`` candidates on sweeps from an H200. No GPU is needed.

    python benchmarks/guess.py [SWEEP.json]
    python benchmarks/guess.py --served [FAMILY]     ranks, in this order, of the candidates that served stored runs

The backend estimates the time of each candidate and lists them in this order. A sweep has the microseconds of every
configuration by shape, "family:M:K:N". The output is the best time of the first 1, 6 and 12 candidates over the best
time of all. The constants of the estimate were fitted to the default sweep, among others: this output shows the fit,
not the prediction of new shapes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from h200 import ALONE, OURS, problem_of
from harness import RESULTS
from plots import runs_of

from gemmtune.backends import get
from gemmtune.core.candidate import Candidate
from gemmtune.core.target import Target

SWEEP = "gpu-slab-sweep-20261122.json"
H200 = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 62914560), cores=132, versions=(("hip", "None"),))
FIRST = (1, 6, 12)


def ordered_ids(shape: tuple[str, int, int, int]) -> list[str]:
    """Return the ids of the CUDA backend's candidates for (family, M, N, K), in the backend's order."""
    candidates = get("cuda").candidates(problem_of(*shape), H200)
    return [item.id for item in candidates if isinstance(item, Candidate)]


def print_served_ranks(family: str) -> None:
    """Print, for each shape, the fastest candidate that served it in a stored run of h200.py, and its rank."""
    for shape, rows in sorted(runs_of(sorted(RESULTS.glob("h200-*.json"))).items()):
        names = ordered_ids(shape)
        cuda_rows = [row for row in rows if row["kernel"] in names]
        if cuda_rows and shape[0] == family:
            best = min(cuda_rows, key=lambda row: float(row["median_us"].get(ALONE, row["median_us"][OURS])))["kernel"]
            same_template = [name for name in names if name.split("[")[0] == best.split("[")[0]]
            rank, (kind, m, n, k) = same_template.index(best) + 1, shape
            print(f"{kind} {m}x{n}x{k}: place {rank} of {len(same_template)}, {best}")


def main() -> None:
    if sys.argv[1:2] == ["--served"]:
        print_served_ranks(sys.argv[2] if sys.argv[2:] else "int8wo")
        return
    path = Path(sys.argv[1]) if sys.argv[1:] else RESULTS / SWEEP
    for shape, times in json.loads(path.read_text(encoding="utf-8")).items():
        family, m, k, n = shape.split(":")
        names = [name for name in ordered_ids((family, int(m), int(n), int(k))) if not name.startswith("cuda/skinny")]
        times_us = [times["broad_us"][name] for name in names if name in times["broad_us"]]
        slowdowns = "  ".join(f"first {count}: {min(times_us[:count]) / min(times_us):.3f}x" for count in FIRST)
        print(f"{shape:22} {len(times_us):4} configurations  best {min(times_us):7.2f} us  {slowdowns}")


if __name__ == "__main__":
    main()
