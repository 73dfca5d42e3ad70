"""optimize(): swap, run, save, load and restore, on an MLP, an attention block and weight-only layers."""

from __future__ import annotations

import copy
import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gemmtune
from gemmtune.core.checks import GradError
from gemmtune.dispatch import RUNTIME
from gemmtune.nn.sites import Site
from gemmtune.ops.weight_only import recognise
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy
from helpers.tuned_models import Mlp, prepare_model, store_toy_decisions

optimize_module: Any = importlib.import_module("gemmtune.nn.optimize")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.view(*x.shape[:2], 2, 4).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = torch.softmax(q @ k.mT / 2, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class WeightOnly(nn.Module):
    """Weight-only linear of int8 or int4 with groups along K and scales [N, groups]."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits, self.group_size = bits, 16
        data = torch.randint(-128, 128, (12, 32), dtype=torch.int8)
        self.register_buffer("weight", data if bits == 8 else data[:, :16].contiguous().view(torch.uint8))
        self.register_buffer("scales", torch.rand(12, 2) * 0.01 + 0.01)
        self.bias = nn.Parameter(torch.randn(12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        values = w if self.bits == 8 else torch.stack((w & 15, w >> 4), -1).reshape(12, 32).to(torch.int16) - 8
        full = values.float() * self.scales.repeat_interleave(16, 1)
        return F.linear(x, full, self.bias)


def test_packed_weight_is_used_on_a_cpu_though_a_raw_kernel_is_faster(
    own_store: MemoryStore,
) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store)
    with gemmtune.record() as recording:
        model(x)
    for problem, _ in recording.problems:
        store_decision(own_store, problem, evidence(toy(""), 0.1), evidence(toy("plain"), 0.3), chosen=toy(""))
    assert set(gemmtune.optimize(model, x, tune=False).swapped.values()) == {"toy:plain"}


MODELS = [(Mlp, (3, 8), 2), (Attention, (2, 3, 8), 2), (lambda: nn.Sequential(WeightOnly(8)), (4, 32), 1),
          (lambda: nn.Sequential(WeightOnly(4)), (4, 32), 1)]  # fmt: skip


@pytest.mark.parametrize(("make_model", "shape", "count"), MODELS)
def test_swap_save_load_restore(make_model: Any, shape: tuple[int, ...], count: int, own_store: MemoryStore) -> None:
    x = torch.randn(shape)
    model = prepare_model(make_model(), x, own_store)
    modules, expected = dict(model.named_modules()), model(x)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    handle = gemmtune.optimize(model, (x,), tune=False)
    assert len(handle.swapped) == count
    assert set(handle.swapped.values()) == {"toy:plain"}
    assert handle.left == {}
    TOY_RUNS.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert len(TOY_RUNS) == count
    state = model.state_dict()
    assert set(state) == set(saved)
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    other = make_model().eval().requires_grad_(False)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(model(x), other(x), rtol=1e-4, atol=1e-5)
    handle.restore()
    handle.restore()
    assert dict(model.named_modules()) == modules
    assert torch.equal(model(x), other(x))


def test_raw_weight_is_freed_and_restored(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store)
    assert isinstance(model, Mlp)
    layer, weight, values = model.up, model.up.weight, model.up.weight.clone()
    with gemmtune.optimize(model, x, tune=False):
        assert model.up is layer
        assert layer.weight is weight
        assert isinstance(weight, gemmtune.nn.PackedTensor)
        assert weight.data_ptr() == 0
        assert torch.equal(weight, values)
    assert layer.weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, values)


def test_linears_that_cannot_be_packed_have_a_reason(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8)), x, own_store
    )
    model[2].weight = model[3].weight  # type: ignore[union-attr]
    torch.nn.utils.parametrizations.weight_norm(model[1])
    model.append(nn.Linear(8, 5))
    idle = nn.Linear(8, 8)
    model[0].idle = idle
    model.eval().requires_grad_(False)
    handle = gemmtune.optimize(model, x, tune=False)
    assert set(handle.swapped) == {"0"}
    reasons = {
        "1": "has no Parameter 'weight'",
        "2": "shares its weight",
        "3": "shares its weight",
        "4": "has no decision",
    }
    assert {
        name: reason for name, reason in handle.left.items() if reason.startswith(reasons.get(name, "?"))
    }.keys() == reasons.keys()
    assert handle.left["0.idle"] == "did not run on the example inputs"


def test_model_that_is_a_linear_is_packed(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(nn.Linear(8, 8), x, own_store)
    expected = model(x)
    assert gemmtune.optimize(model, x, tune=False).swapped == {"": "toy:plain"}
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_problems_that_aten_wins_are_left_to_pytorch(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = Mlp().eval()
    with gemmtune.record() as recording, torch.no_grad():
        model(x)
    for problem, _ in recording.problems:
        store_decision(own_store, problem)
    assert set(gemmtune.optimize(model, x, tune=False).left.values()) == {"plain PyTorch is best"}


def test_memory_limit_excludes_larger_layouts(own_store: MemoryStore) -> None:
    register()
    x = torch.randn(4, 32)
    model = nn.Sequential(WeightOnly(8)).eval()
    with gemmtune.record() as recording:
        model(x)
    from gemmtune.core.candidate import Candidate
    from gemmtune.core.decision import Evidence, Sample, Verdict

    dequant = Candidate.make("aten", "dequant")
    sample = Sample(0.1, 0.1, 0.1, 50, 0.1, 0.1, 0.1)
    row = Evidence(
        dequant.to_dict(), dequant.id, "winner", packing="aten:dequant/float32", verdict=Verdict("within_bound"),
        sample=sample,
    )  # fmt: skip
    store_decision(own_store, recording.problems[0][0], row, chosen=dequant)
    assert "1.25 times" in gemmtune.optimize(model, x, tune=False).left["0"]
    handle = gemmtune.optimize(model, x, tune=False, memory=8)
    assert handle.swapped == {"0": "aten:dequant/float32"}


def test_module_with_another_forward_is_not_replaced(own_store: MemoryStore) -> None:
    class NegatedLinear(WeightOnly):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    x = torch.randn(4, 32)
    model = prepare_model(nn.Sequential(NegatedLinear(8)), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False)
    assert "computes something else" in handle.left["0"]


def test_packed_model_raises_grad_error_when_training(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store)
    model.requires_grad_(True)
    handle = gemmtune.optimize(model, x, tune=False)
    with pytest.raises(GradError, match=r"required grad when .* its packed form has no gradient"):
        model(x)
    with torch.no_grad():
        assert model(x).shape == (3, 8)
    handle.restore()
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_requires_grad_can_change_after_packing(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store).requires_grad_(True)
    handle = gemmtune.optimize(model, x, tune=False)
    assert not model.up.weight.requires_grad  # a graph's inner tensors are integers, which cannot require grad
    copied = copy.deepcopy(model)
    with pytest.raises(GradError):
        copied(x)
    model.requires_grad_(False)
    assert not model(x).requires_grad
    model.up.weight.requires_grad = True
    with pytest.raises(GradError):
        model(x)
    handle.restore()
    assert model.up.weight.requires_grad
    assert not model.down.weight.requires_grad


def test_invalid_arguments_raise_errors() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        gemmtune.optimize(Mlp(), x)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module, not int"):
        gemmtune.optimize(3, x)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory must be at least 1"):
        gemmtune.optimize(Mlp().eval(), x, memory=0.5)
    with pytest.raises(TypeError, match="example_inputs must be"):
        gemmtune.optimize(Mlp().eval(), 3)
    with pytest.raises(ValueError, match="example_inputs is empty"):
        gemmtune.optimize(Mlp().eval(), [])


def test_loading_a_mismatched_state_dict_raises_runtime_error(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store)
    gemmtune.optimize(model, x, tune=False)
    state = model.state_dict()
    del state["down.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*down\.weight"):
        model.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"size mismatch for up\.weight"):
        model.load_state_dict({**model.state_dict(), "up.weight": torch.ones(2, 2)})


def test_shared_module_is_swapped_at_all_its_uses(own_store: MemoryStore) -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(3, 8)
    model = prepare_model(nn.Sequential(layer, nn.ReLU(), layer), x, own_store)
    expected = model(x)
    handle = gemmtune.optimize(model, x, tune=False)
    assert model[0] is model[2]  # type: ignore[index]
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    handle.restore()
    assert model[0] is model[2] is layer  # type: ignore[index]


def test_replaced_forward_and_hooks_still_run(own_store: MemoryStore) -> None:
    x = torch.randn(3, 8)
    model = prepare_model(Mlp(), x, own_store)
    up, hook_calls = model.up, []
    up.forward = lambda t: F.linear(t, up.weight, up.bias) * 2
    model.down.register_forward_hook(lambda *_: hook_calls.append("before"))
    expected = model(x)
    handle = gemmtune.optimize(model, x, tune=False, store=own_store)
    assert set(handle.swapped) == {"up", "down"}
    model.down.register_forward_hook(lambda *_: hook_calls.append("after"))
    hook_calls.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    handle.restore()
    assert torch.equal(model(x), expected)
    assert hook_calls == ["before", "after"] * 2


class Int8PerChannel(nn.Module):
    """Weight-only linear of int8 with a scale per output channel, as in gpt-fast."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 128, (12, 32), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(12) * 0.01)
        if bias:
            self.bias = nn.Parameter(torch.randn(12), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = F.linear(x, self.weight.to(x.dtype)) * self.scales
        return product + self.bias if hasattr(self, "bias") else product


@pytest.mark.parametrize("make_module", [lambda: nn.Linear(32, 12), Int8PerChannel, lambda: Int8PerChannel(False)])
def test_raw_modules_keep_the_weight_unpacked(make_module: Any, own_store: MemoryStore) -> None:
    """optimize() uses these modules on GPUs; they run on a CPU as well."""
    x = torch.randn(2, 3, 32)
    model = prepare_model(nn.Sequential(make_module()), x, own_store)
    with gemmtune.record() as recording:
        model(x)
    store_toy_decisions(own_store, recording.problems, layout="")
    original, expected, state = model[0], model(x), model.state_dict()  # type: ignore[index]
    weight_only = recognise(original)
    site = Site(original, "0", [(model, "0")], weight_only, False, Counter([recording.problems[0][0]]))
    handle = gemmtune.optimize(model, x, tune=False)
    assert handle.left == {"0": "plain PyTorch is best"}  # on a CPU
    assert optimize_module._has_tuned_kernel(RUNTIME.index().plan(recording.problems[0][0].plan_key, None))
    assert optimize_module._serve_unpacked(site, handle, keeps=False) == ""
    assert handle.swapped == {"0": "raw"}
    assert isinstance(model[0], gemmtune.nn.RawLinear | gemmtune.nn.RawWeightOnlyLinear)  # type: ignore[index]
    assert model.state_dict().keys() == state.keys()
    TOY_RUNS.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(model)(x), expected, rtol=1e-4, atol=1e-5)
    assert len(TOY_RUNS) == 2
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-5)
    model.load_state_dict({name: tensor + tensor for name, tensor in state.items()})
    if weight_only is not None:
        model.register_buffer("probe", torch.zeros(()))
        assert "probe" in model.state_dict()
    changed = model(x)
    model.double()
    handle.restore()
    assert model[0] is original  # type: ignore[index]
    torch.testing.assert_close(model(x.double()), changed.double(), rtol=1e-4, atol=1e-4)


def test_raw_linear_has_gradients_and_autocast(own_store: MemoryStore) -> None:
    layer = nn.Linear(8, 4)
    raw, x = gemmtune.nn.RawLinear(layer), torch.randn(3, 8)
    assert raw.weight is layer.weight
    raw(x).sum().backward()
    assert layer.weight.grad is not None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert raw(x).dtype == torch.bfloat16
    assert repr(raw) == "RawLinear(in_features=8, out_features=4, bias=True)"


def test_raw_module_is_not_used_for_transposed_scales_or_another_forward(own_store: MemoryStore) -> None:
    class NegatedLinear(Int8PerChannel):
        def forward(self, x: Tensor) -> Tensor:
            return -super().forward(x)

    for make, x, reason in (
        (WeightOnly, torch.randn(4, 32), "other way round"),
        (NegatedLinear, torch.randn(4, 32), "else"),
    ):
        model = nn.Sequential(make(8) if make is WeightOnly else make()).eval()
        with gemmtune.record() as recording:
            model(x)
        problems = Counter([recording.problems[0][0]])
        site = Site(model[0], "0", [(model, "0")], recognise(model[0]), False, problems)
        original = model[0]
        assert reason in optimize_module._serve_unpacked(site, optimize_module.Handle(), keeps=False)
        assert model[0] is original
