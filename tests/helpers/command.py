"""Running the ``gemmtune`` command inside the test process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from gemmtune.cli.commands import app


@dataclass(frozen=True)
class Result:
    """What a command did: its exit code and what it printed where."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Result]


def invoke(*args: object) -> Result:
    """Run ``gemmtune`` with the given arguments; an exception that is no exit fails the test."""
    outcome = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False, prog_name="gemmtune")
    return Result(outcome.exit_code, outcome.stdout, outcome.stderr)
