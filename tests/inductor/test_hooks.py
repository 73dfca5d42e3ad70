"""Tests of what gemmtune changes in Inductor: how Triton kernels are timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from gemmtune.inductor.hooks import time_kernels_without_copies


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
    """PyTorch's own method, which is in use after the test again."""
    bench = getattr(CachingAutotuner.bench, "__wrapped__", CachingAutotuner.bench)
    monkeypatch.setattr(CachingAutotuner, "bench", bench)
    return bench


def run(tuner: Tuner, launcher: Launcher) -> torch.Tensor:
    """Time the kernel, and return the tensor that it overwrites."""
    total, step = torch.zeros(4), torch.ones(4)
    assert tuner.bench(launcher, total, step) > 0
    assert launcher.steps == {step.data_ptr()}
    return total


def test_pytorch_copies_arguments_within_the_timed_calls(inductors_bench: Any) -> None:
    """If this fails, this version of PyTorch needs no ``time_kernels_without_copies``."""
    tuner, launcher = Tuner(), Launcher()
    run(tuner, launcher)
    assert tuner.copies == launcher.calls > 1


def test_overwritten_arguments_are_copied_once(inductors_bench: Any) -> None:
    time_kernels_without_copies()
    tuner, launcher = Tuner(), Launcher()
    assert run(tuner, launcher).eq(0).all(), "the program's tensor is as it was"
    assert tuner.copies == 1 < launcher.calls
    assert tuner.mutated_arg_names == ("total",)


def test_arguments_too_large_to_copy_are_restored(inductors_bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch saves them on the host if a copy would raise the peak of the device's memory."""

    def save(self: Tuner, *args: torch.Tensor) -> dict[str, Any]:
        return {"total": (args[0], args[0].clone())} if self.mutated_arg_names else {}

    monkeypatch.setattr(Tuner, "copy_args_to_cpu_if_needed", save)
    time_kernels_without_copies()
    launcher = Launcher()
    assert run(Tuner(), launcher).eq(0).all()
    assert launcher.calls > 1


def test_errors_of_a_kernel_leave_its_arguments_as_they_were(inductors_bench: Any) -> None:
    time_kernels_without_copies()
    tuner, total = Tuner(), torch.zeros(4)
    with pytest.raises(RuntimeError, match="size"):
        tuner.bench(Launcher(), total, torch.ones(3))
    assert tuner.mutated_arg_names == ("total",)
    assert total.eq(0).all()


def test_kernels_that_overwrite_nothing_are_timed_by_pytorch(inductors_bench: Any) -> None:
    time_kernels_without_copies()
    tuner = Tuner(overwritten=())
    run(tuner, Launcher())
    assert tuner.copies == 0


def test_timing_is_changed_once(inductors_bench: Any) -> None:
    time_kernels_without_copies()
    changed = CachingAutotuner.bench
    time_kernels_without_copies()
    assert CachingAutotuner.bench is changed
    assert changed.__wrapped__ is inductors_bench
