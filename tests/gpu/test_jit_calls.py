"""The Triton kernels beside PyTorch's products: what builders compile without the GPU is what calls on it launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune.backends.aten import AtenBackend
from gemmtune.backends.base import Artifact
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Epilogue, Step
from gemmtune.core.workloads import weight_only_problem
from gemmtune.dispatch import current_target
from gemmtune.verify.inputs import make_inputs
from gemmtune.workers.builds import Builders

pytestmark = pytest.mark.gpu

NORM, ADD, GATE = Step("rms_norm", "inner", "bfloat16", 1e-5), Step("add", "full", "bfloat16"), Step("swiglu")


@pytest.mark.parametrize("steps", [(ADD,), (NORM, GATE), (NORM,)], ids=str)
def test_calls_compile_nothing_that_builders_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Epilogue
) -> None:
    """At M = 1, 16 and 21, for which Triton has code of its own."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = torch.device("cuda")
    target, backend = current_target(device), AtenBackend()
    names = ("upcast", "upcast_rounded", "upcast_converted", "upcast_once")
    candidates = [Candidate.make("aten", name) for name in names]

    def compiled() -> int:
        """Return the number of kernels, and of modules in C that launch them."""
        return len([*tmp_path.glob("*/*.cubin"), *tmp_path.glob("*/*.so")])

    for m in (1, 16, 21):
        problem = replace(weight_only_problem(m, 512, 256), epilogue=steps)
        with Builders() as builders:
            outcomes = builders(problem, candidates, target)
        assert all(isinstance(outcome, Artifact) for outcome in outcomes.values())
        before = compiled()
        assert before
        inputs = make_inputs(problem, 0, device=device)
        for candidate in candidates:
            kernel: Any = backend.load(outcomes[candidate.id], problem)  # type: ignore[arg-type]
            out = torch.empty(problem.out_shape, dtype=torch.bfloat16, device=device)
            kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)
        torch.cuda.synchronize()
        assert compiled() == before, m
