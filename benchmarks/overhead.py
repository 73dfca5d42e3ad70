"""What gemmtune costs beside the kernels: dispatch in microseconds, import time, the store, built kernels.

python benchmarks/overhead.py
"""

from __future__ import annotations

import hashlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["GEMMTUNE_STORE"] = str(Path(tempfile.mkdtemp(prefix="gemmtune-overhead-")) / "store.db")

import torch
import torch.nn.functional as F
from harness import Entrant, Spread, interleave, write

import gemmtune
from gemmtune import fuse
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.store import Artifacts, open_store


def dispatch() -> dict[str, tuple[float, float]]:
    """Microseconds a call, 8x8: what gemmtune adds to PyTorch's own op. Each pair: (PyTorch, gemmtune)."""
    gemmtune.tune([(build(8, 8, 8, "fp32"), 1)], budget=1.0)
    gemmtune.refresh()
    x, w, b, out = (torch.randn(8, 8) for _ in range(4))
    packed, relu = gemmtune.pack(w), (fuse.relu(),)
    layer, packed_layer = (torch.nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(2))
    packed_layer.weight = torch.nn.Parameter(gemmtune.nn.PackedTensor.of(packed), requires_grad=False)
    turned = torch.nn.Parameter(gemmtune.nn.PackedTensor.of(packed, transposed=True), requires_grad=False)
    bias = torch.randn(8)
    rows = {
        "linear with a Plan, 8x8": _pair(lambda: F.linear(x, w), lambda: gemmtune.linear(x, w)),
        "linear, packed weight, 8x8": _pair(lambda: F.linear(x, w), lambda: gemmtune.linear(x, packed)),
        "nn.Linear, packed weight, 8x8": _pair(lambda: layer(x), lambda: packed_layer(x)),
        "addmm, packed weight [K, N]": _pair(lambda: torch.addmm(bias, x, b), lambda: torch.addmm(bias, x, turned)),
        "mm without a Plan, 8x8": _pair(lambda: torch.mm(x, b), lambda: gemmtune.mm(x, b)),
        "mm with out=": _pair(lambda: torch.mm(x, b, out=out), lambda: gemmtune.mm(x, b, out=out)),
        "linear with epilogue=": _pair(lambda: F.linear(x, w).relu(), lambda: gemmtune.linear(x, w, epilogue=relu)),
    }
    for name, (plain, mine) in rows.items():
        print(f"{name:<28} PyTorch {plain:6.2f} us  gemmtune {mine:6.2f} us  ({mine - plain:+.2f})")
    return rows


def _pair(plain: Callable[[], Any], mine: Callable[[], Any]) -> tuple[float, float]:
    def loop(action: Callable[[], Any]) -> Entrant:
        def run(_: int) -> None:
            for _ in range(1000):
                action()

        return Entrant(run, calls=1000)

    times = interleave({"plain": loop(plain), "mine": loop(mine)}, sets=1, seconds=3.0, rounds=(51, 401))
    return Spread.of(times["plain"]).median * 1e6, Spread.of(times["mine"]).median * 1e6


def importing(rounds: int = 9) -> tuple[float, float]:
    """Seconds to ``import torch``, and to ``import gemmtune`` after it, medians over fresh processes."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import gemmtune; gemmtune.mm; "
        "c = time.perf_counter(); print(b - a, c - b)"
    )
    samples = []
    for _ in range(rounds):
        text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        samples.append(tuple(float(part) for part in text.split()))
    torch_s, ours_s = (statistics.median(column) for column in zip(*samples, strict=True))
    print(f"import torch {torch_s * 1e3:.0f} ms; import gemmtune after it {ours_s * 1e3:.0f} ms")
    return torch_s, ours_s


def store_hit(rounds: int = 501) -> float:
    """Seconds for the store to answer a problem it knows (median), the file already open."""
    target, key = current_target(), build(8, 8, 8, "fp32").key
    store = open_store()
    if store.get(target, key) is None:
        raise SystemExit("the store does not know the problem that was just tuned")
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        store.get(target, key)
        times.append(time.perf_counter() - start)
    store.close()
    median = statistics.median(times)
    print(f"store hit {median * 1e6:.0f} us (slowest of {rounds}: {max(times) * 1e6:.0f} us)")
    return median


def artifact_found(count: int = 3000, rounds: int = 101) -> float:
    """Seconds to find one built kernel among many (median), its bytes checked."""
    artifacts = Artifacts(Path(tempfile.mkdtemp(prefix="gemmtune-overhead-")) / "artifacts")
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]
    for key in keys:
        artifacts.put(key, bytes(20_000))
    times = []
    for key in keys[:rounds]:
        start = time.perf_counter()
        artifacts.get(key)
        times.append(time.perf_counter() - start)
    median = statistics.median(times)
    print(f"one built kernel found among {count} in {median * 1e3:.2f} ms")
    return median


def main() -> None:
    with torch.inference_mode():
        rows = dispatch()
    torch_s, ours_s = importing()
    stored = {"store_hit_s": store_hit(), "artifact_found_s": artifact_found()}
    write("overhead", rows, import_torch_s=torch_s, import_gemmtune_s=ours_s, **stored)


if __name__ == "__main__":
    main()
