"""Tests that ``explain`` begins with the kernel, its interval and the next command, and the report with saved times."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from gemmtune.cli.answer import answer
from gemmtune.cli.models import record_calls
from gemmtune.cli.tune import store_layers
from gemmtune.core.candidate import Candidate
from gemmtune.core.decision import Decision, Evidence
from gemmtune.core.problem import Problem
from gemmtune.core.workloads import build
from gemmtune.dispatch import current_target
from gemmtune.report import interactive, layers, write_report
from gemmtune.report.cells import SCRIPT
from gemmtune.report.layers import Model, Use, forward, saving
from gemmtune.report.page import table
from gemmtune.report.rows import disturbances_of, summarize
from gemmtune.store import MemoryStore, SqliteStore, open_store
from helpers import command
from helpers.factories import make_decision, make_target

LINEAR = build(1, 64, 32, "fp32")


def with_conditions(decision: Decision, **conditions: str) -> Decision:
    """Return the decision with these conditions in every Sample of its evidence."""

    def with_sample_conditions(row: Evidence) -> Evidence:
        return row if row.sample is None else replace(row, sample=replace(row.sample, conditions=conditions))

    return replace(decision, evidence=tuple(with_sample_conditions(row) for row in decision.evidence))


# explain


def test_explain_begins_with_the_three_lines_of_brief(tmp_path: Path) -> None:
    target, path = current_target(), tmp_path / "s.db"
    with contextlib.closing(open_store(path)) as store:
        store.put(target, make_decision(LINEAR, "winner", target))
    args = ("explain", 1, 64, 32, "--dtype", "fp32", "--store", path)
    lines = command.invoke(*args).out.splitlines()
    brief = command.invoke(*args, "--brief").out.splitlines()
    assert brief == lines[:3]
    assert lines[0].startswith("1x64x32 fp32: native/gemm[isa=avx512,mr=6,nr=64] serves, 1.00 ms a call, ATen 2.00 ms")
    assert lines[1].startswith("sure: 1.96x to 2.04x with 95% over 50 timings")
    assert "within the bound" in lines[1]
    assert lines[2].startswith("next: nothing")
    assert len(lines) > 10
    (document,) = command.invoke(*args, "--brief", "--json").json["decisions"]
    assert [document["serves"], document["sure"], document["next"]] == brief


@pytest.mark.parametrize(
    ("outcome", "serves", "after"),
    [
        ("tie", "ATen serves (aten/linear)", "gemmtune tune 16,4096,4096 --dtype bf16 --force --budget 60"),
        ("none_valid", "PyTorch's own kernels serve", "gemmtune tune 16,4096,4096 --dtype bf16 --force"),
    ],
)
def test_explain_names_the_next_command_for_a_tie_and_for_none_valid(outcome: str, serves: str, after: str) -> None:
    first, _, last = answer(make_decision(outcome=outcome))
    assert serves in first
    assert last.endswith(after)


def test_explain_advises_to_tune_a_disturbed_decision_again() -> None:
    decision = with_conditions(make_decision(), stalled="7% of the pairs, set aside", load="1.3 cores")
    _, interval, next_command = answer(decision, " --device cuda")
    assert "disturbed: stalled 7% of the pairs, set aside; others kept 1.3 cores busy" in interval
    assert next_command.endswith("gemmtune tune 16,4096,4096 --dtype bf16 --device cuda --force")
    assert disturbances_of(with_conditions(make_decision(), load="0.1 cores", drift="+0.2%")) == ""


def test_explain_names_a_tune_command_only_for_problems_that_the_command_tunes() -> None:
    biased = build(4, 64, 32, "fp32", bias=True)
    assert "--bias" in answer(make_decision(biased, "tie"))[2]
    other = Problem("mm", 4, 64, 32, biased.a, variable_weight(biased), "float32")
    assert "the model that runs it" in answer(make_decision(other, "tie"))[2]


def variable_weight(problem: Problem) -> object:
    """Return the problem's second operand, marked as not constant."""
    import dataclasses

    return dataclasses.replace(problem.b, constant=False)


# layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class ThreeBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Parameter(torch.ones(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.head


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    """Return the recorded calls of a model of three blocks, with 4 rows and then with 1."""
    factory = lambda: (ThreeBlocks(), [(torch.ones(4, 32),), (torch.ones(1, 32),)])  # noqa: E731 - a factory
    monkeypatch.setattr("gemmtune.cli.models.find_factory", lambda spec: factory)
    with torch.inference_mode(False):
        return record_calls("tiny.py:made", None).layers()


def test_recorded_calls_have_the_module_and_the_example_input(model: Model) -> None:
    assert model.inputs == ("float32 [4, 32]", "float32 [1, 32]")
    counts = {(use.call, use.layer): use.count for use in model.uses}
    names = [f"blocks.{index}.{name}" for index in range(3) for name in ("up", "down")]
    assert counts == {(call, name): 1 for call in (0, 1) for name in (*names, "")}


def test_module_hooks_are_removed_after_a_forward_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.modules import module as hooks

    before = len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)
    monkeypatch.setattr("gemmtune.cli.models.find_factory", lambda spec: lambda: (ThreeBlocks(), (torch.ones(4, 5),)))
    with pytest.raises(RuntimeError, match="raised"):
        record_calls("tiny.py:made", None)
    assert (len(hooks._global_forward_hooks), len(hooks._global_forward_pre_hooks)) == before


def test_layers_are_grouped_by_name_and_weighted_by_calls(model: Model) -> None:
    keys = {use.problem_key for use in model.uses if use.call == 1 and use.layer.endswith("up")}
    rows = {key: summarize(make_decision(LINEAR, "winner", aten_s=1e-3)) for key in keys}
    layers_of_forward = forward(model, 1, rows)
    assert (layers_of_forward[0].name, layers_of_forward[0].modules, layers_of_forward[0].calls) == (
        "blocks.*.up",
        3,
        3,
    )
    assert {layer.name for layer in layers_of_forward} == {"blocks.*.up", "blocks.*.down", ""}
    total = saving(layers_of_forward)
    assert total.aten_s == pytest.approx(3e-3)
    assert total.served_s == pytest.approx(1.5e-3)
    assert total.lo_s < 1.5e-3 < total.hi_s
    assert total.undecided == 4


def test_layers_are_sorted_by_cost_and_ties_save_nothing() -> None:
    uses = (Use(0, "a", "tie", 1), Use(0, "b", "win", 10), Use(0, "model.0.c", "win", 2))
    rows = {"tie": summarize(make_decision(outcome="tie")), "win": summarize(make_decision())}
    layers_of_forward = forward(Model(("x",), uses), 0, rows)
    assert [layer.name for layer in layers_of_forward] == ["b", "model.*.c", "a"]
    assert layers_of_forward[2].saved_s == 0.0
    assert saving(layers_of_forward).aten_s - saving(layers_of_forward).served_s == pytest.approx(12 * 1e-3)


@pytest.mark.parametrize("damage", ["", "[]", '{"version": 1, "models": {"m": 3}}', "{" * 9999])
def test_a_damaged_layers_file_is_read_as_empty_and_overwritten(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "s.layers.json"
    path.write_text(damage)
    assert layers.load(path) == {}
    layers.save(path, "m", "t", Model(("x",), (Use(0, "a", "key", 2),)))
    assert layers.load(path)["m"]["t"].uses[0].count == 2
    assert layers.layers_path(MemoryStore()) is None


def test_the_report_of_a_tuned_model_has_times_by_layer(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interactive, "library", lambda: None)
    target, path = make_target(), tmp_path / "r.html"
    with contextlib.closing(SqliteStore(tmp_path / "s.db")) as store:
        for rows in (1, 4):
            key = next(u.problem_key for u in model.uses if u.layer == "blocks.0.up" and u.call == (rows == 1))
            decision = make_decision(build(rows, 64, 32, "fp32"), "winner", target, aten_s=rows * 1e-3)
            assert decision.problem_key == key
            store.put(target, with_conditions(decision, stalled="a lot") if rows == 4 else decision)
        store_layers(store, target, "<tiny>.py:made", model)
        write_report(store, path)
    text = path.read_text()
    answers = re.findall(r"<p class='answer'>(.*?)</p>", text)
    assert len(answers) == 2
    assert answers[1].startswith("One forward of &lt;tiny&gt;.py:made with float32 [1, 32]: ")
    assert "take 3.00 ms with ATen and 1.50 ms with what serves. <b>1.50 ms saved</b>" in answers[1]
    assert "not decided, and left out: 4." in answers[1]
    assert text.index("class='answer'") < text.index("<svg")
    assert "<td>blocks.*.up</td>" in text
    assert text.count("(disturbed)") == 1
    assert "disturbed: stalled a lot" in text


def test_a_report_without_a_model_names_the_command_that_tunes_one(tmp_path: Path) -> None:
    store, target = MemoryStore(), make_target()
    store.put(target, make_decision(LINEAR, "winner", target))
    assert write_report(store, tmp_path / "r.html") == 1
    assert "gemmtune tune file.py:factory" in (tmp_path / "r.html").read_text()


def test_table_cells_have_their_value_as_sort_key() -> None:
    text = table([make_decision(), make_decision(LINEAR, "tie", aten_s=1e-6)])
    assert re.search(r"<input[^>]*><table><thead>", text)
    assert "data-v='0.001'>1.00 ms" in text
    assert "data-v='1e-06'>1.00 us" in text
    assert Candidate.make("aten", "linear").id in text


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_report_script_sorts_and_filters_rows() -> None:
    page = """
    function cell(text, v) { return {textContent: text, dataset: v === undefined ? {} : {v: String(v)}}; }
    var rows = [["b", 2], ["a", 10], ["c", 1]].map(function (r) {
      return {cells: [cell(r[0]), cell(r[1] + " us", r[1])], textContent: r[0], hidden: false}; });
    var body = {rows: rows, append: function (r) { rows.splice(rows.indexOf(r), 1); rows.push(r); }};
    var heads = [{dataset: {}}, {dataset: {}}], field = {value: ""};
    var table = {tBodies: [body], previousElementSibling: field, querySelectorAll: function () { return heads; }};
    var document = {querySelectorAll: function () { return [table]; }};
    """
    after = """
    function names() { return rows.filter(function (r) { return !r.hidden; }).map(function (r) {
      return r.textContent; }).join(""); }
    var seen = [names()];
    heads[1].onclick(); seen.push(names()); heads[1].onclick(); seen.push(names());
    heads[0].onclick(); seen.push(names());
    field.value = "B"; field.oninput(); seen.push(names());
    console.log(JSON.stringify(seen));
    """
    process = subprocess.run(["node", "-e", page + SCRIPT + after], capture_output=True, text=True, check=True)
    assert json.loads(process.stdout) == ["bac", "cba", "abc", "abc", "b"]
