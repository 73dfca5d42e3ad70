import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from msgspec.structs import replace

from gemmtune.core.decision import Verdict
from gemmtune.core.workloads import build
from gemmtune.report import interactive, write_report
from gemmtune.report.page import overview, table
from gemmtune.report.rows import summarize
from gemmtune.store import MemoryStore
from helpers.factories import make_decision, make_target
from helpers.plans import LARGE, PROBLEM, SMALL, planted_plan, simulated, staircase

UNUSED = simulated("unused", staircase(30.0, 1.0))
PLAN = planted_plan(
    PROBLEM, [SMALL, LARGE, UNUSED], {"": [(1, 40, SMALL), (41, 128, LARGE)]}, [1, 16, 48, 128], target_key="t"
)


class NestingParser(HTMLParser):
    """HTML parser that fails for wrongly nested elements; ``open`` lists unclosed elements, ``tags`` all tags."""

    VOID = ("meta", "br", "wbr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def store() -> MemoryStore:
    memory_store, target = MemoryStore(), make_target()
    for m, outcome in ((1, "winner"), (4, "tie"), (16, "winner"), (64, "none_valid")):
        for dtype in ("bf16", "int8"):
            memory_store.put(target, make_decision(build(m, 4096, 4096, dtype), outcome, target, aten_s=m * 1e-4))
    return memory_store


@pytest.mark.parametrize("library", ["/* plotly stands here */", None], ids=["plotly", "svg"])
def test_report_is_one_well_formed_file_without_links(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str | None
) -> None:
    monkeypatch.setattr(interactive, "library", lambda: library)
    path = tmp_path / "report.html"
    assert write_report(store, path) == 8
    text = path.read_text()
    parser = NestingParser()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"""(src|href)\s*=|@import|url\(""", text)
    assert ("svg" in parser.tags) == (library is None)
    assert text.count("<h3>Time by shape and backend") == text.count("<h3>Achieved against the roofline") == 2


@pytest.mark.parametrize("library", ["/* plotly stands here */", None], ids=["plotly", "svg"])
def test_names_and_details_are_escaped(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str | None
) -> None:
    monkeypatch.setattr(interactive, "library", lambda: library)
    path = tmp_path / "report.html"
    write_report(store, path)
    text = path.read_text()
    assert "Test CPU &lt;x&gt;" in text
    assert "element [3, &lt;b&gt;7&lt;/b&gt;]" in text
    assert "<x>" not in text
    assert "<b>7" not in text


def test_plotly_is_embedded_once_when_installed(store: MemoryStore, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "report.html"
    write_report(store, path)
    text = path.read_text()
    source = interactive.library()
    assert source is not None
    assert text.count(source) == 1
    assert text.count("Plotly.newPlot(") >= 6


def test_empty_store_writes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    assert write_report(MemoryStore(), path) == 0
    assert not path.exists()


def test_report_of_one_target(store: MemoryStore, tmp_path: Path) -> None:
    other = make_target(threads=7)
    store.put(other, make_decision(build(2, 3, 5, "fp32"), "tie", other))
    path = tmp_path / "report.html"
    assert write_report(store, path, target=other) == 1
    assert "7 threads" in path.read_text()


def test_table_has_the_outcomes() -> None:
    text = table([make_decision(outcome=outcome) for outcome in ("winner", "tie", "none_valid")])
    assert "2.00x [1.96-2.04]" in text
    assert "tie: ATen serves" in text
    assert "nothing valid" in text
    assert "1 refused" in text
    assert "(+1 illegal)" in text


def test_overview_has_counts_and_the_mean_speedup() -> None:
    rows = [summarize(make_decision(outcome=outcome)) for outcome in ("winner", "tie")]
    assert overview(rows).startswith("2 problems: 1 won, 1 tied")
    assert "1.41x" in overview(rows)
    none_valid = overview([summarize(make_decision(outcome="none_valid"))])
    assert "1 without a valid candidate" in none_valid
    assert "nan" not in none_valid


@pytest.mark.parametrize("library", ["/* plotly stands here */", None], ids=["plotly", "svg"])
def test_weights_with_plans_have_a_section(
    store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str | None
) -> None:
    monkeypatch.setattr(interactive, "library", lambda: library)
    target, path = make_target(), tmp_path / "report.html"
    write_report(store, path)
    assert "range of M" not in path.read_text()
    wrong = Verdict("wrong", "element <b>", 9.0)
    kernels = [replace(row, verdict=wrong) if row.id == UNUSED.id else row for row in PLAN.kernels]
    store.put_plan(target, replace(PLAN, target_key=target.key, kernels=tuple(kernels)))
    assert write_report(store, path) == 8
    text = path.read_text()
    parser = NestingParser()
    parser.feed(text)
    assert parser.open == []
    for expected in (
        "Weights tuned over a range of M",
        "Mx64x96 fp32: M 1-128, 2 kernels in 2 intervals, worst regret 11.1% at M = 48.",
        "Mx64x96 fp32, unpacked: time over M",
        "right at 4 M from 1 to 128",
        "1 kernels cannot serve",
        "wrong: element &lt;b&gt;",
        "floor of the machine",
    ):
        assert expected in text
    assert f"<td>A</td><td>unpacked</td><td>1-40</td><td><code>{SMALL.id}</code></td>" in text
    assert text.count("<h4>") == 1


def test_plans_of_other_machines_are_left_out(store: MemoryStore, tmp_path: Path) -> None:
    other, path = make_target(threads=7), tmp_path / "report.html"
    store.put_plan(other, replace(PLAN, target_key=other.key))
    write_report(store, path, target=make_target())
    assert "range of M" not in path.read_text()
