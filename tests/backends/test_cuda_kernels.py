"""CUDA C++ kernels emulated on a CPU, launched through the real launch path with a fake driver."""

from __future__ import annotations

import ctypes
import hashlib
import random
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune.backends.base import CAPTURE_FACTS
from gemmtune.backends.cuda import CudaBackend, space
from gemmtune.backends.cuda import source as cuda_source
from gemmtune.backends.cuda.fitted import FittedTiles
from gemmtune.backends.cuda.kernel import Skinny
from gemmtune.backends.cuda.source import generate
from gemmtune.backends.gpu.artifact import Header
from gemmtune.backends.gpu.driver import record_captured
from gemmtune.backends.gpu.kernel import GpuKernel
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem
from gemmtune.testing.problems import random_problem
from gemmtune.verify.inputs import Inputs, make_inputs
from gemmtune.verify.verify import make_reference_cases, verify
from helpers.batches import LAYOUTS
from helpers.drivers import STREAM, FakeDriver, install_fake_driver
from helpers.gpus import H200, SKINNY, legal_candidates
from helpers.integers import exact_cases, rounding_cases

CXX = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
needs_cxx = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")
FRAME = Path(__file__).parents[2] / "native" / "frame"  # other tests check its conversions
SLAB_CONFIG = {"bm": 64, "bn": 32, "chunks": 1, "cluster": 1, "split": 1, "pieces": 1, "turns": 1, "stages": 3}
MIXED_CONFIG = {"bm": 16, "bn": 64, "split": 1, "stages": 2}
OPTIONS = ["-std=c++17", "-O1", "-fPIC", "-w", f"-I{FRAME}"]


class Emulator:
    """Builder of kernels whose launches run on the CPU, through ``emulated.h``. libraries: see the fixture."""

    def __init__(self, driver: FakeDriver, folder: Path, libraries: Path) -> None:
        self.driver, self._folder, self._libraries = driver, folder, libraries

    def skinny(self, problem: Problem, **config: int) -> GpuKernel:
        config = {**SKINNY, "bm": 8 * -(-problem.m // 8), **config}
        assert not space._why_skinny_illegal(problem, space.device_limits(H200), config)
        return self.load(problem, Candidate.make("cuda", "skinny", **config))

    def slab(self, problem: Problem, **config: int) -> GpuKernel:
        config = {**SLAB_CONFIG, **config}
        assert not space._why_slab_illegal(problem, space.device_limits(H200), config)
        return self.load(problem, Candidate.make("cuda", "slab", **config))

    def mixed(self, problem: Problem, **config: int) -> GpuKernel:
        config = {**MIXED_CONFIG, **config}
        assert not space._why_mixed_illegal(problem, space.device_limits(H200), config)
        return self.load(problem, Candidate.make("cuda", "mixed", **config))

    def load(self, problem: Problem, candidate: Candidate) -> GpuKernel:
        device = replace(space.device_limits(H200), multiprocessors=6)
        configs = space.copies(problem, candidate.template, dict(candidate.config), device)
        with ThreadPoolExecutor() as pool:
            built = list(pool.map(lambda config: self._build(problem, candidate.template, config), configs))
        libraries = {str(path).encode(): ctypes.CDLL(str(path)) for path, _ in built}

        def run(grid: tuple[int, int], values: list[int]) -> None:
            addresses = self.driver.argument_addresses
            library = libraries[self.driver.cubin]
            assert library.emulate(*grid, (ctypes.c_void_p * len(addresses))(*addresses)) == 0, "too early"

        (warps,) = {header.warps for _, header in built}
        self.driver.run, self.driver.threads = run, 32 * warps
        self.driver.arguments[candidate.template] = len(built[0][1].arguments)
        parts = [(header, str(path).encode()) for path, header in built]
        return CudaBackend.templates[candidate.template](problem, candidate, parts)

    def _build(self, problem: Problem, template: str, config: dict[str, int]) -> tuple[Path, Header]:
        """Return the library of a kernel and what launching it takes."""
        header = Path(__file__).with_name("emulated.h").read_text(encoding="utf-8")
        source = generate(problem, template, config, header)
        emulated_source = '#include "emulated_libraries.h"\n' + source.text
        emulated_source += 'extern "C" int emulate(int x, int y, void** slots) {\n'
        emulated_source += "    static void** given;\n    given = slots;\n"
        emulated_source += "    early_given = *static_cast<int*>(slots[COUNT - 1]) & B_EARLY;\n"
        emulated_source += (
            f"    run_all([] {{ call({template}, given, std::make_index_sequence<COUNT>()); }}, x, y);\n"
            "    return too_early;\n}\n"
        )
        path = self._folder / f"{hashlib.sha256(emulated_source.encode()).hexdigest()[:16]}.so"
        path.with_suffix(".cpp").write_text(emulated_source)
        options = [*OPTIONS, "-shared", f"-I{self._libraries}", f"-DCOUNT={len(source.arguments)}"]
        options.append(f"-DREADS_WITHIN={int(template == 'slab')}")
        subprocess.run([str(CXX), *options, "-o", str(path), str(path.with_suffix(".cpp"))], check=True)
        return path, Header(
            template, 0, source.shared, source.warps, source.arguments, 0, source.descriptors, waits=True,
            split=source.split,
        )  # fmt: skip


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with ``emulated_libraries.h`` in the form that GCC has parsed; another compiler parses it for
    each kernel, which takes 1.8 s in place of 1.1."""
    folder = tmp_path_factory.mktemp("libraries")
    header = folder / "emulated_libraries.h"
    header.write_text(Path(__file__).with_name(header.name).read_text(encoding="utf-8"), encoding="utf-8")
    command = [str(CXX), *OPTIONS, "-x", "c++-header", "-o", str(folder / f"{header.name}.gch"), str(header)]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, libraries: Path) -> Emulator:
    return Emulator(install_fake_driver(monkeypatch), tmp_path, libraries)


def run_into(kernel: GpuKernel, inputs: Inputs, out: torch.Tensor) -> None:
    kernel.run(inputs.a, kernel.pack(inputs.b) if kernel.packing else inputs.b, inputs.aux, out)


def check(kernel: GpuKernel, problem: Problem) -> None:
    """Verify the kernel through bind, the fake driver and the emulated kernel source."""
    verdict = verify(
        lambda inputs, out: run_into(kernel, inputs, out), problem, make_reference_cases(problem, 0), time_limit_s=0.0
    )
    assert verdict.ok, f"{verdict.kind}: {verdict.detail}"


STEPS = (
    Step("bias", "col", "bfloat16"), Step("gelu_tanh"), Step("mul", "full", "bfloat16"), Step("clamp", lo=-1.0, hi=2.0),
)  # fmt: skip
NORM = Step("rms_norm", "inner", "bfloat16", value=1e-5)
LAYER_NORM = Step("layer_norm", "inner", "bfloat16", value=1e-5)
NORM_BIAS = Step("norm_bias", "inner", "bfloat16")
CASES: dict[str, tuple[Problem, dict[str, int]]] = {
    "bf16, odd sizes": (build(3, 37, 200, "bf16"), {}),
    "fp16, an epilogue": (
        replace(build(11, 40, 256, "fp16"), epilogue=(Step("add", "row", "float32", value=0.5), Step("gelu"))),
        {"side": 2, "depth": 2},
    ),
    "bf16, an epilogue, a cluster": (replace(build(9, 50, 264, "bf16"), epilogue=STEPS), {"split": 2}),
    "bmm": (replace(bmm_problem(3, 5, 24, 64, "bfloat16"), b=Operand("bfloat16", Layout("col"))), {"bn": 16}),
    "int8": (int_problem(7, 40, 272), {"depth": 2}),
    "int8, requantised": (
        replace(
            int_problem(4, 24, 128), out_dtype="int8",
            epilogue=(Step("bias", "col", "int32"), Step("relu"), Step("scale", "col", "float32")),
        ),
        {},
    ),
    "fp8": (fp8_problem(5, 40, 208), {}),
    "int8 weights": (weight_only_problem(1, 40, 272), {}),
    "int8 weights, fp16, groups": (
        weight_only_problem(9, 24, 256, group=128, zero_point=True, dtype="float16"), {"bn": 16},
    ),
    "int4 weights": (weight_only_problem(10, 40, 512, bits=4, group=128), {"side": 2}),
    "int4 weights, zero points": (weight_only_problem(2, 40, 512, bits=4, group=256, zero_point=True), {}),
    "int4 weights, fp16, a scale a channel": (weight_only_problem(3, 24, 512, bits=4, dtype="float16"), {"bn": 16}),
    "a norm in front": (replace(build(3, 37, 200, "bf16"), epilogue=(NORM,)), {}),
    "a norm in front, two tiles of rows, a cluster": (
        replace(build(11, 50, 264, "bf16"), epilogue=(NORM, *STEPS)), {"side": 2, "depth": 2, "split": 2},
    ),
    "a norm in front of int8 weights": (
        replace(weight_only_problem(5, 40, 272), epilogue=(NORM, Step("silu"))), {"depth": 2},
    ),
    "a norm in front of int8 weights in groups": (
        replace(weight_only_problem(9, 24, 256, group=128, zero_point=True), epilogue=(NORM,)), {"bn": 16},
    ),
    "a layer norm in front": (replace(build(3, 37, 200, "bf16"), epilogue=(LAYER_NORM, NORM_BIAS)), {}),
    "a layer norm in front, without a bias, of a row": (replace(build(1, 37, 264, "bf16"), epilogue=(LAYER_NORM,)), {}),
    "a layer norm in front, two tiles of rows, a cluster": (
        replace(build(11, 50, 264, "bf16"), epilogue=(LAYER_NORM, NORM_BIAS, *STEPS)),
        {"side": 2, "depth": 2, "split": 2},
    ),
    "a layer norm in front, more rows than warps": (
        replace(build(16, 40, 264, "bf16"), epilogue=(LAYER_NORM, NORM_BIAS, Step("gelu"))), {"warps": 4},
    ),
    "a layer norm in front of int8 weights, and a gate": (
        replace(weight_only_problem(2, 70, 272), epilogue=(LAYER_NORM, NORM_BIAS, Step("geglu_tanh"))), {"bn": 16},
    ),
    "a layer norm in front of int8 weights in groups": (
        replace(weight_only_problem(9, 24, 256, group=128, zero_point=True), epilogue=(LAYER_NORM, NORM_BIAS)),
        {"bn": 16},
    ),
    "a layer norm in front of int4 weights": (
        replace(weight_only_problem(3, 40, 512, bits=4, group=128), epilogue=(LAYER_NORM, NORM_BIAS)), {},
    ),
    "a gate": (replace(build(3, 38, 200, "bf16"), epilogue=(Step("swiglu"),)), {}),
    "a gate of biased columns, two tiles of rows, a cluster": (
        replace(build(11, 100, 264, "fp16"), epilogue=(Step("bias", "col", "float16"), Step("geglu"))),
        {"side": 2, "split": 2},
    ),
    "a norm in front of int8 weights, and a gate": (
        replace(weight_only_problem(2, 70, 272), epilogue=(NORM, Step("geglu_tanh"))), {"bn": 16},
    ),
    "a gate of int8 weights in groups": (
        replace(weight_only_problem(9, 52, 256, group=128, zero_point=True), epilogue=(Step("swiglu"),)), {},
    ),
    "a gate of int8": (
        replace(
            int_problem(7, 40, 272), out_dtype="bfloat16",
            epilogue=(Step("relu"), Step("scale", "row", "float32"), Step("scale", "col", "float32"), Step("swiglu")),
        ),
        {"depth": 2},
    ),
    "a gate of fp8": (
        replace(fp8_problem(5, 40, 208), epilogue=(*fp8_problem(5, 40, 208).epilogue, Step("swiglu"))), {},
    ),
    "a norm in front of int4 weights": (
        replace(weight_only_problem(2, 40, 512, bits=4, group=256, zero_point=True), epilogue=(NORM,)), {},
    ),
}  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("name", CASES)
def test_skinny_kernel_matches_the_oracle(emulator: Emulator, name: str) -> None:
    problem, config = CASES[name]
    kernel = emulator.skinny(problem, **config)
    check(kernel, problem)


BIAS = (Step("bias", "col", "bfloat16"),)
SLABS: dict[str, tuple[Problem, dict[str, int]]] = {
    "bf16, odd sizes": (build(19, 141, 200, "bf16"), {}),
    "fp16, two groups of warps": (replace(build(70, 72, 136, "fp16"), epilogue=(Step("gelu"),)), {"bm": 128}),
    "bf16, an epilogue, a cluster": (
        replace(
            build(65, 100, 264, "bf16"),
            epilogue=(Step("bias", "col", "bfloat16"), Step("mul", "full", "bfloat16"), Step("add", "row", "float32")),
        ),
        {"cluster": 2, "chunks": 2, "bn": 16},
    ),
    "int8, two products a width": (int_problem(33, 210, 272), {"bn": 40, "cluster": 2}),
    "int8, requantised": (
        replace(
            int_problem(20, 24, 128), out_dtype="int8",
            epilogue=(Step("bias", "col", "int32"), Step("relu"), Step("scale", "col", "float32")),
        ),
        {"bn": 24},
    ),
    "fp8": (fp8_problem(50, 80, 656), {"chunks": 2, "turns": 2}),
    "fp8, a product at a time": (fp8_problem(70, 90, 400), {"bm": 128}),
    "bf16, fewer rows than wgmma has": (build(13, 141, 200, "bf16"), {"bm": 16, "stages": 4}),
    "fp8, eight rows": (fp8_problem(5, 90, 784), {"bm": 8, "bn": 16, "stages": 3}),
    "int8, rows shared by a cluster": (int_problem(31, 90, 784), {"bm": 32, "cluster": 2}),
    "fp8, few rows, K shared": (fp8_problem(20, 60, 1040), {"bm": 24, "chunks": 2, "bn": 24, "split": 2}),
    "fp8, in pieces by turns": (fp8_problem(33, 90, 784), {"bn": 48, "chunks": 2, "pieces": 2, "turns": 2}),
    "fp8, registers that change hands": (fp8_problem(65, 300, 272), {"bm": 128, "bn": 256, "pieces": 2}),
    "bf16, K shared, two groups of warps, an epilogue": (
        replace(build(75, 100, 520, "bf16"), epilogue=STEPS), {"bm": 128, "bn": 40, "split": 3},
    ),
    "int8, K shared": (int_problem(20, 70, 1104), {"chunks": 2, "bn": 64, "split": 2}),
    "fp8, K shared": (fp8_problem(65, 60, 1040), {"chunks": 2, "bn": 24, "split": 2}),
    "fp8, a cluster": (fp8_problem(18, 150, 144), {"cluster": 4, "bn": 48, "chunks": 2, "turns": 2}),
    "bf16, a gate": (replace(build(19, 150, 200, "bf16"), epilogue=(Step("swiglu"),)), {"bn": 32}),
    "bf16, a gate of biased columns, two groups of warps, a cluster": (
        replace(build(75, 104, 264, "bf16"), epilogue=(*BIAS, Step("geglu"))), {"bm": 128, "bn": 48, "cluster": 2},
    ),
    "fp8, a gate, in pieces by turns": (
        replace(fp8_problem(33, 140, 784), epilogue=(*fp8_problem(33, 140, 784).epilogue, Step("geglu_tanh"))),
        {"bn": 64, "chunks": 2, "pieces": 2, "turns": 2},
    ),
    "bf16, a norm in front": (replace(build(13, 100, 456, "bf16"), epilogue=(NORM,)), {"bm": 16}),
    "bf16, a norm in front, an epilogue": (
        replace(build(32, 100, 1096, "bf16"), epilogue=(NORM, *STEPS)), {"bm": 32, "bn": 24, "chunks": 4},
    ),
    "bf16, a norm in front, a cluster, a gate": (
        replace(build(21, 104, 1096, "bf16"), epilogue=(NORM, Step("swiglu"))),
        {"bm": 32, "bn": 48, "cluster": 2, "chunks": 2},
    ),
    "bf16, a norm in front of one row": (
        replace(build(1, 70, 456, "bf16"), epilogue=(NORM,)), {"bm": 16, "cluster": 2},
    ),
    "int8, a gate": (
        replace(
            int_problem(33, 92, 272), out_dtype="bfloat16",
            epilogue=(Step("scale", "row", "float32"), Step("scale", "col", "float32"), Step("swiglu")),
        ),
        {"bn": 32},
    ),
}  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("name", SLABS)
def test_slab_kernel_matches_the_oracle(emulator: Emulator, name: str) -> None:
    """The cases have more tiles than thread blocks, several passes through the stages, and zeros beyond the edges."""
    problem, config = SLABS[name]
    kernel = emulator.slab(problem, **config)
    check(kernel, problem)


MIXED: dict[str, tuple[Problem, dict[str, int]]] = {
    "int8, odd sizes": (weight_only_problem(19, 101, 400), {"bm": 24}),
    "int8, two groups of warps, a cluster, an epilogue": (
        replace(weight_only_problem(34, 140, 784), epilogue=STEPS), {"bm": 40, "bn": 128, "split": 3},
    ),
    "int8, fp16": (weight_only_problem(70, 72, 656, dtype="float16"), {"bm": 72, "stages": 3}),
    "int8, groups": (weight_only_problem(40, 72, 1024, group=256), {"bm": 16, "split": 2}),
    "int4, groups": (weight_only_problem(20, 136, 640, bits=4, group=128), {"bm": 24, "bn": 128}),
    "int4, groups, a cluster, fp16": (
        weight_only_problem(17, 72, 1280, bits=4, group=256, dtype="float16"), {"bm": 24, "split": 4, "stages": 3},
    ),
    "int8, registers that change hands": (weight_only_problem(70, 130, 528), {"bm": 256, "bn": 128, "split": 2}),
    "int4, a scale a channel": (weight_only_problem(10, 70, 768, bits=4), {"split": 2}),
}  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("name", MIXED)
def test_mixed_kernel_matches_the_oracle(emulator: Emulator, name: str) -> None:
    """The cases convert weights on the way to wgmma's registers, pass the stages several times, and have all edges."""
    problem, config = MIXED[name]
    kernel = emulator.mixed(problem, **config)
    check(kernel, problem)


BANDS: dict[str, tuple[Problem, dict[str, int]]] = {
    "slab": (build(300, 70, 72, "bf16"), {}),
    "slab, a cluster": (build(300, 70, 72, "bf16"), {"cluster": 2}),
    "slab, fp8": (fp8_problem(300, 72, 80), {}),
    "mixed": (weight_only_problem(75, 140, 256), {}),
}


@needs_cxx
@pytest.mark.parametrize("name", BANDS)
def test_tiles_in_bands_of_rows_cover_the_output(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Five rows of tiles are two bands of two and one of one."""
    problem, config = BANDS[name]
    rows = 2 * (MIXED_CONFIG if name == "mixed" else SLAB_CONFIG)["bm"] // config.get("cluster", 1)
    monkeypatch.setattr(cuda_source, "_BAND_ROWS", rows)
    monkeypatch.setattr(cuda_source, "_BAND_BYTES", 1)
    kernel = (emulator.mixed if name == "mixed" else emulator.slab)(problem, **config)
    check(kernel, problem)


def has_few_fibers(candidate: Candidate) -> bool:
    """Return whether the emulator needs few fibers for the candidate."""
    return candidate.template == "skinny" and candidate["warps"] == 4


@needs_cxx
@pytest.mark.parametrize("family", ["mm", "bmm", "int_mm", "mixed_mm", "scaled_mm"])
def test_random_problems_match_the_oracle(emulator: Emulator, family: str) -> None:
    """Verify three problems of a family, each with a random candidate."""
    rng, remaining = random.Random(family), 3
    while remaining:
        problem = random_problem(rng, 80)
        candidates = (
            [item for item in legal_candidates(CudaBackend(), problem) if has_few_fibers(item)]
            if problem.family == family
            else []
        )
        if not candidates:
            continue
        remaining -= 1
        candidate = rng.choice(candidates)
        kernel = emulator.load(problem, candidate)

        def run(inputs: Inputs, out: torch.Tensor, kernel: GpuKernel = kernel) -> None:
            run_into(kernel, inputs, out)

        verdict = verify(run, problem, make_reference_cases(problem, remaining), time_limit_s=0.0)
        assert verdict.ok, f"{candidate.id} on {problem.key}: {verdict.kind}: {verdict.detail}"


@needs_cxx
def test_kernels_serve_more_rows_than_their_m(emulator: Emulator) -> None:
    normed = replace(build(16, 37, 392, "bf16"), epilogue=(NORM,))
    cases: tuple[tuple[Callable[..., GpuKernel], Problem, dict[str, int], int], ...] = (
        (emulator.skinny, build(8, 37, 128, "bf16"), {}, 21),
        (emulator.slab, build(60, 37, 128, "bf16"), {}, 130),
        (emulator.slab, normed, {"bm": 16}, 39),
        (emulator.mixed, weight_only_problem(16, 37, 256), {}, 40),
    )
    for make_kernel, tuned, config, m in cases:
        kernel = make_kernel(tuned, **config)
        problem = kernel.problem.with_m(m)

        def run(inputs: Inputs, out: torch.Tensor, kernel: GpuKernel = kernel) -> None:
            run_into(kernel, inputs, out)

        verdict = verify(run, problem, make_reference_cases(problem, 0)[:1], time_limit_s=0)
        assert verdict.ok, verdict.detail


# By name: a template, a Problem, a config, and the copies (or the sizes of copies that share no K) by M on the fake
# driver's six multiprocessors.
FITTED: dict[str, tuple[str, Problem, dict[str, int], dict[int, Any]]] = {
    "int8 weights": (
        "mixed", weight_only_problem(130, 37, 528), {"bm": 72}, {1: 32, 193: 40, 289: 56, 385: 72},
    ),
    "int8 weights, clusters, an epilogue": (
        "mixed", replace(weight_only_problem(130, 70, 4000), epilogue=STEPS), {"bm": 72, "split": 2},
        {40: (2, 48), 70: (2, 72), 130: (1, 48)},
    ),
    "int4 weights, groups, clusters": (
        "mixed", weight_only_problem(90, 72, 3200, bits=4, group=128), {"bm": 72, "split": 2},
        {9: (2, 32), 40: (2, 48), 100: (1, 40), 200: (1, 72)},
    ),
    "bf16": ("slab", build(70, 304, 200, "bf16"), {"bn": 128}, {3: 64, 70: 112, 150: 80}),
    "bf16, a cluster, an epilogue": (
        "slab", replace(build(70, 304, 200, "bf16"), epilogue=STEPS), {"bn": 128, "cluster": 2}, {70: 64, 150: 80},
    ),
    "fp8, pieces": (
        "slab", fp8_problem(70, 304, 272), {"bn": 128, "pieces": 2, "turns": 2, "chunks": 2}, {70: 112, 150: 80},
    ),
    "bf16, a gate": (
        "slab", replace(build(70, 208, 136, "bf16"), epilogue=(Step("swiglu"),)), {"bn": 128},
        {30: 48, 70: 80, 150: 112},
    ),
}  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("name", FITTED)
def test_kernels_whose_tiles_are_fitted_match_the_oracle(
    emulator: Emulator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, problem, config, copies = FITTED[name]
    base, fitted = (MIXED_CONFIG, 3) if template == "mixed" else (SLAB_CONFIG, 1)
    config = {**base, **config, "fitted": fitted}
    tiles = FittedTiles(template, config, problem.n, problem.k, 6)
    assert {m: tiles.copy_at(m) for m in copies} == {
        m: c if isinstance(c, tuple) else (1, c) for m, c in copies.items()
    }
    kernel = emulator.load(problem, Candidate.make("cuda", template, **config))
    asked: list[int] = []
    original = FittedTiles.copy_at
    monkeypatch.setattr(FittedTiles, "copy_at", lambda tiles, m: asked.append(m) or original(tiles, m))
    for m in copies:
        problem = kernel.problem.with_m(m)

        def run(inputs: Inputs, out: torch.Tensor) -> None:
            run_into(kernel, inputs, out)

        verdict = verify(run, problem, make_reference_cases(problem, 0)[:1], time_limit_s=0)
        assert verdict.ok, f"{m}: {verdict.detail}"
        assert asked == list(range(1, 4097, tiles.rows_alike))  # when the launch was made; launches ask no more


@needs_cxx
@pytest.mark.parametrize("rows", [5, 1])
def test_batch_layouts_of_torch_bmm_match_torch(emulator: Emulator, rows: int) -> None:
    """The emulator aborts at a misaligned 16-byte load, as a GPU does."""
    problem = replace(bmm_problem(3, rows, 24, 64, "bfloat16"), b=Operand("bfloat16", Layout("col")))
    kernel = emulator.skinny(problem, bn=16)
    a, b = torch.randn(3, rows, 64).bfloat16(), torch.randn(3, 24, 64).bfloat16()
    for a_name, make_a_view in LAYOUTS.items():
        for b_name, make_b_view in LAYOUTS.items():
            if "dense" not in (a_name, b_name) and a_name != b_name:
                continue
            a_view, b_view = make_a_view(a), make_b_view(b).mT
            for start in (0, 3):
                out = torch.full((3 * rows * 24 + start,), float("nan"), dtype=torch.bfloat16)[start:]
                out = out.view(3, rows, 24)
                kernel.run(a_view, b_view, (), out)
                expected = torch.bmm(a_view.float(), b_view.float())
                torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2, msg=f"{a_name}, {b_name}")


@needs_cxx
@pytest.mark.parametrize("template", ["skinny", "slab"])
def test_integer_epilogues_are_exact(emulator: Emulator, template: str) -> None:
    for name, problem, inputs, expected in exact_cases(3, 24):
        kernel = emulator.skinny(problem) if template == "skinny" else emulator.slab(problem, bm=8, bn=24)
        out = torch.empty_like(expected)
        run_into(kernel, inputs, out)
        assert torch.equal(out, expected), name


@needs_cxx
def test_integer_outputs_round_nan_to_zero_and_ties_to_even(emulator: Emulator) -> None:
    for problem, inputs, expected in rounding_cases(8, 24, 64):
        for make_kernel, config in ((emulator.skinny, {}), (emulator.slab, {"bm": 8, "bn": 24})):
            out = torch.full_like(expected, 77)
            run_into(make_kernel(problem, **config), inputs, out)
            assert torch.equal(out, expected), problem.out_dtype


# Each value has a template, a Problem, a config, a statement, and a wrong statement that replaces it.
WRONG_STATEMENTS: dict[str, tuple[str, Problem, dict[str, int], str, str]] = {
    "A and B disagree about K's order": (
        "skinny", build(3, 24, 128, "bf16"), {}, "c * (KIND == INT4 ? 16 : RUN)", "(3 - c) * RUN",
    ),
    "all groups of warps take the same rows": (
        "slab", build(70, 24, 128, "bf16"), {"bm": 128}, "warp / 4 * 64 * 128", "0",
    ),
    "the same weights serve both halves of a step": (
        "mixed", weight_only_problem(17, 24, 128), {"bm": 24}, "4 * half + i : i", "i : i",
    ),
    "lanes store each other's columns": (
        "slab", build(20, 64, 128, "bf16"), {}, "8 * (own % TOGETHER)", "8 * (3 - own % TOGETHER)",
    ),
    "every tile takes the first columns' bias": (
        "slab", replace(build(20, 64, 128, "bf16"), epilogue=BIAS), {}, "min(first + min(thread", "min(min(thread",
    ),
    "one row's scale serves all": (
        "skinny", fp8_problem(5, 32, 128), {}, "const int x = e % WIDE, y = e / WIDE",
        "const int x = e % WIDE, y = 0 * e",
    ),
    "a norm leaves out the squares of the cluster's first block": (
        "skinny", replace(build(2, 32, 512, "bf16"), epilogue=(NORM,)), {"split": 2}, "squared += load_remote",
        "squared = load_remote",
    ),
    "the first of a norm's weights serve all of K": (
        "skinny", replace(build(2, 32, 512, "bf16"), epilogue=(NORM,)), {"warps": 4, "depth": 1},
        "weights_from += STEP * CHUNK * WIDTH", "weights_from += 0",
    ),
    "a gate multiplies its own columns": (
        "skinny", replace(build(2, 32, 512, "bf16"), epilogue=(Step("swiglu"),)), {}, "gate * finish(x + WIDE, y, m",
        "gate * finish(x, y, m",
    ),
    "the right half's scales are those of the left": (
        "skinny", replace(weight_only_problem(2, 64, 512), epilogue=(Step("swiglu"),)), {},
        "Ahead(const T* from, int first, int last, int thread) {",
        "Ahead(const T* from, int, int last, int thread) { int first = 0;",
    ),
    "a slab's gate multiplies its own columns": (
        "slab", replace(build(20, 64, 512, "bf16"), epilogue=(Step("swiglu"),)), {"bn": 32}, "sum[WIDE / 2]", "*sum",
    ),
    "both halves of a slab's stage are the gate's": (
        "slab", replace(build(20, 64, 512, "bf16"), epilogue=(Step("swiglu"),)), {"bn": 32}, "end_n + n0", "n0",
    ),
    "the last scales of a wide tile are not there": (
        "mixed", weight_only_problem(17, 70, 128), {"bn": 128, "bm": 24},
        "if (thread + i * THREADS < SIZE)", "if (thread < 32)",
    ),
    "one block's sums are left out": (
        "slab", build(20, 32, 512, "bf16"), {"split": 2}, "all.of[e] += one.of[e]", "all.of[e] = one.of[e]",
    ),
}  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("name", WRONG_STATEMENTS)
def test_verification_rejects_a_wrong_statement(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The emulated kernels are wrong when a statement of their source is wrong."""
    from gemmtune.backends.cuda import source as module

    template, problem, config, right, wrong = WRONG_STATEMENTS[name]
    original, changed = module._read_source, list[str]()

    def read_changed_source(name: str) -> str:
        text = original(name)
        changed.extend([name] * text.count(right))
        return text.replace(right, wrong)

    monkeypatch.setattr(module, "_read_source", read_changed_source)
    if template == "skinny":
        config = {"bm": 8 * -(-problem.m // 8), **config}
    kernel = getattr(emulator, template)(problem, **config)
    assert changed
    verdict = verify(
        lambda inputs, out: run_into(kernel, inputs, out), problem, make_reference_cases(problem, 0)[:1], time_limit_s=0
    )
    assert verdict.kind == "wrong"


PDL_CASES: dict[str, tuple[str, Problem, dict[str, int]]] = {
    "skinny": ("skinny", fp8_problem(5, 40, 208), {"depth": 2}),
    "slab": (
        "slab", replace(build(70, 100, 520, "bf16"), epilogue=STEPS),
        {"bm": 128, "bn": 40, "cluster": 2, "stages": 3},
    ),
    "slab, blocks that begin together": (
        "slab", replace(build(70, 100, 520, "bf16"), epilogue=STEPS), {"bm": 64, "bn": 40, "split": 2},
    ),
    "mixed": ("mixed", replace(weight_only_problem(34, 140, 784), epilogue=STEPS), {"bm": 40, "bn": 128, "split": 2}),
}  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("name", PDL_CASES)
def test_pdl_is_used_in_a_graph_after_a_gemmtune_kernel(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Such a kernel may begin before the previous one has ended, and reads only B until then. After others it waits."""
    template, problem, config = PDL_CASES[name]
    kernel, driver = getattr(emulator, template)(problem, **config), emulator.driver
    inputs = make_inputs(problem, 0)
    expected, out = (torch.full((problem.m, problem.n), float("nan"), dtype=torch.bfloat16) for _ in range(2))
    run_into(kernel, inputs, expected)
    assert expected.isfinite().all()

    def launch_flags() -> tuple[int, int]:
        """Return whether the launch used PDL, and whether it read B before the previous kernel ended."""
        run_into(kernel, inputs, out.fill_(float("nan")))
        assert torch.equal(out, expected)
        return driver.pdl_flags[-1], driver.launches[-1][2][-1]

    assert launch_flags() == (0, 0)  # no capture
    driver.capture = 3
    assert launch_flags() == (0, 0)  # the previous node is in another graph
    assert launch_flags() == launch_flags() == (1, 1)
    driver.nodes.append(-1)  # for example a kernel of PyTorch
    assert launch_flags() == (0, 0)
    assert launch_flags() == (1, 1)
    driver.capture = 4
    assert launch_flags() == (0, 0)
    with monkeypatch.context() as patch:
        patch.setenv("GEMMTUNE_OVERLAP", "0")
        assert launch_flags() == launch_flags() == (0, 0)
    assert launch_flags() == (0, 0)
    assert launch_flags() == (1, 1)


@pytest.mark.parametrize(
    ("name", "signals", "flags"),
    [
        (b"triton_red_fused_norm_1", True, (1, 1)),
        (b"triton_red_fused_norm_1", False, (0, 0)),
        (b"cudnn_attention", True, (0, 0)),
        (None, True, (0, 0)),
    ],
)
def test_pdl_is_used_behind_kernels_of_inductor_that_signal(
    name: bytes | None, signals: bool, flags: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = install_fake_driver(monkeypatch)
    driver.capture, driver.arguments["skinny"] = 1, 5
    header = Header("skinny", 0, 0, 4, ("b_ptr", "a_ptr", "c_ptr", "M", "following"), 0, waits=True)
    problem = build(4, 32, 64, "bf16")
    kernel = Skinny(problem, Candidate.make("cuda", "skinny", **SKINNY), [(header, b"")])
    driver.nodes.append(1000)
    if name is not None:
        driver.captured_names[1000] = name
    monkeypatch.setattr(CAPTURE_FACTS, "inductor_signals", signals)
    run_into(kernel, make_inputs(problem, 0), torch.empty(4, 32, dtype=torch.bfloat16))
    assert (driver.pdl_flags[-1], driver.launches[-1][2][-1]) == flags


@pytest.mark.parametrize(("writes_b", "flags"), [(False, (1, 1)), (True, (1, 0))])
def test_pdl_is_used_behind_other_kernels_of_gemmtunes(
    writes_b: bool, flags: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's kernels beside products signal, too, and are recorded with what they write."""
    driver = install_fake_driver(monkeypatch)
    driver.capture, driver.arguments["skinny"] = 1, 5
    header = Header("skinny", 0, 0, 4, ("b_ptr", "a_ptr", "c_ptr", "M", "following"), 0, waits=True)
    problem = build(4, 32, 64, "bf16")
    kernel, inputs = (
        Skinny(problem, Candidate.make("cuda", "skinny", **SKINNY), [(header, b"")]),
        make_inputs(problem, 0),
    )
    driver.nodes.append(1000)
    record_captured(STREAM, inputs.b if writes_b else inputs.a)
    run_into(kernel, inputs, torch.empty(4, 32, dtype=torch.bfloat16))
    assert (driver.pdl_flags[-1], driver.launches[-1][2][-1]) == flags


def test_pdl_is_not_used_with_an_older_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older driver's graphs would refuse PDL."""
    driver = install_fake_driver(monkeypatch)
    driver.version, driver.capture, driver.arguments["skinny"] = 12020, 1, 5
    header = Header("skinny", 0, 0, 4, ("b_ptr", "a_ptr", "c_ptr", "M", "following"), 0, waits=True)
    problem = build(4, 32, 64, "bf16")
    kernel = Skinny(problem, Candidate.make("cuda", "skinny", **SKINNY), [(header, b"")])
    inputs = make_inputs(problem, 0)
    for _ in range(2):
        run_into(kernel, inputs, torch.empty(4, 32, dtype=torch.bfloat16))
    assert driver.pdl_flags == [0, 0]


@needs_cxx
def test_dependents_launch_late_when_the_grid_does_not_fit(emulator: Emulator) -> None:
    problem, driver = build(5, 100, 208, "bf16"), emulator.driver
    inputs = make_inputs(problem, 0)
    driver.capture, driver.blocks_per_multiprocessor = 1, 0
    kernel = emulator.skinny(problem)
    for flags in (2, 3):
        out = torch.full((5, 100), float("nan"), dtype=torch.bfloat16)
        run_into(kernel, inputs, out)
        assert driver.launches[-1][2][-1] == flags
        assert out.isfinite().all()
    driver.blocks_per_multiprocessor = 2
    run_into(emulator.skinny(problem), inputs, out)
    assert driver.launches[-1][2][-1] == 1
    wide, driver.blocks_per_multiprocessor = build(5, 800, 64, "bf16"), 9
    run_into(emulator.skinny(wide, bn=16), make_inputs(wide, 0), torch.empty(5, 800, dtype=torch.bfloat16))
    assert driver.launches[-1][2][-1] == 3  # 50 small thread blocks on 6 multiprocessors


@needs_cxx
@pytest.mark.parametrize(
    ("blocks", "static", "percent"), [(2, 0, 1), (8, 9 << 10, 36), (1, 227 << 10, 100), (9, 48 << 10, 100)]
)
def test_kernels_leave_the_memory_that_their_blocks_do_not_share_to_the_l1_cache(
    blocks: int, static: int, percent: int, emulator: Emulator
) -> None:
    problem, driver = build(5, 40, 64, "bf16"), emulator.driver
    driver.blocks_per_multiprocessor, driver.static_shared = blocks, static
    run_into(emulator.skinny(problem), make_inputs(problem, 0), torch.empty(5, 40, dtype=torch.bfloat16))
    assert driver.carveouts == [percent]


@needs_cxx
def test_launch_in_a_thread_without_a_context_needs_no_other_driver_call(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, driver = build(5, 40, 64, "bf16"), emulator.driver
    kernel, inputs, out = emulator.skinny(problem), make_inputs(problem, 0), torch.empty(5, 40, dtype=torch.bfloat16)
    run_into(kernel, inputs, out)
    monkeypatch.setattr(FakeDriver, "cuOccupancyMaxActiveBlocksPerMultiprocessor", lambda *_: 201)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_into, kernel, inputs, out).result()
    assert len(driver.launches) == 2


@needs_cxx
def test_b_that_the_previous_kernel_writes_is_not_read_early(emulator: Emulator) -> None:
    """The previous kernel's output overlaps this kernel's B, by one row at least."""
    problem = build(16, 16, 64, "bf16")
    kernel, driver = emulator.skinny(problem), emulator.driver
    inputs = make_inputs(problem, 0)
    memory = torch.zeros(64 * 16 + 16 * 16, dtype=torch.bfloat16)
    b = memory[: 64 * 16].view(16, 64).t().copy_(inputs.b)
    after_b, last_row = memory[64 * 16 :].view(16, 16), memory[64 * 16 - 16 : -16].view(16, 16)
    driver.capture = 1
    for out, early in ((after_b, 1), (last_row, 0)):
        kernel.run(inputs.a, b, (), out)
        kernel.run(inputs.a, b, (), torch.empty(16, 16, dtype=torch.bfloat16))
        assert (driver.pdl_flags[-1], driver.launches[-1][2][-1]) == (1, early)


UNSYNCHRONIZED = {
    "skinny": ("skinny", "} else {\n        pdl_wait();", "} else {\n"),
    "slab": ("slab", "            pdl_wait();\n            for", "            for"),
    "slab's successor": (
        "slab", "pdl_wait();\n        if (!together) pdl_launch_dependents();",
        "if (!together) pdl_launch_dependents();\n        pdl_wait();",
    ),
    "mixed": ("mixed", "acquire_registers();\n        pdl_wait();", "acquire_registers();\n"),
    "mixed's successor": (
        "mixed", "pdl_wait();\n        pdl_launch_dependents();", "pdl_launch_dependents();\n        pdl_wait();",
    ),
}  # fmt: skip


@needs_cxx
@pytest.mark.parametrize("name", UNSYNCHRONIZED)
def test_emulator_detects_a_kernel_that_does_not_wait(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    from gemmtune.backends.cuda import source as module

    original, (template, right, wrong) = module._read_source, UNSYNCHRONIZED[name]
    assert right in original(f"{template}.cu")
    monkeypatch.setattr(module, "_read_source", lambda name: original(name).replace(right, wrong))
    _, problem, config = PDL_CASES[template]
    kernel = getattr(emulator, template)(problem, **config)
    inputs = make_inputs(problem, 0)
    with pytest.raises(AssertionError, match="too early"):
        run_into(kernel, inputs, torch.empty(problem.m, problem.n, dtype=torch.bfloat16))


def test_int4_weights_have_the_layout_of_the_triton_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    install_fake_driver(monkeypatch)
    problem: Any = weight_only_problem(4, 24, 256, bits=4, group=128)
    header = Header("skinny", 0, 0, 4, ("b_ptr", "a_ptr", "c_ptr"), 0)
    kernel = Skinny(problem, Candidate.make("cuda", "skinny", **SKINNY), [(header, b"")])
    assert kernel.packing == "triton:int4/128"
    assert kernel.pack(make_inputs(problem, 0).b).layout == kernel.packing


@pytest.mark.parametrize(
    ("steps", "sector"),
    [
        ((), 0),
        ((Step("bias", "col", "bfloat16"),), 0),
        ((Step("add", "full", "bfloat16"),), 16),
        ((Step("mul", "full", "bfloat16"), Step("add", "full", "float32")), 8),
        ((Step("add", "full", "bfloat16"), Step("swiglu")), 0),
    ],
)
def test_matrices_are_fetched_in_sectors_of_32_bytes(steps: tuple[Step, ...], sector: int) -> None:
    problem = replace(build(4, 64, 256, "bf16"), epilogue=steps)
    text = generate(problem, "slab", {**SLAB_CONFIG, "bm": 8}).text
    assert f"#define SECTOR {sector}\n" in text
    matrices = [index for index, step in enumerate(steps) if step.axis == "full" and step.takes_tensor]
    assert all(f"prefetch(&t{index}[(long long)m * ld{index} + n]);" in text for index in matrices)
