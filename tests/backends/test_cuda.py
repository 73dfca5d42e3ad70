"""CUDA C++ kernels without a GPU: their search space and cross-compiling. test_cuda_kernels.py checks their results."""

from __future__ import annotations

import ctypes
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemmtune.backends.cuda import CudaBackend, compiler, space
from gemmtune.backends.cuda.block import mixed_raised_registers, slab_raised_registers
from gemmtune.backends.cuda.fitted import Copy, FittedTiles, clusters_at_once
from gemmtune.backends.cuda.source import generate
from gemmtune.backends.gpu.artifact import decode_kernels
from gemmtune.backends.gpu.rules import device_limits
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError, UnsupportedError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem
from helpers import gpus
from helpers.gpus import A100, H200, PROBLEM_OF_DTYPE, SKINNY

needs_nvrtc = pytest.mark.skipif(not compiler.version(), reason="NVRTC is not installed")


def legal_candidates(problem: Problem, target: Target = H200) -> list[Candidate]:
    return gpus.legal_candidates(CudaBackend(), problem, target)


def illegal_reasons(problem: Problem, target: Target = H200) -> set[str]:
    return gpus.illegal_reasons(CudaBackend(), problem, target)


# --- search space ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", PROBLEM_OF_DTYPE)
@pytest.mark.parametrize("m", [1, 5, 16, 32])
def test_skinny_has_candidates_for_all_dtypes(dtype: str, m: int) -> None:
    candidates = [
        candidate for candidate in legal_candidates(PROBLEM_OF_DTYPE[dtype].with_m(m)) if candidate.template == "skinny"
    ]
    assert len(candidates) >= 10
    assert len({candidate.id for candidate in candidates}) == len(candidates)
    assert all(m <= int(candidate["bm"]) < m + 8 for candidate in candidates)


@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("m", [1, 17, 64, 100, 256])
def test_slab_has_candidates_for_its_dtypes(dtype: str, m: int) -> None:
    candidates = [
        candidate for candidate in legal_candidates(PROBLEM_OF_DTYPE[dtype].with_m(m)) if candidate.template == "slab"
    ]
    assert len(candidates) >= 5
    assert len({candidate.id for candidate in candidates}) == len(candidates)
    assert {int(candidate["bm"]) for candidate in candidates} == (
        {8 * -(-m // 8), 16 * -(-m // 16)} if m <= 64 else {64, 128}
    )


@pytest.mark.parametrize("m", [17, 64, 100, 256, 500])
@pytest.mark.parametrize(
    "problem", [weight_only_problem(1, 4096, 4096), weight_only_problem(1, 4096, 4096, bits=4, group=128)]
)
def test_mixed_has_candidates_for_weight_only_problems(problem: Problem, m: int) -> None:
    candidates = [candidate for candidate in legal_candidates(problem.with_m(m)) if candidate.template == "mixed"]
    assert len(candidates) >= 30
    assert len({candidate.id for candidate in candidates}) == len(candidates)
    assert all(int(c["bm"]) <= 256 and -(-m // int(c["bm"])) * int(c["bm"]) < m + 40 for c in candidates)
    assert {2, 3} <= {candidate["stages"] for candidate in candidates}


@given(st.sampled_from(("mixed", "slab")), st.integers(1, 8192), st.integers(8, 20000), st.integers(1, 264), st.data())
def test_fitted_tiles_need_no_more_rounds_of_blocks_than_the_largest(
    template: str, m: int, n: int, multiprocessors: int, data: st.DataObject
) -> None:
    blocks = data.draw(st.integers(1, multiprocessors))
    largest, other = data.draw(st.sampled_from((24, 40, 160, 232, 256))), data.draw(st.sampled_from((64, 128)))
    bm, bn = (largest, other) if template == "mixed" else (other, largest)
    config = {
        "bm": bm,
        "bn": bn,
        "fitted": 1,
        **({"split": blocks} if template == "mixed" else {"split": 1, "cluster": blocks}),
    }
    k = data.draw(st.sampled_from((512, 4096, 11008)))
    tiles = FittedTiles(template, config, n, k, multiprocessors)
    copy = tiles.copy_at(m)
    assert copy in tiles.copies
    assert Copy(1, largest) in tiles.copies
    loaded = FittedTiles(template, config, n, k, multiprocessors, tiles.copies)  # as a loaded kernel does
    assert loaded.copy_at(m) == copy
    assert tiles.copy_at((m - 1) // tiles.rows_alike * tiles.rows_alike + 1) == copy

    def rounds(copy: Copy) -> int:
        rows, columns = (copy.size, bn) if template == "mixed" else (bm, copy.size * blocks)
        clusters = clusters_at_once(copy.split if template == "mixed" else blocks, multiprocessors)
        return math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / clusters)

    def smallest(split: int) -> Copy:
        eights = range(largest // 2, 192) if template == "mixed" and split == 1 else ()
        step = 32 if template == "mixed" and split > 2 else 16
        least = largest // 3 if (template, bn) == ("mixed", 128) else 0  # smaller ones are not built
        sizes = [size for size in range(32, largest, 8) if size >= least and (size % step == 0 or size in eights)]
        most = rounds(Copy(split, largest))
        return next(c for size in (*sizes, largest) if rounds(c := Copy(split, size)) == most)

    def rows_multiplied(copy: Copy) -> float:
        """Return the time of a copy, in rows of a tile with K = 4096."""
        count = rounds(copy)
        exchange = 45.0 * 4096 / k if copy.split > 1 else 0.0
        return math.inf if copy.split > 2 and count > 1 else count * ((110.0 + copy.size) / copy.split + exchange)

    if template == "slab":
        assert rounds(copy) == rounds(smallest(1))
    elif m <= 4096:  # for more rows not all copies may be there
        splits = [split for split in (1, 2, 4, 6) if split <= blocks]
        assert copy == min(map(smallest, splits), key=rows_multiplied)


FITTED_PROBLEMS = {
    "bf16": build(1, 4096, 4096, "bf16"), "fp8": fp8_problem(1, 4096, 4096), "int8": int_problem(1, 4096, 4096),
    "int8 weights": weight_only_problem(1, 4096, 4096), "few steps": weight_only_problem(1, 512, 256),
    "int4 weights": weight_only_problem(1, 4096, 4096, bits=4, group=128),
}  # fmt: skip


@pytest.mark.parametrize("m", [17, 65, 100, 500, 3000])
@pytest.mark.parametrize("name", FITTED_PROBLEMS)
def test_candidates_for_plans_are_legal_and_not_listed_for_one_m(name: str, m: int) -> None:
    problem, backend = FITTED_PROBLEMS[name].with_m(m), CudaBackend()
    candidates = backend.plan_candidates(problem, H200)
    assert bool(candidates) == (m > 17)
    listed = set(legal_candidates(problem))
    seconds = [backend.estimated_s(problem, candidate, H200) or 0.0 for candidate in candidates]
    assert seconds == sorted(seconds)
    for candidate in candidates:
        assert candidate not in listed
        assert not backend.why_illegal(problem, candidate, H200)
        path = backend.code_paths(problem, candidate, H200)
        assert path is not None
        tiles = FittedTiles(candidate.template, dict(candidate.config), problem.n, problem.k, 132)
        assert path(m) == tiles.copy_at(m)
    assert backend.code_paths(problem, next(iter(listed)), H200) is None


def test_a_template_without_fitted_tiles_has_none() -> None:
    """A damaged store may say so."""
    problem, backend = build(8, 4096, 4096, "bf16"), CudaBackend()
    skinny = next(c for c in legal_candidates(problem) if c.template == "skinny")
    fitted = Candidate.make("cuda", "skinny", **dict(skinny.config), fitted=1)
    assert backend.why_illegal(problem, fitted, H200)
    assert backend.code_paths(problem, fitted, H200) is None
    assert backend.estimated_s(problem, fitted, H200) == backend.estimated_s(problem, skinny, H200)


@pytest.mark.parametrize("name", FITTED_PROBLEMS)
def test_the_copies_of_kernels_whose_tiles_are_fitted_are_legal(name: str) -> None:
    problem, backend, device = FITTED_PROBLEMS[name].with_m(300), CudaBackend(), device_limits(H200)
    for candidate in backend.plan_candidates(problem, H200):
        axis, fitted = ("bm", 4) if candidate.template == "mixed" else ("bn", 1)
        copies = space.copies(problem, candidate.template, dict(candidate.config), device)
        tiles = FittedTiles(candidate.template, dict(candidate.config), problem.n, problem.k, device.multiprocessors)
        assert [(copy["split"], copy[axis]) for copy in copies] == list(tiles.copies)
        assert dict(candidate.config) in [{**copy, "split": candidate["split"], "fitted": fitted} for copy in copies]
        why_illegal = space._why_mixed_illegal if candidate.template == "mixed" else space._why_slab_illegal
        assert not [reason for copy in copies if (reason := why_illegal(problem, device, {**copy, "fitted": fitted}))]


NORM = Step("rms_norm", "inner", "bfloat16", value=1e-5)


@pytest.mark.parametrize(
    ("problem", "templates"),
    [
        (build(1, 4096, 4096, "bf16"), {"skinny", "slab"}),
        (build(32, 4096, 4096, "bf16"), {"skinny", "slab"}),
        (build(33, 4096, 4096, "bf16"), set()),
        (weight_only_problem(16, 4096, 4096), {"skinny"}),
    ],
)
def test_templates_that_compute_norms_of_bfloat16(problem: Problem, templates: set[str]) -> None:
    normed = replace(problem, epilogue=(NORM, Step("silu")))
    assert {candidate.template for candidate in legal_candidates(normed)} == templates
    for other in ("float16", "float32"):
        wrong = replace(normed, epilogue=(replace(NORM, dtype=other),))
        assert not legal_candidates(wrong)
        expected = f"normalises bfloat16 activations with a bfloat16 weight and bias; got bfloat16, {other}"
        assert {expected} == illegal_reasons(wrong)


@pytest.mark.parametrize("m", [1, 9, 17, 32])
@pytest.mark.parametrize("k", [512, 4096])
def test_slabs_with_norms_have_more_steps_than_stages(m: int, k: int) -> None:
    """A row's sum of squares is read before the last stage of the next tile arrives. The warps that normalise give no
    registers to others."""
    problem = replace(build(m, 4096, k, "bf16"), epilogue=(NORM,))
    slabs = [candidate for candidate in legal_candidates(problem) if candidate.template == "slab"]
    assert slabs
    for candidate in slabs:
        assert candidate["split"] == 1
        assert int(candidate["stages"]) < -(-k // (64 * int(candidate["chunks"])))
        assert not generate(problem, "slab", dict(candidate.config)).registers


def test_raised_registers_do_not_exceed_those_of_the_thread_block() -> None:
    """``setmaxnreg`` would wait forever for more registers."""
    counts = Counter[str]()
    problems = (weight_only_problem(256, 4096, 4096), weight_only_problem(128, 4096, 4096, bits=4, group=128))
    for problem in (*problems, fp8_problem(1024, 4096, 4096)):
        for candidate in legal_candidates(problem):
            config, template = dict(candidate.config), candidate.template
            if template not in ("mixed", "slab"):
                continue
            source = generate(problem, template, config)
            if source.registers:
                counts[template] += 1
                raised_registers, groups = (
                    (mixed_raised_registers, config["bn"])
                    if template == "mixed"
                    else (slab_raised_registers, config["bm"])
                )
                registers, groups = raised_registers(problem, config), groups // 64
                assert source.warps == 4 * groups + 4
                assert 128 * (groups * registers + 24) <= 32 * source.warps * source.registers <= 65536
    assert counts["mixed"] >= 20
    assert counts["slab"] >= 4


def test_slab_widths_give_each_multiprocessor_a_tile() -> None:
    """N = 22016 on 132 multiprocessors is 132 tiles of 168 columns, or two or three waves of narrower tiles.

    Integers have these tiles too, though their wgmma has no such widths.
    """
    for problem in (build(64, 22016, 4096, "bf16"), int_problem(64, 22016, 4096)):
        assert {168, 88, 56} <= {candidate["bn"] for candidate in legal_candidates(problem)}
    assert legal_candidates(build(64, 12288, 4096, "bf16"))[0]["bn"] == 96


def test_few_columns_and_a_large_k_are_split() -> None:
    slabs = [candidate for candidate in legal_candidates(build(64, 1024, 8192, "bf16")) if candidate.template == "slab"]
    assert int(slabs[0]["split"]) > 1
    assert all(min(int(candidate["split"]), int(candidate["cluster"])) == 1 for candidate in slabs)


def test_first_candidate_has_the_most_loads_in_flight() -> None:
    """The first candidate uses many multiprocessors with many loads on each; clusters come after other candidates."""
    first = legal_candidates(build(1, 4096, 4096, "bf16"))[0]
    assert int(first["bn"]) <= 32
    assert int(first["warps"]) * int(first["depth"]) >= 16
    assert first["split"] == 1


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (build(8193, 64, 64, "bf16"), "at most 32 rows"),
        (build(8193, 64, 64, "bf16"), "at most 8192 rows"),
        (replace(bmm_problem(3, 50, 24, 64, "bfloat16"), b=Operand("bfloat16", Layout("col"))), "one kind of element"),
        (build(4, 64, 68, "bf16"), "16 bytes at a time"),
        (fp8_problem(4, 64, 72), "16 bytes at a time"),
        (replace(build(4, 64, 64, "bf16"), b=Operand("bfloat16")), "columns of B must be contiguous"),
        (replace(build(4, 64, 64, "bf16"), a=Operand("bfloat16", Layout("col"))), "rows of A"),
        (build(4, 64, 64, "fp32"), "float32 runs in cuBLAS"),
        (weight_only_problem(4, 64, 128, group=32), "64 elements of K at a time"),
        (weight_only_problem(4, 64, 128, bits=4, group=64), "128 elements of K at a time"),
        (weight_only_problem(40, 64, 128, group=64), "128 elements of K at a time"),
        (weight_only_problem(40, 64, 256, bits=4, group=128, zero_point=True), "no zero points"),
        (weight_only_problem(4097, 64, 256), "17 to 4096 rows"),
        (build(8193, 64, 64, "bf16"), "by narrower weights"),
        (replace(fp8_problem(4, 64, 64), out_dtype="float8_e4m3fn"), "writes no float8_e4m3fn"),
    ],
)
def test_unsupported_problems_have_a_reason(problem: Problem, expected: str) -> None:
    assert legal_candidates(problem) == []
    assert any(expected in reason for reason in illegal_reasons(problem))


def test_templates_are_legal_within_their_ranges_of_m() -> None:
    assert {candidate.template for candidate in legal_candidates(build(32, 4096, 4096, "bf16"))} == {"skinny", "slab"}
    assert {candidate.template for candidate in legal_candidates(build(33, 4096, 4096, "bf16"))} == {"slab"}
    assert {candidate.template for candidate in legal_candidates(weight_only_problem(16, 4096, 4096))} == {"skinny"}
    assert {candidate.template for candidate in legal_candidates(weight_only_problem(32, 4096, 4096))} == {
        "skinny",
        "mixed",
    }
    assert {candidate.template for candidate in legal_candidates(weight_only_problem(33, 4096, 4096))} == {"mixed"}


def test_illegal_configs_have_a_reason() -> None:
    text = " | ".join(
        illegal_reasons(weight_only_problem(16, 4096, 128)) | illegal_reasons(build(16, 50000, 4096, "bf16"))
    )
    for expected in (
        "nothing to do",
        "KB for the warps' sums and vectors",
        "registers a thread",
        "without splitting K",
    ):
        assert expected in text
    slab_text = " | ".join(illegal_reasons(build(256, 40, 64, "bf16")) | illegal_reasons(fp8_problem(100, 30000, 4096)))
    slab_text += " | ".join(illegal_reasons(build(64, 40000, 4096, "bf16")))
    for expected in (
        "at least 3",
        "first 128 bytes",
        "fewer slabs than blocks",
        "registers a thread",
        "as many turns",
        "in 2 pieces",
    ):
        assert expected in slab_text
    for expected in ("K is 1 steps", "without splitting K"):
        assert expected in slab_text
    text = " | ".join(
        illegal_reasons(weight_only_problem(64, 30000, 512))
        | illegal_reasons(weight_only_problem(512, 4096, 4096, bits=4, group=128))
    )
    for expected in ("fewer than 2", "K is 4 steps", "without splitting K", "registers a thread"):
        assert expected in text
    for problem in (build(64, 4096, 4096, "bf16"), weight_only_problem(64, 4096, 4096)):
        assert "wgmma" in " | ".join(illegal_reasons(problem, A100))
    assert "clusters need compute capability 9.0" in " | ".join(illegal_reasons(build(1, 4096, 4096, "bf16"), A100))
    assert "fp8 needs compute capability 8.9" in " | ".join(illegal_reasons(fp8_problem(1, 64, 64), A100))


# --- compiling ------------------------------------------------------------------------------------------------------


def test_unavailable_backend_names_the_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend()
    assert "runs on GPUs" in backend.available(Target("cpu", "x", "x86_64")).reason
    assert bool(backend.available(H200)) == bool(compiler.version())
    monkeypatch.setattr(compiler, "_library_names", lambda: iter(["libnvrtc-that-is-not-there.so"]))
    compiler.nvrtc.cache_clear()
    compiler.version.cache_clear()
    try:
        assert "pip install nvidia-cuda-nvrtc" in backend.available(H200).reason
        with pytest.raises(UnsupportedError, match="NVRTC"):
            compiler.compile_source("", (9, 0))
    finally:
        compiler.nvrtc.cache_clear()
        compiler.version.cache_clear()


def test_problems_that_differ_in_size_only_share_artifacts() -> None:
    backend, candidate = CudaBackend(), Candidate.make("cuda", "skinny", **SKINNY)

    def key(problem: Problem, target: Target = H200) -> str:
        return backend._recipe(problem, candidate, target)[0]

    small = build(1, 4096, 4096, "bf16")
    assert key(small) == key(build(5, 12288, 8192, "bf16"))
    assert key(small) != key(build(1, 4096, 4088, "bf16"))
    assert key(small) != key(small, A100)
    assert key(small) != key(replace(small, epilogue=(Step("relu"),)))
    with pytest.raises(KernelError, match="no template 'fat'"):
        backend._recipe(small, Candidate.make("cuda", "fat"), H200)


@needs_nvrtc
@pytest.mark.parametrize("dtype", PROBLEM_OF_DTYPE)
def test_cross_compiling_for_hopper(dtype: str) -> None:
    problem = PROBLEM_OF_DTYPE[dtype]
    for candidate in (
        legal_candidates(problem)[0],
        next(item for item in legal_candidates(problem) if item["split"] == 2),
    ):
        ((header, cubin),) = decode_kernels(CudaBackend()._recipe(problem, candidate, H200)[1]())
        assert cubin[:4] == b"\x7fELF"
        assert (header.name, header.warps, header.arguments[:3]) == (
            "skinny", candidate["warps"], ("b_ptr", "a_ptr", "c_ptr"),
        )  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8"])
def test_cross_compiling_slab_for_hopper(dtype: str) -> None:
    """wgmma needs the architecture's specific name (sm_90a)."""
    problem = PROBLEM_OF_DTYPE[dtype].with_m(100)
    candidates = [item for item in legal_candidates(problem) if item.template == "slab"]
    for candidate in (candidates[0], next(item for item in candidates if item["cluster"] == 2 and item["bm"] == 128)):
        ((header, cubin),) = decode_kernels(CudaBackend()._recipe(problem, candidate, H200)[1]())
        assert cubin[:4] == b"\x7fELF"
        assert (header.name, header.warps) == ("slab", int(candidate["bm"]) // 16 + 1)
        assert header.arguments[:3] == ("a_desc", "b_desc", "c_ptr")
        assert 100_000 < header.shared <= 232_448
        assert header.descriptors["a_desc"].block[0] == int(candidate["bm"]) // int(candidate["cluster"])


@needs_nvrtc
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("m", [64, 200])
def test_cross_compiling_mixed_for_hopper(bits: int, m: int) -> None:
    """The kernels compile without spilling, with the initial number of registers that ``setmaxnreg`` redistributes."""
    problem = weight_only_problem(m, 4096, 4096, bits=bits, group=128 if bits == 4 else None)
    candidates = [item for item in legal_candidates(problem) if item.template == "mixed"]
    by_register_handover = {
        generate(problem, "mixed", dict(item.config)).registers > 0: item for item in reversed(candidates)
    }
    for candidate in by_register_handover.values():
        ((header, cubin),) = decode_kernels(CudaBackend()._recipe(problem, candidate, H200)[1]())
        assert cubin[:4] == b"\x7fELF"
        assert header.name == "mixed"
        assert header.shared <= 232_448
        assert header.descriptors["b_desc"].block == (candidate["bn"], 128 * bits // 8)


@needs_nvrtc
@pytest.mark.parametrize("m", [64, 200])
def test_cross_compiling_mixed_with_a_residual(m: int) -> None:
    """Blocks that share K have the residual in registers while they wait for sums, without spilling."""
    problem = replace(weight_only_problem(m, 4096, 4096), epilogue=(Step("add", "full", "bfloat16"),))
    candidates = [item for item in legal_candidates(problem) if item.template == "mixed" and item["split"] == 2]
    for candidate in (candidates[0], max(candidates, key=lambda item: item["bm"])):
        source = generate(problem, "mixed", dict(candidate.config))
        assert "elements.t0 = t0[" in source.text
        assert compiler.compile_source(source.text, (9, 0), source.arch, source.registers)[:4] == b"\x7fELF"


@needs_nvrtc
def test_compiler_errors_are_raised_with_their_text() -> None:
    with pytest.raises(KernelError, match=r"NVRTC cannot compile it: gemmtune.cu\(1\): error"):
        compiler.compile_source("nonsense", (9, 0))
    problem = weight_only_problem(32, 64, 4096, bits=4, group=128)
    greedy = {**SKINNY, "bm": 32, "bn": 64, "depth": 4}
    with pytest.raises(KernelError, match="hand on what makes 248"):
        compiler.compile_source('extern "C" __global__ void idle() {}', (9, 0), registers=248)
    with pytest.raises(KernelError, match="would spill"):
        compiler.compile_source(generate(problem, "skinny", greedy).text, (9, 0))


@needs_nvrtc
def test_no_cache_option_is_dropped_for_nvrtc_12(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC 12 has neither the option nor the cache."""
    original, options_of_calls = compiler._compile, list[list[str]]()

    def compile_as_nvrtc_12(program: ctypes.c_void_p, options: list[str]) -> int:
        options_of_calls.append(list(options))
        return original(program, [f"{option}d" if option == "--no-cache" else option for option in options])

    text = 'extern "C" __global__ void idle() {}'
    monkeypatch.setattr(compiler, "_compile", compile_as_nvrtc_12)
    assert compiler.compile_source(text, (9, 0))[:4] == b"\x7fELF"
    assert ["--no-cache" in options for options in options_of_calls] == [True, False]
