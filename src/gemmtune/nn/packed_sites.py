"""The packed form of a weight: in which layout, and whether the raw form is kept beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from ..core.errors import GemmtuneError
from ..core.weights import PackedWeight
from ..dispatch.index import DecisionIndex
from ..ops.packing import pack
from .quantized_tensor import pack_quantized
from .sites import Site

log = logging.getLogger("gemmtune")

# A layout may take this multiple of the raw weight's bytes where there is memory for two forms of a weight: it is
# padded to its tiles, and may have sums of its columns.
PADDING = 1.25


class RankedLayout(NamedTuple):
    """The name of a layout, and whether the weight's raw form is kept beside it and serves some M."""

    name: str
    keeps_raw: bool


def _can_keep_raw(site: Site) -> bool:
    """Whether both forms of the weight can serve: of a floating weight, or one whose activations are int8 too."""
    return site.weight_only is None and (site.quantized is None or site.quantized.product == "int_mm")


def ranked_layouts(
    site: Site, index: DecisionIndex, plan_key: str, memory: float, *, raw_kernels: bool
) -> list[RankedLayout]:
    """Return the layouts in which the weight of ``site`` is served faster than raw, the best first.

    memory: as for ``optimize``. raw_kernels: whether kernels would serve the raw weight (``index.layouts``).
    """
    counts = {problem.m: float(count) for problem, count in site.ran.items()}
    both: list[str] = []
    if memory >= 2 and _can_keep_raw(site):
        both = index.layouts_beside_raw(plan_key, counts, raw_kernels=raw_kernels)
    alone = index.layouts(plan_key, counts, raw_kernels=raw_kernels)
    return [*(RankedLayout(name, True) for name in both), *(RankedLayout(name, False) for name in alone if name)]


def pack_best(site: Site, layouts: Sequence[RankedLayout], memory: float) -> tuple[PackedWeight | None, bool]:
    """Return the weight of ``site`` packed in the first of the layouts that fits in memory, and whether its raw form
    is to be kept for some M; None where no layout fits.

    The packed form may take ``memory`` times the bytes of the raw weight; where the raw form is kept for some M,
    ``memory - 1`` times, and ``PADDING`` of that. For a shared weight, which is kept in its raw form too, the limit is
    twice ``memory`` less one.
    """
    raw_bytes = next(iter(site.ran)).weight_bytes if site.quantized is None else site.quantized.nbytes
    for layout in layouts:
        multiple = 2 * memory - 1 if site.shared else (memory - 1) * PADDING if layout.keeps_raw else memory
        packed = _pack(site, layout.name)
        if packed is not None and packed.nbytes <= multiple * raw_bytes:
            return packed, layout.keeps_raw
    return None, False


def _pack(site: Site, layout: str) -> PackedWeight | None:
    """Return the weight of ``site`` packed in ``layout``; None where it cannot be packed so."""
    weight_only, problems = site.weight_only, list(site.ran)
    try:
        if site.quantized is not None:
            return pack_quantized(site.quantized, layout=layout, problems=problems)
        if weight_only is None:
            return pack(site.matrix, m=problems, layout=layout)
        return pack(
            weight_only.weight, scale=weight_only.scale, zero_point=weight_only.zero_point, bits=weight_only.bits,
            group_size=weight_only.group_size, m=problems, layout=layout,
        )  # fmt: skip
    except GemmtuneError as error:
        log.debug("%s cannot be packed as %s: %s", site.name, layout, error)
        return None
