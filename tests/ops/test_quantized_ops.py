"""int_mm, mixed_mm and scaled_mm against integer or float64 arithmetic, and their errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import gemmtune
from gemmtune import fuse
from gemmtune.backends.aten.cpu_rules import scaled_mm_takes_rows
from gemmtune.core.checks import DtypeError, GradError, ShapeError
from gemmtune.core.errors import PackedWeightError
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import int_problem
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy


def random_integers(*shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, shape, dtype=dtype)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 9), st.integers(0, 40), st.integers(0, 9), st.sampled_from((torch.int8, torch.uint8)), st.booleans()
)
def test_int_mm_is_exact(m: int, k: int, n: int, dtype: torch.dtype, is_transposed: bool) -> None:
    a, b = random_integers(m, k, dtype=dtype), random_integers(n, k).t() if is_transposed else random_integers(k, n)
    product = gemmtune.int_mm(a, b)
    assert product.dtype == torch.int32
    assert torch.equal(product.long(), a.long() @ b.long())


def test_int_mm_requantises_with_one_rounding() -> None:
    a, b = random_integers(3, 32), random_integers(32, 5)
    scale, bias = torch.rand(5) * 0.01, torch.randn(5)
    result = gemmtune.int_mm(a, b, out_dtype=torch.int8, epilogue=[fuse.scale(scale, axis="col"), fuse.bias(bias)])
    exact = (a.double() @ b.double()) * scale.double() + bias.double()
    assert result.dtype == torch.int8
    assert (result.double() - exact.clamp(-128, 127)).abs().max() <= 0.5 + 1e-3


def test_integer_bias_is_added_exactly() -> None:
    a, b = torch.full((2, 2048), 127, dtype=torch.int8), torch.full((2048, 3), 127, dtype=torch.int8)
    bias = torch.tensor([1, 2, 3], dtype=torch.int32)
    assert gemmtune.int_mm(a, b, epilogue=[fuse.bias(bias)])[0].tolist() == [127 * 127 * 2048 + i for i in (1, 2, 3)]


def random_int4(k: int, n: int) -> tuple[Tensor, Tensor]:
    """Return values 0..15 [K, N], and those values with two in a byte [ceil(K / 2), N], low nibble first."""
    values = torch.randint(0, 16, (k, n))
    padded = torch.cat((values, torch.zeros(k % 2, n, dtype=torch.int64)))
    return values, (padded[0::2] + 16 * padded[1::2]).to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 3, 20])
@pytest.mark.parametrize("k", [32, 37])
@pytest.mark.parametrize("zero", [None, "float", "int"])
@pytest.mark.parametrize("group", [None, 16])
@pytest.mark.parametrize("bits", [8, 4])
def test_mixed_mm_matches_float64(
    bits: int, group: int | None, zero: str | None, k: int, m: int, dtype: torch.dtype
) -> None:
    n = 6
    x = torch.randn(m, k).to(dtype)
    values, data = random_int4(k, n) if bits == 4 else (random_integers(k, n), torch.empty(0))
    data = values.to(torch.int8) if bits == 8 else data
    shape = (n,) if group is None else (-(-k // group), n)
    scale = (torch.rand(shape) * 0.02).to(dtype)
    zeros = {None: None, "float": torch.randn(shape).to(dtype), "int": torch.randint(-3, 4, shape)}[zero]
    offset = 8.0 if bits == 4 and zeros is None else (0.0 if zeros is None else zeros.double())
    expand_groups = (lambda t: t) if group is None else (lambda t: t.repeat_interleave(group, 0)[:k])
    offset = expand_groups(offset) if isinstance(offset, Tensor) else offset
    expected = x.double() @ ((values.double() - offset) * expand_groups(scale.double()))
    result = gemmtune.mixed_mm(x, data, scale, zeros, bits=bits, group_size=group)
    assert result.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    assert (result.double() - expected).norm() <= tolerance * expected.norm()


def test_mixed_mm_accepts_misaligned_operands() -> None:
    """ATen's int8 kernel crashes on misaligned operands."""
    x = torch.randn(4 * 64 + 1).bfloat16()[1:].view(4, 64)
    w = random_integers(8 * 64 + 3)[3:].view(8, 64)
    scale = torch.rand(8).bfloat16()
    expected = (x.double() @ w.t().double()) * scale.double()
    result = gemmtune.mixed_mm(x, w.t(), scale)
    assert (result.double() - expected).norm() <= 1e-2 * expected.norm()


def test_packed_weights_are_served_in_int_mm_and_mixed_mm(own_store: MemoryStore) -> None:
    register()
    a, w = random_integers(4, 16), random_integers(5, 16)
    store_decision(own_store, int_problem(4, 5, 16), evidence(toy("plain"), 0.1), chosen=toy("plain"))
    packed = gemmtune.pack(w, m=4)
    assert packed.layout == "toy:plain"
    assert torch.equal(gemmtune.int_mm(a, packed), torch._int_mm(a, w.t()))
    assert TOY_RUNS[-1] == (toy("plain").id, 4, 4)
    x, scale = torch.randn(3, 16).bfloat16(), torch.rand(5).bfloat16()
    quant = gemmtune.pack(w, scale=scale, layout="toy:plain")
    bias = torch.randn(5).bfloat16()
    expected = (x.double() @ w.t().double()) * scale.double() + bias.double()
    for _ in range(2):
        result = gemmtune.mixed_mm(x, quant, bias=bias)
        assert (result.double() - expected).norm() <= 1e-2 * expected.norm()
    result = gemmtune.mixed_mm(x, quant, bias=bias, out_dtype=torch.float32, epilogue=[fuse.relu()])
    torch.testing.assert_close(result.double(), expected.relu(), rtol=1e-5, atol=1e-5)
    assert gemmtune.mixed_mm(x[:0], quant).shape == (0, 5)


E4M3 = torch.float8_e4m3fn


def test_scaled_mm_matches_torch() -> None:
    a, b = torch.randn(4, 16).to(E4M3), torch.randn(32, 16).to(E4M3).t()
    scalar = torch.tensor(0.5)
    rows, cols = torch.rand(4, 1) + 0.5, torch.rand(1, 32) + 0.5
    bias = torch.randn(32).bfloat16()
    for scale_a, scale_b in ((scalar, scalar), (rows, cols)):
        for extra in ({}, {"bias": bias}):
            if scale_a is scalar or scaled_mm_takes_rows():
                expected = torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, **extra)
            else:
                expected = ((a.float() @ b.float()) * rows * cols + extra.get("bias", torch.zeros(1))).bfloat16()
            product = gemmtune.scaled_mm(a, b, scale_a, scale_b, out_dtype=torch.bfloat16, **extra)
            torch.testing.assert_close(product, expected, rtol=1e-2, atol=1e-2)
    for dtype in (None, E4M3):
        result = gemmtune.scaled_mm(a, b, scalar, scalar, scale_result=torch.tensor(4.0), out_dtype=dtype)
        expected = torch._scaled_mm(a, b, scalar, scalar, scale_result=torch.tensor(4.0), out_dtype=dtype)
        assert result.dtype == expected.dtype == E4M3
        torch.testing.assert_close(result.float(), expected.float(), rtol=0.13, atol=0.01)
    mixed = gemmtune.scaled_mm(a, b, rows, scalar, out_dtype=torch.float32)
    torch.testing.assert_close(mixed, (a.float() @ b.float()) * rows * scalar)


X, W8, S = torch.ones(2, 8), torch.ones(8, 3, dtype=torch.int8), torch.ones(3)
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: gemmtune.int_mm(X, W8), DtypeError, "self's dtype to be one of int8, uint8; got float32"),
    (lambda: gemmtune.int_mm(W8.t(), X.t()), DtypeError, "mat2's dtype"),
    (lambda: gemmtune.int_mm(W8, W8), ShapeError, "8x3 and 8x3"),
    (lambda: gemmtune.int_mm([1], W8), TypeError, "must be Tensor, not list"),
    (lambda: gemmtune.mixed_mm(X, W8), TypeError, "missing argument 'scale'"),
    (lambda: gemmtune.mixed_mm(X, W8, torch.ones(4)), ShapeError, r"scale of shape \[3\]; got \[4\]"),
    (lambda: gemmtune.mixed_mm(X, W8, S, group_size=4), ShapeError, r"scale of shape \[2, 3\]"),
    (lambda: gemmtune.mixed_mm(X, W8, S, group_size=0), ValueError, "group_size"),
    (lambda: gemmtune.mixed_mm(X, W8, S, bits=3), ValueError, "bits must be 8 or 4"),
    (lambda: gemmtune.mixed_mm(X, W8, S, bits=4), DtypeError, r"\(bits=4\) to be one of uint8"),
    (lambda: gemmtune.mixed_mm(X, W8.view(torch.uint8), S, bits=4), ShapeError, "holds K = 16"),
    (lambda: gemmtune.mixed_mm(X, W8, S.int()), DtypeError, "scale's dtype"),
    (lambda: gemmtune.mixed_mm(X, W8, S, S.double()), DtypeError, "zero_point"),
    (lambda: gemmtune.mixed_mm(X, W8, S, bias=torch.ones(2)), ShapeError, "axis 'col'"),
    (lambda: gemmtune.mixed_mm(X.requires_grad_(), W8, S), GradError, "no gradient"),
    (lambda: gemmtune.mixed_mm(X.int(), W8, S), DtypeError, "mat1's dtype"),
    (lambda: gemmtune.mixed_mm(X, gemmtune.pack(W8.t().contiguous(), layout="aten:row")), PackedWeightError, "plain"),
    (lambda: gemmtune.scaled_mm(X, X.t(), S[:1], S[:1]), DtypeError, "float8"),
    (
        lambda: gemmtune.scaled_mm(X.detach().to(E4M3), X.detach().t().to(E4M3), torch.ones(3), torch.ones(1)),
        ShapeError,
        "scale_a with 1 or 2 elements",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[text for _, _, text in ERRORS])
def test_invalid_arguments_raise_errors(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.parametrize(("m", "k", "n"), [(1, 9, 5), (5, 1, 9), (1, 1, 9), (9, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_int_mm_of_vectors_with_unusual_strides_is_exact(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    a, b = random_integers(k, m, dtype=dtype).t(), random_integers(n, k).t()
    for _ in range(2):
        assert torch.equal(gemmtune.int_mm(a, b).double(), a.double() @ b.double())


def test_arguments_that_contradict_a_packed_weight_raise_value_error() -> None:
    x = torch.randn(2, 64)
    packed = gemmtune.pack(random_integers(4, 64), scale=torch.rand(2, 4), group_size=32)
    assert gemmtune.mixed_mm(x, packed, bits=8, group_size=32).shape == (2, 4)
    for options in ({"bits": 4}, {"group_size": 16}, {"zero_point": torch.zeros(2, 4)}):
        for _ in range(2):
            with pytest.raises(ValueError, match="packed weight"):
                gemmtune.mixed_mm(x, packed, **options)


def test_scaled_mm_checks_the_type_of_scale_result() -> None:
    a = torch.zeros(16, 16).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="scale_result"):
        gemmtune.scaled_mm(a, a.t(), torch.ones(()), torch.ones(()), None, 3.0)  # type: ignore[arg-type]


def test_cached_calls_with_raw_weights_and_fp8_make_no_new_problem(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mixed_mm of an unpacked weight and scaled_mm make one Problem, at the first call."""
    register()
    x, q, scale, bias = torch.randn(3, 16), random_integers(5, 16), torch.rand(5), torch.randn(5)
    grouped = torch.rand(2, 5)
    a, b = torch.randn(4, 16).to(E4M3), torch.randn(32, 16).to(E4M3).t()
    rows, cols, extra = torch.rand(4, 1) + 0.5, torch.rand(1, 32) + 0.5, torch.randn(32).bfloat16()
    product = x.double() @ q.t().double()
    expanded_scale = grouped.repeat_interleave(8, 0).double()
    calls: list[tuple[Any, Tensor]] = [
        (lambda: gemmtune.mixed_mm(x, q.t(), scale), product * scale.double()),
        (lambda: gemmtune.mixed_mm(x, q.t(), scale, bias=bias), product * scale.double() + bias.double()),
        (lambda: gemmtune.mixed_mm(x, q.t(), scale, torch.ones(5)), (product - x.double().sum(1, True)) * scale),
        (lambda: gemmtune.mixed_mm(x, q.t(), grouped, group_size=8), x.double() @ (q.t().double() * expanded_scale)),
        (
            lambda: gemmtune.scaled_mm(a, b, rows, cols, extra, out_dtype=torch.bfloat16),
            (a.double() @ b.double()) * rows.double() * cols.double() + extra.double(),
        ),
        (
            lambda: gemmtune.scaled_mm(a, b, rows[:1], cols[:, :1], out_dtype=torch.float32),
            (a.double() @ b.double()) * rows[0].double() * cols[0, 0].double(),
        ),
    ]
    with gemmtune.record() as recording:
        for call, _ in calls:
            call()
    assert len(recording) == len(calls)
    for tuned in (False, True):
        if tuned:
            for problem, _ in recording.problems:
                store_decision(own_store, problem, evidence(toy(), 0.1), chosen=toy())
        for call, expected in calls:
            for _ in range(2):
                TOY_RUNS.clear()
                torch.testing.assert_close(call().double(), expected, rtol=1e-2, atol=1e-2)
                assert len(TOY_RUNS) == tuned
        with monkeypatch.context() as patch:
            patch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))
            for call, expected in calls:
                torch.testing.assert_close(call().double(), expected, rtol=1e-2, atol=1e-2)


def test_scales_with_unusual_strides_are_accepted() -> None:
    x, q, scale = torch.randn(3, 16), random_integers(5, 16), torch.rand(5)
    expected = (x.double() @ q.t().double()) * scale.double()
    for _ in range(2):
        for scale_view in (scale, scale[None], torch._neg_view(-scale), torch.cat((scale, scale))[::2].copy_(scale)):
            result = gemmtune.mixed_mm(x, q.t(), scale_view)
            torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
    assert gemmtune.mixed_mm(x, q.t(), scale, torch.zeros(5, dtype=torch.int8)).shape == (3, 5)
    with pytest.raises(GradError, match="no gradient"):
        gemmtune.mixed_mm(x, q.t(), scale.clone().requires_grad_())


def test_int_mm_fallback_pads_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtune.backends.aten import padding
    from gemmtune.dispatch import fallback

    class OnGpu:
        is_cuda = True

    assert fallback.int_product(OnGpu()) is padding.int_product  # type: ignore[arg-type]
    assert fallback.int_product(torch.ones(2, 2, dtype=torch.int8)) is torch._int_mm


def test_scaled_mm_arguments_for_gpus_need_torch() -> None:
    from gemmtune.ops.scaled_mm import SPEC

    class OnGpu(Tensor):
        @property
        def is_cpu(self) -> bool:  # type: ignore[override]
            return False

        @property
        def is_cuda(self) -> bool:  # type: ignore[override]
            return True

    a, b = torch.zeros(4, 16).as_subclass(OnGpu), torch.zeros(16, 32)
    scalar, rows, cols = torch.ones(()), torch.ones(4, 1), torch.ones(1, 32)
    for scale_a, scale_b, result, use_fast_accum, expected in (
        (scalar, scalar, None, False, False), (rows, cols, None, False, False), (rows, scalar, None, False, False),
        (scalar, scalar, None, True, True), (scalar, scalar, scalar, False, True),
        (scalar.bfloat16(), scalar, None, False, True),
        (torch.ones(4, 2), cols, None, False, True), (scalar, 3, None, False, False),
    ):  # fmt: skip
        scales = {"scale_a": scale_a, "scale_b": scale_b, "scale_result": result}
        function = SPEC.torch_function(mat1=a, mat2=b, **scales, use_fast_accum=use_fast_accum)
        assert (function is not None) is expected
    on_cpu = {"mat1": b, "mat2": b, "scale_a": scalar, "scale_b": scalar, "scale_result": None}
    assert SPEC.torch_function(**on_cpu, use_fast_accum=True) is None
