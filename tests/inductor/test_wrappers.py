"""Models that are wrapped for training or distribution, under ``torch.compile(model, backend="gemmtune")``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gemmtune
from gemmtune.inductor import graph_pass
from gemmtune.inductor.graph_report import GraphReport, report_of
from gemmtune.inductor.plan_graph import Form, GraphPlan
from helpers.graphs import prefer

OPTIONS = {"policy": "cached"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Checkpointed(nn.Module):
    """Two layers whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile in the test's own cache directory, and check that gemmtune served products of forward and backward."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    torch._dynamo.reset()
    prefer(monkeypatch, fused=True, merged=True)
    served: list[int] = []

    def counted(plan: GraphPlan, forms: Sequence[Form], unmatched: Mapping[fx.Node, str]) -> GraphReport:
        served.append(len(forms))
        return report_of(plan, forms, unmatched)

    monkeypatch.setattr(graph_pass, "report_of", counted)
    yield
    torch._dynamo.reset()
    assert sum(count > 0 for count in served) >= 2


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def assert_trains_alike(model: nn.Module, reference: nn.Module, full: Callable[[Tensor], Tensor] = lambda t: t) -> None:
    """Compare results, gradients, and the results after a step of SGD. full: makes a local tensor of a gradient."""
    x = torch.randn(5, 32)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        torch.testing.assert_close(full(p.grad), q.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(full(model(x)), reference(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:remat_using_tags")  # torch 2.10 warns of graphs without a backward part
def test_checkpointed_activations() -> None:
    model = Checkpointed()
    assert_trains_alike(gemmtune.compile(copy.deepcopy(model), options=OPTIONS), model)


@pytest.mark.usefixtures("process_group")
def test_distributed_data_parallel() -> None:
    model = Mlp()
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    assert_trains_alike(gemmtune.compile(wrapped, options=OPTIONS), model)


@pytest.mark.usefixtures("process_group")
def test_fully_sharded_data_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = Mlp()
    sharded = copy.deepcopy(model)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    compiled = gemmtune.compile(sharded, options=OPTIONS)
    assert_trains_alike(compiled, model, lambda t: t.full_tensor() if isinstance(t, DTensor) else t)
