"""Tuning in this process, as if no other process used the cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from gemmtune.core.target import Target
from gemmtune.timing import devices
from gemmtune.tuning import worker_pool
from gemmtune.workers.local_worker import LocalWorker


@contextmanager
def undisturbed() -> Iterator[None]:
    """Tune in this process with one thread, and never call the machine disturbed: no decision is inconclusive for
    that."""

    def make_worker(target: Target, *, limits: object, hosts: object, **options: Any) -> LocalWorker:
        return LocalWorker(target, **options)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with (
            mock.patch.object(worker_pool, "Worker", make_worker),
            mock.patch.object(devices.HostTiming, "machine", None),
        ):
            yield
    finally:
        torch.set_num_threads(threads)
