"""AMD GPUs without a GPU: legality, cross-compiling, and launches through a fake HIP library."""

from __future__ import annotations

import ctypes
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
from helpers.gpus import H200, HAS_TRITON, MI300X, PROBLEM_OF_DTYPE, needs_triton

BACKEND = TritonBackend()
STREAM = 9


def test_nvidia_backends_are_unavailable_on_rocm() -> None:
    for name in ("cuda", "cublaslt"):
        assert "on ROCm there is the Triton backend" in backends.get(name).available(MI300X).reason
    assert bool(BACKEND.available(MI300X)) == HAS_TRITON
    old = replace(MI300X, capability="gfx906")
    assert "kernels are for gfx90a, gfx942" in BACKEND.available(old).reason


@pytest.mark.parametrize("dtype", ["bf16", "int8", "int8wo", "int4wo"])
@pytest.mark.parametrize("m", [1, 16, 300, 4096])
def test_triton_tiles_fit_into_lds_without_split_k(dtype: str, m: int) -> None:
    candidates = gpus.legal_candidates(BACKEND, PROBLEM_OF_DTYPE[dtype].with_m(m), MI300X)
    assert len(candidates) >= 3
    for candidate in candidates:
        assert (candidate.template, candidate["split"], candidate["swap"]) == ("tiled", 1, 0)
        assert candidate["bm"] * candidate["bn"] <= 256 * 64 * candidate["warps"]  # type: ignore[operator]
    reasons = " | ".join(gpus.illegal_reasons(BACKEND, PROBLEM_OF_DTYPE[dtype].with_m(m), MI300X))
    assert "KB of shared memory; a program has 64" in reasons
    assert "TMA needs compute capability 9.0" in reasons or "KB of shared" in reasons


def test_untested_templates_and_dtypes_have_a_reason() -> None:
    assert gpus.legal_candidates(BACKEND, PROBLEM_OF_DTYPE["fp8"], MI300X) == []
    assert any("no fp8 on ROCm" in reason for reason in gpus.illegal_reasons(BACKEND, PROBLEM_OF_DTYPE["fp8"], MI300X))
    reasons = " | ".join(gpus.illegal_reasons(BACKEND, build(64, 4096, 4096, "bf16"), MI300X))
    assert "which was not tried on ROCm" in reasons
    assert "nothing to fill by swapping" in reasons


def test_aten_candidates_are_legal_on_rocm() -> None:
    for dtype in ("bf16", "int8", "int8wo"):
        assert gpus.legal_candidates(backends.get("aten"), PROBLEM_OF_DTYPE[dtype], MI300X)


@needs_triton
@pytest.mark.parametrize("dtype", ["bf16", "int8", "int8wo", "int4wo"])
@pytest.mark.parametrize(("arch", "lanes"), [("gfx942", 64), ("gfx90a", 64), ("gfx1100", 32)])
def test_cross_compiling_for_amd_gpus(dtype: str, arch: str, lanes: int) -> None:
    target_ = replace(MI300X, capability=arch)
    problem = PROBLEM_OF_DTYPE[dtype]
    candidate = gpus.legal_candidates(BACKEND, problem, target_)[0]
    spec = compiler.make_spec(problem, candidate)
    ((header, code),) = artifact.decode_kernels(compiler.compile_spec(spec, target_))
    assert code[:4] == b"\x7fELF"
    assert (header.arch, header.lanes, header.warps) == (arch, lanes, candidate["warps"])
    assert 0 < header.shared <= 65536
    assert header.scratch == 2  # Triton passes two pointers after the kernel's arguments
    assert header.arguments[:3] == ("a_ptr", "b_ptr", "c_ptr")
    assert spec.key(arch, "x") != spec.key(H200.capability, "x")


@pytest.mark.parametrize(
    ("size", "kinds", "expected"),
    [
        (64, ["*bf16"] * 3 + ["i32"] * 6, 2),
        (40, ["*bf16", "i32", "i64"], 2),
        (24, ["*bf16"] * 4, -1),
        (20, ["i32"], -1),
    ],
)
def test_scratch_pointers_are_counted_from_the_argument_size(size: int, kinds: list[str], expected: int) -> None:
    assert compiler._amd_scratch(f"    .kernarg_segment_size: {size}\n", kinds) == expected
    assert compiler._amd_scratch("", kinds) == -1


class FakeHip:
    """Fake HIP library that records launches.

    launches: the sizes, the stream and the values of the arguments of each launch. status: the code that calls return.
    count: the number of arguments of a launch.
    """

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
        addresses = (ctypes.c_void_p * self.count).from_address(start.value)
        values = [ctypes.c_uint64.from_address(address).value for address in addresses]
        self.launches.append((tuple(sizes), stream.value, values))
        return self.status


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeHip:
    library = FakeHip()
    monkeypatch.setattr(hip, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(query=lambda: True))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=304))
    monkeypatch.setattr(torch_compat, "stream_of", lambda _: STREAM)
    return library


def load_kernel(fake: FakeHip, batches: int = 1) -> Tiled:
    problem = bmm_problem(batches, 40, 200, 256, "bfloat16") if batches > 1 else build(40, 200, 256, "bf16")
    config = {"bm": 16, "bn": 64, "bk": 64, "split": 1, "swap": 0, "group": 8, "stages": 2, "warps": 4}
    candidate = Candidate.make("triton", "tiled", **config)
    arguments = tuple(
        name for name, kind in compiler.make_spec(problem, candidate).signature.items() if kind != "constexpr"
    )
    fake.count = len(arguments) + 2
    return Tiled(problem, candidate, [(Header("tiled", 0, 8192, 4, arguments, 2, lanes=64, arch="gfx942"), b"")])


def test_launch_passes_grid_stream_and_arguments(fake: FakeHip) -> None:
    kernel = load_kernel(fake)
    inputs, out = make_inputs(kernel.problem, 0), torch.empty(40, 200, dtype=torch.bfloat16)
    kernel.run(inputs.a, inputs.b, (), out)
    ((sizes, stream, values),) = fake.launches
    assert sizes == (3 * 4, 1, 1, 256, 1, 1, 8192)
    assert stream == STREAM
    assert dict(zip(kernel.header.arguments, values, strict=False)) == {
        "a_ptr": inputs.a.data_ptr(), "b_ptr": inputs.b.data_ptr(), "c_ptr": out.data_ptr(), "M": 40, "N": 200,
        "K": 256, "lda": 256, "ldb": 256, "ldc": 200,
    }  # fmt: skip
    assert values[-2:] == [0, 0]


def test_launch_has_a_grid_dimension_for_the_batch(fake: FakeHip) -> None:
    kernel = load_kernel(fake, 3)
    inputs = make_inputs(kernel.problem, 0)
    kernel.run(inputs.a, inputs.b, (), torch.empty(3, 40, 200, dtype=torch.bfloat16))
    assert fake.launches[0][0][:3] == (3 * 4, 3, 1)


def test_hip_errors_raise_kernel_error(fake: FakeHip) -> None:
    kernel = load_kernel(fake)
    fake.status = 98
    inputs = make_inputs(kernel.problem, 0)
    with pytest.raises(KernelError, match=r"launching tiled: HIP error 98 \(no such thing\)"):
        kernel.run(inputs.a, inputs.b, (), torch.empty(40, 200, dtype=torch.bfloat16))
    with pytest.raises(KernelError, match="finding tiled: HIP error 98"):
        load_kernel(fake)


def test_missing_library_raises_kernel_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hip.library.cache_clear()
    monkeypatch.setattr(hip, "_library_names", lambda: iter(["/nowhere/libamdhip64.so"]))
    with pytest.raises(KernelError, match="is this PyTorch for ROCm"):
        hip.library()


def test_target_has_the_architecture_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304,
        shared_memory_per_block=65536, L2_cache_size=4 << 20, total_memory=192 << 30,
    )  # fmt: skip
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    target._gpu.cache_clear()
    target._gpu_versions.cache_clear()
    try:
        gpu = target.current_cuda({}, 0)
    finally:
        target._gpu.cache_clear()
        target._gpu_versions.cache_clear()
    assert (gpu.capability, gpu.cores, gpu.caches) == ("gfx942", 304, (65536, 0, 4 << 20))
    assert dict(gpu.versions)["hip"] == "6.4.1"
