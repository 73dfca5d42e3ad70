"""Tests that a decision made with one version of a compiler or library does not serve with another version."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from gemmtune import backends
from gemmtune.backends import cublaslt, cuda, triton
from gemmtune.backends.cublaslt import library
from gemmtune.backends.cuda import compiler
from gemmtune.backends.gpu.wheels import build_of, file_of
from gemmtune.backends.triton import compiler as triton_compiler
from gemmtune.core import devices
from gemmtune.core.errors import UnsupportedError
from gemmtune.core.target import current_cpu
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.dispatch.runtime import RUNTIME
from gemmtune.store import MemoryStore
from helpers.gpus import H200, MI300X
from helpers.serving import decide, evidence, register, toy

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make dispatch see an H200 with every compiler and library."""
    register()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(
        devices, "current_cuda", lambda sources=None, index=None: replace(H200, sources=tuple(sorted(sources.items())))
    )
    monkeypatch.setattr(cuda, "version", lambda: "libnvrtc.so.13 (b2)")
    monkeypatch.setattr(triton, "triton_version", lambda: "3.6.0")
    monkeypatch.setattr(cublaslt, "_why_missing", lambda: "")
    monkeypatch.setattr(library, "version", lambda: "130100 libcublasLt.so.13 (a1)")


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a patch of NVRTC": lambda patch: patch.setattr(cuda, "version", lambda: "libnvrtc.so.13 (b3)"),
    "no NVRTC": lambda patch: patch.setattr(cuda, "version", lambda: ""),
    "another Triton": lambda patch: patch.setattr(triton, "triton_version", lambda: "3.6.1"),
    "no Triton": lambda patch: patch.setattr(triton, "triton_version", lambda: ""),
    "another cuBLASLt": lambda patch: patch.setattr(library, "version", lambda: "130101 libcublasLt.so.13 (a2)"),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("change", CHANGES)
def test_a_decision_made_with_another_compiler_or_library_does_not_serve(
    own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    problem = build(4, 16, 16, "bf16")
    target = current_target("cuda")
    assert {"nvrtc", "triton", "cublaslt"} <= set(dict(target.versions))
    decision = decide(problem, evidence(toy(), 0.1), chosen=toy())
    own_store.put(target, msgspec.structs.replace(decision, target_key=target.key))
    RUNTIME.refresh(own_store)
    assert RUNTIME.kernel_for(problem, None, GPU) is not None
    CHANGES[change](monkeypatch)
    RUNTIME.refresh(own_store)
    assert current_target("cuda").key != target.key
    assert RUNTIME.kernel_for(problem, None, GPU) is None


def test_a_cpu_target_has_no_backend_versions() -> None:
    """Stores that were tuned before backends had versions still serve."""
    assert backends.versions(current_cpu()) == {}
    assert current_target().key == current_cpu(backends.sources(backends.names("cpu"))).key


def test_an_amd_gpu_target_has_no_versions_of_nvidia_libraries() -> None:
    assert set(backends.versions(MI300X)) <= {"triton"}


def test_different_files_of_a_library_have_different_builds(tmp_path: Path) -> None:
    file = tmp_path / "lib.so"
    file.write_bytes(b"no ELF file")
    first = build_of(file)
    file.write_bytes(b"a longer one, without a build id")
    assert build_of(file) != first
    assert build_of(tmp_path / "none.so") == build_of(None) == "unknown"


def test_the_nvrtc_version_is_the_build_of_the_loaded_file() -> None:
    if not compiler.version():
        pytest.skip("NVRTC is not installed")
    assert compiler.version() == build_of(file_of(compiler.nvrtc().nvrtcVersion))
    assert "unknown" not in compiler.version()


def test_the_version_of_triton_has_the_ptxas_of_triton_ptxas_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\necho Cuda compilation tools\necho V12.9.86\n")
    tool.chmod(0o755)
    monkeypatch.setattr(triton_compiler, "_package_version", lambda: "3.6.0")
    versions = []
    for path in ("", str(tool), str(tmp_path / "nowhere")):
        monkeypatch.setenv("TRITON_PTXAS_PATH", path)
        triton_compiler.triton_version.cache_clear()
        versions.append(triton_compiler.triton_version())
    triton_compiler.triton_version.cache_clear()
    assert versions == ["3.6.0", "3.6.0 with V12.9.86", "3.6.0 with FileNotFoundError"]


def test_versions_of_a_target_import_no_compiler() -> None:
    script = (
        "import sys; from gemmtune import backends; from gemmtune.core.target import Target\n"
        "loaded = lambda: any('libnvrtc' in line for line in open('/proc/self/maps'))\n"
        "before = 'triton' in sys.modules, loaded()\n"  # CUDA builds of torch load NVRTC themselves
        "backends.versions(Target('cuda', 'NVIDIA H200', '9.0', versions=(('hip', 'None'),)))\n"
        "assert before == ('triton' in sys.modules, loaded())\n"
    )
    source = str(Path(backends.__file__).parents[2])
    process = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = [{source!r}]\n{script}"], check=False)
    assert process.returncode == 0


def test_a_backend_without_its_library_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise UnsupportedError(library.MISSING)

    monkeypatch.setattr(library, "library", missing)
    assert backends.get("cublaslt").versions(H200) == {}
