"""The typer app of ``gemmtune`` with all commands.

The commands import torch and other slow modules inside their functions, so that ``--help`` prints at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from .bench import bench
from .doctor import doctor
from .explain import explain
from .report import report
from .store import app as store_app
from .tune import tune

app = typer.Typer(
    name="gemmtune",
    help="Find, prove and serve the fastest correct matrix multiply for every shape a model uses.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(short_help="Find and keep the fastest correct kernels.")(tune)
app.command(short_help="Race backends on shapes, keeping nothing.")(bench)
app.command(short_help="Show a decision and all its evidence.")(explain)
app.command(short_help="Write an HTML report from the store.")(report)
app.command(short_help="Show what this machine has and lacks.")(doctor)
app.add_typer(store_app, name="store")


def _version(requested: bool) -> None:
    if requested:
        from .. import __version__

        print(f"gemmtune {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Find, prove and serve the fastest correct matrix multiply for every shape a model uses."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may have characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
