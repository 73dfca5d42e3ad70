"""gemmtune.pack with the Plan's layout, the default layout or a named one; unpack; errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import backends
from gemmtune.backends.base import Availability
from gemmtune.core.candidate import Candidate, Illegal
from gemmtune.core.checks import DtypeError, ShapeError
from gemmtune.core.errors import KernelError, UnsupportedError
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight, QuantWeight
from gemmtune.core.workloads import int_problem, linear_problem, weight_only_problem
from gemmtune.dispatch import RUNTIME, policy
from gemmtune.ops.packing import b_operand, problem_of
from gemmtune.store import MemoryStore
from helpers.serving import ToyBackend, evidence, register, store_decision, toy

W = torch.randn(24, 32)


def test_pack_uses_the_layout_of_the_plan(own_store: MemoryStore) -> None:
    register()
    problem = linear_problem(4, 24, 32, "float32", bias=True)
    store_decision(own_store, problem, evidence(toy("other"), 0.1), chosen=toy("other"))
    assert gemmtune.pack(W, m=[problem]).layout == "toy:other"


@pytest.mark.skipif(not backends.get("native").available(gemmtune.current_target()), reason="no native kernels here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pack_uses_the_native_default_layout_without_a_plan(dtype: torch.dtype) -> None:
    weight = W.to(dtype)
    packed = gemmtune.pack(weight)
    assert packed.layout.startswith("native:")
    assert torch.equal(gemmtune.unpack(packed), weight)  # type: ignore[arg-type]
    x = torch.randn(3, 32).to(dtype)
    torch.testing.assert_close(gemmtune.linear(x, packed), torch.nn.functional.linear(x, weight), rtol=2e-2, atol=2e-2)


def test_policy_off_packs_without_a_plan(own_store: MemoryStore) -> None:
    register()
    problem = linear_problem(4, 24, 32, "float32")
    store_decision(own_store, problem, evidence(toy("other"), 0.1), chosen=toy("other"))
    assert gemmtune.pack(W, m=4).layout == "toy:other"
    gemmtune.policy("off")
    assert gemmtune.pack(W, m=4).layout != "toy:other"


def test_layout_of_a_plan_is_packed_for_an_m_without_kernels_of_it(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend lists kernels of the layout for 4 rows only, and the plan has one of them serve."""

    def candidates(self: ToyBackend, problem: Problem, target: Target) -> Iterator[Candidate]:
        yield toy("other" if problem.m == 4 else "plain")

    register()
    monkeypatch.setattr(ToyBackend, "candidates", candidates)
    problem = linear_problem(4, 24, 32, "float32")
    with pytest.raises(UnsupportedError, match="into layout 'toy:other'"):
        gemmtune.pack(W, m=64, layout="toy:other")
    store_decision(own_store, problem, evidence(toy("other"), 0.1), chosen=toy("other"))
    RUNTIME.refresh(own_store)
    assert gemmtune.pack(W, m=64, layout="toy:other").layout == "toy:other"
    with policy("off"), pytest.raises(UnsupportedError, match="into layout 'toy:other'"):
        gemmtune.pack(W, m=64, layout="toy:other")


@pytest.mark.parametrize(("raw_s", "layout"), [(0.5, "toy:other"), (0.1, None)])
def test_plan_packs_its_best_layout_if_that_beats_the_raw_weight(
    own_store: MemoryStore, raw_s: float, layout: str | None
) -> None:
    register()
    problem = linear_problem(4, 24, 32, "float32")
    rows = (evidence(toy(""), raw_s), evidence(toy("other"), 0.2), evidence(toy("plain"), 0.3))
    store_decision(own_store, problem, *rows, chosen=toy("" if layout is None else "other"))
    packed = gemmtune.pack(W, m=[4]).layout
    assert packed == layout if layout is not None else not packed.startswith("toy:")


def test_pack_raises_the_reason_why_kernels_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise KernelError("no room")

    for name in ("aten", "native"):
        monkeypatch.setattr(backends.get(name), "load", load)
    with pytest.raises(UnsupportedError, match=r"could not be loaded, the first of them aten/.*: no room"):
        gemmtune.pack(W, layout="aten:row")


@pytest.mark.parametrize("layout", ["aten:row", "aten:mkldnn/float32/m16"])
def test_pack_into_a_named_layout_and_unpack(layout: str) -> None:
    packed = gemmtune.pack(W, layout=layout)
    assert (packed.layout, packed.shape, packed.dtype) == (layout, (32, 24), "float32")
    unpacked = gemmtune.unpack(packed)
    assert isinstance(unpacked, torch.Tensor)
    assert torch.equal(unpacked, W)
    assert unpacked.is_contiguous()
    for m in (1, 7, 100):
        x = torch.randn(m, 32)
        torch.testing.assert_close(gemmtune.mm(x, packed), x @ W.t(), rtol=1e-4, atol=1e-4)


def test_unpack_restores_a_quantised_weight() -> None:
    data = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    scale, zero = torch.rand(2, 16), torch.randint(0, 16, (2, 16))
    packed = gemmtune.pack(data, scale=scale, zero_point=zero, group_size=32, layout="aten:dequant/float32")
    unpacked = gemmtune.unpack(packed)
    assert isinstance(unpacked, QuantWeight)
    assert packed.shape == (64, 16)
    assert torch.equal(unpacked.data.t(), data)
    assert torch.equal(unpacked.scale, scale)
    assert unpacked.zero_point is not None
    assert torch.equal(unpacked.zero_point, zero.float())


def test_packed_weight_is_a_copy() -> None:
    weight = W.clone()
    packed = gemmtune.pack(weight, layout="aten:row")
    expected = gemmtune.mm(torch.ones(1, 32), packed)
    weight.zero_()
    assert torch.equal(gemmtune.mm(torch.ones(1, 32), packed), expected)


I8 = torch.ones(4, 8, dtype=torch.int8)
ERRORS: list[tuple[Any, type[Exception], str]] = [
    (lambda: gemmtune.pack(5), TypeError, "must be Tensor, not int"),
    (lambda: gemmtune.pack(torch.ones(3)), ShapeError, r"expected a weight \[N, K\]"),
    (lambda: gemmtune.pack(torch.ones(3, 4, device="meta")), DtypeError, "only weights on cpu, cuda are packed"),
    (lambda: gemmtune.pack(torch.ones(3, 4, dtype=torch.int32)), DtypeError, "got int32"),
    (lambda: gemmtune.pack(torch.ones(3, 4, dtype=torch.complex64)), DtypeError, "complex"),
    (lambda: gemmtune.pack(I8, bits=8), TypeError, "give its scale too"),
    (lambda: gemmtune.pack(I8, group_size=4), TypeError, "give its scale too"),
    (lambda: gemmtune.pack(I8, zero_point=torch.ones(4)), TypeError, "give its scale too"),
    (lambda: gemmtune.pack(I8, bits=4, scale=torch.ones(4)), DtypeError, r"\(bits=4\) to be one of uint8"),
    (lambda: gemmtune.pack(I8, scale=torch.ones(4, device="meta")), TypeError, "scale is on meta"),
    (lambda: gemmtune.pack(W, m=-1), ValueError, "m must be a positive int; got -1"),
    (lambda: gemmtune.pack(W, m=True), ValueError, "m must be a positive int; got True"),
    (lambda: gemmtune.pack(W, m=[2.0]), ValueError, r"m must be a positive int; got 2\.0"),
    (lambda: gemmtune.pack(I8, scale=torch.ones(3)), ShapeError, r"scale of shape \[4\]"),
    (lambda: gemmtune.pack(W, m=0), ValueError, "m must be a positive int"),
    (lambda: gemmtune.pack(W, m=[]), ValueError, "at least one number of rows"),
    (lambda: gemmtune.pack(W, layout="aten:nonsense"), UnsupportedError, "into layout 'aten:nonsense'"),
    (lambda: gemmtune.unpack(W), TypeError, "expected a PackedWeight, not Tensor"),
]


@pytest.mark.parametrize(("call", "kind", "text"), ERRORS, ids=[text for _, _, text in ERRORS])
def test_invalid_arguments_raise_errors(call: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_weight_with_the_negative_bit_is_packed_by_its_values() -> None:
    negated, x = torch._neg_view(W), torch.randn(3, 32)
    assert torch.equal(gemmtune.unpack(gemmtune.pack(negated)), -W)
    torch.testing.assert_close(gemmtune.linear(x, gemmtune.pack(negated)), x @ -W.t(), rtol=1e-4, atol=1e-4)


def test_scale_or_layout_of_another_type_raises_type_error() -> None:
    with pytest.raises(TypeError, match="scale"):
        gemmtune.pack(W.to(torch.int8), scale=[1.0] * 24)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="layout"):
        gemmtune.pack(W, layout=3)  # type: ignore[arg-type]


class Reader(ToyBackend):
    """Backend whose kernels take the toy backend's layouts."""

    name = "reader"
    shared_layouts = ("toy",)

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        yield Candidate.make("reader", "slow", layout="plain", tag=0)


def test_layout_of_an_unavailable_backend_is_packed_by_another_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    backends.register("reader", f"{__name__}:Reader")
    weight = torch.randn(5, 4)
    try:
        assert list(backends.readers("toy:plain", "cpu")) == ["toy", "reader"]
        assert list(backends.readers("native:k1/float32/nr16", "cpu")) == ["native"]
        assert list(backends.readers("native:k1/float32/nr16", "cuda")) == []
        monkeypatch.setattr(
            type(backends.get("toy")), "available", lambda self, target: Availability(self.name != "toy")
        )
        assert gemmtune.pack(weight, layout="toy:plain").layout == "toy:plain"
    finally:
        backends._PLUGINS.pop("reader")
        backends.get.cache_clear()


@pytest.mark.parametrize("name", ["scale", "zero_point"])
def test_scale_without_memory_is_refused(name: str) -> None:
    operands = {"scale": torch.rand(24), "zero_point": torch.rand(24)}
    operands[name].untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=rf"{name}.* without memory"):
        gemmtune.pack(W.to(torch.int8), **operands)


def test_lazily_negated_scale_is_packed_by_its_values() -> None:
    scale = torch.rand(24)
    packed = gemmtune.pack(W.to(torch.int8), scale=torch._neg_view(scale), layout="aten:dequant/float32")
    back = gemmtune.unpack(packed)
    assert isinstance(back, QuantWeight)
    assert torch.equal(back.scale, -scale)


@pytest.mark.parametrize("name", ["scale", "zero_point"])
def test_scale_of_a_subclass_is_refused_even_if_it_is_negated(name: str) -> None:
    operands = {"scale": torch.rand(24), "zero_point": torch.rand(24)}
    operands[name] = torch._neg_view(operands[name]).as_subclass(type("Marked", (torch.Tensor,), {}))
    with pytest.raises(TypeError, match=rf"{name} is a .*Marked, a subclass of torch\.Tensor"):
        gemmtune.pack(W.to(torch.int8), **operands)


def test_weight_of_a_subclass_is_refused() -> None:
    with pytest.raises(TypeError, match=r"weight is a .*Marked, a subclass of torch\.Tensor"):
        gemmtune.pack(W.as_subclass(type("Marked", (torch.Tensor,), {})))


def test_weight_that_requires_a_gradient_is_detached() -> None:
    operand = b_operand(torch.nn.Parameter(W), None, None, None, None)
    assert isinstance(operand, torch.Tensor)
    assert not operand.requires_grad
    assert torch.equal(operand, W.t())


@pytest.mark.parametrize("zero_point", [None, torch.rand(24)])
@pytest.mark.parametrize(
    ("dtype", "bits", "k"), [(torch.uint8, None, 64), (torch.uint8, 4, 64), (torch.int8, None, 32)]
)
def test_quantised_operand_has_the_bits_of_its_dtype(
    dtype: torch.dtype, bits: int | None, k: int, zero_point: torch.Tensor | None
) -> None:
    data, scale = torch.ones(24, 32, dtype=dtype), torch.rand(24)
    raw = b_operand(data, scale, zero_point, bits, None)
    assert isinstance(raw, QuantWeight)
    assert (raw.k, raw.dtype) == (k, "int4" if dtype == torch.uint8 else "int8")
    options: Any = {"bits": 4 if dtype == torch.uint8 else 8, "zero_point": zero_point is not None}
    assert problem_of(raw, 5) == weight_only_problem(5, 24, k, dtype="float32", **options)
    half = problem_of(raw, 1, torch.float16)
    assert half == weight_only_problem(1, 24, k, dtype="float16", scale_dtype="float32", **options)


def test_problem_of_a_plain_operand_is_that_of_its_op() -> None:
    assert problem_of(W.t(), 7) == linear_problem(7, 24, 32, "float32")
    assert problem_of(W[:1].t(), 1) == linear_problem(1, 1, 32, "float32")
    assert problem_of(I8.t(), 7) == int_problem(7, 4, 8)


class HalfOnly(ToyBackend):
    """Backend with one kernel, for float16 activations, and candidates that cannot run or be loaded."""

    name = "half"

    def candidates(self, problem: Problem, target: Target) -> Iterator[Candidate | Illegal]:
        yield Illegal(Candidate.make("half", "slow", layout="wanted", tag=0), "it is illegal")
        yield Candidate.make("half", "slow", layout="broken", tag=0)
        yield Candidate.make("half", "slow", layout="other", tag=0)
        if problem.a.dtype == "float16":
            yield Candidate.make("half", "slow", layout="wanted", tag=1)

    def load(self, artifact: Any, problem: Problem) -> Any:
        if artifact.candidate["layout"] == "broken":
            raise KernelError("no room")
        kernel = super().load(artifact, problem)
        kernel.packing = f"half:{artifact.candidate['layout']}"
        return kernel


@pytest.fixture
def half_backend() -> Iterator[None]:
    backends.register("half", f"{__name__}:HalfOnly")
    yield
    backends._PLUGINS.pop("half")
    backends.get.cache_clear()


@pytest.mark.usefixtures("half_backend")
def test_layout_for_activations_of_another_dtype_than_the_scales_is_found() -> None:
    packed = gemmtune.pack(W.to(torch.int8), scale=torch.rand(24), layout="half:wanted")
    assert isinstance(packed, PackedWeight)
    assert packed.layout == "half:wanted"
    with pytest.raises(
        UnsupportedError, match=r"layout 'half:wanted' \(1 of its kernels could not be loaded, the first"
    ):
        gemmtune.pack(W, m=1, layout="half:wanted")


def test_weight_that_no_backend_packs_by_default_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in backends.names("cpu"):
        monkeypatch.setattr(backends.get(name), "default_packing", lambda problem, target: None)
    text = r"^no backend here packs a float32 weight \(K = 32, N = 24\) into any layout; `gemmtune doctor`"
    with pytest.raises(UnsupportedError, match=text):
        gemmtune.pack(W)


def test_backend_that_is_not_available_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in backends.names("cpu"):
        monkeypatch.setattr(backends.get(name), "available", lambda target: Availability(False, "no such device"))
    with pytest.raises(UnsupportedError, match="into any layout"):
        gemmtune.pack(W)
    with pytest.raises(UnsupportedError, match="into layout 'aten:row'"):
        gemmtune.pack(W, layout="aten:row")
