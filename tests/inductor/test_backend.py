"""``torch.compile(model, backend="gemmtune")`` as a whole, by Inductor's C++ code for CPUs."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import gemmtune
from gemmtune.inductor import graph_pass
from gemmtune.inductor.graph_report import report_of
from gemmtune.inductor.operator import product
from gemmtune.store import MemoryStore
from helpers.graphs import prefer
from helpers.serving import decide, evidence, toy

backend_module: Any = importlib.import_module("gemmtune.inductor.backend")


@pytest.fixture(autouse=True)
def cleared_counters(fresh_compiler: None) -> None:
    counters.clear()


def test_explain_reports_each_product_and_generates_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    model = Mlp()
    x = torch.randn(4, 64)
    (report,) = gemmtune.inductor.explain(model, x)
    assert [product.form for product in report.products] == ["merged", "merged", "fused"]
    gate, _, fused = report.products
    assert gate.gated
    assert gate.problem.startswith("4x128x64 fp32")
    assert fused.problem.startswith("4x64x64 fp32")
    assert fused.nodes[0].startswith("addmm")
    assert len(fused.nodes) > 1
    assert "gemmtune serves 3 of 3 products of a graph: 2 merged ones, 1 with" in report.summary
    assert not counters["inductor"]["extern_calls"]


def test_generated_code_names_the_kernel_of_each_product(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    compiled = gemmtune.compile(Mlp().eval(), options={"policy": "cached"})
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, torch.randn(4, 64))
    comments = [line for line in code.splitlines() if "# gemmtune: " in line]
    shapes = ("4x128x64 fp32 +bias +swiglu: merged", "4x64x64 fp32 +bias +add: fused")
    assert len(comments) == 2
    assert all(shape in line for shape, line in zip(shapes, comments, strict=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_generated_code_tells_call_sites_whether_m_is_symbolic(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    compiled = gemmtune.compile(Mlp().eval(), dynamic=dynamic, options={"policy": "cached"})
    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, torch.randn(4, 64))
    sites = [line for line in code.splitlines() if " = CallSite(" in line]
    assert len(sites) == 2
    assert all(line.endswith(f", {dynamic})") for line in sites)


def test_explain_reports_the_bodies_of_branches_and_the_graph_around_them() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x, y: x @ y, lambda x, y: x - y, (x, y)) @ y

    square = torch.ones(8, 8)
    reports = gemmtune.inductor.explain(function, square, square, options={"store": MemoryStore()})
    assert [len(report.products) for report in reports] == [1, 0, 1]


def test_explain_says_why_a_product_stays_inductors() -> None:
    def function(x: Tensor, y: Tensor, z: Tensor, store: Tensor) -> Tensor:
        return torch.addmm(z, x, y, beta=2) + torch.mm(x.double(), y.double()) + x @ y

    square = torch.randn(8, 8)
    (report,) = gemmtune.inductor.explain(function, square, square, square, square, options={"store": MemoryStore()})
    assert dict(report.unmatched)["addmm"] == "has an alpha or beta"
    assert "multiplies float32, bfloat16, float16; got float64" in report.lines()[-1]
    assert {product.form for product in report.products} == {"inductor"}
    assert "it was not tuned" in report.lines()[0]


class Mlp(nn.Module):
    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(size, size), nn.Linear(size, size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def test_missing_decisions_are_tuned_once(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    asked: set[str] = set()
    tune = graph_pass.tune_on_device

    def counted(problems: Any, *args: Any, more: Any = None, **options: Any) -> Any:
        calls.append(len(problems))
        asked.update(problem.key for problem, _ in problems)

        def counted_more() -> Any:
            others = more()
            asked.update(problem.key for problem, _ in others)
            return others

        return tune(problems, *args, more=None if more is None else counted_more, **options)

    monkeypatch.setattr(graph_pass, "tune_on_device", counted)
    model, x = Mlp().eval(), torch.randn(2, 3, 64)
    with torch.no_grad():
        compiled = torch.compile(model, backend="gemmtune", options={"budget": 0.2, "backends": ["aten", "native"]})
        close(compiled(x), model(x))
        assert calls[0] == 2  # both halves of the gate as one product, and down with its residual
        first, count = len(calls), len(asked)  # what a busy machine left undecided is tuned once more
        assert first <= 2
        torch._dynamo.reset()
        close(torch.compile(model, backend="gemmtune", options={"budget": 0.2})(x), model(x))
    decided = {decision.problem_key for decision in own_store.decisions(gemmtune.current_target())}
    assert len(calls) == first or len(decided) < count


def test_workers_start_while_a_graph_is_traced_if_nothing_was_tuned(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    closed: list[bool] = []

    def start(device: torch.device, store: Any) -> Any:
        started.append(device.type)
        return SimpleNamespace(close=lambda: closed.append(True))

    def tune(problems: Any, *_: Any, pool: Any, more: Any, **__: Any) -> list[Any]:
        assert pool is not None
        assert not closed
        more()
        own_store.put(gemmtune.current_target(), decide(problems[0][0], evidence(toy(), 0.1), chosen=toy()))
        return []

    monkeypatch.setattr(backend_module, "start_workers", start)
    monkeypatch.setattr(graph_pass, "tune_on_device", tune)
    x = torch.randn(3, 64)
    with torch.no_grad():
        gemmtune.compile(torch.relu)(x)  # nothing to tune
        gemmtune.compile(Mlp().eval(), options={"policy": "cached"})(x)
        assert started == []
        gemmtune.compile(Mlp().eval())(x)
        assert started == ["cpu"]
        assert closed
        monkeypatch.setattr(graph_pass, "tune_on_device", lambda *_, pool, **__: [])
        torch._dynamo.reset()
        gemmtune.compile(Mlp(32).eval())(torch.randn(3, 32))  # something was tuned here
    assert started == ["cpu"]


def test_writes_to_weights_reach_the_compiled_model(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, merged=True)
    model, x = Mlp().eval(), torch.randn(3, 64)
    with torch.no_grad():
        compiled = gemmtune.compile(model, options={"policy": "cached"})
        close(compiled(x), model(x))
        model.gate.weight.mul_(2.0)
        model.up.bias.add_(1.0)
        close(compiled(x), model(x))
        model.load_state_dict(Mlp().state_dict())
        close(compiled(x), model(x))
        model.up.weight = nn.Parameter(torch.randn(64, 64))
        close(compiled(x), model(x))
        assert {name: tuple(t.shape) for name, t in model.state_dict().items()}["gate.weight"] == (64, 64)


def test_one_graph_serves_all_m(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    model = Mlp().eval()
    with torch.no_grad():
        compiled = gemmtune.compile(model, dynamic=True, options={"policy": "cached"})
        for batch in (2, 3, 17, 5):
            x = torch.randn(batch, 4, 64)
            close(compiled(x), model(x))
    assert counters["stats"]["unique_graphs"] == 1


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True, merged=True)
    model, x = Mlp(), torch.randn(3, 64, requires_grad=True)
    compiled = gemmtune.compile(model, options={"policy": "cached"})
    compiled(x).square().sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    x.grad = None
    model.zero_grad()
    model(x).square().sum().backward()
    for gradient, expected in zip(gradients, [x.grad, *(p.grad for p in model.parameters())], strict=True):
        assert gradient is not None
        assert expected is not None
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-3)
    torch.optim.SGD(model.parameters(), 0.1).step()
    close(compiled(x), model(x))


def test_autocast_and_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, merged=True)
    model, x = Mlp().eval(), torch.randn(3, 64)
    compiled = gemmtune.compile(model, options={"policy": "cached"})
    with torch.inference_mode():
        close(compiled(x), model(x))
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(compiled(x), model(x), rtol=5e-2, atol=5e-2)


def same_twice(x: Tensor) -> Tensor:
    return x @ x.t() + (x @ x.t()).t()


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(F.linear(y, y[:8, :8]))
    return y


BEHAVIOURS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: torch.softmax(x @ x.t(), -1) @ x,
    "layer norm": lambda x: F.layer_norm(F.linear(x, x), (8,)),
    "in place": in_place,
    "cumsum": lambda x: torch.cumsum(x @ x, 0),
    "sort": lambda x: torch.sort(x @ x, -1)[0],
    "the same tensor twice": same_twice,
    "integers": lambda x: torch._int_mm((x * 9).to(torch.int8), (x * 9).to(torch.int8)),
    "views": lambda x: (x.view(4, 2, 8).transpose(0, 1) @ x.view(2, 4, 8).transpose(1, 2)[:, :8, :4]).flatten(),
}  # fmt: skip


def test_behaviours_that_pytorch_tests_of_max_autotune(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def everything(x: Tensor) -> list[Any]:
        return [function(x) for function in BEHAVIOURS.values()]

    with torch.no_grad():
        results = gemmtune.compile(everything, options={"policy": "cached"})(x)
    for name, result, expected in zip(BEHAVIOURS, results, everything(x), strict=True):
        torch.testing.assert_close(
            result, expected, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_batch_norm_and_dropout_train(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Linear(8, 8))
    compiled = gemmtune.compile(model, options={"policy": "cached"})
    x = torch.randn(5, 8)
    result = compiled(x)
    mean = model[1].running_mean.clone()
    model[1].reset_running_stats()
    close(result, model(x))
    close(mean, model[1].running_mean)


def test_products_in_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch, fused=True, merged=True)
    model = Mlp(16).eval()

    def choose(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: model.gate(x) + model.up(x), lambda x: F.relu(model.down(x)), (x,))

    compiled = gemmtune.compile(choose, options={"policy": "cached"})
    x = torch.ones(3, 16)
    with torch.no_grad():
        close(compiled(x), choose(x))
        close(compiled(-x), choose(-x))
    # A branch has as many inputs as the graph, in another order: none of them is taken for a weight.
    weights = [layer.weight for layer in (model.gate, model.up, model.down)]
    assert len({weight.untyped_storage().data_ptr() for weight in weights}) == 3


def test_policy_off_is_plain_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)
    monkeypatch.setattr(graph_pass, "find_products", lambda *_, **__: pytest.fail("the policy is off"))
    model, x = Mlp().eval(), torch.randn(3, 64)
    with torch.no_grad():
        close(gemmtune.compile(model, options={"policy": "off"})(x), model(x))


def test_installed_pass_serves_the_backend_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)
    seen = []
    monkeypatch.setattr(graph_pass, "report_of", lambda *args: seen.append(len(args[1])) or report_of(*args))
    model, x = Mlp().eval(), torch.randn(3, 64)
    with torch.no_grad(), gemmtune.inductor.install({"policy": "cached"}):
        close(torch.compile(model)(x), model(x))
    assert seen == [3]
    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(model)(x), model(x))
    assert seen == [3]
    with pytest.raises(ValueError, match="epilogue_fusion"):
        gemmtune.inductor.install({"epilogue_fusion": True})


def test_users_own_pass_runs_first(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer(monkeypatch)
    order: list[str] = []
    monkeypatch.setattr(graph_pass, "report_of", lambda *args: order.append("gemmtune") or report_of(*args))
    options = {"policy": "cached", "post_grad_custom_pre_pass": lambda graph: order.append("user")}
    with torch.no_grad():
        gemmtune.compile(Mlp().eval(), options=options)(torch.randn(3, 64))
    assert order == ["user", "gemmtune"]


def test_bad_options_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="polcy"):
        gemmtune.compile(Mlp(), options={"polcy": "off"})


def test_operator_passes_opcheck() -> None:
    from gemmtune.core.workloads import linear_problem
    from gemmtune.inductor.graph_call import GraphCall

    text = GraphCall(linear_problem(3, 8, 16, "float32"), "linear", (8,)).to_json()
    torch.library.opcheck(product, (torch.randn(3, 16), [torch.randn(8, 16)], text), raise_exception=True)


SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch._dynamo.utils import counters
    import gemmtune
    from gemmtune.inductor import graph_pass

    tuned = []
    tune = graph_pass.tune_on_device
    graph_pass.tune_on_device = lambda problems, *a, **k: (tuned.extend(problems), tune(problems, *a, **k))[1]
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(), torch.randn(3, 64)
    with torch.no_grad():
        result = torch.compile(model, backend="gemmtune", options={"budget": 0.3})(x)
        torch.testing.assert_close(result, model(x), rtol=1e-4, atol=1e-4)
    if len(sys.argv) > 1:
        from gemmtune.dispatch.runtime import RUNTIME
        from gemmtune.core.workloads import build
        for _ in range(9):  # on a busy machine a Problem may stay undecided
            (decision,) = gemmtune.tune([build(5, 32, 32, "fp32")], budget=0.3)
            if decision.outcome != "inconclusive":
                break
    print(dict(counters["aot_autograd"]), dict(counters["inductor"]), file=sys.stderr)
    caches = [counters["aot_autograd"], "autograd_cache"], [counters["inductor"], "fxgraph_cache"]
    print(len(tuned), *(counts[f"{name}_{word}"] for word in ("hit", "miss") for counts, name in caches))
"""


def test_second_process_loads_what_the_first_compiled_until_decisions_change(tmp_path: Path) -> None:
    def run(*args: str) -> list[int]:
        environment = {
            "GEMMTUNE_STORE": str(tmp_path / "store.db"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
            "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path),
        }  # fmt: skip
        command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SCRIPT), *args]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        print(done.stderr[-600:])
        return [int(word) for word in done.stdout.split()]

    tuned, *counts = run()
    assert tuned >= 2
    assert counts == [0, 0, 1, 1]  # traced once, and tuned before Inductor looked for the graph
    tuned, *counts = run()
    if tuned:  # a busy machine left a Problem undecided in the first process
        tuned, *counts = run()
    assert (tuned, *counts) == (0, 1, 1, 0, 0)
    run("and another decision")
    _, *counts = run()
    assert counts == [0, 0, 1, 1]


@pytest.mark.parametrize("ahead", [True, False])
def test_graph_is_traced_again_only_if_the_pass_tuned(
    ahead: bool, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []
    run = graph_pass.ProductPass.__call__
    monkeypatch.setattr(
        graph_pass.ProductPass, "__call__", lambda each, graph: (graphs.append(graph), run(each, graph))
    )
    if not ahead:  # as for a product that only appears while Inductor prepares the graph
        monkeypatch.setattr(graph_pass.ProductPass, "tune_ahead", lambda *_: None)
    model, x = Mlp().eval(), torch.randn(3, 64)
    with torch.no_grad():
        close(gemmtune.compile(model, options={"budget": 0.2, "backends": ["aten"]})(x), model(x))
    assert own_store.decisions(gemmtune.current_target())
    assert (len(graphs) == 1) is ahead


def test_training_graphs_are_tuned_by_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[Any] = []
    monkeypatch.setattr(graph_pass.ProductPass, "tune_ahead", lambda _, graph: ahead.append(graph))
    model, x = Mlp().train(), torch.randn(3, 64)
    gemmtune.compile(model, options={"policy": "cached"})(x).sum().backward()
    assert ahead == []
