"""The first call with another M: what serves it is what a description of the call would have chosen."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import gemmtune
from gemmtune import fuse
from gemmtune.core.checks import ShapeError
from gemmtune.core.errors import KernelError
from gemmtune.core.weights import PackedWeight
from gemmtune.dispatch import RUNTIME, cache, current_target, policy
from gemmtune.ops import operands
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, ToyKernel, bind_toy, bind_toy_any_m, plan_of_toys, register

K, N = 12, 20
WEIGHT, BIAS, COLUMN = torch.randn(N, K), torch.randn(N), torch.rand(N)
INTEGERS = torch.randint(-8, 8, (N, K), dtype=torch.int8)


def leading(m: int, dims: int) -> tuple[int, ...]:
    """Return the first dimensions of activations of M rows, with this many dimensions in all."""
    return (m,) if dims == 2 else (2, m // 2) if m % 2 == 0 else (1, m)


Form = Callable[[int, int, Any], Tensor]  # of M, the dimensions of the activations, and a packed weight


def rows(m: int, dims: int = 2, k: int = K) -> Tensor:
    torch.manual_seed(m)
    return torch.randn(*leading(m, dims), k)


FORMS: dict[str, Form] = {
    "linear": lambda m, dims, _: gemmtune.linear(rows(m, dims), WEIGHT),
    "linear, packed": lambda m, dims, packed: gemmtune.linear(rows(m, dims), packed, BIAS),
    "linear with a bias": lambda m, dims, _: gemmtune.linear(rows(m, dims), WEIGHT, BIAS),
    "linear with a bias for each row": lambda m, dims, _: gemmtune.linear(rows(m), WEIGHT, rows(m, 2, 1)),
    "residual": lambda m, dims, _: gemmtune.linear(rows(m, dims), WEIGHT, epilogue=[fuse.add(rows(m, dims, N))]),
    "scales": lambda m, dims, packed: gemmtune.linear(
        rows(m, dims), packed, epilogue=[fuse.scale(COLUMN, axis="col"), fuse.scale(torch.rand(m), axis="row")]
    ),
    "out": lambda m, dims, packed: gemmtune.linear(rows(m, dims), packed, out=torch.empty(*leading(m, dims), N)),
    "mm": lambda m, dims, _: gemmtune.mm(rows(m), WEIGHT.t()),
    "mm, columns in front": lambda m, dims, _: gemmtune.mm(rows(K, 2, m).t(), WEIGHT.t()),
    "addmm": lambda m, dims, _: gemmtune.addmm(BIAS, rows(m), WEIGHT.t(), alpha=2),
    "addmm of a matrix": lambda m, dims, _: gemmtune.addmm(rows(m, 2, N), rows(m), WEIGHT.t()),
    "addmm of a row": lambda m, dims, _: gemmtune.addmm(BIAS.view(1, N), rows(m), WEIGHT.t(), beta=2),
    "int_mm": lambda m, dims, _: gemmtune.int_mm(rows(m).mul(9).to(torch.int8), INTEGERS.t()),
    "mixed_mm": lambda m, dims, _: gemmtune.mixed_mm(rows(m), INTEGERS.t(), COLUMN, bias=BIAS),
    "scaled_mm": lambda m, dims, _: gemmtune.scaled_mm(
        rows(m).to(torch.float8_e4m3fn), WEIGHT.to(torch.float8_e4m3fn).t(), torch.rand(m, 1), COLUMN.view(1, N),
        out_dtype=torch.float32,
    ),
}  # fmt: skip


@pytest.fixture
def packed(own_store: MemoryStore) -> PackedWeight:
    """Store a plan of toy kernels for every product of FORMS, and return WEIGHT packed for them."""
    register()
    with gemmtune.record() as recording:
        for form in FORMS.values():
            for m in (1, 4, 5):
                form(m, 2, WEIGHT)
    packed = PackedWeight("toy:plain", (WEIGHT.t().clone(),), N, K, "float32", None, "toy", "col")
    for problem, _ in recording.problems:
        for constant in (problem, gemmtune.ops.linear.describe(rows(4), packed, BIAS).problem):
            own_store.put_plan(current_target(), plan_of_toys(constant))
    with gemmtune.record() as recording:
        for form in FORMS.values():
            form(4, 2, packed)
    for problem, _ in recording.problems:
        own_store.put_plan(current_target(), plan_of_toys(problem))
    RUNTIME.refresh(own_store)
    return packed


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the ops whose calls are described."""
    ops: list[str] = []
    original = operands._checked

    def note(op: str, *args: Any) -> Any:
        ops.append(op)
        return original(op, *args)

    monkeypatch.setattr(operands, "_checked", note)
    return ops


@pytest.fixture(params=["run", "launch"])
def toys_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have toy kernels be served by ``run``, or by a launch that is bound for each M."""
    if request.param == "launch":
        monkeypatch.setattr(ToyKernel, "bind", bind_toy)
        monkeypatch.setattr(ToyKernel, "bind_any_m", bind_toy_any_m)
    return str(request.param)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    name=st.sampled_from(sorted(FORMS)), dims=st.sampled_from((2, 3)), sizes=st.lists(st.integers(0, 30), max_size=6)
)
def test_each_m_is_served_as_if_it_were_described(
    packed: PackedWeight, toys_by: str, name: str, dims: int, sizes: list[int]
) -> None:
    form, sizes = FORMS[name], [5, *sizes]
    cache.clear()
    served = [run_and_note(form, m, dims, packed) for m in sizes]
    for m, (result, kernels) in zip(sizes, served, strict=True):
        cache.clear()
        wanted, wanted_kernels = run_and_note(form, m, dims, packed)
        assert kernels == wanted_kernels
        assert result.shape == wanted.shape
        assert torch.equal(result, wanted)


def run_and_note(form: Form, m: int, dims: int, packed: PackedWeight) -> tuple[Tensor, list[Any]]:
    """Return the result, and the runs of toy kernels. The call is made twice; the cache serves the second."""
    TOY_RUNS.clear()
    torch.manual_seed(m)
    first = form(m, dims, packed)
    runs = list(TOY_RUNS)
    TOY_RUNS.clear()
    assert torch.equal(form(m, dims, packed), first)
    assert runs == TOY_RUNS
    return first, runs


_DESCRIBED_EACH = ("mm, columns in front", "linear with a bias for each row")


@pytest.mark.parametrize("name", [name for name in FORMS if name not in _DESCRIBED_EACH])
def test_another_m_is_not_described(name: str, packed: PackedWeight, described: list[str]) -> None:
    form = FORMS[name]
    form(5, 2, packed)
    assert len(described) == 1
    TOY_RUNS.clear()
    for m in (6, 9, 16, 33):
        form(m, 2, packed)
    assert len(described) == 1
    assert len(TOY_RUNS) == 4  # kernels served


_AXES_ARE_CLEAR = ("linear", "linear, packed", "int_mm")
_AXES_MAY_DIFFER = ("residual", "scales", "addmm of a matrix", "scaled_mm")


@pytest.mark.parametrize("name", [*_AXES_ARE_CLEAR, *_AXES_MAY_DIFFER])
def test_one_row_is_described_only_where_a_tensor_may_have_another_axis(
    name: str, packed: PackedWeight, described: list[str]
) -> None:
    FORMS[name](5, 2, packed)
    FORMS[name](1, 2, packed)
    assert len(described) == (1 if name in _AXES_ARE_CLEAR else 2)


@pytest.mark.parametrize("name", ["linear", "linear, packed", "scales", "residual"])
def test_a_kernel_binds_another_m_alone(name: str, packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands are bound once for each kernel, and then M alone."""
    bound: list[tuple[int, ...]] = []

    def bind(kernel: ToyKernel, a: Tensor, b: Any, aux: Any) -> Any:
        bound.append(tuple(a.shape))
        return bind_toy(kernel, a, b, aux)

    monkeypatch.setattr(ToyKernel, "bind", bind)
    monkeypatch.setattr(ToyKernel, "bind_any_m", bind_toy_any_m)
    for m in (5, 6, 3, 9, 10, 4):  # 9 and 10 are served by the second kernel
        FORMS[name](m, 2, packed)
    assert bound == [(5, K), (6, K), (9, K)]


@pytest.mark.parametrize("name", ["linear, packed", "scales", "residual"])
def test_a_refused_launch_of_another_m_is_served_by_pytorch(
    name: str, packed: PackedWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch refuses 3 rows; 4 rows cannot be bound by themselves either."""

    def refuse(*_: object) -> Any:
        raise KernelError("no memory")

    def bind_any_m(kernel: ToyKernel, a: Tensor, b: Any, aux: Any) -> Any:
        launch: Any = bind_toy_any_m(kernel, a, b, aux)
        return lambda out, *rest: refuse() if out.numel() in (3 * N, 4 * N) else launch(out, *rest)

    expected = {(m, dims): FORMS[name](m, dims, packed) for m in (5, 6, 3, 4) for dims in (2, 3)}
    cache.clear()
    monkeypatch.setattr(ToyKernel, "bind_any_m", bind_any_m)
    monkeypatch.setattr(ToyKernel, "bind", lambda *of: refuse() if of[1].shape[0] == 4 else bind_toy(*of))
    for (m, dims), result in expected.items():
        TOY_RUNS.clear()
        torch.testing.assert_close(FORMS[name](m, dims, packed), result)
        assert bool(TOY_RUNS) == (m > 4)


def test_errors_of_another_m_are_those_of_the_op(packed: PackedWeight) -> None:
    residual = [fuse.add(rows(5, 2, N))]
    gemmtune.linear(rows(5), packed, epilogue=residual)
    with pytest.raises(ShapeError, match="does not broadcast to the output"):
        gemmtune.linear(rows(6), packed, epilogue=residual)
    with pytest.raises(ShapeError, match="out"):
        gemmtune.linear(rows(6), packed, out=torch.empty(5, N))
    gemmtune.linear(rows(5), packed, out=torch.empty(5, N))
    with pytest.raises(ShapeError, match="out"):
        gemmtune.linear(rows(6), packed, out=torch.empty(5, N))
    wide = torch.randn(6, K + 3)[:, :K]  # its rows have gaps: it is copied
    torch.testing.assert_close(gemmtune.linear(wide, packed), wide @ WEIGHT.t())


def test_what_serves_another_m_serves_no_other_scales(packed: PackedWeight) -> None:
    """Keys have the shape of the activations, and of the scales their number only."""
    a, b = rows(6).to(torch.float8_e4m3fn), WEIGHT.to(torch.float8_e4m3fn).t()

    def multiply(scales: Tensor, x: Tensor = a) -> Tensor:
        return gemmtune.scaled_mm(x, b, scales, COLUMN.view(1, N), out_dtype=torch.float32)

    multiply(torch.rand(5, 1), rows(5).to(torch.float8_e4m3fn))
    for scales in (torch.rand(6, 1), torch.rand(6, 2)[:, :1], torch.rand(6), torch.rand(1, 6)):
        for _ in range(2):
            expected = a.float() @ b.float() * scales.reshape(6, 1) * COLUMN
            torch.testing.assert_close(multiply(scales), expected, rtol=1e-3, atol=1e-3)
    for count in (5, 7):
        with pytest.raises(ShapeError, match="scale_a"):
            multiply(torch.rand(count, 1))


def test_gradients_of_another_m(own_store: MemoryStore, described: list[str]) -> None:
    weight = torch.nn.Parameter(WEIGHT.clone())
    for m in (5, 6):
        weight.grad = None
        gemmtune.linear(rows(m), weight).sum().backward()
        assert weight.grad is not None
        torch.testing.assert_close(weight.grad, rows(m).sum(0).expand(N, K))
    assert len(described) == 1


def test_another_m_is_recorded(packed: PackedWeight) -> None:
    gemmtune.linear(rows(5), packed)
    with gemmtune.record() as recording:
        gemmtune.linear(rows(6), packed)
        gemmtune.linear(rows(9), packed)
    assert sorted(problem.m for problem, _ in recording.problems) == [6, 9]


def test_policy_on_miss_tunes_each_m(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[int] = []
    monkeypatch.setattr(RUNTIME, "miss_hook", lambda problem, device: tuned.append(problem.m))
    with policy("on-miss"):
        for m in (5, 50, 5000):
            gemmtune.linear(rows(m), WEIGHT)
    assert tuned == [5, 50, 5000]


def test_a_refresh_forgets_what_served_other_m(packed: PackedWeight) -> None:
    gemmtune.linear(rows(5), packed)
    TOY_RUNS.clear()
    with policy("off"):
        gemmtune.linear(rows(5), WEIGHT)
        gemmtune.linear(rows(6), WEIGHT)
    assert not TOY_RUNS
    assert not cache.DESCRIBED_CALLS


def test_dispatch_modes_see_another_m(packed: PackedWeight) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    gemmtune.linear(rows(5), WEIGHT)
    with FakeTensorMode() as mode:
        fake = gemmtune.linear(mode.from_tensor(rows(6)), mode.from_tensor(WEIGHT))
    assert fake.shape == (6, N)
    with torch.autocast("cpu", torch.bfloat16):
        assert gemmtune.linear(rows(8), WEIGHT).dtype == torch.bfloat16
    assert gemmtune.linear(rows(8), WEIGHT).dtype == torch.float32


def test_described_calls_keep_no_tensor(packed: PackedWeight) -> None:
    a, residual, out = rows(5), rows(5, 2, N), torch.empty(5, N)
    kept = [weakref.ref(tensor) for tensor in (a, residual, out)]
    gemmtune.linear(a, WEIGHT, epilogue=[fuse.add(residual)], out=out)
    assert cache.DESCRIBED_CALLS
    del a, residual, out
    gc.collect()
    assert [reference() for reference in kept] == [None, None, None]


def test_described_calls_are_bounded(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_KEYS", 4)
    cache.clear()
    for n in random.Random(0).sample(range(2, 60), 20):
        gemmtune.linear(rows(5), torch.randn(n, K))
    assert len(cache.DESCRIBED_CALLS) == 4
