"""AMD GPUs, without one: what is offered there, cross-compiling, and what HIP's library is asked to launch."""

from __future__ import annotations

import ctypes
import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemmtune import backends
from gemmtune.backends.gpu import artifact, hip
from gemmtune.backends.gpu.artifact import Header
from gemmtune.backends.triton import TritonBackend, compiler
from gemmtune.backends.triton.kernel import Tiled
from gemmtune.core import target, torch_compat
from gemmtune.core.candidate import Candidate
from gemmtune.core.errors import KernelError
from gemmtune.core.workloads import bmm_problem, build
from gemmtune.verify.inputs import make_inputs
from helpers import gpus
from helpers.gpus import FAMILIES, H200, MI300X

BACKEND = TritonBackend()
HAS_TRITON = importlib.util.find_spec("triton") is not None
STREAM = 9


def test_nvidias_backends_say_that_they_are_not_for_it() -> None:
    for name in ("cuda", "cublaslt"):
        assert "on ROCm there is the Triton backend" in backends.get(name).available(MI300X).reason
    assert bool(BACKEND.available(MI300X)) == HAS_TRITON
    old = replace(MI300X, capability="gfx906")
    assert "kernels are for gfx90a, gfx942" in BACKEND.available(old).reason


@pytest.mark.parametrize("family", ["bf16", "int8", "int8wo", "int4wo"])
@pytest.mark.parametrize("m", [1, 16, 300, 4096])
def test_tiles_that_fit_and_share_nothing(family: str, m: int) -> None:
    found = gpus.legal(BACKEND, FAMILIES[family].with_m(m), MI300X)
    assert len(found) >= 3
    for candidate in found:
        assert (candidate.template, candidate["split"], candidate["swap"]) == ("tiled", 1, 0)
        assert candidate["bm"] * candidate["bn"] <= 256 * 64 * candidate["warps"]  # type: ignore[operator]
    why = " | ".join(gpus.reasons(BACKEND, FAMILIES[family].with_m(m), MI300X))
    assert "KB of shared memory; a program has 64" in why
    assert "TMA needs compute capability 9.0" in why or "KB of shared" in why


def test_what_was_not_tried_is_refused_in_words() -> None:
    assert gpus.legal(BACKEND, FAMILIES["fp8"], MI300X) == []
    assert any("no fp8 on ROCm" in reason for reason in gpus.reasons(BACKEND, FAMILIES["fp8"], MI300X))
    why = " | ".join(gpus.reasons(BACKEND, build(64, 4096, 4096, "bf16"), MI300X))
    assert "which was not tried on ROCm" in why
    assert "nothing to fill by swapping" in why


def test_atens_ways_are_offered() -> None:
    for family in ("bf16", "int8", "int8wo"):
        assert gpus.legal(backends.get("aten"), FAMILIES[family], MI300X)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("family", ["bf16", "int8", "int8wo", "int4wo"])
@pytest.mark.parametrize(("arch", "lanes"), [("gfx942", 64), ("gfx90a", 64), ("gfx1100", 32)])
def test_cross_compiling(family: str, arch: str, lanes: int) -> None:
    there = replace(MI300X, capability=arch)
    problem = FAMILIES[family]
    candidate = gpus.legal(BACKEND, problem, there)[0]
    wanted = compiler.make_spec(problem, candidate)
    ((header, code),) = artifact.decode_kernels(compiler.compile_spec(wanted, there))
    assert code[:4] == b"\x7fELF"
    assert (header.arch, header.lanes, header.warps) == (arch, lanes, candidate["warps"])
    assert 0 < header.shared <= 65536
    assert header.scratch == 2  # what Triton passes behind a kernel's own
    assert header.arguments[:3] == ("a_ptr", "b_ptr", "c_ptr")
    assert wanted.key(arch, "x") != wanted.key(H200.capability, "x")


@pytest.mark.parametrize(
    ("size", "kinds", "expected"),
    [
        (64, ["*bf16"] * 3 + ["i32"] * 6, 2),
        (40, ["*bf16", "i32", "i64"], 2),
        (24, ["*bf16"] * 4, -1),
        (20, ["i32"], -1),
    ],
)
def test_pointers_behind_the_arguments(size: int, kinds: list[str], expected: int) -> None:
    assert compiler._amd_scratch(f"    .kernarg_segment_size: {size}\n", kinds) == expected
    assert compiler._amd_scratch("", kinds) == -1


class Hip:
    """HIP's library, which launches nothing and says what it was asked to."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], int, list[int]]] = []
        self.status, self.count = 0, 0

    def hipModuleLoadData(self, module: Any, code: bytes) -> int:
        return 0

    def hipModuleGetFunction(self, handle: Any, module: Any, name: bytes) -> int:
        assert name == b"tiled"
        handle._obj.value = 5
        return self.status

    def hipGetErrorString(self, status: int) -> bytes:
        return b"no such thing"

    def hipModuleLaunchKernel(self, handle: Any, *rest: Any) -> int:
        assert handle.value == 5
        *sizes, stream, start, extra = rest
        assert extra is None
        places = (ctypes.c_void_p * self.count).from_address(start.value)
        values = [ctypes.c_uint64.from_address(place).value for place in places]
        self.launches.append((tuple(sizes), stream.value, values))
        return self.status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Hip:
    made = Hip()
    monkeypatch.setattr(hip, "library", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch_compat, "stream_of", lambda _: STREAM)
    return made


def loaded(fake: Hip, batches: int = 1) -> Tiled:
    problem = bmm_problem(batches, 40, 200, 256, "bfloat16") if batches > 1 else build(40, 200, 256, "bf16")
    config = {"bm": 16, "bn": 64, "bk": 64, "split": 1, "swap": 0, "group": 8, "stages": 2, "warps": 4}
    candidate = Candidate.make("triton", "tiled", **config)
    passed = tuple(
        name for name, kind in compiler.make_spec(problem, candidate).signature.items() if kind != "constexpr"
    )
    fake.count = len(passed) + 2
    return Tiled(problem, candidate, [(Header("tiled", 0, 8192, 4, passed, 2, lanes=64, arch="gfx942"), b"")])


def test_launching(fake: Hip) -> None:
    made = loaded(fake)
    inputs, out = make_inputs(made.problem, 0), torch.empty(40, 200, dtype=torch.bfloat16)
    made.run(inputs.a, inputs.b, (), out)
    ((sizes, stream, values),) = fake.launches
    assert sizes == (3 * 4, 1, 1, 256, 1, 1, 8192)
    assert stream == STREAM
    assert dict(zip(made.header.arguments, values, strict=False)) == {
        "a_ptr": inputs.a.data_ptr(), "b_ptr": inputs.b.data_ptr(), "c_ptr": out.data_ptr(), "M": 40, "N": 200,
        "K": 256, "lda": 256, "ldb": 256, "ldc": 200,
    }  # fmt: skip
    assert values[-2:] == [0, 0]


def test_batches(fake: Hip) -> None:
    made = loaded(fake, 3)
    inputs = make_inputs(made.problem, 0)
    made.run(inputs.a, inputs.b, (), torch.empty(3, 40, 200, dtype=torch.bfloat16))
    assert fake.launches[0][0][:3] == (3 * 4, 3, 1)


def test_what_hip_refuses_is_an_error(fake: Hip) -> None:
    made = loaded(fake)
    fake.status = 98
    inputs = make_inputs(made.problem, 0)
    with pytest.raises(KernelError, match=r"launching tiled: HIP error 98 \(no such thing\)"):
        made.run(inputs.a, inputs.b, (), torch.empty(40, 200, dtype=torch.bfloat16))
    with pytest.raises(KernelError, match="finding tiled: HIP error 98"):
        loaded(fake)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    hip.library.cache_clear()
    monkeypatch.setattr(hip, "_library_names", lambda: iter(["/nowhere/libamdhip64.so"]))
    with pytest.raises(KernelError, match="is this PyTorch for ROCm"):
        hip.library()


def test_a_target_is_its_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(
        name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304,
        shared_memory_per_block=65536, L2_cache_size=4 << 20, total_memory=192 << 30,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    target._gpu.cache_clear()
    target._gpu_versions.cache_clear()
    try:
        made = target.current_cuda({}, 0)
    finally:
        target._gpu.cache_clear()
        target._gpu_versions.cache_clear()
    assert (made.capability, made.cores, made.caches) == ("gfx942", 304, (65536, 0, 4 << 20))
    assert dict(made.versions)["hip"] == "6.4.1"
