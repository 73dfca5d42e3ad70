"""Plug-in backend after whose first load the worker process treats its device's context as lost."""

from __future__ import annotations

from typing import Any

from gemmtune.testing.hostile_backend import HostileBackend
from gemmtune.workers import job

ENTRY_POINT = "helpers.context_loss:ContextLossBackend"


def raise_context_lost(handler: job.RequestHandler, error: str) -> None:
    raise job.ContextLost(f"the device's context is lost (simulated): {error}")


class ContextLossBackend(HostileBackend):
    name = "context_loss"

    def load(self, *arguments: Any) -> Any:
        job.RequestHandler._check_context = raise_context_lost  # type: ignore[method-assign]
        return super().load(*arguments)
