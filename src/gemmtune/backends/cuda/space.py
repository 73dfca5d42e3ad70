"""The search spaces of the CUDA C++ kernels, and why parts of them are illegal for a Problem or on a Target.

Axes of ``skinny``: ``bm``, ``bn`` (the tile: rows of A, columns of B), ``warps`` of a block, of which ``side`` are side
by side along the tile's columns and the others share K, ``depth`` (how many times 64 bytes of each column a warp has in
flight), ``split`` (blocks of a cluster, which share K).

Axes of ``slab``: ``bm``, ``bn`` (the tile; no more rows than A has, although wgmma takes 64), ``chunks`` (times 128
bytes of a row in a stage), ``stages`` (as many as fit shared memory), ``cluster`` (blocks that share their loads of A),
``split`` (blocks of a cluster, which share K; only one of ``cluster`` and ``split`` is more than 1); for fp8,
``pieces`` (parts of the slab's columns, multiplied one after the other) and ``turns`` (how many of these products are
in flight at a time).

Axes of ``mixed``: ``bm``, ``bn`` (the tile), ``split`` (blocks of a cluster, which share K), ``stages`` (as many as fit
when one, two, three or four blocks run on a multiprocessor).

Candidates for plans also have ``fitted`` (1: tiles of ``slab`` have up to ``bn`` columns; 3: those of ``mixed`` up to
``bm`` rows, and up to ``split`` blocks share K; as many as M needs: fitted.py).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from ...core.candidate import Candidate, Illegal
from ...core.problem import Problem, bits
from ...core.target import Target
from ..base import NOT_LISTED
from ..gpu.rules import FP8, DeviceLimits, aligned_leads, device_limits, why_no_gpu_kernel
from ..gpu.space import Config, rank_configs
from .block import (
    CHUNK_BYTES,
    GROUP_ROWS,
    MIXED_STEP,
    REGISTERS,
    RESERVED_SHARED,
    equal_registers,
    mixed_raised_registers,
    mixed_registers,
    mixed_shared,
    mixed_stage,
    mixed_stages,
    mixed_warps,
    slab_raised_registers,
    slab_registers,
    slab_stages,
    slab_warps,
)
from .epilogue import TYPES, scale_group, vector_words
from .fitted import (
    MAX_STAGES,
    SIZE,
    SIZE_AND_SPLIT,
    SPLITS,
    Copy,
    clusters_at_once,
    copy_config,
    fitted_tiles,
    is_fitted,
)
from .source import MIXED, SKINNY, SLAB, elements_per_load

NAME = "cuda"
_TemplateSpace = tuple[
    Callable[[Problem, DeviceLimits], str],
    Callable[[Problem, DeviceLimits], Iterator[Config]],
    Callable[[Problem, DeviceLimits, Config], str],
    Callable[[Problem, DeviceLimits, Config], float],
]
_MAX_SKINNY_ROWS = 32
_MAX_SLAB_ROWS = 8192
_MIXED_MIN_ROWS = 17
_MAX_NORMED_ROWS = 32
# One of Triton's templates converts int8 weights as a whole, which is faster for many rows; none converts int4 weights.
_MIXED_MAX_ROWS = {"int8": 4096, "int4": _MAX_SLAB_ROWS}
_MIXED_FITTED_ROWS = 1024  # beyond, no tile divides the rows better than another
_WIDTHS = tuple(range(16, 257, 8))
_LANES = 4  # lanes of a warp that are side by side along K
_DEFAULT_SHARED_BYTES = 48 << 10  # shared memory of a kernel that does not ask for more
_MAX_THREADS = 2048  # of a multiprocessor
# Columns of a slab: two products of fewer columns leave the matrix units waiting more often than one product does.
_MIN_PIECES_WIDTH = 128
_MIN_STAGES = 3
# Fitted to times on an H200.
_BANDWIDTH = 4.2e12
_L2_BANDWIDTH = 2.1e13  # many blocks read the same parts of A
_FLOPS = 1.9e13  # of a multiprocessor, with one-byte operands
_FLIGHT = 15e3  # bytes a multiprocessor must have in flight to reach half the bandwidth
_WAVE_S = 1.6e-6  # the time that another round of blocks adds
_SPLIT_S = 4e-6
_START_S = 2e-6
_SLAB_FLIGHT = 4e4  # bytes of stages, beyond the current one, that keep a block busy half of the time
_STEP_S = 3.9e-8  # the barriers of a stage
_CLUSTER_SYNC_S = 6.4e-6  # the blocks of a cluster exchange sums one after the other
_BETWEEN_BLOCKS = 4.5e10  # bytes per second that a block reads from another block's shared memory
# Registers by which ``mixed_registers`` exceeds what NVRTC uses for tiles of up to 64 rows.
_OVERESTIMATED = {"int4": 10, "int8": 6}


class _MixedCosts(NamedTuple):
    """The costs of ``mixed``: fitted to 16,000 times of int8 and int4 weights on H100s and H200s, those of plans and
    of Decisions at M = 17 to 8192 (every-m files up to 20261129-093329), by the logarithms of their ratios at one M.

    The candidate with the least estimate took 1.014 of the least measured time in the mean at M = 65 to 128, and 1.04
    at M = 17 to 64; with the costs before, 1.08 and 1.09. Where a weight was left out of the fit, its candidates were
    ordered as well (a script that was not kept).

    bandwidth, l2: bytes per second, from memory and from the L2 cache. flops: per second, of a multiprocessor.
    flight, stages_flight: bytes in flight with which a multiprocessor reaches half of the bandwidth, and half of the
    rate of loads and products. between: bytes per second that the blocks of a cluster exchange. convert_s: conversion
    of 64 columns of a step; convert_alone: times that where one group of warps is alone on a multiprocessor. start_s,
    round_s: of a call, and of a round of blocks. exposed_share, column_s: as for ``_SlabCosts``. output_beside: share
    of an output's time that other blocks of the round do not hide.
    """

    bandwidth: float = 4.8e12
    l2: float = 1.7e13
    flops: float = 1.67e13
    flight: float = 1.43e4
    stages_flight: float = 7e3
    between: float = 1e10
    convert_s: float = 1.6e-7
    convert_alone: float = 1.75
    start_s: float = 2.7e-6
    round_s: float = 1.6e-6
    column_s: float = 2.2e-8
    exposed_share: float = 0.27
    output_beside: float = 0.26


_MIXED_COSTS = _MixedCosts()


class _SlabCosts(NamedTuple):
    """What depends on how many tiles a block of ``slab`` computes one after the other.

    barriers_s: of a stage, times the square of the cluster's blocks less 1. drain_s: fp8: nothing is multiplied between
    a product's end and the next one's start. exposed_share: of the second longest of the concurrent activities, which
    adds to the time. column_s: the output of a column of 64 rows.
    """

    barriers_s: float
    drain_s: float
    exposed_share: float
    column_s: float


_FEW_TILES, _MANY_TILES = 2, 4
_COSTS_OF_FEW = _SlabCosts(3.9e-8, 1.3e-8, 0.27, 1.9e-8)
# Barriers and outputs are hidden behind other tiles' loads. Fitted to times of fp8, int8 and bfloat16 on an H100.
_COSTS_OF_MANY = _SlabCosts(1.4e-8, 6.5e-8, 0.5, 0.0)


def candidates(problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
    """Yield the legal candidates, most promising first within each template, then the illegal ones with their
    reasons."""
    reason = why_no_gpu_kernel(problem) or _why_unsupported(problem)
    if reason:
        yield Illegal(Candidate.make(NAME, "*"), reason)
        return
    device = device_limits(target)
    illegal: list[Illegal] = []
    for template, (why_unsupported, space, why_illegal, seconds) in _spaces().items():
        reason = why_unsupported(problem, device)
        if reason:
            illegal.append(Illegal(Candidate.make(NAME, template), reason))
            continue
        configs = space(problem, device)
        legal, rejected = rank_configs(
            NAME, template, configs, partial(why_illegal, problem, device), partial(seconds, problem, device)
        )
        yield from legal
        illegal += rejected
    yield from illegal


def plan_candidates(problem: Problem, target: Target) -> list[Candidate]:
    """Return the legal candidates whose tiles are fitted to M, most promising first."""
    device = device_limits(target)
    if why_no_gpu_kernel(problem) or _why_unsupported(problem):
        return []
    legal: list[Candidate] = []
    for template, fitted_configs in _FITTED.items():
        why_unsupported, _, why_illegal, _ = _spaces()[template]
        if not why_unsupported(problem, device):
            check, seconds = partial(why_illegal, problem, device), partial(_seconds, template, problem, device)
            legal += rank_configs(NAME, template, fitted_configs(problem, device), check, seconds)[0]
    return legal


def copies(problem: Problem, template: str, config: dict[str, Any], device: DeviceLimits) -> list[dict[str, Any]]:
    """Return the configs of the kernels that a candidate consists of: one for each copy, ascending."""
    if not is_fitted(config):
        return [config]
    tiles = fitted_tiles(template, config, problem, device.multiprocessors)
    return [copy_config(problem, template, config, copy, device.shared) for copy in tiles.copies]


def why_illegal(problem: Problem, candidate: Candidate, target: Target) -> str:
    """Return why neither ``candidates`` nor ``plan_candidates`` lists ``candidate``, by looking only at its template;
    empty if one of them lists it."""
    reason = why_no_gpu_kernel(problem) or _why_unsupported(problem)
    if reason or candidate.template not in _spaces():
        return reason or NOT_LISTED
    device, requested = device_limits(target), dict(candidate.config)
    why_unsupported, space, check, _ = _spaces()[candidate.template]
    space = _FITTED.get(candidate.template, space) if is_fitted(requested) else space
    reason = why_unsupported(problem, device)
    for config in () if reason else space(problem, device):
        if config == requested and Candidate.make(NAME, candidate.template, **config).identity == candidate.identity:
            return check(problem, device, config)
    return reason or NOT_LISTED


def estimated_s(problem: Problem, candidate: Candidate, target: Target) -> float | None:
    """Return the estimated seconds of a call; None for a template that is not there."""
    if candidate.template not in _spaces():
        return None
    return _seconds(candidate.template, problem, device_limits(target), dict(candidate.config))


def _seconds(template: str, problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> float:
    """Return the estimated seconds of a call, with the copy for M where tiles are fitted."""
    *_, seconds = _spaces()[template]
    if template in _FITTED and is_fitted(config):
        copy = fitted_tiles(template, config, problem, device.multiprocessors).copy_at(problem.m)
        config = copy_config(problem, template, config, copy, device.shared)
    return seconds(problem, device, config)


def code_paths(problem: Problem, candidate: Candidate, target: Target) -> Callable[[int], Copy] | None:
    """Return a function from M to the copy that runs, where tiles are fitted to M; None for other kernels."""
    config = dict(candidate.config)
    if candidate.template not in _FITTED or not is_fitted(config):
        return None
    return fitted_tiles(candidate.template, config, problem, device_limits(target).multiprocessors).copy_at


@functools.cache
def _spaces() -> dict[str, _TemplateSpace]:
    """Return four functions for each template: one says why it does not support a Problem, one yields its
    configurations, one says why a configuration is illegal, and one estimates a configuration's time."""
    return {
        SKINNY: (_why_skinny_unsupported, _skinny_configs, _why_skinny_illegal, _skinny_seconds),
        SLAB: (_why_slab_unsupported, _slab_configs, _why_slab_illegal, _slab_seconds),
        MIXED: (_why_mixed_unsupported, _mixed_configs, _why_mixed_illegal, _mixed_seconds),
    }


def _why_unsupported(problem: Problem) -> str:
    """Return why no template supports the Problem in any configuration, or empty."""
    a_ok, b_ok, _ = aligned_leads(problem)
    if problem.a.layout.order != "row" or (problem.b.dtype != "int4" and problem.b.layout.order != "col"):
        return "reads along K: rows of A and columns of B must be contiguous"
    if not (a_ok and b_ok) or problem.k % elements_per_load(problem):
        return f"reads 16 bytes at a time: leading dimensions and K must be multiples of that; got K = {problem.k}"
    if problem.out_dtype not in TYPES or problem.out_dtype in FP8:
        return f"writes no {problem.out_dtype}"
    dtypes = [problem.a.dtype, *(str(step.dtype) for step in problem.norm_steps)]
    if problem.norm is not None and set(dtypes) != {"bfloat16"}:
        # float16 could overflow in an RMS norm, whose row's factor is applied behind the product.
        return f"normalises bfloat16 activations with a bfloat16 weight and bias; got {', '.join(dtypes)}"
    return ""


def _why_skinny_unsupported(problem: Problem, device: DeviceLimits) -> str:
    if problem.m > _MAX_SKINNY_ROWS:
        return f"made for at most {_MAX_SKINNY_ROWS} rows; got {problem.m}"
    group, chunk = scale_group(problem), _LANES * elements_per_load(problem)
    if group % chunk:
        return f"scales {chunk} elements of K at a time: groups must be multiples of that; got {group}"
    if problem.family == "scaled_mm" and device.capability < (8, 9):
        return "multiplying fp8 needs compute capability 8.9"
    return ""


def _skinny_configs(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    bm = 8 * -(-problem.m // 8)
    sides = (1,) if bm == 8 else (1, 2)  # few rows are read quickly enough by every warp
    for bn, side, warps, depth, split in itertools.product((16, 32, 64), sides, (4, 8, 16), (1, 2, 4), (1, 2, 4)):
        if bn // side >= 16:
            yield {"bm": bm, "bn": bn, "side": side, "warps": warps, "depth": depth, "split": split}


def _why_skinny_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    bm, bn, warps, split = (config[name] for name in ("bm", "bn", "warps", "split"))
    turns = warps // config["side"]
    chunks = -(-problem.k // (_LANES * elements_per_load(problem)))
    if split > 1 and device.capability < (9, 0):
        return "clusters need compute capability 9.0"
    if turns * split > max(chunks, 4):
        return f"{chunks} times 64 bytes of K leave some of {turns * split} warps with nothing to do"
    if split > 1 and _tiles(problem, config) >= 2 * device.multiprocessors:
        return "there are blocks enough for every multiprocessor without splitting K"
    words = bn * (turns * (bm + 1) + (bm if split > 1 else 0)) + vector_words(problem, bm, bn)
    if problem.norm is not None:  # the larger of what the two kinds of norms need
        words += max(bm * (turns + (1 if split > 1 else 0)), 3 * max(warps, bm))
    shared = 4 * words
    if shared > _DEFAULT_SHARED_BYTES:
        return f"{shared >> 10} KB for the warps' sums and vectors; {_DEFAULT_SHARED_BYTES >> 10} are there"
    available = min(255, REGISTERS // (32 * warps))
    needed = _registers(problem, config)
    if needed > available:
        return f"about {needed} registers a thread; {warps} warps have {available}"
    return ""


def _registers(problem: Problem, config: dict[str, Any]) -> int:
    """Return about how many registers of a thread the compiler uses: for loaded values, for sums, for addresses and for
    conversions."""
    r, mt = config["bn"] // config["side"] // 16, config["bm"] // 8
    loads = elements_per_load(problem) * bits(problem.a.dtype) // 128
    grouped = bool(scale_group(problem))
    spare = 20
    if problem.family == "scaled_mm":
        spare = 36 + 8 * mt  # fp8 is converted to float16 before multiplying
    elif grouped:
        zero = int(problem.b.quant is not None and problem.b.quant.zero_point)
        spare = 28 + 2 * r * config["depth"] * (1 + zero) + 4 * mt * zero
    elif problem.b.dtype == "int4":
        spare = 26
    if problem.norm is not None:  # its tensors are loaded beside A; squares are summed by mma
        spare += 4 * mt - 4 + config["depth"] * 4 * loads * len(problem.norm_steps)
    return int(spare + config["depth"] * (8 * r + 4 * loads * mt) + 4 * (1 + grouped) * r * mt + 4 * r + 2 * mt)


def _tiles(problem: Problem, config: dict[str, Any]) -> int:
    return int(-(-problem.m // config["bm"]) * -(-problem.n // config["bn"]) * problem.batch)


def _skinny_seconds(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> float:
    """Return the estimated time of one call, in seconds. It orders candidates and decides nothing else."""
    warps, blocks = config["warps"], _tiles(problem, config) * config["split"]
    threads = 32 * warps
    resident_limit = min(REGISTERS // (_registers(problem, config) * threads), _MAX_THREADS // threads)
    busiest = -(-blocks // device.multiprocessors)
    resident = max(1, min(resident_limit, busiest))
    in_flight = resident * threads * 2 * (config["bn"] // config["side"] // 16) * 16 * config["depth"]
    read = problem.n * problem.k * problem.batch * bits(problem.b.dtype) / 8
    memory = read / _BANDWIDTH * busiest * device.multiprocessors / blocks * (1.0 + _FLIGHT / in_flight)
    return float(memory + _WAVE_S * -(-busiest // resident) + (_SPLIT_S if config["split"] > 1 else 0.0))


def _why_slab_unsupported(problem: Problem, device: DeviceLimits) -> str:
    if device.capability != (9, 0):
        return "wgmma is compute capability 9.0's alone"
    if problem.family not in ("mm", "int_mm", "scaled_mm"):
        return f"multiplies matrices of one kind of element; got {problem.family}"
    if problem.m > _MAX_SLAB_ROWS:
        return f"made for at most {_MAX_SLAB_ROWS} rows; got {problem.m}"
    if problem.norm is not None and problem.norm.kind != "rms_norm":
        return f"normalises rows by their root mean square only; got {problem.norm.kind}"
    if problem.norm is not None and problem.m > _MAX_NORMED_ROWS:
        return f"normalises at most {_MAX_NORMED_ROWS} rows, in every block; for more a kernel before it is faster"
    return ""


def _slab_configs(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    """Yield configurations whose slabs are just wide enough that one to six rounds of blocks suffice, and some with
    common widths."""
    stepwise, one_or_two = problem.family == "scaled_mm", (1, 2)
    common_widths = {64, 128, 192, 256} if stepwise else {64, 128, 256}
    fp8_choices = one_or_two if stepwise else (1,)
    few_rows = problem.m <= 64
    rows = (8 * -(-problem.m // 8),) if few_rows else (64, 128)
    splits = (1,) if problem.gate is not None or problem.norm is not None else (1, 2, 3, 4, 6, 8)
    widths = _WIDTHS[::2] if problem.gate is not None else _WIDTHS
    for bm, split in itertools.product(rows, splits):
        blocks = -(-problem.m // bm) * split
        fitting_widths = {
            next((w for w in widths if -(-problem.n // w) * blocks <= device.multiprocessors * rounds), 256)
            for rounds in range(1, 7 if split == 1 else 3)
        }
        for bn, cluster, chunks, pieces, turns in itertools.product(
            sorted(fitting_widths | common_widths),
            one_or_two,
            (1, 2, 4) if few_rows else (1, 2),
            fp8_choices,
            fp8_choices,
        ):
            if min(cluster, split) == 1 and (pieces == 1 or bn >= _MIN_PIECES_WIDTH):
                row_multiple = 8 * cluster  # rows are swizzled in groups of eight
                config = {
                    "bm": -(-bm // row_multiple) * row_multiple,
                    "bn": bn,
                    "chunks": chunks,
                    "cluster": cluster,
                    "split": split,
                }
                config |= {"pieces": pieces, "turns": turns}
                stages = min(MAX_STAGES, slab_stages(problem, config, device.shared))
                if problem.norm is not None:  # a tile's squares are read before the last stage of the next one arrives
                    stages = min(stages, _slab_steps(problem, config) - 1)
                yield {**config, "stages": stages}


def _fitted_slab_configs(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    """Yield configurations with as many columns, a multiple of 16, as registers, and shared memory with a number of
    stages, allow."""
    if problem.m <= GROUP_ROWS:  # tiles of fewer rows are faster
        return
    stepwise, one_or_two = problem.family == "scaled_mm", (1, 2)
    fp8_choices = one_or_two if stepwise else (1,)
    for bm, cluster, chunks, pieces, turns in itertools.product(
        (64, 128), one_or_two, one_or_two, fp8_choices, fp8_choices
    ):
        config = {"bm": bm, "chunks": chunks, "cluster": cluster, "split": 1, "pieces": pieces, "turns": turns}
        listed = set[int]()
        for least_stages in (5, 4, 3):
            for bn in range(256, _MIN_PIECES_WIDTH - 1, -16):
                whole = {**config, "bn": bn}
                whole = {**copy_config(problem, SLAB, whole, Copy(1, bn), device.shared), "fitted": SIZE}
                if whole["stages"] >= least_stages and not _why_slab_illegal(problem, device, whole):
                    if bn not in listed:
                        listed.add(bn)
                        yield whole
                    break


def _slab_steps(problem: Problem, config: dict[str, Any]) -> int:
    """Return the number of steps through K, one stage each."""
    return -(-problem.k * bits(problem.a.dtype) // (8 * CHUNK_BYTES * int(config["chunks"])))


def _why_slab_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    if config["stages"] < _MIN_STAGES:
        return f"shared memory and K have room for {config['stages']} stages; at least {_MIN_STAGES} hide the latency"
    if config["chunks"] > 1 and problem.k * bits(problem.a.dtype) <= 8 * CHUNK_BYTES:
        return "K ends in the first 128 bytes"
    if config["bm"] % (8 * config["cluster"]):
        return f"eight rows are swizzled together; {config['cluster']} blocks cannot share {config['bm']}"
    if config["cluster"] > -(-problem.n // config["bn"]):
        return "there are fewer slabs than blocks in a cluster"
    split, steps = config["split"], _slab_steps(problem, config)
    if split > 1 and steps < 2 * split:
        return f"K is {steps} steps: too few to be shared by {split} blocks"
    if split > 1 and _tiles(problem, config) >= 2 * device.multiprocessors:
        return "there are blocks enough for every multiprocessor without splitting K"
    pieces, turns = config["pieces"], config["turns"]
    if config["bn"] % (8 * pieces):
        return f"wgmma multiplies by multiples of 8 columns; {config['bn']} are in {pieces} pieces"
    if problem.gate is not None and (config["bn"] % 16 or split > 1):
        return "a block multiplies a gate by its factor: it has multiples of 8 columns of either, and all of K"
    if problem.norm is not None and (split > 1 or steps <= config["stages"]):
        return "a block sums the squares of whole rows, and its stages must be fewer than its steps through K"
    if turns > config["chunks"] * pieces:
        return f"a step has no {turns} products for as many turns"
    needed = slab_registers(problem, config)
    available = slab_raised_registers(problem, config) or equal_registers(slab_warps(problem, config))
    if needed > available:
        return f"about {needed} registers a thread; {available} are there"
    return ""


def _slab_seconds(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> float:
    """Return the estimated time of one call, in seconds: a block's steps through its slabs, or reading all of B from
    memory, plus the output of the last slab. The estimate only orders candidates."""
    bm, bn, cluster, split = config["bm"], config["bn"], config["cluster"], config["split"]
    size = bits(problem.a.dtype) / 8
    groups = -(-problem.m // bm) * -(-problem.n // (bn * cluster))
    clusters = clusters_at_once(cluster * split, device.multiprocessors)
    rounds = -(-groups // clusters) / split
    stage = CHUNK_BYTES * config["chunks"]
    steps = rounds * -(-problem.k * size // stage)
    transfer = steps * stage * (bn + min(bm, problem.m) / cluster) * device.multiprocessors / _L2_BANDWIDTH
    costs = _slab_costs(rounds * split)
    fetch = transfer + steps * (_STEP_S + costs.barriers_s * (cluster**2 - 1))
    compute = 2.0 * problem.k * size * max(bm, 64) * bn * rounds / _FLOPS
    memory = problem.n * problem.k * size / _BANDWIDTH
    latency_factor = 1 + _SLAB_FLIGHT / ((config["stages"] - 1) * stage * (bn + bm))
    fetch, compute = fetch * latency_factor, compute * latency_factor
    if problem.family == "scaled_mm":
        compute += steps * costs.drain_s * (config["chunks"] * config["pieces"] - config["turns"] + 1)
    faster, slower = sorted((fetch, memory, compute))[1:]
    output = costs.column_s * bn * bm / 64
    if split > 1:
        output = output / split + _CLUSTER_SYNC_S + 4.0 * bm * bn * (split - 1) / split / _BETWEEN_BLOCKS
    return float(slower + costs.exposed_share * faster + output + _START_S)


def _slab_costs(tiles: float) -> _SlabCosts:
    """Return the costs for blocks that compute a number of tiles each: between those of few and of many tiles."""
    share = min(max((tiles - _FEW_TILES) / (_MANY_TILES - _FEW_TILES), 0.0), 1.0)
    return _SlabCosts(*(few + share * (many - few) for few, many in zip(_COSTS_OF_FEW, _COSTS_OF_MANY, strict=True)))


def _why_mixed_unsupported(problem: Problem, device: DeviceLimits) -> str:
    if device.capability != (9, 0):
        return "wgmma is compute capability 9.0's alone"
    if problem.family != "mixed_mm":
        return f"multiplies by narrower weights; got {problem.family}"
    if problem.norm is not None or problem.gate is not None:
        return "computes no norm in front of the product, and no gate behind it"
    most = _MIXED_MAX_ROWS[problem.b.dtype]
    if not _MIXED_MIN_ROWS <= problem.m <= most:
        return f"made for {_MIXED_MIN_ROWS} to {most} rows by {problem.b.dtype} weights; got {problem.m}"
    if problem.b.quant is not None and problem.b.quant.zero_point:
        return "takes no zero points"
    if scale_group(problem) % MIXED_STEP:
        return (
            f"scales {MIXED_STEP} elements of K at a time: groups must be multiples of that; got {scale_group(problem)}"
        )
    return ""


def _mixed_configs(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    """Yield configurations that split A's rows into as few parts as wgmma allows, into one more part, or into one more
    than twice as many, for one block or several on a multiprocessor; for many rows, parts of any size."""
    fewest = -(-problem.m // _WIDTHS[-1])
    rows = {8 * -(-problem.m // (8 * parts)) for parts in (fewest, fewest + 1, 2 * fewest + 1)}
    if problem.m > _MIXED_FITTED_ROWS:
        rows = set(_WIDTHS[6::2])
    for bm, bn, split in itertools.product(sorted(rows), (64, 128, 192, 256), (1, 2, 3, 4, 6, 8)):
        config = {"bm": bm, "bn": bn, "split": split}
        budgets = [(device.shared + RESERVED_SHARED) // resident - RESERVED_SHARED for resident in (1, 2, 3, 4)]
        for stages in sorted({min(MAX_STAGES, mixed_stages(problem, config, budget)) for budget in budgets}):
            yield {**config, "stages": stages}


def _fitted_mixed_configs(problem: Problem, device: DeviceLimits) -> Iterator[dict[str, Any]]:
    """Yield configurations with as many rows as registers, and shared memory with a number of stages, allow for one
    block on a multiprocessor (``FittedTiles`` counts one), and with the next multiple of 16 below: some numbers of rows
    are faster than others by 5%, and fitted ones differ by 16."""
    for bn in (64, 128, 192, 256):
        split, listed = _useful_split(problem, device, bn), set[int]()
        for least_stages in (4, 3, 2):
            whole = ({"bm": bm, "bn": bn, "split": split} for bm in reversed(_WIDTHS))
            with_stages = (
                {**copy_config(problem, MIXED, c, Copy(split, c["bm"]), device.shared), "fitted": SIZE_AND_SPLIT}
                for c in whole
            )
            legal = (
                config
                for config in with_stages
                if config["stages"] >= least_stages and not _why_mixed_illegal(problem, device, config)
            )
            for config in itertools.islice(legal, 2):
                if config["bm"] not in listed and problem.m > _MIXED_MIN_ROWS:
                    listed.add(config["bm"])
                    yield config
                if not config["bm"] % 16:
                    break


def _useful_split(problem: Problem, device: DeviceLimits, bn: int) -> int:
    """Return the most blocks that share K in a fitted kernel with ``bn`` columns in a tile."""
    steps = -(-problem.k // MIXED_STEP)
    config = {"bm": _WIDTHS[-1], "bn": bn, "split": max(split for split in SPLITS if steps >= 2 * split or split == 1)}
    return max(copy.split for copy in fitted_tiles(MIXED, config, problem, device.multiprocessors).copies)


# The configurations of templates whose tiles may be fitted to M.
_FITTED = {MIXED: _fitted_mixed_configs, SLAB: _fitted_slab_configs}


def _why_mixed_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    stages, split = config["stages"], config["split"]
    if stages < 2:
        return f"shared memory has room for {stages} stages; with fewer than 2 fetching and multiplying take turns"
    if mixed_shared(problem, config) > device.shared:
        return f"{mixed_shared(problem, config) >> 10} KB of shared memory; a block has {device.shared >> 10}"
    steps = -(-problem.k // MIXED_STEP)
    if split > 1 and steps < 2 * split:
        return f"K is {steps} steps: too few to be shared by {split} blocks"
    if split > 1 and not is_fitted(config) and _tiles(problem, config) >= 3 * device.multiprocessors:
        return "there are blocks enough for every multiprocessor without splitting K"
    needed = mixed_registers(problem, config)
    available = mixed_raised_registers(problem, config) or equal_registers(mixed_warps(problem, config))
    if needed > available:
        return f"about {needed} registers a thread; {available} are there"
    return ""


def _mixed_seconds(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> float:
    """Return the estimated time of one call, in seconds: the reads of B, the loads of A, the conversions and the
    products of the busiest multiprocessor, and the rounds of blocks. The estimate only orders candidates."""
    bm, bn, split, stages = (config[name] for name in ("bm", "bn", "split", "stages"))
    costs, groups, stage = _MIXED_COSTS, bn // 64, mixed_stage(problem, config)
    registers = 32 * mixed_warps(problem, config) * (mixed_registers(problem, config) - _OVERESTIMATED[problem.b.dtype])
    resident_limit = (device.shared + RESERVED_SHARED) // (mixed_shared(problem, config) + RESERVED_SHARED)
    resident = max(1, min(resident_limit, REGISTERS // registers))
    at_once = clusters_at_once(split, device.multiprocessors, resident)  # tiles
    tiles = _tiles(problem, config)
    rounds, busiest = -(-tiles // at_once), -(-tiles * resident // at_once)
    steps, beside = busiest * -(-problem.k // MIXED_STEP) / split, min(resident, busiest)
    weights = stage - 2 * CHUNK_BYTES * bm
    memory = steps * weights * device.multiprocessors / costs.bandwidth
    memory *= 1.0 + costs.flight / (beside * stages * weights)
    fetched = steps * stage * device.multiprocessors / costs.l2
    products_s = 4.0 * MIXED_STEP * 64 * bm / costs.flops
    compute = steps * groups * max(costs.convert_s * (costs.convert_alone if beside * groups == 1 else 1.0), products_s)
    latency_factor = 1 + costs.stages_flight / (beside * (stages - 1) * stage)
    faster, slower = sorted((memory, fetched * latency_factor, compute * latency_factor))[1:]
    output = costs.column_s * bn * bm / 64 / split + 4.0 * bm * bn * (split - 1) / split / costs.between
    outputs = output * (rounds + costs.output_beside * (busiest - rounds))
    return float(slower + costs.exposed_share * faster + costs.start_s + costs.round_s * rounds + outputs)
