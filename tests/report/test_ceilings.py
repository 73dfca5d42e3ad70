from pathlib import Path

import pytest

from gemmtune.report import ceilings
from gemmtune.store import MemoryStore, open_store
from helpers.factories import make_target


def test_measured_ceilings_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "_READ_BYTES", 8 << 20)
    monkeypatch.setattr(ceilings, "_SIZE", 128)
    assert 1e8 < ceilings.read_bandwidth(0.01) < 1e13
    rates = ceilings.arithmetic(0.01)
    assert set(rates) == {"float32", "bfloat16", "int8"}
    assert all(rate > 1e6 for rate in rates.values())


def test_ceilings_are_measured_once_per_target_and_stored_beside_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(ceilings, "read_bandwidth", lambda: float(calls.append(1) or 5e9))
    monkeypatch.setattr(ceilings, "arithmetic", lambda: {"float32": 1e11})
    path = ceilings.ceilings_path(open_store(tmp_path / "store.db"))
    assert path == tmp_path / "store.ceilings.json"
    first = ceilings.load_or_measure(path, make_target())
    assert first == {"read": 5e9, "float32": 1e11}
    assert ceilings.load_or_measure(path, make_target()) == first
    ceilings.load_or_measure(path, make_target(threads=1))
    assert len(calls) == 2
    assert set(ceilings.load(path)) == {make_target().key, make_target(threads=1).key}


def test_memory_store_has_no_ceilings_file() -> None:
    assert ceilings.ceilings_path(MemoryStore()) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"ceilings": 3}', '{"ceilings": {"k": {"read": "fast"}}}'])
def test_damaged_file_has_no_ceilings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    assert ceilings.load(path) == {}


def test_unwritable_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "read_bandwidth", lambda: 5e9)
    monkeypatch.setattr(ceilings, "arithmetic", lambda: {})
    assert ceilings.load_or_measure(tmp_path / "absent" / "c.json", make_target()) == {"read": 5e9}
