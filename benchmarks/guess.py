"""How well the CUDA backend's guesses order ``slab`` and ``mixed``, by sweeps of all of them on an H200. Needs no GPU.

    python benchmarks/guess.py [SWEEP.json]

A sweep has microseconds of every configuration by shape, "family:M:K:N". Printed: how much longer than the best of
all the best of the first 1, 6 and 12 takes. The guess's constants were fitted to the default sweep, among others: it
says how well they fit, not how well they foretell.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from h200 import problem_of
from harness import RESULTS

from gemmtune.backends import get
from gemmtune.backends.base import Candidate
from gemmtune.target import Target

SWEEP = "gpu-slab-sweep-20261122.json"
H200 = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 62914560), cores=132, versions=(("hip", "None"),))
FIRST = (1, 6, 12)


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else RESULTS / SWEEP
    for shape, times in json.loads(path.read_text(encoding="utf-8")).items():
        family, m, k, n = shape.split(":")
        listed = get("cuda").candidates(problem_of(family, int(m), int(n), int(k)), H200)
        names = [item.id for item in listed if isinstance(item, Candidate) and item.template != "skinny"]
        taken = [times["broad_us"][name] for name in names if name in times["broad_us"]]
        behind = "  ".join(f"first {count}: {min(taken[:count]) / min(taken):.3f}x" for count in FIRST)
        print(f"{shape:22} {len(taken):4} configurations  best {min(taken):7.2f} us  {behind}")


if __name__ == "__main__":
    main()
