"""scaled_mm: the axes of its scales, and the calls that only torch._scaled_mm takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune.core.checks import DtypeError, ShapeError
from gemmtune.core.problem import Layout
from gemmtune.core.workloads import fp8_problem
from gemmtune.ops import scaled_mm

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
A, B = torch.randn(4, 16).to(E4M3), torch.randn(32, 16).to(E4M3).t()
ONE, ROWS, COLS = torch.ones(()), torch.ones(4, 1), torch.ones(1, 32)


def describe(a: Tensor = A, b: Tensor = B, scale_a: Any = ONE, scale_b: Any = ONE, **options: Any) -> Any:
    return scaled_mm.describe(a, b, scale_a, scale_b, **options)


def axes(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> list[str]:
    steps = describe(a, b, scale_a, scale_b).problem.epilogue
    assert {step.kind for step in steps} == {"scale"}
    return [step.axis for step in steps]


def test_problem_has_the_scales_and_the_dtype() -> None:
    options = {"out_dtype": torch.bfloat16}
    assert describe(**options).problem == fp8_problem(4, 32, 16, rowwise=False)
    assert describe(scale_a=ROWS, scale_b=COLS, **options).problem == fp8_problem(4, 32, 16)
    assert describe().problem.out_dtype == "float8_e4m3fn"
    assert describe(A.float().to(E5M2)).problem.out_dtype == "float8_e5m2"
    assert describe(b=B[:, :1]).problem.b.layout == Layout("col")
    assert describe().shape == (4, 32)


def test_scale_of_one_element_is_of_the_tensor_unless_the_other_is_by_column() -> None:
    assert axes(A, B, ONE, ONE) == ["tensor", "tensor"]
    assert axes(A, B, ROWS, COLS) == ["row", "col"]
    assert axes(A, B, ONE, COLS) == ["tensor", "col"]
    assert axes(A, B, ROWS, ONE) == ["row", "tensor"]
    assert axes(A[:1], B, ONE, COLS) == ["row", "col"]
    assert axes(A[:1], B, ONE, ONE) == ["tensor", "tensor"]
    assert axes(A, B[:, :1], ROWS, ONE) == ["row", "tensor"]


def test_bias_and_the_scale_of_the_result_are_later_steps() -> None:
    def steps(**options: Any) -> list[tuple[str, str]]:
        return [(step.kind, step.axis) for step in describe(**options).problem.epilogue[2:]]

    bias = torch.ones(32)
    assert steps(bias=bias) == [("bias", "col")]
    assert steps(scale_result=ONE) == []
    assert steps(scale_result=ONE, out_dtype=torch.bfloat16) == []
    assert steps(out_dtype=E4M3) == []
    assert steps(bias=bias, scale_result=ONE, out_dtype=E4M3) == [("bias", "col"), ("scale", "tensor")]
    call = describe(scale_result=torch.tensor(4.0), out_dtype=E4M3)
    assert [aux.tolist() for aux in call.aux] == [1.0, 1.0, 0.25]


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"a": A[0]}, ShapeError, "mat1 must be a matrix"),
        ({"b": B[0]}, ShapeError, "mat2 must be a matrix"),
        ({"b": torch.ones(16, 32)}, DtypeError, "mat2's dtype"),
        ({"a": A[:, :8]}, ShapeError, "cannot be multiplied"),
        ({"out_dtype": torch.float64}, DtypeError, "out_dtype"),
        ({"scale_a": 1.0}, TypeError, r"argument 'scale_a' \(position 3\)"),
        ({"scale_b": 1.0}, TypeError, r"argument 'scale_b' \(position 4\)"),
        ({"scale_a": ONE.double()}, DtypeError, "scale_a's dtype to be one of float32"),
        ({"scale_b": COLS.bfloat16()}, DtypeError, "scale_b's dtype to be one of float32"),
        ({"scale_a": torch.ones(3)}, ShapeError, r"expected scale_a with 1 or 4 elements; got \[3\]"),
        ({"scale_b": torch.ones(2, 2)}, ShapeError, r"expected scale_b with 1 or 32 elements; got \[2, 2\]"),
        ({"bias": 1.0}, TypeError, r"argument 'bias' \(position 5\)"),
        ({"bias": torch.ones(4)}, ShapeError, r"scaled_mm\(\): bias for axis 'col'"),
        ({"bias": torch.ones(32, device="meta")}, DtypeError, r"\bbias is on meta"),
    ],
)
def test_invalid_operands_raise_errors(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        describe(**options)


class OnDevice(Tensor):
    """A tensor that says it is on another device than the CPU."""

    cuda = True

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return self.cuda


class OnXpu(OnDevice):
    """A tensor that says it is on a device that gemmtune does not know."""

    cuda = False


def needs_torch(mat1: Tensor, scale_a: Any = ONE, scale_b: Any = ONE, mat2: Tensor = B, **options: Any) -> bool:
    function = scaled_mm.SPEC.torch_function(mat1=mat1, mat2=mat2, scale_a=scale_a, scale_b=scale_b, **options)
    return function is not None and function.required


def test_calls_that_only_gpus_know_need_torch_on_a_gpu_alone() -> None:
    gpu, xpu = torch.zeros(4, 16).as_subclass(OnDevice), torch.zeros(4, 16).as_subclass(OnXpu)
    half, wrong = ONE.bfloat16(), torch.ones(3)
    assert needs_torch(gpu) is False
    assert needs_torch(gpu, ROWS, COLS) is False
    for scale_a, scale_b in ((half, ONE), (ONE, half), (half, half), (wrong, ONE), (ONE, wrong), (wrong, wrong)):
        assert needs_torch(gpu, scale_a, scale_b) is True
        assert needs_torch(A, scale_a, scale_b) is False
        assert needs_torch(A.to("meta"), scale_a, scale_b) is False
    for options in ({"use_fast_accum": True}, {"scale_result": ONE}):
        assert needs_torch(gpu, **options) is True
        assert needs_torch(A, **options) is False
        assert needs_torch(A.to("meta"), **options) is False
    assert needs_torch(xpu) is True


def test_errors_of_a_call_on_a_gpu_are_left_to_describe() -> None:
    gpu = torch.zeros(4, 16).as_subclass(OnDevice)
    assert needs_torch(gpu, 1.0) is False
    assert needs_torch(gpu, ONE, 1.0) is False
    assert needs_torch(gpu, mat2=torch.ones(())) is False
    assert needs_torch(torch.zeros(()).as_subclass(OnDevice)) is False


def test_torchs_function_gets_the_options_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(scaled_mm, "torch_scaled_mm", lambda *args: calls.append(args) or args[0])
    gpu = torch.zeros(4, 16).as_subclass(OnDevice)
    options: dict[str, Any] = {"mat2": B, "scale_a": ONE, "scale_b": ONE}
    more: dict[str, Any] = {"out_dtype": torch.bfloat16, "scale_result": ONE, "use_fast_accum": True}
    function = scaled_mm.SPEC.torch_function(mat1=gpu, **options, **more)
    assert function is not None
    assert function.functional(A, B, ROWS, COLS) is A
    expected = (A, B, ROWS, COLS, None, ONE, torch.bfloat16, True)
    assert all(given is wanted for given, wanted in zip(calls[0], expected, strict=True))
    assert scaled_mm.SPEC.torch_function(mat1=A, **options, **more) is None


def test_fast_accumulation_and_the_scale_of_the_result_are_computed_on_cpus() -> None:
    plain = gemmtune.scaled_mm(A, B, ONE, ONE, out_dtype=torch.float32)
    torch.testing.assert_close(plain, A.float() @ B.float())
    assert torch.equal(gemmtune.scaled_mm(A, B, ONE, ONE, out_dtype=torch.float32, use_fast_accum=True), plain)
    divided = gemmtune.scaled_mm(A, B, ONE, ONE, None, torch.tensor(4.0), torch.float32)
    assert torch.equal(divided, plain)
