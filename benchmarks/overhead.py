"""Measure gemmtune's overhead outside kernels: dispatch, import, store look-ups and artifact look-ups.

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
from harness import Entrant, Spread, interleave, write_results

import gemmtune
from gemmtune import fuse
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.store import Artifacts, open_store


def time_dispatch() -> dict[str, tuple[float, float]]:
    """Return (PyTorch, gemmtune) microseconds per call by op, on 8x8 operands, where overhead dominates."""
    gemmtune.tune([(build(8, 8, 8, "fp32"), 1)], budget=1.0)
    gemmtune.refresh()
    x, w, b, out = (torch.randn(8, 8) for _ in range(4))
    packed, relu = gemmtune.pack(w), (fuse.relu(),)
    layer, packed_layer = (torch.nn.Linear(8, 8, bias=False).requires_grad_(False) for _ in range(2))
    packed_layer.weight = torch.nn.Parameter(gemmtune.nn.PackedTensor.of(packed), requires_grad=False)
    w_kn = torch.nn.Parameter(gemmtune.nn.PackedTensor.of(packed, transposed=True), requires_grad=False)
    bias = torch.randn(8)
    rows = {
        "linear with a Plan, 8x8": _pair_us(lambda: F.linear(x, w), lambda: gemmtune.linear(x, w)),
        "linear, packed weight, 8x8": _pair_us(lambda: F.linear(x, w), lambda: gemmtune.linear(x, packed)),
        "nn.Linear, packed weight, 8x8": _pair_us(lambda: layer(x), lambda: packed_layer(x)),
        "addmm, packed weight [K, N]": _pair_us(lambda: torch.addmm(bias, x, b), lambda: torch.addmm(bias, x, w_kn)),
        "mm without a Plan, 8x8": _pair_us(lambda: torch.mm(x, b), lambda: gemmtune.mm(x, b)),
        "mm with out=": _pair_us(lambda: torch.mm(x, b, out=out), lambda: gemmtune.mm(x, b, out=out)),
        "linear with epilogue=": _pair_us(lambda: F.linear(x, w).relu(), lambda: gemmtune.linear(x, w, epilogue=relu)),
    }
    for name, (torch_us, gemmtune_us) in rows.items():
        print(f"{name:<28} PyTorch {torch_us:6.2f} us  gemmtune {gemmtune_us:6.2f} us  ({gemmtune_us - torch_us:+.2f})")
    return rows


def _pair_us(torch_call: Callable[[], Any], gemmtune_call: Callable[[], Any]) -> tuple[float, float]:
    def repeated(call: Callable[[], Any]) -> Entrant:
        def run(_: int) -> None:
            for _ in range(1000):
                call()

        return Entrant(run, calls=1000)

    times = interleave(
        {"torch": repeated(torch_call), "gemmtune": repeated(gemmtune_call)}, sets=1, seconds=3.0, rounds=(51, 401)
    )
    return Spread.of(times["torch"]).median * 1e6, Spread.of(times["gemmtune"]).median * 1e6


def time_import(rounds: int = 9) -> tuple[float, float]:
    """Return the seconds of ``import torch`` and of ``import gemmtune`` after it: medians over new processes."""
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import gemmtune; gemmtune.mm; "
        "c = time.perf_counter(); print(b - a, c - b)"
    )
    samples = []
    for _ in range(rounds):
        text = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        samples.append(tuple(float(part) for part in text.split()))
    torch_s, gemmtune_s = (statistics.median(column) for column in zip(*samples, strict=True))
    print(f"import torch {torch_s * 1e3:.0f} ms; import gemmtune after it {gemmtune_s * 1e3:.0f} ms")
    return torch_s, gemmtune_s


def time_store_hit(rounds: int = 501) -> float:
    """Return the median seconds of a store hit; the file is already open."""
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


def time_artifact_lookup(count: int = 3000, rounds: int = 101) -> float:
    """Return the median seconds of loading one of ``count`` artifacts, including the check of its bytes."""
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
        rows = time_dispatch()
    torch_s, gemmtune_s = time_import()
    store_times = {"store_hit_s": time_store_hit(), "artifact_found_s": time_artifact_lookup()}
    write_results("overhead", rows, import_torch_s=torch_s, import_gemmtune_s=gemmtune_s, **store_times)


if __name__ == "__main__":
    main()
