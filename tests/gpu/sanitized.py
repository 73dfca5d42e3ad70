"""One launch and more of each Triton template, for NVIDIA's compute-sanitizer to watch: see scripts/test-sanitizer.

Sizes are odd, so that every mask is met. Prints what ran; each is checked against the oracle, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from test_triton import first, kernel_of, run_into

from gemmtune.measure.inputs import Inputs
from gemmtune.measure.verify import prepare, verify
from gemmtune.problem import Problem
from gemmtune.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem


def cases() -> Iterator[tuple[Problem, str, dict[str, int]]]:
    """A problem, a template, and what its configuration must have."""
    yield build(5, 1096, 1032, "bf16"), "tiled", {"split": 4}
    yield build(100, 300, 136, "bf16"), "tiled", {"split": 1}
    yield bmm_problem(3, 20, 72, 200, "bfloat16"), "tiled", {}
    yield int_problem(33, 1096, 1040), "tiled", {"split": 2}
    yield fp8_problem(7, 272, 1024), "tiled", {}
    yield weight_only_problem(3, 1096, 1056), "tiled", {"split": 2}
    yield weight_only_problem(9, 1096, 1024, bits=4, group=128), "tiled", {"split": 2}
    yield build(300, 8200, 136, "bf16"), "persistent", {}
    yield weight_only_problem(200, 8200, 144), "persistent", {}
    yield weight_only_problem(200, 8200, 144), "converted", {}


def main() -> None:
    for problem, template, wanted in cases():
        candidate = first(problem, template, **wanted)
        kernel = kernel_of(problem, candidate)

        def run(inputs: Inputs, out: torch.Tensor, kernel=kernel) -> None:  # type: ignore[no-untyped-def]
            run_into(kernel, inputs, out)

        verdict = verify(run, problem, prepare(problem, 0, device=torch.device("cuda"))[:1], patience_s=0.0)
        print(f"{candidate.id} on {problem.m}x{problem.n}x{problem.k} {problem.b.dtype}: {verdict.kind}", flush=True)
        assert verdict.ok, verdict.detail


if __name__ == "__main__":
    main()
