"""The Triton kernels beside PyTorch's products that builders compile: which ones, for operands like those of a call,
and that a later process finds them in Triton's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune.backends.aten import AtenBackend, cuda_narrow
from gemmtune.backends.base import Artifact
from gemmtune.backends.triton.conversion import Conversion, conversion
from gemmtune.backends.triton.jit_kernel import JitKernel
from gemmtune.backends.triton.pointwise import Pointwise, pointwise_of
from gemmtune.backends.triton.row_norm import RowNorm, row_norm_of
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Epilogue, Step
from gemmtune.core.problem import Problem
from gemmtune.core.target import current_cpu
from gemmtune.core.workloads import bmm_problem, build, weight_only_problem
from gemmtune.verify.inputs import make_inputs
from helpers.gpus import H200, MI300X, needs_triton
from helpers.jit_kernels import OnGpu, pretend_that_triton_runs

NORM, ADD, GATE = Step("rms_norm", "inner", "bfloat16", 1e-5), Step("add", "full", "bfloat16"), Step("swiglu")
UPCASTS = ("upcast", "upcast_rounded", "upcast_converted", "upcast_once")


def int8_weights(*steps: Step, m: int = 16, n: int = 64) -> Problem:
    return replace(weight_only_problem(m, n, 32), epilogue=steps)


def jit_calls(problem: Problem, template: str) -> Any:
    kernel: Any = AtenBackend().load(Artifact(Candidate.make("aten", template), ""), problem)
    return kernel.jit_calls()


def describe(kernel: JitKernel, operands: Any) -> tuple[Any, ...]:
    """Return what Triton's code depends on: the kernel, its constants, and the operands' dtypes, sizes and strides."""
    tensors = [
        tensor for item in operands for tensor in ([item] if isinstance(item, torch.Tensor) else item)
    ]  # fmt: skip
    constants = getattr(kernel, "_constants", None)
    leads = [t.stride(0) if t.dim() == 2 and not isinstance(kernel, Conversion) else t.numel() for t in tensors]
    return type(kernel).__name__, constants, [t.dtype for t in tensors], leads


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return descriptions of launches, which compute nothing."""
    made: list[tuple[Any, ...]] = []
    for kind in (Pointwise, RowNorm, Conversion):
        monkeypatch.setattr(kind, "launch", lambda self, *operands: made.append(describe(self, operands)))
    pretend_that_triton_runs(monkeypatch)
    # A product in float32 of narrower operands, which PyTorch has on GPUs only.
    monkeypatch.setattr(cuda_narrow, "wide_mm", lambda a, b: torch.mm(a.float(), b.float()))
    return made


@pytest.mark.parametrize("template", UPCASTS)
@pytest.mark.parametrize("steps", [(), (ADD,), (GATE,), (NORM, GATE), (NORM,)], ids=str)
def test_kernels_that_are_compiled_early_are_those_that_a_call_launches(
    launched: list[tuple[Any, ...]], template: str, steps: Epilogue
) -> None:
    """With operands of the same dtypes and strides. Off 16-byte boundaries a call launches none."""
    problem = int8_weights(*steps)
    kernel: Any = AtenBackend().load(Artifact(Candidate.make("aten", template), ""), problem)
    inputs = make_inputs(problem, 0)
    weight = replace(inputs.b, data=inputs.b.data.as_subclass(OnGpu), scale=inputs.b.scale.as_subclass(OnGpu))
    b = kernel.pack(inputs.b) if kernel.packing else weight
    launched.clear()
    aux = [tensor.as_subclass(OnGpu) for tensor in inputs.aux]
    kernel.run(inputs.a.as_subclass(OnGpu), b, aux, torch.empty(problem.out_shape, dtype=torch.bfloat16))
    expected = [describe(kernel, operands) for kernel, operands in kernel.jit_calls()]
    assert sorted(expected, key=str) == sorted(launched, key=str)
    assert len(expected) == (NORM in steps) + (template == "upcast_converted") + bool(set(steps) - {NORM})


@pytest.mark.parametrize(
    ("problem", "template"),
    [
        (build(16, 64, 32, "bf16"), "mm"), (int8_weights(), "upcast"), (int8_weights(ADD, m=0), "upcast"),
        (bmm_problem(2, 16, 64, 32, "bfloat16"), "bmm"),
    ],
)  # fmt: skip
def test_products_without_steps_and_without_elements_compile_nothing(problem: Problem, template: str) -> None:
    assert jit_calls(problem, template) == []


@needs_triton
def test_candidates_compile_in_calls_on_nvidia_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, backend = Candidate.make("aten", "upcast"), AtenBackend()
    assert backend.compiles_in_calls(int8_weights(ADD), candidate, H200)
    assert not backend.compiles_in_calls(int8_weights(), candidate, H200)
    assert not backend.compiles_in_calls(int8_weights(ADD), candidate, MI300X)
    assert not backend.compiles_in_calls(int8_weights(ADD), candidate, current_cpu())
    monkeypatch.setattr("gemmtune.backends.triton.compiler.triton_version", lambda: "")
    assert not backend.compiles_in_calls(int8_weights(ADD), candidate, H200)


@pytest.fixture
def triton_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the directory of Triton's cache, empty, and restore Triton's driver."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", None)
    yield tmp_path
    forget_compiled()


def forget_compiled() -> None:
    """Have Triton look for kernels in its cache's files again, as a new process does."""
    from gemmtune.backends.triton import kernels, pointwise_kernel, row_norm_kernel

    functions = (kernels.convert, pointwise_kernel.gemmtune_pointwise, row_norm_kernel.gemmtune_row_norm)
    for function in functions:
        function.device_caches.clear()


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "shapes"),
    [
        (pointwise_of((Step("scale", "col", "bfloat16"), GATE), "bfloat16", "bfloat16"), [(16, 64), [(64,)], (16, 32)]),
        (pointwise_of((ADD,), "bfloat16", "bfloat16"), [(16, 64), [(16, 64)], (16, 64)]),
        (conversion(), [(64, 32), (64, 32)]),
        (row_norm_of("rms_norm", 1e-5), [(16, 64), [(64,)], (16, 64)]),
    ],
)  # fmt: skip
def test_kernel_that_was_compiled_without_a_gpu_is_found_for_operands_in_memory(
    triton_cache: Path, kernel: JitKernel, shapes: list[Any]
) -> None:
    """At multiples of 16 bytes; code for others is another kernel, which shows that Triton did look."""

    def operands(make: Any) -> tuple[Any, ...]:
        return tuple([make(s) for s in shape] if isinstance(shape, list) else make(shape) for shape in shapes)

    def compiled() -> int:
        return len(list(triton_cache.glob("*/*.cubin")))

    def off_boundary(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(torch.Size(shape).numel() + 1, dtype=torch.bfloat16)[1:].view(shape)

    forget_compiled()
    kernel.compile_for(H200, operands(lambda shape: torch.empty(shape, dtype=torch.bfloat16, device="meta")))
    assert compiled() == 1
    for make, count in ((lambda shape: torch.empty(shape, dtype=torch.bfloat16), 1), (off_boundary, 2)):
        forget_compiled()
        kernel.compile_for(H200, operands(make))
        assert compiled() == count


@needs_triton
def test_backend_compiles_all_kernels_of_a_candidate(triton_cache: Path) -> None:
    forget_compiled()
    AtenBackend().compile_early(int8_weights(NORM, GATE), Candidate.make("aten", "upcast_converted"), H200)
    names = {path.stem for path in triton_cache.glob("*/*.cubin")}
    assert names == {"convert", "gemmtune_pointwise", "gemmtune_row_norm"}
