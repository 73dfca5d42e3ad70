"""Targets of GPUs that this machine may lack, and the candidates that a backend lists for them."""

from __future__ import annotations

import importlib.util

import pytest

from gemmtune.backends.base import Backend
from gemmtune.backends.triton.compiler import triton_version, why_unusable
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import build, fp8_problem, int_problem, weight_only_problem

H200 = Target("cuda", "NVIDIA H200", "9.0", caches=(232448, 0, 62914560), cores=132, versions=(("hip", "None"),))
A100 = Target("cuda", "NVIDIA A100", "8.0", caches=(166912, 0, 41943040), cores=108, versions=(("hip", "None"),))
MI300X = Target(
    "cuda", "AMD Instinct MI300X", "gfx942", caches=(65536, 0, 4194304), cores=304, versions=(("hip", "6.4"),)
)
PROBLEM_OF_DTYPE = {
    "bf16": build(16, 4096, 4096, "bf16"),
    "int8": int_problem(16, 4096, 4096),
    "fp8": fp8_problem(16, 4096, 4096),
    "int8wo": weight_only_problem(16, 4096, 4096),
    "int4wo": weight_only_problem(16, 4096, 4096, bits=4, group=128),
}
HAS_TRITON = importlib.util.find_spec("triton") is not None and not why_unusable(triton_version())
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason=why_unusable(triton_version()))
# Config of the CUDA backend's template ``skinny`` for up to 8 rows.
SKINNY = {"bm": 8, "bn": 32, "side": 1, "warps": 4, "depth": 1, "split": 1}


def legal_candidates(backend: Backend, problem: Problem, target: Target = H200) -> list[Candidate]:
    """Return the backend's legal candidates, in its order."""
    return [item for item in backend.candidates(problem, target) if isinstance(item, Candidate)]


def illegal_reasons(backend: Backend, problem: Problem, target: Target = H200) -> set[str]:
    """Return the reasons of the backend's illegal candidates."""
    return {item.reason for item in backend.candidates(problem, target) if isinstance(item, Illegal)}
