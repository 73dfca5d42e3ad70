"""The CUDA C++ kernels without a GPU: their space, and cross-compiling. What they compute: test_cuda_kernels.py."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace

import pytest

from gemmtune.backends.cuda import CudaBackend, compiler
from gemmtune.backends.cuda.block import mixed_raised_registers, slab_raised_registers
from gemmtune.backends.cuda.source import generate
from gemmtune.backends.gpu.artifact import decode_kernels
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError, UnsupportedError
from gemmtune.core.problem import Layout, Operand, Problem
from gemmtune.core.target import Target
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem
from helpers import gpus
from helpers.gpus import A100, FAMILIES, H200, SKINNY

needs_nvrtc = pytest.mark.skipif(not compiler.version(), reason="NVRTC is not installed")


def legal(problem: Problem, target: Target = H200) -> list[Candidate]:
    return gpus.legal(CudaBackend(), problem, target)


def reasons(problem: Problem, target: Target = H200) -> set[str]:
    return gpus.reasons(CudaBackend(), problem, target)


# --- space ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("m", [1, 5, 16, 32])
def test_every_family_has_candidates(family: str, m: int) -> None:
    found = [candidate for candidate in legal(FAMILIES[family].with_m(m)) if candidate.template == "skinny"]
    assert len(found) >= 10
    assert len({candidate.id for candidate in found}) == len(found)
    assert all(m <= int(candidate["bm"]) < m + 8 for candidate in found)


@pytest.mark.parametrize("family", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("m", [1, 17, 64, 100, 256])
def test_slabs_of_every_family_that_has_them(family: str, m: int) -> None:
    found = [candidate for candidate in legal(FAMILIES[family].with_m(m)) if candidate.template == "slab"]
    assert len(found) >= 5
    assert len({candidate.id for candidate in found}) == len(found)
    assert {int(candidate["bm"]) for candidate in found} == (
        {8 * -(-m // 8), 16 * -(-m // 16)} if m <= 64 else {64, 128}
    )


@pytest.mark.parametrize("m", [17, 64, 100, 256, 500])
@pytest.mark.parametrize(
    "problem", [weight_only_problem(1, 4096, 4096), weight_only_problem(1, 4096, 4096, bits=4, group=128)]
)
def test_narrow_weights_beside_many_rows(problem: Problem, m: int) -> None:
    found = [candidate for candidate in legal(problem.with_m(m)) if candidate.template == "mixed"]
    assert len(found) >= 30
    assert len({candidate.id for candidate in found}) == len(found)
    assert all(int(c["bm"]) <= 256 and -(-m // int(c["bm"])) * int(c["bm"]) < m + 40 for c in found)
    assert {2, 3} <= {candidate["stages"] for candidate in found}


def test_threads_wait_for_no_more_registers_than_a_block_starts_with() -> None:
    """``setmaxnreg`` waits forever for more."""
    handing = Counter[str]()
    problems = (weight_only_problem(256, 4096, 4096), weight_only_problem(128, 4096, 4096, bits=4, group=128))
    for problem in (*problems, fp8_problem(1024, 4096, 4096)):
        for candidate in legal(problem):
            config, template = dict(candidate.config), candidate.template
            if template not in ("mixed", "slab"):
                continue
            made = generate(problem, template, config)
            if made.registers:
                handing[template] += 1
                more, groups = (
                    (mixed_raised_registers, config["bn"])
                    if template == "mixed"
                    else (slab_raised_registers, config["bm"])
                )
                wanted, groups = more(problem, config), groups // 64
                assert made.warps == 4 * groups + 4
                assert 128 * (groups * wanted + 24) <= 32 * made.warps * made.registers <= 65536
    assert handing["mixed"] >= 20
    assert handing["slab"] >= 4


def test_slabs_are_as_wide_as_gives_every_multiprocessor_one() -> None:
    """N = 22016 on 132 of them: 132 slabs of 168 columns, or two or three rounds of narrower ones; integers too, whose
    wgmma has no such widths."""
    for problem in (build(64, 22016, 4096, "bf16"), int_problem(64, 22016, 4096)):
        assert {168, 88, 56} <= {candidate["bn"] for candidate in legal(problem)}
    assert legal(build(64, 12288, 4096, "bf16"))[0]["bn"] == 96


def test_few_columns_and_much_of_k_are_shared_among_blocks() -> None:
    slabs = [c for c in legal(build(64, 1024, 8192, "bf16")) if c.template == "slab"]
    assert int(slabs[0]["split"]) > 1
    assert all(min(int(c["split"]), int(c["cluster"])) == 1 for c in slabs)


def test_what_reads_most_at_once_comes_first() -> None:
    """Many multiprocessors, and loads enough on each; clusters only behind what does without."""
    first = legal(build(1, 4096, 4096, "bf16"))[0]
    assert int(first["bn"]) <= 32
    assert int(first["warps"]) * int(first["depth"]) >= 16
    assert first["split"] == 1


@pytest.mark.parametrize(
    ("problem", "words"),
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
        (weight_only_problem(1025, 64, 256), "17 to 1024 rows"),
        (build(8193, 64, 64, "bf16"), "by narrower weights"),
        (replace(fp8_problem(4, 64, 64), out_dtype="float8_e4m3fn"), "writes no float8_e4m3fn"),
    ],
)
def test_what_is_refused_is_refused_with_a_reason(problem: Problem, words: str) -> None:
    assert legal(problem) == []
    assert any(words in reason for reason in reasons(problem))


def test_each_template_has_its_range_of_rows() -> None:
    assert {c.template for c in legal(build(32, 4096, 4096, "bf16"))} == {"skinny", "slab"}
    assert {c.template for c in legal(build(33, 4096, 4096, "bf16"))} == {"slab"}
    assert {c.template for c in legal(weight_only_problem(16, 4096, 4096))} == {"skinny"}
    assert {c.template for c in legal(weight_only_problem(32, 4096, 4096))} == {"skinny", "mixed"}
    assert {c.template for c in legal(weight_only_problem(33, 4096, 4096))} == {"mixed"}


def test_illegal_configurations_say_why() -> None:
    found = " | ".join(reasons(weight_only_problem(16, 4096, 128)) | reasons(build(16, 50000, 4096, "bf16")))
    for words in ("nothing to do", "KB for the warps' sums and vectors", "registers a thread", "without splitting K"):
        assert words in found
    slabs = " | ".join(reasons(build(256, 40, 64, "bf16")) | reasons(fp8_problem(100, 30000, 4096)))
    slabs += " | ".join(reasons(build(64, 40000, 4096, "bf16")))
    for words in (
        "at least 3",
        "first 128 bytes",
        "fewer slabs than blocks",
        "registers a thread",
        "as many turns",
        "in 2 pieces",
    ):
        assert words in slabs
    for words in ("K is 1 steps", "without splitting K"):
        assert words in slabs
    found = " | ".join(
        reasons(weight_only_problem(64, 30000, 512)) | reasons(weight_only_problem(512, 4096, 4096, bits=4, group=128))
    )
    for words in ("fewer than 2", "K is 4 steps", "without splitting K", "registers a thread"):
        assert words in found
    for problem in (build(64, 4096, 4096, "bf16"), weight_only_problem(64, 4096, 4096)):
        assert "wgmma" in " | ".join(reasons(problem, A100))
    assert "clusters need compute capability 9.0" in " | ".join(reasons(build(1, 4096, 4096, "bf16"), A100))
    assert "fp8 needs compute capability 8.9" in " | ".join(reasons(fp8_problem(1, 64, 64), A100))


# --- compiling ------------------------------------------------------------------------------------------------------


def test_availability_is_in_words_to_act_on(monkeypatch: pytest.MonkeyPatch) -> None:
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

    one = build(1, 4096, 4096, "bf16")
    assert key(one) == key(build(5, 12288, 8192, "bf16"))
    assert key(one) != key(build(1, 4096, 4088, "bf16"))
    assert key(one) != key(one, A100)
    assert key(one) != key(replace(one, epilogue=(Step("relu"),)))
    with pytest.raises(KernelError, match="no template 'fat'"):
        backend._recipe(one, Candidate.make("cuda", "fat"), H200)


@needs_nvrtc
@pytest.mark.parametrize("family", FAMILIES)
def test_cross_compiling_for_hopper(family: str) -> None:
    problem = FAMILIES[family]
    for candidate in (legal(problem)[0], next(c for c in legal(problem) if c["split"] == 2)):
        ((header, cubin),) = decode_kernels(CudaBackend()._recipe(problem, candidate, H200)[1]())
        assert cubin[:4] == b"\x7fELF"
        assert (header.name, header.warps, header.arguments[:3]) == (
            "skinny", candidate["warps"], ("b_ptr", "a_ptr", "c_ptr"),
        )  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("family", ["bf16", "int8", "fp8"])
def test_cross_compiling_slabs(family: str) -> None:
    """wgmma is there with the architecture's own name only (sm_90a)."""
    problem = FAMILIES[family].with_m(100)
    found = [c for c in legal(problem) if c.template == "slab"]
    for candidate in (found[0], next(c for c in found if c["cluster"] == 2 and c["bm"] == 128)):
        ((header, cubin),) = decode_kernels(CudaBackend()._recipe(problem, candidate, H200)[1]())
        assert cubin[:4] == b"\x7fELF"
        assert (header.name, header.warps) == ("slab", int(candidate["bm"]) // 16 + 1)
        assert header.arguments[:3] == ("a_desc", "b_desc", "c_ptr")
        assert 100_000 < header.shared <= 232_448
        assert header.descriptors["a_desc"].block[0] == int(candidate["bm"]) // int(candidate["cluster"])


@needs_nvrtc
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("m", [64, 200])
def test_cross_compiling_narrow_weights_beside_many_rows(bits: int, m: int) -> None:
    """Without spilling, and with as many registers at the start as threads hand on."""
    problem = weight_only_problem(m, 4096, 4096, bits=bits, group=128 if bits == 4 else None)
    found = [c for c in legal(problem) if c.template == "mixed"]
    chosen = {generate(problem, "mixed", dict(c.config)).registers > 0: c for c in reversed(found)}
    for candidate in chosen.values():
        ((header, cubin),) = decode_kernels(CudaBackend()._recipe(problem, candidate, H200)[1]())
        assert cubin[:4] == b"\x7fELF"
        assert header.name == "mixed"
        assert header.shared <= 232_448
        assert header.descriptors["b_desc"].block == (candidate["bn"], 128 * bits // 8)


@needs_nvrtc
def test_what_the_compiler_says_is_passed_on() -> None:
    with pytest.raises(KernelError, match=r"NVRTC cannot compile it: gemmtune.cu\(1\): error"):
        compiler.compile_source("nonsense", (9, 0))
    problem = weight_only_problem(32, 64, 4096, bits=4, group=128)
    greedy = {**SKINNY, "bm": 32, "bn": 64, "depth": 4}
    with pytest.raises(KernelError, match="hand on what makes 248"):
        compiler.compile_source('extern "C" __global__ void idle() {}', (9, 0), registers=248)
    with pytest.raises(KernelError, match="would spill"):
        compiler.compile_source(generate(problem, "skinny", greedy).text, (9, 0))


@needs_nvrtc
def test_the_drivers_cache_which_drops_what_the_compiler_says_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC 12 does not know the option, nor has it the cache."""
    real, given = compiler._compile, list[list[str]]()

    def older(program: ctypes.c_void_p, options: list[str]) -> int:
        given.append(list(options))
        return real(program, [f"{option}d" if option == "--no-cache" else option for option in options])

    text = 'extern "C" __global__ void idle() {}'
    monkeypatch.setattr(compiler, "_compile", older)
    assert compiler.compile_source(text, (9, 0))[:4] == b"\x7fELF"
    assert ["--no-cache" in options for options in given] == [True, False]
