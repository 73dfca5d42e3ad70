"""Export file: its format, and the checks of an import."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gemmtune.core.errors import StoreError
from gemmtune.core.owner import this_process
from gemmtune.store.exchange import FORMAT, VERSION, read_export, write_export
from gemmtune.testing.store_suite import PLAIN, PROBLEM, TARGET, UNVERIFIED, make_decision, make_plan

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "out.json"
    assert write_export(path, [(TARGET, make_decision())]) == 1
    return path


@pytest.fixture
def exported_plan(tmp_path: Path) -> Path:
    """Return an export whose target has a plan and no decision."""
    path = tmp_path / "plan.json"
    assert write_export(path, [], [(TARGET, make_plan())]) == 0
    return path


def test_export_and_import_round_trip(exported: Path) -> None:
    assert read_export(exported) == ([(TARGET, make_decision())], [])


def test_export_and_import_of_plans_round_trip(exported_plan: Path, tmp_path: Path) -> None:
    assert read_export(exported_plan) == ([], [(TARGET, make_plan())])
    both = tmp_path / "both.json"
    assert write_export(both, [(TARGET, make_decision())], [(TARGET, make_plan())]) == 1
    assert read_export(both) == ([(TARGET, make_decision())], [(TARGET, make_plan())])


def test_export_has_plans_only_if_there_are_any(exported: Path, exported_plan: Path) -> None:
    """Versions of gemmtune that know no plans refuse a file with this key."""
    assert set(json.loads(exported.read_text())) == {"format", "version", "targets", "decisions"}
    assert set(json.loads(exported_plan.read_text())) == {"format", "version", "targets", "decisions", "plans"}


def test_export_has_a_format_and_a_version(exported: Path) -> None:
    text = exported.read_text()
    data = json.loads(text)
    assert (data["format"], data["version"]) == (FORMAT, VERSION)
    assert data["targets"][TARGET.key]["name"] == "suite cpu"
    assert data["decisions"][0]["problem_key"] == PROBLEM.key
    assert text.count("\n") > 50


def test_export_leaves_no_other_file(exported: Path) -> None:
    assert [path.name for path in exported.parent.iterdir()] == ["out.json"]


def test_next_export_deletes_the_temporary_file_of_a_killed_one(exported: Path) -> None:
    dead = replace(this_process(), started="1").text
    temporary = exported.with_name(f".out.json.{dead}.{'0' * 16}.tmp")
    other = exported.with_name(f".other.json.{dead}.{'0' * 16}.tmp")
    for path in (temporary, other):
        path.write_bytes(b"{")
    write_export(exported, [])
    assert not temporary.exists()
    assert other.exists()


def test_export_succeeds_without_permission_to_list_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("somebody else's directory")

    monkeypatch.setattr("os.scandir", refuse)
    assert write_export(tmp_path / "out.json", [(TARGET, make_decision())]) == 1
    assert read_export(tmp_path / "out.json").decisions == [(TARGET, make_decision())]


def test_unwritable_path_raises_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot write the export"):
        write_export(tmp_path / "no" / "out.json", [])


def test_missing_file_raises_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        read_export(tmp_path / "none.json")


def _row(data: dict[str, Any]) -> dict[str, Any]:
    row = data["decisions"][0]
    assert isinstance(row, dict)
    return row


INVALID_EDITS: dict[str, Edit] = {
    "another format": lambda d: d.update(format="x"),
    "a later version": lambda d: d.update(version=VERSION + 1),
    "a foreign field": lambda d: d.update(extra=1),
    "no decisions": lambda d: d.pop("decisions"),
    "a foreign field in a decision": lambda d: _row(d).update(extra=1),
    "seconds as text": lambda d: _row(d).update(seconds="1"),
    "an unknown outcome": lambda d: _row(d).update(outcome="best"),
    "a target that is not its key": lambda d: d["targets"][TARGET.key].update(threads=64),
    "threads as text": lambda d: d["targets"][TARGET.key].update(threads="2"),
    "a target without a field": lambda d: d["targets"][TARGET.key].pop("isa"),
    "a missing target": lambda d: d["targets"].clear(),
    "a problem that is not its key": lambda d: _row(d)["problem"].update(m=99),
    "an unknown dtype": lambda d: _row(d)["problem"].update(out_dtype="float3"),
    "a negative size": lambda d: _row(d)["problem"].update(m=-1),
    "a size as float": lambda d: _row(d)["problem"].update(m=3.0),
    "an unknown step": lambda d: _row(d)["problem"]["epilogue"][0].update(kind="exec"),
    "a bound that is no number": lambda d: _row(d)["problem"]["epilogue"][0].update(lo="zero"),
    "another candidate": lambda d: _row(d)["evidence"][0]["candidate"].update(template="other"),
    "a candidate without a backend": lambda d: _row(d)["evidence"][0]["candidate"].pop("backend"),
    "a config that is a list": lambda d: _row(d)["evidence"][0]["candidate"].update(config=[1]),
    "a config value that is a list": lambda d: _row(d)["evidence"][0]["candidate"]["config"].update(mr=[6]),
    "a chosen one without evidence": lambda d: _row(d).update(chosen="aten/other"),
    "a chosen one that was wrong": lambda d: _row(d)["evidence"][0]["verdict"].update(kind="wrong"),
    "an alternative that was not checked": lambda d: _row(d)["alternatives"].update({"": "native/gemm[isa=amx]"}),
    "the same evidence twice": lambda d: _row(d)["evidence"].append(_row(d)["evidence"][1]),
}


@pytest.mark.parametrize("edit", INVALID_EDITS.values(), ids=INVALID_EDITS.keys())
def test_import_of_an_invalid_record_raises_store_error(exported: Path, edit: Edit) -> None:
    data = json.loads(exported.read_text())
    edit(data)
    exported.write_text(json.dumps(data))
    with pytest.raises(StoreError, match=r"nothing was imported"):
        read_export(exported)


def _plan(data: dict[str, Any]) -> dict[str, Any]:
    plan = data["plans"][0]
    assert isinstance(plan, dict)
    return plan


INVALID_PLAN_EDITS: dict[str, Edit] = {
    "a foreign field in a plan": lambda d: _plan(d).update(extra=1),
    "a missing target": lambda d: d["targets"].clear(),
    "a problem that is not its key": lambda d: _plan(d)["problem"].update(n=99),
    "another candidate": lambda d: _plan(d)["kernels"][0]["candidate"].update(template="other"),
    "another candidate that does not serve": lambda d: _plan(d)["kernels"][3]["candidate"].update(template="other"),
    "the same kernel twice": lambda d: _plan(d)["kernels"].append(_plan(d)["kernels"][0]),
    "a gap": lambda d: _plan(d)["intervals"]["native:b16"][1].update(first=10),
    "a kernel that was not verified": lambda d: _plan(d)["intervals"]["native:b16"][1].update(kernel=UNVERIFIED.id),
    "a kernel of another layout": lambda d: _plan(d)["intervals"]["native:b16"][1].update(kernel=PLAIN.id),
    "a time of zero": lambda d: _plan(d)["kernels"][3]["times"].update({"1": 0.0}),
    "an M that is no number": lambda d: _plan(d)["kernels"][3]["times"].update({"one": 1.0}),
    "plans that are an object": lambda d: d.update(plans={}),
}


@pytest.mark.parametrize("edit", INVALID_PLAN_EDITS.values(), ids=INVALID_PLAN_EDITS.keys())
def test_import_of_an_invalid_plan_raises_store_error(exported_plan: Path, edit: Edit) -> None:
    data = json.loads(exported_plan.read_text())
    edit(data)
    exported_plan.write_text(json.dumps(data))
    with pytest.raises(StoreError, match=r"nothing was imported"):
        read_export(exported_plan)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a":' * 5000, b"[" * 100_000, b"\xff\xfe", b'{"format": 1, "version": 1}']
)
def test_import_of_malformed_bytes_raises_store_error(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(body)
    with pytest.raises(StoreError):
        read_export(path)


def test_file_beyond_the_limit_is_not_read(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemmtune.store.exchange.MAX_BYTES", exported.stat().st_size)
    assert len(read_export(exported).decisions) == 1
    monkeypatch.setattr("gemmtune.store.exchange.MAX_BYTES", exported.stat().st_size - 1)
    with pytest.raises(StoreError, match="it is larger than 0 MiB"):
        read_export(exported)
