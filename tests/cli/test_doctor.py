from pathlib import Path

import pytest
import torch

from gemmtune.cli import doctor_report as doctor
from gemmtune.core import devices
from gemmtune.core.target import Target
from helpers.command import CommandRunner


def test_json_has_the_target_backends_and_store(run: CommandRunner, legal_store_path: Path) -> None:
    result = run("doctor", "--json", "--store", legal_store_path)
    assert result.code == 0
    report = result.json
    assert report["target"]["device"] == "cpu"
    assert report["backends"][0]["name"] == "aten"
    assert report["backends"][0]["available"]
    assert report["store_decisions"] == 3
    assert report["store_damage"] == []


def test_text_has_a_line_for_each_part(run: CommandRunner, tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    text = run("doctor", "--store", path).out
    for label in ("machine", "caches", "isa", "torch", "openmp", "backend", "tool", "store"):
        assert f"\n{label}" in f"\n{text}"
    assert not path.exists()


def test_openmp_runtimes_are_recognised_by_file_name(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    row = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42    "
    names = ("/a/libgomp.so.1", "/b/libgomp-a34b3233.so.1.0.0", "/b/libiomp5.so", "/c/libc.so.6", "/d/libomp.so")
    maps.write_text("".join(f"{row}{name}\n" for name in (*names, names[0])) + "7f00-7f01 rw-p 0 0:0 0 \n")
    expected = ["/a/libgomp.so.1", "/b/libgomp-a34b3233.so.1.0.0", "/b/libiomp5.so", "/d/libomp.so"]
    assert doctor.openmp_runtimes(maps) == expected
    assert doctor.openmp_runtimes(tmp_path / "absent") == []


def make_report(**changes: object) -> doctor.DoctorReport:
    fields: dict[str, object] = {
        "python": "3",
        "torch": "2",
        "system": "Linux",
        "target": {"threads": 2},
        "cores": 2,
        "openmp": ["/a/libgomp.so.1"],
        "backends": [doctor.BackendState("aten", True)],
        "tools": {"make": "/m", "c++": "/c", "g++": None, "clang++": None},
        "extras": {"plotly": True},
        "store_path": "s",
        "store_decisions": 0,
        "store_damage": [],
    }
    return doctor.DoctorReport(**{**fields, **changes})  # type: ignore[arg-type]


def test_advice_has_one_line_per_problem() -> None:
    assert doctor.advice_for(make_report()) == []
    changes_by_advice: dict[str, dict[str, object]] = {
        "native is not available: no AVX2": {"backends": [doctor.BackendState("native", False, "no AVX2")]},
        "2 OpenMP runtimes": {"openmp": ["/a", "/b"]},
        "no C++ compiler": {"tools": {"make": "/m", "c++": None, "g++": None, "clang++": None}},
        "make is not on PATH": {"tools": {"make": None, "c++": "/c", "g++": None, "clang++": None}},
        "OMP_NUM_THREADS=2": {"target": {"threads": 8}},
        "plotly is not installed": {"extras": {"plotly": False}},
        "store is damaged": {"store_damage": ["x"]},
    }
    for expected, change in changes_by_advice.items():
        (advice,) = doctor.advice_for(make_report(**change))
        assert expected in advice


def test_gpus_are_listed_with_their_backends(
    run: CommandRunner, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def current_gpu(sources: object = None, index: int | None = None) -> Target:
        return Target(
            "cuda", f"H200 no. {index}", "9.0", caches=(232448, 0, 62914560), cores=132, memory=139 << 30,
            versions=(("driver", "580.1"), ("hip", "None")),
        )  # fmt: skip

    assert "\ngpu        none that torch can use" in run("doctor", "--store", store_path).out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "current_cuda", current_gpu)
    lines = run("doctor", "--store", store_path).out.splitlines()
    index_of_gpu = lines.index(
        "gpu        cuda:1: H200 no. 1, capability 9.0, 132 multiprocessors, 139 GB memory, driver 580.1"
    )
    assert lines[index_of_gpu + 1] == "  aten     available"
    report = run("doctor", "--store", store_path, "--json").json
    assert [gpu["device"] for gpu in report["gpus"]] == ["cuda:0", "cuda:1"]
    names = [[state["name"] for state in device_report["backends"]] for device_report in (report, report["gpus"][0])]
    assert ("native" in names[0], "native" in names[1]) == (True, False)
    assert ("triton" in names[0], "triton" in names[1]) == (False, True)


def test_advice_names_the_gpu_without_a_backend() -> None:
    gpu = doctor.Gpu("cuda:0", "H200", "9.0", "580", 1, 132, [doctor.BackendState("triton", False, "not installed")])
    assert doctor.advice_for(make_report(gpus=[gpu])) == ["backend triton is not available on cuda:0: not installed"]
