"""The declared search spaces of the CUDA C++ kernels, and why some of them is illegal for a Problem or on a Target.

Entries of ``skinny``: ``bm``, ``bn`` (the tile: rows of A, columns of B), ``warps`` of a block, of which ``side`` lie
side by side along the tile's columns and the others share K, ``depth`` (how many times 64 bytes of each column a warp
has under way), ``split`` (blocks of a cluster, which share K).

Entries of ``slab``: ``bm``, ``bn`` (the tile; no more rows than A has, though wgmma takes 64), ``chunks`` (times 128
bytes of a row in a stage), ``stages`` (as many as there is shared memory for), ``cluster`` (blocks that share what they
read of A), ``split`` (blocks of a cluster, which share K; only one of the two is more than 1); for fp8, ``pieces`` (of
the slab's columns, multiplied one after the other) and ``turns`` (of those products, how many are under way at a time).

Entries of ``mixed``: ``bm``, ``bn`` (the tile), ``split`` (blocks of a cluster, which share K), ``stages`` (as many as
one, two, three or four blocks of a multiprocessor have room for).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...core.candidate import Candidate, Illegal
from ...core.problem import Problem, bits
from ...core.target import Target
from ..base import NOT_LISTED
from ..gpu.rules import FP8, DeviceLimits, aligned_leads, device_of, refusal
from ..gpu.space import Config, rank_configs
from .block import (
    CHUNK_BYTES,
    MIXED_STEP,
    REGISTERS,
    alike,
    mixed_more,
    mixed_registers,
    mixed_shared,
    mixed_stage,
    mixed_stages,
    mixed_warps,
    slab_more,
    slab_registers,
    slab_stages,
    slab_warps,
)
from .epilogue import TYPES, kept_words, scale_group
from .source import MIXED, SKINNY, SLAB, run_of

NAME = "cuda"
_Space = tuple[
    Callable[[Problem, DeviceLimits], str],
    Callable[[Problem, DeviceLimits], Iterator[Config]],
    Callable[[Problem, DeviceLimits, Config], str],
    Callable[[Problem, DeviceLimits, Config], float],
]
_ROWS = 32
_SLAB_ROWS = 8192
_MIXED_ROWS = (17, 1024)
_WIDTHS = tuple(range(16, 257, 8))
_LANES = 4  # of a warp, side by side along K
_SHARED = 48 << 10  # what a kernel has without asking for more
_RESERVED = 1 << 10  # of a multiprocessor's shared memory, for each block
_THREADS = 2048
_PIECES_FROM = 128  # columns of a slab: two products of fewer leave the matrix units waiting more often than one does
_FEWEST_STAGES, _MOST_STAGES = 3, 24
# Fitted to times on an H200.
_BANDWIDTH = 4.2e12
_L2_BANDWIDTH = 2.1e13  # many ask for the same of A
_FLOPS = 1.9e13  # of a multiprocessor at one-byte operands
_FLIGHT = 15e3  # bytes a multiprocessor must have under way to reach half the bandwidth
_WAVE_S = 1.6e-6  # what another round of blocks adds
_SPLIT_S = 4e-6
_START_S = 2e-6
_SLAB_FLIGHT = 4e4  # bytes of stages, beyond the one in use, that keep a block busy half of the time
_STEP_S = 3.9e-8  # a stage's barriers
_DRAIN_S = 1.3e-8  # fp8: nothing is multiplied between a product's end and the next one's start
_BESIDE = 0.2  # of the second longest of what goes on at a time
_COLUMN_S = 1.2e-8  # a column of 64 rows on its way out
_SLAB_BESIDE, _SLAB_COLUMN_S = 0.27, 1.9e-8  # ``slab``'s own of the two above
_MEET_S = 6.4e-6  # a cluster's blocks, one after the last
_BETWEEN_BLOCKS = 4.5e10  # bytes a second that one reads of another's shared memory
_CONVERT_S = 2e-7  # 64 columns of a step of ``mixed`` become numbers
_MIXED_FLOPS = 1.3e13  # of a multiprocessor, as ``_FLOPS``
_MIXED_L2 = 1.6e13
_CLUSTER_LOSS = 0.04  # of the multiprocessors, for each block beyond two that a cluster wants of one part of the GPU


def candidates(problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
    """Legal candidates, likeliest first within each template, then what was ruled out and why."""
    none = refusal(problem) or _refusal(problem)
    if none:
        yield Illegal(Candidate.make(NAME, "*"), none)
        return
    device = device_of(target)
    illegal: list[Illegal] = []
    for template, (why, space, check, guess) in _spaces().items():
        reason = why(problem, device)
        if reason:
            illegal.append(Illegal(Candidate.make(NAME, template), reason))
            continue
        configs = space(problem, device)
        legal, refused = rank_configs(
            NAME, template, configs, partial(check, problem, device), partial(guess, problem, device)
        )
        yield from legal
        illegal += refused
    yield from illegal


def why_illegal(problem: Problem, candidate: Candidate, target: Target) -> str:
    """Return why ``candidates`` does not list ``candidate``, by a look at its template alone; empty if it does."""
    reason = refusal(problem) or _refusal(problem)
    if reason or candidate.template not in _spaces():
        return reason or NOT_LISTED
    device, wanted = device_of(target), dict(candidate.config)
    why, space, check, _ = _spaces()[candidate.template]
    reason = why(problem, device)
    for config in () if reason else space(problem, device):
        if config == wanted and Candidate.make(NAME, candidate.template, **config).identity == candidate.identity:
            return check(problem, device, config)
    return reason or NOT_LISTED


@functools.cache
def _spaces() -> dict[str, _Space]:
    """Of each template: why it does not take a Problem, its configurations, why one is illegal, and its time."""
    return {
        SKINNY: (_skinny_refusal, _skinny_space, _skinny_illegal, _skinny_seconds),
        SLAB: (_slab_refusal, _slab_space, _slab_illegal, _slab_seconds),
        MIXED: (_mixed_refusal, _mixed_space, _mixed_illegal, _mixed_seconds),
    }


def _refusal(problem: Problem) -> str:
    """Why no template takes the Problem in any configuration."""
    a_ok, b_ok, _ = aligned_leads(problem)
    if problem.a.layout.order != "row" or (problem.b.dtype != "int4" and problem.b.layout.order != "col"):
        return "reads along K: rows of A and columns of B must be contiguous"
    if not (a_ok and b_ok) or problem.k % run_of(problem):
        return f"reads 16 bytes at a time: leading dimensions and K must be multiples of that; got K = {problem.k}"
    if problem.out_dtype not in TYPES or problem.out_dtype in FP8:
        return f"writes no {problem.out_dtype}"
    return ""


def _skinny_refusal(problem: Problem, device: DeviceLimits) -> str:
    if problem.m > _ROWS:
        return f"made for at most {_ROWS} rows; got {problem.m}"
    group, chunk = scale_group(problem), _LANES * run_of(problem)
    if group % chunk:
        return f"scales {chunk} elements of K at a time: groups must be multiples of that; got {group}"
    if problem.family == "scaled_mm" and device.capability < (8, 9):
        return "multiplying fp8 needs compute capability 8.9"
    return ""


def _skinny_space(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    bm = 8 * -(-problem.m // 8)
    sides = (1,) if bm == 8 else (1, 2)  # few rows are read soon enough by every warp
    for bn, side, warps, depth, split in itertools.product((16, 32, 64), sides, (4, 8, 16), (1, 2, 4), (1, 2, 4)):
        if bn // side >= 16:
            yield {"bm": bm, "bn": bn, "side": side, "warps": warps, "depth": depth, "split": split}


def _skinny_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    bm, bn, warps, split = (config[name] for name in ("bm", "bn", "warps", "split"))
    turns = warps // config["side"]
    chunks = -(-problem.k // (_LANES * run_of(problem)))
    if split > 1 and device.capability < (9, 0):
        return "clusters need compute capability 9.0"
    if turns * split > max(chunks, 4):
        return f"{chunks} times 64 bytes of K leave some of {turns * split} warps with nothing to do"
    if split > 1 and _tiles(problem, config) >= 2 * device.multiprocessors:
        return "there are blocks enough for every multiprocessor without splitting K"
    shared = 4 * (bn * (turns * (bm + 1) + (bm if split > 1 else 0)) + kept_words(problem, bm, bn))
    if shared > _SHARED:
        return f"{shared >> 10} KB for the warps' sums and vectors; {_SHARED >> 10} are there"
    allowed = min(255, REGISTERS // (32 * warps))
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
        spare = 36 + 8 * mt  # fp8 is multiplied as float16
    elif grouped:
        zero = int(problem.b.quant is not None and problem.b.quant.zero_point)
        spare = 28 + 2 * r * config["depth"] * (1 + zero) + 4 * mt * zero
    elif problem.b.dtype == "int4":
        spare = 26
    return int(spare + config["depth"] * (8 * r + 4 * loads * mt) + 4 * (1 + grouped) * r * mt + 4 * r + 2 * mt)


def _tiles(problem: Problem, config: dict[str, Any]) -> int:
    return int(-(-problem.m // config["bm"]) * -(-problem.n // config["bn"]) * problem.batch)


def _skinny_seconds(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> float:
    """A guess at one call's time, to order candidates; it decides nothing else."""
    warps, blocks = config["warps"], _tiles(problem, config) * config["split"]
    threads = 32 * warps
    fit = min(REGISTERS // (_registers(problem, config) * threads), _THREADS // threads)
    busiest = -(-blocks // device.multiprocessors)
    resident = max(1, min(fit, busiest))
    flight = resident * threads * 2 * (config["bn"] // config["side"] // 16) * 16 * config["depth"]
    read = problem.n * problem.k * problem.batch * bits(problem.b.dtype) / 8
    memory = read / _BANDWIDTH * busiest * device.multiprocessors / blocks * (1.0 + _FLIGHT / flight)
    return float(memory + _WAVE_S * -(-busiest // resident) + (_SPLIT_S if config["split"] > 1 else 0.0))


def _slab_refusal(problem: Problem, device: DeviceLimits) -> str:
    if device.capability != (9, 0):
        return "wgmma is compute capability 9.0's alone"
    if problem.family not in ("mm", "int_mm", "scaled_mm"):
        return f"multiplies matrices of one kind of element; got {problem.family}"
    if problem.m > _SLAB_ROWS:
        return f"made for at most {_SLAB_ROWS} rows; got {problem.m}"
    return ""


def _slab_space(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    """Slabs just wide enough that one to six rounds of blocks do, and some of usual widths."""
    stepwise, one_or_two = problem.family == "scaled_mm", (1, 2)
    usual = {64, 128, 192, 256} if stepwise else {64, 128, 256}
    by_turns = one_or_two if stepwise else (1,)
    few = problem.m <= 64
    rows = (8 * -(-problem.m // 8),) if few else (64, 128)
    for bm, split in itertools.product(rows, (1, 2, 3, 4, 6, 8)):
        blocks = -(-problem.m // bm) * split
        fitting = {
            next((w for w in _WIDTHS if -(-problem.n // w) * blocks <= device.multiprocessors * rounds), 256)
            for rounds in range(1, 7 if split == 1 else 3)
        }
        for bn, cluster, chunks, pieces, turns in itertools.product(
            sorted(fitting | usual), one_or_two, (1, 2, 4) if few else (1, 2), by_turns, by_turns
        ):
            if min(cluster, split) == 1 and (pieces == 1 or bn >= _PIECES_FROM):
                shared = 8 * cluster  # rows are swizzled in eights
                config = {
                    "bm": -(-bm // shared) * shared,
                    "bn": bn,
                    "chunks": chunks,
                    "cluster": cluster,
                    "split": split,
                }
                config |= {"pieces": pieces, "turns": turns}
                yield {**config, "stages": min(_MOST_STAGES, slab_stages(problem, config, device.shared))}


def _slab_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    if config["stages"] < _FEWEST_STAGES:
        return f"shared memory has room for {config['stages']} stages; at least {_FEWEST_STAGES} hide the latency"
    if config["chunks"] > 1 and problem.k * bits(problem.a.dtype) <= 8 * CHUNK_BYTES:
        return "K ends in the first 128 bytes"
    if config["bm"] % (8 * config["cluster"]):
        return f"eight rows are swizzled together; {config['cluster']} blocks cannot share {config['bm']}"
    if config["cluster"] > -(-problem.n // config["bn"]):
        return "there are fewer slabs than blocks in a cluster"
    split, steps = config["split"], -(-problem.k * bits(problem.a.dtype) // (8 * CHUNK_BYTES * config["chunks"]))
    if split > 1 and steps < 2 * split:
        return f"K is {steps} steps: too few to be shared by {split} blocks"
    if split > 1 and _tiles(problem, config) >= 2 * device.multiprocessors:
        return "there are blocks enough for every multiprocessor without splitting K"
    pieces, turns = config["pieces"], config["turns"]
    if config["bn"] % (8 * pieces):
        return f"wgmma multiplies by multiples of 8 columns; {config['bn']} are in {pieces} pieces"
    if turns > config["chunks"] * pieces:
        return f"a step has no {turns} products for as many turns"
    wanted = slab_registers(problem, config)
    allowed = slab_more(problem, config) or alike(slab_warps(problem, config))
    if wanted > allowed:
        return f"about {wanted} registers a thread; {allowed} are there"
    return ""


def _slab_seconds(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> float:
    """As ``_skinny_seconds``: a block's steps through its slabs, or all of B through memory, and the last slab's way
    out."""
    bm, bn, cluster, split = config["bm"], config["bn"], config["cluster"], config["split"]
    size = bits(problem.a.dtype) / 8
    groups = -(-problem.m // bm) * -(-problem.n // (bn * cluster))
    there = int(device.multiprocessors * (1.0 - _CLUSTER_LOSS * max(0, split - 2))) // (cluster * split)
    rounds = -(-groups // max(1, there)) / split
    stage = CHUNK_BYTES * config["chunks"]
    steps = rounds * -(-problem.k * size // stage)
    fetched = steps * stage * (bn + min(bm, problem.m) / cluster) * device.multiprocessors / _L2_BANDWIDTH
    walk = fetched + steps * _STEP_S * cluster**2
    compute = 2.0 * problem.k * size * max(bm, 64) * bn * rounds / _FLOPS
    memory = problem.n * problem.k * size / _BANDWIDTH
    waiting = 1 + _SLAB_FLIGHT / ((config["stages"] - 1) * stage * (bn + bm))
    walk, compute = walk * waiting, compute * waiting
    if problem.family == "scaled_mm":
        compute += steps * _DRAIN_S * (config["chunks"] * config["pieces"] - config["turns"] + 1)
    faster, slower = sorted((walk, memory, compute))[1:]
    out = _SLAB_COLUMN_S * bn * bm / 64
    if split > 1:
        out = out / split + _MEET_S + 4.0 * bm * bn * (split - 1) / split / _BETWEEN_BLOCKS
    return float(slower + _SLAB_BESIDE * faster + out + _START_S)


def _mixed_refusal(problem: Problem, device: DeviceLimits) -> str:
    if device.capability != (9, 0):
        return "wgmma is compute capability 9.0's alone"
    if problem.family != "mixed_mm":
        return f"multiplies by narrower weights; got {problem.family}"
    if not _MIXED_ROWS[0] <= problem.m <= _MIXED_ROWS[1]:
        return f"made for {_MIXED_ROWS[0]} to {_MIXED_ROWS[1]} rows; got {problem.m}"
    if problem.b.quant is not None and problem.b.quant.zero_point:
        return "takes no zero points"
    if scale_group(problem) % MIXED_STEP:
        return (
            f"scales {MIXED_STEP} elements of K at a time: groups must be multiples of that; got {scale_group(problem)}"
        )
    return ""


def _mixed_space(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    """A's rows in as few parts as wgmma takes and in one more; a block alone on its multiprocessor, or several."""
    fewest = -(-problem.m // _WIDTHS[-1])
    rows = {8 * -(-problem.m // (8 * parts)) for parts in (fewest, fewest + 1, 2 * fewest + 1)}
    for bm, bn, split in itertools.product(sorted(rows), (64, 128, 192, 256), (1, 2, 3, 4, 6, 8)):
        config = {"bm": bm, "bn": bn, "split": split}
        rooms = [(device.shared + _RESERVED) // beside - _RESERVED for beside in (1, 2, 3, 4)]
        for stages in sorted({min(_MOST_STAGES, mixed_stages(problem, config, room)) for room in rooms}):
            yield {**config, "stages": stages}


def _mixed_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    stages, split = config["stages"], config["split"]
    if stages < 2:
        return f"shared memory has room for {stages} stages; with fewer than 2 fetching and multiplying take turns"
    if mixed_shared(problem, config) > device.shared:
        return f"{mixed_shared(problem, config) >> 10} KB of shared memory; a block has {device.shared >> 10}"
    steps = -(-problem.k // MIXED_STEP)
    if split > 1 and steps < 2 * split:
        return f"K is {steps} steps: too few to be shared by {split} blocks"
    if split > 1 and _tiles(problem, config) >= 3 * device.multiprocessors:
        return "there are blocks enough for every multiprocessor without splitting K"
    wanted = mixed_registers(problem, config)
    allowed = mixed_more(problem, config) or alike(mixed_warps(problem, config))
    if wanted > allowed:
        return f"about {wanted} registers a thread; {allowed} are there"
    return ""


def _mixed_seconds(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> float:
    """As ``_skinny_seconds``: what the busiest multiprocessor reads of B, gets of A, converts and multiplies, and the
    rounds."""
    bm, bn, split = config["bm"], config["bn"], config["split"]
    blocks, groups = _tiles(problem, config) * split, bn // 64
    registers = 32 * mixed_warps(problem, config) * mixed_registers(problem, config)
    room = (device.shared + _RESERVED) // (mixed_shared(problem, config) + _RESERVED)
    beside = max(1, min(room, REGISTERS // registers))
    there = int(device.multiprocessors * (1.0 - _CLUSTER_LOSS * max(0, split - 2)))
    busiest = -(-blocks // there)
    steps = busiest * -(-problem.k // MIXED_STEP) / split
    weights = mixed_stage(problem, config) - 2 * CHUNK_BYTES * bm
    flight = min(beside, busiest) * config["stages"] * weights
    memory = steps * weights * device.multiprocessors / _BANDWIDTH * (1.0 + _FLIGHT / flight)
    fetched = steps * mixed_stage(problem, config) * device.multiprocessors / _MIXED_L2
    alone = min(beside, busiest) * groups == 1
    compute = steps * groups * max(_CONVERT_S * (1.5 if alone else 1.0), 4.0 * MIXED_STEP * 64 * bm / _MIXED_FLOPS)
    faster, slower = sorted((memory, fetched, compute))[1:]
    rounds = -(-busiest // beside)
    return float(
        slower + _BESIDE * faster + _START_S + _WAVE_S * rounds + _COLUMN_S * bn * bm / 64 / split
        + (_WAVE_S if split > 1 else 0.0)
    )  # fmt: skip
