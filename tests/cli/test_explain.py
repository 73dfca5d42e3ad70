from pathlib import Path

import pytest
from msgspec.structs import replace

from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Evidence
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.store import open_store
from helpers.command import Run
from helpers.factories import SLOW, make_decision


def test_shows_all_the_evidence(run: Run, filled: Path) -> None:
    result = run("explain", 16, 4096, 4096, "--dtype", "bf16", "--store", filled)
    assert result.code == 0
    text = " ".join(result.out.split())
    for part in (
        "winner native/gemm[isa=avx512,mr=6,nr=64]",
        "stopped: the duel was decided after 50 pairs",
        "illegal (1): this CPU has no AMX",
        "native/gemm[isa=amx,mr=16,nr=32]",
        "0.500 [0.490-0.510]",
        "within bound",
    ):
        assert part in text


def test_json_holds_the_whole_record(run: Run, filled: Path) -> None:
    (decision,) = run("explain", 16, 4096, 4096, "--json", "--store", filled).json["decisions"]
    assert decision["outcome"] == "winner"
    assert {row["stage"] for row in decision["evidence"]} == {"winner", "finalist", "eliminated", "failed", "illegal"}


def test_tells_the_conditions_once_and_where_they_differ(run: Run, tmp_path: Path, here: Target) -> None:
    made = make_decision(build(2, 3, 4, "fp32"), "winner", here)
    cold = {"operands": "cold", "threads": "2", "drift": "+1.2%", "pinned": "CPUs 0, 1"}
    rough = {"timing": "rough", "operands": "hot", "threads": "2"}
    rows = [
        _timed(row, cold if row.stage in ("winner", "finalist") else rough, packing_s=2.5e-3) for row in made.evidence
    ]
    path = tmp_path / "s.db"
    open_store(path).put(here, replace(made, evidence=tuple(rows)))
    lines = run("explain", 2, 3, 4, "--dtype", "fp32", "--store", path).out.splitlines()
    assert lines.count("timed with: operands cold; threads 2; drift +1.2%; pinned CPUs 0, 1") == 1
    place = next(index for index, line in enumerate(lines) if line.strip().startswith(f"{SLOW.id}: "))
    assert [line.strip() for line in lines[place + 1 : place + 3]] == [
        "packing its weight took 2.50 ms, once",
        "timed with: operands hot; timing rough",
    ]
    assert sum("timed with" in line for line in lines) == 2
    (record,) = run("explain", 2, 3, 4, "--dtype", "fp32", "--store", path, "--json").json["decisions"]
    assert record["stopped"] == made.stopped
    assert [row["sample"]["conditions"] for row in record["evidence"] if row["sample"]] == [cold, cold, rough]
    assert {"lo_s", "hi_s", "rounds", "ratio_lo", "ratio_hi", "times"} <= record["evidence"][0]["sample"].keys()


def _timed(row: Evidence, conditions: dict[str, str], **more: float) -> Evidence:
    sample = None if row.sample is None else replace(row.sample, conditions=conditions, **more)
    return replace(row, sample=sample)


def test_old_samples_say_at_least_whether_operands_were_cold(run: Run, filled: Path) -> None:
    assert "timed with: operands cold\n" in run("explain", 16, 4096, 4096, "--store", filled).out
    nothing_timed = run("explain", 16, 4096, 4096, "--dtype", "int8", "--store", filled).out
    assert "timed with" not in nothing_timed


def test_says_when_nothing_is_valid(run: Run, filled: Path) -> None:
    result = run("explain", 16, 4096, 4096, "--dtype", "int8", "--store", filled)
    assert result.code == 0
    assert "no candidate was valid" in result.out


def test_unknown_shape_names_the_command_to_run(run: Run, filled: Path) -> None:
    result = run("explain", 5, 6, 7, "--dtype", "fp32", "--store", filled)
    assert result.code == 1
    assert "gemmtune tune 5,6,7 --dtype fp32" in result.err


def test_a_candidate_is_shown_whole_whatever_the_width(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = run("explain", 16, 4096, 4096, "--dtype", "bf16", "--store", filled).out.splitlines()
    (record,) = run("explain", 16, 4096, 4096, "--json", "--store", filled).json["decisions"]
    for row in record["evidence"]:
        words = [line.split(": ")[0].strip() for line in lines]
        assert Candidate.from_dict(row["candidate"]).id in words


def test_an_empty_shape_is_not_sent_to_be_tuned(run: Run, filled: Path) -> None:
    result = run("explain", 0, 8, 8, "--store", filled)
    assert result.code == 1
    assert "is empty" in result.err
    assert "gemmtune tune" not in result.err


def test_other_machines_on_request(run: Run, filled: Path) -> None:
    args = ("explain", 4, 512, 512, "--dtype", "fp32", "--store", filled)
    missing = run(*args)
    assert missing.code == 1
    assert "--any-machine" in missing.err
    assert run(*args, "--any-machine").code == 0


def test_wrong_usage(run: Run, filled: Path) -> None:
    unknown = run("explain", 1, 2, 3, "--dtype", "int7", "--store", filled)
    assert unknown.code == 2
    assert "int8wo" in unknown.err
    assert run("explain", 1, 2).code == 2
    assert run("explain", 1, 2, -3).code == 2
