"""Raw results on disk, and the page made of them."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemmtune.dispatch import current_target

from .checks import Check, Outcome

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "reliability.md"

_HEAD = """# Reliability: the figures, and how to have them again

Written by `make reliability` from the raw data in tests/reliability/results/; do not edit. One row alone:
`PYTHONPATH=tests .venv/bin/python -m reliability NAME`. Short forms of all rows that time nothing run in `make test`.

| what | bar | measured | holds | check | seconds | commit |
| --- | --- | --- | --- | --- | --- | --- |
"""


def keep(check: Check, outcome: Outcome, seconds: float) -> None:
    """Write one check's raw data with the machine and the commit it comes from."""
    RESULTS.mkdir(exist_ok=True)
    target = current_target()
    document = {
        "check": check.name,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "target": target.to_dict(),
        "measured": outcome.measured,
        "ok": outcome.ok,
        "seconds": round(seconds, 1),
        "data": outcome.data,
    }
    path = RESULTS / f"{check.name}.json"
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_report(checks: Mapping[str, Check]) -> None:
    """Write docs/explanation/reliability.md: a row a check, those never run in full among them."""
    rows = [_row(check, _kept(name)) for name, check in checks.items()]
    PAGE.write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")


def _row(check: Check, kept: dict[str, Any] | None) -> str:
    if kept is None:
        return f"| {check.what} | {check.bar} | never run in full | | {check.name} | | |"
    holds = "yes" if kept["ok"] else "**no**"
    return (
        f"| {check.what} | {check.bar} | {kept['measured']} | {holds} | {check.name} | {kept['seconds']:.0f} | "
        f"{kept['commit'][:9]} |"
    )


def _kept(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _commit() -> str:
    """The checked-out commit, with ``+`` when tracked sources differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return head[:9] + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", "src", "native") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    here = Path(__file__).parent
    return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()
