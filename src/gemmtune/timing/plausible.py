"""The least time in which any kernel can solve a Problem on a Target. A time below it is a wrong measurement, or that
of a kernel that computes nothing.

The bound is generous on purpose: the widest instructions of the target in each cycle, at a clock that no such part
reaches, with every operand in the nearest cache. A time above the bound is not thereby believed.

Sources: Intel's optimization manual (AMX: 16x16x32 bf16 or 16x16x64 int8 products in 16 cycles; AVX-512: two 512-bit
fused multiply-adds a cycle, two 64-byte loads a cycle) and NVIDIA's architecture white papers (multiply-adds of a
multiprocessor's tensor cores a cycle: A100 1024, H100 2048, B200 4096 dense bf16; twice that for 8-bit types).
"""

from __future__ import annotations

from ..core.problem import Problem, bits
from ..core.target import Target

_CPU_HZ, _CPU_LOAD = 6.5e9, 128  # bytes a core can load in a cycle
_GPU_HZ, _GPU_LOAD = 2.6e9, 256  # bytes a multiprocessor can load in a cycle
# Operations (a multiply-add counts two) of a core in a cycle, by the width of the activations.
_CPU_FLOPS = {64: 32, 32: 64, 16: 256, 8: 512}
_AMX_FLOPS = {16: 2048, 8: 4096}
# Operations of a GPU's multiprocessor in a cycle, with 16-bit activations; 8-bit ones have twice as many, wider ones
# half or less.
_GPU_FLOPS = {8: 2048, 9: 4096}
_GPU_FLOPS_NEWER = 16384


def least_cpu_s(problem: Problem, target: Target) -> float:
    """Return the least number of seconds that a call takes on a CPU; 0.0 for an empty Problem."""
    width = min(bits(problem.a.dtype), 64)
    per_cycle = max(_CPU_FLOPS[width], _AMX_FLOPS.get(width, 0) if "amx_tile" in target.isa else 0)
    rate = target.cores * _CPU_HZ
    return max(problem.flops / (rate * per_cycle), problem.min_bytes / (rate * _CPU_LOAD))


def least_gpu_s(problem: Problem, target: Target) -> float:
    """Return the least number of seconds that a call takes on a GPU; 0.0 for an empty Problem."""
    per_cycle = _gpu_flops(min(bits(problem.a.dtype), 64), target)
    rate = target.cores * _GPU_HZ
    return max(problem.flops / (rate * per_cycle), problem.min_bytes / (rate * _GPU_LOAD))


def _gpu_flops(width: int, target: Target) -> int:
    major = target.compute_capability[0]
    flops = _GPU_FLOPS_NEWER if target.is_amd or major not in _GPU_FLOPS else _GPU_FLOPS[major]
    return 2 * flops if width == 8 else flops
