"""Tests that every call increments the version counter of ``out`` once, by which autograd detects modified tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import gemmtune
from gemmtune import backends, fuse
from gemmtune.backends.aten import AtenBackend
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Problem
from gemmtune.dispatch import RUNTIME, current_target
from gemmtune.store import MemoryStore
from helpers.serving import ToyKernel, decide, evidence, register, store_decision, toy

M, N, K = 4, 48, 32
X, WEIGHT, BIAS = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
INTS, INT_WEIGHT = (torch.randint(-9, 9, size, dtype=torch.int8) for size in ((M, K), (N, K)))
BATCH = torch.randn(3, M, K), torch.randn(3, K, N)
OUT = (M, N)

OutCall = Callable[[Tensor], object]


def _pack_and_call(into: Callable[[Any, Tensor], object], weight: Tensor, **more: Any) -> Callable[[], OutCall]:
    def make() -> OutCall:
        packed = gemmtune.pack(weight, **more)
        return lambda out: into(packed, out)

    return make


# Each function returns a call that writes into an out [M, N] (or [3, M, N]) of the dtype.
PACKED: dict[str, tuple[Callable[[], OutCall], torch.dtype]] = {
    "mm": (_pack_and_call(lambda w, out: gemmtune.mm(X, w, out=out), WEIGHT), torch.float32),
    "linear": (_pack_and_call(lambda w, out: gemmtune.linear(X, w, BIAS, out=out), WEIGHT), torch.float32),
    "linear, epilogue": (
        _pack_and_call(lambda w, out: gemmtune.linear(X, w, epilogue=[fuse.relu()], out=out), WEIGHT), torch.float32,
    ),
    "linear, strided": (
        _pack_and_call(lambda w, out: gemmtune.linear(X.t().contiguous().t(), w, out=out), WEIGHT), torch.float32,
    ),
    "addmm": (_pack_and_call(lambda w, out: gemmtune.addmm(BIAS, X, w, beta=0.5, out=out), WEIGHT), torch.float32),
    "int_mm": (_pack_and_call(lambda w, out: gemmtune.int_mm(INTS, w, out=out), INT_WEIGHT), torch.int32),
    "mixed_mm": (
        _pack_and_call(lambda w, out: gemmtune.mixed_mm(X, w, out=out), INT_WEIGHT, scale=torch.rand(N)), torch.float32,
    ),
}  # fmt: skip
RAW: dict[str, tuple[OutCall, tuple[int, ...], torch.dtype]] = {
    "mm": (lambda out: gemmtune.mm(X, WEIGHT.t(), out=out), OUT, torch.float32),
    "mm, epilogue": (lambda out: gemmtune.mm(X, WEIGHT.t(), epilogue=[fuse.relu()], out=out), OUT, torch.float32),
    "mm, out_dtype": (lambda out: gemmtune.mm(X, WEIGHT.t(), out_dtype=torch.bfloat16, out=out), OUT, torch.bfloat16),
    "linear": (lambda out: gemmtune.linear(X, WEIGHT, BIAS, out=out), OUT, torch.float32),
    "addmm": (lambda out: gemmtune.addmm(BIAS, X, WEIGHT.t(), out=out), OUT, torch.float32),
    "bmm": (lambda out: gemmtune.bmm(*BATCH, out=out), (3, M, N), torch.float32),
    "int_mm": (lambda out: gemmtune.int_mm(INTS, INT_WEIGHT.t(), out=out), OUT, torch.int32),
    "mixed_mm": (
        lambda out: gemmtune.mixed_mm(X, INT_WEIGHT.t(), torch.rand(N), out=out), OUT, torch.float32,
    ),
}  # fmt: skip


def version_increments(call: OutCall, out: Tensor, calls: int = 3) -> list[int]:
    """Return the increment of the version counter of each call. The first call misses the dispatch cache."""
    increments = []
    for _ in range(calls):
        before = out._version
        with torch.no_grad():
            call(out)
        increments.append(out._version - before)
    return increments


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("name", PACKED)
def test_a_call_with_a_packed_weight_counts_once(name: str) -> None:
    make, dtype = PACKED[name]
    call, out = make(), torch.empty(OUT, dtype=dtype)
    assert version_increments(call, out) == [1, 1, 1]
    base = torch.empty(2 * M, N, dtype=dtype)
    call(base[M:])
    assert base._version == 1


@pytest.mark.parametrize("name", RAW)
def test_a_call_that_pytorch_serves_counts_once(name: str) -> None:
    call, shape, dtype = RAW[name]
    assert version_increments(call, torch.empty(shape, dtype=dtype)) == [1, 1, 1]


def raw_candidates(problem: Problem, name: str) -> list[Candidate]:
    """Return one candidate of each template for raw weights, without the default candidate."""
    backend = backends.get(name)
    default = AtenBackend().default_candidate(problem)
    candidates: dict[str, Candidate] = {}
    for item in backend.candidates(problem, current_target()):
        if isinstance(item, Candidate) and item.id != default.id and backend.packing_of(problem, item) is None:
            candidates.setdefault(item.template, item)
    return list(candidates.values())


@pytest.mark.parametrize("backend", ["native", "aten"])
@pytest.mark.parametrize("name", RAW)
def test_a_call_that_a_tuned_kernel_serves_counts_once(name: str, backend: str, own_store: MemoryStore) -> None:
    call, shape, dtype = RAW[name]
    out = torch.empty(shape, dtype=dtype)
    with gemmtune.record() as recorded:
        call(out)
    ((problem, _),) = recorded.problems
    candidates = raw_candidates(problem, backend)
    if not candidates:
        pytest.skip(f"{backend} has no other kernel for {problem.key}")
    for candidate in candidates:
        own_store.put(current_target(), decide(problem, evidence(candidate, 0.1), chosen=candidate))
        RUNTIME.refresh(own_store)
        served = RUNTIME.kernel_for(problem)
        if served is None:  # equivalent to PyTorch's own function
            assert backend == "aten"
        else:
            assert served.candidate == candidate
        assert version_increments(call, out) == [1, 1, 1], candidate.id


def test_a_call_whose_kernel_does_not_count_counts_once(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call is cached, not cached, or recorded; one ``out`` shares memory with an operand, and is copied into."""
    monkeypatch.setattr(ToyKernel, "run", lambda self, a, b, aux, out: out.data.copy_(a @ b))
    register()
    square = torch.randn(N, N)
    with gemmtune.record() as recorded:
        gemmtune.mm(square, square.t())
    store_decision(own_store, recorded.problems[0][0], evidence(toy(), 0.1), chosen=toy())
    out = torch.empty(N, N)
    assert version_increments(lambda out: gemmtune.mm(square, square.t(), out=out), out) == [1, 1, 1]
    assert version_increments(lambda out: gemmtune.mm(out, square.t(), out=out), out) == [1, 1, 1]
    monkeypatch.setattr(RUNTIME, "cache_entry", lambda *_: None)
    assert version_increments(lambda out: gemmtune.mm(square, square.t(), out=out), out) == [1, 1, 1]
    with gemmtune.record():
        assert version_increments(lambda out: gemmtune.mm(square, square.t(), out=out), out) == [1, 1, 1]


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("view", [False, True], ids=["out", "a view of it"])
@pytest.mark.parametrize("calls", [1, 2])
def test_backward_raises_for_a_saved_tensor_that_was_overwritten(view: bool, calls: int) -> None:
    packed, out = gemmtune.pack(WEIGHT), torch.zeros(OUT)
    factor = torch.ones(OUT, requires_grad=True)
    if calls == 2:
        gemmtune.linear(X, packed, out=out[:] if view else out)
    product = (factor * out).sum()  # saves out
    gemmtune.linear(X, packed, out=out[:] if view else out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.usefixtures("verified")
def test_inference_tensors_are_written_without_a_version_counter() -> None:
    packed = gemmtune.pack(WEIGHT)
    with torch.inference_mode():
        out = torch.empty(OUT)
        for _ in range(2):
            gemmtune.linear(X, packed, out=out)
        torch.testing.assert_close(out, X @ WEIGHT.t())
    normal = torch.empty(OUT)
    with torch.inference_mode():
        for _ in range(2):
            gemmtune.linear(X, packed, out=normal)
    assert normal._version == 2


@pytest.mark.usefixtures("verified")
def test_an_empty_out_is_resized_and_its_version_increases() -> None:
    packed, out = gemmtune.pack(WEIGHT), torch.empty(0)
    gemmtune.linear(X, packed, out=out)
    assert out._version > 0
    assert out.shape == OUT
