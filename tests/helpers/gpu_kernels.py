"""Random problems, parallel builds, and runs of GPU kernels on one set of operands."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from gemmtune import backends
from gemmtune.backends.base import Backend
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import GemmtuneError, UnsupportedError
from gemmtune.core.problem import FAMILIES, Layout, Problem
from gemmtune.core.target import Target, current_cuda
from gemmtune.testing.problems import random_problem
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.verify import guarded, make_reference_cases, verify

PROBLEM_COUNT = int(os.environ.get("GEMMTUNE_GPU_PROBLEMS", "150"))
NARROW_DTYPES = ("bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


def sample_problems(backend: Backend, count: int, seed: int = 0) -> Iterator[tuple[Problem, Candidate]]:
    """Yield ``count`` random problems that the backend supports, each with one of its legal candidates.

    No family has more than a third of the problems. The candidate's template is the one that was yielded least often.
    """
    rng, target = random.Random(seed), current_cuda({})
    remaining, template_counts = Counter(dict.fromkeys(FAMILIES, -(-count // 3))), Counter[str]()
    while count:
        max_size = rng.choice((40, 200, 700, 1500))
        problem = random_problem(rng, max_size)
        if rng.random() < 0.5:
            problem = _with_model_layout(rng, problem)
        if problem.a.dtype not in NARROW_DTYPES or not remaining[problem.family]:
            continue
        items = backend.candidates(problem, target)
        legal = [item for item in items if isinstance(item, Candidate)]
        if legal:
            template = min(sorted({candidate.template for candidate in legal}), key=template_counts.__getitem__)
            template_counts[template] += 1
            yield problem, rng.choice([candidate for candidate in legal if candidate.template == template][:60])
            count -= 1
            remaining[problem.family] -= 1


def _with_model_layout(rng: random.Random, problem: Problem) -> Problem:
    """Return a variant of the problem with the sizes and layouts that models have and TMA needs.

    N and K are multiples of 64, K is contiguous in both operands, and no operand has padding. N is three times as
    large, so that there are tiles for many thread blocks. An ``mm`` gets an epilogue that libraries can fuse.
    """
    n, k = (max(64, size - size % 64) for size in (3 * problem.n, problem.k))
    a, b = replace(problem.a, layout=Layout()), replace(problem.b, layout=Layout("col"))
    if problem.family == "mm":
        bias, relu = Step("bias", "col", problem.out_dtype), Step("relu")
        problem = replace(problem, epilogue=rng.choice(((), (bias,), (relu,), (bias, relu))))
    return replace(problem, n=n, k=k, a=a, b=b, out=Layout())


def _build(job: tuple[Problem, Candidate, Target]) -> str:
    problem, candidate, target = job
    torch.set_num_threads(1)
    try:
        backends.get(candidate.backend).build(problem, candidate, target)
    except GemmtuneError as error:
        return str(error)
    return ""


def build_all(jobs: list[tuple[Problem, Candidate]]) -> list[str]:
    """Build the candidates in parallel. Return the error's text for each of them, or an empty string."""
    target = current_cuda({})
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        return list(pool.map(_build, [(problem, candidate, target) for problem, candidate in jobs], chunksize=4))


def load_kernel(problem: Problem, candidate: Candidate):  # type: ignore[no-untyped-def]
    backend = backends.get(candidate.backend)
    return backend.load(backend.build(problem, candidate, current_cuda({})), problem)


def first_candidate(problem: Problem, template: str = "tiled", backend: str = "triton", **config: object) -> Candidate:
    for item in backends.get(backend).candidates(problem, current_cuda({})):
        if isinstance(item, Candidate) and item.template == template:
            config_of_item = dict(item.config)
            if all(config_of_item[name] == value for name, value in config.items()):
                return item
    raise AssertionError(f"no {template} with {config}")


def run_into(kernel, inputs: Inputs, out: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    weight = kernel.pack(inputs.b) if kernel.packing else inputs.b
    kernel.run(inputs.a, weight, inputs.aux, out)


def check_random_problems(backend: Backend) -> None:
    """Verify one random candidate for each of ``PROBLEM_COUNT`` random problems against the oracle."""
    jobs = list(sample_problems(backend, PROBLEM_COUNT))
    counts: Counter[str] = Counter()
    failures = []
    for (problem, candidate), error in zip(jobs, build_all(jobs), strict=True):
        label = f"{problem.family}/{candidate.template}"
        if error:
            counts[f"{label} {'would spill' if 'spill' in error else 'not built'}"] += 1
            continue
        try:
            kernel = load_kernel(problem, candidate)
        except UnsupportedError:  # the library ranks fewer algorithms
            counts[f"{label} not there"] += 1
            continue
        test_cases = make_reference_cases(problem, counts.total(), device=torch.device("cuda"))
        verdict = verify(
            lambda inputs, out, kernel=kernel: run_into(kernel, inputs, out), problem, test_cases, time_limit_s=0.0
        )
        counts[f"{label} {verdict.kind}"] += 1
        if not verdict.ok:
            failures.append(f"{candidate.id} on {problem.key}: {verdict.kind}: {verdict.detail}")
    output_folder = os.environ.get("OUT")
    if output_folder:
        report = {"count": PROBLEM_COUNT, "found": dict(counts), "wrong": failures}
        (Path(output_folder) / f"random_problems_{backend.name}.json").write_text(json.dumps(report, indent=1))
    print(dict(counts))
    assert not failures, "\n".join(failures[:20])
    assert sum(count for name, count in counts.items() if name.endswith("not built")) < 0.02 * PROBLEM_COUNT
    assert sum(count for name, count in counts.items() if name.endswith("not there")) < 0.5 * PROBLEM_COUNT


def check_repeats(kernel, problem: Problem, seed: int) -> None:  # type: ignore[no-untyped-def]
    """Assert that three runs on the same operands agree bit for bit."""
    device = torch.device("cuda")
    inputs = make_inputs(problem, seed, device=device)
    buffers = []
    for _ in range(3):
        buffer, out = guarded(problem, device, 0)
        run_into(kernel, inputs, out)
        buffers.append(buffer)
    assert torch.equal(buffers[0], buffers[1])
    assert torch.equal(buffers[0], buffers[2])
