"""Modules in the place of weight-only linears and of raw ones: compiled, exported, copied."""

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


def test_one_graph_under_torch_compile() -> None:
    """Packed modules do not break the graph, and a copy answers for itself."""
    raw = torch.randint(-128, 128, (8, 16), dtype=torch.int8)
    packed = gemmtune.pack(raw, scale=torch.rand(8))
    module = gemmtune.nn.WeightOnlyLinear(packed, names={"weight": "weight", "scale": "scales"})
    other = copy.deepcopy(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state["weight"] = state["weight"].flip(0)
    other.load_state_dict(state)
    x = torch.randn(3, 2, 16)
    with torch.no_grad():
        for one in (module, other):
            compiled = torch.compile(nn.Sequential(one, nn.ReLU()), fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(compiled(x), one(x).relu(), rtol=0, atol=0)
        assert not torch.equal(module(x), other(x))


def weight_only() -> gemmtune.nn.WeightOnlyLinear:
    torch.manual_seed(0)
    packed = gemmtune.pack(torch.randint(-128, 128, (8, 16), dtype=torch.int8), scale=torch.rand(8))
    return gemmtune.nn.WeightOnlyLinear(packed, torch.randn(8), names={"weight": "weight", "scale": "scales"})


def test_packed_tensors_are_buffers() -> None:
    module = weight_only()
    buffers = dict(module.named_buffers())
    assert sum(tensor.untyped_storage().nbytes() for tensor in buffers.values()) >= module.packed.nbytes
    assert all(any(part is buffer for buffer in buffers.values()) for part in module.packed.data)
    assert set(module.state_dict()) == {"weight", "scales", "bias"}


def test_copies_have_memory_of_their_own() -> None:
    module, x = weight_only(), torch.randn(2, 16)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(x), module(x))
        before = module(x)
        twin.packed_0.zero_()
        assert torch.equal(module(x), before)
        assert not torch.equal(twin(x), before)


def test_a_write_to_what_weight_shows_is_refused() -> None:
    module = weight_only()
    assert torch.equal(module.weight + 0, module.state_dict()["weight"])
    with pytest.raises(PackedWeightError, match="would be lost"):
        module.weight.zero_()


@pytest.mark.filterwarnings("ignore:No complete tensor found")  # packed tensors begin on a cache line of a larger one
@pytest.mark.parametrize("raw", [False, True])
def test_exported_programs_carry_the_weight(raw: bool, tmp_path: Path) -> None:
    """They load where no such module was ever made."""
    module: nn.Module = weight_only()
    if raw:
        original = module

        class Plain(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("weight", original.state_dict()["weight"])
                self.register_buffer("scales", original.state_dict()["scales"])
                self.register_buffer("bias", original.state_dict()["bias"])

        plain = Plain()
        known = recognise(plain)
        assert known is not None
        module = gemmtune.nn.RawWeightOnlyLinear(plain, known)
    x = torch.randn(2, 3, 16)
    with torch.no_grad():
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "model.pt2")
        wanted = module(x)
    torch.save((x, wanted), tmp_path / "x.pt")
    code = (
        "import torch, gemmtune.nn; "
        f"x, wanted = torch.load({str(tmp_path / 'x.pt')!r}); "
        f"got = torch.export.load({str(tmp_path / 'model.pt2')!r}).module()(x); "
        "torch.testing.assert_close(got, wanted)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_raw_linears_are_linears_and_train(tmp_path: Path) -> None:
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
