"""OpSpec: an op that a plug-in describes is served, traced and recorded as gemmtune's ops are."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune import fuse
from gemmtune.core import checks
from gemmtune.core.call import Call
from gemmtune.core.problem import Problem
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.dispatch.call import TorchFunction
from gemmtune.dispatch.runtime import RUNTIME
from gemmtune.ops import table
from gemmtune.ops.mm import describe as describe_mm
from gemmtune.ops.operands import is_torchs_alone, matrix_adapter
from gemmtune.ops.spec import OpSpec
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy


def torch_mm_nt(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [M, K] by the transpose of b [N, K], as a PyTorch function without an op in gemmtune."""
    return torch.mm(a, b.t())


def describe(a: Tensor, b: Tensor, *, constant: bool = False) -> Call:
    return describe_mm(a, b.t(), op="mm_nt", prefer="col", constant=constant)


def _needs_torch(a: Any, b: Any) -> bool:
    checks.require_tensor("mm_nt", "a", 1, a)
    checks.require_tensor("mm_nt", "b", 2, b)
    return is_torchs_alone(a, b)


def _recorded(input: Tensor, other: Tensor) -> Problem:
    return describe(input, other).problem


SPEC = OpSpec(
    name="mm_nt",
    operands=("a", "b"),
    describe=describe,
    trace=lambda a, b, out: torch_mm_nt(a, b),
    needs_torch=_needs_torch,
    torch_function=lambda **_: TorchFunction(torch_mm_nt, lambda out, a, b: torch.mm(a, b.t(), out=out)),
    adapt=lambda call, **_: lambda a, b, *_: (a, b.t()),
    records={torch.inner: _recorded},
    packable=False,
)


@SPEC.public
def mm_nt(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:  # type: ignore[empty-body]
    """Multiply a [M, K] by the transpose of b [N, K]."""


@pytest.fixture
def registered_op() -> Iterator[None]:
    table.register(SPEC)
    yield
    del table.OPS["mm_nt"], table.DESCRIBERS[torch.inner]


A, B = torch.randn(3, 4), torch.randn(5, 4)


def test_public_function_has_the_declared_signature_and_docstring() -> None:
    assert mm_nt.__doc__ == "Multiply a [M, K] by the transpose of b [N, K]."
    assert str(inspect.signature(mm_nt)) == "(a: 'Tensor', b: 'Tensor', *, out: 'Tensor | None' = None) -> 'Tensor'"
    assert "isinstance" not in inspect.getsource(mm_nt)  # its weight cannot be packed


def test_tracebacks_show_the_generated_lines() -> None:
    with pytest.raises(TypeError, match=r"'b'.*must be Tensor, not int") as error:
        mm_nt(A, 3)  # type: ignore[arg-type]
    lines = [frame.line for frame in traceback.extract_tb(error.value.__traceback__)]
    assert any(line is not None and line.startswith("return miss(") for line in lines)


def test_tuned_kernel_serves_and_cached_calls_make_no_new_problem(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    store_decision(own_store, describe(A, B).problem, evidence(toy(), 0.1), chosen=toy())
    torch.testing.assert_close(mm_nt(A, B), A @ B.t())
    monkeypatch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))
    TOY_RUNS.clear()
    out = mm_nt(A.clone(), B)
    torch.testing.assert_close(out, A @ B.t())
    assert len(TOY_RUNS) == 1


def test_out_gradients_integers_autocast_and_vmap(own_store: MemoryStore) -> None:
    out = torch.empty(3, 5)
    for _ in range(2):
        assert mm_nt(A, B, out=out.zero_()) is out
        torch.testing.assert_close(out, A @ B.t())
    a = A.clone().requires_grad_()
    mm_nt(a, B).sum().backward()
    torch.testing.assert_close(a.grad, B.sum(0).expand(3, 4))
    integers = torch.ones(3, 4, dtype=torch.int64), torch.ones(5, 4, dtype=torch.int64)
    assert mm_nt(*integers).tolist() == [[4] * 5] * 3
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mm_nt(A, B).dtype == torch.bfloat16
    with pytest.raises(checks.ShapeError, match="cannot be multiplied"):
        mm_nt(A, torch.ones(5, 3))
    torch.testing.assert_close(torch.func.vmap(mm_nt)(A[:, None], B[:3, None])[:, 0, 0], (A * B[:3]).sum(1))


def test_torch_compile_traces_the_op() -> None:
    compiled = torch.compile(lambda a, b: mm_nt(a, b) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(A, B), A @ B.t() + 1)


@pytest.mark.usefixtures("registered_op")
def test_registered_op_is_recorded() -> None:
    with gemmtune.record() as recording:
        torch.inner(A, B)
        mm_nt(A, B)
    assert recording.problems == [(describe(A, B).problem, 2)]
    assert RUNTIME.observer is None


@pytest.mark.usefixtures("registered_op")
def test_registering_a_taken_name_raises_value_error() -> None:

    with pytest.raises(ValueError, match="gemmtune has an op of that name"):
        table.register(SPEC._replace(name="mm"))
    with pytest.raises(ValueError, match="another op records"):
        table.register(SPEC._replace(name="other"))
    table.register(SPEC)  # the op replaces itself
    assert table.OPS["mm_nt"] is SPEC


def test_matrix_adapter_makes_activations_contiguous() -> None:
    a = torch.randn(4, 3).t()
    call = describe_mm(a, B.t(), constant=True)
    adapted, _ = matrix_adapter(call)(a, B.t())
    assert adapted.is_contiguous()


def test_call_under_vmap_is_cached_unless_it_is_recorded() -> None:
    DISPATCH_CACHE.clear()
    with gemmtune.record() as recorded:
        torch.func.vmap(gemmtune.linear, in_dims=(0, None))(A[None], B)
    assert not DISPATCH_CACHE
    assert len(recorded.problems) == 1
    torch.func.vmap(gemmtune.linear, in_dims=(0, None))(A[None], B)
    assert [len(entries) for entries in DISPATCH_CACHE.values()] == [1]


def test_op_that_only_pytorch_computes_returns_its_out() -> None:
    a, b = torch.ones(3, 4, dtype=torch.int64), torch.ones(4, 5, dtype=torch.int64)
    out = torch.empty(3, 5, dtype=torch.int64)
    assert gemmtune.mm(a, b, out=out) is out
    assert out.tolist() == [[4] * 5] * 3
    assert gemmtune.bmm(a[None], b[None], out=out[None].zero_()).tolist() == [[[4] * 5] * 3]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: gemmtune.linear(A, B, torch.ones(5, device="meta")), "bias"),
        (lambda: gemmtune.linear(A, B, epilogue=[fuse.add(torch.ones(5, device="meta"))]), "an epilogue tensor"),
    ],
)
def test_tensor_on_another_device_is_named(call: Callable[[], Tensor], name: str) -> None:
    with pytest.raises(checks.DtypeError, match=rf"\b{name} is on meta"):
        call()
