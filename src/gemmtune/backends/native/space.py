"""The search space of the native kernels, and why parts of it are illegal for a Problem.

Axes: ``isa``; ``nr``, ``mr`` (columns and rows of a micro-tile); ``kc``, ``mc``, ``nc`` (cache blocks: K elements,
rows, panels; 0 = all, of the rows up to a limit that ``kernel.py`` chooses); ``order`` (which operand the inner loop
keeps in L1); ``pack_a``; ``prefetch`` (bytes ahead in B, or -1: the next block while the current one is computed);
``grid`` (threads over M x N x K).

Templates: ``packed`` reads the packed weight and converts in registers. ``expand`` converts a block of it first.
``raw`` packs blocks of a weight that is not constant during the product. ``dot`` multiplies along the contiguous K of
an unpacked weight (``nn.Linear``'s own layout).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ...core.candidate import Candidate, Illegal, is_same
from ...core.problem import Problem
from ...core.target import Target
from ..base import NOT_LISTED
from .layout import Packing
from .traits import AMX_BLOCK_BYTES, AMX_LEAST_ROWS, BF16, DTYPES, F32, LANES, SCALED, U8S8, UNITS, Unit, can_multiply

NAME = "native"
TEMPLATES = ("packed", "expand", "raw", "dot")
_STEP_DTYPES = tuple(DTYPES)[:6]
_MAX_TENSORS = 16
_CACHE_LINE = 64
_MANY_ROWS = 64
_WHOLE_PANEL_ROWS = 128  # with more rows, vector units may read a panel of B as a whole
_FEW_ROWS = 256  # with more, the rows of A that are multiplied at a time may be limited
_KEPT_PANELS = 4  # in the L2, while all rows of A pass over them (``_keeps_panels``)
# From here on AMX's tiles are first loaded from packed rows, which do not lie a power of two apart: with K = 2048 and
# M = 256, bf16 products took 5% to 6% less time, the packing included (``amx-prefetch-20261129.txt``).
_PACKED_ROWS = 128
_TWO_PANELS = 64  # columns
_ROW_BLOCK_BYTES = 2048  # of a K block of a row of A, for AMX, where the L2 does not hold whole rows
_SINGLE_THREAD_MACS = 1 << 20  # up to so many multiply-adds, waking other threads may cost more time than it saves


def why_unsupported(problem: Problem) -> str:
    """Return why no native kernel supports the Problem at all, in words; empty when some may."""
    a, b = problem.a.dtype, problem.b.dtype
    if problem.family == "scaled_mm":
        return "there is no native fp8 kernel"
    if a not in DTYPES or b not in DTYPES or problem.out_dtype not in DTYPES:
        return f"no native kernel for {a} x {b} -> {problem.out_dtype}"
    if problem.family in ("mm", "bmm") and (a != b or a not in ("float32", "bfloat16", "float16")):
        return f"needs one dtype of float32, bfloat16 or float16; got {a} x {b}"
    if problem.family == "mixed_mm" and not problem.b.constant:
        return "a weight-only operand is packed first: gemmtune.pack(weight, scale=...)"
    if min(problem.m, problem.n, problem.k) == 0:
        return "there is nothing to multiply"
    if problem.acc != ("int32" if problem.family == "int_mm" else "float32"):
        return f"accumulates in {'int32' if problem.family == 'int_mm' else 'float32'} only; got {problem.acc}"
    if problem.out.order != "row":
        return "writes row-major outputs only"
    return _why_epilogue_unsupported(problem) or _why_quant_unsupported(problem)


def _why_epilogue_unsupported(problem: Problem) -> str:
    for step in problem.epilogue:
        if step.dtype is not None and step.dtype not in _STEP_DTYPES:
            return f"no epilogue tensors or casts of {step.dtype}"
    if sum(step.takes_tensor for step in problem.epilogue) > _MAX_TENSORS:
        return f"at most {_MAX_TENSORS} epilogue tensors"
    if problem.gate is not None and not problem.b.constant:
        return "a gate needs a weight in panels of columns from both of its halves: it must be constant"
    if problem.gate is not None and problem.n % LANES:
        return f"a gate needs whole panels: N must be a multiple of {LANES}; got {problem.n}"
    return ""


def _why_quant_unsupported(problem: Problem) -> str:
    quant = problem.b.quant
    if problem.family != "mixed_mm":
        return ""
    if quant is None or problem.b.dtype not in SCALED:
        return "needs int8, int4 or float8_e4m3fn weights with their scales"
    if quant.scale_dtype not in ("float32", "bfloat16", "float16"):
        return f"no scales of {quant.scale_dtype}"
    if quant.group is not None and quant.group < problem.k and quant.group % 8:
        return f"groups must be multiples of 8; got {quant.group}"
    return ""


def candidates(problem: Problem, target: Target, isas: Sequence[str]) -> Iterator[Candidate | Illegal]:
    """Yield the legal candidates, fastest unit and most promising configuration first, then the illegal ones with their
    reasons."""
    reason = why_unsupported(problem)
    if reason:
        yield Illegal(Candidate.make(NAME, "*"), reason)
        return
    illegal: list[Illegal] = []
    best: dict[str, Unit] = {}
    for unit in UNITS:
        if not can_multiply(unit, problem.a.dtype, problem.b.dtype):
            continue
        for template in _templates_in_order(problem):
            why = _why_template_unsupported(problem, unit, template)
            if not why and unit.isa not in isas:
                why = f"this CPU (or build) has no {unit.isa}"
            if why:
                illegal.append(Illegal(Candidate.make(NAME, template, isa=unit.isa), why))
                continue
            for pack_a, why in _illegal_pack_a(problem, unit).items():
                illegal.append(Illegal(Candidate.make(NAME, template, isa=unit.isa, pack_a=pack_a), why))
            # Slower units are raced with only their most promising configuration.
            all_configs = best.setdefault(template, unit) is unit
            configs = _configs(problem, target, unit, template)
            for config in configs if all_configs else itertools.islice(configs, 1):
                yield Candidate.make(NAME, template, isa=unit.isa, **config)
    yield from illegal


def _templates_in_order(problem: Problem) -> tuple[str, ...]:
    """Return the templates, most promising first: with many rows, a block of the weight that is converted once is used
    often."""
    return ("expand", *(name for name in TEMPLATES if name != "expand")) if problem.m >= _MANY_ROWS else TEMPLATES


def why_illegal(problem: Problem, candidate: Candidate, target: Target, isas: Sequence[str]) -> str:
    """Return why ``candidates`` does not list ``candidate``, without listing its thousands of candidates; empty if it
    lists it.

    The target is assumed to be a CPU with ``isas``.
    """
    reason = why_unsupported(problem)
    if reason or candidate.backend != NAME or candidate.template not in TEMPLATES:
        return reason or NOT_LISTED
    isa = dict(candidate.config).get("isa")
    best: Unit | None = None  # only this unit lists all its configurations for the template
    for unit in UNITS:
        if not can_multiply(unit, problem.a.dtype, problem.b.dtype):
            continue
        why = _why_template_unsupported(problem, unit, candidate.template)
        if not why and unit.isa not in isas:
            why = f"this CPU (or build) has no {unit.isa}"
        best = best or (None if why else unit)
        if unit.isa != isa:
            continue
        reason = why or reason
        if not why and _lists(problem, target, unit, candidate, all_configs=best is unit):
            return ""
    return reason or NOT_LISTED


def _lists(problem: Problem, target: Target, unit: Unit, candidate: Candidate, all_configs: bool) -> bool:
    """Whether a unit lists the candidate among all its configurations, or (without ``all_configs``) as the first of
    them."""
    template, config = candidate.template, dict(candidate.config)
    if not all_configs:
        first = next(_configs(problem, target, unit, template), None)
        return (
            first is not None and Candidate.make(NAME, template, isa=unit.isa, **first).identity == candidate.identity
        )
    for nr, mr in _micro_tiles(problem, unit, template):
        axes = {"isa": (unit.isa,), "nr": (nr,), "mr": (mr,), **_axes(problem, target, unit, template, nr, mr)}
        if axes.keys() == config.keys() and all(
            any(is_same(config[name], value) for value in axes[name]) for name in axes
        ):
            return not _is_redundant(*(config[name] for name in ("kc", "nc", "order", "prefetch")))  # type: ignore[arg-type]
    return False


def default_candidate(problem: Problem, target: Target, isas: Sequence[str]) -> Candidate | None:
    """Return the most promising candidate for a constant weight that has not been tuned; None when there is none."""
    for item in candidates(problem, target, isas):
        if isinstance(item, Candidate) and item.template == "packed":
            return item
    return None


def _why_template_unsupported(problem: Problem, unit: Unit, template: str) -> str:
    weight = problem.b.dtype
    if template == "dot":
        if weight not in unit.dots:
            return f"{unit.isa} has no dot products over {weight}"
        return "" if problem.b.layout.order == "col" else "columns of the weight are not contiguous along K"
    if template == "raw":
        if problem.b.constant:
            return "a constant weight is packed once instead"
        return "" if weight in unit.reads and unit.isa != "amx" else "blocks are packed for plainer units"
    if not problem.b.constant:
        return "the weight is not constant: packing it would count in every call"
    if problem.family == "bmm":
        return "batched operands are read as they lie"
    if template == "expand":
        if weight not in unit.expands or weight not in SCALED:
            return "nothing to expand: the weight is stored as it is multiplied"
        if problem.m <= min(unit.tile_rows(weight, expanded=False).values()):
            return f"M = {problem.m} is one row tile: an expanded block would be used once"
        return ""
    return "" if weight in unit.reads else f"{unit.isa} cannot convert {weight} in registers"


def why_not_direct(problem: Problem, unit: Unit) -> str:
    """Return why the activations cannot be read without packing them; empty when they can."""
    direct_dtype = {F32.name: "float32", BF16.name: "bfloat16"}.get(unit.compute.name)
    a, kp = problem.a.dtype, unit.compute.kp
    if direct_dtype is not None and a != direct_dtype:
        return f"{a} activations are converted for {unit.compute.name}"
    if unit.compute is U8S8 and a == "int8":
        return "signed activations are shifted by 128 for the unsigned x signed instruction"
    if direct_dtype is None and unit.compute.kp == 2:
        return f"{a} activations are widened to int16"
    if problem.a.layout.order != "row":
        return "rows of the activations are not contiguous"
    if problem.k % (8 if problem.b.dtype == "int4" else kp):
        return f"K = {problem.k} is not a multiple of {8 if problem.b.dtype == 'int4' else kp}: A needs zero padding"
    return ""


def _illegal_pack_a(problem: Problem, unit: Unit) -> dict[str, str]:
    """Return the values of ``pack_a`` that are illegal, each with its reason."""
    illegal = {}
    if why_not_direct(problem, unit):
        illegal["none"] = why_not_direct(problem, unit)
    if unit.isa == "amx":
        illegal["panels"] = "AMX loads rows of A, not panels"
    elif problem.m == 1:
        illegal["panels"] = "a panel of one row is a row"
    return illegal


def _configs(problem: Problem, target: Target, unit: Unit, template: str) -> Iterator[dict[str, Any]]:
    """Yield every configuration of a template on one unit: the most promising of each micro-tile, then all of each.

    An axis that has no effect keeps one value.
    """
    by_tile = [_tile_configs(problem, target, unit, template, *tile) for tile in _micro_tiles(problem, unit, template)]
    for configs in by_tile:
        yield from itertools.islice(configs, 1)
    yield from itertools.chain.from_iterable(by_tile)


def _micro_tiles(problem: Problem, unit: Unit, template: str) -> list[tuple[int, int]]:
    """Return the micro-tiles (nr, mr) that a template offers on a unit, most promising first."""
    if template == "dot":
        return [(64, 4), (16, 4)]
    return _tiles(problem, unit.tile_rows(problem.b.dtype, template != "packed"))


def _tile_configs(
    problem: Problem, target: Target, unit: Unit, template: str, nr: int, mr: int
) -> Iterator[dict[str, Any]]:
    axes = _axes(problem, target, unit, template, nr, mr)
    for kc, grid, pack_a, prefetch, order, nc, mc in itertools.product(*axes.values()):
        if not _is_redundant(kc, nc, order, prefetch):
            yield {
                "nr": nr, "mr": mr, "kc": kc, "mc": mc, "nc": nc, "order": order,
                "pack_a": pack_a, "prefetch": prefetch, "grid": grid,
            }  # fmt: skip


def _axes(problem: Problem, target: Target, unit: Unit, template: str, nr: int, mr: int) -> dict[str, Sequence[Any]]:
    """Return the values of every axis besides the micro-tile, most promising first; the first axis varies slowest."""
    several_tiles, by_blocks = problem.m > mr, template != "packed"
    illegal = _illegal_pack_a(problem, unit)
    amx = unit.isa == "amx"
    keeps_panels = amx and not by_blocks and _keeps_panels(problem, unit, nr)
    modes = ("rows", "none", "panels") if amx and problem.m >= _PACKED_ROWS else ("none", "rows", "panels")
    prefetches, orders = _prefetches(problem, unit, template, nr, several_tiles), ("b", "a")
    blocks_of_rows = (0, 1024 if amx else 128) if problem.m > _FEW_ROWS else (0,)
    if keeps_panels:
        prefetches, orders = sorted(prefetches, key=lambda distance: distance == -1), ("a", "b")
        blocks_of_rows = blocks_of_rows[::-1]
    return {
        "kc": _k_blocks(problem, target, unit, template, nr, several_tiles),
        "grid": [f"{tm}x{tn}x{tk}" for tm, tn, tk in _grids(problem, target.threads, nr, template)],
        "pack_a": [mode for mode in modes if mode not in illegal and (mode != "panels" or template != "dot")],
        "prefetch": prefetches,
        "order": orders if several_tiles and not by_blocks else ("b",),
        "nc": _panels_of_a_block(amx, several_tiles, template, keeps_panels),
        "mc": blocks_of_rows,
    }


def _keeps_panels(problem: Problem, unit: Unit, nr: int) -> bool:
    """Whether the inner loop goes over A first, while the L2 keeps a group of panels: for AMX and many rows, where an
    eighth of the L2 holds the group.

    B is then read from memory once, and A from the L3 for each group. With bf16, K = 768, a cold weight and M of 384
    and 512 that took 5% to 8% less time than rows in the L2 and all panels for them in quick moments of a host, 6% to
    9% more in slow ones; with K from 2048 on 1% to 12% more (``amx-blocks-20261129.txt``).
    """
    group = _KEPT_PANELS * Packing.of(unit.compute, problem.b.dtype, nr).nbytes(nr, problem.k)
    return problem.m > _FEW_ROWS and group <= AMX_BLOCK_BYTES // 4


def _panels_of_a_block(amx: bool, several_tiles: bool, template: str, keeps_panels: bool) -> tuple[int, ...]:
    """Return the numbers of panels that share one pass over a K block, most promising first.

    AMX reads a block of A that does not fit the L2 from the L3 for each of these passes: with 8 or 16 panels instead of
    4 bf16 256x4096x11008 took 10% less time (``amx-blocks-20261129.txt``).
    """
    if not several_tiles or template == "dot":
        return (1,)
    if amx and template == "packed":
        return (_KEPT_PANELS, 1, 16) if keeps_panels else (8, 16, 4, 1)
    return (1, 4)


def _is_redundant(kc: int, nc: int, order: str, prefetch: int) -> bool:
    """Whether a configuration does exactly what another one does, or asks for something impossible."""
    if nc > 1 and kc == 0 and order == "b":
        return True  # with one pass over K, panels are visited one by one for any nc
    return order == "a" and prefetch == -1  # then no block of B stays in the cache while tiles pass over it


def _tiles(problem: Problem, rows: dict[int, int]) -> list[tuple[int, int]]:
    """Return micro-tiles, ordered by the work that they waste at the edges and the loads that they need per
    multiply-add."""

    def cost(tile: tuple[int, int]) -> float:
        nr, mr = tile
        vectors, rows_used = nr // 16, -(-problem.m // -(-problem.m // mr))
        loads = (vectors + rows_used) / (vectors * rows_used)
        # Few accumulators cannot hide the latency of a multiply-add; panels beyond N are wasted work.
        idle = max(1.0, 10 / (vectors * rows_used))
        return (1.0 + loads) * idle * (-(-problem.n // nr) * nr / problem.n) ** 2

    # The largest tile is offered for smaller M, too: it is as fast there, and serves other M of the Plan well.
    tiles = set(rows.items())
    tiles |= {(nr, largest // 2) for nr, largest in rows.items() if largest >= 8 and problem.m >= largest}
    allowed = {(nr, mr) for nr, mr in tiles if nr == min(rows) or -(-problem.n // nr) * nr <= 1.5 * problem.n + 16}
    if problem.gate is not None:
        allowed = {(nr, mr) for nr, mr in allowed if problem.n % nr == 0}
    return sorted(allowed, key=cost)[:4]


def _k_blocks(problem: Problem, target: Target, unit: Unit, template: str, nr: int, several_tiles: bool) -> list[int]:
    """Return the numbers of K elements in a block, most promising first; 0 is all of K.

    Where several row tiles pass over a packed panel, a block of it that stays in the L1 or L2 meanwhile was up to 25%
    faster than all of K (AVX512, fp32 and fp16, M of 16 to 256, one and two threads, timed by hand on a Xeon). A panel
    of which the L2 holds two was up to 10% faster as a whole, prefetched by a distance, from M = 192 on
    (``fp32-order-20261126.txt``). An expanded block that few row tiles read is fastest when the L1 holds it: with AMX
    at M = 16, int8 weights took 4 to 20% longer with blocks of 1024 than of 512, int4 weights 20% longer with blocks of
    512 than of 256; at M = 256, 1024 was the fastest.
    """
    if template == "dot":
        return [0] + [size for size in (1024, 512, 2048) if several_tiles and size < problem.k]
    if template != "packed":
        few_rows = unit.isa == "amx" and problem.m <= 64
        sizes = [size for size in ((512, 256, 1024) if few_rows else (1024, 512, 256)) if size // 2 < problem.k]
        sizes = sizes or [512]
    elif unit.isa == "amx":
        sizes = _k_blocks_for_tiles(problem, unit) if several_tiles else [0]
    else:
        blocks = [size for size in (512, 1024) if several_tiles and size < problem.k]
        panel = Packing.of(unit.compute, problem.b.dtype, nr).nbytes(nr, problem.k)
        holds_two = 2 * panel <= _l2_bytes(target)
        sizes = [0, *blocks] if problem.m > _WHOLE_PANEL_ROWS and holds_two else [*blocks, 0]
    group = problem.b.quant.group if problem.b.quant is not None else None
    if group is None or group >= problem.k:
        return sizes
    return [size for size in sizes if size == 0 or size % group == 0 or group % size == 0] or [group]


def _l2_bytes(target: Target) -> int:
    """Return the bytes of a core's L2 cache; 0 where they are not known."""
    return target.caches[1] if len(target.caches) > 1 else 0


def _k_blocks_for_tiles(problem: Problem, unit: Unit) -> list[int]:
    """Return AMX's K blocks: all of K first, where three quarters of the L2 hold more than the rows of a block of A and
    two panels of B, this one and the next.

    Elsewhere blocks of 2 KiB of a row (1 KiB with more than ``_FEW_ROWS`` rows) took 6% to 18% less time than all of
    K with bf16 and K = 4096 from M = 128 on, and 8% to 15% less than 4 KiB with K = 11008; where the L2 holds whole
    rows, all of K took 7% to 17% less (``amx-blocks-20261129.txt``).
    """
    row_bytes = problem.k * unit.compute.nbytes
    rows = min(problem.m, max(AMX_BLOCK_BYTES // row_bytes, AMX_LEAST_ROWS))
    longer = _ROW_BLOCK_BYTES // unit.compute.nbytes
    first = longer if problem.m <= _FEW_ROWS else longer // 2
    sizes = [size for size in dict.fromkeys((first, longer, longer // 2, 512, 2 * longer)) if size < problem.k]
    if 2 * (rows + _TWO_PANELS) * row_bytes < 3 * AMX_BLOCK_BYTES:
        return [0, *sizes]
    return [*sizes, 0]


def _grids(problem: Problem, threads: int, nr: int, template: str) -> list[tuple[int, int, int]]:
    """Return thread grids: columns first (each weight byte is read by one thread), then finer dynamic shares, rows, K,
    and combinations of rows and columns. One thread alone comes first for small products and large batches."""
    if threads == 1:
        return [(1, 1, 1)]
    panels, grids = -(-problem.n // nr), []
    if panels >= threads:
        grids.append((1, threads, 1))
    macs = problem.m * problem.n * problem.k * problem.batch
    if macs <= _SINGLE_THREAD_MACS or (problem.family == "bmm" and problem.batch >= threads):
        grids.insert(0, (1, 1, 1))
    if panels >= 8 * threads:
        grids.append((1, 4 * threads, 1))
    if problem.m >= 8 * threads:
        grids.append((threads, 1, 1))
    if template in ("packed", "expand") and problem.k >= 512 * threads and panels < 16 * threads:
        grids.append((1, 1, threads))
    for rows in (2, 4, 8):
        if threads % rows == 0 and rows < threads and problem.m >= 8 * rows and panels >= threads // rows:
            grids.append((rows, threads // rows, 1))
    return grids or [(1, 1, 1)]


def _prefetches(problem: Problem, unit: Unit, template: str, nr: int, several_tiles: bool) -> list[int]:
    """Return prefetch distances in bytes; -1, the next block, where several row tiles share a block.

    Timed by hand on a Xeon with AMX. Vector units read a panel whose rows are longer than a cache line up to a third
    slower with distances of a page (4 KiB) and more; panels of shorter rows were fastest with the longer distances. The
    cause is not known; it may be the L2's prefetcher, which stays within a page. AMX was up to 10% faster with the
    longer distances, whatever the rows' length. From M = 192 on, whole panels are prefetched by a distance
    (``_k_blocks``).
    """
    if template == "raw":
        return [0]
    if template == "dot":
        return [1024, 0, 3072]
    if several_tiles:
        by_distance = unit.isa != "amx" and template == "packed" and problem.m > _WHOLE_PANEL_ROWS
        return [3072, -1, 8192] if by_distance else [-1, 3072, 8192]
    if unit.isa == "amx":
        return [16384, 8192, 3072]
    row_bytes = Packing.of(unit.compute, problem.b.dtype, nr).nbytes(nr, 1)
    return [3072, 8192, 16384] if row_bytes > _CACHE_LINE else [8192, 3072, 16384]
