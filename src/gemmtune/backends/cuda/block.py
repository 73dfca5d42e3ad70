"""What a block of ``slab`` and ``mixed`` has: warps, registers of a thread, bytes of shared memory."""

from __future__ import annotations

from typing import Any

from ...core.problem import Problem, bits
from .epilogue import kept_words, scale_group

REGISTERS = 65536  # of a multiprocessor
GROUP, GROUP_ROWS = 128, 64  # threads and rows that wgmma takes
CHUNK_BYTES = 128  # of a row, as TMA lays them for wgmma
MIXED_STEP = 128  # elements of K in a stage of ``mixed``
_BOUNDARY = 1024  # where TMA's swizzle starts anew
_BARRIERS = 16  # bytes of a pair


def mixed_warps(problem: Problem, config: dict[str, Any]) -> int:
    """Those that multiply, and the one that fetches, or the four that give their registers to the others."""
    return int(config["bn"] // 16 + (4 if mixed_more(problem, config) else 1))


def mixed_registers(problem: Problem, config: dict[str, Any]) -> int:
    """About as many as the compiler uses for a thread that multiplies."""
    kept = 74 if problem.b.dtype == "int4" else 64
    return int(config["bm"] // 2 * (2 if scale_group(problem) else 1) + kept)


def mixed_more(problem: Problem, config: dict[str, Any]) -> int:
    """What a thread that multiplies has when those that fetch keep 24; 0: it does with as many as all can have alike.

    A block has as many as it started with, alike for all: who waits for more than is left waits forever.
    """
    return _more(config["bn"] // 64, mixed_registers(problem, config))


def mixed_shared(problem: Problem, config: dict[str, Any]) -> int:
    """Bytes of shared memory: stages with a pair of barriers each, or the tile's sums where that is more, what putting
    them on a boundary of 1 KB may take, and vectors."""
    bm, bn, split, stages = (config[name] for name in ("bm", "bn", "split", "stages"))
    sums = _sent(bm, bn, split) if split > 1 else 4 * bm * mixed_across(config)
    most = max(stages * mixed_stage(problem, config), sums)
    return int(most + _BARRIERS * (stages + 1) + _BOUNDARY + 4 * kept_words(problem, bm, bn))


def mixed_stages(problem: Problem, config: dict[str, Any], room: int) -> int:
    """As many stages as so many bytes of shared memory hold."""
    besides = _BOUNDARY + _BARRIERS + 4 * kept_words(problem, config["bm"], config["bn"])
    return (room - besides) // (mixed_stage(problem, config) + _BARRIERS)


def mixed_stage(problem: Problem, config: dict[str, Any]) -> int:
    """Bytes of a stage."""
    return int(2 * CHUNK_BYTES * config["bm"] + MIXED_STEP * bits(problem.b.dtype) // 8 * config["bn"])


def mixed_across(config: dict[str, Any]) -> int:
    """Sums from one of C's rows to the next: those that a warp writes at a time lie in different banks."""
    return int(config["bn"] + 4)


def slab_warps(problem: Problem, config: dict[str, Any]) -> int:
    """As ``mixed_warps``."""
    return 4 * _slab_groups(config) + (4 if slab_more(problem, config) else 1)


def _slab_groups(config: dict[str, Any]) -> int:
    """Groups of four warps that multiply: 64 rows each, or what there is."""
    return int(-(-config["bm"] // GROUP_ROWS))


def slab_registers(problem: Problem, config: dict[str, Any]) -> int:
    """As ``mixed_registers``."""
    sums = config["bn"] // 2
    if problem.family == "scaled_mm":
        sums += config["turns"] * sums // config["pieces"]
    return int(sums + 40)


def slab_more(problem: Problem, config: dict[str, Any]) -> int:
    """As ``mixed_more``."""
    return _more(_slab_groups(config), slab_registers(problem, config))


def slab_shared(problem: Problem, config: dict[str, Any]) -> int:
    """Bytes of shared memory: stages, or, where blocks share K, what they send each other in the stages' place, if that
    is more; a pair of barriers for each, what putting them on a boundary of 1 KB may take, and vectors."""
    stages = config["stages"] * _slab_stage(config) + _slab_beyond(config)
    if config["split"] > 1:
        stages = max(stages, _sent(config["bn"], GROUP_ROWS * _slab_groups(config), config["split"]))
    return int(stages + _BARRIERS * config["stages"] + _slab_besides(problem, config))


def slab_stages(problem: Problem, config: dict[str, Any], room: int) -> int:
    """As many stages as so many bytes of shared memory hold."""
    return (room - _slab_besides(problem, config) - _slab_beyond(config)) // (_slab_stage(config) + _BARRIERS)


def _slab_besides(problem: Problem, config: dict[str, Any]) -> int:
    vectors = 2 * _slab_groups(config) * 4 * kept_words(problem, GROUP_ROWS, config["bn"])
    return int(_BOUNDARY + (_BARRIERS if config["split"] > 1 else 0) + vectors)


def _slab_beyond(config: dict[str, Any]) -> int:
    """What wgmma reads of more rows than the last stage has."""
    return CHUNK_BYTES * max(0, int(GROUP_ROWS - config["bm"] - config["chunks"] * config["bn"]))


def _slab_stage(config: dict[str, Any]) -> int:
    return int(config["chunks"] * CHUNK_BYTES * (config["bm"] + config["bn"]))


def _sent(own: int, others: int, split: int) -> int:
    """Bytes that blocks which share K send each of them (sums.cu): sums of some of ``own`` columns (or rows), of which
    8 stay together, times all ``others``."""
    return 4 * 8 * -(-own // (8 * split)) * split * others


def _more(groups: int, wanted: int) -> int:
    if wanted <= alike(4 * groups + 1):
        return 0
    return min(240, ((groups + 1) * alike(4 * groups + 4) - 24) // groups // 8 * 8)


def alike(warps: int) -> int:
    """Registers that each thread of a block can have, as ptxas hands them out: to four warps at a time."""
    return min(255, REGISTERS // (128 * -(-warps // 4)) // 8 * 8)
