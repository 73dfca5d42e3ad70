"""How well the CUDA backend's guesses order ``slab`` and ``mixed``, by sweeps of all of them on an H200. Needs no GPU.

    python benchmarks/guess.py [SWEEP.json]
    python benchmarks/guess.py --served [FAMILY]     places in the guess's order of what was served in stored runs

A sweep has microseconds of every configuration by shape, "family:M:K:N". Printed: how much longer than the best of
all the best of the first 1, 6 and 12 takes. The guess's constants were fitted to the default sweep, among others: it
says how well they fit, not how well they foretell.
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


def order(shape: tuple[str, int, int, int]) -> list[str]:
    """The CUDA backend's candidates for a family's M, N and K, as its guesses order them."""
    listed = get("cuda").candidates(problem_of(*shape), H200)
    return [item.id for item in listed if isinstance(item, Candidate)]


def served(family: str) -> None:
    """For each shape: the fastest kernel of ours that served it in a stored run of h200.py, and its place."""
    for shape, rows in sorted(runs_of(sorted(RESULTS.glob("h200-*.json"))).items()):
        names = order(shape)
        ours = [row for row in rows if row["kernel"] in names]
        if ours and shape[0] == family:
            best = min(ours, key=lambda row: float(row["median_us"].get(ALONE, row["median_us"][OURS])))["kernel"]
            own = [name for name in names if name.split("[")[0] == best.split("[")[0]]
            print(f"{shape[0]} {shape[1]}x{shape[2]}x{shape[3]}: place {own.index(best) + 1} of {len(own)}, {best}")


def main() -> None:
    if sys.argv[1:2] == ["--served"]:
        served(sys.argv[2] if sys.argv[2:] else "int8wo")
        return
    path = Path(sys.argv[1]) if sys.argv[1:] else RESULTS / SWEEP
    for shape, times in json.loads(path.read_text(encoding="utf-8")).items():
        family, m, k, n = shape.split(":")
        names = [name for name in order((family, int(m), int(n), int(k))) if not name.startswith("cuda/skinny")]
        taken = [times["broad_us"][name] for name in names if name in times["broad_us"]]
        behind = "  ".join(f"first {count}: {min(taken[:count]) / min(taken):.3f}x" for count in FIRST)
        print(f"{shape:22} {len(taken):4} configurations  best {min(taken):7.2f} us  {behind}")


if __name__ == "__main__":
    main()
