"""mm, addmm, bmm and linear agree with PyTorch in results, shapes, dtypes, accepted strides and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import gemmtune
from gemmtune import fuse
from gemmtune.core.checks import DtypeError, GradError, ShapeError
from gemmtune.core.workloads import linear_problem
from gemmtune.ops.torch_linear import torch_linear
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=2e-2 if expected.element_size() == 2 else 1e-4, atol=1e-3)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Draw matrices [M, K] and [K, N] of one dtype, each dense, transposed, strided, offset, padded or expanded."""
    m, k, n = (draw(st.integers(0, 9)) for _ in range(3))
    dtype = draw(st.sampled_from(DTYPES))
    return draw_view(draw, m, k, dtype), draw_view(draw, k, n, dtype)


def draw_view(draw: st.DrawFn, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    form = draw(st.sampled_from(("dense", "transposed", "strided", "offset", "padded", "expanded")))
    if form == "transposed":
        return torch.randn(cols, rows).to(dtype).t()
    if form == "strided":
        return torch.randn(rows, 2 * cols + 1).to(dtype)[:, 1::2]
    if form == "offset":
        return torch.randn(rows * cols + 3).to(dtype)[3:].view(rows, cols)
    if form == "padded":
        return torch.randn(rows, cols + 5).to(dtype)[:, :cols]
    if form == "expanded":
        return torch.randn(1, cols).to(dtype).expand(rows, cols)
    return torch.randn(rows, cols).to(dtype)


@settings(max_examples=120, deadline=None)
@given(matrices())
def test_mm_matches_torch(pair: tuple[Tensor, Tensor]) -> None:
    a, b = pair
    assert_close(gemmtune.mm(a, b), torch.mm(a, b))


@settings(max_examples=80, deadline=None)
@given(matrices(), st.sampled_from(("none", "n", "one", "zero-d", "row", "full")))
def test_linear_matches_torch(pair: tuple[Tensor, Tensor], kind: str) -> None:
    x, w = pair[0], pair[1].t()
    m, n = x.shape[0], w.shape[0]
    shapes = {"n": (n,), "one": (1,), "zero-d": (), "row": (1, n), "full": (m, n)}
    bias = None if kind == "none" else torch.randn(shapes[kind]).to(x.dtype)
    assert_close(gemmtune.linear(x, w, bias), F.linear(x, w, bias))


@settings(max_examples=80, deadline=None)
@given(
    matrices(),
    st.sampled_from(("", "n", "1n", "m1", "mn", "1")),
    st.sampled_from((1, 0, -0.5)),
    st.sampled_from((1, 2.0)),
)
def test_addmm_broadcasts_as_torch_does(pair: tuple[Tensor, Tensor], kind: str, beta: float, alpha: float) -> None:
    a, b = pair
    sizes = {"m": a.shape[0], "n": b.shape[1], "1": 1}
    addend = torch.randn([sizes[letter] for letter in kind]).to(a.dtype)
    expected = torch.addmm(addend, a, b, beta=beta, alpha=alpha)
    assert_close(gemmtune.addmm(addend, a, b, beta=beta, alpha=alpha), expected)


def test_addmm_ignores_nan_when_beta_is_zero() -> None:
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    nan = torch.full((2, 4), float("nan"))
    assert_close(gemmtune.addmm(nan, a, b, beta=0), torch.mm(a, b))


@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), (0, 3, 4, 5), (2, 3, 0, 5), (1, 1, 7, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bmm_matches_torch(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, m, k, n = sizes
    a, b = torch.randn(batch, k, m).to(dtype).mT, torch.randn(k, batch, n).to(dtype).transpose(0, 1)
    assert_close(gemmtune.bmm(a, b), torch.bmm(a, b))


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5), (1, 2, 3, 5), (0, 5), (2, 0, 5)])
def test_linear_keeps_leading_sizes(shape: tuple[int, ...]) -> None:
    x, w, b = torch.randn(shape), torch.randn(7, 5), torch.randn(7)
    assert_close(gemmtune.linear(x, w, b), F.linear(x, w, b))
    packed = gemmtune.pack(w, layout="aten:row")
    assert_close(gemmtune.linear(x, packed, b), F.linear(x, w, b))


def test_epilogue_is_applied_to_zero_for_k_of_zero() -> None:
    a, b = torch.empty(2, 0), torch.empty(0, 3)
    assert torch.equal(gemmtune.mm(a, b, epilogue=[fuse.add(torch.ones(3)), fuse.scale(2.0)]), torch.full((2, 3), 2.0))


def test_integer_products_are_computed_by_torch() -> None:
    a, b = torch.arange(6).view(2, 3), torch.arange(12).view(3, 4)
    assert torch.equal(gemmtune.mm(a, b), torch.mm(a, b))
    assert torch.equal(gemmtune.linear(a, b.t()), F.linear(a, b.t()))


ACTIVATIONS = {
    "relu": (fuse.relu(), F.relu),
    "gelu": (fuse.gelu(), F.gelu),
    "gelu_tanh": (fuse.gelu(approximate="tanh"), lambda t: F.gelu(t, approximate="tanh")),
    "silu": (fuse.silu(), F.silu),
    "clamp": (fuse.clamp(-0.5, 0.5), lambda t: t.clamp(-0.5, 0.5)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_epilogue_steps_are_applied_in_order(name: str) -> None:
    step, function = ACTIVATIONS[name]
    x, w, b, r, s = torch.randn(4, 6), torch.randn(5, 6), torch.randn(5), torch.randn(4, 5), torch.rand(4, 1)
    result = gemmtune.linear(x, w, b, epilogue=[step, fuse.add(r, value=0.5), fuse.mul(s)])
    assert_close(result, (function(F.linear(x, w, b)) + 0.5 * r) * s)


def test_out_dtype_is_not_rounded_twice() -> None:
    a, b = torch.randn(4, 64).bfloat16(), torch.randn(64, 5).bfloat16()
    result = gemmtune.mm(a, b, out_dtype=torch.float32)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["dense", "transposed", "padded", "aliased"])
def test_out_may_have_any_strides_or_alias_an_operand(form: str, own_store: MemoryStore) -> None:
    register()
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    expected = torch.mm(a, b)
    outs = {
        "dense": torch.empty(4, 4),
        "transposed": torch.empty(4, 4).t(),
        "padded": torch.empty(4, 9)[:, :4],
        "aliased": a,
    }
    problem = linear_problem(4, 4, 4, "float32", constant=False)
    store_decision(own_store, problem, evidence(toy(), 0.1), chosen=toy())
    out = outs[form]
    weight = b.t().contiguous()
    result = gemmtune.linear(a, weight, out=out)
    assert result is out
    assert TOY_RUNS[-1][0] == toy().id
    torch.testing.assert_close(out, expected)


ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(4, 5)), ShapeError, r"cannot be multiplied \(2x3 and 4x5\)"),
    (lambda: gemmtune.mm(torch.ones(2, 3, 1), torch.ones(3, 5)), ShapeError, "must be a matrix, got 3-D"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5).double()), DtypeError, "float != double"),
    (lambda: gemmtune.mm(5, torch.ones(2, 2)), TypeError, r"argument 'input' \(position 1\) must be Tensor, not int"),
    (lambda: gemmtune.mm(torch.ones(2, 2), None), TypeError, "must be Tensor or PackedWeight, not NoneType"),
    (lambda: gemmtune.mm(torch.ones(2, 3, dtype=torch.complex64), torch.ones(3, 5)), DtypeError, "complex"),
    (lambda: gemmtune.mm(torch.ones(2, 3).to_sparse(), torch.ones(3, 5)), DtypeError, "sparse"),
    (lambda: gemmtune.linear(torch.ones(2, 3), torch.ones(4, 5)), ShapeError, r"\(2x3 and 5x4\)"),
    (lambda: gemmtune.linear(torch.ones(2, 3), torch.ones(5, 3), torch.ones(4)), ShapeError, "broadcast"),
    (lambda: gemmtune.linear(torch.ones(2, 3), torch.ones(5, 3), 1.0), TypeError, "argument 'bias'"),
    (lambda: gemmtune.linear(torch.ones(2, 3), torch.ones(5, 3, device="meta")), DtypeError, "same device"),
    (lambda: gemmtune.bmm(torch.ones(2, 3), torch.ones(2, 3, 4)), ShapeError, "batch1 must be a 3D tensor"),
    (lambda: gemmtune.bmm(torch.ones(2, 3, 4), torch.ones(2, 3, 4)), ShapeError, r"to be: \[2, 4\] but got: \[2, 3\]"),
    (lambda: gemmtune.addmm(torch.ones(7), torch.ones(2, 3), torch.ones(3, 5)), ShapeError, "broadcast"),
    (lambda: gemmtune.addmm(torch.ones(5).double(), torch.ones(2, 3), torch.ones(3, 5)), DtypeError, "same dtype"),
    (lambda: gemmtune.addmm(torch.ones(5), torch.ones(2, 3), torch.ones(3, 5), beta="1"), TypeError, "beta must be"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5), out=torch.ones(2, 4)), ShapeError, r"shape \[2, 5\]"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5), out=torch.ones(2, 5).double()), DtypeError, "out tensor"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5), out=5), TypeError, "argument 'out'"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5), out=torch.ones(1, 5).expand(2, 5)), ShapeError, "share"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5), out_dtype=torch.int8), DtypeError, "out_dtype"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5), out_dtype="float32"), TypeError, "torch.dtype"),
    (lambda: gemmtune.mm(torch.ones(2, 3), torch.ones(3, 5), epilogue=["relu"]), TypeError, "gemmtune.fuse"),
    (
        lambda: gemmtune.mm(torch.ones(2, 3, requires_grad=True), torch.ones(3, 5), out=torch.ones(2, 5)),
        GradError,
        "don't support automatic differentiation",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[text for _, _, text in ERRORS])
def test_invalid_arguments_raise_errors(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_shape_error_is_a_runtime_error_and_a_value_error() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        gemmtune.mm(torch.ones(2, 3), torch.ones(4, 5))
    with pytest.raises(ValueError, match="cannot be multiplied"):
        gemmtune.mm(torch.ones(2, 3), torch.ones(4, 5))


@pytest.mark.parametrize("served", [False, True])
def test_meta_and_fake_tensors_return_shapes_and_dtypes(served: bool, own_store: MemoryStore) -> None:
    register()
    if served:
        store_decision(
            own_store, linear_problem(3, 5, 4, "bfloat16", constant=False), evidence(toy(), 0.1), chosen=toy()
        )
    x, w = torch.randn(3, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    packed = gemmtune.pack(w, layout="aten:row")
    gemmtune.linear(x, w)
    for weight in (w.to("meta"), packed):
        result = gemmtune.linear(x.to("meta")[None], weight)
        assert (result.shape, result.dtype, result.device.type) == ((1, 3, 5), torch.bfloat16, "meta")
    with FakeTensorMode() as mode:
        fake_x, fake_w = mode.from_tensor(x), mode.from_tensor(w)
        assert gemmtune.linear(fake_x, fake_w).shape == (3, 5)
        assert gemmtune.linear(fake_x, packed).shape == (3, 5)
        assert gemmtune.mm(fake_x, fake_w.t(), epilogue=[fuse.gelu()]).dtype == torch.bfloat16


class Marked(Tensor):
    """Tensor subclass without any behaviour of its own."""


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_subclasses_transforms_and_autocast_reach_torch(own_store: MemoryStore) -> None:
    register()
    store_decision(own_store, linear_problem(3, 5, 4, "float32", constant=False), evidence(toy(), 0.1), chosen=toy())
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    gemmtune.linear(x, w)
    assert TOY_RUNS[-1][0] == toy().id
    TOY_RUNS.clear()
    assert isinstance(gemmtune.linear(x.as_subclass(Marked), w), Marked)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert gemmtune.linear(x, w).dtype == torch.bfloat16
    stacked = torch.randn(2, 3, 4)
    assert_close(torch.vmap(lambda t: gemmtune.linear(t, w))(stacked), F.linear(stacked, w))
    _, tangent = torch.func.jvp(lambda t: gemmtune.linear(t, w), (x,), (torch.ones_like(x),))
    assert_close(tangent, F.linear(torch.ones_like(x), w))
    conjugate = torch.randn(3, 4, dtype=torch.complex64).conj().imag
    assert conjugate.is_neg()
    assert_close(gemmtune.linear(conjugate, w), F.linear(conjugate, w))
    assert TOY_RUNS == []


def test_torch_compile_traces_pytorch_functions() -> None:
    x, w, b = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    packed = gemmtune.pack(w, layout="aten:row")

    def model(x: Tensor) -> Tensor:
        y = gemmtune.linear(x, w, b, epilogue=[fuse.relu()]) + gemmtune.mm(x, w.t())
        return y + gemmtune.linear(x, packed) + gemmtune.addmm(b, x, w.t())

    compiled = torch.compile(model, backend="eager")
    assert_close(compiled(x), model(x))
    single_graph = torch.compile(
        lambda x: gemmtune.linear(x, w, b, epilogue=[fuse.relu()]), backend="eager", fullgraph=True
    )
    assert_close(single_graph(x), F.relu(F.linear(x, w, b)))


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (1, 5), (5,)])
def test_bias_broadcasts_against_the_result_with_its_leading_sizes(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(2, 4, 3), torch.randn(5, 3), torch.randn(shape)
    expected = F.linear(x, weight) + bias
    assert_close(gemmtune.linear(x, weight, bias), expected)
    if torch_linear is F.linear or bias.shape[:-1] in ((), (1,)):  # torch 2.9 adds no bias of several rows here
        assert_close(F.linear(x, weight, bias), expected)


@pytest.mark.parametrize("shape", [(4, 5), (2, 4, 5), (2, 1, 5)])
def test_bias_of_several_rows_is_also_added_by_pytorchs_function(shape: tuple[int, ...]) -> None:
    """PyTorch's function computes calls while torch.compile traces, and those of integers."""
    x, weight, bias = torch.randn(2, 4, 3), torch.randn(5, 3), torch.randn(shape)
    compiled = torch.compile(lambda: gemmtune.linear(x, weight, bias), backend="eager", fullgraph=True)
    assert_close(compiled(), F.linear(x, weight) + bias)
    x, weight, bias = ((4 * each).int() for each in (x, weight, bias))
    assert_close(gemmtune.linear(x, weight, bias), F.linear(x, weight) + bias)


def test_bias_of_other_leading_sizes_raises_shape_error() -> None:
    with pytest.raises(ShapeError, match="does not broadcast"):
        gemmtune.linear(torch.randn(2, 2, 3), torch.randn(5, 3), torch.randn(4, 5))


def test_empty_out_is_resized_as_in_pytorch() -> None:
    a, b, out = torch.randn(4, 3), torch.randn(3, 5), torch.empty(0)
    assert gemmtune.mm(a, b, out=out) is out
    assert_close(out, a @ b)


def test_device_mismatch_raises_after_a_cached_call() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    gemmtune.mm(a, b)
    gemmtune.linear(a, b.t())
    with pytest.raises(DtypeError, match="same device"):
        gemmtune.mm(a, b.to("meta"))
    with pytest.raises(DtypeError, match="same device"):
        gemmtune.linear(a, b.t().to("meta"))


def test_autocast_sets_the_dtype_of_a_product_with_an_epilogue() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 2)
    with torch.autocast("cpu", torch.bfloat16):
        for operand in (a, a.bfloat16()):
            result = gemmtune.mm(operand, b, epilogue=[fuse.relu()])
            assert_close(result, torch.relu(torch.mm(operand, b)))
            assert_close(gemmtune.linear(operand, b.t(), epilogue=[fuse.relu()]), result)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_nested_tensors_raise_dtype_error() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)])
    with pytest.raises(DtypeError, match="nested"):
        gemmtune.linear(nested, torch.randn(5, 3))
    with pytest.raises(DtypeError, match="nested"):
        fuse.add(nested)
