"""Tests that a PackedTensor behaves as a tensor: it is read, written, copied, saved, traced and exported."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import gemmtune
from gemmtune.core.checks import GradError
from gemmtune.core.errors import PackedWeightError
from gemmtune.dispatch import RUNTIME
from gemmtune.nn.packed_tensor import PackedTensor, swap_tensors

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

K, N = 40, 24


def assert_close(got: Tensor, wanted: Tensor) -> None:
    scale = 2e-2 if wanted.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(got, wanted, rtol=scale, atol=scale)


class TwoLinears(nn.Module):
    """Model of two linears, whose weights ``packed`` packs as ``optimize`` does."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(K, N, dtype=dtype), nn.Linear(N, K, bias=False, dtype=dtype)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def with_packed_weights(model: nn.Module, keep_raw: bool = False) -> nn.Module:
    """Replace the weight of every linear by a packed Parameter, and return the model."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            raw = weight.detach() if keep_raw else None
            swap_tensors(weight, nn.Parameter(PackedTensor.of(gemmtune.pack(weight), raw), weight.requires_grad))
    return model


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    param: torch.dtype = request.param
    return param


@pytest.fixture
def plain(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return TwoLinears(dtype)


@pytest.fixture
def model(plain: nn.Module) -> nn.Module:
    return with_packed_weights(copy.deepcopy(plain))


@pytest.fixture
def x(dtype: torch.dtype) -> Tensor:
    return torch.randn(3, K, dtype=dtype)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which every packed product appends an entry."""
    products_run: list[str] = []
    import gemmtune.nn.packed_ops as ops
    import gemmtune.nn.packed_products as products

    original = products.linear

    def counting_linear(*args: Any) -> Tensor:
        products_run.append("op")
        return original(*args)

    monkeypatch.setattr(products, "linear", counting_linear)
    monkeypatch.setattr(ops, "linear", counting_linear)
    monkeypatch.setattr(products, "lookup", lambda *_: None)
    return products_run


def test_a_packed_parameter_keeps_name_shape_dtype_strides_and_values(plain: nn.Module, model: nn.Module) -> None:
    for (name, was), (other, now) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert isinstance(now, nn.Parameter)
        assert (now.shape, now.dtype, now.device, now.stride()) == (was.shape, was.dtype, was.device, was.stride())
        assert torch.equal(now, was)
    assert type(model.up) is nn.Linear
    assert isinstance(model.up.weight, PackedTensor)


def test_packed_products_are_served(plain: nn.Module, model: nn.Module, x: Tensor, served: list[str]) -> None:
    with torch.no_grad():
        assert_close(model(x), plain(x))
    assert len(served) == 2


def test_a_second_call_hits_the_dispatch_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    import gemmtune.nn.packed_products as module

    model, x = with_packed_weights(TwoLinears()), torch.randn(3, K)
    wanted = model(x)
    monkeypatch.setattr(module, "linear", lambda *_: pytest.fail("the key is not the one of ops.linear"))
    assert torch.equal(model(x), wanted)


def test_packing_and_unpacking_preserve_the_identity_of_the_parameter() -> None:
    layer = nn.Linear(K, N)
    weight, values = layer.weight, layer.weight.detach().clone()
    swap_tensors(weight, nn.Parameter(PackedTensor.of(gemmtune.pack(weight))))
    assert layer.weight is weight
    assert isinstance(weight, PackedTensor)
    swap_tensors(weight, nn.Parameter(weight.unpacked()))
    assert layer.weight is weight
    assert type(weight) is nn.Parameter
    assert torch.equal(weight, values)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: _reloaded(m),
}


def _reloaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


@pytest.mark.parametrize("method", COPIES)
def test_a_copy_is_packed_and_independent_of_the_original(
    method: str, plain: nn.Module, model: nn.Module, x: Tensor
) -> None:
    other = COPIES[method](model)
    assert isinstance(other.up.weight, PackedTensor)
    with torch.no_grad():
        other.up.weight.mul_(2)
        assert_close(model(x), plain(x))
        plain.up.weight.mul_(2)
        assert_close(other(x), plain(x))


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "mul_": lambda w: w.mul_(2),
    "add_ to .data": lambda w: w.data.add_(1),
    ".data +=": lambda w: exec("w.data += 1", {"w": w}),
    "copy_": lambda w: w.copy_(torch.full_like(w, 0.5)),
    "detach().zero_": lambda w: w.detach().zero_(),
    "init.ones_": nn.init.ones_,
    "fill_": lambda w: w.fill_(0.25),
    "addcmul_": lambda w: w.addcmul_(torch.ones(w.shape, dtype=w.dtype), torch.ones(w.shape, dtype=w.dtype)),
    "out=": lambda w: torch.mul(torch.ones(w.shape, dtype=w.dtype), 3, out=w),
    ".data =": lambda w: setattr(w, "data", torch.full(w.shape, 0.125, dtype=w.dtype)),
    "_foreach_mul_": lambda w: torch._foreach_mul_([w], 3.0),
}


@pytest.mark.parametrize("keep_raw", [False, True], ids=["", "beside the raw weight"])
@pytest.mark.parametrize("write", WRITES)
def test_in_place_writes_change_the_packed_weight(write: str, keep_raw: bool, plain: nn.Module, x: Tensor) -> None:
    model = with_packed_weights(copy.deepcopy(plain), keep_raw)
    with torch.no_grad():
        for each in (plain, model):
            version = each.up.weight._version
            WRITES[write](each.up.weight)
            assert each.up.weight._version > version or "data" in write or "detach" in write
        assert torch.equal(model.up.weight, plain.up.weight)
        assert_close(model(x), plain(x))


@pytest.mark.parametrize(
    "write",
    [lambda w: w[0].zero_(), lambda w: w.t()[0].mul_(2), lambda w: w.view(-1).fill_(1), lambda w: w.chunk(2)[1].add_(1),
     lambda w: w[:, :3].copy_(w[:, 3:6])],
)  # fmt: skip
def test_in_place_writes_to_views_are_refused(
    write: Callable[[Tensor], Any], plain: nn.Module, model: nn.Module
) -> None:
    with torch.no_grad(), pytest.raises(PackedWeightError, match=r"restore\(\)"):
        write(model.up.weight)
    assert torch.equal(model.up.weight, plain.up.weight)


def test_indexed_assignment_is_refused(plain: nn.Module, model: nn.Module) -> None:
    with torch.no_grad(), pytest.raises(PackedWeightError, match=r"restore\(\)"):
        model.up.weight[0] = 1.0
    assert torch.equal(model.up.weight, plain.up.weight)


@pytest.mark.parametrize("tracer", ["compile", "export", "make_fx"])
def test_traced_reads_of_views_work_and_traced_writes_are_refused(tracer: str, model: nn.Module, x: Tensor) -> None:
    class Viewing(nn.Module):
        def __init__(self, write: bool) -> None:
            super().__init__()
            self.up, self.write = model.up, write

        def forward(self, x: Tensor) -> Tensor:
            rows = self.up.weight[:2]
            return x @ (rows.zero_() if self.write else rows.view(-1, K)).t()

    with torch.no_grad():
        wanted = x @ model.up.weight[:2].t()
        assert_close(TRACERS[tracer](Viewing(False), x)(x), wanted)
        with pytest.raises(Exception, match=r"restore\(\)"):  # PackedWeightError, which torch.compile wraps
            TRACERS[tracer](Viewing(True), x)(x)


READS: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda w: w[1], "t": lambda w: w.t() + 0, "sum": lambda w: w.double().sum(), "tolist": lambda w: w.tolist(),
    "chunk": lambda w: w.chunk(2)[0], "norm": lambda w: w.norm(), "cat": lambda w: torch.cat([w, w]),
    "clone": lambda w: w.clone(), "cpu": lambda w: w.cpu(), "float": lambda w: w.float(),
    "einsum": lambda w: torch.einsum("nk->k", w),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_reads_return_the_values_of_the_weight(read: str, plain: nn.Module, model: nn.Module) -> None:
    got, wanted = READS[read](model.up.weight), READS[read](plain.up.weight)
    assert got == wanted if isinstance(got, list) else torch.equal(got, wanted)


def test_assigning_packed_data_also_replaces_the_raw_weight() -> None:
    one, other = (nn.Linear(K, N, bias=False).requires_grad_(False) for _ in range(2))
    values, x = other.weight.clone(), torch.randn(3, K)
    with_packed_weights(one, keep_raw=True)
    with_packed_weights(other)
    one.weight.data = other.weight.data
    assert torch.equal(one.weight, values)
    assert_close(one(x), x @ values.t())


def test_numpy_returns_a_read_only_array() -> None:
    model = with_packed_weights(TwoLinears())
    array = model.up.weight.numpy()
    assert not array.flags.writeable
    assert torch.equal(torch.tensor(array), model.up.weight)


def test_a_packed_weight_can_be_moved_to_shared_memory() -> None:
    model = with_packed_weights(TwoLinears())
    x = torch.randn(2, K)
    wanted = model(x)
    model.share_memory()
    assert all(part.is_shared() for part in model.up.weight.parts)
    assert torch.equal(model(x), wanted)


CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda m: m.half(), "double": lambda m: m.double(), "to": lambda m: m.to(torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_dtype_conversions_unpack_the_weight(conversion: str, plain: nn.Module, model: nn.Module) -> None:
    weight = model.up.weight
    CONVERSIONS[conversion](plain), CONVERSIONS[conversion](model)
    assert model.up.weight is weight
    assert type(weight) is nn.Parameter
    x = torch.randn(2, K).to(plain.up.weight.dtype)
    assert_close(model(x), plain(x))


def test_moves_to_the_current_device_and_dtype_keep_the_weight_packed(model: nn.Module, x: Tensor) -> None:
    wanted = model(x)
    for moved in (model.to("cpu"), model.cpu(), model.to(x.dtype), model.requires_grad_(False), model.eval()):
        assert isinstance(moved.up.weight, PackedTensor)
    assert torch.equal(model(x), wanted)


TRACERS: dict[str, Callable[[nn.Module, Tensor], Callable[[Tensor], Tensor]]] = {
    "make_fx": lambda m, x: make_fx(lambda t: m(t))(x),
    "make_fx symbolic": lambda m, x: make_fx(lambda t: m(t), tracing_mode="symbolic", _allow_non_fake_inputs=True)(x),
    "jit.trace": lambda m, x: torch.jit.trace(m, x),
    "fx": lambda m, _: torch.fx.symbolic_trace(m),
    "functionalize": lambda m, _: torch.func.functionalize(m),
    "functional_call": lambda m, _: lambda t: torch.func.functional_call(m, dict(m.named_parameters()), (t,)),
    "vmap": lambda m, _: torch.vmap(m),
    "compile": lambda m, _: torch.compile(m, fullgraph=True, backend="aot_eager"),
    "compile dynamic": lambda m, _: torch.compile(m, fullgraph=True, backend="aot_eager", dynamic=True),
    "export": lambda m, x: torch.export.export(m, (x,)).module(),
    "export strict": lambda m, x: torch.export.export(m, (x,), strict=True).module(),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # torch 2.15 itself uses what it warns of
@pytest.mark.parametrize("keep_raw", [False, True], ids=["", "beside the raw weight"])
@pytest.mark.parametrize("tracer", TRACERS)
def test_traced_and_transformed_models_compute_the_reference_result(
    tracer: str, keep_raw: bool, plain: nn.Module, x: Tensor
) -> None:
    model = with_packed_weights(copy.deepcopy(plain), keep_raw)
    with torch.no_grad():
        traced = TRACERS[tracer](model, x)
        assert_close(traced(x), plain(x))
        other = torch.randn_like(x)
        assert_close(traced(other), plain(other))


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # torch 2.15 itself uses what it warns of
def test_jvp_and_grad_of_the_input_agree_with_the_reference(plain: nn.Module, model: nn.Module, x: Tensor) -> None:
    wanted = torch.func.jvp(plain, (x,), (x,))
    assert_close(torch.func.jvp(model, (x,), (x,))[1], wanted[1])
    assert_close(torch.func.grad(lambda t: model(t).sum())(x), torch.func.grad(lambda t: plain(t).sum())(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_backward_computes_the_gradients_of_the_input_and_the_bias(
    plain: nn.Module, model: nn.Module, x: Tensor, compiled: bool
) -> None:
    gradients = []
    for each in (plain, model):
        each.up.bias.requires_grad_(True)
        function = torch.compile(each, backend="aot_eager", fullgraph=True) if compiled else each
        leaf = x.clone().requires_grad_(True)
        function(leaf).float().square().sum().backward()
        gradients.append((leaf.grad, each.up.bias.grad))
    for wanted, got in zip(*gradients, strict=True):
        assert_close(got / wanted.abs().max(), wanted / wanted.abs().max())


@pytest.mark.parametrize("dims", [2, 3])
def test_results_that_require_grad_may_be_written_in_place(model: nn.Module, x: Tensor, dims: int) -> None:
    leaf = x.clone().requires_grad_(True)
    rows = leaf if dims == 2 else leaf[None]
    F.linear(rows, model.up.weight).add_(1).sum().backward()
    assert leaf.grad is not None


def test_a_packed_weight_that_requires_grad_raises_grad_error(model: nn.Module, x: Tensor) -> None:
    model.up.weight.requires_grad_(True)
    with pytest.raises(GradError, match=r"no_grad\(\)"):
        model(x)
    with torch.no_grad():
        model(x)


@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_autocast_to_the_dtype_of_the_weight_is_served(mode: str, served: list[str]) -> None:
    plain = TwoLinears(torch.bfloat16)
    model, x = with_packed_weights(copy.deepcopy(plain)), torch.randn(3, K)
    function = torch.compile(model, backend="aot_eager", fullgraph=True) if mode == "compile" else model
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = function(x), plain(x)
    assert got.dtype == wanted.dtype == torch.bfloat16
    assert_close(got, wanted)
    assert len(served) == 2


def test_autocast_to_another_dtype_rounds_the_weight(x: Tensor) -> None:
    plain = TwoLinears(torch.float32)
    model = with_packed_weights(copy.deepcopy(plain))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        got, wanted = model(x.float()), plain(x.float())
    assert got.dtype == torch.bfloat16
    assert_close(got, wanted)


def test_invalid_operands_raise() -> None:
    model = with_packed_weights(TwoLinears())
    with pytest.raises((TypeError, RuntimeError, ValueError)):
        model.up(torch.randn(3, K + 1))
    with pytest.raises(TypeError):
        F.linear("x", model.up.weight)  # type: ignore[arg-type]


_LOAD_AND_RUN = """
import sys, torch
import torch._inductor.codecache  # torch 2.10 loads packages with it, and does not import it
import gemmtune, gemmtune.nn
torch.manual_seed(7)
other = gemmtune.pack(torch.randn(24, 40))  # the exported model must not use this packed weight
x = torch.load(sys.argv[2])
path = sys.argv[1]
run = torch._inductor.aoti_load_package(path) if "aoti" in path else torch.export.load(path).module()
torch.save(run(x), sys.argv[3])
"""


class Projections(nn.Module):
    """Model of self-attention's projections and a weight [K, N] as in transformers' Conv1D."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(K, 2, batch_first=True)
        self.table, self.shift = nn.Parameter(torch.randn(K, N)), nn.Parameter(torch.randn(N))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        mixed, _ = self.attention(x[None], x[None], x[None], need_weights=False)
        return torch.addmm(self.shift, mixed[0], self.table)


def packed_projections(model: Projections) -> Projections:
    """Pack the weights of the projections, and return the model."""
    for weight in (model.attention.in_proj_weight, model.attention.out_proj.weight, model.table):
        transposed = weight is model.table
        form = PackedTensor.of(gemmtune.pack(weight.t() if transposed else weight), transposed=transposed)
        swap_tensors(weight, nn.Parameter(form, requires_grad=False))
    return model


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["export", "aoti"])
@pytest.mark.parametrize("weights", ["linears", "projections"])
def test_exported_models_run_in_another_process(kind: str, weights: str, tmp_path: Path) -> None:
    plain: nn.Module = TwoLinears() if weights == "linears" else Projections()
    x = torch.randn(3, K)
    other = copy.deepcopy(plain)
    model = packed_projections(other) if isinstance(other, Projections) else with_packed_weights(other)
    for parameter in model.parameters():
        if isinstance(parameter, PackedTensor):
            parameter.trainable = True  # as optimize() sets it for the weights of a library's model
    package = tmp_path / f"model.{kind}.pt2"
    with torch.no_grad():
        program = torch.export.export(model, (x,))
        if kind == "aoti":
            torch._inductor.aoti_compile_and_package(program, package_path=str(package))
        else:
            torch.export.save(program, package)
    torch.save(x, tmp_path / "x.pt")
    command = [sys.executable, "-c", _LOAD_AND_RUN, package, tmp_path / "x.pt", tmp_path / "y.pt"]
    process = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert_close(torch.load(tmp_path / "y.pt"), plain(x))


def test_an_exported_model_without_gemmtune_fails_with_the_name_of_the_operator(tmp_path: Path) -> None:
    program = torch.export.export(with_packed_weights(TwoLinears()), (torch.randn(3, K),))
    torch.export.save(program, tmp_path / "model.pt2")
    code = (
        "import sys, torch; sys.modules['gemmtune'] = None; "
        f"torch.export.load({str(tmp_path / 'model.pt2')!r}).module()(torch.randn(3, {K}))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode != 0
    assert "gemmtune" in process.stderr


def test_the_state_dict_of_an_optimized_model_has_plain_tensors(own_store: Any) -> None:
    from helpers.tuned_models import prepare_model

    x = torch.randn(3, K)
    model = prepare_model(TwoLinears(), x, own_store)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    handle = gemmtune.optimize(model, x, tune=False)
    assert len(handle.swapped) == 2
    state = model.state_dict()
    assert all(type(value) is Tensor and torch.equal(value, saved[name]) for name, value in state.items())
    with torch.no_grad():
        model.up.weight.mul_(3)
    handle.restore()
    assert torch.equal(model.up.weight, 3 * saved["up.weight"])
    assert torch.equal(model.state_dict()["up.weight"], 3 * saved["up.weight"])


class ReadsItsWeights(TwoLinears):
    def forward(self, x: Tensor) -> Tensor:
        assert self.up.weight.dtype == x.dtype
        return super().forward(x) * self.down.weight.mean()


def test_a_weight_that_forward_reads_is_packed_only_beside_its_raw_copy(own_store: Any) -> None:
    from helpers.tuned_models import prepare_model

    x = torch.randn(3, K)
    model = prepare_model(ReadsItsWeights(), x, own_store)
    handle = gemmtune.optimize(model, x, tune=False)
    assert set(handle.swapped) == {"up"}
    assert "read besides its product, by mean" in handle.left["down"]
    handle.restore()
    wanted = model(x)
    handle = gemmtune.optimize(model, x, tune=False, memory=4)
    assert set(handle.swapped) == {"up", "down"}
    with torch.no_grad():
        assert_close(model(x), wanted)
        model.down.weight.mul_(2)
        assert_close(model(x), 4 * wanted)
    RUNTIME.refresh(own_store)


def test_writes_to_a_tied_weight_change_both_modules(own_store: Any) -> None:
    from helpers.tuned_models import prepare_model

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(N, K), nn.Linear(K, N, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    ids = torch.tensor([1, 5, 2])
    model = prepare_model(Tied(), ids, own_store)
    wanted = model(ids)
    handle = gemmtune.optimize(model, ids, tune=False, memory=4)
    assert set(handle.swapped) == {"head"}
    assert model.embed.weight is model.head.weight
    with torch.no_grad():
        assert_close(model(ids), wanted)
        model.embed.weight.mul_(2)
        assert_close(model(ids), 4 * wanted)
    handle.restore()
    assert_close(model(ids), 4 * wanted)


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_subclass_of_linear_is_served(own_store: Any) -> None:
    from helpers.tuned_models import prepare_model

    x = torch.randn(3, K)
    model = prepare_model(nn.Sequential(Doubling(K, N)), x, own_store)
    wanted = model(x)
    handle = gemmtune.optimize(model, x, tune=False)
    assert set(handle.swapped) == {"0"}
    assert type(model[0]) is Doubling  # type: ignore[index]
    assert_close(model(x), wanted)
