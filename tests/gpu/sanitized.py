"""Launch each template of gemmtune's GPU kernels at least once under compute-sanitizer (scripts/test-sanitizer).

The sizes are odd, so that every mask is used. Each result is checked against the oracle, and its candidate is printed.
Arguments such as "cuda" or "cuda/slab" select backends or templates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch

from gemmtune.backends.base import Kernel
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem
from gemmtune.timing.race_operands import empty_output
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.gpu_kernels import first_candidate, load_kernel, run_into


def cases() -> Iterator[tuple[Problem, str, dict[str, int]]]:
    """Yield problems, each with a template ("backend/template") and the required entries of its config."""
    yield build(5, 1096, 1032, "bf16"), "triton/tiled", {"split": 4}
    yield build(100, 300, 136, "bf16"), "triton/tiled", {"split": 1}
    yield bmm_problem(3, 20, 72, 200, "bfloat16"), "triton/tiled", {}
    yield int_problem(33, 1096, 1040), "triton/tiled", {"split": 2}
    yield fp8_problem(7, 272, 1024), "triton/tiled", {}
    yield weight_only_problem(3, 1096, 1056), "triton/tiled", {"split": 2}
    yield weight_only_problem(9, 1096, 1024, bits=4, group=128), "triton/tiled", {"split": 2}
    yield build(300, 8200, 136, "bf16"), "triton/persistent", {"stream": 0}
    yield weight_only_problem(200, 8200, 144), "triton/persistent", {"stream": 0}
    yield build(300, 1096, 1032, "bf16"), "triton/persistent", {"stream": 1}
    yield int_problem(300, 1096, 2064), "triton/persistent", {"stream": 1}
    yield weight_only_problem(200, 8200, 144), "triton/converted", {}
    yield build(5, 1096, 1032, "bf16"), "cuda/skinny", {"split": 1}
    yield replace(bmm_problem(3, 20, 72, 200, "bfloat16"), b=Operand("bfloat16", Layout("col"))), "cuda/skinny", {}
    yield int_problem(9, 1096, 2064), "cuda/skinny", {"split": 2}
    yield fp8_problem(7, 272, 1040), "cuda/skinny", {}
    yield weight_only_problem(3, 1096, 2064), "cuda/skinny", {"split": 4, "depth": 1}
    yield weight_only_problem(9, 1096, 1024, bits=4, group=128, zero_point=True), "cuda/skinny", {"split": 1}
    norm = Step("rms_norm", "inner", "bfloat16", value=1e-5)
    yield replace(build(5, 1096, 1032, "bf16"), epilogue=(norm,)), "cuda/skinny", {"split": 2}
    yield (
        replace(weight_only_problem(9, 1096, 2064), epilogue=(norm, Step("swiglu"))), "cuda/skinny", {"split": 1}
    )  # fmt: skip
    layer_norm = (Step("layer_norm", "inner", "bfloat16", value=1e-5), Step("norm_bias", "inner", "bfloat16"))
    yield replace(build(5, 1096, 1032, "bf16"), epilogue=layer_norm), "cuda/skinny", {"split": 2}
    yield build(100, 1096, 1032, "bf16"), "cuda/slab", {"cluster": 1, "split": 1}
    yield (
        replace(build(100, 1101, 1032, "bf16"), epilogue=(Step("bias", "col", "bfloat16"),)),
        "cuda/slab",
        {"split": 1},
    )
    yield build(5, 1096, 1032, "bf16"), "cuda/slab", {"bm": 8, "split": 1}
    yield fp8_problem(9, 1096, 2064), "cuda/slab", {"bm": 16, "chunks": 4, "split": 1}
    yield int_problem(20, 1096, 2064), "cuda/slab", {"bm": 24, "split": 2}
    yield build(33, 8200, 136, "fp16"), "cuda/slab", {"cluster": 2}
    yield int_problem(70, 1096, 2064), "cuda/slab", {"cluster": 2}
    yield fp8_problem(20, 1096, 2064), "cuda/slab", {"cluster": 2}
    yield build(70, 1096, 2064, "bf16"), "cuda/slab", {"bm": 128, "split": 2}
    yield fp8_problem(20, 1096, 2064), "cuda/slab", {"split": 3}
    yield fp8_problem(150, 1096, 2064), "cuda/slab", {"bm": 128, "pieces": 2, "turns": 2}
    yield fp8_problem(150, 1096, 2064), "cuda/slab", {"bm": 128, "bn": 256, "split": 1}
    yield replace(build(25, 1096, 2064, "bf16"), epilogue=(norm, Step("swiglu"))), "cuda/slab", {"cluster": 2}
    yield replace(build(5, 1096, 2064, "bf16"), epilogue=(norm,)), "cuda/slab", {"bm": 8}
    yield weight_only_problem(70, 1096, 2064), "cuda/mixed", {"split": 2}
    yield weight_only_problem(200, 1096, 1040), "cuda/mixed", {"bm": 200, "bn": 128}
    yield weight_only_problem(33, 1096, 2048, bits=4, group=128), "cuda/mixed", {"split": 2}
    yield weight_only_problem(33, 1096, 2048, bits=4, group=128), "cuda/mixed", {"split": 1}


def main() -> None:
    for problem, name, required in cases():
        backend, _, template = name.partition("/")
        if not {backend, name}.intersection(sys.argv[1:] or [backend]):
            continue
        candidate = first_candidate(problem, template, backend, **required)
        kernel = load_kernel(problem, candidate)

        def run_candidate(inputs: Inputs, out: torch.Tensor, kernel=kernel) -> None:  # type: ignore[no-untyped-def]
            run_into(kernel, inputs, out)

        verdict = verify(
            run_candidate, problem, make_reference_cases(problem, 0, device=torch.device("cuda"))[:1], time_limit_s=0.0
        )
        print(f"{candidate.id} on {problem.m}x{problem.n}x{problem.k} {problem.b.dtype}: {verdict.kind}", flush=True)
        assert verdict.ok, verdict.detail
        if backend == "cuda":
            run_behind_itself(problem, kernel)


def run_behind_itself(problem: Problem, kernel: Kernel) -> None:
    """Capture two launches of the kernel in a graph, where the second may begin before the first has ended (PDL)."""
    device = torch.device("cuda")
    inputs, outs = make_inputs(problem, 1, device=device), [empty_output(problem, device) for _ in range(3)]
    b = kernel.pack(inputs.b) if kernel.packing else inputs.b
    kernel.run(inputs.a, b, inputs.aux, outs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for out in outs[1:]:
            kernel.run(inputs.a, b, inputs.aux, out)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(out, outs[0]) for out in outs[1:])


if __name__ == "__main__":
    main()
