"""A plug-in backend for tests of workers: loading its kernels makes the process treat its device's context as lost."""

from __future__ import annotations

from typing import Any

from gemmtune.testing.hostile_backend import HostileBackend
from gemmtune.workers import job

PLACE = "helpers.losing:LosingBackend"


def lose(desk: job.RequestHandler, happened: str) -> None:
    raise job.ContextLost(f"the device's context is lost (simulated): {happened}")


class LosingBackend(HostileBackend):
    name = "losing"

    def load(self, *arguments: Any) -> Any:
        job.RequestHandler._check_context = lose  # type: ignore[method-assign]
        return super().load(*arguments)
