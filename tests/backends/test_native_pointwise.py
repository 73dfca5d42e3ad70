"""The native kernel of the steps behind a product of PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.aten.steps import apply_steps
from gemmtune.backends.base import Artifact
from gemmtune.backends.native.pointwise import cpu_pointwise_of
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.epilogue import Epilogue, Step
from gemmtune.core.problem import Problem
from gemmtune.core.target import current_cpu
from gemmtune.core.workloads import linear_problem, weight_only_problem
from gemmtune.verify.inputs import make_inputs

native = pytest.importorskip("gemmtune.backends.native._native")
SWIGLU = Step("swiglu")
EPILOGUES: list[Epilogue] = [
    (SWIGLU,),
    (Step("geglu"),),
    (Step("bias", "col", "bfloat16"), Step("geglu_tanh")),
    (Step("scale", "row", "float32"), Step("add", "full", "float16", 0.5), SWIGLU),
    (Step("silu"), Step("mul", "full", "bfloat16")),
]


def tensors_of(steps: Epilogue, m: int, n: int) -> list[torch.Tensor]:
    shapes = {"row": (m,), "col": (n,), "full": (m, n)}
    return [torch.randn(shapes[step.axis]).to(getattr(torch, step.dtype)) for step in steps if step.dtype]


@given(
    m=st.sampled_from([1, 7, 8, 9, 40]), half=st.sampled_from([1, 5, 16, 127, 128, 129, 300]),
    steps=st.sampled_from(EPILOGUES), dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    isa=st.sampled_from(native.usable_isas()),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_steps_are_those_of_aten(m: int, half: int, steps: Epilogue, dtype: str, isa: str) -> None:
    from gemmtune.backends.native.pointwise import CpuPointwise

    torch.manual_seed(m + half)
    acc = torch.randn(m, 2 * half + 3).to(getattr(torch, dtype))[:, : 2 * half]  # rows with a gap behind them
    aux = tensors_of(steps, m, 2 * half)
    expected = apply_steps(acc.float(), steps, aux)
    out = torch.full_like(expected, float("nan"))
    assert CpuPointwise(steps, dtype, "float32", isa).run(acc, aux, out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_rows_are_shared_among_threads() -> None:
    acc = torch.randn(97, 4096)
    kernel = cpu_pointwise_of((Step("scale", "row", "float32"), SWIGLU), "float32", "float32")
    assert kernel is not None
    scale, out = torch.rand(97), torch.empty(97, 2048)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert kernel.run(acc, (scale,), out)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(out, apply_steps(acc, (Step("scale", "row", "float32"), SWIGLU), (scale,)))


def test_a_call_counts_as_a_write() -> None:
    kernel = cpu_pointwise_of((SWIGLU,), "float32", "float32")
    assert kernel is not None
    out = torch.empty(4, 16)
    version = out._version
    assert kernel.run(torch.randn(4, 32), (), out)
    assert out._version == version + 1


def test_matrices_that_it_does_not_take() -> None:
    kernel = cpu_pointwise_of((SWIGLU,), "float32", "float32")
    assert kernel is not None
    out = torch.zeros(4, 16)
    assert not kernel.run(torch.randn(32, 4).t(), (), out)
    assert not kernel.run(torch.randn(4, 32), (), torch.zeros(16, 4).t())
    assert not kernel.run(torch.randn(4, 32, device="meta"), (), out)
    assert not out.any()


@pytest.mark.parametrize(
    ("steps", "acc", "out"),
    [
        ((), "float32", "float32"), ((SWIGLU,), "int32", "float32"), ((SWIGLU,), "float32", "int8"),
        ((SWIGLU,), "float64", "float64"), ((Step("add", "full", "float64"), SWIGLU), "float32", "float32"),
        ((Step("cast", dtype="int8"), SWIGLU), "float32", "float32"),
    ],
)  # fmt: skip
def test_steps_that_it_does_not_compute(steps: Epilogue, acc: str, out: str) -> None:
    assert cpu_pointwise_of(steps, acc, out) is None


def test_pytorchs_product_of_bfloat16_is_rounded_before_a_gate_as_torch_compile_rounds_it() -> None:
    backend, problem = AtenBackend(), replace(linear_problem(5, 64, 32, "bfloat16"), epilogue=(SWIGLU,))
    assert backend.default_candidate(problem, current_cpu()).id == "aten/mm_rounded"
    kernel = backend.load(Artifact(Candidate.make("aten", "mm_rounded"), ""), problem)
    inputs = make_inputs(problem, 0)
    gate, factor = torch.mm(inputs.a, inputs.b).float().chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * factor).bfloat16()
    out = torch.empty(5, 32, dtype=torch.bfloat16)
    kernel.run(inputs.a, inputs.b, (), out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(kernel.functional(inputs.a, inputs.b, ()), expected)


def test_pytorchs_product_of_int8_weights_is_rounded_before_other_steps_for_few_rows() -> None:
    backend, problem = AtenBackend(), replace(weight_only_problem(5, 64, 32), epilogue=(SWIGLU,))
    candidate = Candidate.make("aten", "int8pack_rounded")
    assert candidate in list(backend.candidates(problem, current_cpu()))
    kernel = backend.load(Artifact(candidate, ""), problem)
    inputs = make_inputs(problem, 0)
    product = torch._weight_int8pack_mm(inputs.a, inputs.b.data.t(), inputs.b.scale)
    gate, factor = product.float().chunk(2, -1)
    expected = (torch.nn.functional.silu(gate) * factor).bfloat16()
    out = torch.empty(5, 32, dtype=torch.bfloat16)
    kernel.run(inputs.a, inputs.b, (), out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(kernel.functional(inputs.a, inputs.b, ()), expected)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (weight_only_problem(5, 64, 32), "computes all that rounds"),
        (replace(weight_only_problem(5, 64, 32), epilogue=(Step("relu"),)), "computes all that rounds"),
        (replace(weight_only_problem(5, 64, 32, dtype="float16"), epilogue=(SWIGLU,)), "bfloat16 operands"),
        (replace(weight_only_problem(17, 64, 32), epilogue=(SWIGLU,)), "16 rows at most"),
        (replace(weight_only_problem(5, 64, 32, group=32), epilogue=(SWIGLU,)), "one scale per output channel"),
    ],
)
def test_rounded_product_of_int8_weights_says_why_it_is_not_offered(problem: Problem, reason: str) -> None:
    reasons = [
        item.reason for item in AtenBackend().candidates(problem, current_cpu())
        if isinstance(item, Illegal) and item.candidate.template == "int8pack_rounded"
    ]  # fmt: skip
    assert len(reasons) == 1
    assert reason in reasons[0]
