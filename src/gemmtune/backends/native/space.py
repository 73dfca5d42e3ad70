"""The declared search space of the native kernels, and why some of it is illegal for a Problem.

Entries: ``isa``; ``nr``, ``mr`` (micro-tile columns and rows); ``kc``, ``mc``, ``nc`` (cache blocks: K elements, rows,
panels; 0 = all); ``order`` (which operand the inner loop keeps in L1); ``pack_a``; ``prefetch`` (bytes ahead in B, or
-1: the next block while this one computes);
``grid`` (threads over M x N x K). Templates: ``packed`` reads the packed weight and converts in registers, ``expand``
converts a block of it first, ``raw`` packs blocks of a weight that is not constant as it goes, ``dot`` multiplies along
the contiguous K of an unpacked weight (``nn.Linear``'s own layout).
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
from .traits import BF16, DTYPES, F32, SCALED, U8S8, UNITS, Unit, suits

NAME = "native"
TEMPLATES = ("packed", "expand", "raw", "dot")
_STEP_DTYPES = tuple(DTYPES)[:6]
_MOST_TENSORS = 16
_CACHE_LINE = 64
_ALONE = 1 << 20  # multiply-adds: up to here waking other threads may cost more than they save


def refusal(problem: Problem) -> str:
    """Why no native kernel takes the Problem at all, in words; empty when some may."""
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
    return _epilogue_refusal(problem) or _quant_refusal(problem)


def _epilogue_refusal(problem: Problem) -> str:
    for step in problem.epilogue:
        if step.dtype is not None and step.dtype not in _STEP_DTYPES:
            return f"no epilogue tensors or casts of {step.dtype}"
    if sum(step.takes_tensor for step in problem.epilogue) > _MOST_TENSORS:
        return f"at most {_MOST_TENSORS} epilogue tensors"
    return ""


def _quant_refusal(problem: Problem) -> str:
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
    """Legal candidates, best unit and likeliest configuration first, then what was ruled out and why."""
    reason = refusal(problem)
    if reason:
        yield Illegal(Candidate.make(NAME, "*"), reason)
        return
    illegal: list[Illegal] = []
    best: dict[str, Unit] = {}
    for unit in UNITS:
        if not suits(unit, problem.a.dtype, problem.b.dtype):
            continue
        for template in TEMPLATES:
            why = _template_refusal(problem, unit, template)
            if not why and unit.isa not in isas:
                why = f"this CPU (or build) has no {unit.isa}"
            if why:
                illegal.append(Illegal(Candidate.make(NAME, template, isa=unit.isa), why))
                continue
            for pack_a, why in _pack_refusals(problem, unit).items():
                illegal.append(Illegal(Candidate.make(NAME, template, isa=unit.isa, pack_a=pack_a), why))
            # Weaker units stay in the race with their likeliest configuration only.
            thorough = best.setdefault(template, unit) is unit
            configs = _configs(problem, target, unit, template)
            for config in configs if thorough else itertools.islice(configs, 1):
                yield Candidate.make(NAME, template, isa=unit.isa, **config)
    yield from illegal


def why_illegal(problem: Problem, candidate: Candidate, target: Target, isas: Sequence[str]) -> str:
    """Return why ``candidates`` does not list ``candidate``, without listing the thousands it does; empty if it does.

    A CPU target of ``isas`` is assumed.
    """
    reason = refusal(problem)
    if reason or candidate.backend != NAME or candidate.template not in TEMPLATES:
        return reason or NOT_LISTED
    isa = dict(candidate.config).get("isa")
    best: Unit | None = None  # the only unit that offers all its configurations for the template
    for unit in UNITS:
        if not suits(unit, problem.a.dtype, problem.b.dtype):
            continue
        why = _template_refusal(problem, unit, candidate.template)
        if not why and unit.isa not in isas:
            why = f"this CPU (or build) has no {unit.isa}"
        best = best or (None if why else unit)
        if unit.isa != isa:
            continue
        reason = why or reason
        if not why and _offers(problem, target, unit, candidate, thorough=best is unit):
            return ""
    return reason or NOT_LISTED


def _offers(problem: Problem, target: Target, unit: Unit, candidate: Candidate, thorough: bool) -> bool:
    """Whether a unit lists the candidate among its configurations, or (not ``thorough``) as the first of them."""
    template, config = candidate.template, dict(candidate.config)
    if not thorough:
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


def default(problem: Problem, target: Target, isas: Sequence[str]) -> Candidate | None:
    """The likeliest candidate for a constant weight nobody has tuned."""
    for item in candidates(problem, target, isas):
        if isinstance(item, Candidate) and item.template == "packed":
            return item
    return None


def _template_refusal(problem: Problem, unit: Unit, template: str) -> str:
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


def direct_refusal(problem: Problem, unit: Unit) -> str:
    """Why the activations cannot be read where they lie; empty when they can."""
    own = {F32.name: "float32", BF16.name: "bfloat16"}.get(unit.compute.name)
    a, kp = problem.a.dtype, unit.compute.kp
    if own is not None and a != own:
        return f"{a} activations are converted for {unit.compute.name}"
    if unit.compute is U8S8 and a == "int8":
        return "signed activations are shifted by 128 for the unsigned x signed instruction"
    if own is None and unit.compute.kp == 2:
        return f"{a} activations are widened to int16"
    if problem.a.layout.order != "row":
        return "rows of the activations are not contiguous"
    if problem.k % (8 if problem.b.dtype == "int4" else kp):
        return f"K = {problem.k} is not a multiple of {8 if problem.b.dtype == 'int4' else kp}: A needs zero padding"
    return ""


def _pack_refusals(problem: Problem, unit: Unit) -> dict[str, str]:
    """The ways of reading A that are illegal, each with its reason."""
    refused = {}
    if direct_refusal(problem, unit):
        refused["none"] = direct_refusal(problem, unit)
    if unit.isa == "amx":
        refused["panels"] = "AMX loads rows of A, not panels"
    elif problem.m == 1:
        refused["panels"] = "a panel of one row is a row"
    return refused


def _configs(problem: Problem, target: Target, unit: Unit, template: str) -> Iterator[dict[str, Any]]:
    """Every configuration of a template on one unit: the likeliest of each micro-tile, then all of each.

    Entries that cannot matter stay at one value.
    """
    everything = [
        _tile_configs(problem, target, unit, template, *tile) for tile in _micro_tiles(problem, unit, template)
    ]
    for configs in everything:
        yield from itertools.islice(configs, 1)
    yield from itertools.chain.from_iterable(everything)


def _micro_tiles(problem: Problem, unit: Unit, template: str) -> list[tuple[int, int]]:
    """The micro-tiles (nr, mr) that a template offers on a unit, likeliest first."""
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
    """The values of every entry besides the micro-tile, likeliest first; the first entry varies slowest."""
    many, blocked = problem.m > mr, template != "packed"
    refused = _pack_refusals(problem, unit)
    ways = (("rows", "none") if problem.m > 64 else ("none", "rows")) + ("panels",)
    return {
        "kc": _k_blocks(problem, unit, template, many),
        "grid": [f"{tm}x{tn}x{tk}" for tm, tn, tk in _grids(problem, target.threads, nr, template)],
        "pack_a": [way for way in ways if way not in refused and (way != "panels" or template != "dot")],
        "prefetch": _prefetches(problem, unit, template, nr, many),
        "order": ("b", "a") if many and not blocked else ("b",),
        "nc": (1, 4) if many and template != "dot" else (1,),
        "mc": (0, 128) if problem.m > 256 else (0,),
    }


def _is_redundant(kc: int, nc: int, order: str, prefetch: int) -> bool:
    """Whether a configuration would do what another one does, or ask for what cannot be."""
    if nc > 1 and kc == 0 and order == "b":
        return True  # one pass over K visits panels one by one whatever nc says
    return order == "a" and prefetch == -1  # no block of B stays while tiles pass over it


def _tiles(problem: Problem, rows: dict[int, int]) -> list[tuple[int, int]]:
    """Micro-tiles by the work they waste on the edges and the loads they need per multiply-add."""

    def cost(tile: tuple[int, int]) -> float:
        nr, mr = tile
        vectors, used = nr // 16, -(-problem.m // -(-problem.m // mr))
        loads = (vectors + used) / (vectors * used)
        # Few accumulators cannot hide the latency of a multiply-add, panels beyond N are wasted work.
        idle = max(1.0, 10 / (vectors * used))
        return (1.0 + loads) * idle * (-(-problem.n // nr) * nr / problem.n) ** 2

    # The largest tile also for a smaller M: it runs the same there, and serves other M of the Plan well.
    tiles = set(rows.items())
    tiles |= {(nr, most // 2) for nr, most in rows.items() if most >= 8 and problem.m >= most}
    allowed = {(nr, mr) for nr, mr in tiles if nr == min(rows) or -(-problem.n // nr) * nr <= 1.5 * problem.n + 16}
    return sorted(allowed, key=cost)[:4]


def _k_blocks(problem: Problem, unit: Unit, template: str, many: bool) -> list[int]:
    """Elements of K in a block, likeliest first; 0 is all of K.

    Where several row tiles pass over a packed panel, a block of it that stays in the L1 or L2 meanwhile was up to 25%
    faster than all of K (AVX512, fp32 and fp16, M of 16 to 256, one and two threads, timed by hand on a Xeon). With AMX
    it was up to 20% faster at M = 64 and 10% slower at 256. An expanded block that few row tiles read is best when the
    L1 keeps it: with AMX at M = 16, int8 weights took 4 to 20% longer by blocks of 1024 than of 512, int4 weights 20%
    longer by 512 than by 256; at M = 256, 1024 was the fastest.
    """
    if template == "dot":
        return [0] + [size for size in (1024, 512, 2048) if many and size < problem.k]
    if template != "packed":
        few = unit.isa == "amx" and problem.m <= 64
        sizes = [size for size in ((512, 256, 1024) if few else (1024, 512, 256)) if size // 2 < problem.k]
        sizes = sizes or [512]
    else:
        blocks = [size for size in (512, 1024) if many and size < problem.k]
        sizes = [0, *blocks] if unit.isa == "amx" else [*blocks, 0]
    group = problem.b.quant.group if problem.b.quant is not None else None
    if group is None or group >= problem.k:
        return sizes
    return [size for size in sizes if size == 0 or size % group == 0 or group % size == 0] or [group]


def _grids(problem: Problem, threads: int, nr: int, template: str) -> list[tuple[int, int, int]]:
    """Thread grids: columns first (each weight byte is read by one thread), then rows, K, and finer dynamic shares."""
    if threads == 1:
        return [(1, 1, 1)]
    panels, grids = -(-problem.n // nr), []
    if panels >= threads:
        grids.append((1, threads, 1))
    macs = problem.m * problem.n * problem.k * problem.batch
    if macs <= _ALONE or (problem.family == "bmm" and problem.batch >= threads):
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


def _prefetches(problem: Problem, unit: Unit, template: str, nr: int, many: bool) -> list[int]:
    """Distances in bytes; -1, the block after this one, where several row tiles share a block.

    Timed by hand on a Xeon with AMX. Vector units read a panel whose rows are longer than a cache line up to a third
    slower with distances of a page (4 KiB) and more; panels of shorter rows were fastest with the longer ones. The
    cause is not known; the L2's prefetcher, which follows within a page, may be it. AMX was up to 10% faster with the
    longer distances, whatever the rows' length.
    """
    if template == "raw":
        return [0]
    if template == "dot":
        return [1024, 0, 3072]
    if many:
        return [-1, 3072, 8192]
    if unit.isa == "amx":
        return [16384, 8192, 3072]
    row_bytes = Packing.of(unit.compute, problem.b.dtype, nr).nbytes(nr, 1)
    return [3072, 8192, 16384] if row_bytes > _CACHE_LINE else [8192, 3072, 16384]
