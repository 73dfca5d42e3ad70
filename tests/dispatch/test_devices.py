"""Dispatch by device: keys, Indices and kernels of a CPU and of GPUs that are made up here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gemmtune
from gemmtune import backends
from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.checks import DtypeError
from gemmtune.core.decision import Sample
from gemmtune.core.errors import UnsupportedError
from gemmtune.core.problem import Problem
from gemmtune.core.target import Target
from gemmtune.core.weights import PackedWeight
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch import RUNTIME, build_plan, current_target, guards, specialize
from gemmtune.dispatch import call as call_module
from gemmtune.dispatch.cache import DISPATCH_CACHE
from gemmtune.store import MemoryStore
from helpers.serving import TOY_RUNS, decide, evidence, register, toy
from helpers.serving import store_decision as put_in_store

H200 = Target("cuda", "H200", "9.0", caches=(232448, 0, 62914560), cores=132)
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
W = torch.randn(5, 4)


def problem(m: int, constant: bool = False) -> Problem:
    return linear_problem(m, 5, 4, "float32", constant=constant)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two equal GPUs, as far as dispatch asks."""
    register()
    TOY_RUNS.clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        devices, "current_cuda", lambda sources=None, index=None: replace(H200, sources=tuple(sorted(sources.items())))
    )


def teach(store: MemoryStore, problem: Problem, candidate: Candidate) -> None:
    """Make a toy the winner on the GPU."""
    target = current_target("cuda")
    decision = decide(problem, evidence(candidate, 0.1), chosen=candidate)
    store.put(target, replace_target(decision, target))
    RUNTIME.refresh(store)


def replace_target(decision: Any, target: Target) -> Any:
    import msgspec

    return msgspec.structs.replace(decision, target_key=target.key)


@pytest.mark.usefixtures("gpus")
def test_decisions_are_a_devices_own(own_store: MemoryStore) -> None:
    teach(own_store, problem(3), toy("", 1))
    put_in_store(own_store, problem(3), evidence(toy("", 2), 0.1), chosen=toy("", 2))
    picked = [RUNTIME.kernel_for(problem(3), None, place) for place in (FIRST, SECOND, devices.CPU)]
    assert [kernel and kernel.candidate for kernel in picked] == [toy("", 1), toy("", 1), toy("", 2)]
    assert picked[0] is not picked[1]  # each device loads its own
    assert RUNTIME.kernel_for(problem(3), None, FIRST) is picked[0]
    assert RUNTIME.kernel_for(problem(3), None, torch.device("cuda")) is picked[0]
    assert RUNTIME.kernel_for(problem(3), None, torch.device("meta")) is None


@pytest.mark.usefixtures("gpus")
def test_a_gpus_target_has_the_sources_of_its_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(dict(current_target("cuda").sources)) == set(backends.names("cuda"))
    assert set(dict(current_target().sources)) == set(backends.names("cpu"))
    assert "native" in backends.names("cpu")
    assert "native" not in backends.names("cuda")
    assert "aten" in backends.names("cuda")
    assert set(backends.names("cpu")) | set(backends.names("cuda")) == set(backends.names())
    with pytest.raises(UnsupportedError, match="no cuda:2: torch sees 2"):
        current_target("cuda:2")
    with pytest.raises(ValueError, match="device must be cpu or cuda"):
        current_target("meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        current_target("cuda")


@pytest.mark.usefixtures("gpus")
def test_nothing_is_loaded_while_a_graph_is_captured(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    teach(own_store, problem(3), toy("", 1))
    asked: list[Problem] = []
    monkeypatch.setattr(RUNTIME, "miss_hook", lambda missing, device: asked.append(missing))
    captured = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured[0])
    with gemmtune.policy("on-miss"):
        assert RUNTIME.kernel_for(problem(300), None, FIRST) is None
        assert RUNTIME.kernel_for(problem(3), None, FIRST) is None
        assert asked == []
        captured[0] = False
        kernel = RUNTIME.kernel_for(problem(3), None, FIRST)
        assert kernel is not None
        captured[0] = True
        assert RUNTIME.kernel_for(problem(3), None, FIRST) is kernel
    call = SimpleNamespace(a=SimpleNamespace(is_cuda=True, device=FIRST), tensors=())
    assert call_module.is_transient(call)  # type: ignore[arg-type]
    captured[0] = False
    assert not call_module.is_transient(call)  # type: ignore[arg-type]


@pytest.mark.usefixtures("gpus", "verified")
def test_a_packed_weight_in_a_capture_is_served_by_what_is_loaded(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = gemmtune.pack(W, layout="toy:plain")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert RUNTIME.kernel_for(problem(3, constant=True), packed, FIRST) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    kernel = RUNTIME.kernel_for(problem(3, constant=True), packed, FIRST)
    assert kernel is not None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert RUNTIME.kernel_for(problem(3, constant=True), packed, FIRST) is kernel


@pytest.mark.usefixtures("gpus")
def test_misses_are_asked_for_once_a_device(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(RUNTIME, "miss_hook", lambda missing, device: asked.append((missing.m, device)))
    with gemmtune.policy("on-miss"):
        for place in (FIRST, devices.CPU, FIRST, devices.CPU):
            assert RUNTIME.kernel_for(problem(3), None, place) is None
    assert asked == [(3, FIRST), (3, devices.CPU)]


def test_only_the_operands_device_is_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        entered.append(device.index)
        yield

    now = [0]
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(devices.CudaDevice, "current_index", staticmethod(lambda: now[0]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ours = SimpleNamespace(candidate=toy())
    run = specialize.with_device_guard(lambda a, b: a + b, ours, SECOND)  # type: ignore[arg-type]
    assert run(1, 2) == 3
    assert entered == [1]
    now[0] = 1
    assert run(1, 2) == 3
    assert entered == [1]
    plain = SimpleNamespace(candidate=Candidate.make("aten", "mm"))
    for kernel, place in ((plain, SECOND), (ours, devices.CPU)):
        assert specialize.with_device_guard(max, kernel, place) is max  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert specialize.with_device_guard(max, ours, FIRST) is max  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_prepared_runs_and_allocates_on_its_device(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now, allocated = [0], []

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        before, now[0] = now[0], device.index
        yield
        now[0] = before

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        allocated.append(now[0])
        return torch.full(shape, -1.0, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(devices.CudaDevice, "current_index", staticmethod(lambda: now[0]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "empty_cuda", empty)
    x, w, bias = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
    weight = PackedWeight("toy:two", (w, torch.ones(5)), 5, 4, "float32") if packed else w
    call: Any = SimpleNamespace(
        a=SimpleNamespace(device=SECOND), problem=problem(3), shape=(3, 5), packed=weight if packed else None
    )
    ran: list[Any] = []

    def go(out: torch.Tensor, *operands: torch.Tensor) -> None:
        ran.append((now[0], out, *operands))

    ours: Any = SimpleNamespace(candidate=toy())
    fresh = specialize.launch_functional(go, ours, call, 3, lambda error, *operands: operands[0])
    write = specialize.launch_out(go, ours, call, 3)
    passed = (x, *weight.data, bias) if isinstance(weight, PackedWeight) else (x, w, bias)
    for place in (0, 1):
        now[0] = place
        out = fresh(x, weight, bias)
        assert tuple(out.shape) == (3, 5)
        write(out, x, weight, bias)
        assert now == [place]
        for where, *given in ran[-2:]:
            assert where == 1
            assert [id(t) for t in given] == [id(t) for t in (out, *passed)]
    assert allocated == [1, 1]
    assert len(ran) == 4


def test_what_is_special() -> None:
    x = torch.randn(2, 2)
    assert not guards.needs_torch(x)
    assert not guards.needs_torch(torch.nn.Parameter(x))
    assert guards.needs_torch(x.to("meta"))
    assert not guards.is_unusual(x.to("meta"))
    negated = torch._neg_view(x)
    assert guards.needs_torch(negated)
    assert guards.is_unusual(negated)
    assert guards.needs_torch(x.as_subclass(type("Mine", (torch.Tensor,), {})))
    assert not guards.is_capturing(devices.CPU)


def test_variants_tell_devices_apart(own_store: MemoryStore) -> None:
    """What serves a CPU's tensors is no other device's: meta tensors of the same shapes get variants of their own."""
    register()
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    ints = torch.ones(3, 4, dtype=torch.int8)
    gemmtune.mm(x, w)
    gemmtune.linear(x, W, torch.randn(5))
    gemmtune.addmm(torch.randn(3, 5), x, w)
    gemmtune.bmm(x[None], w[None])
    gemmtune.int_mm(ints, ints.t())
    assert [len(variants) for variants in DISPATCH_CACHE.values()] == [1] * 5
    y, v = x.to("meta"), w.to("meta")
    for got, shape in (
        (gemmtune.mm(y, v), (3, 5)),
        (gemmtune.linear(y, W.to("meta"), torch.randn(5, device="meta")), (3, 5)),
        (gemmtune.addmm(torch.randn(3, 5, device="meta"), y, v), (3, 5)),
        (gemmtune.bmm(y[None], v[None]), (1, 3, 5)),
        (gemmtune.int_mm(ints.to("meta"), ints.t().to("meta")), (3, 3)),
    ):
        assert (got.device.type, tuple(got.shape)) == ("meta", shape)
    assert [len(variants) for variants in DISPATCH_CACHE.values()] == [2] * 5


def test_a_weight_packed_on_another_device_is_named() -> None:
    packed = gemmtune.pack(W, layout="aten:row")
    elsewhere = replace(packed, data=(packed.data[0].to("meta"),))
    assert packed.key != elsewhere.key
    assert (packed.device.type, elsewhere.device.type) == ("cpu", "meta")
    for _ in range(2):
        with pytest.raises(DtypeError, match="same device, but the input is on cpu and the packed weight is on meta"):
            gemmtune.linear(torch.randn(3, 4), elsewhere)


def test_times_from_a_graph_are_not_charged_for_python() -> None:
    at = linear_problem(1, 8, 8, "float32")
    for timed, served in (("graph", toy("")), ("eager: asked for", None)):
        row = evidence(toy(""), 2.4e-6, 0.8)
        assert row.sample is not None
        sample: Sample = type(row.sample)(
            2.4e-6, 2.4e-6, 2.4e-6, 50, 0.8, 0.78, 0.82, conditions={"timed": timed}
        )  # fmt: skip
        import msgspec

        decision = decide(at, msgspec.structs.replace(row, sample=sample), chosen=toy(""), aten_s=3e-6)
        plan = build_plan([decision])
        assert plan is not None
        assert plan.entries[0].candidate == served


def test_a_default_device_does_not_move_the_output(own_store: MemoryStore) -> None:
    """torch.set_default_device and ``with torch.device(..)`` speak of new tensors, not of products."""
    register()
    x, packed = torch.randn(3, 4), gemmtune.pack(W, layout="toy:plain")
    with torch.device("meta"):
        for _ in range(2):
            assert gemmtune.linear(x, packed).device.type == "cpu"
            assert gemmtune.linear(x, packed, epilogue=[gemmtune.fuse.relu()]).device.type == "cpu"
