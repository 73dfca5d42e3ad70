"""OpSpec: an op that a plug-in describes is served, traced and recorded as gemmtune's ops are."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gemmtune
from gemmtune import fuse
from gemmtune.core import checks
from gemmtune.core.call import Call
from gemmtune.core.problem import Problem
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.dispatch.runtime import RUNTIME
from gemmtune.dispatch.specialize import TorchFunction, adapt_args
from gemmtune.ops import table
from gemmtune.ops.mm import describe as describe_mm
from gemmtune.ops.operands import is_torchs_alone
from gemmtune.ops.spec import OpSpec
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy


def torch_mm_nt(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [M, K] by the transpose of b [N, K], as a PyTorch function without an op in gemmtune."""
    return torch.mm(a, b.t())


def describe(a: Tensor, b: Tensor, *, constant: bool = False) -> Call:
    return describe_mm(a, b.t(), op="mm_nt", prefer="col", constant=constant)._replace(adapt_b=Tensor.t)


def _torch_function(a: Any, b: Any) -> TorchFunction:
    checks.require_tensor("mm_nt", "a", 1, a)
    checks.require_tensor("mm_nt", "b", 2, b)
    return TorchFunction(torch_mm_nt, lambda out, a, b: torch.mm(a, b.t(), out=out), required=is_torchs_alone(a, b))


def _recorded(input: Tensor, other: Tensor) -> Problem:
    return describe(input, other).problem


SPEC = OpSpec(
    name="mm_nt",
    operands=("a", "b"),
    describe=describe,
    trace=lambda a, b, out: torch_mm_nt(a, b),
    torch_function=_torch_function,
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


def test_activations_beside_a_constant_weight_are_made_contiguous() -> None:
    a = torch.randn(4, 3).t()
    call = describe_mm(a, B.t(), constant=True)
    adapted, _, _ = adapt_args(call, (a, B.t()))(a, B.t())
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


PACKED_B = gemmtune.pack(B, layout="aten:row")
INTEGERS = torch.ones(3, 4, dtype=torch.int64), torch.ones(5, 4, dtype=torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gemmtune.mm(INTEGERS[0], INTEGERS[1].t(), out_dtype=torch.float32),
        lambda: gemmtune.mm(INTEGERS[0], INTEGERS[1].t(), epilogue=[fuse.relu()]),
        lambda: gemmtune.mm(INTEGERS[0], INTEGERS[1].t(), epilogue=[fuse.relu()], out=torch.empty(3, 5)),
        lambda: gemmtune.linear(*INTEGERS, epilogue=[fuse.relu()]),
    ],
)
def test_call_that_pytorchs_function_does_not_know_is_not_given_to_it(call: Callable[[], Tensor]) -> None:
    with pytest.raises(checks.DtypeError, match="the operands' dtype"):
        call()


@pytest.mark.parametrize("bias", [None, torch.ones(5, dtype=torch.int64)])
def test_integer_linear_writes_its_out(bias: Tensor | None) -> None:
    out = torch.empty(3, 5, dtype=torch.int64)
    for _ in range(2):
        assert gemmtune.linear(*INTEGERS, bias, out=out.zero_()) is out
        assert out.tolist() == [[4 if bias is None else 5] * 5] * 3


def test_autocast_converts_what_pytorch_converts() -> None:
    relu = [fuse.relu()]
    with torch.autocast("cpu", torch.bfloat16):
        assert gemmtune.mm(A.double(), B.t().double(), epilogue=relu).dtype == torch.float64
        assert gemmtune.mm(A.half(), B.t(), epilogue=relu).dtype == torch.bfloat16
        assert gemmtune.linear(A, PACKED_B, epilogue=relu).dtype == torch.float32
        assert gemmtune.mixed_mm(A, B.t().to(torch.int8), torch.ones(5)).dtype == torch.float32
        assert gemmtune.mixed_mm(A, B.t().to(torch.int8), torch.ones(5), epilogue=relu).dtype == torch.float32
    assert gemmtune.mm(A, B.t(), epilogue=relu).dtype == torch.float32


def test_out_of_a_call_under_autocast_keeps_its_dtype() -> None:
    out = torch.empty(3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert gemmtune.mm(A, B.t(), epilogue=[fuse.relu()], out=out) is out
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, torch.relu(A @ B.t()), rtol=2e-2, atol=5e-2)


def test_error_under_a_transform_is_that_of_the_op() -> None:
    with pytest.raises(checks.ShapeError, match=r"\(3x4 and 3x5\)"):
        torch.vmap(lambda a: gemmtune.mm(a, torch.ones(3, 5)))(torch.ones(2, 3, 4))
    with pytest.raises(checks.DtypeError, match="float != double"):
        torch.vmap(lambda a: gemmtune.mm(a, torch.ones(4, 5).double()))(torch.ones(2, 3, 4))


def test_fake_operands_of_other_devices_and_dtypes_raise_the_errors_of_the_op() -> None:
    with FakeTensorMode():
        a, b = torch.ones(3, 4), torch.ones(4, 5)
        assert gemmtune.mm(a, b).shape == (3, 5)
        with pytest.raises(checks.DtypeError, match="float != c10::BFloat16"):
            gemmtune.mm(a, b.bfloat16())
        with pytest.raises(checks.DtypeError, match="same device"):
            gemmtune.mm(a, b.to("meta"))


def test_public_function_has_the_signature_and_the_documentation() -> None:
    signature = inspect.signature(gemmtune.mixed_mm)
    keywords = [name for name, p in signature.parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert list(signature.parameters)[:4] == ["mat1", "mat2", "scale", "zero_point"]
    assert keywords == ["bits", "group_size", "bias", "out_dtype", "epilogue", "out"]
    assert (signature.parameters["bits"].default, signature.parameters["scale"].default) == (8, None)
    assert signature.parameters["mat1"].default is inspect.Parameter.empty
    assert (gemmtune.mixed_mm.__doc__ or "").startswith("Floating activations [M, K] by a quantised weight")
    assert gemmtune.mixed_mm.__module__ == "gemmtune.ops.mixed_mm"
    assert gemmtune.mixed_mm.__annotations__["bits"] == "int"


@pytest.mark.parametrize("extra", [{}, {"epilogue": [fuse.relu()]}, {"out_dtype": torch.float64}])
@pytest.mark.parametrize("optional", [(), ("bias",), ("zero_point",), ("zero_point", "bias")])
def test_cached_calls_with_any_optional_operands_are_told_apart(
    optional: tuple[str, ...], extra: dict[str, Any]
) -> None:
    """Each combination has a key of its own, and the second call of each is served by the cache."""
    q, scale = torch.randint(-8, 8, (5, 4), dtype=torch.int8), torch.rand(5)
    operands = {"zero_point": torch.rand(5), "bias": torch.rand(5)}
    given: dict[str, Any] = {name: operands[name] for name in optional}
    zero, bias = given.get("zero_point", 0.0), given.get("bias", 0.0)
    expected = A @ ((q.float().t() - zero) * scale) + bias
    expected = torch.relu(expected) if "epilogue" in extra else expected
    quant = gemmtune.pack(q, scale=scale, zero_point=given.get("zero_point"), layout="aten:dequant/float32")
    given_bias = {name: value for name, value in given.items() if name == "bias"}
    for _ in range(2):
        raw = gemmtune.mixed_mm(A, q.t(), scale, **given, **extra)
        packed = gemmtune.mixed_mm(A, quant, **given_bias, **extra)
        for result in (raw, packed):
            assert result.dtype == extra.get("out_dtype", torch.float32)
            torch.testing.assert_close(result.float(), expected, rtol=1e-4, atol=1e-4)
        out = torch.empty(3, 5, dtype=result.dtype)
        assert gemmtune.mixed_mm(A, quant, **given_bias, **extra, out=out) is out
        torch.testing.assert_close(out.float(), expected, rtol=1e-4, atol=1e-4)


def test_cached_calls_with_a_packed_weight_and_a_bias_are_told_apart() -> None:
    bias, out = torch.randn(5), torch.empty(3, 5)
    for _ in range(2):
        torch.testing.assert_close(gemmtune.linear(A, PACKED_B), A @ B.t())
        torch.testing.assert_close(gemmtune.linear(A, PACKED_B, bias), A @ B.t() + bias)
        torch.testing.assert_close(gemmtune.linear(A, PACKED_B, epilogue=[fuse.add(bias)]), A @ B.t() + bias)
        assert gemmtune.linear(A, PACKED_B, bias, out=out.zero_()) is out
        torch.testing.assert_close(out, A @ B.t() + bias)
        torch.testing.assert_close(gemmtune.mm(A, PACKED_B), A @ B.t())
        torch.testing.assert_close(gemmtune.addmm(bias, A, PACKED_B, beta=2), A @ B.t() + 2 * bias)


def test_key_has_the_number_of_threads() -> None:
    DISPATCH_CACHE.clear()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            gemmtune.mm(A, B.t())
    finally:
        torch.set_num_threads(threads)
    assert len(DISPATCH_CACHE) == 2


def test_operands_that_are_none_raise_the_errors_of_the_op() -> None:
    for call in (gemmtune.mm, gemmtune.bmm, gemmtune.linear, gemmtune.int_mm):
        for operands in ((None, A), (A, None), ([1.0], A)):
            with pytest.raises(TypeError, match="must be Tensor"):
                call(*operands)  # type: ignore[operator]


@pytest.mark.usefixtures("registered_op")
def test_op_that_is_registered_again_records_only_its_new_functions() -> None:
    table.register(SPEC._replace(records={torch.outer: _recorded}))
    assert torch.inner not in table.DESCRIBERS
    assert torch.outer in table.DESCRIBERS
    table.register(SPEC)
    assert torch.outer not in table.DESCRIBERS
