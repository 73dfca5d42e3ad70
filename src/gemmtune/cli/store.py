"""``gemmtune store``: list, show, export, import, prune and verify stored decisions and plans."""

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
    checked_store,
    exit_if_damaged,
    exit_on_error,
    fail,
    parse_device,
    plain_console,
    print_json,
    print_lines,
    quiet_stdout,
    require_file,
    require_finite,
    selected_target,
)
from .usage import fail_usage

if TYPE_CHECKING:
    from rich.table import Table

    from ..core.decision import Decision
    from ..core.target import Target
    from ..core.tuned_plan import TunedPlan
    from ..store.base import Store

app = typer.Typer(
    help="Look into the store, move decisions between machines, clean up.", no_args_is_help=True, rich_markup_mode=None
)


def short_id(decision: Decision) -> str:
    """Return the ten hex digits that identify a stored decision on the command line."""
    return hashlib.sha256(f"{decision.target_key}/{decision.problem_key}".encode()).hexdigest()[:10]


@app.command("ls")
@exit_on_error
def ls(
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the decisions and the plans of every machine."""
    with checked_store(store_path) as store:
        targets = {target.key: target for target in store.targets()}
        decisions, plans = list(store.decisions()), list(store.plans())
    if as_json:
        document = {
            "targets": {key: target.to_dict() for key, target in targets.items()},
            "decisions": [_summary_row(row) for row in decisions],
            "plans": [_plan_row(plan) for plan in plans],
            "damage": store.damage,
        }
        print_json(document)
    elif decisions or plans:
        _print_tables(decisions, plans, {key: _machine_name(t) for key, t in targets.items()})
    elif not store.damage:
        print_lines("the store is empty")
    exit_if_damaged(store, as_json=as_json)


def _machine_name(target: Target) -> str:
    return f"{target.name}, {target.threads} threads" if target.is_cpu else target.name


def _summary_row(decision: Decision) -> dict[str, Any]:
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


def _plan_row(plan: TunedPlan) -> dict[str, Any]:
    return {
        "plan": plan.plan_key,
        "target": plan.target_key,
        "first": plan.first,
        "last": plan.last,
        "kernels": len(plan.kernels),
        "layouts": list(plan.intervals),
        "created": plan.created,
    }


def _print_tables(decisions: list[Decision], plans: list[TunedPlan], machines: dict[str, str]) -> None:
    out = plain_console()
    records: list[Decision | TunedPlan] = [*decisions, *plans]
    for key in dict.fromkeys(record.target_key for record in records):
        out.print(machines.get(key, "unknown machine"), style="bold", end="  ")
        out.print(f"({key})")
        if own_decisions := [decision for decision in decisions if decision.target_key == key]:
            out.print(_decisions_table(own_decisions))
        if own_plans := [plan for plan in plans if plan.target_key == key]:
            out.print(_plans_table(own_plans))


def _decisions_table(decisions: list[Decision]) -> Table:
    from ..report.rows import sorted_decisions, summarize
    from .tables import speedup_text

    table = _table_of("id", "problem (MxNxK)", "speed-up [95%]", "made", "kernel")
    for decision in sorted_decisions(decisions):
        row = summarize(decision)
        table.add_row(short_id(decision), row.label, speedup_text(row), _time_text(decision.created), row.kernel)
    return table


def _plans_table(plans: list[TunedPlan]) -> Table:
    from ..report.plan_rows import size_name

    table = _table_of("sizes", "kernels", "layouts", "made", "plan")
    for plan in sorted(plans, key=lambda plan: plan.plan_key):
        layouts = ", ".join(packing or "unpacked" for packing in plan.intervals)
        created = _time_text(plan.created)
        table.add_row(
            f"{size_name(plan)} {plan.first}-{plan.last}",
            str(len(plan.kernels)),
            layouts or "none",
            created,
            plan.plan_key,
        )
    return table


def _table_of(*columns: str) -> Table:
    from .tables import empty_table

    table = empty_table()
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _time_text(seconds: float) -> str:
    """Return a Unix time as a local date with the time of day."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


@app.command("show")
@exit_on_error
def show(
    which: Annotated[str, typer.Argument(metavar="ID", help="An id of `store ls` (a prefix will do), or a whole key.")],
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one decision with all its evidence."""
    import msgspec

    from .explain import show as explain_decision

    with checked_store(store_path) as store:
        decision = _find_decision(store, which, as_json)
    if as_json:
        print_json(msgspec.to_builtins(decision))
    else:
        explain_decision(decision, plain_console())


def _find_decision(store: Store, which: str, as_json: bool) -> Decision:
    matches = [d for d in store.decisions() if d.problem_key == which or short_id(d).startswith(which)]
    if not matches:
        fail(f"no decision is called {which!r}; `gemmtune store ls` lists them", as_json=as_json)
    if len(matches) > 1:
        names = ", ".join(short_id(decision) for decision in matches[:5])
        fail(f"{which!r} fits {len(matches)} decisions ({names}); give more digits of the id", as_json=as_json)
    return matches[0]


@app.command("export")
@exit_on_error
def export(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON file to write.")],
    here: Annotated[bool, typer.Option("--here", help="Only this machine's decisions with torch's threads.")] = False,
    device: DeviceOption = None,
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write decisions and plans to one readable JSON file."""
    require_file(path)
    with quiet_stdout(as_json):
        target = selected_target(None, parse_device(device)) if here else None
    with checked_store(store_path) as store:
        count, plan_count = store.export(path, target), _plan_count(store, target)
    document = {"path": str(path.resolve()), "decisions": count, "plans": plan_count, "damage": store.damage}
    _print_or_emit(document, [f"{_counts_text(count, plan_count)} written to {path}"], as_json)
    exit_if_damaged(store, as_json=as_json)


@app.command("import")
@exit_on_error
def import_(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `store export`.")],
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check everything in an exported file, then import all of it or nothing.

    Decisions and plans whose kernels are not legal for their problem and machine are not imported, and are listed.
    """
    require_file(path)
    left_out: list[str] = []
    with checked_store(store_path) as store:
        count = store.import_(path, left_out.append)
    lines = [f"{count} decisions imported from {path}"]
    if left_out:
        lines.append(f"{len(left_out)} left out, which would serve what is not legal:")
    _print_or_emit({"decisions": count, "left_out": left_out}, lines + left_out, as_json)


@app.command("prune")
@exit_on_error
def prune(
    others: Annotated[bool, typer.Option("--others", help="Delete what was decided on other machines.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than", min=0, metavar="DAYS", callback=require_finite, help="Delete what is older than this."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=4096, metavar="N", help="With --others: the thread count to keep."),
    ] = None,
    device: DeviceOption = None,
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete decisions and plans of other machines or thread counts, or old ones. With both options, either is enough.

    This machine's GPUs are not other machines: theirs stay too, unless --device says what alone to keep.
    """
    if not others and older_than is None:
        fail_usage("say what to delete: --others, --older-than DAYS, or both")
    with quiet_stdout(as_json):
        kept_targets = _targets_to_keep(threads, device) if others else None
    with checked_store(store_path) as store:
        before = _plan_count(store)
        count = store.prune(keep=kept_targets, older_than_s=None if older_than is None else older_than * 86400)
        plan_count = max(before - _plan_count(store), 0)
    document = {"deleted": count, "plans": plan_count}
    _print_or_emit(document, [f"{_counts_text(count, plan_count)} deleted"], as_json)


def _targets_to_keep(threads: int | None, device: str | None) -> Target | tuple[Target, ...]:
    """Return the Targets whose decisions stay.

    Without ``device`` these are the CPU with ``threads`` threads and every GPU; with it, the Target of this device.
    """
    import torch

    if device is not None or not torch.cuda.is_available():
        return selected_target(threads, parse_device(device))
    devices = (f"cuda:{index}" for index in range(torch.cuda.device_count()))
    return (selected_target(threads), *(selected_target(None, each) for each in devices))


@app.command("verify")
@exit_on_error
def verify(
    store_path: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Read the whole store and report damage, and kernels that are not legal where they would serve (exit code 1 if
    there are any). Kernels that cannot be checked on this machine are listed too: they are checked where they serve.
    """
    unchecked: list[str] = []
    with checked_store(store_path) as store:
        damage = store.verify(unchecked.append)
        count, plan_count = sum(1 for _ in store.decisions()), _plan_count(store)
    lines = [*(damage or [f"sound: {_counts_text(count, plan_count)}"]), *unchecked]
    document = {"decisions": count, "plans": plan_count, "damage": damage, "unchecked": unchecked}
    _print_or_emit(document, lines, as_json)
    if damage:
        raise typer.Exit(1)


def _plan_count(store: Store, target: Target | None = None) -> int:
    return sum(1 for _ in store.plans(target))


def _counts_text(decisions: int, plans: int) -> str:
    """Return the numbers of decisions and plans as text; plans are mentioned only when there are any."""
    return f"{decisions} decisions" + (f" and {plans} plan{'s' if plans > 1 else ''}" if plans else "")


def _print_or_emit(document: dict[str, Any], lines: list[str], as_json: bool) -> None:
    if as_json:
        print_json(document)
    else:
        print_lines(*lines)
