"""Runner of the ``gemmtune`` command inside the test process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typer.testing import CliRunner

from gemmtune.cli.commands import app


@dataclass(frozen=True)
class Result:
    """Result of a command: its exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


CommandRunner = Callable[..., Result]


def invoke(*args: object) -> Result:
    """Run ``gemmtune`` with these arguments and return its Result. Exceptions other than SystemExit are not caught."""
    result = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False, prog_name="gemmtune")
    return Result(result.exit_code, result.stdout, result.stderr)
