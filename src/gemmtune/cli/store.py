"""``gemmtune store``: look into the store, move decisions between machines, clean up."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    DeviceOption,
    JsonOption,
    StoreOption,
    console,
    current_target,
    emit,
    fail,
    finite,
    guard,
    opened,
    parse_device,
    quiet_stdout,
    require_file,
    require_whole,
    say,
)
from .errors import usage

if TYPE_CHECKING:
    from ..core.decision import Decision
    from ..core.target import Target
    from ..store.base import Store

app = typer.Typer(
    help="Look into the store, move decisions between machines, clean up.", no_args_is_help=True, rich_markup_mode=None
)


def short_id(decision: Decision) -> str:
    """Ten hex digits that name a stored decision on the command line."""
    return hashlib.sha256(f"{decision.target_key}/{decision.problem_key}".encode()).hexdigest()[:10]


@app.command("ls")
@guard
def ls(
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the decisions of every machine."""
    with opened(store) as keeper:
        targets = {target.key: target for target in keeper.targets()}
        found = list(keeper.decisions())
    if as_json:
        machines = {key: target.to_dict() for key, target in targets.items()}
        emit({"targets": machines, "decisions": [_brief(row) for row in found], "damage": keeper.damage})
    elif found:
        _print_list(found, {key: _place(t) for key, t in targets.items()})
    elif not keeper.damage:
        say("the store is empty")
    require_whole(keeper, as_json=as_json)


def _place(target: Target) -> str:
    return f"{target.name}, {target.threads} threads" if target.device == "cpu" else target.name


def _brief(decision: Decision) -> dict[str, Any]:
    from ..report.rows import summarize

    row = summarize(decision)
    return {
        "id": short_id(decision),
        "problem": decision.problem_key,
        "label": row.label,
        "target": decision.target_key,
        "outcome": row.outcome,
        "kernel": decision.chosen,
        "speedup": row.speedup,
        "created": decision.created,
    }


def _print_list(found: list[Decision], machines: dict[str, str]) -> None:
    from rich.table import Table

    from ..report.rows import ordered, summarize
    from .tables import speedup_text

    out = console()
    for key in dict.fromkeys(decision.target_key for decision in found):
        out.print(machines.get(key, "unknown machine"), style="bold", end="  ")
        out.print(f"({key})")
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("id", "problem (MxNxK)", "speed-up [95%]", "made", "kernel"):
            table.add_column(name, overflow="fold")
        for decision in ordered(row for row in found if row.target_key == key):
            row = summarize(decision)
            made = time.strftime("%Y-%m-%d %H:%M", time.localtime(decision.created))
            table.add_row(short_id(decision), row.label, speedup_text(row), made, row.kernel)
        out.print(table)


@app.command("show")
@guard
def show(
    which: Annotated[str, typer.Argument(metavar="ID", help="An id of `store ls` (a prefix will do), or a whole key.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one decision with all its evidence."""
    import msgspec

    from .explain import show as explain_decision

    with opened(store) as keeper:
        decision = _find(keeper, which, as_json)
    if as_json:
        emit(msgspec.to_builtins(decision))
    else:
        explain_decision(decision, console())


def _find(keeper: Store, which: str, as_json: bool) -> Decision:
    hits = [d for d in keeper.decisions() if d.problem_key == which or short_id(d).startswith(which)]
    if not hits:
        fail(f"no decision is called {which!r}; `gemmtune store ls` lists them", as_json=as_json)
    if len(hits) > 1:
        names = ", ".join(short_id(decision) for decision in hits[:5])
        fail(f"{which!r} fits {len(hits)} decisions ({names}); give more digits of the id", as_json=as_json)
    return hits[0]


@app.command("export")
@guard
def export(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON file to write.")],
    here: Annotated[bool, typer.Option("--here", help="Only this machine's decisions with torch's threads.")] = False,
    device: DeviceOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write decisions to one readable JSON file."""
    require_file(path)
    with quiet_stdout(as_json):
        target = current_target(None, parse_device(device)) if here else None
    with opened(store) as keeper:
        count = keeper.export(path, target)
    document = {"path": str(path.resolve()), "decisions": count, "damage": keeper.damage}
    _tell(document, [f"{count} decisions written to {path}"], as_json)
    require_whole(keeper, as_json=as_json)


@app.command("import")
@guard
def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `store export`.")],
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check everything in an exported file, then keep all of it or nothing.

    Decisions whose kernels are not legal for their problem and machine are left out, and named.
    """
    require_file(path)
    left_out: list[str] = []
    with opened(store) as keeper:
        count = keeper.import_(path, left_out.append)
    lines = [f"{count} decisions imported from {path}"]
    if left_out:
        lines.append(f"{len(left_out)} left out, which would serve what is not legal:")
    _tell({"decisions": count, "left_out": left_out}, lines + left_out, as_json)


@app.command("prune")
@guard
def prune(
    others: Annotated[bool, typer.Option("--others", help="Delete what was decided on other machines.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", min=0, metavar="DAYS", callback=finite, help="Delete what is older than this."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=4096, metavar="N", help="With --others: the thread count to keep."),
    ] = None,
    device: DeviceOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete decisions of other machines or thread counts, or old ones. With both options, either is enough.

    This machine's GPUs are not other machines: theirs stay too, unless --device says what alone to keep.
    """
    if not others and older_than is None:
        usage("say what to delete: --others, --older-than DAYS, or both")
    with quiet_stdout(as_json):
        keep = _kept(threads, device) if others else None
    with opened(store) as keeper:
        count = keeper.prune(keep=keep, older_than_s=None if older_than is None else older_than * 86400)
    _tell({"deleted": count}, [f"{count} decisions deleted"], as_json)


def _kept(threads: int | None, device: str | None) -> Target | tuple[Target, ...]:
    """The Targets of this machine: the CPU with so many threads and every GPU, or one device's."""
    import torch

    if device is not None or not torch.cuda.is_available():
        return current_target(threads, parse_device(device))
    places = (f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return (current_target(threads), *(current_target(None, place) for place in places))


@app.command("verify")
@guard
def verify(
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read everything back and report damage, and kernels that are not legal where they would serve (exit code 1 when
    there is any). Kernels that cannot be checked here are named, too: they are checked where they serve.
    """
    unchecked: list[str] = []
    with opened(store) as keeper:
        damage = keeper.verify(unchecked.append)
        count = sum(1 for _ in keeper.decisions())
    lines = [*(damage or [f"sound: {count} decisions"]), *unchecked]
    _tell({"decisions": count, "damage": damage, "unchecked": unchecked}, lines, as_json)
    if damage:
        raise typer.Exit(1)


def _tell(document: dict[str, Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        emit(document)
    else:
        say(*lines)
