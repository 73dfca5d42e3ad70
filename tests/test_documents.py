"""The Python blocks of each page of the documents run in order; blocks marked ```python notest``` are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from gemmtune import backends
from gemmtune.store import MemoryStore
from gemmtune.tuning import search

ROOT = Path(__file__).parent.parent
PAGES = [
    path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if "```python\n" in path.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_of_a_page_run(page: Path, own_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_PLUGINS", {})  # those of other tests would be tuned, too
    document = Sybil(parsers=[PythonCodeBlockParser()]).parse(page)
    examples = list(document.examples())
    assert len(examples) == page.read_text().count("```python\n")
    try:
        for example in examples:
            example.evaluate()
    finally:
        torch._dynamo.reset()
        search._REGISTERED.clear()
