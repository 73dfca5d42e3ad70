"""Raw results of checks on disk, and the report that is made from them."""

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


def write_result(check: Check, outcome: Outcome, seconds: float) -> None:
    """Write the raw data of one check, with the machine and the commit of the run."""
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
    """Write docs/explanation/reliability.md with a row for each check, also for checks that were never run in full."""
    rows = [_row(check, _read_result(name)) for name, check in checks.items()]
    PAGE.write_text(_HEAD + "\n".join(rows) + "\n", encoding="utf-8")


def _row(check: Check, result: dict[str, Any] | None) -> str:
    if result is None:
        return f"| {check.subject} | {check.bar} | never run in full | | {check.name} | | |"
    holds = "yes" if result["ok"] else "**no**"
    return (
        f"| {check.subject} | {check.bar} | {result['measured']} | {holds} | {check.name} | {result['seconds']:.0f} | "
        f"{result['commit'][:9]} |"
    )


def _read_result(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _commit() -> str:
    """Return the checked-out commit, with ``+`` if tracked sources differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return head[:9] + ("+" if _git("status", "--porcelain", "--untracked-files=no", "--", "src", "native") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*args: str) -> str:
    folder = Path(__file__).parent
    return subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()
