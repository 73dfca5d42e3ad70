"""Modules that replace weight-only and raw linears: compiled, exported and copied."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gemmtune
from gemmtune.core.errors import PackedWeightError
from gemmtune.ops.weight_only import recognise


def test_packed_modules_compile_into_one_graph() -> None:
    """Packed modules cause no graph break, and a copy has its own weight."""
    data = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    packed = gemmtune.pack(data, scale=torch.rand(8))
    module = gemmtune.nn.WeightOnlyLinear(packed, names={"weight": "weight", "scale": "scales"})
    copied = copy.deepcopy(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["weight"] = state["weight"].flip(0)
    copied.load_state_dict(state)
    x = torch.randn(3, 2, 16)
    with torch.no_grad():
        for linear in (module, copied):
            compiled = torch.compile(nn.Sequential(linear, nn.ReLU()), fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), linear(x).relu(), rtol=0, atol=0)
        assert not torch.equal(module(x), copied(x))


def make_weight_only_linear() -> gemmtune.nn.WeightOnlyLinear:
    torch.manual_seed(0)
    packed = gemmtune.pack(torch.randint(-128, 128, (8, 16), dtype=torch.int8), scale=torch.rand(8))
    return gemmtune.nn.WeightOnlyLinear(packed, torch.randn(8), names={"weight": "weight", "scale": "scales"})


def test_packed_tensors_are_buffers_of_the_module() -> None:
    module = make_weight_only_linear()
    buffers = dict(module.named_buffers())
    assert sum(tensor.untyped_storage().nbytes() for tensor in buffers.values()) >= module.packed.nbytes
    assert all(any(part is buffer for buffer in buffers.values()) for part in module.packed.data)
    assert set(module.state_dict()) == {"weight", "scales", "bias"}


def test_copies_share_no_memory() -> None:
    module, x = make_weight_only_linear(), torch.randn(2, 16)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x), module(x))
        before = module(x)
        copied.packed_0.zero_()
        assert torch.equal(module(x), before)
        assert not torch.equal(copied(x), before)


def test_writing_to_the_unpacked_weight_raises_packed_weight_error() -> None:
    module = make_weight_only_linear()
    assert torch.equal(module.weight + 0, module.state_dict()["weight"])
    with pytest.raises(PackedWeightError, match="would be lost"):
        module.weight.zero_()
    with pytest.raises(PackedWeightError, match="would be lost"):
        torch._foreach_zero_([module.weight])


@pytest.mark.filterwarnings(
    "ignore:No complete tensor found"
)  # packed tensors start at a cache line within a larger tensor
@pytest.mark.parametrize("raw", [False, True])
def test_exported_programs_include_the_weight(raw: bool, tmp_path: Path) -> None:
    """Exported programs load in a process that has made no such module."""
    module: nn.Module = make_weight_only_linear()
    if raw:
        original = module

        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("weight", original.state_dict()["weight"])
                self.register_buffer("scales", original.state_dict()["scales"])
                self.register_buffer("bias", original.state_dict()["bias"])

        plain = Plain()
        weight_only = recognise(plain)
        assert weight_only is not None
        module = gemmtune.nn.RawWeightOnlyLinear(plain, weight_only)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "model.pt2")
        expected = module(x)
    torch.save((x, expected), tmp_path / "x.pt")
    code = (
        "import torch, gemmtune.nn; "
        f"x, wanted = torch.load({str(tmp_path / 'x.pt')!r}); "
        f"got = torch.export.load({str(tmp_path / 'model.pt2')!r}).module()(x); "
        "torch.testing.assert_close(got, wanted)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_raw_linear_is_a_linear_and_has_gradients(tmp_path: Path) -> None:
    original = nn.Linear(16, 8)
    module, x = gemmtune.nn.RawLinear(original), torch.randn(2, 3, 16)
    assert isinstance(module, nn.Linear)
    assert module.weight is original.weight
    module(x).sum().backward()
    assert original.weight.grad is not None
    frozen = gemmtune.nn.RawLinear(copy.deepcopy(original).requires_grad_(False))
    leaves = [x.clone().requires_grad_(True) for _ in range(2)]
    try:
        compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager")
        for function, leaf in zip((frozen, compiled), leaves, strict=True):
            function(leaf).add_(1).square().sum().backward()
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
