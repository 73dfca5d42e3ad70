"""Screening times of candidates on a GPU: a few cold calls of each, before any race."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from .clock import Latency, gc_disabled
from .cuda_clock import MIN_KERNEL_S, PAUSE_MARGIN, ROUND_PAUSE_S, Gpu

_COLD_CALLS, _COLD_SLOW_CALLS, _COLD_SLOW_S = 5, 2, 5e-3
# Seconds that a first call may need: modules are loaded, libraries choose their kernels, and Triton compiles a kernel
# beside one of PyTorch's products. With 0.5 the product of converted int8 weights, whose first call took 0.7 and 1.0 s,
# was not timed at the first M that a process tuned (H200, every-m-20261129-063427.json, -064138).
_SETTING_UP_S = 2.0
_STALL_S = 2e-3
_SLOW_S = 50e-3


def screening_times(
    gpu: Gpu,
    call: Callable[[], object],
    flush: Callable[[], object],
    cutoff_s: float | None = None,
    latency: Latency = "graph",
) -> tuple[float, ...]:
    """Return the screening times of a call in seconds: five (slow calls: two), each after ``flush`` emptied the L2,
    launching hidden by a pause.

    A call that is slower than ``cutoff_s`` even when warm returns the one time that showed it. The very first call,
    which sets things up, does not count, unless it takes so long that setting things up cannot be why. latency: with
    ``eager`` a call takes no less than launching it. Raises the errors of the calls.

    The calls run on the current stream, usually the default one. Work that is launched there whatever the current
    stream is shows its time here, and its fault only in a race. For work that is launched on another stream the time is
    that until the device was done.
    """
    with gc_disabled():
        gpu.synchronize()
        first_s, _ = _time_single_call(gpu, call)
        if cutoff_s is not None and first_s > 4.0 * cutoff_s + _SETTING_UP_S:
            return (first_s,)
        warm_s, host_s = _time_single_call(gpu, call)
        if warm_s > _SLOW_S or (cutoff_s is not None and warm_s > 2.0 * cutoff_s + _STALL_S):
            return (warm_s,)
        events, launches = [], []
        count = _COLD_CALLS if warm_s < _COLD_SLOW_S else _COLD_SLOW_CALLS
        gpu.sleep(ROUND_PAUSE_S + PAUSE_MARGIN * count * host_s)
        for _ in range(count):
            flush()
            start, end = gpu.event(), gpu.event()
            start.record()
            started = gpu.now()
            call()
            launches.append(gpu.now() - started)
            end.record()
            events.append((start, end))
        gpu.synchronize()
    least_s = median(launches) if latency == "eager" else 0.0
    times = [start.elapsed_time(end) * 1e-3 for start, end in events]
    if min(times) < MIN_KERNEL_S:
        return (warm_s,)
    return tuple(max(least_s, seconds) for seconds in times)


def _time_single_call(gpu: Gpu, call: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of one call until it was done, and until it was launched."""
    started = gpu.now()
    call()
    launched_s = gpu.now() - started
    gpu.synchronize()
    return gpu.now() - started, launched_s
