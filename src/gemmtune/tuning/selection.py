"""Which candidates are checked fully and which ones race, by their screening times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .ledger import Row

CLOSE = 1.3  # a candidate whose screening time is within this factor of the best may turn out fastest in a race
CLOSE_BASELINE = 1.5  # ATen has few candidates: a wider limit keeps the name "ATen" honest
# Kernels on the raw weight are raced when they take up to this multiple of the best packed kernel's time.
RAW_WITHIN = 8.0
# The fastest candidate of each packing is confirmed within this factor of the best, for Plans that share one packing
# over many M.
PACKING_WITHIN = 5.0
MAX_BASELINES, MAX_PACKINGS = 4, 4


def promising(rows: Sequence[Row], layouts: Sequence[str], max_raced: int) -> list[Row]:
    """Return the rows that may win a race, or be a packing's best in a Plan that shares that packing.

    rows: timed, fastest first. layouts: those in which the weight has kernels at other M.
    """
    baselines = [row for row in rows if row.is_baseline]
    others = [row for row in rows if not row.is_baseline]
    chosen = within(baselines, CLOSE_BASELINE)[:MAX_BASELINES]
    chosen += [row for row in baselines if row.packing is None][:1]
    chosen += within(others, CLOSE)[:max_raced]
    best_by_packing = {row.packing: row for row in reversed(within(rows, PACKING_WITHIN))}
    chosen += sorted(best_by_packing.values(), key=lambda row: row.screening_s)[:MAX_PACKINGS]
    chosen += [best_by_packing[layout] for layout in layouts if layout in best_by_packing]
    return list({row.id: row for row in chosen}.values())


def entrants(rows: Sequence[Row], layouts: Sequence[str], max_raced: int, budget_s: float) -> list[Row]:
    """Return the rows to race, most important first: ATen's best, the other candidates, then more of ATen's.

    rows: eligible, fastest first; those that are left out get a reason. A race that is short of memory leaves out the
    last entrants. budget_s: seconds that remain.
    """
    baselines = within([row for row in rows if row.is_baseline], CLOSE_BASELINE)[:MAX_BASELINES]
    others = within([row for row in rows if not row.is_baseline], CLOSE_BASELINE)
    others = best_of_each_packing_first(others, layouts)
    raw = raw_pair(rows)
    baselines += [row for row in raw if row.is_baseline and row not in baselines]
    others[1:1] = [row for row in raw if not row.is_baseline and row not in others[:1]]
    others = list({row.id: row for row in others}.values())
    best_s = min((row.screening_s for row in rows), default=1.0)
    others = others[: max(3, min(max_raced, int(budget_s / (20 * best_s))))]
    for row in rows:
        if row not in baselines and row not in others:
            row.reason = row.reason or f"{row.screening_s / best_s:.2f}x the best screening time: not raced"
    return baselines[:1] + others + baselines[1:]


def raw_pair(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest challenger and the fastest baseline that read the raw (unpacked) weight, which one of the two
    serves.

    Empty when ATen's is far ahead, or when both are far behind the best row.
    """
    raw = [row for row in rows if row.packing is None]
    challenger = next((row for row in raw if not row.is_baseline), None)
    baseline = next((row for row in raw if row.is_baseline), None)
    if challenger is None or baseline is None:
        return []
    limit_s = min(CLOSE * baseline.screening_s, RAW_WITHIN * rows[0].screening_s)
    return [challenger, baseline] if challenger.screening_s <= limit_s else []


def within(rows: Sequence[Row], factor: float) -> list[Row]:
    """Return the rows within ``factor`` of the first; rows are sorted by screening time."""
    return [row for row in rows if row.screening_s <= factor * rows[0].screening_s]


def best_of_each_packing_first(rows: Sequence[Row], layouts: Sequence[str] = ()) -> list[Row]:
    """Return ``rows`` with the best overall first, then the best of each packing (those in ``layouts`` first), then the
    rest.

    A Plan compares packings by raced times, so each packing needs an entrant.
    """
    best_rows = list({row.packing: row for row in reversed(rows)}.values())
    best_rows.sort(key=lambda row: (row is not rows[0], row.packing not in layouts, row.screening_s))
    best_ids = {row.id for row in best_rows}
    return best_rows + [row for row in rows if row.id not in best_ids]


def grouped_by_packing(rows: Iterable[Row]) -> list[Row]:
    """Return ``rows`` with those of one packing next to each other, so that each layout is packed once."""
    groups: dict[str | None, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.packing, []).append(row)
    return [row for group in groups.values() for row in group]
