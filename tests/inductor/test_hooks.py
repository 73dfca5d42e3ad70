"""Tests of what gemmtune changes in Inductor: how Triton kernels are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime import triton_heuristics
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from gemmtune.inductor import hooks
from gemmtune.inductor.hooks import time_kernels_on_device


class Tuner(CachingAutotuner):
    """PyTorch's autotuner of a kernel that adds its second argument to its first one, on the CPU. copies: how often the
    arguments were copied."""

    def __init__(self, overwritten: tuple[str, ...] = ("total",)) -> None:
        self.copies = 0
        self.mutated_arg_names, self.reset_to_zero_arg_names = overwritten, []
        self.optimize_mem, self.custom_kernel, self.inductor_meta = False, False, {}
        self.benchmark_failure_reasons: dict[Any, Any] = {}
        self.device_props = SimpleNamespace(type="cpu")
        self.fn = SimpleNamespace(arg_names=["total", "step"])

    def get_device_interface(self) -> Any:
        return SimpleNamespace(current_device=lambda: 0, get_raw_stream=lambda device: 0)

    def maybe_clone_args(self, *args: Any, **kwargs: Any) -> Any:
        self.copies += bool(self.mutated_arg_names)
        return super().maybe_clone_args(*args, **kwargs)


class Launcher:
    """A compiled kernel. calls: how often it ran."""

    n_spills = 0
    config = SimpleNamespace(num_warps=1, num_stages=1, kwargs={})

    def __init__(self) -> None:
        self.calls = 0
        self.steps: set[int] = set()

    def __call__(self, total: torch.Tensor, step: torch.Tensor, stream: int) -> None:
        self.calls += 1
        self.steps.add(step.data_ptr())
        total.add_(step)


@pytest.fixture
def inductors_bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """PyTorch's own method, which is in use after the test again, like its benchmarker."""
    bench = getattr(CachingAutotuner.bench, "__wrapped__", CachingAutotuner.bench)
    monkeypatch.setattr(triton_heuristics, "benchmarker", triton_heuristics.benchmarker)
    monkeypatch.setattr(CachingAutotuner, "bench", bench)
    return bench


def run(tuner: Tuner, launcher: Launcher) -> torch.Tensor:
    """Time the kernel, and return the tensor that it overwrites."""
    total, step = torch.zeros(4), torch.ones(4)
    assert tuner.bench(launcher, total, step) > 0
    assert launcher.steps == {step.data_ptr()}
    return total


def test_pytorch_copies_arguments_within_the_timed_calls(inductors_bench: Any) -> None:
    """If this fails, this version of PyTorch needs no ``time_kernels_on_device``."""
    tuner, launcher = Tuner(), Launcher()
    run(tuner, launcher)
    assert tuner.copies == launcher.calls > 1


def test_overwritten_arguments_are_copied_once(inductors_bench: Any) -> None:
    time_kernels_on_device()
    tuner, launcher = Tuner(), Launcher()
    assert run(tuner, launcher).eq(0).all(), "the program's tensor is as it was"
    assert tuner.copies == 1 < launcher.calls
    assert tuner.mutated_arg_names == ("total",)


def test_arguments_too_large_to_copy_are_restored(inductors_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch saves them on the host if a copy would raise the peak of the device's memory."""

    def save(self: Tuner, *args: torch.Tensor) -> dict[str, Any]:
        return {"total": (args[0], args[0].clone())} if self.mutated_arg_names else {}

    monkeypatch.setattr(Tuner, "copy_args_to_cpu_if_needed", save)
    time_kernels_on_device()
    launcher = Launcher()
    assert run(Tuner(), launcher).eq(0).all()
    assert launcher.calls > 1


def test_errors_of_a_kernel_leave_its_arguments_as_they_were(inductors_bench: Any) -> None:
    time_kernels_on_device()
    tuner, total = Tuner(), torch.zeros(4)
    with pytest.raises(RuntimeError, match="size"):
        tuner.bench(Launcher(), total, torch.ones(3))
    assert tuner.mutated_arg_names == ("total",)
    assert total.eq(0).all()


def test_kernels_that_overwrite_nothing_are_timed_by_pytorch(inductors_bench: Any) -> None:
    time_kernels_on_device()
    tuner = Tuner(overwritten=())
    run(tuner, Launcher())
    assert tuner.copies == 0


def test_timing_is_changed_once(inductors_bench: Any) -> None:
    time_kernels_on_device()
    changed = CachingAutotuner.bench
    time_kernels_on_device()
    assert CachingAutotuner.bench is changed
    assert changed.__wrapped__ is inductors_bench


class Gpu:
    """A GPU whose calls take ``call_ms`` each. The host launches one in ``launch_ms``. now: milliseconds of the host's
    clock. end: when the GPU has done all that it was given. sleeps: of the stream, in milliseconds."""

    def __init__(self, call_ms: float, launch_ms: float) -> None:
        self.call_ms, self.launch_ms = call_ms, launch_ms
        self.now, self.end = 0.0, 0.0
        self.sleeps: list[float] = []

    def call(self) -> None:
        self.now += self.launch_ms
        self.end = max(self.end, self.now) + self.call_ms

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(1e3 * cycles / hooks._CYCLES_PER_S)
        self.end = max(self.end, self.now) + self.sleeps[-1]

    def synchronize(self) -> None:
        self.now = max(self.now, self.end)

    def event(self, enable_timing: bool) -> Any:
        return Event(self)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.end, self.gpu.now)

    def query(self) -> bool:
        return self.gpu.now >= self.at

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


def on_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", gpu.sleep)
    monkeypatch.setattr(hooks, "time", SimpleNamespace(perf_counter=lambda: gpu.now / 1e3))


@pytest.mark.parametrize(("call_ms", "launch_ms"), [(0.002, 0.03), (0.005, 0.005), (40.0, 0.01)])
def test_launches_take_no_part_in_the_time_of_a_kernel(
    call_ms: float, launch_ms: float, inductors_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(call_ms, launch_ms)
    on_gpu(gpu, monkeypatch)
    time_kernels_on_device()
    timed = triton_heuristics.benchmarker.benchmark_gpu(gpu.call, rep=40)
    assert timed == pytest.approx(call_ms)
    assert gpu.now < max(20 * call_ms, 10.0)


def test_stream_sleeps_longer_where_launches_took_longer_than_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(0.002, 0.01)
    on_gpu(gpu, monkeypatch)

    def call() -> None:
        gpu.launch_ms = 0.01 if not gpu.sleeps else 0.03
        gpu.call()

    assert hooks._queued_ms(call) == pytest.approx(0.002)
    assert len(gpu.sleeps) == 2
    assert gpu.sleeps[1] == pytest.approx(4 * gpu.sleeps[0], rel=1e-3)
