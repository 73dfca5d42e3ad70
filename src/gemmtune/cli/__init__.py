"""The command line: ``gemmtune tune | bench | explain | report | store | doctor``. One file a command.

Exit codes: 0 done; 1 nothing valid, or failed; 2 wrong usage. Heavy imports happen inside the commands, so that
``gemmtune --help`` answers at once.
"""

from __future__ import annotations

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
)
for _command in (tune, bench, explain, report, doctor):
    app.command()(_command)
app.add_typer(store_app, name="store")


def main() -> None:
    """Run the command line and exit with its code."""
    app(prog_name="gemmtune")
