"""The fallback: which of PyTorch's functions compute a Call, also for devices that this machine may lack."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gemmtune.backends.aten import padding
from gemmtune.core.call import Call
from gemmtune.core.epilogue import Step
from gemmtune.core.torch_compat import int_mm
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import build, weight_only_problem
from gemmtune.dispatch import fallback
from gemmtune.ops import scaled_mm
from gemmtune.verify.inputs import make_inputs


def int8_only(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype != torch.int8:
        raise RuntimeError("expected int8")
    result: Tensor = int_mm(a, b)
    return result


def test_norm_is_computed_in_front_of_the_product() -> None:
    norm = Step("rms_norm", "inner", "float32", value=1e-5)
    problem = replace(build(3, 24, 32, "fp32"), epilogue=(norm, Step("bias", "col", "float32")))
    inputs = make_inputs(problem, 0)
    assert isinstance(inputs.b, Tensor)
    result = fallback.run_fallback(Call(problem, inputs.a, inputs.b, inputs.aux, (3, 24)))
    normed = torch.nn.functional.rms_norm(inputs.a, (32,), inputs.aux[0], 1e-5)
    torch.testing.assert_close(result, normed @ inputs.b + inputs.aux[1])


def test_layer_norm_is_computed_in_front_of_the_product() -> None:
    norm = (Step("layer_norm", "inner", "float32", value=1e-5), Step("norm_bias", "inner", "float32"))
    problem = replace(build(3, 24, 32, "fp32"), epilogue=(*norm, Step("bias", "col", "float32")))
    inputs = make_inputs(problem, 0)
    assert isinstance(inputs.b, Tensor)
    result = fallback.run_fallback(Call(problem, inputs.a, inputs.b, inputs.aux, (3, 24)))
    normed = torch.nn.functional.layer_norm(inputs.a, (32,), inputs.aux[0], inputs.aux[1], 1e-5)
    torch.testing.assert_close(result, normed @ inputs.b + inputs.aux[2])


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integer_products_are_exact_where_torch_takes_int8_only(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fallback, padding):
        monkeypatch.setattr(module, "int_mm", int8_only)
        monkeypatch.setattr(module, "int_mm_takes_uint8", lambda: False)
    a, b = torch.arange(96).view(8, 12).to(dtype), (torch.arange(96) % 13 - 6).view(12, 8).to(torch.int8)
    assert torch.equal(fallback.int_product(a)(a, b), (a.long() @ b.long()).int())


# --- weights in int8


@pytest.mark.parametrize(("rows", "fast"), [(16, True), (17, False)])
def test_few_rows_by_int8_weights_are_multiplied_without_converting_the_weight(
    rows: int, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = weight_only_problem(rows, 32, 48)
    inputs, calls = make_inputs(problem, 0), list[int]()
    assert isinstance(inputs.b, QuantWeight)

    def int8pack(a: Tensor, b: QuantWeight) -> Tensor:
        calls.append(a.shape[0])
        return fallback.nibbles(b).to(a.dtype).t().mm(a.t()).t() * b.scale

    monkeypatch.setattr(fallback, "int8pack", int8pack)
    result = fallback.run_fallback(Call(problem, inputs.a, inputs.b, inputs.aux, problem.out_shape))
    assert result.shape == problem.out_shape
    assert calls == ([rows] if fast else [])


# --- fp8 on a GPU


class Operators(TorchDispatchMode):
    """Mode that records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def run_on_fake_gpu(
    monkeypatch: pytest.MonkeyPatch, out_dtype: torch.dtype, *, rowwise: bool
) -> tuple[Tensor, list[str]]:
    """Return the fallback's result for fp8 operands on a GPU, without values, and the operators that it ran."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        a = torch.empty(32, 64, device="cuda", dtype=torch.float8_e4m3fn)
        b = torch.empty(48, 64, device="cuda", dtype=torch.float8_e4m3fn).t()
        scales = [torch.empty(count if rowwise else 1, device="cuda") for count in (32, 48)]
        scale_a, scale_b = scales[0].view(-1, 1), scales[1].view(1, -1)
        call = scaled_mm.describe(a, b, scale_a, scale_b, None, None, out_dtype)
        with Operators() as operators:
            return fallback.run_fallback(call), operators.names


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_fp8_product_includes_scales_where_torch_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    result, operators = run_on_fake_gpu(monkeypatch, torch.bfloat16, rowwise=True)
    assert (result.shape, result.dtype) == ((32, 48), torch.bfloat16)
    assert operators.count("_scaled_mm") == 1
    assert "mul" not in operators


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_other_scales_are_applied_to_the_unscaled_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "why_scales_unsupported", lambda *_: "not these scales")
    result, operators = run_on_fake_gpu(monkeypatch, torch.bfloat16, rowwise=True)
    assert (result.shape, result.dtype) == ((32, 48), torch.bfloat16)
    assert operators.count("_scaled_mm") == 1
    assert operators.count("mul") + operators.count("mul_") == 2
