"""Weights that optimize(memory=2) keeps raw and packed: each M is served by its form, and both have the same values."""

from __future__ import annotations

import copy
import importlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import gemmtune
from gemmtune import fuse
from gemmtune.backends.aten import AtenBackend
from gemmtune.core.checks import GradError
from gemmtune.core.devices import CPU
from gemmtune.core.errors import PackedWeightError
from gemmtune.core.problem import Problem
from gemmtune.core.weights import PackedWeight
from gemmtune.dispatch import RUNTIME, policy
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.nn.packed_tensor import PackedTensor
from gemmtune.store import MemoryStore
from helpers.plans import PLAIN_S, SimulatedKernel, planted_plan
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy
from helpers.torchao_modules import REASON, SKIPPED
from helpers.tuned_models import Mlp

optimize_module: Any = importlib.import_module("gemmtune.nn.optimize")

SIZES = (1, 8, 32, 64)
SLOW = range(9, 64)  # the M that the raw form serves: of the measured ones, the packed kernel is slower at 32
PACKED = SimulatedKernel(toy("plain"), lambda m: (1.5 if m == 32 else 0.5) * PLAIN_S(m), "toy:plain")
RAW = SimulatedKernel(toy(""), lambda m: 0.8 * PLAIN_S(m))


def store_plan(problem: Problem, store: MemoryStore, raw_kernel: bool = False) -> None:
    """Store a plan of a weight whose packed kernel is slower than plain PyTorch at M = 32. raw_kernel: whether a kernel
    serves the raw weight, too."""
    plain = SimulatedKernel(AtenBackend().default_candidate(problem), PLAIN_S)
    raw = RAW if raw_kernel else plain
    plan = planted_plan(
        problem, [PACKED, RAW] if raw_kernel else [PACKED], {"toy:plain": [(1, 64, PACKED)], "": [(1, 64, raw)]}, SIZES,
        target_key=gemmtune.current_target().key, plain=plain,
    )  # fmt: skip
    store.put_plan(gemmtune.current_target(), plan)
    RUNTIME.refresh(store)


def planned(model: nn.Module, store: MemoryStore, x: Tensor, raw_kernel: bool = False) -> nn.Module:
    """Return the frozen model, and store a plan for each weight that ``model(x)`` multiplies by."""
    register()
    model.eval().requires_grad_(False)
    with gemmtune.record() as recording:
        model(x)
    for problem, _ in recording.problems:
        store_plan(problem, store, raw_kernel)
    return model


def two_forms(model: nn.Module, x: Tensor) -> gemmtune.Handle:
    handle = gemmtune.optimize(model, x, tune=False, memory=2)
    assert set(handle.swapped.values()) == {"toy:plain"}
    assert handle.left == {}
    return handle


X = torch.randn(3, 8)


@pytest.fixture
def plain(own_store: MemoryStore) -> nn.Module:
    torch.manual_seed(0)
    return planned(Mlp(), own_store, X)


@pytest.fixture
def model(plain: nn.Module) -> nn.Module:
    served = copy.deepcopy(plain)
    two_forms(served, X)
    return served


def packed_rows(model: nn.Module, x: Tensor) -> list[int]:
    """Return the rows of each product that a packed kernel computed in a call of the model."""
    TOY_RUNS.clear()
    with torch.no_grad():
        model(x)
    return [rows for name, _, rows in TOY_RUNS if name == toy("plain").id]


def assert_serves(model: nn.Module, plain: nn.Module, sizes: Any = (1, 8, 9, 32, 63, 64, 200)) -> None:
    """Assert that the model has the values of the plain one at some M, by the form for each M, at a second call too."""
    for m in (*sizes, *sizes):
        x = torch.randn(m, 8)
        assert packed_rows(model, x) == ([] if m in SLOW else [m, m])
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def assert_forms_agree(weight: Tensor) -> None:
    assert isinstance(weight, PackedTensor)
    assert weight.raw_weight is not None
    assert torch.equal(gemmtune.unpack(weight.packed), weight.raw_weight)  # type: ignore[arg-type]
    assert weight.packed.raw is weight.raw_weight


# --- what serves


def test_each_m_is_served_by_the_form_of_the_plan(model: nn.Module, plain: nn.Module) -> None:
    assert_serves(model, plain)


def test_every_m_gives_the_result_of_plain_pytorch(model: nn.Module, plain: nn.Module) -> None:
    for m in range(1, 70):
        x = torch.randn(m, 8)
        assert packed_rows(model, x) == ([] if m in SLOW else [m, m])
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_kernels_of_the_plan_serve_the_raw_form(plain: nn.Module, own_store: MemoryStore) -> None:
    model = planned(copy.deepcopy(plain), own_store, X, raw_kernel=True)
    two_forms(model, X)
    for m, name in ((8, toy("plain").id), (32, toy("").id), (32, toy("").id), (64, toy("plain").id)):
        TOY_RUNS.clear()
        x = torch.randn(m, 8)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        assert {run[0] for run in TOY_RUNS} == {name}


def test_a_hit_does_not_choose_the_form_again(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [torch.randn(m, 8) for m in (8, 32)]
    wanted = [model(x) for x in xs]
    monkeypatch.setattr(RUNTIME, "forms", lambda *_: pytest.fail("the entry of this M is cached"))
    for x, result in zip(xs, wanted, strict=True):
        assert torch.equal(model(x), result)


def test_batches_count_all_their_rows(model: nn.Module, plain: nn.Module) -> None:
    for shape, m in (((2, 4, 8), 8), ((4, 8, 8), 32), ((8,), 1)):
        x = torch.randn(shape)
        assert packed_rows(model, x) == ([] if m in SLOW else [m, m])
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_decisions_at_single_m_choose_the_form(own_store: MemoryStore) -> None:
    register()
    model = nn.Sequential(nn.Linear(8, 16)).eval().requires_grad_(False)
    with gemmtune.record() as recording:
        model(X)
    problem = recording.problems[0][0]
    for m, seconds in ((3, 0.1), (8, 0.1), (32, 1.5)):
        store_decision(own_store, problem.with_m(m), evidence(toy("plain"), seconds, seconds), chosen=toy("plain"))
    examples = [X, torch.randn(32, 8)]
    assert gemmtune.optimize(copy.deepcopy(model), examples, tune=False).left == {}
    gemmtune.optimize(model, examples, tune=False, memory=2)
    served = {m: packed_rows(model, torch.randn(m, 8)) for m in (3, 8, 9, 32, 100)}
    assert served == {3: [3], 8: [8], 9: [], 32: [], 100: []}


def test_policy_off_serves_the_packed_form(model: nn.Module, verified: None) -> None:
    with policy("off"):
        TOY_RUNS.clear()
        model(torch.randn(32, 8))
        assert {rows for _, _, rows in TOY_RUNS} == {32}


class Multiplied(nn.Module):
    """A weight [K, N] as ``matmul`` takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.shift = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.shift, x, self.table)


def test_transposed_weight_has_two_forms(own_store: MemoryStore) -> None:
    model = planned(Multiplied(), own_store, X)
    plain = copy.deepcopy(model)
    handle = two_forms(model, X)
    for m in (8, 32):
        x = torch.randn(m, 8)
        assert packed_rows(model, x) == ([] if m in SLOW else [m])
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        model.table.mul_(2)
        plain.table.mul_(2)
    for m in (8, 32):
        x = torch.randn(m, 8)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    handle.restore()
    assert torch.equal(model.table, plain.table)


# --- memory


@pytest.mark.parametrize("memory", [1.0, 1.25, 1.99])
def test_less_memory_keeps_one_form(memory: float, plain: nn.Module) -> None:
    handle = gemmtune.optimize(plain, X, tune=False, memory=memory)
    assert set(handle.left.values()) == {"plain PyTorch is best"}


@pytest.mark.parametrize(("memory", "fits"), [(2, False), (2.3, False), (2.5, True)])
def test_memory_limits_the_packed_form(
    memory: float, fits: bool, plain: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout that takes 1.8 times the raw weight's bytes."""
    monkeypatch.setattr(PackedWeight, "nbytes", property(lambda packed: int(1.8 * 4 * packed.n * packed.k)))
    handle = gemmtune.optimize(plain, X, tune=False, memory=memory)
    assert len(handle.swapped) == (2 if fits else 0)
    assert all("times the raw weight's bytes" in reason for reason in handle.left.values())


def test_raw_form_counts_as_memory_and_is_the_original(plain: nn.Module) -> None:
    address, raw_bytes = plain.up.weight.data_ptr(), plain.up.weight.nbytes
    two_forms(plain, X)
    weight = plain.up.weight
    assert isinstance(weight, PackedTensor)
    assert weight.raw_weight is not None
    assert weight.raw_weight.data_ptr() == address
    assert weight.packed.nbytes == 2 * raw_bytes


def test_one_form_is_kept_where_the_packed_one_is_nowhere_slower(plain: nn.Module, own_store: MemoryStore) -> None:
    with gemmtune.record() as recording:
        plain(X)
    for problem, _ in recording.problems:
        fast = SimulatedKernel(toy("plain"), lambda m: 0.5 * PLAIN_S(m), "toy:plain")
        aten = SimulatedKernel(AtenBackend().default_candidate(problem), PLAIN_S)
        spans = {"toy:plain": [(1, 64, fast)], "": [(1, 64, aten)]}
        target = gemmtune.current_target()
        own_store.put_plan(target, planted_plan(problem, [fast], spans, SIZES, target_key=target.key, plain=aten))
    two_forms(plain, X)
    weight = plain.up.weight
    assert isinstance(weight, PackedTensor)
    assert weight.raw_weight is None


# --- values


@pytest.mark.parametrize("write", [
    lambda w: w.mul_(2), lambda w: w.copy_(torch.ones(16, 8)), lambda w: w.data.add_(1), nn.init.zeros_,
    lambda w: torch._foreach_mul_([w], 3), lambda w: w.set_(torch.ones(16, 8)),
])  # fmt: skip
def test_writes_reach_both_forms(write: Any, model: nn.Module, plain: nn.Module) -> None:
    with torch.no_grad():
        write(model.up.weight)
        write(plain.up.weight)
    assert_forms_agree(model.up.weight)
    assert_serves(model, plain, (8, 32))


@pytest.mark.parametrize("write", [lambda w: w.resize_(8, 8), lambda w: w[0].zero_(), lambda w: w.t_()])
def test_refused_writes_change_neither_form(write: Any, model: nn.Module, plain: nn.Module) -> None:
    with torch.no_grad(), pytest.raises(PackedWeightError):
        write(model.up.weight)
    assert_forms_agree(model.up.weight)
    assert_serves(model, plain, (8, 32))


def test_state_dict_has_the_values_and_loads_into_both_forms(model: nn.Module, plain: nn.Module) -> None:
    state = model.state_dict()
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(plain.state_dict(), Tensor)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    state["up.weight"].zero_()  # a copy
    assert_serves(model, plain, (8, 32))
    other = Mlp().eval()
    model.load_state_dict(other.state_dict())
    assert_forms_agree(model.up.weight)
    assert_serves(model, other, (8, 32))


def pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("called_before", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_have_both_forms_of_their_own(
    copied: Any, called_before: bool, model: nn.Module, plain: nn.Module
) -> None:
    if called_before:
        model(torch.randn(32, 8))
    other = copied(model)
    assert_forms_agree(other.up.weight)
    with torch.no_grad():
        other.up.weight.zero_()
    assert_forms_agree(other.up.weight)
    assert_serves(model, plain, (8, 32))


def test_weight_moves_to_shared_memory_with_both_forms(model: nn.Module, plain: nn.Module) -> None:
    model.up.weight.share_memory_()
    weight = model.up.weight
    assert isinstance(weight, PackedTensor)
    assert weight.raw_weight is not None
    assert weight.raw_weight.is_shared()
    assert_serves(model, plain, (8, 32))


def test_restore_gives_the_ordinary_parameter_back(plain: nn.Module) -> None:
    model = copy.deepcopy(plain)
    handle = two_forms(model, X)
    with torch.no_grad():
        model.up.weight.add_(1)
    handle.restore()
    assert type(model.up.weight) is nn.Parameter
    assert torch.equal(model.up.weight, plain.up.weight + 1)
    assert torch.equal(model.down.weight, plain.down.weight)


def test_conversion_to_another_dtype_gives_an_ordinary_parameter(model: nn.Module, plain: nn.Module) -> None:
    assert torch.equal(model.double().up.weight, plain.double().up.weight)


def test_timing_of_the_whole_model_swaps_the_forms(plain: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimize_module, "compare_forms", lambda calls, set_form, devices: [set_form(False), None][1])
    model = copy.deepcopy(plain)
    gemmtune.optimize(model, X, tune=False, memory=2, compare=True)
    assert_forms_agree(model.up.weight)
    assert_serves(model, plain, (8, 32))


# --- graphs, gradients, autocast


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_graphs_serve_each_m_by_its_form(
    dynamic: bool, model: nn.Module, plain: nn.Module, fresh_compiler: None
) -> None:
    assert_serves(torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=dynamic), plain, (8, 32))


def test_exported_program_serves_each_m_by_its_form(model: nn.Module, plain: nn.Module) -> None:
    rows = torch.export.Dim("rows", min=2, max=100)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(8, 8),), dynamic_shapes=({0: rows},))
    assert_serves(program.module(), plain, (8, 32))


def test_gradient_of_the_input_is_that_of_the_plain_model(model: nn.Module, plain: nn.Module) -> None:
    for m in (8, 32):
        x = torch.randn(m, 8, requires_grad=True)
        (wanted,) = torch.autograd.grad(plain(x).sum(), x)
        (got,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_no_form_has_a_gradient_in_ops(model: nn.Module) -> None:
    for m in (8, 32):
        with pytest.raises(GradError, match="packed weight"):
            gemmtune.linear(torch.randn(m, 8, requires_grad=True), model.up.weight.packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_autocast_computes_in_one_dtype_at_each_m(dtype: torch.dtype, model: nn.Module, plain: nn.Module) -> None:
    for m in (8, 32):
        x = torch.randn(m, 8)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            wanted, got = plain(x), model(x)
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)
            assert gemmtune.linear(x, model.up.weight.packed).dtype == torch.float32


def test_graph_capture_uses_what_is_loaded(model: nn.Module, plain: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a graph is captured nothing is cached, and no kernel is loaded."""
    assert_serves(model, plain, (8,))
    monkeypatch.setattr("gemmtune.core.devices.is_capturing", lambda device: True)
    before = len(DISPATCH_CACHE)
    assert packed_rows(model, torch.randn(32, 8)) == []
    assert len(DISPATCH_CACHE) == before
    RUNTIME.refresh()
    x = torch.randn(32, 8)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)


def test_kernels_of_both_forms_are_preloaded_on_a_gpu(plain: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[tuple[int, str | None]] = []
    monkeypatch.setattr(optimize_module, "is_host", lambda device: False)
    monkeypatch.setattr(RUNTIME, "preload", lambda problem, packing, device: loaded.append((problem.n, packing)))
    two_forms(plain, X)
    assert set(loaded) == {(n, layout) for n in (8, 16) for layout in ("toy:plain", None)}


def test_fake_operands_have_fake_results(model: nn.Module) -> None:
    packed = model.up.weight.packed
    with FakeTensorMode(), torch.no_grad():
        for m in (8, 32):
            assert gemmtune.linear(torch.empty(m, 8), packed, torch.empty(16)).shape == (m, 16)


# --- ops


def packed_pair(weight: Tensor) -> PackedWeight:
    """Return a weight [N, K] in both forms."""
    packed = gemmtune.pack(weight, layout="toy:plain")
    return PackedWeight(packed.layout, packed.data, packed.n, packed.k, packed.dtype, machine=packed.machine,
                        raw_order=packed.raw_order, raw=weight)  # fmt: skip


def store_plan_of(call: Any, store: MemoryStore) -> None:
    """Store a plan for the Problem that a call of an op with a packed weight has."""
    register()
    with gemmtune.record() as recording:
        call()
    store_plan(recording.problems[0][0], store)


OPS: dict[str, tuple[torch.dtype, Any]] = {
    "linear": (torch.float32, lambda x, w, **o: gemmtune.linear(x, w, torch.ones(16), **o)),
    "mm": (torch.float32, gemmtune.mm),
    "addmm": (torch.float32, lambda x, w, **o: gemmtune.addmm(torch.ones(16), x, w, beta=2, **o)),
    "int_mm": (torch.int8, gemmtune.int_mm),
}


@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("name", list(OPS))
def test_ops_serve_each_m_by_its_form(name: str, with_out: bool, own_store: MemoryStore) -> None:
    register()
    dtype, op = OPS[name]
    weight = torch.randint(-4, 5, (16, 8)).to(dtype)
    packed, raw = packed_pair(weight), weight if name == "linear" else weight.t()
    store_plan_of(lambda: op(torch.ones(8, 8, dtype=dtype), packed), own_store)
    for m in (8, 32, 8, 32):
        x = torch.randint(-4, 5, (m, 8)).to(dtype)
        wanted = op(x, raw)
        options = {"out": torch.empty_like(wanted)} if with_out else {}
        TOY_RUNS.clear()
        assert torch.equal(op(x, packed, **options), wanted)
        assert [rows for _, _, rows in TOY_RUNS] == ([] if m == 32 else [m])
        assert all(torch.equal(out, wanted) for out in options.values())


@pytest.mark.parametrize("name", ["linear", "int_mm"])
def test_epilogues_are_computed_behind_either_form(name: str, own_store: MemoryStore) -> None:
    register()
    dtype = OPS[name][0]
    weight = torch.randint(-4, 5, (16, 8)).to(dtype)
    packed, steps = packed_pair(weight), [fuse.scale(0.5), fuse.relu()]

    def run(x: Tensor, w: Any) -> Tensor:
        if name == "linear":
            return gemmtune.linear(x, w, epilogue=steps)
        return gemmtune.int_mm(x, w, epilogue=steps, out_dtype=torch.float32)

    store_plan_of(lambda: run(torch.ones(8, 8, dtype=dtype), packed), own_store)
    for m in (8, 32, 32):
        x = torch.randint(-4, 5, (m, 8)).to(dtype)
        TOY_RUNS.clear()
        torch.testing.assert_close(run(x, packed), F.relu(0.5 * (x.float() @ weight.t().float())))
        assert bool(TOY_RUNS) == (m == 8)


def test_raw_form_of_unusual_strides_does_not_serve(own_store: MemoryStore) -> None:
    """It is another Problem than the one that was tuned."""
    register()
    weight = torch.randn(16, 12)[:, :8]
    packed = packed_pair(weight)
    store_plan_of(lambda: gemmtune.linear(torch.randn(8, 8), packed), own_store)
    x = torch.randn(32, 8)
    TOY_RUNS.clear()
    torch.testing.assert_close(gemmtune.linear(x, packed), F.linear(x, weight), rtol=1e-4, atol=1e-5)
    assert [rows for _, _, rows in TOY_RUNS] == [32]


def test_raw_form_of_another_weight_is_refused() -> None:
    register()
    packed = gemmtune.pack(torch.randn(16, 8), layout="toy:plain")
    for raw in (torch.randn(8, 16), torch.randn(16, 8).double()):
        with pytest.raises(ValueError, match="another weight"):
            PackedWeight(packed.layout, packed.data, 16, 8, "float32", raw=raw)
    with pytest.raises(TypeError, match="subclass"):
        PackedWeight(packed.layout, packed.data, 16, 8, "float32", raw=PackedTensor.of(packed))


def test_raw_form_is_served_on_its_device_only(model: nn.Module) -> None:
    problem = gemmtune.ops.linear.describe(torch.randn(32, 8), model.up.weight.packed, torch.randn(16)).problem
    forms = RUNTIME.forms(problem, model.up.weight.packed, CPU)
    assert forms is not None
    assert forms.is_raw(32)
    assert RUNTIME.forms(problem, model.up.weight.packed, torch.device("meta")) is None


# --- quantised weights


@pytest.fixture
def quantised(own_store: MemoryStore) -> tuple[nn.Module, nn.Module]:
    """Return a model that torchao quantised to int8 weights and activations, and a copy that keeps both forms."""
    ao = pytest.importorskip("torchao.quantization", reason=REASON, exc_type=SKIPPED)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(32, 48)).eval()
    ao.quantize_(plain, ao.Int8DynamicActivationInt8WeightConfig())
    planned(plain, own_store, torch.randn(3, 32))
    model = copy.deepcopy(plain)
    two_forms(model, torch.randn(3, 32))
    return model, plain


def assert_serves_quantised(model: nn.Module, plain: nn.Module) -> None:
    for m in (8, 32, 8, 32):
        x = torch.randn(m, 32)
        assert packed_rows(model, x) == ([] if m in SLOW else [m])
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


def test_int8_weight_has_two_forms(quantised: tuple[nn.Module, nn.Module]) -> None:
    model, plain = quantised
    assert_serves_quantised(model, plain)
    assert_serves_quantised(copy.deepcopy(model), plain)
    assert type(model.state_dict()["0.weight"]) is type(plain[0].weight)  # type: ignore[index]


def test_compiled_int8_weight_has_two_forms(quantised: tuple[nn.Module, nn.Module], fresh_compiler: None) -> None:
    model, plain = quantised
    assert_serves_quantised(torch.compile(model, backend="aot_eager", fullgraph=True), plain)


def test_loaded_int8_values_reach_both_forms(quantised: tuple[nn.Module, nn.Module]) -> None:
    model, _ = quantised
    ao = pytest.importorskip("torchao.quantization", reason=REASON, exc_type=SKIPPED)
    other = nn.Sequential(nn.Linear(32, 48)).eval()
    ao.quantize_(other, ao.Int8DynamicActivationInt8WeightConfig())
    model.load_state_dict(other.state_dict())
    assert_serves_quantised(model, other)


def test_restored_int8_weight_is_that_of_torchao(own_store: MemoryStore) -> None:
    ao = pytest.importorskip("torchao.quantization", reason=REASON, exc_type=SKIPPED)
    model = nn.Sequential(nn.Linear(32, 48)).eval()
    ao.quantize_(model, ao.Int8DynamicActivationInt8WeightConfig())
    planned(model, own_store, torch.randn(3, 32))
    x = torch.randn(5, 32)
    wanted, before = model(x), type(model[0].weight)
    handle = two_forms(model, torch.randn(3, 32))
    handle.restore()
    assert type(model[0].weight) is before
    torch.testing.assert_close(model(x), wanted)


def test_weight_only_weight_has_one_form(own_store: MemoryStore) -> None:
    ao = pytest.importorskip("torchao.quantization", reason=REASON, exc_type=SKIPPED)
    model = nn.Sequential(nn.Linear(32, 48)).eval()
    ao.quantize_(model, ao.Int8WeightOnlyConfig())
    planned(model, own_store, torch.randn(3, 32))
    handle = gemmtune.optimize(model, torch.randn(3, 32), tune=False, memory=2)
    assert set(handle.swapped.values()) <= {"raw"}
