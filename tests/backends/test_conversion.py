"""The kernel that converts an int8 weight for one of PyTorch's products: when it is launched, and what the product is
(triton_interpreted.py runs it)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemmtune.backends.aten import AtenBackend, has_plain_product, is_fallback
from gemmtune.backends.aten.cuda_narrow import UpcastConverted
from gemmtune.backends.base import Artifact, Kernel
from gemmtune.backends.triton import compiler
from gemmtune.backends.triton.conversion import Conversion
from gemmtune.backends.triton.pointwise import Pointwise
from gemmtune.core.candidate import Candidate
from gemmtune.core.problem import Layout, Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import weight_only_problem
from gemmtune.verify.inputs import make_inputs
from gemmtune.verify.verify import allowed_rounding, make_reference_cases, verify
from helpers.jit_kernels import OnGpu, pretend_that_triton_runs

H200 = Target("cuda", "H200", "9.0", caches=(232448, 0, 62914560), cores=132)
CONVERTED = Candidate.make("aten", "upcast_converted")
ROUNDED = Candidate.make("aten", "upcast_rounded")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Record the shapes of weights in place of launches, which convert as PyTorch does."""
    made: list[tuple[int, ...]] = []

    def launch(self: Conversion, source: Any, target: Any) -> None:
        made.append(tuple(source.shape))
        target.copy_(source)

    monkeypatch.setattr(Conversion, "launch", launch)
    pretend_that_triton_runs(monkeypatch)
    return made


def integers(k: int = 6, n: int = 4) -> torch.Tensor:
    return torch.arange(k * n, dtype=torch.int8).reshape(k, n)


def load(candidate: Candidate, problem: Problem) -> Kernel:
    return AtenBackend().load(Artifact(candidate, ""), problem)


def reasons(problem: Problem) -> str:
    """Return why the candidate is illegal on an H200, or empty."""
    for candidate in AtenBackend().candidates(problem, H200):
        if getattr(candidate, "candidate", candidate) == CONVERTED:
            return str(getattr(candidate, "reason", ""))
    raise AssertionError("not listed")


@pytest.mark.parametrize("turned", [False, True])
def test_dense_weights_are_converted_in_either_order(launches: list[tuple[int, ...]], turned: bool) -> None:
    source = integers().t() if turned else integers()
    target = torch.empty_like(source, dtype=torch.bfloat16)
    assert Conversion().run(source.as_subclass(OnGpu), target.as_subclass(OnGpu))
    assert launches == [tuple(source.shape)]
    assert torch.equal(target, source.bfloat16())


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (integers(), torch.empty(6, 4)), (integers()[:0].as_subclass(OnGpu), torch.empty(0, 4)),
        (integers().as_subclass(OnGpu), torch.empty(4, 6).t()),
        (integers(6, 8)[:, ::2].as_subclass(OnGpu), torch.empty(6, 8)[:, ::2]),
    ],
    ids=["CPU", "empty", "other order", "gaps"],
)  # fmt: skip
def test_other_weights_are_not_converted(launches: list[tuple[int, ...]], source: Any, target: torch.Tensor) -> None:
    assert not Conversion().run(source, target)
    assert launches == []


@pytest.mark.parametrize("m", [1, 20])
def test_product_has_the_bits_of_what_pytorch_runs(m: int) -> None:
    problem = weight_only_problem(m, 48, 512)
    converted, rounded = (load(candidate, problem) for candidate in (CONVERTED, ROUNDED))
    inputs = make_inputs(problem, 0)
    out, expected = (torch.empty(problem.out_shape, dtype=torch.bfloat16) for _ in range(2))
    converted.run(inputs.a, inputs.b, inputs.aux, out)
    rounded.run(inputs.a, inputs.b, inputs.aux, expected)
    assert torch.equal(out, expected)
    assert allowed_rounding(converted) == allowed_rounding(rounded)
    verdict = verify(
        lambda item, result: converted.run(item.a, item.b, item.aux, result), problem,
        make_reference_cases(problem, 0), 0.0, rounding=allowed_rounding(converted),
    )  # fmt: skip
    assert verdict.ok


@pytest.mark.parametrize("most", [0, 20 * 48])
@pytest.mark.parametrize("into_out", [False, True], ids=["functional", "out"])
def test_a_triton_kernel_scales_products_of_many_elements(
    launches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, most: int, into_out: bool
) -> None:
    scaled: list[tuple[int, ...]] = []

    def launch(self: Pointwise, acc: Any, aux: Any, out: Any) -> None:
        scaled.append(tuple(acc.shape))
        torch.mul(acc, *aux, out=out)

    def computed(candidate: Candidate) -> torch.Tensor:
        inputs, kernel = make_inputs(problem, 0), load(candidate, problem)
        weight = replace(inputs.b, data=inputs.b.data.as_subclass(OnGpu))
        operands = inputs.a.as_subclass(OnGpu), weight, inputs.aux
        if not into_out:
            return kernel.functional(*operands)
        out = torch.empty(problem.out_shape, dtype=torch.bfloat16)
        kernel.run(*operands, out)
        return out

    monkeypatch.setattr(Pointwise, "launch", launch)
    monkeypatch.setattr(UpcastConverted, "most_scaled_by_operator", most)
    problem = weight_only_problem(20, 48, 512)
    assert torch.equal(computed(CONVERTED), computed(ROUNDED))
    assert launches == [(512, 48)]
    assert scaled == ([] if most else [(20, 48)])  # what PyTorch runs has operators only


def test_it_is_a_candidate_beside_pytorchs_op_where_triton_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = weight_only_problem(2048, 1024, 8192)
    monkeypatch.setattr(compiler, "why_unusable", lambda version: "")
    assert reasons(problem) == ""
    assert "without memory between" in reasons(replace(problem, b=replace(problem.b, layout=Layout("col", 9000))))
    assert "int8 weights and bfloat16" in reasons(weight_only_problem(2048, 1024, 8192, dtype="float16"))
    monkeypatch.setattr(compiler, "why_unusable", lambda version: "no Triton")
    assert reasons(problem) == "no Triton"
    assert not is_fallback("upcast_converted", problem)


def test_its_product_is_the_plain_ops() -> None:
    assert has_plain_product(CONVERTED)
    assert not has_plain_product(ROUNDED)  # it is the plain op
    assert not has_plain_product(Candidate.make("triton", "upcast_converted"))
    assert not has_plain_product(Candidate.make("aten", "of a plugin that is not loaded"))
