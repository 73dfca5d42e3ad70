"""The hot path: from a call to a prepared kernel in microseconds. Never tunes, never measures."""

from __future__ import annotations

from .plan import Plan, PlanEntry
from .policies import Policy
from .portfolio import build_plan, choose_packing, rank_packings
from .runtime import RUNTIME, PolicyScope, current_target, policy

__all__ = [
    "RUNTIME", "Plan", "PlanEntry", "Policy", "PolicyScope", "build_plan", "choose_packing", "current_target",
    "policy", "rank_packings", "refresh",
]  # fmt: skip

refresh = RUNTIME.refresh
