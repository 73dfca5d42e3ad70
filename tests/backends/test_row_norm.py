"""The kernel of the norm in front of a product: when it is launched, and what is recorded of it (triton_interpreted.py
runs it)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.aten.norm import normalize_rows_by_kernel
from gemmtune.backends.aten.steps import normalize_rows
from gemmtune.backends.base import Artifact
from gemmtune.backends.triton import jit_kernel
from gemmtune.backends.triton.row_norm import RowNorm, row_norm_of
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Epilogue, Step
from gemmtune.core.workloads import linear_problem
from gemmtune.verify.inputs import make_inputs
from helpers.jit_kernels import OnGpu, pretend_that_triton_runs

NORM = (Step("rms_norm", "inner", "float32", value=1e-5),)
LAYER_NORM = (Step("layer_norm", "inner", "float32", value=1e-5), Step("norm_bias", "inner", "float32"))


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(*shape).to(dtype).as_subclass(OnGpu)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of outputs in place of launches, which write PyTorch's results."""
    made: list[tuple[int, ...]] = []

    def launch(self: RowNorm, a: Any, tensors: Any, out: Any) -> None:
        made.append(tuple(out.shape))
        out.copy_(normalize_rows(a, NORM if self._kind == "rms_norm" else LAYER_NORM[: len(tensors)], tensors))

    monkeypatch.setattr(RowNorm, "launch", launch)
    pretend_that_triton_runs(monkeypatch)
    row_norm_of.cache_clear()
    return made


@pytest.mark.parametrize("norm", [NORM, LAYER_NORM, LAYER_NORM[:1]], ids=["RMS", "layer", "layer, no bias"])
def test_rows_are_normalised_by_the_kernel(launches: list[tuple[int, ...]], norm: Epilogue) -> None:
    a, tensors = on_gpu(3, 40), [on_gpu(40) for _ in norm]
    result = normalize_rows_by_kernel(a, norm, tensors)
    assert launches == [(3, 40)]
    assert torch.equal(result, normalize_rows(a, norm, tensors))


@pytest.mark.parametrize("norm", [NORM, LAYER_NORM], ids=["RMS", "layer"])
def test_atens_candidates_normalise_by_the_kernel(launches: list[tuple[int, ...]], norm: Epilogue) -> None:
    problem = replace(linear_problem(3, 8, 40, "float32"), epilogue=norm)
    kernel = AtenBackend().load(Artifact(Candidate.make("aten", "mm"), ""), problem)
    inputs, out = make_inputs(problem, 0), torch.empty(3, 8)
    operands = inputs.a.as_subclass(OnGpu), inputs.b, tuple(t.as_subclass(OnGpu) for t in inputs.aux)
    kernel.run(*operands, out)
    assert torch.equal(kernel.functional(*operands), out)
    assert launches == [(3, 40)] * 2


@pytest.mark.parametrize(
    ("a", "weight"),
    [
        (torch.randn(3, 40), torch.randn(40)), (on_gpu(0, 40), on_gpu(40)), (on_gpu(40, 3).t(), on_gpu(40)),
        (on_gpu(3, 40, dtype=torch.float64), on_gpu(40, dtype=torch.float64)), (on_gpu(1, 16385), on_gpu(16385)),
        (on_gpu(3, 40), on_gpu(80)[::2]), (on_gpu(2, 3, 40), on_gpu(40)),
    ],
    ids=["CPU", "no rows", "columns are dense", "float64", "long rows", "strided weight", "batched"],
)  # fmt: skip
def test_pytorchs_operator_normalises_what_the_kernel_does_not_take(
    launches: list[tuple[int, ...]], a: Any, weight: Any
) -> None:
    result = normalize_rows_by_kernel(a, NORM, [weight])
    assert launches == []
    assert torch.equal(result, normalize_rows(a, NORM, [weight]))


def test_code_that_a_capture_would_load_is_not_launched(
    launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton makes other code for another dtype, and for another number of columns."""
    kernel, weights = RowNorm("rms_norm", 1e-5), [on_gpu(40)]
    a, half = on_gpu(3, 40), on_gpu(3, 40, dtype=torch.float16)
    assert kernel.run(a, weights, torch.empty_like(a))
    monkeypatch.setattr(jit_kernel, "is_capturing", lambda device: True)
    assert kernel.run(a, weights, torch.empty_like(a))
    assert not kernel.run(half, weights, torch.empty_like(half))
    longer = on_gpu(3, 56)
    assert not kernel.run(longer, [on_gpu(56)], torch.empty_like(longer))
    assert len(launches) == 2


@pytest.mark.parametrize(("signals", "capturing", "recorded"), [
    (True, True, 1), (False, True, 0), (True, False, 0),
])  # fmt: skip
def test_captured_kernels_that_signal_are_recorded(
    launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, signals: bool, capturing: bool, recorded: int
) -> None:
    seen: list[tuple[int, Any]] = []
    kernel, a, weights = RowNorm("rms_norm", 1e-5), on_gpu(3, 40), [on_gpu(40)]
    assert kernel.run(a, weights, torch.empty_like(a))
    monkeypatch.setattr(jit_kernel, "signals", lambda device: signals)
    monkeypatch.setattr(jit_kernel, "is_capturing", lambda device: capturing)
    monkeypatch.setattr(jit_kernel, "record_captured", lambda stream, out: seen.append((stream, out)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    out = torch.empty_like(a)
    assert kernel.run(a, weights, out)
    assert [(stream, written is out) for stream, written in seen] == [(7, True)] * recorded


def test_only_gpus_with_programmatic_dependent_launch_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    jit_kernel.signals.cache_clear()
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0) if device.index else (8, 9))
    assert not jit_kernel.signals(torch.device("cpu"))
    assert not jit_kernel.signals(torch.device("cuda", 0))
    assert jit_kernel.signals(torch.device("cuda", 1))
    jit_kernel.signals.cache_clear()
