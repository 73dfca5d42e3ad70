"""``gemmtune report``: one HTML file with tables and plots, made from the store alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import (
    DeviceOption,
    JsonOption,
    StoreOption,
    checked_store,
    exit_on_error,
    fail,
    parse_device,
    print_json,
    print_lines,
    quiet_stdout,
    require_file,
    selected_target,
)


@exit_on_error
def report(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="PATH", help="Where to write it.")] = Path(
        "report.html"
    ),
    all_machines: Annotated[
        bool, typer.Option("--all-machines", help="Decisions of every machine and thread count, not only this one.")
    ] = False,
    device: DeviceOption = None,
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a self-contained HTML report: times by shape and backend, the roofline, the candidates' spread."""
    from ..report import write_report

    require_file(output)
    with quiet_stdout(as_json):
        target = None if all_machines else selected_target(None, parse_device(device))
    with checked_store(store_path) as store:
        if target is not None and not any(True for _ in store.decisions(target)):
            target = None  # tuned with --threads, or on another machine: show all decisions
        shown = write_report(store, output, target=target)
    if not shown:
        fail("the store is empty: tune something first, e.g. gemmtune tune 16,4096,4096", as_json=as_json)
    if as_json:
        print_json({"path": str(output.resolve()), "decisions": shown})
    else:
        print_lines(f"{output.resolve()} ({shown} problems)")
