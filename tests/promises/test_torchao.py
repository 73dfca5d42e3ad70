"""Tests that models quantised by torchao are served by gemmtune's kernels and keep torchao's tensors otherwise."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gemmtune
from gemmtune.core.errors import PackedWeightError
from gemmtune.nn.quantized_tensor import QuantizedTensor, pack_quantized
from gemmtune.ops import int4pack, torchao_formats
from gemmtune.ops.packing import pack
from gemmtune.ops.torchao_formats import UnknownFormatError, problem
from gemmtune.store import MemoryStore
from helpers.int4_tiles import fake_convert, fake_int4pack_mm
from helpers.serving import TOY_RUNS
from helpers.torchao_modules import REASON, SKIPPED
from helpers.tuned_models import prepare_model

pytest.importorskip("torchao", reason=REASON, exc_type=SKIPPED)
from torchao import quantization as ao
from torchao.float8.inference import Float8MMConfig
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor, QuantizeTensorToFloat8Kwargs

K, N = 64, 96

CONFIGS: dict[str, Callable[[], Any]] = {
    "int8 weights": ao.Int8WeightOnlyConfig,
    "int8 weights by groups": lambda: ao.Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8 weights by tensor": lambda: ao.Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8 dynamic": ao.Int8DynamicActivationInt8WeightConfig,
    "int8 dynamic by tensor": lambda: ao.Int8DynamicActivationInt8WeightConfig(granularity=PerTensor()),
    "8 bits": ao.IntxWeightOnlyConfig,
    "4 bits by groups": lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int8 activations, 4 bits": lambda: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
    "float8 weights": ao.Float8WeightOnlyConfig,
}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    param: torch.dtype = request.param
    return param


def quantised(config: Callable[[], Any], dtype: torch.dtype) -> nn.Module:
    """Return a model of two linears that torchao quantised."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K, bias=False)).to(dtype).eval()
    ao.quantize_(model, config())
    return model


def relative_error_bound(dtype: torch.dtype) -> float:
    """Return the allowed relative error of a result, in the norm of the whole tensor."""
    return 2e-2 if dtype == torch.bfloat16 else 1e-5


def is_close(got: Tensor, wanted: Tensor) -> bool:
    return bool((got - wanted).float().norm() <= relative_error_bound(wanted.dtype) * wanted.float().norm())


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> Callable[[], Any]:
    param: Callable[[], Any] = CONFIGS[request.param]
    return param


@pytest.fixture
def x(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, K, dtype=dtype)


@pytest.fixture
def plain(config: Callable[[], Any], dtype: torch.dtype) -> nn.Module:
    return quantised(config, dtype)


@pytest.fixture
def served(plain: nn.Module, x: Tensor, own_store: MemoryStore) -> Iterator[tuple[nn.Module, gemmtune.Handle]]:
    """Yield the optimized model, whose linears the toy backend serves, and its handle."""
    model = prepare_model(copy.deepcopy(plain), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False, memory=4)
    assert handle.left == {}
    assert set(handle.swapped.values()) == {"toy:plain"}
    yield model, handle
    handle.restore()


def have_equal_tensors(model: nn.Module, other: nn.Module) -> bool:
    """Return whether two models have equal torchao tensors, bit for bit."""
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(
        type(a) is type(b)
        and (
            torch.equal(a, b)
            if type(a) is Tensor
            else all(
                torch.equal(p.view(torch.uint8), q.view(torch.uint8)) and p.dtype == q.dtype
                for p, q in zip(
                    torchao_formats.inner_tensors(a).values(), torchao_formats.inner_tensors(b).values(), strict=True
                )
            )
        )
        for a, b in pairs
    )


def test_an_optimized_model_is_served_and_agrees_with_torchao(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    TOY_RUNS.clear()
    got = model(x)
    assert len(TOY_RUNS) == 2
    assert got.dtype == x.dtype
    assert is_close(got, plain(x))
    with torch.inference_mode():
        assert torch.equal(model(x), got)


def test_the_state_dict_has_the_tensors_of_torchao(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    assert have_equal_tensors(model, plain)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = copy.deepcopy(plain)
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(x), plain(x))


def test_loading_a_state_dict_packs_the_new_weights(served: Any, config: Callable[[], Any], x: Tensor) -> None:
    model, handle = served
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K, bias=False)).to(x.dtype).eval()
    ao.quantize_(other, config())
    model.load_state_dict(other.state_dict())
    assert isinstance(model[0].weight, QuantizedTensor)
    assert is_close(model(x), other(x))
    handle.restore()
    assert torch.equal(model(x), other(x))


def test_restore_returns_the_original_tensors_bit_for_bit(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, handle = served
    handle.restore()
    assert have_equal_tensors(model, plain)
    assert type(model[0].weight) is type(plain[0].weight)
    assert torch.equal(model(x), plain(x))


def test_a_deepcopy_is_served(served: Any, x: Tensor) -> None:
    model, _ = served
    twin = copy.deepcopy(model)
    TOY_RUNS.clear()
    assert torch.equal(twin(x), model(x))
    assert len(TOY_RUNS) == 4


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of torch 2.10
def test_compiled_and_exported_models_agree_with_torchao(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    wanted = plain(x)
    try:
        # Fused arithmetic sometimes rounds bfloat16 activations to other integers, for torchao's tensors too.
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    finally:
        torch._dynamo.reset()
    assert is_close(compiled, wanted)
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    TOY_RUNS.clear()
    assert is_close(torch.export.load(file).module()(x), wanted)
    assert len(TOY_RUNS) == 2


def test_gradients_agree_with_torchao(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    grads = []
    for one in (model, plain):
        rows = x.clone().requires_grad_()
        out = one(rows)
        if out.requires_grad:
            out.sum().backward()
        grads.append(rows.grad)
    assert (grads[0] is None) == (grads[1] is None)
    if grads[0] is not None:  # a value near 0 before the ReLU may change its sign, and with it a whole gradient
        assert (grads[0] - grads[1]).float().norm() <= 0.1 * grads[1].float().norm()


def test_dequantize_agrees_with_torchao_and_dtype_conversions_return_its_tensor(served: Any, plain: nn.Module) -> None:
    model, _ = served
    weight, original = model[0].weight, plain[0].weight
    assert (weight.shape, weight.dtype, weight.device) == (original.shape, original.dtype, original.device)
    assert torch.equal(weight.dequantize(), original.dequantize())
    moved = copy.deepcopy(model).to(torch.float16)
    assert type(moved[0].weight) is type(original)


def test_in_place_writes_are_refused(served: Any) -> None:
    model, _ = served
    for write in (lambda w: w.mul_(2), lambda w: nn.init.zeros_(w), lambda w: w.copy_(torch.zeros(N, K))):
        with pytest.raises(PackedWeightError, match=r"restore\(\)"), torch.no_grad():
            write(model[0].weight)


def test_record_has_the_problems_of_quantised_linears(plain: nn.Module, x: Tensor) -> None:
    with gemmtune.record() as recorded:
        plain(x)
    assert [count for _, count in recorded.problems] == [1, 1]
    assert all(item.b.constant and item.m == 6 for item, _ in recorded.problems)


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()])
def test_float8_dynamic_activations_agree_with_torchao(granularity: Any, dtype: torch.dtype, x: Tensor) -> None:
    """torchao quantises such activations on GPUs only, and computes with them on CPUs too."""
    weight = Float8Tensor.from_hp(
        torch.randn(N, K, dtype=dtype),
        granularity=granularity,
        mm_config=Float8MMConfig(use_fast_accum=True),
        act_quant_kwargs=QuantizeTensorToFloat8Kwargs(granularity=granularity),
    )
    stored = torchao_formats.read(weight)
    assert stored.product == "scaled_mm"
    assert problem(x, stored, None).family == "scaled_mm"
    bias = torch.randn(N, dtype=dtype)
    got = F.linear(x, QuantizedTensor.of_weight(stored, None), bias)
    try:
        wanted = F.linear(x, weight, bias)
    except RuntimeError as error:
        if "per-tensor scaling" in str(error):  # torch 2.10 and 2.11 on a CPU
            pytest.skip("torchao cannot compute it with this torch")
        raise
    assert is_close(got, wanted)


@pytest.mark.parametrize("raw", [True, False])
def test_raw_and_packed_weights_agree_with_torchao(plain: nn.Module, x: Tensor, raw: bool) -> None:
    stored = torchao_formats.read(plain[0].weight)
    if raw:
        packed = None
    elif stored.product == "int_mm":
        packed = pack(stored.data)
    else:
        packed = pack(
            stored.data,
            scale=stored.scale,
            zero_point=stored.zero_point,
            bits=stored.bits,
            group_size=stored.group_size,
        )
    quantized = QuantizedTensor.of_weight(stored, packed)
    assert (quantized.layout_name == "raw") == raw
    assert is_close(F.linear(x, quantized, plain[0].bias), plain[0](x))
    restored = torchao_formats.inner_tensors(quantized.original())
    for name, tensor in torchao_formats.inner_tensors(plain[0].weight).items():
        assert torch.equal(restored[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("activation", ["int8 row", "int8 tensor"])
def test_activations_are_quantized_as_by_torchao(activation: Any, dtype: torch.dtype) -> None:
    rows = torch.randn(5, K, dtype=dtype) * torch.tensor([1e-6, 1.0, 1e3, 0.0, 7.0]).to(dtype)[:, None]
    granularity = PerRow() if activation == "int8 row" else PerTensor()
    wanted = ao.Int8Tensor.from_hp(rows, granularity)
    values, scale = torchao_formats.quantize(rows, activation)
    assert scale is not None
    assert torch.equal(values, wanted.qdata)
    assert torch.equal(scale.reshape(-1), wanted.scale.reshape(-1))


def test_an_unsupported_format_is_left_with_the_reason(x: Tensor, dtype: torch.dtype) -> None:
    def asymmetric() -> Any:
        return ao.Int8DynamicActivationInt8WeightConfig(act_mapping_type=ao.MappingType.ASYMMETRIC)

    model = quantised(asymmetric, dtype)
    wanted = model(x)
    handle = gemmtune.optimize(model, x, tune=False)
    assert handle.swapped == {}
    assert "zero point" in handle.left["0"]
    assert torch.equal(model(x), wanted)
    with pytest.raises(UnknownFormatError, match="zero point"):
        torchao_formats.read(model[0].weight)


def test_autocast_returns_the_dtype_of_torchao(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = model(x), plain(x)
    assert got.dtype == wanted.dtype
    assert (got - wanted).float().norm() <= 2e-2 * wanted.float().norm()


@pytest.mark.parametrize("shape", [(24, 1024), (20, 1536)])
def test_tile_packed_int4_weights_are_read_and_restored(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only GPUs have the operators of Int4TilePackedTo4dTensor. One of the shapes has torchao's padding."""
    tiled = ao.Int4TilePackedTo4dTensor
    monkeypatch.setattr(torchao_formats, "convert_weight_to_int4pack", fake_convert)
    monkeypatch.setattr(int4pack, "weight_int4pack_mm", fake_int4pack_mm)
    (n, k), group = shape, 128
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    values = torch.full((rows, columns), 11, dtype=torch.uint8)
    values[:n, :k] = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    pairs = torch.rand(columns // group, rows, 2).bfloat16() + 0.1
    qdata = fake_convert((values[:, ::2] << 4) | values[:, 1::2], 8)
    weight = tiled(qdata, pairs, [1, group], torch.Size(shape))
    scale, zero = (pairs[: k // group, :n, index].float().repeat_interleave(group, 0).t() for index in range(2))
    wanted = (values[:n, :k].float() - 8) * scale + zero
    read = torchao_formats.read(weight)
    layout = pack(read.data, scale=read.scale, zero_point=read.zero_point, bits=4, group_size=group).layout
    for packed in (None, pack_quantized(read, layout=layout)):
        form = QuantizedTensor.of_weight(read, packed)
        torch.testing.assert_close(form.dequantize().float(), wanted, rtol=1e-2, atol=1e-2)
        restored: Any = form.original()
        assert type(restored) is tiled
        assert torch.equal(restored.qdata, qdata)
        assert torch.equal(restored.scale_and_zero, pairs)
    if rows > n:
        values[-1, 0] = 3
        other = tiled(fake_convert((values[:, ::2] << 4) | values[:, 1::2], 8), pairs, [1, group], torch.Size(shape))
        with pytest.raises(UnknownFormatError, match="padding"):
            torchao_formats.read(other)
