"""The resources of a thread block of ``slab`` and ``mixed``: warps, registers per thread, bytes of shared memory."""

from __future__ import annotations

from typing import Any

from ...core.problem import Problem, bits
from .epilogue import scale_group, vector_words

REGISTERS = 65536  # of a multiprocessor
GROUP, GROUP_ROWS = 128, 64  # threads that execute a wgmma, and its rows
RESERVED_SHARED = 1 << 10  # bytes of a multiprocessor's shared memory that each block reserves
CHUNK_BYTES = 128  # of a row, in the layout that TMA writes for wgmma
MIXED_STEP = 128  # elements of K in a stage of ``mixed``
_SWIZZLE_ALIGNMENT = 1024  # bytes; TMA's swizzle pattern repeats at multiples of it
_BARRIER_BYTES = 8
_BARRIER_PAIR_BYTES = 2 * _BARRIER_BYTES


def mixed_warps(problem: Problem, config: dict[str, Any]) -> int:
    """Return the number of warps: those that multiply, and the one that loads, or the four that give up registers to
    the others."""
    return int(config["bn"] // 16 + (4 if mixed_raised_registers(problem, config) else 1))


def mixed_registers(problem: Problem, config: dict[str, Any]) -> int:
    """Return about how many registers the compiler uses for a thread that multiplies."""
    other = 74 if problem.b.dtype == "int4" else 64
    return int(config["bm"] // 2 * (2 if scale_group(problem) else 1) + other)


def mixed_raised_registers(problem: Problem, config: dict[str, Any]) -> int:
    """Return the registers of a thread that multiplies when the threads that load keep 24; 0 where an equal share per
    thread suffices.

    The registers of a block are fixed when it starts, with an equal share for every thread. A thread that requests more
    than are free waits forever.
    """
    return _raised_registers(config["bn"] // 64, mixed_registers(problem, config))


def mixed_shared(problem: Problem, config: dict[str, Any]) -> int:
    """Return the bytes of shared memory: stages with a pair of barriers each, or the tile's sums where they are larger,
    the padding that aligns them to 1 KB, and vectors."""
    bm, bn, split, stages = (config[name] for name in ("bm", "bn", "split", "stages"))
    sums = _exchange_bytes(bm, bn, split) if split > 1 else 4 * bm * mixed_row_stride(config)
    stage_bytes = max(stages * mixed_stage(problem, config), sums)
    return int(
        stage_bytes + _BARRIER_PAIR_BYTES * (stages + 1) + _SWIZZLE_ALIGNMENT + 4 * vector_words(problem, bm, bn)
    )


def mixed_stages(problem: Problem, config: dict[str, Any], available: int) -> int:
    """Return how many stages fit ``available`` bytes of shared memory."""
    fixed = _SWIZZLE_ALIGNMENT + _BARRIER_PAIR_BYTES + 4 * vector_words(problem, config["bm"], config["bn"])
    return (available - fixed) // (mixed_stage(problem, config) + _BARRIER_PAIR_BYTES)


def mixed_stage(problem: Problem, config: dict[str, Any]) -> int:
    """Return the bytes of a stage."""
    return int(2 * CHUNK_BYTES * config["bm"] + MIXED_STEP * bits(problem.b.dtype) // 8 * config["bn"])


def mixed_row_stride(config: dict[str, Any]) -> int:
    """Return the number of sums from one row of C to the next; it is chosen so that the sums that a warp writes at a
    time lie in different banks."""
    return int(config["bn"] + 4)


def slab_warps(problem: Problem, config: dict[str, Any]) -> int:
    """Return the number of warps: those that multiply, and the one that loads, or the four that give up registers to
    the others; with a norm also those that normalise, one for each four rows."""
    loaders = 4 if slab_raised_registers(problem, config) else 1
    return int(4 * _slab_groups(config) + loaders + (config["bm"] // 4 if problem.norm is not None else 0))


def _slab_groups(config: dict[str, Any]) -> int:
    """Return the number of warp groups (four warps) that multiply: one for each 64 rows or part of them."""
    return int(-(-config["bm"] // GROUP_ROWS))


def slab_registers(problem: Problem, config: dict[str, Any]) -> int:
    """Return about how many registers the compiler uses for a thread that multiplies, as ``mixed_registers`` does."""
    sums = config["bn"] // 2
    if problem.family == "scaled_mm":
        sums += config["turns"] * sums // config["pieces"]
    return int(sums + 40)


def slab_raised_registers(problem: Problem, config: dict[str, Any]) -> int:
    """Return the registers of a thread that multiplies, or 0, as ``mixed_raised_registers`` does."""
    return _raised_registers(_slab_groups(config), slab_registers(problem, config))


def slab_shared(problem: Problem, config: dict[str, Any]) -> int:
    """Return the bytes of shared memory: stages, a pair of barriers for each, the padding that aligns them to 1 KB, and
    vectors; with a norm also each stage's third barrier and elements of the norm's weight, and a sum for each row.

    Where blocks share K, the sums that they exchange replace the stages in shared memory and count if they are larger.
    """
    size = config["stages"] * _slab_stage(config) + _slab_overread_bytes(config)
    if config["split"] > 1:
        size = max(size, _exchange_bytes(config["bn"], GROUP_ROWS * _slab_groups(config), config["split"]))
    return int(size + _beside_stage_bytes(problem, config) * config["stages"] + _slab_fixed_bytes(problem, config))


def slab_stages(problem: Problem, config: dict[str, Any], available: int) -> int:
    """Return how many stages fit ``available`` bytes of shared memory."""
    return (available - _slab_fixed_bytes(problem, config) - _slab_overread_bytes(config)) // (
        _slab_stage(config) + _beside_stage_bytes(problem, config)
    )


def _beside_stage_bytes(problem: Problem, config: dict[str, Any]) -> int:
    """Return the bytes that each stage takes beside its rows of A and B: barriers, and elements of a norm's weight."""
    norm = _BARRIER_BYTES + CHUNK_BYTES * config["chunks"] if problem.norm is not None else 0
    return int(_BARRIER_PAIR_BYTES + norm)


def _slab_fixed_bytes(problem: Problem, config: dict[str, Any]) -> int:
    vectors = 2 * _slab_groups(config) * 4 * vector_words(problem, GROUP_ROWS, config["bn"])
    squares = 4 * config["bm"] if problem.norm is not None else 0
    return int(_SWIZZLE_ALIGNMENT + (_BARRIER_PAIR_BYTES if config["split"] > 1 else 0) + squares + vectors)


def _slab_overread_bytes(config: dict[str, Any]) -> int:
    """Return the bytes that wgmma reads beyond the last stage where a tile has fewer than 64 rows."""
    return CHUNK_BYTES * max(0, int(GROUP_ROWS - config["bm"] - config["chunks"] * config["bn"]))


def _slab_stage(config: dict[str, Any]) -> int:
    return int(config["chunks"] * CHUNK_BYTES * (config["bm"] + config["bn"]))


def _exchange_bytes(columns: int, rows: int, split: int) -> int:
    """Return the bytes that blocks which share K send each of them (sums.cu): the sums of its part of the columns (or
    rows), in units of 8, times all ``rows``."""
    return 4 * 8 * -(-columns // (8 * split)) * split * rows


def _raised_registers(groups: int, needed: int) -> int:
    if needed <= equal_registers(4 * groups + 1):
        return 0
    return min(240, ((groups + 1) * equal_registers(4 * groups + 4) - 24) // groups // 8 * 8)


def equal_registers(warps: int) -> int:
    """Return the registers that each thread of a block can have with equal shares. ptxas assigns them to four warps at
    a time."""
    return min(255, REGISTERS // (128 * -(-warps // 4)) // 8 * 8)
