"""What is remembered of a call, and what it then serves: variants, out=, epilogue=, out_dtype=."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import gemmtune
from gemmtune import fuse
from gemmtune.backends.base import Launch
from gemmtune.core.checks import DtypeError, GradError, ShapeError
from gemmtune.core.problem import Problem
from gemmtune.core.weights import PackedWeight
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch.cache import DISPATCH_CACHE, EntriesByStrides
from gemmtune.store import MemoryStore
from helpers.serving import RAN, ToyKernel, evidence, register, serve, toy


def bind(kernel: ToyKernel, a: Tensor, b: Any, aux: Sequence[Tensor]) -> Launch | None:
    """A toy's launch by addresses: it knows shapes and strides, and takes any view of the memory."""
    if not isinstance(b, Tensor | PackedWeight):
        return None
    shapes, left, right = [t.shape for t in aux], (a.shape, a.stride()), b if isinstance(b, PackedWeight) else None
    weight = () if right is not None else (b.shape, b.stride())
    inner = (*a.shape[:-1], kernel.problem.n)

    def launch(out: Tensor, x: Tensor, raw: Tensor, *rest: Tensor) -> None:
        rows = [t.view(shape) for t, shape in zip(rest, shapes, strict=True)]
        kernel.run(x.as_strided(*left), raw.as_strided(*weight) if right is None else right, rows, out.view(inner))

    return launch


@pytest.fixture(autouse=True)
def toys() -> None:
    register()
    RAN.clear()


@pytest.fixture(params=["plain", "run", "bound"])
def served(request: pytest.FixtureRequest, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``served(call)``: make a toy that runs, or one that is bound, serve a call (or leave it to PyTorch)."""
    if request.param == "bound":
        monkeypatch.setattr(ToyKernel, "bind", bind)

    def teach(*calls: Callable[[], object]) -> bool:
        for call in calls:
            if request.param == "plain":
                break
            with gemmtune.record() as recorded:
                call()
            for problem, _ in recorded.problems:
                serve(own_store, problem, evidence(toy(), 0.1), chosen=toy())
        RAN.clear()
        return request.param != "plain"

    return teach


@pytest.fixture
def undescribed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it, and from then on nothing may be described anew."""

    def stop() -> None:
        monkeypatch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))

    return stop


def close(got: Tensor, wanted: Tensor) -> None:
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.double(), wanted.double(), rtol=2e-2, atol=2e-2)


def test_variants_of_a_key_stay_beside_each_other(served: Any, undescribed: Callable[[], None]) -> None:
    """dtype, strides and gradients of operands of the same shapes."""
    w = torch.randn(5, 4)
    forms = [
        (torch.randn(3, 4), w), (torch.randn(3, 4).bfloat16(), w.bfloat16()), (torch.randn(4, 3).t(), w),
        (torch.randn(3, 4), torch.randn(4, 5).t()), (torch.randn(3, 4, requires_grad=True), w),
        (torch.randn(3, 4), torch.nn.Parameter(w)),
    ]  # fmt: skip
    kernels = served(*(lambda x=x, w=w: gemmtune.linear(x, w) for x, w in forms))
    for x, weight in forms:
        close(gemmtune.linear(x, weight), F.linear(x, weight))
    (key,) = DISPATCH_CACHE
    assert len(DISPATCH_CACHE[key]) == len(forms)
    undescribed()
    for _ in range(2):
        for x, weight in forms:
            RAN.clear()
            got = gemmtune.linear(x, weight)
            close(got, F.linear(x, weight))
            assert got.requires_grad == (x.requires_grad or weight.requires_grad)
            assert len(RAN) == kernels


def test_a_key_tries_so_many_variants(served: Any) -> None:
    """Up to eight, the newest first; with one more they are found by their layouts."""
    w = torch.randn(5, 4)
    forms = [torch.randn(3, 4 + more)[:, :4] for more in range(11)]
    served(*(lambda x=x: gemmtune.linear(x, w) for x in forms))
    for x in forms[:8]:
        close(gemmtune.linear(x, w), F.linear(x, w))
    (variants,) = DISPATCH_CACHE.values()
    assert [check(x, w) for check, _ in variants for x in forms[7::-1]] == [n == m for n in range(8) for m in range(8)]
    for x in forms[8:]:
        close(gemmtune.linear(x, w), F.linear(x, w))
    (many,) = DISPATCH_CACHE.values()
    assert isinstance(many, EntriesByStrides)
    assert [len(variants) for variants in many.by_strides.values()] == [1, 1, 1]


def test_gradients_come_and_go_with_their_mode(served: Any) -> None:
    """A model that was called under no_grad is trained afterwards."""
    x, w, b = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True), torch.randn(5, requires_grad=True)
    served(lambda: gemmtune.linear(x, w, b), lambda: gemmtune.mm(x, w.t()))
    for _ in range(2):
        with torch.no_grad():
            assert not gemmtune.linear(x, w, b).requires_grad
        assert gemmtune.linear(x, w, b).requires_grad
        assert gemmtune.linear(x, w, b, epilogue=[fuse.relu()]).requires_grad
        with torch.no_grad():
            assert not gemmtune.linear(x, w, b, epilogue=[fuse.relu()]).requires_grad
            assert not gemmtune.mm(x, w.t()).requires_grad
        assert gemmtune.mm(x, w.t()).requires_grad
    w.grad = None
    gemmtune.linear(x, w, b).sum().backward()
    close(w.grad, torch.ones(3, 5).t() @ x)  # type: ignore[arg-type]


def test_what_has_no_gradient_says_so_after_no_grad(served: Any) -> None:
    x, packed = torch.randn(3, 4, requires_grad=True), gemmtune.pack(torch.randn(5, 4), layout="toy:plain")
    q, scale = torch.ones(4, 5, dtype=torch.int8), torch.rand(5)
    out = torch.empty(3, 5)
    calls = (
        lambda: gemmtune.linear(x, packed), lambda: gemmtune.mixed_mm(x, q, scale),
        lambda: gemmtune.mixed_mm(x, q, scale, epilogue=[fuse.relu()]),
        lambda: gemmtune.linear(x, packed, epilogue=[fuse.relu()]), lambda: gemmtune.mm(x, scale.expand(4, 5), out=out),
    )  # fmt: skip
    for call in calls:
        with torch.no_grad():
            call()
        with pytest.raises(GradError):
            call()


X, WEIGHT, B, R, ADDEND = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5), torch.randn(3, 5), torch.randn(5)
INTS, Q, S = (torch.arange(24) % 7 - 3).to(torch.int8).view(3, 8), (torch.arange(40) % 5).to(torch.int8).view(8, 5), B
PRODUCT = X @ WEIGHT.t()
WHOLE: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "mm": (lambda **more: gemmtune.mm(X, WEIGHT.t(), **more), PRODUCT),
    "linear": (lambda **more: gemmtune.linear(X, WEIGHT, **more), PRODUCT),
    "linear with bias": (lambda **more: gemmtune.linear(X, WEIGHT, B, **more), PRODUCT + B),
    "linear 3-D": (lambda **more: gemmtune.linear(X[None], WEIGHT, B, **more), (PRODUCT + B)[None]),
    "addmm": (lambda **more: gemmtune.addmm(ADDEND, X, WEIGHT.t(), beta=2, **more), PRODUCT + 2 * ADDEND),
    "addmm without": (lambda **more: gemmtune.addmm(ADDEND, X, WEIGHT.t(), beta=0, **more), PRODUCT),
    "bmm": (lambda **more: gemmtune.bmm(X[None], WEIGHT.t()[None], **more), PRODUCT[None]),
    "int_mm": (lambda **more: gemmtune.int_mm(INTS, Q, **more), INTS.int() @ Q.int()),
    "mixed_mm": (lambda **more: gemmtune.mixed_mm(X, Q, S, **more), (X @ Q.float()) * S),
    "mixed_mm with more": (lambda **more: gemmtune.mixed_mm(X, Q, S, B, bias=R[0], **more), X @ ((Q - B) * S) + R[0]),
}  # fmt: skip
FUSED = [name for name in WHOLE if "mm" not in name or name.startswith(("mm", "int", "mixed"))]


@pytest.mark.parametrize("name", WHOLE)
def test_out_is_written_without_being_described_again(
    name: str, served: Any, undescribed: Callable[[], None]
) -> None:  # fmt: skip
    call, wanted = WHOLE[name]
    kernels = served(call)
    out = torch.full_like(wanted, 77)
    assert call(out=out) is out
    close(out, wanted)
    undescribed()
    for _ in range(2):
        RAN.clear()
        fresh = torch.full_like(wanted, 77)
        assert call(out=fresh) is fresh
        close(fresh, wanted)
        assert len(RAN) == kernels


@pytest.mark.parametrize("name", FUSED)
def test_an_epilogue_is_served_without_being_described_again(
    name: str, served: Any, undescribed: Callable[[], None]
) -> None:  # fmt: skip
    call, wanted = WHOLE[name]

    def more() -> list[fuse.BoundStep]:
        return [fuse.scale(torch.full((1, 5), 0.5), axis="col"), fuse.add(R.clone(), value=2.0), fuse.relu()]

    after = (wanted * 0.5 + 2 * R).relu()
    forms: list[dict[str, Any]] = [{}, {"out": torch.empty(after.shape)}]
    if "linear" not in name:
        forms += [{"out_dtype": torch.float32}, {"out_dtype": torch.bfloat16, "out": torch.empty(3, 5).bfloat16()}]
    if name == "int_mm":
        forms = [{"out_dtype": torch.float32, **form} for form in forms]
    kernels = served(*(lambda form=form: call(epilogue=more(), **form) for form in forms))
    for form in forms:
        close(call(epilogue=more(), **form), after)
    undescribed()
    for form in forms:
        RAN.clear()
        got = call(epilogue=more(), **form)
        close(got, after)
        assert got.dtype == form.get("out_dtype", torch.float32)
        assert got is form.get("out", got)
        assert len(RAN) == kernels


def test_out_may_share_memory_with_an_operand(served: Any) -> None:
    """After calls where it did not, too: as the operand itself, a view of it, or another part of its storage."""
    w = torch.randn(4, 4)
    fused = [fuse.add(torch.randn(4, 4))]
    for more in ({}, {"epilogue": fused}):
        served(lambda more=more: gemmtune.linear(torch.randn(4, 4), w, **more))
        for _ in range(2):
            for form in range(5):
                held = torch.randn(2, 4, 4)
                x = held[0]
                out = [torch.empty(4, 4), x, x.view(4, 4), held[1], x.view(-1).view(4, 4)][form]
                wanted = gemmtune.linear(x.clone(), w, **more)
                assert gemmtune.linear(x, w, out=out, **more) is out
                close(out, wanted)
        tensor = fused[0].tensor
        assert tensor is not None
        wanted = gemmtune.linear(held[0], w, epilogue=fused)
        close(gemmtune.linear(held[0], w, epilogue=fused, out=tensor), wanted)


def test_an_operand_given_twice(served: Any, undescribed: Callable[[], None]) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    calls: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (lambda t: gemmtune.mm(t, t), lambda t: t @ t),
        (lambda t: gemmtune.mm(t, w), lambda t: t @ w),
        (lambda t: gemmtune.mm(t, w, epilogue=[fuse.add(t)]), lambda t: t @ w + t),
        (lambda t: gemmtune.mm(t, w, epilogue=[fuse.add(w)]), lambda t: t @ w + w),
    ]
    kernels = served(*(lambda call=call: call(x) for call, _ in calls))
    for call, wanted in calls:
        close(call(x), wanted(x))
    undescribed()
    for call, wanted in calls:
        RAN.clear()
        other = torch.randn(4, 4)
        close(call(other), wanted(other))
        assert len(RAN) == kernels


def test_an_epilogues_tensors_may_lie_otherwise_the_next_time(served: Any) -> None:
    forms = [
        torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(3, 9)[:, ::2], torch.randn(5), torch.randn(3, 1),
        torch.randn(5).expand(3, 5), torch.randn(1), torch.randn(3, 5).bfloat16(), torch.randn(5).expand(3, 5),
        torch._neg_view(torch.randn(3, 5)),
    ]  # fmt: skip
    served(*(lambda t=t: gemmtune.linear(X, WEIGHT, epilogue=[fuse.add(t)]) for t in forms))
    for _ in range(2):
        for form in forms:
            close(gemmtune.linear(X, WEIGHT, epilogue=[fuse.add(form)]), PRODUCT + form.float())
        for value in (1.0, 0.5):
            close(gemmtune.linear(X, WEIGHT, epilogue=[fuse.add(forms[0], value=value)]), PRODUCT + value * forms[0])


OUTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "dtype": (lambda: torch.empty(3, 5).double(), pytest.raises(DtypeError, match="out tensor")),
    "shape": (lambda: torch.empty(5, 3), pytest.raises(ShapeError, match=r"shape \[3, 5\]")),
    "device": (lambda: torch.empty(3, 5, device="meta"), pytest.raises(DtypeError, match="out tensor")),
    "expanded": (lambda: torch.empty(5).expand(3, 5), pytest.raises(ShapeError, match="share")),
    "gradient": (lambda: torch.empty(3, 5, requires_grad=True), pytest.raises(GradError, match="differentiation")),
    "kind": (lambda: 5, pytest.raises(TypeError, match="argument 'out'")),
}


@pytest.mark.parametrize("name", OUTS)
def test_an_out_that_does_not_fit_is_refused_after_one_that_does(name: str, served: Any) -> None:
    make, refused = OUTS[name]
    served(lambda: gemmtune.mm(X, WEIGHT.t()))
    gemmtune.mm(X, WEIGHT.t(), out=torch.empty(3, 5))
    with refused:
        gemmtune.mm(X, WEIGHT.t(), out=make())


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(0), lambda: torch.empty(5, 3).t(), lambda: torch.empty(3, 9)[:, :5]]
)
def test_an_out_that_must_be_resized_or_lies_otherwise(make: Callable[[], Tensor], served: Any) -> None:
    served(lambda: gemmtune.mm(X, WEIGHT.t()))
    for _ in range(2):
        gemmtune.mm(X, WEIGHT.t(), out=torch.empty(3, 5))
        out = make()
        assert gemmtune.mm(X, WEIGHT.t(), out=out) is out
        close(out, PRODUCT)


def test_recording_sees_every_call_and_nothing_is_remembered_meanwhile(served: Any) -> None:
    def calls() -> None:
        gemmtune.mm(X, WEIGHT.t(), out=torch.empty(3, 5))
        gemmtune.mm(X, WEIGHT.t(), epilogue=[fuse.relu()])
        gemmtune.addmm(ADDEND, X, WEIGHT.t(), out=torch.empty(3, 5))

    served(calls)
    calls()
    with gemmtune.record() as recorded:
        calls()
        calls()
        assert not DISPATCH_CACHE
    assert [count for _, count in recorded.problems] == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_what_pytorch_serves_in_a_state_it_serves_there_alone(served: Any) -> None:
    """Under autocast and vmap PyTorch's op is remembered for that state; under modes and forward AD nothing is."""
    kernels = served(lambda: gemmtune.linear(X, WEIGHT))
    with FakeTensorMode() as mode:
        gemmtune.linear(mode.from_tensor(X), mode.from_tensor(WEIGHT))
    with forward_ad.dual_level():
        gemmtune.linear(forward_ad.make_dual(X, X), WEIGHT)
    gemmtune.linear(X.as_subclass(type("Mine", (Tensor,), {})), WEIGHT)
    assert not DISPATCH_CACHE
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert gemmtune.linear(X, WEIGHT).dtype == torch.bfloat16
        close(torch.vmap(lambda t: gemmtune.linear(t, WEIGHT))(X[None]), PRODUCT[None])
        assert RAN == []
    assert [len(variants) for variants in DISPATCH_CACHE.values()] == [2]
    close(gemmtune.linear(X, WEIGHT), PRODUCT)
    assert len(RAN) == kernels


@pytest.mark.usefixtures("verified")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("packed", [False, True])
def test_states_that_pytorch_must_see_after_ordinary_calls(packed: bool, served: Any, own_store: MemoryStore) -> None:
    weight: Any = gemmtune.pack(WEIGHT, layout="toy:plain") if packed else WEIGHT
    relu = (fuse.relu(),)
    kernels = served(lambda: gemmtune.linear(X, weight), lambda: gemmtune.linear(X, weight, epilogue=relu))
    stacked = torch.randn(2, 3, 8)
    for _ in range(2):
        RAN.clear()
        close(gemmtune.linear(X, weight), PRODUCT)
        close(gemmtune.linear(X, weight, epilogue=relu), PRODUCT.relu())
        close(gemmtune.linear(X, weight, out=torch.empty(3, 5)), PRODUCT)
        assert len(RAN) == (3 if packed or kernels else 0)
        RAN.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for got in (gemmtune.linear(X, weight), gemmtune.linear(X, weight, epilogue=relu)):
                assert got.dtype == (torch.float32 if packed else torch.bfloat16)
        close(torch.vmap(lambda t: gemmtune.linear(t, weight))(stacked), F.linear(stacked, WEIGHT))
        got = torch.vmap(lambda t: gemmtune.linear(t, weight, epilogue=relu))(stacked)
        close(got, F.linear(stacked, WEIGHT).relu())
        _, tangent = torch.func.jvp(lambda t: gemmtune.linear(t, weight), (X,), (torch.ones_like(X),))
        close(tangent, F.linear(torch.ones_like(X), WEIGHT))
        with forward_ad.dual_level():
            dual = gemmtune.linear(forward_ad.make_dual(X, torch.ones_like(X)), weight, epilogue=())
            assert forward_ad.unpack_dual(dual).tangent is not None
        with FakeTensorMode() as mode:
            x, w = mode.from_tensor(X), weight if packed else mode.from_tensor(WEIGHT)
            for got in (gemmtune.linear(x, w), gemmtune.linear(x, w, epilogue=relu)):
                assert (type(got).__name__, got.shape) == ("FakeTensor", (3, 5))
        with torch.inference_mode():
            close(gemmtune.linear(X, weight), PRODUCT)
        assert len(RAN) == (1 if packed or kernels else 0)


def test_errors_in_such_states_keep_their_words() -> None:
    double = WEIGHT.double()
    with FakeTensorMode() as mode:
        x = mode.from_tensor(X)
        with pytest.raises(ShapeError, match="cannot be multiplied"):
            gemmtune.mm(x, x)
        with pytest.raises(DtypeError, match="float != double"):
            gemmtune.linear(x, mode.from_tensor(double))
    with pytest.raises(ShapeError, match="cannot be multiplied"):
        torch.vmap(lambda t: gemmtune.mm(t, X))(X[None])


def test_arguments_that_cannot_be_a_key_are_named() -> None:
    with pytest.raises(ValueError, match="bits must be 8 or 4"):
        gemmtune.mixed_mm(X, Q, S, bits=[8])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.dtype, not list"):
        gemmtune.mm(X, WEIGHT.t(), out_dtype=[torch.float32])  # type: ignore[arg-type]


@pytest.mark.usefixtures("verified")
def test_a_plan_for_a_constant_weight_takes_activations_that_lie_otherwise(own_store: MemoryStore) -> None:
    problem = linear_problem(3, 5, 8, "float32", constant=True)
    serve(own_store, problem, evidence(toy("plain"), 0.1), chosen=toy("plain"))
    packed = gemmtune.pack(WEIGHT, m=3)
    turned, out = X.t().contiguous().t(), torch.empty(3, 5)
    for _ in range(2):
        for x in (X, turned):
            RAN.clear()
            close(gemmtune.linear(x, packed), PRODUCT)
            close(gemmtune.linear(x, packed, B, out=out), PRODUCT + B)
            assert len(RAN) == 2


def test_a_zero_point_does_not_pass_for_a_scale() -> None:
    """The operands behind the matrices are told apart by name, not only by how many they are."""
    x, q, scale = torch.randn(3, 16), torch.randint(-9, 9, (16, 8), dtype=torch.int8), torch.rand(8)
    gemmtune.mixed_mm(x, q, scale)
    with pytest.raises(TypeError, match="missing argument 'scale'"):
        gemmtune.mixed_mm(x, q, None, scale)


def write_past_autograd(kernel: ToyKernel, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
    """Write the result to the memory of ``out`` as a compiled kernel does. The version counter stays as it was."""
    out.numpy()[:] = (a @ b).numpy()


@pytest.mark.parametrize("kernel", ["none", "run", "launch"])
def test_a_write_to_out_is_counted_once(kernel: str, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd detects by the version counter that a saved tensor was written."""
    monkeypatch.setattr(ToyKernel, "run", write_past_autograd)
    if kernel == "launch":
        monkeypatch.setattr(ToyKernel, "bind", lambda self, a, b, aux: lambda out, x, w: self.run(x, w, (), out))
    x, w, out = torch.randn(3, 8), torch.randn(8, 5), torch.zeros(3, 5)
    if kernel != "none":
        with gemmtune.record() as recorded:
            gemmtune.mm(x, w, out=out)
        ((problem, _),) = recorded.problems
        serve(own_store, problem, evidence(toy(), 0.1), chosen=toy())
    for _ in range(3):
        before = out._version
        assert gemmtune.mm(x, w, out=out) is out
        close(out, x @ w)
        assert out._version == before + 1
