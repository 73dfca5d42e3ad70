"""Tests that calls of gemmtune's ops are events ``gemmtune::<op>`` of torch.profiler, as PyTorch's operators are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.nn import functional
from torch.profiler import profile

import gemmtune
from gemmtune import fuse
from gemmtune.dispatch import profiling
from gemmtune.nn import PackedTensor

M, N, K = 4, 48, 32
X, WEIGHT, BIAS = torch.randn(M, K), torch.randn(N, K), torch.randn(N)
INTS, INT_WEIGHT, SCALE = torch.ones(M, K, dtype=torch.int8), torch.ones(N, K, dtype=torch.int8), torch.rand(N)
FP8, FP8_WEIGHT, ONE = X.to(torch.float8_e4m3fn), WEIGHT.to(torch.float8_e4m3fn).t(), torch.ones(())


def events(call: Callable[[], object], **config: Any) -> list[Any]:
    """Return gemmtune's profiler events of one call."""
    with profile(acc_events=True, **config) as profiled:
        call()
    return [event for event in profiled.events() if event.name.startswith("gemmtune::")]


PACKED = gemmtune.pack(WEIGHT)
PACKED_INTS = gemmtune.pack(INT_WEIGHT)
PACKED_TENSOR = PackedTensor.of(PACKED)
CALLS: dict[str, tuple[str, Callable[[], Tensor]]] = {
    "mm": ("mm", lambda: gemmtune.mm(X, WEIGHT.t())),
    "mm, packed": ("mm", lambda: gemmtune.mm(X, PACKED)),
    "mm, out": ("mm", lambda: gemmtune.mm(X, PACKED, out=torch.empty(M, N))),
    "linear": ("linear", lambda: gemmtune.linear(X, WEIGHT, BIAS)),
    "linear, packed": ("linear", lambda: gemmtune.linear(X, PACKED, BIAS)),
    "linear, epilogue": ("linear", lambda: gemmtune.linear(X, PACKED, epilogue=[fuse.relu()])),
    "F.linear by a packed weight": ("linear", lambda: functional.linear(X, PACKED_TENSOR, BIAS)),
    "addmm": ("addmm", lambda: gemmtune.addmm(BIAS, X, PACKED)),
    "bmm": ("bmm", lambda: gemmtune.bmm(X[None], WEIGHT.t()[None])),
    "int_mm": ("int_mm", lambda: gemmtune.int_mm(INTS, PACKED_INTS)),
    "mixed_mm": ("mixed_mm", lambda: gemmtune.mixed_mm(X, INT_WEIGHT.t(), SCALE)),
    "scaled_mm": ("scaled_mm", lambda: gemmtune.scaled_mm(FP8, FP8_WEIGHT, ONE, ONE, out_dtype=torch.bfloat16)),
}


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_one_event_with_input_shapes(name: str) -> None:
    op, call = CALLS[name]
    gemmtune.refresh()  # the first call misses the cache, the others hit it
    profiled_events = events(lambda: [call() for _ in range(3)], record_shapes=True)
    assert [event.name for event in profiled_events] == [f"gemmtune::{op}"] * 3
    assert {tuple(event.input_shapes[0]) for event in profiled_events} == {(1, M, K) if op == "bmm" else (M, K)}


@pytest.mark.usefixtures("verified")
def test_calls_with_many_different_strides_are_one_event_each() -> None:
    wide = torch.randn(M, 4 * K)
    inputs = [wide[:, start : start + K] for start in range(4)]
    inputs += [torch.randn(M, K + padding)[:, :K] for padding in range(1, 9)]
    for x in inputs:
        gemmtune.mm(x, WEIGHT.t())
    assert len(events(lambda: [gemmtune.mm(x, WEIGHT.t()) for x in inputs])) == len(inputs)


@pytest.mark.usefixtures("verified")
def test_the_aten_operator_of_a_call_is_a_child_of_its_event() -> None:
    with profile(acc_events=True) as profiled:
        gemmtune.mm(X, WEIGHT.t())
    (product,) = [event for event in profiled.events() if event.name == "aten::mm"]
    parents = []
    while product is not None:
        parents.append(product.name)
        product = product.cpu_parent
    assert "gemmtune::mm" in parents


@pytest.mark.usefixtures("verified")
def test_a_packed_linear_operator_and_its_product_are_events() -> None:
    x = X.clone().requires_grad_()
    names = {event.name for event in events(lambda: functional.linear(x, PACKED_TENSOR))}
    assert names >= {"gemmtune::packed_linear", "gemmtune::linear"}


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("all_threads", [False, True])
def test_calls_of_another_thread_are_events_if_pytorchs_are(all_threads: bool) -> None:
    def work() -> None:
        gemmtune.mm(X, PACKED)
        torch.mm(X, WEIGHT.t())

    def run_in_thread() -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    config = _ExperimentalConfig(profile_all_threads=all_threads)
    with profile(acc_events=True, experimental_config=config) as profiled:
        run_in_thread()
    names = {event.name for event in profiled.events()}
    assert ("gemmtune::mm" in names) == ("aten::mm" in names) == all_threads


@pytest.mark.usefixtures("verified")
def test_no_event_is_created_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("an event was made")

    monkeypatch.setattr(profiling, "RecordFunction", fail)
    for _, call in CALLS.values():
        call()
    with profile(acc_events=True), pytest.raises(AssertionError, match="an event was made"):
        gemmtune.mm(X, PACKED)


def test_a_profiler_started_by_the_kineto_daemon_has_events() -> None:
    """A profiler started by the daemon does not set torch's flag; this script clears the flag itself."""
    script = (
        "import torch, gemmtune\n"
        "from torch.autograd import profiler\n"
        "x, w = torch.randn(4, 32), torch.randn(32, 48)\n"
        "with torch.profiler.profile(acc_events=True) as profiled:\n"
        "    profiler._set_is_profiler_enabled(False)\n"
        "    for _ in range(3): gemmtune.mm(x, w)\n"
        "    profiler._set_is_profiler_enabled(True)\n"
        "print('events:', sum(event.name == 'gemmtune::mm' for event in profiled.events()))\n"
    )
    environment = {**os.environ, "KINETO_USE_DAEMON": "1"}
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert "events: 3" in process.stdout, process.stderr
