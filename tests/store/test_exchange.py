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
from gemmtune.testing.store_suite import PROBLEM, TARGET, make_decision

Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    path = tmp_path / "out.json"
    assert write_export(path, [(TARGET, make_decision())]) == 1
    return path


def test_export_and_import_round_trip(exported: Path) -> None:
    assert read_export(exported) == [(TARGET, make_decision())]


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
    assert read_export(tmp_path / "out.json") == [(TARGET, make_decision())]


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
    assert len(read_export(exported)) == 1
    monkeypatch.setattr("gemmtune.store.exchange.MAX_BYTES", exported.stat().st_size - 1)
    with pytest.raises(StoreError, match="it is larger than 0 MiB"):
        read_export(exported)
