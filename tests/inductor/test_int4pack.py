"""Products by int4 weights of ``_weight_int4pack_mm`` in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gemmtune
from gemmtune.core.problem import Quant
from gemmtune.core.torch_compat import weight_int4pack_mm_for_cpu
from gemmtune.core.workloads import weight_only_problem
from gemmtune.inductor import int4pack_time, matching
from gemmtune.inductor.graph_call import GraphCall
from gemmtune.inductor.int4pack_time import operator_s
from gemmtune.ops.int4pack import multiply
from gemmtune.store import MemoryStore
from helpers.graphs import prefer, run_pass, trace
from helpers.int4pack import GROUP, Int4Linear, Int4Weight, int4_weight
from helpers.torchao_modules import REASON, SKIPPED

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Mlp(nn.Module):
    """Gated layer with int4 weights."""

    def __init__(self, weights: tuple[Int4Weight, Int4Weight, Int4Weight]) -> None:
        super().__init__()
        self.gate, self.up, self.down = map(Int4Linear, weights)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


def mlp() -> tuple[Mlp, tuple[Int4Weight, Int4Weight, Int4Weight]]:
    weights = int4_weight(96, 64, seed=1), int4_weight(96, 64, seed=2), int4_weight(64, 96, seed=3)
    return Mlp(weights), weights


def reference(x: Tensor, weights: tuple[Int4Weight, ...]) -> Tensor:
    gate, up, down = (weight.values for weight in weights)
    return (F.silu(x.double() @ gate.t()) * (x.double() @ up.t())) @ down.t()


def activations(rows: int, k: int) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(name="torch_s")
def fixed_torch_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have PyTorch's operator take a second."""
    monkeypatch.setattr(matching, "operator_s", lambda *_: 1.0)


def product(x: Tensor, packed: Tensor, scales_and_zeros: Tensor) -> Tensor:
    result: Tensor = weight_int4pack_mm_for_cpu(x, packed, GROUP, scales_and_zeros)
    return F.relu(result)


@pytest.mark.usefixtures("torch_s")
def test_products_are_problems_of_constant_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    weight = int4_weight(96, 64)
    module = trace(product, activations(3, 64), weight.packed, weight.scales_and_zeros)
    (node,) = run_pass(monkeypatch, module, [1, 2])
    call = GraphCall.from_json(str(node.args[2]))
    problem = call.problem
    assert (call.form, call.parts, call.weight_count) == ("int4pack", (96,), 2)
    assert (problem.family, problem.m, problem.n, problem.k) == ("mixed_mm", 3, 96, 64)
    assert (problem.b.dtype, problem.b.constant) == ("int4", True)
    assert problem.b.quant == Quant(GROUP, "float32", zero_point=True)
    assert [step.kind for step in problem.epilogue] == ["relu"]


@pytest.mark.parametrize("constants", [[1], [2], []])
def test_weights_that_may_change_stay_as_they_are(constants: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)
    weight = int4_weight(96, 64)
    module = trace(product, activations(3, 64), weight.packed, weight.scales_and_zeros)
    assert not run_pass(monkeypatch, module, constants)


@pytest.mark.parametrize(("torch_s", "served"), [(1.0, True), (1e-9, False), (None, False)])
def test_faster_operator_stays(torch_s: float | None, served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)
    asked: list[Any] = []
    monkeypatch.setattr(matching, "operator_s", lambda *arguments: asked.append(arguments) or torch_s)
    weight = int4_weight(96, 64)
    module = trace(product, activations(3, 64), weight.packed, weight.scales_and_zeros)
    assert bool(run_pass(monkeypatch, module, [1, 2])) == served
    assert {(problem.epilogue, *others) for problem, *others in asked} == {
        ((), tuple(weight.packed.shape), torch.uint8, torch.bfloat16, torch.device("cpu"))
    }


def test_operator_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    multiplied: list[tuple[int, ...]] = []

    def count(a: torch.Tensor, *operands: Any) -> torch.Tensor:
        multiplied.append(tuple(a.shape))
        return multiply(a, *operands)

    monkeypatch.setattr(int4pack_time, "multiply", count)
    for m in (2, 63):  # that no other test asks for, since times are remembered
        problem = weight_only_problem(m, 1024, 1024, bits=4, group=128)
        seconds = operator_s(problem, (1024, 512), torch.uint8, torch.bfloat16, torch.device("cpu"))
        assert seconds is not None
        assert 0.0 < seconds < 1.0
        assert set(multiplied) == {(m, 1024)}
        multiplied.clear()


@pytest.mark.usefixtures("torch_s")
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_untuned_products_compute_what_the_operator_does(
    rows: int, merged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer(monkeypatch, fused=not merged, merged=merged)
    model, weights = mlp()
    x = activations(rows, 64)
    compiled = gemmtune.compile(model, options={"policy": "cached", "store": MemoryStore()})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).double(), reference(x, weights), rtol=3e-2, atol=3e-2)


def test_tuned_kernels_serve_and_see_writes() -> None:
    weight = int4_weight(512, 256)
    model, x, store = Int4Linear(weight), activations(3, 256), MemoryStore()
    compiled = gemmtune.compile(model, options={"store": store, "budget": 2.0})
    with torch.no_grad():
        torch.testing.assert_close(compiled(x).double(), x.double() @ weight.values.t(), rtol=2e-2, atol=2e-2)
        (report,) = gemmtune.inductor.explain(model, x, options={"store": store})
        (served,) = report.products
        model.scales_and_zeros.mul_(2)
        torch.testing.assert_close(compiled(x).double(), 2 * x.double() @ weight.values.t(), rtol=2e-2, atol=4e-2)
        model.scales_and_zeros[0, 0, 0] = 0  # no zero point stands for the zero of this group
        torch.testing.assert_close(compiled(x), model(x), rtol=2e-2, atol=4e-2)
    assert served.ratio is None
    if served.reason == "it was not tuned":
        pytest.skip("the machine was too busy to decide")
    assert served.kernel or "PyTorch's operator takes" in served.reason


def test_emulated_roundings_are_the_operators() -> None:
    model, _ = mlp()
    options = {"store": MemoryStore(), "emulate_precision_casts": True}
    (report,) = gemmtune.inductor.explain(model, activations(3, 64), options=options)
    assert not report.products
    assert {reason for _, reason in report.unmatched} == {"eager PyTorch rounds the dequantised weight or its scales"}


@pytest.mark.usefixtures("torch_s")
def test_linears_that_torchao_quantised_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    prototype = pytest.importorskip("torchao.prototype.quantization.int4", reason=REASON, exc_type=SKIPPED)
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256, bias=False))
    model = model.bfloat16().eval().requires_grad_(False)
    quantize_(model, prototype.PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False))
    prefer(monkeypatch, fused=True)
    x, options = activations(3, 256), {"policy": "cached", "store": MemoryStore()}
    with torch.no_grad():
        (report,) = gemmtune.inductor.explain(model, x, options=options)
        expected = model(x)
        torch.testing.assert_close(gemmtune.compile(model, options=options)(x), expected, rtol=2e-2, atol=2e-2)
    assert [(product.form, product.normed) for product in report.products] == [("fused", False), ("alone", False)]
