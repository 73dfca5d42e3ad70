"""Kernels whose tiles are fitted to M: several kernels of one template (``mixed`` or ``slab``) that differ in one size
of their tiles. The host chooses one of them by M, so that blocks divide the output evenly."""

from __future__ import annotations

from typing import Any

from ...core.problem import Problem
from .block import mixed_stages, slab_stages
from .source import MIXED, SLAB

# The size that is fitted: ``mixed`` reads A's rows along wgmma's second dimension, ``slab`` B's columns.
_AXES = {MIXED: "bm", SLAB: "bn"}
_STAGES = {MIXED: mixed_stages, SLAB: slab_stages}
_STEP = 16  # between sizes; each is a kernel of its own, which takes the compiler half a second
MAX_STAGES = 24


def is_fitted(config: dict[str, Any]) -> bool:
    """Whether a candidate's tiles are fitted to M."""
    return bool(config.get("fitted"))


def tile_sizes(template: str, config: dict[str, Any]) -> tuple[int, ...]:
    """Return the sizes that a fitted kernel's tiles may have along the axis that is fitted (rows of ``mixed``, columns
    of ``slab``), ascending: that of the config, and the multiples of 16 below it down to a third of it."""
    most = int(config[_AXES[template]])
    return (*range(-(-most // (3 * _STEP)) * _STEP, most, _STEP), most)


def fitted_size(template: str, m: int, n: int, multiprocessors: int, config: dict[str, Any]) -> int:
    """Return the size of a fitted kernel's tiles for an [M, N] output: the least with which the blocks need no more
    rounds than with the largest.

    A block's time has a part that does not depend on its tile's size, so that more rounds of smaller tiles take longer.
    """
    cluster = int(config.get("cluster", 1))  # blocks side by side along N
    clusters = max(1, multiprocessors // (cluster * config["split"]))
    bm, bn, sizes = config["bm"], config["bn"] * cluster, tile_sizes(template, config)

    def rounds(size: int) -> int:
        rows, columns = (size, bn) if template == MIXED else (bm, size * cluster)
        return int(-(-(-(-m // rows) * -(-n // columns)) // clusters))

    fewest = rounds(sizes[-1])
    return next(size for size in sizes if rounds(size) <= fewest)


def copy_at(problem: Problem, template: str, config: dict[str, Any], size: int, shared: int) -> dict[str, Any]:
    """Return the config of a fitted kernel's copy with tiles of one size, with as many stages as fit ``shared`` bytes
    of shared memory."""
    copy = {name: value for name, value in config.items() if name != "fitted"} | {_AXES[template]: size}
    return copy | {"stages": min(MAX_STAGES, _STAGES[template](problem, copy, shared))}


def copy_for(
    problem: Problem, template: str, config: dict[str, Any], multiprocessors: int, shared: int
) -> dict[str, Any]:
    """Return the config of the copy that serves the Problem's M; the config itself where tiles are not fitted."""
    if not is_fitted(config):
        return config
    size = fitted_size(template, problem.m, problem.n, multiprocessors, config)
    return copy_at(problem, template, config, size, shared)
