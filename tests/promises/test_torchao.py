"""Models that torchao quantised are served by gemmtune's kernels, and stay torchao's for everybody else."""

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
from gemmtune.ops import torchao_formats
from gemmtune.ops.packing import pack
from gemmtune.ops.torchao_formats import UnknownFormatError, problem
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS
from helpers.tuned_models import prepare_model

pytest.importorskip("torchao", reason="pip install torchao")
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
    kind: torch.dtype = request.param
    return kind


def quantised(config: Callable[[], Any], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K, bias=False)).to(dtype).eval()
    ao.quantize_(model, config())
    return model


def bound(dtype: torch.dtype) -> float:
    return 2e-2 if dtype == torch.bfloat16 else 1e-5


def is_close(got: Tensor, wanted: Tensor) -> bool:
    return bool((got - wanted).float().norm() <= bound(wanted.dtype) * wanted.float().norm())


@pytest.fixture(params=list(CONFIGS))
def config(request: pytest.FixtureRequest) -> Callable[[], Any]:
    made: Callable[[], Any] = CONFIGS[request.param]
    return made


@pytest.fixture
def x(dtype: torch.dtype) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, K, dtype=dtype)


@pytest.fixture
def plain(config: Callable[[], Any], dtype: torch.dtype) -> nn.Module:
    return quantised(config, dtype)


@pytest.fixture
def served(plain: nn.Module, x: Tensor, own_store: MemoryStore) -> Iterator[tuple[nn.Module, gemmtune.Handle]]:
    """The model with its linears served by the toy backend."""
    model = prepare_model(copy.deepcopy(plain), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False, memory=4)
    assert handle.left == {}
    assert set(handle.swapped.values()) == {"toy:plain"}
    yield model, handle
    handle.restore()


def same(model: nn.Module, other: nn.Module) -> bool:
    """Whether two models hold the same torchao tensors, bit for bit."""
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


def test_it_is_served_and_agrees(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    TOY_RUNS.clear()
    got = model(x)
    assert len(TOY_RUNS) == 2
    assert got.dtype == x.dtype
    assert is_close(got, plain(x))
    with torch.inference_mode():
        assert torch.equal(model(x), got)


def test_the_state_is_torchaos(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    assert same(model, plain)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = copy.deepcopy(plain)
    other.load_state_dict(state, assign=True)
    assert torch.equal(other(x), plain(x))


def test_loading_repacks(served: Any, config: Callable[[], Any], x: Tensor) -> None:
    model, handle = served
    torch.manual_seed(7)
    other = nn.Sequential(nn.Linear(K, N), nn.ReLU(), nn.Linear(N, K, bias=False)).to(x.dtype).eval()
    ao.quantize_(other, config())
    model.load_state_dict(other.state_dict())
    assert isinstance(model[0].weight, QuantizedTensor)
    assert is_close(model(x), other(x))
    handle.restore()
    assert torch.equal(model(x), other(x))


def test_restore_gives_the_very_bits_back(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, handle = served
    handle.restore()
    assert same(model, plain)
    assert type(model[0].weight) is type(plain[0].weight)
    assert torch.equal(model(x), plain(x))


def test_copies_are_served(served: Any, x: Tensor) -> None:
    model, _ = served
    twin = copy.deepcopy(model)
    TOY_RUNS.clear()
    assert torch.equal(twin(x), model(x))
    assert len(TOY_RUNS) == 4


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of torch 2.10
def test_compiled_and_exported(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    wanted = plain(x)
    try:
        # Fused arithmetic rounds activations of bfloat16 to other integers now and then, as it does for torchao.
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


def test_gradients_are_torchaos(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    grads = []
    for one in (model, plain):
        rows = x.clone().requires_grad_()
        out = one(rows)
        if out.requires_grad:
            out.sum().backward()
        grads.append(rows.grad)
    assert (grads[0] is None) == (grads[1] is None)
    if grads[0] is not None:  # a number near 0 before the ReLU may have another sign, which counts whole
        assert (grads[0] - grads[1]).float().norm() <= 0.1 * grads[1].float().norm()


def test_reads_see_dequantised_values_and_moves_give_torchaos_tensor(served: Any, plain: nn.Module) -> None:
    model, _ = served
    weight, original = model[0].weight, plain[0].weight
    assert (weight.shape, weight.dtype, weight.device) == (original.shape, original.dtype, original.device)
    assert torch.equal(weight.dequantize(), original.dequantize())
    moved = copy.deepcopy(model).to(torch.float16)
    assert type(moved[0].weight) is type(original)


def test_writes_are_refused(served: Any) -> None:
    model, _ = served
    for write in (lambda w: w.mul_(2), lambda w: nn.init.zeros_(w), lambda w: w.copy_(torch.zeros(N, K))):
        with pytest.raises(PackedWeightError, match=r"restore\(\)"), torch.no_grad():
            write(model[0].weight)


def test_a_recording_has_their_problems(plain: nn.Module, x: Tensor) -> None:
    with gemmtune.record() as recorded:
        plain(x)
    assert [count for _, count in recorded.problems] == [1, 1]
    assert all(item.b.constant and item.m == 6 for item, _ in recorded.problems)


@pytest.mark.parametrize("granularity", [PerRow(), PerTensor()])
def test_float8_activations(granularity: Any, dtype: torch.dtype, x: Tensor) -> None:
    """torchao makes these on GPUs only, and computes with them on CPUs."""
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
def test_both_forms_of_a_weight_agree(plain: nn.Module, x: Tensor, raw: bool) -> None:
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
    made = QuantizedTensor.of_weight(stored, packed)
    assert (made.layout_name == "raw") == raw
    assert is_close(F.linear(x, made, plain[0].bias), plain[0](x))
    again = torchao_formats.inner_tensors(made.original())
    for name, tensor in torchao_formats.inner_tensors(plain[0].weight).items():
        assert torch.equal(again[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("activation", ["int8 row", "int8 tensor"])
def test_activations_become_torchaos_integers(activation: Any, dtype: torch.dtype) -> None:
    rows = torch.randn(5, K, dtype=dtype) * torch.tensor([1e-6, 1.0, 1e3, 0.0, 7.0]).to(dtype)[:, None]
    granularity = PerRow() if activation == "int8 row" else PerTensor()
    wanted = ao.Int8Tensor.from_hp(rows, granularity)
    values, scale = torchao_formats.quantize(rows, activation)
    assert scale is not None
    assert torch.equal(values, wanted.qdata)
    assert torch.equal(scale.reshape(-1), wanted.scale.reshape(-1))


def test_what_gemmtune_has_no_op_for_is_left_with_the_reason(x: Tensor, dtype: torch.dtype) -> None:
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


def test_autocast_gives_torchaos_dtype(served: Any, plain: nn.Module, x: Tensor) -> None:
    model, _ = served
    with torch.autocast("cpu", torch.bfloat16):
        got, wanted = model(x), plain(x)
    assert got.dtype == wanted.dtype
    assert (got - wanted).float().norm() <= 2e-2 * wanted.float().norm()


def _fake_convert(pairs: Tensor, inner_tiles: int) -> Tensor:
    """Stands in for ``_convert_weight_to_int4pack``, which CPUs have not: uint8 [N, K / 2], the high nibble first, into
    int32 [N / 8, K / 128, 32, 4] in an order of its own."""
    assert inner_tiles == 8
    values = torch.stack((pairs >> 4, pairs & 15), 2).reshape(-1, 8).flip(1).to(torch.int64)
    packed = (values << (4 * torch.arange(8))).sum(1)
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return packed.reshape(pairs.shape[0] // 8, pairs.shape[1] // 64, 32, 4)


def _fake_int4pack_mm(rows: Tensor, packed: Tensor, group: int, pairs: Tensor) -> Tensor:
    """Stands in for ``_weight_int4pack_mm``."""
    words = packed.reshape(-1, 1).to(torch.int64) & 0xFFFFFFFF
    nibbles = ((words >> (4 * torch.arange(8))) & 15).flip(1)
    values = nibbles.reshape(packed.shape[0] * 8, packed.shape[1] * 128) - 8.0
    scale, zero = (pairs[..., place].float().repeat_interleave(group, 0).t() for place in range(2))
    return (rows.float() @ (values * scale + zero).t()).to(rows.dtype)


@pytest.mark.parametrize("shape", [(24, 1024), (20, 1536)])
def test_tiles_of_int4_are_read_and_restored(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Int4TilePackedTo4dTensor, whose operators only GPUs have; also padded, as torchao pads it."""
    tiled = ao.Int4TilePackedTo4dTensor
    monkeypatch.setattr(torchao_formats, "convert_weight_to_int4pack", _fake_convert)
    monkeypatch.setattr(torchao_formats, "weight_int4pack_mm", _fake_int4pack_mm)
    (n, k), group = shape, 128
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    values = torch.full((rows, columns), 11, dtype=torch.uint8)
    values[:n, :k] = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    pairs = torch.rand(columns // group, rows, 2).bfloat16() + 0.1
    qdata = _fake_convert((values[:, ::2] << 4) | values[:, 1::2], 8)
    weight = tiled(qdata, pairs, [1, group], torch.Size(shape))
    scale, zero = (pairs[: k // group, :n, place].float().repeat_interleave(group, 0).t() for place in range(2))
    wanted = (values[:n, :k].float() - 8) * scale + zero
    read = torchao_formats.read(weight)
    layout = pack(read.data, scale=read.scale, zero_point=read.zero_point, bits=4, group_size=group).layout
    for packed in (None, pack_quantized(read, layout=layout)):
        form = QuantizedTensor.of_weight(read, packed)
        torch.testing.assert_close(form.dequantize().float(), wanted, rtol=1e-2, atol=1e-2)
        again: Any = form.original()
        assert type(again) is tiled
        assert torch.equal(again.qdata, qdata)
        assert torch.equal(again.scale_and_zero, pairs)
    if rows > n:
        values[-1, 0] = 3
        other = tiled(_fake_convert((values[:, ::2] << 4) | values[:, 1::2], 8), pairs, [1, group], torch.Size(shape))
        with pytest.raises(UnknownFormatError, match="padding"):
            torchao_formats.read(other)
