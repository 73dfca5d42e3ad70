"""Tests that PyTorch's own op serves a call whose kernel cannot be launched, and that no part of the launch ran."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune import fuse
from gemmtune.backends.gpu import kernel as gpu_kernel
from gemmtune.backends.gpu.artifact import Header, Tma
from gemmtune.backends.gpu.kernel import GpuKernel
from gemmtune.backends.triton.compiler import make_spec
from gemmtune.backends.triton.kernel import TEMPLATES
from gemmtune.core.candidate import Candidate
from gemmtune.core.errors import KernelError, UnsupportedError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.workloads import bmm_problem, build, weight_only_problem
from gemmtune.store import MemoryStore
from gemmtune.verify.inputs import make_inputs
from helpers.drivers import FakeDriver, install_fake_driver
from helpers.serving import TOY_RUNS, ToyKernel, evidence, register, store_decision, toy

ERRORS = (
    KernelError("asking for 64 bytes: CUDA error 2 (out of memory)"),
    UnsupportedError("cuBLASLt has no algorithm for this product"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
)


def raising(error: Exception) -> Callable[..., NoReturn]:
    """Return a function that raises ``error``."""

    def fail(*_: Any) -> NoReturn:
        raise error

    return fail


@pytest.fixture
def tuned(own_store: MemoryStore) -> Callable[[Callable[[], Tensor]], Tensor]:
    """Return a function that makes a kernel win for a call, and returns PyTorch's own result."""
    register()
    TOY_RUNS.clear()

    def tune(call: Callable[[], Tensor]) -> Tensor:
        with gemmtune.record() as recorded:
            wanted = call()
        for problem, _ in recorded.problems:
            store_decision(own_store, problem, evidence(toy(), 0.1), chosen=toy())
        TOY_RUNS.clear()  # the recorded call may have run a kernel of an earlier decision
        return wanted.clone()

    return tune


@pytest.mark.parametrize("stage", ["run", "bind", "bound launch"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_call_whose_launch_fails_is_served_by_torch(
    tuned: Any, monkeypatch: pytest.MonkeyPatch, stage: str, error: Exception
) -> None:
    a, b, bias, out = torch.randn(5, 8), torch.randn(8, 6), torch.randn(6), torch.empty(5, 6)
    batches = torch.randn(2, 5, 8), torch.randn(2, 8, 6)
    calls: list[Callable[[], Tensor]] = [
        lambda: gemmtune.mm(a, b),
        lambda: gemmtune.mm(a, b, out=out),
        lambda: gemmtune.mm(a, b, epilogue=[fuse.bias(bias), fuse.relu()]),
        lambda: gemmtune.linear(a, b.t().contiguous(), bias),
        lambda: gemmtune.bmm(*batches),
    ]
    if stage == "bound launch":
        monkeypatch.setattr(ToyKernel, "bind", lambda *_: raising(error))
    elif stage == "run" or isinstance(error, torch.OutOfMemoryError):  # bind allocates no device memory
        monkeypatch.setattr(ToyKernel, "run", raising(error))
    else:
        monkeypatch.setattr(ToyKernel, "bind", raising(error))
    for call in calls:
        wanted = tuned(call)
        for _ in range(3):
            torch.testing.assert_close(call(), wanted)
    assert TOY_RUNS == []


def test_a_packed_weight_whose_launch_fails_is_unpacked_for_torch(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    weight, x = torch.randn(6, 8), torch.randn(5, 8)
    packed = gemmtune.pack(weight, layout="toy:plain")
    monkeypatch.setattr(ToyKernel, "run", raising(ERRORS[0]))
    for _ in range(3):
        torch.testing.assert_close(gemmtune.linear(x, packed), torch.nn.functional.linear(x, weight))


def test_the_out_of_memory_error_of_the_fallback_is_raised(tuned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(5, 8), torch.randn(8, 6)
    tuned(lambda: gemmtune.mm(a, b, epilogue=[fuse.gelu()]))
    monkeypatch.setattr(ToyKernel, "run", raising(ERRORS[0]))
    monkeypatch.setattr(torch, "mm", raising(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        gemmtune.mm(a, b, epilogue=[fuse.gelu()])


# --- GPU kernels allocate all memory before the first launch --------------------------------------------------------


def split_kernel(driver: FakeDriver, problem: Problem) -> GpuKernel:
    """Return a split-K kernel of the template ``tiled`` on the simulated driver."""
    config = {"bm": 16, "bn": 64, "bk": 128, "split": 2, "swap": 0, "group": 8, "stages": 3, "warps": 4}
    candidate = Candidate.make("triton", "tiled", **config)
    parameter_names = tuple(
        name for name, kind in make_spec(problem, candidate).signature.items() if kind != "constexpr"
    )
    driver.arguments["tiled"] = len(parameter_names)
    return TEMPLATES["tiled"](problem, candidate, [(Header("tiled", 0, 0, 4, parameter_names, 1), b"")])


def converted_kernel(driver: FakeDriver, problem: Problem) -> GpuKernel:
    """Return a kernel of the template ``converted``, which converts the weight first, on the simulated driver."""
    config = {"bm": 64, "bn": 64, "bk": 64, "group": 8, "stages": 3, "warps": 4, "stream": 0}
    names = ("a_desc", "b_desc", "c_ptr", "s_ptr", "M", "N", "K", "ldc", "PROGRAMS")
    boxes = {"a_desc": Tma(3, 2, 1, (64, 64)), "b_desc": Tma(3, 2, 1, (64, 64))}
    driver.arguments |= {"converted": len(names), "convert": 3}
    parts = [
        (Header("convert", 0, 0, 4, ("source_ptr", "target_ptr", "COUNT"), 1), b""),
        (Header("converted", 0, 0, 4, names, 2, boxes), b""),
    ]
    return TEMPLATES["converted"](problem, Candidate.make("triton", "converted", **config), parts)


def run(kernel: GpuKernel, a: Tensor, b: Any) -> None:
    """Run a kernel into a new output."""
    problem = kernel.problem
    shape = (problem.batch, problem.m, problem.n) if problem.family == "bmm" else (problem.m, problem.n)
    kernel.run(a, b, (), torch.empty(shape, dtype=torch.bfloat16))


@pytest.mark.parametrize("capture", [0, 3])
def test_nothing_is_launched_when_torch_has_no_memory_for_partial_sums(
    monkeypatch: pytest.MonkeyPatch, capture: int
) -> None:
    driver = install_fake_driver(monkeypatch)
    split = split_kernel(driver, build(20, 200, 256, "bf16"))
    converted = converted_kernel(driver, weight_only_problem(200, 64, 256))
    monkeypatch.setattr(gpu_kernel, "empty_cuda", raising(ERRORS[2]))
    driver.capture = capture
    for kernel in (split, converted):
        inputs = make_inputs(kernel.problem, 0)
        with pytest.raises(torch.OutOfMemoryError):
            run(kernel, inputs.a, inputs.b)
    assert driver.launches == []


def test_nothing_is_launched_when_the_driver_has_no_memory_for_the_semaphores_of_a_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_kernel, "_SEMAPHORE_POOL_BYTES", 32)
    driver = install_fake_driver(monkeypatch)
    kernel = split_kernel(driver, build(20, 200, 256, "bf16"))
    inputs = make_inputs(kernel.problem, 0)
    run(kernel, inputs.a, inputs.b)
    monkeypatch.setattr(FakeDriver, "cuMemAlloc_v2", lambda *_: 2)
    driver.capture, launched = 5, len(driver.launches)
    with pytest.raises(KernelError, match="CUDA error 2"):
        run(kernel, inputs.a, inputs.b)
    assert (len(driver.launches), driver.mode) == (launched, 0)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_nothing_is_copied_when_not_all_copies_of_operands_fit(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """A copy before the failed allocation would stay in a graph that is being captured."""
    driver = install_fake_driver(monkeypatch)
    dense, batched = build(20, 200, 256, "bf16"), bmm_problem(2, 20, 200, 256, "bfloat16")
    for problem in (dense, replace(batched, b=Operand("bfloat16", Layout("col")))):
        kernel, inputs = split_kernel(driver, problem), make_inputs(problem, 0)
        operands = [torch.empty(t.numel() + 1, dtype=t.dtype)[1:].as_strided(t.shape, t.stride()).copy_(t)
                    for t in (inputs.a, inputs.b)]  # fmt: skip
        shape = (2, 20, 200) if problem.family == "bmm" else (20, 200)
        out = torch.empty(4001 * 2, dtype=torch.bfloat16)[1 : 1 + torch.Size(shape).numel()].view(shape)
        remaining, copied = [allowed], list[int]()

        def allocate(real: Any, *args: Any, remaining: list[int] = remaining, **kwargs: Any) -> Any:
            if not remaining[0]:
                raise torch.OutOfMemoryError("CUDA out of memory")
            remaining[0] -= 1
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            for name in ("empty", "empty_like", "empty_strided"):
                real = getattr(torch, name)
                patch.setattr(torch, name, lambda *args, real=real, **kwargs: allocate(real, *args, **kwargs))
            patch.setattr(Tensor, "copy_", lambda *_, copied=copied: copied.append(1))
            with pytest.raises(torch.OutOfMemoryError):
                kernel.run(operands[0], operands[1], (), out)
        assert (copied, driver.launches) == ([], [])


# --- limits of kernel arguments and grids ---------------------------------------------------------------------------


def test_a_grid_beyond_the_cuda_limits_is_refused_before_any_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = install_fake_driver(monkeypatch)
    kernel = split_kernel(driver, build(20, 200, 256, "bf16"))
    a = torch.empty(1, 256, dtype=torch.bfloat16).expand(2**31 - 1, 256)
    with pytest.raises(KernelError, match="cannot be launched"):
        kernel.bind(a, torch.empty(200, 256, dtype=torch.bfloat16).t(), ())
    batched_kernel = split_kernel(driver, bmm_problem(70_000, 1, 8, 256, "bfloat16"))
    b = torch.empty(1, 8, 256, dtype=torch.bfloat16).expand(70_000, 8, 256).mT
    with pytest.raises(KernelError, match="cannot be launched"):
        batched_kernel.bind(torch.empty(70_000, 1, 256, dtype=torch.bfloat16), b, ())
    assert driver.launches == []
