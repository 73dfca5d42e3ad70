"""Dispatch by device: cache keys, decision indexes and kernels of the CPU and of two simulated GPUs."""

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
from gemmtune.dispatch import RUNTIME, build_plan, current_target, specialize, torch_state
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
    """Simulate two equal GPUs for dispatch."""
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


def store_gpu_decision(store: MemoryStore, problem: Problem, candidate: Candidate) -> None:
    """Store a decision that ``candidate`` wins the problem on the GPU."""
    target = current_target("cuda")
    decision = decide(problem, evidence(candidate, 0.1), chosen=candidate)
    store.put(target, replace_target(decision, target))
    RUNTIME.refresh(store)


def replace_target(decision: Any, target: Target) -> Any:
    import msgspec

    return msgspec.structs.replace(decision, target_key=target.key)


@pytest.mark.usefixtures("gpus")
def test_decisions_of_a_device_serve_that_device_only(own_store: MemoryStore) -> None:
    store_gpu_decision(own_store, problem(3), toy("", 1))
    put_in_store(own_store, problem(3), evidence(toy("", 2), 0.1), chosen=toy("", 2))
    kernels = [RUNTIME.kernel_for(problem(3), None, device) for device in (FIRST, SECOND, devices.CPU)]
    assert [kernel and kernel.candidate for kernel in kernels] == [toy("", 1), toy("", 1), toy("", 2)]
    assert kernels[0] is not kernels[1]  # each device loads its own kernel
    assert RUNTIME.kernel_for(problem(3), None, FIRST) is kernels[0]
    assert RUNTIME.kernel_for(problem(3), None, torch.device("cuda")) is kernels[0]
    assert RUNTIME.kernel_for(problem(3), None, torch.device("meta")) is None


@pytest.mark.usefixtures("gpus")
def test_target_of_a_gpu_has_the_sources_of_its_backends(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_no_kernel_is_loaded_during_graph_capture(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store_gpu_decision(own_store, problem(3), toy("", 1))
    misses: list[Problem] = []
    monkeypatch.setattr(RUNTIME, "miss_hook", lambda missing, device: misses.append(missing))
    is_capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing[0])
    with gemmtune.policy("on-miss"):
        assert RUNTIME.kernel_for(problem(300), None, FIRST) is None
        assert RUNTIME.kernel_for(problem(3), None, FIRST) is None
        assert misses == []
        is_capturing[0] = False
        kernel = RUNTIME.kernel_for(problem(3), None, FIRST)
        assert kernel is not None
        is_capturing[0] = True
        assert RUNTIME.kernel_for(problem(3), None, FIRST) is kernel
    assert devices.is_capturing(FIRST)
    is_capturing[0] = False
    assert not devices.is_capturing(FIRST)


@pytest.mark.usefixtures("gpus", "verified")
def test_packed_weight_is_served_by_a_loaded_kernel_during_capture(
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
def test_miss_hook_is_called_once_per_device(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    misses: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(RUNTIME, "miss_hook", lambda problem_, device: misses.append((problem_.m, device)))
    with gemmtune.policy("on-miss"):
        for device_ in (FIRST, devices.CPU, FIRST, devices.CPU):
            assert RUNTIME.kernel_for(problem(3), None, device_) is None
    assert misses == [(3, FIRST), (3, devices.CPU)]


def test_device_guard_sets_the_device_of_the_operands_only(monkeypatch: pytest.MonkeyPatch) -> None:
    entered_devices: list[int] = []

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        entered_devices.append(device.index)
        yield

    current_index = [0]
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(devices.CudaDevice, "current_index", staticmethod(lambda: current_index[0]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    toy_kernel = SimpleNamespace(candidate=toy())
    run = specialize.with_device_guard(lambda a, b: a + b, toy_kernel, SECOND)  # type: ignore[arg-type]
    assert run(1, 2) == 3
    assert entered_devices == [1]
    current_index[0] = 1
    assert run(1, 2) == 3
    assert entered_devices == [1]
    aten_kernel = SimpleNamespace(candidate=Candidate.make("aten", "mm"))
    for kernel, operand_device in ((aten_kernel, SECOND), (toy_kernel, devices.CPU)):
        assert specialize.with_device_guard(max, kernel, operand_device) is max  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert specialize.with_device_guard(max, toy_kernel, FIRST) is max  # type: ignore[arg-type]


@pytest.mark.parametrize("packed", [False, True])
def test_specialised_launches_run_and_allocate_on_their_device(packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    current_index, allocated = [0], []

    @contextmanager
    def device(device: torch.device) -> Iterator[None]:
        previous, current_index[0] = current_index[0], device.index
        yield
        current_index[0] = previous

    def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        allocated.append(current_index[0])
        return torch.full(shape, -1.0, dtype=dtype)

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(devices.CudaDevice, "current_index", staticmethod(lambda: current_index[0]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "empty_cuda", empty)
    x, w, bias = torch.ones(3, 4), torch.ones(5, 4), torch.ones(5)
    weight = PackedWeight("toy:two", (w, torch.ones(5)), 5, 4, "float32") if packed else w
    call: Any = SimpleNamespace(
        a=SimpleNamespace(device=SECOND), problem=problem(3), shape=(3, 5), packed=weight if packed else None
    )
    launches: list[Any] = []

    def launch(out: torch.Tensor, *operands: torch.Tensor) -> None:
        launches.append((current_index[0], out, *operands))

    toy_kernel: Any = SimpleNamespace(candidate=toy())
    make = specialize.launch_functional_maker(launch, toy_kernel, call, 3, lambda error, *operands: operands[0])
    functional = make(call.problem.m, call.shape)
    out_variant = specialize.launch_out(launch, toy_kernel, call, 3)
    expected = (x, *weight.data, bias) if isinstance(weight, PackedWeight) else (x, w, bias)
    for index in (0, 1):
        current_index[0] = index
        out = functional(x, weight, bias)
        assert tuple(out.shape) == (3, 5)
        out_variant(out, x, weight, bias)
        assert current_index == [index]
        for launch_index, *arguments in launches[-2:]:
            assert launch_index == 1
            assert [id(t) for t in arguments] == [id(t) for t in (out, *expected)]
    assert allocated == [1, 1]
    assert len(launches) == 4


def test_needs_torch_and_is_unusual() -> None:
    x = torch.randn(2, 2)
    assert not torch_state.needs_torch(x)
    assert not torch_state.needs_torch(torch.nn.Parameter(x))
    assert torch_state.needs_torch(x.to("meta"))
    assert not torch_state.is_unusual(x.to("meta"))
    negated = torch._neg_view(x)
    assert torch_state.needs_torch(negated)
    assert torch_state.is_unusual(negated)
    assert torch_state.needs_torch(x.as_subclass(type("Mine", (torch.Tensor,), {})))
    assert not devices.is_capturing(devices.CPU)


def test_entries_distinguish_devices(own_store: MemoryStore) -> None:
    """Meta tensors of equal shapes get entries of their own, apart from those of CPU tensors."""
    register()
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    ints = torch.ones(3, 4, dtype=torch.int8)
    gemmtune.mm(x, w)
    gemmtune.linear(x, W, torch.randn(5))
    gemmtune.addmm(torch.randn(3, 5), x, w)
    gemmtune.bmm(x[None], w[None])
    gemmtune.int_mm(ints, ints.t())
    assert [len(entries) for entries in DISPATCH_CACHE.values()] == [1] * 5
    y, v = x.to("meta"), w.to("meta")
    for result, shape in (
        (gemmtune.mm(y, v), (3, 5)),
        (gemmtune.linear(y, W.to("meta"), torch.randn(5, device="meta")), (3, 5)),
        (gemmtune.addmm(torch.randn(3, 5, device="meta"), y, v), (3, 5)),
        (gemmtune.bmm(y[None], v[None]), (1, 3, 5)),
        (gemmtune.int_mm(ints.to("meta"), ints.t().to("meta")), (3, 3)),
    ):
        assert (result.device.type, tuple(result.shape)) == ("meta", shape)
    assert [len(entries) for entries in DISPATCH_CACHE.values()] == [2] * 5


def test_weight_packed_on_another_device_raises_dtype_error() -> None:
    packed = gemmtune.pack(W, layout="aten:row")
    on_meta = replace(packed, data=(packed.data[0].to("meta"),))
    assert packed.key != on_meta.key
    assert (packed.device.type, on_meta.device.type) == ("cpu", "meta")
    for _ in range(2):
        with pytest.raises(DtypeError, match="same device, but the input is on cpu and the packed weight is on meta"):
            gemmtune.linear(torch.randn(3, 4), on_meta)


def test_serving_overhead_is_not_subtracted_from_graph_times() -> None:
    problem_ = linear_problem(1, 8, 8, "float32")
    for condition, expected in (("graph", toy("")), ("eager: asked for", None)):
        row = evidence(toy(""), 2.4e-6, 0.8)
        assert row.sample is not None
        sample: Sample = type(row.sample)(
            2.4e-6, 2.4e-6, 2.4e-6, 50, 0.8, 0.78, 0.82, conditions={"timed": condition}
        )  # fmt: skip
        import msgspec

        decision = decide(problem_, msgspec.structs.replace(row, sample=sample), chosen=toy(""), aten_s=3e-6)
        plan = build_plan([decision])
        assert plan is not None
        assert plan.entries[0].candidate == expected


def test_default_device_does_not_change_the_output_device(own_store: MemoryStore) -> None:
    """torch.set_default_device and ``with torch.device(..)`` set the device of new tensors, not of products."""
    register()
    x, packed = torch.randn(3, 4), gemmtune.pack(W, layout="toy:plain")
    with torch.device("meta"):
        for _ in range(2):
            assert gemmtune.linear(x, packed).device.type == "cpu"
            assert gemmtune.linear(x, packed, epilogue=[gemmtune.fuse.relu()]).device.type == "cpu"
