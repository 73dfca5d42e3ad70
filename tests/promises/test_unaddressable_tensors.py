"""Tests that no kernel reads tensors without addressable memory: subclasses, wrappers of transforms, freed storages."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import gemmtune
from gemmtune import backends, fuse
from gemmtune.backends.base import Kernel
from gemmtune.backends.gpu.artifact import Header
from gemmtune.backends.triton.compiler import make_spec
from gemmtune.backends.triton.kernel import Tiled
from gemmtune.core.candidate import Candidate
from gemmtune.core.errors import PackedWeightError
from gemmtune.core.memory import is_addressable, why_not_addressable
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import current_target
from gemmtune.ops.packing import problem_of
from gemmtune.ops.weight_only import _ADAPTERS, WeightOnly, register_weight_only
from helpers.drivers import install_fake_driver
from helpers.serving import register

N, K = 48, 32


class Quantised(Tensor):
    """Wrapper subclass as torchao has them: it owns no memory, and ``linear`` is its only op."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Quantised:
        wrapper: Quantised = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *bias = (arg.inner if isinstance(arg, Quantised) else arg for arg in args)
            return F.linear(x, weight * 2, *bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Quantised(args[0].inner)
        raise NotImplementedError(f"Quantised has no {func}")


class QuantisedWithLookupError(Quantised):
    """``Quantised`` whose other ops raise LookupError instead of NotImplementedError."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return QuantisedWithLookupError(args[0].inner)
        raise LookupError(f"QuantisedWithLookupError has no {func}")


def freed(tensor: Tensor, offset: int = 0) -> Tensor:
    """Return a view of a storage that was resized to 0 bytes, as FSDP does with its flat parameter."""
    flat = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype)
    view = flat[offset:].view(tensor.shape)
    flat.untyped_storage().resize_(0)
    return view


def leaked(tensor: Tensor) -> Tensor:
    """Return the wrapper that vmap passes to its function, after vmap has returned."""
    wrappers: list[Tensor] = []
    torch.vmap(lambda row: (wrappers.append(row), row)[1])(tensor.expand(2, *tensor.shape))
    return wrappers[0]


# Each has the dtype, strides and device of an ordinary tensor.
UNADDRESSABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "subclass": Quantised,
    "parameter of a subclass": lambda t: nn.Parameter(Quantised(t), requires_grad=False),
    "functional": torch._to_functional_tensor,
    "zero": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),  # type: ignore[attr-defined]
    "leaked": leaked,
    "freed": freed,
    "freed part": lambda t: freed(t, 24),
}  # fmt: skip
unaddressable = pytest.mark.parametrize("make", UNADDRESSABLE.values(), ids=UNADDRESSABLE)


@unaddressable
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_pack_refuses_an_unaddressable_weight(make: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=r"pack\(\): weight is .* Give a plain dense tensor"):
        gemmtune.pack(make(torch.ones(N, K, dtype=dtype)))


@unaddressable
@pytest.mark.parametrize("name", ["weight", "scale", "zero_point"])
def test_pack_refuses_an_unaddressable_weight_scale_or_zero_point(make: Callable[[Tensor], Tensor], name: str) -> None:
    operands = {"weight": torch.ones(N, K, dtype=torch.int8), "scale": torch.rand(N), "zero_point": torch.zeros(N)}
    operands[name] = make(operands[name])
    with pytest.raises(TypeError, match=rf"pack\(\): {name} is "):
        gemmtune.pack(operands.pop("weight"), **operands)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [Tensor.to_mkldnn, Tensor.to_sparse, lambda t: t.to("meta"), lambda t: torch.nested.nested_tensor([t])],
    ids=["mkldnn", "sparse", "meta", "nested"],
)
def test_pack_refuses_mkldnn_sparse_meta_and_nested_weights(make: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TypeError, match=r"pack\(\): "):
        gemmtune.pack(make(torch.ones(N, K)))


def test_pack_refuses_a_quantized_tensor() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of torch call it deprecated
        weight = torch.quantize_per_tensor(torch.ones(N, K), 1.0, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"pack\(\): .*qint8"):
        gemmtune.pack(weight)


def test_a_weight_with_the_negative_bit_is_packed_by_value() -> None:
    weight = torch.randn(N, K)
    negated: Tensor = torch._neg_view(weight)
    assert torch.equal(gemmtune.unpack(gemmtune.pack(negated)), -weight)  # type: ignore[arg-type]


def test_pack_refuses_a_weight_that_exceeds_its_storage() -> None:
    weight = torch.randn(N, K)
    weight.untyped_storage().resize_(4 * N * K - 4)
    with pytest.raises(TypeError, match="reaches beyond its storage"):
        gemmtune.pack(weight)


def kernel_of(weight: Tensor) -> Kernel:
    """Return the native kernel that packs a weight."""
    problem, backend = problem_of(weight.t(), 4), backends.get("native")
    candidate = backend.default_packing(problem, current_target())
    assert candidate is not None
    return backend.load(backend.build(problem, candidate, current_target()), problem)


@unaddressable
def test_a_kernel_refuses_to_pack_or_multiply_unaddressable_tensors(make: Callable[[Tensor], Tensor]) -> None:
    """Call ``Kernel.pack`` and ``Kernel.run``, without the checks of the ops before them."""
    weight, x, out = torch.randn(N, K), torch.randn(4, K), torch.empty(4, N)
    kernel = kernel_of(weight)
    packed = kernel.pack(weight.t())
    with pytest.raises(TypeError, match="memory by its address"):
        kernel.pack(make(weight.t()))
    with pytest.raises((TypeError, RuntimeError), match=r"memory by its address|data pointer"):
        kernel.run(make(x), packed, (), out)


@unaddressable
def test_a_packed_weight_refuses_unaddressable_data(make: Callable[[Tensor], Tensor]) -> None:
    packed = gemmtune.pack(torch.randn(N, K))
    with pytest.raises(TypeError, match=r"PackedWeight\('native:.*'\): data\[0\] is "):
        replace(packed, data=(make(packed.data[0]),))
    with pytest.raises(TypeError, match="no tensor but a str"):
        replace(packed, data=("weight",))  # type: ignore[arg-type]


def test_copies_of_a_packed_weight_are_checked_like_new_ones() -> None:
    """A mode or an unpickler may replace the tensors that are copied."""
    weight = torch.randn(N, K)
    packed = gemmtune.pack(weight)
    for duplicate in (copy.copy(packed), copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert duplicate.key == packed.key
        assert duplicate.nbytes == packed.nbytes
        assert torch.equal(gemmtune.unpack(duplicate), weight)  # type: ignore[arg-type]

    class Replacing(pickle.Pickler):
        def persistent_id(self, item: Any) -> Any:
            return "tensor" if isinstance(item, Tensor) else None

    class Restoring(pickle.Unpickler):
        def persistent_load(self, _: Any) -> Any:
            return Quantised(packed.data[0])

    file = io.BytesIO()
    Replacing(file).dump(packed)
    file.seek(0)
    with pytest.raises(TypeError, match="Quantised, a subclass"):
        Restoring(file).load()


def test_unpack_refuses_a_packed_weight_with_too_few_bytes() -> None:
    packed = gemmtune.pack(torch.randn(N, K))
    with pytest.raises(PackedWeightError, match="bytes"):
        gemmtune.unpack(replace(packed, n=N * 64))


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("part", ["input", "bias", "out", "weight"])
@pytest.mark.parametrize("offset", [0, 24])
def test_a_cached_call_refuses_freed_operands(part: str, offset: int) -> None:
    """The guard is true of freed operands: their dtype, strides and dispatch keys are those of the first call."""
    packed = gemmtune.pack(torch.randn(N, K))
    operands = {"input": torch.randn(4, K), "bias": torch.randn(N), "out": torch.empty(4, N)}

    def call() -> Tensor:
        with torch.no_grad():
            return gemmtune.linear(operands["input"], packed, operands["bias"], out=operands["out"])

    call()
    if part == "weight":
        packed.data[0].untyped_storage().resize_(0)
    else:
        operands[part] = freed(operands[part], offset)
    for _ in range(2):
        with pytest.raises(TypeError, match="without memory"):
            call()


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("name", UNADDRESSABLE)
@pytest.mark.parametrize("index", [0, 1], ids=["input", "residual"])
def test_ops_pass_unaddressable_operands_to_torch(name: str, index: int) -> None:
    """PyTorch computes the result or raises its error; no kernel reads the operands by address."""
    weight, operands = torch.randn(N, K), [torch.randn(4, K), torch.randn(4, N)]
    packed = gemmtune.pack(weight)
    gemmtune.linear(operands[0], packed, epilogue=[fuse.add(operands[1])])
    operands[index] = UNADDRESSABLE[name](operands[index])
    for right in (weight, packed):
        if "freed" in name:  # PyTorch's own addition ends the process
            with pytest.raises(TypeError, match="without memory"):
                gemmtune.linear(operands[0], right, epilogue=[fuse.add(operands[1])])
            continue
        if "subclass" in name:  # it implements F.linear alone
            with pytest.raises(NotImplementedError):
                gemmtune.linear(operands[0], right, epilogue=[fuse.add(operands[1])])
            continue
        try:
            wanted = F.linear(operands[0], weight) + operands[1]
        except RuntimeError:
            with pytest.raises((RuntimeError, TypeError)):
                gemmtune.linear(operands[0], right, epilogue=[fuse.add(operands[1])])
        else:
            got = gemmtune.linear(operands[0], right, epilogue=[fuse.add(operands[1])])
            values = torch._from_functional_tensor if name == "functional" else Tensor.clone
            torch.testing.assert_close(values(got), values(wanted))


def test_packed_weights_are_unpacked_into_new_memory_under_functionalize_and_vmap() -> None:
    """Under these transforms torch.empty returns tensors without memory."""
    weight, x = torch.randn(N, K), torch.randn(4, K)
    packed, wanted = gemmtune.pack(weight), F.linear(x, weight)

    def product(rows: Tensor) -> Tensor:
        return gemmtune.linear(rows, packed)

    torch.testing.assert_close(torch.func.functionalize(product)(x), wanted)
    torch.testing.assert_close(torch.vmap(product)(x.view(2, 2, K)), wanted.view(2, 2, N))
    scales, ints = torch.rand(N), torch.ones(N, K, dtype=torch.int8)
    packed_ints = gemmtune.pack(ints, scale=scales)
    got = torch.func.functionalize(lambda rows: gemmtune.mixed_mm(rows, packed_ints))(x)
    torch.testing.assert_close(got, F.linear(x, ints * scales[:, None]))


def test_pack_is_refused_under_functionalize() -> None:
    weight = torch.randn(N, K)
    for weight_of in (lambda rows: rows, lambda rows: weight):
        with pytest.raises(TypeError, match="Functionalize"):
            torch.func.functionalize(lambda rows, weight_of=weight_of: gemmtune.pack(weight_of(rows)))(weight)


class Model(nn.Module):
    """Two linears; the weight of the first is a tensor subclass."""

    def __init__(self, kind: type[Quantised]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(K, K), nn.Linear(K, N)
        self.first.weight = nn.Parameter(kind(self.first.weight.detach()), requires_grad=False)
        self.requires_grad_(False).eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Quantised, QuantisedWithLookupError])
def test_record_skips_products_of_subclasses(kind: type[Quantised]) -> None:
    model, x = Model(kind), torch.randn(4, K)
    wanted = model(x)
    with gemmtune.record() as recorded:
        assert torch.equal(model(x), wanted)
        torch.testing.assert_close(gemmtune.linear(x, model.first.weight, model.first.bias), model.first(x))
        F.linear(kind(x), model.second.weight)
    assert [problem.key for problem, _ in recorded.problems] == [linear_problem(4, N, K, "float32", bias=True).key]


@pytest.mark.parametrize("kind", [Quantised, QuantisedWithLookupError])
def test_optimize_leaves_a_subclass_weight_with_its_type_as_the_reason(kind: type[Quantised]) -> None:
    model, x = Model(kind), torch.randn(4, K)
    wanted = model(x)
    handle = gemmtune.optimize(model, x, tune=False)
    assert handle.left["first"] == f"its weight is a {kind.__module__}.{kind.__name__}, a subclass of torch.Tensor"
    assert "second" in handle.left  # nothing was tuned
    assert torch.equal(model(x), wanted)


class UnusedLinear(nn.Module):
    """Model that does not call its linear: PyTorch cannot call one whose weight has no memory."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(K, N, bias=False)
        self.linear._parameters["weight"] = weight  # type: ignore[assignment]
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return x


@unaddressable
def test_optimize_leaves_an_unaddressable_weight_with_a_reason(make: Callable[[Tensor], Tensor]) -> None:
    handle = gemmtune.optimize(UnusedLinear(make(torch.randn(N, K))), torch.randn(4, K), tune=False)
    assert handle.left["linear"].startswith("its weight is ")


class Adapted(nn.Module):
    """Weight-only linear whose adapter returns scales of a tensor subclass."""

    def forward(self, x: Tensor) -> Tensor:
        return x[..., :1].expand(*x.shape[:-1], N)


def test_tensors_of_a_weight_only_adapter_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.ops.weight_only._ADAPTERS", dict(_ADAPTERS))
    ints = torch.ones(N, K, dtype=torch.int8)
    register_weight_only(Adapted, lambda _: WeightOnly(ints, Quantised(torch.rand(N))))
    module = Adapted()
    module.weight = nn.Parameter(ints, requires_grad=False)
    handle = gemmtune.optimize(nn.Sequential(module).eval(), torch.randn(4, K), tune=False)
    assert handle.left["0"] == f"its scale is a {__name__}.Quantised, a subclass of torch.Tensor"


def test_ordinary_tensors_are_addressable_and_others_are_not() -> None:
    x = torch.randn(4, 6)
    with torch.inference_mode():
        inferred = torch.randn(3)
    for tensor in (x, nn.Parameter(x), x.t(), x[1:, ::2], x.expand(3, 4, 6), x[:0], inferred, torch.empty(0)):
        assert is_addressable(tensor)
        assert why_not_addressable(tensor) == ""
    for name, make in UNADDRESSABLE.items():
        assert not is_addressable(make(x)), name
        assert why_not_addressable(make(x)), name


def test_pack_refuses_a_subclass_for_a_layout_of_any_backend() -> None:
    register()
    assert gemmtune.pack(torch.randn(5, 4), layout="toy:plain").layout == "toy:plain"
    with pytest.raises(TypeError, match=r"pack\(\): weight is "):
        gemmtune.pack(Quantised(torch.randn(5, 4)), layout="toy:plain")


@pytest.mark.parametrize("part", ["a", "b", "bias"])
def test_a_gpu_launch_refuses_freed_operands(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated driver records launches; none follows a refusal."""
    driver = install_fake_driver(monkeypatch)
    problem = linear_problem(16, 64, 128, "bfloat16", bias=True)
    candidate = Candidate.make("triton", "tiled", bm=16, bn=64, bk=128, split=1, swap=0, group=8, stages=3, warps=4)
    parameter_names = tuple(
        name for name, kind in make_spec(problem, candidate).signature.items() if kind != "constexpr"
    )
    driver.arguments["tiled"] = len(parameter_names)
    kernel = Tiled(problem, candidate, [(Header("tiled", 0, 0, 4, parameter_names, 1), b"")])
    operands = {
        "a": torch.randn(16, 128).bfloat16(), "b": torch.randn(64, 128).bfloat16(), "bias": torch.randn(64).bfloat16(),
    }  # fmt: skip
    out = torch.empty(16, 64, dtype=torch.bfloat16)
    launch = kernel.bind(operands["a"], operands["b"].t(), (operands["bias"],))
    launch(out, *operands.values())
    assert len(driver.launches) == 1
    for offset in (0, 24):
        operands[part] = freed(operands[part], offset)
        with pytest.raises(TypeError, match="without memory"):
            launch(out, *operands.values())
    assert len(driver.launches) == 1
