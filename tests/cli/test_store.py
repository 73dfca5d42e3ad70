import os
import re
import sqlite3
import stat
from pathlib import Path

import pytest
import torch

from gemmtune.core import devices
from gemmtune.core.candidate import Candidate
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.store import open_store
from helpers.command import CommandRunner
from helpers.factories import make_decision, make_legal_plan, make_plan, make_target


def ids_by_label(run: CommandRunner, store_path: Path) -> dict[str, str]:
    rows = run("store", "ls", "--json", "--store", store_path).json["decisions"]
    return {row["label"]: row["id"] for row in rows}


def test_ls_lists_all_machines(run: CommandRunner, store_path: Path) -> None:
    result = run("store", "ls", "--store", store_path)
    assert result.code == 0
    assert "Another CPU, 64 threads" in result.out
    assert "16x4096x4096 bf16" in result.out
    assert "2.00x [1.96-2.04]" in result.out


def test_ls_of_a_missing_store_is_empty_and_creates_no_file(run: CommandRunner, tmp_path: Path) -> None:
    path = tmp_path / "none.db"
    assert run("store", "ls", "--store", path).out == "the store is empty\n"
    assert not path.exists()


def test_show_accepts_a_prefix_of_the_id(run: CommandRunner, store_path: Path) -> None:
    decision_id = ids_by_label(run, store_path)["16x4096x4096 bf16"]
    result = run("store", "show", decision_id[:6], "--store", store_path)
    assert result.code == 0
    assert "winner native/gemm[isa=avx512,mr=6,nr=64]" in result.out
    assert run("store", "show", decision_id, "--json", "--store", store_path).json["outcome"] == "winner"


def test_show_fails_for_an_unknown_or_ambiguous_id(run: CommandRunner, store_path: Path) -> None:
    unknown = run("store", "show", "zzz", "--store", store_path)
    assert unknown.code == 1
    assert "no decision is called 'zzz'" in unknown.err
    ambiguous = run("store", "show", "", "--store", store_path)
    assert ambiguous.code == 1
    assert "fits 4 decisions" in ambiguous.err


def test_export_and_import_round_trip(run: CommandRunner, legal_store_path: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "out.json", tmp_path / "copy.db"
    assert run("store", "export", file, "--json", "--store", legal_store_path).json["decisions"] == 3
    assert run("store", "import", file, "--json", "--store", copy).json == {"decisions": 3, "left_out": []}
    assert ids_by_label(run, copy) == ids_by_label(run, legal_store_path)


def test_import_omits_illegal_decisions_with_their_reasons(
    run: CommandRunner, store_path: Path, tmp_path: Path
) -> None:
    """Three of the four decisions are for this machine; two of them would serve kernels that no backend lists."""
    file, copy = tmp_path / "out.json", tmp_path / "copy.db"
    run("store", "export", file, "--store", store_path)
    text = run("store", "import", file, "--store", copy).out
    assert text.startswith("2 decisions imported from ")
    assert "2 left out, which would serve what is not legal:\n" in text
    assert "aten/linear is not legal" in text


def test_verify_reports_illegal_and_unchecked_decisions(run: CommandRunner, store_path: Path) -> None:
    result = run("store", "verify", "--json", "--store", store_path)
    assert result.code == 1
    assert len(result.json["damage"]) == 3
    assert all("is not legal" in line for line in result.json["damage"])
    assert result.json["unchecked"]
    assert all("another version of its backend" in line for line in result.json["unchecked"])


def test_import_of_another_file_fails_with_one_line(run: CommandRunner, tmp_path: Path) -> None:
    file = tmp_path / "no.json"
    file.write_text("[]")
    result = run("store", "import", file, "--store", tmp_path / "s.db")
    assert result.code == 1
    assert re.fullmatch(r"error: .+\n", result.err)


def test_prune_others_deletes_other_machines_only(run: CommandRunner, store_path: Path) -> None:
    assert run("store", "prune", "--store", store_path).code == 2
    assert run("store", "prune", "--others", "--json", "--store", store_path).json == {
        "deleted": 1,
        "plans": 0,
    }
    assert "4x512x512 fp32" not in ids_by_label(run, store_path)
    assert len(ids_by_label(run, store_path)) == 3


def test_verify_reports_damage(run: CommandRunner, legal_store_path: Path) -> None:
    assert run("store", "verify", "--store", legal_store_path).out == "sound: 3 decisions\n"
    with sqlite3.connect(legal_store_path) as database:
        database.execute("UPDATE decisions SET body = x'00' WHERE rowid = (SELECT min(rowid) FROM decisions)")
    database.close()
    result = run("store", "verify", "--json", "--store", legal_store_path)
    assert result.code == 1
    assert len(result.json["damage"]) == 1
    assert result.json["decisions"] == 2


@pytest.mark.parametrize("command", ["export", "import"])
def test_unusable_file_is_an_error_without_a_traceback(run: CommandRunner, store_path: Path, command: str) -> None:
    result = run("store", command, "/nonexistent/dir/file.json", "--store", store_path)
    assert result.code == 1
    assert result.err.startswith("error: ")


@pytest.mark.parametrize("command", [("store", "ls"), ("store", "verify"), ("report",), ("explain", 1, 8, 8)])
def test_file_that_is_no_store_is_an_error(run: CommandRunner, tmp_path: Path, command: tuple[object, ...]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    for store_path in (path, tmp_path):
        result = run(*command, "--store", store_path)
        assert result.code == 1
        assert result.err.startswith(f"error: cannot read the store {store_path}: ")
        assert result.err.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize(
    "args",
    [("store", "ls", "--store"), ("store", "import"), ("store", "export"), ("report", "-o"), ("doctor", "--store")],
)
def test_named_pipe_does_not_block(run: CommandRunner, tmp_path: Path, args: tuple[str, ...]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(*args, pipe)
    if args[0] != "doctor":
        assert result.code == 1
        assert "not a regular file" in result.err
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_unknown_home_directory_is_an_error(run: CommandRunner) -> None:
    result = run("store", "ls", "--store", "~nobody-by-this-name/s.db")
    assert result.code == 1
    assert "cannot find the store" in result.err


@pytest.mark.parametrize("days", ["nan", "inf", "-1"])
def test_invalid_ages_and_threads_are_exit_code_2(run: CommandRunner, store_path: Path, days: str) -> None:
    assert run("store", "prune", "--older-than", days, "--store", store_path).code == 2
    assert run("store", "prune", "--others", "--threads", 10**12, "--store", store_path).code == 2


def test_path_with_a_surrogate_is_printed_escaped(run: CommandRunner, tmp_path: Path, store_path: Path) -> None:
    path = tmp_path / "bad\udcff.json"
    result = run("store", "export", path, "--store", store_path)
    assert result.code == 0
    assert "bad\\udcff.json" in result.out


def test_prune_others_keeps_this_machines_gpus(
    run: CommandRunner, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemmtune.dispatch import runtime

    h200 = Target("cuda", "H200", "9.0", caches=(232448, 0, 62914560), cores=132)
    monkeypatch.setattr(devices, "current_cuda", lambda sources=None, index=None: h200)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    gpu = runtime.current_target("cuda")
    store = open_store(store_path)
    store.put(gpu, make_decision(build(2, 64, 64, "bf16"), "winner", gpu))
    store.close()
    assert run("store", "prune", "--others", "--store", store_path, "--json").json["deleted"] == 1
    assert run("explain", 2, 64, 64, "--device", "cuda", "--store", store_path).code == 0
    missing = run("explain", 2, 64, 65, "--device", "cuda", "--store", store_path)
    assert "on the H200; make one with: gemmtune tune 2,64,65 --dtype bf16 --device cuda" in missing.err
    assert "H200\n" in run("store", "ls", "--store", store_path).out.replace("  (", "\n")
    assert run("store", "prune", "--others", "--device", "cuda", "--store", store_path, "--json").json["deleted"] == 3


WEIGHT = build(4, 512, 512, "bf16")


@pytest.fixture
def plan_store_path(legal_store_path: Path, target: Target) -> Path:
    """Return the store of legal decisions, with a legal plan for the same weight and one of another machine."""
    store = open_store(legal_store_path)
    store.put_plan(target, make_legal_plan(WEIGHT, target))
    other = make_target(threads=64, name="Another CPU")
    store.put_plan(other, make_legal_plan(WEIGHT, other))
    store.close()
    return legal_store_path


def test_ls_lists_plans(run: CommandRunner, plan_store_path: Path, target: Target) -> None:
    result = run("store", "ls", "--store", plan_store_path)
    assert result.code == 0
    assert "Another CPU, 64 threads" in result.out
    assert result.out.count("1-64  1        unpacked") == 2
    rows = run("store", "ls", "--store", plan_store_path, "--json").json["plans"]
    assert len(rows) == 2
    assert {row["target"] for row in rows} == {target.key, make_target(threads=64, name="Another CPU").key}
    assert [row for row in rows if row["target"] == target.key] == [
        {
            "plan": WEIGHT.plan_key,
            "target": target.key,
            "first": 1,
            "last": 64,
            "kernels": 1,
            "layouts": [""],
            "created": 1_760_000_000.0,
        }
    ]


def test_ls_of_a_store_with_plans_only_lists_them(run: CommandRunner, tmp_path: Path, target: Target) -> None:
    path = tmp_path / "plans.db"
    store = open_store(path)
    store.put_plan(target, make_legal_plan(WEIGHT, target))
    store.close()
    out = run("store", "ls", "--store", path).out
    assert "unpacked" in out
    assert "empty" not in out
    assert "kernel " not in out


def test_plans_are_exported_and_imported(run: CommandRunner, plan_store_path: Path, tmp_path: Path) -> None:
    file, copy = tmp_path / "out.json", tmp_path / "copy.db"
    assert run("store", "export", file, "--store", plan_store_path).out == (
        f"3 decisions and 2 plans written to {file}\n"
    )
    exported = run("store", "export", file, "--store", plan_store_path, "--json").json
    assert (exported["decisions"], exported["plans"]) == (3, 2)
    assert run("store", "import", file, "--json", "--store", copy).json == {"decisions": 3, "left_out": []}
    assert len(run("store", "ls", "--store", copy, "--json").json["plans"]) == 2


def test_illegal_plan_is_reported_and_not_imported(
    run: CommandRunner, plan_store_path: Path, tmp_path: Path, target: Target
) -> None:
    store = open_store(plan_store_path)
    store.put_plan(target, make_plan(WEIGHT, target, Candidate.make("aten", "bmm")))
    store.close()
    verified = run("store", "verify", "--store", plan_store_path, "--json")
    assert verified.code == 1
    (line,) = verified.json["damage"]
    assert line.startswith(f"plan {WEIGHT.plan_key}: aten/bmm is not legal")
    file, copy = tmp_path / "out.json", tmp_path / "copy.db"
    run("store", "export", file, "--store", plan_store_path)
    assert run("store", "import", file, "--json", "--store", copy).json == {"decisions": 3, "left_out": [line]}
    assert len(run("store", "ls", "--store", copy, "--json").json["plans"]) == 1


def test_verify_counts_plans_and_reports_their_damage(run: CommandRunner, plan_store_path: Path) -> None:
    assert run("store", "verify", "--store", plan_store_path).out.startswith("sound: 3 decisions and 2 plans\n")
    with sqlite3.connect(plan_store_path) as database:
        database.execute("UPDATE plans SET body = x'00' WHERE rowid = (SELECT min(rowid) FROM plans)")
    database.close()
    result = run("store", "verify", "--json", "--store", plan_store_path)
    assert result.code == 1
    assert len(result.json["damage"]) == 1
    assert (result.json["decisions"], result.json["plans"]) == (3, 1)
    assert run("store", "ls", "--store", plan_store_path).code == 1


def test_prune_deletes_plans(run: CommandRunner, plan_store_path: Path) -> None:
    assert run("store", "prune", "--others", "--store", plan_store_path).out == "0 decisions and 1 plan deleted\n"
    assert run("store", "prune", "--older-than", 1, "--store", plan_store_path, "--json").json == {
        "deleted": 3,
        "plans": 1,
    }
    assert run("store", "ls", "--store", plan_store_path).out == "the store is empty\n"
