"""mixed_mm: checks of a quantised weight, its Problem, agreement with a packed weight, and copies of scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune import fuse
from gemmtune.core.checks import DtypeError, ShapeError
from gemmtune.core.errors import PackedWeightError
from gemmtune.core.problem import Layout
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import weight_only_problem
from gemmtune.dispatch.specialize import adapt_args
from gemmtune.ops import mixed_mm
from gemmtune.ops.mixed_mm import describe_product, quant_weight

K, N = 32, 6
X = torch.randn(3, K).bfloat16()
W8, W4 = torch.ones(N, K, dtype=torch.int8).t(), torch.ones(N, K // 2, dtype=torch.uint8).t()
SCALE, GROUPED = torch.rand(N).bfloat16(), torch.rand(2, N).bfloat16()


def weight(data: Tensor = W8, scale: Tensor = SCALE, zero_point: Tensor | None = None, **options: Any) -> QuantWeight:
    defaults: dict[str, Any] = {"bits": 8, "group_size": None, "k": K}
    return quant_weight(data, scale, zero_point, **(defaults | options))


def packed(bits: int = 8, group: int | None = None) -> Any:
    data, scale = (W8 if bits == 8 else W4).t(), SCALE if group is None else GROUPED
    return gemmtune.pack(data, scale=scale, bits=bits, group_size=group, layout="aten:dequant/float32")


@pytest.mark.parametrize(
    ("operand", "options"),
    [
        (lambda: weight(), {}),
        (lambda: weight(scale=GROUPED, group_size=16), {"group": 16}),
        (lambda: weight(group_size=K), {}),
        (lambda: weight(group_size=2 * K), {}),
        (lambda: weight(zero_point=SCALE), {"zero_point": True}),
        (lambda: weight(W4, bits=4), {"bits": 4}),
        (lambda: weight(W8.to(torch.float8_e4m3fn)), {"float8": True}),
        (lambda: packed(), {}),
        (lambda: packed(4, 16), {"bits": 4, "group": 16}),
    ],
)
def test_problem_names_the_format_of_the_weight(operand: Any, options: dict[str, Any]) -> None:
    call = describe_product(X, operand(), constant=True)
    assert call.problem == weight_only_problem(3, N, K, **options)
    assert call.shape == (3, N)


def test_problem_has_the_outputs_dtype_and_the_steps() -> None:
    call = mixed_mm.describe(X, W8, SCALE, None, 8, None, SCALE, torch.float32, [fuse.relu()])
    assert (call.problem.out_dtype, call.problem.acc) == ("float32", "float32")
    assert [step.kind for step in call.problem.epilogue] == ["bias", "relu"]
    assert not call.problem.b.constant
    plain = mixed_mm.describe(X.double(), W8, SCALE, None, 8, None, None, None, ())
    assert (plain.problem.out_dtype, plain.problem.acc, plain.problem.epilogue) == ("float64", "float64", ())


def test_strided_activations_are_described_as_dense_beside_a_constant_weight_only() -> None:
    x = torch.randn(K, 3).t()
    assert describe_product(x, weight(), constant=True).problem.a.layout == Layout("row")
    assert describe_product(x, weight()).problem.a.layout == Layout("col")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"bits": 2}, ValueError, r"bits must be 8 or 4; got 2"),
        ({"data": W8[0]}, ShapeError, r"mat2 must be a matrix, got 1-D"),
        ({"data": W4}, DtypeError, r"mat2's dtype \(bits=8\) to be one of int8, float8_e4m3fn; got uint8"),
        ({"bits": 4}, DtypeError, r"mat2's dtype \(bits=4\) to be one of uint8; got int8"),
        ({"data": W8[:31]}, ShapeError, r"mat1 has K = 32, and mat2 \[31, 6\] holds K = 31"),
        ({"data": W4[:15], "bits": 4}, ShapeError, r"mat1 has K = 32, and mat2 \[15, 6\] holds K = 30"),
        ({"group_size": 0}, ValueError, "group_size must be a positive int or None; got 0"),
        ({"group_size": True}, ValueError, "group_size must be a positive int or None; got True"),
        ({"group_size": 2.0}, ValueError, r"group_size must be a positive int or None; got 2\.0"),
        ({"scale": None}, TypeError, r"argument 'scale' \(position 3\) must be Tensor"),
        ({"scale": SCALE[:5]}, ShapeError, r"expected scale of shape \[6\]; got \[5\]"),
        ({"scale": GROUPED}, ShapeError, r"expected scale of shape \[6\]; got \[2, 6\]"),
        ({"scale": GROUPED[None], "group_size": 16}, ShapeError, r"scale of shape \[2, 6\]; got \[1, 2, 6\]"),
        ({"scale": SCALE.int()}, DtypeError, "scale's dtype"),
        ({"zero_point": 1.0}, TypeError, r"argument 'zero_point' \(position 4\) must be Tensor"),
        ({"zero_point": SCALE[:5]}, ShapeError, r"expected zero_point of shape \[6\]; got \[5\]"),
        ({"zero_point": SCALE.float()}, DtypeError, "expected zero_point to be of scale's dtype torch.bfloat16"),
        ({"data": W8.to(torch.float8_e4m3fn), "zero_point": SCALE}, ValueError, "float8 weights have scales and no"),
    ],
)
def test_weight_that_is_no_operand_raises_the_reason(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        weight(**options)


def test_group_of_one_element_has_a_scale_for_each_value() -> None:
    assert weight(scale=torch.rand(K, N), group_size=1).quant.group == 1


def test_odd_k_has_one_value_in_its_last_byte() -> None:
    odd = weight(W4, bits=4, k=K - 1)
    assert (odd.k, odd.dtype, odd.quant.zero_point) == (K - 1, "int4", False)


def test_integer_zero_points_are_converted_to_the_dtype_of_the_scale() -> None:
    zero = weight(zero_point=torch.arange(N)).zero_point
    assert zero is not None
    assert zero.dtype == torch.bfloat16
    assert zero.tolist() == list(range(N))
    assert weight().zero_point is None


def test_scale_of_shape_1_n_is_taken_as_a_vector() -> None:
    result = weight(scale=SCALE[None], zero_point=SCALE[None])
    assert result.zero_point is not None
    assert tuple(result.scale.shape) == tuple(result.zero_point.shape) == (N,)


@pytest.mark.parametrize(
    ("bits", "group", "options"),
    [
        (8, None, {}),
        (8, None, {"bits": 8}),
        (8, None, {"group_size": K}),
        (8, None, {"group_size": 2 * K}),
        (8, 16, {"group_size": 16}),
        (4, 16, {}),
        (4, 16, {"bits": 4, "group_size": 16}),
    ],
)
def test_options_that_agree_with_a_packed_weight_are_accepted(
    bits: int, group: int | None, options: dict[str, Any]
) -> None:
    assert gemmtune.mixed_mm(X, packed(bits, group), **options).shape == (3, N)


@pytest.mark.parametrize(
    ("bits", "group", "options", "text"),
    [
        (8, None, {"bits": 4}, "bits = 4, and the packed weight holds int8"),
        (4, 16, {"bits": 2}, "bits = 2, and the packed weight holds int4"),
        (8, None, {"group_size": K - 1}, "group_size = 31, and the packed weight has one scale per output channel"),
        (8, 16, {"group_size": 8}, "group_size = 8, and the packed weight has groups of 16"),
        (8, 16, {"group_size": K}, "group_size = 32, and the packed weight has groups of 16"),
        (8, None, {"scale": SCALE}, "a packed weight holds its scale and zero point"),
        (8, None, {"zero_point": SCALE}, "a packed weight holds its scale and zero point"),
    ],
)
def test_options_that_contradict_a_packed_weight_raise_value_error(
    bits: int, group: int | None, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        gemmtune.mixed_mm(X, packed(bits, group), **options)


def test_packed_weight_without_scales_is_refused_for_what_it_is() -> None:
    plain = gemmtune.pack(torch.randn(N, K).bfloat16(), layout="aten:row")
    with pytest.raises(PackedWeightError, match="got a packed plain weight"):
        gemmtune.mixed_mm(X, plain, bits=4, group_size=3)


def test_activations_and_bias_are_checked() -> None:
    with pytest.raises(ShapeError, match="mat1 must be a matrix"):
        gemmtune.mixed_mm(X[0], W8, SCALE)
    with pytest.raises(ShapeError, match="mat1 must be a matrix"):
        gemmtune.mixed_mm(X[0], packed())
    with pytest.raises(TypeError, match=r"argument 'bias' \(position 7\) must be Tensor, not float"):
        gemmtune.mixed_mm(X, W8, SCALE, bias=1.0)  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match="mat2 is on meta"):
        gemmtune.mixed_mm(X, W8.to("meta"), SCALE)
    with pytest.raises(DtypeError, match=r"\bbias is on meta"):
        gemmtune.mixed_mm(X, packed(), bias=SCALE.to("meta"))


STRIDED = torch.rand(2 * N).bfloat16()[::2]


@pytest.mark.parametrize(
    ("scale", "zero_point", "taken"),
    [
        (SCALE, None, True),
        (SCALE[None], None, False),
        (STRIDED, None, False),
        (SCALE, SCALE, True),
        (SCALE, SCALE[None], False),
        (SCALE, STRIDED, False),
        (SCALE, torch.ones(N, dtype=torch.int8), False),
        (STRIDED, SCALE, False),
    ],
)
def test_kernels_get_scales_and_zero_points_without_a_copy_where_they_can(
    scale: Tensor, zero_point: Tensor | None, taken: bool
) -> None:
    bias = torch.ones(N)
    call = mixed_mm.describe(X, W8, scale, zero_point, 8, None, bias, None, ())
    args = (X, W8, scale, bias) if zero_point is None else (X, W8, scale, zero_point, bias)
    a, b, aux = adapt_args(call, args)(*args)
    assert a is X
    assert aux == (bias,)
    assert b.data is W8
    assert (b.scale is scale and b.zero_point is zero_point) == taken
    assert torch.equal(b.scale, call.b.scale)
    assert (b.zero_point is None) == (zero_point is None)
    assert b.zero_point is None or torch.equal(b.zero_point, call.b.zero_point)
    assert (b.k, b.quant, b.dtype) == (K, call.problem.b.quant, "int8")
    expected = gemmtune.mixed_mm(X, W8, scale, zero_point, bias=bias)  # described, and perhaps served by the cache next
    assert torch.equal(gemmtune.mixed_mm(X, W8, scale, zero_point, bias=bias), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_strided_activations_are_copied_beside_a_packed_weight(transposed: bool) -> None:
    x, operand = torch.randn(K, 3).bfloat16().t() if transposed else X, packed()
    call = mixed_mm.describe(x, operand, None, None, 8, None, None, None, ())
    a, b, _ = adapt_args(call, (x, operand))(x, operand)
    assert b is operand
    assert (a is x) != transposed
    assert a.is_contiguous()
    raw = adapt_args(mixed_mm.describe(x, W8, SCALE, None, 8, None, None, None, ()), (x, W8, SCALE))
    assert raw(x, W8, SCALE)[0] is x


def test_only_gemmtune_has_this_product() -> None:
    assert mixed_mm.SPEC.torch_function(mat1=X, mat2=W8) is None


@pytest.mark.parametrize("constant", [False, True])
def test_torchs_int8_product_is_recorded(constant: bool) -> None:
    data = W8.t().contiguous()
    operand = nn.Parameter(data, requires_grad=False) if constant else data
    with gemmtune.record() as recording:
        torch._weight_int8pack_mm(X, operand, SCALE)
    assert recording.problems == [(weight_only_problem(3, N, K, constant=constant), 1)]
