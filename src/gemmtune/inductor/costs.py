"""Estimates of what a form of a product costs in a graph, from the times of the store's decisions."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from .. import backends
from ..backends.aten.fusion import mkldnn_prefix
from ..backends.aten.quantized import INT8PACK_ROWS, Int8Pack, Int8PackRounded
from ..core.candidate import Illegal
from ..core.devices import is_host
from ..core.epilogue import GATES
from ..core.problem import Problem, bits
from ..dispatch.runtime import RUNTIME, current_target

# By whether a device is a host.
# A pointwise kernel that Inductor need not launch: seconds of a launch inside a graph, and bytes a second.
_LAUNCH_S = {True: 1e-6, False: 1.5e-6}
_BANDWIDTH = {True: 1.5e10, False: 3e12}
# A matrix that a kernel of Inductor's need not read. On an H200, a norm of one row of 4,096 numbers took 2.4 us with
# one matrix added in front, and 4.7 to 6.7 us with two or three (benchmarks/results/e2e-gpu-kernels-20261125.txt). In a
# graph of such norms only it took 1.9 us with one or two and 2.3 with three (compile-residuals-h200-20261130.txt); a
# decoder's step was 3% shorter at 16 rows with residuals in the products' kernels, and the same at 64.
_READ_S = {True: 0.0, False: 1e-6}


# Seconds for an element that Inductor's kernels take longer on one thread of a CPU for an activation: bfloat16, an AMD
# EPYC with AVX512 (benchmarks/results/pointwise-cpu-20261129.txt). Not measured on GPUs, where it counts nothing.
_ACTIVATION_S: dict[str, float] = {"silu": 0.45e-9, "gelu": 0.7e-9, "gelu_tanh": 1.85e-9}

# A norm's kernel that Inductor need not launch, without its memory traffic. On an H100, seven norms that products
# computed saved 20 us of a decode step in bfloat16, although each product took 1.5 us longer, and 98 us with int8
# weights (benchmarks/results/e2e-gpu-norms-h100-20261126.txt): a norm's few loads wait behind the early ones of the
# product behind it.
_NORM_S = {True: 1e-6, False: 4e-6}

# What a GPU's memory gives to a kernel that reads much, as a share of the data sheet's bandwidth: 0.92 on an H100
# (benchmarks/results/e2e-gpu-20261126-004054.json), 0.91 on an H200 (e2e-gpu-20261125-235045.json).
_REACHED = 0.92
# What is assumed of a product that was not tuned, besides its memory traffic. The fastest kernels for one row of 17 to
# 235 MB of weights took 2.6 to 3.4 us more than that on an H100 (e2e-gpu-norms-times-h100-20261126.txt) and on an H200
# (decisions of the run e2e-gpu-20261126-032243, whose store was not kept).
_READY_S = 3.5e-6

# Layouts that are a copy of an integer weight in a wider dtype, which takes twice the memory and more.
_WIDER = ("aten:cast/", "aten:dequant/")
# Layouts of GPUs that are a copy of a floating weight in another order, beside the Parameter, whose memory is scarce.
_COPIES = ("aten:row", "aten:col", "aten:pad16")


MOST_ROWS = 1024  # where there are kernels for so many rows, there are kernels for any number


class Cost(NamedTuple):
    """seconds: of one call. beats_torch: whether a kernel serves that is faster than PyTorch's own op beyond the
    noise. kernel: the id of what serves; empty for PyTorch's own op. torch_s: the seconds of PyTorch's own op in the
    same race; None where they are not known."""

    seconds: float
    beats_torch: bool
    kernel: str = ""
    torch_s: float | None = None


def layouts_of(problem: Problem, device: torch.device) -> list[str | None]:
    """Return the layouts in which a graph's weight may be served, the best first; None is the raw weight.

    They do not depend on M, so that the graphs of one model share a packed form.
    """
    index = RUNTIME.index(device)
    if not problem.b.constant or not index.knows(problem.plan_key):
        return [None]
    refused = _WIDER if is_host(device.type) else (*_WIDER, *_COPIES)
    return [name for name in index.layouts(problem.plan_key) if name is None or not name.startswith(refused)]


def cost_of(problem: Problem, device: torch.device) -> Cost | None:
    """Return the cost of what serves a Problem on a device by the store's decisions; None if it was not tuned."""
    index, packing = RUNTIME.index(device), layouts_of(problem, device)[0]
    point = next((p for p in index.points(problem.plan_key) if p.m == problem.m), None)
    if point is not None:
        option = point.options.get(packing) or point.options.get(None)
        plain = point.plain_s
        torch_s = plain if math.isfinite(plain) else None
        if option is not None and option.beats_aten and option.seconds <= plain:
            own = option.candidate.backend != "aten" or packing is not None
            return Cost(option.seconds, own, option.candidate.id, torch_s)
        return Cost(plain, False, torch_s=plain) if torch_s is not None else None
    for dim in problem.dims:
        tuned, size = index.tuned_plan(problem.plan_key_over(dim)), problem.size(dim)
        kernel = None if tuned is None else tuned.serving(size, packing or "")
        if kernel is not None and kernel.times:
            nearest = min(kernel.times, key=lambda timed: abs(math.log(timed / size)))
            seconds = kernel.times[nearest] * max(1.0, size / nearest)
            return Cost(seconds, kernel.candidate.get("backend") != "aten", kernel.id)
    return None


def assumed_s(problem: Problem, device: torch.device) -> float | None:
    """Return the seconds that are assumed of a Problem that was not tuned: its memory traffic at the bandwidth that the
    device reaches, and what a kernel takes until its loads arrive. None where the bandwidth is unknown.

    It is too little for a Problem that is limited by arithmetic, so that no other form seems better than tuning it.
    """
    bandwidth = _memory_bandwidth(device)
    if bandwidth is None:
        return None
    return _READY_S + problem.min_bytes / (_REACHED * bandwidth)


@functools.lru_cache(maxsize=16)
def _memory_bandwidth(device: torch.device) -> float | None:
    """Return the bytes a second of a GPU's memory by its data sheet; None for other devices."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    clock_khz, bits_wide = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    transfers = 2  # in each clock
    return transfers * 1e3 * clock_khz * bits_wide / 8 or None


def pointwise_s(problem: Problem, device: torch.device) -> float:
    """Return the seconds of a pointwise kernel that reads a product's result and the epilogue's matrices, and writes
    its own result; for a gate, one that multiplies two products."""
    host = is_host(device.type)
    width = bits(problem.out_dtype) // 8
    fixed_s = _LAUNCH_S[host] + _activations_s(problem, device)
    if problem.gate is not None:
        return fixed_s + 3 * problem.m * problem.columns * width / _BANDWIDTH[host]
    elements = problem.m * problem.n * problem.batch
    matrices = sum(bits(step.dtype) // 8 for step in problem.epilogue if step.axis == "full" and step.dtype)
    return fixed_s + elements * (2 * width + matrices) / _BANDWIDTH[host]


def _activations_s(problem: Problem, device: torch.device) -> float:
    """Return the seconds that Inductor's kernels take longer for the activations of a Problem's epilogue, its gate's
    among them, with torch's present number of threads."""
    if not is_host(device.type):
        return 0.0
    kinds = (GATES.get(step.kind, step.kind) for step in problem.epilogue)
    element_s = sum(_ACTIVATION_S.get(kind, 0.0) for kind in kinds)
    return problem.m * problem.columns * problem.batch * element_s / torch.get_num_threads()


def has_fused_rival(problem: Problem) -> bool:
    """Whether races on CPUs have a form of PyTorch's that computes a Problem's steps as fast as ``torch.compile``
    would: oneDNN's, its product with one kernel behind it (in float32 for gates only), or, for few rows by int8
    weights, ``_weight_int8pack_mm`` with one kernel behind it. Of other Problems the candidate is a product in float32,
    or has an operator for each step: to be faster than it does not mean to be faster than ``torch.compile``."""
    if problem.family == "mixed_mm":
        return problem.m <= INT8PACK_ROWS and any(
            not template.why_illegal(problem.without_norm(), {}) for template in (Int8Pack, Int8PackRounded)
        )
    if problem.family != "mm" or problem.a.dtype not in ("float32", "bfloat16"):
        return False
    is_rounded = problem.a.dtype == problem.out_dtype == "bfloat16"
    return is_rounded or problem.gate is not None or mkldnn_prefix(problem).steps == len(problem.epilogue)


def gate_read_s(problem: Problem, device: torch.device) -> float:
    """Return the seconds that a kernel of Inductor's saves which reads a gate's result in place of its two factors."""
    bytes_saved = problem.m * problem.columns * (bits(problem.out_dtype) // 8)
    return bytes_saved / _BANDWIDTH[is_host(device.type)] + _activations_s(problem, device)


def norm_s(problem: Problem, device: torch.device) -> float:
    """Return the seconds of a kernel that normalises the rows of a product's A."""
    host = is_host(device.type)
    return _NORM_S[host] + 2 * problem.m * problem.k * (bits(problem.a.dtype) // 8) / _BANDWIDTH[host]


@functools.lru_cache(maxsize=256)
def has_own_kernels(problem: Problem, device: torch.device) -> bool:
    """Whether a backend other than ATen has a legal candidate for a Problem on a device."""
    target = current_target(device)
    for name in backends.names(device.type):
        backend = backends.get(name) if name != "aten" else None
        if backend is None or backend.why_family_unsupported(problem) or not backend.available(target):
            continue
        if any(not isinstance(candidate, Illegal) for candidate in backend.candidates(problem, target)):
            return True
    return False


@functools.lru_cache(maxsize=256)
def most_rows(problem: Problem, device: torch.device) -> int:
    """Return the most rows, a power of two up to ``MOST_ROWS``, for which a backend other than ATen has kernels for a
    Problem (with a norm, each block normalises all rows); 0 where none has one."""
    sizes = [2**i for i in range(MOST_ROWS.bit_length())]
    return next((rows for rows in reversed(sizes) if has_own_kernels(problem.with_m(rows), device)), 0)


def residual_s(problem: Problem, device: torch.device) -> float:
    """Return the seconds that kernels of Inductor's save which read a product's result, if that includes the matrix
    that is added last."""
    host = is_host(device.type)
    width = bits(problem.epilogue[-1].dtype or problem.out_dtype) // 8
    read_s = _READ_S[host] + problem.m * problem.n * problem.batch * width / _BANDWIDTH[host]
    return read_s + _activations_s(problem, device)
