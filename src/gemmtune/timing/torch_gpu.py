"""torch.cuda as the ``Gpu`` that ``CudaClock`` works with; and a worker process's use of a GPU."""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from ..core.torch_compat import cuda_sleep, end_allocate_to_pool, release_pool
from .cuda_clock import EmptyGraph, Event, Graph, first_line

_CYCLES_S = 2e9  # highest clock of a GPU, in Hz: a slower clock makes pauses longer


class TorchGpu:
    """torch.cuda as a ``Gpu``. Its graphs share a memory pool, which is freed with it."""

    def __init__(self, device: torch.device) -> None:
        self._index = _index(device)
        self._stream = _stream(self._index)
        self._new_pool()
        self._numbers = torch.arange(256, dtype=torch.uint8, device=f"cuda:{self._index}").unbind()
        self._reached = torch.zeros((), dtype=torch.uint8, pin_memory=True)

    def now(self) -> float:
        return time.perf_counter()

    def rest(self) -> None:
        time.sleep(20e-6)

    def stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def event(self) -> Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def sleep(self, seconds: float) -> None:
        cuda_sleep(round(seconds * _CYCLES_S))

    def capture(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # a pool whose graphs are all freed cannot be captured into again
            self._new_pool()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            work()
        except BaseException:  # Ctrl-C too must not leave the stream capturing
            with suppress(Exception):  # ending a broken capture may fail as well; the first error counts
                self._end(graph)
            raise
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*CUDA Graph is empty")
                self._end(graph)
        except Warning:
            raise EmptyGraph("it launches nothing on the current stream") from None
        self._graphs.add(graph)
        return graph

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture. After a broken capture torch leaves the allocator recording to the pool; this method ends
        that, too."""
        try:
            graph.capture_end()
        except Warning:
            raise
        except Exception:  # any error of CUDA or the allocator
            with suppress(Exception):  # torch may have ended it already
                end_allocate_to_pool(self._index, self._pool)
                release_pool(self._index, self._pool)
            self._new_pool()
            raise

    def _new_pool(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()  # the graphs captured into the pool

    def mark(self, number: int) -> None:
        self._reached.copy_(self._numbers[number], non_blocking=True)

    def reached(self) -> int:
        return int(self._reached)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._index)


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    """Return this process's only stream for timing: libraries keep a workspace for each stream that they see."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def warm_up(device: torch.device) -> None:
    """Create the context, and load the libraries that every problem needs. Takes about a second in a new process."""
    a = torch.ones(16, 16, dtype=torch.float64, device=device)
    (a @ a).sum().item()
    torch.cuda.synchronize(device)


def limit_device_memory(device: torch.device, allowance: int) -> None:
    """Let torch allocate ``allowance`` bytes of device memory more than it has now; 0 changes nothing.

    Beyond the limit allocations raise torch.OutOfMemoryError, which costs one candidate.
    """
    if allowance > 0:
        total = torch.cuda.get_device_properties(device).total_memory
        share = (torch.cuda.memory_allocated(device) + allowance) / max(total, 1)
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), _index(device))


def context_fault(device: torch.device) -> str:
    """Return why this process can do nothing more on the device, in words; empty while it can, or when it never used
    it."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return first_line(error)
    return ""
