"""Call sites of products in generated code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F

from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Problem
from gemmtune.core.tuned_plan import PlanInterval
from gemmtune.core.workloads import linear_problem
from gemmtune.dispatch.runtime import RUNTIME, Choice, current_target, policy
from gemmtune.inductor.call_site import CallSite, write_result
from gemmtune.inductor.graph_call import GraphCall
from gemmtune.store import MemoryStore
from helpers.factories import make_legal_plan
from helpers.serving import ToyKernel, bind_toy, bind_toy_any_m, plan_of_toys, register, toy


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_result_is_taken_over_by_a_buffer_with_memory_of_its_own(mode: type[torch.no_grad]) -> None:
    with mode():
        out, result = torch.zeros(3, 4), torch.arange(12.0).view(3, 4)
        write_result(out, result)
        assert out.data_ptr() == result.data_ptr()
        assert torch.equal(out, result)


def test_result_is_copied_into_a_part_of_a_buffer_and_into_another_layout() -> None:
    whole, result = torch.zeros(6, 4), torch.arange(12.0).view(3, 4)
    write_result(whole[:3], result)
    assert torch.equal(whole[:3], result)
    assert not whole[3:].any()
    out = torch.zeros(3, 4)
    address = out.data_ptr()
    write_result(out, torch.arange(12.0).view(4, 3).t())
    assert out.data_ptr() == address
    assert torch.equal(out, torch.arange(12.0).view(4, 3).t())


RMS_NORM = (Step("rms_norm", "inner", "bfloat16", value=1e-5),)
LAYER_NORM = (Step("layer_norm", "inner", "bfloat16", value=1e-5), Step("norm_bias", "inner", "bfloat16"))


def asked_with_plans(
    store: MemoryStore, lasts: Mapping[Problem, int], monkeypatch: pytest.MonkeyPatch
) -> list[Problem]:
    """Store a plan of each Problem for M from 1 to the given one, and have PyTorch serve all. Return the Problems for
    which a kernel is asked, in their order."""
    target = current_target()
    for problem, last in lasts.items():
        plan = make_legal_plan(problem, target)
        intervals = {"": (PlanInterval(1, last, plan.kernels[0].id),)}
        store.put_plan(target, msgspec.structs.replace(plan, last=last, intervals=intervals))
    RUNTIME.refresh(store)
    asked: list[Problem] = []

    def choose_pytorch(problem: Problem, *_: object) -> Choice:
        asked.append(problem)
        return Choice(None)

    monkeypatch.setattr(RUNTIME, "choose", choose_pytorch)
    return asked


@pytest.mark.parametrize("norm", [RMS_NORM, LAYER_NORM], ids=["RMS norm", "layer norm"])
@pytest.mark.parametrize("steps", [(Step("silu"),), (Step("swiglu"),)], ids=lambda steps: steps[0].kind)
def test_norm_and_gate_of_more_rows_than_were_tuned_are_kernels_of_their_own(
    steps: tuple[Step, ...], norm: tuple[Step, ...], own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan of the product with them serves its M, and the plan of the product without them the others."""
    problem = replace(linear_problem(8, 48, 64, "bfloat16"), epilogue=(*norm, *steps))
    alone = problem.without_norm().without_gate()
    asked = asked_with_plans(own_store, {problem: 64, alone: 128}, monkeypatch)
    site = CallSite(GraphCall(problem, "linear", (24, 24)).to_json())
    x, gain, shift = torch.randn(200, 64).bfloat16(), torch.rand(64).bfloat16(), torch.randn(64).bfloat16()
    first, second = (torch.randn(24, 64).bfloat16() / 8 for _ in range(2))
    for m in (64, 65, 128, 65, 200):
        rows, out = x[:m], torch.empty(m, problem.columns, dtype=torch.bfloat16)
        site(rows, first, second, *(gain, shift)[: len(norm)], out=out)
        normed = F.rms_norm(rows, (64,), gain, 1e-5)
        normed = normed if len(norm) == 1 else F.layer_norm(rows, (64,), gain, shift, 1e-5)
        a, b = (F.linear(normed, w).float() for w in (first, second))
        expected = F.silu(a) * b if steps[0].kind == "swiglu" else F.silu(torch.cat([a, b], 1))
        torch.testing.assert_close(out, expected.bfloat16())
    assert [(p.m, p.epilogue) for p in asked] == [
        (64, problem.epilogue), (65, alone.epilogue), (128, alone.epilogue), (200, problem.epilogue),
    ]  # fmt: skip
    assert first.data_ptr() + first.nbytes == second.data_ptr()  # the call sites read one merged matrix


def store_toys(store: MemoryStore, epilogue: tuple[Step, ...] = ()) -> Problem:
    """Store a plan of toy kernels, and return its Problem: a linear layer of 12 columns into 20."""
    register()
    problem = replace(linear_problem(8, 20, 12, "float32"), epilogue=epilogue)
    store.put_plan(current_target(), plan_of_toys(problem))
    RUNTIME.refresh(store)
    return problem


def test_first_call_binds_the_kernels_of_all_intervals(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = store_toys(own_store)
    bound: list[str] = []

    def bind_any_m(kernel: ToyKernel, a: torch.Tensor, b: torch.Tensor, aux: Sequence[torch.Tensor]) -> Any:
        bound.append(kernel.candidate.id)
        return bind_toy_any_m(kernel, a, b, aux)

    monkeypatch.setattr(ToyKernel, "bind", bind_toy)
    monkeypatch.setattr(ToyKernel, "bind_any_m", bind_any_m)
    site, weight = CallSite(GraphCall(problem, "linear", (20,)).to_json()), torch.randn(20, 12)
    both = [toy("", 1).id, toy("", 2).id]
    # One row does not tell the strides of more, so that the second call is the one that binds.
    for m, expected in ((1, []), (5, both), (9, both)):
        x, out = torch.randn(m, 12), torch.empty(m, 20)
        site(x, weight, out=out)
        torch.testing.assert_close(out, F.linear(x, weight))
        assert bound == expected


@pytest.mark.parametrize(("is_dynamic", "last"), [(True, 128), (True, 64), (False, 128)])
def test_first_call_of_a_graph_for_all_m_prepares_what_serves_more_rows(
    is_dynamic: bool, last: int, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = replace(linear_problem(8, 48, 64, "bfloat16"), epilogue=(*RMS_NORM, Step("swiglu")))
    asked = asked_with_plans(own_store, {problem: 64, problem.without_norm(): last}, monkeypatch)
    site = CallSite(GraphCall(problem, "linear", (24, 24)).to_json(), is_dynamic=is_dynamic)
    x, gain = torch.randn(4, 64).bfloat16(), torch.rand(64).bfloat16()
    first, second = (torch.randn(24, 64).bfloat16() / 8 for _ in range(2))
    for rows in (x, x[:3]):
        out = torch.empty(rows.shape[0], 24, dtype=torch.bfloat16)
        site(rows, first, second, gain, out=out)
        normed = F.rms_norm(rows, (64,), gain, 1e-5)
        expected = F.silu(F.linear(normed, first).float()) * F.linear(normed, second).float()
        torch.testing.assert_close(out, expected.bfloat16())
    prepared = [(4, problem.without_norm().epilogue)] if is_dynamic and last > 64 else []
    assert [(p.m, p.epilogue) for p in asked] == [(4, problem.epilogue), *prepared, (3, problem.epilogue)]


def test_policy_on_miss_tunes_each_m(own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = store_toys(own_store)
    asked: list[int] = []
    monkeypatch.setattr(RUNTIME, "_tune_missing", lambda problem, device: asked.append(problem.m))
    site = CallSite(GraphCall(problem, "linear", (20,)).to_json())
    with policy("on-miss"):
        for m in (5, 6, 5, 7):
            site(torch.randn(m, 12), torch.randn(20, 12), out=torch.empty(m, 20))
    assert asked == [5, 6, 7]
    for m in (5, 6, 7):  # one interval of the plan
        site(torch.randn(m, 12), torch.randn(20, 12), out=torch.empty(m, 20))
    assert len(site._interval_runs) == 1


@pytest.mark.parametrize(("is_dynamic", "epilogue"), [(True, ()), (False, ()), (True, (Step("relu"),))])
def test_first_call_of_a_graph_for_all_m_loads_the_librarys_kernels(
    is_dynamic: bool, epilogue: tuple[Step, ...], own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for the M that PyTorch's op serves by the plan, where that op is a product alone."""
    problem = store_toys(own_store, epilogue)
    loaded: list[tuple[str, list[int]]] = []
    monkeypatch.setattr(
        "gemmtune.inductor.call_site.load_chosen_kernels",
        lambda problem, sizes, b: loaded.append((problem.plan_key, list(sizes))),
    )
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr("gemmtune.dispatch.plan_kernels.PlanKernels.plain_sizes", lambda plan: [8, 9])
    site = CallSite(GraphCall(problem, "linear", (20,)).to_json(), is_dynamic=is_dynamic)
    for m in (5, 6):
        site(torch.randn(m, 12), torch.randn(20, 12), out=torch.empty(m, 20))
    assert loaded == ([(problem.plan_key, [8, 9])] if is_dynamic and not epilogue else [])


def test_a_kernel_binds_dense_operands_with_another_m_by_m_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(linear_problem(8, 20, 12, "float32"), epilogue=(Step("add", "full", "float32"),))
    kernel, bound = ToyKernel(problem, toy()), []

    def bind(kernel: ToyKernel, a: torch.Tensor, b: torch.Tensor, aux: Sequence[torch.Tensor]) -> Any:
        bound.append(a.shape[0])
        return bind_toy(kernel, a, b, aux)

    monkeypatch.setattr(ToyKernel, "bind", bind)
    monkeypatch.setattr(ToyKernel, "bind_any_m", bind_toy_any_m)
    monkeypatch.setattr(RUNTIME, "choose", lambda *_: Choice(kernel))
    site, weight = CallSite(GraphCall(problem, "linear", (20,)).to_json()), torch.randn(20, 12)

    def serve(m: int, wide: bool = False) -> None:
        x, residual, out = torch.randn(m, 12), torch.randn(m, 40)[:, :20], torch.empty(m, 20)
        residual = residual if wide else residual.contiguous()
        site(x, weight, residual, out=out)
        torch.testing.assert_close(out, F.linear(x, weight) + residual)

    for m in (1, 5, 6, 9, 6):
        serve(m)
    assert bound == [1]
    serve(7, wide=True)  # the rows of its residual have gaps
    assert bound == [1, 7]
