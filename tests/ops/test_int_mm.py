"""int_mm: its Problem, its call without a kernel, and activations and weights whose strides torch misreads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import gemmtune
from gemmtune.core.problem import Layout, Problem
from gemmtune.core.workloads import int_problem
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.dispatch.specialize import adapt_args
from gemmtune.ops import int_mm
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, evidence, register, store_decision, toy

A = torch.arange(-12, 12, dtype=torch.int8).view(3, 8)
B = torch.arange(-20, 20, dtype=torch.int8).view(5, 8).t()
# Rows that overlap: torch._int_mm takes them for a matrix whose rows lie one after another.
OVERLAPPING = torch.arange(-20, 20, dtype=torch.int8).as_strided((3, 8), (2, 1))


def exact(a: Tensor, b: Tensor) -> Tensor:
    return (a.long() @ b.long()).int()


def test_problem_has_the_dtypes_and_the_layouts() -> None:
    call = int_mm.describe(A, B, constant=True)
    assert call.problem == int_problem(3, 5, 8)
    assert call.shape == (3, 5)
    assert int_mm.describe(A.view(torch.uint8), B).problem == int_problem(3, 5, 8, a_dtype="uint8", constant=False)
    assert int_mm.describe(A, B, torch.float16).problem.out_dtype == "float16"
    assert int_mm.describe(A, B[:, :1]).problem.b.layout == Layout("col")


@pytest.mark.parametrize("constant", [False, True])
def test_products_of_torch_are_recorded(constant: bool) -> None:
    weight = nn.Parameter(B, requires_grad=False) if constant else B
    with gemmtune.record() as recording:
        torch._int_mm(A, weight)
    assert recording.problems == [(int_problem(3, 5, 8, constant=constant), 1)]


def test_torch_has_a_function_only_for_operands_that_it_reads_as_they_are() -> None:
    packed = gemmtune.pack(B.t().contiguous(), layout="aten:row")
    function = int_mm.SPEC.torch_function(self=A, mat2=B)
    assert function is not None
    assert not function.required
    for a, b in (
        (A, packed),
        (A[0], B),
        (A, B[0]),
        (OVERLAPPING, B),
        (A, OVERLAPPING.t()),
        (A[:0], B),
        (A[:, :0], B[:0]),
        (A, B[:, :0]),
    ):
        assert int_mm.SPEC.torch_function(self=a, mat2=b) is None


@pytest.mark.parametrize(("a", "b"), [(A, B), (OVERLAPPING, B), (A, OVERLAPPING.t()), (OVERLAPPING, OVERLAPPING.t())])
@pytest.mark.parametrize("served", [False, True])
def test_operands_with_overlapping_rows_are_multiplied_exactly(
    a: Tensor, b: Tensor, served: bool, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    register()
    if served:
        store_decision(own_store, int_mm.describe(a, b).problem, evidence(toy(), 0.1), chosen=toy())
    TOY_RUNS.clear()
    assert torch.equal(gemmtune.int_mm(a, b), exact(a, b))
    assert len(TOY_RUNS) == served
    monkeypatch.setattr(Problem, "__post_init__", lambda _: pytest.fail("described again"))
    assert torch.equal(gemmtune.int_mm(a, b), exact(a, b))
    assert len(TOY_RUNS) == 2 * served


def test_kernels_get_operands_in_the_strides_that_the_problem_names() -> None:
    for a, b in ((A, B), (OVERLAPPING, B), (A, OVERLAPPING.t()), (OVERLAPPING, OVERLAPPING.t())):
        call = int_mm.describe(a, b)
        first, second, _ = adapt_args(call, (a, b))(a, b)
        assert (first is a, second is b) == (a is A, b is B)
        assert (first.stride(), second.stride()) == (call.a.stride(), call.b.stride())
        assert torch.equal(first, a)
        assert torch.equal(second, b)


@pytest.mark.parametrize("transposed", [False, True])
def test_activations_beside_a_packed_weight_are_dense(transposed: bool) -> None:
    packed = gemmtune.pack(B.t().contiguous(), layout="aten:row")
    a = A.t().contiguous().t() if transposed else A
    call = int_mm.describe(a, packed)
    first, second, _ = adapt_args(call, (a, packed))(a, packed)
    assert first.is_contiguous()
    assert (first is a) != transposed
    assert second is packed
    for _ in range(2):
        assert torch.equal(gemmtune.int_mm(a, packed), exact(A, B))


def test_call_that_cannot_be_cached_is_exact() -> None:
    DISPATCH_CACHE.clear()
    with gemmtune.record() as recording:
        assert torch.equal(gemmtune.int_mm(A, B), exact(A, B))
        assert torch.equal(gemmtune.int_mm(OVERLAPPING, B), exact(OVERLAPPING, B))
    assert not DISPATCH_CACHE
    assert recording.problems == [(int_problem(3, 5, 8, constant=False), 2)]


def test_out_is_written_in_its_dtype() -> None:
    out = torch.empty(3, 5, dtype=torch.float32)
    for _ in range(2):
        assert gemmtune.int_mm(A, B, out_dtype=torch.float32, out=out.zero_()) is out
        assert torch.equal(out, exact(A, B).float())
