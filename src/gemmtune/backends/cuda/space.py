"""The declared search space of the CUDA C++ kernels, and why some of it is illegal for a Problem or on a Target.

Entries of ``skinny``: ``bm``, ``bn`` (the tile: rows of A, columns of B), ``warps`` of a block, of which ``side`` lie
side by side along the tile's columns and the others share K, ``depth`` (how many times 64 bytes of each column a warp
has under way), ``split`` (blocks of a cluster, which share K).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

from ...problem import Problem, bits
from ...target import Target
from ..base import Candidate, Illegal
from ..gpu.rules import FP8, Device, aligned, device_of, refusal
from ..gpu.space import ranked
from .source import TYPES, run_of, scale_group

NAME = "cuda"
TEMPLATE = "skinny"
_ROWS = 32
_LANES = 4  # of a warp, side by side along K
_SHARED = 48 << 10  # what a kernel has without asking for more
_REGISTERS = 65536  # of a multiprocessor
_THREADS = 2048
# Fitted to times on an H200.
_BANDWIDTH = 4.2e12
_FLIGHT = 15e3  # bytes a multiprocessor must have under way to reach half the bandwidth
_WAVE_S = 1.6e-6  # what another round of blocks adds
_SPLIT_S = 4e-6


def candidates(problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
    """Legal candidates, likeliest first, then what was ruled out and why."""
    reason = refusal(problem) or _refusal(problem, target)
    if reason:
        yield Illegal(Candidate.make(NAME, TEMPLATE), reason)
        return
    device = device_of(target)
    guess = partial(_seconds, problem, device)
    legal, illegal = ranked(NAME, TEMPLATE, _space(problem), partial(_illegal, problem, device), guess)
    yield from legal
    yield from illegal


def _space(problem: Problem) -> Iterator[dict[str, Any]]:
    bm = 8 * -(-problem.m // 8)
    sides = (1,) if bm == 8 else (1, 2)  # few rows are read soon enough by every warp
    for bn, side, warps, depth, split in itertools.product((16, 32, 64), sides, (4, 8, 16), (1, 2, 4), (1, 2, 4)):
        if bn // side >= 16:
            yield {"bm": bm, "bn": bn, "side": side, "warps": warps, "depth": depth, "split": split}


def _refusal(problem: Problem, target: Target) -> str:
    """Why the template does not take the Problem in any configuration."""
    a_ok, b_ok, _ = aligned(problem)
    if problem.m > _ROWS:
        return f"made for at most {_ROWS} rows; got {problem.m}"
    if problem.a.layout.order != "row" or (problem.b.dtype != "int4" and problem.b.layout.order != "col"):
        return "reads along K: rows of A and columns of B must be contiguous"
    if not (a_ok and b_ok) or problem.k % run_of(problem):
        return f"reads 16 bytes at a time: leading dimensions and K must be multiples of that; got K = {problem.k}"
    if problem.out_dtype not in TYPES or problem.out_dtype in FP8:
        return f"writes no {problem.out_dtype}"
    group, chunk = scale_group(problem), _LANES * run_of(problem)
    if group % chunk:
        return f"scales {chunk} elements of K at a time: groups must be multiples of that; got {group}"
    if problem.family == "scaled_mm" and device_of(target).capability < (8, 9):
        return "multiplying fp8 needs compute capability 8.9"
    return ""


def _illegal(problem: Problem, device: Device, config: dict[str, Any]) -> str:
    bm, bn, warps, split = (config[name] for name in ("bm", "bn", "warps", "split"))
    turns = warps // config["side"]
    chunks = -(-problem.k // (_LANES * run_of(problem)))
    if split > 1 and device.capability < (9, 0):
        return "clusters need compute capability 9.0"
    if turns * split > max(chunks, 4):
        return f"{chunks} times 64 bytes of K leave some of {turns * split} warps with nothing to do"
    if split > 1 and _tiles(problem, config) >= 2 * device.multiprocessors:
        return "there are blocks enough for every multiprocessor without splitting K"
    shared = 4 * bn * (turns * (bm + 1) + (bm if split > 1 else 0))
    if shared > _SHARED:
        return f"{shared >> 10} KB for the warps' sums; {_SHARED >> 10} are there"
    allowed = min(255, _REGISTERS // (32 * warps))
    wanted = _registers(problem, config)
    if wanted > allowed:
        return f"about {wanted} registers a thread; {warps} warps have {allowed}"
    return ""


def _registers(problem: Problem, config: dict[str, Any]) -> int:
    """About as many as the compiler uses: what is loaded, what is added up, addresses, and what conversions take."""
    r, mt = config["bn"] // config["side"] // 16, config["bm"] // 8
    loads = run_of(problem) * bits(problem.a.dtype) // 128
    grouped = bool(scale_group(problem))
    spare = 20
    if problem.family == "scaled_mm":
        spare = 48 + 8 * mt  # fp8 is multiplied as float16
    elif problem.family == "mixed_mm":
        spare = 45 if grouped or problem.b.dtype == "int4" else 30
    return int(spare + config["depth"] * (8 * r + 4 * loads * mt) + 4 * (1 + grouped) * r * mt + 4 * r + 2 * mt)


def _tiles(problem: Problem, config: dict[str, Any]) -> int:
    return int(-(-problem.m // config["bm"]) * -(-problem.n // config["bn"]) * problem.batch)


def _seconds(problem: Problem, device: Device, config: dict[str, Any]) -> float:
    """A guess at one call's time, to order candidates; it decides nothing else."""
    warps, blocks = config["warps"], _tiles(problem, config) * config["split"]
    threads = 32 * warps
    fit = min(_REGISTERS // (_registers(problem, config) * threads), _THREADS // threads)
    busiest = -(-blocks // device.multiprocessors)
    resident = max(1, min(fit, busiest))
    flight = resident * threads * 2 * (config["bn"] // config["side"] // 16) * 16 * config["depth"]
    read = problem.n * problem.k * problem.batch * bits(problem.b.dtype) / 8
    memory = read / _BANDWIDTH * busiest * device.multiprocessors / blocks * (1.0 + _FLIGHT / flight)
    return float(memory + _WAVE_S * -(-busiest // resident) + (_SPLIT_S if config["split"] > 1 else 0.0))
