"""Imported by the process that builders are forked from, so that each of them finds done what it would do anew.

Triton's key for its own cache holds a hash of all its files, a library of 400 MB among them: 0.28 s of the 0.35 s that
a build took on a CPU host (Triton 3.6, cProfile in a forked process), and more where sixteen of them read it at once.
"""

from __future__ import annotations

import contextlib

import triton.backends.nvidia.compiler
import triton.compiler
import triton.runtime.cache

from . import kernels

__all__ = ["kernels"]

_PLACES = (triton.runtime.cache, triton.compiler.compiler)  # where Triton has had it since 3.2

for _place in _PLACES:
    if hasattr(_place, "triton_key"):
        with contextlib.suppress(Exception):  # the builds that need it say what is wrong
            _place.triton_key()  # Triton keeps what it returns
        break
