"""``gemmtune report``: one HTML file with tables and plots, made from the store alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    DeviceOption,
    JsonOption,
    StoreOption,
    current_target,
    emit,
    fail,
    guard,
    opened,
    parse_device,
    quiet_stdout,
    require_file,
    say,
)


@guard
def report(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Where to write it.")] = Path(
        "report.html"
    ),
    all_machines: Annotated[
        bool, typer.Option("--all-machines", help="Decisions of every machine and thread count, not only this one.")
    ] = False,
    device: DeviceOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a self-contained HTML report: times by shape and backend, the roofline, the candidates' spread."""
    from ..report import write_report

    require_file(output)
    with quiet_stdout(as_json):
        target = None if all_machines else current_target(None, parse_device(device))
    with opened(store) as keeper:
        if target is not None and not any(True for _ in keeper.decisions(target)):
            target = None  # tuned with --threads, or copied here: show what there is
        shown = write_report(keeper, output, target=target)
    if not shown:
        fail("the store is empty: tune something first, e.g. gemmtune tune 16,4096,4096", as_json=as_json)
    if as_json:
        emit({"path": str(output.resolve()), "decisions": shown})
    else:
        say(f"{output.resolve()} ({shown} problems)")
