"""Costs of a graph's forms, from the times of decisions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import build, weight_only_problem
from gemmtune.inductor import costs
from gemmtune.inductor.costs import (
    gate_read_s,
    has_fused_rival,
    has_own_kernels,
    layouts_of,
    norm_s,
    pointwise_s,
    residual_s,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Index:
    """Index of a store in which every weight has these layouts."""

    def __init__(self, *layouts: str | None) -> None:
        self._layouts = list(layouts)

    def knows(self, plan_key: str) -> bool:
        return True

    def layouts(self, plan_key: str) -> list[str | None]:
        return self._layouts


@pytest.mark.parametrize(
    ("device", "expected"),
    [(CPU, ["native:x/1", "aten:col", None]), (GPU, ["native:x/1", None])],
)
def test_weights_are_not_copied_where_memory_is_scarce(
    device: torch.device, expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    index: Any = Index("native:x/1", "aten:cast/bfloat16", "aten:col", None)
    monkeypatch.setattr(costs.RUNTIME, "index", lambda _: index)
    problem = build(4, 64, 32, "bf16")
    assert problem.b.constant
    assert layouts_of(problem, device) == expected


def test_backends_that_compute_a_norm_are_asked_for() -> None:
    problem = build(4, 64, 32, "bf16")
    assert has_own_kernels(problem, CPU)
    normed = replace(problem, epilogue=(Step("rms_norm", "inner", "bfloat16", value=1e-5),))
    assert not has_own_kernels(normed, CPU)
    assert norm_s(normed, GPU) == pytest.approx(4e-6 + 2 * 4 * 32 * 2 / 3e12)


BIAS, SWIGLU = Step("bias", "col", "bfloat16"), Step("swiglu")


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (build(4, 64, 32, "bf16"), True),
        (replace(build(4, 64, 32, "fp32"), epilogue=(SWIGLU,)), True),
        (replace(build(4, 64, 32, "bf16"), epilogue=(BIAS, SWIGLU)), True),
        (replace(build(4, 64, 32, "bf16"), epilogue=(BIAS, Step("gelu"))), True),  # by oneDNN
        (replace(build(4, 64, 32, "bf16"), epilogue=(Step("silu"), Step("mul", "full", "bfloat16"))), True),
        (replace(build(4, 64, 32, "fp32"), epilogue=(BIAS, Step("gelu"))), False),  # the bias is not of float32
        (replace(build(4, 64, 32, "fp32"), epilogue=(Step("silu"), Step("mul", "full", "float32"))), False),
        (replace(build(4, 64, 32, "fp16"), epilogue=(SWIGLU,)), False),
        (weight_only_problem(4, 64, 32), True),  # by _weight_int8pack_mm
        (replace(weight_only_problem(4, 64, 32), epilogue=(BIAS, SWIGLU)), True),
        (replace(weight_only_problem(4, 64, 32, dtype="float32"), epilogue=(SWIGLU,)), True),
        (replace(weight_only_problem(4, 64, 32, dtype="float16"), epilogue=(SWIGLU,)), False),
        (replace(weight_only_problem(4, 64, 32), epilogue=(Step("rms_norm", "inner", "bfloat16"), SWIGLU)), True),
        (replace(weight_only_problem(17, 64, 32), epilogue=(SWIGLU,)), False),
        (weight_only_problem(4, 64, 32, group=32), False),
        (weight_only_problem(4, 64, 32, bits=4), False),
        (build(4, 64, 32, "int8"), False),
    ],
)
def test_races_on_cpus_have_a_fused_form_of_pytorchs(problem: Problem, expected: bool) -> None:
    assert has_fused_rival(problem) is expected


def test_a_fused_form_saves_a_launch_or_a_read() -> None:
    plain = build(4, 4096, 32, "bf16")
    added = replace(plain, epilogue=(Step("add", "full", "bfloat16"),))
    for device in (CPU, GPU):
        assert pointwise_s(added, device) > pointwise_s(plain, device) > 1e-6
        assert residual_s(added, device) < pointwise_s(added, device)
    assert residual_s(added, GPU) == pytest.approx(1e-6 + 4 * 4096 * 2 / 3e12)


def test_a_gate_saves_a_kernel_or_half_of_what_it_reads() -> None:
    gate = replace(build(4, 8192, 32, "bf16"), epilogue=(Step("swiglu"),))
    assert pointwise_s(gate, GPU) == pytest.approx(1.5e-6 + 3 * 4 * 4096 * 2 / 3e12)
    assert gate_read_s(gate, GPU) == pytest.approx(4 * 4096 * 2 / 3e12)


def test_activations_take_time_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    plain, elements = build(16, 4096, 32, "bf16"), 16 * 4096
    silu = replace(plain, epilogue=(Step("silu"), Step("add", "full", "bfloat16")))
    added = replace(plain, epilogue=(Step("add", "full", "bfloat16"),))
    gate, plain_gate = (replace(plain, epilogue=(Step(kind),)) for kind in ("geglu_tanh", "swiglu"))
    for seconds in (pointwise_s, residual_s):
        assert seconds(silu, CPU) - seconds(added, CPU) == pytest.approx(elements * 0.45e-9 / 2)
        assert seconds(silu, GPU) == seconds(added, GPU)
    assert gate_read_s(gate, CPU) - gate_read_s(plain_gate, CPU) == pytest.approx(elements / 2 * 1.4e-9 / 2)


def test_untuned_products_are_assumed_to_be_limited_by_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = build(1, 14336, 4096, "bf16")
    assert costs.assumed_s(problem, CPU) is None
    monkeypatch.setattr(costs, "_memory_bandwidth", lambda device: 3.35e12)
    seconds = costs.assumed_s(problem, GPU)
    assert seconds is not None
    assert 40e-6 < seconds < 44e-6  # ours took 41.1 us on an H100, ATen's 42.8


@pytest.mark.parametrize(("clock_khz", "expected"), [(2_619_000, 3.35e12), (0, None)])
def test_memory_bandwidth_is_that_of_the_data_sheet(
    clock_khz: int, expected: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Properties:
        memory_clock_rate, memory_bus_width = clock_khz, 5120

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    costs._memory_bandwidth.cache_clear()
    bandwidth = costs._memory_bandwidth(GPU)
    costs._memory_bandwidth.cache_clear()
    assert bandwidth == (expected if expected is None else pytest.approx(expected, rel=1e-2))
    assert costs._memory_bandwidth(CPU) is None
