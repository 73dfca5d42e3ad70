"""Work that every build would repeat, done once in the process from which builders are forked, which imports this
module. The process from which workers are forked imports it, too: a worker's first call of a Triton kernel beside one
of PyTorch's products would do this work. The nine attempts of the first Problem with a residual took 2.7 s, and 1.3 s
since (on two H200s; benchmarks/results/compile-timeline-h200-20261128.txt).

Triton's key for its own cache contains a hash of all its files, including a library of 400 MB. Computing it took 0.28 s
of the 0.35 s of a build on a CPU host (Triton 3.6, cProfile in a forked process), and more where sixteen builds read
the files at once.
"""

from __future__ import annotations

import contextlib

import triton.backends.nvidia.compiler
import triton.compiler
import triton.runtime.cache

from . import kernels, pointwise_kernel, row_norm_kernel

__all__ = ["kernels", "pointwise_kernel", "row_norm_kernel"]

# The modules that have contained triton_key since Triton 3.2.
_MODULES = (triton.runtime.cache, triton.compiler.compiler)

for _module in _MODULES:
    if hasattr(_module, "triton_key"):
        with contextlib.suppress(Exception):  # a build that needs the key reports the error
            _module.triton_key()  # Triton caches its result
        break
