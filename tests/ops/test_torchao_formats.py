"""Readers of torchao's tensors: contents, the products that multiply by them, and formats that no op takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemmtune.ops.torchao_formats import UnknownFormatError, nibbles, problem, quantize, read, signed

pytest.importorskip("torchao", reason="pip install torchao")
from torchao import quantization as ao
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor

N, K = 96, 64


def weight_of(config: Any) -> Any:
    """Return the weight [N, K] of a linear module that torchao quantised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N, bias=False))
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
    assert tuple(contents.scale.shape) == ((N,) if group is None else (K // group, N))
    values = signed(contents.data) if bits == 4 else contents.data
    scale = contents.scale if group is None else contents.scale.repeat_interleave(group, 0)
    torch.testing.assert_close(values.float() * (scale.t() if group else scale[:, None]), weight.dequantize())
    described = problem(torch.randn(3, K), contents, None)
    assert (described.family, described.m, described.n, described.k) == (product, 3, N, K)


def test_nibbles_and_signed_are_inverse() -> None:
    values = torch.randint(-8, 8, (5, 12), dtype=torch.int8)
    assert torch.equal(signed(nibbles(values)), values)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
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
