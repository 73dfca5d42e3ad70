from pathlib import Path

import pytest
from msgspec.structs import replace

from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Evidence
from gemmtune.core.target import Target
from gemmtune.core.workloads import build
from gemmtune.store import open_store
from helpers.command import CommandRunner
from helpers.factories import SLOW, make_decision


def test_text_has_all_the_evidence(run: CommandRunner, store_path: Path) -> None:
    result = run("explain", 16, 4096, 4096, "--dtype", "bf16", "--store", store_path)
    assert result.code == 0
    text = " ".join(result.out.split())
    for expected in (
        "winner native/gemm[isa=avx512,mr=6,nr=64]",
        "stopped: the duel was decided after 50 pairs",
        "illegal (1): this CPU has no AMX",
        "native/gemm[isa=amx,mr=16,nr=32]",
        "0.500 [0.490-0.510]",
        "within bound",
    ):
        assert expected in text


def test_json_has_the_decision_and_its_evidence(run: CommandRunner, store_path: Path) -> None:
    (decision,) = run("explain", 16, 4096, 4096, "--json", "--store", store_path).json["decisions"]
    assert decision["outcome"] == "winner"
    assert {row["stage"] for row in decision["evidence"]} == {"winner", "finalist", "eliminated", "failed", "illegal"}


def test_conditions_are_printed_once_and_per_differing_row(run: CommandRunner, tmp_path: Path, target: Target) -> None:
    decision = make_decision(build(2, 3, 4, "fp32"), "winner", target)
    cold = {"operands": "cold", "threads": "2", "drift": "+1.2%", "pinned": "CPUs 0, 1"}
    screened = {"timing": "rough", "operands": "hot", "threads": "2"}
    rows = [
        _with_conditions(row, cold if row.stage in ("winner", "finalist") else screened, packing_s=2.5e-3)
        for row in decision.evidence
    ]
    path = tmp_path / "s.db"
    open_store(path).put(target, replace(decision, evidence=tuple(rows)))
    lines = run("explain", 2, 3, 4, "--dtype", "fp32", "--store", path).out.splitlines()
    assert lines.count("timed with: operands cold; threads 2; drift +1.2%; pinned CPUs 0, 1") == 1
    index_of_row = next(index for index, line in enumerate(lines) if line.strip().startswith(f"{SLOW.id}: "))
    assert [line.strip() for line in lines[index_of_row + 1 : index_of_row + 3]] == [
        "packing its weight took 2.50 ms, once",
        "timed with: operands hot; timing rough",
    ]
    assert sum("timed with" in line for line in lines) == 2
    (record,) = run("explain", 2, 3, 4, "--dtype", "fp32", "--store", path, "--json").json["decisions"]
    assert record["stopped"] == decision.stopped
    assert [row["sample"]["conditions"] for row in record["evidence"] if row["sample"]] == [cold, cold, screened]
    assert {"lo_s", "hi_s", "rounds", "ratio_lo", "ratio_hi", "times"} <= record["evidence"][0]["sample"].keys()


def _with_conditions(row: Evidence, conditions: dict[str, str], **times: float) -> Evidence:
    sample = None if row.sample is None else replace(row.sample, conditions=conditions, **times)
    return replace(row, sample=sample)


def test_samples_without_conditions_show_the_operands_condition(run: CommandRunner, store_path: Path) -> None:
    assert "timed with: operands cold\n" in run("explain", 16, 4096, 4096, "--store", store_path).out
    nothing_timed = run("explain", 16, 4096, 4096, "--dtype", "int8", "--store", store_path).out
    assert "timed with" not in nothing_timed


def test_none_valid_is_explained(run: CommandRunner, store_path: Path) -> None:
    result = run("explain", 16, 4096, 4096, "--dtype", "int8", "--store", store_path)
    assert result.code == 0
    assert "no candidate was valid" in result.out


def test_unknown_shape_names_the_tune_command(run: CommandRunner, store_path: Path) -> None:
    result = run("explain", 5, 6, 7, "--dtype", "fp32", "--store", store_path)
    assert result.code == 1
    assert "gemmtune tune 5,6,7 --dtype fp32" in result.err


def test_candidate_ids_are_not_truncated_on_a_narrow_terminal(
    run: CommandRunner, store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = run("explain", 16, 4096, 4096, "--dtype", "bf16", "--store", store_path).out.splitlines()
    (record,) = run("explain", 16, 4096, 4096, "--json", "--store", store_path).json["decisions"]
    for row in record["evidence"]:
        labels = [line.split(": ")[0].strip() for line in lines]
        assert Candidate.from_dict(row["candidate"]).id in labels


def test_empty_shape_does_not_suggest_tuning(run: CommandRunner, store_path: Path) -> None:
    result = run("explain", 0, 8, 8, "--store", store_path)
    assert result.code == 1
    assert "is empty" in result.err
    assert "gemmtune tune" not in result.err


def test_any_machine_includes_other_machines(run: CommandRunner, store_path: Path) -> None:
    args = ("explain", 4, 512, 512, "--dtype", "fp32", "--store", store_path)
    missing = run(*args)
    assert missing.code == 1
    assert "--any-machine" in missing.err
    assert run(*args, "--any-machine").code == 0


def test_wrong_usage_is_exit_code_2(run: CommandRunner, store_path: Path) -> None:
    unknown = run("explain", 1, 2, 3, "--dtype", "int7", "--store", store_path)
    assert unknown.code == 2
    assert "int8wo" in unknown.err
    assert run("explain", 1, 2).code == 2
    assert run("explain", 1, 2, -3).code == 2


MODEL = """
import torch

def factory(dtype: torch.dtype = torch.float32):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).to(dtype)
    return model, torch.ones(3, 16, dtype=dtype)
"""


def test_graph_has_a_line_for_each_product_of_a_model(run: CommandRunner, store_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "small.py"
    path.write_text(MODEL)
    result = run("explain", "--graph", f"{path}:factory", "--store", store_path)
    assert result.code == 0
    assert "gemmtune serves 0 of 2 products of a graph" in result.out
    assert "3x8x16 fp32 +bias: Inductor's (it was not tuned)" in result.out
    (graph,) = run("explain", "--graph", f"{path}:factory", "--dtype", "bf16", "--store", store_path, "--json").json[
        "graphs"
    ]
    assert [product["problem"] for product in graph["products"]] == ["3x8x16 bf16 +bias", "3x4x8 bf16 +bias"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give a shape"),
        ((1, 2), "give a shape"),
        ((1, 2, 3, "--graph", "x.py:f"), "without M N K"),
        (("--graph", "x.py:f", "--brief"), "without M N K"),
    ],
)
def test_explain_takes_a_shape_or_a_model(run: CommandRunner, arguments: tuple[object, ...], words: str) -> None:
    result = run("explain", *arguments)
    assert result.code == 2
    assert words in result.err
