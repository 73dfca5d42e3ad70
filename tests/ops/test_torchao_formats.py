"""Readers of torchao's tensors: contents, the products that multiply by them, and formats that no op takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune.core.weights import QuantWeight
from gemmtune.ops import int4pack, torchao_formats
from gemmtune.ops.int4pack import signed
from gemmtune.ops.torchao_formats import (
    UnknownFormatError,
    as_tiles,
    inner_tensors,
    is_from_torchao,
    problem,
    quantize,
    read,
)
from helpers.int4_tiles import fake_convert, fake_int4pack_mm
from helpers.torchao_modules import REASON, SKIPPED

pytest.importorskip("torchao", reason=REASON, exc_type=SKIPPED)
from torchao import quantization as ao
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

N, K = 96, 64


def weight_of(config: Any, k: int = K) -> Any:
    """Return the weight [N, k] of a linear module that torchao quantised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(k, N, bias=False))
    ao.quantize_(model, config)
    return model[0].weight


FORMATS: dict[str, tuple[Callable[[], Any], str, str, int, int | None]] = {
    # name: (config, product, activation, bits, group_size)
    "int8": (ao.Int8WeightOnlyConfig, "mixed_mm", "", 8, None),
    "int8 by groups": (lambda: ao.Int8WeightOnlyConfig(granularity=PerGroup(32)), "mixed_mm", "", 8, 32),
    "int8 by tensor": (lambda: ao.Int8WeightOnlyConfig(granularity=PerTensor()), "mixed_mm", "", 8, None),
    "dynamic int8": (ao.Int8DynamicActivationInt8WeightConfig, "int_mm", "int8 row", 8, None),
    "dynamic int8 by tensor": (
        lambda: ao.Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()), "int_mm", "int8 tensor", 8, None,
    ),
    "8 bits": (ao.IntxWeightOnlyConfig, "mixed_mm", "", 8, None),
    "4 bits": (
        lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)), "mixed_mm", "", 4, 32,
    ),
    "int8 activations, 4 bits": (
        lambda: ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32)),
        "mixed_mm", "int8 row asymmetric", 4, 32,
    ),
    "float8": (ao.Float8WeightOnlyConfig, "mixed_mm", "", 8, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_format_is_read_as_the_operands_of_its_product(name: str) -> None:
    config, product, activation, bits, group = FORMATS[name]
    weight = weight_of(config())
    contents = read(weight)
    assert (contents.product, contents.activation, contents.bits, contents.group_size) == (
        product,
        activation,
        bits,
        group,
    )
    assert contents.shape == (N, K)
    assert contents.source is weight
    assert contents.dtype == torch.float32
    assert contents.autocast == ("8 bits" in name or "4 bits" in name or name == "float8")
    assert tuple(contents.scale.shape) == ((N,) if group is None else (K // group, N))
    values = signed(contents.data) if bits == 4 else contents.data
    scale = contents.scale if group is None else contents.scale.repeat_interleave(group, 0)
    torch.testing.assert_close(values.float() * (scale.t() if group else scale[:, None]), weight.dequantize())
    described = problem(torch.randn(3, K), contents, None)
    assert (described.family, described.m, described.n, described.k) == (product, 3, N, K)
    assert described.b.constant
    axis = "tensor" if activation == "int8 tensor" else "row"
    scales = [("scale", axis), ("scale", "col")] if product == "int_mm" else []
    assert [(step.kind, step.axis) for step in described.epilogue] == scales
    with_bias = problem(torch.randn(2, 3, K), contents, torch.randn(N))
    assert with_bias.m == 6
    assert [(step.kind, step.axis) for step in with_bias.epilogue] == [*scales, ("bias", "col")]
    assert with_bias.out_dtype == "float32"


@pytest.mark.parametrize("name", FORMATS)
def test_operand_of_the_product_is_the_weights_transpose(name: str) -> None:
    config, product, _, bits, group = FORMATS[name]
    contents = read(weight_of(config()))
    operand = contents.operand
    if product == "int_mm":
        assert isinstance(operand, Tensor)
        assert torch.equal(operand, contents.data.t())
    else:
        assert isinstance(operand, QuantWeight)
        assert torch.equal(operand.data.view(torch.uint8), contents.data.t().view(torch.uint8))
        assert (operand.k, operand.quant.group, operand.zero_point) == (K, group, None)
        assert (operand.dtype == "int4") == (bits == 4)


def test_bytes_of_a_weight_are_those_of_its_inner_tensors() -> None:
    weight = weight_of(ao.Float8WeightOnlyConfig())
    assert set(inner_tensors(weight)) >= {"qdata", "scale"}
    assert read(weight).nbytes == N * K + weight.scale.nbytes
    assert is_from_torchao(weight) is True
    assert is_from_torchao(torch.ones(2)) is False


@pytest.mark.parametrize("dtype", [torch.int4, torch.int8])
def test_zero_points_are_read_in_the_units_of_the_data(dtype: torch.dtype) -> None:
    config = ao.IntxWeightOnlyConfig(
        weight_dtype=dtype, granularity=PerGroup(32), mapping_type=ao.MappingType.ASYMMETRIC
    )
    weight = weight_of(config)
    contents = read(weight)
    assert contents.zero_point is not None
    assert contents.zero_point.dtype == contents.scale.dtype
    assert contents.zero_point.unique().numel() > 1
    offset = 8 if dtype == torch.int4 else 0
    values = (signed(contents.data) if dtype == torch.int4 else contents.data) + offset
    zero, scale = (t.repeat_interleave(32, 0).t() for t in (contents.zero_point, contents.scale))
    torch.testing.assert_close((values.float() - zero) * scale, weight.dequantize())
    operand = contents.operand
    assert isinstance(operand, QuantWeight)
    assert operand.quant.zero_point


@pytest.mark.parametrize(
    ("dtype", "k", "bits"),
    [(torch.int1, 64, 4), (torch.int3, 64, 4), (torch.int4, 64, 4), (torch.int4, 63, 8), (torch.int5, 64, 8)],
)
def test_values_of_up_to_four_bits_are_read_as_nibbles_if_they_come_in_pairs(
    dtype: torch.dtype, k: int, bits: int
) -> None:
    weight = weight_of(ao.IntxWeightOnlyConfig(weight_dtype=dtype), k)
    contents = read(weight)
    assert (contents.bits, contents.shape) == (bits, (N, k))
    assert torch.equal(signed(contents.data) if bits == 4 else contents.data, weight.qdata)


@pytest.mark.parametrize("block", [[2, K], [N, 32], [1, 48], [1, 0], [1, 2 * K]])
def test_scales_of_other_blocks_than_rows_and_groups_are_refused(block: list[int]) -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    weight.block_size = block
    with pytest.raises(UnknownFormatError, match=rf"^has a scale for each block of {block[0]}x{block[1]} elements"):
        read(weight)


def test_scale_of_the_whole_weight_is_repeated_for_each_row() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig(granularity=PerTensor()))
    scale = read(weight).scale
    assert scale.is_contiguous()
    assert scale.tolist() == [weight.scale.item()] * N


def test_int8_weight_with_zero_points_is_refused() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    weight.zero_point = None
    assert read(weight).zero_point is None
    weight.zero_point = torch.zeros(N, 1, dtype=torch.int8)
    assert read(weight).zero_point is None
    weight.zero_point[3] = 1
    with pytest.raises(UnknownFormatError, match=r"^has zero points"):
        read(weight)


@pytest.mark.parametrize("name", ["act_pre_scale", "act_quant_scale", "act_quant_zero_point"])
def test_int8_weight_with_a_scale_of_the_activations_is_refused(name: str) -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    setattr(weight, name, torch.ones(K))
    with pytest.raises(UnknownFormatError, match=rf"^has an {name}, a scale of the activations"):
        read(weight)


def test_int8_weight_by_groups_with_int8_activations_is_refused() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig(granularity=PerGroup(32)))
    weight.act_quant_kwargs = weight_of(ao.Int8DynamicActivationInt8WeightConfig()).act_quant_kwargs
    with pytest.raises(UnknownFormatError, match=r"^has scales by groups, and its activations are quantised to int8"):
        read(weight)


def test_weight_of_integers_is_refused() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    integers = type(weight)(weight.qdata, weight.scale, weight.block_size, torch.int32, zero_point=None)
    with pytest.raises(UnknownFormatError, match=r"^stands for a weight of torch\.int32"):
        read(integers)


def test_inner_tensor_without_memory_is_named() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    weight.qdata.untyped_storage().resize_(0)
    with pytest.raises(UnknownFormatError, match=r"^has an inner tensor qdata that is a tensor without memory"):
        read(weight)


def test_weight_of_another_version_of_torchao_is_refused() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    del weight.block_size
    with pytest.raises(UnknownFormatError, match=r"^is a Int8Tensor that gemmtune does not know .*block_size"):
        read(weight)


# --- float8 ------------------------------------------------------------------------------------------------------

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def float8_weight(granularity: Any, activations: Any = None, dtype: torch.dtype = E4M3, **options: Any) -> Any:
    """Return a float8 weight [N, K]. activations: the granularity at which its activations are quantised, or None."""
    torch.manual_seed(0)
    weight = Float8Tensor.from_hp(torch.randn(N, K), float8_dtype=dtype, granularity=granularity)
    if activations is not None:
        defaults = {"granularity": activations, "float8_dtype": E4M3, "hp_value_lb": None, "hp_value_ub": None}
        weight.act_quant_kwargs = SimpleNamespace(**(defaults | options))
    return weight


@pytest.mark.parametrize(
    ("granularity", "activation", "axes"),
    [(PerRow(), "float8 row", ["row", "col"]), (PerTensor(), "float8 tensor", ["tensor", "tensor"])],
)
def test_float8_weight_with_float8_activations_is_read_as_operands_of_scaled_mm(
    granularity: Any, activation: str, axes: list[str]
) -> None:
    weight = float8_weight(granularity, granularity)
    contents = read(weight)
    assert (contents.product, contents.activation, contents.bits) == ("scaled_mm", activation, 8)
    assert (contents.group_size, contents.zero_point, contents.autocast) == (None, None, False)
    assert tuple(contents.scale.shape) == ((N,) if activation == "float8 row" else (1,))
    torch.testing.assert_close(contents.data.float() * contents.scale.reshape(-1, 1), weight.dequantize())
    described = problem(torch.randn(3, K).bfloat16(), contents, torch.randn(N))
    assert (described.family, described.m, described.n, described.k) == ("scaled_mm", 3, N, K)
    assert (described.a.dtype, described.out_dtype) == ("float8_e4m3fn", "bfloat16")
    assert [(step.kind, step.axis) for step in described.epilogue] == [
        ("scale", axes[0]), ("scale", axes[1]), ("bias", "col")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (lambda: float8_weight(PerRow(), dtype=E5M2), r"^is torch\.float8_e5m2; gemmtune's kernels take"),
        (lambda: float8_weight(PerRow(), PerRow(), hp_value_lb=1.0), "^has bounds for its activations"),
        (lambda: float8_weight(PerRow(), PerRow(), hp_value_ub=1.0), "^has bounds for its activations"),
        (lambda: float8_weight(PerRow(), PerRow(), float8_dtype=E5M2), r"^has activations of torch\.float8_e5m2"),
        (lambda: float8_weight(PerGroup(32), PerRow()), "^is float8 with scales by groups"),
        (lambda: float8_weight(PerRow(), PerTensor()), "by row, and its activations by tensor"),
        (lambda: float8_weight(PerTensor(), PerRow()), "by row, and its activations by tensor"),
        (lambda: float8_weight(PerRow(), PerGroup(32)), "^has activations quantised by PerGroup"),
    ],
)
def test_other_float8_weights_are_refused(weight: Callable[[], Any], reason: str) -> None:
    with pytest.raises(UnknownFormatError, match=reason):
        read(weight())


def test_float8_weight_by_groups_is_read_with_its_groups() -> None:
    contents = read(float8_weight(PerGroup(32)))
    assert (contents.product, contents.group_size) == ("mixed_mm", 32)
    assert tuple(contents.scale.shape) == (K // 32, N)


# --- int4 in tiles -----------------------------------------------------------------------------------------------

GROUP = 128


def tiled_weight(n: int, k: int, *, fill: int = 11) -> tuple[Any, Tensor, Tensor]:
    """Return torchao's tensor of a random weight [n, k] in tiles, its values 0 .. 15 [n, k], and its padded scales and
    offsets [groups, N, 2]."""
    torch.manual_seed(0)
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    values = torch.full((rows, columns), fill, dtype=torch.uint8)
    values[:n, :k] = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    pairs = torch.rand(columns // GROUP, rows, 2).bfloat16() + 0.1
    qdata = fake_convert((values[:, ::2] << 4) | values[:, 1::2], 8)
    weight: Any = ao.Int4TilePackedTo4dTensor(qdata, pairs, [1, GROUP], torch.Size((n, k)))
    return weight, values[:n, :k], pairs


@pytest.fixture
def tile_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchao_formats, "convert_weight_to_int4pack", fake_convert)
    monkeypatch.setattr(int4pack, "weight_int4pack_mm", fake_int4pack_mm)


@pytest.mark.usefixtures("tile_operators")
@pytest.mark.parametrize(("n", "k"), [(24, 1024), (20, 1536)])
def test_int4_weight_in_tiles_is_read_without_its_padding(n: int, k: int) -> None:
    weight, values, pairs = tiled_weight(n, k)
    contents = read(weight)
    padded = (24, -(-k // 1024) * 1024)
    assert (contents.product, contents.bits, contents.group_size, contents.shape) == ("mixed_mm", 4, GROUP, (n, k))
    assert contents.tiles is not None
    assert contents.tiles[:2] == padded
    assert contents.tiles[2] == (11 if padded != (n, k) else int(values[-1, -1]))
    assert torch.equal(signed(contents.data) + 8, values)
    assert contents.zero_point is not None
    assert tuple(contents.scale.shape) == tuple(contents.zero_point.shape) == (k // GROUP, n)
    zero, scale = (t.repeat_interleave(GROUP, 0).t() for t in (contents.zero_point, contents.scale))
    first, second = (pairs[: k // GROUP, :n, i].float().repeat_interleave(GROUP, 0).t() for i in range(2))
    torch.testing.assert_close((values.float() - zero) * scale, (values.float() - 8) * first + second)
    assert torch.equal(as_tiles(signed(contents.data), contents.tiles), weight.qdata)


@pytest.mark.usefixtures("tile_operators")
def test_other_int4_weights_in_tiles_are_refused() -> None:
    weight, _, _ = tiled_weight(24, 1024)
    weight.act_pre_scale = torch.ones(1024)
    with pytest.raises(UnknownFormatError, match=r"^has an act_pre_scale"):
        read(weight)
    weight, _, pairs = tiled_weight(24, 1024)
    pairs[2, 5, 0] = 0.0
    with pytest.raises(UnknownFormatError, match=r"^has a scale of 0, or a last group that is shorter"):
        read(weight)
    weight, _, _ = tiled_weight(24, 1024 - GROUP // 2)
    with pytest.raises(UnknownFormatError, match=r"^has a scale of 0, or a last group that is shorter"):
        read(weight)
    weight, values, _ = tiled_weight(20, 1024)
    padding = torch.full((24, 1024), 11, dtype=torch.uint8)
    padding[:20], padding[21, 7] = values, 3
    weight.qdata.copy_(fake_convert((padding[:, ::2] << 4) | padding[:, 1::2], 8))
    with pytest.raises(UnknownFormatError, match=r"^has a padding that differs"):
        read(weight)


# --- other weights -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"granularity": SimpleNamespace(dim=-1)}, "quantised by"),
        ({"reduce_range": True}, "7 bits"),
        ({"mapping_type": SimpleNamespace(name="ASYMMETRIC")}, "with a zero point"),
        ({"granularity": PerGroup(32)}, "quantised by"),
        ({"granularity": PerRow(dim=0)}, "quantised by"),
    ],
)
def test_activations_that_no_op_quantises_are_refused(change: dict[str, Any], reason: str) -> None:
    weight = weight_of(ao.Int8DynamicActivationInt8WeightConfig())
    options = {"granularity": PerRow(), "mapping_type": SimpleNamespace(name="SYMMETRIC"), "reduce_range": False}
    weight.act_quant_kwargs = SimpleNamespace(**(options | change))
    with pytest.raises(UnknownFormatError, match=reason):
        read(weight)


def test_other_quantised_activations_of_a_narrow_weight_are_refused() -> None:
    weight = weight_of(ao.IntxWeightOnlyConfig())
    weight.activation_quantization = "int4_asym_per_token"
    with pytest.raises(UnknownFormatError, match="activations quantised by int4_asym_per_token"):
        read(weight)


def test_tensor_of_another_library_is_refused() -> None:
    with pytest.raises(UnknownFormatError, match=r"subclass of torch\.Tensor"):
        read(torch.ones(4, 4).as_subclass(type("Other", (Tensor,), {})))


def test_stacked_weights_are_refused() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    stacked = type(weight)(
        weight.qdata[None], weight.scale[None], [1, *weight.block_size], weight.dtype, zero_point=None
    )
    with pytest.raises(UnknownFormatError, match="has 3 dimensions"):
        read(stacked)


# --- activations -------------------------------------------------------------------------------------------------

ROWS = torch.tensor([[-1.0, 0.5, 3.0, 0.0], [0.0, 0.0, 0.0, 0.0]])


def test_activations_by_row_have_a_scale_for_each_row() -> None:
    values, scale = quantize(ROWS, "int8 row")
    assert values.dtype == torch.int8
    assert scale is not None
    assert tuple(scale.shape) == (2, 1)
    torch.testing.assert_close(values * scale, ROWS, rtol=0.0, atol=3.0 / 127.5)


def test_activations_by_tensor_have_one_scale() -> None:
    _, scale = quantize(ROWS, "int8 tensor")
    assert scale is not None
    assert scale.tolist() == pytest.approx([3.0 / 127.5])


def test_asymmetric_activations_are_rounded_and_returned_as_floating_numbers() -> None:
    values, scale = quantize(ROWS, "int8 row asymmetric")
    assert scale is None
    assert values.dtype == ROWS.dtype
    torch.testing.assert_close(values, ROWS, rtol=0.0, atol=0.5 * 4.0 / 255.0 + 1e-6)
    assert values[0].unique().numel() == 4


def test_activations_of_a_weight_only_product_stay_as_they_are() -> None:
    values, scale = quantize(ROWS, "")
    assert values is ROWS
    assert scale is None


@pytest.mark.parametrize("activation", ["float8 row", "float8 tensor"])
def test_float8_activations_reach_the_largest_float8_number(activation: Any) -> None:
    values, scale = quantize(ROWS, activation)
    assert values.dtype == E4M3
    assert scale is not None
    assert scale.dtype == torch.float32
    tiny = torch.finfo(torch.float32).tiny
    assert scale.flatten().tolist() == pytest.approx([3.0 / 448.0] + ([tiny] if activation == "float8 row" else []))
    assert values.float().abs().max() == 448.0
    torch.testing.assert_close(values.float() * scale, ROWS, rtol=2.0**-4, atol=1e-6)


@pytest.mark.parametrize("activation", ["int8 row", "int8 tensor"])
def test_integers_of_activations_use_the_whole_range(activation: Any) -> None:
    values, scale = quantize(torch.tensor([[-3.0, 3.0, 1.5]]), activation)
    assert values.tolist() == [[-128, 127, 64]]
    assert scale is not None
    assert scale.dtype == torch.float32
    _, smallest = quantize(torch.zeros(1, 4), activation)
    assert smallest is not None
    assert smallest.item() == 2.0**-23


def test_asymmetric_activations_of_one_sign_keep_zero_exact() -> None:
    rows = torch.tensor([[4.0, 5.0, 0.0], [-4.0, -2.0, 0.0]])
    values, _ = quantize(rows, "int8 row asymmetric")
    torch.testing.assert_close(values, rows, rtol=0.0, atol=0.5 * 5.0 / 255.0 + 1e-6)
    assert values[:, 2].tolist() == [0.0, 0.0]


def test_quantised_activations_have_no_gradient() -> None:
    rows = ROWS.clone().requires_grad_()
    for activation in ("int8 row", "float8 row", "int8 row asymmetric"):
        values, _ = quantize(rows, activation)  # type: ignore[arg-type]
        assert not values.requires_grad
    assert quantize(rows, "")[0] is rows


# --- recording ---------------------------------------------------------------------------------------------------


def test_linears_by_quantised_weights_are_recorded() -> None:
    weight, x, bias = weight_of(ao.Int8WeightOnlyConfig()), torch.randn(3, K), torch.randn(N)
    with torch.no_grad(), gemmtune.record() as recording:
        nn.functional.linear(x, weight, bias)
    assert recording.problems == [(problem(x, read(weight), bias), 1)]


def test_linear_by_an_unknown_format_is_not_recorded() -> None:
    weight = weight_of(ao.Int8WeightOnlyConfig())
    weight.act_pre_scale = torch.ones(K)
    with torch.no_grad(), gemmtune.record() as recording:
        nn.functional.linear(torch.randn(3, K), weight)
    assert recording.problems == []
