"""The kinds of Verdict. Apart from ``decision``, so that serving does not load msgspec."""

from __future__ import annotations

from typing import Literal

VerdictKind = Literal[
    "exact", "within_bound", "wrong", "unstable", "crashed", "hung", "out_of_memory", "build_failed", "unsupported"
]
# Faults of a kernel itself: it may serve no M of a Plan, whatever M showed them. What did not build, fit in memory or
# apply at one M says nothing of another.
FAULTS: frozenset[VerdictKind] = frozenset({"wrong", "unstable", "crashed", "hung"})
