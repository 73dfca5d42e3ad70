from pathlib import Path

import pytest
import torch

from gemmtune.cli import doctor_report as doctor
from gemmtune.core import devices
from gemmtune.core.target import Target
from helpers.command import Run


def test_json_names_machine_backends_and_store(run: Run, legal: Path) -> None:
    result = run("doctor", "--json", "--store", legal)
    assert result.code == 0
    found = result.json
    assert found["target"]["device"] == "cpu"
    assert found["backends"][0]["name"] == "aten"
    assert found["backends"][0]["available"]
    assert found["store_decisions"] == 3
    assert found["store_damage"] == []


def test_page_has_a_line_for_everything(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    text = run("doctor", "--store", path).out
    for word in ("machine", "caches", "isa", "torch", "openmp", "backend", "tool", "store"):
        assert f"\n{word}" in f"\n{text}"
    assert not path.exists()


def test_openmp_runtimes_are_found_by_name(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    row = "7f0000000000-7f0000001000 r-xp 00000000 08:01 42    "
    names = ("/a/libgomp.so.1", "/b/libgomp-a34b3233.so.1.0.0", "/b/libiomp5.so", "/c/libc.so.6", "/d/libomp.so")
    maps.write_text("".join(f"{row}{name}\n" for name in (*names, names[0])) + "7f00-7f01 rw-p 0 0:0 0 \n")
    expected = ["/a/libgomp.so.1", "/b/libgomp-a34b3233.so.1.0.0", "/b/libiomp5.so", "/d/libomp.so"]
    assert doctor.openmp_runtimes(maps) == expected
    assert doctor.openmp_runtimes(tmp_path / "absent") == []


def examination(**changes: object) -> doctor.DoctorReport:
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


def test_advice_names_each_trouble_and_only_it() -> None:
    assert doctor.advice_for(examination()) == []
    troubles: dict[str, dict[str, object]] = {
        "native is not available: no AVX2": {"backends": [doctor.BackendState("native", False, "no AVX2")]},
        "2 OpenMP runtimes": {"openmp": ["/a", "/b"]},
        "no C++ compiler": {"tools": {"make": "/m", "c++": None, "g++": None, "clang++": None}},
        "make is not on PATH": {"tools": {"make": None, "c++": "/c", "g++": None, "clang++": None}},
        "OMP_NUM_THREADS=2": {"target": {"threads": 8}},
        "plotly is not installed": {"extras": {"plotly": False}},
        "store is damaged": {"store_damage": ["x"]},
    }
    for words, change in troubles.items():
        (advice,) = doctor.advice_for(examination(**change))
        assert words in advice


def test_gpus_are_shown_with_their_backends(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def fake(sources: object = None, index: int | None = None) -> Target:
        return Target(
            "cuda", f"H200 no. {index}", "9.0", caches=(232448, 0, 62914560), cores=132, memory=139 << 30,
            versions=(("driver", "580.1"), ("hip", "None")),
        )  # fmt: skip

    assert "\ngpu        none that torch can use" in run("doctor", "--store", filled).out
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(devices, "current_cuda", fake)
    lines = run("doctor", "--store", filled).out.splitlines()
    place = lines.index(
        "gpu        cuda:1: H200 no. 1, capability 9.0, 132 multiprocessors, 139 GB memory, driver 580.1"
    )
    assert lines[place + 1] == "  aten     available"
    found = run("doctor", "--store", filled, "--json").json
    assert [gpu["place"] for gpu in found["gpus"]] == ["cuda:0", "cuda:1"]
    names = [[state["name"] for state in part["backends"]] for part in (found, found["gpus"][0])]
    assert ("native" in names[0], "native" in names[1]) == (True, False)
    assert ("triton" in names[0], "triton" in names[1]) == (False, True)


def test_advice_names_the_gpu_a_backend_is_missing_on() -> None:
    gpu = doctor.Gpu("cuda:0", "H200", "9.0", "580", 1, 132, [doctor.BackendState("triton", False, "not installed")])
    assert doctor.advice_for(examination(gpus=[gpu])) == ["backend triton is not available on cuda:0: not installed"]
