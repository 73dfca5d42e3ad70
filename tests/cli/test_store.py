import os
import re
import sqlite3
import stat
from pathlib import Path

import pytest
import torch

from gemmtune.core import devices
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.store import open_store
from helpers.command import Run
from helpers.factories import make_decision


def ids(run: Run, filled: Path) -> dict[str, str]:
    rows = run("store", "ls", "--json", "--store", filled).json["decisions"]
    return {row["label"]: row["id"] for row in rows}


def test_ls_lists_every_machine(run: Run, filled: Path) -> None:
    result = run("store", "ls", "--store", filled)
    assert result.code == 0
    assert "Another CPU, 64 threads" in result.out
    assert "16x4096x4096 bf16" in result.out
    assert "2.00x [1.96-2.04]" in result.out


def test_ls_of_a_store_that_does_not_exist_is_empty_and_makes_none(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    assert run("store", "ls", "--store", path).out == "the store is empty\n"
    assert not path.exists()


def test_show_takes_a_prefix_of_the_id(run: Run, filled: Path) -> None:
    which = ids(run, filled)["16x4096x4096 bf16"]
    result = run("store", "show", which[:6], "--store", filled)
    assert result.code == 0
    assert "winner native/gemm[isa=avx512,mr=6,nr=64]" in result.out
    assert run("store", "show", which, "--json", "--store", filled).json["outcome"] == "winner"


def test_show_refuses_what_fits_none_or_many(run: Run, filled: Path) -> None:
    unknown = run("store", "show", "zzz", "--store", filled)
    assert unknown.code == 1
    assert "no decision is called 'zzz'" in unknown.err
    many = run("store", "show", "", "--store", filled)
    assert many.code == 1
    assert "fits 4 decisions" in many.err


def test_export_and_import_round_trip(run: Run, legal: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "out.json", tmp_path / "copy.db"
    assert run("store", "export", file, "--json", "--store", legal).json["decisions"] == 3
    assert run("store", "import", file, "--json", "--store", copy).json == {"decisions": 3, "left_out": []}
    assert ids(run, copy) == ids(run, legal)


def test_import_leaves_out_what_is_not_legal_and_says_why(run: Run, filled: Path, tmp_path: Path) -> None:
    """Of the four, three are for this machine, two of which would serve kernels that no backend lists."""
    file, copy = tmp_path / "out.json", tmp_path / "copy.db"
    run("store", "export", file, "--store", filled)
    text = run("store", "import", file, "--store", copy).out
    assert text.startswith("2 decisions imported from ")
    assert "2 left out, which would serve what is not legal:\n" in text
    assert "aten/linear is not legal" in text


def test_verify_names_kernels_that_are_not_legal_and_those_it_cannot_check(run: Run, filled: Path) -> None:
    result = run("store", "verify", "--json", "--store", filled)
    assert result.code == 1
    assert len(result.json["damage"]) == 3
    assert all("is not legal" in line for line in result.json["damage"])
    assert result.json["unchecked"]
    assert all("another version of its backend" in line for line in result.json["unchecked"])


def test_import_of_something_else_fails_in_one_line(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "no.json"
    file.write_text("[]")
    result = run("store", "import", file, "--store", tmp_path / "s.db")
    assert result.code == 1
    assert re.fullmatch(r"error: .+\n", result.err)


def test_prune_others_keeps_this_machine(run: Run, filled: Path) -> None:
    assert run("store", "prune", "--store", filled).code == 2
    assert run("store", "prune", "--others", "--json", "--store", filled).json == {"deleted": 1}
    assert "4x512x512 fp32" not in ids(run, filled)
    assert len(ids(run, filled)) == 3


def test_verify_reports_damage(run: Run, legal: Path) -> None:
    assert run("store", "verify", "--store", legal).out == "sound: 3 decisions\n"
    with sqlite3.connect(legal) as database:
        database.execute("UPDATE decisions SET body = x'00' WHERE rowid = (SELECT min(rowid) FROM decisions)")
    database.close()
    result = run("store", "verify", "--json", "--store", legal)
    assert result.code == 1
    assert len(result.json["damage"]) == 1
    assert result.json["decisions"] == 2


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_file_that_cannot_be_used_is_an_error_not_a_traceback(run: Run, filled: Path, command: str) -> None:
    result = run("store", command, "/nonexistent/dir/file.json", "--store", filled)
    assert result.code == 1
    assert result.err.startswith("error: ")


@pytest.mark.parametrize("command", [("store", "ls"), ("store", "verify"), ("report",), ("explain", 1, 8, 8)])
def test_a_file_that_is_no_store_is_a_failure(run: Run, tmp_path: Path, command: tuple[object, ...]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    for place in (path, tmp_path):
        result = run(*command, "--store", place)
        assert result.code == 1
        assert result.err.startswith(f"error: cannot read the store {place}: ")
        assert result.err.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize(
    "args",
    [("store", "ls", "--store"), ("store", "import"), ("store", "export"), ("report", "-o"), ("doctor", "--store")],
)
def test_a_pipe_is_not_waited_for(run: Run, tmp_path: Path, args: tuple[str, ...]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(*args, pipe)
    if args[0] != "doctor":
        assert result.code == 1
        assert "not a regular file" in result.err
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_no_home_no_store(run: Run) -> None:
    result = run("store", "ls", "--store", "~nobody-by-this-name/s.db")
    assert result.code == 1
    assert "cannot find the store" in result.err


@pytest.mark.parametrize("days", ["nan", "inf", "-1"])
def test_odd_ages_are_wrong_usage(run: Run, filled: Path, days: str) -> None:
    assert run("store", "prune", "--older-than", days, "--store", filled).code == 2
    assert run("store", "prune", "--others", "--threads", 10**12, "--store", filled).code == 2


def test_text_that_utf8_cannot_hold_is_escaped(run: Run, tmp_path: Path, filled: Path) -> None:
    path = tmp_path / "bad\udcff.json"
    result = run("store", "export", path, "--store", filled)
    assert result.code == 0
    assert "bad\\udcff.json" in result.out


def test_pruning_keeps_this_machines_gpus(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gemmtune.dispatch import runtime

    made = Target("cuda", "H200", "9.0", caches=(232448, 0, 62914560), cores=132)
    monkeypatch.setattr(devices, "current_cuda", lambda sources=None, index=None: made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu = runtime.current_target("cuda")
    store = open_store(filled)
    store.put(gpu, make_decision(build(2, 64, 64, "bf16"), "winner", gpu))
    store.close()
    assert run("store", "prune", "--others", "--store", filled, "--json").json == {"deleted": 1}
    assert run("explain", 2, 64, 64, "--device", "cuda", "--store", filled).code == 0
    missing = run("explain", 2, 64, 65, "--device", "cuda", "--store", filled)
    assert "on the H200; make one with: gemmtune tune 2,64,65 --dtype bf16 --device cuda" in missing.err
    assert "H200\n" in run("store", "ls", "--store", filled).out.replace("  (", "\n")
    assert run("store", "prune", "--others", "--device", "cuda", "--store", filled, "--json").json == {"deleted": 3}
