"""Which candidates to try, in which order, and when to stop."""

from __future__ import annotations

from .local import Search
from .space import enumerate_candidates

__all__ = ["Search", "enumerate_candidates"]
