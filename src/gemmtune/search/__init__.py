"""Which candidates to try, in which order, and when to stop."""

from __future__ import annotations

from .ledger import Ledger, Row
from .local import Search
from .space import INCUMBENT, enumerate_candidates

__all__ = ["INCUMBENT", "Ledger", "Row", "Search", "enumerate_candidates"]
