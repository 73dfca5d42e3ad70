from pathlib import Path

from command import Run
from gemmtune import doctor


def test_json_names_machine_backends_and_store(run: Run, filled: Path) -> None:
    result = run("doctor", "--json", "--store", filled)
    assert result.code == 0
    found = result.json
    assert found["target"]["device"] == "cpu"
    assert found["backends"][0]["name"] == "aten"
    assert found["backends"][0]["available"]
    assert found["store_decisions"] == 4
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


def examination(**changes: object) -> doctor.Examination:
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
    return doctor.Examination(**{**fields, **changes})  # type: ignore[arg-type]


def test_advice_names_each_trouble_and_only_it() -> None:
    assert doctor.advise(examination()) == []
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
        (advice,) = doctor.advise(examination(**change))
        assert words in advice
