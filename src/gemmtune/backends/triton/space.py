"""The search space of the Triton templates, and why parts of it are illegal for a Problem or on a Target.

Axes of ``tiled``: ``bm``, ``bn``, ``bk`` (the tile), ``split`` (programs that share a tile's K), ``swap`` (multiply B^T
by A^T, see kernels.py), ``group`` (rows of tiles that are processed together), ``stages``, ``warps``.

``persistent`` and ``converted`` (which converts int8 weights for a ``persistent`` product) have these axes without
``split`` and ``swap``, and ``stream`` (1: programs share the tiles of the last rounds).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ...core.candidate import Candidate, Illegal
from ...core.problem import Problem, bits
from ...core.target import Target
from ..base import NOT_LISTED
from ..gpu.int4 import INT4_BLOCKS
from ..gpu.rules import (
    ALIGN,
    FP8,
    OFFSET_LIMIT,
    DeviceLimits,
    aligned_leads,
    device_limits,
    leading_dimensions,
    why_no_gpu_kernel,
)
from ..gpu.space import axis_values, rank_configs
from .cost import Work, seconds, shared_tiles

NAME = "triton"
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_MIN_CONVERTED_ROWS = 128
_AMD_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950", "gfx11", "gfx12")
# Accumulators of a thread; with 256, and 255 registers, kernels took 3 to 9 times as long (docs/notes/triton.md).
_MAX_ACCUMULATORS = 128
_CONVERTED_BYTES_PER_S = 4e12  # read and written when ``converted`` converts a weight; an H200 copies 4.25 TB/s
_FEW_ROWS = 64  # up to here, tiled was faster than persistent in every committed measurement (docs/notes/triton.md)
_MAX_FILL = 0.9  # fraction of their rounds that tiles fill: beyond it, sharing takes more time than the idle rest


def why_unsupported_amd(target: Target) -> str:
    """Return why kernels are not compiled for a target's AMD architecture, or empty."""
    if target.capability.startswith(_AMD_ARCHITECTURES):
        return ""
    return f"on ROCm kernels are for {', '.join(_AMD_ARCHITECTURES)}; {target.name} is {target.capability}"


def candidates(problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
    """Yield the legal candidates, most promising first within each template, then the illegal ones with their
    reasons."""
    reason = why_no_gpu_kernel(problem) or (
        _why_unsupported_on_amd(problem) if target.is_amd else _why_fp8_unsupported(problem, target)
    )
    if reason:
        yield Illegal(Candidate.make(NAME, "*"), reason)
        return
    device = device_limits(target)
    work = _work(problem, device)
    illegal: list[Illegal] = []
    for template, space in _spaces(problem, device).items():
        legal, rejected = rank_configs(
            NAME,
            template,
            space,
            partial(_why_illegal, problem, device, template),
            partial(_estimated_seconds, work, template),
        )
        illegal += rejected
        yield from legal
    yield from illegal


def why_illegal(problem: Problem, candidate: Candidate, target: Target) -> str:
    """Return why ``candidates`` does not list ``candidate``, without listing all candidates; empty if it lists it."""
    reason = why_no_gpu_kernel(problem) or (_why_unsupported_on_amd(problem) if target.is_amd else "")
    if reason:
        return reason
    device, requested = device_limits(target), dict(candidate.config)
    for config in _spaces(problem, device, requested).get(candidate.template, ()):
        if Candidate.make(NAME, candidate.template, **config).identity == candidate.identity:
            return _why_illegal(problem, device, candidate.template, config)
    return NOT_LISTED


def estimated_s(problem: Problem, candidate: Candidate, target: Target) -> float:
    """Return the estimated seconds of a call."""
    work = _work(problem, device_limits(target))
    seconds = _estimated_seconds(work, candidate.template, dict(candidate.config))
    if candidate.template == "converted":
        seconds += (work.b_bytes + work.a_bytes) * problem.n * problem.k / _CONVERTED_BYTES_PER_S
    return seconds


def _spaces(
    problem: Problem, device: DeviceLimits, only: dict[str, Any] | None = None
) -> dict[str, Iterator[dict[str, Any]]]:
    """Return the configurations of every template; with ``only``, at most that configuration."""
    spaces = {"tiled": _tiled_configs(problem, device, only), "persistent": _persistent_configs(problem, (0, 1), only)}
    if problem.family == "mixed_mm":
        spaces["converted"] = _persistent_configs(problem, (0,), only)
    return spaces


def _tiled_configs(problem: Problem, device: DeviceLimits, only: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    blocks: tuple[int, ...] = (64, 128, 256) if bits(problem.a.dtype) == 16 else (128, 256, 512)
    depths: tuple[int, ...] = (3, 4, 5, 6, 8)
    if device.arch:  # AMD GPUs have a third of an H200's shared memory, or less
        blocks, depths = tuple(block // 2 for block in blocks), (2, 3)
    if problem.b.dtype == "int4":
        blocks = INT4_BLOCKS
    axes = {
        "bm": (16, 32, 64, 128), "bn": (32, 64, 128, 256), "bk": blocks, "split": _SPLITS, "swap": (0, 1),
        "stages": depths, "warps": (4, 8),
    }  # fmt: skip
    for bm, bn, bk, split, swap, stages, warps in itertools.product(*axis_values(axes, only)):
        if (bm > 16 and bm >= 2 * problem.m) or (bm < 64 and problem.m > 4 * bm):
            continue  # mostly padding, or B is read too often; no reason is listed for these
        programs = _tiles(problem, bm, bn) * split
        if split > 1 and not device.multiprocessors // 2 <= programs <= 5 * device.multiprocessors:
            continue
        yield {
            "bm": bm, "bn": bn, "bk": bk, "split": split, "swap": swap, "group": 8, "stages": stages, "warps": warps,
        }  # fmt: skip


def _persistent_configs(
    problem: Problem, streams: tuple[int, ...], only: dict[str, Any] | None
) -> Iterator[dict[str, Any]]:
    width = bits(problem.a.dtype)
    blocks = (64,) if width == 16 else (64, 128)
    axes = {
        "bm": (64, 128), "bn": (64, 128, 256), "bk": blocks, "stages": (3, 4, 5), "warps": (4, 8), "stream": streams,
    }  # fmt: skip
    for bm, bn, bk, stages, warps, stream in itertools.product(*axis_values(axes, only)):
        yield {
            "bm": bm, "bn": bn, "bk": bk, "group": 8, "stages": stages, "warps": warps, "stream": stream,
        }  # fmt: skip


def _tiles(problem: Problem, bm: int, bn: int) -> int:
    return -(-problem.m // bm) * -(-problem.n // bn) * problem.batch


def _why_illegal(problem: Problem, device: DeviceLimits, template: str, config: dict[str, Any]) -> str:
    bm, bn, bk, stages, warps = (config[name] for name in ("bm", "bn", "bk", "stages", "warps"))
    a_bytes, b_bytes = bits(problem.a.dtype) / 8, bits(problem.b.dtype) / 8
    if template == "converted":
        b_bytes = a_bytes
    shared_stages = max(stages - 1, 1) if device.arch else stages  # on AMD the last stage is in registers
    shared = int((bm * a_bytes + bn * b_bytes) * bk * shared_stages)
    if problem.family == "mixed_mm" and template != "converted":
        shared += int(bn * bk * a_bytes)  # the converted tile passes through shared memory
    if template != "tiled" and (problem.family == "int_mm" or bits(problem.out_dtype) == 32):
        shared += 4 * bm * bn  # so does the previous tile's output, while the next tile's loads are in flight
    if shared > device.shared - 1024:
        return f"{shared >> 10} KB of shared memory; a program has {device.shared >> 10}"
    accumulators = bm * bn // (warps * device.warp)
    if accumulators > _MAX_ACCUMULATORS:
        return f"{accumulators} accumulators a thread: they would not stay in registers"
    if accumulators < 4:
        return "fewer than 4 accumulators a thread"
    quant = problem.b.quant
    if (
        problem.b.dtype == "int8"
        and quant is not None
        and quant.group is not None
        and (bk > quant.group or quant.group % bk)
    ):
        return f"a block of K = {bk} crosses groups of {quant.group}"
    if problem.b.dtype == "int4":
        group = problem.k if quant is None or quant.group is None else quant.group
        if problem.k % bk or (group % (bk // 2) and group < problem.k):
            return f"blocks of {bk} want K to be a multiple, and groups of {bk // 2}"
    narrow = bits(problem.a.dtype) == 8
    if narrow and problem.k % bk and problem.family == "scaled_mm":
        return f"fp8 blocks of {bk} must divide K = {problem.k}"
    if template == "converted" and (reason := _why_conversion_illegal(problem)):
        return reason
    if template == "tiled":
        return _why_tiled_illegal(problem, device, config)
    return _why_persistent_illegal(problem, device, config) or (
        _why_stream_illegal(problem, device, config) if config["stream"] else ""
    )


def _why_fp8_unsupported(problem: Problem, target: Target) -> str:
    """Return why an NVIDIA GPU does not support the problem's fp8 dtypes, or empty."""
    if not {problem.a.dtype, problem.b.dtype, problem.out_dtype} & set(FP8) or target.compute_capability >= (8, 9):
        return ""
    return f"fp8 needs compute capability 8.9; got {target.capability}"


def _why_unsupported_on_amd(problem: Problem) -> str:
    if {problem.a.dtype, problem.b.dtype, problem.out_dtype} & set(FP8):
        return "no fp8 on ROCm: gfx942 multiplies other formats (fnuz), and what others round was not measured"
    return ""


def _why_tiled_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    bm, bn, bk, split, swap = (config[name] for name in ("bm", "bn", "bk", "split", "swap"))
    if device.arch and split > 1:
        return "programs share a tile where one sees what the others wrote, which was not tried on ROCm"
    if device.arch and swap:
        return "AMD's matrix units multiply 16 or 32 rows: nothing to fill by swapping"
    blocks = -(-problem.k // bk)
    lda, ldb, _ = leading_dimensions(problem, problem.m)
    a_far = bm * lda + problem.k if problem.a.layout.order == "row" else bk * lda
    b_far = bn * ldb + problem.k if problem.b.layout.order == "col" else bk * ldb
    if max(a_far, b_far) >= OFFSET_LIMIT:
        return f"elements of a tile lie {max(a_far, b_far)} apart, further than 32 bits tell"
    if problem.b.quant is not None and problem.b.quant.group is not None:
        scales = -(-problem.k // problem.b.quant.group) * problem.n
        if scales >= OFFSET_LIMIT:
            return f"{scales} scales are more than 32 bits count"
    if split > 1 and blocks < 2 * split:
        return f"{split} parts of {blocks} blocks of K"
    if split > 1 and -(-blocks // split) * (split - 1) >= blocks:
        return f"the last of {split} parts of {blocks} blocks would have nothing to do"
    if bm <= 32 and bn > (64 if problem.family == "mixed_mm" else 128):
        return f"few rows want many programs: {bn} columns make too few"
    if swap and problem.family == "mixed_mm":
        return "converted weights are the right-hand side: as the left one they were slower (docs/notes/triton.md)"
    if swap and (bn < 64 or bm > 64):
        return "swapping pays where B fills the 64 rows that matrix units take, and A cannot"
    if not swap and bm < 64 and problem.family != "mixed_mm" and device.capability[0] == 9:
        return f"{bm} rows leave Hopper's matrix units (64 rows) idle; swapped they do not"
    return ""


def _why_persistent_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    if device.capability[0] < 9:
        return "TMA needs compute capability 9.0"
    if problem.family == "bmm":
        return "its descriptors are of matrices, not of batches"
    if problem.b.dtype == "int4" or (problem.b.quant is not None and problem.b.quant.group is not None):
        return "it has no scales within K"
    if problem.a.layout.order != "row" or problem.b.layout.order != "col":
        return "its descriptors run along K: rows of A and columns of B must be contiguous"
    a_ok, b_ok, _ = aligned_leads(problem)
    if not (a_ok and b_ok):
        return f"TMA needs rows of a multiple of {ALIGN} bytes"
    if problem.m <= _FEW_ROWS:
        return f"{problem.m} rows: up to {_FEW_ROWS}, tiled was always faster (docs/notes/triton.md)"
    share, part = (4, "a quarter of") if config["stream"] else (2, "half")
    if _tiles(problem, config["bm"], config["bn"]) < device.multiprocessors // share:
        return f"fewer tiles than {part} the multiprocessors"
    return ""


def _why_stream_illegal(problem: Problem, device: DeviceLimits, config: dict[str, Any]) -> str:
    tiles, multiprocessors = _tiles(problem, config["bm"], config["bn"]), device.multiprocessors
    fill = tiles / (-(-tiles // multiprocessors) * multiprocessors)
    if fill > _MAX_FILL:
        return f"{tiles} tiles fill {fill:.0%} of their rounds of {multiprocessors}: not worth sharing"
    blocks = shared_tiles(tiles, multiprocessors) * -(-problem.k // config["bk"])
    if blocks < 4 * multiprocessors:
        return f"{blocks} blocks to share are fewer than 4 for each of {multiprocessors} multiprocessors"
    return ""


def _why_conversion_illegal(problem: Problem) -> str:
    if problem.b.dtype != "int8":
        return "only int8 weights are converted for one product"
    if problem.m < _MIN_CONVERTED_ROWS:
        return f"converting all weights pays from {_MIN_CONVERTED_ROWS} rows; got {problem.m}"
    if leading_dimensions(problem, problem.m)[1] != problem.k:
        return "converts weights whose columns follow one another"
    return ""


def _estimated_seconds(work: Work, template: str, config: dict[str, Any]) -> float:
    if template == "converted":  # the conversion costs the same for all its configurations
        work = replace(work, b_bytes=work.a_bytes, convert=False)
    return seconds(
        work, config["bm"], config["bn"], config["bk"], config.get("split", 1), config["stages"], config["warps"],
        bool(config.get("swap", 0)), template != "tiled", bool(config.get("stream", 0)),
    )  # fmt: skip


def _work(problem: Problem, device: DeviceLimits) -> Work:
    return Work(
        problem.m,
        problem.n * problem.batch,
        problem.k,
        bits(problem.a.dtype) / 8,
        bits(problem.b.dtype) / 8,
        device.multiprocessors,
        device.shared,
        problem.family == "mixed_mm",
    )
