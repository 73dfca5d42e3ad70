"""Triton backend without a GPU: search space, cross-compiling, kernels in the interpreter, and int4 packing."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmtune import backends
from gemmtune.backends import triton
from gemmtune.backends.gpu import artifact
from gemmtune.backends.gpu.int4 import INT4_BLOCKS, int4_layout, shuffle_int4, unshuffle_int4
from gemmtune.backends.triton import TritonBackend, compiler
from gemmtune.backends.triton.cost import Work, seconds
from gemmtune.core.candidate import Candidate
from gemmtune.core.epilogue import Step
from gemmtune.core.errors import KernelError, UnsupportedError
from gemmtune.core.problem import Layout, Operand, Problem, Quant
from gemmtune.core.target import Target
from gemmtune.core.weights import QuantWeight
from gemmtune.core.workloads import bmm_problem, build, fp8_problem, int_problem, weight_only_problem
from helpers import gpus
from helpers.gpus import A100, H200, HAS_TRITON, PROBLEM_OF_DTYPE, needs_triton


def legal_candidates(problem: Problem, target: Target = H200) -> list[Candidate]:
    return gpus.legal_candidates(TritonBackend(), problem, target)


def illegal_reasons(problem: Problem, target: Target = H200) -> set[str]:
    return gpus.illegal_reasons(TritonBackend(), problem, target)


def first_candidate(problem: Problem, template: str, **config: Any) -> Candidate:
    for candidate in legal_candidates(problem):
        candidate_config = dict(candidate.config)
        if candidate.template == template and all(candidate_config[name] == value for name, value in config.items()):
            return candidate
    raise AssertionError(f"no {template} candidate with {config}")


# --- search space ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", PROBLEM_OF_DTYPE)
@pytest.mark.parametrize("m", [1, 16, 64, 256, 4096])
def test_candidates_fit_the_device_for_all_dtypes(dtype: str, m: int) -> None:
    problem = PROBLEM_OF_DTYPE[dtype].with_m(m)
    candidates = legal_candidates(problem)
    assert len(candidates) >= 10
    assert len({candidate.id for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        config = dict(candidate.config)
        assert config["bm"] * config["bn"] <= 256 * 32 * config["warps"]
        assert compiler.make_spec(problem, candidate).signature["c_ptr"].startswith("*")


def test_small_m_prefers_swapped_operands_and_split_k_on_hopper() -> None:
    leading = legal_candidates(build(1, 4096, 4096, "bf16"))[:8]
    assert all(candidate["swap"] == 1 and candidate["bm"] == 16 for candidate in leading)
    assert any(candidate["split"] != 1 for candidate in leading)


def test_large_m_prefers_large_tiles() -> None:
    best = legal_candidates(build(4096, 4096, 4096, "bf16"))[0]
    assert int(best["bm"]) * int(best["bn"]) >= 128 * 128


def test_tma_needs_hopper() -> None:
    problem = build(4096, 4096, 4096, "bf16")
    assert {candidate.template for candidate in legal_candidates(problem, A100)} == {"tiled"}
    assert any("TMA needs compute capability 9.0" in reason for reason in illegal_reasons(problem, A100))


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (build(16, 64, 64, "fp32"), "float32 runs in cuBLAS"),
        (build(0, 64, 64, "bf16"), "nothing to multiply"),
        (replace(build(16, 64, 64, "bf16"), out=Layout("col")), "row-major outputs"),
        (replace(build(16, 64, 64, "bf16"), acc="float16"), "accumulates in float32 only"),
        (int_problem(16, 64, 64, a_dtype="uint8"), "int8 by int8"),
        (weight_only_problem(16, 64, 96, bits=4, group=32), "multiple of 128"),
        (weight_only_problem(16, 64, 128, group=16), "multiples of 32"),
        (replace(build(16, 64, 64, "bf16"), epilogue=(Step("relu"),) * 6), "at most 5 steps"),
        (replace(int_problem(4, 64, 64), epilogue=(Step("scale", "col", "float32"),)), "rounded to int32"),
    ],
)
def test_unsupported_problems_have_a_reason(problem: Problem, expected: str) -> None:
    assert legal_candidates(problem) == []
    assert any(expected in reason for reason in illegal_reasons(problem))


def test_illegal_configs_have_a_reason() -> None:
    text = " | ".join(illegal_reasons(fp8_problem(64, 4096, 4160)))
    assert "must divide K = 4160" in text
    large = build(1, 16, 1 << 26, "bf16")
    assert any("further than 32 bits tell" in reason for reason in illegal_reasons(large))
    assert all(
        candidate.template != "tiled" or candidate["bm"] * (1 << 26) < 1 << 31 for candidate in legal_candidates(large)
    )
    assert "KB of shared memory" in text


@needs_triton
def test_only_int4_has_a_default_packing() -> None:
    backend = TritonBackend()
    for m in (1, 16, 300):
        candidate = backend.default_packing(PROBLEM_OF_DTYPE["int4wo"].with_m(m), H200)
        assert candidate is not None
        assert candidate["bk"] == 128
    assert backend.default_packing(PROBLEM_OF_DTYPE["int8wo"], H200) is None
    assert backend.default_packing(PROBLEM_OF_DTYPE["int4wo"], replace(H200, device="cpu")) is None


def test_unavailable_backend_has_a_reason() -> None:
    backend = TritonBackend()
    assert "runs on GPUs" in backend.available(Target("cpu", "x", "x86_64")).reason
    assert "needs compute capability 8.0" in backend.available(replace(H200, capability="7.5")).reason
    assert bool(backend.available(H200)) == HAS_TRITON


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("", "Triton is not installed"),
        ("3.5.1", "needs Triton 3.6 or newer, .*; Triton 3.5.1 is installed"),
        ("2.9.0 with V12.9.86", "Triton 2.9.0 with V12.9.86 is installed"),
        ("3.6.0", ""),
        ("3.6.0 with V12.9.86", ""),
        ("3.10.0+git0123abcd", ""),
        ("4.0.0", ""),
        ("nightly", ""),
    ],
)
def test_backend_needs_a_triton_with_which_its_kernels_ran(
    version: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "triton_version", lambda: version)
    available = TritonBackend().available(H200)
    assert bool(available) == (not reason)
    assert re.search(reason, available.reason)
    assert TritonBackend().versions(H200) == ({} if reason else {"triton": version})


def test_kernels_are_not_compiled_by_an_older_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEM_OF_DTYPE["bf16"]
    spec = compiler.make_spec(problem, first_candidate(problem, "tiled"))
    monkeypatch.setattr(compiler, "triton_version", lambda: "3.5.1")
    with pytest.raises(UnsupportedError, match=r"Triton 3\.5\.1 is installed"):
        compiler.compile_spec(spec, H200)


def test_estimated_time_grows_with_the_problem() -> None:
    tile = {"bm": 128, "bn": 128, "bk": 64, "split": 1, "stages": 4, "warps": 8, "swap": False, "tma": False}
    small = Work(1024, 4096, 4096, 2.0, 2.0, 132, 232448)
    assert seconds(replace(small, m=4096), **tile) > 2.0 * seconds(small, **tile)
    assert seconds(replace(small, k=16384), **tile) > 2.0 * seconds(small, **tile)


def test_stream_k_is_estimated_faster_where_the_last_wave_is_mostly_empty() -> None:
    tile = {"bm": 128, "bn": 256, "bk": 64, "split": 1, "stages": 4, "warps": 8, "swap": False, "tma": True}
    work = Work(1024, 256 * 17, 4096, 2.0, 2.0, 132, 232448)  # 136 tiles
    assert seconds(work, **tile, stream=True) < 0.8 * seconds(work, **tile)
    even = replace(work, n=256 * 16)
    assert seconds(even, **tile, stream=True) > seconds(even, **tile)


def test_smaller_tile_is_estimated_faster_only_where_it_needs_fewer_rounds() -> None:
    """128 x 256 tiles of 6336 x 4096 need seven rounds, and 64 x 256 ones twelve of half the size; of 6144 x 4096 six
    and twelve. Four warps suffice for the smaller tile."""
    large = {"bm": 128, "bn": 256, "bk": 64, "split": 1, "stages": 4, "warps": 8, "swap": False, "tma": True}
    small = {**large, "bm": 64, "stages": 5, "warps": 4}
    work = Work(6336, 4096, 4096, 2.0, 2.0, 132, 232448)
    assert seconds(work, **small) < seconds(work, **large)
    assert seconds(work, **small) < seconds(work, **{**small, "warps": 8})
    fewer = replace(work, m=6144)
    assert seconds(fewer, **large) < seconds(fewer, **small) < 1.15 * seconds(fewer, **large)


# --- compiling ------------------------------------------------------------------------------------------------------


def test_argument_names_match_the_kernels() -> None:
    """compiler.ARGUMENTS equals the parameters in kernels.py. Its source is read, since importing it needs Triton."""
    source = Path(compiler.__file__).with_name("kernels.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    for name, arguments in compiler.ARGUMENTS.items():
        assert tuple(argument.arg for argument in functions[name].args.args) == arguments
        constant = {argument.arg for argument in functions[name].args.args if argument.annotation is not None}
        assert ({"ITEMS"} if name == "convert" else {"BM", "BN", "BK"}) <= constant


def test_problems_that_differ_in_size_only_share_artifacts() -> None:
    problem, other = build(16, 4096, 4096, "bf16"), build(1, 12288, 4096, "bf16")
    candidate = first_candidate(problem, "tiled")
    assert compiler.make_spec(problem, candidate).key("9.0", "x") == compiler.make_spec(other, candidate).key(
        "9.0", "x"
    )
    odd = build(16, 4095, 4096, "bf16")
    assert compiler.make_spec(odd, candidate).key("9.0", "x") != compiler.make_spec(problem, candidate).key("9.0", "x")
    assert compiler.make_spec(problem, candidate).key("8.0", "x") != compiler.make_spec(problem, candidate).key(
        "9.0", "x"
    )
    biased = replace(problem, epilogue=(Step("bias", "col", "bfloat16"),))
    assert compiler.make_spec(biased, candidate).key("9.0", "x") != compiler.make_spec(problem, candidate).key(
        "9.0", "x"
    )


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "int8", "fp8", "int8wo"])
def test_stream_k_kernels_compile(dtype: str) -> None:
    problem = PROBLEM_OF_DTYPE[dtype].with_m(1152)
    candidate = first_candidate(problem, "persistent", stream=1)
    ((header, cubin),) = artifact.decode_kernels(compiler.compile_spec(compiler.make_spec(problem, candidate), H200))
    assert cubin[:4] == b"\x7fELF"
    assert {"ws_ptr", "lock_ptr"} <= set(header.arguments)
    assert header.shared <= 232448


def test_stream_k_is_illegal_for_full_waves() -> None:
    assert any(
        "132 tiles fill 100% of their rounds of 132" in reason
        for reason in illegal_reasons(build(1536, 1408, 4096, "bf16"))
    )
    assert any("fewer than 4 for each" in reason for reason in illegal_reasons(build(600, 4096, 128, "bf16")))
    shared = [
        candidate
        for candidate in legal_candidates(build(1152, 4096, 4096, "bf16"))
        if candidate.template == "persistent" and candidate["stream"]
    ]
    assert shared
    for candidate in shared:
        tiles = -(-1152 // candidate["bm"]) * -(-4096 // candidate["bn"])
        assert tiles <= 0.9 * 132 * -(-tiles // 132)
    converted = [
        candidate
        for candidate in legal_candidates(PROBLEM_OF_DTYPE["int8wo"].with_m(4096))
        if candidate.template == "converted"
    ]
    assert converted
    assert not any(candidate["stream"] for candidate in converted)


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "template"),
    [
        ("bf16", "tiled"),
        ("bf16", "persistent"),
        ("int8", "tiled"),
        ("fp8", "tiled"),
        ("int8wo", "tiled"),
        ("int4wo", "tiled"),
        ("int8wo", "converted"),
    ],
)
def test_cross_compiling_for_hopper(dtype: str, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PROBLEM_OF_DTYPE[dtype] if template == "tiled" else PROBLEM_OF_DTYPE[dtype].with_m(1024)
    candidate = (
        first_candidate(problem, template, split=2) if template == "tiled" else first_candidate(problem, template)
    )
    body = compiler.compile_spec(compiler.make_spec(problem, candidate), H200)
    *earlier, (header, cubin) = artifact.decode_kernels(body)
    assert [convert_header.name for convert_header, _ in earlier] == (["convert"] if template == "converted" else [])
    assert all(code[:4] == b"\x7fELF" for code in (cubin, *(code for _, code in earlier)))
    assert header.shared > 0
    assert header.warps == candidate["warps"]
    assert header.arguments[:2] == (("a_ptr", "b_ptr") if template == "tiled" else ("a_desc", "a_desc.shape0"))
    assert len(header.descriptors) == (0 if template == "tiled" else 2)


def _artifact() -> bytes:
    return artifact.encode_kernel(artifact.Header("k", 3, 0, 4, (), 0), b"elf")


def test_artifact_with_several_kernels_is_decoded() -> None:
    parts = artifact.decode_kernels(_artifact() * 2)
    assert [(header.name, cubin) for header, cubin in parts] == [("k", b"elf")] * 2


def test_negative_size_in_an_artifact_raises_kernel_error() -> None:
    body = _artifact().replace(b'"size":3', b'"size":-9')
    body = (len(body) - 4 - 3).to_bytes(4, "little") + body[4:]
    with pytest.raises(KernelError, match="malformed"):
        artifact.decode_kernels(body)


@pytest.mark.parametrize(
    "body", [b"", b"\x05\x00\x00\x00nonsense", _artifact()[:-1], _artifact() + b"\x00", _artifact() + _artifact()[:9]]
)
def test_malformed_artifact_raises_kernel_error(body: bytes) -> None:
    with pytest.raises(KernelError, match="malformed"):
        artifact.decode_kernels(body)


# --- the interpreter ------------------------------------------------------------------------------------------------

INTERPRETED = """
import sys
sys.path[:0] = {path!r}
from triton_interpreted import main
main()
"""


@needs_triton
def test_kernels_match_the_oracle_in_the_interpreter() -> None:
    """Verify each template on small problems. A subprocess is needed: the first import of Triton selects the
    interpreter."""
    backends_folder, tests_folder = str(Path(__file__).parent), str(Path(__file__).parents[1])
    source = str(Path(backends.__file__).parents[2])
    process = subprocess.run(
        [sys.executable, "-c", INTERPRETED.format(path=[backends_folder, tests_folder, source])],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]
    assert "problems right" in process.stdout


# --- int4 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "zero"), [(128, False), (64, True), (None, False)])
@pytest.mark.parametrize("order", ["col", "row"])
@pytest.mark.parametrize("block", INT4_BLOCKS)
def test_unshuffling_restores_int4_weights_bit_for_bit(group: int | None, zero: bool, order: str, block: int) -> None:
    n, k = 24, 256
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8).t()
    data = data if order == "col" else data.contiguous()
    groups = 1 if group is None else k // group
    scale = torch.rand(n) if group is None else torch.rand(groups, n)
    zeros = torch.randint(0, 16, scale.shape).float() if zero else None
    quant = Quant(group, "float32", zero)
    problem = weight_only_problem(4, n, k, bits=4, group=group, scale_dtype="float32", zero_point=zero)
    raw = QuantWeight(data, scale, zeros, k, quant, "int4")
    packed = shuffle_int4(raw, problem, block)
    assert packed.layout == int4_layout(block)
    unpacked = unshuffle_int4(packed)
    assert torch.equal(unpacked.data, data)
    assert unpacked.data.stride() == data.stride()
    assert torch.equal(unpacked.scale, scale)
    assert zeros is None or (unpacked.zero_point is not None and torch.equal(unpacked.zero_point, zeros))
    codes, half = torch.stack((data & 15, data >> 4), 1).reshape(k, n), block // 2
    assert torch.equal(packed.data[0][:, :half] & 15, codes[:half].t())
    assert torch.equal(packed.data[0][:, :half] >> 4, codes[half:block].t())


def test_epilogue_steps_are_constants_of_the_spec() -> None:
    steps = (Step("bias", "col", "bfloat16"), Step("silu"), Step("scale", "tensor", value=0.5), Step("clamp", lo=-1.0))
    problem = replace(build(16, 64, 64, "bf16"), epilogue=steps)
    spec = compiler.make_spec(problem, first_candidate(problem, "tiled"))
    assert spec.signature["t0"] == "*bf16"
    assert spec.constants["KIND0"] == "bias"
    assert spec.constants["KIND2"] == "number"
    assert spec.constants["VALUE2"] == 0.5
    assert (spec.constants["LO3"], spec.constants["HI3"]) == (-1.0, None)
    assert spec.constants["KIND4"] == ""


def test_spec_has_batch_strides_and_layouts() -> None:
    batched = bmm_problem(3, 64, 64, 64, "bfloat16")
    candidate = first_candidate(batched, "tiled")
    assert compiler.make_spec(batched, candidate).signature["batch_a"] == "i64"
    assert {candidate.template for candidate in legal_candidates(batched)} == {"tiled"}
    column_major = replace(build(64, 64, 64, "bf16"), a=Operand("bfloat16", Layout("col")))
    assert compiler.make_spec(column_major, first_candidate(column_major, "tiled")).constants["A_COL"] is True


@needs_triton
def test_preload_computes_the_hash_of_triton() -> None:
    """Each build hashed 400 MB for Triton's cache. A subprocess is needed, since Triton caches the hash for good."""
    script = """if True:
        import importlib, builtins
        from gemmtune.backends.triton import TritonBackend
        for module in TritonBackend.preload:
            importlib.import_module(module)
        opened = []
        def counting(path, *args, real=builtins.open, **kwargs):
            opened.append(str(path))
            return real(path, *args, **kwargs)
        builtins.open = counting
        from triton.runtime import cache
        from triton.compiler import compiler
        next(place for place in (cache, compiler) if hasattr(place, "triton_key")).triton_key()
        assert not opened, opened[:3]
        assert "gemmtune.backends.triton.kernels" in importlib.sys.modules
    """
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
