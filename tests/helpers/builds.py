"""Builds whose outcomes are known."""

from __future__ import annotations

from concurrent.futures import Future

from gemmtune.backends.base import Artifact
from gemmtune.core.decision import Verdict

Outcome = Artifact | Verdict


def finished(outcome: Outcome) -> Future[Outcome]:
    """Return the future of a build that has ended."""
    future = Future[Outcome]()
    future.set_result(outcome)
    return future
