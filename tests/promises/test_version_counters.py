"""What is written into ``out=`` counts in its version counter once a call: autograd finds stale saved tensors by it."""

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

Into = Callable[[Tensor], object]


def _packed(into: Callable[[Any, Tensor], object], weight: Tensor, **more: Any) -> Callable[[], Into]:
    def make() -> Into:
        packed = gemmtune.pack(weight, **more)
        return lambda out: into(packed, out)

    return make


# Each makes what writes into an out [M, N] (or [3, M, N]) of a dtype.
PACKED: dict[str, tuple[Callable[[], Into], torch.dtype]] = {
    "mm": (_packed(lambda w, out: gemmtune.mm(X, w, out=out), WEIGHT), torch.float32),
    "linear": (_packed(lambda w, out: gemmtune.linear(X, w, BIAS, out=out), WEIGHT), torch.float32),
    "linear, epilogue": (
        _packed(lambda w, out: gemmtune.linear(X, w, epilogue=[fuse.relu()], out=out), WEIGHT), torch.float32,
    ),
    "linear, strided": (
        _packed(lambda w, out: gemmtune.linear(X.t().contiguous().t(), w, out=out), WEIGHT), torch.float32,
    ),
    "addmm": (_packed(lambda w, out: gemmtune.addmm(BIAS, X, w, beta=0.5, out=out), WEIGHT), torch.float32),
    "int_mm": (_packed(lambda w, out: gemmtune.int_mm(INTS, w, out=out), INT_WEIGHT), torch.int32),
    "mixed_mm": (
        _packed(lambda w, out: gemmtune.mixed_mm(X, w, out=out), INT_WEIGHT, scale=torch.rand(N)), torch.float32,
    ),
}  # fmt: skip
RAW: dict[str, tuple[Into, tuple[int, ...], torch.dtype]] = {
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


def counts(call: Into, out: Tensor, calls: int = 3) -> list[int]:
    """By how much each of some calls raises the counter: the first is prepared, the others are remembered."""
    found = []
    for _ in range(calls):
        before = out._version
        with torch.no_grad():
            call(out)
        found.append(out._version - before)
    return found


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("name", PACKED)
def test_packed_weights(name: str) -> None:
    make, dtype = PACKED[name]
    call, out = make(), torch.empty(OUT, dtype=dtype)
    assert counts(call, out) == [1, 1, 1]
    base = torch.empty(2 * M, N, dtype=dtype)
    call(base[M:])
    assert base._version == 1


@pytest.mark.parametrize("name", RAW)
def test_plain_pytorch(name: str) -> None:
    call, shape, dtype = RAW[name]
    assert counts(call, torch.empty(shape, dtype=dtype)) == [1, 1, 1]


def kernels_of(problem: Problem, backend: str) -> list[Candidate]:
    """One candidate of each template that takes the raw weight, and is not what serves anyhow."""
    room = backends.get(backend)
    plain = AtenBackend().default_candidate(problem)
    found: dict[str, Candidate] = {}
    for item in room.candidates(problem, current_target()):
        if isinstance(item, Candidate) and item.id != plain.id and room.packing_of(problem, item) is None:
            found.setdefault(item.template, item)
    return list(found.values())


@pytest.mark.parametrize("backend", ["native", "aten"])
@pytest.mark.parametrize("name", RAW)
def test_tuned_kernels_of_raw_weights(name: str, backend: str, own_store: MemoryStore) -> None:
    call, shape, dtype = RAW[name]
    out = torch.empty(shape, dtype=dtype)
    with gemmtune.record() as recorded:
        call(out)
    ((problem, _),) = recorded.problems
    found = kernels_of(problem, backend)
    if not found:
        pytest.skip(f"{backend} has no other kernel for {problem.key}")
    for candidate in found:
        own_store.put(current_target(), decide(problem, evidence(candidate, 0.1), chosen=candidate))
        RUNTIME.refresh(own_store)
        served = RUNTIME.kernel_for(problem)
        if served is None:  # just what PyTorch runs
            assert backend == "aten"
        else:
            assert served.candidate == candidate
        assert counts(call, out) == [1, 1, 1], candidate.id


def test_a_kernel_that_counts_nothing_itself(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its prepared launch and by the general path; an out that shares memory with an operand is copied into."""
    monkeypatch.setattr(ToyKernel, "run", lambda self, a, b, aux, out: out.data.copy_(a @ b))
    register()
    square = torch.randn(N, N)
    with gemmtune.record() as recorded:
        gemmtune.mm(square, square.t())
    store_decision(own_store, recorded.problems[0][0], evidence(toy(), 0.1), chosen=toy())
    out = torch.empty(N, N)
    assert counts(lambda out: gemmtune.mm(square, square.t(), out=out), out) == [1, 1, 1]
    assert counts(lambda out: gemmtune.mm(out, square.t(), out=out), out) == [1, 1, 1]
    monkeypatch.setattr("gemmtune.dispatch.call.add_to_cache", lambda *_: None)
    assert counts(lambda out: gemmtune.mm(square, square.t(), out=out), out) == [1, 1, 1]
    with gemmtune.record():
        assert counts(lambda out: gemmtune.mm(square, square.t(), out=out), out) == [1, 1, 1]


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("view", [False, True], ids=["out", "a view of it"])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_stale_saved_tensor_is_found(view: bool, calls: int) -> None:
    packed, out = gemmtune.pack(WEIGHT), torch.zeros(OUT)
    factor = torch.ones(OUT, requires_grad=True)
    if calls == 2:
        gemmtune.linear(X, packed, out=out[:] if view else out)
    product = (factor * out).sum()  # saves out
    gemmtune.linear(X, packed, out=out[:] if view else out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.usefixtures("verified")
def test_inference_tensors_have_no_counter() -> None:
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
def test_an_empty_out_is_resized_and_counted() -> None:
    packed, out = gemmtune.pack(WEIGHT), torch.empty(0)
    gemmtune.linear(X, packed, out=out)
    assert out._version > 0
    assert out.shape == OUT
