"""The kinds of Verdict. They are not in ``decision``, so that dispatch does not load msgspec."""

from __future__ import annotations

from typing import Literal

VerdictKind = Literal[
    "exact", "within_bound", "wrong", "unstable", "crashed", "hung", "out_of_memory", "build_failed", "unsupported"
]
# Faults of a kernel itself: a kernel with one of them at any M serves no M of a Plan. The other failures (not built,
# out of memory, unsupported) at one M do not imply a failure at another.
FAULTS: frozenset[VerdictKind] = frozenset({"wrong", "unstable", "crashed", "hung"})
