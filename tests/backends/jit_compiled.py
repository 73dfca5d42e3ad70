"""Compile the Triton kernels beside PyTorch's products without a GPU, and check that later compilations for operands in
memory find them in Triton's cache. Run by test_jit_calls.py; TRITON_CACHE_DIR names an empty directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.triton import kernels, pointwise_kernel, row_norm_kernel
from gemmtune.backends.triton.conversion import conversion
from gemmtune.backends.triton.pointwise import pointwise_of
from gemmtune.backends.triton.row_norm import row_norm_of
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.workloads import weight_only_problem
from helpers.gpus import H200

NORM, ADD, GATE = Step("rms_norm", "inner", "bfloat16", 1e-5), Step("add", "full", "bfloat16"), Step("swiglu")
CACHE = Path(os.environ["TRITON_CACHE_DIR"])
# A kernel, and the shapes of its operands; those of an epilogue's tensors in a list.
KERNELS: dict[str, tuple[Any, list[Any]]] = {
    "gate": (
        pointwise_of((Step("scale", "col", "bfloat16"), GATE), "bfloat16", "bfloat16"), [(16, 64), [(64,)], (16, 32)],
    ),
    "add": (pointwise_of((ADD,), "bfloat16", "bfloat16"), [(16, 64), [(16, 64)], (16, 64)]),
    "convert": (conversion(), [(64, 32), (64, 32)]),
    "norm": (row_norm_of("rms_norm", 1e-5), [(16, 64), [(64,)], (16, 64)]),
}  # fmt: skip


def forget_compiled() -> None:
    """Have Triton look for kernels in its cache's files again, as a new process does."""
    functions = (kernels.convert, pointwise_kernel.gemmtune_pointwise, row_norm_kernel.gemmtune_row_norm)
    for function in functions:
        function.device_caches.clear()


def compiled() -> tuple[set[str], set[str]]:
    """Return the files of kernels, and those of modules in C that launch them."""
    return {str(path) for path in CACHE.glob("*/*.cubin")}, {str(path) for path in CACHE.glob("*/*.so")}


def on_meta(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def in_memory(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def off_boundary(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(torch.Size(shape).numel() + 1, dtype=torch.bfloat16)[1:].view(shape)


for name, (kernel, shapes) in KERNELS.items():

    def added(
        make: Callable[[tuple[int, ...]], torch.Tensor], kernel: Any = kernel, shapes: list[Any] = shapes
    ) -> tuple[int, int]:
        """Compile for operands, and return how many kernels and modules are new."""
        before = compiled()
        forget_compiled()
        operands = [[make(s) for s in shape] if isinstance(shape, list) else make(shape) for shape in shapes]
        kernel.compile_for(H200, tuple(operands))
        after = compiled()
        return len(after[0] - before[0]), len(after[1] - before[1])

    kernels_added, modules_added = added(on_meta)
    assert kernels_added == 1
    # The first has the module that all kernels need; kernels of one signature share a module.
    assert modules_added == 2 if name == "gate" else modules_added <= 1
    assert added(in_memory) == (0, 0)
    # Code for other addresses is another kernel, which shows that Triton did look at them.
    assert added(off_boundary) == (1, 0)
    print("found:", name)

forget_compiled()
problem = replace(weight_only_problem(16, 96, 80), epilogue=(NORM, GATE))
before, _ = compiled()
AtenBackend().compile_early(problem, Candidate.make("aten", "upcast_converted"), H200)
assert {Path(path).stem for path in compiled()[0] - before} == {"convert", "gemmtune_pointwise", "gemmtune_row_norm"}
print("all of a candidate")
