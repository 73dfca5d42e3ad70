"""What tests of GPU kernels share: random problems, builds side by side, one kernel on one set of operands."""

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
from gemmtune.verify.verify import guarded, prepare, verify

COUNT = int(os.environ.get("GEMMTUNE_GPU_PROBLEMS", "150"))
NARROW = ("bfloat16", "float16", "int8", "float8_e4m3fn", "float8_e5m2")


def problems(backend: Backend, count: int, seed: int = 0) -> Iterator[tuple[Problem, Candidate]]:
    """Random problems that the backend takes, no family more than a third, with one of their legal candidates each, of
    the template that there are fewest of."""
    rng, target = random.Random(seed), current_cuda({})
    left, had = Counter(dict.fromkeys(FAMILIES, -(-count // 3))), Counter[str]()
    while count:
        most = rng.choice((40, 200, 700, 1500))
        problem = random_problem(rng, most)
        if rng.random() < 0.5:
            problem = _usual(rng, problem)
        if problem.a.dtype not in NARROW or not left[problem.family]:
            continue
        listed = backend.candidates(problem, target)
        legal = [item for item in listed if isinstance(item, Candidate)]
        if legal:
            template = min(sorted({candidate.template for candidate in legal}), key=had.__getitem__)
            had[template] += 1
            yield problem, rng.choice([candidate for candidate in legal if candidate.template == template][:60])
            count -= 1
            left[problem.family] -= 1


def _usual(rng: random.Random, problem: Problem) -> Problem:
    """As models have it, and TMA wants it: N and K in multiples of 64, the operands' K contiguous and without gaps,
    three times the columns, that there are tiles for many programs, and of mm an epilogue that libraries fuse."""
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


def build_all(wanted: list[tuple[Problem, Candidate]]) -> list[str]:
    """Why each could not be built, or empty; side by side."""
    target = current_cuda({})
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=context) as pool:
        return list(pool.map(_build, [(problem, candidate, target) for problem, candidate in wanted], chunksize=4))


def kernel_of(problem: Problem, candidate: Candidate):  # type: ignore[no-untyped-def]
    backend = backends.get(candidate.backend)
    return backend.load(backend.build(problem, candidate, current_cuda({})), problem)


def first(problem: Problem, template: str = "tiled", backend: str = "triton", **config: object) -> Candidate:
    for item in backends.get(backend).candidates(problem, current_cuda({})):
        if isinstance(item, Candidate) and item.template == template:
            have = dict(item.config)
            if all(have[name] == value for name, value in config.items()):
                return item
    raise AssertionError(f"no {template} with {config}")


def run_into(kernel, inputs: Inputs, out: torch.Tensor) -> None:  # type: ignore[no-untyped-def]
    b = kernel.pack(inputs.b) if kernel.packing else inputs.b
    kernel.run(inputs.a, b, inputs.aux, out)


def check_random_problems(backend: Backend) -> None:
    """COUNT of them, on a random one of the first candidates each, against the oracle."""
    wanted = list(problems(backend, COUNT))
    found: Counter[str] = Counter()
    wrong = []
    for (problem, candidate), error in zip(wanted, build_all(wanted), strict=True):
        family = f"{problem.family}/{candidate.template}"
        if error:
            found[f"{family} {'would spill' if 'spill' in error else 'not built'}"] += 1
            continue
        try:
            kernel = kernel_of(problem, candidate)
        except UnsupportedError:  # the library ranks fewer algorithms
            found[f"{family} not there"] += 1
            continue
        draws = prepare(problem, found.total(), device=torch.device("cuda"))
        verdict = verify(
            lambda inputs, out, kernel=kernel: run_into(kernel, inputs, out), problem, draws, patience_s=0.0
        )
        found[f"{family} {verdict.kind}"] += 1
        if not verdict.ok:
            wrong.append(f"{candidate.id} on {problem.key}: {verdict.kind}: {verdict.detail}")
    folder = os.environ.get("OUT")
    if folder:
        report = {"count": COUNT, "found": dict(found), "wrong": wrong}
        (Path(folder) / f"random_problems_{backend.name}.json").write_text(json.dumps(report, indent=1))
    print(dict(found))
    assert not wrong, "\n".join(wrong[:20])
    assert sum(count for name, count in found.items() if name.endswith("not built")) < 0.02 * COUNT
    assert sum(count for name, count in found.items() if name.endswith("not there")) < 0.5 * COUNT


def check_repeats(kernel, problem: Problem, seed: int) -> None:  # type: ignore[no-untyped-def]
    """Three runs on the same operands agree bit for bit."""
    device = torch.device("cuda")
    inputs = make_inputs(problem, seed, device=device)
    frames = []
    for _ in range(3):
        frame, out = guarded(problem, device, 0)
        run_into(kernel, inputs, out)
        frames.append(frame)
    assert torch.equal(frames[0], frames[1])
    assert torch.equal(frames[0], frames[2])
