"""The kernel of an epilogue's steps behind PyTorch's products: when it is launched (triton_interpreted.py runs it)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.base import Artifact
from gemmtune.backends.triton import jit_kernel
from gemmtune.backends.triton.jit_kernel import JitKernel
from gemmtune.backends.triton.pointwise import Pointwise, pointwise_of
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.workloads import linear_problem
from gemmtune.verify.inputs import make_inputs
from helpers.jit_kernels import OnGpu, pretend_that_triton_runs

SWIGLU, RELU = Step("swiglu"), Step("relu")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of outputs in place of launches."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr(Pointwise, "launch", lambda self, acc, aux, out: made.append(tuple(out.shape)))
    pretend_that_triton_runs(monkeypatch)
    return made


def operands(m: int = 4, n: int = 32) -> tuple[Any, Any]:
    return torch.randn(m, 2 * n).as_subclass(OnGpu), torch.zeros(m, n).as_subclass(OnGpu)


@pytest.mark.parametrize(
    ("steps", "acc_dtype", "out_dtype"),
    [
        ((), "float32", "bfloat16"), ((RELU,), "int32", "bfloat16"), ((RELU,), "float32", "int8"),
        ((RELU,), "float64", "float32"), ((RELU,) * 6, "float32", "float32"),
        ((Step("cast", dtype="int8"),), "float32", "float32"),
        ((Step("add", "full", "float64"),), "float32", "float32"),
    ],
)  # fmt: skip
def test_steps_that_the_kernel_does_not_compute_as_aten_does(
    steps: tuple[Step, ...], acc_dtype: str, out_dtype: str
) -> None:
    assert pointwise_of(steps, acc_dtype, out_dtype) is None


def test_integers_become_floats_at_a_step_of_floats() -> None:
    assert pointwise_of((Step("scale", "row", "float32"), RELU), "int32", "bfloat16") is not None
    assert pointwise_of((*[RELU] * 5, SWIGLU), "float32", "float32") is not None


def test_launch_counts_as_a_write(launches: list[tuple[int, ...]]) -> None:
    kernel = pointwise_of((SWIGLU,), "float32", "float32")
    acc, out = operands()
    assert kernel is not None
    version = out._version
    assert kernel.run(acc, (), out)
    assert launches == [(4, 32)]
    assert out._version == version + 1


def test_a_new_result_of_pytorchs_product_has_it_too(launches: list[tuple[int, ...]]) -> None:
    problem = replace(linear_problem(4, 32, 16, "bfloat16"), epilogue=(RELU, Step("scale", value=2.0)))
    kernel = AtenBackend().load(Artifact(Candidate.make("aten", "mm_rounded"), ""), problem)
    inputs = make_inputs(problem, 0)
    assert kernel.functional(inputs.a.as_subclass(OnGpu), inputs.b, inputs.aux).shape == (4, 32)
    assert launches == [(4, 32)]


def test_matrices_that_it_does_not_take(launches: list[tuple[int, ...]]) -> None:
    kernel = pointwise_of((SWIGLU,), "float32", "float32")
    acc, out = operands()
    assert kernel is not None
    assert not kernel.run(torch.randn(4, 64), (), out)  # on a CPU
    assert not kernel.run(acc, (), out.t().contiguous().t())
    assert not kernel.run(acc[:0], (), out[:0])
    assert launches == []


def test_operands_at_unaligned_addresses_are_left_to_aten(launches: list[tuple[int, ...]]) -> None:
    """Triton would compile code of its own for them."""
    kernel = pointwise_of((Step("add", "full", "float32"),), "float32", "float32")
    acc, out = operands(n=64)
    moved = torch.randn(4 * 64 + 1)[1:].view(4, 64).as_subclass(OnGpu)
    assert kernel is not None
    for values, added, target in ((moved, out, acc[:, :64]), (out, moved, acc[:, :64]), (out, out, moved)):
        assert not kernel.run(values, (added,), target)
    assert launches == []
    assert kernel.run(out, (out,), acc[:, :64])
    scaled = pointwise_of((Step("scale", "tensor", "float32"),), "float32", "float32")
    assert scaled is not None
    assert scaled.run(out, (torch.ones(4).as_subclass(OnGpu)[1:2],), acc[:, :64])  # one scale among others


def test_nothing_is_compiled_while_a_graph_is_captured(
    launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = pointwise_of((SWIGLU,), "float32", "float32")
    acc, out = operands()
    assert kernel is not None
    monkeypatch.setattr(jit_kernel, "is_capturing", lambda device: True)
    assert not kernel.run(acc, (), out)
    monkeypatch.setattr(jit_kernel, "is_capturing", lambda device: False)
    assert kernel.run(acc, (), out)
    monkeypatch.setattr(jit_kernel, "is_capturing", lambda device: True)
    assert kernel.run(acc, (), out)  # it was launched before
    assert len(launches) == 2


def test_failure_of_triton_is_warned_of_once(
    launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[int] = []

    def fail(*_: Any) -> None:
        tried.append(1)
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(Pointwise, "launch", fail)
    acc, out = operands()
    for _ in range(2):
        kernel = pointwise_of((SWIGLU,), "float32", "float32")
        assert kernel is not None
        assert not kernel.run(acc, (), out)
    assert len(tried) == 1
    assert [record.message for record in caplog.records if "no C compiler" in record.message]
    monkeypatch.setattr(jit_kernel, "triton_version", lambda: "")
    monkeypatch.setattr(JitKernel, "_broken", False)
    assert not kernel.run(acc, (), out)  # Triton is not installed
    assert len(tried) == 1
