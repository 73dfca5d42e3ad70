"""The Triton kernels beside PyTorch's products that builders compile: which ones, for operands like those of a call,
and that a later process finds them in Triton's cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune.backends.aten import AtenBackend, cuda_narrow
from gemmtune.backends.base import Artifact
from gemmtune.backends.triton.conversion import Conversion
from gemmtune.backends.triton.jit_kernel import JitKernel
from gemmtune.backends.triton.pointwise import Pointwise
from gemmtune.backends.triton.row_norm import RowNorm
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
    """With operands of the same dtypes and strides."""
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


def test_norms_of_rows_that_the_kernel_does_not_take_are_not_compiled() -> None:
    for k, count in ((16384, 1), (16400, 0)):
        problem = replace(weight_only_problem(16, 64, k), epilogue=(NORM,))
        assert len(jit_calls(problem, "upcast")) == count


@needs_triton
def test_candidates_compile_in_calls_on_nvidia_gpus_only(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate, backend = Candidate.make("aten", "upcast"), AtenBackend()
    assert backend.compiles_in_calls(int8_weights(ADD), candidate, H200)
    assert not backend.compiles_in_calls(int8_weights(), candidate, H200)
    assert not backend.compiles_in_calls(int8_weights(ADD), candidate, MI300X)
    assert not backend.compiles_in_calls(int8_weights(ADD), candidate, current_cpu())
    assert not backend.compiles_in_calls(build(16, 64, 32, "bf16"), candidate, H200)  # it cannot be loaded
    monkeypatch.setattr("gemmtune.backends.triton.compiler.triton_version", lambda: "")
    assert not backend.compiles_in_calls(int8_weights(ADD), candidate, H200)


@needs_triton
def test_builders_compile_what_operands_in_memory_need_in_a_later_process(tmp_path: Path) -> None:
    """The checks are those of ``jit_compiled.py``: it runs beside a library in place of NVIDIA's driver, which must not
    be in this process."""
    from triton.backends.nvidia import driver

    folder = Path(driver.__file__).parent
    text = (folder / "driver.c").read_text() + (folder / "driver.py").read_text()
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+", text)))
    source = tmp_path / "stubs.c"
    source.write_text("".join(f"int {name}(void) {{ return 0; }}\n" for name in names))
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    environment = {
        **os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache"), "TRITON_LIBCUDA_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    script = Path(__file__).with_name("jit_compiled.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "found: gate",
        "found: add",
        "found: convert",
        "found: norm",
        "all of a candidate",
    ]
