"""Cached calls: entries by dtype, strides and gradients, and the arguments out=, epilogue= and out_dtype=."""

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
from gemmtune.core.checks import DtypeError, GradError, ShapeError
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch.cache import DISPATCH_CACHE, EntriesByStrides
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, ToyKernel, bind_toy, evidence, register, store_decision, toy


@pytest.fixture(autouse=True)
def toys() -> None:
    register()
    TOY_RUNS.clear()


@pytest.fixture(params=["plain", "run", "bound"])
def served(request: pytest.FixtureRequest, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``served(*calls)``, which stores decisions for the calls.

    By the parameter, a toy kernel serves them through ``run`` or a bound launch, or PyTorch serves them.
    """
    if request.param == "bound":
        monkeypatch.setattr(ToyKernel, "bind", bind_toy)

    def store_decisions(*calls: Callable[[], object]) -> bool:
        for call in calls:
            if request.param == "plain":
                break
            with gemmtune.record() as recording:
                call()
            for problem, _ in recording.problems:
                store_decision(own_store, problem, evidence(toy(), 0.1), chosen=toy())
        TOY_RUNS.clear()
        return request.param != "plain"

    return store_decisions


@pytest.fixture
def forbid_new_problems(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after whose call a new Problem fails the test."""

    def stop() -> None:
        monkeypatch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))

    return stop


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-2, atol=2e-2)


def test_entries_of_a_key_are_cached_together(served: Any, forbid_new_problems: Callable[[], None]) -> None:
    """Operands of equal shapes that differ in dtype, strides or gradients have an entry each."""
    w = torch.randn(5, 4)
    operands = [
        (torch.randn(3, 4), w), (torch.randn(3, 4).bfloat16(), w.bfloat16()), (torch.randn(4, 3).t(), w),
        (torch.randn(3, 4), torch.randn(4, 5).t()), (torch.randn(3, 4, requires_grad=True), w),
        (torch.randn(3, 4), torch.nn.Parameter(w)),
    ]  # fmt: skip
    kernels = served(*(lambda x=x, w=w: gemmtune.linear(x, w) for x, w in operands))
    for x, weight in operands:
        assert_close(gemmtune.linear(x, weight), F.linear(x, weight))
    (key,) = DISPATCH_CACHE
    assert len(DISPATCH_CACHE[key]) == len(operands)
    forbid_new_problems()
    for _ in range(2):
        for x, weight in operands:
            TOY_RUNS.clear()
            result = gemmtune.linear(x, weight)
            assert_close(result, F.linear(x, weight))
            assert result.requires_grad == (x.requires_grad or weight.requires_grad)
            assert len(TOY_RUNS) == kernels


def test_more_than_eight_entries_of_a_key_are_indexed_by_strides(served: Any) -> None:
    """A key has up to eight entries, the newest first; more entries are indexed by strides."""
    w = torch.randn(5, 4)
    operands = [torch.randn(3, 4 + padding)[:, :4] for padding in range(11)]
    served(*(lambda x=x: gemmtune.linear(x, w) for x in operands))
    for x in operands[:8]:
        assert_close(gemmtune.linear(x, w), F.linear(x, w))
    (entries,) = DISPATCH_CACHE.values()
    assert [check(x, w) for check, _ in entries for x in operands[7::-1]] == [
        n == m for n in range(8) for m in range(8)
    ]
    for x in operands[8:]:
        assert_close(gemmtune.linear(x, w), F.linear(x, w))
    (by_strides,) = DISPATCH_CACHE.values()
    assert isinstance(by_strides, EntriesByStrides)
    assert [len(entries) for entries in by_strides.by_strides.values()] == [1, 1, 1]


def test_requires_grad_follows_the_grad_mode(served: Any) -> None:
    """A model that was called under no_grad can be trained afterwards."""
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
    assert_close(w.grad, torch.ones(3, 5).t() @ x)  # type: ignore[arg-type]


def test_ops_without_a_gradient_raise_grad_error_after_no_grad(served: Any) -> None:
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
CALLS: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
    "mm": (lambda **options: gemmtune.mm(X, WEIGHT.t(), **options), PRODUCT),
    "linear": (lambda **options: gemmtune.linear(X, WEIGHT, **options), PRODUCT),
    "linear with bias": (lambda **options: gemmtune.linear(X, WEIGHT, B, **options), PRODUCT + B),
    "linear 3-D": (lambda **options: gemmtune.linear(X[None], WEIGHT, B, **options), (PRODUCT + B)[None]),
    "addmm": (lambda **options: gemmtune.addmm(ADDEND, X, WEIGHT.t(), beta=2, **options), PRODUCT + 2 * ADDEND),
    "addmm without": (lambda **options: gemmtune.addmm(ADDEND, X, WEIGHT.t(), beta=0, **options), PRODUCT),
    "bmm": (lambda **options: gemmtune.bmm(X[None], WEIGHT.t()[None], **options), PRODUCT[None]),
    "int_mm": (lambda **options: gemmtune.int_mm(INTS, Q, **options), INTS.int() @ Q.int()),
    "mixed_mm": (lambda **options: gemmtune.mixed_mm(X, Q, S, **options), (X @ Q.float()) * S),
    "mixed_mm with more": (
        lambda **options: gemmtune.mixed_mm(X, Q, S, B, bias=R[0], **options), X @ ((Q - B) * S) + R[0],
    ),
}  # fmt: skip
EPILOGUE_OPS = [name for name in CALLS if "mm" not in name or name.startswith(("mm", "int", "mixed"))]


@pytest.mark.parametrize("name", CALLS)
def test_cached_out_variant_makes_no_new_problem(
    name: str, served: Any, forbid_new_problems: Callable[[], None]
) -> None:  # fmt: skip
    call, expected = CALLS[name]
    kernels = served(call)
    out = torch.full_like(expected, 77)
    assert call(out=out) is out
    assert_close(out, expected)
    forbid_new_problems()
    for _ in range(2):
        TOY_RUNS.clear()
        second_out = torch.full_like(expected, 77)
        assert call(out=second_out) is second_out
        assert_close(second_out, expected)
        assert len(TOY_RUNS) == kernels


@pytest.mark.parametrize("name", EPILOGUE_OPS)
def test_cached_epilogue_makes_no_new_problem(
    name: str, served: Any, forbid_new_problems: Callable[[], None]
) -> None:  # fmt: skip
    call, product = CALLS[name]

    def make_epilogue() -> list[fuse.BoundStep]:
        return [fuse.scale(torch.full((1, 5), 0.5), axis="col"), fuse.add(R.clone(), value=2.0), fuse.relu()]

    expected = (product * 0.5 + 2 * R).relu()
    options: list[dict[str, Any]] = [{}, {"out": torch.empty(expected.shape)}]
    if "linear" not in name:
        options += [{"out_dtype": torch.float32}, {"out_dtype": torch.bfloat16, "out": torch.empty(3, 5).bfloat16()}]
    if name == "int_mm":
        options = [{"out_dtype": torch.float32, **option} for option in options]
    kernels = served(*(lambda option=option: call(epilogue=make_epilogue(), **option) for option in options))
    for option in options:
        assert_close(call(epilogue=make_epilogue(), **option), expected)
    forbid_new_problems()
    for option in options:
        TOY_RUNS.clear()
        result = call(epilogue=make_epilogue(), **option)
        assert_close(result, expected)
        assert result.dtype == option.get("out_dtype", torch.float32)
        assert result is option.get("out", result)
        assert len(TOY_RUNS) == kernels


def test_out_may_share_memory_with_an_operand(served: Any) -> None:
    """``out`` may be the operand, a view of it or another part of its storage, also after calls with a separate one."""
    w = torch.randn(4, 4)
    epilogue = [fuse.add(torch.randn(4, 4))]
    for options in ({}, {"epilogue": epilogue}):
        served(lambda options=options: gemmtune.linear(torch.randn(4, 4), w, **options))
        for _ in range(2):
            for form in range(5):
                storage = torch.randn(2, 4, 4)
                x = storage[0]
                out = [torch.empty(4, 4), x, x.view(4, 4), storage[1], x.view(-1).view(4, 4)][form]
                expected = gemmtune.linear(x.clone(), w, **options)
                assert gemmtune.linear(x, w, out=out, **options) is out
                assert_close(out, expected)
        tensor = epilogue[0].tensor
        assert tensor is not None
        expected = gemmtune.linear(storage[0], w, epilogue=epilogue)
        assert_close(gemmtune.linear(storage[0], w, epilogue=epilogue, out=tensor), expected)


def test_one_tensor_as_two_operands_is_served(served: Any, forbid_new_problems: Callable[[], None]) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    calls: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
        (lambda t: gemmtune.mm(t, t), lambda t: t @ t),
        (lambda t: gemmtune.mm(t, w), lambda t: t @ w),
        (lambda t: gemmtune.mm(t, w, epilogue=[fuse.add(t)]), lambda t: t @ w + t),
        (lambda t: gemmtune.mm(t, w, epilogue=[fuse.add(w)]), lambda t: t @ w + w),
    ]
    kernels = served(*(lambda call=call: call(x) for call, _ in calls))
    for call, reference in calls:
        assert_close(call(x), reference(x))
    forbid_new_problems()
    for call, reference in calls:
        TOY_RUNS.clear()
        other = torch.randn(4, 4)
        assert_close(call(other), reference(other))
        assert len(TOY_RUNS) == kernels


def test_epilogue_tensors_may_change_their_layout(served: Any) -> None:
    tensors = [
        torch.randn(3, 5), torch.randn(5, 3).t(), torch.randn(3, 9)[:, ::2], torch.randn(5), torch.randn(3, 1),
        torch.randn(5).expand(3, 5), torch.randn(1), torch.randn(3, 5).bfloat16(), torch.randn(5).expand(3, 5),
        torch._neg_view(torch.randn(3, 5)),
    ]  # fmt: skip
    served(*(lambda t=t: gemmtune.linear(X, WEIGHT, epilogue=[fuse.add(t)]) for t in tensors))
    for _ in range(2):
        for tensor in tensors:
            assert_close(gemmtune.linear(X, WEIGHT, epilogue=[fuse.add(tensor)]), PRODUCT + tensor.float())
        for value in (1.0, 0.5):
            assert_close(
                gemmtune.linear(X, WEIGHT, epilogue=[fuse.add(tensors[0], value=value)]), PRODUCT + value * tensors[0]
            )


INVALID_OUTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "dtype": (lambda: torch.empty(3, 5).double(), pytest.raises(DtypeError, match="out tensor")),
    "shape": (lambda: torch.empty(5, 3), pytest.raises(ShapeError, match=r"shape \[3, 5\]")),
    "device": (lambda: torch.empty(3, 5, device="meta"), pytest.raises(DtypeError, match="out tensor")),
    "expanded": (lambda: torch.empty(5).expand(3, 5), pytest.raises(ShapeError, match="share")),
    "gradient": (lambda: torch.empty(3, 5, requires_grad=True), pytest.raises(GradError, match="differentiation")),
    "kind": (lambda: 5, pytest.raises(TypeError, match="argument 'out'")),
}


@pytest.mark.parametrize("name", INVALID_OUTS)
def test_invalid_out_raises_after_a_valid_one(name: str, served: Any) -> None:
    make, raises = INVALID_OUTS[name]
    served(lambda: gemmtune.mm(X, WEIGHT.t()))
    gemmtune.mm(X, WEIGHT.t(), out=torch.empty(3, 5))
    with raises:
        gemmtune.mm(X, WEIGHT.t(), out=make())


@pytest.mark.parametrize(
    "make", [lambda: torch.empty(0), lambda: torch.empty(5, 3).t(), lambda: torch.empty(3, 9)[:, :5]]
)
def test_out_is_resized_or_may_have_other_strides(make: Callable[[], Tensor], served: Any) -> None:
    served(lambda: gemmtune.mm(X, WEIGHT.t()))
    for _ in range(2):
        gemmtune.mm(X, WEIGHT.t(), out=torch.empty(3, 5))
        out = make()
        assert gemmtune.mm(X, WEIGHT.t(), out=out) is out
        assert_close(out, PRODUCT)


def test_recording_counts_cached_calls_and_caches_nothing(served: Any) -> None:
    def calls() -> None:
        gemmtune.mm(X, WEIGHT.t(), out=torch.empty(3, 5))
        gemmtune.mm(X, WEIGHT.t(), epilogue=[fuse.relu()])
        gemmtune.addmm(ADDEND, X, WEIGHT.t(), out=torch.empty(3, 5))

    served(calls)
    calls()
    with gemmtune.record() as recording:
        calls()
        calls()
        assert not DISPATCH_CACHE
    assert [count for _, count in recording.problems] == [2, 2, 2]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_entries_of_autocast_and_vmap_serve_in_that_state_only(served: Any) -> None:
    """Under autocast and vmap PyTorch's op is cached for that state; under modes and forward AD nothing is cached."""
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
        assert_close(torch.vmap(lambda t: gemmtune.linear(t, WEIGHT))(X[None]), PRODUCT[None])
        assert TOY_RUNS == []
    assert [len(entries) for entries in DISPATCH_CACHE.values()] == [2]
    assert_close(gemmtune.linear(X, WEIGHT), PRODUCT)
    assert len(TOY_RUNS) == kernels


@pytest.mark.usefixtures("verified")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("packed", [False, True])
def test_autocast_transforms_and_modes_reach_pytorch_after_cached_calls(
    packed: bool, served: Any, own_store: MemoryStore
) -> None:
    weight: Any = gemmtune.pack(WEIGHT, layout="toy:plain") if packed else WEIGHT
    relu = (fuse.relu(),)
    kernels = served(lambda: gemmtune.linear(X, weight), lambda: gemmtune.linear(X, weight, epilogue=relu))
    stacked = torch.randn(2, 3, 8)
    for _ in range(2):
        TOY_RUNS.clear()
        assert_close(gemmtune.linear(X, weight), PRODUCT)
        assert_close(gemmtune.linear(X, weight, epilogue=relu), PRODUCT.relu())
        assert_close(gemmtune.linear(X, weight, out=torch.empty(3, 5)), PRODUCT)
        assert len(TOY_RUNS) == (3 if packed or kernels else 0)
        TOY_RUNS.clear()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for result in (gemmtune.linear(X, weight), gemmtune.linear(X, weight, epilogue=relu)):
                assert result.dtype == (torch.float32 if packed else torch.bfloat16)
        assert_close(torch.vmap(lambda t: gemmtune.linear(t, weight))(stacked), F.linear(stacked, WEIGHT))
        result = torch.vmap(lambda t: gemmtune.linear(t, weight, epilogue=relu))(stacked)
        assert_close(result, F.linear(stacked, WEIGHT).relu())
        _, tangent = torch.func.jvp(lambda t: gemmtune.linear(t, weight), (X,), (torch.ones_like(X),))
        assert_close(tangent, F.linear(torch.ones_like(X), WEIGHT))
        with forward_ad.dual_level():
            dual = gemmtune.linear(forward_ad.make_dual(X, torch.ones_like(X)), weight, epilogue=())
            assert forward_ad.unpack_dual(dual).tangent is not None
        with FakeTensorMode() as mode:
            x, w = mode.from_tensor(X), weight if packed else mode.from_tensor(WEIGHT)
            for result in (gemmtune.linear(x, w), gemmtune.linear(x, w, epilogue=relu)):
                assert (type(result).__name__, result.shape) == ("FakeTensor", (3, 5))
        with torch.inference_mode():
            assert_close(gemmtune.linear(X, weight), PRODUCT)
        assert len(TOY_RUNS) == (1 if packed or kernels else 0)


def test_errors_under_fake_tensors_and_vmap_have_pytorchs_text() -> None:
    double = WEIGHT.double()
    with FakeTensorMode() as mode:
        x = mode.from_tensor(X)
        with pytest.raises(ShapeError, match="cannot be multiplied"):
            gemmtune.mm(x, x)
        with pytest.raises(DtypeError, match="float != double"):
            gemmtune.linear(x, mode.from_tensor(double))
    with pytest.raises(ShapeError, match="cannot be multiplied"):
        torch.vmap(lambda t: gemmtune.mm(t, X))(X[None])


def test_unhashable_arguments_raise_errors() -> None:
    with pytest.raises(ValueError, match="bits must be 8 or 4"):
        gemmtune.mixed_mm(X, Q, S, bits=[8])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.dtype, not list"):
        gemmtune.mm(X, WEIGHT.t(), out_dtype=[torch.float32])  # type: ignore[arg-type]


@pytest.mark.usefixtures("verified")
def test_packed_weight_serves_activations_of_other_strides(own_store: MemoryStore) -> None:
    problem = linear_problem(3, 5, 8, "float32", constant=True)
    store_decision(own_store, problem, evidence(toy("plain"), 0.1), chosen=toy("plain"))
    packed = gemmtune.pack(WEIGHT, m=3)
    column_major, out = X.t().contiguous().t(), torch.empty(3, 5)
    for _ in range(2):
        for x in (X, column_major):
            TOY_RUNS.clear()
            assert_close(gemmtune.linear(x, packed), PRODUCT)
            assert_close(gemmtune.linear(x, packed, B, out=out), PRODUCT + B)
            assert len(TOY_RUNS) == 2


def test_zero_point_is_not_taken_for_a_scale() -> None:
    """The key has the names of the optional operands, not only their number."""
    x, q, scale = torch.randn(3, 16), torch.randint(-9, 9, (16, 8), dtype=torch.int8), torch.rand(8)
    gemmtune.mixed_mm(x, q, scale)
    with pytest.raises(TypeError, match="missing argument 'scale'"):
        gemmtune.mixed_mm(x, q, None, scale)


def write_past_autograd(kernel: ToyKernel, a: Tensor, b: Any, aux: Sequence[Tensor], out: Tensor) -> None:
    """Write the result to the memory of ``out`` as a compiled kernel does. The version counter stays as it was."""
    out.numpy()[:] = (a @ b).numpy()


@pytest.mark.parametrize("kernel", ["none", "run", "launch"])
def test_write_to_out_is_counted_once(kernel: str, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd detects by the version counter that a saved tensor was written."""
    monkeypatch.setattr(ToyKernel, "run", write_past_autograd)
    if kernel == "launch":
        monkeypatch.setattr(ToyKernel, "bind", lambda self, a, b, aux: lambda out, x, w: self.run(x, w, (), out))
    x, w, out = torch.randn(3, 8), torch.randn(8, 5), torch.zeros(3, 5)
    if kernel != "none":
        with gemmtune.record() as recorded:
            gemmtune.mm(x, w, out=out)
        ((problem, _),) = recorded.problems
        store_decision(own_store, problem, evidence(toy(), 0.1), chosen=toy())
    for _ in range(3):
        before = out._version
        assert gemmtune.mm(x, w, out=out) is out
        assert_close(out, x @ w)
        assert out._version == before + 1
